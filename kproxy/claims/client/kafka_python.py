"""Implement `own_sync` for kafka-python: claim on the connections that its producers and consumers use.

The client's I/O runs on a thread of its own. So does this module's code, except the context manager. Requests are sent
through `KafkaConnectionManager.send`, on one connection for each node. The first request opens the connection, and the
next request after its end opens it again. This module uses internals of kafka-python 3.0, most of them private; the
tests exercise them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from types import TracebackType
from typing import Any, Final, NamedTuple

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError, KafkaTimeoutError, PolicyViolationError
from kafka.future import Future
from kafka.net.connection import KafkaConnection
from kafka.net.manager import KafkaConnectionManager
from kafka.net.wakeup_notifier import WakeupNotifier
from kafka.protocol.metadata import ApiVersionsRequest

from kproxy.claims.client.claimant import Claimant, Ownership, State, enter, leave
from kproxy.claims.client.errors import NOT_OFFERED, ConnectionLost, OwnError, OwnNotOffered, Severed
from kproxy.claims.client.plan import ClaimPlan
from kproxy_codec.api_keys import FETCH, OWN, PRODUCE
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import LENGTH_BYTES, frame_message, request_header, response_correlation_id
from kproxy_codec.own import (
    OWN_MAX_VERSION,
    OWN_MIN_VERSION,
    OwnRequest,
    OwnResponse,
    encode_own_request,
    parse_own_response,
)

_CLOSE_TIMEOUT_S: Final = 5.0
_PAUSE_S: Final = 0.02
log = logging.getLogger(__name__)


class SyncOwnership(Ownership):
    """The ownership for code on threads."""

    def __init__(self, claimant: Claimant[Any]) -> None:
        super().__init__(claimant)
        self._is_severed = threading.Event()

    def wait_severed(self, timeout_s: float | None = None) -> Severed | None:
        """Wait until the ownership is lost; return None if `timeout_s` passes first."""
        self._is_severed.wait(timeout_s)
        return self.severed

    def tell(self) -> None:
        self._is_severed.set()


class SyncOwn:
    """`own_sync(...)`: the context manager."""

    def __init__(
        self,
        client: KafkaProducer | KafkaConsumer,
        plan: ClaimPlan,
        *,
        on_severed: Callable[[Severed], None] | None,
    ) -> None:
        if isinstance(client, KafkaProducer):
            self._manager, self._producer = client._sender._client._manager, client
        elif isinstance(client, KafkaConsumer):
            self._manager, self._producer = client._manager, None
        else:
            name = type(client).__name__
            raise TypeError(f"own_sync() is for kafka-python's producers and consumers, not {name}; see own")
        self._plan = plan
        self._on_severed = on_severed
        self._claimant = Claimant(plan, _Driver(self._manager), self._severed)
        self._ownership = SyncOwnership(self._claimant)
        self._gate = _Gate(self._manager, self._claimant)

    def __enter__(self) -> SyncOwnership:
        """Claim the resources. Raises OwnRefused, OwnNotOffered and OwnError; nothing is claimed then."""
        enter(self._manager)
        try:
            self._flush("before it can claim")
            self._run(self._claimant.claim)
        except BaseException:
            self._run(self._release)
            leave(self._manager)
            raise
        self._gate.shut()
        self._manager.call_soon(self._claimant.keep)
        return self._ownership

    def _run(self, step: Callable[[], Awaitable[Any]]) -> None:
        """Run a coroutine on the client's thread, to its end."""
        ended = threading.Event()
        future = self._manager.call_soon(step)
        future.add_both(lambda _: ended.set())
        ended.wait()
        if future.exception is not None:
            raise future.exception

    def _flush(self, when: str) -> None:
        """Send the producer's pending records, which belong to no claim or to the one that ends."""
        if self._producer is None:
            return
        try:
            self._producer.flush(self._plan.timeout_s)
        except KafkaTimeoutError:
            raise OwnError(
                f"The producer still has records to send {when}, after {self._plan.timeout_s:g} s; use a new producer."
            ) from None

    def _send_pending(self, error: BaseException | None) -> None:
        """Send pending records while they are owned, unless the block must end at once. They fail once severed."""
        if self._claimant.severed is None:
            if error is None or isinstance(error, Exception):
                self._flush("before it can give back what it owns")
            return
        try:
            self._flush("after it was severed")
        except OwnError as unsent:
            log.warning("pending records not sent: %s", unsent)

    def _severed(self, severed: Severed) -> None:
        self._ownership.tell()
        if self._on_severed is not None:
            self._on_severed(severed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._send_pending(error)
        finally:
            self._run(self._release)
            leave(self._manager)
        severed = self._claimant.severed
        if severed is not None and (error is None or isinstance(error, KafkaError)):
            raise severed from error

    async def _release(self) -> None:
        closed = self._claimant.release()
        self._gate.open()
        for connection in closed:
            try:
                await self._manager.wait_for(connection.close_future, _CLOSE_TIMEOUT_S * 1000)
            except (KafkaError, OSError) as error:
                log.debug("%s ended with %s", connection, error)


class _Gate:
    """Holds produce and fetch requests back while RECLAIMING, and fails them once SEVERED (claimant, invariant 3)."""

    def __init__(self, manager: KafkaConnectionManager, claimant: Claimant[Any]) -> None:
        self._manager = manager
        self._claimant = claimant

    def shut(self) -> None:
        self._manager.send = self._send

    def open(self) -> None:
        # Restores the method of the class.
        vars(self._manager).pop("send", None)

    def _send(self, request: Any, node_id: int | None = None, request_timeout_ms: float | None = None) -> Future:
        if request.API_KEY not in (PRODUCE, FETCH):
            return self._forward(request, node_id, request_timeout_ms)
        answered = Future()
        self._claimant.when_settled(lambda: self._let_go(answered, request, node_id, request_timeout_ms))
        return answered

    def _let_go(self, answered: Future, request: Any, node_id: int | None, request_timeout_ms: float | None) -> None:
        if self._claimant.state is State.SEVERED:
            answered.failure(PolicyViolationError(str(self._claimant.severed)))
            return
        try:
            self._forward(request, node_id, request_timeout_ms).chain(answered)
        except KafkaError as error:
            answered.failure(error)

    def _forward(self, request: Any, node_id: int | None, request_timeout_ms: float | None) -> Future:
        return KafkaConnectionManager.send(self._manager, request, node_id, request_timeout_ms)


class _Driver:
    """Implements plan.Driver."""

    def __init__(self, manager: KafkaConnectionManager) -> None:
        self._manager = manager
        self._woken = WakeupNotifier(manager._net)

    def now(self) -> float:
        return time.monotonic()

    async def wait(self, seconds: float) -> None:
        await self._woken(seconds)

    def wake(self) -> None:
        self._woken.notify()

    async def refresh(self, topics: Collection[str]) -> None:
        for topic in topics:
            self._manager.cluster.add_topic(topic)
        try:
            await self._manager.cluster.refresh_metadata()
        except (KafkaError, OSError) as error:
            raise ConnectionLost("no proxy answers") from error

    def leader(self, topic: str, partition: int) -> int | None:
        known: int | None = self._manager.cluster.leader_for_partition(TopicPartition(topic, partition))
        return known

    def any_node(self) -> int | None:
        return min((broker.node_id for broker in self._manager.cluster.brokers()), default=None)

    async def open(self, node: int) -> KafkaConnection:
        try:
            connection = self._manager.get_connection(node)
            await connection
        except (KafkaError, OSError) as error:
            raise ConnectionLost(f"proxy {node} does not accept connections") from error
        return connection

    def is_open(self, connection: KafkaConnection) -> bool:
        is_open: bool = connection.connected
        return is_open

    def is_busy(self, connection: KafkaConnection) -> bool:
        return bool(connection.in_flight_requests)

    def watch(self, connection: KafkaConnection, on_closed: Callable[[], None]) -> None:
        ended = connection.close_future
        with ended._lock:
            if not ended.is_done:
                # These run before the callbacks, added earlier, that fail the requests under way.
                ended._callbacks.insert(0, lambda _: on_closed())
                ended._errbacks.insert(0, lambda _: on_closed())
                return
        on_closed()

    async def ask(self, connection: KafkaConnection, request: OwnRequest, timeout_s: float) -> OwnResponse:
        # A client with a configured api_version does not ask for the offered API versions.
        is_told = self._manager.config["api_version"] is not None
        offered = {OWN: (OWN_MIN_VERSION, OWN_MAX_VERSION)} if is_told else connection.broker_version_data.api_versions
        if OWN not in offered:
            raise OwnNotOffered(NOT_OFFERED)
        version = min(offered[OWN][1], OWN_MAX_VERSION)
        answer: OwnResponse = await self._sent(connection, _OwnCall(request, version), timeout_s)
        return answer

    async def ping(self, connection: KafkaConnection, timeout_s: float) -> None:
        await self._sent(connection, ApiVersionsRequest(version=0), timeout_s)

    async def _sent(self, connection: KafkaConnection, request: Any, timeout_s: float) -> Any:
        while connection.connected and connection.paused:
            # The connection has the greatest permitted number of requests in flight.
            await self._manager._net.sleep(_PAUSE_S)
        try:
            return await connection.send_request(request, request_timeout_ms=timeout_s * 1000)
        except (KafkaError, OSError) as error:
            raise ConnectionLost(f"{connection} ended") from error

    def shut(self, connection: KafkaConnection) -> None:
        connection.close()


# The codec expects the length prefix of a frame, which the library has removed.
_PREFIX: Final = bytes(LENGTH_BYTES)


class _OwnCall:
    """An Own request in the form that KafkaConnection.send_request expects."""

    API_KEY = OWN

    def __init__(self, request: OwnRequest, version: int) -> None:
        self.API_VERSION = version
        self.header = _Header(version)
        self._request = request
        self._encoded_header = b""

    def with_header(self, correlation_id: int, client_id: str) -> None:
        self.header = _Header(self.API_VERSION, correlation_id)
        self._encoded_header = request_header(OWN, self.API_VERSION, correlation_id, client_id.encode())

    def encode(self, *, framed: bool, header: bool) -> bytes:
        return frame_message(self._encoded_header, encode_own_request(self._request))

    def expect_response(self) -> bool:
        return True


class _Header(NamedTuple):
    """The header of the request and of the answer, and the parser of the answer."""

    api_version: int
    correlation_id: int = 0
    api_key: int = OWN

    def get_response_class(self) -> _Header:
        return self

    def parse_header(self, buffer: bytearray) -> _Header:
        return _Header(self.api_version, response_correlation_id(_PREFIX + buffer))

    def decode(self, buffer: bytearray) -> OwnResponse:
        try:
            return parse_own_response(_PREFIX + buffer, self.api_version)
        except CodecError as error:
            raise ValueError(f"the answer to Own is invalid: {error}") from error
