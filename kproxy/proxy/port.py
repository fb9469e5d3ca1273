"""The port that clients connect to."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from kproxy.errors import StartupError

BACKLOG = 1024


async def bind(
    factory: Callable[[], asyncio.BaseProtocol], host: str, port: int, *, shared: bool = False
) -> asyncio.Server:
    """A server that does not accept anything yet. Raises StartupError."""
    try:
        return await asyncio.get_running_loop().create_server(
            factory, host, port, backlog=BACKLOG, start_serving=False, reuse_address=True, reuse_port=shared
        )
    except OSError as error:
        raise _taken(f"{host}:{port}", error) from error


async def accept_from(server: asyncio.Server) -> None:
    """Begin to accept. Raises StartupError: another process may have bound the port too and listened first."""
    host, port, *_ = server.sockets[0].getsockname()
    try:
        await server.start_serving()
        if not all(map(_listens, server.sockets)):
            # uvloop hands such an error to nobody.
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except OSError as error:
        raise _taken(f"{host}:{port}", error) from error


def _listens(bound: socket.socket) -> bool:
    with socket.fromfd(bound.fileno(), bound.family, bound.type) as same:
        return bool(same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _taken(address: str, error: OSError) -> StartupError:
    return StartupError(
        f"cannot listen on {address} ({error.strerror or error}): choose another address with --listen, "
        "or stop what uses this one"
    )
