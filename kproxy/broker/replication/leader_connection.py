"""A follower's connection to a leader's replication listener.

States
  dialling         the connection is being made
  authenticating   each side proves to the other that it knows the cluster's secret; frames are small
  open             requests may be sent
  lost             no more requests or answers; pending requests fail

Transitions
  dialling -> authenticating -> open   within CONNECT_TIMEOUT_S
  any -> lost                          the other side closed or broke it, or sent an invalid or unrequested answer;
                                       `close`

Invariants
1. The other side is not trusted before it has proved that it knows the secret.
2. Answers are matched in order and by correlation_id; an answer that does not match ends the connection.
3. Memory is bounded: frames by the limit of the state, pending answers by the requests sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from kproxy.broker.keys import ReplicaKey
from kproxy.broker.replication.authentication import MECHANISM, AuthenticationFailed, FollowerHandshake, Secret
from kproxy.runtime.resolver import dial
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, UnexpectedAnswer
from kproxy_codec.fetch import PartitionFetch
from kproxy_codec.framing import (
    FrameReader,
    ReceiveArena,
    frame_message,
    request_header,
    response_body_offset,
)
from kproxy_codec.replica_fetch import ReplicaAnswer, encode_replica_fetch, read_replica_answer

CONNECT_TIMEOUT_S = 5.0
UNAUTHENTICATED_FRAME_BYTES = 64 << 10
# A request, and the one that hurries its answer.
MOST_AWAITED = 2
_HANDSHAKE_VERSION = 1
_AUTHENTICATE_VERSION = 2


class LeaderLost(Exception):
    """The connection is unusable or could not be made; the message says why."""


class LeaderConnection(asyncio.BufferedProtocol):
    """A follower's connection, by its broker and data directory, to a leader. See `open`."""

    def __init__(self, follower: ReplicaKey, arena: ReceiveArena) -> None:
        self._follower = follower
        self._sender = b"broker-%d" % follower.node_id
        self._reader = FrameReader(UNAUTHENTICATED_FRAME_BYTES, arena)
        self._transport: asyncio.Transport | None = None
        self._awaited: AwaitedAnswers[asyncio.Future[memoryview]] = AwaitedAnswers(self._reader, MOST_AWAITED)
        self._lost_because = ""

    @classmethod
    async def open(
        cls,
        address: tuple[str, int],
        follower: ReplicaKey,
        secret: Secret,
        *,
        arena: ReceiveArena,
        max_answer_bytes: int,
    ) -> LeaderConnection:
        """Connect and authenticate both sides. Raises LeaderLost."""
        connection = cls(follower, arena)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                loop = asyncio.get_running_loop()
                await dial(lambda *place: loop.create_connection(lambda: connection, *place), *address)
                await connection._authenticate(secret)
        except (OSError, AuthenticationFailed, CodecError) as error:
            connection.close()
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise LeaderLost(reason) from error
        except BaseException:
            connection.close()
            raise
        connection._reader.admit(max_answer_bytes)
        return connection

    async def _authenticate(self, secret: Secret) -> None:
        handshake = FollowerHandshake(self._follower, secret)
        agreed = await self._control(SASL_HANDSHAKE, _HANDSHAKE_VERSION, mechanism=MECHANISM)
        if agreed.error_code != error_codes.NONE:
            raise AuthenticationFailed(f"{MECHANISM} is refused: {error_codes.name_of(agreed.error_code)}")
        handshake_answer = await self._prove(handshake.first())
        handshake.check(await self._prove(handshake.final(handshake_answer)))

    async def _prove(self, message: bytes) -> bytes:
        answer = await self._control(SASL_AUTHENTICATE, _AUTHENTICATE_VERSION, auth_bytes=message)
        if answer.error_code != error_codes.NONE:
            raise AuthenticationFailed(f"the leader says {error_codes.name_of(answer.error_code)}")
        return bytes(answer.auth_bytes)

    async def _control(self, api_key: int, version: int, **fields: Any) -> control.Message:
        body = control.encode_request(control.build_request(api_key, version, **fields))
        correlation_id = self._awaited.next_id()
        head = request_header(api_key, version, correlation_id, self._sender)
        frame = await self._ask(correlation_id, frame_message(head, body))
        return control.decode_response(api_key, version, frame[response_body_offset(frame, api_key, version) :])

    # Requests

    def fetch(
        self,
        topics: Sequence[tuple[bytes, Sequence[PartitionFetch]]],
        *,
        max_wait_ms: int,
        min_bytes: int,
        max_bytes: int,
    ) -> asyncio.Future[memoryview]:
        """Request topics by id; the future gets the frame for `read_answer`, or LeaderLost."""
        correlation_id = self._awaited.next_id()
        frame = encode_replica_fetch(
            self._follower.node_id,
            topics,
            correlation_id=correlation_id,
            sender=self._sender,
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
        )
        return self._ask(correlation_id, frame)

    @staticmethod
    def read_answer(frame: memoryview) -> ReplicaAnswer:
        """Decode a Fetch answer. Raises LeaderLost for an invalid one, or one that fails as a whole."""
        try:
            answer = read_replica_answer(frame)
        except CodecError as error:
            raise LeaderLost(f"not an answer: {error}") from error
        if answer.error_code != error_codes.NONE:
            raise LeaderLost(f"the leader says {error_codes.name_of(answer.error_code)}")
        return answer

    def _ask(self, correlation_id: int, frame: bytes) -> asyncio.Future[memoryview]:
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        if self._transport is None:
            answer.set_exception(LeaderLost(self._lost_because or "not connected"))
        else:
            self._awaited.sent(correlation_id, answer)
            self._transport.write(frame)
        return answer

    def close(self) -> None:
        """Close; pending requests fail with LeaderLost. May be called twice."""
        self._lose("closed here")

    def _lose(self, reason: str) -> None:
        self._lost_because = self._lost_because or reason
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        for answer in self._awaited.end():
            if not answer.done():
                answer.set_exception(LeaderLost(self._lost_because))
                # Nobody may await it any more.
                answer.exception()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("the leader closed the connection" if exc is None else f"the connection broke: {exc}")

    def eof_received(self) -> bool:
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for answer, frame in self._awaited.receive(nbytes):
                if not answer.done():
                    answer.set_result(frame)
        except UnexpectedAnswer as error:
            self._lose(str(error))
        except CodecError as error:
            self._lose(f"not an answer: {error}")
