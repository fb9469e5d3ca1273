"""Read, skip and encode Kafka's primitive types.

A reader takes a buffer and an offset, and returns the value and the next offset; an encoder returns a value's bytes.
Every length is checked against the rest of the buffer before anything is read or allocated. `limit` is where the
message ends in the buffer: exclusive, in bytes. Every error is a CodecError.
"""

from __future__ import annotations

from struct import Struct, error

from kproxy_codec.errors import InvalidField, Truncated

Buffer = bytes | bytearray | memoryview

INT8 = Struct(">b")
INT16 = Struct(">h")
INT32 = Struct(">i")
INT64 = Struct(">q")

MAX_TAGGED_FIELDS = 64
MAX_STRING_BYTES = 0x7FFF
_MAX_UVARINT_BYTES = 5
_UINT32_MAX = 0xFFFF_FFFF


def read_fixed(form: Struct, buffer: Buffer, offset: int, limit: int) -> tuple[int, int]:
    """Read one integer of the given form."""
    end = offset + form.size
    if end > limit:
        raise Truncated(f"no room for {form.size} bytes at byte {offset}: the message ends at {limit}")
    try:
        (value,) = form.unpack_from(buffer, offset)
    except error as cause:
        raise Truncated(str(cause)) from cause
    return value, end


def read_uvarint(buffer: Buffer, offset: int, limit: int) -> tuple[int, int]:
    """Read an unsigned varint of at most 32 bits."""
    # Read up to three bytes, the length of nearly all, without a loop.
    if offset + 3 <= limit:
        first, second, third = buffer[offset : offset + 3]
        if first < 0x80:
            return first, offset + 1
        if second < 0x80:
            return first & 0x7F | second << 7, offset + 2
        if third < 0x80:
            return first & 0x7F | (second & 0x7F) << 7 | third << 14, offset + 3
    value = 0
    for position in range(_MAX_UVARINT_BYTES):
        at = offset + position
        if at >= limit:
            raise Truncated(f"the varint at byte {offset} reaches past the message's end at {limit}")
        byte = buffer[at]
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            if value > _UINT32_MAX:
                break
            return value, at + 1
    raise InvalidField(f"the varint at byte {offset} is longer than 32 bits")


def encode_uvarint(value: int) -> bytes:
    """Encode `value`, from 0 to 2^32-1, as an unsigned varint."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_count(
    buffer: Buffer, offset: int, limit: int, *, compact: bool, least_bytes: int, nullable: bool = False
) -> tuple[int, int]:
    """Read an array's element count; -1 for null.

    Raises InvalidField for null if the array is not `nullable`. `least_bytes` is the smallest size of one element: a
    count that cannot fit into the rest raises InvalidField before anything is allocated for it.
    """
    if compact:
        value, offset = read_uvarint(buffer, offset, limit)
        count = value - 1
    else:
        count, offset = read_fixed(INT32, buffer, offset, limit)
    if count < -1 or count * least_bytes > limit - offset:
        raise InvalidField(f"an array announces {count} elements, but only {limit - offset} bytes are left")
    if count < 0 and not nullable:
        raise InvalidField(f"invalid array before byte {offset}: null; expected an array")
    return count, offset


_SHORT_COUNTS = [encode_uvarint(value) for value in range(0x80)]


def encode_count(count: int, *, compact: bool) -> bytes:
    if compact:
        return _SHORT_COUNTS[count + 1] if count < 0x7F else encode_uvarint(count + 1)
    return INT32.pack(count)


def skip_string(
    buffer: Buffer, offset: int, limit: int, *, compact: bool, nullable: bool = False
) -> tuple[int, int, int]:
    """The span of a string: (start, end, next offset); start -1 for null.

    Raises InvalidField for null if the string is not `nullable`. No string is longer than MAX_STRING_BYTES: Kafka
    limits the compact form to the range of the old one.
    """
    if compact:
        value, offset = read_uvarint(buffer, offset, limit)
        length = value - 1
        if length > MAX_STRING_BYTES:
            raise InvalidField(f"a string has {length} bytes; expected at most {MAX_STRING_BYTES}")
    else:
        length, offset = read_fixed(INT16, buffer, offset, limit)
    if length == -1:
        if not nullable:
            raise InvalidField(f"invalid string before byte {offset}: null; expected a string")
        return -1, -1, offset
    end = offset + length
    if length < 0 or end > limit:
        raise Truncated(f"no room for a string of {length} bytes at byte {offset}: the message ends at {limit}")
    return offset, end, end


def skip_bytes(buffer: Buffer, offset: int, limit: int, *, compact: bool) -> tuple[int, int, int]:
    """The span of a nullable byte string: (start, end, next offset); start is -1 for null."""
    if compact:
        value, offset = read_uvarint(buffer, offset, limit)
        length = value - 1
    else:
        length, offset = read_fixed(INT32, buffer, offset, limit)
    if length == -1:
        return -1, -1, offset
    end = offset + length
    if length < 0 or end > limit:
        raise Truncated(f"no room for {length} announced bytes at byte {offset}: the message ends at {limit}")
    return offset, end, end


def read_tagged_fields(buffer: Buffer, offset: int, limit: int) -> tuple[list[tuple[int, int, int]], int]:
    """Read a section of tagged fields (KIP-482).

    Returns (tag, start of the value, end of the value) for each, and the offset after the section. Raises InvalidField
    for more than MAX_TAGGED_FIELDS fields or tags that do not ascend.
    """
    count, offset = read_uvarint(buffer, offset, limit)
    if count == 0:
        return [], offset
    if count > MAX_TAGGED_FIELDS:
        raise InvalidField(f"{count} tagged fields begin at byte {offset}; expected at most {MAX_TAGGED_FIELDS}")
    fields: list[tuple[int, int, int]] = []
    last_tag = -1
    for _ in range(count):
        tag, offset = read_uvarint(buffer, offset, limit)
        if tag <= last_tag:
            raise InvalidField(f"tagged field {tag} follows {last_tag}; expected ascending tags")
        last_tag = tag
        size, offset = read_uvarint(buffer, offset, limit)
        end = offset + size
        if end > limit:
            raise Truncated(f"no room for tagged field {tag}, {size} bytes at {offset}: the message ends at {limit}")
        fields.append((tag, offset, end))
        offset = end
    return fields, offset


def skip_tagged_fields(buffer: Buffer, offset: int, limit: int) -> int:
    """The offset after a tagged-field section."""
    if offset < limit and buffer[offset] == 0:
        return offset + 1
    return read_tagged_fields(buffer, offset, limit)[1]


def encode_tagged_fields(fields: list[tuple[int, bytes]]) -> bytes:
    """Encode a tagged-field section from (tag, value), tags ascending."""
    if not fields:
        return b"\x00"
    out = bytearray(encode_uvarint(len(fields)))
    for tag, value in fields:
        out += encode_uvarint(tag) + encode_uvarint(len(value)) + value
    return bytes(out)


def encode_string(value: bytes | None, *, compact: bool) -> bytes:
    """Encode a string or null, with its length in the old or compact form."""
    if value is None:
        return b"\x00" if compact else b"\xff\xff"
    if len(value) > MAX_STRING_BYTES:
        raise InvalidField(f"a string has {len(value)} bytes; expected at most {MAX_STRING_BYTES}")
    return (encode_uvarint(len(value) + 1) if compact else INT16.pack(len(value))) + value
