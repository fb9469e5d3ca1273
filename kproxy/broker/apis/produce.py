"""Handle Produce, versions 3-13: append each batch to its partition's log.

- Offered from version 0, otherwise librdkafka silently drops compression; 0 to 2 close the connection.
- Each partition gets one batch of magic 2; it is appended as received, with its offset and leader epoch patched in.
- A partition that this broker does not lead gets 6 (NOT_LEADER_OR_FOLLOWER), and nothing is appended to it; from
  version 10 with its leader (KIP-951). This broker first takes a partition without an owner, if it may.
- An unknown topic or partition gets 3 (UNKNOWN_TOPIC_OR_PARTITION), an internal topic INVALID_TOPIC_EXCEPTION. From
  version 13 topics are named by id (KIP-516); an unknown one gets UNKNOWN_TOPIC_ID.
- If a partition is named twice, every partition gets INVALID_REQUEST. acks other than -1, 0, 1 get
  INVALID_REQUIRED_ACKS, transactional batches INVALID_TXN_STATE.
- acks=0 is not answered; after an error the connection is closed, as in Kafka, so that the client notices it.
- A writer that the partition's fence refuses (BindFences) gets POLICY_VIOLATION, whatever it sent. If the connection's
  fence is not yet kept for this topic, it is kept first; if that fails, LEADER_NOT_AVAILABLE.
- With `--flush always` no answer is sent before the records are on the disk; 7 (REQUEST_TIMED_OUT) if the disk fails.
  Only acks=0 does not wait for the disk.
- acks=-1 is answered when every in-sync replica has the records, within the request's time: else 7, or 20
  (NOT_ENOUGH_REPLICAS_AFTER_APPEND) if too few replicas stay in sync; 19 (NOT_ENOUGH_REPLICAS), before the append, if
  there are too few already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

from kproxy.broker.context import FENCE_TIMEOUT_S, Answer, Bindings, Body, Broker, CloseConnection, Request
from kproxy.broker.partition import ACKS_ALL, AppendResult, Partition
from kproxy.broker.producer_state import wall_ms
from kproxy.broker.topics import CONSUMER_OFFSETS
from kproxy.broker.validation import Refusal, check_records
from kproxy.broker.writer_fence import UNBOUND
from kproxy_codec import error_codes
from kproxy_codec.own import FenceBinding
from kproxy_codec.partitioned import PartitionedRequest, TopicSpan, encode_topics
from kproxy_codec.primitives import INT32, Buffer, encode_count, encode_tagged_fields
from kproxy_codec.produce import parse_produce, records_of, result_entry

_ACKS = (ACKS_ALL, 0, 1)
_LEADER_VERSION = 10
_NODE_ENDPOINTS_TAG = 0
_CONSUMER_OFFSETS = CONSUMER_OFFSETS.encode()


def handle(broker: Broker, request: Request) -> Answer:
    """Append the batches, in one step if no partition must be taken first."""
    produce, bindings = parse_produce(request.frame, request.header), request.bindings
    broker.name_topics(produce)
    wanted = [(topic.name, topic.partitions) for topic in produce.topics]

    def append() -> Answer:
        broker.name_topics(produce)
        unknown = _unknown_fences(broker, produce, bindings) if bindings else []
        return _keep_and_append(broker, produce, bindings, unknown) if unknown else _append(broker, produce, bindings)

    return broker.take_then(wanted, append)


class _Pending(NamedTuple):
    """A result that must wait before it is answered.

    It waits for every in-sync replica or, with acks=1, for this broker's disk. `at` is its index among the results.
    """

    at: int
    partition: Partition
    last_offset: int


def _unknown_fences(
    broker: Broker, produce: PartitionedRequest, bindings: Bindings
) -> list[tuple[Partition, FenceBinding]]:
    """List the partitions that do not yet know the fence to which this connection is bound."""
    unknown = []
    for topic in produce.topics:
        for index in topic.partitions:
            bound, partition = bindings.get((topic.name, index), UNBOUND), broker.led(topic.name, index)
            if partition is not None and partition.writers.is_above(bound):
                unknown.append((partition, FenceBinding(partition.topic, index, bound)))
    return unknown


async def _keep_and_append(
    broker: Broker, produce: PartitionedRequest, bindings: Bindings, unknown: list[tuple[Partition, FenceBinding]]
) -> Body | None:
    await broker.fences.settle_all(unknown, FENCE_TIMEOUT_S)
    broker.name_topics(produce)
    result = _append(broker, produce, bindings)
    return await result if isinstance(result, Awaitable) else result


def _append(broker: Broker, produce: PartitionedRequest, bindings: Bindings) -> Answer:
    refused = _refuse_all(produce)
    results: list[AppendResult] = []
    pending: list[_Pending] = []
    waits = produce.acks == ACKS_ALL or (produce.acks == 1 and broker.config.flush == "always")
    for topic in produce.topics:
        for ordinal, index in enumerate(topic.partitions):
            result = refused or _append_one(broker, produce, topic, ordinal, bindings)
            if waits and result.error_code == error_codes.NONE:
                partition = broker.led(topic.name, index)
                if partition is not None and not _is_settled(partition, produce.acks, result.last_offset):
                    pending.append(_Pending(len(results), partition, result.last_offset))
            results.append(result)
    return _wait_and_answer(broker, produce, results, pending) if pending else _answer(broker, produce, results)


def _is_settled(partition: Partition, acks: int, last_offset: int) -> bool:
    return partition.is_committed(last_offset) if acks == ACKS_ALL else partition.is_on_disk(last_offset)


async def _wait_and_answer(
    broker: Broker, produce: PartitionedRequest, results: list[AppendResult], pending: list[_Pending]
) -> Body | None:
    """Answer once everything is replicated, or on the disk. Sequential waits take no longer than the longest."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + produce.timeout_ms / 1000
    for each in pending:
        wait = each.partition.wait_for_isr if produce.acks == ACKS_ALL else each.partition.wait_for_disk
        error_code = await wait(each.last_offset, deadline - loop.time())
        if error_code != error_codes.NONE:
            results[each.at] = AppendResult(error_code)
    return _answer(broker, produce, results)


def _answer(broker: Broker, produce: PartitionedRequest, results: list[AppendResult]) -> Body | None:
    if produce.acks == 0:
        _close_on_failure(produce, results)
        return None
    version, at = produce.header.api_version, 0
    leaders: dict[int, tuple[str, int]] = {}
    answer: list[tuple[bytes, list[Buffer], int]] = []
    for topic in produce.topics:
        entries: list[Buffer] = []
        for index in topic.partitions:
            entries.append(_entry(broker, version, topic, index, results[at], leaders))
            at += 1
        answer.append((topic.wire, entries, len(entries)))
    flexible = produce.flexible
    tail = INT32.pack(0) + encode_tagged_fields(_endpoint_tags(leaders)) if flexible else INT32.pack(0)
    return [*encode_topics(answer, flexible=flexible, by_id=produce.by_id), tail]


def _close_on_failure(produce: PartitionedRequest, results: list[AppendResult]) -> None:
    """Close after an error with acks=0, as the client gets no other report."""
    names = [(topic.name, index) for topic in produce.topics for index in topic.partitions]
    failures = [
        f"{name.decode(errors='replace')}-{index}: {error_codes.name_of(result.error_code)}"
        for (name, index), result in zip(names, results, strict=True)
        if result.error_code != error_codes.NONE
    ]
    if failures:
        raise CloseConnection(f"an acks=0 request was not appended: {'; '.join(failures[:5])}")


def _refuse_all(produce: PartitionedRequest) -> AppendResult | None:
    if produce.acks not in _ACKS:
        return AppendResult(error_codes.INVALID_REQUIRED_ACKS, -1, f"acks={produce.acks}: -1, 0 and 1 are known")
    if produce.repeats_a_partition():
        return AppendResult(error_codes.INVALID_REQUEST, -1, "the request names a partition twice")
    return None


def _append_one(
    broker: Broker, produce: PartitionedRequest, topic: TopicSpan, ordinal: int, bindings: Bindings
) -> AppendResult:
    if topic.name == _CONSUMER_OFFSETS:
        return AppendResult(error_codes.INVALID_TOPIC_EXCEPTION, -1, "clients do not write to an internal topic")
    index = topic.partitions[ordinal]
    partition = broker.led(topic.name, index)
    if partition is None:
        return AppendResult(broker.refusal_in(produce, topic, index))
    bound = bindings.get((topic.name, index), UNBOUND) if bindings else UNBOUND
    records = records_of(produce, topic, ordinal)
    batch = check_records(records, produce.header.api_version, broker.config.message_max_bytes, wall_ms())
    if isinstance(batch, Refusal):
        return partition.refusal_of_writer(bound) or AppendResult(batch.error_code, -1, batch.error_message)
    return partition.append_as_leader(records, batch, produce.acks, bound)


def _entry(
    broker: Broker,
    version: int,
    topic: TopicSpan,
    index: int,
    result: AppendResult,
    leaders: dict[int, tuple[str, int]],
) -> bytes:
    led, current_leader = None, None
    if result.error_code == error_codes.NONE:
        led = broker.led(topic.name, index)
    elif result.error_code == error_codes.NOT_LEADER_OR_FOLLOWER and version >= _LEADER_VERSION:
        current_leader = broker.current_leader(topic.name.decode(), index)
        live = broker.view.brokers.get(current_leader[0])
        if live is None or live.node_id == broker.config.node_id:
            current_leader = None  # There is no live owner, or it is this broker, which is stopping.
        else:
            leaders[live.node_id] = (live.host, live.port)
    return result_entry(
        version,
        index,
        result.error_code,
        base_offset=result.base_offset,
        log_start_offset=led.log_start_offset if led is not None else -1,
        error_message=result.error_message,
        current_leader=current_leader,
    )


def _endpoint_tags(leaders: dict[int, tuple[str, int]]) -> list[tuple[int, bytes]]:
    """Encode the addresses of the leaders named in the entries (KIP-951)."""
    if not leaders:
        return []
    value = bytearray(encode_count(len(leaders), compact=True))
    for node_id, (host, port) in leaders.items():
        encoded = host.encode()
        value += INT32.pack(node_id) + encode_count(len(encoded), compact=True) + encoded + INT32.pack(port)
        value += encode_count(-1, compact=True) + encode_tagged_fields([])
    return [(_NODE_ENDPOINTS_TAG, bytes(value))]
