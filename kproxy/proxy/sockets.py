"""What every connection of the proxy asks of its socket."""

from __future__ import annotations

import asyncio
import socket

# After so many seconds of silence the kernel asks whether the other side is still there, then again at this interval.
IDLE_S = 60
INTERVAL_S = 10
PROBES = 6


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel find out when the other host has gone without a word: nobody else would.

    A client's place under the limit of connections, and a connection that a broker's host forgot, are given up after
    two minutes. It also keeps an idle connection in the tables of what lies between.
    """
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", PROBES)):
        # Not every system has all of them; its own times hold then.
        option = getattr(socket, name, None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
