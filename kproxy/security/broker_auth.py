"""Begin each connection to a broker, with TLS and with an identity, which is the proxy's own or a client's.

A connection with TLS or SASL is not handed over until the broker has accepted it. As the refusal of a client
certificate shows only at the first answer (TLS 1.3), one request is sent even without SASL. A refusal raises
AccessRefused, a ConnectionError whose text names the remedy, so that the broker counts as unreachable.

Each authentication reads the proxy's password or token again. A session that the broker limits is renewed on the same
connection (KIP-368). The proxy's session is renewed after `RENEW_AFTER` of its life, a client's when the client renews
its own. A client's session at the proxy lasts no longer than its session at the broker.

A broker that refuses a client's identity is not at fault. Any failure from the first message of SASL on raises
IdentityRefused, within JUDGE_S.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from kproxy.errors import StartupError
from kproxy.runtime.request_protocol import ConnectionEnded, RequestProtocol
from kproxy.security.sasl_client import Credential, SaslClient, SaslRefused, mechanism
from kproxy.security.tls_errors import DialWords, broker_failure
from kproxy_codec import api_keys as keys
from kproxy_codec.control import decode_response
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import response_body_offset

# Spark's executors lack the libraries that configuration needs.
if TYPE_CHECKING:
    from kproxy.config.tls import BrokerTls, Loaded
    from kproxy.security.reloading import Reloading

CLIENT_ID: Final = b"kproxy"
# Time for TLS and SASL besides that for the dial, in seconds: some round trips, and the broker's own work.
EXTRA_S: Final = 5.0
# Time for a broker to judge a client's identity, in seconds, as it may have to ask other servers.
JUDGE_S: Final = 5.0
# The part of a session's life after which it is renewed, drawn again each time, as Kafka's clients do.
RENEW_AFTER: Final = (0.80, 0.90)
# The longest answer to ApiVersions.
_MAX_ANSWER_BYTES: Final = 1 << 20

Exchange = Callable[[int, int, bytes], Awaitable[memoryview]]
"""Sends a request by API key, version and encoded body, and returns the whole frame of its answer."""


class AccessRefused(ConnectionError):
    """A broker and the proxy do not accept each other; the message states the reason, without a secret."""


class IdentityRefused(AccessRefused):
    """A broker refuses a client's identity.

    `to_client` is the broker's message for the client, None if it has not judged the identity.
    """

    def __init__(self, reason: str, to_client: str | None = None) -> None:
        super().__init__(reason)
        self.to_client = to_client


class Session(NamedTuple):
    """A session of SASL at a broker.

    `renew_after_s` is the time until its renewal, None if only a client renews it, and `lifetime_s` that until the
    broker ends it, 0 for never. `authenticate_version` is the broker's highest; `number` that of a client's credential.
    """

    renew_after_s: float | None = None
    authenticate_version: int = 0
    lifetime_s: float = 0.0
    number: int = 0


class Identity(Protocol):
    """A client's identity. `number` counts the credentials that the client has presented."""

    @property
    def number(self) -> int: ...

    @property
    def credential(self) -> Credential | None:
        """Return the current credential, or None once the client has disconnected."""
        ...

    def refused(self, error: IdentityRefused) -> None:
        """Note that a broker has refused the identity."""
        ...


class OwnIdentity(Protocol):
    """The proxy's user, with a password or a token. Errors name the settings with `prefix`."""

    @property
    def prefix(self) -> str: ...

    @property
    def mechanism(self) -> str | None: ...

    @property
    def username(self) -> str | None: ...

    def read_secret(self) -> str:
        """Return the current password or token. Raises StartupError."""
        ...


class BrokerAuth:
    """TLS by `options`, with files as in `tls`, and SASL; plain connections without either.

    SASL uses `identity`, a client's, or else `sasl`, the proxy's own.
    """

    def __init__(
        self,
        options: BrokerTls | None = None,
        tls: Reloading[Loaded] | None = None,
        sasl: OwnIdentity | None = None,
        *,
        identity: Identity | None = None,
        random: Random | None = None,
        needs_tls: str = "set broker_tls",
    ) -> None:
        self._options = options
        # Follows the files of TLS; None without TLS.
        self.tls = tls
        self._sasl = sasl
        self._identity = identity
        # The remedy if a broker speaks TLS and these connections do not.
        self.needs_tls = needs_tls
        self._random = random or Random()  # noqa: S311 -- spreads renewals, guards nothing

    @classmethod
    def once(cls, options: BrokerTls | None, sasl: OwnIdentity | None) -> Self:
        """Make an access with the files as they are now, for a command that ends soon. Raises StartupError."""
        from kproxy.config.tls import load_broker_tls
        from kproxy.security.reloading import Reloading

        tls = None
        if options is not None:
            tls = Reloading("TLS", (), lambda: load_broker_tls(options), counters=Counter())
        return cls(options, tls, sasl)

    def carrying(self, identity: Identity) -> BrokerAuth:
        """Return the same access with a client's identity."""
        return BrokerAuth(self._options, self.tls, identity=identity, random=self._random)

    @property
    def is_plain(self) -> bool:
        """Whether connections have neither TLS nor SASL."""
        return self.tls is None and not self.has_sasl

    @property
    def has_sasl(self) -> bool:
        """Whether connections authenticate by SASL."""
        return self._sasl is not None or self._identity is not None

    @property
    def extra_s(self) -> float:
        """The time that a connection may take besides its dial, in seconds."""
        if self._identity is not None:
            return EXTRA_S + JUDGE_S
        return 0.0 if self.is_plain else EXTRA_S

    def is_current(self, session: Session) -> bool:
        """Whether a session uses the credential that was presented last."""
        return self._identity is None or session.number == self._identity.number

    @property
    def expires_at(self) -> float | None:
        """When the certificate shown to brokers expires, in seconds since the epoch; None without one."""
        certificate = self.tls.current.certificate if self.tls is not None else None
        return None if certificate is None else certificate.expires_at

    def context(self) -> ssl.SSLContext | None:
        """Return the current TLS context; None for plain text."""
        return None if self.tls is None else self.tls.current.context

    def server_name(self, host: str) -> str | None:
        """Return the name that the certificate of the broker at `host` must have; None for plain text."""
        return None if self._options is None else self._options.server_name or host

    def explain(self, error: OSError, host: str) -> OSError:
        """Return the error of a dial; an error of TLS is explained."""
        if self._options is None or not is_of_tls(error):
            return error
        failure = broker_failure(
            error,
            name=self.server_name(host) or host,
            has_ca=self._options.ca is not None,
            has_cert=self._options.cert is not None,
            words=_words(self._options.prefix),
        )
        return AccessRefused(failure.text)

    async def connect(
        self,
        protocol: asyncio.BaseProtocol,
        address: str,
        port: int,
        host: str,
        on_reached: Callable[[], None] = lambda: None,
    ) -> asyncio.Transport:
        """Dial `address`, one of `host`'s; `protocol` gets the connection once the broker has accepted it.

        `on_reached` is called before a client's identity is presented. Raises OSError.
        """
        loop = asyncio.get_running_loop()
        if self.is_plain:
            plain, _ = await loop.create_connection(lambda: protocol, address, port)
            return plain
        introduction = RequestProtocol(
            CLIENT_ID, _MAX_ANSWER_BYTES, lambda error: self.explain(error, host), self.needs_tls
        )
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
            session = await self.introduce(introduction.exchange, on_reached)
            introduction.check()
        except BaseException as error:
            transport.abort()
            if isinstance(error, CodecError):
                raise AccessRefused(f"its answer is malformed: {error}") from error
            if isinstance(error, ConnectionEnded):
                raise AccessRefused(str(error)) from error
            raise
        # Receiving is paused, because event loops choose how to receive for a protocol when they start receiving.
        transport.pause_reading()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if not transport.is_closing():
            transport.resume_reading()
            # A connection that renews its session notes when it began.
            session_began: Callable[[Session], None] | None = getattr(protocol, "session_began", None)
            if self.has_sasl and session_began is not None:
                session_began(session)
        return transport

    async def introduce(self, exchange: Exchange, on_reached: Callable[[], None] = lambda: None) -> Session:
        """Send one request, and authenticate; `on_reached` as in `connect`.

        Raises AccessRefused, and the errors of `exchange`.
        """
        frame = await exchange(keys.API_VERSIONS, 0, b"")
        if not self.has_sasl:
            return Session()
        try:
            answer = decode_response(keys.API_VERSIONS, 0, _body(frame, keys.API_VERSIONS, 0))
        except CodecError as error:
            raise AccessRefused(f"its answer to ApiVersions is malformed: {error}") from error
        offered = {api.api_key: api.max_version for api in answer.api_keys}
        if keys.SASL_AUTHENTICATE not in offered or keys.SASL_HANDSHAKE not in offered:
            raise AccessRefused("it offers no SASL there: name its SASL port, or drop broker_sasl")
        if self._identity is not None:
            on_reached()
        return await self.authenticate(exchange, offered[keys.SASL_AUTHENTICATE])

    async def authenticate(self, exchange: Exchange, version: int) -> Session:
        """Authenticate, for the first time or again. Raises AccessRefused, and the errors of `exchange`."""
        if self._identity is not None:
            return await self._carry(self._identity, exchange, version)
        if self._sasl is None:
            return Session()
        try:
            secret = await asyncio.to_thread(self._sasl.read_secret)
            own = mechanism(str(self._sasl.mechanism), self._sasl.username or "", secret)
            client = SaslClient(own, version, f"{self._sasl.prefix}mechanism")
            lifetime_s = await _converse(client, exchange)
        except (SaslRefused, StartupError) as error:
            raise AccessRefused(str(error)) from error
        except CodecError as error:
            raise AccessRefused(f"its answer is malformed: {error}") from error
        renew_after_s = lifetime_s * self._random.uniform(*RENEW_AFTER) if lifetime_s else None
        return Session(renew_after_s, version, lifetime_s)

    async def _carry(self, identity: Identity, exchange: Exchange, version: int) -> Session:
        credential, number = identity.credential, identity.number
        if credential is None:
            raise IdentityRefused("its client has disconnected")
        client = SaslClient(credential, version, "sasl.mechanisms")
        try:
            async with asyncio.timeout(JUDGE_S):
                return Session(None, version, await _converse(client, exchange), number)
        except SaslRefused as error:
            refused = IdentityRefused(str(error), error.to_client)
        except CodecError as error:
            refused = IdentityRefused(f"its answer is malformed: {error}")
        except TimeoutError:
            refused = IdentityRefused(f"it does not judge the identity within {JUDGE_S:g} s")
        except OSError as error:
            refused = IdentityRefused(str(error))
        if identity.number != number:
            # The refusal is about a credential that the client has replaced meanwhile.
            raise IdentityRefused(str(refused))
        identity.refused(refused)
        raise refused


async def _converse(client: SaslClient, exchange: Exchange) -> float:
    """Authenticate; return the lifetime of the session in seconds, 0 if it is unlimited."""
    request = client.begin()
    while True:
        frame = await exchange(request.api_key, request.api_version, request.body)
        body = _body(frame, request.api_key, request.api_version)
        # A refusal must be read at once, as the broker then closes the connection.
        following = await asyncio.to_thread(client.receive, body) if client.is_slow else client.receive(body)
        if following is None:
            return client.session_lifetime_ms / 1000
        request = following


def _body(frame: memoryview, api_key: int, api_version: int) -> memoryview:
    return frame[response_body_offset(frame, api_key, api_version) :]


def _words(prefix: str) -> DialWords:
    return DialWords(
        ca=f"{prefix}ca",
        pair=f"{prefix}cert and {prefix}key",
        other_name=f"correct the address that it advertises, or set {prefix}server_name",
        no_tls=f"name its TLS port, or drop {prefix.rstrip('.')}",
    )


def is_of_tls(error: OSError) -> bool:
    """Whether the error came after the connection was made."""
    return isinstance(error, (ssl.SSLError, ConnectionResetError, ConnectionAbortedError))
