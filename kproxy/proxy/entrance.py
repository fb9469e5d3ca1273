"""Let clients in by a listener with TLS or the PROXY protocol: everything before Kafka's protocol.

States of a connection
  accepted     it is admitted, and the PROXY protocol's header is awaited, if the listener asks for it
  recognised   its first byte is read, and left in the socket: it shows a client without TLS
  handshake    the event loop's TLS runs
  inside       a client session has it
  refused      it is closed

Transitions
  accepted -> recognised   the header is correct, or none is asked for
  recognised -> handshake  the first byte is that of a TLS handshake
  accepted, recognised -> inside   the listener has no TLS
  handshake -> inside      the handshake is finished
  any but inside -> refused   bytes that are not admitted; a failed handshake; HANDSHAKE_S are over; it is the oldest of
                           more than `max_half_open` that are not inside; the listener closes

Invariants
1. Exactly the PROXY protocol's header is consumed, and the first byte after it is left in the socket. The event loop's
   TLS begins with an untouched socket.
2. At most `max_half_open` connections are not inside, each for at most HANDSHAKE_S. Where there are more, the oldest is
   refused: an ordinary client finishes within a few round trips, so it is not the oldest.
3. Each connection that is not inside is one task, which owns its socket until the event loop has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, cast

import structlog

from kproxy.config.listeners import ListenerConfig
from kproxy.config.tls import ListenerTls, Loaded, load_listener_tls
from kproxy.errors import StartupError
from kproxy.proxy.admission import Admission
from kproxy.proxy.client_session import ClientSession
from kproxy.proxy.reception import Reception
from kproxy.routing.fleet import Fleet
from kproxy.runtime.sockets import BACKLOG
from kproxy.runtime.tasks import cancel
from kproxy.security.proxy_protocol import ProxyHeader, ProxyHeaderError, Source
from kproxy.security.reloading import Reloading
from kproxy.security.tls_errors import Failure, client_failure
from kproxy_codec.errors import FrameTooLarge
from kproxy_codec.foreign import ANSWER_TO_HTTP, foreign_protocol

log = structlog.get_logger(__name__)

# To finish the header and the handshake, in seconds; this is as long as a client may take to authenticate.
HANDSHAKE_S: Final = 10.0
# To end TLS, in seconds.
SHUTDOWN_S: Final = 5.0
# For a refused client to read the reason, in seconds.
LINGER_S: Final = 2.0
# After an error of accept, in seconds: there is no descriptor left.
PAUSE_S: Final = 0.1
_TLS_HANDSHAKE: Final = 0x16
_FIRST_BYTES: Final = 4
_DISCARD_BYTES: Final = 64 << 10
# The most lines in the log a minute for each kind of failure.
_MOST_A_MINUTE: Final = 5


class _Handshake:
    """The data of a handshake that are needed if it fails.

    `server_name` is the name that the client asks for, `outgoing` has the bytes that TLS wants to send; `spare` is a
    descriptor of the connection that stays open when the event loop closes its own.
    """

    __slots__ = ("outgoing", "server_name", "spare")

    def __init__(self, spare: socket.socket) -> None:
        self.server_name = ""
        self.outgoing: ssl.MemoryBIO | None = None
        self.spare = spare

    def send_alert(self) -> None:
        """Send the client the reason: event loops drop the last bytes that TLS wants to send (python/cpython#98078)."""
        if self.outgoing is not None:
            with contextlib.suppress(OSError):
                self.spare.send(self.outgoing.read())


# The event loop makes the SSL objects; this reaches the handshake that runs in a task's context.
_handshake: ContextVar[_Handshake] = ContextVar("_handshake")


class _Context(ssl.SSLContext):
    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        handshake = _handshake.get(None)
        if handshake is not None:
            handshake.outgoing = outgoing
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class _Object(ssl.SSLObject):
    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            handshake = _handshake.get(None)
            if handshake is not None:
                handshake.send_alert()
            raise


_Context.sslobject_class = _Object


def load_for_entrance(options: ListenerTls) -> Loaded:
    """Load a listener's context that fills in the `_Handshake`. Raises StartupError."""
    loaded = load_listener_tls(options, _Context)
    certificate = loaded.certificate

    def on_server_name(_: ssl.SSLObject | ssl.SSLSocket, name: str | None, __: ssl.SSLContext) -> int | None:
        handshake = _handshake.get(None)
        if handshake is not None:
            handshake.server_name = (name or "")[:255]
        if options.strict_server_name and name and certificate is not None and not certificate.is_for(name):
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return None

    loaded.context.sni_callback = on_server_name
    return loaded


class Entrance:
    """One listener.

    `refuses` returns, and logs, whether one more connection is not admitted. `session` makes the session of a
    connection that is inside, or returns None if there are too many; `welcome` takes it once it is connected.
    """

    def __init__(
        self,
        config: ListenerConfig,
        tls: Reloading[Loaded] | None,
        *,
        max_half_open: int,
        refuses: Callable[[], bool],
        session: Callable[[Reception], ClientSession | None],
        welcome: Callable[[ClientSession], None],
        counters: Counter[str],
    ) -> None:
        self._config = config
        self._tls = tls
        self._fleet: Fleet | None = None
        self._admission: Admission | None = None
        self._max_half_open = max_half_open
        self._refuses = refuses
        self._session = session
        self._welcome = welcome
        self._counters = counters
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        # The oldest first.
        self._half_open: dict[asyncio.Task[None], None] = {}
        self._evicted: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """The listener's name."""
        return self._config.name

    @property
    def expires_at(self) -> float | None:
        """When its certificate ends, in seconds since the epoch; None without TLS."""
        certificate = self._tls.current.certificate if self._tls is not None else None
        return None if certificate is None else certificate.expires_at

    @property
    def descriptor(self) -> int:
        """An open descriptor, while the listener accepts connections."""
        return self._sockets[0].fileno()

    @property
    def half_open(self) -> int:
        """The number of connections that are not inside yet."""
        return len(self._half_open)

    def open(self, bound: asyncio.Server, fleet: Fleet, admission: Admission | None = None) -> None:
        """Accept connections on the sockets of `bound`, which is closed.

        Answers to clients name the proxies of `fleet`; clients authenticate as `admission` asks.

        Raises StartupError.
        """
        self._fleet, self._admission = fleet, admission
        for each in bound.sockets:
            self._sockets.append(socket.fromfd(each.fileno(), each.family, each.type))
        bound.close()
        for listening in self._sockets:
            listening.setblocking(False)
            try:
                listening.listen(BACKLOG)
            except OSError as error:
                self.close_sockets()
                address = ":".join(map(str, listening.getsockname()[:2]))
                raise StartupError(
                    f"cannot listen on {address} ({error.strerror or error}): choose another address, or stop what "
                    f"uses this one."
                ) from error
            self._accepting.append(asyncio.get_running_loop().create_task(self._accept(listening)))

    async def close(self) -> None:
        """Accept no more connections, and refuse those that are not inside."""
        for task in self._accepting:
            await cancel(task)
        for task in list(self._half_open):
            await cancel(task)
        self.close_sockets()

    def close_sockets(self) -> None:
        for listening in self._sockets:
            listening.close()
        self._sockets.clear()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("client connection not accepted", listener=self._config.name, reason=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            if self._refuses():
                connection.close()
            else:
                self._begin(connection, f"{address[0]}:{address[1]}")
            # A flood of connections must not keep the event loop from everything else.
            await asyncio.sleep(0)

    def _begin(self, connection: socket.socket, peer: str) -> None:
        if len(self._half_open) >= self._max_half_open:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            self._evicted.add(oldest)
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._let_in(connection, peer))
        self._half_open[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._half_open.pop(task, None)
        if task in self._evicted:
            self._evicted.discard(task)
            self._refused(Failure("crowded", "too many connections are in their handshake, and it was the oldest"), "?")

    async def _let_in(self, connection: socket.socket, peer: str) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                source = await _read_header(connection) if self._config.proxy_protocol else None
                if source is not None:
                    peer = f"{source.host}:{source.port}"
                if self._fleet is None:
                    raise RuntimeError("open comes first")
                reception = Reception(self._config.name, self._fleet, source, self._admission)
                if self._tls is None:
                    await self._enter(connection, reception, None)
                elif await self._speaks_tls(connection, peer):
                    await self._shake_hands(connection, reception, self._tls.current, peer)
        except ProxyHeaderError as error:
            self._refused(Failure("proxy_header", str(error)), peer)
            await _let_read(connection)
        except (OSError, EOFError) as error:
            # TimeoutError is an OSError.
            self._refused(client_failure(error, names=(), asked_for=""), peer)
        except Exception:  # the boundary: an error with one connection must not end the listener
            log.exception("client connection not let in", client=peer)
        finally:
            # This does nothing where the event loop has taken the descriptor.
            connection.close()

    async def _shake_hands(self, connection: socket.socket, reception: Reception, loaded: Loaded, peer: str) -> None:
        with connection.dup() as spare:
            spare.setblocking(False)
            handshake = _Handshake(spare)
            _handshake.set(handshake)
            try:
                await self._enter(connection, reception, loaded.context)
                self._counters["tls.handshakes.done"] += 1
            except OSError as error:
                # SSLError is an OSError.
                names = loaded.certificate.names if loaded.certificate is not None else ()
                self._refused(client_failure(error, names=names, asked_for=handshake.server_name), peer)
                if isinstance(error, ssl.SSLError):
                    await _let_read(spare)

    async def _enter(self, connection: socket.socket, reception: Reception, context: ssl.SSLContext | None) -> None:
        """Give the connection to a session. Raises OSError."""
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threshold = _Threshold(lambda: self._session(reception))
        taken = socket.socket(fileno=connection.detach())
        loop = asyncio.get_running_loop()
        if context is None:
            await loop.connect_accepted_socket(lambda: threshold, taken)
        else:
            await loop.connect_accepted_socket(
                lambda: threshold,
                taken,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        if threshold.session is not None:
            self._welcome(threshold.session)

    async def _speaks_tls(self, connection: socket.socket, peer: str) -> bool:
        """Whether its first byte is that of a TLS handshake, which stays unread. Raises OSError, EOFError."""
        first = await _peek(connection, _FIRST_BYTES)
        if first[0] == _TLS_HANDSHAKE:
            return True
        stranger = foreign_protocol(FrameTooLarge("", first)) if len(first) == _FIRST_BYTES else None
        protocol = stranger.protocol if stranger is not None and stranger.protocol != "TLS" else "plain text"
        if protocol == "HTTP":
            with contextlib.suppress(OSError):
                connection.send(ANSWER_TO_HTTP)
        self._refused(
            Failure("plain_text", f"it speaks {protocol}, and this listener speaks TLS: set security.protocol=SSL"),
            peer,
        )
        await _let_read(connection)
        return False

    def _refused(self, failure: Failure, peer: str) -> None:
        self._counters[f"tls.handshakes.failed.{failure.word}"] += 1
        if failure.word == "gone":
            # A load balancer's check of the port, or a client that did not wait.
            log.debug("client not let in", listener=self._config.name, client=peer, reason=failure.text)
            return
        log.warning(
            "client not let in",
            most_a_minute=_MOST_A_MINUTE,
            bounded_by="failure",
            failure=failure.word,
            listener=self._config.name,
            client=peer,
            reason=failure.text,
        )


class _Threshold(asyncio.BufferedProtocol):
    """The placeholder of a session until the handshake is finished."""

    def __init__(self, make: Callable[[], ClientSession | None]) -> None:
        self._make = make
        self.session: ClientSession | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.session = self._make()
        if self.session is None:
            cast(asyncio.Transport, transport).abort()
            return
        cast(asyncio.Transport, transport).set_protocol(self.session)
        self.session.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        raise RuntimeError("the handshake is not finished")

    def buffer_updated(self, nbytes: int) -> None:
        raise RuntimeError("the handshake is not finished")


async def _read_header(connection: socket.socket) -> Source | None:
    """Consume a PROXY protocol header. Raises ProxyHeaderError, OSError, EOFError."""
    header, loop = ProxyHeader(), asyncio.get_running_loop()
    while header.needed:
        data = await loop.sock_recv(connection, header.needed)
        if not data:
            raise EOFError("it closed the connection before the header")
        header.receive(data)
    return header.source


async def _peek(connection: socket.socket, most: int) -> bytes:
    """Return the connection's first bytes, at least one, which stay unread. Raises OSError, EOFError."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            first = connection.recv(most, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            readable = loop.create_future()
            loop.add_reader(connection, _set, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection)
            continue
        if not first:
            raise EOFError("it closed the connection")
        return first


async def _let_read(connection: socket.socket) -> None:
    """Let the client read the reason: closing with unread bytes resets the connection, and a reset may overtake it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(LINGER_S):
            while await asyncio.get_running_loop().sock_recv(connection, _DISCARD_BYTES):
                continue


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
