"""Authenticate to a broker, as the client side of SASL in Kafka's protocol, without I/O.

States
  new            nothing was sent
  handshake      SaslHandshake was sent, which proposes the mechanism
  authenticate   SaslAuthenticate was sent, once or several times
  authenticated  the broker accepts the identity and, with SCRAM, has proven that it knows the password too
  failed         the broker refuses, or its answer is invalid

Transitions
  new          -> handshake      `begin`
  handshake    -> authenticate   the broker supports the mechanism
  authenticate -> authenticate   the mechanism has another message
  authenticate -> authenticated  the mechanism is done, and the broker reports no error
  handshake, authenticate -> failed   any other answer; `receive` raises SaslRefused

Invariants
1. No request is made in `authenticated` and `failed`.
2. Only PLAIN and OAUTHBEARER send the secret, which is never part of an error.
3. A broker cannot make this side work for long, as MAX_ITERATIONS bounds the work of SCRAM. It gets no proof from
   which the password is quickly guessed, because none is sent with fewer than LEAST_SCRAM_ITERATIONS.

Sources: KIP-43, KIP-84 (SCRAM), KIP-152 (SaslAuthenticate), KIP-255 and RFC 7628 (OAUTHBEARER), KIP-368 (lifetime).
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Final, NamedTuple

from scramp import ScramClient, ScramException

from kproxy_codec import api_keys as keys
from kproxy_codec.control import MOST_SCRAM_BYTES, build_request, decode_response, encode_request
from kproxy_codec.error_codes import NONE, SASL_AUTHENTICATION_FAILED, UNSUPPORTED_SASL_MECHANISM, name_of
from kproxy_codec.errors import CodecError

# The bound of RFC 7677 and of Kafka's clients: with fewer a password is quickly guessed from its proof.
LEAST_SCRAM_ITERATIONS: Final = 4_096
# Kafka itself makes credentials with at most 16384 (ScramMechanism.maxIterations); other brokers may use more.
MAX_ITERATIONS: Final = 100_000
_ITERATIONS: Final = re.compile(r"(?:^|,)i=([0-9]{1,10})(?:,|$)")
_MAX_TEXT: Final = 300
# The bound is one year.
_MAX_LIFETIME_MS: Final = 31_536_000_000
_PLAIN: Final = "PLAIN"
_OAUTHBEARER: Final = "OAUTHBEARER"
_ACKNOWLEDGEMENT: Final = b"\x01"
# The error of a listener without SASL.
_ILLEGAL_SASL_STATE: Final = 34
_HANDSHAKE_VERSION: Final = 1
# Version 1 has the lifetime; version 2 differs in its encoding alone.
_MAX_AUTHENTICATE_VERSION: Final = 1


class SaslRefused(Exception):
    """The broker refuses the identity, or cannot be trusted; the message states the reason, without the secret.

    `to_client`: the broker's message for the client with this identity, if it has judged the identity.
    """

    def __init__(self, reason: str, to_client: str | None = None) -> None:
        super().__init__(reason)
        self.to_client = to_client


class Request(NamedTuple):
    """A request, with its encoded `body`."""

    api_key: int
    api_version: int
    body: bytes


class State(Enum):
    NEW = "new"
    HANDSHAKE = "handshake"
    AUTHENTICATE = "authenticate"
    AUTHENTICATED = "authenticated"
    FAILED = "failed"


class Credential:
    """The message of PLAIN (RFC 4616) or OAUTHBEARER (RFC 7628): a client's, unchanged, or the proxy's own.

    Neither its repr nor any error contains the message.
    """

    __slots__ = ("__weakref__", "_message", "name")

    is_slow = False

    def __init__(self, name: str, message: bytes) -> None:
        self.name = name
        self._message = message

    def __repr__(self) -> str:
        return f"Credential({self.name})"

    def first(self) -> bytes:
        return self._message

    def next(self, message: bytes) -> bytes | None:
        """Return the answer to the broker's message; None if nothing more is to be sent."""
        # A message of OAUTHBEARER is an error in JSON, which must be acknowledged; the broker then reports the failure.
        return _ACKNOWLEDGEMENT if message and self.name == _OAUTHBEARER else None

    def shown(self, text: str) -> str:
        """Return a broker's message without the secret, for logs."""
        return text.replace(self._secret(), "***") if self._secret() else text

    def _secret(self) -> str:
        """Return the password, or the token."""
        if self.name == _PLAIN:
            secret = self._message.rpartition(b"\0")[2]
        else:
            parts = self._message.split(b"\x01")
            secret = next((part for part in parts if part.startswith(b"auth=")), b"").rpartition(b" ")[2]
        return secret.decode(errors="replace")


class Scram:
    """The messages of SCRAM (RFC 5802); `name` is SCRAM-SHA-256 or SCRAM-SHA-512."""

    is_slow = True

    def __init__(self, name: str, username: str, password: str) -> None:
        self.name = name
        self._client = ScramClient([name], username, password)
        self._is_last = False

    def first(self) -> bytes:
        message: str = self._client.get_client_first()
        return message.encode()

    def next(self, message: bytes) -> bytes | None:
        """Like `Credential.next`. Raises SaslRefused."""
        try:
            if len(message) > MOST_SCRAM_BYTES:
                raise ValueError("too long")
            text = message.decode()
            if self._is_last:
                self._client.set_server_final(text)
                return None
            self._is_last = True
            _check_iterations(text)
            self._client.set_server_first(text)
            final: str = self._client.get_client_final()
            return final.encode()
        except (ScramException, ValueError) as error:
            # The error is not chained, because a library's error may have the messages.
            why = "it does not know the password" if self._is_last and not isinstance(error, ValueError) else "no SCRAM"
            raise SaslRefused(f"its {self.name} message is invalid ({why})") from None

    def shown(self, text: str) -> str:
        # The broker does not know the password.
        return text


def _check_iterations(server_first: str) -> None:
    found = _ITERATIONS.search(server_first)
    if found is None or not LEAST_SCRAM_ITERATIONS <= int(found[1]) <= MAX_ITERATIONS:
        asked = "no valid number of" if found is None else found[1]
        bounds = f"from {LEAST_SCRAM_ITERATIONS} to {MAX_ITERATIONS}"
        raise SaslRefused(f"it asks for {asked} iterations; expected {bounds}")


def mechanism(name: str, username: str, secret: str) -> Credential | Scram:
    """Return the mechanism with this name; `secret` is a password or a token."""
    if name == _PLAIN:
        return Credential(name, f"\0{username}\0{secret}".encode())
    if name == _OAUTHBEARER:
        return Credential(name, f"n,,\x01auth=Bearer {secret}\x01\x01".encode())
    return Scram(name, username, secret)


class SaslClient:
    """One authentication by `mechanism`; `authenticate_version` is the highest that the broker serves.

    Errors name `option` as the setting that chooses the mechanism.
    """

    def __init__(
        self, mechanism: Credential | Scram, authenticate_version: int, option: str = "broker_sasl.mechanism"
    ) -> None:
        self._option = option
        self._mechanism = mechanism
        self._version = min(authenticate_version, _MAX_AUTHENTICATE_VERSION)
        self.state = State.NEW
        # The time after which the broker ends the session, in milliseconds; 0 for never.
        self.session_lifetime_ms = 0

    @property
    def is_slow(self) -> bool:
        """Whether `receive` may take milliseconds of hashing."""
        return self._mechanism.is_slow

    def begin(self) -> Request:
        """Return the first request."""
        if self.state is not State.NEW:
            raise RuntimeError("the authentication has already begun")
        self.state = State.HANDSHAKE
        body = encode_request(build_request(keys.SASL_HANDSHAKE, _HANDSHAKE_VERSION, mechanism=self._mechanism.name))
        return Request(keys.SASL_HANDSHAKE, _HANDSHAKE_VERSION, body)

    def receive(self, body: memoryview) -> Request | None:
        """Process the body of the answer to the last request; return the next request, None once authenticated.

        Raises SaslRefused.
        """
        try:
            if self.state is State.HANDSHAKE:
                self._check_handshake(body)
                self.state = State.AUTHENTICATE
                return self._authenticate(self._mechanism.first())
            if self.state is State.AUTHENTICATE:
                return self._go_on(body)
            raise RuntimeError("no answer is awaited")
        except CodecError as error:
            self.state = State.FAILED
            raise SaslRefused(f"its answer is malformed: {error}") from error
        except SaslRefused:
            self.state = State.FAILED
            raise

    def _check_handshake(self, body: memoryview) -> None:
        answer = decode_response(keys.SASL_HANDSHAKE, _HANDSHAKE_VERSION, body)
        if answer.error_code == UNSUPPORTED_SASL_MECHANISM:
            offers = ", ".join(map(str, answer.mechanisms))[:_MAX_TEXT] or "none"
            raise SaslRefused(f"it does not offer {self._mechanism.name} but {offers}: set {self._option}")
        if answer.error_code == _ILLEGAL_SASL_STATE:
            raise SaslRefused("it offers no SASL there: name its SASL port, or use no SASL")
        if answer.error_code != NONE:
            raise SaslRefused(f"it refuses SaslHandshake with {name_of(answer.error_code)}")

    def _go_on(self, body: memoryview) -> Request | None:
        answer = decode_response(keys.SASL_AUTHENTICATE, self._version, body)
        if answer.error_code != NONE:
            told = str(answer.error_message or "")
            says = f": {self._mechanism.shown(told)[:_MAX_TEXT]}" if told else ""
            to_client = told[:_MAX_TEXT] if answer.error_code == SASL_AUTHENTICATION_FAILED else None
            raise SaslRefused(f"it refuses the identity with {name_of(answer.error_code)}{says}", to_client)
        message = self._mechanism.next(bytes(answer.auth_bytes or b""))
        if message is not None:
            return self._authenticate(message)
        self.state = State.AUTHENTICATED
        told_ms = answer.session_lifetime_ms or 0
        self.session_lifetime_ms = min(max(0, told_ms), _MAX_LIFETIME_MS)
        return None

    def _authenticate(self, message: bytes) -> Request:
        body = encode_request(build_request(keys.SASL_AUTHENTICATE, self._version, auth_bytes=message))
        return Request(keys.SASL_AUTHENTICATE, self._version, body)
