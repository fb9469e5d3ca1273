"""The port that clients connect to."""

from __future__ import annotations

import asyncio
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
        raise StartupError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): choose another address with --listen, "
            "or stop what uses this one"
        ) from error
