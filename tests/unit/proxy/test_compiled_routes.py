"""The choice of the plain path, and the routes that the compiled one keeps: only proven ones, and a bounded number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy import plain
from kproxy.errors import StartupError
from kproxy.observe.tally import BROKER_BOUNDS_S, BrokerCounts, Tally
from kproxy.plain import ReceiveArena, compiled
from kproxy.proxy.access import AccessControl
from kproxy.proxy.answer_memory import LARGE_BYTES
from kproxy.proxy.answer_order import AnswerOrder
from kproxy.proxy.answer_reader import AnswerReader
from kproxy.proxy.fanout import FanoutShell
from kproxy.proxy.memory_budget import Budget
from kproxy.routing.actions import Proven
from kproxy.routing.merge import Exchange
from kproxy.routing.topology import Topology
from kproxy.security.acls import Acl, Operation, Resource, Rules
from kproxy.trail.acknowledgements import ConnectionAcks
from kproxy.trail.trail import Trail
from kproxy_codec.api_keys import FETCH
from kproxy_codec.fetch import FetchApi
from kproxy_codec.framing import parse_request_header
from kproxy_codec.partitioned import MAX_PARTITIONS
from kproxy_codec.produce import PRODUCE_API, parse_produce, result_entry
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.models.playbook_words import answer_frame, read_request
from tests.support.processes.dev import run_kproxy

is_compiled = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")

RANGES = {0: (3, 13)}
MOST_PLACES = 65_536


class Upstream(AnswerReader):
    """A connection that is being dialled, and keeps the bytes to send."""

    owner = 1

    def __init__(self) -> None:
        super().__init__(1 << 20, ReceiveArena(), LARGE_BYTES, None, lambda: 0.0, BrokerCounts(BROKER_BOUNDS_S))
        self.tickets: list[Any] = []
        self.frames: list[memoryview] = []

    @property
    def sent(self) -> int:
        return len(self.tickets)

    def send(self, ticket: Any, correlation_id: int, buffers: Sequence[memoryview]) -> None:
        self.tickets.append(ticket)
        self.frames.extend(buffers)


class Access:
    """Permissions for some topics and transactional ids; `asked` has the requested ids."""

    def __init__(self, *names: bytes) -> None:
        self.names = names
        self.asked: list[bytes] = []

    def may_write(self, topic: bytes) -> bool:
        return topic in self.names

    def may_transact(self, transactional_id: bytes) -> bool:
        self.asked.append(transactional_id)
        return transactional_id in self.names


class Client:
    """A compiled path before a core whose proven routes are `proven`; topics in `gated` have a writer group."""

    def __init__(
        self,
        *proven: tuple[bytes, int],
        access: Access | None = None,
        gated: Collection[bytes] = (),
        confirms: bool = False,
        core_partitions: int = 0,
        acks: ConnectionAcks | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.proven = {*proven}
        self.upstream = Upstream()
        self.routes = SimpleNamespace(generation=0, proven_on=lambda *each: 1 if each in self.proven else None)
        core = SimpleNamespace(routes=self.routes, version=1)
        shell = SimpleNamespace(core=core, acks=acks, upstreams={1: self.upstream})
        shell.gate = ({}, {}, SimpleNamespace(partitions=core_partitions), SimpleNamespace(version=1))
        shell.access = access
        context: Any = SimpleNamespace(
            topology=SimpleNamespace(version=1),
            tally=Tally(),
            budget=Budget(1 << 30),
            clock=clock,
            limits=SimpleNamespace(deadline_cap_ms=30_000),
            own=SimpleNamespace(gated=gated) if gated else None,
            confirm_acks0=confirms,
            counters=Counter(),
        )
        self.answers = answers = AnswerOrder(context, None)  # type: ignore[arg-type]
        self.budget = context.budget
        nothing = SimpleNamespace()
        assert compiled is not None
        self.path = compiled.CompiledPath(shell, answers, context, nothing, nothing)

    def take(self, topic: str, index: int, **fields: Any) -> bool:
        return self.take_all({topic: [index]}, **fields)

    def take_all(self, topics: Mapping[str, Sequence[int]], **fields: Any) -> bool:
        frame = produce_frame(topics, **{"records": batch(), **fields})
        taken: bool = self.path.take(memoryview(bytearray(frame)), 0.0, RANGES)
        return taken


@pytest.mark.parametrize("mode", ["maybe", ""])
def test_unknown_mode_is_refused(mode: str) -> None:
    ended = run_kproxy("serve", "--etcd", "a:1", environ={"KPROXY_PLAIN": mode})
    assert ended.status == 2
    assert ended.stderr == (
        f"kproxy: unknown mode KPROXY_PLAIN={mode} of the plain path; expected one of auto, off, require.\n"
    )


@is_compiled
@pytest.mark.parametrize("mode", ["auto", "require"])
def test_extension_built_from_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    assert plain.load(mode) is compiled
    monkeypatch.setattr(compiled, "SOURCES", "0" * 64)
    with pytest.raises(StartupError, match=r"built from other sources .* run make install"):
        plain.load(mode)
    assert plain.load("off") is None


@is_compiled
def test_topics_without_a_proven_route_leave_nothing_behind() -> None:
    client = Client()
    for number in range(1000):
        assert not client.take(f"topic-{number}", number)
    assert client.path.kept == (0, 0)


@is_compiled
def test_proven_routes_are_kept_until_core_changes_them() -> None:
    client = Client((b"t", 7), (b"u", 0))
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
    highest = MOST_PLACES // 2
    client = Client(*((name.encode(), highest) for name in "abcd"))
    for name in "abcdabcd":
        # The first topic beyond the bound takes the Python path, which clears the kept topics.
        client.take(name, highest)
        topics, places = client.path.kept
        assert topics <= 1
        assert places <= MOST_PLACES
    assert client.upstream.sent >= 4
    client.proven.add((b"e", MOST_PLACES))
    assert not client.take("e", MOST_PLACES)


@is_compiled
def test_route_to_forbidden_topic_is_not_kept() -> None:
    client = Client((b"t", 0), (b"u", 0), access=Access(b"t"))
    for _ in range(2):
        assert client.take("t", 0)
        assert not client.take("u", 0)
    assert client.path.kept == (1, 1)
    assert Client().take("t", 0) is False


@is_compiled
def test_writer_group_closes_only_its_topics_gate() -> None:
    client = Client((b"t", 0), (b"g", 0), gated={b"g"})
    for _ in range(2):
        assert client.take("t", 0)
        assert not client.take("g", 0)
        assert not client.take_all({"t": [0], "g": [0]})
    assert client.path.kept == (1, 1)


@is_compiled
def test_unconfirmed_acks_0_request_is_left() -> None:
    client = Client((b"t", 0))
    assert not client.take("t", 0, acks=0)
    assert client.upstream.sent == 0


@is_compiled
def test_confirmed_acks_0_request_has_no_answer() -> None:
    client = Client((b"t", 0), confirms=True)
    assert client.take("t", 0, acks=0)
    sent = client.upstream.frames[0]
    request = parse_produce(sent, parse_request_header(sent))
    assert request.acks == 1
    assert (len(client.answers.slots), client.answers.silent) == (0, 1)
    assert client.answers.in_flight_bytes == client.budget.held == len(sent)
    client.upstream.tickets[0].answered(answer_frame(request, "t-0@17"))
    assert (client.answers.silent, client.answers.in_flight_bytes, client.budget.held) == (0, 0, 0)


@is_compiled
def test_open_partitions_of_core_leave_less_room() -> None:
    for open_partitions, has_room in ((0, True), (MAX_PARTITIONS - 2, True), (MAX_PARTITIONS - 1, False)):
        client = Client((b"t", 0), (b"t", 1), core_partitions=open_partitions)
        assert client.take_all({"t": [0, 1]}) is has_room


@is_compiled
@pytest.mark.parametrize("version", [7, 9])
def test_transactional_id_needs_its_permission(version: int) -> None:
    access = Access(b"t", b"mine")
    client = Client((b"t", 0), access=access)
    for _ in range(2):
        assert client.take("t", 0, version=version, transactional_id="mine")
        assert not client.take("t", 0, version=version, transactional_id="mind")
        assert not client.take("t", 0, version=version, transactional_id="")
    assert access.asked == [b"mine", b"mind", b"", b"mind", b""]
    access.names = (b"t",)
    client.path.forget_routes()
    assert not client.take("t", 0, version=version, transactional_id="mine")
    assert client.take("t", 0, version=version)


NOTED = (
    *("acks", "latency_s", "producer", "counts_sequences", "first_sequence", "next_sequence"),
    *("first_offset", "next_offset", "spans", "volume", "unread", "is_idle"),
)


@is_compiled
@pytest.mark.parametrize("version", [7, 9])
def test_batches_are_recorded_like_in_core(version: int) -> None:
    now = [0.0]
    trail = Trail("p", "i", clock=lambda: now[0], wall_ms=lambda: 0, deadline_cap_ms=30_000, interval_s=1.0)
    compiled_notes, core_notes = (trail.connection(Topology()) for _ in range(2))
    client = Client((b"t", 0), acks=compiled_notes, clock=lambda: now[0])
    for number, (records, offset) in enumerate([(batch(0), 17), (batch(1), 18), (batch(2), 30), (batch(4), 31)]):
        now[0] = number / 1000
        assert client.take("t", 0, records=records, version=version, acks=1)
        sent = client.upstream.frames[-1]
        request = parse_produce(sent, parse_request_header(sent))
        exchange = Exchange(PRODUCE_API, request, 1, 27.0)
        result = result_entry(version, 0, 0, base_offset=offset, log_start_offset=-1)
        core_notes.note(exchange, (0, 0), 1, 1, result)
        client.upstream.tickets[-1].answered(answer_frame(request, f"t-0@{offset}"))
        found = [each.open_chunk(sent, b"t", 0, 1) for each in (compiled_notes, core_notes)]
        in_c, in_python = ([getattr(each, name) for name in NOTED] for each in found)
        assert in_c == in_python


@pytest.mark.parametrize("dry_run", [False, True])
def test_read_without_permission_is_not_repeated(dry_run: bool) -> None:
    """The rules may have changed while it waited; in a dry run each such read is told of."""
    rules = Rules([Acl("User:*", False, frozenset({Operation.READ}), Resource.TOPIC, "t", False)])
    access = AccessControl(lambda: rules, Counter(), dry_run=dry_run).client()
    learned: list[Any] = []
    shell: Any = SimpleNamespace(
        access=access,
        plain=SimpleNamespace(path=SimpleNamespace(learn=lambda *read: learned.append(read))),
        upstreams={1: None},
        _context=SimpleNamespace(limits=SimpleNamespace(max_answer_bytes=1)),
    )
    for topics, has_learned in (("t-0", True), ("t-0 u-0", False)):
        learned.clear()
        read = Exchange(FetchApi(), read_request(FETCH, topics), 1, 0.0)
        FanoutShell._learn(shell, Proven(read, 1, 0))
        assert bool(learned) is has_learned
    rules = Rules([], rules)
    FanoutShell._learn(shell, Proven(Exchange(FetchApi(), read_request(FETCH, "t-0"), 1, 0.0), 1, 0))
    assert not learned
