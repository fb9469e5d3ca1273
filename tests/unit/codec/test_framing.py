"""The frame reader at its limits: illegal lengths, and the limits of allocation and reuse."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator

import pytest

from kproxy_codec.errors import CodecError, FrameTooLarge, InvalidField
from kproxy_codec.framing import CHUNK_BYTES, GROWTH, KEPT_CHUNKS, LEAST_FREE_BYTES, FrameReader, ReceiveArena

LIMIT = 100 << 20


def _frame(length: int, fill: int = 0x41) -> bytes:
    return struct.pack(">i", length) + bytes([fill]) * length


def _feed(reader: FrameReader, data: bytes | memoryview) -> list[memoryview]:
    """Pass `data` to the reader like an event loop: each time as much as the reader has room for."""
    frames: list[memoryview] = []
    while data:
        buffer = reader.get_buffer(-1)
        count = min(len(buffer), len(data))
        assert count, "asyncio takes an empty buffer for a broken protocol"
        buffer[:count] = data[:count]
        frames += reader.buffer_updated(count)
        data = data[count:]
    return frames


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_frame_is_writable_and_its_own() -> None:
    reader = FrameReader(LIMIT)
    first, second = _feed(reader, _frame(4, 1) + _frame(4, 2))
    first[4:] = b"\xff" * 4
    assert bytes(second) == _frame(4, 2)
    with pytest.raises(IndexError):
        first[len(first)] = 0


def test_limit_itself_is_admitted() -> None:
    assert [len(frame) for frame in _feed(FrameReader(10), _frame(10))] == [14]
    with pytest.raises(FrameTooLarge, match="11"):
        _feed(FrameReader(10), _frame(11))


def test_limit_is_raised_for_authenticated_clients() -> None:
    reader = FrameReader(10)
    assert [len(frame) for frame in _feed(reader, _frame(10) + _frame(3)[:5])] == [14]
    reader.admit(LIMIT)
    assert [len(frame) for frame in _feed(reader, _frame(3)[5:] + _frame(11) + _frame(LIMIT))] == [7, 15, LIMIT + 4]
    with pytest.raises(FrameTooLarge):
        _feed(reader, _frame(LIMIT + 1))
    reader.admit(2**31 - 1)
    with pytest.raises(InvalidField):
        _feed(reader, _frame(1))


@pytest.mark.parametrize(
    ("announced", "error"),
    [
        (2**31 - 1, FrameTooLarge),
        (LIMIT + 1, FrameTooLarge),
        (-1, InvalidField),
        (-(2**31), InvalidField),
        (int.from_bytes(b"GET ", "big"), FrameTooLarge),
        (int.from_bytes(b"\x16\x03\x01\x02", "big"), FrameTooLarge),
    ],
    ids=["2 GiB", "one too many", "-1", "-2 GiB", "HTTP", "TLS"],
)
@pytest.mark.parametrize("cut", range(4))
@pytest.mark.usefixtures("traced")
def test_illegal_length_costs_nothing(announced: int, error: type[CodecError], cut: int) -> None:
    reader = FrameReader(LIMIT)
    head = struct.pack(">i", announced)
    _feed(reader, head[:cut])
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with pytest.raises(error, match=str(announced)):
        _feed(reader, head[cut:] + b"more")
    _, peak = tracemalloc.get_traced_memory()
    assert peak - before < 100_000


def test_bytes_behind_an_illegal_length_are_not_read() -> None:
    reader = FrameReader(LIMIT)
    with pytest.raises(FrameTooLarge):
        _feed(reader, _frame(2) + struct.pack(">i", 2**31 - 1) + _frame(2))
    for _ in range(2):
        with pytest.raises(CodecError):
            _feed(reader, _frame(2))


def test_illegal_length_affects_only_its_connection() -> None:
    arena = ReceiveArena()
    good, bad = FrameReader(LIMIT, arena), FrameReader(LIMIT, arena)
    _feed(good, _frame(100)[:50])
    with pytest.raises(InvalidField):
        _feed(bad, b"\xff" * 4)
    (frame,) = _feed(good, _frame(100)[50:])
    assert bytes(frame) == _frame(100)


@pytest.mark.parametrize("announced", [CHUNK_BYTES // 4, CHUNK_BYTES, 8 << 20, LIMIT])
@pytest.mark.usefixtures("traced")
def test_announced_bytes_are_allocated_only_on_arrival(announced: int) -> None:
    """Ten thousand connections that announce 100 MiB each must not be able to take a terabyte."""
    reader = FrameReader(LIMIT)
    stream = struct.pack(">i", announced) + bytes(3 << 20)
    baseline, _ = tracemalloc.get_traced_memory()
    arrived = 0
    for size in (4, 1, 1, 1000, 100_000, 100_000, 700_000, 24, 1 << 20, 900_000):
        if arrived + size > announced:
            break
        piece = memoryview(stream)[arrived : arrived + size]
        arrived += size
        assert not _feed(reader, piece)
        reader.get_buffer(-1)
        allocated, _ = tracemalloc.get_traced_memory()
        assert allocated - baseline <= max(CHUNK_BYTES, GROWTH * arrived) + 4096
    assert arrived > 200_000


@pytest.mark.usefixtures("traced")
def test_idle_connection_holds_no_buffer() -> None:
    arena = ReceiveArena()
    readers = [FrameReader(LIMIT, arena) for _ in range(1000)]
    for reader in readers:
        _feed(reader, _frame(10))
        reader.get_buffer(-1)
    allocated, _ = tracemalloc.get_traced_memory()
    assert allocated - CHUNK_BYTES < 1000 * 200
    assert {reader.pending_bytes for reader in readers} == {0}


@pytest.mark.usefixtures("traced")
def test_chunks_are_reused_when_their_frames_are_free() -> None:
    reader = FrameReader(LIMIT)
    chunks: list[bytearray] = []
    for _ in range(200):
        (frame,) = _feed(reader, _frame(200_000))
        assert isinstance(frame.obj, bytearray)
        assert len(frame.obj) == CHUNK_BYTES
        if not any(frame.obj is chunk for chunk in chunks):
            chunks.append(frame.obj)
    assert len(chunks) <= 3
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 5 * CHUNK_BYTES


@pytest.mark.usefixtures("traced")
def test_chunks_that_were_held_long_are_given_back() -> None:
    reader = FrameReader(LIMIT)
    held = [_feed(reader, _frame(200_000, fill % 256)) for fill in range(300)]
    assert all(bytes(frames[0]) == _frame(200_000, fill % 256) for fill, frames in enumerate(held))
    held.clear()
    for _ in range(300):
        _feed(reader, _frame(200_000))
    allocated, _ = tracemalloc.get_traced_memory()
    assert allocated < (KEPT_CHUNKS + 3) * CHUNK_BYTES


def test_same_position_in_another_chunk_is_distinct() -> None:
    arena = ReceiveArena()
    one, two = FrameReader(LIMIT, arena), FrameReader(LIMIT, arena)
    _feed(one, _frame(300, 1)[:100])
    held = [_feed(two, _frame((CHUNK_BYTES - LEAST_FREE_BYTES) // 4, 2))[0] for _ in range(4)]
    held += _feed(two, _frame(96, 3))
    # Another frame's last bytes end at the same position of the next chunk.
    assert held[0].obj is not held[-1].obj
    assert arena.position == 100
    assert [bytes(frame) for frame in _feed(one, _frame(300, 1)[100:])] == [_frame(300, 1)]
    assert [bytes(frame) for frame in held] == [_frame((CHUNK_BYTES - LEAST_FREE_BYTES) // 4, 2)] * 4 + [_frame(96, 3)]


def test_unfinished_frames_hold_little_more_than_their_bytes() -> None:
    """A few bytes of a frame must not keep a whole chunk that other frames fill."""
    arena = ReceiveArena()
    busy, partial = FrameReader(1 << 20, arena), [FrameReader(1 << 20, arena) for _ in range(50)]
    tracemalloc.start()
    try:
        for number, reader in enumerate(partial):
            _feed(reader, _frame(1000, number)[:300])
            for _ in range(12):
                _feed(busy, _frame(100_000, 0))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < (KEPT_CHUNKS + 4) * CHUNK_BYTES
    for number, reader in enumerate(partial):
        assert [bytes(frame) for frame in _feed(reader, _frame(1000, number)[300:])] == [_frame(1000, number)]


def test_long_frame_arrives_in_its_owners_buffer() -> None:
    arena = ReceiveArena()
    reader, neighbour = FrameReader(LIMIT, arena, most_shared=1000), FrameReader(LIMIT, arena)
    sent = [_frame(5), _frame(1500, 0x42), _frame(996, 0x43), _frame(3 * CHUNK_BYTES, 0x44), _frame(0)]
    stream, frames = memoryview(b"".join(sent)), list[bytes]()
    given = list[bytearray]()
    while stream:
        buffer = reader.get_buffer()
        assert reader.has_own or len(buffer) <= 1000
        count = min(len(buffer), len(stream))
        buffer[:count] = stream[:count]
        stream = stream[count:]
        frames += [bytes(frame) for frame in reader.buffer_updated(count)]
        assert _feed(neighbour, _frame(50, 0x61))[0][4:] == bytes([0x61]) * 50
        if reader.announced > 1000 and not reader.has_own:
            given.append(bytearray(reader.announced))
            reader.move_to(given[-1])
    assert frames == sent
    assert [bytes(each) for each in given] == [sent[1], sent[3]]
    assert reader.announced == reader.pending_bytes == 0


@pytest.mark.parametrize("length", [LEAST_FREE_BYTES + 1, CHUNK_BYTES // 3, 1_000_000, CHUNK_BYTES - 4])
def test_equally_long_frames_stay_where_they_arrive(length: int) -> None:
    arena = ReceiveArena()
    reader, neighbour = FrameReader(LIMIT, arena), FrameReader(LIMIT, arena)
    _feed(reader, _frame(length))
    stream, frames, begun = memoryview(_frame(length, 0x42) * 30), list[memoryview](), list[memoryview]()
    while stream:
        buffer = reader.get_buffer()
        if not reader.pending_bytes:
            begun.append(buffer)
        count = min(len(buffer), len(stream))
        # The last third of a large frame arrives later, after a small frame of another connection.
        if length > CHUNK_BYTES // 4 and not reader.pending_bytes and len(begun) % 2:
            count = min(count, length * 2 // 3)
        buffer[:count] = stream[:count]
        stream = stream[count:]
        frames += reader.buffer_updated(count)
        _feed(neighbour, _frame(50, 0x61))
    assert [bytes(frame) for frame in frames] == [_frame(length, 0x42)] * 30
    for buffer in begun:
        buffer[4:8] = b"here"
    assert sum(bytes(frame[4:8]) == b"here" for frame in frames) == len(begun)
    assert not any(b"here" in bytes(frame[8:]) for frame in frames)


def test_small_frame_after_long_ones_holds_no_chunk() -> None:
    arena = ReceiveArena()
    reader = FrameReader(LIMIT, arena)
    (long,) = _feed(reader, _frame(1_000_000))
    (small,) = _feed(reader, _frame(10))
    _feed(reader, _frame(10)[:7])
    assert reader.held_bytes == 7
    assert small.obj is not long.obj
    (other,) = _feed(FrameReader(LIMIT, arena), _frame(20))
    assert other.obj is small.obj
