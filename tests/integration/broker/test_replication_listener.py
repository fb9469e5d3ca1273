"""The listener for the other brokers: admission, allowed requests, and strangers that disturb no others.

The brokers are real. Strangers at one of them must not affect the topic that it replicates.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

from kproxy.broker.keys import ReplicaKey
from kproxy.broker.replication import listener
from kproxy.broker.replication.authentication import MECHANISM, FollowerHandshake, Secret
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import error_codes
from kproxy_codec.api_keys import API_VERSIONS, CREATE_TOPICS, FETCH, METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.fetch import PartitionFetch
from kproxy_codec.framing import request_header
from kproxy_codec.partitioned import MAX_PARTITIONS
from tests.support.brokers.follower_client import NO_DIRECTORY, FollowerClient, Replication, replication_of
from tests.support.brokers.reference_broker import BrokerProcess, Cluster, RawClient
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

C = TypeVar("C", FollowerClient, RawClient)
TOPIC = "replicated"
# An id that no broker here has.
STRANGER = 9
ANOTHER = Secret.of("another cluster's secret, as long as this one's")


class Leader:
    """The broker that leads the topic's one partition, which all three brokers keep."""

    def __init__(self, broker: BrokerProcess, replication: Replication, topic_id: uuid.UUID) -> None:
        self.broker = broker
        self.replication = replication
        self.topic_id = topic_id

    def replicates(self) -> int:
        """Check that a record still reaches every in-sync replica; return its offset."""
        with self.broker.client() as client:
            produced = client.produce(TOPIC, 0, build_batch([b"v"]), acks=-1)
        assert produced.error_code == error_codes.NONE
        return int(produced.base_offset)

    def closings(self) -> list[str]:
        return [line for line in self.broker.log().splitlines() if "connection closed" in line]

    @contextmanager
    def closes(self, client: C) -> Iterator[tuple[C, list[str]]]:
        """A connection that the broker closes; after the block, the list has the one line that says why."""
        before, lines = len(self.closings()), list[str]()
        with client:
            yield client, lines
            assert client.is_closed()
        lines += self.closings()[before:]
        assert len(lines) == 1
        self.replicates()

    def asking(self, **changes: int) -> list[tuple[uuid.UUID, list[PartitionFetch]]]:
        asked = PartitionFetch(0, 0, 0, -1, 0, 1 << 20)._replace(**changes)
        return [(self.topic_id, [asked])]


@pytest.fixture(scope="module")
def leader(cluster: Cluster, etcd: EmbeddedEtcd) -> Iterator[Leader]:
    with cluster.brokers[0].client() as client:
        topic = {"name": TOPIC, "num_partitions": 1, "replication_factor": 3, "assignments": [], "configs": []}
        created = client.request(CREATE_TOPICS, 7, topics=[topic], timeout_ms=5000, validate_only=False).topics[0]
        assert created.error_code == error_codes.NONE
    broker = cluster.leader(TOPIC)
    found = Leader(broker, replication_of(etcd.endpoint, f"/cluster-{os.getpid()}", broker.node_id), created.topic_id)
    wait_for(lambda: set(_isr(broker)) == {1, 2, 3}, what="all in sync")
    yield found
    found.replicates()
    assert set(_isr(broker)) == {1, 2, 3}


def _isr(broker: BrokerProcess) -> list[int]:
    with broker.client() as client:
        return list(client.metadata(TOPIC).topics[0].partitions[0].isr_nodes)


# Admission


@pytest.mark.parametrize("version", [0, 1, 2])
def test_peer_with_the_secret_may_fetch(leader: Leader, version: int) -> None:
    with leader.replication.client().authenticate(STRANGER, leader.replication.secret, version) as client:
        answer = client.fetch(STRANGER, leader.asking())
    # It has proved to be a broker, but that broker keeps no replica of this partition.
    assert answer.error_code == error_codes.NONE
    assert [each.error_code for each in answer.topics[0][1]] == [error_codes.REPLICA_NOT_AVAILABLE]


def test_replication_listener_offers_what_followers_need(leader: Leader) -> None:
    with leader.replication.client() as client:
        offered = {
            each.api_key: (each.min_version, each.max_version) for each in client.request(API_VERSIONS, 3).api_keys
        }
    assert offered == {FETCH: (13, 13), SASL_HANDSHAKE: (1, 1), API_VERSIONS: (0, 4), SASL_AUTHENTICATE: (0, 2)}


def _send(api_key: int, version: int, **fields: Any) -> Callable[[FollowerClient, Leader], None]:
    return lambda client, _: client.send(api_key, version, **fields)


def _send_produce(client: FollowerClient, _: Leader) -> None:
    client.send_produce(TOPIC, 0, build_batch([b"v"]))


def _replay(client: FollowerClient, leader: Leader) -> None:
    client.authenticate(STRANGER, leader.replication.secret)
    client.send(SASL_HANDSHAKE, 1, mechanism=MECHANISM)


def _authenticate_twice(client: FollowerClient, leader: Leader) -> None:
    client.authenticate(STRANGER, leader.replication.secret)
    client.send(SASL_AUTHENTICATE, 2, auth_bytes=b"n,,n=9,r=abc")


def _produce_as_a_broker(client: FollowerClient, leader: Leader) -> None:
    _send_produce(client.authenticate(STRANGER, leader.replication.secret), leader)


def _fetch_for_another(client: FollowerClient, leader: Leader) -> None:
    """Fetch with an id whose progress would count."""
    client.authenticate(STRANGER, leader.replication.secret)
    client.send_fetch(2, leader.asking(fetch_offset=10**6))


def _fetch_as_a_consumer(client: FollowerClient, leader: Leader) -> None:
    client.authenticate(STRANGER, leader.replication.secret)
    client.send_fetch(-1, leader.asking())


def _large_frame(client: FollowerClient, _: Leader) -> None:
    client.send_raw(struct.pack(">i", listener.UNAUTHENTICATED_FRAME_BYTES + 1))


def _larger_frame(client: FollowerClient, leader: Leader) -> None:
    client.authenticate(STRANGER, leader.replication.secret)
    client.send_raw(struct.pack(">i", listener.FRAME_BYTES + 1))


def _cut_short(client: FollowerClient, leader: Leader) -> None:
    client.authenticate(STRANGER, leader.replication.secret)
    client.send_bytes(request_header(FETCH, 13, 1, b"raw") + bytes(20))


# The messages, and their log lines. The connection is closed without an answer.
REFUSED: dict[str, tuple[Callable[[FollowerClient, Leader], None], str]] = {
    "a fetch": (lambda client, leader: client.send_fetch(2, leader.asking()), "unauthenticated"),
    "a fetch of no partition": (lambda client, _: client.send_fetch(2, []), "unauthenticated"),
    "a consumer's fetch": (_send(FETCH, 12, topics=[], max_wait_ms=0, min_bytes=0), "FETCH v12"),
    "a produce": (_send_produce, "PRODUCE v9"),
    "metadata": (_send(METADATA, 12, topics=None), "METADATA v12"),
    "a handshake without framing": (_send(SASL_HANDSHAKE, 0, mechanism=MECHANISM), "SASL_HANDSHAKE v0"),
    "a proof before a handshake": (_send(SASL_AUTHENTICATE, 2, auth_bytes=b"n,,n=9,r=abc"), "no handshake is"),
    "a handshake afterwards": (_replay, "SASL_HANDSHAKE twice"),
    "a proof afterwards": (_authenticate_twice, "no handshake is"),
    "a produce by a broker": (_produce_as_a_broker, "PRODUCE v9"),
    "a fetch for another": (_fetch_for_another, "broker 9 sent Fetch with replica_id 2"),
    "a fetch as a consumer": (_fetch_as_a_consumer, "broker 9 sent Fetch with replica_id -1"),
    "a frame over 64 KiB from a stranger": (_large_frame, "65537 bytes"),
    "a frame over 1 MiB from a broker": (_larger_frame, "1048577 bytes"),
    "a fetch cut short": (_cut_short, "shorter than its fixed part"),
    "a length below zero": (lambda client, _: client.send_raw(b"\xff" * 4), "negative length"),
    "noise": (lambda client, _: client.send_bytes(bytes(range(256))), "client_id"),
    "another protocol": (lambda client, _: client.send_raw(b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n"), "bytes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_requests_close_the_connection(leader: Leader, case: str) -> None:
    say, reason = REFUSED[case]
    with leader.closes(leader.replication.client()) as (client, lines):
        say(client, leader)
    assert reason in lines[0]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512", "GSSAPI", "", "x" * 30_000])
def test_unknown_mechanism_has_kafkas_answer(leader: Leader, mechanism: str) -> None:
    with leader.closes(leader.replication.client()) as (client, lines):
        answer = client.shake_hands(mechanism)
        assert (answer.error_code, answer.mechanisms) == (error_codes.UNSUPPORTED_SASL_MECHANISM, [MECHANISM])
    assert len(lines[0]) < 400


@pytest.mark.parametrize(
    ("name", "secret"), [(2, ANOTHER), (STRANGER, ANOTHER), (-1, None)], ids=["broker", "nobody", "no id"]
)
def test_peer_without_the_secret_learns_only_that(leader: Leader, name: int, secret: Secret | None) -> None:
    with leader.closes(leader.replication.client()) as (client, lines):
        client.shake_hands()
        handshake = FollowerHandshake(ReplicaKey(name, NO_DIRECTORY), secret or leader.replication.secret)
        answer = client.prove(handshake.first())
        if secret is not None:
            answer = client.prove(handshake.final(answer.auth_bytes))
        assert answer.error_code == error_codes.SASL_AUTHENTICATION_FAILED
        assert (answer.error_message, answer.auth_bytes) == ("authentication failed", b"")
    assert "authentication failed" in lines[0]


def test_requests_after_a_failed_proof_are_ignored(leader: Leader) -> None:
    """All in one packet, so that it arrives before the connection is closed."""
    with leader.replication.client() as client:
        client.shake_hands()
        handshake = FollowerHandshake(ReplicaKey(2, NO_DIRECTORY), ANOTHER)
        final = handshake.final(client.prove(handshake.first()).auth_bytes)
        client.send(SASL_AUTHENTICATE, 2, auth_bytes=final)
        client.send_fetch(2, leader.asking(fetch_offset=10**6))
        assert client.receive().error_code == error_codes.SASL_AUTHENTICATION_FAILED
        assert client.is_closed()
    leader.replicates()


def test_strangers_do_not_keep_brokers_out(leader: Leader) -> None:
    with ExitStack() as stack:
        strangers = [stack.enter_context(leader.replication.client()) for _ in range(listener.MAX_UNAUTHENTICATED + 5)]
        # The oldest connections must go.
        assert all(stranger.is_closed() for stranger in strangers[:5])
        with leader.replication.follower(STRANGER) as client:
            assert client.fetch(STRANGER, leader.asking()).error_code == error_codes.NONE
        assert strangers[-1].request(API_VERSIONS, 0).error_code == error_codes.NONE
        leader.replicates()


def test_earlier_data_directory_is_refused(leader: Leader, cluster: Cluster) -> None:
    """Otherwise it would end the connection of the current broker with that id."""
    follower = next(broker for broker in cluster.brokers if broker is not leader.broker)
    authenticated = leader.broker.log().count("follower authenticated")
    with leader.closes(leader.replication.client()) as (client, lines):
        client.shake_hands()
        handshake = FollowerHandshake(ReplicaKey(follower.node_id, NO_DIRECTORY), leader.replication.secret)
        answer = client.prove(handshake.final(client.prove(handshake.first()).auth_bytes))
        assert (answer.error_code, answer.auth_bytes) == (error_codes.SASL_AUTHENTICATION_FAILED, b"")
    assert f"broker {follower.node_id} runs with the data directory" in lines[0]
    assert str(NO_DIRECTORY) in lines[0]
    assert leader.broker.log().count("follower authenticated") == authenticated, "its own connection has ended"


def test_broker_has_one_connection(leader: Leader) -> None:
    """A restarted follower does not wait for the end of its old connection."""
    with leader.replication.follower(STRANGER) as first, leader.replication.follower(STRANGER) as second:
        assert first.is_closed()
        assert second.fetch(STRANGER, leader.asking()).error_code == error_codes.NONE


# Requests that clients may not send here


@pytest.mark.parametrize("version", range(4, 19))
def test_client_does_not_fetch_as_a_follower(leader: Leader, version: int) -> None:
    """It would move the high watermark past the followers' logs."""
    with leader.closes(leader.broker.client()) as (client, lines):
        partition = {"partition": 0, "fetch_offset": 10**6, "partition_max_bytes": 1000}
        topics = [{"topic": TOPIC, "partitions": [partition]}] if version < 13 else []
        replica = {"replica_id": 2} if version < 15 else {"replica_state": {"replica_id": 2, "replica_epoch": -1}}
        client.send(FETCH, version, **replica, max_wait_ms=0, min_bytes=1, max_bytes=1000, topics=topics)
    assert "replica_id 2" in lines[0]


def test_replication_apis_are_not_offered_to_clients(leader: Leader) -> None:
    with leader.broker.client() as client:
        offered = {each.api_key: each.max_version for each in client.request(API_VERSIONS, 3).api_keys}
        assert offered[FETCH] == 18
        assert not offered.keys() & {SASL_HANDSHAKE, SASL_AUTHENTICATE}
    with leader.broker.client() as client:
        refused = client.request(SASL_HANDSHAKE, 1, mechanism=MECHANISM)
        assert (refused.error_code, refused.mechanisms) == (error_codes.UNSUPPORTED_SASL_MECHANISM, [])
        assert client.is_closed()


# Answers to followers


@pytest.fixture
def follower(leader: Leader) -> Iterator[FollowerClient]:
    with leader.replication.follower(STRANGER) as client:
        yield client


@pytest.mark.parametrize(
    ("changes", "error_code"),
    [
        ({"partition_index": 1}, error_codes.UNKNOWN_TOPIC_OR_PARTITION),
        ({"partition_index": -1}, error_codes.UNKNOWN_TOPIC_OR_PARTITION),
        ({"current_leader_epoch": 7}, error_codes.UNKNOWN_LEADER_EPOCH),
        ({"current_leader_epoch": -1}, error_codes.REPLICA_NOT_AVAILABLE),
        ({}, error_codes.REPLICA_NOT_AVAILABLE),
    ],
)
def test_follower_learns_the_reason_for_an_error(
    leader: Leader, follower: FollowerClient, changes: dict[str, int], error_code: int
) -> None:
    """At once, however long its request would wait."""
    ((topic, (fetched,)),) = follower.fetch(STRANGER, leader.asking(**changes), max_wait_ms=60_000).topics
    assert topic == leader.topic_id.bytes
    assert (fetched.error_code, fetched.records) == (error_code, b"")


def test_follower_may_fetch_maximum_number_of_partitions(leader: Leader, follower: FollowerClient) -> None:
    """The request is longer than a stranger's may be."""
    asked = [PartitionFetch(index, 0, 0, -1, 0, 1000) for index in range(MAX_PARTITIONS)]
    ((_, results),) = follower.fetch(STRANGER, [(leader.topic_id, asked)]).topics
    codes = [each.error_code for each in results]
    assert codes == [error_codes.REPLICA_NOT_AVAILABLE] + [error_codes.UNKNOWN_TOPIC_OR_PARTITION] * (
        MAX_PARTITIONS - 1
    )


def test_unknown_topic_gets_its_own_error(leader: Leader, follower: FollowerClient) -> None:
    unknown = uuid.uuid4()
    asked = [*leader.asking(), (unknown, [PartitionFetch(0, 0, 0, -1, 0, 1000)])]
    answer = follower.fetch(STRANGER, asked)
    assert [(topic, [each.error_code for each in results]) for topic, results in answer.topics] == [
        (leader.topic_id.bytes, [error_codes.REPLICA_NOT_AVAILABLE]),
        (unknown.bytes, [error_codes.UNKNOWN_TOPIC_ID]),
    ]
