"""Keep the requests in flight on the compiled plain path of one client, and hand them to the core.

The compiled path (kproxy/plain/path.pxi) sends a request whose routes are all proven, and takes the answers if all are
successes. It does the same with repeated reads of one broker (kproxy/plain/reads.pxi). On any other outcome all its
requests in flight first enter the core (kproxy.routing.fanout): in order, each with its unanswered pieces. Without the
extension there is no such path: the core gets every request.

Invariant: requests sent on this path follow, on the same connections, those sent before for their partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, Protocol

from kproxy.plain import compiled
from kproxy.proxy.answer_reader import QuietTicket, Ticket
from kproxy.proxy.broker_connection import Upstream
from kproxy.proxy.claims import Respond
from kproxy.proxy.request_reader import Taker
from kproxy.routing.actions import Adopted
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Selection
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.produce import PRODUCE_API


class CompiledPath(Taker, Protocol):
    """The compiled path.

    `open_count` is the number of its unanswered requests, `open_partitions` that of the partitions of those with
    several. `is_reading`: one is a read.
    """

    open_count: int
    open_partitions: int
    is_reading: bool

    def learn(
        self,
        request: PartitionedRequest,
        upstream: Upstream,
        connection: int,
        routed_at: int,
        wait_s: float,
        answer_bytes: int,
    ) -> None:
        """Serve reads like this one, which a broker has answered on this connection, until `forget_read`."""
        ...

    def forget_read(self) -> bool:
        """Serve no more reads; return whether one is in flight."""
        ...

    def forget_routes(self) -> None:
        """Find the route of each partition again: the client's permissions have changed."""
        ...


class PlainSlot(Protocol):
    """A request and the place of its answer.

    `exchange` has the results so far if it is sent in parts, or is a read; else None.
    """

    sequence: int
    deadline: float
    routed_at: int
    is_silent: bool
    fill: Respond

    @property
    def request(self) -> PartitionedRequest: ...

    @property
    def exchange(self) -> Exchange | None: ...

    def take_out(self) -> None:
        """Copy the request out of a much larger receive buffer."""
        ...


class PlainPiece(Ticket, Protocol):
    """The ticket of one part of a request; `part` is None for the whole request."""

    slot: PlainSlot
    upstream: Upstream
    connection: int
    part: Selection | None


# The ticket of a part whose client is gone: it sends the request again.
_FORGOTTEN: Final = QuietTicket()
_PIECES: Final[tuple[type[PlainPiece], ...]] = (
    () if compiled is None else (compiled.CompiledPiece, compiled.CompiledRead)
)


class PlainRequests:
    """The requests in flight on `path`, which sends them on `upstreams`; None: there are none."""

    __slots__ = ("_upstreams", "path")

    def __init__(self, upstreams: Mapping[int, Upstream]) -> None:
        self._upstreams = upstreams
        self.path: CompiledPath | None = None

    @property
    def open_count(self) -> int:
        """The number of unanswered requests."""
        return self.path.open_count if self.path is not None else 0

    @property
    def open_partitions(self) -> int:
        """The partitions of unanswered requests with more than one."""
        return self.path.open_partitions if self.path is not None else 0

    @property
    def is_reading(self) -> bool:
        """Whether a read is in flight."""
        return self.path is not None and self.path.is_reading

    def pieces(self) -> Iterator[PlainPiece]:
        """The pieces in flight."""
        if self.open_count:
            for upstream in self._upstreams.values():
                yield from _pieces_on(upstream)

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
            exchange = slot.exchange or Exchange(PRODUCE_API, slot.request, sequence, slot.deadline)
            exchange.is_silent = slot.is_silent
            leaving.append((Adopted(exchange, slot.routed_at, [(each.connection, each.part) for each in parts]), parts))
        if self.path is not None:
            self.path.open_count = self.path.open_partitions = 0
            self.path.is_reading = False
        return leaving

    def forget(self) -> None:
        """Forget the requests that have an answer, which may be many: their client is gone."""
        if self.path is None:
            return
        for upstream in self._upstreams.values():
            upstream.replace({piece: _FORGOTTEN for piece in _pieces_on(upstream) if not piece.slot.is_silent})
        self.path.open_count = len({piece.slot.sequence for piece in self.pieces()})
        self.path.is_reading = False


def _pieces_on(upstream: Upstream) -> list[PlainPiece]:
    return [ticket for ticket in upstream.unanswered() if isinstance(ticket, _PIECES)]
