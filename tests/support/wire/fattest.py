"""Build the largest messages that an API has room for, by kafka-python's schemas but not by its encoder.

One array of the message has as many elements as fit, each as small as possible: the highest reading cost per byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kproxy_codec import control
from kproxy_codec.api_keys import API_VERSIONS, is_flexible
from tests.support.wire.messages import uvarint

Path = tuple[str, ...]
"""The names of an array and of the arrays around it, outermost first."""
Values = Mapping[str, Any]

_SIZES: Final = {
    **dict.fromkeys(("bool", "int8"), 1),
    **dict.fromkeys(("int16", "uint16"), 2),
    **dict.fromkeys(("int32", "uint32", "bitfield"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
    "uuid": 16,
}


def schema_of(kind: str, api_key: int) -> Any:
    """The schema of kafka-python, for a "request" or "response"."""
    return {"request": control._REQUESTS, "response": control._RESPONSES}[kind][api_key]._struct


def arrays(kind: str, api_key: int, version: int) -> list[Path]:
    """The arrays that the message has in this version."""
    return list(_arrays(schema_of(kind, api_key), version))


def _arrays(schema: Any, version: int) -> Iterator[Path]:
    for field in schema.fields.values():
        if field.for_version_q(version) and not field.tagged_field_q(version) and field.is_array():
            yield (field.name,)
            if field.is_struct_array():
                for path in _arrays(field, version):
                    yield (field.name, *path)


def body_of(
    kind: str, api_key: int, version: int, array: Path, count: int, *, tags: bytes = b"\x00", **values: Any
) -> bytes:
    """A message with `count` elements in `array`, one in each array around it, and none in any other.

    `tags` is the section of tagged fields that ends each structure; `values` are values of fields, by name, that must
    not be null, zero or an empty string.
    """
    # The header of an ApiVersions answer is not flexible; its body is.
    flexible = is_flexible(api_key, version)
    return _structure(schema_of(kind, api_key), version, array, count, tags if flexible else b"", values)


def fattest(
    kind: str, api_key: int, version: int, array: Path, size: int, *, tags: bytes = b"\x00", **values: Any
) -> bytes:
    """The same with as many elements as `size` bytes have room for."""
    one, two = (len(body_of(kind, api_key, version, array, count, tags=tags, **values)) for count in (1, 2))
    # A varint may grow by two bytes.
    count = max(1, (size - one - 2) // (two - one))
    return body_of(kind, api_key, version, array, count, tags=tags, **values)


def many_tags(size: int) -> bytes:
    """A section of as many tagged fields as fit, each empty."""
    count = size // 4
    return uvarint(count) + b"".join(uvarint(tag) + b"\x00" for tag in range(100, 100 + count))[: size - 4]


def control_request(api_key: int, version: int, body: bytes, *, correlation_id: int = 1) -> bytes:
    head = struct.pack(">hhih", api_key, version, correlation_id, 5) + b"tests"
    if is_flexible(api_key, version):
        head += b"\x00"
    return struct.pack(">i", len(head) + len(body)) + head + body


def control_answer(api_key: int, version: int, body: bytes, *, correlation_id: int = 1) -> bytes:
    head = struct.pack(">i", correlation_id)
    if is_flexible(api_key, version) and api_key != API_VERSIONS:
        head += b"\x00"
    return struct.pack(">i", len(head) + len(body)) + head + body


def _structure(schema: Any, version: int, array: Path, count: int, tags: bytes, values: Values) -> bytes:
    parts = []
    for field in schema.fields.values():
        if not field.for_version_q(version) or field.tagged_field_q(version):
            continue
        if field.is_array():
            elements = 0 if array[:1] != (field.name,) else count if len(array) == 1 else 1
            if field.is_struct_array():
                element = _structure(field, version, array[1:], count, tags, values) if elements else b""
            else:
                element = _scalar(field.type_str.removeprefix("[]"), None, flexible=bool(tags))
            parts += [_count(elements, flexible=bool(tags)), element * elements]
        elif field.is_struct():
            # All structures in fields of their own may be null.
            parts.append(b"\xff")
        else:
            parts.append(_scalar(field.type_str, values.get(field.name), flexible=bool(tags)))
    return b"".join(parts) + tags


def _count(count: int, *, flexible: bool) -> bytes:
    return uvarint(count + 1) if flexible else struct.pack(">i", count)


def _scalar(type_name: str, value: Any, *, flexible: bool) -> bytes:
    if type_name in ("string", "bytes", "records"):
        text = (value or "").encode()
        return (
            uvarint(len(text) + 1) if flexible else struct.pack(">h" if type_name == "string" else ">i", len(text))
        ) + text
    return int(value or 0).to_bytes(_SIZES[type_name], "big", signed=True)
