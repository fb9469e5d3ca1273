"""The zombie leader of the KRaft split-brain text, thirty times: stopped for longer than its lease, then continued.

Ten brokers lead one partition each and are all stopped at once, while two others take over and receive writes. This
runs three times, with every broker stopped at a different place each time:

asleep             by SIGSTOP from outside; a produce and a fetch wait in its sockets when it wakes
before the write   it has looked at its fence, and writes when it wakes
after the write    the bytes are in its log; it is killed in its sleep, so that nobody takes them back
after the append   its followers never got the batch, which waits for them with acks=all

After it wakes it acknowledges nothing and serves no read, and its late write is in no log at the end.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psutil
import pytest
import pytest_asyncio

from kproxy.etcd import EtcdError
from kproxy_codec import error_codes
from tests.support.brokers.broker_hooks import AFTER_THE_APPEND, AFTER_THE_WRITE, BEFORE_THE_WRITE
from tests.support.brokers.faulty_site import FaultyBroker, FaultySite, faulty_site
from tests.support.brokers.reference_broker import Closed, RawClient, send_fetch
from tests.support.clients.attempts import Stored
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.waiting import eventually
from tests.support.wire.record_batches import build_batch

TTL_S = 2
ZOMBIES = range(1, 11)
OTHERS = (11, 12)
ROUNDS = 3
PLACES = {
    "asleep": b"",
    "before the write": BEFORE_THE_WRITE,
    "after the write": AFTER_THE_WRITE,
    "after the append": AFTER_THE_APPEND,
}
ACKS = (-1, 1, 0)
NOT_LEADER = error_codes.NOT_LEADER_OR_FOLLOWER
REFUSED_UNWRITTEN = {NOT_LEADER, error_codes.NOT_ENOUGH_REPLICAS}
HANG_S = 60.0
# After the append no answer may look like a refusal.
NO_ACK = {
    "asleep": {NOT_LEADER},
    "before the write": {NOT_LEADER},
    "after the write": set(),
    "after the append": {error_codes.REQUEST_TIMED_OUT, error_codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND},
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(etcd_cluster: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultySite]:
    async with faulty_site(etcd_cluster, "/zombies", tmp_path_factory.mktemp("zombies")) as site:
        await site.add((*ZOMBIES, *OTHERS), lease_ttl_s=TTL_S, stops_at_marks=1)
        yield site


class Zombie:
    """One broker in one round. It leads partition `node_id` - 1."""

    def __init__(self, broker: FaultyBroker, topic: str, round_number: int) -> None:
        self.broker = broker
        self.topic = topic
        self.partition = broker.node_id - 1
        self.place = list(PLACES)[(broker.node_id + round_number) % len(PLACES)]
        # Requests queued behind a leader's acks=all would wait there in any case.
        self.acks = -1 if self.place == "after the append" else ACKS[(broker.node_id // len(PLACES)) % len(ACKS)]
        self._writer: RawClient | None = None
        self._reader: RawClient | None = None
        self._stamp = f"{topic} {broker.node_id}".encode()

    def produce(self, client: RawClient, value: bytes, *, acks: int = -1, answered: bool = True) -> Any:
        return client.produce(self.topic, self.partition, build_batch([value]), acks=acks, answered=answered)

    def fall_asleep(self) -> None:
        """Stop, with a produce and a fetch in flight."""
        self._writer, self._reader = self.broker.client(), self.broker.client()
        if self.place == "asleep":
            self.broker.signal(signal.SIGSTOP)
        batch = build_batch([self._stamp + PLACES[self.place]])
        self._writer.send_produce(self.topic, self.partition, batch, acks=self.acks, answered=self.acks != 0)

    @property
    def is_stopped(self) -> bool:
        return psutil.Process(self.broker.process.pid).status() == psutil.STATUS_STOPPED

    def send_more(self) -> None:
        """Send the stopped broker a second produce, and a read."""
        assert self._writer is not None
        assert self._reader is not None
        more = build_batch([self._stamp + b" more"])
        self._writer.send_produce(self.topic, self.partition, more, acks=self.acks, answered=self.acks != 0)
        send_fetch(self._reader, self.topic, partition=self.partition, max_wait_ms=0)

    def what_it_says(self) -> tuple[list[int], list[int]]:
        """Return the error codes of its answers to the produces and to the fetch."""
        assert self._writer is not None
        assert self._reader is not None
        produced: list[int] = []
        fetched: list[int] = []
        try:
            while self.acks and len(produced) < 2:
                produced.append(self._writer.produced().error_code)
        except Closed:
            pass
        try:
            found = self._reader.receive().responses[0].partitions[0]
            assert not found.records, f"{self.place}: it served a read"
            fetched.append(found.error_code)
        except Closed:
            pass
        self._writer.close()
        self._reader.close()
        return produced, fetched

    async def wake(self) -> None:
        if self.place == "after the write":
            await self.broker.down()
            await self.broker.up()
        else:
            self.broker.signal(signal.SIGCONT)

    def check_answers(self) -> None:
        produced, fetched = self.what_it_says()
        if self.place == "after the write":
            assert (produced, fetched) == ([], []), "it was killed, and answers"
            return
        assert fetched == [NOT_LEADER]
        if self.acks == 0:
            return
        assert produced[0] in NO_ACK[self.place], f"{self.place}: {produced}"
        assert produced[1] == NOT_LEADER, f"{self.place}: {produced}"


async def written(site: FaultySite, zombie: Zombie, leaders: Sequence[int], value: bytes) -> tuple[int, int]:
    """Return the error code and base offset of a write to one of these, repeated if it is refused before the append.

    On a slow machine a follower may leave the ISR, or a leader lose its lease, for a moment.
    """
    deadline = time.monotonic() + HANG_S
    while True:
        owner = await site.led_by(zombie.topic, zombie.partition, leaders, HANG_S)
        with site.brokers[owner].client() as client:
            taken = await asyncio.to_thread(zombie.produce, client, value)
        if taken.error_code not in REFUSED_UNWRITTEN or time.monotonic() > deadline:
            return taken.error_code, taken.base_offset
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "round_number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, ROUNDS))]
)
async def test_leader_stopped_past_its_lease_keeps_nothing(site: FaultySite, round_number: int) -> None:
    topic = f"round-{round_number}"
    await site.put_topic(topic, [[node_id, *OTHERS] for node_id in ZOMBIES])
    zombies = [Zombie(site.brokers[node_id], topic, round_number) for node_id in ZOMBIES]
    for zombie in zombies:
        own_id = zombie.broker.node_id
        await site.led_by(topic, zombie.partition, [own_id], HANG_S)
        await site.in_sync(topic, zombie.partition, [own_id, *OTHERS], HANG_S)
        assert await written(site, zombie, [own_id], b"before") == (0, 0)
    for zombie in zombies:
        zombie.fall_asleep()

    async def all_sleep() -> bool:
        return all(zombie.is_stopped for zombie in zombies)

    try:
        await eventually(all_sleep, timeout_s=HANG_S, ignored=(EtcdError,), what="they all stop")
        for zombie in zombies:
            zombie.send_more()
            taken = await written(site, zombie, OTHERS, b"meanwhile")
            assert taken == (0, 1), "the new leader does not write where the old one would"
    finally:
        # Also when this round fails: the next one needs them running.
        await asyncio.gather(*(zombie.wake() for zombie in zombies))
    for zombie in zombies:
        await asyncio.to_thread(zombie.check_answers)
    for zombie in zombies:
        everyone = [zombie.broker.node_id, *OTHERS]
        await site.in_sync(topic, zombie.partition, everyone, HANG_S)
        log = await site.same_logs(topic, zombie.partition, everyone, HANG_S)
        assert log == [Stored(0, b"before"), Stored(1, b"meanwhile")], f"{zombie.place}, acks={zombie.acks}"
