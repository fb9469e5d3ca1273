"""Handshakes begin in order, and leave the event loop most of its time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest

from kproxy.security.tls_acceptor import (
    MOST_STEP_S,
    MOST_WORK_S,
    PACE,
    TlsAcceptor,
    _HandshakeProtocol,
    _Pace,
    _pace_of_loop,
)
from tests.support.security.sasl_client import Clock


async def test_handshakes_begin_in_order_after_work() -> None:
    pace, began, order = _Pace(), time.monotonic(), []

    async def handshake(number: int) -> None:
        await pace.turn()
        order.append(number)
        pace.worked(MOST_STEP_S)

    await asyncio.gather(*(handshake(number) for number in range(10)))
    assert order == list(range(10))
    assert time.monotonic() - began >= 9 * PACE * MOST_STEP_S


async def test_interrupted_step_delays_next_handshake_boundedly() -> None:
    pace = _Pace()
    pace.worked(60.0)
    async with asyncio.timeout(10.0):
        await pace.turn()


async def test_cancelled_wait_passes_the_turn_on() -> None:
    pace = _Pace()
    pace.worked(MOST_STEP_S)
    waiting = [asyncio.create_task(pace.turn()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    async with asyncio.timeout(10.0):
        await asyncio.gather(*waiting[1:])
    assert waiting[0].cancelled()


async def test_all_connection_work_replaces_its_reservation() -> None:
    clock = Clock()
    pace = _Pace(clock)
    for step_s in (0.001, 0.0005, 0.002):
        pace.worked(step_s)
    assert pace.left_s == pytest.approx(PACE * 0.0035)
    clock.now += pace.left_s
    await pace.turn()
    assert pace.left_s == pytest.approx(PACE * 0.002)
    pace.worked(0.001)
    assert pace.left_s == pytest.approx(PACE * 0.001)


async def test_many_continuing_clients_delay_next_handshake_boundedly() -> None:
    pace = _Pace(Clock())
    for _ in range(500):
        pace.worked(0.001)
    assert pace.left_s == pytest.approx(PACE * MOST_WORK_S)


async def test_listeners_take_turns_and_share_one_pace() -> None:
    flooded, quiet = (
        TlsAcceptor[asyncio.BufferedProtocol](
            name, None, max_half_open=1, session=lambda source: None, counters=Counter()
        )
        for name in ("flooded", "quiet")
    )
    began, order = time.monotonic(), []

    async def handshake(acceptor: TlsAcceptor[asyncio.BufferedProtocol]) -> None:
        await acceptor._turn()
        order.append(acceptor.name)
        _pace_of_loop().worked(MOST_STEP_S)

    await asyncio.gather(*(handshake(flooded) for _ in range(20)), *(handshake(quiet) for _ in range(3)))
    assert order[:7].count("quiet") == 3
    assert time.monotonic() - began >= 22 * PACE * MOST_STEP_S


def test_session_of_a_connection_counts_as_work() -> None:
    class Transport(asyncio.Transport):
        def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
            """Note that the session has the transport."""

    worked: list[float] = []
    _HandshakeProtocol(asyncio.Protocol, worked.append).connection_made(Transport())
    assert len(worked) == 1
    assert worked[0] > 0
