"""A trail in a topic, also while no broker accepts it."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from kproxy.dev.cluster import DevCluster
from kproxy.trail.rows import Row, encode_page
from kproxy.trail.sink import SinkFailed
from kproxy.trail.topic_sink import TopicSink
from tests.support.audit.audit_trails import INCARNATION, is_whole, paged, rows_in, some_rows, the_end, trails_in_topic
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import KproxyProcess, asyncios_own_loop, serving
from tests.support.processes.served import counted
from tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def loop() -> Iterator[None]:
    with asyncios_own_loop():
        yield


@pytest.fixture
def trail_topic() -> str:
    return f"trail-{uuid.uuid4().hex[:12]}"


async def test_pages_are_messages_of_one_partition_in_order(dev_cluster: KproxyProcess, trail_topic: str) -> None:
    rows: list[Row] = [*some_rows(60), the_end(60)]
    pages = paged(rows, 4)
    sink = TopicSink(trail_topic, INCARNATION, bootstrap=[dev_cluster.kafka])
    await sink.write(pages[:1])
    await sink.write(pages[1:])
    await sink.close()
    # Another sink's, for an existing topic.
    other = TopicSink(trail_topic, "0" * 16, bootstrap=[dev_cluster.kafka])
    await other.write([encode_page([msgspec.structs.replace(row, incarnation="0" * 16) for row in some_rows(3)])])
    await other.close()
    found = await asyncio.to_thread(trails_in_topic, dev_cluster.kafka, trail_topic)
    assert found.keys() == {INCARNATION, "0" * 16}
    assert found[INCARNATION] == rows
    assert rows_in(pages) == rows


@pytest.mark.parametrize("trouble", ["refuses", "hangs"])
async def test_attempts_leave_nothing_behind(trail_topic: str, trouble: str) -> None:
    """A sink that is down for long is retried often: each attempt closes its sockets and ends its threads."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    if trouble == "refuses":
        server.close()
    process = psutil.Process()
    sink = TopicSink(trail_topic, INCARNATION, bootstrap=[f"127.0.0.1:{port}"])
    sink._client["bootstrap_timeout_ms"] = 300
    # Objects created once are not counted.
    with pytest.raises(SinkFailed):
        await sink.write([b"{}"])
    gc.collect()
    # The collector may also run late.
    gc.disable()
    try:
        threads, descriptors = threading.active_count(), process.num_fds()
        for _ in range(4):
            with pytest.raises(SinkFailed, match=f"topic {trail_topic}: "):
                await sink.write([b"{}"])
        await sink.close()
        assert threading.active_count() <= threads
        assert process.num_fds() <= descriptors
    finally:
        gc.enable()
        server.close()


@pytest.mark.long
async def test_unwritten_trail_is_written_when_owner_returns(tmp_path: Path, trail_topic: str) -> None:
    """The only broker is killed: none accepts the trail, and other topics' clients are not affected."""
    async with DevCluster(tmp_path / "cluster", brokers=1, lease_ttl_s=2, audit=False) as cluster:
        arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--etcd", cluster.etcd, "--alone"]
        arguments += ["--audit-sink", f"topic:{trail_topic}", "--audit-interval-s", "0.5"]
        with serving(arguments, tmp_path / "serve.err") as process:
            await asyncio.to_thread(produce, process.kafka, "t", [b"v"] * 10)

            def shipped() -> float:
                return counted(process.admin, "kproxy_audit_rows_shipped_total")

            await asyncio.to_thread(wait_for, lambda: shipped() >= 2, what="a range")
            await asyncio.to_thread(produce, process.kafka, "t", [b"v"] * 10)
            await cluster.kill_broker(1)
            # Its received records may not have been counted yet.
            before = -1.0
            while before != (before := shipped()):
                await asyncio.sleep(3)
            await asyncio.sleep(2)
            assert shipped() == before
            assert counted(process.admin, "kproxy_audit_waiting_bytes") > 0
            await cluster.restart_broker(1)
            await asyncio.to_thread(produce, process.kafka, "t", [b"v"] * 10)
            await asyncio.to_thread(
                wait_for, lambda: counted(process.admin, "kproxy_audit_waiting_bytes") == 0, what="the rest"
            )
        (rows,) = (await asyncio.to_thread(trails_in_topic, cluster.kafka, trail_topic)).values()
        assert is_whole(rows)
        assert sum(getattr(row, "record_count", 0) for row in rows) == 30
