"""ListOffsets, versions 1-9.

- Timestamp -1: the high watermark, or OFFSET_NOT_AVAILABLE until it has reached the epoch of a new leader (KIP-207); -2
  and -4: the log's start; -3: the largest timestamp (version 7); -5 (tiered storage): nothing. From 0: the first batch
  with a record at or after it, answered with the batch's own first timestamp and offset; records are not unpacked, so a
  client may get a few earlier records.
- Nothing found: offset -1, timestamp -1, no error. Not the owner: 6. Another leader epoch: 74 or 75 (KIP-320).
- replica_id >= 0 is refused, as for Fetch.
"""

from __future__ import annotations

from collections.abc import Awaitable

import structlog

from kproxy.broker.context import Body, Broker, CloseConnection, Request
from kproxy.broker.partition import Partition
from kproxy.broker.segment import LogFailed, TimestampAndOffset
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import LIST_OFFSETS

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
_NOTHING = TimestampAndOffset(-1, -1)
_logger = structlog.get_logger(__name__)


def handle(broker: Broker, request: Request) -> Body | Awaitable[Body | None]:
    """Answer at once, unless a partition has to be taken first."""
    message = control.decode_request(LIST_OFFSETS, request.header.api_version, request.body)
    if message.replica_id >= 0:
        raise CloseConnection(f"ListOffsets with replica_id {message.replica_id}: this broker has no followers")
    wanted = [(topic.name.encode(), [each.partition_index for each in topic.partitions]) for topic in message.topics]
    takeable = broker.takeable(wanted)
    if takeable:
        return broker.take_then(takeable, lambda: _list(broker, message))
    return _list(broker, message)


def _list(broker: Broker, message: control.Message) -> Body:
    topics = [
        {"name": topic.name, "partitions": [_list_one(broker, topic.name, asked) for asked in topic.partitions]}
        for topic in message.topics
    ]
    return [control.encode_response(control.build_response(LIST_OFFSETS, message.version, topics=topics))]


def _list_one(broker: Broker, topic: str, asked: control.Message) -> dict[str, int]:
    index = asked.partition_index
    partition = broker.led(topic.encode(), index)
    if partition is None or not partition.serves_reads():
        return {"partition_index": index, "error_code": broker.refusal(topic, index)}
    error_code = partition.check_leader_epoch(asked.current_leader_epoch)
    if error_code != error_codes.NONE:
        return {"partition_index": index, "error_code": error_code}
    try:
        found = _find(partition, asked.timestamp)
    except (OSError, LogFailed) as error:
        _logger.error("timestamps not read", topic=topic, partition=index, reason=str(error))
        return {"partition_index": index, "error_code": error_codes.KAFKA_STORAGE_ERROR}
    if found is None:
        return {"partition_index": index, "error_code": error_codes.OFFSET_NOT_AVAILABLE}
    leader_epoch = partition.leader_epoch if found.offset >= 0 else -1
    return {
        "partition_index": index,
        "error_code": error_codes.NONE,
        "timestamp": found.timestamp,
        "offset": found.offset,
        "leader_epoch": leader_epoch,
    }


def _find(partition: Partition, timestamp: int) -> TimestampAndOffset | None:
    """Find an offset; None: not available yet. Raises OSError, LogFailed."""
    if timestamp == LATEST:
        latest = partition.latest_offset()
        return None if latest is None else TimestampAndOffset(-1, latest)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return TimestampAndOffset(-1, partition.log_start_offset)
    if timestamp == MAX_TIMESTAMP:
        return partition.max_timestamp()
    if timestamp < 0:
        return _NOTHING
    return partition.find_timestamp(timestamp) or _NOTHING
