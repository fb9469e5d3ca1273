"""Fetch and ListOffsets: the same fan-out as Produce, with the rules of reads.

There are no fetch sessions (KIP-227): an answer names session 0, and a request that continues one is told that it is
not found. A fetch whose partitions lie with one broker waits for data at that broker; one that spans brokers asks them
all without waiting, and again until there is enough or its time is up.
"""

from __future__ import annotations

from kproxy.proxy.answer_order import Slot
from kproxy.proxy.claims import Respond
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.fanout import FanoutShell
from kproxy.proxy.produce import refuse
from kproxy.routing.split import NOTHING_REFUSED
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS
from kproxy_codec.error_codes import FETCH_SESSION_ID_NOT_FOUND, INVALID_REQUEST
from kproxy_codec.fetch import NO_SESSION, FetchApi, response_ends
from kproxy_codec.headers import RequestHeader, response_header
from kproxy_codec.list_offsets import LIST_OFFSETS_API
from kproxy_codec.partitioned import encode_topics, with_length

FETCH_API = FetchApi()
MAX_FETCH_WAIT_S = 300.0
# What a broker is given beyond the time a read may wait by its own word.
READ_GRACE_S = 30.0


def fetch(
    context: ProxyContext, fanout: FanoutShell, frame: memoryview, header: RequestHeader, now: float, slot: Slot
) -> int | None:
    """Serve one fetch request; how many bytes it may bring. Raises CodecError, NoRoom."""
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
    if fanout.claims is not None:
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
    """Serve one ListOffsets request; its answer is as small as itself. Raises CodecError, NoRoom."""
    request = LIST_OFFSETS_API.parse_request(frame, header)
    if request.is_too_large or request.repeats_a_partition():
        context.tally.error(LIST_OFFSETS, INVALID_REQUEST, partitions=request.partition_count)
        slot.fill(refuse(LIST_OFFSETS_API, request, INVALID_REQUEST))
        return 0
    fanout.admit(request)
    fanout.submit(LIST_OFFSETS_API, request, slot, deadline=now + READ_GRACE_S)
    return 0
