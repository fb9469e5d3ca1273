"""The reader of the PROXY protocol, version 2, accepts correct headers and no other bytes."""

from __future__ import annotations

import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.security.proxy_protocol import MAX_BYTES, ProxyHeader, ProxyHeaderError, Source, State
from tests.support.security.proxy_header import LOCAL, SIGNATURE, extension, header


def read(data: bytes, sizes: list[int] | None = None) -> tuple[ProxyHeader, int]:
    """The header in `data`, read in portions of these sizes as far as needed; and the number of bytes read."""
    parsed, at = ProxyHeader(), 0
    portions = iter(sizes or ())
    while parsed.needed:
        size = min(next(portions, parsed.needed), parsed.needed)
        portion = data[at : at + size]
        if not portion:
            break
        parsed.receive(portion)
        at += len(portion)
    return parsed, at


addresses = st.one_of(
    st.tuples(st.ip_addresses(v=4), st.ip_addresses(v=4)), st.tuples(st.ip_addresses(v=6), st.ip_addresses(v=6))
)
ports = st.integers(0, 65_535)
# Any type except the checksum.
extensions = st.lists(
    st.builds(extension, st.integers(0, 255).filter(lambda kind: kind != 3), st.binary(max_size=40)), max_size=5
)


@given(addresses, ports, ports, extensions, st.booleans(), st.lists(st.integers(1, 40), max_size=20), st.binary())
def test_valid_header_names_source_and_leaves_the_rest(
    pair: tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, ...],
    port: int,
    other_port: int,
    more: list[bytes],
    checksum: bool,
    sizes: list[int],
    behind: bytes,
) -> None:
    made = header((str(pair[0]), port), (str(pair[1]), other_port), extensions=more, checksum=checksum)
    parsed, taken = read(made + behind, sizes)
    assert (parsed.state, parsed.source, taken) == (State.DONE, Source(str(pair[0]), port), len(made))


@given(st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=20))
def test_other_bytes_are_refused_or_awaited(data: bytes, sizes: list[int]) -> None:
    try:
        parsed, taken = read(data, sizes)
    except ProxyHeaderError:
        assert not data.startswith(SIGNATURE)
        return
    assert taken == len(data)
    assert parsed.state is State.SIGNATURE


@given(st.binary(min_size=4, max_size=80))
def test_bytes_after_the_signature_do_not_break_parser(data: bytes) -> None:
    parsed = ProxyHeader()
    try:
        for byte in SIGNATURE + data + bytes(MAX_BYTES):
            if not parsed.needed:
                break
            parsed.receive(bytes([byte]))
    except ProxyHeaderError:
        assert parsed.state is State.FAILED
        assert parsed.needed == 0
        return
    assert parsed.state is State.DONE


@given(extensions, st.integers(0, 1 << 31))
def test_changed_byte_does_not_pass_the_checksum(more: list[bytes], change: int) -> None:
    made = bytearray(header(extensions=more, checksum=True))
    at, bit = 16 + change % (len(made) - 16), change >> 8 & 7
    made[at] ^= 1 << bit
    # The changed extension may be another one or end elsewhere; but the source is not used.
    try:
        parsed, _ = read(bytes(made))
    except ProxyHeaderError:
        return
    assert parsed.source == Source("203.0.113.7", 4711)


REFUSED = {
    "version 1": (b"PROXY TCP4 203.0.113.7 198.51.100.1 4711 9092\r\n", "does not begin with a header"),
    "Kafka": (struct.pack(">ihhi", 100, 18, 3, 1), "does not begin with a header"),
    "another version": (header(command=0x11), "version and command 0x11"),
    "another command": (header(command=0x22), "version and command 0x22"),
    "UDP": (header(family=0x12), "family 0x12"),
    "a unix socket": (header(family=0x31), "family 0x31"),
    "half an address": (SIGNATURE + struct.pack(">BBH", 0x21, 0x11, 4) + bytes(4), "4 bytes of addresses"),
    "too long": (SIGNATURE + struct.pack(">BBH", 0x21, 0x11, 65_535), "exceeds 4096"),
    "an extension cut short": (header(extensions=[b"\x04\x00"]), "cut short"),
    "an extension too long": (header(extensions=[b"\x04\x00\x05abcd"]), "longer than the header"),
    "a wrong checksum": (header(extensions=[extension(3, b"abcd")]), "checksum"),
    "half a checksum": (header(extensions=[extension(3, b"ab")]), "checksum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_header_is_explained(case: str) -> None:
    data, says = REFUSED[case]
    with pytest.raises(ProxyHeaderError, match=says):
        read(data)


def test_balancers_own_connection_names_no_client() -> None:
    for made in (
        header(command=LOCAL),
        SIGNATURE + struct.pack(">BBH", 0x20, 0x00, 0),
        SIGNATURE + struct.pack(">BBH", 0x21, 0x00, 0),
    ):
        parsed, taken = read(made + b"more")
        assert (parsed.state, parsed.source, taken) == (State.DONE, None, len(made))


def test_excess_bytes_raise_value_error() -> None:
    with pytest.raises(ValueError, match="17 bytes"):
        ProxyHeader().receive(header()[:17])
