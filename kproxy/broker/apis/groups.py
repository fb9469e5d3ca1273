"""Handle the APIs of consumer groups with the classic protocol, as the coordinator of a group.

JoinGroup 0-9, SyncGroup 0-5, Heartbeat 0-4, LeaveGroup 0-5, OffsetCommit 2-10, OffsetFetch 1-10, OffsetDelete 0,
ListGroups 0-5, DescribeGroups 0-6, DeleteGroups 0-2
- A group of another coordinator gets NOT_COORDINATOR; a group whose journal is being read,
  COORDINATOR_LOAD_IN_PROGRESS; a group whose journal has too few in-sync replicas, COORDINATOR_NOT_AVAILABLE. An empty
  group id gets INVALID_GROUP_ID from JoinGroup, SyncGroup, Heartbeat, LeaveGroup and OffsetDelete only.
- JoinGroup from version 4 first assigns a member id (KIP-394); from version 9 a restarted static leader may skip the
  assignment (KIP-814). `groups.group.Options` bounds a group's members and their metadata.
- OffsetCommit refuses a topic that does not exist with UNKNOWN_TOPIC_OR_PARTITION, metadata above MAX_METADATA_LENGTH
  with OFFSET_METADATA_TOO_LARGE, and too many offsets or groups with INVALID_COMMIT_OFFSET_SIZE.
- OffsetFetch answers -1 for an offset that is not committed. It ignores `require_stable`: there are no transactions.
- From version 10 OffsetCommit and OffsetFetch name topics by id; an unknown one gets UNKNOWN_TOPIC_ID. A fetch of all
  offsets answers those of existing topics.
- ListGroups lists the groups of the asked broker. DescribeGroups has no client hosts.
- ConsumerGroupHeartbeat 0-1 (KIP-848) gets UNSUPPORTED_VERSION, as from a Kafka whose coordinator lacks the consumer
  protocol. If the API were missing, librdkafka and Java would retry for ever without error. Share groups are not
  offered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from kproxy.broker.context import Body, Broker, Request
from kproxy.broker.groups.coordinator import Commit
from kproxy.broker.groups.group import CommittedOffset, Group, Join, Protocol, State, Sync
from kproxy.broker.producer_state import wall_ms
from kproxy_codec import control, error_codes
from kproxy_codec.framing import client_id
from kproxy_codec.primitives import INT16, INT32, encode_string

# Kafka's offset.metadata.max.bytes, counted in UTF-16 units.
MAX_METADATA_LENGTH = 4096
_NO_OFFSET = CommittedOffset(-1, -1, "", -1)
_CLASSIC = "classic"
_BY_ID_FROM = 10
# Begins the placeholder for the name of a topic with an unknown id: no topic name contains it.
_NAMELESS = "\0"
# No throttling; no member id, epoch, interval and assignment; no tags.
_NO_CONSUMER_PROTOCOL = (
    INT32.pack(0)
    + INT16.pack(error_codes.UNSUPPORTED_VERSION)
    + encode_string(b"this broker has no consumer protocol (KIP-848): set group.protocol=classic", compact=True)
    + b"\0" * 9
    + b"\xff\0"
)


async def handle_join_group(broker: Broker, request: Request) -> Body:
    """Answer JoinGroup when the member's generation begins."""
    asked = request.message()
    version = asked.version
    session_s = asked.session_timeout_ms / 1000
    join = Join(
        asked.member_id,
        asked.group_instance_id,
        (client_id(request.frame) or b"").decode(errors="replace"),
        session_s,
        asked.rebalance_timeout_ms / 1000 if version >= 1 else session_s,
        asked.protocol_type,
        tuple(Protocol(each.name, bytes(each.metadata)) for each in asked.protocols),
        needs_id=version >= 4,
        can_skip=version >= 9,
    )
    joined = await broker.groups.join(asked.group_id, join)
    members = [
        {"member_id": member_id, "metadata": metadata, "group_instance_id": instance_id}
        for member_id, instance_id, metadata in joined.members
    ]
    return request.answer(
        error_code=joined.error_code,
        generation_id=joined.generation,
        protocol_name=joined.protocol if version >= 7 else joined.protocol or "",
        leader=joined.leader,
        member_id=joined.member_id,
        members=members,
        protocol_type=joined.protocol_type,
        skip_assignment=joined.skip_assignment,
    )


async def handle_sync_group(broker: Broker, request: Request) -> Body:
    """Answer SyncGroup when the group's leader has sent the assignments."""
    asked = request.message()
    version = asked.version
    synced = await broker.groups.sync(
        asked.group_id,
        Sync(
            asked.member_id,
            asked.group_instance_id,
            asked.generation_id,
            asked.protocol_type or "" if version >= 5 else None,
            asked.protocol_name or "" if version >= 5 else None,
            {each.member_id: bytes(each.assignment) for each in asked.assignments},
        ),
    )
    return request.answer(
        error_code=synced.error_code,
        assignment=synced.assignment,
        protocol_type=synced.protocol_type,
        protocol_name=synced.protocol,
    )


def handle_consumer_group_heartbeat(broker: Broker, request: Request) -> Body:
    """Refuse a member of the protocol of KIP-848."""
    return [_NO_CONSUMER_PROTOCOL]


def handle_heartbeat(broker: Broker, request: Request) -> Body:
    """Answer Heartbeat."""
    asked = request.message()
    error_code = broker.groups.heartbeat(asked.group_id, asked.member_id, asked.group_instance_id, asked.generation_id)
    return request.answer(error_code=error_code)


async def handle_leave_group(broker: Broker, request: Request) -> Body:
    """Answer LeaveGroup, of one member or (from version 3) several."""
    asked = request.message()
    if asked.version < 3:
        error_code, codes = await broker.groups.leave(asked.group_id, [(asked.member_id, None)])
        return request.answer(error_code=error_code or codes[0])
    leaving = [(each.member_id, each.group_instance_id) for each in asked.members]
    error_code, codes = await broker.groups.leave(asked.group_id, leaving)
    members = [
        {"member_id": member_id, "group_instance_id": instance_id, "error_code": code}
        for (member_id, instance_id), code in zip(leaving, codes, strict=False)
    ]
    return request.answer(error_code=error_code, members=[] if error_code else members)


async def handle_offset_commit(broker: Broker, request: Request) -> Body:
    """Answer OffsetCommit, with the group's error at each partition."""
    asked = request.message()
    version = asked.version
    ids = _name_topics(broker, asked.topics, version)
    now_ms = wall_ms()
    expires_ms = now_ms + asked.retention_time_ms if asked.retention_time_ms >= 0 else -1
    commits = [
        Commit(
            topic.name,
            each.partition_index,
            CommittedOffset(
                each.committed_offset,
                each.committed_leader_epoch,
                each.committed_metadata or "",
                now_ms,
                expires_ms,
            ),
            _commit_error(broker, topic.name, each),
        )
        for topic in asked.topics
        for each in topic.partitions
    ]
    member = (asked.member_id, asked.group_instance_id, asked.generation_id_or_member_epoch)
    error_code, results = await broker.groups.commit(asked.group_id, member, commits)
    if error_code == error_codes.GROUP_ID_NOT_FOUND and version < 9:
        error_code = error_codes.ILLEGAL_GENERATION
    codes = {(each.topic, each.partition_index): error_code or each.error_code for each in results}
    return request.answer(topics=_identified(_by_topic(codes), ids))


def _name_topics(broker: Broker, topics: Iterable[Any], version: int) -> dict[str, UUID] | None:
    """Replace the ids of a request's topics by names, and return the ids by name; None if it has no ids."""
    if version < _BY_ID_FROM:
        return None
    ids: dict[str, UUID] = {}
    for topic in topics:
        topic_id = topic.topic_id or UUID(int=0)
        found = broker.view.topic_by_id(topic_id.bytes)
        topic.name = found.name if found is not None else f"{_NAMELESS}{topic_id}"
        ids[topic.name] = topic_id
    return ids


def _identified(topics: list[dict[str, Any]], ids: Mapping[str, UUID] | None) -> list[dict[str, Any]]:
    """Replace the names in an answer by ids, if its version has ids; a topic without an id is omitted."""
    if ids is None:
        return topics
    named = [(topic.pop("name"), topic) for topic in topics]
    return [{"topic_id": ids[name], **topic} for name, topic in named if name in ids]


def _commit_error(broker: Broker, topic: str, asked: control.Message) -> int:
    if topic.startswith(_NAMELESS):
        return error_codes.UNKNOWN_TOPIC_ID
    if not _exists(broker, topic, asked.partition_index):
        return error_codes.UNKNOWN_TOPIC_OR_PARTITION
    # Java's length of a string, as Kafka counts.
    is_long = len((asked.committed_metadata or "").encode("utf-16-le")) > 2 * MAX_METADATA_LENGTH
    return error_codes.OFFSET_METADATA_TOO_LARGE if is_long else error_codes.NONE


def _exists(broker: Broker, topic: str, partition_index: int) -> bool:
    found = broker.view.topics.get(topic)
    return found is not None and 0 <= partition_index < len(found.replicas)


def _by_topic(codes: Mapping[tuple[str, int], int]) -> list[dict[str, Any]]:
    by_topic: dict[str, list[dict[str, Any]]] = {}
    for (topic, index), code in codes.items():
        by_topic.setdefault(topic, []).append({"partition_index": index, "error_code": code})
    return [{"name": topic, "partitions": partitions} for topic, partitions in by_topic.items()]


async def handle_offset_fetch(broker: Broker, request: Request) -> Body:
    """Answer OffsetFetch, for one group or (from version 8) several."""
    asked = request.message()
    version = asked.version
    if version >= 8:
        groups = [{"group_id": each.group_id, **await _fetched(broker, each, version)} for each in asked.groups]
        return request.answer(groups=groups)
    fields = await _fetched(broker, asked, version)
    if version >= 2:
        return request.answer(**fields)
    if fields["error_code"]:
        codes = {(each.name, index): fields["error_code"] for each in asked.topics for index in each.partition_indexes}
        fields["topics"] = [
            topic | {"partitions": [each | {"committed_offset": -1, "metadata": ""} for each in topic["partitions"]]}
            for topic in _by_topic(codes)
        ]
    return request.answer(topics=fields["topics"])


async def _fetched(broker: Broker, asked: control.Message, version: int) -> dict[str, Any]:
    wanted = None
    ids = _name_topics(broker, asked.topics or (), version)
    if asked.topics is not None:
        wanted = [(topic.name, index) for topic in asked.topics for index in topic.partition_indexes]
    error_code, found = await broker.groups.fetch(asked.group_id, wanted)
    if wanted is None and ids is not None:
        ids = {name: topic.topic_id for name, topic in broker.view.topics.items()}
    return {"error_code": error_code, "topics": [] if error_code else _identified(_offsets(found), ids)}


def _offsets(found: Mapping[tuple[str, int], CommittedOffset | None]) -> list[dict[str, Any]]:
    by_topic: dict[str, list[dict[str, Any]]] = {}
    for (topic, index), kept in found.items():
        committed = kept or _NO_OFFSET
        by_topic.setdefault(topic, []).append(
            {
                "partition_index": index,
                "committed_offset": committed.offset,
                "metadata": committed.metadata,
                "error_code": error_codes.UNKNOWN_TOPIC_ID if topic.startswith(_NAMELESS) else error_codes.NONE,
                "committed_leader_epoch": committed.leader_epoch,
            }
        )
    return [{"name": topic, "partitions": partitions} for topic, partitions in by_topic.items()]


async def handle_offset_delete(broker: Broker, request: Request) -> Body:
    """Answer OffsetDelete."""
    asked = request.message()
    wanted = [(topic.name, each.partition_index) for topic in asked.topics for each in topic.partitions]
    error_code, codes = await broker.groups.delete_offsets(asked.group_id, wanted)
    codes |= {key: error_codes.UNKNOWN_TOPIC_OR_PARTITION for key in codes if not _exists(broker, *key)}
    return request.answer(error_code=error_code, topics=[] if error_code else _by_topic(codes))


def handle_list_groups(broker: Broker, request: Request) -> Body:
    """Answer ListGroups with this broker's groups."""
    asked = request.message()
    states = {each.lower() for each in asked.states_filter}
    types = {each.lower() for each in asked.types_filter}
    error_code, groups = broker.groups.listed()
    listed = [
        {
            "group_id": group.group_id,
            "protocol_type": group.protocol_type,
            "group_state": group.state.value,
            "group_type": _CLASSIC,
        }
        for group in groups
        if (not states or group.state.value.lower() in states) and (not types or _CLASSIC in types)
    ]
    return request.answer(error_code=error_code, groups=listed)


def handle_describe_groups(broker: Broker, request: Request) -> Body:
    """Answer DescribeGroups."""
    asked = request.message()
    return request.answer(groups=[_described(broker, group_id, asked.version) for group_id in asked.groups])


def _described(broker: Broker, group_id: str, version: int) -> dict[str, Any]:
    found = broker.groups.described(group_id)
    if isinstance(found, Group):
        return {
            "error_code": error_codes.NONE,
            "group_id": group_id,
            "group_state": found.state.value,
            "protocol_type": found.protocol_type,
            "protocol_data": _protocol(found) or "",
            "members": list(_members(found)),
        }
    described = {"group_id": group_id, "group_state": "", "protocol_type": "", "protocol_data": "", "members": []}
    if found == error_codes.GROUP_ID_NOT_FOUND:
        described["group_state"] = "Dead"
        described["error_message"] = f"there is no group {group_id}"
        return described | {"error_code": found if version >= 6 else error_codes.NONE}
    return described | {"error_code": found}


def _protocol(group: Group) -> str | None:
    return group.protocol if group.state is State.STABLE else None


def _members(group: Group) -> Iterable[dict[str, Any]]:
    for member in group.members.values():
        yield {
            "member_id": member.member_id,
            "client_id": member.client_id,
            "client_host": "",
            "member_metadata": member.metadata(_protocol(group)),
            "member_assignment": member.assignment,
            "group_instance_id": member.instance_id,
        }


async def handle_delete_groups(broker: Broker, request: Request) -> Body:
    """Answer DeleteGroups."""
    asked = request.message()
    results = [{"group_id": each, "error_code": await broker.groups.delete(each)} for each in asked.groups_names]
    return request.answer(results=results)
