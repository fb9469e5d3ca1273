"""Keep an etcd lease alive, and compute how long it is certain to live.

States of `lease_keep_alive`: OPENING (no stream) -> ASKING (one keepalive unanswered) -> RESTING -> ASKING …; any
failure leads back to OPENING. It ends in LeaseLost, or when the caller cancels it.

Invariants
1. `on_renewed(sent_at, ttl_s)` names the time before the keepalive was handed to gRPC. etcd counts the TTL from a later
   moment, so the lease lives at least until sent_at + ttl_s (unless it is revoked).
2. One keepalive is in flight at a time: answers carry no number, so only one request may await an answer. If the answer
   is late, the stream is dropped together with it.
3. LeaseLost is raised only if etcd answers so (TTL 0). An unreachable etcd is asked again for ever: the caller stops at
   its own deadline.
4. The deadline of a `LeaseFence` is the send time of the last answered grant or keepalive, plus the TTL in its answer,
   minus a margin. As etcd counts from a later moment, no other process can have the lease's keys before that deadline,
   unless the lease is revoked. So the holder's ownerships end by themselves at the deadline if etcd is silent.
5. A broken fence is never valid again: everything held under it must be acquired again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from kproxy.etcd.client import EtcdClient
from kproxy.etcd.errors import EtcdError, EtcdUnavailable, LeaseLost
from kproxy.etcd.messages import rpc
from kproxy.etcd.stream import EtcdStream

Clock = Callable[[], float]

if hasattr(time, "CLOCK_BOOTTIME"):

    def lease_clock() -> float:
        """Seconds since boot, suspend included (Linux)."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:

    def lease_clock() -> float:
        """Seconds on the monotonic clock, which may not count suspend."""
        return time.monotonic()


# The share of each TTL that allows for clocks of different speeds.
MARGIN_FRACTION = 0.1


class LeaseFence:
    """The time for which one lease is certain to live.

    `claim_revision` is the revision at which the broker's key was put on it.
    """

    __slots__ = ("_broken", "_clock", "_deadline", "claim_revision", "lapses", "lease_id")

    def __init__(self, lease_id: int, clock: Clock) -> None:
        self.lease_id = lease_id
        self.claim_revision = 0
        # The number of renewals that came after the deadline.
        self.lapses = 0
        self._clock = clock
        self._deadline = float("-inf")
        self._broken = False

    def is_live(self) -> bool:
        return self._clock() < self._deadline

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease is still certain to live; 0 if it is not."""
        return max(self._deadline - self._clock(), 0.0)

    def renew(self, sent_at: float, ttl_s: int) -> None:
        """Extend the deadline: a keepalive sent at `sent_at` (seconds, this clock) was answered with `ttl_s`."""
        if not self._broken:
            self.lapses += float("-inf") < self._deadline <= self._clock()
            self._deadline = max(self._deadline, sent_at + ttl_s * (1 - MARGIN_FRACTION))

    def break_for_good(self) -> None:
        self._broken = True
        self._deadline = float("-inf")


FIRST_ANSWER_TIMEOUT_S = 2.0
REOPEN_PAUSE_S = 0.2
# With four keepalives within one TTL, three may fail without the loss of the lease.
RENEWALS_PER_TTL = 4

log = structlog.get_logger(__name__)


async def lease_keep_alive(
    client: EtcdClient, lease_id: int, *, clock: Callable[[], float], on_renewed: Callable[[float, int], None]
) -> None:
    """Renew `lease_id` until cancelled.

    Raises LeaseLost when etcd has no such lease.

    `clock` stamps the send times that `on_renewed` gets with the TTL in seconds; use one that counts suspend where that
    matters.
    """
    interval_s = FIRST_ANSWER_TIMEOUT_S
    while True:
        try:
            stream = client.open_stream("Lease", "LeaseKeepAlive")
            try:
                while True:
                    sent_at = clock()
                    ttl_s = await _ask(client, stream, lease_id, interval_s)
                    interval_s = ttl_s / RENEWALS_PER_TTL
                    on_renewed(sent_at, ttl_s)
                    await asyncio.sleep(interval_s)
            finally:
                await stream.close()
        except LeaseLost:
            raise
        except EtcdError as error:
            log.warning("lease keepalive interrupted", most_a_minute=1, lease_id=f"{lease_id:x}", reason=str(error))
        await asyncio.sleep(REOPEN_PAUSE_S)


async def _ask(client: EtcdClient, stream: EtcdStream, lease_id: int, timeout_s: float) -> int:
    """Return the TTL in etcd's answer. Raises LeaseLost, and EtcdUnavailable if no answer comes in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    await stream.write(rpc.LeaseKeepAliveRequest(ID=lease_id), timeout_s)
    response = await stream.read(max(deadline - loop.time(), 0.0))
    if response is None:
        raise EtcdUnavailable(f"etcd at {client.endpoints} did not answer a keepalive within {timeout_s:g} s.")
    if response.TTL <= 0:
        raise LeaseLost(f"etcd at {client.endpoints} has no lease {lease_id:x} any more.")
    return int(response.TTL)
