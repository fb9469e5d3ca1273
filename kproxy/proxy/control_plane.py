"""Serve one client's requests other than Produce, Fetch and ListOffsets.

The table of APIs says how each is handled (kproxy.proxy.apis).

`ControlRequests` runs each request as a task until it is answered; kproxy.proxy.paced_reader bounds them. It
serves AT_ONCE of them at a time and the rest in their order, so that the answers to a client's pipelined requests are
not all held together (a Kafka broker serves one request of a connection at a time). Any failure closes the client's
connection, since a request without an answer would block all later ones.

`ControlPlane` gets the answer. It answers ApiVersions itself, from what the proxy and all its brokers serve. A request
about a group or transaction goes to its coordinator (kproxy.proxy.coordinators). One whose parts go to several brokers
is divided (kproxy.proxy.distribution). Any other goes to one broker as received, and brokers that its answer names are
replaced (kproxy.proxy.virtual_brokers). After a broker that cannot be reached, does not answer or sends a malformed
answer, the next one is asked. If a broker may have carried out a request that must not be repeated, the proxy closes
the client's connection, as a broker would.

Where brokers leave it to the proxy (`Api.ends_here`), it also answers
- FindCoordinator for a group: with this proxy, which knows the group's coordinator from its lease when it is asked.
- InitProducerId without a transactional id: with a producer id that no other proxy and no broker assigns, and epoch 0.
  Brokers ignore it. An idempotent producer works with them, and nothing is deduplicated. If etcd gives no id in time,
  the answer is COORDINATOR_NOT_AVAILABLE, after which clients ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from kproxy.etcd import EtcdError
from kproxy.observe.tally import OTHER_VERSION, VERSION_BITS
from kproxy.proxy.access import ClientAccess
from kproxy.proxy.acl_filter import AclFilter, Filtered
from kproxy.proxy.admission import Gate
from kproxy.proxy.answer_order import Slot
from kproxy.proxy.api_versions import check_api_versions_request, offered_response, unsupported_version_response
from kproxy.proxy.apis import NOT_SERVED, REQUEST_KEY_TYPES, SERVED, Ranges, api_of
from kproxy.proxy.broker_connection import Lost, Unanswerable, Upstream, ask
from kproxy.proxy.claims import MAX_CLIENT_BYTES, ClientClaims, NoClaims
from kproxy.proxy.client_identity import NotJudged
from kproxy.proxy.connections import Connections
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.coordinators import CoordinatorRequests
from kproxy.proxy.dialling import reason_of
from kproxy.proxy.distribution import Distribution
from kproxy.proxy.refusals import refusal
from kproxy.proxy.virtual_brokers import AskAnother, VirtualBrokers
from kproxy.routing.fleet import Fleet
from kproxy.routing.rendezvous import preferred
from kproxy.security.acls import Operation, Resource
from kproxy.security.broker_auth import BrokerAuth, IdentityRefused, Session
from kproxy.security.sasl import SASL_APIS, illegal_state
from kproxy_codec import api_keys as keys
from kproxy_codec.cluster import Verdict, asks_for_all_topics
from kproxy_codec.control import Message, build_request, build_response, encode_request, encode_response
from kproxy_codec.coordination import BATCHED_FROM, GROUP, KEY_TYPES_FROM, coordination_key
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    GROUP_AUTHORIZATION_FAILED,
    NONE,
    UNSUPPORTED_VERSION,
)
from kproxy_codec.errors import CodecError, FrameTooLarge
from kproxy_codec.framing import (
    RequestHeader,
    client_id,
    parse_request_header,
    request_header,
    response_body_offset,
    response_header,
)
from kproxy_codec.own import OwnResponse, encode_own_response, parse_own_request
from kproxy_codec.partitioned import set_correlation_id, set_response_correlation_id, with_length
from kproxy_codec.primitives import INT16, INT32, INT64, Buffer

if TYPE_CHECKING:
    from kproxy.proxy.client_session import ClientSession

log = structlog.get_logger(__name__)

AT_ONCE: Final = 8
# Metadata requests for all topics that many clients share have bodies of a few bytes.
_MAX_SHARED_BYTES: Final = 64

_NO_PRODUCER_ID: Final = -1
# Places in the body of an answer to InitProducerId, after throttle_time_ms.
_ERROR_CODE_AT: Final = INT32.size
_PRODUCER_ID_AT: Final = _ERROR_CODE_AT + INT16.size

Result = TypeVar("Result")
Serve = Callable[[memoryview, RequestHeader], Awaitable[list[Buffer]]]
# Makes the result from a broker's answer.
Take = Callable[[memoryview], Awaitable[Result]]


@dataclass(slots=True, eq=False)
class ControlRequests:
    """Run the control requests of `client`.

    Its Own requests go to `claims`, its SASL requests to `gate`, others to a plane. `access` None: all is allowed.
    `fleet` and `to_brokers` as in ControlPlane.
    """

    _context: ProxyContext
    _client: ClientSession
    _claims: ClientClaims
    _gate: Gate | None
    _access: ClientAccess | None
    _fleet: Fleet
    _to_brokers: BrokerAuth | None
    # None before the first request and after the last one, unless it has connections to brokers.
    _made: ControlPlane | None = None
    # Whether a claim is being served: one at a time, as later requests must see its result.
    is_claiming: bool = False
    # A dict: an empty set takes 216 bytes.
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)

    @property
    def plane(self) -> ControlPlane:
        """The ControlPlane that gets the answers; made when first needed."""
        if self._made is None:
            self._made = ControlPlane(self._context, self._client, self._fleet, self._access, self._to_brokers)
        return self._made

    def start(self, frame: memoryview, header: RequestHeader, slot: Slot, ranges: Ranges) -> None:
        """Begin one request, whose answer goes to `slot`.

        `ranges` are the versions served; others are refused. Raises FrameTooLarge.
        """
        if header.api_key == keys.OWN and keys.OWN in ranges:
            self.is_claiming = True
        max_bytes = self._context.limits.max_control_request_bytes
        if len(frame) > max_bytes:
            raise FrameTooLarge(
                f"a {keys.name_of(header.api_key)} request has {len(frame)} bytes; expected at most {max_bytes}"
            )
        lowest, highest = ranges.get(header.api_key, NOT_SERVED)
        version = header.api_version if lowest <= header.api_version <= highest else OTHER_VERSION
        self._context.tally.served[header.api_key << VERSION_BITS | version] += 1
        if header.api_key in SASL_APIS:
            if self._gate is not None:
                self._gate.renew(frame, slot)
            else:
                slot.fill([illegal_state(header)])
            return
        is_refused = version == OTHER_VERSION and header.api_key != keys.API_VERSIONS
        serve = self._refuse_version if is_refused else self._answer
        task = asyncio.get_running_loop().create_task(self._fill(slot, serve, frame, header))
        self.tasks[task] = None
        task.add_done_callback(self._done)
        if self.is_claiming:
            self._client.adjust_reading()

    def _done(self, task: asyncio.Task[None]) -> None:
        del self.tasks[task]
        if not self.tasks and not any(each.by_place for each in self.connections):
            self._made = None

    async def _fill(self, slot: Slot, serve: Serve, frame: memoryview, header: RequestHeader) -> None:
        try:
            async with self.plane.places:
                slot.fill(await serve(frame, header))
        except (CodecError, Unanswerable) as error:
            self._client.refuse(error)
        except Exception:  # the boundary: a request without an answer would block all later ones
            log.exception("request failed", request=keys.name_of(header.api_key))
            self._client.abandon()

    async def _answer(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        if header.api_key == keys.OWN:
            return await self._own(frame, header)
        return await self.plane.answer(frame, header)

    async def _refuse_version(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        self._context.tally.error(header.api_key, UNSUPPORTED_VERSION)
        return await refusal(self._context.portions, header, frame[header.body_offset :], UNSUPPORTED_VERSION)

    async def _own(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """Answer a claim. Raises CodecError, Unanswerable."""
        # The client id is a part of every claim, and the client chooses it.
        called = (client_id(frame) or b"")[:MAX_CLIENT_BYTES].decode(errors="replace")
        try:
            if self._access is not None:
                group = parse_own_request(frame, header).group
                if not self._access.allows(Operation.OWN, Resource.GROUP, group):
                    refusal = encode_own_response(OwnResponse(GROUP_AUTHORIZATION_FAILED, group), header.api_version)
                    return _framed(header, refusal)
            return _framed(header, await self._claims.answer(frame, header, f"{called}@{self._client.peer}"))
        except NoClaims as error:
            raise Unanswerable(str(error)) from error
        finally:
            self.is_claiming = False
            self._client.adjust_reading()

    @property
    def connections(self) -> Sequence[Connections]:
        """Its connections to brokers."""
        return () if self._made is None else self._made.connections

    async def close(self) -> None:
        """Cancel open requests, and close the connections to brokers."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self.connections))


@dataclass(slots=True, eq=False)
class ControlPlane:
    """Answer control requests of `client`; each holds one of the AT_ONCE `places` meanwhile.

    Answers name the proxies of `fleet`. `access` None: all is allowed. `to_brokers`: the client's own identity at
    brokers, if given.
    """

    _context: ProxyContext
    _client: ClientSession
    _fleet: Fleet
    _access: ClientAccess | None
    _to_brokers: BrokerAuth | None
    _connections: Connections = field(init=False)
    # Separate: a request to a coordinator may wait for other clients, and must not delay others.
    _to_coordinators: Connections = field(init=False)
    # Spreads the control planes of many connections over the brokers.
    _key: bytes = field(init=False)
    # Brokers that did not answer when last asked: they are asked last.
    _doubted: dict[int, None] = field(default_factory=dict, init=False)
    # Held while a commit's epochs are removed: a later commit must not overtake it.
    _commits: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE), init=False)

    def __post_init__(self) -> None:
        self._connections = Connections(self._context, self._client, access=self._to_brokers)
        self._to_coordinators = Connections(self._context, self._client, access=self._to_brokers)
        self._key = self._context.random.randbytes(8)

    @property
    def _virtual(self) -> VirtualBrokers:
        return VirtualBrokers(self._context, self._fleet)

    @property
    def _coordination(self) -> CoordinatorRequests:
        return CoordinatorRequests(self._context, self._to_coordinators, self._find_coordinators, self._commits)

    async def answer(self, frame: memoryview, header: RequestHeader) -> list[Buffer]:
        """Return the whole answer to a request.

        Raises CodecError for a malformed request, Unanswerable if no answer comes.
        """
        if header.api_key == keys.API_VERSIONS:
            body = frame[header.body_offset :]
            return _framed(header, encode_response(await self._api_versions(header, body)))
        if self._access is None:
            return await self._answer(frame, header)
        context, is_carried = self._context, self._to_brokers is not None
        screen = AclFilter(self._access, context.topology, context.portions, is_carried=is_carried)
        screened = await screen.screen(frame, header)
        try:
            return await self._answer_screened(screen, screened, header)
        finally:
            screen.end()

    async def _answer_screened(self, screen: AclFilter, screened: Filtered, header: RequestHeader) -> list[Buffer]:
        """Raises as `answer`."""
        if screened.answer is not None:
            return _framed(header, screened.answer)
        answer = await self._answer(screened.frame, header, screened.verdict)
        if screened.amend is None:
            return answer
        whole = memoryview(b"".join(answer))
        body = whole[response_body_offset(whole, header.api_key, header.api_version) :]
        return _framed(header, await screen.amend(screened, body))

    async def _answer(self, frame: memoryview, header: RequestHeader, verdict: Verdict | None = None) -> list[Buffer]:
        """Answer a permitted request, with topics as `verdict` decides. Raises the errors of `answer`."""
        key, body = header.api_key, frame[header.body_offset :]
        key_type = REQUEST_KEY_TYPES.get(SERVED[key].handling)
        if key_type is not None or key == keys.FIND_COORDINATOR:
            refusal = await self._coordination.refuse_transactions(header, body)
            if refusal is not None:
                return refusal
            if key_type is not None:
                coordinated = coordination_key(key, header.api_version, body)
                # As in Kafka the empty group is one, and any broker refuses the empty transactional id.
                if coordinated or (coordinated is not None and key_type == GROUP):
                    return await self._coordination.answer(frame, header, coordinated)
            if key in self._context.brokers.offered.native:
                return _framed(header, await self._answer_natively(header, body))
        if api_of(key, header.api_version).is_divided:
            merged = await Distribution(self._context, self._virtual, self, frame, header).answer()
            if merged is not None:
                return _framed(header, merged)
        return await self._answer_by_broker(frame, header, verdict)

    async def _answer_by_broker(
        self, frame: memoryview, header: RequestHeader, verdict: Verdict | None
    ) -> list[Buffer]:
        key, body = header.api_key, frame[header.body_offset :]
        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                if SERVED[key].names_brokers:
                    return _framed(header, await self._renamed(frame, header, verdict))
                answer = await self._ask_any(frame, header, partial(self._forward, header))
        except (TimeoutError, Unanswerable) as error:
            if key != keys.METADATA:
                raise Unanswerable(f"no broker answered {keys.name_of(key)}: {error}") from error
            return _framed(header, await self._virtual.leaderless_metadata(header, body))
        if key == keys.INIT_PRODUCER_ID and self._context.producer_ids and _lacks_producer_id(header, answer):
            self._context.brokers.disprove(keys.INIT_PRODUCER_ID)
            return _framed(header, await self._answer_natively(header, body))
        return answer

    async def _renamed(self, frame: memoryview, header: RequestHeader, verdict: Verdict | None) -> Buffer:
        """Return the body of a broker's answer, with proxies in it.

        Clients of one listener that ask for all topics at the same time share one answer.
        """
        body = frame[header.body_offset :]
        # Brokers answer each client by its own identity; all clients alike under the proxy's.
        if verdict is not None or not (
            self._to_brokers is None
            and header.api_key == keys.METADATA
            and len(body) <= _MAX_SHARED_BYTES
            and asks_for_all_topics(header.api_version, body)
        ):
            return await self._ask_any(frame, header, partial(self._rename, frame, header, verdict=verdict))
        same = self._fleet, header.api_version, bytes(body)
        answer = await self._context.all_topics.ask(same, lambda: self._all_topics(frame, header))
        if answer is None:
            raise Unanswerable("no broker can be reached")
        return answer

    async def _all_topics(self, frame: memoryview, header: RequestHeader) -> Buffer | None:
        try:
            return await self._ask_any(frame, header, partial(self._rename, frame, header))
        except Unanswerable:
            return None

    async def _ask_any(self, frame: memoryview, header: RequestHeader, take: Take[Result]) -> Result:
        """Like `ask_first`, with all brokers, in the order of this connection."""

        async def frame_for(upstream: Upstream) -> memoryview:
            return frame

        return await self.ask_first(self.in_turn(), header, frame_for, take)

    async def ask_first(
        self,
        upstreams: Iterable[Upstream],
        header: RequestHeader,
        frame_for: Callable[[Upstream], Awaitable[memoryview]],
        take: Take[Result],
    ) -> Result:
        """Return the result of `take` for the first broker that answers; each is asked once. Raises Unanswerable."""
        api = SERVED[header.api_key]
        for upstream in upstreams:
            frame = await frame_for(upstream)
            try:
                async with asyncio.timeout(self._context.limits.control_attempt_s if api.repeatable else None):
                    answer = await self._ask(upstream, frame)
                # Outside the broker's time: this may wait for other long answers.
                taken = await take(answer)
                self._doubted.pop(upstream.owner, None)
                return taken
            except Lost as lost:
                if lost.written and not api.repeatable:
                    raise Unanswerable("the broker's connection ended before it answered") from lost
            except TimeoutError:
                # Later requests to this broker must not wait for this one.
                upstream.give_up("it does not answer", "timeout")
            except CodecError as error:
                upstream.distrust(str(error))
            except AskAnother:
                pass
            self._doubted[upstream.owner] = None
        raise Unanswerable("no broker can be reached")

    def in_turn(self, key: bytes | None = None) -> Iterator[Upstream]:
        """Yield the connection to each broker once, on demand; `key` decides the order, or this connection's."""
        untried = set(self._context.topology.brokers)
        while untried:
            broker = preferred(key or self._key, self._likeliest(untried))
            if broker is None:
                return
            untried.discard(broker)
            if self._context.topology.address(broker) is not None:
                # Otherwise the broker left while another one was asked.
                yield self._connections.to(broker)

    def at(self, broker: int) -> Iterator[Upstream]:
        """Yield the connection to this broker, if its address is known."""
        if self._context.topology.address(broker) is not None:
            yield self._connections.to(broker)

    async def coordinators(self, key_type: int, names: Sequence[str]) -> dict[str, int | None]:
        """Return the coordinator of each group or transactional id; None where there is none."""
        return await self._coordination.brokers_for(key_type, names)

    async def authenticate(self) -> Session:
        """Let the first broker that judges the client's identity accept it. Raises IdentityRefused, NotJudged."""
        reason = "no broker is known"
        for upstream in self.in_turn():
            try:
                session = await upstream.authenticated()
                self._doubted.pop(upstream.owner, None)
                return session
            except (OSError, UnicodeError, Lost) as error:
                reason = f"broker {upstream.owner} at {upstream.address}: {reason_of(error)}"
                if isinstance(error, IdentityRefused) and error.to_client is not None:
                    raise IdentityRefused(reason, error.to_client) from None
            self._doubted[upstream.owner] = None
            log.warning("identity check failed", most_a_minute=5, reason=reason)
        raise NotJudged(f"no broker judges its identity; {reason}")

    def _likeliest(self, untried: set[int]) -> set[int]:
        """Return the brokers without known trouble, or all if each has some.

        Trouble counts whether this connection or another one has met it.
        """
        undoubted = untried - self._doubted.keys()
        return set(filter(self._context.brokers.is_well, undoubted)) or undoubted or untried

    async def _ask(self, upstream: Upstream, frame: memoryview) -> memoryview:
        correlation_id = upstream.next_correlation_id()
        set_correlation_id(frame, correlation_id)
        return await ask(upstream, correlation_id, [frame])

    async def _forward(self, header: RequestHeader, answer: memoryview) -> list[Buffer]:
        set_response_correlation_id(answer, header.correlation_id)
        return [answer]

    async def _rename(
        self, frame: memoryview, header: RequestHeader, answer: memoryview, verdict: Verdict | None = None
    ) -> Buffer:
        return await self._virtual.rewrite(answer, frame[header.body_offset :], header, verdict)

    async def _find_coordinators(self, key_type: int, names: Sequence[str]) -> None:
        """Ask who coordinates these keys; the answers are remembered, where there are any."""
        highest = self._context.brokers.offered.ranges.get(keys.FIND_COORDINATOR, (0, 0))[1]
        if len(names) > 1 and highest >= BATCHED_FROM:
            await self._find(key_type, BATCHED_FROM, coordinator_keys=names)
            return
        for name in names:
            await self._find(key_type, min(highest, BATCHED_FROM - 1), key=name)

    async def _find(self, key_type: int, version: int, **names: object) -> None:
        key_types = {"key_type": key_type} if version >= KEY_TYPES_FROM else {}
        head = request_header(keys.FIND_COORDINATOR, version, 0, b"kproxy")
        body = encode_request(build_request(keys.FIND_COORDINATOR, version, **names, **key_types))
        frame = memoryview(bytearray(b"".join(with_length([head, body]))))
        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                header = parse_request_header(frame)
                await self._ask_any(frame, header, partial(self._rename, frame, header))
        except (TimeoutError, Unanswerable):
            self._context.counters["coordinators.not_found"] += 1

    # Answers of the proxy

    async def _api_versions(self, header: RequestHeader, body: memoryview) -> Message:
        lowest, highest = SERVED[keys.API_VERSIONS].versions
        if not lowest <= header.api_version <= highest:
            self._context.tally.error(keys.API_VERSIONS, UNSUPPORTED_VERSION)
            return unsupported_version_response()
        error_code, software = check_api_versions_request(header, body)
        if error_code != NONE:
            self._context.tally.error(keys.API_VERSIONS, error_code)
            return build_response(keys.API_VERSIONS, header.api_version, error_code=error_code)
        offered = await self._context.brokers.current()
        self._client.offered(offered.ranges, software)
        return offered_response(header.api_version, offered)

    async def _answer_natively(self, header: RequestHeader, body: memoryview) -> Buffer:
        """Answer FindCoordinator or InitProducerId. Raises CodecError."""
        if header.api_key == keys.FIND_COORDINATOR:
            return await self._virtual.find_coordinator(header, body)
        return await self._init_producer_id(header)

    async def _init_producer_id(self, header: RequestHeader) -> Buffer:
        context, producer_id, error_code = self._context, _NO_PRODUCER_ID, NONE
        try:
            if context.producer_ids is None:
                raise EtcdError("the proxy has no etcd to allocate producer ids from")
            async with asyncio.timeout(context.limits.control_attempt_s):
                producer_id = await context.producer_ids.allocate()
            context.counters["producer_ids.given_out"] += 1
        except (EtcdError, TimeoutError) as error:
            context.counters["producer_ids.refused"] += 1
            log.warning("producer id not allocated", reason=str(error) or "etcd does not answer in time")
            error_code = COORDINATOR_NOT_AVAILABLE
        epoch = 0 if error_code == NONE else _NO_PRODUCER_ID
        fields = {"error_code": error_code, "producer_id": producer_id, "producer_epoch": epoch}
        return encode_response(build_response(keys.INIT_PRODUCER_ID, header.api_version, **fields))

    @property
    def connections(self) -> Sequence[Connections]:
        """Its connections to brokers.

        Requests to one that hangs are sent to other brokers, or, to a coordinator, answered so that the client asks
        again.
        """
        return self._connections, self._to_coordinators


def _framed(header: RequestHeader, body: Buffer) -> list[Buffer]:
    return with_length([response_header(header.api_key, header.api_version, header.correlation_id), body])


def _lacks_producer_id(header: RequestHeader, answer: Sequence[Buffer]) -> bool:
    """Return whether an answer to InitProducerId has neither error nor id.

    KafScale's brokers answer unsupported APIs with the default of every field.
    """
    [frame] = answer
    body = memoryview(frame)[response_body_offset(frame, header.api_key, header.api_version) :]
    if len(body) < _PRODUCER_ID_AT + INT64.size:
        return False
    error_code, producer_id = INT16.unpack_from(body, _ERROR_CODE_AT)[0], INT64.unpack_from(body, _PRODUCER_ID_AT)[0]
    return bool(error_code == NONE and producer_id < 0)
