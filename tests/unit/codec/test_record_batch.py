"""The record batch header view, against batches that kafka-python built."""

from __future__ import annotations

import random

import pytest

from kproxy_codec.errors import CodecError, InvalidField, Truncated
from kproxy_codec.record_batch import (
    HEADER_BYTES,
    add_sequence,
    assign_offsets,
    iterate_batches,
    parse_batch,
)
from kproxy_codec.record_crc import crc_is_valid
from tests.support.wire.record_batches import build_batch


def test_every_header_field_is_read() -> None:
    bytes_ = build_batch([b"a" * 200] * 3, producer_id=4711, producer_epoch=3, base_sequence=17, compression=1)
    batch = parse_batch(bytes_)
    assert (batch.base_offset, batch.last_offset, batch.last_offset_delta, batch.record_count) == (0, 2, 2, 3)
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.last_sequence) == (4711, 3, 17, 19)
    assert (batch.base_timestamp, batch.max_timestamp) == (1_700_000_000_000, 1_700_000_000_002)
    assert (batch.magic, batch.compression, batch.is_transactional, batch.is_control) == (2, 1, False, False)
    assert not batch.is_log_append_time
    assert (batch.size_in_bytes, batch.end) == (len(bytes_), len(bytes_))
    assert parse_batch(build_batch(is_transactional=True, producer_id=1, producer_epoch=0, base_sequence=0))[6] & 0x10


def test_offsets_are_assigned_without_breaking_the_crc() -> None:
    two = build_batch([b"a", b"b"]) + build_batch([b"c"])
    first, second = list(iterate_batches(two))
    assign_offsets(two, second, 2**40, 9)
    again = parse_batch(two, second.position)
    assert (again.base_offset, again.partition_leader_epoch) == (2**40, 9)
    assert crc_is_valid(two, again)
    assert parse_batch(two) == first, "the neighbour was touched"


def test_flipped_bit_after_the_crc_is_detected() -> None:
    good = build_batch([b"a" * 50])
    batch = parse_batch(good)
    assert crc_is_valid(good, batch)
    source = random.Random(1)
    for _ in range(100):
        bad = bytearray(good)
        bad[source.randrange(21, len(bad))] ^= 1 << source.randrange(8)
        assert not crc_is_valid(bad, batch)


def test_batches_are_iterated_without_a_copy() -> None:
    three = b"before" + bytes(build_batch([b"a"]) + build_batch([b"b", b"b"]) + build_batch([b"c"] * 3))
    batches = list(iterate_batches(memoryview(three), 6))
    assert [batch.record_count for batch in batches] == [1, 2, 3]
    assert batches[-1].end == len(three)
    assert all(crc_is_valid(three, batch) for batch in batches)


def test_every_prefix_is_truncated() -> None:
    whole = build_batch([b"a", b"b"])
    for length in range(len(whole)):
        with pytest.raises(Truncated):
            parse_batch(whole[:length])


@pytest.mark.parametrize("magic", [0, 1, 3, 255])
def test_unsupported_magic_is_named(magic: int) -> None:
    old = build_batch()
    old[16] = magic
    with pytest.raises(InvalidField, match=f"magic {magic}"):
        parse_batch(old)
    with pytest.raises(InvalidField, match=f"magic {magic}"):
        parse_batch(old[:34])  # message sets 0 and 1 are shorter than a version 2 header


@pytest.mark.parametrize("length", [-1, 0, HEADER_BYTES - 13, 2**31 - 1])
def test_impossible_length_is_refused(length: int) -> None:
    bad = build_batch()
    bad[8:12] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(CodecError):
        parse_batch(bad)


def test_sequences_wrap_after_the_largest_int32() -> None:
    assert add_sequence(2**31 - 1, 1) == 0
    assert add_sequence(2**31 - 2, 3) == 1
    assert add_sequence(5, 0) == 5
