"""A leader moves while both brokers are alive: `kproxy serve` before a cluster that refuses as Apache Kafka does.

The table of leaders is reread every 30 s, so success within seconds shows a lookup.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kproxy_codec.api_keys import API_VERSIONS
from tests.support.brokers.kafka_cluster import KafkaCluster
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import beside, counted, kafka_proxy, port_of
from tests.support.waiting import eventually

T0 = ("t", 0)
# Far below the time between two reads of the table, and above a busy machine's delays.
PATIENCE_S = 25.0
RETRY_BACKOFF_S = 0.1


@pytest.fixture(autouse=True)
def patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The brokers share this process, which may delay their answers."""
    monkeypatch.setenv("KPROXY_LIMITS__PROBE_TIMEOUT_S", "60")


Records = Callable[[int], bytes]
PRODUCERS: dict[str, tuple[Records, int, str | None]] = {
    "acks=1": (lambda n: batch(n, producer_id=-1), 1, None),
    "acks=all": (lambda n: batch(n, producer_id=-1), -1, None),
    "idempotent": (batch, -1, None),
    "transactional": (lambda n: batch(n, is_transactional=True), -1, "x"),
}


@pytest.mark.parametrize("kind", PRODUCERS)
async def test_producers_recover_soon_after_a_planned_move(kind: str, tmp_path: Path) -> None:
    records, acks, transactional_id = PRODUCERS[kind]
    async with KafkaCluster() as cluster:
        cluster.move(T0, 1)
        async with beside(kafka_proxy(tmp_path, cluster.bootstrap)) as process:
            client = await RawClient().connect(port_of(process))

            async def send(n: int) -> int:
                frame = produce_frame(records=records(n), acks=acks, transactional_id=transactional_id)
                client.send(frame)
                return (await client.answer(patience_s=40)).codes[T0]

            assert await send(0) == 0
            cluster.move(T0, 2)
            moved = time.monotonic()
            codes = [await send(1)]
            while codes[-1] and time.monotonic() - moved < PATIENCE_S:
                # Like every client after a retriable code.
                await asyncio.sleep(RETRY_BACKOFF_S)
                codes.append(await send(1))
            client.abort()
            assert codes[-1] == 0, f"{kind}: {codes} in {time.monotonic() - moved:.1f} s"
    # A refusal before the append is certain: no client gets an ambiguous code for its batch.
    assert 7 not in codes
    assert cluster.appended == [(1, T0, records(0)), (2, T0, records(1))]


@pytest.mark.parametrize("confirms", [True, False], ids=["confirmed", "unconfirmed"])
async def test_acks_0_reaches_new_leader_or_closes_client(confirms: bool, tmp_path: Path) -> None:
    """A loss in transit is counted if it can be known, and reported as unconfirmed if not."""
    async with KafkaCluster() as cluster:
        cluster.move(T0, 1)
        flag = "--confirm-acks0" if confirms else "--no-confirm-acks0"
        async with beside(kafka_proxy(tmp_path, cluster.bootstrap, flag)) as process:
            stream = Stream(port_of(process))
            await stream.send()
            await eventually(lambda: len(cluster.appended) == 1)
            cluster.move(T0, 2)
            moved = time.monotonic()
            while not any(leader == 2 for leader, _, _ in cluster.appended):
                assert time.monotonic() - moved < PATIENCE_S, (
                    f"{stream.sent} sent, {cluster.refused_unanswered} refused"
                )
                await stream.send()
            sent = stream.sent
            await stream.end()
            if confirms:
                await eventually(lambda: len(cluster.appended) == sent)
                assert cluster.refused_unanswered == 0
                assert await dropped(process) == await unconfirmed(process) == 0
            else:
                lost = sent - len(cluster.appended)
                assert 1 <= lost <= await dropped(process) + await unconfirmed(process)


class Stream:
    """A producer with acks=0 that reconnects when its connection is closed, like every client."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._client: RawClient | None = None
        self.sent = 0

    async def send(self) -> None:
        if self._client is not None and await self._client.is_closed(0.02):
            self._client = None
        if self._client is None:
            self._client = await RawClient().connect(self._port)
        self._client.send(produce_frame(records=batch(self.sent, producer_id=-1), acks=0))
        self.sent += 1

    async def end(self) -> None:
        """Wait for the answer to a last request, which shows that all were received."""
        if self._client is not None:
            self._client.send(control_frame(API_VERSIONS, 0))
            await self._client.answer(API_VERSIONS, 0)
            self._client.abort()


async def dropped(process: KproxyProcess) -> float:
    return await asyncio.to_thread(counted, process.admin, "kproxy_acks0_dropped_total")


async def unconfirmed(process: KproxyProcess) -> float:
    return await asyncio.to_thread(counted, process.admin, "kproxy_acks0_unconfirmed_total")
