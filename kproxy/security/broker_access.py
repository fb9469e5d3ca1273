"""What every connection to a broker begins with: TLS, and the proxy's own identity.

A connection is in nobody's hands until the broker has accepted it: a client certificate that the broker refuses shows
only at the first answer (TLS 1.3), and so one question is asked in any case. What is refused is an AccessRefused, a
ConnectionError whose text names the remedy: for whoever dials, the broker cannot be reached.

Each authentication reads the password or token anew. A session that the broker limits is to be renewed on the same
connection (KIP-368) after `RENEW_AFTER` of its life.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Final, NamedTuple, Protocol, Self, cast

from kproxy.config.broker_sasl import BrokerSasl
from kproxy.config.tls import BrokerTls, Loaded, load_broker_tls
from kproxy.errors import StartupError
from kproxy.security.reloading import Reloading
from kproxy.security.sasl_client import MAX_AUTH_BYTES, SaslClient, SaslRefused, mechanism
from kproxy.security.tls_errors import broker_failure
from kproxy_codec import api_keys as keys
from kproxy_codec.control import decode_response
from kproxy_codec.correlation import AwaitedAnswers
from kproxy_codec.errors import CodecError, FrameTooLarge
from kproxy_codec.foreign import answered_in
from kproxy_codec.framing import FrameReader, frame_message, request_header, response_body_offset

CLIENT_ID: Final = b"kproxy"
# Time for TLS and SASL besides that for the dial, in seconds: some round trips, and the broker's own work.
EXTRA_S: Final = 5.0
# The part of a session's life after which it is renewed, drawn anew each time, as Kafka's clients do.
RENEW_AFTER: Final = (0.80, 0.90)
# For the answer to ApiVersions.
_MAX_ANSWER_BYTES: Final = 1 << 20

Exchange = Callable[[int, int, bytes], Awaitable[memoryview]]
"""Sends a request by API key, version and encoded body, and returns the whole frame of its answer."""


class AccessRefused(ConnectionError):
    """A broker and the proxy do not accept each other; the text says why, and names no secret."""


class Session(NamedTuple):
    """`renew_after_s`: seconds until it is to be renewed, None: never. `authenticate_version`: the broker's highest."""

    renew_after_s: float | None = None
    authenticate_version: int = 0


class Renewable(Protocol):
    """A connection that renews its session."""

    def session_began(self, session: Session) -> None:
        """Note when it is to be renewed."""
        ...


class BrokerAccess:
    """TLS by `options`, with files as in `tls`, and SASL; plain connections without either."""

    def __init__(
        self,
        options: BrokerTls | None = None,
        tls: Reloading[Loaded] | None = None,
        sasl: BrokerSasl | None = None,
        *,
        random: Random | None = None,
    ) -> None:
        self._options = options
        self._tls = tls
        self._sasl = sasl
        self._random = random or Random()  # noqa: S311 -- spreads renewals, guards nothing

    @classmethod
    def once(cls, options: BrokerTls | None, sasl: BrokerSasl | None) -> Self:
        """With files as they are now, for a command that ends soon. Raises StartupError."""
        tls = None
        if options is not None:
            tls = Reloading("TLS", (), lambda: load_broker_tls(options), counters=Counter())
        return cls(options, tls, sasl)

    @property
    def is_plain(self) -> bool:
        """Whether connections begin with what they are used for."""
        return self._tls is None and self._sasl is None

    @property
    def extra_s(self) -> float:
        """Time that a connection may take besides its dial, in seconds."""
        return 0.0 if self.is_plain else EXTRA_S

    @property
    def expires_at(self) -> float | None:
        """When the client certificate ends, in seconds since the epoch; None without one."""
        certificate = self._tls.current.certificate if self._tls is not None else None
        return None if certificate is None else certificate.expires_at

    def context(self) -> ssl.SSLContext | None:
        """The present TLS context; None for plain text."""
        return None if self._tls is None else self._tls.current.context

    def server_name(self, host: str) -> str | None:
        """The name that the certificate of the broker at `host` must have; None for plain text."""
        return None if self._options is None else self._options.server_name or host

    def explain(self, error: OSError, host: str) -> OSError:
        """The error of a dial, with TLS's own in words."""
        if self._options is None or not (isinstance(error, (ssl.SSLError, ConnectionError)) and _is_of_tls(error)):
            return error
        failure = broker_failure(
            error,
            name=self.server_name(host) or host,
            has_ca=self._options.ca is not None,
            has_cert=self._options.cert is not None,
        )
        return AccessRefused(failure.text)

    async def connect(self, protocol: asyncio.BaseProtocol, address: str, port: int, host: str) -> asyncio.Transport:
        """Dial `address`, which is one of `host`'s; `protocol` has the connection once the broker has accepted it.

        Raises OSError.
        """
        loop = asyncio.get_running_loop()
        if self.is_plain:
            plain, _ = await loop.create_connection(lambda: protocol, address, port)
            return plain
        introduction = _Introduction(self, host)
        try:
            made, _ = await loop.create_connection(
                lambda: introduction,
                address,
                port,
                ssl=self.context(),
                server_hostname=self.server_name(host),
            )
        except OSError as error:
            raise self.explain(error, host) from error
        transport: asyncio.Transport = made
        try:
            session = await self.introduce(introduction.exchange)
            introduction.check()
        except BaseException:
            transport.abort()
            raise
        # Receiving is paused: event loops choose how to receive for a protocol when they begin.
        transport.pause_reading()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if not transport.is_closing():
            transport.resume_reading()
            if session.renew_after_s is not None and hasattr(protocol, "session_began"):
                cast(Renewable, protocol).session_began(session)
        return transport

    async def introduce(self, exchange: Exchange) -> Session:
        """Ask one question, and authenticate. Raises AccessRefused, and what `exchange` raises."""
        frame = await exchange(keys.API_VERSIONS, 0, b"")
        if self._sasl is None:
            return Session()
        try:
            answer = decode_response(keys.API_VERSIONS, 0, _body(frame, keys.API_VERSIONS, 0))
        except CodecError as error:
            raise AccessRefused(f"its answer to ApiVersions is malformed: {error}") from error
        offered = {api.api_key: api.max_version for api in answer.api_keys}
        if keys.SASL_AUTHENTICATE not in offered or keys.SASL_HANDSHAKE not in offered:
            raise AccessRefused("it offers no SASL there: name its SASL port, or drop broker_sasl")
        return await self.authenticate(exchange, offered[keys.SASL_AUTHENTICATE])

    async def authenticate(self, exchange: Exchange, version: int) -> Session:
        """Authenticate, for the first time or again. Raises AccessRefused, and what `exchange` raises."""
        if self._sasl is None:
            return Session()
        try:
            secret = await asyncio.to_thread(self._sasl.read_secret)
            client = SaslClient(mechanism(self._sasl.mechanism, self._sasl.username, secret), version)
            request = client.begin()
            while True:
                frame = await exchange(request.api_key, request.api_version, request.body)
                # In a thread: SCRAM computes for milliseconds.
                following = await asyncio.to_thread(client.receive, _body(frame, request.api_key, request.api_version))
                if following is None:
                    return self._session(client.session_lifetime_ms, version)
                request = following
        except (SaslRefused, StartupError) as error:
            raise AccessRefused(str(error)) from error
        except CodecError as error:
            raise AccessRefused(f"its answer is malformed: {error}") from error

    def _session(self, lifetime_ms: int, version: int) -> Session:
        if not lifetime_ms:
            return Session()
        return Session(lifetime_ms / 1000 * self._random.uniform(*RENEW_AFTER), version)


def _body(frame: memoryview, api_key: int, api_version: int) -> memoryview:
    return frame[response_body_offset(frame, api_key, api_version) :]


def _is_of_tls(error: OSError) -> bool:
    """Whether the error came after the connection was made."""
    return isinstance(error, (ssl.SSLError, ConnectionResetError, ConnectionAbortedError))


class _Introduction(asyncio.BufferedProtocol):
    """A connection that is in nobody's hands yet: one request at a time."""

    def __init__(self, access: BrokerAccess, host: str) -> None:
        self._access = access
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(max(_MAX_ANSWER_BYTES, MAX_AUTH_BYTES))
        self._awaited: AwaitedAnswers[asyncio.Future[memoryview]] = AwaitedAnswers(self._reader, most=1)
        self._waiting: asyncio.Future[memoryview] | None = None
        self._lost: OSError | None = None

    async def exchange(self, api_key: int, api_version: int, body: bytes) -> memoryview:
        """Raises AccessRefused, OSError."""
        self.check()
        if self._transport is None:
            raise RuntimeError("it is not connected")
        waiting = self._waiting = asyncio.get_running_loop().create_future()
        correlation_id = self._awaited.next_id()
        self._awaited.sent(correlation_id, waiting)
        self._transport.write(frame_message(request_header(api_key, api_version, correlation_id, CLIENT_ID), body))
        answer: memoryview = await waiting
        return answer

    def check(self) -> None:
        """Raises OSError if the connection has ended."""
        if self._lost is not None:
            raise self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.buffer_updated(nbytes):
                waiting = self._awaited.match(frame)
                if not waiting.done():
                    waiting.set_result(frame)
        except CodecError as error:
            spoken = answered_in(error.first_bytes) if isinstance(error, FrameTooLarge) else None
            hint = "; set broker_tls" if spoken is not None and spoken.startswith("TLS") else ""
            self._fail(AccessRefused(f"it speaks {spoken}{hint}" if spoken else f"its answer is malformed: {error}"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, OSError):
            self._fail(self._access.explain(exc, self._host))
        else:
            self._fail(AccessRefused("it closed the connection before it had accepted the proxy"))

    def _fail(self, error: OSError) -> None:
        if self._lost is None:
            self._lost = error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(self._lost)
            # It may have been given up.
            self._waiting.exception()
        if self._transport is not None:
            self._transport.abort()
