"""A worker process: a proxy that shares its port and reports to its supervisor.

Invariants
1. It prints nothing on stdout: that is the supervisor's.
2. Its admin page is on a unix socket in its supervisor's private directory. It is there until the worker has drained.
"""

from __future__ import annotations

import socket
from pathlib import Path

from kproxy.config import ProxyConfig
from kproxy.errors import StartupError
from kproxy.observe.admin import AdminPage
from kproxy.proxy.front import OwnFront, OwnPages
from kproxy.proxy.run import run_proxy
from kproxy.workers.channel import (
    Channel,
    ChannelClosed,
    Failed,
    Ready,
    Waits,
    encode,
    next_assignment,
)

# Less than a supervisor waits for a page.
READINESS_S = 1.5
# The status of a command that cannot start as asked.
NOT_STARTED = 2


async def run_worker(channel_fd: int, page: Path | None) -> int:
    """Serve as the supervisor at the other end of the channel says, with an admin page at `page`.

    Return the exit status.
    """
    channel = await Channel.over(socket.socket(fileno=channel_fd))
    try:
        assignment = await next_assignment(channel)
        await run_proxy(assignment.config, WorkerFront(assignment.config, channel, assignment.number, page))
    except ChannelClosed:
        # The supervisor has gone before it sent the assignment: nobody reads a message.
        return NOT_STARTED
    except StartupError as error:
        channel.send(encode(Failed(str(error))))
        return NOT_STARTED
    finally:
        await channel.close()
    return 0


class WorkerFront(OwnFront):
    """Reports to the supervisor."""

    def __init__(self, config: ProxyConfig, channel: Channel, number: int, page: Path | None) -> None:
        super().__init__(config)
        self.worker = number
        self._channel = channel
        self._page = page

    async def open(self, pages: OwnPages) -> None:
        pages.readiness_s = READINESS_S
        if self._page is not None:
            self._admin = AdminPage(pages, self._replicas.page)
            await self._admin.start_unix(self._page)

    def waits(self, sentence: str) -> None:
        self._channel.send(encode(Waits(sentence)))

    def ready(self, kafka: str, source: str) -> None:
        self._channel.send(encode(Ready(source)))

    def stops(self) -> None:
        """Do nothing: the supervisor asked for the stop, and reports it for all."""
