"""Damage frames on purpose: any codec must refuse them with a CodecError, and take little memory for it."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from itertools import product

import pytest

from kproxy_codec.errors import CodecError
from tests.support.rules import examples
from tests.support.wire.messages import uvarint

Parse = Callable[[memoryview], object]
# Written over parts of messages: lengths, counts and varints of one to ten bytes, up to the extremes.
INFLATED = [
    *(bytes([byte]) for byte in (0x00, 0x7F, 0xFF)),
    *(struct.pack(">i", number) for number in (2**31 - 1, -1, -(2**31), 5000)),
    *(struct.pack(">h", number) for number in (2**15 - 1, -2)),
    *(uvarint(number) for number in (2**32 - 1, 65, 4_098, 40_000)),
    b"\x80" * 10,
]
# The memory that parsing a message of some 300 bytes may take: spans and lists, not announced sizes.
MODEST_BYTES = 64_000


def assert_refused_when_cut(parse: Parse, frame: memoryview) -> None:
    """Check this at every length."""
    for length in range(len(frame)):
        with pytest.raises(CodecError):
            parse(memoryview(bytearray(frame[:length])))


def assert_refused_before_allocation(parse: Parse, frame: bytes) -> None:
    """Inflate lengths at any place, in `make test` at a third of all, new ones each time; many messages are refused."""
    refused = 0
    every = [*product(range(4, len(frame)), INFLATED)]
    tried = random.sample(every, examples(len(every)))
    tracemalloc.start()
    try:
        for offset, inflated in tried:
            # Overwrite as many bytes, or replace one byte, as a longer varint would.
            end = offset + (1 if (offset + len(inflated)) % 2 else len(inflated))
            broken = memoryview(bytearray(frame[:offset] + inflated + frame[end:]))
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                parse(broken)
            except CodecError:
                refused += 1
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MODEST_BYTES, (offset, inflated)
    finally:
        tracemalloc.stop()
    assert refused * len(INFLATED) > len(tried)
