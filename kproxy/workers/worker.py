"""A worker process: a proxy that shares its port and reports to its supervisor.

Invariants
1. It prints nothing on stdout, which belongs to the supervisor.
2. Its admin page is on a unix socket in the supervisor's private directory, and stays until the worker has drained.
3. Shares are in force before the supervisor learns of it. No report follows one that is still unread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kproxy.errors import StartupError
from kproxy.observe.page import AdminPage
from kproxy.proxy.admission import OpenConnections
from kproxy.proxy.process_host import AdminSite, OwnPages, ProcessHost
from kproxy.proxy.run import run_proxy
from kproxy.runtime.tasks import cancel
from kproxy.security.quotas import Accounts
from kproxy.workers.channel import (
    Applied,
    Assignment,
    Channel,
    ChannelClosed,
    Failed,
    Ready,
    Usage,
    Waits,
    encode,
    next_assignment,
    next_shares,
)
from kproxy.workers.shares import MOST_CHANGES, ROUND_S

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
        await run_proxy(assignment.config, WorkerHost(assignment, channel, page))
    except ChannelClosed:
        # The supervisor has gone before it sent the assignment: nobody reads a message.
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
        self._counts_use = assignment.config.counts_use
        self._parts = assignment.parts
        self._channel = channel
        self._page = page

    async def open(self, pages: OwnPages, site: AdminSite | None) -> None:
        pages.readiness_s = READINESS_S
        if self._page is not None:
            self._admin = AdminPage(pages, self._replicas)
            await self._admin.start_unix(self._page)

    def waits(self, sentence: str) -> None:
        self._channel.send(encode(Waits(sentence)))

    def share(self, accounts: Accounts, connections: OpenConnections) -> asyncio.Task[None] | None:
        if not self._counts_use:
            return None
        accounts.set_parts(self._parts, time.monotonic())
        return asyncio.create_task(
            keep_shares(self._channel, accounts, connections, time.monotonic), name="shares of rates"
        )

    def ready(self, kafka: str, source: str) -> None:
        self._channel.send(encode(Ready(source)))

    def stops(self) -> None:
        """Do nothing, as the supervisor asked for the stop, and reports it for all workers."""


async def keep_shares(
    channel: Channel, accounts: Accounts, connections: OpenConnections, clock: Callable[[], float]
) -> None:
    """Report use every ROUND_S, and apply the shares that the supervisor sends, until it has gone.

    Raises ChannelMisused.
    """
    applying = asyncio.create_task(_apply_shares(channel, accounts, connections, clock))
    last = Usage([], {})
    try:
        while not applying.done():
            await asyncio.wait((applying,), timeout=ROUND_S)
            usage = Usage(accounts.uses(clock(), MOST_CHANGES), connections.counts(MOST_CHANGES))
            if usage != last and not channel.is_behind:
                channel.send(encode(usage))
                last = usage
        applying.result()
    finally:
        await cancel(applying)


async def _apply_shares(
    channel: Channel, accounts: Accounts, connections: OpenConnections, clock: Callable[[], float]
) -> None:
    try:
        while True:
            shares = await next_shares(channel)
            accounts.set_parts(shares.parts, clock())
            connections.elsewhere = shares.elsewhere
            channel.send(encode(Applied(shares.number)))
    except ChannelClosed:
        # The supervisor has gone, and this process will soon be ended.
        return
