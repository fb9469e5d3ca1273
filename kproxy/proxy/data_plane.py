"""Check produce and read requests and submit them to the fan-out.

A request that names a partition twice, or more than 4,096 partitions, gets INVALID_REQUEST.

Produce. Versions 3–13 are served. Versions 0–2 are offered, because librdkafka drops compression otherwise, and refused
when sent, by closing the connection as Kafka does. acks other than -1, 0 and 1 get INVALID_REQUIRED_ACKS.

The deadline of a produce request counts from its first byte: a request that is past it when its last byte arrives is
not sent. For a client that waits for no answer (acks=0) it counts from the last byte, as such a client has no timer.

acks=0 has no answer. With `confirm_acks0` brokers are asked for acks=1 all the same and their answers end here. So the
proxy knows which batches were refused, sends them to the new owner, keeps their order, and counts losses exactly. For
topics with a writer group this is always so.

Fetch. There are no fetch sessions (KIP-227): answers name session 0, and a request that continues a session gets
FETCH_SESSION_ID_NOT_FOUND. If one broker leads all partitions of a fetch, that broker waits for data. Otherwise all
brokers are asked without waiting, and again until there is enough or the fetch's time is over.
"""

from __future__ import annotations

from kproxy.proxy.answer_order import Slot
from kproxy.proxy.claims import Respond, refused_writes
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.fanout import FanoutShell
from kproxy.routing.retry import deadline_s
from kproxy.routing.split import NOTHING_REFUSED
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.error_codes import FETCH_SESSION_ID_NOT_FOUND, INVALID_REQUEST, INVALID_REQUIRED_ACKS
from kproxy_codec.errors import InvalidField
from kproxy_codec.fetch import NO_SESSION, FetchApi, response_ends
from kproxy_codec.framing import RequestHeader, response_header
from kproxy_codec.list_offsets import LIST_OFFSETS_API
from kproxy_codec.partitioned import PartitionedApi, PartitionedRequest, encode_topics, with_length
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import PRODUCE_API, parse_produce, set_acks

FETCH_API = FetchApi()
MAX_FETCH_WAIT_S = 300.0
# Time for a broker's answer beyond the time that a read itself may wait.
READ_GRACE_S = 30.0

_ACKS = (-1, 1, 0)


def produce(
    context: ProxyContext, fanout: FanoutShell, frame: memoryview, header: RequestHeader, now: float, slot: Slot
) -> int | None:
    """Serve one produce request whose first byte came at `now`.

    Returns the bytes that its answer may have beyond the request's own size, or None if it has no answer (acks=0).
    Raises CodecError, and NoRoom if it has to wait.
    """
    request = parse_produce(frame, header)
    acks = request.acks
    if acks not in _ACKS or request.is_too_large or request.repeats_a_partition():
        if acks == 0:
            raise InvalidField("an acks=0 request names a partition twice, or too many of them")
        refusal = INVALID_REQUEST if acks in _ACKS else INVALID_REQUIRED_ACKS
        context.tally.error(PRODUCE, refusal, partitions=request.partition_count)
        slot.fill(refuse(PRODUCE_API, request, refusal))
        return 0
    fanout.admit(request)
    began = context.clock() if acks == 0 else now
    deadline = began + deadline_s(request.timeout_ms, context.limits.deadline_cap_ms)
    if request.by_id:
        fanout.name_topics(request)
    refused = NOTHING_REFUSED
    if context.own is not None and context.own.gated:
        refused = refused_writes(context.own, fanout.claims.connection, request)
        if refused:
            context.counters["own.gated"] += len(refused)
    if acks == 0 and (context.confirm_acks0 or _is_gated(context, request)):
        set_acks(request, 1)
    fanout.submit(PRODUCE_API, request, slot, deadline=deadline, silent=acks == 0, refused=refused)
    return None if acks == 0 else 0


def _is_gated(context: ProxyContext, request: PartitionedRequest) -> bool:
    """Whether a topic has a writer group: its next claimant must know when the last of this is written."""
    return context.own is not None and any(topic.name in context.own.gated for topic in request.topics)


def fetch(
    context: ProxyContext, fanout: FanoutShell, frame: memoryview, header: RequestHeader, now: float, slot: Slot
) -> int | None:
    """Serve one fetch request; return the bytes that its answer may have.

    Raises CodecError, NoRoom.
    """
    request = FETCH_API.parse_request(frame, header)
    if request.session_id != NO_SESSION:
        head, tail = response_ends(header.api_version, 0, [], FETCH_SESSION_ID_NOT_FOUND)
        answer_header = response_header(header.api_key, header.api_version, header.correlation_id)
        context.tally.error(FETCH, FETCH_SESSION_ID_NOT_FOUND)
        slot.fill(with_length([answer_header + head, *encode_topics([], flexible=request.flexible), tail]))
        return 0
    if request.is_too_large or request.repeats_a_partition():
        context.tally.error(FETCH, INVALID_REQUEST, partitions=request.partition_count)
        slot.fill(refuse(FETCH_API, request, INVALID_REQUEST))
        return 0
    fanout.admit(request)
    refused = NOTHING_REFUSED
    respond: Respond = slot.fill
    if fanout.claims.connection is not None:
        refused, respond = fanout.claims.read(request, slot.fill)
        context.counters["own.fetch_gated"] += len(refused)
    wait_s = min(max(request.max_wait_ms, 0) / 1000, MAX_FETCH_WAIT_S)
    deadline = now + wait_s + READ_GRACE_S
    fanout.submit(
        FETCH_API, request, slot, deadline=deadline, respond=respond, look_until=now + wait_s, refused=refused
    )
    return min(max(request.max_bytes, 0), context.limits.max_answer_bytes)


def list_offsets(
    context: ProxyContext, fanout: FanoutShell, frame: memoryview, header: RequestHeader, now: float, slot: Slot
) -> int | None:
    """Serve one ListOffsets request; its answer is as small as itself.

    Raises CodecError, NoRoom.
    """
    request = LIST_OFFSETS_API.parse_request(frame, header)
    if request.is_too_large or request.repeats_a_partition():
        context.tally.error(LIST_OFFSETS, INVALID_REQUEST, partitions=request.partition_count)
        slot.fill(refuse(LIST_OFFSETS_API, request, INVALID_REQUEST))
        return 0
    fanout.admit(request)
    fanout.submit(LIST_OFFSETS_API, request, slot, deadline=now + READ_GRACE_S)
    return 0


def refuse(api: PartitionedApi, request: PartitionedRequest, error_code: int) -> list[Buffer]:
    """Build an answer that gives every partition the same error, once."""
    header = request.header
    topics: dict[bytes, dict[int, None]] = {}
    for topic in request.topics:
        topics.setdefault(topic.wire, {}).update(dict.fromkeys(topic.partitions))
    errors = [
        (wire, [api.error_entry(header.api_version, index, error_code) for index in partitions], len(partitions))
        for wire, partitions in topics.items()
    ]
    head, tail = api.response_ends(header.api_version, 0, [])
    return with_length(
        [
            response_header(header.api_key, header.api_version, header.correlation_id) + head,
            *encode_topics(errors, flexible=request.flexible, by_id=request.by_id),
            tail,
        ]
    )
