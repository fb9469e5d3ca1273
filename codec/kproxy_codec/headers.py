"""Parse and encode request and response headers of every version.

Request header v1: api_key, api_version, correlation_id, client_id. v2 adds tagged fields. Response header v0:
correlation_id. v1 adds tagged fields. The client_id has the old string type in every version. The answer to ApiVersions
has header v0 in every version, so that a client with too new a version can read it (KIP-511). Offsets are counted in
the whole frame, its 4-byte length prefix included.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from kproxy_codec.api_keys import API_VERSIONS, FLEXIBLE_FROM, is_flexible
from kproxy_codec.errors import InvalidField, Truncated
from kproxy_codec.framing import LENGTH_BYTES
from kproxy_codec.primitives import INT16, INT32, Buffer, encode_tagged_fields, skip_tagged_fields

# api_key, api_version, correlation_id, length of client_id
_REQUEST_HEAD = Struct(">hhih")
_CLIENT_ID_OFFSET = LENGTH_BYTES + _REQUEST_HEAD.size
CORRELATION_ID_OFFSET = LENGTH_BYTES + 4
RESPONSE_CORRELATION_ID_OFFSET = LENGTH_BYTES
_RESPONSE_HEAD_BYTES = LENGTH_BYTES + 4


class RequestHeader(NamedTuple):
    """A request's header; `body_offset` is where the body begins in the frame. For the client_id see `client_id`."""

    api_key: int
    api_version: int
    correlation_id: int
    body_offset: int


def parse_request_header(frame: Buffer) -> RequestHeader:
    """The header of a whole frame. Raises CodecError."""
    limit = len(frame)
    if limit < _CLIENT_ID_OFFSET:
        raise Truncated(f"a request of {limit - LENGTH_BYTES} bytes is shorter than its header")
    api_key, api_version, correlation_id, client_id_length = _REQUEST_HEAD.unpack_from(frame, LENGTH_BYTES)
    offset = _CLIENT_ID_OFFSET
    if client_id_length >= 0:
        offset += client_id_length
        if offset > limit:
            raise Truncated(f"a client_id of {client_id_length} bytes in a request of {limit - LENGTH_BYTES} bytes")
    elif client_id_length != -1:
        raise InvalidField(f"a client_id of {client_id_length} bytes")
    if api_version >= FLEXIBLE_FROM.get(api_key, 0):
        # Almost always there is no tagged field, which is one zero byte.
        offset = offset + 1 if offset < limit and frame[offset] == 0 else skip_tagged_fields(frame, offset, limit)
    return RequestHeader(api_key, api_version, correlation_id, offset)


def client_id(frame: Buffer) -> bytes | None:
    """The client_id of a request whose header has been parsed; None for null."""
    length: int = INT16.unpack_from(frame, _CLIENT_ID_OFFSET - INT16.size)[0]
    return None if length < 0 else bytes(frame[_CLIENT_ID_OFFSET : _CLIENT_ID_OFFSET + length])


def request_header(api_key: int, api_version: int, correlation_id: int, sender: bytes | None) -> bytes:
    """A request header with `sender` as the client_id and no tagged fields; no length prefix."""
    length = -1 if sender is None else len(sender)
    head = _REQUEST_HEAD.pack(api_key, api_version, correlation_id, length) + (sender or b"")
    return head + encode_tagged_fields([]) if is_flexible(api_key, api_version) else head


def response_header(api_key: int, api_version: int, correlation_id: int) -> bytes:
    """A response header; no length prefix."""
    head = INT32.pack(correlation_id)
    if api_key != API_VERSIONS and is_flexible(api_key, api_version):
        return head + b"\x00"
    return head


def response_body_offset(frame: Buffer, api_key: int, api_version: int) -> int:
    """Where the body of an answer to this request begins in the frame. Raises CodecError."""
    if len(frame) < _RESPONSE_HEAD_BYTES:
        raise Truncated(f"an answer of {len(frame) - LENGTH_BYTES} bytes is shorter than its header")
    if api_key != API_VERSIONS and is_flexible(api_key, api_version):
        return skip_tagged_fields(frame, _RESPONSE_HEAD_BYTES, len(frame))
    return _RESPONSE_HEAD_BYTES


def response_correlation_id(frame: Buffer) -> int:
    """The correlation_id of an answer. Raises Truncated."""
    if len(frame) < _RESPONSE_HEAD_BYTES:
        raise Truncated(f"an answer of {len(frame) - LENGTH_BYTES} bytes is shorter than its header")
    correlation_id: int = INT32.unpack_from(frame, RESPONSE_CORRELATION_ID_OFFSET)[0]
    return correlation_id


def frame_message(*parts: Buffer) -> bytes:
    """One frame from the parts of a message, with the length prefix before them."""
    return b"".join((INT32.pack(sum(map(len, parts))), *parts))
