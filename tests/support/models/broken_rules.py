"""Define patches of product code, each of which switches off a rule of replication while a test runs.

The following compares of transactions are not included.
- The lease key in an ISR's change, and in `_begin_epoch`: leaving out one alone has no effect. A broker that takes
  over puts the state, so that the compare of the state's mod_revision fails as well. Between the end of a lease and the
  next take-over nothing is acknowledged, and a replica that a late change adds has counted since it was proposed.
- The lease key in FenceKeeper: leaving it out has no effect either. A broker that takes over later reads the fence. For
  one that did so before, the compare of the fence's own revision fails at the next bind, which so learns it. A deposed
  broker answers no success.
- The state in `_begin_epoch`: a late attempt would bring back an ISR from before a shrink. There is no run for it: a
  broker begins an epoch under a key that it led under before only after a reload that reported an earlier one. It and
  the lease there are tested by `tests/unit/broker/test_take_over.py`.
- The topic in TakeOver and FenceKeeper: the model has no topic that is deleted. They are tested by
  `tests/unit/broker/test_broker_leases_alone.py` and `tests/unit/broker/test_fence_keeper.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from kproxy.broker import data_dir, election, lease_txn, partition, replica_manager
from kproxy.broker.apis import bind_fences
from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.data_dir import DataDir
from kproxy.broker.election import LeaderRebalance
from kproxy.broker.fence_keeper import FenceKeeper
from kproxy.broker.keys import ReplicaKey
from kproxy.broker.log import Log
from kproxy.broker.partition import AppendResult, Partition, ReadResult, Reconciliation
from kproxy.broker.producer_state import BatchVerdict, Judgement, ProducerStates
from kproxy.broker.replication.partition_replication import FollowerContact, ReplicationManager
from kproxy.broker.writer_fence import FenceComparison, KeptFence, WriterFence
from kproxy.etcd import EtcdClient, TxnCompare, TxnOp, TxnResult, lease
from kproxy.etcd.lease import LeaseFence
from kproxy_codec import error_codes
from kproxy_codec.fetch import EpochEnd
from kproxy_codec.own import FenceBinding


class TruncateToHighWatermark(Reconciliation):
    """The StreamBus text's rule, unchanged."""

    def reconcile_as_new_leader(self, log: Log, high_watermark: int, leader_epoch: int) -> int:
        log.truncate_to(high_watermark)
        return super().reconcile_as_new_leader(log, high_watermark, leader_epoch)

    def reconcile_as_new_follower(self, log: Log, high_watermark: int) -> None:
        log.truncate_to(high_watermark)


def truncate_to_high_watermark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partition, "Reconciliation", TruncateToHighWatermark)


def _set(target: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(target, name, value)


count_only_committed_isr = _set(ReplicationManager, "in_sync", property(lambda manager: manager.isr.members))
count_proposed_isr = _set(
    ReplicationManager, "in_sync", property(lambda manager: manager.proposed or manager.isr.members)
)
ask_for_no_epoch = _set(Partition, "check_leader_epoch", lambda replica, epoch: error_codes.NONE)
find_no_divergence = _set(partition, "leader_end_for", lambda log, leader_epoch: EpochEnd(leader_epoch, 1 << 62))
no_fence_before_reads = _set(Partition, "serves_reads", lambda replica: replica.replication.is_leading)
latest_is_the_high_watermark = _set(Partition, "latest_offset", lambda replica: replica.high_watermark)
producers_are_forgotten = _set(ProducerStates, "judge", lambda states, batch: Judgement(BatchVerdict.ACCEPTED))
nobody_reads_fences = _set(lease_txn, "kept_fence", lambda kvs, topic_id: KeptFence())
a_bind_that_is_refused_says_nothing = _set(
    bind_fences, "_BINDING", (error_codes.NONE, error_codes.NOT_LEADER_OR_FOLLOWER)
)
who_waits_is_heard_of_for_ever = _set(
    FollowerContact, "heard_at", property(lambda contact: contact._clock(), lambda contact, at: None)
)
no_margin = _set(lease, "MARGIN_FRACTION", 0.0)


class FenceBelievedOnce:
    """Calls the real fence, but always repeats its first answer."""

    def __init__(self, fence: LeaseFence) -> None:
        self._fence = fence
        self._first: bool | None = None

    def is_live(self) -> bool:
        now = self._fence.is_live()
        self._first = now if self._first is None else self._first
        return self._first


def no_fence_before_the_answer(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_isr(replica: Partition, offset: int, timeout_s: float) -> int:
        error_code = await replica.replication.wait_for_isr(offset, timeout_s)
        replica._fence.is_live()
        return error_code

    patch.setattr(Partition, "wait_for_isr", wait_for_isr)


def anybody_may_take_over(patch: pytest.MonkeyPatch) -> None:
    def candidate_place(
        view: ClusterView, topic: Topic, partition_index: int, node_id: int, *, count_dead: bool
    ) -> int:
        live = {*view.brokers, node_id}
        return [each for each in topic.replicas[partition_index] if count_dead or each in live].index(node_id)

    for module in (election, replica_manager):
        patch.setattr(module, "candidate_place", candidate_place)
    patch.setattr(replica_manager, "is_in_sync", lambda *_: True)


def a_broker_is_its_disk(patch: pytest.MonkeyPatch) -> None:
    keep_id = DataDir._keep_id
    patch.setattr(DataDir, "_keep_id", lambda made, topic_id, index, _: keep_id(made, topic_id, index, made.log_id))
    patch.setattr(data_dir, "_claim", lambda _, node_id: uuid.UUID(int=node_id))


def all_is_committed_at_take_over(patch: pytest.MonkeyPatch) -> None:
    become_leader = ReplicationManager.become_leader

    def become_leader_of_all(manager: ReplicationManager, *arguments: object) -> None:
        manager.high_watermark = manager._log_end()
        become_leader(manager, *arguments)  # type: ignore[arg-type]

    patch.setattr(ReplicationManager, "become_leader", become_leader_of_all)


def consumers_read_all(patch: pytest.MonkeyPatch) -> None:
    def read(replica: Partition, offset: int, max_bytes: int) -> ReadResult:
        return replica._read_log(offset, max_bytes, None)

    patch.setattr(Partition, "read", read)


def nothing_exists_above_the_high_watermark(patch: pytest.MonkeyPatch) -> None:
    read = Partition.read

    def read_below(replica: Partition, offset: int, max_bytes: int) -> ReadResult:
        if offset > replica.high_watermark:
            return ReadResult(error_codes.OFFSET_OUT_OF_RANGE)
        return read(replica, offset, max_bytes)

    patch.setattr(Partition, "read", read_below)


def older_fences_write(patch: pytest.MonkeyPatch) -> None:
    refusal = WriterFence.refusal
    patch.setattr(WriterFence, "refusal", lambda writers, bound: None if bound else refusal(writers, bound))


def fences_count_before_etcd_keeps_them(patch: pytest.MonkeyPatch) -> None:
    keep = FenceKeeper._keep

    async def keep_here_first(keeper: FenceKeeper, replica: Partition, asked: FenceBinding) -> int:
        replica.writers.keep(KeptFence(asked.fence, not asked.is_released, replica.writers.revision))
        return await keep(keeper, replica, asked)

    patch.setattr(FenceKeeper, "_keep", keep_here_first)


# The transactions, by the values that they compare.
TAKE_OVER = ("create partition-leases", "mod partitions", "mod topics")
CHANGE_ISR = ("create partition-leases", "mod partitions")
RELEASE = ("create partition-leases",)
KEEP_FENCE = ("create partition-leases", "mod topics", "mod fences")
CLAIM_ID = ("create brokers",)


def _compared(compare: TxnCompare) -> str:
    """The compared property, and the kind of key."""
    target = {1: "create", 2: "mod", 4: "lease"}[compare.message.target]
    tables = ("partition-leases", "partitions", "topics", "fences", "brokers")
    return next(f"{target} {table}" for table in tables if f"/{table}/".encode() in compare.message.key)


def without(transaction: Sequence[str], compared: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A patch that leaves one compare out of one kind of transaction."""

    def off(patch: pytest.MonkeyPatch) -> None:
        txn = EtcdClient.txn

        async def run(client: EtcdClient, compares: Sequence[TxnCompare], *operations: Sequence[TxnOp]) -> TxnResult:
            names = [_compared(each) for each in compares]
            if tuple(names) == tuple(transaction):
                compares = [each for each, name in zip(compares, names, strict=True) if name != compared]
            return await txn(client, compares, *operations)

        patch.setattr(EtcdClient, "txn", run)

    return off


def wanted_isr_with(**fields: object) -> Callable[[pytest.MonkeyPatch], None]:
    """The ISR that is wanted if these fields of the manager have other values."""

    def off(patch: pytest.MonkeyPatch) -> None:
        wanted_isr = ReplicationManager.wanted_isr

        def wanted(manager: ReplicationManager, *brokers: Collection[int]) -> frozenset[ReplicaKey] | None:
            kept = {name: getattr(manager, name) for name in fields}
            vars(manager).update(fields)
            try:
                return wanted_isr(manager, *brokers)
            finally:
                vars(manager).update(kept)

        patch.setattr(ReplicationManager, "wanted_isr", wanted)

    return off


def everybody_lives(patch: pytest.MonkeyPatch) -> None:
    wanted_isr = ReplicationManager.wanted_isr

    def wanted(manager: ReplicationManager, _: Collection[int], gone: Collection[int]) -> frozenset[ReplicaKey] | None:
        return wanted_isr(manager, manager._followers, gone)

    patch.setattr(ReplicationManager, "wanted_isr", wanted)


def deadline_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    renew = LeaseFence.renew
    patch.setattr(LeaseFence, "renew", lambda fence, sent_at, ttl_s: renew(fence, fence._clock(), ttl_s))


class FenceNotAskedFirst:
    """Alive at its first check, whatever the fence says."""

    def __init__(self, fence: LeaseFence) -> None:
        self._fence = fence
        self._asked = False

    def is_live(self) -> bool:
        now = self._fence.is_live()
        was_asked, self._asked = self._asked, True
        return now or not was_asked


def append_with(kind: type[FenceBelievedOnce | FenceNotAskedFirst]) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace the fence while a leader appends."""

    def off(patch: pytest.MonkeyPatch) -> None:
        append = Partition.append_as_leader

        def append_with(replica: Partition, *arguments: Any) -> AppendResult:
            with pytest.MonkeyPatch.context() as fence:
                fence.setattr(replica, "_fence", kind(replica._fence))
                return append(replica, *arguments)

        patch.setattr(Partition, "append_as_leader", append_with)

    return off


def no_fence_where_it_is_committed_already(patch: pytest.MonkeyPatch) -> None:
    def is_committed(replica: Partition, offset: int) -> bool:
        replica._fence.is_live()
        return replica.high_watermark > offset

    patch.setattr(Partition, "is_committed", is_committed)


def who_is_bound_to_none_writes(patch: pytest.MonkeyPatch) -> None:
    refusal = WriterFence.refusal
    patch.setattr(WriterFence, "refusal", lambda writers, bound: refusal(writers, bound) if bound else None)


def lower_fences_are_kept(patch: pytest.MonkeyPatch) -> None:
    def keep(writers: WriterFence, kept: KeptFence) -> None:
        writers.fence, writers.is_owned, writers.revision = kept

    patch.setattr(WriterFence, "keep", keep)
    patch.setattr(
        WriterFence,
        "compare",
        lambda writers, fence, *, is_released: (
            FenceComparison.HOLDS if fence == writers.fence else FenceComparison.HIGHER
        ),
    )


def nobody_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: LeaderRebalance, partitions: object, timeout_s: float) -> bool:
        return True

    patch.setattr(LeaderRebalance, "wait_for_followers", at_once)
