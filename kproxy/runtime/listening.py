"""Bind a listening port, and accept on it later."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

from kproxy.errors import StartupError

BACKLOG = 1024
_OTHER_ADDRESS = "another address with --listen, or stop what uses this one"


async def bind(
    factory: Callable[[], asyncio.BaseProtocol],
    host: str,
    port: int,
    *,
    shared: bool = False,
    choose: str = _OTHER_ADDRESS,
) -> asyncio.Server:
    """Bind a server that does not accept yet; port 0 takes any free one.

    Raises StartupError. A host name with several addresses gets one port on all of them. `shared` lets other processes
    bind the same port (SO_REUSEPORT). `choose` ends the error's sentence: what the user should choose instead.
    """

    async def create(port: int) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(
            factory, host, port, backlog=BACKLOG, start_serving=False, reuse_port=shared
        )

    try:
        server = await create(port)
        if port == 0 and len(server.sockets) > 1:
            port = bound_port(server)
            server.close()
            return await create(port)
        return server
    except OSError as error:
        raise _not_bound(f"{host}:{port}", error, choose) from error


def bound_port(server: asyncio.Server) -> int:
    """Return the port asked for, or the one that port 0 became."""
    return int(server.sockets[0].getsockname()[1])


async def accept_from(server: asyncio.Server) -> None:
    """Begin to accept. Raises StartupError: another process may have bound the port too and listened first."""
    host, port, *_ = server.sockets[0].getsockname()
    try:
        await server.start_serving()
        if not all(map(_listens, server.sockets)):
            # uvloop reports such an error to nobody.
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    except OSError as error:
        raise _not_bound(f"{host}:{port}", error, _OTHER_ADDRESS) from error


def _listens(bound: socket.socket) -> bool:
    with socket.fromfd(bound.fileno(), bound.family, bound.type) as same:
        return bool(same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _not_bound(address: str, error: OSError, choose: str) -> StartupError:
    return StartupError(f"cannot listen on {address} ({error.strerror or error}): choose {choose}")
