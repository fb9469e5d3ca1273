"""Enforce the rules on control requests: refuse one, cut out the parts that its client may not have, or let it pass.

| request | needs | error codes of refused parts |
| --- | --- | --- |
| JoinGroup, SyncGroup, Heartbeat, LeaveGroup | read the group | 30 |
| OffsetCommit | read the group; read each topic | 30 everywhere; 29 for a topic |
| OffsetFetch | describe the group; describe each topic | 30; 29 for a topic; a topic that was not named is left out |
| FindCoordinator | describe the group or transactional id; for a share group: administer the cluster | 30, 53, 31 |
| InitProducerId, EndTxn | write the transactional id | 53; an idempotent producer without any topic to write: 31 |
| AddPartitionsToTxn | also write each topic | 53 everywhere; 29 for a topic, and 55 for all others |
| AddOffsetsToTxn | also read the group | 53, 30 |
| TxnOffsetCommit | also read the group; read each topic | 53, 30 everywhere; 29 for a topic |
| CreateTopics, CreatePartitions, DeleteTopics | create, alter, delete each topic | 29 for a topic |
| DescribeConfigs | describe the topic, or the cluster | 29, 31 for a resource |
| Metadata, DescribeTopicPartitions | describe each topic | 29 for a topic; one that was not named is left out |
| Own | own the group | 30 |

To create a topic a permission for the cluster is enough. A client without the right to create never creates a topic by
asking for its metadata. Brokers page through the topics of DescribeTopicPartitions, and say which one is next: they are
asked for those alone that the client may see. Everybody may ask for the cluster (DescribeCluster), as in Kafka: the
answer names proxies.

Messages are read by kproxy_codec.control: requests are at most 1 MiB with at most MAX_ELEMENTS elements, and only
authenticated clients send them. An element costs up to 20 µs, so all but short requests are read on another thread, and
of long ones one at a time in a process: the others' threads, which check passwords as well, stay free. A request is
encoded again only if a part of it is refused.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from kproxy.proxy.access import ERRORS, ClientAccess, text
from kproxy.routing.topology import Topology
from kproxy.security.acls import CLUSTER_NAME, Operation, Resource
from kproxy_codec import api_keys as keys
from kproxy_codec.cluster import Verdict, disallow_auto_creation
from kproxy_codec.control import (
    Message,
    build_request,
    build_response,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from kproxy_codec.coordination import BATCHED_FROM, GROUP, TRANSACTION, refuse_partitions
from kproxy_codec.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    INVALID_REQUEST,
    OPERATION_NOT_ATTEMPTED,
    TOPIC_AUTHORIZATION_FAILED,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import RequestHeader, frame_message
from kproxy_codec.primitives import Buffer
from kproxy_codec.walk import at_once

# A longer message is read on another thread.
_SHORT_BYTES: Final = 1 << 10
# Of longer ones a process reads one at a time.
_LONG_BYTES: Final = 16 << 10
_TOPIC: Final = 2
_OFFSET_FETCH_ERROR_FROM: Final = 2
_TOPIC_IDS_FROM: Final = 6
_NO_ID: Final = bytes(16)
# Key types of FindCoordinator.
_COORDINATED: Final = MappingProxyType({GROUP: Resource.GROUP, TRANSACTION: Resource.TRANSACTIONAL_ID})
_SHARE_GROUP_STATE: Final = 2
# Brokers tell of no more partitions at a time (max.request.partition.size.limit of Kafka).
_MOST_PARTITIONS_A_PAGE: Final = 2_000
# Kafka's own words, which clients show to their users. A batched FindCoordinator has none, nor has CreatePartitions.
_MESSAGES: Final[Mapping[int, str]] = {
    TOPIC_AUTHORIZATION_FAILED: "Topic authorization failed.",
    GROUP_AUTHORIZATION_FAILED: "Group authorization failed.",
    CLUSTER_AUTHORIZATION_FAILED: "Cluster authorization failed.",
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Transactional Id authorization failed.",
}
_NOT_CREATED: Final = "Authorization failed."

Amend: TypeAlias = Callable[[Message], None]
Result = TypeVar("Result")


class Filtered(NamedTuple):
    """The decision about a request.

    `answer`: the whole body of its answer, if it is refused. Otherwise `frame` is sent to the broker, and `amend` adds
    the results of the parts that were cut out to the answer. `verdict` decides about the topics of an answer that names
    brokers.
    """

    frame: memoryview
    answer: Buffer | None = None
    amend: Amend | None = None
    verdict: Verdict | None = None


class AclFilter:
    """Screens a request of a client. Call `end` once it is answered: a verdict may have refused something, too."""

    def __init__(self, access: ClientAccess, topology: Topology) -> None:
        self._turn = access.turn
        self._access = access.request()
        self._topology = topology
        # The topics that are known when the request is screened; threads do not read the topology's own.
        self._names: Sequence[bytes] = ()

    def end(self) -> None:
        """Tell of refusals since the request was screened."""
        self._access.end()

    async def screen(self, frame: memoryview, header: RequestHeader) -> Filtered:
        """Decide about a request. Raises CodecError."""
        size = len(frame)
        if header.api_key == keys.DESCRIBE_TOPIC_PARTITIONS:
            # A short one may be about all topics.
            self._names, size = self._topology.names, max(size, _SHORT_BYTES + 1)
        return await self._apart(size, lambda: self._screen(frame, header))

    async def _apart(self, size: int, read: Callable[[], Result]) -> Result:
        """Read a message of this many bytes where it keeps nothing else waiting. Raises what `read` raises."""
        if size <= _SHORT_BYTES:
            return read()
        if size <= _LONG_BYTES:
            return await asyncio.to_thread(read)
        async with self._turn:
            return await asyncio.to_thread(read)

    def _screen(self, frame: memoryview, header: RequestHeader) -> Filtered:
        key, version = header.api_key, header.api_version
        decide = DECISIONS.get(key)
        if decide is None:
            # Never a way around the rules: brokers would take it for the proxy's own request.
            raise CodecError(f"no rules of access are known for {keys.name_of(key)}, so that it is refused")
        request = decode_request(key, version, frame[header.body_offset :])
        # On the thread that decides: the connection may have ended meanwhile.
        with self._access:
            return decide(self, frame, header, request)

    async def amend(self, screened: Filtered, header: RequestHeader, body: Buffer) -> Buffer:
        """Return the answer's body with the results of the parts that were cut out. Raises CodecError."""
        amend = screened.amend
        if amend is None:
            return body
        return await self._apart(len(body), lambda: _amended(amend, header, body))

    # Groups and transactions

    def _group(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        if self._access.allows(Operation.READ, Resource.GROUP, request.group_id):
            return Filtered(frame)
        return _refused(frame, header, error_code=GROUP_AUTHORIZATION_FAILED)

    def _transaction(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        if not self._access.allows(Operation.WRITE, Resource.TRANSACTIONAL_ID, request.transactional_id):
            return _refused(frame, header, error_code=TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        if header.api_key == keys.ADD_OFFSETS_TO_TXN:
            return self._group(frame, header, request)
        return Filtered(frame)

    def _init_producer_id(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        name = request.transactional_id
        code = 0
        if name is not None:
            if not self._access.allows(Operation.WRITE, Resource.TRANSACTIONAL_ID, name):
                code = TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        elif not self._access.may_write_some_topic():
            code = CLUSTER_AUTHORIZATION_FAILED
        if code:
            return _refused(frame, header, error_code=code, producer_id=-1, producer_epoch=-1)
        return Filtered(frame)

    def _add_partitions(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        name = request.v3_and_below_transactional_id
        if not self._access.allows(Operation.WRITE, Resource.TRANSACTIONAL_ID, name):
            return _refused_everywhere(frame, header, TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        topics = request.v3_and_below_topics
        may_write = self._access.each(Operation.WRITE, Resource.TOPIC)
        denied = {each.name for each in topics if not may_write(each.name)}
        if not denied:
            return Filtered(frame)
        results = [
            {
                "name": each.name,
                "results_by_partition": [
                    {
                        "partition_index": index,
                        "partition_error_code": TOPIC_AUTHORIZATION_FAILED
                        if each.name in denied
                        else OPERATION_NOT_ATTEMPTED,
                    }
                    for index in each.partitions
                ],
            }
            for each in topics
        ]
        return _refused(frame, header, results_by_topic_v3_and_below=results)

    def _offsets(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        """OffsetCommit, TxnOffsetCommit and OffsetFetch."""
        key, access = header.api_key, self._access
        is_fetch = key == keys.OFFSET_FETCH
        operation = Operation.DESCRIBE if is_fetch else Operation.READ
        if key == keys.TXN_OFFSET_COMMIT and not access.allows(
            Operation.WRITE, Resource.TRANSACTIONAL_ID, request.transactional_id
        ):
            return _refused_everywhere(frame, header, TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        if not access.allows(operation, Resource.GROUP, request.group_id):
            if is_fetch and header.api_version >= _OFFSET_FETCH_ERROR_FROM:
                return _refused(frame, header, error_code=GROUP_AUTHORIZATION_FAILED)
            return _refused_everywhere(frame, header, GROUP_AUTHORIZATION_FAILED)
        if request.topics is None:
            return Filtered(frame, amend=self._hide_topics)

        def refused(topic: Any) -> dict[str, object]:
            indexes = topic.partition_indexes if is_fetch else [each.partition_index for each in topic.partitions]
            rest = {"committed_offset": -1, "metadata": ""} if is_fetch else {}
            partitions = [
                {"partition_index": each, "error_code": TOPIC_AUTHORIZATION_FAILED, **rest} for each in indexes
            ]
            return {"name": topic.name, "partitions": partitions}

        return self._cut(frame, header, request, operation, _Cut("topics", "topics", refused))

    def _hide_topics(self, answer: Message) -> None:
        answer.topics = [each for each in answer.topics if self._sees(each.name)]

    def _find_coordinator(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        key_type = getattr(request, "key_type", GROUP)
        kind = _COORDINATED.get(key_type)
        if kind is not None:
            code, is_allowed = ERRORS[kind], self._access.each(Operation.DESCRIBE, kind)
        elif key_type != _SHARE_GROUP_STATE:
            code, is_allowed = INVALID_REQUEST, lambda name: not self._access.is_enforced
        else:
            # Only brokers look for it, and create a topic for it: Kafka asks for ClusterAction.
            administers = self._access.each(Operation.ADMIN, Resource.CLUSTER)
            code, is_allowed = CLUSTER_AUTHORIZATION_FAILED, lambda name: administers(CLUSTER_NAME)
        error = {"error_code": code, "error_message": _MESSAGES.get(code), "node_id": -1, "host": "", "port": -1}
        if header.api_version < BATCHED_FROM:
            if is_allowed(request.key):
                return Filtered(frame)
            if header.api_version == 0:
                del error["error_message"]
            return _refused(frame, header, **error)
        kept: list[str] = []
        denied: list[str] = []
        for name in request.coordinator_keys:
            (kept if is_allowed(name) else denied).append(name)
        request.coordinator_keys = kept
        refused = [{"key": name, **error, "error_message": ""} for name in denied]
        return _rest(frame, header, request, "coordinators", refused, bool(request.coordinator_keys))

    # Topics

    def _topics(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        """CreateTopics, CreatePartitions and DeleteTopics up to version 5."""
        operation, answer, says = _TOPIC_CHANGES[header.api_key]
        error = {"error_code": TOPIC_AUTHORIZATION_FAILED, "error_message": says}
        if header.api_key == keys.DELETE_TOPICS:
            if header.api_version >= _TOPIC_IDS_FROM:
                return self._delete_by_id(frame, header, request)
            if header.api_version < 5:
                del error["error_message"]
            cut = _Cut("topic_names", answer, lambda name: {"name": name, **error})
        else:
            cut = _Cut("topics", answer, lambda topic: {"name": topic.name, **error})
        return self._cut(frame, header, request, operation, cut)

    def _delete_by_id(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        kept, refused = [], []
        may_delete = self._access.each(Operation.DELETE, Resource.TOPIC)
        for topic in request.topics:
            # kafka-python reads an id of zeros as None.
            topic_id = topic.topic_id or UUID(int=0)
            name = topic.name if topic.name is not None else self._name_of(topic_id.bytes)
            error = {"name": topic.name, "topic_id": topic_id, "error_message": None}
            if topic.name is not None and topic_id.int:
                # Brokers must not choose.
                refused.append({**error, "error_code": INVALID_REQUEST})
            elif name is None:
                refused.append({**error, "error_code": UNKNOWN_TOPIC_ID})
            elif may_delete(name):
                kept.append(topic)
            else:
                code = TOPIC_AUTHORIZATION_FAILED
                refused.append({**error, "error_code": code, "error_message": _MESSAGES[code]})
        request.topics = kept
        return _rest(frame, header, request, "responses", refused, bool(kept))

    def _name_of(self, topic_id: bytes) -> str | None:
        name = self._topology.name_of(topic_id)
        return None if name is None else text(name)

    def _describe_configs(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        kept, refused = [], []
        describes = self._access.each(Operation.DESCRIBE, Resource.TOPIC)
        describes_cluster = self._access.each(Operation.DESCRIBE, Resource.CLUSTER)
        for each in request.resources:
            if each.resource_type == _TOPIC:
                code, is_allowed = TOPIC_AUTHORIZATION_FAILED, describes(each.resource_name)
            else:
                code, is_allowed = CLUSTER_AUTHORIZATION_FAILED, describes_cluster(CLUSTER_NAME)
            if is_allowed:
                kept.append(each)
            else:
                named = {"resource_type": each.resource_type, "resource_name": each.resource_name, "configs": []}
                refused.append({"error_code": code, "error_message": _MESSAGES[code], **named})
        request.resources = kept
        return _rest(frame, header, request, "results", refused, bool(kept))

    def _cut(
        self, frame: memoryview, header: RequestHeader, request: Message, operation: Operation, cut: _Cut
    ) -> Filtered:
        """Cut out the topics that the client may not have."""
        kept, refused = [], []
        allows = self._access.each(operation, Resource.TOPIC)
        for topic in getattr(request, cut.asked):
            name = topic if isinstance(topic, str) else topic.name
            if (operation is Operation.CREATE and self._access.may_create(name)) or allows(name):
                kept.append(topic)
            else:
                refused.append(cut.refused(topic))
        setattr(request, cut.asked, kept)
        return _rest(frame, header, request, cut.answered, refused, bool(kept))

    def _sees(self, topic: str) -> bool:
        return self._access.permits(Operation.DESCRIBE, Resource.TOPIC, topic)

    # Metadata

    def _metadata(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        """Cut out the topics that the client may not see, whose place in an answer would tell whether they exist.

        And keep a client without the right to create a topic from creating it.
        """
        verdict = self._verdict(header, request)
        describes = self._access.each(Operation.DESCRIBE, Resource.TOPIC)
        asked = request.topics or ()
        named = [each.name for each in asked if each.name is not None and not _is_by_id(each)]
        denied = {name for name in named if not describes(name)}
        if getattr(request, "allow_auto_topic_creation", True):
            missing = [each.name for each in asked if each.name is not None and not self._access.may_create(each.name)]
            if missing and disallow_auto_creation(header.api_version, frame[header.body_offset :]):
                request.allow_auto_topic_creation = False
            else:
                # A version without that field: topics that are not known here, and that might be created, are cut out.
                denied.update(name for name in missing if not self._is_known(name))
        refused = [
            {"error_code": TOPIC_AUTHORIZATION_FAILED, "name": each.name}
            for each in asked
            if each.name in denied and not _is_by_id(each)
        ]
        request.topics = [each for each in asked if each.name not in denied or _is_by_id(each)]
        # In version 0 no topic would mean all of them; in later versions the answer names the brokers as well.
        is_any_left = bool(request.topics) or header.api_version > 0
        return _rest(frame, header, request, "topics", refused, is_any_left)._replace(verdict=verdict)

    def _topic_partitions(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        verdict = self._verdict(header, request)
        if not self._access.is_enforced:
            return Filtered(frame, verdict=verdict)
        cursor = request.cursor
        begins_at = cursor.topic_name if cursor is not None else ""
        if request.topics:
            if cursor is not None:
                names = {each.name for each in request.topics}
                if begins_at not in names:
                    invalid = {"error_code": INVALID_REQUEST, "partitions": []}
                    return _refused(frame, header, topics=[{"name": name, **invalid} for name in sorted(names)])
                request.topics = [each for each in request.topics if each.name >= begins_at]
                self._move_cursor(cursor, sorted(each.name for each in request.topics if self._sees(each.name)))
            error = {"error_code": TOPIC_AUTHORIZATION_FAILED, "partitions": []}
            cut = _Cut("topics", "topics", lambda topic: {"name": topic.name, **error})
            return self._cut(frame, header, request, Operation.DESCRIBE, cut)._replace(verdict=verdict)
        most = min(max(request.response_partition_limit, 1), _MOST_PARTITIONS_A_PAGE)
        first = bisect_left(self._names, begins_at.encode(errors="surrogatepass"))
        # Two more than fit: with one more the broker says where the next page begins, unless topics have gone.
        visible = list(islice(filter(self._sees, map(text, islice(self._names, first, None))), most + 2))
        if not visible:
            return _refused(frame, header, topics=[])
        self._move_cursor(cursor, visible)
        asked = [{"name": name} for name in visible[: most + 1]]
        request.topics = build_request(header.api_key, header.api_version, topics=asked).topics
        next_page = {"topic_name": visible[-1], "partition_index": 0}
        built = build_response(header.api_key, header.api_version, topics=[], next_cursor=next_page).next_cursor

        def amend(answer: Message) -> None:
            if answer.next_cursor is None:
                answer.next_cursor = built

        return Filtered(
            _reframed(frame, header, request), amend=amend if len(visible) > len(asked) else None, verdict=verdict
        )

    def _move_cursor(self, cursor: Any, visible: Sequence[str]) -> None:
        """Begin with the next topic that the client may see: brokers want the cursor's to be among those asked for."""
        if cursor is not None and visible and cursor.topic_name != visible[0]:
            cursor.topic_name, cursor.partition_index = visible[0], 0

    def _cluster(self, frame: memoryview, header: RequestHeader, request: Message) -> Filtered:
        # It has no topics; with a verdict the answer leaves out the operations allowed to the proxy's own identity.
        return Filtered(frame, verdict=lambda name, topic_id, error_code: (error_code, True))

    def _is_known(self, topic: str) -> bool:
        return bool(self._topology.partition_indexes(topic.encode())) or self._access.may_create(topic)

    def _verdict(self, header: RequestHeader, request: Message) -> Verdict:
        """Decide about each topic of an answer to Metadata or DescribeTopicPartitions."""
        is_metadata = header.api_key == keys.METADATA
        topics = request.topics
        asks_for_all = topics is None or (not topics and (not is_metadata or header.api_version == 0))
        by_id = {each.topic_id.bytes for each in topics or () if _is_by_id(each)}
        creates = is_metadata and bool(getattr(request, "allow_auto_topic_creation", True))
        describes = self._access.each(Operation.DESCRIBE, Resource.TOPIC)

        def decide(name: bytes, topic_id: bytes, error_code: int) -> tuple[int, bool] | None:
            """Return a topic's error and whether the answer has its name; None: the topic is left out."""
            topic = text(name)
            if name and asks_for_all:
                is_gone = error_code == UNKNOWN_TOPIC_OR_PARTITION and not is_metadata
                return (error_code, True) if self._sees(topic) and not is_gone else None
            if name and not describes(topic):
                return TOPIC_AUTHORIZATION_FAILED, topic_id not in by_id
            if error_code == UNKNOWN_TOPIC_OR_PARTITION and creates and not self._access.may_create(topic):
                return TOPIC_AUTHORIZATION_FAILED, True
            return error_code, True

        return decide


def _is_by_id(topic: Any) -> bool:
    # Kafka goes by the id where a topic has a name as well.
    topic_id = getattr(topic, "topic_id", None)
    return topic_id is not None and topic_id.bytes != _NO_ID


class _Cut(NamedTuple):
    """Where a request has its topics and the answer its results, and the result of a refused topic."""

    asked: str
    answered: str
    refused: Callable[[Any], dict[str, object]]


def _refused(frame: memoryview, header: RequestHeader, **fields: object) -> Filtered:
    response = build_response(header.api_key, header.api_version, **fields)
    return Filtered(frame, answer=encode_response(response))


def _refused_everywhere(frame: memoryview, header: RequestHeader, error_code: int) -> Filtered:
    body = frame[header.body_offset :]
    return Filtered(frame, answer=at_once(refuse_partitions(header.api_key, header.api_version, body, error_code)))


def _rest(
    frame: memoryview,
    header: RequestHeader,
    request: Message,
    answered: str,
    refused: Sequence[Mapping[str, object]],
    is_any_left: bool,
) -> Filtered:
    """Let the rest of a request pass, if there is any; the answer has the results of the refused parts."""
    if not refused:
        return Filtered(frame)
    if not is_any_left:
        return _refused(frame, header, **{answered: refused})
    built = getattr(build_response(header.api_key, header.api_version, **{answered: refused}), answered)

    def amend(answer: Message) -> None:
        setattr(answer, answered, [*getattr(answer, answered), *built])

    return Filtered(_reframed(frame, header, request), amend=amend)


def _reframed(frame: memoryview, header: RequestHeader, request: Message) -> memoryview:
    """The frame with another body."""
    head = frame[4 : header.body_offset]
    return memoryview(bytearray(frame_message(head, _encoded(header, request))))


def _encoded(header: RequestHeader, request: Message) -> bytes:
    if header.api_key == keys.DELETE_TOPICS:
        # kafka-python cannot encode one that it has decoded.
        request = build_request(header.api_key, header.api_version, **request.to_dict())
    return encode_request(request)


def _amended(amend: Amend, header: RequestHeader, body: Buffer) -> Buffer:
    answer = decode_response(header.api_key, header.api_version, body)
    amend(answer)
    return encode_response(answer)


# By API: what a client must be allowed, where the answer has its results, and the words of a refusal.
_TOPIC_CHANGES: Final[Mapping[int, tuple[Operation, str, str | None]]] = {
    keys.CREATE_TOPICS: (Operation.CREATE, "topics", _NOT_CREATED),
    keys.CREATE_PARTITIONS: (Operation.ALTER, "results", None),
    keys.DELETE_TOPICS: (Operation.DELETE, "responses", _MESSAGES[TOPIC_AUTHORIZATION_FAILED]),
}
DECISIONS: Final[Mapping[int, Callable[[AclFilter, memoryview, RequestHeader, Message], Filtered]]] = {
    keys.JOIN_GROUP: AclFilter._group,
    keys.SYNC_GROUP: AclFilter._group,
    keys.HEARTBEAT: AclFilter._group,
    keys.LEAVE_GROUP: AclFilter._group,
    keys.OFFSET_COMMIT: AclFilter._offsets,
    keys.OFFSET_FETCH: AclFilter._offsets,
    keys.TXN_OFFSET_COMMIT: AclFilter._offsets,
    keys.FIND_COORDINATOR: AclFilter._find_coordinator,
    keys.INIT_PRODUCER_ID: AclFilter._init_producer_id,
    keys.ADD_PARTITIONS_TO_TXN: AclFilter._add_partitions,
    keys.ADD_OFFSETS_TO_TXN: AclFilter._transaction,
    keys.END_TXN: AclFilter._transaction,
    keys.CREATE_TOPICS: AclFilter._topics,
    keys.CREATE_PARTITIONS: AclFilter._topics,
    keys.DELETE_TOPICS: AclFilter._topics,
    keys.DESCRIBE_CONFIGS: AclFilter._describe_configs,
    keys.METADATA: AclFilter._metadata,
    keys.DESCRIBE_TOPIC_PARTITIONS: AclFilter._topic_partitions,
    keys.DESCRIBE_CLUSTER: AclFilter._cluster,
}
