"""Simulate consumer groups under faults: members, coordinators on several brokers, and a log of commits.

The coordinators, their groups and journals are the product's, on a simulated loop. `Lead` is what replication promises
of a partition (the replication model tests that): what the in-sync replicas have stays, what they lack may go with its
leader, and a leader whose lease has ended takes and tells nothing. Members behave as clients do. Answers come late, or
never; requests of members' earlier lives come late, too.

`Violation` names the promise that is broken:
  SHARED     a partition is at two members of one generation
  CHANGED    a member has another assignment in the same generation, or one that the generation's leader did not make
  TWICE      a generation has two leaders, so its number was given twice
  BACK       a committed offset, or a deletion, that was acknowledged or read is gone
  STALE      a request of an earlier generation, or of a fenced member, is taken
  HANGS      a request is never answered
  STAYS      a member that is gone stays in the group
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from random import Random
from typing import Any, NamedTuple, Self, cast

import structlog

from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.groups.coordinator import Commit, GroupCoordinator
from kproxy.broker.groups.group import CommittedOffset, Join, Joined, Options, Protocol, Sync, Synced
from kproxy.broker.keys import PartitionKey
from kproxy.broker.partition import AppendResult, Partition, ReadResult
from kproxy.broker.topics import CONSUMER_OFFSETS
from kproxy_codec import error_codes as codes
from kproxy_codec.record_batch import RecordBatch
from tests.support.models.simulated_loop import SimulatedLoop

BROKERS = 2
GROUP = "g"
PARTITIONS = range(6)
OPTIONS = Options(initial_delay_s=3.0, max_members=5)
SESSION_S, REBALANCE_S = 10.0, 20.0
# So small that journals are rewritten in most runs.
REWRITE_BYTES = 1_500
TOPIC = "t"
# The index of the partition whose offset is also deleted.
DELETED = 1
KEY = PartitionKey(CONSUMER_OFFSETS, 0)
# Longer than any wait of a member.
END_S = 900.0


class Promise(Enum):
    SHARED = auto()
    CHANGED = auto()
    TWICE = auto()
    BACK = auto()
    STALE = auto()
    HANGS = auto()
    STAYS = auto()


class Violation(Exception):
    def __init__(self, promise: Promise, what: str) -> None:
        super().__init__(f"{promise.name}: {what}")
        self.promise = promise


class Lead:
    """A partition as its leader has it, from one take-over to the next; batches are (base offset, end, bytes)."""

    partition_index = KEY.partition_index

    def __init__(self, world: World, batches: list[tuple[int, int, bytes]], start: int, high_watermark: int) -> None:
        self.world = world
        self.batches = batches
        self.log_start_offset = start
        self.high_watermark = high_watermark
        self.is_live = True
        self.log_fields: dict[str, object] = {}
        self._moved: list[asyncio.Future[None]] = []

    @property
    def log(self) -> Self:
        return self

    @property
    def size_in_bytes(self) -> int:
        return sum(len(data) for _, _, data in self.batches)

    @property
    def log_end_offset(self) -> int:
        return self.batches[-1][1] if self.batches else self.log_start_offset

    def takes_writes(self) -> bool:
        return self.is_live

    serves_reads = takes_writes

    def append_as_leader(self, records: memoryview, batch: RecordBatch, acks: int) -> AppendResult:
        if not self.is_live:
            return AppendResult(codes.NOT_LEADER_OR_FOLLOWER)
        if self.world.random.random() < self.world.fails:
            return AppendResult(codes.NOT_ENOUGH_REPLICAS)
        base = self.log_end_offset
        end = base + batch.last_offset_delta + 1
        self.batches.append((base, end, base.to_bytes(8, "big") + bytes(records[8:])))
        return AppendResult(codes.NONE, base, None, end - 1)

    def replicate(self) -> None:
        """All in-sync replicas have all."""
        self.high_watermark = self.log_end_offset
        self.move()

    def move(self) -> None:
        moved, self._moved = self._moved, []
        for each in moved:
            if not each.done():
                each.set_result(None)

    def is_committed(self, offset: int) -> bool:
        return self.high_watermark > offset and self.is_live

    async def wait_for_isr(self, offset: int, timeout_s: float) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_live and self.high_watermark <= offset:
                    self._moved.append(asyncio.get_running_loop().create_future())
                    await self._moved[-1]
        except TimeoutError:
            return codes.REQUEST_TIMED_OUT
        return codes.NONE if self.is_live else codes.NOT_LEADER_OR_FOLLOWER

    def read_whole(self, offset: int, max_bytes: int) -> ReadResult:
        return ReadResult(codes.NONE, b"".join(data for _, end, data in self.batches if end > offset))

    def remove_before(self, offset: int) -> None:
        if offset <= self.high_watermark:
            self.log_start_offset = offset
            self.batches = [each for each in self.batches if each[1] > offset]


class Identity(NamedTuple):
    """What a member may send in its name; `offset` is the one that it would commit."""

    member_id: str
    instance_id: str | None
    generation: int
    sync: Sync | None
    offset: int


class Member:
    """A client: what it was told last, and what it does next. `life` counts its starts."""

    def __init__(self, instance_id: str | None) -> None:
        self.instance_id = instance_id
        self.life = 0
        self.restart()

    def restart(self) -> None:
        self.life += 1
        self.member_id, self.generation = "", -1
        self.sync: Sync | None = None
        self.next = World.join


class World:
    """`fails` is the share of appends that are refused."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.fails = 0.05
        self.now = 0.0
        self.loop = SimulatedLoop(lambda: self.now)
        topic = Topic(CONSUMER_OFFSETS, uuid.UUID(int=1), [[1]], {}, 1, 1)
        view = cast(ClusterView, type("View", (), {"topics": {CONSUMER_OFFSETS: topic}}))
        self.led: list[Lead | None] = [None] * BROKERS
        self.coordinators = [
            GroupCoordinator(view, self._leads(number), lambda: self.now, OPTIONS, REWRITE_BYTES)
            for number in range(BROKERS)
        ]
        self.leader = 0
        self.lead = Lead(self, [], 0, 0)
        self.members = [Member(f"i{number}" if number < 2 else None) for number in range(5)]
        # What members may still send from before.
        self.earlier: list[Identity] = []
        # Answers that come late.
        self.late: list[Callable[[], None]] = []
        self.unanswered: dict[asyncio.Task[Any], str] = {}
        self.broken: list[Violation] = []
        # By generation and place: assignments that its leader made, and the one that was told. A static member's place
        # is its instance, another's its id.
        self.made: dict[tuple[int, str], set[bytes]] = {}
        self.told: dict[tuple[int, str], bytes] = {}
        self.leaders: dict[int, str] = {}
        self.places: dict[str, str] = {}
        # The latest id of each static member, and the ids before.
        self.statics: dict[str, str] = {}
        self.replaced: set[str] = set()
        self.next_offset = 0
        # Nothing below this may be read.
        self.floor = -1
        # The values that the deleted one may have; -1 for none.
        self.possible: set[int] = {-1}
        self.is_asking_deleted = False
        for each in self.coordinators:
            self.loop.create_task(each.run())
        self._appoint(0, self.lead)
        self.run_ready()

    def _leads(self, number: int) -> Callable[[bytes, int], Partition | None]:
        return lambda *_: cast(Partition | None, self.led[number])

    # The machinery

    def run_ready(self) -> None:
        self.loop.run_ready()
        for error in self.loop.errors:
            raise error.get("exception") or AssertionError(str(error))
        if self.broken:
            raise self.broken[0]

    def complain(self, promise: Promise, what: str) -> None:
        self.broken.append(Violation(promise, what))

    def ask(
        self,
        what: str,
        work: Coroutine[Any, Any, Any],
        heard: Callable[[Any], None],
        told: Callable[[Any], None] = lambda answer: None,
    ) -> None:
        """Send a request. What is `told` counts from then on; it is `heard` late, perhaps, or never."""
        task = self.loop.create_task(work)
        self.unanswered[task] = what

        def done(task: asyncio.Task[Any]) -> None:
            del self.unanswered[task]
            answer, drawn = task.result(), self.random.random()
            told(answer)
            if drawn < 0.8:
                heard(answer)
            elif drawn < 0.9:
                self.late.append(lambda: heard(answer))

        task.add_done_callback(done)

    def coordinator(self) -> GroupCoordinator:
        """The one that a client asks, which knows of the current one mostly."""
        return self.coordinators[self.leader if self.random.random() < 0.85 else self.random.randrange(BROKERS)]

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (timer := self.loop.next_timer) is not None and timer <= end:
            self.now = max(self.now, timer)
            self.run_ready()
        self.now = end
        self.run_ready()

    # Brokers

    def _appoint(self, number: int, lead: Lead) -> None:
        self.leader, self.lead, self.led[number] = number, lead, lead
        self.loop.call_soon(self.coordinators[number].leader_changed, KEY)

    def take_over(self) -> None:
        """Another broker leads, or the same one again, with all that is committed, and perhaps more."""
        old = self.lead
        old.is_live = False
        kept = [each for each in old.batches if each[1] <= old.high_watermark]
        more = old.batches[len(kept) :]
        kept += more[: self.random.randint(0, len(more))]
        if self.led[self.leader] is old and self.random.random() < 0.5:
            # It learns of its end now; otherwise later.
            self.dismiss(self.leader)
        number = self.random.randrange(BROKERS)
        self.dismiss(number)
        self._appoint(number, Lead(self, kept, old.log_start_offset, old.high_watermark))

    def dismiss(self, number: int) -> None:
        lead, self.led[number] = self.led[number], None
        if lead is not None:
            self.loop.call_soon(self.coordinators[number].leader_changed, KEY)
            self.run_ready()
            lead.move()

    def learn(self) -> None:
        """A broker that leads no more learns of it."""
        for number, lead in enumerate(self.led):
            if lead is not None and lead is not self.lead:
                self.dismiss(number)

    def replicate(self) -> None:
        self.lead.replicate()

    # Members

    def join(self, member: Member) -> None:
        protocols = (Protocol("range", b"%d" % self.random.randrange(2)),)
        asked = Join(member.member_id, member.instance_id, "c", SESSION_S, REBALANCE_S, "consumer", protocols)
        life = member.life
        self.ask(
            "JoinGroup",
            self.coordinator().join(GROUP, asked),
            lambda answer: self.joined(member, life, answer),
            lambda answer: self.told_generation(member.instance_id, answer),
        )

    def joined(self, member: Member, life: int, answer: Joined) -> None:
        if life != member.life:
            return
        if answer.error_code == codes.MEMBER_ID_REQUIRED:
            member.member_id = answer.member_id
        elif answer.error_code == codes.NONE:
            self.keep(member)
            member.member_id, member.generation = answer.member_id, answer.generation
            given = self.assign(answer)
            member.sync = Sync(member.member_id, member.instance_id, answer.generation, None, None, given)
            member.next = World.beat if answer.skip_assignment else World.synchronise
        elif answer.error_code in (codes.UNKNOWN_MEMBER_ID, codes.FENCED_INSTANCE_ID):
            member.restart()

    def told_generation(self, instance_id: str | None, answer: Joined) -> None:
        if answer.error_code != codes.NONE:
            return
        self.places[answer.member_id] = instance_id or answer.member_id
        self.places |= {member_id: instance or member_id for member_id, instance, _ in answer.members}
        if answer.members:
            leader = self.places[answer.leader]
            if self.leaders.setdefault(answer.generation, leader) != leader:
                self.complain(Promise.TWICE, f"{answer.generation} has two leaders")
        if instance_id is not None:
            before = self.statics.setdefault(instance_id, answer.member_id)
            if before != answer.member_id:
                self.replaced.add(before)
            self.statics[instance_id] = answer.member_id

    def assign(self, joined: Joined) -> dict[str, bytes]:
        """As the leader: give each partition to one member."""
        names = [member_id for member_id, _, _ in joined.members]
        given: dict[str, bytes] = dict.fromkeys(names, b"")
        for partition in PARTITIONS if names and not joined.skip_assignment else ():
            given[self.random.choice(names)] += b"%d" % partition
        for member_id, assignment in given.items():
            self.made.setdefault((joined.generation, self.places[member_id]), {b""}).add(assignment)
        return given

    def keep(self, member: Member) -> None:
        """Remember what a member may send late."""
        if member.generation >= 0:
            # Of a committed offset: as it would have been then.
            identity = (member.member_id, member.instance_id, member.generation, member.sync, self.next_offset)
            self.earlier = [*self.earlier[-9:], Identity(*identity)]

    def synchronise(self, member: Member) -> None:
        if member.sync is not None:
            self._sync(member.sync, member)

    def _sync(self, asked: Sync, member: Member | None = None) -> None:
        answers = self.coordinator().sync(GROUP, asked)
        self.ask("SyncGroup", answers, lambda answer: self.synced(asked, answer, member))

    def synced(self, asked: Sync, answer: Synced, member: Member | None) -> None:
        if member is not None and member.generation == asked.generation:
            member.next = World.beat if answer.error_code == codes.NONE else World.join
        if answer.error_code != codes.NONE:
            return
        place = (asked.generation, asked.instance_id or asked.member_id)
        if self.told.setdefault(place, answer.assignment) != answer.assignment:
            self.complain(Promise.CHANGED, f"{place} had {self.told[place]!r}, now {answer.assignment!r}")
        if answer.assignment not in self.made.get(place, {b""}):
            self.complain(Promise.CHANGED, f"{place} has {answer.assignment!r}, which nobody made")
        for (generation, other), partitions in self.told.items():
            if generation == place[0] and other != place[1] and set(partitions) & set(answer.assignment):
                self.complain(Promise.SHARED, f"{place} and {other} share partitions")

    def beat(self, member: Member) -> None:
        code = self._beat(Identity(member.member_id, member.instance_id, member.generation, None, 0))
        if code in (codes.REBALANCE_IN_PROGRESS, codes.ILLEGAL_GENERATION):
            member.next = World.join
        elif code in (codes.UNKNOWN_MEMBER_ID, codes.FENCED_INSTANCE_ID):
            self.restart(member)

    def _beat(self, asked: Identity) -> int:
        code = self.coordinator().heartbeat(GROUP, asked.member_id, asked.instance_id, asked.generation)
        if code == codes.NONE and (asked.member_id in self.replaced or asked.generation < max(self.leaders, default=0)):
            self.complain(Promise.STALE, f"a heartbeat of {asked.member_id} in {asked.generation} is taken")
        return code

    def act(self, member: Member) -> None:
        """Do what a client does next; it asks again if no answer came."""
        member.next(self, member)

    def leave(self, member: Member) -> None:
        leaving = [(member.member_id, member.instance_id)]
        self.ask("LeaveGroup", self.coordinator().leave(GROUP, leaving), lambda answer: None)
        self.keep(member)
        member.restart()

    def restart(self, member: Member) -> None:
        self.keep(member)
        member.restart()

    def send_late(self, _: Member) -> None:
        """A request from before arrives."""
        if not self.earlier:
            return
        asked, drawn = self.random.choice(self.earlier), self.random.random()
        if drawn < 0.4 and asked.sync is not None:
            self._sync(asked.sync)
        elif any(asked.generation == each.generation and asked.member_id == each.member_id for each in self.members):
            return
        elif drawn < 0.6:
            self._beat(asked)
        else:
            self._commit(asked)

    # Offsets

    def commit(self, member: Member) -> None:
        self.next_offset += 1
        asked = Identity(member.member_id, member.instance_id, member.generation, None, self.next_offset)
        self._commit(asked)

    def _commit(self, asked: Identity) -> None:
        # A member's own late commit may go back where it is in force: clients send one after the other.
        is_late = asked.offset < self.next_offset
        if is_late and asked.generation >= max(self.leaders, default=0):
            return
        named = (asked.member_id, asked.instance_id, asked.generation)
        wanted = [Commit(TOPIC, 0, CommittedOffset(asked.offset, -1, "", 0))]

        def committed(answer: tuple[int, Any]) -> None:
            if answer[0] == codes.NONE:
                self.floor = max(self.floor, asked.offset)

        self.ask("OffsetCommit", self.coordinator().commit(GROUP, named, wanted), committed)

    def read(self, _: Member) -> None:
        floor = self.floor

        def found(answer: tuple[int, dict[tuple[str, int], CommittedOffset | None]]) -> None:
            if answer[0] == codes.NONE:
                offset = _offset(answer[1][TOPIC, 0])
                if offset < floor:
                    self.complain(Promise.BACK, f"{floor} was committed, {offset} is read")
                self.floor = max(self.floor, offset)

        self.ask("OffsetFetch", self.coordinator().fetch(GROUP, [(TOPIC, 0)]), found)

    def change_deleted(self, _: Member) -> None:
        """Commit, delete or read the other offset, one request after another, without a member."""
        if self.is_asking_deleted:
            return
        self.is_asking_deleted = True
        wanted, drawn = (TOPIC, DELETED), self.random.random()
        value = self.next_offset if drawn < 0.3 else -1
        group = "by hand"

        def over(answer: tuple[int, Any]) -> None:
            self.is_asking_deleted = False
            if drawn >= 0.6 and answer[0] == codes.NONE:
                offset = _offset(answer[1][wanted])
                if offset not in self.possible:
                    self.complain(Promise.BACK, f"{offset} is read, it is one of {self.possible}")
                self.possible = {offset}
            elif drawn < 0.6 and answer[0] == codes.NONE:
                self.possible = {value}
            elif drawn < 0.6:
                self.possible |= {value}

        coordinator = self.coordinator()
        if drawn < 0.3:
            wants = [Commit(*wanted, CommittedOffset(value, -1, "", 0))]
            task = self.loop.create_task(coordinator.commit(group, ("", None, -1), wants))
        elif drawn < 0.6:
            task = self.loop.create_task(self._delete(coordinator, group))
        else:
            task = self.loop.create_task(coordinator.fetch(group, [wanted]))
        self.unanswered[task] = "by hand"
        task.add_done_callback(lambda task: (self.unanswered.pop(task), over(task.result()))[1])

    async def _delete(self, coordinator: GroupCoordinator, group: str) -> tuple[int, Any]:
        code = await coordinator.delete(group)
        return (codes.NONE if code == codes.GROUP_ID_NOT_FOUND else code), None

    # Runs

    def step(self) -> None:
        [step] = self.random.choices([*STEPS], [*STEPS.values()])
        step(self, self.random.choice(self.members))
        if self.random.random() < 0.7:
            self.replicate()
        elif self.random.random() < 0.1:
            self.take_over()
        if self.random.random() < 0.05:
            self.learn()
        if self.late and self.random.random() < 0.3:
            self.late.pop(self.random.randrange(len(self.late)))()
        if self.random.random() < 0.9:
            self.run_ready()

    def end(self) -> None:
        """All members are gone and nothing fails: every request is answered, and the group has no member."""
        self.run_ready()
        self.fails, end = 0.0, self.now + END_S
        self.learn()
        while self.now < end:
            self.replicate()
            self.pass_time(20.0)
        if self.unanswered:
            raise Violation(Promise.HANGS, f"not answered: {[*self.unanswered.values()]}")
        for group in self.coordinators[self.leader].listed()[1]:
            if group.members:
                raise Violation(Promise.STAYS, f"{[*group.members]} in {group.state}")


def _offset(committed: CommittedOffset | None) -> int:
    return -1 if committed is None else committed.offset


def _pass_some_time(world: World, _: Member) -> None:
    world.pass_time(world.random.choice((0.1, 0.5, 1.0, 3.0, 12.0)))


STEPS: dict[Callable[[World, Member], None], float] = {
    World.act: 20,
    World.join: 2,
    World.synchronise: 2,
    World.commit: 3,
    World.read: 2,
    World.change_deleted: 2,
    World.send_late: 4,
    _pass_some_time: 4,
    World.leave: 0.3,
    World.restart: 0.5,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing: a run takes over hundreds of times."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**before)


def _drop(*_: object) -> Any:
    raise structlog.DropEvent


def run(seed: int, steps: int) -> World:
    """One run; raises Violation."""
    with quiet():
        world = World(seed)
        try:
            for _ in range(steps):
                world.step()
            world.end()
        finally:
            for each in world.coordinators:
                each.close()
            world.loop.finish()
    return world
