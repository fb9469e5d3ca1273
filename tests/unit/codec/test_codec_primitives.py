"""Primitive types: values that are read, and values that are refused before any work is done for them."""

from __future__ import annotations

import pytest

from kproxy_codec.errors import CodecError, InvalidField, Truncated
from kproxy_codec.primitives import (
    INT8,
    INT16,
    INT32,
    INT64,
    MAX_STRING_BYTES,
    encode_count,
    encode_tagged_fields,
    encode_uvarint,
    read_count,
    read_fixed,
    read_tagged_fields,
    read_uvarint,
    skip_bytes,
    skip_string,
    skip_tagged_fields,
)
from tests.support.wire.messages import tag_section, uvarint

BOUNDARIES = [0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21, 2**28 - 1, 2**28, 2**31, 2**32 - 1]


@pytest.mark.parametrize("value", BOUNDARIES)
def test_varints_match_kafkas_encoding(value: int) -> None:
    assert encode_uvarint(value) == uvarint(value)
    end = 1 + len(uvarint(value))
    assert read_uvarint(b"\xff" + uvarint(value) + b"\xff", 1, end + 1) == (value, end)


@pytest.mark.parametrize(
    ("encoded", "error"),
    [
        (b"", Truncated),
        (b"\x80", Truncated),
        (b"\x80\x80\x80\x80", Truncated),
        (b"\x80\x80\x80\x80\x80\x00", InvalidField),
        (b"\xff\xff\xff\xff\x10", InvalidField),
        (b"\xff" * 4096, InvalidField),
    ],
)
def test_bad_varints_are_refused(encoded: bytes, error: type[CodecError]) -> None:
    with pytest.raises(error):
        read_uvarint(encoded, 0, len(encoded))


@pytest.mark.parametrize(("form", "size"), [(INT8, 1), (INT16, 2), (INT32, 4), (INT64, 8)])
def test_message_may_end_before_the_buffer_does(form: object, size: int) -> None:
    buffer = b"\xff" * 20
    assert read_fixed(form, buffer, 3, 3 + size) == (-1, 3 + size)  # type: ignore[arg-type]
    with pytest.raises(Truncated):
        read_fixed(form, buffer, 3, 2 + size)  # type: ignore[arg-type]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("least_bytes", [1, 2, 6, 22])
def test_count_must_fit_the_remaining_bytes(compact: bool, least_bytes: int) -> None:
    for count in (0, 1, 3, 1000):
        array = encode_count(count, compact=compact)
        end = len(array) + count * least_bytes
        buffer = array + bytes(end)
        assert read_count(buffer, 0, end, compact=compact, least_bytes=least_bytes) == (count, len(array))
        if count:
            with pytest.raises(InvalidField):
                read_count(buffer, 0, end - 1, compact=compact, least_bytes=least_bytes)
    null = encode_count(-1, compact=compact)
    read = read_count(null, 0, len(null), compact=compact, least_bytes=least_bytes, nullable=True)
    assert read == (-1, len(null))
    with pytest.raises(InvalidField, match="null"):
        read_count(null, 0, len(null), compact=compact, least_bytes=least_bytes)


@pytest.mark.parametrize("count", [-2, -(2**31), 2**31 - 1])
def test_no_array_has_that_many_elements(count: int) -> None:
    with pytest.raises(InvalidField):
        read_count(INT32.pack(count) + bytes(100), 0, 104, compact=False, least_bytes=1, nullable=True)


def _string(value: bytes | None, *, compact: bool) -> bytes:
    length = -1 if value is None else len(value)
    return (uvarint(length + 1) if compact else INT16.pack(length)) + (value or b"")


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("value", [None, b"", b"a", b"n" * 127, b"n" * 128, b"n" * MAX_STRING_BYTES])
def test_strings_are_found(compact: bool, value: bytes | None) -> None:
    encoded = _string(value, compact=compact)
    start, end, after = skip_string(encoded + b"!", 0, len(encoded), compact=compact, nullable=True)
    assert (after, encoded[start:end] if start >= 0 else None) == (len(encoded), value)
    if value is None:
        with pytest.raises(InvalidField, match="null"):
            skip_string(encoded, 0, len(encoded), compact=compact)
    else:
        with pytest.raises(Truncated):
            skip_string(encoded + b"!", 0, len(encoded) - 1, compact=compact)


@pytest.mark.parametrize("length", [-2, -(2**15)])
def test_no_string_has_a_negative_length(length: int) -> None:
    with pytest.raises(CodecError):
        skip_string(INT16.pack(length) + bytes(9), 0, 11, compact=False, nullable=True)
    with pytest.raises(CodecError):
        skip_bytes(INT32.pack(length) + bytes(9), 0, 13, compact=False)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("value", [None, b"", b"a", b"r" * 127, b"r" * 70_000])
def test_byte_strings_are_found(compact: bool, value: bytes | None) -> None:
    length = -1 if value is None else len(value)
    encoded = (uvarint(length + 1) if compact else INT32.pack(length)) + (value or b"")
    start, end, after = skip_bytes(encoded + b"!", 0, len(encoded), compact=compact)
    assert (after, encoded[start:end] if start >= 0 else None) == (len(encoded), value)
    with pytest.raises(Truncated):
        skip_bytes(encoded + b"!", 0, len(encoded) - 1, compact=compact)


@pytest.mark.parametrize("fields", [[], [(0, b"")], [(0, b"a"), (1, b"x" * 200), (2**32 - 1, b"z")]])
def test_tagged_fields_are_found_and_written(fields: list[tuple[int, bytes]]) -> None:
    section = tag_section(fields)
    assert encode_tagged_fields(fields) == section
    found, after = read_tagged_fields(section + b"!", 0, len(section))
    assert [(tag, section[start:end]) for tag, start, end in found] == fields
    assert after == skip_tagged_fields(section + b"!", 0, len(section)) == len(section)
    for length in range(len(section)):
        with pytest.raises(Truncated):
            skip_tagged_fields(section, 0, length)
