"""The admin page of a broker: `/`, `/metrics`, `/livez`, `/readyz`, and how it stands in a few lines for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kproxy.broker.metrics import BrokerCollector, FollowerState, followers_of, is_under_replicated
from kproxy.broker.partition import Partition
from kproxy.broker.standing import Standing
from kproxy.observe.exposition import render, this_process
from kproxy.observe.http_page import Readiness

# Of the partitions that are not as they should be.
MAX_LINES = 20


class BrokerPages:
    """What the page says of the broker `node_id`; `hosted` are its replicas."""

    def __init__(
        self,
        node_id: int,
        hosted: Mapping[tuple[bytes, int], Partition],
        collector: BrokerCollector,
        standing: Callable[[], Standing],
    ) -> None:
        self._node_id = node_id
        self._hosted = hosted
        self._collector = collector
        self._standing = standing
        self._process = this_process()

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        return render((*self._process, self._collector), accept)

    async def readiness(self) -> Readiness:
        problem = self._standing().problem
        return Readiness(not problem, problem or "ready")

    async def liveness(self) -> Readiness:
        return Readiness(True, "alive")

    def summary(self) -> str:
        now = self._standing()
        kept = [partition for _, partition in sorted(self._hosted.items())]
        led = [partition for partition in kept if partition.serves_reads()]
        lacking = [partition for partition in led if is_under_replicated(partition)]
        too_few = sum(not partition.replication.has_enough_in_sync for partition in led)
        ended = f"lapsed {_times(now.lease_lapses)}, lost {_times(now.lease_losses)}"
        lines = [
            f"kproxy broker {self._node_id}: {now.problem or 'ready'}",
            "",
            f"lease    {now.lease_remaining_s:.1f} s left; {ended}",
            f"leads    {len(led)} of the {len(kept)} partitions that it keeps",
            f"in sync  {len(led) - len(lacking)} of these with all replicas, {too_few} with fewer than "
            f"min.insync.replicas",
            *_lines_of(lacking),
        ]
        return "\n".join(lines)


def _lines_of(lacking: list[Partition]) -> Iterable[str]:
    for partition in lacking[:MAX_LINES]:
        replication = partition.replication
        missing = "; ".join(_missing(each) for each in followers_of(partition) if not each.is_in_sync)
        count = f"{len(replication.isr.members)} of {1 + len(replication.follower_progress())} in sync"
        yield f"         {partition.topic}/{partition.partition_index}: {count}: {missing}"
    if len(lacking) > MAX_LINES:
        yield f"         and {len(lacking) - MAX_LINES:,} more"


def _missing(follower: FollowerState) -> str:
    what = f"lacks {follower.lag_records:,} records" if follower.has_told else "does not fetch"
    return f"broker {follower.node_id} {what}, not caught up for {follower.behind_s:.0f} s"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
