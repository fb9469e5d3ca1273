"""Encode and decode the records that keep consumer groups in the log of a partition of `__consumer_offsets`.

    key                                                     value
    1 INT16, group STRING                                   version INT16 = 1, the group without its offsets
    2 INT16, group STRING, topic STRING, partition INT32    version INT16 = 1, a committed offset

A later record of a key replaces the earlier one, and a record without a value removes it. So any part of a log that has
the latest record of every key restores the same groups. The format is not that of Kafka's own records in that topic.
"""

from __future__ import annotations

from collections.abc import Iterable

from kproxy.broker.groups.group import CommittedOffset, Group, Member, Options, Protocol, State
from kproxy_codec.errors import InvalidField, Truncated
from kproxy_codec.primitives import INT16, INT32, INT64, Buffer, encode_string
from kproxy_codec.record_batch import parse_batch
from kproxy_codec.record_crc import crc_is_valid
from kproxy_codec.records import Pair, decode_batch
from kproxy_codec.walk import Walk

_GROUP, _OFFSET = 1, 2
_VERSION = 1


def group_record(group: Group) -> Pair:
    """Encode a group that has changed, without its offsets."""
    if group.state is State.PREPARING:
        raise ValueError("a group in a rebalance has no record; write the generation before it")
    value = bytearray(INT16.pack(_VERSION))
    value += INT64.pack(group.changed_ms) + INT32.pack(group.generation) + _string(group.protocol_type)
    value += _string(group.protocol) + _string(group.leader) + INT16.pack(group.state is State.STABLE)
    value += INT32.pack(len(group.members))
    for member in group.members.values():
        value += _string(member.member_id) + _string(member.instance_id) + _string(member.client_id)
        value += _ms(member.session_s) + _ms(member.rebalance_s) + INT32.pack(len(member.protocols))
        for protocol in member.protocols:
            value += _string(protocol.name) + _bytes(protocol.metadata)
        value += _bytes(member.assignment)
    return _group_key(group.group_id), bytes(value)


def kept(group_id: str, value: bytes | None) -> list[Pair]:
    """Return a list with a group's record of this value; an empty list for None."""
    return [] if value is None else [(_group_key(group_id), value)]


def removal(group_id: str) -> Pair:
    """Encode the removal of a group."""
    return _group_key(group_id), None


def _group_key(group_id: str) -> bytes:
    return INT16.pack(_GROUP) + _string(group_id)


def offset_record(group_id: str, topic: str, partition_index: int, committed: CommittedOffset | None) -> Pair:
    """Encode a committed offset, or its removal."""
    key = INT16.pack(_OFFSET) + _string(group_id) + _string(topic) + INT32.pack(partition_index)
    if committed is None:
        return key, None
    value = INT16.pack(_VERSION) + INT64.pack(committed.offset) + INT32.pack(committed.leader_epoch)
    value += _string(committed.metadata) + INT64.pack(committed.committed_ms) + INT64.pack(committed.expires_ms)
    return key, value


class Replay:
    """Reads a log from its start into groups; `values` are their last records. It may run in a thread."""

    def __init__(self, options: Options) -> None:
        self.groups: dict[str, Group] = {}
        self.values: dict[str, bytes] = {}
        self._options = options

    def feed(self, records: Buffer) -> int:
        """Apply whole batches, and skip a partial last one; return the next offset. Raises CodecError."""
        position, next_offset = 0, -1
        while position < len(records):
            try:
                batch = parse_batch(records, position)
            except Truncated:
                break
            if not crc_is_valid(records, batch):
                raise InvalidField(f"the CRC of the batch at offset {batch.base_offset} does not match")
            self._take(decode_batch(records, batch))
            position, next_offset = batch.end, batch.last_offset + 1
        if next_offset < 0:
            raise Truncated(f"{len(records)} bytes hold no whole batch")
        return next_offset

    def _take(self, pairs: Iterable[Pair]) -> None:
        for key, value in pairs:
            walk = Walk(key, compact=False)
            kind, group_id = walk.fixed(INT16), walk.text() or ""
            body = _body(value)
            if kind == _GROUP:
                self._take_group(group_id, value, body)
            elif kind == _OFFSET:
                group = self.groups.get(group_id) or self.groups.setdefault(group_id, Group(group_id, self._options))
                group.apply_offset(walk.text() or "", walk.fixed(INT32), None if body is None else _committed(body))
            else:
                raise InvalidField(f"unknown record kind {kind}; a later release has written it")

    def _take_group(self, group_id: str, value: bytes | None, body: Walk | None) -> None:
        group = Group(group_id, self._options)
        before = self.groups.get(group_id)
        if before is not None:
            group.offsets = before.offsets
        self.values.pop(group_id, None)
        if value is not None and body is not None:
            self.values[group_id] = value
            _read_group(body, group)
        self.groups[group_id] = group

    def restored(self) -> dict[str, Group]:
        """Return the groups that were not removed."""
        return {key: group for key, group in self.groups.items() if group.changed_ms >= 0 or group.offsets}


def _body(value: bytes | None) -> Walk | None:
    if value is None:
        return None
    walk = Walk(value, compact=False)
    version = walk.fixed(INT16)
    if version != _VERSION:
        raise InvalidField(f"unknown record version {version}; expected {_VERSION}")
    return walk


def _read_group(walk: Walk, group: Group) -> None:
    group.changed_ms, group.generation = walk.fixed(INT64), walk.fixed(INT32)
    group.protocol_type, group.protocol = walk.text() or "", walk.text(nullable=True)
    group.leader, is_assigned = walk.text() or "", walk.fixed(INT16)
    for _ in range(walk.count(1)):
        member = Member(
            member_id=walk.text() or "",
            instance_id=walk.text(nullable=True),
            client_id=walk.text() or "",
            session_s=walk.fixed(INT64) / 1000,
            rebalance_s=walk.fixed(INT64) / 1000,
            protocols=tuple(Protocol(walk.text() or "", _read_bytes(walk)) for _ in range(walk.count(1))),
            assignment=_read_bytes(walk),
        )
        group.members[member.member_id] = member
    if group.members:
        group.state = State.STABLE if is_assigned else State.COMPLETING


def _committed(walk: Walk) -> CommittedOffset:
    offset, leader_epoch, metadata = walk.fixed(INT64), walk.fixed(INT32), walk.text() or ""
    return CommittedOffset(offset, leader_epoch, metadata, walk.fixed(INT64), walk.fixed(INT64))


def _string(text: str | None) -> bytes:
    return encode_string(None if text is None else text.encode(), compact=False)


def _bytes(value: bytes) -> bytes:
    return INT32.pack(len(value)) + value


def _read_bytes(walk: Walk) -> bytes:
    return bytes(walk.skip(max(walk.fixed(INT32), 0)))


def _ms(seconds: float) -> bytes:
    return INT64.pack(round(seconds * 1000))
