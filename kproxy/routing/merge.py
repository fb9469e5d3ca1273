"""Track one client request from its split to its answer.

States
  open       some entry of it (one partition) has no result, or it is about to be answered; a read may wait for more
  answered   its client has the answer, or with acks=0 it is done
  dropped    its client is gone and gets no answer

Transitions
  open -> answered
  open -> dropped

An entry is open while it has no result. It is done once it has a broker's result or an error code. kproxy.routing.reads
says when a read is answered; until then a later result replaces an earlier one (`find`).

Invariants
1. Every partition of the request is answered exactly once: a second result for an entry is ignored, except a read's,
   and the exchange is complete when the last entry is done.
2. The answer lists topics and partitions in the request's order.
3. `throttle_time_ms` is the maximum of the brokers'.
4. A result has the broker's own bytes, with leader hints blanked; an error's offsets and times are -1.
5. A merged read keeps the limits of its request as a single broker would (`fit`): results beyond them lose their
   records. The next read begins with the partition that was left out first, so that none starves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum, auto
from struct import Struct
from typing import Final, TypeAlias, cast

from kproxy.routing.retry import Attempts
from kproxy.routing.split import Entry, Selection, route, split_whole
from kproxy.routing.topology import NO_OWNER, Topology
from kproxy_codec.api_keys import FETCH, PRODUCE
from kproxy_codec.errors import CodecError, InvalidField
from kproxy_codec.fetch import as_fetch, beyond_limits, without_records
from kproxy_codec.partitioned import (
    PartitionedApi,
    PartitionedRequest,
    PartitionedResponse,
    Splitter,
    Tag,
    TopicSpan,
)
from kproxy_codec.primitives import INT32, Buffer, encode_count, encode_tagged_fields

# Time for a broker's answer to a read beyond the wait of the read itself, in seconds.
READ_GRACE_S: Final = 30.0

Partition: TypeAlias = tuple[bytes, int]
"""Topic, as requests name it, and partition index."""

_NO_TAGS = encode_tagged_fields([])
# length, correlation_id
_START = Struct(">ii")


class ExchangeState(IntEnum):
    """See the module's docstring."""

    OPEN = auto()
    ANSWERED = auto()
    DROPPED = auto()


_NEXT: Final[Mapping[ExchangeState, Sequence[ExchangeState]]] = {
    ExchangeState.OPEN: (ExchangeState.ANSWERED, ExchangeState.DROPPED),
    ExchangeState.ANSWERED: (),
    ExchangeState.DROPPED: (),
}


class Exchange:
    """A client's request of a partitioned API and the results so far; `deadline` is in seconds of the proxy's clock."""

    __slots__ = (
        "_ambiguous",
        "_attempts",
        "_results",
        "_sizes",
        "_splitter",
        "_tags",
        "api",
        "deadline",
        "is_ordered",
        "is_over",
        "is_read",
        "is_silent",
        "open_count",
        "payload_bytes",
        "refused",
        "request",
        "sequence",
        "shares",
        "state",
        "throttle_time_ms",
        "until",
        "wait_s",
    )

    def __init__(self, api: PartitionedApi, request: PartitionedRequest, sequence: int, deadline: float) -> None:
        self.api = api
        self.request = request
        self.state = ExchangeState.OPEN
        self.sequence = sequence
        self.deadline = deadline
        self.open_count = request.partition_count
        self.throttle_time_ms = 0
        # Whether its partitions keep the order of requests. Reads have no order, and acks=0 has no outcome.
        self.is_ordered = api.api_key == PRODUCE and request.acks != 0
        # Whether its client gets no answer (acks=0), even if brokers are asked to confirm.
        self.is_silent = False
        self.is_read = api.api_key == FETCH
        # Few exchanges need any of these.
        self._attempts: dict[Entry, Attempts] | None = None
        self._ambiguous: set[Entry] | None = None
        self._splitter: tuple[int, int, Splitter] | None = None
        self.payload_bytes = 0
        # Of a read: whether it is answered now, whatever it has found.
        self.is_over = False
        # The number of brokers in its last split.
        self.shares = 1
        # Of a read: how long it waits for data, the end of that in seconds of the proxy's clock, the entries that no
        # broker is asked for, and the bytes of records found so far, by entry.
        self.wait_s = 0.0
        self.until = 0.0
        self.refused: Collection[Entry] = ()
        self._sizes: dict[Entry, int] | None = None
        self._results: list[list[Buffer | None]] | None = None
        self._tags: list[Tag] | None = None

    @property
    def acks(self) -> int:
        return self.request.acks

    @property
    def timeout_ms(self) -> int:
        return self.request.timeout_ms

    def move(self, state: ExchangeState) -> None:
        """Change the state. Raises ValueError if there is no such transition."""
        if state not in _NEXT[self.state]:
            raise ValueError(
                f"request {self.sequence} cannot go from {self.state.name.lower()} to {state.name.lower()}"
            )
        self.state = state

    def attempts(self, entry: Entry) -> Attempts:
        """The failed attempts of an entry."""
        if self._attempts is None:
            self._attempts = {}
        attempts = self._attempts.get(entry)
        if attempts is None:
            attempts = self._attempts[entry] = Attempts()
        return attempts

    @property
    def has_attempts(self) -> bool:
        """Whether an attempt of an entry has failed."""
        return bool(self._attempts)

    def forget_attempts(self, entry: Entry) -> None:
        """Forget the failed attempts of an entry."""
        if self._attempts:
            self._attempts.pop(entry, None)

    def note_sent(self, entry: Entry, broker: int) -> None:
        """Note the broker of an entry that was sent without success; successes are not noted."""
        self.attempts(entry).sent_to = broker

    def sent_to(self, entry: Entry) -> int:
        """The last broker noted by `note_sent`; NO_OWNER if there is none."""
        attempts = self._attempts.get(entry) if self._attempts is not None else None
        return attempts.sent_to if attempts is not None else NO_OWNER

    @property
    def ambiguous(self) -> set[Entry]:
        """Entries that a broker may have appended in an earlier attempt."""
        if self._ambiguous is None:
            self._ambiguous = set()
        return self._ambiguous

    def splitter(self, pieces: int, least_bytes: int) -> Splitter:
        """The encoder of the request's parts, if it is split into `pieces`; see `piece_preamble`."""
        if self._splitter is None or self._splitter[:2] != (pieces, least_bytes):
            preamble = self.api.piece_preamble(self.request, pieces, least_bytes)
            self._splitter = (pieces, least_bytes, Splitter(self.request, preamble))
        return self._splitter[2]

    @property
    def complete(self) -> bool:
        return self.open_count == 0

    def begin_read(self, until: float, wait_s: float) -> None:
        """Begin a read that waits `wait_s` for data, to the time `until`; its deadline is READ_GRACE_S later."""
        self.until, self.wait_s, self.deadline = until, wait_s, until + READ_GRACE_S

    def selection(self, part: Selection | None) -> Selection:
        """The entries of a part of the request; all entries if `part` is None."""
        return split_whole(self.request.topics) if part is None else part

    def topic(self, entry: Entry) -> TopicSpan:
        return self.request.topics[entry[0]]

    def partition(self, entry: Entry) -> Partition:
        """An entry's topic and partition index."""
        topic = self.request.topics[entry[0]]
        return topic.name, topic.partitions[entry[1]]

    def asks_of_any(self, topics: Collection[bytes]) -> bool:
        """Whether the request has one of these topics."""
        return any(topic.name in topics for topic in self.request.topics)

    def route(self, entry: Entry, topology: Topology, taken_by: int) -> int:
        """The broker to send an entry to, or NO_OWNER; see `split.route`."""
        topic = self.request.topics[entry[0]]
        attempts = None if self._attempts is None else self._attempts.get(entry)
        return route(
            topology,
            topic.name,
            topic.partitions[entry[1]],
            is_nameless=self.request.is_nameless(topic),
            taken_by=taken_by,
            refused_by=() if attempts is None else attempts.refused_by,
        )

    def take(self, entry: Entry, result: Buffer) -> None:
        """Record an entry's bytes of the answer."""
        if self._results is None:
            self._results = [[None] * len(topic.partitions) for topic in self.request.topics]
        topic_place, ordinal = entry
        if self._results[topic_place][ordinal] is None:
            self._results[topic_place][ordinal] = result
            self.open_count -= 1

    def find(self, entry: Entry, result: Buffer, size: int) -> None:
        """Record what a read has found, with `size` bytes of records, in place of what it found before."""
        self.lose(entry)
        self.take(entry, result)
        if size:
            if self._sizes is None:
                self._sizes = {}
            self._sizes[entry] = size
            self.payload_bytes += size

    def lose(self, entry: Entry) -> None:
        """Discard what a read has found for an entry, which is open again."""
        if self._results is None or self._results[entry[0]][entry[1]] is None:
            return
        self._results[entry[0]][entry[1]] = None
        self.open_count += 1
        if self._sizes is not None:
            self.payload_bytes -= self._sizes.pop(entry, 0)

    def take_all(self, selection: Selection, results: Sequence[Buffer]) -> None:
        """Record the results of a selection's entries, in its order."""
        rows = self._results
        if rows is None:
            rows = self._results = [[None] * len(topic.partitions) for topic in self.request.topics]
        following = iter(results)
        for topic_place, ordinals in selection:
            row = rows[topic_place]
            for ordinal in ordinals:
                result = next(following)
                if row[ordinal] is None:
                    row[ordinal] = result
                    self.open_count -= 1

    def give_error(self, entry: Entry, error_code: int) -> None:
        """Answer an entry with the proxy's own error code."""
        _, partition_index = self.partition(entry)
        self.is_over = True
        self.take(entry, self.api.error_entry(self.request.header.api_version, partition_index, error_code))

    def note(self, response: PartitionedResponse) -> None:
        """Record the fields of an answer that belong to no partition."""
        self.throttle_time_ms = max(self.throttle_time_ms, response.throttle_time_ms)
        if response.other_tags:
            known = self._tags or []
            tags = {tag for tag, _ in known}
            self._tags = sorted([*known, *(field for field in response.other_tags if field[0] not in tags)])

    def is_late(self, now: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline <= now

    def is_open(self, entry: Entry) -> bool:
        return self._results is None or self._results[entry[0]][entry[1]] is None

    def open_entries(self) -> list[Entry]:
        return [
            (topic_place, ordinal)
            for topic_place, topic in enumerate(self.request.topics)
            for ordinal in range(len(topic.partitions))
            if self.is_open((topic_place, ordinal))
        ]

    def drop(self) -> None:
        """Discard the results: a piece in flight refers to the exchange, and brokers' answers are large."""
        self.move(ExchangeState.DROPPED)
        self._results = None

    def release(self) -> None:
        """Discard the results after the answer: pieces of this read may stay in flight, and refer to it."""
        self.request.take_out()
        self._results = self._sizes = None

    def fit(self, first: Partition | None) -> Partition | None:
        """Empty the results beyond the limits of a read, starting at the partition `first`.

        Returns the first partition that is left out; None if there is none.
        """
        if self._results is None or not self._sizes:
            return None
        found = sorted(self._sizes)
        start = next((n for n, entry in enumerate(found) if entry >= self._entry(first)), 0) if first else 0
        in_turn = [(entry, self._sizes[entry]) for entry in found[start:] + found[:start]]
        beyond = beyond_limits(as_fetch(self.request), in_turn)
        for entry in beyond:
            emptied = without_records(self.request.header.api_version, self._results[entry[0]][entry[1]] or b"")
            self.find(entry, emptied, 0)
        return self.partition(beyond[0]) if beyond else None

    def _entry(self, partition: Partition) -> Entry:
        """The entry of a partition; the first one if the request does not have it."""
        for place, topic in enumerate(self.request.topics):
            if topic.name == partition[0] and partition[1] in topic.partitions:
                return place, topic.partitions.index(partition[1])
        return 0, 0

    def found_at(self, entries: Iterable[Entry]) -> int:
        """The bytes of records that a read has found for these entries."""
        return sum(self._sizes.get(entry, 0) for entry in entries) if self._sizes else 0

    def encode(self) -> list[Buffer]:
        """Encode the whole answer as buffers, the length prefix first. The exchange must be complete."""
        request = self.request
        flexible = request.flexible
        head, tail = self.api.response_ends(request.header.api_version, self.throttle_time_ms, self._tags or [])
        # The header's tagged fields, if any, the fields of the API before the topics, and their number.
        small = (_NO_TAGS if flexible else b"") + head + encode_count(len(request.topics), compact=flexible)
        parts: list[Buffer] = []
        # Without a result it also has no partitions.
        for topic, results in zip(request.topics, self._results or [[]] * len(request.topics), strict=True):
            parts.append(small + request.topic_head(topic))
            # It is complete, so none of them is None.
            parts += cast("list[Buffer]", results)
            small = _NO_TAGS if flexible else b""
        parts.append(small + tail)
        length = sum(map(len, parts)) + INT32.size
        return [_START.pack(length, request.header.correlation_id), *parts]


Matched = list[tuple[Entry, int, TopicSpan, int]]
"""Entries with their results: (entry, error_code, topic of the answer, ordinal within that)."""


def match_results(exchange: Exchange, selection: Selection, response: PartitionedResponse) -> Matched:
    """Pair each selected entry with its result.

    Raises InvalidField if the answer lacks a result, has an unexpected one, or has one twice.
    """
    found: dict[tuple[bytes, int], tuple[TopicSpan, int]] = {}
    for topic in response.topics:
        for ordinal, partition_index in enumerate(topic.partitions):
            if (topic.name, partition_index) in found:
                raise InvalidField(f"the answer has partition {partition_index} of {topic.name!r} twice")
            found[topic.name, partition_index] = (topic, ordinal)
    matched: Matched = []
    for topic_place, ordinals in selection:
        asked = exchange.request.topics[topic_place]
        for ordinal in ordinals:
            result = found.pop((asked.wire, asked.partitions[ordinal]), None)
            if result is None:
                raise InvalidField(f"the answer lacks partition {asked.partitions[ordinal]} of {asked.wire!r}")
            matched.append(((topic_place, ordinal), result[0].error_codes[result[1]], *result))
    if found:
        raise InvalidField(f"the answer has partitions that were not requested: {sorted(found)[:3]}")
    return matched


def is_success(exchange: Exchange, part: Selection | None, frame: memoryview) -> bool:
    """Whether an answer has exactly one result, without an error, for each entry of a part."""
    try:
        response = exchange.api.parse_response(frame, exchange.request.header.api_version)
        matched = match_results(exchange, exchange.selection(part), response)
    except CodecError:
        return False
    return not any(error_code for _, error_code, *_ in matched)


def answers_in_order(request: PartitionedRequest, response: PartitionedResponse) -> bool:
    """Whether the answer to a whole request lists its partitions in order, without errors or others."""
    if len(request.topics) != len(response.topics):
        return False
    for asked, answered in zip(request.topics, response.topics, strict=True):
        if asked.wire != answered.name or asked.partitions != answered.partitions or any(answered.error_codes):
            return False
    return True
