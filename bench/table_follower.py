"""Run a lease table alone in a process, to measure its cost: it follows etcd and reports what it saw.

`python -m bench.table_follower ENDPOINT PREFIX TOPICS PARTITIONS`. Reads a command per line on standard input, writes
an answer in JSON per line on standard output. Times are on the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import structlog
import uvloop

from bench.lease_keys import Shape, lease_key
from bench.processes import cpu_seconds, peak_resident_bytes, resident_bytes
from kproxy.etcd import EtcdClient, WatchEvent
from kproxy.etcd.messages import key_value, rpc
from kproxy.ownership.leases import LeaseTable
from kproxy.routing.topology import Topology

TICK_S = 0.002
CALLS = 1_000_000
EVENTS_AT_ONCE = 1_000
# How far to look for changes behind the first one that has not come: puts sent together may overtake.
LOOK_AHEAD = 64


class _Table(LeaseTable):
    """A lease table that calls `changed` after each message of the watch."""

    changed: Callable[[], None]

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        super().on_events(events, revision)
        self.changed()


class Follower:
    def __init__(self, client: EtcdClient, prefix: str, shape: Shape) -> None:
        self._prefix = prefix
        self._shape = shape
        self._topology = Topology()
        self._table = _Table(client, prefix, self._topology)
        self._table.changed = self._on_change
        self._following: asyncio.Task[None] | None = None
        self._longest_stall = 0.0
        self._awaited_revision = 0
        self._reached: asyncio.Future[float] | None = None
        # Expected changes in a row, by the number of the put: (topic, index, owner), and their arrival times.
        self._awaited: list[tuple[bytes, int, int]] = []
        self._came: dict[int, float] = {}
        self._first_missing = 0

    async def tick(self) -> None:
        """Note how late the loop is."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._longest_stall = max(self._longest_stall, time.monotonic() - due)

    def _on_change(self) -> None:
        now = time.monotonic()
        if self._reached is not None and not self._reached.done() and self._topology.revision >= self._awaited_revision:
            self._reached.set_result(now)
        if self._awaited:
            self._note_routes(now)

    def _note_routes(self, now: float) -> None:
        number = self._first_missing
        while number < min(self._first_missing + LOOK_AHEAD, len(self._awaited)):
            topic, index, owner = self._awaited[number]
            if number not in self._came and self._topology.owner(topic, index) == owner:
                self._came[number] = now
            if number == self._first_missing and number in self._came:
                self._first_missing += 1
            number += 1

    async def answer(self, command: str, argument: int) -> Any:
        if command == "load":
            return await self._load()
        if command == "reach":
            self._awaited_revision = argument
            self._reached = asyncio.get_running_loop().create_future()
            self._on_change()
            return await self._reached
        if command == "stall":
            stall, self._longest_stall = self._longest_stall, 0.0
            return stall
        if command == "cpu":
            return cpu_seconds(os.getpid())
        if command == "expect":
            self._awaited = [
                (topic.encode(), index, argument + number)
                for number, (topic, index) in ((each, self._shape.far_apart(each)) for each in range(20_000))
            ]
            return None
        if command == "routes":
            return [self._came.get(number) for number in range(argument)]
        if command == "lookups":
            return self._lookups()
        if command == "events":
            return self._events()
        raise ValueError(command)

    async def _load(self) -> dict[str, float]:
        started = time.monotonic()
        self._longest_stall = 0.0
        self._following = asyncio.create_task(self._table.run())
        await self._table.wait_synced()
        seconds = time.monotonic() - started
        await asyncio.sleep(0.1)
        return {"seconds": seconds, "stall": self._longest_stall, "partitions": self._topology.owned_count}

    def _lookups(self) -> float:
        """Return lookups per second of CPU time, with the loop around them."""
        places = [(topic.encode(), index) for topic, index in map(self._shape.far_apart, range(CALLS // 10))]
        owner = self._topology.owner
        started = time.process_time()
        for _ in range(10):
            for topic, index in places:
                owner(topic, index)
        return CALLS / (time.process_time() - started)

    def _events(self) -> float:
        """Return the decoded events per second of CPU time that the table applies, in portions of the mirror's size."""
        revision = self._topology.revision
        numbers = (range(start, start + EVENTS_AT_ONCE) for start in range(0, CALLS // 5, EVENTS_AT_ONCE))
        portions = [[self._event(number, revision + 1 + number) for number in portion] for portion in numbers]
        started = time.process_time()
        for portion in portions:
            self._table.on_events(portion, portion[-1].kv.mod_revision)
        elapsed = time.process_time() - started
        if self._topology.revision != revision + CALLS // 5:
            raise RuntimeError("the table did not take the events")
        return CALLS / 5 / elapsed

    def _event(self, number: int, revision: int) -> WatchEvent:
        key = lease_key(self._prefix, *self._shape.far_apart(number)).encode()
        message = rpc.Event(kv={"key": key, "value": b"%d" % (number % 5), "mod_revision": revision})
        return WatchEvent(False, key_value(message.kv))


async def main(endpoint: str, prefix: str, topics: str, partitions: str) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    client = EtcdClient([endpoint], timeout_s=60)
    await client.connect()
    follower = Follower(client, prefix, Shape(int(topics), int(partitions)))
    ticking = asyncio.create_task(follower.tick())
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, _, argument = line.strip().partition(" ")
        found = await follower.answer(command, int(argument or 0))
        memory = {"rss": resident_bytes(os.getpid()), "peak": peak_resident_bytes(os.getpid())}
        sys.stdout.write(json.dumps({"found": found, **memory}) + "\n")
        sys.stdout.flush()
    ticking.cancel()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
