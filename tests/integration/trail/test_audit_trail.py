"""The trail of a real proxy with real brokers has exactly its clients' acknowledgements, each once.

Idempotent clients and plain ones write through one proxy while the owner of their partitions is killed with -9 and
comes back. Then the proxy's trail, the clients' accounts and the brokers' answers are compared.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kproxy.demo.run import partition_owners
from kproxy.dev.cluster import DevCluster
from kproxy.trail.rows import Mark, Range
from tests.support.audit.audit_trails import is_whole, rows_in_files
from tests.support.clients.attempts import Writer
from tests.support.clients.idempotent_writers import IdempotentWriter
from tests.support.clients.kafka_io import create_topic
from tests.support.processes.dev import asyncios_own_loop, serving

PARTITIONS = 3
LEASE_TTL_S = 2


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    with asyncios_own_loop():
        yield


def records(row: Range) -> Iterator[tuple[int, int]]:
    """(offset, sequence) of each record of a row."""
    sequence = row.first_sequence
    for first, count in zip(row.spans[0::2], row.spans[1::2], strict=True):
        for offset in range(first, first + count):
            yield offset, sequence
            sequence += row.producer_id >= 0


async def test_trail_has_each_client_acknowledgement_once(tmp_path: Path) -> None:
    trail_dir = tmp_path / "trail"
    async with DevCluster(tmp_path / "cluster", brokers=3, lease_ttl_s=LEASE_TTL_S) as cluster:
        topics = ("idempotent", "plain")
        for topic in topics:
            await asyncio.to_thread(create_topic, cluster.kafka, topic, PARTITIONS)
        arguments = ["serve", "--listen", "127.0.0.1:0", "--etcd", cluster.etcd, "--alone"]
        with serving([*arguments, "--audit-sink", f"json:{trail_dir}"], tmp_path / "serve.err") as proxy:
            host, _, port = proxy.kafka.rpartition(":")
            async with AsyncExitStack() as stack:
                idempotent = await stack.enter_async_context(IdempotentWriter(proxy.kafka, "idempotent", PARTITIONS))
                plain = await stack.enter_async_context(Writer("plain", lambda: [(host, int(port))], timeout_ms=8_000))
                await asyncio.to_thread(idempotent.wait_for_more, 300)
                owners = await partition_owners([cluster.etcd], "/kafscale", "plain")
                victim = owners[0]
                await cluster.kill_broker(victim)
                await asyncio.to_thread(idempotent.wait_for_more, 600)
                await cluster.restart_broker(victim)
                await asyncio.to_thread(idempotent.wait_for_more, 300)
            assert proxy.stop() == 0
    assert idempotent.failed == []
    rows = rows_in_files(trail_dir)
    assert is_whole(rows)
    assert all(isinstance(row, Range | Mark) for row in rows[1:-1])
    ranges = [row for row in rows if isinstance(row, Range)]
    for partition in range(PARTITIONS):
        _check_idempotent(
            [row for row in ranges if (row.topic, row.partition) == ("idempotent", partition)],
            idempotent.acked[partition],
        )
    _check_plain([row for row in ranges if row.topic == "plain"], plain)
    assert len({row.owner for row in ranges if (row.topic, row.partition) == ("plain", 0)}) > 1, "nobody took over"
    assert "assigned twice" not in proxy.stderr()


def _check_idempotent(ranges: Sequence[Range], acked: dict[int, int | None]) -> None:
    """`acked`: offset by number; the n-th record of its producer has the sequence n."""
    counted = Counter(record for row in ranges for record in records(row))
    # A resend whose first answer came too late for its client is in the trail twice, at the same offset. For a record
    # confirmed only by a later batch, librdkafka reports no offset.
    told = {(offset, number) for number, offset in acked.items() if offset is not None}
    assert told <= set(counted)
    untold = {number for number, offset in acked.items() if offset is None}
    assert {number for _, number in set(counted) - told} <= untold
    assert sum(row.record_count for row in ranges) == sum(counted.values())
    assert {(row.producer_id, row.producer_epoch) for row in ranges} != {(-1, -1)}


def _check_plain(ranges: Sequence[Range], writer: Writer) -> None:
    offsets: defaultdict[int, list[int]] = defaultdict(list)
    for row in ranges:
        assert (row.producer_id, row.first_sequence, row.partition) == (-1, -1, 0)
        for offset, _ in records(row):
            offsets[row.owner].append(offset)
    told = Counter(offset for each in offsets.values() for offset in each)
    # An answer may be lost between the proxy and its client: the trail may have more.
    assert all(count == 1 for count in told.values())
    assert {attempt.offset for attempt in writer.acked} <= set(told)
    assert len(told) <= len(writer.acked) + len([each for each in writer.attempts if each.error_code is None])
