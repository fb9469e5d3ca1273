"""Define what an API handler gets: the broker's parts, the request, and the ways to answer it or to close."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kproxy.broker.cluster import ClusterView
from kproxy.broker.config import BrokerConfig
from kproxy.broker.fence_keeper import FenceKeeper
from kproxy.broker.groups.coordinator import GroupCoordinator
from kproxy.broker.keys import PartitionKey
from kproxy.broker.partition import Partition
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.topics import TopicAdmin
from kproxy.etcd import IdBlocks
from kproxy_codec import control, error_codes
from kproxy_codec.framing import RequestHeader
from kproxy_codec.partitioned import PartitionedRequest, TopicSpan
from kproxy_codec.primitives import Buffer

# How long a client's request waits for a broker to take a partition, for etcd to keep a fence, and for the leaders of a
# new topic.
TAKE_TIMEOUT_S = 3.0
FENCE_TIMEOUT_S = 5.0
LEADERS_TIMEOUT_S = 3.0


class CloseConnection(Exception):
    """Close the request's connection; the message gives the reason.

    `answer` is sent first, if the protocol has one. Only exceptions raised before the handler's first wait may have an
    answer.
    """

    def __init__(self, reason: str, answer: Body | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


Bindings = dict[tuple[bytes, int], int]
"""A connection's fences: (topic, partition index) -> the fence of its writes there (`writer_fence`)."""


class Request(NamedTuple):
    """One request. `frame` includes the length prefix; `bindings` are its connection's."""

    frame: memoryview
    header: RequestHeader
    bindings: Bindings

    @property
    def body(self) -> memoryview:
        return self.frame[self.header.body_offset :]

    def message(self) -> control.Message:
        """Decode the body of a small request; a field that its version lacks has its default. Raises CodecError."""
        return control.decode_request(self.header.api_key, self.header.api_version, self.body)

    def answer(self, **fields: Any) -> Body:
        """Encode an answer in the version of the request, without the fields that this version lacks.

        A structure that the version lacks raises InvalidField.
        """
        response = control.build_response(self.header.api_key, self.header.api_version, **fields)
        return [control.encode_response(response)]


Body = Sequence[Buffer]
"""The parts of a response body, in order."""

Answer = Body | Awaitable[Body | None] | None
"""An answer, at once or later; None if the request has none (acks=0)."""

Handler = Callable[["Broker", Request], Answer]
"""Serves one API. Raises CodecError, CloseConnection."""


@dataclass
class Broker:
    """The parts of the broker."""

    config: BrokerConfig
    cluster_id: str
    view: ClusterView
    replica_manager: ReplicaManager
    topics: TopicAdmin
    producer_ids: IdBlocks
    fences: FenceKeeper
    groups: GroupCoordinator

    def refusal_in(self, request: PartitionedRequest, topic: TopicSpan, partition_index: int) -> int:
        """Like `refusal`, for a topic that the request may name by an unknown id."""
        if request.is_nameless(topic):
            return error_codes.UNKNOWN_TOPIC_ID
        return self.refusal(topic.name.decode(errors="replace"), partition_index)

    def refusal(self, topic: str, partition_index: int) -> int:
        """Return the error code for a partition that this broker does not lead."""
        found = self.view.topics.get(topic)
        if found is None or not 0 <= partition_index < len(found.replicas):
            return error_codes.UNKNOWN_TOPIC_OR_PARTITION
        return error_codes.NOT_LEADER_OR_FOLLOWER

    def check_knows_cluster(self) -> None:
        """Raise CloseConnection while this broker has no lease.

        Its view of topics and brokers may be outdated. For APIs without an error that redirects clients; Metadata has a
        better answer (`apis.describe`).
        """
        if not self.replica_manager.holds_lease:
            raise CloseConnection("this broker has no lease: ask another broker about the cluster")

    def current_leader(self, topic: str, partition_index: int) -> tuple[int, int]:
        """Return (leader_id, leader_epoch), each -1 if it is not known here."""
        found = self.view.topics.get(topic)
        state = self.view.state(found, partition_index) if found is not None else None
        return self.view.owner(topic, partition_index), state.leader_epoch if state is not None else -1

    def led(self, topic: bytes, partition_index: int) -> Partition | None:
        """Return the partition if this broker leads it now."""
        return self.replica_manager.led(topic, partition_index)

    def name_topics(self, request: PartitionedRequest) -> None:
        """Fill in the names of topics that are named by id (KIP-516).

        An unknown id stays; no topic has such a name. Repeat this after a wait: another topic may have the name by
        then.
        """
        for topic in request.topics if request.by_id else ():
            found = self.view.topic_by_id(topic.wire)
            topic.name = found.name.encode() if found is not None else topic.wire

    def take_then(self, wanted: Iterable[tuple[bytes, Sequence[int]]], serve: Callable[[], Answer]) -> Answer:
        """Serve a request, after taking those of its partitions that this broker does not lead but might take."""
        partitions = self.replica_manager.partitions
        takeable = [
            PartitionKey(topic.decode(errors="replace"), index)
            for topic, indexes in wanted
            for index in indexes
            if (topic, index) not in partitions and self.replica_manager.may_take(topic.decode(errors="replace"), index)
        ]
        return self._take_and_serve(takeable, serve) if takeable else serve()

    async def _take_and_serve(self, takeable: Sequence[PartitionKey], serve: Callable[[], Answer]) -> Body | None:
        await self.replica_manager.take(takeable, TAKE_TIMEOUT_S)
        result = serve()
        return await result if isinstance(result, Awaitable) else result
