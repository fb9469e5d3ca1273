"""Serve one client connection: read requests, write answers in order.

States
  open       requests are read
  draining   no more are read; those that were read are answered, then the connection closes
  closed     nothing is read or written

Transitions
  open     -> draining   the proxy stops; a broker joins that serves less than this client was offered; the client was
                         not authenticated, its user was removed, or a broker refuses its identity; it sends no more
  any      -> closed     the client's connection ends, or its sending side does while it has claims or speaks TLS; it is
                         idle, refused (an acks=0 part is undeliverable, for instance), severed or abandoned
  draining -> closed     the last answer is written, or the time for draining is over

Invariants
1. Answers leave in the order of their requests (kproxy.proxy.answer_order).
2. In-flight bytes and open requests are bounded (kproxy.proxy.paced_reader).
3. Nothing is begun during an answer or a failure: the fan-out finishes one event before the next.
4. The bytes of all connections together are bounded too (kproxy.proxy.memory_budget). When this connection ends, its
   bytes are subtracted from that sum, and its brokers' answers from theirs (kproxy.proxy.answer_memory).
5. Any error here closes this connection and no other, with one line in the log.
6. After `take_apart` the session is in no reference cycle. Python's cycle collector stops the event loop: it took
   20 ms to free the parts of 200 sessions. By then its timers and tasks have ended, and the listener does not know it
   any more. Callbacks that are still scheduled, and dials that were given up, find it closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Final, cast

import structlog

from kproxy.observe.busiest import Use
from kproxy.observe.overview import MAX_TEXT
from kproxy.observe.tally import OTHER_VERSION, VERSION_BITS
from kproxy.proxy.admission import Admission, Gate
from kproxy.proxy.answer_memory import ClientMemory
from kproxy.proxy.answer_order import AnswerOrder, Slot
from kproxy.proxy.api_versions import check_served, covers
from kproxy.proxy.apis import NOT_SERVED, Ranges
from kproxy.proxy.broker_connection import FLUSH_S, Unanswerable, Upstream
from kproxy.proxy.client_identity import ClientIdentity
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.control_plane import ControlRequests
from kproxy.proxy.fanout import FanoutShell
from kproxy.proxy.memory_budget import Arrival
from kproxy.proxy.metering import Meter, ThrottledSlot
from kproxy.proxy.outbox import PacedOutbox
from kproxy.proxy.paced_reader import PacedReader
from kproxy.proxy.partitioned_requests import NoRoom, PartitionedRequests, plain_path
from kproxy.proxy.waiting_requests import Waiting
from kproxy.routing.fleet import Fleet
from kproxy.routing.topology import Address
from kproxy.runtime.sockets import keep_alive
from kproxy.runtime.tasks import TURN_S
from kproxy.security.mechanisms import Refused, Step
from kproxy.security.principals import Principal
from kproxy.security.proxy_protocol import Source
from kproxy.security.quotas import Quotas
from kproxy.security.sasl import MOST_FRAME_BYTES
from kproxy.security.sasl_client import Credential
from kproxy_codec import api_keys
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.foreign import foreign_protocol
from kproxy_codec.framing import client_id, parse_request_header

log = structlog.get_logger(__name__)

_PARTITIONED: Final = {
    api_keys.PRODUCE: PartitionedRequests.produce,
    api_keys.FETCH: PartitionedRequests.fetch,
    api_keys.LIST_OFFSETS: PartitionedRequests.list_offsets,
}


@dataclass(frozen=True, slots=True)
class ClientOrigin:
    """How a client connected, and how it has to authenticate.

    `fleet`: the proxies, with the addresses for clients of its listener. `source`: the client's address reported by a
    load balancer; None: that of the connection. `admission` None: the client need not authenticate.
    """

    fleet: Fleet
    source: Source | None = None
    admission: Admission | None = None


class ClientSession(PacedReader, asyncio.BufferedProtocol):
    """A client's connection; `on_closed` is called once when it has ended. `origin` None: from within this process."""

    __slots__ = (
        "_access",
        "_arrival",
        "_clock",
        "_compiled",
        "_connections",
        "_context",
        "_drained_by",
        "_fanout",
        "_gate",
        "_gone",
        "_identity",
        "_lingers",
        "_looked_at",
        "_meter",
        "_negotiated",
        "_on_closed",
        "_origin",
        "_principal",
        "_share",
        "_tally",
        "_told_bytes",
        "_waiting",
        "_wanted_throttle_ms",
        "client_id",
        "opened_at",
        "peer",
        "software",
    )

    def __init__(
        self, context: ProxyContext, on_closed: Callable[[ClientSession], None], origin: ClientOrigin | None = None
    ) -> None:
        super().__init__(context)
        self._context = context
        self._origin = origin or ClientOrigin(context.fleet)
        self._clock = context.clock
        # `is_idle` may be called before the connection is made.
        self._first_byte_at = self.opened_at = context.clock()
        self._tally = context.tally
        self._on_closed = on_closed
        self.peer = "?"
        # For the admin page: the client id of the first request off the plain path; the software named by ApiVersions.
        self.client_id: str | None = None
        self.software = ""
        # How many of the sent bytes the tally has counted.
        self._told_bytes = 0
        self._answers = AnswerOrder(context, self)
        # How long the client of the delayed request is throttled: its account is charged once.
        self._wanted_throttle_ms = 0
        self._arrival = Arrival()
        self._share = ClientMemory(context.answer_memory, self)
        admission = self._origin.admission
        # The identity that its broker connections authenticate with; None: the proxy's.
        self._identity: ClientIdentity | None = None
        if admission is not None and admission.carries:
            self._identity = ClientIdentity(
                context.broker_auth,
                lambda: self._control.plane.authenticate(),
                lambda: self._upstreams,
                # It authenticates again.
                lambda error: self.dismiss(f"a broker says of its identity: {error}"),
            )
        to_brokers = self._identity.access if self._identity is not None else None
        # When a connection that drains by itself is closed.
        self._drained_by = inf
        # Done when the transport is gone; None if nothing waits for that.
        self._gone: asyncio.Future[None] | None = None
        # The client's permissions; None: all. Connections from this process are not checked.
        self._access = context.access.client() if context.access is not None and admission is not None else None
        self._fanout = FanoutShell(context, self, self._share, to_brokers, self._access)
        self._connections = self._fanout.connections
        self._requests = PartitionedRequests(context, self._fanout, self._access)
        self._compiled = plain_path(context, self._fanout, self._answers)
        # Begins the requests or leaves them to `_take`: the gate while the client must authenticate.
        self._plain = self._compiled
        self._meter: Meter | None = None
        # The client's principal once it is admitted, and the quotas, if none of them applied.
        self._principal: Principal | None = None
        self._looked_at: Quotas | None = None
        self._gate = Gate(admission, self) if admission is not None else None
        if self._gate is not None:
            self.guard()
        self._control = ControlRequests(
            context, self, self._fanout.claims, self._gate, self._access, self._origin.fleet, to_brokers
        )
        self._waiting = Waiting(context.brokers)
        # The versions that may be sent here: those of an ApiVersions answer or, before any, those offered now.
        self._ranges = context.brokers.offered.ranges
        self._negotiated = False
        self._lingers = False

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self.closed:
            cast(asyncio.Transport, transport).abort()
            return
        # uvloop's transports have the methods of asyncio.Transport but not its class.
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport)
        loop = asyncio.get_running_loop()
        self._answers.outbox = PacedOutbox(loop, self._transport, self._share, self._tally.writing, self._clock)
        peer = self._origin.source or transport.get_extra_info("peername")
        self.peer = str(Address(*peer[:2]) if isinstance(peer, tuple) else peer)
        if self._fanout.acks is not None:
            self._fanout.acks.peer = self.peer
        if self._access is not None:
            self._access.peer = self.peer
        if self._gate is not None:
            self._gate.connected(transport.get_extra_info("peercert"), peer[0] if isinstance(peer, tuple) else "")

    # Authentication

    def guard(self) -> None:
        """Let the gate begin requests from now on, only short ones."""
        self._plain, self._charging = self._gate, None
        self._reader.admit(MOST_FRAME_BYTES)

    def admit(self, principal: Principal) -> None:
        """Begin requests without the gate from now on: the client is `principal`."""
        context = self._context
        if principal != self._principal:
            self._forget_use(self._answers.outbox)
        self._principal = principal
        self._use_quotas()
        if self._access is not None and principal != self._access.principal:
            self._access.authenticated(principal)
            # A renewal may bring other groups.
            self._forget_routes()
        self._plain, self._charging = self._compiled, self._meter
        self._reader.admit(context.limits.max_request_bytes)
        if self._fanout.acks is not None:
            self._fanout.acks.principal = str(principal)

    def _use_quotas(self) -> None:
        """Attach a meter if a quota applies to the client; it follows later changes itself."""
        context, principal = self._context, self._principal
        if context.quotas is None or principal is None or self._meter is not None:
            return
        quotas = context.quotas()
        if quotas is self._looked_at:
            return
        self._looked_at = quotas
        if quotas.limits(principal):
            self._meter = Meter(
                context.quotas,
                principal,
                self._take,
                self._answers,
                self.broker_presses,
                context.clock,
                context.counters,
            )
            if self._plain is self._compiled:
                self._charging = self._meter

    async def carry(self, step: Step, credential: Credential, within_s: float) -> Step | Refused:
        """Let a broker judge the credential that the client presented. Raises NotJudged."""
        if self._identity is None:
            return step
        return await self._identity.carry(step, credential, within_s)

    def dismiss(self, reason: str) -> None:
        """Close once the pending answers are sent, after FLUSH_S at the latest."""
        if self.closed or self._draining:
            return
        log.warning("client connection drained", reason=reason, client=self.peer)
        if self._gate is not None:
            self._gate.tell_session_ended(reason)
        self._drained_by = self._clock() + FLUSH_S
        self.drain()

    def place(self, frame: memoryview) -> Slot:
        """Take the next place among the answers, for a request that the gate has begun."""
        answers = self._answers
        answers.sequence += 1
        slot = Slot(answers, answers.sequence, len(frame), 0.0)
        answers.slots.append(slot)
        answers.in_flight_bytes += slot.weight
        self._budget.held += slot.weight
        return slot

    # Requests

    def _take(self, frame: memoryview, first_byte_at: float, throttle_ms: int = 0) -> None:
        header = parse_request_header(frame)
        api_key, api_version = header.api_key, header.api_version
        lowest, highest = self._ranges.get(api_key, NOT_SERVED)
        reason = "" if lowest <= api_version <= highest else check_served(header, self._ranges)
        if reason:
            log.warning("request refused", most_a_minute=5, client=self.peer, reason=reason)
        weight, answers = len(frame), self._answers
        answers.sequence += 1
        slot = Slot(answers, answers.sequence, weight, first_byte_at if api_key == PRODUCE else 0.0)
        if throttle_ms:
            slot = ThrottledSlot(answers, answers.sequence, weight, slot.began, frame, throttle_ms)
        # The slot is created before anything is sent: an answer may come within this step.
        answers.slots.append(slot)
        answers.in_flight_bytes += weight
        self._budget.held += weight
        handler = _PARTITIONED.get(api_key)
        if handler is not None and reason:
            handler = PartitionedRequests.refuse_version
        if self.client_id is None:
            self.client_id = (client_id(frame) or b"")[:MAX_TEXT].decode(errors="replace")
        if handler is None:
            self._control.start(frame, header, slot, self._ranges)
        else:
            try:
                answer_bytes = handler(self._requests, frame, header, first_byte_at, slot)
            except NoRoom as full:
                self._put_back(frame, first_byte_at, full.partitions, throttle_ms)
                return
            self._tally.served[api_key << VERSION_BITS | (OTHER_VERSION if reason else api_version)] += 1
            if answer_bytes is None:
                # No answer, so no place among the answers; the last slot is this one.
                answers.silent += 1
                if not self.closed:
                    answers.slots.pop()
            elif answer_bytes and slot.buffers is None and not self.closed:
                slot.weight += answer_bytes
                answers.in_flight_bytes += answer_bytes

    def _put_back(self, frame: memoryview, first_byte_at: float, partitions: int, throttle_ms: int) -> None:
        """Delay the latest request until others are answered; its bytes now count for the backlog."""
        self._answers.slots.pop()
        self._answers.in_flight_bytes -= len(frame)
        self._backlog = self._backlog or deque()
        self._backlog.appendleft((frame, first_byte_at))
        self._wanted_partitions, self._wanted_throttle_ms = partitions, throttle_ms
        self.adjust_reading()

    def _begin_again(self, frame: memoryview, first_byte_at: float) -> None:
        """Begin the delayed request, or pass it to the gate if its client must authenticate again.

        Raises CodecError.
        """
        self._wanted_partitions = 0
        if self._plain is self._compiled:
            self._take(frame, first_byte_at, self._wanted_throttle_ms)
        else:
            self._begin(frame, first_byte_at)

    # Versions

    def offered(self, ranges: Ranges, software: str) -> None:
        """Use the versions of an ApiVersions answer for this connection from now on; note the client's software."""
        self._ranges = ranges
        self._negotiated = True
        self.software = software[:MAX_TEXT]

    def follow_ranges(self, ranges: Ranges) -> None:
        """Follow a change of the offered versions. A client that was offered more must reconnect."""
        if not self._negotiated:
            self._ranges = ranges
        elif not self._draining and not covers(ranges, self._ranges):
            log.info(
                "client connection drained", reason="a broker serves less than the client was offered", client=self.peer
            )
            self._lingers = True
            self.drain()

    # Brokers

    def hold_back(self, holds: bool) -> None:
        """Stop reading the brokers' answers, or resume."""
        self._connections.hold_back(holds)

    def give_up_broker(self, address: Address) -> None:
        """Answer requests that wait for a hung broker now, and refuse to send it more."""
        for each in self._all_connections:
            each.give_up_at(address)

    def undeliverable(self, topic: bytes, error_code: int) -> None:
        """Count a lost acks=0 part and, as Kafka does, close the connection so that the client notices it."""
        self._context.counters["acks0.undeliverable"] += 1
        name = self._context.topology.name_of(topic) or topic
        self._tally.drop(name, error_code)
        self.refuse(
            Unanswerable(f"an acks=0 batch for {name.decode(errors='backslashreplace')} failed with error {error_code}")
        )

    # For the metrics

    def _use_of(self, client_id: bytes) -> Use:
        clients = self._tally.clients
        if clients is None:
            raise RuntimeError("the tally does not count clients")
        return clients.find((client_id, b"" if self._principal is None else self._principal.name.encode()))

    def handed_over(self, sequence: int) -> None:
        """Note that a part of a produce request is written to its broker now."""
        self._answers.handed_over(sequence)

    @property
    def open_requests(self) -> int:
        """Requests that wait for an answer, or with acks=0 to be sent."""
        return self._fanout.open_count + len(self._control.tasks)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that count for `limits.max_in_flight_bytes`."""
        return self._answers.in_flight_bytes

    @property
    def begun_requests(self) -> int:
        """Requests begun; one that was put back counts twice."""
        return self._answers.sequence

    @property
    def principal(self) -> str:
        """The client's principal; empty if it need not authenticate, or has not."""
        return "" if self._principal is None else str(self._principal)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to the client, while the connection is open."""
        return 0 if self._answers.outbox is None else self._answers.outbox.written_bytes

    def tell_sent(self) -> None:
        """Add the bytes sent since the last call to the tally; the rest follow when the connection ends."""
        if self._answers.outbox is not None:
            self._tally.sent_bytes += self.sent_bytes - self._told_bytes
            self._told_bytes = self.sent_bytes

    @property
    def _all_connections(self) -> Sequence[Connections]:
        return self._connections, *self._control.connections

    @property
    def _upstreams(self) -> Iterable[Upstream]:
        """Connections to brokers, open or closed."""
        return chain.from_iterable(each.by_place.values() for each in self._all_connections)

    @property
    def connected_brokers(self) -> Iterable[int]:
        """The broker of each open connection."""
        return (upstream.owner for upstream in self._upstreams if not upstream.closed)

    @property
    def _waits(self) -> bool:
        """Whether anything waits for a broker."""
        return bool(not self._fanout.is_idle or self._broker_pressure or self._control.tasks)

    def unanswered(self, now: float) -> Iterable[tuple[int, int, int, float]]:
        """As `Waiting.unanswered`."""
        return self._waiting.unanswered(self._upstreams, now) if self._waits else ()

    # Ending

    def expire(self, now: float, *, is_late: bool = False) -> None:
        """Answer requests at their deadline, and judge the connection's pace.

        It reports slow brokers, and closes the connection if a request arrives too slowly or answers are not read.

        `is_late`: this process was suspended for a while. Bytes that came meanwhile wait in the kernel and are not
        judged yet.
        """
        if self._waits or self._waiting.watches:
            self._waiting.look(self._upstreams, now)
            self._fanout.take_out(self._answers.sequence)
            self._fanout.expire(now)
        if self._arriving_bytes and self._reading and not self.closed and not is_late:
            self._judge_arrival(now)
        if self._share.held and not self.closed and not is_late:
            self._judge_taking(now)
        if self._gate is not None and not self.closed and not is_late:
            self._gate.look(now)
        self.follow_rules()
        if self._meter is not None:
            self._meter.look()
        else:
            self._use_quotas()
        if now >= self._drained_by and not self.closed:
            self.abandon()
        idle_s = self._context.limits.idle_s
        if idle_s and now - self._first_byte_at > idle_s and not is_late and self._is_at_rest():
            self._context.counters["clients.idle"] += 1
            self._end()

    def _is_at_rest(self) -> bool:
        """Whether nothing is requested, in flight or claimed."""
        is_busy = self._arriving_bytes or self._answers.slots or self._backlog or self._share.held or self.open_requests
        return self._reading and not (is_busy or self.closed or self._is_claimant)

    @property
    def _is_claimant(self) -> bool:
        return self._fanout.claims.has_claims or self._control.is_claiming

    def follow_rules(self) -> None:
        """Forget the routes of the compiled path if the client's permissions have changed."""
        if self._access is not None and self._access.has_changed():
            self._forget_routes()

    def _forget_routes(self) -> None:
        if self._compiled is not None:
            self._compiled.forget_routes()

    def _judge_arrival(self, now: float) -> None:
        arrived = self._reader.pending_bytes
        if self._arrival.is_too_slow(
            now, began=self._first_byte_at, arrived=arrived, pauses=self._pauses, pressed=self._budget.presses
        ):
            self.refuse(Unanswerable(f"a request arrives too slowly: {arrived} bytes of it have arrived"))

    def _judge_taking(self, now: float) -> None:
        """Close if answers are not read while others wait for their memory."""
        outbox = self._answers.outbox
        if outbox is None or self._transport is None or not self._share.is_stuck(now, outbox.taken_bytes):
            return
        held = self._share.held
        outbox.discard()
        self._transport.abort()
        self.refuse(Unanswerable(f"the client does not read {held} bytes of answers, and others wait for that memory"))

    def refuse(self, error: Exception) -> None:
        """Close because of the client's bytes, or because its request has no possible answer."""
        if self.closed:
            return
        self._context.counters["clients.refused"] += 1
        stranger = foreign_protocol(error)
        if stranger is None:
            log.warning("client connection closed", client=self.peer, reason=str(error))
            self._end()
            return
        log.warning(
            "client speaks another protocol",
            most_a_minute=1,
            bounded_by="protocol",
            client=self.peer,
            protocol=stranger.protocol,
            reason=str(stranger),
        )
        if stranger.reply and self._answers.outbox is not None and not self._answers.slots:
            self._answers.outbox.put_one(stranger.reply)
        self._end(lingers=True)

    def forbidden(self) -> None:
        """Close at once: another client has claimed the partition before this client's answer was written."""
        self.sever("another client claimed a partition that it was reading")

    def sever(self, reason: str) -> None:
        """Close at once: this connection has lost its claims, or another client may have claimed what it uses."""
        if self.closed:
            return
        log.warning("client connection severed", client=self.peer, reason=reason)
        self._end()
        self._fanout.part(severed=True)
        if self._context.brokers.fenced:
            self._connections.drop_all()

    def abandon(self) -> None:
        """Close without waiting for answers."""
        if not self.closed and self._answers.slots:
            log.warning(
                "client connection closed with requests unanswered", client=self.peer, requests=len(self._answers.slots)
            )
        self._end()
        self._fanout.hurry()

    def drain(self) -> None:
        """Read no more; close once everything in flight is answered."""
        if self.closed:
            return
        self._draining = True
        # A client that waits for an answer may already send its next request, which is not read.
        self._lingers = self._lingers or bool(self._answers.slots or self._backlog)
        self.adjust_reading()
        self._end_if_drained()

    def _end_if_drained(self) -> None:
        if self._draining and not self._answers.slots and not self._backlog and not self._fanout.open_count:
            self._end(lingers=self._lingers)

    def eof_received(self) -> bool:
        """Answer the requests read so far: the client may have closed only its sending side.

        Only a write shows whether it is gone. TLS has no half-close. Claims are released at once.
        """
        transport = self._transport
        if self.closed or transport is None or not transport.can_write_eof() or self._is_claimant:
            self._end()
            return False
        self._context.turns.take(self._answer_rest)
        return True

    def _answer_rest(self) -> None:
        if self.closed:
            return
        self._drained_by = min(self._drained_by, self._clock() + self._context.limits.deadline_cap_ms / 1000)
        self._draining, self._lingers = True, False
        self._fanout.stop_retries()
        self.adjust_reading()
        self._end_if_drained()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self._transport = None
        if not self.closed:
            self._context.turns.take(self._end)

    def _end(self, *, lingers: bool = False) -> None:
        """Close the connection.

        `lingers`: let the client close first, and ignore what it still sends. Closing with unread bytes resets the
        connection, and a reset may overtake the last answers.
        """
        if self.closed:
            return
        self.closed = True
        outbox, self._answers.outbox = self._answers.outbox, None
        if outbox is not None:
            outbox.flush_all()
            self._forget_use(outbox)
            self._tally.sent_bytes += outbox.written_bytes - self._told_bytes
        if self._transport is not None and not (lingers and self._half_close(self._transport)):
            self._transport.close()
        if self._meter is not None:
            self._meter.close()
        self._fanout.part()
        self._fanout.claims.end()
        self._let_go()
        self._on_closed(self)

    def _half_close(self, transport: asyncio.Transport) -> bool:
        """Send end-of-file and keep reading until the client closes; return whether that was possible."""
        if transport.is_closing() or not transport.can_write_eof():
            return False
        try:
            transport.write_eof()
        except OSError:
            # The client has reset the connection, and the event loop is about to report it.
            return False
        transport.resume_reading()
        return True

    async def _count_lost(self) -> None:
        """Count acks=0 batches in the backlog as lost: they are not begun, though their client assumes it."""
        began = self._clock()
        while self._backlog:
            self._requests.count_lost(self._backlog.popleft()[0], self._ranges)
            if self._clock() - began > TURN_S:
                await asyncio.sleep(0)
                began = self._clock()

    async def close(self) -> None:
        """Release all resources of this connection; whole acks=0 frames are still sent."""
        self._end()
        if self._gate is not None:
            await self._gate.close()
        await asyncio.gather(self._close_client(), self._close_brokers(), self._count_lost())

    async def _close_client(self) -> None:
        """Wait at most FLUSH_S for the client to read its last answers."""
        if self._transport is None:
            return
        self._gone = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._gone,), timeout=FLUSH_S)
        if self._transport is not None:
            self._transport.abort()
            await self._gone

    async def _close_brokers(self) -> None:
        await self._fanout.close()
        await self._control.close()
        await self._connections.close()
        if self._identity is not None:
            self._identity.forget()

    def take_apart(self) -> None:
        """Drop the parts that refer to this session (invariant 6); call it after `close`."""
        self._fanout.take_apart()
        self._plain = None
        del self._answers, self._share, self._identity, self._connections, self._fanout, self._requests, self._compiled
        del self._meter, self._gate, self._control, self._waiting
