"""Rules on control requests: what a request costs that names as much as fits into it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter

import pytest

from kproxy.proxy import screening
from kproxy.proxy.access import AccessControl, ClientAccess
from kproxy.proxy.screening import Screen
from kproxy.routing.topology import Topology
from kproxy.security.acls import Rules
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_request, decode_response, encode_request
from kproxy_codec.framing import parse_request_header, request_header
from kproxy_codec.partitioned import with_length


def request(api_key: int, version: int, **fields: object) -> memoryview:
    body = encode_request(build_request(api_key, version, **fields))
    return memoryview(bytearray(b"".join(with_length([request_header(api_key, version, 1, b"c"), body]))))


@pytest.fixture
def access() -> ClientAccess:
    """That of a client that may do nothing."""
    rules = Rules([])
    return AccessControl(lambda: rules, Counter()).client()


async def test_many_denied_keys_cost_as_much_as_their_number(access: ClientAccess) -> None:
    """Each key was looked up in the list of all that are denied: 20,000 took six seconds of a CPU."""
    frame = request(keys.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=[f"{number:x}" for number in range(20_000)])
    began = time.process_time()
    screened = await Screen(access, Topology()).screen(frame, parse_request_header(frame))
    assert time.process_time() - began < 4
    assert screened.answer is not None
    coordinators = decode_response(keys.FIND_COORDINATOR, 4, screened.answer).coordinators
    assert (len(coordinators), {each.error_code for each in coordinators}) == (20_000, {30})


async def test_long_requests_are_read_one_at_a_time_and_short_ones_meanwhile(
    access: ClientAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise those of one client take all threads, and nobody's password is checked."""
    reading, most, may_end = 0, 0, threading.Event()
    decode = screening.decode_request

    def slowly(api_key: int, version: int, body: memoryview) -> object:
        nonlocal reading, most
        if len(body) > screening._LONG_BYTES:
            reading += 1
            most = max(most, reading)
            may_end.wait(10)
            reading -= 1
        return decode(api_key, version, body)

    monkeypatch.setattr(screening, "decode_request", slowly)
    screen = Screen(access, Topology())
    names = [{"name": f"topic-{number}"} for number in range(3_000)]
    long, medium, short = (request(keys.METADATA, 5, topics=names[:count]) for count in (3_000, 500, 1))
    header = parse_request_header(long)
    waiting = [asyncio.create_task(screen.screen(long, header)) for _ in range(40)]
    for frame in (medium, short):
        async with asyncio.timeout(10):
            assert (await screen.screen(frame, header)).verdict is not None
    assert not any(each.done() for each in waiting)
    may_end.set()
    await asyncio.gather(*waiting)
    assert most == 1
