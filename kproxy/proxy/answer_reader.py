"""Send requests on one broker connection and receive their answers: the hot path of both.

`kproxy.proxy.broker_connection.Upstream` is the whole connection; its docstring has the states and invariants.

The answers of one read are processed together, and other clients wait meanwhile. So the size of reads follows the
processing time: it is small at first, doubles after a full and quick read, and shrinks after a slow one.

The compiled plain path (kproxy.plain) has a twin of the class here, which is used instead where it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from kproxy.observe.tally import BrokerCounts
from kproxy.plain import ReceiveArena, compiled
from kproxy.proxy.answer_memory import LARGE_BYTES, ClientMemory
from kproxy.proxy.outbox import Outbox
from kproxy.runtime.tasks import TURN_S
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import FrameReader
from kproxy_codec.partitioned import set_correlation_id
from kproxy_codec.primitives import Buffer

# The `api_key` of the proxy's own requests.
NO_API: Final = -1
# A read of a broker's connection has at least this much room: some nine acknowledgements of one partition.
LEAST_READ_BYTES = 512


class Ticket(Protocol):
    """Receives the outcome of one request."""

    expects_answer: bool

    @property
    def api_key(self) -> int:
        """The API of the client's request; NO_API for requests of the proxy's own."""
        ...

    @property
    def sequence(self) -> int:
        """The number of that request on its client's connection."""
        ...

    @property
    def may_wait_until(self) -> float:
        """The time, on the proxy's clock, until which the request lets its answer wait (a fetch)."""
        ...

    def sent(self) -> None:
        """The request has left this process; called only for requests without an answer (acks=0)."""
        ...

    def unconfirmed(self) -> None:
        """The connection has ended; this was the last request without an answer that left on it."""
        ...

    def answered(self, frame: memoryview) -> None:
        """Take the answer, a whole frame that the ticket now owns."""
        ...

    def lost(self, *, written: bool) -> None:
        """No answer will come; `written` says whether the broker may have seen the request."""
        ...


class QuietTicket:
    """The ticket of a request with an answer; ignores its outcome."""

    api_key = NO_API
    sequence = 0
    expects_answer = True
    may_wait_until = -inf

    def sent(self) -> None:
        """Never called: the request has an answer."""

    def unconfirmed(self) -> None:
        """Never called: the request has an answer."""

    def answered(self, frame: memoryview) -> None:
        """Ignore the answer."""

    def lost(self, *, written: bool) -> None:
        """Ignore the loss."""


class AnswerReader:
    """The hot part of a broker connection. `_outbox` is None until the connection is open.

    An answer has at most `max_answer_bytes`, a read `longest_read`. `clock` is in seconds. `counts` are the broker's.
    """

    __slots__ = ("_clock", "_in_flight", "_longest_read", "_outbox", "_reader", "_share", "closed", "counts")

    # Methods of the whole connection.
    distrust: Callable[[str], None]
    send: Callable[[Ticket, int, Sequence[Buffer]], None]
    _rest: Callable[[], None]
    _take_in: Callable[[ClientMemory, int], None]

    def __init__(
        self,
        max_answer_bytes: int,
        arena: ReceiveArena,
        longest_read: int,
        share: ClientMemory | None,
        clock: Callable[[], float],
        counts: BrokerCounts,
    ) -> None:
        self.closed = False
        self.counts = counts
        self._reader = FrameReader(max_answer_bytes, arena, most_shared=LEAST_READ_BYTES)
        self._longest_read = longest_read
        # Bounded by the requests that a client may have open.
        self._in_flight: AwaitedAnswers[Ticket] = AwaitedAnswers(self._reader)
        self._outbox: Outbox | None = None
        self._share = share
        self._clock = clock

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        is_over = self.closed
        if is_over:
            # A connection that is being closed is still read, but its answers are not needed.
            return
        in_flight = self._in_flight
        began = self._clock()
        self.counts.received_bytes += nbytes
        try:
            for frame in self._reader.buffer_updated(nbytes):
                if self.closed:
                    return
                ticket = in_flight.match(frame)
                self.counts.answered(ticket.api_key, began - in_flight.sent_at)
                ticket.answered(frame)
        except CodecError as error:
            self.distrust(str(error))
            return
        if self._share is not None and self._reader.announced > LARGE_BYTES and not self.closed:
            self._take_in(self._share, nbytes)
        took = self._clock() - began
        if took > TURN_S / 2 or nbytes >= self._reader.most_shared:
            self._adjust_reads(nbytes, took)

    def _adjust_reads(self, nbytes: int, took: float) -> None:
        """Set the size of reads after one of `nbytes`, full or slow, whose answers took this many seconds."""
        reader = self._reader
        is_full = nbytes >= reader.most_shared
        if took > TURN_S / 2:
            reader.most_shared = max(LEAST_READ_BYTES, min(int(nbytes * TURN_S / 2 / took), self._longest_read))
        elif took < TURN_S / 4:
            reader.most_shared = min(2 * reader.most_shared, self._longest_read)
        # Event loops read again at once after a full read.
        if took > TURN_S or (is_full and took >= TURN_S / 4):
            self._rest()

    def next_correlation_id(self) -> int:
        return self._in_flight.next_id()

    def hand_over(self, ticket: Ticket, correlation_id: int, size: int) -> None:
        """Note a request of `size` bytes that is about to be put into the outbox."""
        self.counts.sent_bytes += size
        self._in_flight.sent(correlation_id, ticket, size, self._clock())

    def forward(self, ticket: Ticket, frame: memoryview) -> None:
        """Send a whole request unchanged but for its correlation_id. Do not call when closed."""
        correlation_id = self._in_flight.next_id()
        set_correlation_id(frame, correlation_id)
        if self._outbox is None or not ticket.expects_answer:
            self.send(ticket, correlation_id, [frame])
            return
        self.hand_over(ticket, correlation_id, len(frame))
        self._outbox.put_one(frame)


if not TYPE_CHECKING and compiled is not None:
    AnswerReader = compiled.AnswerReader
