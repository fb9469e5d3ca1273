"""Write constantly to etcd, and compare the changes that a mirror receives with etcd's own history."""

from __future__ import annotations

import asyncio
import random

from kproxy.etcd import EtcdClient, EtcdError, Snapshot, WatchEvent
from kproxy.etcd.mirror import WatchStream, watch_event
from tests.support.waiting import eventually

# A change: its revision, the key, and the value, None for a deletion.
Change = tuple[int, str, bytes | None]


def change_of(event: WatchEvent) -> Change:
    return event.kv.mod_revision, event.kv.key, None if event.deleted else event.kv.value


class Hearing:
    """A mirror's listener that records everything."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.snapshots = 0
        self.restores = 0

    def on_restored(self) -> None:
        self.restores += 1

    def on_snapshot(self, snapshot: Snapshot) -> None:
        self.snapshots += 1

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        self.changes += map(change_of, events)


async def history(client: EtcdClient, prefix: str, after: int, until: int) -> list[Change]:
    """The changes under a prefix by etcd's own history, after the revision `after` and up to `until`."""
    stream = WatchStream(client, write_timeout_s=30)
    found: list[Change] = []
    try:
        await stream.watch(1, prefix, after + 1, exact=False, fragments=False)
        while not found or found[-1][0] < until:
            message = await stream.read(10)
            assert message is not None, f"etcd tells nothing after {found[-1:]}"
            found += map(change_of, map(watch_event, message.events))
    finally:
        await stream.close()
    return found


class Churn:
    """Puts and deletions until it is stopped, through all outages; `acknowledged` are those that etcd has confirmed."""

    def __init__(self, client: EtcdClient, prefix: str, seed: int) -> None:
        self._client = client
        self._prefix = prefix
        self._random = random.Random(seed)
        self.acknowledged: list[Change] = []
        self._stopped = False

    async def run(self) -> None:
        number = 0
        while not self._stopped:
            number += 1
            key, value = f"{self._prefix}{self._random.randrange(64)}", b"%d" % number
            try:
                if self._random.random() < 0.2:
                    await self._client.delete(key)
                else:
                    self.acknowledged.append((await self._client.put(key, value), key, value))
            except EtcdError:
                await asyncio.sleep(0.02)

    async def goes_on(self, writes: int = 150) -> None:
        """Wait until that many more puts are acknowledged."""
        wanted = len(self.acknowledged) + writes
        await eventually(lambda: len(self.acknowledged) >= wanted, what="writes go on")

    def stop(self) -> None:
        self._stopped = True
