"""The answers of reference brokers on the wire, read by a client that shares no encoder with them.

Refused requests and producers' sequences are compared with Apache Kafka's: tests/contract.
"""

from __future__ import annotations

import os
import time
import uuid
from typing import Any

import psutil
import pytest

from kproxy_codec import api_keys, control, error_codes
from kproxy_codec.record_batch import iterate_batches
from tests.support.brokers.reference_broker import ANSWER_TIMEOUT_S, BrokerProcess, Cluster, fetch, send_fetch
from tests.support.waiting import PATIENCE_S, wait_for
from tests.support.wire.record_batches import build_batch, with_attributes


def base_offsets(records: bytes | None) -> list[int]:
    return [batch.base_offset for batch in iterate_batches(records or b"")]


# Produce


@pytest.mark.parametrize("version", range(3, 14))
def test_every_produce_version_is_appended_and_answered(leader: BrokerProcess, topic: str, version: int) -> None:
    with leader.client() as client:
        results = [client.produce(topic, 0, build_batch([b"a", b"b"]), version=version) for _ in range(2)]
    assert [(each.error_code, each.base_offset) for each in results] == [(0, 0), (0, 2)]
    assert version < 5 or results[0].log_start_offset == 0


def test_unknown_topic_id_gets_its_own_error(leader: BrokerProcess, topic: str) -> None:
    """KIP-516; the other topics of the request are served."""
    with leader.client() as client:
        known, unknown = client.topic_id(topic), uuid.uuid4()
        data = [
            {"topic_id": each, "partition_data": [{"index": index, "records": build_batch()} for index in indexes]}
            for each, indexes in ((unknown, [0, 1]), (known, [0, 1_000]))
        ]
        answer = client.request(api_keys.PRODUCE, 13, acks=-1, timeout_ms=5000, topic_data=data)
    assert [(each.topic_id, [entry.error_code for entry in each.partition_responses]) for each in answer.responses] == [
        (unknown, [error_codes.UNKNOWN_TOPIC_ID, error_codes.UNKNOWN_TOPIC_ID]),
        (known, [0, error_codes.UNKNOWN_TOPIC_OR_PARTITION]),
    ]


@pytest.mark.parametrize("version", range(3))
def test_produce_before_version_3_closes_the_connection(leader: BrokerProcess, version: int) -> None:
    with leader.client() as client:
        client.send_bytes(
            bytes([0, 0, 0, version, 0, 0, 0, 1, 0xFF, 0xFF]) + b"\x00\x01\x00\x00\x00\x64\x00\x00\x00\x00"
        )
        assert client.is_closed()


def test_broker_changes_only_offset_and_epoch_on_append(leader: BrokerProcess, topic: str) -> None:
    sent = build_batch([b"x" * 100] * 3, compression=1)
    with leader.client() as client:
        client.produce(topic, 0, build_batch())
        client.produce(topic, 0, sent)
        stored = fetch(client, topic, 1).records
    assert stored[8:12] + stored[16:] == sent[8:12] + sent[16:]
    assert base_offsets(stored) == [1]


def test_zstd_needs_version_7(leader: BrokerProcess, topic: str) -> None:
    zstd = with_attributes(build_batch(), 4)
    with leader.client() as client:
        assert client.produce(topic, 0, zstd, version=6).error_code == error_codes.UNSUPPORTED_COMPRESSION_TYPE
        assert client.produce(topic, 0, zstd, version=7).error_code == 0


def test_non_leader_names_the_leader(cluster: Cluster, leader: BrokerProcess, topic: str) -> None:
    other = next(broker for broker in cluster.brokers if broker is not leader)
    with other.client() as client:

        def answer_with_epoch() -> control.Message | None:
            client.send_produce(topic, 0, build_batch(), version=10)
            said = client.receive()
            named = said.responses[0].partition_responses[0].current_leader
            return said if named is not None and named.leader_epoch >= 0 else None

        # The broker sees the lease first and then the epoch, both soon after the owner.
        answer = wait_for(answer_with_epoch)
    result = answer.responses[0].partition_responses[0]
    assert (result.error_code, result.base_offset) == (error_codes.NOT_LEADER_OR_FOLLOWER, -1)
    assert (result.current_leader.leader_id, result.current_leader.leader_epoch) == (leader.node_id, 0)
    assert [(each.node_id, each.port) for each in answer.node_endpoints] == [(leader.node_id, leader.port)]


def test_pipelined_requests_are_answered_in_order(leader: BrokerProcess, topic: str) -> None:
    with leader.client() as client:
        send_fetch(client, topic, 0, max_wait_ms=300, min_bytes=1 << 20)  # it waits, and so do later requests
        for _ in range(20):
            client.send_produce(topic, 0, build_batch())
        client.send(api_keys.API_VERSIONS, 3, client_software_name="t", client_software_version="1")
        assert client.receive().responses[0].partitions[0].error_code == 0
        assert [client.produced().base_offset for _ in range(20)] == list(range(20))
        assert client.receive().error_code == 0


def test_large_pipelined_requests_are_all_served(leader: BrokerProcess, topic: str) -> None:
    with leader.client() as client:
        send_fetch(client, topic, 0, max_wait_ms=200, min_bytes=1 << 30)
        for _ in range(12):
            client.send_produce(topic, 0, build_batch([b"x" * 500_000]))
        client.receive()
        assert [client.produced().base_offset for _ in range(12)] == list(range(12))


# Fetch


@pytest.mark.parametrize("version", range(4, 13))
def test_every_fetch_version_returns_the_records(leader: BrokerProcess, topic: str, version: int) -> None:
    with leader.client() as client:
        for _ in range(3):
            client.produce(topic, 0, build_batch([b"a", b"b"]))
        found = fetch(client, topic, 3, version=version)
    assert base_offsets(found.records) == [2, 4], "from the batch that holds the offset on"
    assert (found.error_code, found.high_watermark, found.last_stable_offset) == (0, 6, 6)


def test_waiting_fetch_is_woken_by_an_append(leader: BrokerProcess, topic: str) -> None:
    with leader.client() as consumer, leader.client() as producer:
        # Longer than the client waits for an answer.
        send_fetch(consumer, topic, max_wait_ms=round(3000 * ANSWER_TIMEOUT_S))
        assert consumer.silent_for(0.2), "nothing is there to fetch yet"
        producer.produce(topic, 0, build_batch())
        assert base_offsets(consumer.receive().responses[0].partitions[0].records) == [0]


def test_fetch_without_records_ends_with_its_wait(leader: BrokerProcess, topic: str) -> None:
    with leader.client() as client:
        started = time.monotonic()
        assert not fetch(client, topic, max_wait_ms=300).records
        assert 0.28 < time.monotonic() - started < PATIENCE_S


def test_limits_hold_except_for_the_first_batch(leader: BrokerProcess, topic: str) -> None:
    with leader.client() as client:
        for _ in range(3):
            client.produce(topic, 0, build_batch([b"x" * 5000]))
        assert base_offsets(fetch(client, topic, max_bytes=10).records) == [0]
        assert base_offsets(fetch(client, topic, max_bytes=1 << 20).records) == [0, 1, 2]
        partitions = [{"partition": 0, "fetch_offset": offset, "partition_max_bytes": 10} for offset in (0, 1)]
        answer = client.request(
            api_keys.FETCH,
            11,
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=10,
            topics=[{"topic": topic, "partitions": partitions}],
        )
        first, second = answer.responses[0].partitions
        assert base_offsets(first.records) == [0]
        assert (second.error_code, second.records) == (error_codes.NONE, b""), "of the whole answer, that is"


def test_fetch_sessions_are_not_offered(leader: BrokerProcess, topic: str) -> None:
    with leader.client() as client:
        send_fetch(client, topic, session_id=5, session_epoch=1)
        answer = client.receive()
        assert (answer.error_code, answer.session_id) == (error_codes.FETCH_SESSION_ID_NOT_FOUND, 0)
        send_fetch(client, topic, session_epoch=0, max_wait_ms=0)
        assert client.receive().session_id == 0


# ListOffsets


@pytest.mark.parametrize("version", range(1, 10))
def test_offsets_are_found_by_position_and_time(leader: BrokerProcess, topic: str, version: int) -> None:
    with leader.client() as client:
        for step in range(1, 5):
            client.produce(topic, 0, build_batch([b"a", b"b"], timestamp=step * 1000))

        def offset(timestamp: int) -> tuple[int, int]:
            asked = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": timestamp}]}]
            answer = client.request(api_keys.LIST_OFFSETS, version, replica_id=-1, topics=asked)
            found = answer.topics[0].partitions[0]
            assert found.error_code == 0
            return found.offset, found.timestamp

        assert offset(-1) == (8, -1)
        assert offset(-2) == (0, -1)
        assert offset(2001) == (2, 2000)
        assert offset(2002) == (4, 3000)
        assert offset(9999) == (-1, -1)
        if version >= 7:
            assert offset(-3) == (7, 4001)


# Producer ids and coordinators


@pytest.mark.parametrize("version", range(6))
def test_producer_ids_are_given_out_once(cluster: Cluster, version: int) -> None:
    given = []
    for broker in cluster.brokers:
        with broker.client() as client:
            for _ in range(3):
                answer = client.request(api_keys.INIT_PRODUCER_ID, version, transactional_id=None)
                assert (answer.error_code, answer.producer_epoch) == (0, 0)
                given.append(answer.producer_id)
    assert len(set(given)) == len(given)


@pytest.mark.parametrize("version", range(1, 7))
@pytest.mark.parametrize(
    ("key_type", "error_code", "reason"),
    [
        (1, error_codes.CLUSTER_AUTHORIZATION_FAILED, "transactions are not offered"),
        (9, error_codes.INVALID_REQUEST, "no coordinator type 9"),
    ],
)
def test_missing_coordinator_is_explained(
    cluster: Cluster, version: int, key_type: int, error_code: int, reason: str
) -> None:
    fields: dict[str, Any] = {"coordinator_keys": ["k"]} if version >= 4 else {"key": "k"}
    with cluster.brokers[0].client() as client:
        answer = client.request(api_keys.FIND_COORDINATOR, version, key_type=key_type, **fields)
    found = answer.coordinators[0] if version >= 4 else answer
    assert found.error_code == error_code
    assert reason in found.error_message


def test_transactional_ids_are_refused(cluster: Cluster) -> None:
    with cluster.brokers[0].client() as client:
        answer = client.request(api_keys.INIT_PRODUCER_ID, 4, transactional_id="t", transaction_timeout_ms=1000)
    assert (answer.error_code, answer.producer_id) == (error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, -1)


# The connection itself


@pytest.mark.parametrize("version", range(5))
def test_api_versions_are_listed(cluster: Cluster, version: int) -> None:
    fields = {"client_software_name": "t", "client_software_version": "1"} if version >= 3 else {}
    with cluster.brokers[0].client() as client:
        answer = client.request(api_keys.API_VERSIONS, version, **fields)
    offered = {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}
    assert answer.error_code == 0
    assert offered[api_keys.PRODUCE] == (0, 13), "from 0, or librdkafka drops compression"
    assert offered[api_keys.FETCH] == (4, 18)
    assert api_keys.FIND_COORDINATOR in offered
    assert api_keys.INIT_PRODUCER_ID in offered


def test_newer_api_versions_gets_version_0_and_continues(cluster: Cluster) -> None:
    with cluster.brokers[0].client() as client:
        client.send_bytes(b"\x00\x12\x00\x63\x00\x00\x00\x07\x00\x01x\x00whatever comes in version 99")
        frame = client.receive_frame()
        assert frame[:6] == b"\x00\x00\x00\x07\x00\x23"
        assert client.request(api_keys.API_VERSIONS, 0).error_code == 0


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\x7f\xff\xff\xff" + b"x" * 100, id="2 GiB announced"),
        pytest.param(b"\xff\xff\xff\xff", id="negative length"),
        pytest.param(b"SMTP / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(b"\x00\x00\x00\x0a\x00\x4d\x00\x00\x00\x00\x00\x01\xff\xff", id="an API not offered"),
        pytest.param(b"\x00\x00\x00\x0a\x00\x03\x00\x63\x00\x00\x00\x01\xff\xff", id="a version not offered"),
        pytest.param(b"\x00\x00\x00\x0a\x00\x00\x00\x09\x00\x00\x00\x01\xff\xff", id="a produce that ends early"),
        pytest.param(b"\x00\x00\x00\x03abc", id="shorter than a header"),
    ],
)
def test_garbage_closes_only_its_connection_with_one_line(
    cluster: Cluster, leader: BrokerProcess, topic: str, garbage: bytes
) -> None:
    with leader.client() as bystander, leader.client() as client:
        lines = leader.log().count("connection closed")
        client.send_raw(garbage)
        assert client.is_closed()
        assert leader.log().count("connection closed") == lines + 1
        assert bystander.produce(topic, 0, build_batch()).error_code == 0


def test_control_request_over_a_mebibyte_is_refused(leader: BrokerProcess) -> None:
    with leader.client() as client:
        client.send_bytes(b"\x00\x03\x00\x01\x00\x00\x00\x01\xff\xff" + b"\x00" * (1 << 20))
        assert client.is_closed()


def test_client_that_reads_nothing_costs_little(leader: BrokerProcess, topic: str) -> None:
    """The broker holds answers up to its high-water mark plus one; other clients are served."""
    with leader.client() as producer:
        for _ in range(8):
            producer.produce(topic, 0, build_batch([os.urandom(1_000_000)]))
        before = resident_bytes(leader)
        slow_client = leader.client()
        for _ in range(100):
            send_fetch(slow_client, topic, max_bytes=8 << 20)
        time.sleep(0.5)
        assert producer.produce(topic, 0, build_batch()).error_code == 0
        assert resident_bytes(leader) - before < 100 << 20, "a hundred answers of 8 MB were buffered"
        slow_client.close()


def resident_bytes(broker: BrokerProcess) -> int:
    resident: int = psutil.Process(broker.process.pid).memory_info().rss
    return resident


def test_client_leaving_during_a_wait_is_forgotten(leader: BrokerProcess, topic: str) -> None:
    for _ in range(5):
        client = leader.client()
        send_fetch(client, topic, max_wait_ms=60_000)
        client.close()
    with leader.client() as client:
        assert client.produce(topic, 0, build_batch()).base_offset == 0
        assert "Traceback" not in leader.log()
