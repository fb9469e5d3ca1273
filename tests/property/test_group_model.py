"""Random members of a group, their deaths, late and repeated requests, and take-overs that lose what is not committed.

Members behave as clients do; the journal is real, and the next coordinator restores the group from it. No partition is
at two members of one generation, a generation's assignment never changes, and no commit is lost.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from random import Random

import pytest

from kproxy.broker.groups import journal
from kproxy.broker.groups.group import CommittedOffset, Group, Join, Joined, Options, Protocol, Sync, Synced
from kproxy_codec import error_codes as codes
from kproxy_codec.records import Pair, encode_batch

RUNS = int(os.environ.get("KPROXY_SIM_SEEDS", "40"))
SEED = int(os.environ.get("KPROXY_SIM_FIRST_SEED", "0")) or secrets.randbelow(1 << 40)
STEPS = 400
PARTITIONS = range(6)
OPTIONS = Options(initial_delay_s=3.0, max_members=5)


class Client:
    """One member: its last answers, and the requests that it may send again."""

    def __init__(self, instance_id: str | None) -> None:
        self.instance_id = instance_id
        self.member_id = ""
        self.generation = -1
        self.sync: Sync | None = None


class World:
    """A group, its journal up to the committed end and beyond, and the answers to members."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now = 0.0
        self.group = Group("g", OPTIONS)
        self.journal: list[list[Pair]] = []
        self.committed = 0
        # Answers that wait for the journal: its length for them, and what delivers them.
        self.held: list[tuple[int, Callable[[], None]]] = []
        self.waiting: dict[int, Client] = {}
        self.clients = [Client(f"i{n}" if n < 2 else None) for n in range(5)]
        self.assigned: dict[tuple[int, str], bytes] = {}
        self.offset = 0
        self.told = 0
        self._token = 0

    # The coordinator, as in `GroupCoordinator._run`

    def run(self, event: Callable[[Group], object]) -> None:
        draft = self.group.draft()
        event(draft)
        if draft.is_changed:
            if self.random.random() < 0.1:
                return
            draft.changed_ms = int(self.now * 1000)
            self.journal.append([journal.group_record(draft)])
        self.group = draft
        for token, answer in draft.answers:
            self.after_commit(lambda token=token, answer=answer: self.deliver(token, answer))  # type: ignore[misc]

    def after_commit(self, deliver: Callable[[], None]) -> None:
        self.held.append((len(self.journal), deliver))

    def commit_journal(self) -> None:
        self.committed = len(self.journal)
        held, self.held = self.held, []
        for _, deliver in held:
            deliver()

    def take_over(self) -> None:
        """Another broker has the committed journal, and perhaps more; waiting answers are never sent."""
        del self.journal[self.random.randint(self.committed, len(self.journal)) :]
        self.committed = len(self.journal)
        self.held.clear()
        self.waiting.clear()
        replay = journal.Replay(OPTIONS)
        for pairs in self.journal:
            replay.feed(encode_batch(pairs, 0))
        self.group = replay.restored().get("g") or Group("g", OPTIONS)
        self.group.begin(self.now)

    # Members

    def token(self, client: Client) -> int:
        self._token += 1
        self.waiting[self._token] = client
        return self._token

    def deliver(self, token: int, answer: Joined | Synced) -> None:
        client = self.waiting.pop(token, None)
        if client is None:
            return
        if isinstance(answer, Synced):
            if answer.error_code == codes.NONE:
                self.check_assignment(client, answer.assignment)
        elif answer.error_code == codes.MEMBER_ID_REQUIRED:
            client.member_id = answer.member_id
        elif answer.error_code == codes.NONE:
            client.member_id, client.generation = answer.member_id, answer.generation
            client.sync = Sync(client.member_id, client.instance_id, answer.generation, None, None, self.assign(answer))
        elif answer.error_code in (codes.UNKNOWN_MEMBER_ID, codes.FENCED_INSTANCE_ID):
            client.member_id, client.generation, client.sync = "", -1, None

    def assign(self, joined: Joined) -> dict[str, bytes]:
        """As the leader: give each partition to one member, with the generation, to tell assignments apart."""
        names = [member_id for member_id, _, _ in joined.members]
        given: dict[str, bytes] = dict.fromkeys(names, b"")
        for partition in PARTITIONS if names and not joined.skip_assignment else ():
            given[self.random.choice(names)] += b"%d" % partition
        return given

    def check_assignment(self, client: Client, assignment: bytes) -> None:
        assert client.sync is not None
        place = (client.sync.generation, client.instance_id or client.sync.member_id)
        assert self.assigned.setdefault(place, assignment) == assignment, (
            f"{place} was assigned {self.assigned[place]!r}"
        )
        for (generation, other), partitions in self.assigned.items():
            if generation == place[0] and other != place[1]:
                assert not set(partitions) & set(assignment), f"{place} and {other} share partitions"
        self.told += 1

    # Steps

    def join(self, client: Client) -> None:
        protocols = (Protocol("range", b"%d" % self.random.randrange(2)),)
        asked = Join(client.member_id, client.instance_id, "c", 10.0, 20.0, "consumer", protocols)
        token, now = self.token(client), self.now
        self.run(lambda group: group.join(asked, token, f"m{token}", now))

    def restart(self, client: Client) -> None:
        client.member_id, client.generation, client.sync = "", -1, None
        self.waiting = {token: each for token, each in self.waiting.items() if each is not client}

    def synchronise(self, client: Client) -> None:
        asked = client.sync
        if asked is not None:
            token, now = self.token(client), self.now
            self.run(lambda group: group.sync(asked, token, now))

    def beat(self, client: Client) -> None:
        code = self.group.heartbeat(client.member_id, client.instance_id, client.generation, self.now)
        is_current = client.generation == self.group.generation and client.member_id in self.group.members
        assert is_current or code in (codes.UNKNOWN_MEMBER_ID, codes.ILLEGAL_GENERATION, codes.FENCED_INSTANCE_ID)

    def leave(self, client: Client) -> None:
        self.run(lambda group: group.leave(client.member_id, client.instance_id, self.now))
        self.restart(client)

    def commit(self, client: Client) -> None:
        code = self.group.commit_error(client.member_id, client.instance_id, client.generation, self.now)
        if code != codes.NONE:
            return
        assert client.generation in (-1, self.group.generation)
        new = CommittedOffset(self.offset + 1, -1, "", 0)
        self.offset += 1
        self.journal.append([journal.offset_record("g", "t", 0, new)])
        self.group.apply_offset("t", 0, new)
        self.commit_journal()

    def read(self, _: Client) -> None:
        self.commit_journal()
        found = self.group.offsets.get(("t", 0))
        assert (found.offset if found is not None else 0) == self.offset, "a commit is lost"

    def pass_time(self, _: Client) -> None:
        self.now += self.random.choice((0.1, 1.0, 5.0, 12.0))
        self.run(lambda group: group.tick(self.now))

    def step(self) -> None:
        steps = (
            self.join,
            self.synchronise,
            self.beat,
            self.commit,
            self.read,
            self.pass_time,
            self.leave,
            self.restart,
        )
        weights = (6, 8, 4, 2, 1, 3, 0.5, 0.5)
        [step] = self.random.choices(steps, weights)
        step(self.random.choice(self.clients))
        if self.random.random() < 0.7:
            self.commit_journal()
        elif self.random.random() < 0.1:
            self.take_over()


@pytest.mark.parametrize("run", range(4))
def test_random_events_break_no_group_promise(run: int) -> None:
    print(f"KPROXY_SIM_FIRST_SEED={SEED}")
    told = 0
    for seed in range(SEED + run, SEED + RUNS, 4):
        world = World(Random(seed))
        for _ in range(STEPS):
            world.step()
        told += world.told
    assert told > RUNS, "hardly anybody was assigned anything"
