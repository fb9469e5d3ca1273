"""One connection to a Kafka broker for small requests, one after another."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from kproxy.ownership.kafka_leaders import PORTION
from kproxy.routing.topology import Address
from kproxy.runtime.resolver import dial
from kproxy.security.broker_auth import AccessRefused, BrokerAuth, Session
from kproxy_codec import api_keys as keys
from kproxy_codec.control import Message, build_request, decode_response, encode_request, version_range
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, FrameTooLarge, UnsupportedVersion
from kproxy_codec.foreign import answered_in
from kproxy_codec.framing import FrameReader, frame_message, request_header, response_body_offset
from kproxy_codec.metadata import HIGHEST_VERSION, MetadataReader

MAX_ANSWER_BYTES = 64 << 20
CLIENT_ID = b"kproxy"
PLAIN_ACCESS = BrokerAuth()
# The time before the next broker is asked as well, in seconds.
HEAD_START_S = 0.25
ANY_VERSION = 0x7FFF
# Up to this version Metadata, Produce and Fetch have topic names.
WITHOUT_TOPIC_IDS = 12
_READ_BYTES = 64 << 10


class BrokerUnreachable(Exception):
    """No answer from a broker; the text says which and why."""


class BrokerGone(BrokerUnreachable):
    """The broker has closed the connection, for example for a restart."""


class KafkaConnection:
    """A connection for one request at a time.

    `timeout_s` bounds the dial and each answer, in seconds.
    """

    def __init__(
        self,
        address: Address,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_s: float,
        client_id: bytes = CLIENT_ID,
        access: BrokerAuth = PLAIN_ACCESS,
    ):
        self._access = access
        # When the session is to be renewed, in the event loop's time.
        self._renew_at: float | None = None
        self._authenticate_version = 0
        self.address = address
        self._client_id = client_id
        self._reader = reader
        self._writer = writer
        self._timeout_s = timeout_s
        self._awaited: AwaitedAnswers[None] = AwaitedAnswers(FrameReader(MAX_ANSWER_BYTES), most=1)
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

        `inside`: a Unix socket that leads there already.
        """
        context, name = access.context(), access.server_name(address.host)

        def connect(host: str, port: int) -> Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
            if inside is not None:
                return asyncio.open_unix_connection(sock=inside)
            return asyncio.open_connection(host, port, ssl=context, server_hostname=name)

        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await (dial(connect, *address) if inside is None else connect(*address))
        except (OSError, TimeoutError) as error:
            why = _why(access.explain(error, address.host) if isinstance(error, OSError) else error)
            raise BrokerUnreachable(f"{address} cannot be reached ({why})") from error
        connection = cls(address, reader, writer, timeout_s, client_id, access)
        try:
            await connection._introduce()
            answer = await connection.ask(keys.API_VERSIONS, 0)
        except BaseException:  # the task may be cancelled: another broker has answered first
            writer.transport.abort()
            raise
        connection._versions = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
        return connection

    async def ask(self, api_key: int, at_most: int, **fields: Any) -> Message:
        """Send a request in the highest common version up to `at_most`.

        Raises BrokerUnreachable.
        """
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
        """Ask about topics that exist, None for all. Raises BrokerUnreachable."""
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

    async def _introduce(self) -> None:
        if not self._access.is_plain:
            await self._authenticate(self._access.introduce(self._exchange_frame))

    async def _authenticate(self, authenticating: Awaitable[Session]) -> None:
        """Await the authentication. Raises BrokerUnreachable."""
        try:
            session = await authenticating
        except AccessRefused as error:
            raise BrokerUnreachable(f"{self.address} gives no access ({error})") from error
        self._authenticate_version = session.authenticate_version
        now = asyncio.get_running_loop().time()
        self._renew_at = None if session.renew_after_s is None else now + session.renew_after_s

    async def exchange_frame(
        self, api_key: int, version: int, body: bytes, *, timeout_s: float | None = None
    ) -> memoryview:
        """Send an encoded body; return the whole answer. Raises BrokerUnreachable."""
        if self._renew_at is not None and asyncio.get_running_loop().time() >= self._renew_at:
            await self._authenticate(self._access.authenticate(self._exchange_frame, self._authenticate_version))
        return await self._exchange_frame(api_key, version, body, timeout_s=timeout_s)

    async def _exchange_frame(
        self, api_key: int, version: int, body: bytes, *, timeout_s: float | None = None
    ) -> memoryview:
        try:
            correlation_id = self._awaited.next_id()
            header = request_header(api_key, version, correlation_id, self._client_id)
            self._awaited.sent(correlation_id, None)
            async with asyncio.timeout(timeout_s or self._timeout_s):
                self._writer.write(frame_message(header, body))
                await self._writer.drain()
                return await self._answer()
        except (OSError, EOFError, TimeoutError, CodecError) as error:
            raise self.unreachable(api_key, error) from error

    async def has_ended_within(self, seconds: float) -> bool:
        """Wait while no request is in flight.

        Return whether the broker has closed the connection.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._reader.read(1)
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def unreachable(self, api_key: int, error: BaseException) -> BrokerUnreachable:
        """Make the error for a missing or invalid answer."""
        if isinstance(error, OSError):
            error = self._access.explain(error, self.address.host)
        # TimeoutError is an OSError.
        is_gone = isinstance(error, (OSError, EOFError)) and not isinstance(error, TimeoutError)
        kind = BrokerGone if is_gone else BrokerUnreachable
        return kind(f"{self.address} did not answer {keys.name_of(api_key)} ({_why(error)})")

    async def _answer(self) -> memoryview:
        while received := await self._reader.read(_READ_BYTES):
            try:
                if answers := [*self._awaited.receive_data(received)]:
                    return answers[0][1]
            except FrameTooLarge as error:
                spoken = answered_in(error.first_bytes)
                hint = ": set broker_tls" if spoken is not None and spoken.startswith("TLS") else ""
                raise CodecError(f"it speaks {spoken}{hint}") if spoken else error from error
        raise EOFError("the connection was closed")

    def version(self, api_key: int, at_most: int) -> int:
        """The version that `ask` uses.

        Raises UnsupportedVersion if there is none in common.
        """
        theirs = self._versions.get(api_key)
        ours = version_range(api_key)
        if theirs is None or max(theirs[0], ours[0]) > min(theirs[1], ours[1], at_most):
            raise UnsupportedVersion(f"no version of {keys.name_of(api_key)} in common")
        return min(theirs[1], ours[1], at_most)

    def offered(self, api_key: int) -> tuple[int, int] | None:
        """The lowest and highest version that the broker serves, also of APIs that kafka-python lacks."""
        return self._versions.get(api_key)

    def abort(self) -> None:
        """Close at once, without TLS's farewell, which a broker that hangs would not answer."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def open_any(
    addresses: Sequence[Address],
    timeout_s: float,
    client_id: bytes = CLIENT_ID,
    access: BrokerAuth = PLAIN_ACCESS,
) -> KafkaConnection:
    """Connect to the first of `addresses` that answers.

    Raises BrokerUnreachable that names them all.

    They are tried in order. After HEAD_START_S without an answer the next one is tried as well (as in RFC 8305), so
    hung brokers and dead hosts cost little.
    """
    untried = list(dict.fromkeys(addresses))
    trying: set[asyncio.Task[KafkaConnection]] = set()
    failures: list[str] = []
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
                    failures.append(str(error))
    finally:
        await _abandon(trying)
    if winner is None:
        raise BrokerUnreachable("; ".join(failures) or "there is no broker to ask")
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
    # Without the errno before the words of an OSError.
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
