"""Implement `own` for aiokafka: claim on the connections that its producers and consumers use.

Producers and consumers send requests through `AIOKafkaClient.send`, on one connection for each node. The first request
opens the connection, and the next request after its end opens it again. This module uses internals of aiokafka 0.14,
most of them private; the tests exercise them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from io import BytesIO
from types import TracebackType
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaError, PolicyViolationError
from aiokafka.protocol.admin import ApiVersionRequest

from kproxy.address import Address
from kproxy.claims.client.claimant import Claimant, Ownership, State, enter, leave
from kproxy.claims.client.errors import NOT_OFFERED, ConnectionLost, OwnError, OwnNotOffered, Severed
from kproxy.claims.client.plan import ClaimPlan
from kproxy_codec.api_keys import FETCH, OWN, PRODUCE
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import LENGTH_BYTES, request_header, response_correlation_id
from kproxy_codec.own import OWN_MAX_VERSION, OwnRequest, OwnResponse, encode_own_request, parse_own_response

_CLOSE_TIMEOUT_S: Final = 5.0
log = logging.getLogger(__name__)


class AioOwnership(Ownership):
    """The ownership for code on the event loop."""

    def __init__(self, claimant: Claimant[Any]) -> None:
        super().__init__(claimant)
        self._loss: asyncio.Future[Severed] = asyncio.get_running_loop().create_future()

    async def wait_severed(self) -> Severed:
        """Wait until the ownership is lost."""
        return await asyncio.shield(self._loss)

    def tell(self, severed: Severed) -> None:
        self._loss.set_result(severed)


class AioOwn:
    """`own(...)`: the context manager."""

    def __init__(
        self,
        client: AIOKafkaProducer | AIOKafkaConsumer,
        plan: ClaimPlan,
        *,
        cancels_body: bool,
        on_severed: Callable[[Severed], None] | None,
    ) -> None:
        if isinstance(client, AIOKafkaProducer):
            self._kafka, self._producer = client.client, client
        elif isinstance(client, AIOKafkaConsumer):
            self._kafka, self._producer = client._client, None
        else:
            raise TypeError(
                f"own() is for aiokafka's producers and consumers, not {type(client).__name__}; see own_sync"
            )
        self._plan = plan
        self._cancels_body = cancels_body
        self._on_severed = on_severed
        self._driver = _Driver(self._kafka)
        self._claimant = Claimant(plan, self._driver, self._severed)
        self._ownership = AioOwnership(self._claimant)
        self._gate = _Gate(self._kafka, self._claimant)
        self._body: asyncio.Task[Any] | None = None
        self._cancelling = 0
        self._is_cancelled = False
        self._keeper: asyncio.Task[None]

    async def __aenter__(self) -> AioOwnership:
        """Claim the resources. Raises OwnRefused, OwnNotOffered and OwnError; nothing is claimed then."""
        if self._kafka._sync_task is None:
            # A client that is not started never gets an answer to its request for metadata.
            raise RuntimeError("this client is not running: start it before own(), and stop it after the block")
        enter(self._kafka)
        try:
            await self._flush("before it can claim")
            await self._claimant.claim()
        except BaseException:
            leave(self._kafka)
            raise
        self._gate.shut()
        self._body = asyncio.current_task()
        self._cancelling = self._body.cancelling() if self._body is not None else 0
        self._keeper = asyncio.create_task(self._claimant.keep(), name="own")
        return self._ownership

    async def _flush(self, when: str) -> None:
        """Send the producer's pending records, which belong to no claim or to the one that ends."""
        if self._producer is None:
            return
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._producer.flush()
        except TimeoutError:
            raise OwnError(
                f"The producer still has records to send {when}, after {self._plan.timeout_s:g} s; use a new producer."
            ) from None

    async def _send_pending(self, error: BaseException | None) -> None:
        """Send pending records while they are owned, unless the block must end at once. They fail once severed."""
        if self._claimant.severed is None:
            if error is None or isinstance(error, Exception):
                await self._flush("before it can give back what it owns")
            return
        try:
            await self._flush("after it was severed")
        except OwnError as unsent:
            log.warning("pending records not sent: %s", unsent)

    def _severed(self, severed: Severed) -> None:
        self._ownership.tell(severed)
        if self._cancels_body and self._body is not None and not self._body.done():
            self._is_cancelled = True
            self._body.cancel()
        if self._on_severed is not None:
            self._on_severed(severed)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            is_ours = await self._uncancelled(error)
            await self._send_pending(error)
        finally:
            await self._leave()
        severed = self._claimant.severed
        if severed is not None and (is_ours or error is None or isinstance(error, KafkaError)):
            raise severed from error

    async def _uncancelled(self, error: BaseException | None) -> bool:
        """Undo our cancellation of the block. Return whether it alone ends the block."""
        body = self._body
        # From here on `_severed` does not cancel the block.
        self._body = None
        if not self._is_cancelled or body is None:
            return False
        is_under_way = isinstance(error, asyncio.CancelledError)
        if not is_under_way:
            # The block had ended before the cancellation, which arrives with the next await.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        is_ours = body.uncancel() <= self._cancelling
        if not is_ours and not is_under_way:
            raise asyncio.CancelledError
        return is_ours

    async def _leave(self) -> None:
        closed = self._claimant.release()
        self._gate.open()
        leave(self._kafka)
        # The keeper ends by itself in LEFT, unless it waits for an answer.
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        ends = [asyncio.ensure_future(end) for each in closed if (end := each._closed_fut) is not None]
        if ends:
            await asyncio.wait(ends, timeout=_CLOSE_TIMEOUT_S)
        if self._producer is None:
            # The consumer's fetches have failed; its stop() would raise CancelledError in the pause after that.
            await asyncio.sleep(2 * self._kafka._retry_backoff)


class _Gate:
    """Holds produce and fetch requests back while RECLAIMING, and fails them once SEVERED (claimant, invariant 3)."""

    def __init__(self, kafka: AIOKafkaClient, claimant: Claimant[Any]) -> None:
        self._kafka = kafka
        self._claimant = claimant

    def shut(self) -> None:
        self._kafka.send = self._send

    def open(self) -> None:
        # Restores the method of the class.
        del self._kafka.send

    async def _send(self, node_id: int, request: Any, *, group: ConnectionGroup = ConnectionGroup.DEFAULT) -> Any:
        is_gated = request.API_KEY in (PRODUCE, FETCH)
        while is_gated:
            await self._settled()
            # This may open a new connection in place of one with claims.
            await self._kafka.ready(node_id, group=group)
            self._claimant.close_ended()
            is_gated = self._claimant.state in (State.RECLAIMING, State.SEVERED)
        return await AIOKafkaClient.send(self._kafka, node_id, request, group=group)

    async def _settled(self) -> None:
        settled = asyncio.Event()
        self._claimant.when_settled(settled.set)
        await settled.wait()
        if self._claimant.state is State.SEVERED:
            raise PolicyViolationError(str(self._claimant.severed))


class _Driver:
    """Implements plan.Driver."""

    def __init__(self, kafka: AIOKafkaClient) -> None:
        self._kafka = kafka
        self._woken = asyncio.Event()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    async def refresh(self, topics: Collection[str]) -> None:
        for topic in topics:
            self._kafka.add_topic(topic)
        try:
            is_known = await self._kafka.force_metadata_update()
        except (KafkaError, OSError) as error:
            raise ConnectionLost(str(error)) from error
        if not is_known:
            raise ConnectionLost("no proxy answers")

    def leader(self, topic: str, partition: int) -> int | None:
        known: int | None = self._kafka.cluster.leader_for_partition(TopicPartition(topic, partition))
        return known

    def any_node(self) -> int | None:
        return min((broker.nodeId for broker in self._kafka.cluster.brokers()), default=None)

    async def open(self, node: int) -> AIOKafkaConnection:
        connection = await self._kafka._get_conn(node)
        if connection is None:
            raise ConnectionLost(f"proxy {node} does not accept connections")
        return connection

    def is_open(self, connection: AIOKafkaConnection) -> bool:
        is_open: bool = connection.connected()
        return is_open

    def is_busy(self, connection: AIOKafkaConnection) -> bool:
        return bool(connection._requests)

    def watch(self, connection: AIOKafkaConnection, on_closed: Callable[[], None]) -> None:
        before = connection._on_close_cb

        def closed(closing: AIOKafkaConnection, reason: CloseReason | None) -> None:
            on_closed()
            if before is not None:
                before(closing, reason)

        # aiokafka calls this before the tasks that wait for an answer run.
        connection._on_close_cb = closed

    async def ask(self, connection: AIOKafkaConnection, request: OwnRequest, timeout_s: float) -> OwnResponse:
        answer: OwnResponse = await self._sent(connection, _OwnCall(request), timeout_s)
        return answer

    async def ping(self, connection: AIOKafkaConnection, timeout_s: float) -> None:
        await self._sent(connection, ApiVersionRequest(), timeout_s)

    async def _sent(self, connection: AIOKafkaConnection, request: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await connection.send(request)
        except TimeoutError:
            connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
            raise ConnectionLost(f"{_address(connection)} has not answered in {timeout_s:g} s") from None
        except (KafkaError, OSError) as error:
            raise ConnectionLost(f"the connection to {_address(connection)} ended") from error

    def shut(self, connection: AIOKafkaConnection) -> None:
        connection.close(reason=CloseReason.SHUTDOWN)


def _address(connection: AIOKafkaConnection) -> str:
    return str(Address(connection.host, connection.port))


# The codec expects the length prefix of a frame, which the library has removed.
_PREFIX: Final = bytes(LENGTH_BYTES)


class _OwnCall:
    """An Own request in the form that AIOKafkaConnection.send expects."""

    API_KEY = OWN

    def __init__(self, request: OwnRequest) -> None:
        self._request = request
        self._version = 0

    def prepare(self, versions: Mapping[int, tuple[int, int]]) -> _OwnCall:
        if OWN not in versions:
            raise OwnNotOffered(NOT_OFFERED)
        self._version = min(versions[OWN][1], OWN_MAX_VERSION)
        return self

    def build_request_header(self, correlation_id: int, client_id: str) -> _Header:
        return _Header(correlation_id, request_header(OWN, self._version, correlation_id, client_id.encode()))

    def encode(self) -> bytes:
        return encode_own_request(self._request)

    def parse_response_header(self, buffer: BytesIO) -> _Header:
        return _Header(response_correlation_id(_PREFIX + buffer.getvalue()), b"")

    @property
    def RESPONSE_TYPE(self) -> _OwnCall:  # noqa: N802 - aiokafka's name
        return self

    def decode(self, buffer: BytesIO) -> OwnResponse:
        try:
            return parse_own_response(_PREFIX + buffer.getvalue(), self._version)
        except CodecError as error:
            raise KafkaError(f"the answer to Own is invalid: {error}") from error


class _Header(NamedTuple):
    correlation_id: int
    encoded: bytes

    def encode(self) -> bytes:
        return self.encoded
