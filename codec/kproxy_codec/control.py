"""Encode and decode small control-plane messages, with kafka-python.

kafka-python contains Apache Kafka's own message schemas, so this module need not describe Metadata, CreateTopics and
the like again. Only this module uses these (`kproxy_codec.schemas` adds some). kafka-python's decoder trusts its input,
so this module checks the input:

- errors of the decoder on bad bytes (IndexError, struct.error, ValueError, OverflowError, ...) become CodecError;
- bytes left over (but see `decode_request`), a length that reaches past the end, and null in a field that may not be
  null are errors;
- an over-long varint is refused before the decoder spends quadratic time on it;
- a request with more than MAX_ELEMENTS elements in its arrays, or MAX_TAGGED_FIELDS tagged fields, is refused before
  any object is made: 1 MiB may name 500,000 topics, and the decoder copies the rest of the message for each element
  that has tagged fields.

Some behaviour remains: the decoder copies the fields it reads, drops unknown tagged fields when a message is encoded
again (and may cut short the last one unnoticed), and reads a negative array length other than -1 as an empty array.
Therefore no record bytes pass through this module, and callers limit the size of bodies, to 1 MiB for requests.

Importing `kafka` takes some 0.15 s, because Python runs the package's `__init__`, which imports its whole client,
before any submodule. Only tampering with `sys.modules` would avoid this.

Messages are kafka-python's own objects with fields in snake case; `build_request` and `build_response` make them from
plain mappings. This module handles only bodies; `kproxy_codec.framing` has the headers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kafka.protocol import admin, consumer, metadata, producer, sasl
from kafka.protocol.api_message import ApiMessage

from kproxy_codec import schemas
from kproxy_codec.api_keys import ALTER_USER_SCRAM_CREDENTIALS, API_VERSIONS, METADATA
from kproxy_codec.error_codes import UNSUPPORTED_VERSION
from kproxy_codec.errors import InvalidField, Truncated, UnsupportedVersion
from kproxy_codec.primitives import MAX_TAGGED_FIELDS, Buffer, read_tagged_fields, skip_bytes, skip_string
from kproxy_codec.walk import Walk

Message: TypeAlias = Any
"""A kafka-python message: attributes are the fields, nested structures are objects of the same kind."""

MOST_SCRAM_BYTES = 1_024
"""The longest SCRAM message, of either side: the SCRAM library prepares names on the event loop, in a time that grows
with the square of their length."""

_ENDS_EARLY = (IndexError, struct.error, OverflowError)
_FAILURES = (*_ENDS_EARLY, ValueError, TypeError, AttributeError, AssertionError, MemoryError)
# librdkafka (2.16 at least) puts three bytes too many into a Metadata request for all topics, and one into a change of
# users. Kafka's broker accepts these requests, because it ignores bytes after a request.
_MAY_TRAIL = frozenset({METADATA, ALTER_USER_SCRAM_CREDENTIALS})
# The most elements in all arrays of a request together. 16 numbers count as one element, which costs as much.
MAX_ELEMENTS = 32_768
_NUMBERS_AS_ONE = 16
# The longest run of bytes with the high bit set that reaches the decoder: its varint loop has no limit.
_MAX_HIGH_RUN = 4096
_HIGH_BITS = bytes(byte >> 7 for byte in range(256))


def _classes() -> tuple[dict[int, Message], dict[int, Message]]:
    requests: dict[int, Message] = {}
    responses: dict[int, Message] = {}
    for module in (admin, consumer, metadata, producer, sasl, schemas):
        for name in module.__all__:
            candidate: Message = getattr(module, name)
            if isinstance(candidate, type(ApiMessage)):
                kind = requests if candidate.is_request() else responses
                kind[candidate.API_KEY] = candidate
    return requests, responses


_REQUESTS, _RESPONSES = _classes()


def version_range(api_key: int) -> tuple[int, int]:
    """The lowest and highest version of `api_key` that this codec supports. Raises UnsupportedVersion if unknown."""
    message_class = _REQUESTS.get(api_key)
    if message_class is None:
        raise UnsupportedVersion(f"unknown API key {api_key}")
    lowest, highest = message_class.valid_versions
    return lowest, highest


def is_known(api_key: int, api_version: int) -> bool:
    """Whether this codec supports this version."""
    lowest, highest = _REQUESTS[api_key].valid_versions if api_key in _REQUESTS else (1, 0)
    return bool(lowest <= api_version <= highest)


def response_fields(api_key: int) -> Mapping[str, Message]:
    """Return the schemas of a response's fields by name, for all versions; `fields` of a schema has nested ones."""
    fields: Mapping[str, Message] = _RESPONSES[api_key]._struct.fields
    return fields


def build_request(api_key: int, api_version: int, **fields: Any) -> Message:
    """Build a request from `fields`; nested structures are mappings. Omitted fields take the schema's default."""
    return _build(_class_of(_REQUESTS, api_key, api_version), api_version, fields)


def build_response(api_key: int, api_version: int, **fields: Any) -> Message:
    """Build a response from `fields`; nested structures are mappings. Omitted fields take the schema's default."""
    return _build(_class_of(_RESPONSES, api_key, api_version), api_version, fields)


def decode_request(api_key: int, api_version: int, body: Buffer) -> Message:
    """Decode a whole request; raises CodecError. Bytes after some requests are ignored, as by Kafka."""
    message_class = _class_of(_REQUESTS, api_key, api_version)
    _Census(body, api_version, compact=message_class.flexible_version_q(api_version)).count_in(message_class._struct)
    return _decode(message_class, api_version, body, may_trail=api_key in _MAY_TRAIL)


def decode_response(api_key: int, api_version: int, body: Buffer) -> Message:
    """Decode a whole response; raises CodecError.

    An ApiVersions response with error 35 is read in version 0, whatever version was requested (KIP-511).
    """
    if api_key == API_VERSIONS and int.from_bytes(memoryview(body)[:2], "big") == UNSUPPORTED_VERSION:
        api_version = 0
    return _decode(_class_of(_RESPONSES, api_key, api_version), api_version, body)


def encode_request(message: Message) -> bytes:
    """Encode the body of a request, in the version in which it was built or decoded. Raises InvalidField."""
    return _encode(message, is_request=True)


def encode_response(message: Message) -> bytes:
    """Encode the body of a response, in the version in which it was built or decoded. Raises InvalidField."""
    return _encode(message, is_request=False)


def _class_of(classes: Mapping[int, Message], api_key: int, api_version: int) -> Message:
    lowest, highest = version_range(api_key)
    if not lowest <= api_version <= highest:
        raise UnsupportedVersion(f"unknown version {api_version} of API key {api_key}; expected {lowest} to {highest}")
    return classes[api_key]


def _build(message_class: Message, api_version: int, fields: Mapping[str, Any]) -> Message:
    try:
        return message_class(version=api_version, **_nested(message_class._struct, api_version, fields))
    except _FAILURES as error:
        raise InvalidField(f"{message_class.name} v{api_version}: {error}") from error


def _nested(schema: Message, api_version: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with every nested mapping replaced by the structure that the schema has there."""
    built = dict(fields)
    for name, value in fields.items():
        field = schema.fields.get(name)
        if field is None or value is None:
            continue
        if field.is_struct_array():
            built[name] = [_structure(field, api_version, item) for item in value]
        elif field.is_struct():
            built[name] = _structure(field, api_version, value)
    return built


def _structure(field: Message, api_version: int, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return field.data_class(version=api_version, **_nested(field, api_version, value))


def _decode(message_class: Message, api_version: int, body: Buffer, *, may_trail: bool = False) -> Message:
    view = memoryview(body)
    _refuse_long_varint(view)
    flexible = message_class.flexible_version_q(api_version)
    try:
        # The method that `decode` itself calls. `decode` drops the position, and so hides bytes after the message.
        decode = message_class._struct.compiled_decode_from(
            api_version, compact=flexible, tagged=flexible, data_class=message_class[None]
        )
        message, end = decode(view, 0)
    except _ENDS_EARLY as error:
        raise Truncated(f"{message_class.name} v{api_version} ends early: {error}") from error
    except _FAILURES as error:
        raise InvalidField(f"{message_class.name} v{api_version}: {error}") from error
    if end > len(view):
        raise Truncated(f"{message_class.name} v{api_version}: a length reaches {end - len(view)} bytes past the end")
    if end < len(view) and not may_trail:
        raise InvalidField(f"{message_class.name} v{api_version}: {len(view) - end} bytes left over")
    _refuse_null(message, message_class._struct, api_version, message_class.name)
    return message


class _Census:
    """Counts the objects that the decoder would make of a request's body. Raises CodecError for too many."""

    def __init__(self, body: Buffer, api_version: int, *, compact: bool) -> None:
        self._walk = Walk(body, compact=compact)
        self._version = api_version
        self._elements = 0
        self._tagged_fields = 0

    def count_in(self, schema: Message) -> None:
        """Count the objects of the structure that begins here."""
        walk = self._walk
        for kind, size, inner in _plan(schema, self._version):
            if kind == _FIXED:
                walk.skip(size)
            elif kind == _STRING:
                self._skip(skip_string(walk.body, walk.at, walk.limit, compact=walk.compact, nullable=True))
            elif kind == _BYTES:
                self._skip(skip_bytes(walk.body, walk.at, walk.limit, compact=walk.compact))
            elif kind == _NUMBERS:
                count = max(walk.count(size, nullable=True), 0)
                self._add(count // _NUMBERS_AS_ONE)
                walk.skip(count * size)
            elif kind == _STRUCTURE:
                if walk.skip(size) != _NULL_STRUCTURE:
                    self.count_in(inner)
            else:
                count = max(walk.count(1, nullable=True), 0)
                self._add(count)
                for _ in range(count):
                    if kind == _STRUCTURES:
                        self.count_in(inner)
                    else:
                        self._skip(skip_string(walk.body, walk.at, walk.limit, compact=walk.compact, nullable=True))
        if walk.compact:
            self._count_tagged_fields()

    def _skip(self, span: tuple[int, int, int]) -> None:
        self._walk.at = span[2]

    def _add(self, elements: int) -> None:
        self._elements += elements
        if self._elements > MAX_ELEMENTS:
            raise InvalidField(f"the request's arrays have {self._elements} elements; expected at most {MAX_ELEMENTS}")

    def _count_tagged_fields(self) -> None:
        # No known tagged field has an array.
        walk = self._walk
        if walk.at < walk.limit and walk.body[walk.at] == 0:
            walk.at += 1
            return
        fields, walk.at = read_tagged_fields(walk.body, walk.at, walk.limit)
        self._tagged_fields += len(fields)
        if self._tagged_fields > MAX_TAGGED_FIELDS:
            raise InvalidField(f"too many tagged fields ({self._tagged_fields}); expected at most {MAX_TAGGED_FIELDS}")


_FIXED, _STRING, _BYTES, _NUMBERS, _STRINGS, _STRUCTURE, _STRUCTURES = range(7)
_NULL_STRUCTURE = b"\xff"
_PLANS: dict[tuple[int, int], list[tuple[int, int, Message | None]]] = {}


def _plan(schema: Message, api_version: int) -> list[tuple[int, int, Message | None]]:
    """The fields of `schema` as `_Census` passes them: kind, bytes, schema of the nested structure."""
    key = (id(schema), api_version)  # schemas live for ever, like their message classes
    found = _PLANS.get(key)
    if found is None:
        found = _PLANS[key] = [_step(field, api_version) for field in schema.untagged_fields(api_version)]
    return found


def _step(field: Message, api_version: int) -> tuple[int, int, Message | None]:
    if field.is_struct_array():
        return _STRUCTURES, 0, field
    if field.is_struct():
        # A byte before the structure says whether it is null.
        return _STRUCTURE, int(field.nullable_for_version_q(api_version)), field
    if field.is_array():
        kind = field.array_of.type_str
        return (_STRINGS, 0, None) if kind == "string" else (_NUMBERS, field.array_of._type.size, None)
    if field.type_str == "string":
        return _STRING, 0, None
    return (_BYTES, 0, None) if field.type_str in ("bytes", "records") else (_FIXED, field._type.size, None)


def _refuse_long_varint(view: memoryview) -> None:
    if len(view) > _MAX_HIGH_RUN and b"\x01" * (_MAX_HIGH_RUN + 1) in bytes(view).translate(_HIGH_BITS):
        raise InvalidField(f"more than {_MAX_HIGH_RUN} bytes in a row have the high bit set; expected a valid message")


def _encode(message: Message, *, is_request: bool) -> bytes:
    if message.is_request() != is_request:
        raise InvalidField(f"{message.name} is not a {'request' if is_request else 'response'}")
    _refuse_null(message, message._struct, message.version, message.name)
    try:
        return bytes(message.encode())
    except _FAILURES as error:
        raise InvalidField(f"{message.name} v{message.version}: {error}") from error


def _refuse_null(item: Message, schema: Message, api_version: int, path: str) -> None:
    for name, is_nullable, inner in _checked_fields(schema, api_version):
        value = getattr(item, name)
        if value is None:
            if not is_nullable:
                raise InvalidField(f"{path}.{name} may not be null in version {api_version}")
        elif inner is not None:
            children: Sequence[Message] = value if isinstance(value, list) else (value,)
            for child in children:
                _refuse_null(child, inner, api_version, name)
        elif isinstance(value, list) and None in value:
            raise InvalidField(f"an element of {path}.{name} may not be null in version {api_version}")


_CHECKED_FIELDS: dict[tuple[int, int], list[tuple[str, bool, Message | None]]] = {}


def _checked_fields(schema: Message, api_version: int) -> list[tuple[str, bool, Message | None]]:
    """The fields of `schema` whose type has a null: name, whether null is valid, and the nested structure's schema."""
    key = (id(schema), api_version)  # schemas live for ever, like their message classes
    found = _CHECKED_FIELDS.get(key)
    if found is None:
        found = _CHECKED_FIELDS[key] = []
        for field in schema.fields.values():
            if not field.for_version_q(api_version):
                continue
            inner = field if field.is_struct() or field.is_struct_array() else None
            if inner is not None or field.is_array() or field.type_str in ("string", "bytes", "records"):
                # An absent tagged field has the schema's default, which may be null.
                is_nullable = field.nullable_for_version_q(api_version) or field.tagged_field_q(api_version)
                found.append((field.name, is_nullable, inner))
    return found
