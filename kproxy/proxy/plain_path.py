"""Forward produce requests whose routes are all proven (the plain path).

Every answer here is a success. This module decides nothing. A request goes to the brokers by the plan of its kind, and
its answers come back the same way. On any other outcome, all requests in flight here first enter the core
(kproxy.routing.fanout) by `adopt`.

Invariants
1. Requests sent here follow, on the same connections, those sent before for their partitions.
2. A plan is used only while the routes it was made of are proven (kproxy.routing.routes).
3. The kept plans have at most MAX_PLANNED_PARTITIONS partitions. Beyond that an arbitrary plan is replaced by a new
   one: a client with more kinds of requests than are kept still finds many of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from kproxy.observe.tally import Tally
from kproxy.plain import compiled
from kproxy.proxy.answer_order import Slot
from kproxy.proxy.answer_reader import Ticket
from kproxy.proxy.broker_connection import Upstream
from kproxy.routing.actions import Adopted
from kproxy.routing.fanout import Fanout
from kproxy.routing.merge import Exchange
from kproxy.routing.routes import Routes
from kproxy.routing.split import Selection
from kproxy.trail.acknowledgements import ConnectionAcks, Noted
from kproxy_codec.partitioned import PartitionedRequest, PlainAnswer, set_response_correlation_id
from kproxy_codec.produce import PRODUCE_API

MAX_PLANNED_PARTITIONS: Final = 8_192
# Step through the places of the kept plans; prime, so that it reaches all of them.
_STRIDE: Final = 7_919
Kept = TypeVar("Kept")


class PlannedPart:
    """The part of a request for one connection, and the expected answer; `part` is None for the whole request."""

    __slots__ = ("connection", "noted", "part", "plain", "upstream")

    def __init__(
        self, connection: int, upstream: Upstream, part: Selection | None, plain: PlainAnswer, noted: Noted | None
    ) -> None:
        self.connection = connection
        self.upstream = upstream
        self.part = part
        self.plain = plain
        self.noted = noted


class PlainPiece:
    """The ticket of one part of a request."""

    __slots__ = ("path", "planned", "slot")

    expects_answer = True
    may_wait_until = -inf

    def __init__(self, path: PlainPath, slot: Slot, planned: PlannedPart) -> None:
        self.path = path
        self.slot = slot
        self.planned = planned

    def sent(self) -> None:
        """Never called: it has an answer."""

    def unconfirmed(self) -> None:
        """Never called, for the same reason."""

    def answered(self, frame: memoryview) -> None:
        if not self.path.succeeded(self, frame):
            self.path.shell.take_over(self).answered(frame)

    def lost(self, *, written: bool) -> None:
        self.path.shell.take_over(self).lost(written=written)


class _Forgotten:
    """The ticket of a part whose client is gone: its answer matters to nobody."""

    expects_answer = True
    may_wait_until = -inf

    def sent(self) -> None:
        """Never called: it has an answer."""

    def unconfirmed(self) -> None:
        """Never called, for the same reason."""

    def answered(self, frame: memoryview) -> None:
        """Ignore the answer."""

    def lost(self, *, written: bool) -> None:
        """Ignore the loss: the client sends the request again itself."""


_FORGOTTEN: Final = _Forgotten()
# The compiled path's pieces have the same attributes.
_PIECES: Final = (PlainPiece,) if compiled is None else (PlainPiece, compiled.CompiledPiece)


class OpenRequests:
    """The requests in flight on the plain path of one client; the compiled plain path has a twin of it.

    `open_count` are unanswered requests, `open_partitions` the partitions of those with more than one. `newest` is the
    sequence of the client's newest partitioned request, on whichever path it went.
    """

    __slots__ = ("newest", "open_count", "open_partitions")

    open_count: int
    open_partitions: int
    newest: int


if not TYPE_CHECKING and compiled is not None:
    OpenRequests = compiled.OpenRequests


class Counts(Protocol):
    """The proxy's counts (kproxy.proxy.context.ProxyContext)."""

    tally: Tally
    counters: Counter[str]


class Shell(Protocol):
    """The shell of the core: `upstreams` are its broker connections by number, `acks` its trail."""

    acks: ConnectionAcks | None

    @property
    def upstreams(self) -> Mapping[int, Upstream]: ...

    def take_over(self, piece: PlainPiece) -> Ticket:
        """Have the core take over all requests in flight; return the ticket that replaces this one."""
        ...


class PlainPath(OpenRequests):
    """The plain path of one client connection."""

    __slots__ = ("_acks", "_core", "_counters", "_plans", "_tally", "_upstreams", "shell")

    def __init__(self, core: Fanout, shell: Shell, context: Counts) -> None:
        self._core = core
        self.shell = shell
        self._upstreams = shell.upstreams
        self._acks = shell.acks
        self._tally, self._counters = context.tally, context.counters
        self.open_count = self.open_partitions = self.newest = 0
        # None before the first request: the compiled path has routes of its own.
        self._plans: Plans[list[PlannedPart]] | None = None

    def send(
        self, slot: Slot, request: PartitionedRequest, deadline: float, routed_at: int, *, is_silent: bool
    ) -> bool:
        """Send a request; False if some partition's route is new.

        The answer goes to `slot`. `routed_at` is the topology's version.
        """
        kind, plans = kind_of(request), self._plans
        if plans is None:
            plans = self._plans = Plans(self._core.routes)
        plan = plans.find(kind)
        if plan is None:
            plan = self._make_plan(request)
            if not plan:
                return False
            plans.keep(kind, request.partition_count, plan)
        slot.request = request
        slot.deadline = deadline
        slot.routed_at = routed_at
        slot.is_silent = is_silent
        self._tally.plain_requests += 1
        self.open_count += 1
        partitions = request.partition_count
        if len(plan) == 1:
            planned = plan[0]
            slot.exchange = None
            if partitions > 1:
                self.open_partitions += partitions
            planned.upstream.forward(PlainPiece(self, slot, planned), request.frame)
            return True
        self.open_partitions += partitions
        self._counters["splits"] += 1
        slot.exchange = exchange = Exchange(PRODUCE_API, request, slot.sequence, deadline)
        exchange.is_silent = is_silent
        splitter = exchange.splitter(len(plan))
        for planned in plan:
            upstream = planned.upstream
            correlation_id = upstream.next_correlation_id()
            buffers = splitter.part(planned.part or [], correlation_id)
            upstream.send(PlainPiece(self, slot, planned), correlation_id, buffers)
        return True

    def succeeded(self, piece: PlainPiece, frame: memoryview) -> bool:
        """Take an answer; False if it is not a success for all of the piece."""
        slot, planned = piece.slot, piece.planned
        exchange = slot.exchange
        if exchange is None:
            if not planned.plain.is_met(frame):
                return False
            if planned.noted is not None and not slot.is_silent:
                planned.noted.note(slot, frame)
            self._close(slot)
            if slot.is_silent:
                slot.fill([])
            else:
                set_response_correlation_id(frame, slot.request.header.correlation_id)
                slot.fill([frame])
            return True
        results = planned.plain.results(frame)
        if results is None:
            return False
        if planned.noted is not None and not slot.is_silent:
            planned.noted.note(slot, frame)
        exchange.take_all(planned.part or [], results)
        if exchange.open_count == 0:
            self._close(slot)
            slot.fill([] if slot.is_silent else exchange.encode())
        return True

    def _close(self, slot: Slot) -> None:
        self.open_count -= 1
        if self.open_partitions:
            partitions = slot.request.partition_count
            self.open_partitions -= partitions if partitions > 1 else 0

    # Leaving

    def pieces(self) -> Iterator[PlainPiece]:
        """The pieces in flight."""
        if self.open_count:
            for upstream in self._upstreams.values():
                for ticket in upstream.unanswered():
                    if isinstance(ticket, _PIECES):
                        yield ticket

    def leave(self, before: Iterable[PlainPiece]) -> list[tuple[Adopted, list[PlainPiece]]]:
        """Forget all requests in flight and return them, in order, each with its pieces.

        `before` are pieces that no connection has any more.
        """
        by_sequence: dict[int, list[PlainPiece]] = {}
        for piece in chain(before, self.pieces()):
            by_sequence.setdefault(piece.slot.sequence, []).append(piece)
        leaving = []
        for sequence, parts in sorted(by_sequence.items()):
            slot = parts[0].slot
            exchange = slot.exchange
            if exchange is None:
                exchange = Exchange(PRODUCE_API, slot.request, sequence, slot.deadline)
                exchange.is_silent = slot.is_silent
            sent = [(part.planned.connection, part.planned.part) for part in parts]
            leaving.append((Adopted(exchange, slot.routed_at, sent), parts))
        self.open_count = self.open_partitions = 0
        return leaving

    def forget(self) -> None:
        """Forget the requests that have an answer: their client is gone, and there may be many."""
        for upstream in self._upstreams.values():
            tickets = [ticket for ticket in upstream.unanswered() if isinstance(ticket, _PIECES)]
            upstream.replace({ticket: _FORGOTTEN for ticket in tickets if not ticket.slot.is_silent})
        self.open_count = len({piece.slot.sequence for piece in self.pieces()})

    # Plans

    def _make_plan(self, request: PartitionedRequest) -> list[PlannedPart]:
        parts = self._core.routes.plan(request)
        plan = []
        for connection, selection in parts:
            upstream = self._upstreams[connection]
            plain = PRODUCE_API.plain_answer(request, selection)
            noted = self._acks.part(upstream, request, selection, plain) if self._acks is not None else None
            plan.append(PlannedPart(connection, upstream, selection if len(parts) > 1 else None, plain, noted))
        return plan


class Plans(Generic[Kept]):
    """A cache by kind of request: one version, the same partitions."""

    __slots__ = ("_generation", "_kinds", "_place", "_routes", "_table", "planned_partitions")

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._generation = routes.generation
        self._table: dict[Hashable, Kept] = {}
        # The kinds in it, each with its number of partitions.
        self._kinds: list[tuple[Hashable, int]] = []
        self._place = 0
        self.planned_partitions = 0

    def find(self, kind: Hashable) -> Kept | None:
        """The kept value for this kind of request, as long as it holds."""
        if self._generation != self._routes.generation:
            self._generation = self._routes.generation
            self._table.clear()
            self._kinds.clear()
            self.planned_partitions = 0
        return self._table.get(kind)

    def keep(self, kind: Hashable, partitions: int, kept: Kept) -> None:
        """Keep a value that `find` has not found; one that is too large is not kept."""
        if partitions > MAX_PLANNED_PARTITIONS:
            return
        while self.planned_partitions + partitions > MAX_PLANNED_PARTITIONS:
            self._place = (self._place + _STRIDE) % len(self._kinds)
            # The last one takes the place of the removed one.
            gone, its_partitions = self._kinds[self._place]
            self._kinds[self._place] = self._kinds[-1]
            self._kinds.pop()
            del self._table[gone]
            self.planned_partitions -= its_partitions
        self._table[kind] = kept
        self._kinds.append((kind, partitions))
        self.planned_partitions += partitions


def kind_of(request: PartitionedRequest) -> Hashable:
    """The kind of a request: its version, topics and partitions as it names them. Clients repeat the same kinds."""
    topics = request.topics
    if len(topics) == 1:
        return (request.header.api_version, topics[0].wire, *topics[0].partitions)
    return (request.header.api_version, *[(topic.wire, *topic.partitions) for topic in topics])
