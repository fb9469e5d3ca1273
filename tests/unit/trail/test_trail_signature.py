"""A row that is signed with one of the keys counts; any other line does not."""

from __future__ import annotations

import os
import random

import pytest

from kproxy.trail.rows import decode_page, encode_page
from kproxy.trail.signature import MAC_BYTES, Signatures, signed
from tests.support.audit.forged_trail import ForgedTrail

KEY, OTHER = b"k" * 16, b"o" * 16
ROW = encode_page([ForgedTrail("a" * 16, "Zürich:9092").acked("t", 5, 10)])


def test_signed_row_is_accepted_and_read() -> None:
    line = signed(ROW, KEY)
    assert decode_page(line) == decode_page(ROW)
    keys = Signatures([OTHER, KEY])
    assert keys.accept(line)
    assert keys.refused == 0


def test_row_with_another_signature_is_refused() -> None:
    keys = Signatures([KEY])
    line = signed(ROW, KEY)
    for wrong in (b"", b"}", ROW, signed(ROW, OTHER), line[:-1], b" " + line, signed(line, OTHER), line * 2):
        assert not keys.accept(wrong), wrong
    assert keys.refused == 8


def test_row_altered_at_any_byte_is_refused() -> None:
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    draw, line, keys = random.Random(seed), signed(ROW, KEY), Signatures([KEY])
    for place in range(len(line)):
        altered = bytearray(line)
        altered[place] ^= draw.randint(1, 255)
        assert not keys.accept(bytes(altered)), place


@pytest.mark.parametrize("mac", [b"", b"0" * 2 * MAC_BYTES, b"\xff" * 2 * MAC_BYTES])
def test_made_up_mac_is_refused(mac: bytes) -> None:
    assert not Signatures([KEY]).accept(b'%b,"mac":"%b"}' % (ROW[:-1], mac))
