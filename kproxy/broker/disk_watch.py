"""Detect lasting disk faults of this broker's replicas, and check whether the disk works.

States of the disk
  well      no replica is in trouble, or the last probe succeeded
  doubted   a replica has been in trouble for half of the patience, or was given up: a probe is under way
  failing   a probe has failed, or takes longer than half of the patience; probes follow until one succeeds

A replica is in trouble (`Partition.disk_trouble`) while its writes or reads fail, one flush is under way, or its log
has failed. Trouble is a fault once it has lasted for the patience (`patience_s`), and only of this replica: one bad
sector concerns one partition. Once the disk has been failing for half of the patience, all replicas have a fault.

Invariants
1. One probe runs at a time, in a thread of its own. So a disk that hangs holds one thread, and no code waits for it.
2. A look without trouble ends a replica's trouble: short troubles are no fault, however often they come.
3. A broker that has given up a partition leaves it to others for STANDS_BACK_S seconds, and while the disk is failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import structlog

from kproxy.broker.disk_threads import DiskThreads
from kproxy.broker.keys import PartitionKey
from kproxy.broker.partition import DiskTrouble, Partition

STANDS_BACK_S: Final = 10.0
LOOKS = 5
_logger = structlog.get_logger(__name__)


@dataclass(eq=False)
class DiskWatch:
    """Checks the replicas whose disk may be in trouble, which `restless` yields.

    Each call of `look` is one check; there are LOOKS in `patience_s` seconds. `probe` raises OSError if the disk
    does not work; it may hang. `on_mended` is called when a replica becomes readable or writable again.
    """

    restless: Callable[[], Iterable[Partition]]
    probe: Callable[[], None]
    patience_s: float
    on_mended: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.failure = ""
        self.interval_s = self.patience_s / LOOKS
        self._threads = DiskThreads(1, "disk-probe")
        self._troubles: dict[Partition, tuple[DiskTrouble, float]] = {}
        self._probing: asyncio.Future[None] | None = None
        self._probing_since = 0.0
        self._failing_since = 0.0
        self._given_up: dict[PartitionKey, float] = {}

    def look(self) -> None:
        """Record the troubles, and begin a probe if one is due."""
        now = asyncio.get_running_loop().time()
        before, self._troubles = self._troubles, {}
        is_mended = False
        for replica in self.restless():
            failed, trouble = replica.disk_fails, replica.disk_trouble()
            if trouble is not None:
                known = before.get(replica)
                self._troubles[replica] = known if known is not None and known[0] == trouble else (trouble, now)
            # A reopened replica may still have a failed read, which no look has seen.
            is_mended |= failed and trouble is None
        if is_mended or any(each not in self._troubles and not trouble.flush for each, (trouble, _) in before.items()):
            self.on_mended()
        self._given_up = {key: until for key, until in self._given_up.items() if until > now}
        half_s = self.patience_s / 2
        if self._probing is not None and now - self._probing_since >= half_s:
            self._fails(f"the disk does not answer for {half_s:g} s")
        is_doubted = any(now - since >= half_s for _, since in self._troubles.values())
        if self._probing is None and (is_doubted or self._given_up or self.failure):
            self._probing = asyncio.get_running_loop().run_in_executor(self._threads, self.probe)
            self._probing_since = now
            self._probing.add_done_callback(self._probed)

    def _probed(self, probe: asyncio.Future[None]) -> None:
        self._probing = None
        if probe.cancelled():
            return
        error = probe.exception()
        if error is not None:
            self._fails(str(error))
        elif self.failure:
            self.failure = ""
            _logger.warning("disk works again")

    def _fails(self, reason: str) -> None:
        if not self.failure:
            self._failing_since = asyncio.get_running_loop().time()
            _logger.error("disk probe failed", reason=reason)
        self.failure = reason

    @property
    def has_faults(self) -> bool:
        """Whether `fault_of` may find a fault in some replica."""
        return bool(self.failure or self._troubles)

    def fault_of(self, replica: Partition) -> str:
        """Return the fault of the replica's disk, or an empty string."""
        now = asyncio.get_running_loop().time()
        if self.failure and now - self._failing_since >= self.patience_s / 2:
            return self.failure
        trouble, since = self._troubles.get(replica, (None, now))
        return trouble.reason if trouble is not None and now - since >= self.patience_s else ""

    def gave_up(self, key: PartitionKey) -> None:
        """Note that the partition is given up for a disk fault."""
        self._given_up[key] = asyncio.get_running_loop().time() + STANDS_BACK_S

    def stands_back(self, key: PartitionKey) -> bool:
        """Return whether others should take this partition before this broker does."""
        return bool(self.failure) or self._given_up.get(key, 0.0) > asyncio.get_running_loop().time()

    def close(self) -> None:
        self._threads.shutdown()
