"""Answers that name brokers, made to name the proxy alone.

One view of the cluster in every answer: the proxy is every partition's leader, its only replica and the controller;
leader epochs are always -1, so that no client compares one of ours with one of a broker's (KIP-320); racks are left
out. Topics, partitions, ids, configurations and error codes stay as the broker says.
"""

from __future__ import annotations

from collections.abc import Callable

from codec import api_keys as keys
from codec.control import Message, build_response, decode_request
from codec.error_codes import LEADER_NOT_AVAILABLE, NONE, NOT_LEADER_OR_FOLLOWER, REPLICA_NOT_AVAILABLE
from codec.primitives import Buffer
from kproxy.proxy.context import Identity

_NO_EPOCH = -1
# With one of these a broker says that its own view of leaders is not ready; whom the proxy routes to is its own affair.
_ABOUT_LEADERS = frozenset({LEADER_NOT_AVAILABLE, REPLICA_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER})


def _brokers(api_key: int, api_version: int, identity: Identity) -> list[Message]:
    """The list of brokers that an answer of this kind carries: the proxy alone."""
    if api_key == keys.DESCRIBE_CLUSTER:
        broker = {"broker_id": identity.node_id, "host": identity.host, "port": identity.port}
    else:
        broker = {"node_id": identity.node_id, "host": identity.host, "port": identity.port}
    brokers: list[Message] = build_response(api_key, api_version, brokers=[broker]).brokers
    return brokers


def _lead(partition: Message, identity: Identity) -> None:
    if partition.error_code in _ABOUT_LEADERS:
        partition.error_code = NONE
    partition.leader_id = identity.node_id
    partition.leader_epoch = _NO_EPOCH
    partition.replica_nodes = [identity.node_id]
    partition.isr_nodes = [identity.node_id]
    partition.offline_replicas = []


def _metadata(answer: Message, identity: Identity) -> None:
    answer.brokers = _brokers(keys.METADATA, answer.version, identity)
    answer.controller_id = identity.node_id
    for topic in answer.topics:
        for partition in topic.partitions:
            _lead(partition, identity)


def _describe_cluster(answer: Message, identity: Identity) -> None:
    answer.brokers = _brokers(keys.DESCRIBE_CLUSTER, answer.version, identity)
    answer.controller_id = identity.node_id


def _describe_topic_partitions(answer: Message, identity: Identity) -> None:
    for topic in answer.topics:
        for partition in topic.partitions:
            _lead(partition, identity)
            # Empty, not null: kafka-clients 3.9 reads them without asking.
            partition.eligible_leader_replicas = []
            partition.last_known_elr = []


def _find_coordinator(answer: Message, identity: Identity) -> None:
    found = answer.coordinators if answer.version >= _COORDINATORS_FROM else [answer]
    for coordinator in found:
        if coordinator.error_code == NONE:
            coordinator.node_id = identity.node_id
            coordinator.host = identity.host
            coordinator.port = identity.port


# From this version FindCoordinator answers for several keys at once (KIP-699).
_COORDINATORS_FROM = 4
_RENAMERS: dict[int, Callable[[Message, Identity], None]] = {
    keys.METADATA: _metadata,
    keys.DESCRIBE_CLUSTER: _describe_cluster,
    keys.DESCRIBE_TOPIC_PARTITIONS: _describe_topic_partitions,
    keys.FIND_COORDINATOR: _find_coordinator,
}


def rename(api_key: int, answer: Message, identity: Identity) -> None:
    """Replace every broker in a decoded answer by the proxy, in place."""
    _RENAMERS[api_key](answer, identity)


def metadata_without_brokers(api_version: int, body: Buffer, identity: Identity) -> Message:
    """What is said to a Metadata request while no broker can be asked: the proxy is here, the topics are not yet.

    LEADER_NOT_AVAILABLE makes clients ask again. Raises CodecError.
    """
    request = decode_request(keys.METADATA, api_version, body)
    topics = [
        {"error_code": LEADER_NOT_AVAILABLE, "name": topic.name, "topic_id": topic.topic_id, "partitions": []}
        for topic in request.topics or []
    ]
    answer = build_response(keys.METADATA, api_version, topics=topics, cluster_id=None)
    _metadata(answer, identity)
    return answer
