"""Send small requests, one after another, on a connection to a Kafka broker.

Every part of kproxy that sends own requests uses this module: the proxy for owners and the trail's topic, commands, and
the audit, also on Spark's executors. It needs only the standard library, kproxy_codec, kafka-python, scramp.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from kproxy.routing.topology import Address
from kproxy.runtime.request_protocol import RequestProtocol
from kproxy.runtime.resolver import dial
from kproxy.security.broker_auth import AccessRefused, BrokerAuth, Session
from kproxy_codec import api_keys as keys
from kproxy_codec.control import Message, build_request, decode_response, encode_request, version_range
from kproxy_codec.errors import CodecError, UnsupportedVersion
from kproxy_codec.framing import response_body_offset
from kproxy_codec.metadata import HIGHEST_VERSION, PORTION, MetadataReader

MAX_ANSWER_BYTES = 64 << 20
CLIENT_ID = b"kproxy"
PLAIN_ACCESS = BrokerAuth()
# The time after which the next broker is tried as well, in seconds.
HEAD_START_S = 0.25
ANY_VERSION = 0x7FFF
# Up to this version Metadata, Produce and Fetch have topic names.
WITHOUT_TOPIC_IDS = 12


class BrokerUnreachable(Exception):
    """No answer from a broker; the text names the broker and the reason."""


class BrokerRefused(BrokerUnreachable):
    """Another attempt cannot succeed: TLS or SASL fails, or there is no version in common."""


class BrokerGone(BrokerUnreachable):
    """The broker has closed the connection, for example for a restart."""


class KafkaConnection:
    """A connection for one request at a time. `timeout_s` bounds the dial and each answer, in seconds."""

    def __init__(
        self,
        address: Address,
        transport: asyncio.BaseTransport,
        protocol: RequestProtocol,
        timeout_s: float,
        access: BrokerAuth,
    ):
        self._access = access
        # When the SASL session must be renewed, in the event loop's time.
        self._renew_at: float | None = None
        self._authenticate_version = 0
        self.address = address
        self._transport = transport
        self._protocol = protocol
        self._timeout_s = timeout_s
        self._versions: dict[int, tuple[int, int]] = {keys.API_VERSIONS: (0, 0)}

    @classmethod
    async def open(
        cls,
        address: Address,
        timeout_s: float,
        client_id: bytes = CLIENT_ID,
        access: BrokerAuth = PLAIN_ACCESS,
        inside: socket.socket | None = None,
    ) -> KafkaConnection:
        """Dial, authenticate, and ask for the broker's API versions. Raises BrokerUnreachable.

        `inside`: a connected Unix socket that leads to the broker, used in place of a dial.
        """
        context, name = access.context(), access.server_name(address.host)
        loop = asyncio.get_running_loop()

        def protocol() -> RequestProtocol:
            return RequestProtocol(
                client_id, MAX_ANSWER_BYTES, lambda error: access.explain(error, address.host), access.needs_tls
            )

        def connect(host: str, port: int) -> Awaitable[tuple[asyncio.BaseTransport, RequestProtocol]]:
            return loop.create_connection(protocol, host, port, ssl=context, server_hostname=name)

        try:
            async with asyncio.timeout(timeout_s):
                if inside is None:
                    transport, made = await dial(connect, *address)
                else:
                    transport, made = await loop.create_unix_connection(protocol, sock=inside)
        except (OSError, TimeoutError) as error:
            why = _why(access.explain(error, address.host) if isinstance(error, OSError) else error)
            is_final = isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
            kind = BrokerRefused if is_final else BrokerUnreachable
            raise kind(f"{address} cannot be reached ({why})") from error
        connection = cls(address, transport, made, timeout_s, access)
        try:
            if not access.is_plain:
                await connection._authenticate(access.introduce(connection._exchange_frame))
            answer = await connection.ask(keys.API_VERSIONS, 0)
        except BaseException:  # The task may be cancelled because another broker has answered first.
            connection.abort()
            raise
        connection._versions = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
        return connection

    async def ask(self, api_key: int, at_most: int, **fields: Any) -> Message:
        """Send a request in the highest common version up to `at_most`. Raises BrokerUnreachable."""
        version, body = await self.exchange(api_key, at_most, **fields)
        try:
            return decode_response(api_key, version, body)
        except CodecError as error:
            raise self.unreachable(api_key, error) from error

    async def exchange(self, api_key: int, at_most: int, **fields: Any) -> tuple[int, memoryview]:
        """Like `ask`; return the version, and the answer's body undecoded."""
        try:
            version = self.version(api_key, at_most)
            body = encode_request(build_request(api_key, version, **fields))
        except CodecError as error:
            raise self.unreachable(api_key, error) from error
        frame = await self.exchange_frame(api_key, version, body)
        try:
            return version, frame[response_body_offset(frame, api_key, version) :]
        except CodecError as error:
            raise self.unreachable(api_key, error) from error

    async def metadata(self, topics: Sequence[Mapping[str, object]] | None) -> MetadataReader:
        """Ask about existing topics; None means all. Raises BrokerUnreachable."""
        version, body = await self.exchange(
            keys.METADATA, HIGHEST_VERSION, topics=topics, allow_auto_topic_creation=False
        )
        try:
            answer = MetadataReader(body, version)
            while not answer.read_some(PORTION):  # noqa: ASYNC110 - it decodes, and waits for nothing
                await asyncio.sleep(0)
        except CodecError as error:
            raise self.unreachable(keys.METADATA, error) from error
        return answer

    async def _authenticate(self, authenticating: Awaitable[Session]) -> None:
        """Await the authentication. Raises BrokerUnreachable."""
        try:
            session = await authenticating
        except AccessRefused as error:
            raise BrokerRefused(f"{self.address} refuses access ({error})") from error
        self._authenticate_version = session.authenticate_version
        now = asyncio.get_running_loop().time()
        self._renew_at = None if session.renew_after_s is None else now + session.renew_after_s

    async def exchange_frame(
        self,
        api_key: int,
        version: int,
        body: bytes,
        *,
        timeout_s: float | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> memoryview:
        """Send an encoded body; return the answer's whole frame. Raises BrokerUnreachable."""
        if self._renew_at is not None and asyncio.get_running_loop().time() >= self._renew_at:
            await self._authenticate(self._access.authenticate(self._exchange_frame, self._authenticate_version))
        return await self._exchange_frame(api_key, version, body, timeout_s, max_answer_bytes)

    async def _exchange_frame(
        self,
        api_key: int,
        version: int,
        body: bytes,
        timeout_s: float | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> memoryview:
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                return await self._protocol.exchange(api_key, version, body, max_answer_bytes)
        except (OSError, TimeoutError, CodecError) as error:
            raise self.unreachable(api_key, error) from error

    async def has_ended_within(self, seconds: float) -> bool:
        """Return whether the broker has closed the connection, or does so within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._protocol.ended.wait()
        except TimeoutError:
            return False
        return True

    def unreachable(self, api_key: int, error: BaseException) -> BrokerUnreachable:
        """Make the error for a missing or invalid answer."""
        # TimeoutError is an OSError.
        is_gone = isinstance(error, OSError) and not isinstance(error, TimeoutError)
        kind = BrokerGone if is_gone else BrokerUnreachable
        if isinstance(error, UnsupportedVersion):
            kind = BrokerRefused
        return kind(f"{self.address} did not answer {keys.name_of(api_key)} ({_why(error)})")

    def version(self, api_key: int, at_most: int) -> int:
        """The version in which `ask` sends a request. Raises UnsupportedVersion if there is no common version."""
        theirs = self._versions.get(api_key)
        ours = version_range(api_key)
        if theirs is None or max(theirs[0], ours[0]) > min(theirs[1], ours[1], at_most):
            raise UnsupportedVersion(f"kproxy and the broker share no version of {keys.name_of(api_key)}")
        return min(theirs[1], ours[1], at_most)

    def offered(self, api_key: int) -> tuple[int, int] | None:
        """The lowest and highest version that the broker serves, also of APIs that kafka-python lacks."""
        return self._versions.get(api_key)

    def abort(self) -> None:
        """Close at once, without TLS's closing handshake, which a hung broker would not answer."""
        self._protocol.abort()

    async def close(self) -> None:
        self._transport.close()
        await self._protocol.ended.wait()


async def open_any(
    addresses: Sequence[Address],
    timeout_s: float,
    client_id: bytes = CLIENT_ID,
    access: BrokerAuth = PLAIN_ACCESS,
) -> KafkaConnection:
    """Connect to the first of `addresses` that answers.

    Raises BrokerUnreachable, which names the failure at each of them.

    Addresses are tried in order. After HEAD_START_S without an answer the next one is tried as well (as in RFC 8305),
    so hung brokers and dead hosts cost little time.
    """
    untried = list(dict.fromkeys(addresses))
    trying: set[asyncio.Task[KafkaConnection]] = set()
    failures: list[BrokerUnreachable] = []
    winner: KafkaConnection | None = None
    try:
        while winner is None and (untried or trying):
            if untried:
                trying.add(asyncio.create_task(KafkaConnection.open(untried.pop(0), timeout_s, client_id, access)))
            head_start_s = HEAD_START_S if untried else None
            done, _ = await asyncio.wait(trying, timeout=head_start_s, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                trying.discard(task)
                try:
                    winner = task.result()
                    break
                except BrokerUnreachable as error:
                    failures.append(error)
    finally:
        await _abandon(trying)
    if winner is None:
        is_final = failures and all(isinstance(each, BrokerRefused) for each in failures)
        kind = BrokerRefused if is_final else BrokerUnreachable
        raise kind("; ".join(map(str, failures)) or "no broker is known")
    return winner


async def _abandon(trying: set[asyncio.Task[KafkaConnection]]) -> None:
    """Cancel the attempts that lost."""
    for task in trying:
        task.cancel()
    for result in await asyncio.gather(*trying, return_exceptions=True):
        if isinstance(result, KafkaConnection):
            await result.close()


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    # Omit the errno at the start of an OSError's text.
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
