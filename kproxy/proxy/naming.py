"""Answers that name brokers, made to name proxies alone.

One view of the cluster in every answer: the brokers are the proxies of the fleet, and each partition is led by one of
them, which is its only replica as well; leader epochs are always -1, so that no client compares one of ours with one of
a broker's (KIP-320); racks are left out. The cluster's id, topics, partitions, ids, configurations and error codes stay
as the broker says: all proxies of one upstream tell the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codec import api_keys as keys
from codec.control import Message, build_response, decode_request
from codec.error_codes import LEADER_NOT_AVAILABLE, NONE, NOT_LEADER_OR_FOLLOWER, REPLICA_NOT_AVAILABLE
from codec.primitives import Buffer
from kproxy.proxy.coordinators import BATCHED_FROM, key_type_of
from kproxy.routing.fleet import Fleet, Proxy

_NO_EPOCH = -1
# With one of these a broker says that its own view of leaders is not ready; whom the proxy routes to is its own affair.
_ABOUT_LEADERS = frozenset({LEADER_NOT_AVAILABLE, REPLICA_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER})
# These are answered with the list of brokers and the controller.
_LISTS_BROKERS = frozenset({keys.METADATA, keys.DESCRIBE_CLUSTER})
_NAMES_LEADERS = frozenset({keys.METADATA, keys.DESCRIBE_TOPIC_PARTITIONS})


Leaders = Callable[[bytes, list[int]], Sequence[Proxy]]
"""Who is said to lead these partitions of a topic."""


def rename(api_key: int, answer: Message, fleet: Fleet, leaders: Leaders | None = None) -> None:
    """Replace every broker in a decoded answer by a proxy, in place; `leaders` where they are not the fleet's."""
    if api_key in _LISTS_BROKERS:
        _list_brokers(api_key, answer, fleet)
    if api_key in _NAMES_LEADERS:
        for topic in answer.topics:
            _lead(topic, leaders or fleet.leaders)
    if api_key == keys.DESCRIBE_TOPIC_PARTITIONS:
        for topic in answer.topics:
            for partition in topic.partitions:
                # Empty, not null: kafka-clients 3.9 reads them without asking.
                partition.eligible_leader_replicas = []
                partition.last_known_elr = []


def _list_brokers(api_key: int, answer: Message, fleet: Fleet) -> None:
    id_field = "broker_id" if api_key == keys.DESCRIBE_CLUSTER else "node_id"
    brokers = [{id_field: proxy.node_id, "host": proxy.host, "port": proxy.port} for proxy in fleet.proxies]
    answer.brokers = build_response(api_key, answer.version, brokers=brokers).brokers
    answer.controller_id = fleet.controller.node_id


def _lead(topic: Message, leaders: Leaders) -> None:
    name = (topic.name or "").encode("utf-8", "surrogatepass")
    named = leaders(name, [each.partition_index for each in topic.partitions])
    for partition, leader in zip(topic.partitions, named, strict=True):
        if partition.error_code in _ABOUT_LEADERS:
            partition.error_code = NONE
        partition.leader_id = leader.node_id
        partition.leader_epoch = _NO_EPOCH
        partition.replica_nodes = [leader.node_id]
        partition.isr_nodes = [leader.node_id]
        partition.offline_replicas = []


def rename_coordinators(asked: Message, answer: Message, fleet: Fleet) -> None:
    """The same for a decoded answer to the FindCoordinator request `asked`."""
    batched = answer.version >= BATCHED_FROM
    for found in answer.coordinators if batched else [answer]:
        if found.error_code == NONE:
            proxy = fleet.coordinator(key_type_of(asked), found.key if batched else asked.key)
            found.node_id, found.host, found.port = proxy


def metadata_without_brokers(api_version: int, body: Buffer, fleet: Fleet) -> Message:
    """What is said to a Metadata request while no broker can be asked: the proxies are here, the topics are not yet.

    LEADER_NOT_AVAILABLE makes clients ask again. Raises CodecError.
    """
    request = decode_request(keys.METADATA, api_version, body)
    topics = [
        {"error_code": LEADER_NOT_AVAILABLE, "name": topic.name, "topic_id": topic.topic_id, "partitions": []}
        for topic in request.topics or []
    ]
    answer = build_response(keys.METADATA, api_version, topics=topics, cluster_id=None)
    rename(keys.METADATA, answer, fleet)
    return answer
