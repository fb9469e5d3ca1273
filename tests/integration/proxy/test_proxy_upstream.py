"""A broker connection during its changes of state."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest

from kproxy.observe.tally import Tally
from kproxy.plain import ReceiveArena
from kproxy.proxy.broker_connection import Upstream
from kproxy.proxy.dialling import BrokerDials, Dialler
from kproxy.routing.topology import Address
from kproxy.security.broker_auth import BrokerAuth
from tests.support.brokers.scripted_upstream import HOST
from tests.support.clients.raw_client import produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go
from tests.support.scene import ANSWERS, T0, Scene, scene
from tests.support.waiting import eventually

CONNECT_TIMEOUT_S = 0.05


@scene(ANSWERS, limits={"connect_timeout_s": CONNECT_TIMEOUT_S}, one_go=True)
async def test_established_connection_survives_the_dial_timeout(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop closes such a connection's handle without reporting its loss, so a waiter would hang."""
    connection_made = Upstream.connection_made

    def made_by_a_busy_process(self: Upstream, transport: asyncio.BaseTransport) -> None:
        connection_made(self, transport)
        time.sleep(2 * CONNECT_TIMEOUT_S)

    monkeypatch.setattr(Upstream, "connection_made", made_by_a_busy_process)
    assert await s.ask(produce_frame()) == [{T0: 0}]
    assert len(s.broker.connections) == 1
    s.client.close()
    await s.until_sessions()


@scene(ANSWERS, one_go=True)
async def test_connection_made_after_dial_timeout_is_not_used(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    connection_made = Upstream.connection_made

    def made_too_late(self: Upstream, transport: asyncio.BaseTransport) -> None:
        # Like the timer, if it fires earlier in the same turn of the loop.
        assert self._dial is not None
        self._dial.cancel()
        connection_made(self, transport)
        assert self._transport is None

    monkeypatch.setattr(Upstream, "connection_made", made_too_late)
    s.send(produce_frame())
    await eventually(lambda: s.broker.connections, "a dial")
    await eventually(lambda: not s.broker.connections[0].is_open, "that connection is closed")
    assert s.broker.log == []
    s.client.close()
    await s.until_sessions()


class Silent:
    """A ticket of acks=0."""

    expects_answer = False
    is_sent = False

    def sent(self) -> None:
        self.is_sent = True

    def answered(self, frame: memoryview) -> None:
        raise AssertionError("acks=0 has no answer")

    def lost(self, *, written: bool) -> None:
        raise AssertionError("what is sent is not lost any more")


class Recorder:
    """Records the end of a connection."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def press(self, slow: bool) -> None:
        pass

    def rest(self) -> None:
        pass

    def opens(self, upstream: Upstream) -> None:
        pass

    def ended(self, upstream: Upstream) -> None:
        self._calls.append("end")


def _dialled(listener: socket.socket, keeper: Recorder | None = None) -> Upstream:
    """A connection that dials the listener."""
    return Upstream(
        BrokerDials(
            1, Address(*listener.getsockname()[:2]), Dialler(time.monotonic, BrokerAuth(), ReceiveArena(), Tally())
        ),
        max_answer_bytes=1 << 20,
        connect_timeout_s=5.0,
        keeper=keeper,
    )


@both_loops
@in_one_go
async def test_each_ticket_is_called_before_end_is_reported() -> None:
    calls: list[str] = []

    class Ending(Silent):
        def sent(self) -> None:
            calls.append("sent")
            upstream.drop()

    with socket.create_server((HOST, 0)) as listener:
        upstream = _dialled(listener, Recorder(calls))
        for correlation_id in (1, 2, 3):
            upstream.send(Ending(), correlation_id, [b"request"])
        await eventually(lambda: "end" in calls)
        await upstream.close()
    assert calls == ["sent", "sent", "sent", "end"]


@both_loops
@in_one_go
async def test_closing_a_just_reset_connection_is_safe() -> None:
    """The kernel knows the reset before the event loop: half-closing such a connection is an error."""
    with socket.create_server((HOST, 0)) as listener:
        upstream = _dialled(listener)
        ticket = Silent()
        upstream.send(ticket, 1, [b"request"])
        await eventually(lambda: ticket.is_sent)
        broker, _ = listener.accept()
        await asyncio.sleep(0.01)
        broker.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        broker.close()
        await upstream.close()
        assert upstream.closed


@pytest.mark.parametrize("outcome", ["the connection ends", "another partition moves"])
@scene(ANSWERS, one_go=True)
async def test_requests_waiting_for_session_renewal_are_answered(s: Scene, outcome: str) -> None:
    """They began on the plain path, and an event moves them into the core."""
    for number in range(3):
        s.produces(number)
        assert await s.gets(number) == [0]
    s.broker.script = None
    s.produces(3)
    asked = await s.next()
    (session,) = s.proxy.listener._sessions
    connection = session._connections.by_place[1, 0]
    # As while the proxy reauthenticates.
    connection._kept, connection._outbox = connection._outbox, None
    s.produces(4, 5)
    await eventually(lambda: len(connection._queue) == 2, "both wait")
    s.broker.script = ANSWERS
    if outcome == "the connection ends":
        asked.connection.close()
        await eventually(lambda: connection.closed, "the proxy notices")
        s.produces(6)
    else:
        s.proxy.own(1, partitions=[0, 1])
        # The next request notices the change.
        s.produces(6)
        await eventually(lambda: not session._fanout.plain.open_count, "all have left the plain path")
        asked.answer()
        connection._outbox, connection._kept = connection._kept, None
        connection._write_queue()
    assert await s.gets(3, 4, 5, 6) == [0] * 4
    s.produces(7)
    assert await s.gets(7) == [0]
    assert session.open_requests == 0
