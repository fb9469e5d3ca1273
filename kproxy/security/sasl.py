"""Authenticate one client connection to the proxy by SASL, as a state machine without I/O, clock or randomness.

States
  handshake       the client must name a mechanism; ApiVersions is passed on
  authenticate    a mechanism is agreed on, and its messages are exchanged
  authenticated   the client has a principal
  failed          no more is accepted, and the connection must be closed

Transitions
  handshake     -> authenticate    SaslHandshake names a mechanism that is offered
  authenticate  -> authenticated   the mechanism's last message proves who the client is
  authenticated -> authenticate    SaslHandshake again (KIP-368), at the earliest RENEWAL_PAUSE_S after the last success
  any           -> failed          any other request, a refusal, or the end of the permitted time

Invariants
1. No transition leads out of failed. In authenticated an early or misplaced SASL request gets only ILLEGAL_SASL_STATE.
2. Outside of authenticated only SaslHandshake and SaslAuthenticate are accepted, and ApiVersions before the first
   handshake. In authenticate a new request is accepted only after the outcome of the last one (`resume`).
3. Once there is a principal, neither its name nor the mechanism changes; a renewal by another name or mechanism fails.
   Code that passes the credential on calls `may_become` first, as brokers must not see a credential that fails here.
4. A client gets Kafka's own answers: an error code if the protocol has one for the case, and otherwise the end of the
   connection.

With SaslHandshake v0, which is refused unless it was allowed, the mechanism's messages are frames without a Kafka
header, in both directions, and a refusal has no answer. From v1 on they are in SaslAuthenticate. A session ends
(`session_ends_at`) even if its client does not know the lifetime, which only SaslAuthenticate from v1 on reports.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from kproxy.security.mechanisms import Mechanism, Refused, Servers, Step
from kproxy.security.principals import Principal
from kproxy.security.sasl_client import Credential
from kproxy_codec import control
from kproxy_codec.api_keys import API_VERSIONS, SASL_AUTHENTICATE, SASL_HANDSHAKE, name_of
from kproxy_codec.error_codes import (
    ILLEGAL_SASL_STATE,
    NONE,
    SASL_AUTHENTICATION_FAILED,
    UNSUPPORTED_SASL_MECHANISM,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import LENGTH_BYTES, RequestHeader, frame_message, parse_request_header, response_header

MOST_FRAME_BYTES: Final = 64 << 10
"""The longest frame of a client that is not authenticated."""
SASL_APIS: Final = MappingProxyType({SASL_HANDSHAKE: (0, 1), SASL_AUTHENTICATE: (0, 2)})
SASL_WITHOUT_V0: Final = MappingProxyType({**SASL_APIS, SASL_HANDSHAKE: (1, 1)})
RENEWAL_PAUSE_S: Final = 1.0
_LIFETIME_FROM: Final = 1


class State(Enum):
    """The state of an exchange; the module's docstring explains each."""

    HANDSHAKE = "handshake"
    AUTHENTICATE = "authenticate"
    AUTHENTICATED = "authenticated"
    FAILED = "failed"


class ForwardToBroker(NamedTuple):
    """The request is ApiVersions, to be answered as usual."""


class Answer(NamedTuple):
    """One whole frame for the client. The exchange continues, or has succeeded."""

    frame: bytes


class Failure(NamedTuple):
    """The connection must be closed, after `frame` if there is one. `reason` is for the log.

    `is_refusal`: the client's identity is not proven, or has changed; the answer is delayed, as in Kafka.
    """

    frame: bytes
    reason: str
    is_refusal: bool = False


class Pending(NamedTuple):
    """A mechanism's step, which may be called on another thread; its outcome goes to `resume`."""

    step: Callable[[], Step | Refused]
    is_slow: bool


Outcome: TypeAlias = ForwardToBroker | Answer | Failure | Pending


class Times(NamedTuple):
    """Clocks in seconds: `clock` is monotonic, `wall` counts from the epoch. `lifetime_s` 0: sessions do not end."""

    clock: Callable[[], float]
    wall: Callable[[], float]
    lifetime_s: float = 0.0


class SaslExchange:
    """The exchange of one connection. `principal` is None until the client is authenticated.

    With `carries`, `credential` is the client's last credential while its outcome is not known. `allows_v0`:
    SaslHandshake v0 is accepted.
    """

    def __init__(self, servers: Servers, times: Times, *, carries: bool = False, allows_v0: bool = False) -> None:
        self._allows_v0 = allows_v0
        self._servers = servers
        self._times = times
        self._carries = carries
        self.credential: Credential | None = None
        self.state = State.HANDSHAKE
        self.principal: Principal | None = None
        self.mechanism = ""
        self.session_ends_at: float | None = None
        self.user_creation: int | None = None
        self._server: Mechanism | None = None
        # The header of the request whose outcome is not known; None for a raw token.
        self._header: RequestHeader | None = None
        self._is_waiting = False
        self._is_raw = False
        self._renewable_at = 0.0

    def receive(self, frame: memoryview) -> Outcome:
        """Process a frame of the client: any frame before it is authenticated, then its SASL requests."""
        if self.state is State.FAILED or self._is_waiting:
            return self._fail("it sends more than SASL allows")
        if self.state is State.AUTHENTICATE and self._is_raw:
            return self._begin_step(None, bytes(frame[LENGTH_BYTES:]))
        try:
            header = parse_request_header(frame)
            api_key, version = header.api_key, header.api_version
            if api_key == API_VERSIONS and self.state is State.HANDSHAKE:
                return ForwardToBroker()
            lowest, highest = SASL_APIS.get(api_key, (1, 0))
            if not lowest <= version <= highest:
                return self._fail(f"{name_of(api_key)} v{version} comes before it is authenticated")
            body = control.decode_request(api_key, version, frame[header.body_offset :])
        except CodecError as error:
            return self._fail(f"its request is malformed: {error}")
        if api_key == SASL_HANDSHAKE:
            if not version and not self._allows_v0:
                return self._fail("SaslHandshake v0 is refused: sasl.handshake_v0 = true allows it to old clients")
            return self._handshake(header, body.mechanism)
        return self._authenticate(header, bytes(body.auth_bytes))

    def _handshake(self, header: RequestHeader, mechanism: str) -> Outcome:
        if self.state is State.AUTHENTICATED:
            if self._times.clock() < self._renewable_at:
                return Answer(illegal_state(header))
            if mechanism != self.mechanism:
                return self._fail(f"it renews its session by {mechanism[:40]!r} instead of {self.mechanism}")
        elif self.state is not State.HANDSHAKE:
            return self._fail("it sends SaslHandshake twice")
        offered = list(self._servers)
        begin = self._servers.get(mechanism)
        if begin is None:
            refusal = _encoded(header, error_code=UNSUPPORTED_SASL_MECHANISM, mechanisms=offered)
            return self._fail(f"the mechanism {mechanism[:40]!r} is not offered", refusal)
        self._server = begin()
        self.mechanism = mechanism
        self.state = State.AUTHENTICATE
        self._is_raw = header.api_version == 0
        return Answer(_encoded(header, error_code=NONE, mechanisms=offered))

    def _authenticate(self, header: RequestHeader, token: bytes) -> Outcome:
        if self.state is State.AUTHENTICATED:
            return Answer(illegal_state(header))
        return self._begin_step(header, token)

    def _begin_step(self, header: RequestHeader | None, token: bytes) -> Outcome:
        server = self._server
        if server is None:
            return self._fail("SaslAuthenticate comes before SaslHandshake")
        self._header, self._is_waiting = header, True
        if self._carries:
            self.credential = Credential(self.mechanism, token)

        def step() -> Step | Refused:
            try:
                return server.step(token)
            except Refused as refused:
                # The traceback has the message, and would be in a reference cycle.
                return refused.with_traceback(None)

        return Pending(step, server.is_slow)

    def resume(self, outcome: Step | Refused) -> Answer | Failure:
        """Process the outcome of the pending step."""
        header, self._is_waiting = self._header, False
        self.credential = None
        if self.state is not State.AUTHENTICATE:
            return self._fail("its time is over")
        if isinstance(outcome, Refused):
            return self._refuse(header, str(outcome), outcome.to_client)
        if outcome.principal is None:
            return Answer(self._answer(header, outcome.token))
        if not self.may_become(outcome.principal):
            before = self.principal
            text = f"Cannot change principals during re-authentication from {before} to {outcome.principal}"
            return self._refuse(header, f"{before} renews its session as another", text)
        return Answer(self._admit(header, outcome, outcome.principal))

    @property
    def user(self) -> str:
        """The name that the client gave in this attempt or the one before; empty if none is known."""
        given = self._server.user if self._server is not None else ""
        return given or (self.principal.name if self.principal is not None else "")

    def may_become(self, principal: Principal) -> bool:
        """Whether this client may be that principal, since it had no principal before, or the same."""
        return self.principal is None or self.principal.name == principal.name

    def give_up(self, reason: str) -> Failure:
        """Fail without an outcome of the pending step, so that the client's identity is not proven."""
        self._is_waiting = False
        self.credential = None
        return self._fail(reason)

    def _admit(self, header: RequestHeader | None, outcome: Step, principal: Principal) -> bytes:
        times = self._times
        now = times.clock()
        self.state = State.AUTHENTICATED
        self.principal = principal
        self.user_creation = outcome.user_creation
        self._server = None
        self._renewable_at = now + RENEWAL_PAUSE_S
        lifetimes = [times.lifetime_s] if times.lifetime_s else []
        if outcome.expires_at is not None:
            lifetimes.append(max(outcome.expires_at - times.wall(), 0.001))
        if outcome.lifetime_s is not None:
            lifetimes.append(outcome.lifetime_s)
        lifetime_s = min(lifetimes, default=0.0)
        self.session_ends_at = now + lifetime_s if lifetime_s else None
        return self._answer(header, outcome.token, session_lifetime_ms=round(lifetime_s * 1000))

    def _answer(self, header: RequestHeader | None, token: bytes, *, session_lifetime_ms: int = 0) -> bytes:
        if header is None:
            return frame_message(token)
        lifetime = {"session_lifetime_ms": session_lifetime_ms} if header.api_version >= _LIFETIME_FROM else {}
        return _encoded(header, error_code=NONE, error_message=None, auth_bytes=token, **lifetime)

    def _refuse(self, header: RequestHeader | None, reason: str, to_client: str) -> Failure:
        frame = b""
        if header is not None:
            frame = _encoded(header, error_code=SASL_AUTHENTICATION_FAILED, error_message=to_client, auth_bytes=b"")
        self.state = State.FAILED
        return Failure(frame, reason, is_refusal=True)

    def _fail(self, reason: str, frame: bytes = b"") -> Failure:
        self.state = State.FAILED
        return Failure(frame, reason)

    def time_is_over(self) -> None:
        """Accept no more frames, as the time to authenticate is over, or the session has ended."""
        self.state = State.FAILED
        self.credential = None


def illegal_state(header: RequestHeader) -> bytes:
    """Return Kafka's answer to a SASL request where none is expected, after which the connection stays open."""
    if header.api_key == SASL_HANDSHAKE:
        return _encoded(header, error_code=ILLEGAL_SASL_STATE, mechanisms=[])
    text = "SaslAuthenticate request received after successful authentication"
    return _encoded(header, error_code=ILLEGAL_SASL_STATE, error_message=text, auth_bytes=b"")


def _encoded(header: RequestHeader, **fields: object) -> bytes:
    body = control.encode_response(control.build_response(header.api_key, header.api_version, **fields))
    return frame_message(response_header(header.api_key, header.api_version, header.correlation_id), body)
