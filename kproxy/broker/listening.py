"""Binding a listener's port before anything is served on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kproxy.errors import StartupError

BACKLOG = 1024


async def bind(protocol: Callable[[], asyncio.BaseProtocol], address: tuple[str, int], flag: str) -> asyncio.Server:
    """A server that does not accept yet; port 0 takes any free one. Raises StartupError, which names `flag`."""
    host, port = address
    loop = asyncio.get_running_loop()
    try:
        listener = await loop.create_server(protocol, host, port, backlog=BACKLOG, start_serving=False)
        if port == 0 and len(listener.sockets) > 1:
            # A name with several addresses: they shall all have the port that the first one got.
            port = bound_port(listener)
            listener.close()
            return await loop.create_server(protocol, host, port, backlog=BACKLOG, start_serving=False)
        return listener
    except OSError as error:
        raise StartupError(f"cannot listen on {host}:{port} ({error.strerror}): choose another {flag}") from error


def bound_port(listener: asyncio.Server) -> int:
    """The port that was asked for, or that port 0 came to be."""
    return int(listener.sockets[0].getsockname()[1])
