"""Bind listening ports, set TCP options of connections and read TCP's state of them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from kproxy.address import Address
from kproxy.errors import StartupError

BACKLOG = 1024
_OTHER_ADDRESS = "another address with --listen, or stop what uses this one"


async def bind(
    factory: Callable[[], asyncio.BaseProtocol],
    host: str,
    port: int,
    *,
    shared: bool = False,
    only_ipv6: bool = False,
    choose: str = _OTHER_ADDRESS,
) -> asyncio.Server:
    """Bind a server that does not accept yet; port 0 means any free port.

    Raises StartupError. All addresses of a host name get the same port. So do IPv6 and IPv4 for `::`, as in Java's
    brokers, unless `only_ipv6`. `shared` lets other processes bind the same port (SO_REUSEPORT). `choose` ends the
    error's sentence: what the user should choose instead.
    """
    # Each family has its own socket: a shared one would give IPv4 clients IPv6 addresses, which no rule names.
    hosts = host if host != "::" or only_ipv6 else ("::", "0.0.0.0")  # noqa: S104 - the user says so

    async def create(port: int) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            factory, hosts, port, backlog=BACKLOG, start_serving=False, reuse_port=shared
        )

    try:
        server = await create(port)
        if port == 0 and len(server.sockets) > 1:
            port = bound_port(server)
            server.close()
            return await create(port)
        return server
    except OSError as error:
        raise _not_bound(Address(host, port), error, choose) from error


def bound_port(server: asyncio.Server) -> int:
    """Return the requested port, or the port that the system chose for 0."""
    return int(server.sockets[0].getsockname()[1])


async def accept_from(server: asyncio.Server) -> None:
    """Begin to accept. Raises StartupError if another process has bound the same port and listened first."""
    host, port, *_ = server.sockets[0].getsockname()
    try:
        await server.start_serving()
        if not all(map(_listens, server.sockets)):
            # uvloop does not report such an error.
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except OSError as error:
        raise _not_bound(Address(host, port), error, _OTHER_ADDRESS) from error


def _listens(bound: socket.socket) -> bool:
    with socket.fromfd(bound.fileno(), bound.family, bound.type) as same:
        return bool(same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _not_bound(address: Address, error: OSError, choose: str) -> StartupError:
    return StartupError(f"cannot listen on {address} ({error.strerror or error}): choose {choose}")


# After this many seconds of silence the kernel sends a keepalive probe, and then one per interval of this length.
IDLE_S = 60
INTERVAL_S = 10
PROBES = 6
# The same while an answer is awaited. A live host acknowledges probes even if its processes hang.
WATCHED_IDLE_S = 1
WATCHED_INTERVAL_S = 1
WATCHED_PROBES = 2
# Linux' struct tcp_info: state, ca_state, retransmits, probes, …; and tcpi_unacked, tcpi_last_ack_recv.
_TCP_INFO: Final = struct.Struct("=2xBB4x 4x4x4x4xI 4x4x4x4x 4x4x4xI")
_DISCARD: Final = struct.pack("ii", 1, 0)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel detect that the other host has disappeared without closing the connection.

    After two minutes this frees a client's place under the limit of connections, and closes a connection that a
    broker's host no longer knows. It also keeps an idle connection in the tables of firewalls and load balancers.
    """
    sock = _tcp_socket(transport)
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _set_times(sock, IDLE_S, INTERVAL_S, PROBES)


def watch_path(transport: asyncio.BaseTransport, *, closely: bool) -> None:
    """Have the kernel detect a lost host within seconds (`closely`) or minutes; call `keep_alive` first.

    The kernel probes only while nothing is unacknowledged; otherwise `delivery` shows the loss.
    """
    sock = _tcp_socket(transport)
    if sock is None:
        return
    times = (WATCHED_IDLE_S, WATCHED_INTERVAL_S, WATCHED_PROBES) if closely else (IDLE_S, INTERVAL_S, PROBES)
    # OSError: the other side has ended the connection, and the event loop is about to report it.
    with contextlib.suppress(OSError):
        _set_times(sock, *times)


class Delivery(NamedTuple):
    """TCP's view of a connection to the other host.

    `unacknowledged`: segments sent and not acknowledged. `retransmits`: unanswered retransmissions of the first of
    them, at intervals that double. `probes`: unanswered probes of whether the other side is there, or has room again.
    `silent_s`: seconds since the other host last acknowledged anything.
    """

    unacknowledged: int
    retransmits: int
    probes: int
    silent_s: float


def delivery(transport: asyncio.BaseTransport) -> Delivery | None:
    """The delivery state of a connection; None if the system does not report it."""
    sock = _tcp_socket(transport) if sys.platform == "linux" else None
    if sock is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        # As in `watch_path`, the other side has ended the connection.
        return None
    retransmits, probes, unacknowledged, silent_ms = _TCP_INFO.unpack(info)
    return Delivery(unacknowledged, retransmits, probes, silent_ms / 1000)


def discard_at_close(transport: asyncio.BaseTransport) -> None:
    """Have the kernel discard unsent data when the connection is closed."""
    sock = _tcp_socket(transport)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DISCARD)


def _tcp_socket(transport: asyncio.BaseTransport) -> socket.socket | None:
    """The socket; None if it is closed or not TCP."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.fileno() < 0:
        return None
    return sock


def _set_times(sock: socket.socket, idle_s: int, interval_s: int, probes: int) -> None:
    # A system that lacks one of the options uses its default for it.
    for name, value in (("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", interval_s), ("TCP_KEEPCNT", probes)):
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
