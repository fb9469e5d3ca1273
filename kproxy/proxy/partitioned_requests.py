"""Check the Produce, Fetch and ListOffsets requests of one client connection, and begin them.

These are the requests that the compiled plain path (kproxy.plain) does not take; without the extension, all. One that
names a partition twice, or more than 4,096, gets INVALID_REQUEST; with acks=0 its connection is closed. The others go
to the core (kproxy.proxy.fanout).

Invariant: open requests have at most MAX_OPEN_PARTITIONS partitions together, or as many as a single request has. So an
event, such as the end of a broker's connection, concerns a bounded number, and its duration is bounded. Requests for
one partition do not count: their number is bounded by itself.

Produce. Versions 3–13 are served. Versions 0–2 are offered, because librdkafka drops compression otherwise, and refused
when sent, by closing the connection as Kafka does. acks other than -1, 0 and 1 get INVALID_REQUIRED_ACKS.

The deadline of a produce request counts from its first byte: a request that is past it when its last byte arrives is
not sent. For a client that waits for no answer (acks=0) it counts from the last byte, as such a client has no timer.

acks=0 has no answer. With `confirm_acks0` the proxy still sends acks=1 to brokers, and drops their answers. So it knows
which batches were refused, sends them to the new owner, keeps their order, and counts losses exactly. It always does
this for topics with a writer group.

Fetch. There are no fetch sessions (KIP-227): answers name session 0, and a request that continues a session gets
FETCH_SESSION_ID_NOT_FOUND. All brokers of a fetch wait for data, and the first broker's data is the answer
(kproxy.routing.reads).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from math import inf
from typing import Final

from kproxy.observe.busiest import Busiest
from kproxy.plain import compiled
from kproxy.proxy.access import ClientAccess
from kproxy.proxy.answer_order import AnswerOrder, Slot
from kproxy.proxy.apis import NOT_SERVED, Ranges
from kproxy.proxy.claims import Respond, refused_writes
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.fanout import FanoutShell
from kproxy.proxy.plain_path import CompiledPath
from kproxy.routing.merge import READ_GRACE_S, Exchange
from kproxy.routing.retry import deadline_s
from kproxy.routing.split import NOTHING_REFUSED, Entry
from kproxy.security.acls import Operation
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.error_codes import (
    FETCH_SESSION_ID_NOT_FOUND,
    INVALID_REQUEST,
    INVALID_REQUIRED_ACKS,
    NOT_LEADER_OR_FOLLOWER,
    UNSUPPORTED_VERSION,
)
from kproxy_codec.errors import CodecError, InvalidField, UnsupportedVersion
from kproxy_codec.fetch import FetchApi, response_ends
from kproxy_codec.framing import RequestHeader, parse_request_header, response_header
from kproxy_codec.list_offsets import LIST_OFFSETS_API
from kproxy_codec.partitioned import MAX_PARTITIONS, PartitionedApi, PartitionedRequest, encode_topics, with_length
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import PRODUCE_API, parse_produce, set_acks

FETCH_API: Final = FetchApi()
MAX_FETCH_WAIT_S: Final = 300.0
MAX_OPEN_PARTITIONS: Final = MAX_PARTITIONS

_ACKS: Final = (-1, 1, 0)
_APIS: Final[Mapping[int, PartitionedApi]] = {each.api_key: each for each in (PRODUCE_API, FETCH_API, LIST_OFFSETS_API)}


class NoRoom(Exception):
    """A request for `partitions` must wait until others are answered."""

    def __init__(self, partitions: int) -> None:
        super().__init__(f"no room for a request of {partitions} partitions until others are answered")
        self.partitions = partitions


class PartitionedRequests:
    """Begins requests of one client connection; `access` None: it may do anything.

    Each method serves one request whose first byte came at `now`. It returns the bytes that the answer may have beyond
    the request's own size, or None if it has no answer (acks=0). It raises CodecError, or NoRoom if the request must
    wait; then nothing is changed or sent.
    """

    __slots__ = ("_access", "_claims", "_clock", "_context", "_core", "_fanout", "_plain", "_topology")

    def __init__(self, context: ProxyContext, fanout: FanoutShell, access: ClientAccess | None = None) -> None:
        self._access = access
        self._context = context
        self._clock = context.clock
        self._topology = context.topology
        self._claims = fanout.claims
        self._fanout = fanout
        self._core = fanout.core
        self._plain = fanout.plain

    def produce(self, frame: memoryview, header: RequestHeader, now: float, slot: Slot) -> int | None:
        """Serve a produce request."""
        context = self._context
        request = parse_produce(frame, header)
        acks = request.acks
        if acks not in _ACKS or request.is_too_large or request.repeats_a_partition():
            if acks == 0:
                raise InvalidField("an acks=0 request names a partition twice, or too many partitions")
            return self._refuse(PRODUCE_API, request, slot, INVALID_REQUEST if acks in _ACKS else INVALID_REQUIRED_ACKS)
        self._check_room(request)
        began = self._clock() if acks == 0 else now
        deadline = began + deadline_s(request.timeout_ms, context.limits.deadline_cap_ms)
        if request.by_id:
            self._fanout.name_topics(request)
        if context.tally.topics is not None:
            self._count_topics(context.tally.topics, request)
        refused = self._refused_writes(request)
        # The next claimant of a topic must know when the last write is done.
        if acks == 0 and (context.confirm_acks0 or self._claims.gates(request)):
            set_acks(request, 1)
        self._follow()
        exchange = Exchange(PRODUCE_API, request, slot.sequence, deadline)
        exchange.is_silent = acks == 0
        self._fanout.submit(exchange, slot.fill, refused)
        return None if acks == 0 else 0

    def _count_topics(self, topics: Busiest, request: PartitionedRequest) -> None:
        """Count the request for its topics. Only topics of the table are named: clients may invent others."""
        for topic in request.topics:
            use = topics.find((topic.name,) if self._topology.partition_indexes(topic.name) else None)
            use.requests += 1
            for partition, start, end in zip(topic.partitions, topic.starts, topic.ends, strict=True):
                use.write(partition, end - start)

    def count_lost(self, frame: memoryview, ranges: Ranges) -> None:
        """Count the batches of a request that is not begun as lost if its client waits for no answer."""
        # A CodecError: it would have been refused.
        with contextlib.suppress(CodecError):
            header = parse_request_header(frame)
            lowest, highest = ranges.get(header.api_key, NOT_SERVED)
            if header.api_key != PRODUCE or not lowest <= header.api_version <= highest:
                return
            request = parse_produce(frame, header)
            for topic in request.topics if request.acks == 0 else ():
                name = self._topology.name_of(topic.name) or topic.name
                for _ in topic.partitions:
                    self._context.counters["acks0.undeliverable"] += 1
                    self._context.tally.drop(name, NOT_LEADER_OR_FOLLOWER)

    def _refused_writes(self, request: PartitionedRequest) -> Mapping[Entry, int]:
        """The entries that the client may not write, by the rules or for lack of a claim."""
        refused, own = NOTHING_REFUSED, self._context.own
        if own is not None and own.gated:
            refused = refused_writes(own, self._claims.connection, request)
            if refused:
                self._context.counters["own.gated"] += len(refused)
        if self._access is not None:
            refused = {**refused, **self._access.refused_writes(request)} or NOTHING_REFUSED
        return refused

    def fetch(self, frame: memoryview, header: RequestHeader, now: float, slot: Slot) -> int | None:
        """Serve a fetch request."""
        self._fanout.take_reads()
        request = FETCH_API.parse_request(frame, header)
        if request.continues_session:
            head, tail = response_ends(header.api_version, 0, [], FETCH_SESSION_ID_NOT_FOUND)
            answer_header = response_header(header.api_key, header.api_version, header.correlation_id)
            self._context.tally.error(header.api_key, FETCH_SESSION_ID_NOT_FOUND)
            slot.fill(with_length([answer_header + head, *encode_topics([], flexible=request.flexible), tail]))
            return 0
        if request.is_too_large or request.repeats_a_partition():
            return self._refuse(FETCH_API, request, slot, INVALID_REQUEST)
        self._check_room(request)
        if request.by_id:
            self._fanout.name_topics(request)
        refused = NOTHING_REFUSED
        respond: Respond = slot.fill
        if self._claims.connection is not None:
            refused, respond = self._claims.read(request, slot.fill)
            self._context.counters["own.fetch_gated"] += len(refused)
        if self._access is not None:
            refused = {**refused, **self._access.refused(Operation.READ, request)} or NOTHING_REFUSED
        FETCH_API.admit(request)
        wait_s = min(max(request.max_wait_ms, 0) / 1000, MAX_FETCH_WAIT_S)
        exchange = Exchange(FETCH_API, request, slot.sequence, inf)
        exchange.wait_s = wait_s
        self._follow()
        self._fanout.submit(exchange, respond, refused)
        return min(max(request.max_bytes, 0), self._context.limits.max_answer_bytes)

    def list_offsets(self, frame: memoryview, header: RequestHeader, now: float, slot: Slot) -> int | None:
        """Serve a ListOffsets request; its answer is as small as the request."""
        self._fanout.take_reads()
        request = LIST_OFFSETS_API.parse_request(frame, header)
        if request.is_too_large or request.repeats_a_partition():
            return self._refuse(LIST_OFFSETS_API, request, slot, INVALID_REQUEST)
        self._check_room(request)
        LIST_OFFSETS_API.admit(request)
        self._follow()
        refused: Mapping[Entry, int] = NOTHING_REFUSED
        if self._access is not None:
            refused = self._access.refused(Operation.DESCRIBE, request)
        self._fanout.submit(Exchange(LIST_OFFSETS_API, request, slot.sequence, now + READ_GRACE_S), slot.fill, refused)
        return 0

    def refuse_version(self, frame: memoryview, header: RequestHeader, now: float, slot: Slot) -> int:
        """Answer a request of a version that is not offered."""
        api = _APIS[header.api_key]
        request = api.parse_request(frame, header)
        if request.acks == 0:
            raise UnsupportedVersion("an acks=0 request has a version that is not offered, and no answer to say so")
        return self._refuse(api, request, slot, UNSUPPORTED_VERSION)

    def _follow(self) -> None:
        """Follow the topology before a request begins."""
        if not self._fanout.follows:
            self._fanout.follow()

    def _refuse(self, api: PartitionedApi, request: PartitionedRequest, slot: Slot, error_code: int) -> int:
        """Answer each partition with the same error."""
        self._context.tally.error(api.api_key, error_code, partitions=request.partition_count)
        slot.fill(refuse(api, request, error_code))
        return 0

    # Room

    def _check_room(self, request: PartitionedRequest) -> None:
        """Raises NoRoom if a request must wait; called before any of it changes."""
        # Usually no multi-partition request is open. This runs for every request.
        if self._core.open_partitions or self._plain.open_partitions:
            partitions = request.partition_count
            if not self.has_room_for(partitions):
                raise NoRoom(partitions)

    def has_room_for(self, partitions: int) -> bool:
        """Whether a request for this many partitions may be begun."""
        taken = self._core.open_partitions + self._plain.open_partitions
        return not taken or taken + partitions <= MAX_OPEN_PARTITIONS


def plain_path(context: ProxyContext, fanout: FanoutShell, answers: AnswerOrder) -> CompiledPath | None:
    """Give a client's core its compiled plain path, and return it; None if it is not built or switched off."""
    if compiled is not None:
        fanout.plain.path = compiled.CompiledPath(fanout, answers, context, _parse, _exchange)
    return fanout.plain.path


def _parse(fanout: FanoutShell, frame: memoryview, correlation_id: int) -> PartitionedRequest:
    request = parse_produce(frame, parse_request_header(frame)._replace(correlation_id=correlation_id))
    if request.by_id:
        fanout.name_topics(request)
    return request


def _exchange(request: PartitionedRequest, sequence: int, deadline: float) -> Exchange:
    return Exchange(PRODUCE_API, request, sequence, deadline)


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
