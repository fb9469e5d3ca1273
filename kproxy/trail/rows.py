"""Define the rows of an audit trail, which list the acknowledged records, and encode them as JSON.

Each serving process has one trail. Its rows have a `sequence` from 0 on, one more with every row of any kind, so a row
that was never written, or is lost, leaves a gap. A row is one line of JSON, which ends in the digest of the row before
it and, with a key, in a mac (kproxy.trail.signature). A page is some rows with newlines between them: the value of one
Kafka message, or a part of a file.

Times are milliseconds since the epoch by the proxy's clock; `at` is when a row was closed, and never decreases in a
trail.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class _Row(msgspec.Struct, kw_only=True, tag_field="kind"):
    """What every row begins with."""

    proxy: str
    incarnation: str
    sequence: int
    at: int


class Begin(_Row, kw_only=True, tag="begin"):
    """The first row: the process begins to serve.

    An acknowledgement is in a row that is closed at most `interval_ms` later. Without acknowledgements a mark comes at
    most `interval_ms` after the last row of acknowledgements, and then every `mark_ms`.
    """

    interval_ms: int
    mark_ms: int


class Mark(_Row, kw_only=True, tag="mark"):
    """Every acknowledgement before `at` is in a row before this one."""


class End(_Row, kw_only=True, tag="end"):
    """The last row of a trail that ended cleanly (the process stopped, or its sink changed): nothing follows."""


class Range(_Row, kw_only=True, tag="range"):
    """Batches that one client connection wrote to one partition under one ownership, all acknowledged.

    `spans` are their offsets: first offset and number of records, alternating, in the order of the answers; batches
    without a gap between them are one span. With idempotence the sequence numbers have no gap within a row: those of a
    span begin with `first_sequence` plus the counts of the spans before it, wrapping behind 2^31-1. Without it,
    producer id, epoch and sequence are -1.

    `base_offset` is the first span's, `record_count` the sum of the counts, `bytes` the sum of the batches' sizes.
    `owner` is the broker that answered, `revision` that of its ownership when the request was sent. `latency_us` are
    samples of the time from a request's first byte to the broker's answer, in microseconds.
    """

    topic: str
    topic_id: str | None
    partition: int
    owner: int
    revision: int
    acks: int
    connection: int
    peer: str
    client_id: str
    principal: str | None
    producer_id: int
    producer_epoch: int
    first_sequence: int
    base_offset: int
    record_count: int
    batches: int
    bytes: int
    first_acked_at: int
    last_acked_at: int
    spans: list[int]
    latency_us: list[int]


Row = Begin | Mark | End | Range

_ENCODER = msgspec.json.Encoder()
_quote = _ENCODER.encode
_DECODER: msgspec.json.Decoder[Row] = msgspec.json.Decoder(Row)


def encode_row(row: Row) -> bytes:
    """Encode one row as a line of JSON, without a newline."""
    return _ENCODER.encode(row)


def encode_stamp(proxy: str, incarnation: str) -> bytes:
    """Encode the beginning of every row of acknowledgements of a process, up to its sequence."""
    return b'{"kind":"range","proxy":%b,"incarnation":%b,"sequence":' % (_quote(proxy), _quote(incarnation))


def encode_range(
    stamp: bytes,
    sequence: int,
    at: int,
    topic: str,
    topic_id: bytes | None,
    partition: int,
    owner: int,
    revision: int,
    acks: int,
    connection: int,
    peer: str,
    client_id: str,
    principal: str | None,
    batches: bytes,
) -> bytes:
    """Encode a Range as `encode_row` does, at a third of the cost, as thousands may come at once.

    `batches` has the fields from producer_id on (kproxy.trail.spans.OpenRow.as_json), `stamp` is as above.
    """
    return (
        b'%b%d,"at":%d,"topic":%b,"topic_id":%b,"partition":%d,"owner":%d,"revision":%d,"acks":%d,"connection":%d,'
        b'"peer":%b,"client_id":%b,"principal":%b,%b}'
    ) % (
        stamp,
        sequence,
        at,
        _quote(topic),
        _quote(None if topic_id is None else topic_id.hex()),
        partition,
        owner,
        revision,
        acks,
        connection,
        _quote(peer),
        _quote(client_id),
        _quote(principal),
        batches,
    )


def encode_page(rows: Iterable[Row]) -> bytes:
    """Encode rows as lines of JSON, without a newline after the last."""
    return _ENCODER.encode_lines(rows)[:-1]


def decode_page(page: bytes) -> list[Row]:
    """Decode the rows of a page.

    Raise msgspec.DecodeError, of which msgspec.ValidationError is one.
    """
    return _DECODER.decode_lines(page)
