"""The admin page of a broker: `/`, `/metrics`, `/livez`, `/readyz`; `/` is a short summary for people."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from kproxy.broker.cluster import ClusterView
from kproxy.broker.metrics import BrokerCollector, BrokerStatus, FollowerState, ReplicaState, counts_of, states_of
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.replication.isr_keeper import IsrKeeper
from kproxy.observe.exposition import render, this_process
from kproxy.observe.http_page import Readiness

# The most under-replicated partitions that the summary lists.
MAX_LINES = 20


class BrokerPages:
    """The pages of the broker `node_id`."""

    def __init__(
        self,
        node_id: int,
        view: ClusterView,
        replica_manager: ReplicaManager,
        isr_keeper: IsrKeeper,
        status: Callable[[], BrokerStatus],
    ) -> None:
        self._node_id = node_id
        self._view = view
        self._replica_manager = replica_manager
        self._isr_keeper = isr_keeper
        self._status = status
        self._process = this_process()
        # A page of many partitions takes some tenths of a second of CPU time.
        self._page_lock = asyncio.Lock()

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        async with self._page_lock:
            counts = await counts_of(self._node_id, self._view, self._replica_manager, self._isr_keeper)
            collector = BrokerCollector(self._status(), counts, await states_of(self._replica_manager.hosted))
            return await asyncio.to_thread(render, (*self._process, collector), accept)

    async def readiness(self) -> Readiness:
        problem = self._status().problem
        return Readiness(not problem, problem or "ready")

    async def liveness(self) -> Readiness:
        return Readiness(True, "alive")

    async def summary(self) -> str:
        states = await states_of(self._replica_manager.hosted)
        led = [state for state in states if state.is_leader]
        lacking = [state for state in led if state.is_under_replicated]
        refusing = sum(state.is_under_min_isr for state in led)
        now = self._status()
        ended = f"lapsed {_times(now.lease_lapses)}, lost {_times(now.lease_losses)}"
        lines = [
            f"kproxy broker {self._node_id}: {now.problem or 'ready'}",
            "",
            f"lease    {now.lease_remaining_s:.1f} s left; {ended}",
            f"leads    {len(led)} of the {len(states)} partitions that it keeps",
            f"whole    {len(led) - len(lacking)} of these have all replicas in sync; {refusing} refuse acks=all",
            *_lines_of(lacking),
        ]
        return "\n".join(lines)


def _lines_of(lacking: Sequence[ReplicaState]) -> Iterable[str]:
    for state in lacking[:MAX_LINES]:
        missing = "; ".join(_missing(follower) for follower in state.followers if not follower.is_in_sync)
        count = f"{state.isr_size} of {state.replicas} in sync"
        yield f"         {state.topic}/{state.partition_index}: {count}: {missing}"
    if len(lacking) > MAX_LINES:
        yield f"         and {len(lacking) - MAX_LINES:,} more"


def _missing(follower: FollowerState) -> str:
    what = f"lacks {follower.lag_records:,} records" if follower.has_told else "does not fetch"
    return f"broker {follower.node_id} {what}, not caught up for {follower.behind_s:.0f} s"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
