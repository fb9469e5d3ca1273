"""This process among those that hold claims: its lease, its entry, and what it confirms.

States
  out      no lease that is certain to live: no claim of this process counts
  in       the entry stands on our lease, and every claim of this process stands on that lease as well

Transitions
  out -> in    a lease is granted and the entry put on it
  in  -> out   the lease is not certain to live any more (its fence: silence of etcd does that too), or etcd does not
               know it, or the entry was deleted; `on_lost` is told. A new lease is asked for, under which nothing is
               owned.

Invariants
1. `on_lost` is told before anybody else can have what stood on the lease: the deadline lies before the lease's end. A
   process that was stopped meanwhile finds the fence dead (`is_live`) whatever it looks at first.
2. What is published only grows in `seen`, on one lease, and is the newest when it is sent; one put is under way at a
   time.
3. The name of a member is its lease's: it is never used again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from kproxy.claims.keys import MemberValue, OwnKeys, encode_value
from kproxy.etcd import EtcdClient, EtcdError, LeaseLost
from kproxy.etcd.lease import Clock, LeaseFence

RETRY_PAUSE_S = 0.5
# How often the fence is looked at: it has to be found dead well within what it keeps back of the TTL.
LOOKS_PER_TTL = 40
# A process that ends does not wait longer for etcd: its lease ends by itself.
REVOKE_TIMEOUT_S = 2.0

log = structlog.get_logger(__name__)


class OwnMember:
    """Keeps this process a member. `run` is one coroutine that the caller owns; it revokes the lease when cancelled.

    `ttl_s`: the lease's TTL in seconds, of which etcd may grant more. `state` is asked for what to publish: the
    revision up to which claims were acted upon, and the partitions that are not settled.
    """

    def __init__(
        self,
        client: EtcdClient,
        keys: OwnKeys,
        host: str,
        port: int,
        *,
        ttl_s: int,
        clock: Clock,
        writer_groups: Mapping[str, str],
        state: Callable[[], tuple[int, list[tuple[str, int]]]],
        on_entered: Callable[[], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._client = client
        self._keys = keys
        self._address = (host, port)
        self._ttl_s = ttl_s
        self._clock = clock
        self._writer_groups = dict(writer_groups)
        self._state = state
        self._on_entered = on_entered
        self._on_lost = on_lost
        self._fence: LeaseFence | None = None
        self._dirty = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def name(self) -> str:
        """Under which the claims of now stand; empty while there is none."""
        return "" if self._fence is None else _name(self._fence)

    @property
    def lease_id(self) -> int:
        return 0 if self._fence is None else self._fence.lease_id

    def is_live(self) -> bool:
        """Whether what stands on the lease is certain to be ours."""
        return self._fence is not None and self._fence.is_live()

    def publish(self) -> None:
        """What `state` says has changed."""
        self._dirty.set()

    def entry_gone(self, name: str) -> None:
        """Somebody deleted a member's entry."""
        if name == self.name:
            self._ended.set()

    async def run(self) -> None:
        """Be a member until cancelled."""
        try:
            while True:
                try:
                    await self._enter()
                    await self._stay()
                except EtcdError as error:
                    log.warning("own_not_registered", reason=str(error))
                await self._leave()
                await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            await self._leave()

    async def _enter(self) -> None:
        sent_at = self._clock()
        lease = await self._client.lease_grant(self._ttl_s)
        fence = LeaseFence(lease.lease_id, self._clock)
        fence.renew(sent_at, lease.ttl_s)
        self._ended.clear()
        self._fence = fence
        await self._put(fence)
        self._on_entered()

    async def _put(self, fence: LeaseFence) -> None:
        seen, unsettled = self._state()
        value = encode_value(MemberValue(*self._address, seen, unsettled, self._writer_groups))
        await self._client.put(self._keys.member(_name(fence)), value, lease_id=fence.lease_id)

    async def _stay(self) -> None:
        """Until the lease is not certain to live. Raises EtcdError where it is not known why."""
        fence = self._fence
        if fence is None:
            return
        keeper = asyncio.create_task(
            self._client.lease_keep_alive(fence.lease_id, clock=self._clock, on_renewed=fence.renew)
        )
        tasks = [keeper, *map(asyncio.create_task, (self._watch(fence), self._publish_all(fence), self._ended.wait()))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before anything that may take time.
            self._give_up("its lease in etcd has ended")
            for task in tasks:
                task.cancel()
            outcome = await asyncio.gather(*tasks, return_exceptions=True)
        for each in outcome:
            if isinstance(each, Exception) and not isinstance(each, LeaseLost):
                raise each

    async def _watch(self, fence: LeaseFence) -> None:
        while fence.is_live():  # noqa: ASYNC110 - nothing happens at the deadline: time passes it
            await asyncio.sleep(self._ttl_s / LOOKS_PER_TTL)

    async def _publish_all(self, fence: LeaseFence) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._put(fence)
            except LeaseLost:
                raise
            except EtcdError as error:
                log.warning("own_not_confirmed", reason=str(error))
                self._dirty.set()
                await asyncio.sleep(RETRY_PAUSE_S)

    def _give_up(self, reason: str) -> None:
        """Nothing counts any more that stands on the lease."""
        if self._fence is not None:
            self._fence.break_for_good()
            self._on_lost(reason)

    async def _leave(self) -> None:
        """First nothing is held any more, then others are told what is left unsettled, then the lease ends."""
        self._give_up("the proxy has no lease in etcd")
        fence, self._fence = self._fence, None
        if fence is None:
            return
        try:
            async with asyncio.timeout(REVOKE_TIMEOUT_S):
                if self._state()[1]:
                    await self._put(fence)
                await self._client.lease_revoke(fence.lease_id)
        except (EtcdError, TimeoutError) as error:
            log.warning("own_lease_not_revoked", reason=str(error) or "no answer in time")


def _name(fence: LeaseFence) -> str:
    return f"{fence.lease_id:x}"
