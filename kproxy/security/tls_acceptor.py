"""Accept connections on a listener, with TLS and the PROXY protocol, up to where the session's own protocol begins.

The proxy's listeners for clients, the reference brokers' for followers and the admin page use this.

States of a connection
  accepted     it is admitted, and the PROXY protocol's header is awaited if the listener requires it
  recognised   its first byte, which shows a client without TLS, is read but left in the socket
  handshake    the event loop's TLS runs
  inside       it belongs to a session
  refused      it is closed

Transitions
  accepted -> recognised   the listener has TLS, and the header is correct or none is required
  recognised -> handshake  the first byte is that of a TLS handshake
  accepted -> inside       the listener has no TLS, and the header is correct or none is required
  handshake -> inside      the handshake is finished
  any but inside -> refused   plain text where TLS is required, or a wrong header; a failed handshake; no session for
                           it; HANDSHAKE_S are over; it is the oldest beyond `max_half_open`; the listener closes

Invariants
1. Exactly the PROXY protocol's header is consumed, and the first byte after it is left in the socket. The event loop's
   TLS begins with an untouched socket.
2. At most `max_half_open` connections are not inside, each for at most HANDSHAKE_S, and TLS reads at most
   MOST_HELLO_BYTES before it answers. If there are more, the oldest is refused: an ordinary client finishes within a
   few round trips of its turn, so clients that do not finish are older.
3. Nothing is read from a connection whose sender is not permitted to send a header of the PROXY protocol.
4. Each connection that is not inside is one task, which owns its socket until the event loop has it.
5. Handshakes begin one after another: those of a listener in the order of the clients' requests, those of several
   listeners by turns, so that a flood on one does not delay the others. Handshakes and the begin and end of their
   sessions take about one part in 1 + PACE of the event loop's time; a flood leaves the rest to connections inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import structlog

from kproxy.address import Address
from kproxy.config.listeners import Network
from kproxy.config.tls import ListenerTls, Loaded, PageTls, load_listener_tls
from kproxy.errors import StartupError
from kproxy.runtime.sockets import BACKLOG
from kproxy.runtime.tasks import cancel
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.proxy_protocol import ProxyHeader, ProxyHeaderError, Source
from kproxy.security.tls_errors import EXPIRED, UNSPECIFIED, Failure, ListenerWords, client_failure
from kproxy_codec.errors import FrameTooLarge
from kproxy_codec.foreign import ANSWER_TO_HTTP, foreign_protocol

log = structlog.get_logger(__name__)

Session = TypeVar("Session", bound=asyncio.BaseProtocol)

# The time to finish the header and the handshake, in seconds, as long as a client may take to authenticate.
HANDSHAKE_S: Final = 10.0
# The pause between two handshakes, as a multiple of the event loop's work for handshakes and sessions.
PACE: Final = 3.0
# The longest step that counts as work, in seconds: a step of a handshake takes a millisecond, but may be interrupted.
MOST_STEP_S: Final = 0.005
# The most work that a pause counts, in seconds, as many clients may continue their handshakes at once.
MOST_WORK_S: Final = 0.02
# The end of a session takes about as long as its beginning, and is not measured.
_BOTH_ENDS: Final = 2
# The longest beginning of a handshake. Clients send up to 2 KiB, with keys for post-quantum groups. OpenSSL accepts 128
# KiB, in a time that grows with the square, as it looks up the group of each of a hello's keys in its list of groups.
MOST_HELLO_BYTES: Final = 8 << 10
# The time to end TLS, in seconds.
SHUTDOWN_S: Final = 5.0
# The time for a refused client to read the reason, in seconds.
LINGER_S: Final = 2.0
# The pause after an error of accept, in seconds, as no descriptor is left then.
PAUSE_S: Final = 0.1
_TLS_HANDSHAKE: Final = 0x16
_FIRST_BYTES: Final = 4
_DISCARD_BYTES: Final = 64 << 10
# The most log lines per minute for each kind of failure.
_MOST_A_MINUTE: Final = 5
_FOREIGN_SENDER: Final = Failure(
    "proxy_sender", "its address is not in proxy_protocol_from: add it there if a load balancer has it"
)


class _Pace:
    """Decides when the next handshake of an event loop may begin.

    `worked` counts the event loop's time for earlier connections: steps of handshakes, and sessions' begin and end.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._free_at = 0.0
        # The time of the last step, and the estimate for the next step in `_free_at`, until that step is counted.
        self._last_s = 0.0
        self._reserved_s = 0.0

    async def turn(self) -> None:
        """Wait until the caller's handshake may begin."""
        async with self._turn:
            while True:
                left_s = self.left_s
                if left_s <= 0:
                    break
                # Steps of other handshakes may move the time meanwhile.
                await asyncio.sleep(left_s)
            # The handshake works in the loop's next steps, presumably as long as the one before.
            self._reserved_s = PACE * self._last_s
            self._free_at = self._clock() + self._reserved_s

    @property
    def left_s(self) -> float:
        """The time that the next handshake must wait, in seconds; 0 or less for no wait."""
        return self._free_at - self._clock()

    def worked(self, seconds: float) -> None:
        """Count work that ends now and took `seconds`."""
        now = self._clock()
        self._last_s = min(seconds, MOST_STEP_S)
        free_at = max(now, self._free_at - self._reserved_s) + PACE * self._last_s
        self._free_at = min(free_at, now + PACE * MOST_WORK_S)
        self._reserved_s = 0.0


_paces: WeakKeyDictionary[asyncio.AbstractEventLoop, _Pace] = WeakKeyDictionary()


def _pace_of_loop() -> _Pace:
    """Return the pace of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _paces.get(loop)
    if found is None:
        found = _paces[loop] = _Pace()
    return found


@dataclass(slots=True)
class _Handshake:
    """The data that a handshake needs while it runs, and if it fails.

    `server_name` is the name that the client asks for; `spare` is a descriptor of the connection that stays open when
    the event loop closes its own.
    """

    spare: socket.socket
    pace: _Pace
    server_name: str = ""

    def send_alert(self, alert: bytes) -> None:
        """Send the client the reason, as event loops drop the last bytes that TLS sends (python/cpython#98078)."""
        with contextlib.suppress(OSError):
            self.spare.send(alert)


# The event loop makes the SSL objects; this reaches the handshake that runs in a task's context.
_handshake: ContextVar[_Handshake] = ContextVar("_handshake")


class AcceptorContext(ssl.SSLContext):
    """A context whose failed handshakes send the reason to the other side."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = cast(_Object, super().wrap_bio(incoming, outgoing, server_side, server_hostname, session))
        made.bytes_in, made.bytes_out = incoming, outgoing
        return made


class _Object(ssl.SSLObject):
    bytes_in: ssl.MemoryBIO
    bytes_out: ssl.MemoryBIO
    # The bytes that TLS may still read before its first answer; None after that.
    _hello_left: int | None = MOST_HELLO_BYTES

    def do_handshake(self) -> None:
        handshake = _handshake.get(None)
        began = time.monotonic()
        if self._hello_left is not None:
            # Until its first answer TLS reads all bytes that have arrived.
            self._hello_left -= self.bytes_in.pending
            if self._hello_left < 0:
                error = ssl.SSLError(ssl.SSL_ERROR_SSL, f"its first message has more than {MOST_HELLO_BYTES} bytes")
                error.reason = "HELLO_TOO_LONG"
                raise error
        try:
            super().do_handshake()
            if self.session_reused:
                _reject_expired_session(self.getpeercert())
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if handshake is not None:
                handshake.send_alert(self.bytes_out.read())
            raise
        finally:
            if self.bytes_out.pending:
                self._hello_left = None
            if handshake is not None:
                handshake.pace.worked(time.monotonic() - began)

    def getpeercert(self, binary_form: bool = False) -> Any:
        """Raises SSLCertVerificationError if a name is not UTF-8, as event loops log other errors as their own."""
        try:
            return super().getpeercert(binary_form)
        except UnicodeDecodeError as error:
            raise _not_accepted("a name in it is not UTF-8", UNSPECIFIED) from error


def _reject_expired_session(certificate: Mapping[str, Any] | None) -> None:
    """Raise SSLCertVerificationError for an expired certificate, which resuming a session does not verify."""
    if certificate and ssl.cert_time_to_seconds(str(certificate["notAfter"])) < time.time():
        raise _not_accepted("certificate has expired", EXPIRED)


def _not_accepted(message: str, code: int) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(ssl.SSL_ERROR_SSL, message)
    error.verify_code, error.verify_message = code, message
    return error


AcceptorContext.sslobject_class = _Object


def load_for_acceptor(options: PageTls) -> Loaded:
    """Load a listener's context that fills in the `_Handshake`. Raises StartupError."""
    loaded = load_listener_tls(options, AcceptorContext)
    certificate = loaded.certificate
    is_strict = isinstance(options, ListenerTls) and options.strict_server_name

    def on_server_name(_: ssl.SSLObject | ssl.SSLSocket, name: str | None, __: ssl.SSLContext) -> int | None:
        handshake = _handshake.get(None)
        if handshake is not None:
            handshake.server_name = (name or "")[:255]
        if is_strict and name and certificate is not None and not certificate.is_for(name):
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return None

    loaded.context.sni_callback = on_server_name
    return loaded


HANDSHAKES: Final = "tls.handshakes."
"""The counters of ended handshakes begin with this, unless an acceptor counts them apart."""


def handshakes_of(counters: Counter[str]) -> dict[str, int]:
    """Return the ended handshakes that an acceptor has counted, by outcome."""
    return {name.rpartition(".")[2]: count for name, count in counters.items() if name.startswith(HANDSHAKES)}


@dataclass(eq=False)
class TlsAcceptor(Generic[Session]):
    """One listener; `name` is empty for the only one. `tls` returns the TLS settings for new handshakes.

    `proxy_senders` has the networks that may send the PROXY protocol's header; None: all may. `refuses` returns, and
    logs, whether one more connection is not admitted. `session` makes the session of a connection that is inside, or
    returns None if there are too many; its argument is the client's address by the PROXY protocol. `welcome` takes the
    session once it is connected. `words` name the options in explanations. `answer_to_http` is for HTTP without TLS.
    The names of counters begin with `counted_as`.
    """

    name: str
    tls: Callable[[], Loaded] | None
    _: KW_ONLY
    proxy_protocol: bool = False
    proxy_senders: Collection[Network] | None = None
    max_half_open: int
    refuses: Callable[[], bool] = lambda: False
    session: Callable[[Source | None], Session | None]
    welcome: Callable[[Session], None] = lambda session: None
    counters: Counter[str]
    words: ListenerWords = ListenerWords()  # noqa: RUF009 -- it does not change
    answer_to_http: bytes = ANSWER_TO_HTTP
    counted_as: str = HANDSHAKES
    events: SecurityEvents = NO_EVENTS
    _sockets: list[socket.socket] = field(default_factory=list, init=False)
    _accepting: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    # The tasks of connections, the oldest first, each with the address that the connection comes from.
    _half_open: dict[asyncio.Task[None], str] = field(default_factory=dict, init=False)
    _evicted: dict[asyncio.Task[None], str] = field(default_factory=dict, init=False)
    _queue: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def expires_at(self) -> float | None:
        """When the certificate expires, in seconds since the epoch; None without TLS."""
        certificate = self.tls().certificate if self.tls is not None else None
        return None if certificate is None else certificate.expires_at

    @property
    def descriptor(self) -> int:
        """An open descriptor, while the listener accepts connections."""
        return self._sockets[0].fileno()

    @property
    def half_open(self) -> int:
        """The number of connections that are not inside yet."""
        return len(self._half_open)

    def open(self, bound: asyncio.Server) -> None:
        """Accept connections on the sockets of `bound`, which is closed. Raises StartupError."""
        for each in bound.sockets:
            self._sockets.append(socket.fromfd(each.fileno(), each.family, each.type))
        bound.close()
        for listening in self._sockets:
            listening.setblocking(False)
            try:
                listening.listen(BACKLOG)
            except OSError as error:
                address = ":".join(map(str, listening.getsockname()[:2]))
                self.close_sockets()
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
                log.warning("client connection not accepted", listener=self.name, reason=str(error))
                await asyncio.sleep(PAUSE_S)
                continue
            if self.proxy_senders is not None and not is_among(address[0], self.proxy_senders):
                connection.close()
                self._refused(_FOREIGN_SENDER, str(Address(*address[:2])))
            elif self.refuses():
                connection.close()
            else:
                self._begin(connection, str(Address(*address[:2])))
            # A flood of connections must not keep the event loop from its other work.
            await asyncio.sleep(0)

    def _begin(self, connection: socket.socket, peer: str) -> None:
        if len(self._half_open) >= self.max_half_open:
            oldest = next(iter(self._half_open))
            self._evicted[oldest] = self._half_open.pop(oldest)
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._let_in(connection, peer))
        self._half_open[task] = peer
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._half_open.pop(task, None)
        evicted = self._evicted.pop(task, None)
        if evicted is not None:
            text = "too many connections are in their handshake, and it was the oldest"
            self._refused(Failure("crowded", text), evicted)

    async def _let_in(self, connection: socket.socket, peer: str) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                source = await _read_header(connection) if self.proxy_protocol else None
                if source is not None:
                    peer = str(Address(source.host, source.port))
                first = await _peek(connection, _FIRST_BYTES) if self.tls is not None else b""
                if self.tls is not None and first[0] == _TLS_HANDSHAKE:
                    await self._turn()
                    await self._shake_hands(connection, source, self.tls(), peer)
                elif self.tls is None:
                    await self._enter(connection, source, None)
                else:
                    await self._refuse_plain_text(connection, first, peer)
        except ProxyHeaderError as error:
            self._refused(Failure("proxy_header", str(error)), peer)
            await _let_read(connection)
        except (OSError, EOFError) as error:
            # TimeoutError is an OSError.
            self._refused(client_failure(error, names=(), asked_for="", words=self.words), peer)
        except Exception:  # the boundary: an error with one connection must not end the listener
            log.exception("client connection failed", client=peer)
        finally:
            # This does nothing if the event loop has taken the descriptor.
            connection.close()

    async def _turn(self) -> None:
        """Wait for the turn of the listener's next handshake; only one of its clients competes with other listeners."""
        async with self._queue:
            await _pace_of_loop().turn()

    async def _shake_hands(self, connection: socket.socket, source: Source | None, loaded: Loaded, peer: str) -> None:
        with connection.dup() as spare:
            spare.setblocking(False)
            handshake = _Handshake(spare, _pace_of_loop())
            _handshake.set(handshake)
            try:
                await self._enter(connection, source, loaded.context)
                self.counters[self.counted_as + "done"] += 1
            except OSError as error:
                # SSLError is an OSError.
                names = loaded.certificate.names if loaded.certificate is not None else ()
                asked_for = handshake.server_name
                self._refused(client_failure(error, names=names, asked_for=asked_for, words=self.words), peer)
                if isinstance(error, ssl.SSLError):
                    await _let_read(spare)

    async def _enter(self, connection: socket.socket, source: Source | None, context: ssl.SSLContext | None) -> None:
        """Give the connection to a session. Raises OSError."""
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        worked = _pace_of_loop().worked if context is not None else None
        threshold = _HandshakeProtocol(lambda: self.session(source), worked)
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
            self.welcome(threshold.session)

    async def _refuse_plain_text(self, connection: socket.socket, first: bytes, peer: str) -> None:
        """Refuse a connection without TLS. Raises OSError."""
        stranger = foreign_protocol(FrameTooLarge("", first)) if len(first) == _FIRST_BYTES else None
        protocol = stranger.protocol if stranger is not None and stranger.protocol != "TLS" else "plain text"
        if protocol == "HTTP":
            with contextlib.suppress(OSError):
                connection.send(self.answer_to_http)
        text = f"it speaks {protocol}, and this listener speaks TLS: {self.words.speak_tls}"
        self._refused(Failure("plain_text", text), peer)
        await _let_read(connection)

    def _refused(self, failure: Failure, peer: str) -> None:
        self.counters[f"{self.counted_as}failed.{failure.word}"] += 1
        if failure.word == "gone":
            # This is a load balancer's check of the port, or a client that did not wait.
            log.debug("handshake rejected", listener=self.name, client=peer, reason=failure.text)
            return
        log.warning(
            "handshake rejected",
            most_a_minute=_MOST_A_MINUTE,
            bounded_by="failure",
            failure=failure.word,
            listener=self.name,
            client=peer,
            reason=failure.text,
        )
        self.events.tell(
            "connection_refused", client=peer, listener=self.name, outcome=failure.word, reason=failure.text
        )


class _HandshakeProtocol(asyncio.BufferedProtocol, Generic[Session]):
    """The placeholder of a session during the handshake. `worked` gets the time to begin and end the session."""

    def __init__(self, make: Callable[[], Session | None], worked: Callable[[float], None] | None) -> None:
        self._make = make
        self._worked = worked
        self.session: Session | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        began = time.monotonic()
        self._begin(transport)
        if self._worked is not None:
            self._worked(_BOTH_ENDS * (time.monotonic() - began))

    def _begin(self, transport: asyncio.BaseTransport) -> None:
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


def is_among(host: str, networks: Collection[Network]) -> bool:
    """Whether the address of a socket's other end is in one of the networks; an IPv4 address may be mapped to IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 6 and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)


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
    """Let the client read the reason: closing with unread bytes sends a reset, which may overtake the reason."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(LINGER_S):
            while await asyncio.get_running_loop().sock_recv(connection, _DISCARD_BYTES):
                continue


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
