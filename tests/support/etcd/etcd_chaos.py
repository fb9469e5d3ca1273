"""Cause random faults of an etcd cluster from a seed, and judge the changes that a mirror received."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from kproxy.etcd import EtcdClient, Snapshot, WatchEvent
from tests.support.etcd.embedded import Relay, compact, put_many
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.etcd.etcd_history import Change, change_of

# With keys of this size, this many deletions at one revision need more than one fragment, if fragments are requested.
LONG_TOPIC = "t" * 240
LEASED_KEYS = 3_000
# In seconds: below, around and beyond the time limits for a silent connection.
HOLDS = (0.1, 0.5, 1.0, 2.0, 2.0, 4.0, 7.0, 12.0)


# Values by key.
Content = dict[str, bytes]


class Step(NamedTuple):
    """One fault: `what` happens for that long to these members, counted from 0."""

    what: str
    members: tuple[int, ...]
    hold_s: float


def steps(seed: int) -> Iterator[Step]:
    """The endless sequence of faults; the same for the same seed."""
    chance = random.Random(seed)
    while True:
        what = chance.choice(("killed", "killed", "hung", "hung", "cut off", "silent", "compacted", "a lease ends"))
        members = chance.sample(range(3), chance.choice((1, 1, 1, 2, 2, 3)))
        yield Step(what, tuple(members), chance.choice(HOLDS))


class Trouble:
    """Carries out steps on `cluster`, and on the `relays` before its members, which the mirror uses.

    `unreachable_since`: the monotonic time since which the mirror reaches no majority; None if it reaches one.
    """

    def __init__(self, cluster: EtcdCluster, client: EtcdClient, leases_prefix: str) -> None:
        self.cluster = cluster
        self.relays = [Relay(endpoint) for endpoint in cluster.endpoints]
        self.unreachable_since: float | None = None
        self._client = client
        self._leases_prefix = leases_prefix

    async def make(self, step: Step) -> None:
        """Carry out a fault from its beginning until every member answers again."""
        async with self._befalling(step):
            needed = {"killed": 2, "hung": 2, "cut off": 3}
            if len(step.members) >= needed.get(step.what, 4):
                self.unreachable_since = time.monotonic()
            await asyncio.sleep(step.hold_s)
            self.unreachable_since = None
        await self.cluster.healthy()

    @asynccontextmanager
    async def _befalling(self, step: Step) -> AsyncIterator[None]:
        members = [self.cluster.members[number] for number in step.members]
        relays = [self.relays[number] for number in step.members]
        async with AsyncExitStack() as healing:
            if step.what == "killed":
                for member in members:
                    member.kill()
                    healing.callback(self.cluster.start_member, member)
            elif step.what == "hung":
                for member in members:
                    await member.freeze()
                    healing.callback(member.thaw)
            elif step.what == "silent":
                for relay in relays:
                    relay.freeze()
                    healing.push_async_callback(relay.cut)
            elif step.what == "cut off":
                for relay in relays:
                    await relay.shut()
                    healing.push_async_callback(relay.open)
            elif step.what == "a lease ends":
                await self._end_a_lease()
            yield

    async def _end_a_lease(self) -> None:
        lease = await self._client.lease_grant(600)
        keys = [f"{self._leases_prefix}{LONG_TOPIC}/{n}" for n in range(LEASED_KEYS)]
        await put_many(self._client, [(key, b"1") for key in keys], lease.lease_id)
        await self._client.lease_revoke(lease.lease_id)

    async def compact(self, revision: int) -> None:
        await compact(self._client, revision)


class Chapter:
    """The changes since one snapshot; `told` maps numbers of changes to the revision reported completely by then."""

    def __init__(self, revision: int, content: Content) -> None:
        self.revision = revision
        self.content = content
        self.changes: list[Change] = []
        self.told: list[tuple[int, int]] = []

    def follows(self, truth: Sequence[Change]) -> bool:
        """Whether its changes are all of `truth`, in order; AssertionError if they are not a prefix of it.

        A revision interrupted by a break may come again, from its beginning.
        """
        told = iter(self.told)
        complete_after, revision = next(told, (0, 0))
        place = began = 0
        for heard, change in enumerate(self.changes, start=1):
            if truth[place : place + 1] != [change] and place and change == truth[began]:
                place = began
            assert truth[place : place + 1] == [change], f"heard {change}, where {truth[place : place + 1]} was due"
            if change[0] != truth[began][0]:
                began = place
            place += 1
            if heard == complete_after:
                missing = [each for each in truth[place : place + 1] if each[0] <= revision]
                assert not missing, f"told that all is known up to {revision}, and not {missing}"
                complete_after, revision = next(told, (0, 0))
        return place == len(truth)


class Story:
    """A mirror's listener that records everything, in chapters that begin with a snapshot."""

    def __init__(self) -> None:
        self.chapters: list[Chapter] = []
        self.loads = 0
        self.restores = 0

    def on_restored(self) -> None:
        self.restores += 1

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.loads += 1
        self.chapters.append(Chapter(snapshot.revision, {kv.key: kv.value for kv in snapshot.kvs}))

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        chapter = self.chapters[-1]
        chapter.changes += map(change_of, events)
        chapter.told.append((len(chapter.changes), revision))

    def reached(self, revision: int) -> bool:
        """Whether the change of `revision` was received, or a later load."""
        if not self.chapters:
            return False
        chapter = self.chapters[-1]
        return chapter.revision >= revision or bool(chapter.changes and chapter.changes[-1][0] >= revision)

    def judge(self, before: Content, truth: Sequence[Change]) -> Content:
        """The content of etcd after all of `truth`, if it held `before`; AssertionError if the story differs.

        Judged changes are forgotten: the story continues from there.
        """
        assert self.restores == 0, "nobody restored etcd"
        content: Content = dict(before)
        place = 0
        for chapter in self.chapters:
            while place < len(truth) and truth[place][0] <= chapter.revision:
                _apply(truth[place], content)
                place += 1
            assert chapter.content == content, f"the load at {chapter.revision} is not what etcd held"
            complete = chapter.follows(truth[place:])
        assert complete, "the end was not heard"
        for change in truth[place:]:
            _apply(change, content)
        self.chapters = [Chapter(truth[-1][0], dict(content))]
        return content


def _apply(change: Change, content: Content) -> None:
    _, key, value = change
    if value is None:
        del content[key]
    else:
        content[key] = value
