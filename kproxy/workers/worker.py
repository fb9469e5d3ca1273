"""Run a worker process: a proxy that shares its port and reports to its supervisor.

Invariants
1. It prints nothing on stdout, which belongs to the supervisor.
2. Its admin page is on a unix socket in the supervisor's private directory, and stays until the worker has drained.
3. Shares are in force before the supervisor is told so. No report is sent while an earlier one is unread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kproxy.config import ProxyConfig
from kproxy.errors import StartupError
from kproxy.observe.http_page import HttpPage
from kproxy.observe.logging import set_level
from kproxy.proxy.admission import OpenConnections
from kproxy.proxy.process_host import AdminSite, OwnPages, ProcessHost
from kproxy.proxy.reload import Read, ReloadStatus
from kproxy.proxy.run import run_proxy
from kproxy.runtime.tasks import cancel
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.quotas import Accounts
from kproxy.workers.channel import (
    Applied,
    Assignment,
    Channel,
    ChannelClosed,
    Failed,
    Ready,
    Reload,
    Usage,
    Waits,
    encode,
    next_assignment,
    next_order,
    unpickled,
)
from kproxy.workers.shares import MOST_CHANGES, ROUND_S, Shares

# Shorter than a supervisor's wait for a page.
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
        set_level(assignment.config.log_level)
        await run_proxy(assignment.config, WorkerHost(assignment, channel, page))
    except ChannelClosed:
        # The supervisor ended before it sent the assignment: nobody reads a message.
        return NOT_STARTED
    except StartupError as error:
        channel.send(encode(Failed(str(error))))
        return NOT_STARTED
    finally:
        await channel.close()
    return 0


class WorkerHost(ProcessHost):
    """Reports to the supervisor."""

    def __init__(self, assignment: Assignment, channel: Channel, page: Path | None) -> None:
        # The supervisor, which shows the replicas, reads them itself.
        super().__init__(dataclasses.replace(assignment.config, etcd=()))
        self.worker = assignment.number
        self._parts = assignment.parts
        self._channel = channel
        self._page = page
        self._config = b""
        self._handed = asyncio.Event()

    async def open(self, pages: OwnPages, site: AdminSite | None) -> None:
        pages.readiness_s = READINESS_S
        if self._page is not None:
            self._admin = HttpPage(pages, pages.routes())
            await self._admin.start_unix(self._page)

    def waits(self, sentence: str) -> None:
        self._channel.send(encode(Waits(sentence)))

    def share(self, accounts: Accounts, connections: OpenConnections) -> asyncio.Task[None] | None:
        accounts.set_parts(self._parts, time.monotonic())
        return asyncio.create_task(self._report(accounts, connections), name="shares of rates")

    async def _report(self, accounts: Accounts, connections: OpenConnections) -> None:
        """Report use every ROUND_S, and follow the supervisor, until it closes the channel. Raises ChannelMisused."""
        following = asyncio.create_task(self._follow(accounts, connections))
        last = Usage([], {})
        try:
            while not following.done():
                await asyncio.wait((following,), timeout=ROUND_S)
                usage = Usage(accounts.uses(time.monotonic(), MOST_CHANGES), connections.counts(MOST_CHANGES))
                if usage != last and not self._channel.is_behind:
                    self._channel.send(encode(usage))
                    last = usage
            following.result()
        finally:
            await cancel(following)

    async def _follow(self, accounts: Accounts, connections: OpenConnections) -> None:
        """Apply the shares that the supervisor sends, and hand over its configurations."""
        try:
            while True:
                match await next_order(self._channel):
                    case Shares(number, parts, elsewhere):
                        accounts.set_parts(parts, time.monotonic())
                        connections.elsewhere = elsewhere
                        self._channel.send(encode(Applied(number)))
                    case Reload(config):
                        self._config = config
                        self._handed.set()
        except ChannelClosed:
            # The supervisor has ended, and this process will soon be ended.
            return

    def configurations(self, hangup: asyncio.Event) -> tuple[asyncio.Event, Read]:
        # The supervisor reads the file, once for all workers.
        return self._handed, lambda _: self._take()

    def _take(self) -> tuple[ProxyConfig, Sequence[str]]:
        if not self._config:
            raise StartupError("")
        return unpickled(self._config, ProxyConfig), ()

    def status(self, counters: Counter[str], events: SecurityEvents) -> ReloadStatus:
        return _WorkerStatus(Counter(), NO_EVENTS)

    def ready(self, kafka: str, source: str) -> None:
        self._channel.send(encode(Ready(source)))

    def stops(self) -> None:
        """Do nothing, as the supervisor asked for the stop, and reports it for all workers."""


class _WorkerStatus(ReloadStatus):
    """Reports only a configuration that this worker cannot apply; the supervisor reports success and refused files."""

    def tell(self, reason: str, changed: Sequence[str], restart: Sequence[str]) -> None:
        if reason:
            super().tell(reason, changed, restart)
