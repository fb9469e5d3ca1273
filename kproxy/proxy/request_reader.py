"""Read the requests of one client and begin them: the hot path of every request.

`kproxy.proxy.client_session.ClientSession` is the whole session; its docstring has the states and invariants.

The compiled plain path (kproxy.plain) has a twin of the class here, which is used instead where it is built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from kproxy.observe.busiest import Use
from kproxy.plain import compiled
from kproxy.proxy.answer_order import AnswerOrder
from kproxy.proxy.apis import Ranges
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.memory_budget import LAST_READ_BYTES
from kproxy.proxy.metering import Meter
from kproxy.proxy.outbox import PacedOutbox
from kproxy.runtime.tasks import TURN_S
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import CHUNK_BYTES, FrameReader
from kproxy_codec.primitives import INT16

# A read of this many bytes and this many requests is the last in its turn, as many may follow (TLS). Reads grow after
# one of this many bytes that had fewer requests.
LARGE_READ_BYTES = 64 << 10
MANY_REQUESTS = 32
# Position of the client id in a frame, after its length.
CLIENT_ID_AT = 14


class Taker(Protocol):
    """Begins some of the requests in the session's place."""

    def take(self, frame: memoryview, first_byte_at: float, ranges: Ranges) -> bool:
        """Begin a request; False leaves it, with nothing changed, to the session."""
        ...


class RequestReader:
    """The hot part of a client session.

    `_charging` gets every request first, if a quota applies to the client; else it is None. `_plain` is next: the gate
    while the client must authenticate, then the compiled plain path, where it runs.
    """

    __slots__ = (
        "_answers",
        "_arriving_bytes",
        "_backlog",
        "_budget",
        "_charging",
        "_clock",
        "_first_byte_at",
        "_is_let_go",
        "_max_bytes",
        "_max_requests",
        "_plain",
        "_ranges",
        "_reader",
        "_reading",
        "_tally",
        "_use",
        "_used_bytes",
        "_user",
        "closed",
        "received_bytes",
    )

    _answers: AnswerOrder
    _ranges: Ranges
    _plain: Taker | None
    _charging: Meter | None
    # Methods of the session. The budget calls `read_on`, which calls its `leave` or `wait` again.
    adjust_reading: Callable[[], None]
    read_on: Callable[[], None]
    refuse: Callable[[Exception], None]
    _rest: Callable[[], None]
    _take: Callable[[memoryview, float], None]
    _use_of: Callable[[bytes], Use]
    _wait: Callable[[Iterable[memoryview], float], None]

    def __init__(self, context: ProxyContext) -> None:
        self._clock = context.clock
        self._tally = context.tally
        self._budget = context.budget
        limit = context.limits.max_request_bytes
        self._reader = FrameReader(limit, context.arena, most_shared=LARGE_READ_BYTES)
        # Requests that wait to be begun, each with the time of its first byte; None if none waits.
        self._backlog: deque[tuple[memoryview, float]] | None = None
        self._first_byte_at = 0.0
        # The memory held by the arriving frame.
        self._arriving_bytes = 0
        # Whether the budget released it from waiting and it has completed no frame since.
        self._is_let_go = False
        self._max_bytes = context.limits.max_in_flight_bytes
        self._max_requests = context.limits.max_open_requests
        self._reading = True
        self._charging = None
        # The counts of the client, whose id is `_user`, and how many of the sent bytes they include.
        self._use: Use | None = None
        self._user = b""
        self._used_bytes = 0
        self.closed = False
        self.received_bytes = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        budget = self._budget
        if budget.held < budget.limit or budget.passing is self:
            return self._reader.get_buffer(sizehint)
        return self._reader.get_buffer(sizehint, lean=True)[:LAST_READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        now = self._clock()
        self._tally.received_bytes += nbytes
        self.received_bytes += nbytes
        first_byte_at = self._first_byte_at if self._arriving_bytes else now
        try:
            frames = self._reader.buffer_updated(nbytes)
            self._first_byte_at = now if frames else first_byte_at
            coming = iter(frames)
            for frame in coming:
                if self.closed:
                    if frame is not frames[0]:
                        # An earlier request has closed the connection; the rest is counted with the backlog.
                        self._wait((frame, *coming), now)
                    return
                if self._reading:
                    self._begin(frame, first_byte_at)
                    if frame is not frames[-1] and self._clock() - now > TURN_S:
                        self._rest()
                else:
                    self._wait((frame,), first_byte_at)
                    self._budget.held += len(frame)
                first_byte_at = now
            if nbytes >= LARGE_READ_BYTES:
                has_many = len(frames) >= MANY_REQUESTS
                self._reader.most_shared = LARGE_READ_BYTES if has_many else CHUNK_BYTES
                if has_many and self._reading and not self.closed:
                    self._rest()
        except CodecError as error:
            self.refuse(error)
            return
        budget = self._budget
        if frames and self._is_let_go:
            self._is_let_go = False
            budget.leave(self)
        if self._arriving_bytes or self._reader.pending_bytes:
            self._spend()
        if budget.held >= budget.limit:
            self.adjust_reading()

    def _spend(self) -> None:
        """Count the arriving frame in the budget."""
        arriving_bytes = 0 if self.closed else self._reader.held_bytes
        more = arriving_bytes - self._arriving_bytes
        self._budget.held += more
        self._budget.arriving += more
        self._arriving_bytes = arriving_bytes

    def _begin(self, frame: memoryview, first_byte_at: float) -> None:
        """Begin a request."""
        if self._tally.clients is not None:
            self._count_use(frame)
        if self._charging is not None and self._charging.take(frame, first_byte_at):
            pass
        elif self._plain is None or not self._plain.take(frame, first_byte_at, self._ranges):
            self._take(frame, first_byte_at)
        answers = self._answers
        if answers.in_flight_bytes >= self._max_bytes or answers.open_count >= self._max_requests:
            self.adjust_reading()

    def _count_use(self, frame: memoryview) -> None:
        """Add a request to the use of its client."""
        if len(frame) < CLIENT_ID_AT:
            return
        end = CLIENT_ID_AT + max(0, INT16.unpack_from(frame, CLIENT_ID_AT - INT16.size)[0])
        if end > len(frame):
            return
        if self._use is None or self._use.is_over or self._user != frame[CLIENT_ID_AT:end]:
            self._user = bytes(frame[CLIENT_ID_AT:end])
            self._use = self._use_of(self._user)
        self._use.requests += 1
        self._use.received_bytes += len(frame)
        self._count_sent(self._answers.outbox)

    def _count_sent(self, outbox: PacedOutbox | None) -> None:
        if outbox is not None and self._use is not None:
            self._use.sent_bytes += outbox.written_bytes - self._used_bytes
            self._used_bytes = outbox.written_bytes

    def _forget_use(self, outbox: PacedOutbox | None) -> None:
        """Count what is left, and find the client's use again with its next request."""
        if self._use is not None and self._use.is_over:
            self._use = self._use_of(self._user)
        self._count_sent(outbox)
        self._use = None

    @property
    def is_amid_frame(self) -> bool:
        """Whether a frame has begun to arrive and is not whole."""
        return self._arriving_bytes > 0

    @property
    def arrived_bytes(self) -> int:
        """The bytes that have arrived of a frame that is not whole."""
        return self._reader.pending_bytes


if not TYPE_CHECKING and compiled is not None:
    RequestReader = compiled.RequestReader
