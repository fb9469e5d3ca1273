"""Wishes to have a partition's owner looked up anew, each a task until the source has answered."""

from __future__ import annotations

import asyncio

from kproxy.proxy.context import ProxyContext


class OwnerLookups:
    """The wishes of one client connection, at most `max_open_requests`; who made them learns of it by the topology."""

    def __init__(self, context: ProxyContext) -> None:
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, topic: bytes, partition_index: int, routed_at: int) -> None:
        """Have the source look again, unless it has said something new since this was routed."""
        seen_revision = self._context.topology.owner_revision(topic, partition_index)
        if seen_revision > routed_at or len(self._tasks) >= self._context.limits.max_open_requests:
            return
        task = asyncio.ensure_future(self._refresh(topic, partition_index, seen_revision))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        # An id that the topology does not know is the source's to find.
        name = self._context.topology.name_of(topic) or topic
        await self._context.source.refresh(name, partition_index, seen_revision)

    async def close(self) -> None:
        """Take all wishes back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
