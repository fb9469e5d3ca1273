"""Build Kafka messages for codec tests: hand-made bytes, random messages, and kafka-python's reading of them.

A message is a plain mapping with kafka-python's field names. Any structure in it may hold "tags", a list of (tag,
value): only a separate writer can put unknown tagged fields into a message. It shares nothing with `codec`;
test_codec_messages compares it with kafka-python's encoder, byte for byte.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from kproxy_codec import control
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE
from kproxy_codec.fetch import FetchApi
from kproxy_codec.framing import RequestHeader, parse_request_header
from kproxy_codec.list_offsets import LIST_OFFSETS_API
from kproxy_codec.partitioned import PartitionedApi
from kproxy_codec.produce import PRODUCE_API

Fields = Mapping[str, Any]
Tags = Sequence[tuple[int, bytes]]
# (name, kind, first version, and the last one of a field that was removed). A kind is a letter of `struct`, "string"
# or "bytes", "?" before it where it may be null, or the fields of the elements of an array, in a list of one where the
# array may be null. "topic" is a string, and from Produce 13 and Fetch 13 on an id: that of the name here (`topic_id`).
Schema = tuple[tuple[Any, ...], ...]

APIS: dict[int, PartitionedApi] = {PRODUCE: PRODUCE_API, FETCH: FetchApi(), LIST_OFFSETS: LIST_OFFSETS_API}
VERSIONS = {PRODUCE: range(3, 14), FETCH: range(4, 19), LIST_OFFSETS: range(1, 12)}
FLEXIBLE_FROM = {PRODUCE: 9, FETCH: 12, LIST_OFFSETS: 6}
EVERY_VERSION = [(api_key, version) for api_key, versions in VERSIONS.items() for version in versions]
# Versions for tests of thousands of partitions: each API's first, first flexible and last one.
AT_LENGTH = [
    pytest.param(
        api_key,
        version,
        marks=()
        if version in (VERSIONS[api_key][0], FLEXIBLE_FROM[api_key], VERSIONS[api_key][-1])
        else pytest.mark.long,
    )
    for api_key, version in EVERY_VERSION
]
NAMES = {PRODUCE: "Produce", FETCH: "Fetch", LIST_OFFSETS: "ListOffsets"}
# The arrays of topics and partitions, and the name of a topic and of a partition's index: in requests and in answers.
REQUEST_FIELDS = {
    PRODUCE: ("topic_data", "partition_data", "name", "index"),
    FETCH: ("topics", "partitions", "topic", "partition"),
    LIST_OFFSETS: ("topics", "partitions", "name", "partition_index"),
}
RESPONSE_FIELDS = {
    PRODUCE: ("responses", "partition_responses", "name", "index"),
    FETCH: ("responses", "partitions", "topic", "partition_index"),
    LIST_OFFSETS: ("topics", "partitions", "name", "partition_index"),
}

_PRODUCE_PARTITION: Schema = (("index", "i", 0), ("records", "?bytes", 0))
_LIST_OFFSETS_PARTITION: Schema = (
    ("partition_index", "i", 0),
    ("current_leader_epoch", "i", 4),
    ("timestamp", "q", 0),
)
_FETCH_PARTITION: Schema = (
    ("partition", "i", 0),
    ("current_leader_epoch", "i", 9),
    ("fetch_offset", "q", 0),
    ("last_fetched_epoch", "i", 12),
    ("log_start_offset", "q", 5),
    ("partition_max_bytes", "i", 0),
)
_REQUESTS: dict[int, Schema] = {
    PRODUCE: (
        ("transactional_id", "?string", 0),
        ("acks", "h", 0),
        ("timeout_ms", "i", 0),
        ("topic_data", (("name", "topic", 0), ("partition_data", _PRODUCE_PARTITION, 0)), 0),
    ),
    FETCH: (
        ("replica_id", "i", 0, 14),
        ("max_wait_ms", "i", 0),
        ("min_bytes", "i", 0),
        ("max_bytes", "i", 0),
        ("isolation_level", "b", 0),
        ("session_id", "i", 7),
        ("session_epoch", "i", 7),
        ("topics", (("topic", "topic", 0), ("partitions", _FETCH_PARTITION, 0)), 0),
        ("forgotten_topics_data", (("topic", "topic", 0), ("partitions", "[]i", 0)), 7),
        ("rack_id", "string", 11),
    ),
    LIST_OFFSETS: (
        ("replica_id", "i", 0),
        ("isolation_level", "b", 2),
        ("topics", (("name", "string", 0), ("partitions", _LIST_OFFSETS_PARTITION, 0)), 0),
        ("timeout_ms", "i", 10),
    ),
}
_PRODUCE_RESULT: Schema = (
    ("index", "i", 0),
    ("error_code", "h", 0),
    ("base_offset", "q", 0),
    ("log_append_time_ms", "q", 0),
    ("log_start_offset", "q", 5),
    ("record_errors", (("batch_index", "i", 0), ("batch_index_error_message", "?string", 0)), 8),
    ("error_message", "?string", 8),
)
_FETCH_RESULT: Schema = (
    ("partition_index", "i", 0),
    ("error_code", "h", 0),
    ("high_watermark", "q", 0),
    ("last_stable_offset", "q", 0),
    ("log_start_offset", "q", 5),
    ("aborted_transactions", [(("producer_id", "q", 0), ("first_offset", "q", 0))], 0),
    ("preferred_read_replica", "i", 11),
    ("records", "?bytes", 0),
)
_LIST_OFFSETS_RESULT: Schema = (
    ("partition_index", "i", 0),
    ("error_code", "h", 0),
    ("timestamp", "q", 0),
    ("offset", "q", 0),
    ("leader_epoch", "i", 4),
)
_RESPONSES: dict[int, Schema] = {
    PRODUCE: (
        ("responses", (("name", "topic", 0), ("partition_responses", _PRODUCE_RESULT, 0)), 0),
        ("throttle_time_ms", "i", 0),
    ),
    FETCH: (
        ("throttle_time_ms", "i", 0),
        ("error_code", "h", 7),
        ("session_id", "i", 7),
        ("responses", (("topic", "topic", 0), ("partitions", _FETCH_RESULT, 0)), 0),
    ),
    LIST_OFFSETS: (
        ("throttle_time_ms", "i", 2),
        ("topics", (("name", "string", 0), ("partitions", _LIST_OFFSETS_RESULT, 0)), 0),
    ),
}


def fields_of(schema: Schema, version: int) -> list[tuple[str, Any]]:
    """The names and kinds of the fields that the version has."""
    return [
        (name, kind) for name, kind, first, *last in schema if version >= first and not (last and version > last[0])
    ]


TOPIC_IDS_FROM = 13
# Of Fetch: a follower's id is in a tagged field.
REPLICA_STATE_FROM = 15
_NAMES_BY_ID: dict[uuid.UUID, str] = {}


def topic_id(name: str | bytes) -> uuid.UUID:
    """The id that a topic has in these tests."""
    text = name if isinstance(name, str) else name.decode(errors="backslashreplace")
    identity = uuid.UUID(bytes=uuid.uuid5(uuid.NAMESPACE_URL, text).bytes, version=4)
    _NAMES_BY_ID[identity] = text
    return identity


def _topic_name(identity: uuid.UUID) -> str:
    return _NAMES_BY_ID.get(identity, f"id:{identity}")


def is_by_id(api_key: int, version: int) -> bool:
    """Whether messages of this version name topics by their ids."""
    return api_key in (PRODUCE, FETCH) and version >= TOPIC_IDS_FROM


def named_as(api_key: int, version: int, name: str) -> bytes:
    """A topic's name as messages of this version contain it, whether or not `topic_id` has an id for it."""
    if not is_by_id(api_key, version):
        return name.encode()
    return uuid.UUID(name[3:]).bytes if name.startswith("id:") else topic_id(name).bytes


def uvarint(value: int) -> bytes:
    """`value` as an unsigned varint."""
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def tag_section(tags: Tags = ()) -> bytes:
    """A tagged-field section (KIP-482)."""
    return uvarint(len(tags)) + b"".join(uvarint(tag) + uvarint(len(value)) + value for tag, value in tags)


def _sized(value: bytes | None, form: str, *, flexible: bool) -> bytes:
    length = -1 if value is None else len(value)
    return (uvarint(length + 1) if flexible else struct.pack(form, length)) + (value or b"")


def _count(count: int, *, flexible: bool) -> bytes:
    return uvarint(count + 1) if flexible else struct.pack(">i", count)


def _write(kind: Any, version: int, value: Any, *, flexible: bool) -> bytes:
    if isinstance(kind, list | tuple) or kind == "[]i":
        if value is None:
            return _count(-1, flexible=flexible)
        inner = kind[0] if isinstance(kind, list) else kind
        if inner == "[]i":
            elements = [struct.pack(">i", item) for item in value]
        else:
            elements = _write_each(inner, version, value, flexible=flexible)
        return _count(len(value), flexible=flexible) + b"".join(elements)
    if kind == "topic" and version >= TOPIC_IDS_FROM:
        return topic_id(value).bytes
    if kind.endswith("string") or kind == "topic":
        encoded = value.encode() if isinstance(value, str) else value
        return _sized(encoded, ">h", flexible=flexible)
    if kind.endswith("bytes"):
        return _sized(value, ">i", flexible=flexible)
    return struct.pack(">" + kind, value)


def _write_each(schema: Schema, version: int, items: Iterable[Fields], *, flexible: bool) -> list[bytes]:
    """The bytes of structures, of which there may be tens of thousands; one that comes again is written once."""
    present, before, written = fields_of(schema, version), None, [b""]
    for fields in items:
        if fields is before:
            written.append(written[-1])
            continue
        before = fields
        parts = [
            struct.pack(f">{kind}", fields[name])
            if len(kind) == 1 and isinstance(kind, str)
            else _write(kind, version, fields[name], flexible=flexible)
            for name, kind in present
        ]
        if flexible:
            parts.append(tag_section(fields["tags"]) if fields.get("tags") else b"\x00")
        written.append(b"".join(parts))
    return written[1:]


def _write_structure(schema: Schema, version: int, fields: Fields, *, flexible: bool) -> bytes:
    return _write_each(schema, version, [fields], flexible=flexible)[0]


def request_body(api_key: int, version: int, fields: Fields) -> bytes:
    """A request's body; strings may be given as bytes, so that they need not be UTF-8."""
    if api_key == FETCH and version >= REPLICA_STATE_FROM and fields.get("replica_id", -1) >= 0:
        state = struct.pack(">iq", fields["replica_id"], -1) + tag_section()
        fields = {**fields, "tags": [(1, state), *fields.get("tags", ())]}
    return _write_structure(_REQUESTS[api_key], version, fields, flexible=version >= FLEXIBLE_FROM[api_key])


def response_body(api_key: int, version: int, fields: Fields) -> bytes:
    return _write_structure(_RESPONSES[api_key], version, fields, flexible=version >= FLEXIBLE_FROM[api_key])


def frame_of(*parts: bytes) -> memoryview:
    """A whole frame, writable as a receive buffer is."""
    message = b"".join(parts)
    return memoryview(bytearray(struct.pack(">i", len(message)) + message))


def request_frame(
    api_key: int, version: int, body: bytes, *, correlation_id: int = 7, client_id: bytes = b"tests", tags: Tags = ()
) -> memoryview:
    """A request with `tags` in its header, if its version has room for them."""
    head = struct.pack(">hhih", api_key, version, correlation_id, len(client_id)) + client_id
    return frame_of(head, tag_section(tags) if version >= FLEXIBLE_FROM[api_key] else b"", body)


def response_frame(api_key: int, version: int, body: bytes, *, correlation_id: int = 7, tags: Tags = ()) -> memoryview:
    head = struct.pack(">i", correlation_id)
    return frame_of(head, tag_section(tags) if version >= FLEXIBLE_FROM[api_key] else b"", body)


def head_of(frame: memoryview) -> RequestHeader:
    return parse_request_header(frame)


def read_by_kafka_python(kind: str, api_key: int, version: int, body: bytes) -> dict[str, Any]:
    """The fields that kafka-python reads in a "request" or "response"; tagged fields are left out."""
    decode, schemas = {
        "request": (control.decode_request, _REQUESTS),
        "response": (control.decode_response, _RESPONSES),
    }[kind]
    return _plain(schemas[api_key], version, decode(api_key, version, body), getattr)


def written_by_kafka_python(kind: str, api_key: int, version: int, fields: Fields) -> bytes:
    """The body of a message with no tagged fields."""
    plain = without_tags(kind, api_key, version, fields)
    if is_by_id(api_key, version):
        topics, _, name, _ = (REQUEST_FIELDS if kind == "request" else RESPONSE_FIELDS)[api_key]
        for field in {topics, "forgotten_topics_data"} & set(plain):
            plain[field] = [{**topic, "topic_id": topic_id(topic[name])} for topic in plain[field]]
            for topic in plain[field]:
                del topic[name]
    if kind == "request":
        return control.encode_request(control.build_request(api_key, version, **plain))
    return control.encode_response(control.build_response(api_key, version, **plain))


def without_tags(kind: str, api_key: int, version: int, fields: Fields) -> dict[str, Any]:
    """The message without tagged fields, and without the fields that its version lacks."""
    schemas = _REQUESTS if kind == "request" else _RESPONSES
    return _plain(schemas[api_key], version, fields, lambda item, name: item[name])


def _plain(schema: Schema, version: int, item: Any, get: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, kind in fields_of(schema, version):
        by_id = kind == "topic" and version >= TOPIC_IDS_FROM and not isinstance(item, Mapping)
        value = _topic_name(item.topic_id) if by_id else get(item, name)
        inner = kind[0] if isinstance(kind, list) else kind
        if isinstance(inner, tuple) and value is not None:
            value = [_plain(inner, version, element, get) for element in value]
        elif kind == "?bytes" and value is not None:
            value = bytes(value)
        plain[name] = value
    return plain


# Sample messages

_ASKED: dict[int, Callable[[int], dict[str, Any]]] = {
    PRODUCE: lambda index: {"index": index, "records": b"records of %d" % index},
    FETCH: lambda index: {
        "partition": index,
        "current_leader_epoch": 11,
        "fetch_offset": 2**40 + index,
        "last_fetched_epoch": 10,
        "log_start_offset": 5,
        "partition_max_bytes": 1 << 20,
    },
    LIST_OFFSETS: lambda index: {"partition_index": index, "current_leader_epoch": 11, "timestamp": -2},
}
_ASKED_AS_A_WHOLE: dict[int, dict[str, Any]] = {
    PRODUCE: {"transactional_id": None, "acks": -1, "timeout_ms": 20_000},
    FETCH: {
        "replica_id": -1,
        "max_wait_ms": 500,
        "min_bytes": 1,
        "max_bytes": 50 << 20,
        "isolation_level": 1,
        "session_id": 0,
        "session_epoch": -1,
        "forgotten_topics_data": [{"topic": "gone", "partitions": [1, 2]}],
        "rack_id": "rack",
    },
    LIST_OFFSETS: {"replica_id": -1, "isolation_level": 0, "timeout_ms": 30_000},
}
_ANSWERED: dict[int, Callable[[int], dict[str, Any]]] = {
    PRODUCE: lambda index: {
        "index": index,
        "error_code": 0,
        "base_offset": 2**33 + index,
        "log_append_time_ms": -1,
        "log_start_offset": 5,
        "record_errors": [{"batch_index": 3, "batch_index_error_message": "no"}],
        "error_message": None,
    },
    FETCH: lambda index: {
        "partition_index": index,
        "error_code": 0,
        "high_watermark": 2**33 + index,
        "last_stable_offset": 2**33,
        "log_start_offset": 5,
        "aborted_transactions": [{"producer_id": 1, "first_offset": 2}],
        "preferred_read_replica": 3,
        "records": b"records of %d" % index,
    },
    LIST_OFFSETS: lambda index: {
        "partition_index": index,
        "error_code": 0,
        "timestamp": 1_700_000_000_000,
        "offset": 2**33 + index,
        "leader_epoch": 12,
    },
}


def sample_request(api_key: int, partitions: Mapping[str, Sequence[int]], **changes: Any) -> dict[str, Any]:
    """A request for these partitions by topic; `changes` replaces fields of the message."""
    topics, entries, name, _ = REQUEST_FIELDS[api_key]
    asked = [{name: topic, entries: list(map(_ASKED[api_key], indexes))} for topic, indexes in partitions.items()]
    return {**_ASKED_AS_A_WHOLE[api_key], topics: asked, **changes}


def sample_response(api_key: int, partitions: Mapping[str, Sequence[int]], **changes: Any) -> dict[str, Any]:
    """An answer for these partitions by topic; `changes` replaces fields of the message."""
    topics, entries, name, _ = RESPONSE_FIELDS[api_key]
    answered = [{name: topic, entries: list(map(_ANSWERED[api_key], indexes))} for topic, indexes in partitions.items()]
    whole = {"throttle_time_ms": 21, "error_code": 0, "session_id": 0}
    return {**whole, topics: answered, **changes}


# Random messages

# Low tags have a meaning in some versions; these have none in any version. The lengths need varints of two bytes.
_LONG_BYTES = st.integers(128, 300).map(lambda length: bytes([length % 256]) * length)
_TAGS = st.dictionaries(st.integers(100, 2**31), st.binary(max_size=6), max_size=2).map(
    lambda tags: sorted(tags.items())
)
_INTEGERS = {"b": 8, "h": 16, "i": 32, "q": 64}


def _values(kind: Any, version: int) -> st.SearchStrategy[Any]:
    if isinstance(kind, list):
        return st.none() | _values(kind[0], version)
    if isinstance(kind, tuple):
        return st.lists(_structures(kind, version), max_size=3)
    if kind == "[]i":
        return st.lists(_values("i", version), max_size=3)
    if kind.startswith("?"):
        return st.none() | _values(kind[1:], version)
    if kind in ("string", "topic"):
        return st.text(max_size=5)
    if kind == "bytes":
        return st.binary(max_size=40) | _LONG_BYTES
    bits = _INTEGERS[kind]
    return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)


def _structures(schema: Schema, version: int, **fixed: Any) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: _values(kind, version) for name, kind in fields_of(schema, version) if name not in fixed}
    return st.fixed_dictionaries({**fields, "tags": _TAGS, **{name: st.just(value) for name, value in fixed.items()}})


def requests(api_key: int, version: int) -> st.SearchStrategy[dict[str, Any]]:
    """Any request of a client, tagged fields at every level."""
    fixed = {} if api_key == PRODUCE else {"replica_id": -1}
    return _structures(_REQUESTS[api_key], version, **fixed)


def responses(api_key: int, version: int) -> st.SearchStrategy[dict[str, Any]]:
    """Any answer, tagged fields at every level."""
    return _structures(_RESPONSES[api_key], version)
