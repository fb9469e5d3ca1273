"""Restart each part of a development cluster that ends, and report it.

States of a part: etcd, each broker, the proxy
  running   the part has been ready, and its process exists
  pausing   its process has ended, or it did not become ready; it is started after the pause
  starting  it has been started and is not ready yet
  left      the part is not started again

Transitions
  running  -> pausing, left   its process ends; left with `restart` off, or after MAX_ATTEMPTS in a row
  pausing  -> starting        the pause is over
  starting -> running         it is ready
  starting -> pausing, left   it did not become ready

Invariants
1. A pause is at least twice as long as the one before, up to MAX_PAUSE_S, until the part has run for STEADY_S.
2. Each transition, except to `starting`, is reported in one line, an end or a failure with its reason.
3. A stopped part (SIGSTOP) has not ended.
4. With several replicas, a broker that failed is restarted after its lease has ended and others lead its partitions.
5. `keep` raises ChildEnded when nothing is served any more: the proxy is left, or all attempts to start etcd failed.
   Brokers may be left; the others continue to serve.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Final

from kproxy.dev.cluster import ChildEnded, DevCluster, End, Part
from kproxy.errors import StartupError

PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0
MAX_ATTEMPTS: Final = 8
STEADY_S: Final = 10.0
# Added to the TTL: etcd ends a lease a little late, and other brokers need a moment to take over.
LEASE_SLACK_S: Final = 2


class BackOff:
    """The pauses before the attempts to start a part."""

    def __init__(self) -> None:
        self._attempts = 0
        self._last_s = 0.0

    def pause_s(self, *, ran_s: float, least_s: float = PAUSE_S) -> float | None:
        """Return the pause after a run of `ran_s` seconds (0 if the part was not ready).

        None if there are no more attempts.
        """
        if ran_s >= STEADY_S:
            self._attempts, self._last_s = 0, 0.0
        self._attempts += 1
        if self._attempts > MAX_ATTEMPTS:
            return None
        self._last_s = min(max(least_s, PAUSE_S, 2 * self._last_s), max(least_s, MAX_PAUSE_S))
        return self._last_s


class Restarter:
    """Keeps a started `cluster` running; `say` is called with each line to print."""

    def __init__(self, cluster: DevCluster, say: Callable[[str], None], *, restart: bool = True) -> None:
        self._cluster = cluster
        self._say = say
        self._restart = restart

    async def keep(self) -> None:
        """Run until cancelled. Raises ChildEnded (invariant 5)."""
        keeping = [asyncio.create_task(self._keep(part), name=f"keeper of {part}") for part in self._cluster.parts]
        try:
            await asyncio.gather(*keeping)
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def _keep(self, part: Part) -> None:
        back_off = BackOff()
        while True:
            ready_at = time.monotonic()
            end = await self._cluster.ended(part)
            least_s = self._cluster.lease_ttl_s + LEASE_SLACK_S if self._others_take_over(part, end) else PAUSE_S
            pause_s = back_off.pause_s(ran_s=time.monotonic() - ready_at, least_s=least_s)
            if not self._restart or pause_s is None:
                self._leave(part, end, in_vain=self._restart)
                return
            self._say(f"{_how(part, end)} {self._meanwhile(part, end)}It is started again in {pause_s:g} s.")
            if not await self._start_again(part, back_off, pause_s, end):
                return

    async def _start_again(self, part: Part, back_off: BackOff, pause_s: float, end: End) -> bool:
        """Try to start a part; return whether it runs again before the attempts are over."""
        while True:
            await asyncio.sleep(pause_s)
            try:
                where = await self._cluster.restart(part)
            except StartupError as error:
                why = str(error).removeprefix(f"the {str(part).removeprefix('the ')} did not start: ").rstrip(".")
                following = back_off.pause_s(ran_s=0.0)
                if following is None:
                    self._say(f"{part} could not be started again: {why}.")
                    self._leave(part, end, in_vain=True)
                    return False
                pause_s = following
                self._say(f"{part} could not be started again: {why}. The next attempt is in {pause_s:g} s.")
            else:
                self._say(f"{part} is back: {where}")
                return True

    def _leave(self, part: Part, end: End, *, in_vain: bool) -> None:
        """Report that the part is not restarted. Raises ChildEnded if nothing is served without it."""
        if part.kind == "proxy" or (part.kind == "etcd" and in_vain):
            # The last lines of a process killed by SIGKILL say nothing about its end.
            raise ChildEnded(part, end if end.status != -signal.SIGKILL else end._replace(last_lines=[]))
        why = f"after {MAX_ATTEMPTS} attempts" if in_vain else "because of --no-restart"
        self._say(f"{_how(part, end)} {self._meanwhile(part, end)}It is not started again, {why}.")

    def _others_take_over(self, part: Part, end: End) -> bool:
        """Whether other brokers lead its partitions once its lease ends. A clean stop gives up the lease at once."""
        return part.kind == "broker" and end.status != 0 and self._cluster.replication_factor > 1

    def _meanwhile(self, part: Part, end: End) -> str:
        """Return the effect on the other parts, with a space after it."""
        ttl_s = self._cluster.lease_ttl_s
        if part.kind == "etcd":
            return f"Brokers and the proxy serve on without it as long as leases last, {ttl_s} s. "
        if self._others_take_over(part, end):
            return f"The others take over what it led when its lease ends, within {ttl_s} s. "
        if part.kind == "broker" and self._cluster.replication_factor == 1:
            return "What it led waits for it. "
        return "" if part.kind == "broker" else "Clients connect again. "


def _how(part: Part, end: End) -> str:
    if end.status < 0:
        return f"{part} (pid {end.pid}) was ended by {_signal_name(-end.status)}."
    said = f", its last line is: {end.last_lines[-1]}" if end.status and end.last_lines else "."
    return f"{part} (pid {end.pid}) ended with status {end.status}{said}"


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
