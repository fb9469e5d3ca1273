"""Connections read into one arena, in any order and any portions, and every held frame stays unmodified.

The chunks are small here, so that a few kilobytes cause every renewal, move and reuse.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_codec import framing
from kproxy_codec.framing import FrameReader, ReceiveArena
from tests.support.rules import examples

CHUNK = 1024
LIMIT = 6 * CHUNK
SCRIBBLE = 0xEE


@contextmanager
def small_chunks() -> Iterator[None]:
    with mock.patch.multiple(framing, CHUNK_BYTES=CHUNK, LEAST_FREE_BYTES=64, KEPT_CHUNKS=3):
        yield


class Connection:
    """One peer: the bytes that it will send, the frames that the reader cut from them, and the frames still held."""

    def __init__(self, arena: ReceiveArena, chance: random.Random, frames: int) -> None:
        self.reader = FrameReader(LIMIT, arena)
        self.sent = [_frame(chance) for _ in range(frames)]
        self.stream = b"".join(self.sent)
        self.position = 0
        self.received = 0
        self.held: list[tuple[memoryview, bytes]] = []

    @property
    def is_done(self) -> bool:
        return self.position == len(self.stream)

    def receive(self, chance: random.Random) -> None:
        buffer = self.reader.get_buffer(-1)
        assert len(buffer) > 0
        count = min(len(buffer), len(self.stream) - self.position, _portion(chance))
        # The whole offered buffer may be overwritten: a TLS library does so after the bytes that it reports.
        buffer[:] = bytes([SCRIBBLE]) * len(buffer)
        buffer[:count] = self.stream[self.position : self.position + count]
        self.position += count
        for frame in self.reader.buffer_updated(count):
            expected = self.sent[self.received]
            assert bytes(frame) == expected
            self.received += 1
            self.held.append((frame, expected))

    def drop(self, chance: random.Random, keep: float) -> None:
        """Release some frames, whose bytes must be unchanged."""
        kept: list[tuple[memoryview, bytes]] = []
        for frame, expected in self.held:
            assert bytes(frame) == expected
            if chance.random() < keep:
                kept.append((frame, expected))
        self.held = kept


def _frame(chance: random.Random) -> bytes:
    of_any_size = (chance.randrange(100), chance.randrange(CHUNK), chance.randrange(LIMIT + 1))
    length = chance.choice((0, 1, 3, CHUNK // 4, *of_any_size))
    return struct.pack(">i", length) + chance.randbytes(length)


def _portion(chance: random.Random) -> int:
    return chance.choice((1, 2, chance.randrange(1, 40), chance.randrange(1, CHUNK), LIMIT))


@settings(max_examples=examples(400))
@given(
    seed=st.integers(0, 2**64),
    connections=st.integers(1, 5),
    frames=st.integers(1, 25),
    keep=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    idle=st.sampled_from([0.0, 0.3]),
)
def test_frames_come_whole_and_stay_unmodified_while_held(
    seed: int, connections: int, frames: int, keep: float, idle: float
) -> None:
    chance = random.Random(seed)
    with small_chunks():
        arena = ReceiveArena()
        peers = [Connection(arena, chance, frames) for _ in range(connections)]
        busy = list(peers)
        while busy:
            peer = chance.choice(busy)
            if chance.random() < idle:
                peer.reader.get_buffer(-1)
                continue
            peer.receive(chance)
            if chance.random() < 0.2:
                chance.choice(peers).drop(chance, keep)
            if peer.is_done:
                busy.remove(peer)
        for peer in peers:
            assert peer.received == len(peer.sent)
            assert peer.reader.pending_bytes == 0
            peer.drop(chance, 0.0)


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 2**64))
def test_connections_ending_within_frame_affect_no_other(seed: int) -> None:
    chance = random.Random(seed)
    with small_chunks():
        arena = ReceiveArena()
        survivor = Connection(arena, chance, 30)
        passing = Connection(arena, chance, 3)
        while not survivor.is_done:
            survivor.receive(chance)
            if chance.random() < 0.2:
                survivor.drop(chance, 0.5)
            if passing.is_done or chance.random() < 0.1:
                passing = Connection(arena, chance, 3)
            passing.receive(chance)
        assert survivor.received == len(survivor.sent)
        survivor.drop(chance, 0.0)
