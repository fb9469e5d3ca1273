"""Keep this process a member: its lease, its entry, its published state, and the mark that members leave.

    {prefix}/kproxy/own-at-work   the mark, on no lease: it outlives its writers

States
  out      no lease that is certain to live: no claim of this process counts
  in       the entry stands on this process's lease, and so does every claim of this process

Transitions
  out -> in    a lease is granted and the entry put on it
  in  -> out   the lease is not certain to live any more (its fence breaks; silence of etcd does that too), or etcd does
               not know the lease, or the entry was deleted. `on_lost` is called. A new lease is asked for, under which
               nothing is owned.

Invariants
1. `on_lost` is called before anybody else can get claims that stood on the lease: the deadline lies before the lease's
   end. A process that was stopped meanwhile finds the fence dead (`is_live`) at its first check, wherever that is.
2. Of one lease, published values of `seen` only grow, and each put sends the newest; one put is under way at a time.
3. The name of a member is its lease's, and is never used again.
4. The mark stands before the first claim is granted that no broker fences, and while the process that granted it lives.
5. Only a process that ends in order removes the mark, as the last one and with nothing in flight. The first process
   that finds it waits for everything, for as long as for a process that it saw die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.keys import MemberValue, OwnKeys, encode_value
from kproxy.claims.table import OwnTable
from kproxy.etcd import EtcdClient, EtcdError, LeaseLost, delete_op, mod_revision_is, prefix_unchanged_since
from kproxy.etcd.lease import Clock, LeaseFence, lease_keep_alive

RETRY_PAUSE_S: Final = 0.5
# How often the fence is checked: it must be found dead well within the margin that it keeps of the TTL.
CHECKS_PER_TTL: Final = 40
# The longest wait of an ending process for etcd: its lease ends by itself. A mark that stays costs the next process one
# unnecessary wait of `unsettled_s`.
END_TIMEOUT_S: Final = 2.0

log = structlog.get_logger(__name__)


class OwnMember:
    """Keeps this process a member. `run` is one coroutine that the caller runs; it revokes the lease when cancelled.

    `ttl_s`: the lease's TTL in seconds; etcd may grant more. `state` returns the state to publish: the revision up to
    which claims were acted upon, and the unsettled partitions.
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
        """The name under which this process claims now; empty while it has no lease."""
        return "" if self._fence is None else _name(self._fence)

    @property
    def lease_id(self) -> int:
        return 0 if self._fence is None else self._fence.lease_id

    def is_live(self) -> bool:
        """Whether the lease is certain to live, and so everything that stands on it."""
        return self._fence is not None and self._fence.is_live()

    def publish(self) -> None:
        """Publish `state` anew, because it has changed."""
        self._dirty.set()

    def entry_gone(self, name: str) -> None:
        """Note that a member's entry was deleted."""
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
                    log.warning("member not registered", reason=str(error))
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
        """Wait until the lease is not certain to live. Raises EtcdError where the reason is not known."""
        fence = self._fence
        if fence is None:
            return
        keeper = asyncio.create_task(
            lease_keep_alive(self._client, fence.lease_id, clock=self._clock, on_renewed=fence.renew)
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
        while fence.is_live():  # noqa: ASYNC110 - no event marks the deadline: time passes it
            await asyncio.sleep(self._ttl_s / CHECKS_PER_TTL)

    async def _publish_all(self, fence: LeaseFence) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            try:
                await self._put(fence)
            except LeaseLost:
                raise
            except EtcdError as error:
                log.warning("claims not confirmed", reason=str(error))
                self._dirty.set()
                await asyncio.sleep(RETRY_PAUSE_S)

    def _give_up(self, reason: str) -> None:
        """Break the fence: nothing that stands on the lease counts any more."""
        if self._fence is not None:
            self._fence.break_for_good()
            self._on_lost(reason)

    async def _leave(self) -> None:
        """Give everything up, then publish the places left unsettled, then revoke the lease."""
        self._give_up("the proxy has no lease in etcd")
        fence, self._fence = self._fence, None
        if fence is None:
            return
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if self._state()[1]:
                    await self._put(fence)
                await self._client.lease_revoke(fence.lease_id)
        except (EtcdError, TimeoutError) as error:
            log.warning("member lease not revoked", reason=str(error) or "no answer in time")


def _name(fence: LeaseFence) -> str:
    return f"{fence.lease_id:x}"


class AtWorkMark:
    """The mark in etcd that writers were at work when the last of all proxies died.

    It is not known then what they had in flight. This matters only with brokers without fences
    (kproxy.claims.inflight_writes). `table` is to be loaded first.
    """

    def __init__(self, client: EtcdClient, table: OwnTable, unsettled: InflightWrites) -> None:
        self._client = client
        self._table = table
        self._unsettled = unsettled
        self._key = table.keys.at_work
        # The name of the member as which this process has put the mark.
        self._put_as = ""

    async def check(self) -> None:
        """Wait for everything if all proxies died at once. Called before this process is a member."""
        while self._unsettled.topics:
            try:
                if await self._client.get(self._key) is not None and not self._table.members:
                    log.warning(
                        "earlier writes waited for", reason="all proxies ended at once: what they sent is waited for"
                    )
                    self._unsettled.note_all_gone()
                return
            except EtcdError as error:
                log.warning("earlier members not read", reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)

    async def put(self, member: str) -> None:
        """Put the mark: this process, which is `member`, grants a claim that no broker fences. Raises EtcdError."""
        if self._put_as != member:
            await self._client.put(self._key, b"")
            self._put_as = member

    async def remove(self) -> None:
        """Remove the mark: this process has ended in order, and is no member any more."""
        if not self._put_as or self._unsettled.places():
            return
        members = self._table.keys.members
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                mark, others = await self._client.get(self._key), await self._client.get_prefix(members)
                if mark is None or others.kvs:
                    return
                unchanged = [
                    mod_revision_is(self._key, mark.mod_revision),
                    prefix_unchanged_since(members, others.revision),
                ]
                await self._client.txn(unchanged, [delete_op(self._key)])
        except (EtcdError, TimeoutError) as error:
            log.warning("member mark not removed", reason=str(error) or "no answer in time")
