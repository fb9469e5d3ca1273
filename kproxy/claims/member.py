"""Keep this process a member, one of the processes that may claim: keep its lease alive and publish its state.

    {prefix}/kproxy/own-at-work   a mark (AtWorkMark) on no lease, which outlives its writers

States
  out      no lease is certain to live, and no claim of this process counts
  in       the entry is on this process's lease, and so is every claim of this process

Transitions
  out -> in    a lease is granted and the entry put on it
  in  -> out   the lease is no longer certain to live (its fence breaks, as when etcd is silent), or etcd does not know
               the lease, or the entry was deleted. `on_lost` is called. A new lease is requested, with no claim on it.

Invariants
1. If the lease expires, `on_lost` is called before other clients get claims that were on it, as the fence's deadline is
   before the lease's end. A process that was suspended meanwhile finds its fence dead (`is_live`) at its first check.
2. The published values of `seen` on one lease only grow. Each put sends the newest; one put is under way at a time.
3. The name of a member is the id of its lease, and is never used again.
4. The mark exists before the first claim that no broker fences is granted, and while the granting process lives.
5. Only a process that ends normally removes the mark, as the last member and with no write in flight. The first process
   that finds the mark and no member treats every partition as after the death of its claimant's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Final

import structlog

from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.keys import MemberValue, OwnKeys, encode_value
from kproxy.claims.table import OwnTable
from kproxy.etcd import EtcdClient, EtcdError, LeaseLost, delete_op, mod_revision_is, prefix_unchanged_since
from kproxy.etcd.lease import Clock, LeaseFence, lease_keep_alive

RETRY_PAUSE_S: Final = 0.5
# How often the fence is checked, so that it is found dead well within the margin that it keeps of the TTL.
CHECKS_PER_TTL: Final = 40
# The longest wait of an ending process for etcd, as its lease ends by itself. A mark that stays costs the next process
# one unnecessary wait of `unsettled_s`.
END_TIMEOUT_S: Final = 2.0

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class OwnMember:
    """Keeps this process a member. `run` is one coroutine that the caller runs; it revokes the lease when cancelled.

    `ttl_s`: the lease's TTL in seconds; etcd may grant more. `state` returns the state to publish: the revision up to
    which claims were acted upon, and the unsettled partitions.
    """

    client: EtcdClient
    keys: OwnKeys
    host: str
    port: int
    _: KW_ONLY
    ttl_s: int
    clock: Clock
    writer_groups: Mapping[str, str]
    state: Callable[[], tuple[int, list[tuple[str, int]]]]
    on_entered: Callable[[], None]
    on_lost: Callable[[str], None]

    def __post_init__(self) -> None:
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
        """Whether the lease, with every claim on it, is certain to live."""
        return self._fence is not None and self._fence.is_live()

    def publish(self) -> None:
        """Publish `state` again, because it has changed."""
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
                    await self._stay(await self._enter())
                except EtcdError as error:
                    log.warning("member not registered", reason=str(error))
                await self._leave()
                await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            await self._leave()

    async def _enter(self) -> LeaseFence:
        sent_at = self.clock()
        lease = await self.client.lease_grant(self.ttl_s)
        fence = LeaseFence(lease.lease_id, self.clock)
        fence.renew(sent_at, lease.ttl_s)
        self._ended.clear()
        self._fence = fence
        await self._put(fence)
        self.on_entered()
        return fence

    async def _put(self, fence: LeaseFence) -> None:
        seen, unsettled = self.state()
        value = encode_value(MemberValue(self.host, self.port, seen, unsettled, dict(self.writer_groups)))
        await self.client.put(self.keys.member(_name(fence)), value, lease_id=fence.lease_id)

    async def _stay(self, fence: LeaseFence) -> None:
        """Wait until the lease is no longer certain to live. Raises EtcdError if the reason is not known."""
        keeper = asyncio.create_task(
            lease_keep_alive(self.client, fence.lease_id, clock=self.clock, on_renewed=fence.renew)
        )
        tasks = [keeper, *map(asyncio.create_task, (self._watch(fence), self._publish_all(fence), self._ended.wait()))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # This comes before anything that may take time.
            self._give_up("its lease in etcd has ended")
            for task in tasks:
                task.cancel()
            outcome = await asyncio.gather(*tasks, return_exceptions=True)
        for each in outcome:
            if isinstance(each, Exception) and not isinstance(each, LeaseLost):
                raise each

    async def _watch(self, fence: LeaseFence) -> None:
        while fence.is_live():  # noqa: ASYNC110 - no event marks the deadline: time passes it
            await asyncio.sleep(self.ttl_s / CHECKS_PER_TTL)

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
        """Break the fence: no claim on the lease counts any more."""
        if self._fence is not None:
            self._fence.break_for_good()
            self.on_lost(reason)

    async def _leave(self) -> None:
        """Give up all claims, publish the places left unsettled, then revoke the lease."""
        self._give_up("the proxy has no lease in etcd")
        fence, self._fence = self._fence, None
        if fence is None:
            return
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if self.state()[1]:
                    await self._put(fence)
                await self.client.lease_revoke(fence.lease_id)
        except (EtcdError, TimeoutError) as error:
            log.warning("member lease not revoked", reason=str(error) or "no answer in time")


def _name(fence: LeaseFence) -> str:
    return f"{fence.lease_id:x}"


class AtWorkMark:
    """The mark in etcd which shows that writers were active when the last of all proxies died.

    Their writes in flight are unknown then. This matters only with brokers without fences
    (kproxy.claims.inflight_writes). `table` must be loaded first.
    """

    def __init__(self, client: EtcdClient, table: OwnTable, unsettled: InflightWrites) -> None:
        self._client = client
        self._table = table
        self._unsettled = unsettled
        self._key = table.keys.at_work
        # The name that this process had as a member when it put the mark.
        self._put_as = ""

    async def check(self) -> None:
        """Make every partition uncertain if all proxies died at once. Called before this process is a member."""
        while self._unsettled.topics:
            try:
                if await self._client.get(self._key) is not None and not self._table.members:
                    log.warning(
                        "claims delayed", reason="all proxies ended at once, and their last writes may still arrive"
                    )
                    self._unsettled.note_all_gone()
                return
            except EtcdError as error:
                log.warning("earlier members not read", reason=str(error))
                await asyncio.sleep(RETRY_PAUSE_S)

    async def put(self, member: str) -> None:
        """Put the mark, since this process, `member`, grants a claim that no broker fences. Raises EtcdError."""
        if self._put_as != member:
            await self._client.put(self._key, b"")
            self._put_as = member

    async def remove(self) -> None:
        """Remove the mark, because this process ends normally and is no longer a member."""
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
            log.warning("at-work mark not removed", key=self._key, reason=str(error) or "no answer in time")
