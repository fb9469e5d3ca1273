"""Handle Fetch from clients, ListOffsets and OffsetForLeaderEpoch.

Fetch, versions 4-18 (followers fetch in another way: `replication.open_fetches`)
- There are no sessions (KIP-227): every answer has session 0; a request that continues one gets
  FETCH_SESSION_ID_NOT_FOUND.
- The answer waits up to max_wait_ms for min_bytes. An error of any partition ends the wait. A move of the high
  watermark causes another look. last_fetched_epoch is ignored: no answer to a client has a diverging epoch.
- The first batch of the answer is whole, however large; beyond that the limits of the request, of each partition and of
  this broker hold. The last batch may be partial.
- An offset outside the log gets OFFSET_OUT_OF_RANGE. From version 13 an unknown topic id gets UNKNOWN_TOPIC_ID.
- A client with replica_id >= 0 is refused: it would move the high watermark.

ListOffsets, versions 1-11
- Timestamp -1: the high watermark, or OFFSET_NOT_AVAILABLE until it has reached the epoch of a new leader (KIP-207); -2
  and -4: the log's start; -3: the largest timestamp; -5, -6 (tiered storage): nothing. Any other below 0, and one that
  Kafka has only in later versions of the request: UNSUPPORTED_VERSION. From 0: the first batch with a record at or
  after it, answered with the batch's own first timestamp and offset; records are not unpacked, so a client may get a
  few earlier records.
- If nothing is found: offset -1, timestamp -1, no error.
- A partition named twice gets INVALID_REQUEST. A request from a replica is answered like a consumer's.

OffsetForLeaderEpoch, versions 2-4 (KIP-320: consumers check their position with it after the leader has changed)
- The answer is the largest epoch up to the requested one, and its end; -1 and -1 for an epoch that is not known yet.

All three answer 6 (NOT_LEADER_OR_FOLLOWER) for a partition that this broker does not lead, and 74 (FENCED_LEADER_EPOCH)
or 75 (UNKNOWN_LEADER_EPOCH) for another leader epoch than the current one (KIP-320).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import NamedTuple

import structlog

from kproxy.broker.context import Answer, Body, Broker, CloseConnection, Request
from kproxy.broker.partition import NO_EPOCH, Partition, leader_end_for
from kproxy.broker.replication.open_fetches import MAX_WAIT_MS
from kproxy.broker.segment import LogFailed, TimestampAndOffset
from kproxy_codec import control, error_codes
from kproxy_codec.fetch import (
    FetchRequest,
    PartitionFetch,
    PartitionFetched,
    parse_fetch,
    partition_fetch,
    response_ends,
    result_entry,
)
from kproxy_codec.partitioned import encode_topics
from kproxy_codec.primitives import Buffer


class _Found(NamedTuple):
    """The results by topic, in the order of the request. `is_urgent`: a partition has an error."""

    topics: list[list[PartitionFetched]]
    size_in_bytes: int
    is_urgent: bool


def handle(broker: Broker, request: Request) -> Answer:
    """Answer a client's fetch, at once if there is enough."""
    fetch = parse_fetch(request.frame, request.header)
    if fetch.replica_id >= 0:
        raise CloseConnection(f"Fetch has replica_id {fetch.replica_id}: followers fetch on the replication listener")
    broker.name_topics(fetch)
    deadline = asyncio.get_running_loop().time() + min(fetch.max_wait_ms, MAX_WAIT_MS) / 1000
    wanted = [(topic.name, topic.partitions) for topic in fetch.topics]
    return broker.take_then(wanted, lambda: _serve(broker, fetch, deadline))


def _serve(broker: Broker, fetch: FetchRequest, deadline: float) -> Body | Awaitable[Body]:
    if fetch.continues_session:
        head, tail = response_ends(fetch.header.api_version, 0, [], error_codes.FETCH_SESSION_ID_NOT_FOUND)
        return [head, *encode_topics([], flexible=fetch.flexible), tail]
    found = _read(broker, fetch)
    if _is_enough(found, fetch):
        return _encode(fetch, found)
    # The wait begins in the same step that found too little, so that every later append wakes it.
    news = asyncio.Event()
    return _wait(broker, fetch, deadline, news, _watch(broker, fetch, news))


def _is_enough(found: _Found, fetch: FetchRequest) -> bool:
    return found.is_urgent or found.size_in_bytes >= fetch.min_bytes or fetch.max_wait_ms <= 0 or not fetch.topics


def _watch(broker: Broker, fetch: FetchRequest, news: asyncio.Event) -> list[Partition]:
    """Return the partitions of a fetch; the next change of any of them sets `news`."""
    led = (broker.led(topic.name, index) for topic in fetch.topics for index in topic.partitions)
    watched = [partition for partition in led if partition is not None]
    for partition in watched:
        partition.add_waiter(news.set)
    return watched


async def _wait(
    broker: Broker, fetch: FetchRequest, deadline: float, news: asyncio.Event, watched: list[Partition]
) -> Body:
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                await news.wait()
        except TimeoutError:
            pass
        finally:
            for partition in watched:
                partition.remove_waiter(news.set)
        found = _read(broker, fetch)
        if _is_enough(found, fetch) or broker.replica_manager.stopping or asyncio.get_running_loop().time() >= deadline:
            return _encode(fetch, found)
        news.clear()
        watched = _watch(broker, fetch, news)


def _read(broker: Broker, fetch: FetchRequest) -> _Found:
    left = min(fetch.max_bytes, broker.config.fetch_max_bytes)
    size, is_urgent = 0, False
    topics: list[list[PartitionFetched]] = []
    broker.name_topics(fetch)
    for topic in fetch.topics:
        results: list[PartitionFetched] = []
        for start in topic.starts:
            asked = partition_fetch(fetch, start)
            limit = min(asked.max_bytes, left)
            partition = broker.led(topic.name, asked.partition_index)
            if partition is not None:
                fetched = _fetch_as_client(partition, asked, limit)
            else:
                refusal = broker.refusal_in(fetch, topic, asked.partition_index)
                fetched = PartitionFetched(asked.partition_index, refusal)
            if size and len(fetched.records) > limit:
                # Only the first batch of the whole answer may exceed the limits.
                fetched = fetched._replace(records=b"")
            size += len(fetched.records)
            left -= len(fetched.records)
            is_urgent = is_urgent or fetched.error_code != error_codes.NONE or fetched.diverging_epoch is not None
            results.append(fetched)
        topics.append(results)
    return _Found(topics, size, is_urgent)


def _encode(fetch: FetchRequest, found: _Found) -> Body:
    """Encode the answer."""
    version = fetch.header.api_version
    topics: list[tuple[bytes, list[Buffer], int]] = []
    for topic, results in zip(fetch.topics, found.topics, strict=True):
        entries = [part for fetched in results for part in result_entry(version, fetched)]
        topics.append((topic.wire, entries, len(results)))
    head, tail = response_ends(version, 0, [])
    return [head, *encode_topics(topics, flexible=fetch.flexible, by_id=fetch.by_id), tail]


def _fetch_as_client(partition: Partition, asked: PartitionFetch, max_bytes: int) -> PartitionFetched:
    if not partition.serves_reads():
        return PartitionFetched(asked.partition_index, error_codes.NOT_LEADER_OR_FOLLOWER)
    error_code = partition.check_leader_epoch(max(asked.current_leader_epoch, NO_EPOCH))
    if error_code != error_codes.NONE:
        return PartitionFetched(asked.partition_index, error_code)
    error_code, records = partition.read(asked.fetch_offset, max_bytes)
    if error_code not in (error_codes.NONE, error_codes.OFFSET_OUT_OF_RANGE):
        return PartitionFetched(asked.partition_index, error_code)
    return PartitionFetched(
        asked.partition_index, error_code, partition.high_watermark, partition.log_start_offset, None, records
    )


LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
EARLIEST_PENDING_UPLOAD = -6
# The lowest request version in which Kafka knows each.
_KNOWN_FROM = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
_NOTHING = TimestampAndOffset(-1, -1)
_logger = structlog.get_logger(__name__)


def handle_list_offsets(broker: Broker, request: Request) -> Answer:
    """Answer ListOffsets at once, unless a partition must be taken first."""
    message = request.message()
    wanted = [(topic.name.encode(), [each.partition_index for each in topic.partitions]) for topic in message.topics]
    return broker.take_then(wanted, lambda: _list(broker, request, message))


def _list(broker: Broker, request: Request, message: control.Message) -> Body:
    named = Counter((topic.name, each.partition_index) for topic in message.topics for each in topic.partitions)
    topics: dict[str, dict[int, dict[str, int]]] = {topic.name: {} for topic in message.topics}
    for topic in message.topics:
        for asked in topic.partitions:
            index = asked.partition_index
            is_twice = named[topic.name, index] > 1
            listed = (
                {"error_code": error_codes.INVALID_REQUEST}
                if is_twice
                else _list_one(broker, topic.name, asked, message.version)
            )
            topics[topic.name][index] = {"partition_index": index, **listed}
    answered = [{"name": name, "partitions": list(partitions.values())} for name, partitions in topics.items()]
    return request.answer(topics=answered)


def _list_one(broker: Broker, topic: str, asked: control.Message, version: int) -> dict[str, int]:
    index = asked.partition_index
    if asked.timestamp < 0 and version < _KNOWN_FROM.get(asked.timestamp, version + 1):
        return {"error_code": error_codes.UNSUPPORTED_VERSION}
    partition = broker.led(topic.encode(), index)
    if partition is None or not partition.serves_reads():
        return {"error_code": broker.refusal(topic, index)}
    error_code = partition.check_leader_epoch(asked.current_leader_epoch)
    if error_code != error_codes.NONE:
        return {"error_code": error_code}
    try:
        found = _find(partition, asked.timestamp)
    except (OSError, LogFailed) as error:
        _logger.error("timestamps not read", topic=topic, partition=index, reason=str(error))
        return {"error_code": error_codes.KAFKA_STORAGE_ERROR}
    if found is None:
        return {"error_code": error_codes.OFFSET_NOT_AVAILABLE}
    leader_epoch = partition.leader_epoch if found.offset >= 0 else -1
    return {
        "error_code": error_codes.NONE,
        "timestamp": found.timestamp,
        "offset": found.offset,
        "leader_epoch": leader_epoch,
    }


def _find(partition: Partition, timestamp: int) -> TimestampAndOffset | None:
    """Find an offset; None if it is not available yet. Raises OSError, LogFailed."""
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


def handle_offset_for_leader_epoch(broker: Broker, request: Request) -> Body:
    """Answer OffsetForLeaderEpoch."""
    topics = [
        {"topic": topic.topic, "partitions": [_epoch_end(broker, topic.topic, each) for each in topic.partitions]}
        for topic in request.message().topics
    ]
    return request.answer(topics=topics)


def _epoch_end(broker: Broker, topic: str, asked: control.Message) -> dict[str, int]:
    nowhere = {"partition": asked.partition, "leader_epoch": -1, "end_offset": -1}
    partition = broker.led(topic.encode(), asked.partition)
    if partition is None or not partition.serves_reads():
        return nowhere | {"error_code": broker.refusal(topic, asked.partition)}
    error_code = partition.check_leader_epoch(asked.current_leader_epoch)
    if error_code != error_codes.NONE or not 0 <= asked.leader_epoch <= partition.leader_epoch:
        return nowhere | {"error_code": error_code}
    end = leader_end_for(partition.log, asked.leader_epoch)
    return nowhere | {"error_code": error_codes.NONE, "leader_epoch": end.leader_epoch, "end_offset": end.end_offset}
