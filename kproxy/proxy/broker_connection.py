"""Send requests to a broker on one connection and match its answers.

Only one client connection uses it, so that the broker's order per connection keeps the client's order.

States
  connecting   the dial is under way; requests are queued
  open         requests are written at once; answers come back in the order of their requests
  renewing     the broker is about to end the session of SASL, or the client has presented a new credential: requests
               are queued until it is renewed
  ending       the transport is gone, and the end waits for its turn of the event loop; requests are queued
  closed       nothing more is sent or answered

Transitions
  connecting -> open     the dial succeeded: the queue is written
  connecting -> closed   the dial failed, timed out, was given up, or was not begun because the broker hangs or is
                         down: the queue is lost unwritten
  open       -> renewing the session's time is nearly over (KIP-368), or `renew`
  renewing   -> open     the session is renewed: the queue is written
  renewing   -> closed   the broker refuses, or as below: the queue is lost unwritten
  open       -> ending   the broker closed, or the connection broke; so may a renewal end
  open       -> closed   an answer was not the awaited one; the connection was given up or dropped; `close` was called
  ending     -> closed   its turn comes, or as above: what was written is lost written, the queue is lost unwritten

Invariants
1. A ticket that expects an answer gets one call, `answered` or `lost`; `withdraw`, `replace` and `close` may drop it.
2. Answers are matched in order and the correlation_id of each is verified. On a mismatch the connection is closed.
3. `lost(written=False)` is called only for requests that never reached the transport.
4. A ticket that expects no answer (acks=0) gets `sent` when its last byte has left this process, or `lost` if the
   connection ends before. Bytes that left may not have arrived: the last such ticket gets `unconfirmed` when the
   connection ends for a reason other than the client's.
5. The connection is not read while a large answer waits for room or for a read of its client, or its client reads too
   slowly (kproxy.proxy.answer_memory), and not for the rest of a turn of the event loop in which its client's answers
   took long (kproxy.proxy.answer_reader).

`AnswerReader` (kproxy.proxy.answer_reader) has the code that every request and answer passes through.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, NamedTuple, cast

import structlog

from kproxy.proxy.answer_memory import LARGE_BYTES, AnswerBuffer, ClientMemory
from kproxy.proxy.answer_reader import AnswerReader, QuietTicket, Ticket
from kproxy.proxy.dialling import BrokerDials, reason_of
from kproxy.proxy.outbox import Outbox
from kproxy.runtime.sockets import Delivery, delivery, discard_at_close, keep_alive, watch_path
from kproxy.runtime.tasks import cancel
from kproxy.security.broker_auth import CLIENT_ID, BrokerAuth, Session
from kproxy_codec.framing import CHUNK_BYTES, frame_message, request_header
from kproxy_codec.primitives import Buffer

if TYPE_CHECKING:
    from kproxy.proxy.connections import Connections

log = structlog.get_logger(__name__)

# Queued bytes during a dial, beyond which the client is read more slowly.
MAX_QUEUED_BYTES = 1 << 20
FLUSH_S = 5.0
# Brokers accept a renewal no sooner than a second after the last one began.
RENEWAL_PAUSE_S = 1.1
# Pause between checks whether acks=0 requests have left this process, in seconds.
LOOK_PAUSE_S = 0.005


class Oldest(NamedTuple):
    """The first thing that a connection waits for: an answer, or (None) the kernel, to take written bytes."""

    correlation_id: int | None
    written: bool


class Upstream(AnswerReader, asyncio.BufferedProtocol):
    """A connection to `broker`.

    `is_paced`: a broker that hangs is not dialled, and one that is down is dialled in its turn. `keeper` gets the
    connection's events; None: nobody does. Large answers wait for room in `share`, if given. `access`: the identity at
    the broker; None: the proxy's own.
    """

    __slots__ = (
        "_access",
        "_dial",
        "_ended",
        "_failure",
        "_is_held_back",
        "_is_stuck",
        "_keeper",
        "_kept",
        "_last_left",
        "_leaving",
        "_looks_for_left",
        "_next_session",
        "_patience",
        "_presses",
        "_queue",
        "_queued_bytes",
        "_renewable_at",
        "_renewal",
        "_rests",
        "_session",
        "_transport",
        "_waits_for_room",
        "address",
        "fences",
        "number",
        "owner",
    )

    def __init__(
        self,
        broker: BrokerDials,
        *,
        max_answer_bytes: int,
        connect_timeout_s: float,
        is_paced: bool = True,
        keeper: Connections | None = None,
        share: ClientMemory | None = None,
        access: BrokerAuth | None = None,
    ) -> None:
        most_shared = CHUNK_BYTES if share is None else LARGE_BYTES
        dialler = broker.dialler
        super().__init__(max_answer_bytes, dialler.arena, most_shared, share, dialler.clock, broker.counts)
        self.owner = broker.owner
        self.address = broker.address
        # Given by kproxy.proxy.connections; 0: none.
        self.number = 0
        # Fences bound on this connection (kproxy.proxy.claims), by topic and partition index.
        self.fences: dict[tuple[bytes, int], int] = {}
        self._waits_for_room = False
        self._is_held_back = False
        self._rests = False
        self._transport: asyncio.Transport | None = None
        # Lists: an empty deque takes 760 bytes.
        self._queue: list[tuple[Ticket, int, Sequence[Buffer]]] = []
        self._queued_bytes = 0
        self._access = access or broker.dialler.access
        # The session of SASL, and the reason why there is none.
        self._session: Session | None = None
        self._failure: Exception | None = None
        self._renewable_at = -inf
        # Done when the next session begins, or when there will be none; None if nothing waits for it.
        self._next_session: asyncio.Future[None] | None = None
        self._keeper = keeper
        self._presses = False
        # Requests without an answer that may still be here, each with the offset of its last byte; the last that left.
        self._leaving: list[tuple[int, Ticket]] = []
        self._last_left: Ticket | None = None
        # Whether the kernel had not taken all of them at the last check.
        self._is_stuck = False
        self._looks_for_left: asyncio.Handle | None = None
        # Done when the transport is gone; set once `close` waits for that.
        self._ended: asyncio.Future[None] | None = None
        self._patience: asyncio.Timeout | None = None
        # The outbox, unused while the session is renewed and when the transport is gone.
        self._kept: Outbox | None = None
        self._renewal: asyncio.TimerHandle | asyncio.Task[None] | None = None
        # None when the dial is over.
        self._dial: asyncio.Task[None] | None = asyncio.get_running_loop().create_task(
            self._connect(broker, connect_timeout_s, is_paced=is_paced)
        )

    # Sending

    def send(self, ticket: Ticket, correlation_id: int, buffers: Sequence[Buffer]) -> None:
        """Send one request; queue it while the connection is not open. Do not call when closed."""
        if self._outbox is None:
            self._queue.append((ticket, correlation_id, buffers))
            self._queued_bytes += sum(map(len, buffers))
            self._press(self._queued_bytes > MAX_QUEUED_BYTES)
            return
        if ticket.expects_answer:
            self.hand_over(ticket, correlation_id, sum(map(len, buffers)))
        self._outbox.put(buffers)
        if not ticket.expects_answer:
            self._leaving.append((self._outbox.put_bytes, ticket))
            if self._looks_for_left is None:
                # Not in the step that writes it: transports may not count the bytes yet.
                loop = asyncio.get_running_loop()
                self._looks_for_left = loop.call_soon(lambda: self._look_for_left_after(0))

    def _look_for_left_after(self, seconds: float) -> None:
        self._looks_for_left = asyncio.get_running_loop().call_later(seconds, self._look_for_left)

    def _look_for_left(self) -> None:
        """Call `sent` for requests whose bytes the kernel has; check the others again later."""
        self._looks_for_left = None
        if self._transport is None or self._outbox is None or self._transport.is_closing():
            return
        left_bytes = self._outbox.written_bytes - self._transport.get_write_buffer_size()
        # One by one: a called ticket may end the connection, which calls the others.
        while self._leaving and self._leaving[0][0] <= left_bytes:
            self._last_left = self._leaving.pop(0)[1]
            self._last_left.sent()
        self._is_stuck = bool(self._leaving)
        if self._is_stuck and self._looks_for_left is None:
            self._look_for_left_after(LOOK_PAUSE_S)

    def queued(self) -> list[Ticket]:
        """The tickets that wait to be written."""
        return [ticket for ticket, _, _ in self._queue]

    def unanswered(self) -> list[Ticket]:
        """The tickets that wait, written or not, in order."""
        return [*self._in_flight, *self.queued()]

    @property
    def unanswered_count(self) -> int:
        """The number of `unanswered` tickets, and of acks=0 requests that may not have left this process."""
        return len(self._in_flight) + len(self._queue) + len(self._leaving)

    @property
    def unanswered_bytes(self) -> int:
        """The bytes of requests that wait for answers, written or not."""
        return self._in_flight.awaited_bytes + self._queued_bytes

    @property
    def is_open(self) -> bool:
        """Whether requests are written at once."""
        return self._outbox is not None and not self.closed

    def replace(self, tickets: Mapping[Ticket, Ticket]) -> None:
        """Replace tickets that wait for answers or in the queue."""
        self._in_flight.replace(tickets)
        if self._queue:
            self._queue = [(tickets.get(queued[0], queued[0]), *queued[1:]) for queued in self._queue]

    def oldest_unanswered(self) -> Ticket | None:
        """The ticket whose answer comes next."""
        oldest = self._in_flight.oldest
        return oldest[1] if oldest else None

    def oldest(self) -> Oldest | None:
        """The first thing that the connection waits for; None for nothing."""
        if oldest := self._in_flight.oldest:
            return Oldest(oldest[0], written=True)
        if self._queue:
            return Oldest(self._queue[0][1], written=False)
        return Oldest(None, written=False) if self._presses and not self.closed else None

    def withdraw(self, is_meant: Callable[[Ticket], bool]) -> list[Ticket]:
        """Withdraw matching requests that have not been written."""
        kept: list[tuple[Ticket, int, Sequence[Buffer]]] = []
        withdrawn = []
        for queued in self._queue:
            if is_meant(queued[0]):
                withdrawn.append(queued[0])
                self._queued_bytes -= sum(map(len, queued[2]))
            else:
                kept.append(queued)
        if withdrawn:
            self._queue = kept
            self._press(self._queued_bytes > MAX_QUEUED_BYTES)
        return withdrawn

    async def _connect(self, broker: BrokerDials, timeout_s: float, *, is_paced: bool) -> None:
        self._patience = asyncio.timeout(timeout_s)
        try:
            await broker.dial(self, self._patience, self._access, is_paced=is_paced)
        except (OSError, UnicodeError) as error:
            # It has been noted; TimeoutError is an OSError. Its traceback would keep the dial's objects.
            self._failure = error.with_traceback(None)
            self._end()
        self._dial = self._patience = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._keeper is not None:
            self._keeper.opens(self)
        if self.closed or (self._dial is not None and self._dial.cancelling()):
            cast(asyncio.Transport, transport).abort()
            return
        if self._patience is not None:
            # The dial must not be cancelled from here on: uvloop would close the handle and never report its end.
            self._patience.reschedule(None)
        # uvloop's transports have the methods of asyncio.Transport but not its class.
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport)
        loop = asyncio.get_running_loop()
        self._outbox = Outbox(loop, self._transport)
        self._write_queue()

    def _write_queue(self) -> None:
        queue, self._queue, self._queued_bytes = self._queue, [], 0
        # Queued bytes no longer count; bytes written now may.
        self._press(False)
        for ticket, correlation_id, buffers in queue:
            self.send(ticket, correlation_id, buffers)

    # The session of SASL

    def session_began(self, session: Session) -> None:
        """Renew the session when its time is nearly over, or at once if it uses an old credential."""
        self._session, self._renewal = session, None
        if session.renew_after_s is not None and not self.closed:
            loop = asyncio.get_running_loop()
            self._renewal = loop.call_later(session.renew_after_s, self._begin_renewal, session)
        else:
            self.renew()
        self._tell_of_session()

    def renew(self) -> None:
        """Renew the session if the client has presented another credential since it began."""
        session = self._session
        if session is None or self.closed or self._renewal is not None or self._access.is_current(session):
            return
        loop = asyncio.get_running_loop()
        wait_s = max(0.0, self._renewable_at - loop.time())
        self._renewal = loop.call_later(wait_s, self._begin_renewal, session)

    async def authenticated(self) -> Session:
        """Wait until the broker has taken the present credential. Raises OSError, UnicodeError, Lost."""
        if self._dial is not None:
            await asyncio.wait((self._dial,))
        while not self.closed:
            if self._session is not None and self._access.is_current(self._session):
                return self._session
            self.renew()
            self._next_session = self._next_session or asyncio.get_running_loop().create_future()
            await asyncio.wait((self._next_session,))
        raise self._failure or Lost(written=True)

    def _tell_of_session(self) -> None:
        if self._next_session is not None:
            self._next_session.set_result(None)
            self._next_session = None

    def _begin_renewal(self, session: Session) -> None:
        self._renewable_at = asyncio.get_running_loop().time() + RENEWAL_PAUSE_S
        self._kept, self._outbox = self._outbox, None
        self._renewal = asyncio.get_running_loop().create_task(self._renew(session))

    async def _renew(self, session: Session) -> None:
        try:
            renewed = await self._access.authenticate(self._exchange, session.authenticate_version)
        except Lost:
            # The end of the connection is reported separately.
            return
        except OSError as error:
            self._failure = error.with_traceback(None)
            self.give_up(f"its session is not renewed: {error}", "access")
            return
        except Exception:  # the boundary: requests must not wait for ever
            log.exception("broker session not renewed", broker=self.owner, address=str(self.address))
            self.give_up("its session is not renewed")
            return
        # As after a dial: queued requests may need to be withdrawn.
        if self._keeper is not None:
            self._keeper.opens(self)
        if not self.closed and self._transport is not None:
            self._outbox, self._kept = self._kept, None
            self._write_queue()
            if self._leaving and self._looks_for_left is None:
                self._look_for_left_after(0)
            self.session_began(renewed)

    async def _exchange(self, api_key: int, api_version: int, body: bytes) -> memoryview:
        """Send a request ahead of the queue and return the answer. Raises Lost."""
        if self._kept is None or self._transport is None or self.closed:
            raise Lost(written=False)
        question, correlation_id = Question(), self._in_flight.next_id()
        self._in_flight.sent(correlation_id, question)
        header = request_header(api_key, api_version, correlation_id, CLIENT_ID)
        self._kept.put([frame_message(header, body)])
        return await question.answer

    # Back-pressure

    def pause_writing(self) -> None:
        self._press(True)

    def resume_writing(self) -> None:
        self._press(False)

    def _press(self, slow: bool) -> None:
        """Report once when this connection accepts no more for now, and once when it does again."""
        if slow is not self._presses:
            self._presses = slow
            if self._keeper is not None:
                self._keeper.press(slow)

    # Receiving

    def _take_in(self, share: ClientMemory, nbytes: int) -> None:
        """Count a large answer's bytes; at its beginning, get room for it."""
        share.arrived_bytes += nbytes
        if self._reader.has_own:
            return
        self._waits_for_room = True
        if self._keeper is None or not self._keeper.puts_off(self):
            self.read_on()
        if self._waits_for_room:
            self._adjust_reading()

    def read_on(self) -> None:
        """Get room for the answer that has begun to arrive, now or later."""
        if self._share is not None and self._waits_for_room and not self.closed:
            room = self._share.room.take(self, self._share, self._reader.announced)
            if room is not None:
                self.give_room(room)

    @property
    def is_receiving(self) -> bool:
        """Whether an answer has begun to arrive or the connection is not read: the broker is not the slow side."""
        return bool(self._reader.pending_bytes) or self._waits_for_room or self._is_held_back or self._rests

    def give_room(self, room: AnswerBuffer) -> None:
        """Receive the arriving answer into this room."""
        self._reader.move_to(room)
        self._waits_for_room = False
        self._adjust_reading()

    def hold_back(self, holds: bool) -> None:
        """Stop or resume reading: the client reads its answers too slowly, or fast enough again."""
        self._is_held_back = holds
        self._adjust_reading()

    def _rest(self) -> None:
        """Read no more answers for this client in this turn of the event loop."""
        if self._keeper is not None:
            self._keeper.yield_turn()
        else:
            self.yield_turn(True)
            asyncio.get_running_loop().call_soon(self.yield_turn, False)

    def yield_turn(self, yields: bool) -> None:
        """Stop or resume reading, so that other clients have their turn of the event loop first."""
        self._rests = yields
        self._adjust_reading()

    def _adjust_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if (self._waits_for_room or self._is_held_back or self._rests) and not self.closed:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _take_no_more(self) -> None:
        """Discard all further answers."""
        self.closed = True
        self._reader.drop()
        if self._share is not None:
            self._share.room.leave(self)
        self._adjust_reading()

    def distrust(self, reason: str) -> None:
        """Close because of the broker's answer."""
        self.counts.errors["invalid"] += 1
        log.warning("broker sent invalid answer", broker=self.owner, address=str(self.address), reason=reason)
        self._end()

    def give_up(self, reason: str, kind: str = "") -> None:
        """Close because no answer can come; `kind` is the broker's error, if it is one (kproxy.observe.tally)."""
        if kind:
            self.counts.errors[kind] += 1
        log.warning("broker connection abandoned", broker=self.owner, address=str(self.address), reason=reason)
        self._end()

    def watch_path(self, *, closely: bool) -> None:
        """Let the kernel detect a dead path soon (`closely`) or at its usual pace; it then ends the connection."""
        if self._transport is not None and not self.closed:
            watch_path(self._transport, closely=closely)

    def delivery(self) -> Delivery | None:
        """The kernel's view of the path to the broker; None if it has none."""
        return None if self._transport is None or self.closed else delivery(self._transport)

    def cut(self) -> None:
        """Close a dead path and discard unsent bytes: they must not arrive after requests on a newer connection."""
        if self._transport is not None and not self.closed:
            discard_at_close(self._transport)
        self.give_up("its host acknowledges no sent bytes", "cut_off")

    def drop(self) -> None:
        """Close because of the client: the broker has done nothing wrong."""
        self._end(by_client=True)

    # Ending

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        self._transport = None
        if self._outbox is not None:
            self._kept, self._outbox = self._outbox, None
        # A broker that ends ends the connections of all clients.
        step = partial(self._lose, reason_of(exc) if exc else "closed by the broker")
        if self._keeper is None:
            step()
        elif not self.closed:
            self._keeper.in_turn(step)

    def _lose(self, reason: str) -> None:
        if not self.closed and self._in_flight:
            self.counts.errors["closed"] += 1
            log.info(
                "broker connection lost",
                broker=self.owner,
                address=str(self.address),
                unanswered=len(self._in_flight),
                reason=reason,
            )
        self._end()

    def _end(self, *, by_client: bool = False) -> None:
        if self.closed:
            return
        self._take_no_more()
        self._press(False)
        if self._transport is not None:
            self._transport.abort()
        # The task that renews the session may be the one that runs this.
        if self._renewal is not None and self._renewal is not asyncio.current_task():
            self._renewal.cancel()
        self._queued_bytes = 0
        self._tell_of_session()
        # One by one: a called ticket may ask for the unanswered ones, which are those not called yet.
        for ticket in self._in_flight.end():
            ticket.lost(written=True)
        self._end_unanswered(by_client=by_client)
        while self._queue:
            self._queue.pop(0)[0].lost(written=False)
        if self._keeper is not None:
            self._keeper.ended(self)

    def _end_unanswered(self, *, by_client: bool) -> None:
        """End requests that expect no answer: those that have not left are lost, the last that left is unconfirmed.

        No request is unconfirmed if the client ends the connection.
        """
        if self._looks_for_left is not None:
            self._looks_for_left.cancel()
            self._looks_for_left = None
        leaving, self._leaving = self._leaving, []
        outbox = self._kept if self._outbox is None else self._outbox
        written_bytes = outbox.written_bytes if outbox is not None else 0
        for last_byte, ticket in leaving:
            if last_byte > written_bytes:
                ticket.lost(written=False)
            elif self._is_stuck:
                # The kernel had not taken all of them at the last check, and may have taken more since.
                ticket.lost(written=True)
            else:
                ticket.sent()
                self._last_left = ticket
        last_left, self._last_left = self._last_left, None
        if last_left is not None and not by_client:
            last_left.unconfirmed()

    async def close(self) -> None:
        """End the connection; written requests without an answer (acks=0) leave this process and reach the broker.

        Requests that expect an answer are dropped: their client is gone and will send them again itself.
        """
        has_sent_unanswered = bool(self._leaving) or self._last_left is not None
        outbox = self._kept if self._outbox is None else self._outbox
        self._ended = ended = self._ended or asyncio.get_running_loop().create_future()
        if has_sent_unanswered and self._transport is not None and outbox is not None and not self.closed:
            self._take_no_more()
            outbox.flush()
            # Not closed yet: unread answers would make the kernel reset the connection, and a reset drops bytes in
            # transit. The broker closes once it has read everything.
            if not self._transport.can_write_eof():
                # TLS has its own end: send it, and await the peer's.
                self._transport.close()
            elif not self._transport.is_closing():
                # An OSError: the broker has reset the connection, and the event loop is about to report it.
                with contextlib.suppress(OSError):
                    self._transport.write_eof()
            await asyncio.wait((ended,), timeout=FLUSH_S)
        self._take_no_more()
        self._tell_of_session()
        self._end_unanswered(by_client=True)
        # Drop the tickets that will not be called: a waiting read may hold large answers of other brokers.
        self._in_flight.clear()
        self._queue.clear()
        self._queued_bytes = 0
        if self._transport is not None:
            self._transport.abort()
            await ended
        if isinstance(self._renewal, asyncio.Task):
            await cancel(self._renewal)
        elif self._renewal is not None:
            self._renewal.cancel()
        dial = self._dial
        if dial is not None:
            dial.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await dial


class Unanswerable(Exception):
    """No answer can be given; the connection is closed instead, or each part gets an error."""


class Lost(Exception):
    """The connection ended before the answer; `written` says whether the broker may have seen the request."""

    def __init__(self, *, written: bool) -> None:
        super().__init__("the broker's connection ended before it answered")
        self.written = written


class Question(QuietTicket):
    """The ticket of one request whose sender awaits the answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

    def answered(self, frame: memoryview) -> None:
        if not self.answer.done():
            self.answer.set_result(frame)

    def lost(self, *, written: bool) -> None:
        if not self.answer.done():
            self.answer.set_exception(Lost(written=written))


async def ask(upstream: Upstream, correlation_id: int, buffers: Sequence[Buffer]) -> memoryview:
    """Send a request that carries this correlation_id and return the answer, a whole frame. Raises Lost."""
    question = Question()
    upstream.send(question, correlation_id, buffers)
    return await question.answer
