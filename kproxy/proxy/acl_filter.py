"""Enforce ACLs on control requests: refuse a request, remove the parts that its client may not access, or let it pass.

The row of an API has the permissions that its requests need (`needs` in kproxy.proxy.apis); they are checked in turn.
If the permission for the cluster or for a request's only group or transactional id is missing, the whole request gets
31, 30 or 53, in each partition where the answer has no other place. Of several topics, groups or ids the refused ones
are removed, and get 29, 30 or 53. These APIs have functions of their own (`_BY_API`):

| request | needs | error codes of refused parts |
| --- | --- | --- |
| FindCoordinator | describe the group or transactional id; for a share group: administer the cluster | 30, 53, 31 |
| InitProducerId of an idempotent producer | write any topic, or the cluster | 31 |
| DeleteTopics by id | delete each topic | 29; 100 for an unknown id; 42 for a name with an id |
| DescribeConfigs | describe the topic, group, or cluster | 29, 30, 31 for a resource |
| AlterConfigs, IncrementalAlterConfigs | alter the topic, group, or cluster | the same |
| ConsumerGroupHeartbeat | read the group, describe the subscribed topics | 30; 29, for a regular expression too |
| ConsumerGroupDescribe | describe the group, and the topics that its members have | 30, 29 for a group |
| DescribeAcls, CreateAcls, DeleteAcls | describe or alter the cluster | 31; 54 (SECURITY_DISABLED) with the right |
| OffsetFetch of several groups | describe each group, and each topic | 30 for a group, 29 for a topic of it |
| Metadata, DescribeTopicPartitions | describe each topic | 29 for a topic; one that was not named is left out |

OffsetFetch for all topics, ListGroups, ListTransactions and DescribeTransactions leave out what the client may not see.
A topic that OffsetFetch or OffsetCommit names by an unknown id gets 100. AddPartitionsToTxn adds all partitions or
none: if a topic is refused, all others get 55. To create a topic a permission for the cluster is enough. A client
without the right to create never creates a topic by asking for its metadata. An answer to DescribeTopicPartitions may
name the topic that comes next, so the proxy asks brokers only for visible topics. Every client may send
DescribeCluster, as in Kafka: the answer names proxies.

kproxy_codec.control reads messages, on another thread unless they are short (kproxy.proxy.long_answers). Requests have
at most `limits.max_control_request_bytes` and MAX_ELEMENTS elements, and only admitted clients send them. They are
encoded again only if the filter has changed them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from kproxy.proxy.access import ERRORS, ClientAccess, RequestAccess, text
from kproxy.proxy.apis import APIS, Permission
from kproxy.proxy.long_answers import READ_AT_ONCE_BYTES, Portions
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
from kproxy_codec.coordination import BATCHED_FROM, GROUP, OFFSETS_BY_ID_FROM, TRANSACTION, names_groups
from kproxy_codec.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    INVALID_REQUEST,
    NONE,
    OPERATION_NOT_ATTEMPTED,
    SECURITY_DISABLED,
    TOPIC_AUTHORIZATION_FAILED,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import RequestHeader, frame_message
from kproxy_codec.parts import keep, name_of, refused, result_of
from kproxy_codec.primitives import Buffer

# The types of configuration resources that are not the cluster's, as Kafka numbers them.
_CONFIGURED: Final = MappingProxyType({2: Resource.TOPIC, 32: Resource.GROUP})
_TOPIC_IDS_FROM: Final = 6
_NO_ID: Final = UUID(int=0)
# Key types of FindCoordinator.
_COORDINATED: Final = MappingProxyType({GROUP: Resource.GROUP, TRANSACTION: Resource.TRANSACTIONAL_ID})
_SHARE_GROUP_STATE: Final = 2
# Brokers describe at most this many partitions at a time (Kafka's max.request.partition.size.limit).
_MOST_PARTITIONS_A_PAGE: Final = 2_000
# Kafka's own messages, which clients show to users. A batched FindCoordinator has none, nor has CreatePartitions.
_MESSAGES: Final[Mapping[int, str]] = {
    TOPIC_AUTHORIZATION_FAILED: "Topic authorization failed.",
    GROUP_AUTHORIZATION_FAILED: "Group authorization failed.",
    CLUSTER_AUTHORIZATION_FAILED: "Cluster authorization failed.",
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Transactional Id authorization failed.",
}
_CHANGE_MESSAGES: Final[Mapping[int, str | None]] = {
    keys.CREATE_TOPICS: "Authorization failed.",
    keys.CREATE_PARTITIONS: None,
}

_OWN_ACLS: Final = "Clients of this proxy are subject to its own ACLs (kproxy acl). Change the brokers' at a broker."
_TOPICS: Final = Permission(Operation.DESCRIBE, Resource.TOPIC, "topics", "topics")

Amend: TypeAlias = Callable[[Message], None]
Code: TypeAlias = Callable[[Any], int]
"""The error code of an element of a request, NONE if it stays."""
Refused: TypeAlias = Callable[[Any, int], dict[str, object]]
"""The result of an element that is refused with this code."""


class Filtered(NamedTuple):
    """The decision about a request.

    `answer`: the whole body of its answer, if it is refused. Otherwise `frame` is sent to the broker, and `amend` adds
    the results of the removed parts to the answer. `verdict` decides about the topics of an answer that names brokers.
    """

    frame: memoryview
    answer: Buffer | None = None
    amend: Amend | None = None
    verdict: Verdict | None = None


class AclFilter:
    """Filters one request of a client. Call `end` once it is answered, because a verdict may also refuse something."""

    _frame: memoryview
    _header: RequestHeader
    _request: Message

    def __init__(
        self, access: ClientAccess, topology: Topology, portions: Portions, *, is_carried: bool = False
    ) -> None:
        """`is_carried`: brokers know the client by its own identity."""
        self._tells_apart = access.is_enforced and not is_carried
        self._portions = portions
        self._access = RequestAccess(access)
        self._topology = topology
        # The topics known when the filter begins; threads do not read the topology itself.
        self._names: Sequence[bytes] = ()

    def end(self) -> None:
        """Report the refusals since `screen`, which has reported its own."""
        self._access.end()

    async def screen(self, frame: memoryview, header: RequestHeader) -> Filtered:
        """Decide about a request. Raises CodecError."""
        self._frame, self._header = frame, header
        size = len(frame)
        if header.api_key == keys.DESCRIBE_TOPIC_PARTITIONS:
            # A short request may be about all topics.
            self._names, size = self._topology.names, max(size, READ_AT_ONCE_BYTES + 1)
        return await self._portions.apart(size, self._screen)

    def _screen(self) -> Filtered:
        key, version = self._header.api_key, self._header.api_version
        needs = APIS[key].needs if key in APIS else None
        decide = _BY_API.get(key, AclFilter._by_needs)
        if needs is None or (key not in _BY_API and not all(map(_is_general, needs))):
            # Never forward it: brokers would treat it as the proxy's own request.
            raise CodecError(f"{keys.name_of(key)} is refused, because the proxy has no access rules for it")
        if not needs and key not in _BY_API:
            return Filtered(self._frame)
        self._request = decode_request(key, version, self._frame[self._header.body_offset :])
        # On the thread that decides: the connection may have ended by now.
        with self._access:
            return decide(self)

    async def amend(self, screened: Filtered, body: Buffer) -> Buffer:
        """Return the answer's body with the results of the removed parts. Raises CodecError."""
        amend = screened.amend
        if amend is None:
            return body
        return await self._portions.apart(len(body), lambda: self._amended(amend, body))

    def _amended(self, amend: Amend, body: Buffer) -> Buffer:
        answer = decode_response(self._header.api_key, self._header.api_version, body)
        amend(answer)
        return encode_response(answer)

    # By the needs of the API

    def _by_needs(self) -> Filtered:
        if getattr(self._request, "include_authorized_operations", False):
            # A broker's answer would be about the proxy.
            self._request.include_authorized_operations = False
            self._frame = self._reframed()
        decided = Filtered(self._frame)
        for need in APIS[self._header.api_key].needs or ():
            if need.resource is Resource.CLUSTER or not need.to:
                name = getattr(self._request, need.at) if need.resource is not Resource.CLUSTER else CLUSTER_NAME
                if not self._access.allows(need.operation, need.resource, name):
                    return self._refused(ERRORS[need.resource])
            elif need.at and decided.answer is None:
                decided = self._only_allowed(need)
            elif not need.at and decided.answer is None:
                decided = decided._replace(amend=_both(decided.amend, partial(self._hide, need)))
        return decided

    def _hide(self, need: Permission, answer: Message) -> None:
        """Leave out of an answer what the client may not see. Who may describe the cluster sees all groups."""
        if need.resource is Resource.GROUP and self._access.permits(need.operation, Resource.CLUSTER, CLUSTER_NAME):
            return
        keep(answer, need.to, lambda each: self._access.permits(need.operation, need.resource, name_of(each)))

    def _refused(self, error_code: int, message: str | None = None) -> Filtered:
        """Refuse the whole request."""
        key = self._header.api_key
        if key == keys.INIT_PRODUCER_ID:
            return self._answered(error_code=error_code, producer_id=-1, producer_epoch=-1)
        at, to = APIS[key].parts
        answer = refused(self._request, error_code, message or _message_of(key, error_code), at=at, to=to)
        return Filtered(self._frame, answer=encode_response(answer))

    def _answered(self, **fields: object) -> Filtered:
        """Answer without a broker."""
        return Filtered(self._frame, answer=encode_response(self._response(fields)))

    def _response(self, fields: Mapping[str, object]) -> Message:
        return build_response(self._header.api_key, self._header.api_version, **fields)

    def _only_allowed(self, need: Permission) -> Filtered:
        """Remove the parts that the client may not access."""
        operation, kind, at, to = need
        if getattr(self._request, at) is None:
            return Filtered(self._frame, amend=partial(self._hide, need))
        return self._cut(at, to, self._code_of(operation, kind))

    def _code_of(self, operation: Operation, kind: Resource) -> Code:
        allows = self._access.each(operation, kind)

        def code_of(part: Any) -> int:
            name = self._named(part)
            if name is None:
                return UNKNOWN_TOPIC_ID if self._access.is_enforced else NONE
            is_allowed = (operation is Operation.CREATE and self._access.may_create(name)) or allows(name)
            return NONE if is_allowed else ERRORS[kind]

        return code_of

    @property
    def _has_ids(self) -> bool:
        """Whether the request names the topics of offsets by id."""
        is_about_offsets = self._header.api_key in (keys.OFFSET_COMMIT, keys.OFFSET_FETCH)
        return is_about_offsets and self._header.api_version >= OFFSETS_BY_ID_FROM

    def _named(self, part: Any) -> str | None:
        """The name of a part; None if it is a topic with an unknown id."""
        name: str | None = self._name_of(part) if self._has_ids else name_of(part)
        return name

    def _cut(
        self, at: str, to: str, code_of: Code, refused: Refused | None = None, *, may_be_empty: bool = False
    ) -> Filtered:
        """Remove elements of the field `at`; their results are added to the answer's field `to`.

        A broker gets the rest, unless it is empty and not `may_be_empty`.
        """
        request = self._request
        decided = [(each, code_of(each)) for each in getattr(request, at) or ()]
        if self._header.api_key == keys.ADD_PARTITIONS_TO_TXN and any(code for _, code in decided):
            decided = [(each, code or OPERATION_NOT_ATTEMPTED) for each, code in decided]
        kept = [each for each, code in decided if not code]
        result = refused or partial(self._refused_part, to)
        results = {to: [result(each, code) for each, code in decided if code]}
        setattr(request, at, kept)
        if not results[to]:
            return Filtered(self._frame)
        if not kept and not may_be_empty:
            return self._answered(**results)
        built = getattr(self._response(results), to)

        def amend(answer: Message) -> None:
            setattr(answer, to, [*getattr(answer, to), *built])

        return Filtered(self._reframed(), amend=amend)

    def _refused_part(self, to: str, part: Any, error_code: int) -> dict[str, Any]:
        key = self._header.api_key
        result = result_of(key, to, part, error_code, _message_of(key, error_code))
        if self._has_ids:
            del result["name"]
            result["topic_id"] = _id_of(part)
        return result

    def _reframed(self) -> memoryview:
        """The frame with the current body of the request."""
        header, request = self._header, self._request
        if header.api_key == keys.DELETE_TOPICS:
            # kafka-python cannot encode a message that it has decoded.
            request = build_request(header.api_key, header.api_version, **request.to_dict())
        return memoryview(bytearray(frame_message(self._frame[4 : header.body_offset], encode_request(request))))

    def _sees(self, topic: str | None) -> bool:
        if topic is None:
            return not self._access.is_enforced
        return self._access.permits(Operation.DESCRIBE, Resource.TOPIC, topic)

    # Offsets of several groups

    def _offset_fetch(self) -> Filtered:
        if not names_groups(self._header.api_key, self._header.api_version):
            return self._by_needs()
        describes, code_of = (
            self._access.each(Operation.DESCRIBE, Resource.GROUP),
            self._code_of(Operation.DESCRIBE, Resource.TOPIC),
        )
        asks_for_all: set[str] = set()
        refused: list[dict[str, object]] = []
        refused_in: dict[str, Any] = {}
        kept = []
        for group in self._request.groups:
            if not describes(group.group_id):
                refused.append({"group_id": group.group_id, "error_code": GROUP_AUTHORIZATION_FAILED})
                continue
            kept.append(group)
            if group.topics is None:
                asks_for_all.add(group.group_id)
                continue
            decided = [(each, code_of(each)) for each in group.topics]
            group.topics = [each for each, code in decided if not code]
            topics = [self._refused_part("topics", each, code) for each, code in decided if code]
            if topics:
                [built] = self._response({"groups": [{"group_id": group.group_id, "topics": topics}]}).groups
                refused_in[group.group_id] = built.topics
        if not kept:
            return self._answered(groups=refused)
        self._request.groups = kept

        def amend(answer: Message) -> None:
            for group in answer.groups:
                if group.group_id in asks_for_all:
                    group.topics = [each for each in group.topics if self._sees(self._named(each))]
                elif not group.error_code:
                    group.topics = [*group.topics, *refused_in.get(group.group_id, ())]
            answer.groups = [*answer.groups, *self._response({"groups": refused}).groups]

        if not (refused or refused_in):
            return Filtered(self._frame, amend=amend if asks_for_all else None)
        return Filtered(self._reframed(), amend=amend)

    # Producer ids, coordinators, topics by id, and configurations

    def _init_producer_id(self) -> Filtered:
        if self._request.transactional_id is not None:
            return self._by_needs()
        if self._access.may_write_some_topic():
            return Filtered(self._frame)
        return self._refused(CLUSTER_AUTHORIZATION_FAILED)

    def _find_coordinator(self) -> Filtered:
        version = self._header.api_version
        key_type = getattr(self._request, "key_type", GROUP)
        kind = _COORDINATED.get(key_type)
        if kind is not None:
            code, is_allowed = ERRORS[kind], self._access.each(Operation.DESCRIBE, kind)
        elif key_type != _SHARE_GROUP_STATE:
            code, is_allowed = INVALID_REQUEST, lambda name: not self._access.is_enforced
        else:
            # Only brokers look for this coordinator, and create a topic for it: Kafka requires ClusterAction.
            administers = self._access.each(Operation.ADMIN, Resource.CLUSTER)
            code, is_allowed = CLUSTER_AUTHORIZATION_FAILED, lambda name: administers(CLUSTER_NAME)
        nobody = {"error_code": code, "node_id": -1, "host": "", "port": -1}
        if version >= BATCHED_FROM:
            return self._cut(
                "coordinator_keys",
                "coordinators",
                lambda name: NONE if is_allowed(name) else code,
                lambda name, _: {"key": name, "error_message": "", **nobody},
            )
        if is_allowed(self._request.key):
            return Filtered(self._frame)
        return self._answered(error_message=_MESSAGES.get(code), **nobody)

    def _delete_topics(self) -> Filtered:
        if self._header.api_version < _TOPIC_IDS_FROM:
            return self._by_needs()
        may_delete = self._access.each(Operation.DELETE, Resource.TOPIC)

        def code_of(topic: Any) -> int:
            if topic.name is not None and _is_by_id(topic):
                # Brokers must not choose.
                return INVALID_REQUEST
            name = topic.name if topic.name is not None else self._name_of(topic)
            if name is None:
                return UNKNOWN_TOPIC_ID
            return NONE if may_delete(name) else TOPIC_AUTHORIZATION_FAILED

        return self._cut("topics", "responses", code_of)

    def _name_of(self, topic: Any) -> str | None:
        name = self._topology.name_of(_id_of(topic).bytes)
        return None if name is None else text(name)

    def _configs(self) -> Filtered:
        need = (APIS[self._header.api_key].needs or ())[0]

        def code_of(each: Any) -> int:
            kind = _CONFIGURED.get(each.resource_type, Resource.CLUSTER)
            name = CLUSTER_NAME if kind is Resource.CLUSTER else each.resource_name
            return NONE if self._access.allows(need.operation, kind, name) else ERRORS[kind]

        return self._cut(need.at, need.to, code_of)

    # Groups of KIP-848, and the brokers' ACLs

    def _group_heartbeat(self) -> Filtered:
        request = self._request
        if not self._access.allows(Operation.READ, Resource.GROUP, request.group_id):
            return self._refused(GROUP_AUTHORIZATION_FAILED)
        if getattr(request, "subscribed_topic_regex", None) and self._tells_apart:
            # Brokers resolve it among the topics that the proxy may see.
            return self._refused(TOPIC_AUTHORIZATION_FAILED, "Name the topics: the proxy (kproxy) has ACLs.")
        if not all(map(self._access.each(Operation.DESCRIBE, Resource.TOPIC), request.subscribed_topic_names or ())):
            return self._refused(TOPIC_AUTHORIZATION_FAILED)
        return Filtered(self._frame)

    def _group_describe(self) -> Filtered:
        screened = self._only_allowed((APIS[self._header.api_key].needs or ())[0])
        return screened._replace(amend=_both(screened.amend, self._hide_members))

    def _hide_members(self, answer: Message) -> None:
        """Hide all members of a group that has a topic which the client may not see, as Kafka does."""
        for group in answer.groups:
            has = {
                each.topic_name
                for member in group.members
                for assignment in (member.assignment, member.target_assignment)
                for each in assignment.topic_partitions
            }
            if not all(map(self._sees, has)):
                group.error_code, group.members = TOPIC_AUTHORIZATION_FAILED, []
                group.error_message = "The group has described topic(s) that the client is not authorized to describe."

    def _acls(self) -> Filtered:
        """Refuse requests about brokers' ACLs, which do not affect clients where only the proxy tells these apart."""
        decided = self._by_needs()
        is_decided = decided.answer is not None or not self._tells_apart
        return decided if is_decided else self._refused(SECURITY_DISABLED, _OWN_ACLS)

    # Metadata

    def _metadata(self) -> Filtered:
        """Remove the topics that the client may not see: their place in an answer would reveal whether they exist.

        A client without the right to create a topic does not create it.
        """
        request, version = self._request, self._header.api_version
        verdict = self._verdict()
        describes = self._access.each(Operation.DESCRIBE, Resource.TOPIC)
        asked = request.topics or ()
        named = [each.name for each in asked if each.name is not None and not _is_by_id(each)]
        denied = {name for name in named if not describes(name)}
        if getattr(request, "allow_auto_topic_creation", True):
            missing = [each.name for each in asked if each.name is not None and not self._access.may_create(each.name)]
            if missing and disallow_auto_creation(version, self._frame[self._header.body_offset :]):
                request.allow_auto_topic_creation = False
            else:
                # A version without that field: unknown topics, which might be created, are removed.
                denied.update(name for name in missing if not self._is_known(name))
        # In version 0 an empty list means all topics; in later versions the answer also names the brokers.
        return self._cut(
            "topics",
            "topics",
            lambda each: TOPIC_AUTHORIZATION_FAILED if each.name in denied and not _is_by_id(each) else NONE,
            may_be_empty=version > 0,
        )._replace(verdict=verdict)

    def _topic_partitions(self) -> Filtered:
        request, verdict = self._request, self._verdict()
        if not self._access.is_enforced:
            return Filtered(self._frame, verdict=verdict)
        cursor = request.cursor
        begins_at = cursor.topic_name if cursor is not None else ""
        if request.topics:
            if cursor is not None:
                names = {each.name for each in request.topics}
                if begins_at not in names:
                    invalid = {"error_code": INVALID_REQUEST}
                    return self._answered(topics=[{"name": name, **invalid} for name in sorted(names)])
                request.topics = [each for each in request.topics if each.name >= begins_at]
                self._move_cursor(cursor, sorted(each.name for each in request.topics if self._sees(each.name)))
            return self._only_allowed(_TOPICS)._replace(verdict=verdict)
        most = min(max(request.response_partition_limit, 1), _MOST_PARTITIONS_A_PAGE)
        first = bisect_left(self._names, begins_at.encode(errors="surrogatepass"))
        # Two more than fit: from the extra one the broker says where the next page begins, unless topics were deleted.
        visible = list(islice(filter(self._sees, map(text, islice(self._names, first, None))), most + 2))
        if not visible:
            return self._answered(topics=[])
        self._move_cursor(cursor, visible)
        asked = [{"name": name} for name in visible[: most + 1]]
        request.topics = build_request(self._header.api_key, self._header.api_version, topics=asked).topics
        built = self._response({"next_cursor": {"topic_name": visible[-1], "partition_index": 0}}).next_cursor

        def amend(answer: Message) -> None:
            if answer.next_cursor is None:
                answer.next_cursor = built

        return Filtered(self._reframed(), amend=amend if len(visible) > len(asked) else None, verdict=verdict)

    def _move_cursor(self, cursor: Any, visible: Sequence[str]) -> None:
        """Begin with the next topic that the client may see: brokers require the cursor's to be in the request."""
        if cursor is not None and visible and cursor.topic_name != visible[0]:
            cursor.topic_name, cursor.partition_index = visible[0], 0

    def _cluster(self) -> Filtered:
        # It has no topics; with a verdict the answer omits the operations allowed to the proxy's own identity.
        return Filtered(self._frame, verdict=lambda name, topic_id, error_code: (error_code, True))

    def _is_known(self, topic: str) -> bool:
        return bool(self._topology.partition_indexes(topic.encode())) or self._access.may_create(topic)

    def _verdict(self) -> Verdict:
        """Decide about each topic of an answer to Metadata or DescribeTopicPartitions."""
        is_metadata = self._header.api_key == keys.METADATA
        topics = self._request.topics
        # From version 1 of Metadata on, an empty list requests no topics.
        asks_for_all = not topics
        by_id = {each.topic_id.bytes for each in topics or () if _is_by_id(each)}
        creates = is_metadata and bool(getattr(self._request, "allow_auto_topic_creation", True))
        describes = self._access.each(Operation.DESCRIBE, Resource.TOPIC)

        def decide(name: bytes, topic_id: bytes, error_code: int) -> tuple[int, bool] | None:
            """Return a topic's error and whether the answer has its name; None: the topic is omitted."""
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


def _is_general(need: Permission) -> bool:
    """Whether a permission says which names of a request or an answer need it."""
    return bool(need.at or need.to) or need.resource is Resource.CLUSTER


def _message_of(api_key: int, error_code: int) -> str | None:
    message = _MESSAGES.get(error_code)
    return _CHANGE_MESSAGES.get(api_key, message) if message else None


def _both(first: Amend | None, second: Amend) -> Amend:
    def amend(answer: Message) -> None:
        if first is not None:
            first(answer)
        second(answer)

    return amend


def _is_by_id(topic: Any) -> bool:
    # If a topic has both, Kafka uses the id.
    return _id_of(topic) != _NO_ID


def _id_of(topic: Any) -> UUID:
    # kafka-python reads an id of zeros as None.
    return getattr(topic, "topic_id", None) or _NO_ID


# The APIs that need more than their `needs` to decide.
_BY_API: Final[Mapping[int, Callable[[AclFilter], Filtered]]] = {
    keys.FIND_COORDINATOR: AclFilter._find_coordinator,
    keys.INIT_PRODUCER_ID: AclFilter._init_producer_id,
    keys.DELETE_TOPICS: AclFilter._delete_topics,
    keys.DESCRIBE_CONFIGS: AclFilter._configs,
    keys.ALTER_CONFIGS: AclFilter._configs,
    keys.INCREMENTAL_ALTER_CONFIGS: AclFilter._configs,
    keys.CONSUMER_GROUP_HEARTBEAT: AclFilter._group_heartbeat,
    keys.CONSUMER_GROUP_DESCRIBE: AclFilter._group_describe,
    keys.DESCRIBE_ACLS: AclFilter._acls,
    keys.CREATE_ACLS: AclFilter._acls,
    keys.DELETE_ACLS: AclFilter._acls,
    keys.METADATA: AclFilter._metadata,
    keys.DESCRIBE_TOPIC_PARTITIONS: AclFilter._topic_partitions,
    keys.DESCRIBE_CLUSTER: AclFilter._cluster,
    keys.OFFSET_FETCH: AclFilter._offset_fetch,
}
