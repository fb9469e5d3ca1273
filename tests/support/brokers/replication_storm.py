"""Cause random faults of replicated brokers from a seed, and check all records that a reader has read."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from kproxy.etcd import EtcdError
from kproxy_codec import error_codes
from kproxy_codec.api_keys import LIST_OFFSETS
from tests.support.brokers.faulty_site import FaultyBroker, FaultySite
from tests.support.brokers.reference_broker import Closed, RawClient, fetch
from tests.support.clients.attempts import Address, Stored, ThreadedClient, stored

BROKERS = (1, 2, 3)
# Seconds: below, around and beyond the TTL of 2 s.
HOLDS = (0.1, 0.5, 1.5, 2.5, 4.0)
KINDS = (
    *("killed",) * 3,
    *("stopped",) * 3,
    *("terminated",) * 2,
    *("cut off from etcd",) * 2,
    *("silent to etcd",) * 2,
    *("cut off from followers",) * 2,
    "its lease is revoked",
    "its disk is wiped",
    "etcd member killed",
    "etcd majority stopped",
)
MOST_AT_A_TIME = 3
# Faults that may happen to several brokers at once without loss of the only copy.
_ANY_NUMBER = frozenset({"killed", "stopped", "terminated", "cut off from etcd", "silent to etcd"})


class Step(NamedTuple):
    """One fault: `what` happens to these brokers, by id. The next one begins `hold_s` seconds later.

    `settled`: only once all replicas are in sync. `healed`: it and all earlier faults end before the next one;
    otherwise they continue.
    """

    what: str
    brokers: tuple[int, ...]
    hold_s: float
    settled: bool
    healed: bool

    def __str__(self) -> str:
        who = ",".join(map(str, self.brokers))
        more = (", all being in sync" if self.settled else "") + ("" if self.healed else ", and on")
        return f"{who} {self.what} for {self.hold_s} s{more}"


def steps(seed: int) -> Iterator[Step]:
    """The endless sequence of faults; the same for the same seed."""
    chance = random.Random(seed)
    unhealed = 0
    while True:
        what = chance.choice(KINDS)
        count = chance.choice((1, 1, 1, 1, 2, 3)) if what in _ANY_NUMBER else 1
        brokers = tuple(chance.sample(BROKERS, count))
        healed = unhealed == MOST_AT_A_TIME - 1 or chance.random() < 0.5
        # All replicas are in sync only if no other fault continues.
        settled = unhealed == 0 and chance.random() < 0.5
        unhealed = 0 if healed else unhealed + 1
        yield Step(what, brokers, chance.choice(HOLDS), settled, healed)


class Trouble:
    """Makes steps happen to a site's brokers and to its etcd. `topics` are those whose promises a wiped disk must not
    break: for each of their partitions at least one other broker with the promised records keeps its disk."""

    def __init__(self, site: FaultySite, topics: Sequence[str], partitions: int) -> None:
        self._site = site
        self._partitions = [(topic, partition) for topic in topics for partition in range(partitions)]
        self._healing = AsyncExitStack()
        self._etcd_is_troubled = False
        self.wipes = 0

    async def make(self, step: Step) -> None:
        """Carry out a fault for as long as it holds; a healed one until every process serves again."""
        brokers = [self._site.brokers[node_id] for node_id in step.brokers]
        if step.what.startswith("etcd"):
            await self._befall_etcd(step)
        else:
            await asyncio.gather(*(self._befall(step.what, broker) for broker in brokers))
        await asyncio.sleep(step.hold_s)
        if step.healed:
            await self.heal()

    async def heal(self) -> None:
        """End all faults; every process serves again."""
        await self.close()
        await self._site.heal()

    async def close(self) -> None:
        """Leave etcd as it was before."""
        healing, self._healing = self._healing, AsyncExitStack()
        self._etcd_is_troubled = False
        await healing.aclose()

    async def _befall_etcd(self, step: Step) -> None:
        if self._etcd_is_troubled:
            return
        self._etcd_is_troubled = True
        etcd, healing = self._site.etcd, self._healing
        member = etcd.members[step.brokers[0] - 1]
        if step.what == "etcd member killed":
            member.kill()
            healing.push_async_callback(etcd.healthy, member)
            healing.callback(etcd.start_member, member)
        else:
            for other in etcd.members:
                if other is not member:
                    await other.freeze()
                    healing.callback(other.thaw)

    async def _befall(self, what: str, broker: FaultyBroker) -> None:
        """Carry out one fault. A broker or link that is down stays down."""
        if not broker.is_running:
            return
        if what == "killed":
            await broker.down()
        elif what == "stopped":
            broker.signal(signal.SIGSTOP)
        elif what == "terminated":
            broker.signal(signal.SIGCONT)
            await asyncio.to_thread(broker.terminate)
        elif what == "cut off from etcd":
            await broker.cut_off_from_etcd("refused")
        elif what == "silent to etcd":
            await broker.cut_off_from_etcd("silent")
        elif what == "cut off from followers":
            broker.replication_way.blackhole()
        elif what == "its disk is wiped":
            # From then on it acknowledges nothing, and other in-sync replicas, if any, have what it acknowledged.
            await broker.down()
            if await self._others_hold_what_was_promised(broker.node_id):
                shutil.rmtree(broker.data_dir)
                self.wipes += 1
        else:
            with contextlib.suppress(EtcdError):
                found = await self._site.client.get(self._site.keys.broker(broker.node_id))
                if found is not None:
                    await self._site.client.lease_revoke(found.lease_id)

    async def _others_hold_what_was_promised(self, node_id: int) -> bool:
        """Whether for each partition another broker is in sync, with the very log that it has on its disk."""
        try:
            states = [await self._site.state(*each) for each in self._partitions]
        except EtcdError:
            return False
        return all(
            state is not None
            and any(
                replica.node_id != node_id
                and self._site.log_id(replica.node_id, state.topic_id, partition) == replica.log_id
                for replica in state.isr
            )
            for (_, partition), state in zip(self._partitions, states, strict=True)
        )


class Reader(ThreadedClient):
    """Reads one partition from its beginning, from whichever of `addresses` serves it, on a thread of its own.

    A record that it has read must stay, and an offset that it has reached must not be refused.
    """

    def __init__(self, topic: str, partition: int, addresses: Callable[[], Sequence[Address]]) -> None:
        super().__init__(f"reader {topic}-{partition}")
        self.seen: dict[int, bytes] = {}
        self.topic, self.partition = topic, partition
        self._addresses = addresses
        self._offset = 0
        self._turn = 0
        self._client: RawClient | None = None

    def judge(self, log: Sequence[Stored]) -> None:
        """Compare the records read with the final log."""
        final = dict(log)
        for offset, value in self.seen.items():
            assert final.get(offset) == value, f"read {value!r} at {offset}, where {final.get(offset)!r} is in the end"

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._read()
            except (OSError, Closed):
                self._disconnect()
                self._stopping.wait(0.05)
        self._disconnect()

    def _read(self) -> None:
        if self._client is None:
            addresses = self._addresses()
            host, port = addresses[self._turn % len(addresses)]
            self._client = RawClient(host, port, timeout_s=2.0)
        place = {"partition": self.partition, "max_bytes": 1 << 18}
        found = fetch(self._client, self.topic, self._offset, **place, max_wait_ms=200)
        where = f"{self.topic}-{self.partition}"
        assert found.error_code != error_codes.OFFSET_OUT_OF_RANGE, f"{where}: sent back from {self._offset}"
        if found.error_code != error_codes.NONE:
            self._disconnect()
            self._stopping.wait(0.05)
            return
        if not found.records:
            self._ask_for_the_end(self._client, where)
        for offset, value in stored(bytes(found.records or b"")):
            if offset < self._offset:
                continue
            assert offset == self._offset, f"{where}: {self._offset} was skipped for {offset}"
            assert offset < found.high_watermark, (
                f"{where}: {offset} was shown, the high watermark is {found.high_watermark}"
            )
            self.seen[offset] = value
            self._offset = offset + 1

    def _ask_for_the_end(self, client: RawClient, where: str) -> None:
        """A broker must not report an earlier end than was reported before."""
        topics = [{"name": self.topic, "partitions": [{"partition_index": self.partition, "timestamp": -1}]}]
        found = client.request(LIST_OFFSETS, 7, replica_id=-1, topics=topics).topics[0].partitions[0]
        if found.error_code == error_codes.NONE:
            assert found.offset >= self._offset, f"{where}: the end is {found.offset}, after {self._offset}"

    def _disconnect(self) -> None:
        self._turn += 1
        if self._client is not None:
            self._client.close()
            self._client = None
