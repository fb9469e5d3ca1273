"""Cut received bytes into frames without copying them; read their headers.

Frames are memoryviews over the receive buffer. A frame is a 4-byte big-endian length and that many bytes. A
`FrameReader` belongs to one connection. All connections of one event loop share the `ReceiveArena` that it fills, so an
idle connection holds no buffer at all. This works because an event loop asks for a buffer and fills it in one step,
with no other connection in between.

States of a reader
  empty      nothing is held
  partial    the beginning of a frame is in [start, end) of a chunk
  broken     an illegal length was seen, or nothing more is read (`drop`); further bytes are refused

Transitions
  empty   -> partial   `buffer_updated` leaves an unfinished frame after the whole ones
  partial -> partial   more bytes arrive, perhaps after `get_buffer` moved the frame to where the rest fits
  partial -> empty     its last byte arrives with nothing after it
  any     -> broken    FrameTooLarge, InvalidField, `drop`

Invariants
1. A chunk is reused for new bytes only past its `position`, or when nothing refers to it any more: a frame is never
   overwritten while it is referenced. Python's own export count of the bytearray decides.
2. A length is checked before anything is allocated for it. The allocation for an announced frame is at most one chunk,
   or GROWTH times its bytes that have arrived. So a frame that only announces 2 GiB costs at most one chunk.
3. Bytes are moved only when a frame is unfinished and the rest does not fit after it, or another connection has used
   the chunk in between, or the chunk is full and other readers continue in the next one. Where long reads are allowed,
   a reader expects frames as large as its last one: its reads end with the frame, and it begins in a chunk with room
   for one. A large frame that has begun in such a chunk gets it for itself, and other readers continue in the next one.
4. Once the chunk in which it began is left, an unfinished frame holds only its own bytes and buffers made for it alone.
   A buffer given by the reader's owner (`move_to`) is the owner's responsibility.

Headers. Request header v1: api_key, api_version, correlation_id, client_id; v2 adds tagged fields. Response header v0:
correlation_id; v1 adds tagged fields. The client_id has the old string type in every version. The answer to ApiVersions
has header v0 in every version, so that a client with too new a version can read it (KIP-511). Offsets count from the
start of the frame, with its 4-byte length prefix.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from kproxy_codec.api_keys import API_VERSIONS, FLEXIBLE_FROM, is_flexible
from kproxy_codec.errors import FrameTooLarge, InvalidField, Truncated
from kproxy_codec.primitives import INT16, INT32, Buffer, encode_tagged_fields, skip_tagged_fields

LENGTH_BYTES = 4
# Fits the largest request of Kafka's clients by default (1 MiB), with its header.
CHUNK_BYTES = (1 << 20) + (64 << 10)
# A chunk with less free space than this gets no further read from the kernel.
LEAST_FREE_BYTES = 64 << 10
GROWTH = 4
# Chunks kept for reuse; further ones are left to the allocator.
KEPT_CHUNKS = 64

_LENGTH = Struct(">i")
# The limit of a broken reader, which admits not even an empty frame.
_BROKEN = -1


class ReceiveArena:
    """The chunk that the readers of one event loop fill in turn, and the chunks that may be reused."""

    __slots__ = ("_unfinished", "_used", "chunk", "position", "view")

    def __init__(self) -> None:
        self._used: list[bytearray] = []
        # Readers that left an unfinished frame in the chunk; some of them may have finished it since.
        self._unfinished: set[FrameReader] = set()
        self.chunk = bytearray(CHUNK_BYTES)
        self.view = memoryview(self.chunk)
        self.position = 0

    def renew(self, keeps: FrameReader | None = None) -> None:
        """Begin another chunk; the old one lives as long as a frame refers to it.

        Unfinished frames are copied out, so that a few bytes that a client leaves for hours do not keep a whole chunk.
        The frame of `keeps` stays where it is.
        """
        left, self._unfinished = self._unfinished, set()
        if keeps is not None:
            left.discard(keeps)
        for reader in left:
            reader.take_out(self.view)
        self.view = memoryview(b"")
        self._used.append(self.chunk)
        self.chunk = self._take()
        self.view = memoryview(self.chunk)
        self.position = 0

    def leave(self, reader: FrameReader) -> None:
        """Note that `reader` has an unfinished frame in the chunk."""
        self._unfinished.add(reader)

    def lend(self) -> bytearray:
        """Return a chunk for one reader alone; it may be reused when nothing refers to it any more."""
        chunk = self._take()
        self._used.append(chunk)
        return chunk

    def _take(self) -> bytearray:
        # The newest chunks are the most likely to be in a cache of the processor.
        for at in reversed(range(len(self._used))):
            if is_unreferenced(self._used[at]):
                return self._used.pop(at)
        if len(self._used) > KEPT_CHUNKS:
            del self._used[0]
        return bytearray(CHUNK_BYTES)


def is_unreferenced(chunk: bytearray) -> bool:
    """Whether no memoryview refers to `chunk`: a bytearray with exports refuses to be resized."""
    try:
        chunk.pop()
    except BufferError:
        return False
    chunk.append(0)
    return True


class FrameReader:
    """Cut one connection's bytes into frames.

    Its methods fit asyncio.BufferedProtocol. Every returned frame is a writable memoryview of the whole frame, its
    4-byte length prefix included. At most `most_shared` bytes are read into the chunk at a time, so that a longer frame
    is announced before it is whole; the reader's owner may change `most_shared`. `announced` is the length of the
    arriving frame, its prefix included, if it is known; else 0.
    """

    __slots__ = (
        "_arena",
        "_end",
        "_expected",
        "_max_frame_bytes",
        "_own",
        "_start",
        "_view",
        "announced",
        "most_shared",
    )

    def __init__(
        self, max_frame_bytes: int, arena: ReceiveArena | None = None, *, most_shared: int = CHUNK_BYTES
    ) -> None:
        self._arena = arena if arena is not None else ReceiveArena()
        self._max_frame_bytes = max_frame_bytes
        self.most_shared = most_shared
        self.announced = 0
        self._view: memoryview | None = None  # the chunk that holds the unfinished frame
        self._own = False  # whether that chunk is this reader's alone
        self._start = 0
        self._end = 0
        # The length of the last whole frame, if long reads are allowed and the frame is large enough; else 0.
        self._expected = 0

    @property
    def pending_bytes(self) -> int:
        """Bytes held of an unfinished frame."""
        return self._end - self._start

    @property
    def held_bytes(self) -> int:
        """Memory held by an unfinished frame: its bytes, or the whole buffer if it is this reader's alone."""
        if self._own and self._view is not None:
            return len(self._view)
        return self._end - self._start

    def admit(self, max_frame_bytes: int) -> None:
        """Set the limit for frames whose first bytes arrive from now on. A broken reader stays broken."""
        if self._max_frame_bytes != _BROKEN:
            self._max_frame_bytes = max_frame_bytes

    def get_buffer(self, size_hint: int = -1, *, lean: bool = False) -> memoryview:
        """The buffer for the next bytes.

        Call `buffer_updated` with their count before any other reader's `get_buffer`. With `lean` a large frame's
        buffer grows by at most LEAST_FREE_BYTES.
        """
        arena = self._arena
        view = self._view
        if view is None:
            expected = 0 if lean else self._expected
            if CHUNK_BYTES - arena.position < max(LEAST_FREE_BYTES, expected):
                arena.renew()
            size = min(self.most_shared, CHUNK_BYTES - arena.position)
            if size > expected > 0:
                size -= size % expected
            return arena.view[arena.position : arena.position + size]
        announced = LENGTH_BYTES
        if self._end - self._start >= LENGTH_BYTES:
            announced += _LENGTH.unpack_from(view, self._start)[0]
        fits = self._end < len(view) and announced <= len(view) - self._start
        if self._own:
            if self._end < len(view):
                return view[self._end : self._start + announced]
        elif fits and view is arena.view and self._end == arena.position:
            return view[self._end : self._end + self.most_shared]
        return self._move(view[self._start : self._end], announced, lean)

    def _move(self, held: memoryview, announced: int, lean: bool) -> memoryview:
        """Move the unfinished frame to where more of it fits, and return the space after it."""
        arena = self._arena
        if announced > CHUNK_BYTES // 4:
            # A large frame gets a buffer of its own that grows as its bytes arrive. New memory costs more than the work
            # on it, because each page causes a page fault.
            size = min(announced, len(held) + LEAST_FREE_BYTES if lean else max(CHUNK_BYTES, GROWTH * len(held)))
            view = memoryview(bytearray(size) if lean or size > CHUNK_BYTES else arena.lend())
            start, self._own = 0, True
        else:
            if CHUNK_BYTES - arena.position < max(LEAST_FREE_BYTES, announced):
                arena.renew(self)
            view, start, self._own = arena.view, arena.position, False
            arena.position += len(held)
        end = start + len(held)
        view[start:end] = held
        self._view, self._start, self._end = view, start, end
        return view[end:announced] if self._own else view[end : end + self.most_shared]

    @property
    def has_own(self) -> bool:
        """Whether the arriving frame has a buffer of its own."""
        return self._own

    def move_to(self, buffer: bytearray) -> None:
        """Receive the arriving frame into `buffer`, which has the `announced` length."""
        if self._view is None:
            raise ValueError("no frame is arriving")
        held = self._view[self._start : self._end]
        buffer[: len(held)] = held
        self._view, self._start, self._end, self._own = memoryview(buffer), 0, len(held), True

    def drop(self) -> None:
        """Forget the arriving frame, because nothing more will be read."""
        self._max_frame_bytes = _BROKEN
        self._let_go()

    def buffer_updated(self, nbytes: int) -> list[memoryview]:
        """The frames that `nbytes` more bytes complete, in order.

        Raises FrameTooLarge for a length over the limit, InvalidField for a negative one; frames that were whole before
        it are lost with the connection, as at Kafka's own broker.
        """
        arena = self._arena
        view = self._view
        if view is None:
            view, start = arena.view, arena.position
            end = arena.position = start + nbytes
        else:
            start, end = self._start, self._end + nbytes
            if not self._own:
                arena.position = end
        frames: list[memoryview] = []
        frame_end = start
        while end - start >= LENGTH_BYTES:
            (length,) = _LENGTH.unpack_from(view, start)
            if not 0 <= length <= self._max_frame_bytes:
                raise self._break(length)
            frame_end = start + LENGTH_BYTES + length
            if frame_end > end:
                break
            frames.append(view[start:frame_end])
            start = frame_end
        reads_long = self.most_shared >= CHUNK_BYTES
        if frames:
            last = len(frames[-1])
            self._expected = last if reads_long and LEAST_FREE_BYTES < last <= CHUNK_BYTES else 0
        if start == end:
            self._let_go()
            return frames
        self._view, self._start, self._end = view, start, end
        self.announced = announced = frame_end - start
        if not self._own:
            # A lean read is shorter, and its frame uses no more memory than its bytes.
            if reads_long and nbytes >= LEAST_FREE_BYTES and CHUNK_BYTES // 4 < announced <= CHUNK_BYTES - start:
                self._own = True
                arena.renew(self)
            else:
                arena.leave(self)
        return frames

    def take_out(self, view: memoryview) -> None:
        """Copy the unfinished frame out of the chunk of this view, if it is in that chunk."""
        if self._view is view:
            held = bytearray(view[self._start : self._end])
            self._view, self._start, self._end = memoryview(held), 0, len(held)

    def _let_go(self) -> None:
        self._view, self._start, self._end, self._own, self.announced = None, 0, 0, False, 0

    def _break(self, length: int) -> InvalidField | FrameTooLarge:
        """The error for `length`. From now on every length is illegal: further bytes do not begin at a frame."""
        admitted, self._max_frame_bytes = self._max_frame_bytes, _BROKEN
        self._let_go()
        return illegal_length(length, admitted)


def illegal_length(length: int, admitted: int) -> InvalidField | FrameTooLarge:
    """The error for a frame of a negative length, or of one over `admitted` bytes (-1 after an illegal length)."""
    if admitted == _BROKEN:
        return InvalidField("bytes follow an illegal length; the start of the next frame is unknown")
    if length < 0:
        return InvalidField(f"a frame announces a negative length ({length})")
    return FrameTooLarge(
        f"a frame announces {length} bytes; at most {admitted} are admitted here", _LENGTH.pack(length)
    )


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
    """Parse the header of a whole frame. Raises CodecError."""
    limit = len(frame)
    if limit < _CLIENT_ID_OFFSET:
        raise Truncated(f"a request of {limit - LENGTH_BYTES} bytes is shorter than its header")
    api_key, api_version, correlation_id, client_id_length = _REQUEST_HEAD.unpack_from(frame, LENGTH_BYTES)
    offset = _CLIENT_ID_OFFSET
    if client_id_length >= 0:
        offset += client_id_length
        if offset > limit:
            raise Truncated(f"a request of {limit - LENGTH_BYTES} bytes ends in its client_id of {client_id_length}")
    elif client_id_length != -1:
        raise InvalidField(f"invalid client_id length {client_id_length}; expected -1 or more")
    if api_version >= FLEXIBLE_FROM.get(api_key, 0):
        # Almost always there is no tagged field, which is one zero byte.
        offset = offset + 1 if offset < limit and frame[offset] == 0 else skip_tagged_fields(frame, offset, limit)
    return RequestHeader(api_key, api_version, correlation_id, offset)


def client_id(frame: Buffer) -> bytes | None:
    """The client_id of a request whose header has been parsed; None for null."""
    length: int = INT16.unpack_from(frame, _CLIENT_ID_OFFSET - INT16.size)[0]
    return None if length < 0 else bytes(frame[_CLIENT_ID_OFFSET : _CLIENT_ID_OFFSET + length])


def request_header(api_key: int, api_version: int, correlation_id: int, sender: bytes | None) -> bytes:
    """Encode a request header with `sender` as the client_id and no tagged fields, without the length prefix."""
    length = -1 if sender is None else len(sender)
    head = _REQUEST_HEAD.pack(api_key, api_version, correlation_id, length) + (sender or b"")
    return head + encode_tagged_fields([]) if is_flexible(api_key, api_version) else head


def response_header(api_key: int, api_version: int, correlation_id: int) -> bytes:
    """Encode a response header, without the length prefix."""
    head = INT32.pack(correlation_id)
    if api_key != API_VERSIONS and is_flexible(api_key, api_version):
        return head + b"\x00"
    return head


def response_body_offset(frame: Buffer, api_key: int, api_version: int) -> int:
    """Return the offset in the frame at which the body of an answer to this request begins. Raise CodecError."""
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
    """Return one frame: the length prefix and the parts of a message."""
    return b"".join((INT32.pack(sum(map(len, parts))), *parts))
