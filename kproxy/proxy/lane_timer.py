"""When what waits in lanes goes on: once its back-off is over, or the topology names another owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kproxy.proxy.context import ProxyContext
from kproxy.routing.lanes import Item, Lanes, Pause
from kproxy.routing.retry import Attempts
from kproxy.routing.topology import NO_OWNER

TIMER_STEP_S = 0.001


class LaneTimer:
    """The timer of one client connection's lanes: `wake` is called when one of them may be due."""

    def __init__(self, context: ProxyContext, lanes: Lanes, wake: Callable[[], None]) -> None:
        self._context = context
        self._topology = context.topology
        self._lanes = lanes
        self._wake = wake
        self._handle: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._closed = False

    def arm(self) -> None:
        """Lanes may have changed: see to it that the next one that is due goes on."""
        if self._closed:
            return
        self._topology.on_next_change(self._topology_changed)
        due = self._lanes.next_due()
        if due is None:
            return
        if self._handle is not None:
            # Handles are not asked for their time: uvloop's for "now" have none.
            if self._due <= due:
                return
            self._handle.cancel()
        loop = asyncio.get_running_loop()
        self._due = due
        # Timers are counted in milliseconds and may ring a part of one early, when nothing is due yet.
        self._handle = loop.call_later(max(0.0, due - self._context.clock()) + TIMER_STEP_S, self._ring)

    def pause(self, item: Item, attempts: Attempts, routed_at: int) -> Pause:
        """How long an item waits that was sent in vain at the topology's revision `routed_at`."""
        now, jitter = self._context.clock(), self._context.random.random()
        soonest = now + attempts.soonest_s(jitter)
        due = soonest if self._has_moved(item, routed_at) else now + attempts.due_s(jitter)
        return Pause(due, soonest, routed_at)

    def _ring(self) -> None:
        self._handle = None
        self._wake()

    def _topology_changed(self) -> None:
        # One change may come as many: look at them together.
        asyncio.get_running_loop().call_soon(self._follow_owners)

    def _follow_owners(self) -> None:
        """What waits out a back-off for one owner, and has another now, waits no longer."""
        if self._lanes:
            self._lanes.hasten(self._has_moved)
            self.arm()

    def _has_moved(self, item: Item, routed_at: int) -> bool:
        """Whether another owner has been told of since, one that can be sent to."""
        topic, partition_index = item.exchange.partition(item.entry)
        if self._topology.owner_revision(topic, partition_index) <= routed_at:
            return False
        return item.exchange.route(item.entry, self._topology) != NO_OWNER

    def close(self) -> None:
        """Nothing waits any more."""
        self._closed = True
        self._topology.forget(self._topology_changed)
        if self._handle is not None:
            self._handle.cancel()
