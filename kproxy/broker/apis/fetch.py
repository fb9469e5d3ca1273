"""Fetch, versions 4-12.

- Sessionless (KIP-227): every answer says session 0; a request that names one gets FETCH_SESSION_ID_NOT_FOUND.
- Waits up to max_wait_ms until min_bytes have come, woken by appends; an error in any partition ends the wait.
- The first batch of the answer comes whole, however large; beyond that the limits of the request, of each partition and
  of this broker hold. The last batch may be cut short.
- Not the owner: 6. Outside of the log: OFFSET_OUT_OF_RANGE. Another leader epoch: 74 or 75 (KIP-320).
- replica_id >= 0 is refused: there are no followers yet, and a client that plays one would move the high watermark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

from codec import error_codes
from codec.api_keys import FETCH
from codec.fetch import (
    NO_SESSION,
    TOPIC_IDS_FROM,
    FetchRequest,
    PartitionFetched,
    parse_fetch,
    partition_fetch,
    response_ends,
    result_entry,
)
from codec.partitioned import encode_topics
from codec.primitives import Buffer
from kproxy.broker.context import TAKE_TIMEOUT_S, Body, Broker, CloseConnection, Request
from kproxy.broker.partition import Partition, ReadResult

API_KEY = FETCH
MIN_VERSION = 4
MAX_VERSION = TOPIC_IDS_FROM - 1
# Nobody has to wait longer, whatever it asks for: a client that is gone must not be waited for long.
MAX_WAIT_MS = 60_000


class _Answer(NamedTuple):
    body: Body
    size_in_bytes: int
    has_errors: bool


def handle(broker: Broker, request: Request) -> Body | Awaitable[Body]:
    """Answer at once where there is enough, else when there is."""
    fetch = parse_fetch(request.frame, request.header)
    if fetch.replica_id >= 0:
        raise CloseConnection(f"Fetch with replica_id {fetch.replica_id}: this broker has no followers")
    if fetch.session_id != NO_SESSION:
        head, tail = response_ends(request.header.api_version, 0, [], error_codes.FETCH_SESSION_ID_NOT_FOUND)
        return [head, *encode_topics([], flexible=fetch.flexible), tail]
    if broker.takeable([(topic.name, topic.partitions) for topic in fetch.topics]):
        return _wait(broker, fetch)
    answer = _read(broker, fetch)
    return answer.body if _is_enough(answer, fetch) else _wait(broker, fetch)


def _is_enough(answer: _Answer, fetch: FetchRequest) -> bool:
    return answer.has_errors or answer.size_in_bytes >= fetch.min_bytes or fetch.max_wait_ms <= 0 or not fetch.topics


async def _wait(broker: Broker, fetch: FetchRequest) -> Body:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(fetch.max_wait_ms, MAX_WAIT_MS) / 1000
    wanted = [(topic.name, topic.partitions) for topic in fetch.topics]
    await broker.leases.take(broker.takeable(wanted), TAKE_TIMEOUT_S)
    while True:
        woken: asyncio.Future[None] = loop.create_future()

        def wake(woken: asyncio.Future[None] = woken) -> None:
            if not woken.done():
                woken.set_result(None)

        led = [partition for name, indexes in wanted for index in indexes if (partition := broker.led(name, index))]
        answer = _read(broker, fetch)
        left = deadline - loop.time()
        if _is_enough(answer, fetch) or left <= 0 or broker.leases.stopping:
            return answer.body
        for partition in led:
            partition.add_waiter(wake)
        try:
            await asyncio.wait([woken], timeout=left)
        finally:
            for partition in led:
                partition.remove_waiter(wake)


def _read(broker: Broker, fetch: FetchRequest) -> _Answer:
    left = min(fetch.max_bytes, broker.config.fetch_max_bytes)
    size, has_errors = 0, False
    topics: list[tuple[bytes, list[Buffer], int]] = []
    for topic in fetch.topics:
        entries: list[Buffer] = []
        for ordinal, index in enumerate(topic.partitions):
            partition = broker.led(topic.name, index)
            asked = partition_fetch(fetch, topic.starts[ordinal])
            limit = min(asked.max_bytes, left)
            error_code, records = _read_one(
                broker, partition, (topic.name, index), asked.current_leader_epoch, asked.fetch_offset, limit, size > 0
            )
            size += len(records)
            left -= len(records)
            has_errors = has_errors or error_code != error_codes.NONE
            high_watermark, log_start_offset = -1, -1
            if partition is not None and error_code in (error_codes.NONE, error_codes.OFFSET_OUT_OF_RANGE):
                high_watermark, log_start_offset = partition.high_watermark, partition.log_start_offset
            fetched = PartitionFetched(index, error_code, high_watermark, log_start_offset, None, records)
            entries += result_entry(fetch.header.api_version, fetched)
        topics.append((topic.name, entries, len(topic.partitions)))
    head, tail = response_ends(fetch.header.api_version, 0, [])
    return _Answer([head, *encode_topics(topics, flexible=fetch.flexible), tail], size, has_errors)


def _read_one(
    broker: Broker,
    partition: Partition | None,
    name: tuple[bytes, int],
    leader_epoch: int,
    offset: int,
    limit: int,
    has_records: bool,
) -> ReadResult:
    """One partition's records; only the first of the whole answer may be more than `limit` bytes."""
    if partition is None or not partition.serves_reads():
        return ReadResult(broker.refusal(name[0].decode(errors="replace"), name[1]))
    error_code = partition.check_leader_epoch(leader_epoch)
    if error_code != error_codes.NONE:
        return ReadResult(error_code)
    result = partition.read(offset, limit)
    return ReadResult(result.error_code) if has_records and len(result.records) > limit else result
