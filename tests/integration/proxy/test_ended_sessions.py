"""Sessions that have ended are taken apart: late events must not reach them.

A test fails for an exception in the event loop, for an unraisable one, and for a logged one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from kproxy.config.access import parse_acls
from kproxy.config.quotas import parse_quotas
from kproxy.config.tls import ListenerTls
from kproxy.proxy import server
from kproxy.proxy.access import AccessControl
from kproxy.runtime import tasks
from kproxy.security.acls import Rules, acls_of
from kproxy.security.mechanisms import servers
from kproxy.security.quotas import Quotas
from kproxy.security.tls_acceptor import load_for_acceptor
from kproxy_codec.api_keys import API_VERSIONS, METADATA, PRODUCE
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import RawClient, batch, control_frame, fetch_frame, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.scene import ANSWERS, staged
from tests.support.security import sasl_client as sasl
from tests.support.security.tls_files import Signer, client_context
from tests.support.waiting import eventually

SECONDS: Final = float(os.environ.get("KPROXY_ENDINGS_S", "1"))


@contextlib.contextmanager
def nothing_escapes() -> Iterator[None]:
    """Fail for unraisable exceptions, and for caught and logged ones."""
    unraisable: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda found: unraisable.append((found.exc_value, found.object))
    try:
        with capture_logs() as lines:
            yield
    finally:
        sys.unraisablehook = before
    assert not unraisable
    assert [line for line in lines if line.get("exc_info") or line["log_level"] == "error"] == []


@both_loops
async def test_deadlines_are_watched_while_sessions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick visited sessions that had ended since it began, failed, and stopped watching deadlines."""
    # Others have their turn after a few sessions, instead of some hundreds.
    monkeypatch.setattr(tasks, "TURN_S", 1e-5)
    monkeypatch.setattr(server, "DEADLINE_TICK_S", 0.0)
    with nothing_escapes():
        async with staged(ANSWERS, clients=0) as s:
            for _ in range(3):
                clients = [await s.proxy.client() for _ in range(100)]
                await s.until_sessions(100)
                for client in clients:
                    client.abort()
                await s.until_sessions()
            assert s.proxy.listener._ticker is not None
            assert not s.proxy.listener._ticker.done()


@both_loops
async def test_dial_may_end_after_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was abandoned because its broker had moved, so the client's end did not wait for it."""
    with nothing_escapes():
        async with staged(ANSWERS, ANSWERS, owners=[1]) as s:
            access, dials = s.proxy.context.dialler.access, 0
            connect = access.connect

            async def slowly(*arguments: Any) -> asyncio.Transport:
                nonlocal dials
                dials += 1
                await asyncio.sleep(0.3 if dials == 1 else 0)
                return await connect(*arguments)

            monkeypatch.setattr(access, "connect", slowly)
            s.produces(0, producer_id=-1)
            await eventually(lambda: dials == 1)
            s.proxy.topology.set_broker(1, s.brokers[1].address)
            s.produces(0, producer_id=-1)
            await eventually(lambda: dials == 2)
            s.client.abort()
            await s.until_sessions()
            await asyncio.sleep(0.5)


class Stress:
    """Clients that misbehave and end at any moment, before brokers that misbehave too."""

    def __init__(self, dice: random.Random, proxy: RunningProxy, upstreams: Sequence[ScriptedUpstream]) -> None:
        self._dice = dice
        self._proxy = proxy
        self._upstreams = upstreams
        self.ended = 0

    def answer(self, asked: Asked) -> None:
        loop = asyncio.get_running_loop()
        lot = self._dice.random()
        if lot < 0.05:
            asked.connection.abort()
        elif lot < 0.1:
            asked.connection.write(b"\x00\x00\x00\x04\xff\xff\xff\xff")
        elif lot < 0.3:
            loop.call_later(self._dice.random() * 0.05, self._answer_late, asked)
        elif lot > 0.35:
            self._answer(asked)

    def _answer_late(self, asked: Asked) -> None:
        if asked.connection.is_open:
            self._answer(asked)

    @staticmethod
    def _answer(asked: Asked) -> None:
        if asked.header.api_key == METADATA:
            asked.answer_message(brokers=[], topics=[], controller_id=-1, cluster_id="c")
        else:
            answers_everything(asked)

    def _frames(self) -> list[bytes]:
        dice = self._dice
        acks, topic = dice.choice([-1, 0, 1]), dice.choice(["t", "t", "denied"])
        wide = {"t": range(dice.choice([2, 300, 4_096]))}
        return dice.choice(
            [
                [control_frame(API_VERSIONS, 0)],
                [control_frame(METADATA, 9, topics=None), control_frame(METADATA, 1, topics=[{"name": "u"}])],
                [produce_frame({topic: [0]}, records=batch(0, producer_id=-1), acks=acks) for _ in range(40)],
                [produce_frame(wide, records=b"", acks=acks)] * 2,
                [produce_frame({"t": [0]}, records=bytes(300_000), acks=acks, timeout_ms=1)],
                [fetch_frame({"t": [0, 1]}, max_wait_ms=dice.choice([0, 200]), max_bytes=1_000)],
                [sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", "alice-secret"))],
                [produce_frame()[:-9]],
                [os.urandom(20)],
            ]
        )

    async def client(self, tls: ssl.SSLContext | None) -> None:
        dice = self._dice
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            client = await RawClient().connect(self._proxy.port, tls=tls)
            try:
                if dice.random() < 0.9:
                    mechanism = "SCRAM-SHA-256" if dice.random() < 0.2 else "PLAIN"
                    password = "alice-secret" if dice.random() < 0.9 else "wrong"
                    token = sasl.plain("alice", password) if mechanism == "PLAIN" else b"n,,n=alice,r=abc"
                    client.send(sasl.handshake(mechanism), sasl.authenticate(token))
                if dice.random() < 0.3:
                    client.pause_reading()
                for _ in range(dice.randrange(6)):
                    if client.is_gone:
                        # uvloop's transport would raise.
                        break
                    client.send(*self._frames())
                    await client.rest(dice.choice([0.0, 0.001, 0.02]))
                await asyncio.sleep(dice.choice([0, 0, 0.001, 0.1]) * dice.random())
            finally:
                client.abort() if dice.random() < 0.5 else client.close()
                self.ended += 1

    async def clients(self, tls: ssl.SSLContext | None, until: float) -> None:
        while time.monotonic() < until:
            await self.client(tls)

    async def change(self, until: float) -> None:
        """Change the objects that sessions follow."""
        dice, proxy = self._dice, self._proxy
        while time.monotonic() < until:
            await asyncio.sleep(0.02 * dice.random())
            lot = dice.randrange(5)
            if lot == 0:
                proxy.own(dice.choice([0, 1, 2]) or -1, "t", range(dice.choice([1, 4])))
            elif lot == 1:
                moved = dice.choice(self._upstreams)
                proxy.topology.set_broker(1, moved.address)
            elif lot == 2:
                proxy.listener._follow_ranges(
                    {
                        key: (low, high - (key == PRODUCE) * dice.randrange(2))
                        for key, (low, high) in proxy.context.brokers.offered.ranges.items()
                    }
                )
            elif lot == 3:
                proxy.listener._give_up_broker(dice.choice(self._upstreams).address)
            elif proxy.listener._sessions:
                session = dice.choice(sorted(proxy.listener._sessions, key=id))
                dice.choice([session.drain, session.abandon, partial(session.sever, "it is told to")])()


@pytest.mark.parametrize("with_tls", [False, True])
@both_loops
async def test_session_may_end_at_any_moment(with_tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TURN_S", 1e-5)
    monkeypatch.setattr(server, "DEADLINE_TICK_S", 0.005)
    seed = int(os.environ.get("KPROXY_FIRST_SEED", secrets.randbelow(1 << 31)))
    print(f"seed {seed}")
    dice = random.Random(seed)
    tls = context = None
    if with_tls:
        signer = Signer(tmp_path / "ca")
        pair = signer.issue("server", "localhost")
        tls = load_for_acceptor(ListenerTls(Path(pair.cert), Path(pair.key)))
        context = client_context(signer.ca)
    known = sasl.users()
    offered = servers(("PLAIN", "SCRAM-SHA-256"), lambda: known, lambda: None)
    upstreams = [ScriptedUpstream(number, lambda asked: stress.answer(asked)) for number in (1, 2)]
    limits = {
        "max_in_flight_bytes_total": 4 << 20,
        "max_in_flight_bytes": 1 << 20,
        "max_open_requests": 50,
        "deadline_cap_ms": 1_100,
        "control_timeout_s": 0.3,
        "control_attempt_s": 0.2,
        "connect_timeout_s": 1.0,
    }
    with nothing_escapes():
        times = {"timeout_s": 0.3, "lifetime_s": 0.2}
        async with running_proxy(*upstreams, limits=limits, mechanisms=offered, times=times, tls=tls) as proxy:
            denied = {"principal": "User:*", "operations": ["write"], "topics": ["denied"], "effect": "deny"}
            allowed = {"principal": "User:*", "operations": ["admin"], "topics": ["*"], "groups": ["*"]}
            rules = Rules(acls_of(parse_acls([denied, allowed], "here")))
            proxy.context.access = AccessControl(lambda: rules, proxy.counters)
            quotas = Quotas(parse_quotas([{"principal": "User:*", "produce_bytes_per_s": 5_000_000}], "here"))
            proxy.context.quotas = lambda: quotas
            proxy.own(1, "t", range(4))
            stress = Stress(dice, proxy, upstreams)
            until = time.monotonic() + SECONDS
            await asyncio.gather(*(stress.clients(context, until) for _ in range(30)), stress.change(until))
            assert stress.ended
            # Some are present when the proxy stops.
            left = [asyncio.create_task(stress.client(context)) for _ in range(30)]
            await asyncio.sleep(0.1 * dice.random())
        await asyncio.gather(*left)
