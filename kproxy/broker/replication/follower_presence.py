"""Detect followers that are gone by their broken connections.

That is sooner than by the end of a lease.

A process that dies breaks its connections at once, while its lease lasts for seconds. Until then leaders would wait for
it: it is in sync, and confirms nothing.

States of a follower, by broker
  unknown    it has never connected; nothing follows from that
  present    it has a connection
  broken     it has none, for less than the grace; most come back
  gone       it has none, for longer; or it has been gone and is not back for long enough

Transitions
  unknown, broken, gone -> present   it connects; from gone only after a time, see 2
  present -> broken                  its last connection ends
  broken -> gone                     the grace is over

Invariants
1. Only `gone` has consequences, and only those that the lease or the lag would have later as well.
2. A follower that was gone counts as present only once it has been connected for a time. That time doubles from the
   grace with each time that it was gone, up to `longest_s`, and starts over when it has been present for that long. So
   a follower that comes and goes changes the ISR ever more rarely.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class _Follower:
    """One follower. `back_at` is when it last stopped being gone, on the loop's clock."""

    __slots__ = ("back_at", "timer", "times_gone")

    def __init__(self) -> None:
        self.times_gone = 0
        self.back_at = float("-inf")
        self.timer: asyncio.TimerHandle | None = None


class FollowerPresence:
    """Fed by the replication listener. Times are seconds."""

    def __init__(self, grace_s: float, longest_s: float) -> None:
        self.gone: set[int] = set()
        self._subscribers: list[Callable[[], None]] = []
        self._grace_s = grace_s
        self._longest_s = longest_s
        self._followers: dict[int, _Follower] = {}

    def subscribe(self, subscriber: Callable[[], None]) -> None:
        """Call `subscriber` when `gone` has changed."""
        self._subscribers.append(subscriber)

    def connected(self, node_id: int) -> None:
        """Note that a broker's follower is authenticated."""
        follower = self._followers.setdefault(node_id, _Follower())
        self._cancel(follower)
        if node_id in self.gone:
            wait_s = min(self._grace_s * 2 ** min(follower.times_gone - 1, 16), self._longest_s)
            follower.timer = asyncio.get_running_loop().call_later(wait_s, self._is_back, node_id, follower)

    def broken(self, node_id: int) -> None:
        """Note that a follower's last connection has ended."""
        follower = self._followers[node_id]
        self._cancel(follower)
        if node_id not in self.gone:
            loop = asyncio.get_running_loop()
            follower.timer = loop.call_later(self._grace_s, self._has_gone, node_id, follower)

    def close(self) -> None:
        """Cancel all timers."""
        for follower in self._followers.values():
            self._cancel(follower)

    def _cancel(self, follower: _Follower) -> None:
        if follower.timer is not None:
            follower.timer.cancel()
            follower.timer = None

    def _has_gone(self, node_id: int, follower: _Follower) -> None:
        was_steady = asyncio.get_running_loop().time() - follower.back_at > self._longest_s
        follower.times_gone = 1 if was_steady else follower.times_gone + 1
        self.gone.add(node_id)
        self._notify()

    def _is_back(self, node_id: int, follower: _Follower) -> None:
        follower.back_at = asyncio.get_running_loop().time()
        self.gone.discard(node_id)
        self._notify()

    def _notify(self) -> None:
        for subscriber in self._subscribers:
            subscriber()
