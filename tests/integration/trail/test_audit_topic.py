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

from kproxy.address import Address
from kproxy.config.parsing import parse_address
from kproxy.dev.cluster import DevCluster
from kproxy.trail import topic_sink
from kproxy.trail.rows import Row, encode_page
from kproxy.trail.sink import SinkFailed
from kproxy.trail.topic_sink import TopicSink
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes as codes
from kproxy_codec.record_batch import parse_batch
from tests.support.audit.audit_trails import INCARNATION, is_whole, paged, rows_in, some_rows, the_end, trails_in_topic
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, introduction
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
    sink = TopicSink(trail_topic, INCARNATION, bootstrap=[parse_address(dev_cluster.kafka, "")])
    await sink.write(pages[:1])
    await sink.write(pages[1:])
    await sink.close()
    # Another proxy's rows, in the existing topic.
    other = TopicSink(trail_topic, "0" * 16, bootstrap=[parse_address(dev_cluster.kafka, "")])
    await other.write([encode_page([msgspec.structs.replace(row, incarnation="0" * 16) for row in some_rows(3)])])
    await other.close()
    found = await asyncio.to_thread(trails_in_topic, dev_cluster.kafka, trail_topic)
    assert found.keys() == {INCARNATION, "0" * 16}
    assert found[INCARNATION] == rows
    assert rows_in(pages) == rows


class TrailBroker:
    """The only broker, with the trail's topic. `outcomes` of Produce requests: error codes, or None to close."""

    def __init__(self, *outcomes: int | None) -> None:
        self.outcomes = list(outcomes)
        self.batches: list[bytes] = []
        self.producers = 0
        self.upstream = ScriptedUpstream(1, self.take)

    def take(self, asked: Asked) -> None:
        match asked.header.api_key:
            case keys.API_VERSIONS:
                asked.connection.write(introduction(asked.header))
            case keys.METADATA:
                host, port = self.upstream.address
                partitions = [
                    {"partition_index": index, "leader_id": 1, "replica_nodes": [], "isr_nodes": []}
                    for index in range(3)
                ]
                asked.answer_message(
                    brokers=[{"node_id": 1, "host": host, "port": port}],
                    controller_id=1,
                    topics=[{"name": "trail", "partitions": partitions}],
                )
            case keys.CREATE_TOPICS:
                asked.answer_message(topics=[{"name": "trail", "error_code": codes.TOPIC_ALREADY_EXISTS}])
            case keys.INIT_PRODUCER_ID:
                self.producers += 1
                asked.answer_message(error_code=0, producer_id=self.producers, producer_epoch=0)
            case keys.PRODUCE:
                ((place, batch),) = asked.records.items()
                self.batches.append(batch)
                code = self.outcomes.pop(0)
                if code is None:
                    asked.connection.close()
                else:
                    asked.answer(results={place: code})


async def test_unconfirmed_batch_is_sent_again_unchanged() -> None:
    refused = [codes.NOT_LEADER_OR_FOLLOWER, codes.NOT_ENOUGH_REPLICAS, None, codes.REQUEST_TIMED_OUT]
    broker = TrailBroker(*refused, codes.DUPLICATE_SEQUENCE_NUMBER, codes.NONE)
    await broker.upstream.start()
    sink = TopicSink("trail", INCARNATION, bootstrap=[broker.upstream.address])
    await sink.write([b"one", b"two"])
    await sink.write([b"three"])
    await sink.close()
    await broker.upstream.stop()
    *first, last = broker.batches
    assert len(first) == 5
    assert set(first) == {first[0]}
    shown = [(batch.producer_id, batch.base_sequence, batch.record_count) for batch in map(parse_batch, broker.batches)]
    assert shown == [(1, 0, 2)] * 5 + [(1, 2, 1)]
    assert b"three" in last


async def test_too_large_batch_is_sent_in_parts() -> None:
    """The sequence numbers that the refused batch has used are free again."""
    broker = TrailBroker(codes.MESSAGE_TOO_LARGE, codes.NONE, codes.RECORD_LIST_TOO_LARGE, codes.NONE, codes.NONE)
    await broker.upstream.start()
    sink = TopicSink("trail", INCARNATION, bootstrap=[broker.upstream.address])
    before = sink.preference.bytes
    await sink.write([b"one", b"two", b"three"])
    assert sink.preference.bytes == before // 4
    broker.outcomes = [codes.MESSAGE_TOO_LARGE]
    with pytest.raises(SinkFailed, match="MESSAGE_TOO_LARGE"):
        await sink.write([b"one page"])
    await sink.close()
    await broker.upstream.stop()
    shown = [(batch.base_sequence, batch.record_count) for batch in map(parse_batch, broker.batches)]
    assert shown == [(0, 3), (0, 1), (1, 2), (1, 1), (2, 1), (3, 1)]


async def test_sink_restarts_after_final_refusal() -> None:
    broker = TrailBroker(codes.OUT_OF_ORDER_SEQUENCE_NUMBER, codes.NONE)
    await broker.upstream.start()
    sink = TopicSink("trail", INCARNATION, bootstrap=[broker.upstream.address])
    with pytest.raises(SinkFailed, match=r"topic trail: .*OUT_OF_ORDER_SEQUENCE_NUMBER"):
        await sink.write([b"page"])
    await sink.write([b"page"])
    await sink.close()
    await broker.upstream.stop()
    shown = [(batch.producer_id, batch.base_sequence) for batch in map(parse_batch, broker.batches)]
    assert shown == [(1, 0), (2, 0)]


@pytest.mark.parametrize("trouble", ["refuses", "hangs"])
async def test_attempts_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, trail_topic: str, trouble: str) -> None:
    """A sink that is down for long is tried often: each attempt's sockets and threads are released."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    if trouble == "refuses":
        server.close()
    process = psutil.Process()
    monkeypatch.setattr(topic_sink, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(topic_sink, "OPEN_S", 0.3)
    sink = TopicSink(trail_topic, INCARNATION, bootstrap=[Address("127.0.0.1", port)])
    # Objects that are made only once are not counted.
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
