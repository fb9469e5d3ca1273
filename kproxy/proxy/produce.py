"""Produce: admit, judge, hand to the fan-out.

Versions 3–13 are served; 0–2 are offered, because librdkafka drops compression otherwise, and refused when sent, by
closing the connection, which is what Kafka does. A partition that stands in a request twice makes the whole request
INVALID_REQUEST, and so do more than 4,096 partitions; acks other than -1, 0 and 1 make it INVALID_REQUIRED_ACKS.

A request has its deadline from its first byte on: one that is over when the last byte has come is not sent any more. A
client that waits for no answer (acks=0) has no such timer, and its requests have until their last byte.

acks=0 has no answer. With `confirm_acks0` brokers are asked for acks=1 all the same and their answers end here: so the
proxy knows what was refused, sends it to the new owner, keeps its order, and counts exactly what is lost. So it is for
topics with a writer group in any case.
"""

from __future__ import annotations

from kproxy.proxy.answer_order import Slot
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.fanout import FanoutShell
from kproxy.proxy.owning import refused_writes
from kproxy.routing.retry import deadline_s
from kproxy.routing.split import NOTHING_REFUSED
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.error_codes import INVALID_REQUEST, INVALID_REQUIRED_ACKS
from kproxy_codec.errors import InvalidField
from kproxy_codec.headers import RequestHeader, response_header
from kproxy_codec.partitioned import PartitionedApi, PartitionedRequest, encode_topics, with_length
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import parse_produce, set_acks
from kproxy_codec.produce_response import PRODUCE_API

_ACKS = (-1, 1, 0)


def produce(
    context: ProxyContext, fanout: FanoutShell, frame: memoryview, header: RequestHeader, now: float, slot: Slot
) -> int | None:
    """Serve one produce request whose first byte came at `now`.

    Returns how many bytes its answer may hold beyond the request's own size, or None where it has no answer (acks=0).
    Raises CodecError, and NoRoom where it has to wait.
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
        refused = refused_writes(context.own, fanout.owning.holdings if fanout.owning is not None else None, request)
        if refused:
            context.counters["own.gated"] += len(refused)
    if acks == 0 and (context.confirm_acks0 or _is_gated(context, request)):
        set_acks(request, 1)
    fanout.submit(PRODUCE_API, request, slot, deadline=deadline, silent=acks == 0, refused=refused)
    return None if acks == 0 else 0


def _is_gated(context: ProxyContext, request: PartitionedRequest) -> bool:
    """Whether a topic has a writer group: whoever claims it next has to know when the last of this is written."""
    return context.own is not None and any(topic.name in context.own.gated for topic in request.topics)


def refuse(api: PartitionedApi, request: PartitionedRequest, error_code: int) -> list[Buffer]:
    """An answer that gives every partition of a request the same error, each once."""
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
