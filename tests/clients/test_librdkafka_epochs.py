"""The proxy causes no duplicates by librdkafka's new epoch, in which it sends unacknowledged batches again.

If a broker refuses a batch, the next batch is out of order. librdkafka takes this for a lost count: it begins a new
epoch, and sends all unacknowledged batches of every partition again in it. A broker, reference or Apache Kafka, cannot
recognize these batches. Behind the proxy no batch is doubled, because the proxy passes on no such error behind a batch
that is sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import confluent_kafka
import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers.doubtful_relay import Batch, doubtful_relay
from tests.support.brokers.reference_broker import LASTING_TTL_S, start_broker
from tests.support.clients.attempts import log_bytes, stored
from tests.support.processes.dev import serving

TOPIC = "in-doubt"
# Longer than all that befalls the other partition: until then the batch in doubt waits to be sent again.
BACKOFF_MS = 2000
SETTLE_S = 90.0


@contextmanager
def served_by(way: str, broker: str, etcd: str, prefix: str, directory: Path) -> Iterator[str]:
    """The bootstrap server of a client that goes that way."""
    with ExitStack() as stack:
        if way == "direct":
            yield broker
            return
        arguments = ["serve", "--listen", "127.0.0.1:0", "--etcd", etcd, "--prefix", prefix]
        yield stack.enter_context(serving(arguments, directory / "proxy")).kafka


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        pytest.param("direct", [(0, b"0"), (0, b"1"), (1, b"1")], id="direct"),
        pytest.param("proxied", [(0, b"0"), (0, b"1")], id="proxied"),
    ],
)
async def test_new_epoch_duplicates_only_without_the_proxy(
    way: str, expected: list[tuple[int, bytes]], etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path
) -> None:
    # Directly it is not in doubt any more where the machine stands still for as long as it waits to be sent again.
    for attempt in range(5 if way == "direct" else 1):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        found = await _left_in_log(way, etcd, f"{etcd_prefix}/{attempt}", directory)
        if found == expected:
            break
    assert found == expected


async def _left_in_log(way: str, etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> list[tuple[int, bytes]]:
    """Of the partition whose batch is in doubt; the other one's is as it was sent."""
    failed: list[str] = []
    with ExitStack() as stack:
        async with doubtful_relay(doubtful=Batch(0, b"1"), refused=Batch(1, b"1"), behind=Batch(1, b"2")) as relay:
            options = {"advertise": relay.port, "num_partitions": 2, "lease_ttl_s": LASTING_TTL_S}
            broker = start_broker(1, tmp_path / "1", etcd.endpoint, etcd_prefix, **options)
            relay.broker_port = (await asyncio.to_thread(stack.enter_context, broker)).port
            served = served_by(way, f"127.0.0.1:{relay.port}", etcd.endpoint, etcd_prefix, tmp_path)
            producer = confluent_kafka.Producer(
                {
                    "bootstrap.servers": await asyncio.to_thread(stack.enter_context, served),
                    "enable.idempotence": True,
                    "linger.ms": 0,
                    "retry.backoff.ms": BACKOFF_MS,
                    "retry.backoff.max.ms": BACKOFF_MS,
                }
            )

            def write(partition: int, value: bytes) -> None:
                producer.produce(TOPIC, value, partition=partition, on_delivery=delivered)

            def delivered(error: object, message: confluent_kafka.Message) -> None:
                if error is not None:
                    failed.append(f"{message.partition()}/{message.value()!r}: {error}")

            write(0, b"0")
            write(1, b"0")
            assert await asyncio.to_thread(producer.flush, SETTLE_S) == 0
            async with asyncio.timeout(SETTLE_S):
                write(0, b"1")
                await relay.doubted.wait()
                write(1, b"1")
                await relay.arrived.wait()
                write(1, b"2")
            assert await asyncio.to_thread(producer.flush, SETTLE_S) == 0
    assert failed == []
    assert [value for _, value in in_log(tmp_path / "1" / f"{TOPIC}-1")] == [b"0", b"1", b"2"]
    return in_log(tmp_path / "1" / f"{TOPIC}-0")


def in_log(directory: Path) -> list[tuple[int, bytes]]:
    """The producer epoch and the value of each record."""
    log = log_bytes(directory)
    return [
        (batch.producer_epoch, record.value)
        for batch in iterate_batches(log)
        for record in stored(log[batch.position : batch.end])
    ]
