"""Authenticate both sides of a replication connection by SCRAM-SHA-256 (RFC 5802, RFC 7677).

The secret is random and shared by the cluster. The first broker puts it into etcd, which every broker can read. A
follower's name is its broker id and the log id of its data directory (like KIP-858's directory ids), so that a listener
can distinguish it from an earlier broker with that id. Neither side reveals the secret: a listener learns nothing from
a follower at the wrong address, and a follower trusts no listener that has not proved its knowledge.

States, of either handshake
  first     nothing was exchanged
  final     the first message of each side has been exchanged
  done      the other side has proved that it knows the secret
  failed    it has not, or its message is invalid

Transitions
  first -> final -> done    one message of the other side each
  first, final -> failed    AuthenticationFailed is raised; a message in `done` or `failed` raises it too
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

from scramp import ScramClient, ScramException, ScramMechanism

from kproxy.broker.cluster import get_or_put
from kproxy.broker.keys import Keys, ReplicaKey
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient
from kproxy_codec.control import MOST_SCRAM_BYTES

MECHANISM = "SCRAM-SHA-256"
# A listener could demand so many iterations that they block its follower; ours demands 4,096.
MAX_ITERATIONS = 16_384
LEAST_CHARACTERS = 16


SECRET_BYTES = 32


class AuthenticationFailed(Exception):
    """The other side has not proved that it knows the secret; the message gives the reason."""


class Secret(NamedTuple):
    """The cluster's secret, and the keys that a listener needs to verify it."""

    text: str
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    @classmethod
    def of(cls, text: str) -> Secret:
        """Derive the keys of a secret. Raises ValueError for a guessable text, or one that SASL forbids."""
        if len(text) < LEAST_CHARACTERS:
            raise ValueError(f"it has {len(text)} characters; expected at least {LEAST_CHARACTERS}")
        try:
            return cls(text, *ScramMechanism(MECHANISM).make_auth_info(text))
        except ScramException as error:
            raise ValueError(str(error)) from error


def _text(message: bytes) -> str:
    """Decode a message as text. Raises ValueError."""
    if len(message) > MOST_SCRAM_BYTES:
        raise ValueError(f"a message has {len(message)} bytes; expected at most {MOST_SCRAM_BYTES}")
    return message.decode()


class ListenerHandshake:
    """The listener's side. `follower` is the authenticated follower; None until then."""

    def __init__(self, secret: Secret) -> None:
        self.follower: ReplicaKey | None = None
        self._secret = secret
        self._claimed: ReplicaKey | None = None
        self._server = ScramMechanism(MECHANISM).make_server(self._find)
        self._has_begun = False

    def _find(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        self._claimed = ReplicaKey.parse(name)
        return self._secret[1:]

    def answer(self, message: bytes) -> bytes:
        """Answer the follower's next message. Raises AuthenticationFailed."""
        try:
            text = _text(message)
            if not self._has_begun:
                self._has_begun = True
                self._server.set_client_first(text)
                return str(self._server.get_server_first()).encode()
            self._server.set_client_final(text)
            answer = str(self._server.get_server_final()).encode()
        except (ScramException, ValueError) as error:
            raise AuthenticationFailed(str(error)) from error
        self.follower = self._claimed
        return answer


class FollowerHandshake:
    """The follower's side, which sends the first message."""

    def __init__(self, follower: ReplicaKey, secret: Secret) -> None:
        self._client = ScramClient([MECHANISM], str(follower), secret.text)

    def first(self) -> bytes:
        return str(self._client.get_client_first()).encode()

    def final(self, message: bytes) -> bytes:
        """Answer the listener's first message. Raises AuthenticationFailed."""
        try:
            self._client.set_server_first(_text(message))
            if int(self._client.iterations) > MAX_ITERATIONS:
                raise AuthenticationFailed(f"{self._client.iterations} iterations; expected at most {MAX_ITERATIONS}")
            return str(self._client.get_client_final()).encode()
        except (ScramException, ValueError) as error:
            raise AuthenticationFailed(str(error)) from error

    def check(self, message: bytes) -> None:
        """Verify the listener's last message: it must know the secret too. Raises AuthenticationFailed."""
        try:
            self._client.set_server_final(_text(message))
        except (ScramException, ValueError) as error:
            raise AuthenticationFailed(str(error)) from error


class SharedSecret:
    """The secret as last read: `load` it first, and again when etcd's history may have changed."""

    def __init__(self, client: EtcdClient, keys: Keys) -> None:
        self._client = client
        self._key = keys.replication_secret
        self._secret: Secret | None = None

    @property
    def current(self) -> Secret:
        if self._secret is None:
            raise RuntimeError("the replication secret is not loaded; await load() first")
        return self._secret

    async def load(self) -> None:
        """Read the secret, or create one. Raises EtcdError, StartupError."""
        # If etcd has lost it, put back what this broker remembers.
        proposal = self._secret.text if self._secret is not None else secrets.token_urlsafe(SECRET_BYTES)
        stored = await get_or_put(self._client, self._key, proposal.encode())
        try:
            text = stored.decode("ascii")
            if self._secret is None or self._secret.text != text:
                self._secret = Secret.of(text)
        except ValueError as error:
            raise StartupError(
                f"etcd's key {self._key} holds no usable secret ({error}): "
                f"stop every broker, delete the key, and the first one to start makes another"
            ) from error
