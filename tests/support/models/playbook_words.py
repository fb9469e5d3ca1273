"""Read and write the texts of a Playbook (tests.support.models.playbook) for requests, answers and actions.

t-0        partition 0 of topic t; as an answer, a success
t-0@17     a success with this base offset
t-0=6      an error without a base offset; `t-0=6@17` with one
t-0:100    the result of a fetch: this number of bytes of records
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from kproxy.routing import actions
from kproxy.routing.actions import Action
from kproxy.routing.merge import Exchange
from kproxy.routing.retry import event_name
from kproxy.routing.split import Entry, Selection
from kproxy.routing.topology import NO_OWNER
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import base_offset_of
from tests.support.wire.messages import (
    APIS,
    FETCH,
    LIST_OFFSETS,
    NAMES,
    PRODUCE,
    head_of,
    request_body,
    request_frame,
    response_body,
    response_frame,
    sample_request,
    sample_response,
    topic_id,
)
from tests.support.wire.record_batches import build_batch

VERSIONS = {PRODUCE: 9, FETCH: 12, LIST_OFFSETS: 6}
BY_ID_VERSION = 13
# The proxy's own errors have this base offset, too.
NO_OFFSET = -1
_RESULT = re.compile(r"(?P<topic>\w+)-(?P<index>\d+)(=(?P<code>-?\d+))?(@(?P<offset>\d+))?(:(?P<size>\d+))?")


Producer: TypeAlias = tuple[int, int, int | None] | None
"""Producer id, epoch and base sequence; None for none."""
# The actions that few scripts are about.
ASIDE = (
    actions.Note,
    actions.Reread,
    actions.WakeAt,
    actions.Unconfirmed,
    actions.Retried,
    actions.Failed,
    actions.Counted,
)


class Result(NamedTuple):
    """One partition of an answer, or of a request, which has neither code nor offset."""

    topic: str
    index: int
    code: int = 0
    offset: int = NO_OFFSET
    size: int = 0

    def __str__(self) -> str:
        text = f"{self.topic}-{self.index}" + (f"={self.code}" if self.code else "")
        return text + (f"@{self.offset}" if self.offset != NO_OFFSET else "") + (f":{self.size}" if self.size else "")


def read(text: str) -> list[Result]:
    """All results in a text, in order."""
    results = []
    for word in text.split():
        found = _RESULT.fullmatch(word)
        if found is None:
            raise ValueError(f"{word!r} names no partition")
        topic, index, code, offset, size = found.group("topic", "index", "code", "offset", "size")
        given = NO_OFFSET if offset is None else int(offset)
        results.append(Result(topic, int(index), int(code or 0), given, int(size or 0)))
    return results


def partition(text: str) -> tuple[bytes, int]:
    """The one partition that a text names."""
    ((topic, index, *_),) = read(text)
    return topic.encode(), index


def _by_topic(results: Iterable[Result]) -> list[tuple[str, list[Result]]]:
    return [(topic, list(group)) for topic, group in groupby(results, key=lambda each: each.topic)]


def batch_of(producer: Producer, sequence: int) -> tuple[int, int, int] | None:
    """A producer's batch in a request; a base sequence of None means the request's own number."""
    if producer is None:
        return None
    producer_id, epoch, base_sequence = producer
    return producer_id, epoch, sequence if base_sequence is None else base_sequence


def produce_request(
    partitions: str,
    *,
    producer: tuple[int, int, int] | None = None,
    is_transactional: bool = False,
    acks: int = -1,
    by_id: bool = False,
    correlation_id: int = 7,
) -> PartitionedRequest:
    """`producer` is (producer id, epoch, base sequence) of each partition's one batch."""
    producer_id, epoch, sequence = producer or (-1, -1, -1)
    records = bytes(
        build_batch(
            producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, is_transactional=is_transactional
        )
    )
    topics = [
        {"name": topic, "partition_data": [{"index": each.index, "records": records} for each in group]}
        for topic, group in _by_topic(read(partitions))
    ]
    version = BY_ID_VERSION if by_id else VERSIONS[PRODUCE]
    fields = {"transactional_id": None, "acks": acks, "timeout_ms": 20_000, "topic_data": topics}
    return parse(PRODUCE, version, fields, correlation_id)


def read_request(api_key: int, partitions: str, *, correlation_id: int = 7, **changes: Any) -> PartitionedRequest:
    """A Fetch, from the partitions' offsets if given, or ListOffsets; `changes` replaces fields of the message."""
    asked = {topic: [each.index for each in group] for topic, group in _by_topic(read(partitions))}
    if api_key == FETCH:
        changes.setdefault("forgotten_topics_data", [])
    fields = sample_request(api_key, asked, **changes)
    if api_key == FETCH:
        for (_, group), topic in zip(_by_topic(read(partitions)), fields["topics"], strict=True):
            for each, entry in zip(group, topic["partitions"], strict=True):
                entry["fetch_offset"] = entry["fetch_offset"] if each.offset == NO_OFFSET else each.offset
    return parse(api_key, VERSIONS[api_key], fields, correlation_id)


def parse(api_key: int, version: int, fields: dict[str, Any], correlation_id: int) -> PartitionedRequest:
    frame = request_frame(api_key, version, request_body(api_key, version, fields), correlation_id=correlation_id)
    return APIS[api_key].parse_request(frame, head_of(frame))


def answer_frame(request: PartitionedRequest, text: str, *, throttle_ms: int = 0, error_code: int = 0) -> memoryview:
    """A broker's answer; `error_code` is that of the whole answer, which a fetch has."""
    api_key, version = request.header.api_key, request.header.api_version
    results = read(text)
    asked = {topic: [each.index for each in group] for topic, group in _by_topic(results)}
    fields = sample_response(api_key, asked, throttle_time_ms=throttle_ms, error_code=error_code)
    topics = fields["topics" if api_key == LIST_OFFSETS else "responses"]
    for (_, group), topic in zip(_by_topic(results), topics, strict=True):
        entries = topic["partition_responses" if api_key == PRODUCE else "partitions"]
        for each, entry in zip(group, entries, strict=True):
            entry["error_code"] = each.code
            if api_key == PRODUCE:
                # The same fields as in the proxy's own errors, so that both may be compared.
                entry |= {"base_offset": each.offset, "log_start_offset": -1, "record_errors": []}
            elif api_key == FETCH:
                entry |= {"records": b"r" * each.size, "aborted_transactions": None}
    return response_frame(api_key, version, response_body(api_key, version, fields))


class Answer(NamedTuple):
    """An answer as its client reads it; `sizes` are the bytes of records in each result."""

    results: list[Result]
    throttle_ms: int
    correlation_id: int
    sizes: list[int]

    def __str__(self) -> str:
        return " ".join(map(str, self.results)) + (f" throttle {self.throttle_ms}" if self.throttle_ms else "")


def read_answer(exchange: Exchange, buffers: Sequence[Buffer]) -> Answer:
    """Read the answer in the buffers of a Respond. Raise ValueError if it does not answer the request."""
    request = exchange.request
    frame = memoryview(bytearray(b"".join(buffers)))
    if int.from_bytes(frame[:4], "big") != len(frame) - 4:
        raise ValueError("the length before the answer is not its own")
    response = APIS[request.header.api_key].parse_response(frame, request.header.api_version)
    results, sizes = [], []
    for asked, topic in zip(request.topics, response.topics, strict=True):
        if asked.wire != topic.name or asked.partitions != topic.partitions:
            raise ValueError(f"{topic.name!r} {topic.partitions} answers {asked.wire!r} {asked.partitions}")
        for index, code, start, end in zip(topic.partitions, topic.error_codes, topic.starts, topic.ends, strict=True):
            is_produce = request.header.api_key == PRODUCE
            offset = base_offset_of(frame[start:end]) if is_produce else NO_OFFSET
            results.append(Result(name_of(asked.name), index, code, offset))
            sizes.append(bytes(frame[start:end]).count(b"r"))
    return Answer(results, response.throttle_time_ms, int.from_bytes(frame[4:8], "big"), sizes)


_NAMES_BY_ID = {topic_id(name).bytes: name for name in ("t", "u", "v")}


def name_of(topic: bytes) -> str:
    """A topic as texts name it; one whose name the core does not know has a question mark."""
    return f"{_NAMES_BY_ID[topic]}?" if topic in _NAMES_BY_ID else topic.decode()


def entry_text(exchange: Exchange, entry: Entry) -> str:
    topic, index = exchange.partition(entry)
    return f"{name_of(topic)}-{index}"


def selection_text(exchange: Exchange, selection: Selection) -> str:
    return " ".join(entry_text(exchange, (place, each)) for place, ordinals in selection for each in ordinals)


def partitions_text(partitions: Collection[tuple[bytes, int]]) -> str:
    return " ".join(f"{name_of(topic)}-{index}" for topic, index in partitions)


_WORDS: dict[type, Callable[..., str]] = {
    actions.Withdraw: lambda connection, pieces: (
        f"withdraw {' '.join(f'#{n}' for n in sorted(pieces))} from c{connection}"
    ),
    actions.Drop: lambda sequence: f"drop {sequence}",
    actions.Note: lambda exchange, entry, broker, _, result: (
        f"note {exchange.sequence} {entry_text(exchange, entry)}@{base_offset_of(result)} of b{broker}"
    ),
    actions.Proven: lambda exchange, connection, _: f"proven {exchange.sequence} on c{connection}",
    actions.Hold: lambda piece, partitions: f"hold #{piece}: {partitions_text(partitions)}",
    actions.LetGo: lambda piece: f"let go #{piece}",
    actions.NoteLost: lambda partitions: f"lost {partitions_text(partitions)}",
    actions.Reread: lambda topic, index, _: f"reread {name_of(topic)}-{index}",
    actions.Close: lambda connection, _, is_untrue: f"{'distrust' if is_untrue else 'close'} c{connection}",
    actions.Undeliverable: lambda topic, code: f"undeliverable {name_of(topic)}={code}",
    actions.Unconfirmed: lambda topic, batches: f"unconfirmed {name_of(topic)} {batches}",
    actions.Retried: lambda event, broker: f"retried {event_name(event)} of {broker_text(broker)}",
    actions.Failed: lambda api_key, code, broker, _: f"failed {NAMES[api_key]} {code} of {broker_text(broker)}",
    actions.Counted: lambda counter, amount: f"count {counter} {amount}",
}


def broker_text(broker: int) -> str:
    return "nobody" if broker == NO_OWNER else f"b{broker}"


def action_text(action: Action, now: float) -> str:
    """The words for an action, except Send and Respond, which need more context."""
    if isinstance(action, actions.WakeAt):
        return f"wake in {(action.at - now) * 1000:.0f} ms"
    return _WORDS[type(action)](*action)
