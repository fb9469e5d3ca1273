"""Get and keep the broker's lease in etcd, and the fence that says how long its ownerships are certain to last.

The broker counts as live while its key is on the lease.

States
  none    no lease; the broker may own nothing
  held    the lease exists as far as is known; the fence is live until its deadline
  lost    etcd, or the watch on our own key, reports that the lease or the key is gone; the fence is broken for good

Transitions
  none -> held   `establish`: no other process has the broker's key
  held -> lost   `hold` returns: LeaseLost, or `declare_lost`
  lost -> held   `establish` again, with another lease and another fence

Invariants
1. The deadline is the send time of the last answered keepalive, plus the TTL in its answer, minus a margin. etcd counts
   from a later moment, so no other broker can hold our keys before the deadline. Without answers from etcd our
   ownerships end then.
2. A broken fence is never live again: everything owned under it must be taken again.
3. The broker's key is created only if it is absent: of two processes with one id, only one owns partitions. A new
   process does not inherit its predecessor's keys; it waits until they are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kproxy.broker.keys import BrokerValue, Keys, encode_value
from kproxy.etcd import EtcdClient, EtcdError, LeaseLost, key_absent, put_op
from kproxy.etcd.lease import Clock, LeaseFence, lease_keep_alive

CLAIM_PAUSE_S = 0.2
_logger = structlog.get_logger(__name__)


class IdInUse(Exception):
    """Another process holds the broker's key; the message is the key's value."""


class BrokerLease:
    """One broker's lease, granted and claimed again whenever it is lost."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        broker: BrokerValue,
        *,
        ttl_s: int,
        clock: Clock,
        on_claimed: Callable[[str, bytes, LeaseFence], None],
    ) -> None:
        """`on_claimed` gets the key, its value and the fence of each claim, before other code can see the claim."""
        self._client = client
        self._key = keys.broker(broker.node_id)
        self._value = encode_value(broker)
        self._ttl_s = ttl_s
        self._clock = clock
        self._on_claimed = on_claimed
        self._lost: asyncio.Event = asyncio.Event()
        self._lost_reason = ""
        self._lease_id = 0
        self.fence: LeaseFence | None = None

    async def establish(self, patience_s: float) -> LeaseFence:
        """Get a new lease with the broker's key on it.

        Wait up to `patience_s` seconds for a predecessor's key to go. Raises IdInUse if it stays, EtcdError.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            holder = await self._client.get(self._key)
            if holder is None:
                fence = await self._claim()
                if fence is not None:
                    self._lost.clear()
                    self.fence = fence
                    self._lease_id = fence.lease_id
                    return fence
            elif loop.time() >= deadline:
                raise IdInUse(holder.value.decode(errors="replace"))
            await asyncio.sleep(CLAIM_PAUSE_S)

    async def _claim(self) -> LeaseFence | None:
        sent_at = self._clock()
        lease = await self._client.lease_grant(self._ttl_s)
        fence = LeaseFence(lease.lease_id, self._clock)
        fence.renew(sent_at, lease.ttl_s)
        claimed = False
        try:
            put = put_op(self._key, self._value, lease.lease_id)
            result = await self._client.txn([key_absent(self._key)], [put])
            claimed = result.succeeded
        finally:
            if not claimed:
                # Undo the transaction, whatever its outcome.
                await self._client.lease_revoke(lease.lease_id)
        if not claimed:
            return None
        fence.claim_revision = result.revision
        self._on_claimed(self._key, self._value, fence)
        return fence

    async def hold(self) -> str:
        """Keep the lease alive until it is lost; return the reason. Then the fence is already broken."""
        fence = self.fence
        if fence is None:
            return "there is no lease"
        keeper = asyncio.create_task(
            lease_keep_alive(self._client, fence.lease_id, clock=self._clock, on_renewed=fence.renew)
        )
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait((keeper, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            fence.break_for_good()
            self.fence = None
            for task in (keeper, lost):
                task.cancel()
            outcome = await asyncio.gather(keeper, lost, return_exceptions=True)
        if isinstance(outcome[0], LeaseLost):
            self._lease_id = 0
            return str(outcome[0])
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        # Our key is gone; the lease may still exist, and must hold no key.
        await self.revoke()
        return self._lost_reason

    def declare_lost(self, reason: str) -> None:
        """Break the fence at once, because the lease or its key is known to be gone."""
        if self.fence is not None:
            self.fence.break_for_good()
        self._lost_reason = reason
        self._lost.set()

    async def revoke(self) -> None:
        """Revoke the lease and every key on it; other brokers need not wait.

        If etcd does not answer, this is only logged.
        """
        if self.fence is not None:
            self.fence.break_for_good()
            self.fence = None
        lease_id, self._lease_id = self._lease_id, 0
        if lease_id:
            try:
                await self._client.lease_revoke(lease_id)
            except EtcdError as error:
                _logger.warning("lease not revoked", reason=str(error))
