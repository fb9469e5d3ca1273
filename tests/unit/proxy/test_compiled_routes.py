"""Which plain path runs, and which routes the compiled one keeps: only proven ones, and a bounded number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy.observe.tally import Tally
from kproxy.plain import FrameReader, compiled
from kproxy.proxy.answer_order import AnswerOrder
from kproxy.proxy.answer_reader import AnswerReader
from kproxy.proxy.memory_budget import Budget
from kproxy.proxy.plain_path import OpenRequests
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.dev import run_kproxy

is_compiled = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")

RANGES = {0: (3, 13)}
MOST_PLACES = 65_536


class Upstream(AnswerReader):
    """A connection that is being dialled, and counts what it is to send."""

    owner = 1
    sent = 0

    def __init__(self) -> None:
        super().__init__(FrameReader(1 << 20), None, lambda: 0.0)

    def send(self, *request: Any) -> None:
        self.sent += 1


class Client:
    """A compiled path before a core whose proven routes are `proven`."""

    def __init__(self, may_write: Callable[[bytes], bool] | None = None) -> None:
        self.proven: set[tuple[bytes, int]] = set()
        self.upstream = Upstream()
        self.routes = SimpleNamespace(generation=0, proven_on=lambda *each: 1 if each in self.proven else None)
        core = SimpleNamespace(routes=self.routes, version=1)
        plain = OpenRequests()
        shell = SimpleNamespace(core=core, plain=plain, acks=None, upstreams={1: self.upstream})
        shell.gate = ({}, {}, SimpleNamespace(partitions=0), SimpleNamespace(version=1))
        shell.may_write = may_write
        context: Any = SimpleNamespace(
            topology=SimpleNamespace(version=1),
            tally=Tally(),
            budget=Budget(1 << 30),
            clock=lambda: 0.0,
            limits=SimpleNamespace(deadline_cap_ms=30_000),
            own=None,
            counters=Counter(),
        )
        answers = AnswerOrder(context, None)  # type: ignore[arg-type]
        nothing = SimpleNamespace()
        assert compiled is not None
        self.path = compiled.CompiledPath(shell, answers, context, nothing, nothing)

    def take(self, topic: str, index: int, **fields: Any) -> bool:
        frame = produce_frame({topic: [index]}, records=batch(), **fields)
        taken: bool = self.path.take(memoryview(bytearray(frame)), 0.0, RANGES)
        return taken


@pytest.mark.parametrize("mode", ["maybe", ""])
def test_unknown_mode_is_refused(mode: str) -> None:
    ended = run_kproxy("serve", "--etcd", "a:1", environ={"KPROXY_PLAIN": mode})
    assert ended.status == 2
    assert ended.stderr == (
        f"kproxy: KPROXY_PLAIN={mode} is not a mode of the plain path: give one of auto, off, require.\n"
    )


@is_compiled
def test_topics_without_a_proven_route_leave_nothing_behind() -> None:
    client = Client()
    for number in range(1000):
        assert not client.take(f"topic-{number}", number)
    assert client.path.kept == (0, 0)


@is_compiled
def test_proven_routes_are_kept_until_core_changes_them() -> None:
    client = Client()
    client.proven |= {(b"t", 7), (b"u", 0)}
    for _ in range(2):
        assert client.take("t", 7)
        assert not client.take("t", 6)
        assert client.take("u", 0)
    assert client.path.kept == (2, 9)
    assert client.upstream.sent == 4
    client.proven.remove((b"t", 7))
    client.routes.generation += 1
    assert not client.take("t", 7)
    assert client.path.kept == (0, 0)


@is_compiled
def test_kept_routes_are_bounded() -> None:
    client = Client()
    highest = MOST_PLACES // 2
    client.proven |= {(name.encode(), highest) for name in "abcd"}
    for name in "abcdabcd":
        # The first beyond the bound goes the Python path, and finds all forgotten.
        client.take(name, highest)
        topics, places = client.path.kept
        assert topics <= 1
        assert places <= MOST_PLACES
    assert client.upstream.sent >= 4
    client.proven.add((b"e", MOST_PLACES))
    assert not client.take("e", MOST_PLACES)


@is_compiled
def test_route_to_forbidden_topic_is_not_kept() -> None:
    client = Client(lambda topic: topic == b"t")
    client.proven |= {(b"t", 0), (b"u", 0)}
    for _ in range(2):
        assert client.take("t", 0)
        assert not client.take("u", 0)
        # The right to a transactional id is checked with every request.
        assert not client.take("t", 0, transactional_id="x")
    assert client.path.kept == (1, 1)
    assert Client().take("t", 0) is False
