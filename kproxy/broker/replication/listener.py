"""Accept the followers of other brokers, authenticate them, and answer their fetches.

States of a connection, with TLS once its handshake is finished (kproxy.security.tls_acceptor)
  new             SaslHandshake is answered
  handshaking     the mechanism is agreed on: SaslAuthenticate is answered
  authenticated   the other side has proved to be one of the cluster's brokers: Fetch is answered
  closed          nothing is answered; in every other state ApiVersions is answered too

Transitions
  new -> handshaking             SaslHandshake names our mechanism
  handshaking -> authenticated   the second SaslAuthenticate proves it
  handshaking -> closed          the live broker of that id has another data directory, according to etcd
  authenticated -> closed        the same broker has authenticated on another connection
  any -> closed                  either side closes it, or authentication takes longer than AUTHENTICATION_TIMEOUT_S

Invariants
1. Before a connection is authenticated nothing of the broker's state can be read or changed through it, and its frames
   are at most UNAUTHENTICATED_FRAME_BYTES long.
2. At most MAX_UNAUTHENTICATED connections are not authenticated: one more closes the oldest. So strangers cannot lock
   out brokers, which authenticate in a few milliseconds. Each broker has at most one authenticated connection.
3. A follower fetches under its authenticated id. A broker with an earlier data directory of that id is refused: its
   connection would replace that of the present broker.
4. A request is refused by Kafka's own answer where there is one, and by closing the connection, with one log line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import MappingProxyType

import structlog

from kproxy.broker.apis.registry import API_VERSIONS_MAX, answer_api_versions
from kproxy.broker.connection import ClientConnection
from kproxy.broker.context import Answer, Body, Broker, CloseConnection, Request
from kproxy.broker.replication.authentication import MECHANISM, AuthenticationFailed, ListenerHandshake, Secret
from kproxy.broker.replication.encryption import NO_ENCRYPTION, Encryption, without_tls
from kproxy.broker.replication.isr_keeper import FollowerPresence
from kproxy.broker.replication.open_fetches import OpenFetches
from kproxy.etcd.lease import Clock, lease_clock
from kproxy.runtime.sockets import bind, bound_port
from kproxy_codec import error_codes
from kproxy_codec.api_keys import API_VERSIONS, FETCH, SASL_AUTHENTICATE, SASL_HANDSHAKE, name_of
from kproxy_codec.framing import ReceiveArena
from kproxy_codec.replica_fetch import VERSION as REPLICA_FETCH_VERSION

AUTHENTICATION_TIMEOUT_S = 10.0
UNAUTHENTICATED_FRAME_BYTES = 64 << 10
# Far more than a follower's largest fetch, which names MAX_PARTITIONS partitions.
FRAME_BYTES = 1 << 20
MAX_UNAUTHENTICATED = 64
OFFERED = MappingProxyType(
    {
        API_VERSIONS: (0, API_VERSIONS_MAX),
        # Version 0 is followed by messages without a header.
        SASL_HANDSHAKE: (1, 1),
        SASL_AUTHENTICATE: (0, 2),
        FETCH: (REPLICA_FETCH_VERSION, REPLICA_FETCH_VERSION),
    }
)
"""API key -> the lowest and highest version that ApiVersions names."""
_logger = structlog.get_logger(__name__)


class ReplicationListener:
    """Accepts the other brokers' followers: `bind`, `start`, `close`."""

    def __init__(
        self,
        secret: Callable[[], Secret],
        arena: ReceiveArena,
        presence: FollowerPresence,
        encryption: Encryption = NO_ENCRYPTION,
        clock: Clock = lease_clock,
    ) -> None:
        """`secret` returns the cluster's current secret; `presence` records which followers are connected.

        `clock` is that of the partitions led here.
        """
        self.clock = clock
        self._secret = secret
        self._acceptor = encryption.acceptor(self._connection)
        self._presence = presence
        self.arena = arena
        self._server: asyncio.Server | None = None
        self._broker: Broker | None = None
        self._unauthenticated: dict[_Session, None] = {}
        self._authenticated: dict[int, _Session] = {}

    @property
    def followers(self) -> frozenset[int]:
        """The ids of the brokers that are connected and authenticated."""
        return frozenset(self._authenticated)

    async def bind(self, address: tuple[str, int]) -> int:
        """Bind and return the port, without accepting connections yet. Raises StartupError."""
        self._server = await bind(self._connection, *address, choose="another --replication-listen")
        return bound_port(self._server)

    async def start(self, broker: Broker) -> None:
        """Accept followers of the partitions that `broker` leads. Raises StartupError."""
        if self._server is None:
            raise RuntimeError("the replication listener is not bound; call bind() before start()")
        self._broker = broker
        if self._acceptor is not None:
            self._acceptor.open(self._server)
        else:
            await self._server.start_serving()

    async def close(self) -> None:
        """Stop accepting, close every connection, and wait for the requests being served."""
        if self._server is not None:
            self._server.close()
        if self._acceptor is not None:
            await self._acceptor.close()
        self._presence.close()
        connections = [each.connection for each in (*self._unauthenticated, *self._authenticated.values())]
        working = [each.task for each in connections if each.task is not None]
        for connection in connections:
            connection.abort()
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    def _connection(self) -> ClientConnection:
        return _Session(self).connection

    # Used by sessions

    @property
    def secret(self) -> Secret:
        return self._secret()

    @property
    def broker(self) -> Broker:
        if self._broker is None:
            raise RuntimeError("the replication listener is not started; call start() first")
        return self._broker

    def opened(self, session: _Session) -> None:
        self._unauthenticated[session] = None
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            oldest.connection.refuse(f"more than {MAX_UNAUTHENTICATED} connections are not authenticated")
            self._unauthenticated.pop(oldest, None)

    def authenticated(self, session: _Session, node_id: int) -> None:
        self._unauthenticated.pop(session, None)
        earlier = self._authenticated.get(node_id)
        self._authenticated[node_id] = session
        self._presence.connected(node_id)
        if earlier is not None:
            # Left over from a restart, or from a connection that broke only on the other side.
            earlier.end_fetches()
            earlier.connection.abort()

    def closed(self, session: _Session) -> None:
        self._unauthenticated.pop(session, None)
        for node_id, each in list(self._authenticated.items()):
            if each is session:
                del self._authenticated[node_id]
                self._presence.broken(node_id)


class _Session:
    """The authentication state of one connection."""

    def __init__(self, listener: ReplicationListener) -> None:
        self._listener = listener
        self._handshake: ListenerHandshake | None = None
        # None until the peer is authenticated.
        self._fetches: OpenFetches | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.connection = ClientConnection(
            self._serve,
            listener.arena,
            UNAUTHENTICATED_FRAME_BYTES,
            self._on_opened,
            self._on_closed,
            on_queued=self._hurry,
            explain=without_tls,
        )

    def _on_opened(self, connection: ClientConnection) -> bool:
        reason = f"not authenticated within {AUTHENTICATION_TIMEOUT_S:.0f} s"
        self._timer = asyncio.get_running_loop().call_later(AUTHENTICATION_TIMEOUT_S, connection.refuse, reason)
        self._listener.opened(self)
        return True

    def _on_closed(self, _: ClientConnection) -> None:
        self._stop_timer()
        self.end_fetches()
        self._listener.closed(self)

    def end_fetches(self) -> None:
        """Drop the open questions: this connection's requests no longer count."""
        if self._fetches is not None:
            self._fetches.close()
            self._fetches = None

    def _hurry(self) -> None:
        if self._fetches is not None:
            self._fetches.hurry()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _serve(self, request: Request) -> Answer:
        api_key, version = request.header.api_key, request.header.api_version
        if api_key == API_VERSIONS:
            return answer_api_versions(request, OFFERED)
        lowest, highest = OFFERED.get(api_key, (1, 0))
        if not lowest <= version <= highest:
            raise CloseConnection(f"{name_of(api_key)} v{version} is not offered to followers")
        if api_key == SASL_HANDSHAKE:
            return self._agree_on_mechanism(request)
        if api_key == SASL_AUTHENTICATE:
            return self._authenticate(request)
        if self._fetches is None:
            raise CloseConnection(f"an unauthenticated peer sent {name_of(api_key)}")
        return self._fetches.serve(self._listener.broker, request)

    def _agree_on_mechanism(self, request: Request) -> Body:
        if self._handshake is not None:
            raise CloseConnection("the peer sent SASL_HANDSHAKE twice on one connection")
        mechanism = request.message().mechanism
        if mechanism != MECHANISM:
            refused = request.answer(error_code=error_codes.UNSUPPORTED_SASL_MECHANISM, mechanisms=[MECHANISM])
            raise CloseConnection(f"unknown SASL mechanism {mechanism[:40]!r}; expected {MECHANISM}", refused)
        self._handshake = ListenerHandshake(self._listener.secret)
        return request.answer(error_code=error_codes.NONE, mechanisms=[MECHANISM])

    def _authenticate(self, request: Request) -> Body:
        if self._handshake is None or self._fetches is not None:
            raise CloseConnection("unexpected SASL_AUTHENTICATE: no handshake is under way")
        message = request.message()
        try:
            answer = self._handshake.answer(bytes(message.auth_bytes))
        except AuthenticationFailed as error:
            raise CloseConnection(f"authentication failed: {error}", _authentication_failed(request)) from error
        follower = self._handshake.follower
        if follower is not None:
            live = self._listener.broker.view.brokers.get(follower.node_id)
            if live is not None and live.log_id != follower.log_id:
                raise CloseConnection(
                    f"broker {follower.node_id} runs with the data directory {live.log_id}, not {follower.log_id}",
                    _authentication_failed(request),
                )
            self._fetches = OpenFetches(follower.node_id, self._listener.clock)
            self._stop_timer()
            self.connection.admit(FRAME_BYTES)
            self._listener.authenticated(self, follower.node_id)
            _logger.info("follower authenticated", replica_id=follower.node_id, log_id=str(follower.log_id))
        return request.answer(error_code=error_codes.NONE, error_message=None, auth_bytes=answer)


def _authentication_failed(request: Request) -> Body:
    """Answer a failed authentication; only the log has the exact reason."""
    code = error_codes.SASL_AUTHENTICATION_FAILED
    return request.answer(error_code=code, error_message="authentication failed", auth_bytes=b"")
