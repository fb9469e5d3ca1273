"""Switch off each rule of replication: the model must find a violation for each, which proves that it can.

Every entry patches product code while a test runs, and has a run that the model found or that a text describes. With
the rule on the run passes, with the rule off it ends in a Violation.

These compares of transactions are not included.
- The lease key in an ISR's change, and in `_begin_epoch`: leaving out one alone has no effect. A broker that takes
  over puts the state, so that the compare of the state's mod_revision fails as well. Between the end of a lease and the
  next take-over nothing is acknowledged, and a replica that a late change adds has counted since it was proposed.
- The lease key in FenceKeeper: leaving it out has no effect either. A broker that takes over later reads the fence. A
  broker that took over before learns the fence at its next bind, as the compare of the fence's own revision fails. A
  deposed broker answers no success.
- The state in `_begin_epoch`: a late attempt would bring back an ISR from before a shrink. There is no run for it: a
  broker begins an epoch under a key that it led under before only after a reload that reported an earlier one. It and
  the lease there are tested by `tests/unit/broker/test_take_over.py`.
- The topic in TakeOver and FenceKeeper: the model has no topic that is deleted. They are tested by
  `tests/integration/broker/test_broker_leases.py` and `tests/unit/broker/test_fence_keeper.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

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
from tests.support.models.replication_checks import Rule
from tests.support.models.replication_model import LEADER, Setting, Taken

FAST, SLOW, DEAF, CUT = range(4)
A_WHILE, A_SECOND, SOME_SECONDS, A_LEASE = range(4)


class RuleOff(NamedTuple):
    """`off` switches the rule off; `steps` then end in a violation of `found`."""

    name: str
    off: Callable[[pytest.MonkeyPatch], None]
    found: Rule
    setting: Setting
    steps: list[Taken]


class TruncateToHighWatermark(Reconciliation):
    """The rule of the StreamBus text, taken literally."""

    def reconcile_as_new_leader(self, log: Log, high_watermark: int, leader_epoch: int) -> int:
        log.truncate_to(high_watermark)
        return super().reconcile_as_new_leader(log, high_watermark, leader_epoch)

    def reconcile_as_new_follower(self, log: Log, high_watermark: int) -> None:
        log.truncate_to(high_watermark)


def truncate_to_high_watermark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partition, "Reconciliation", TruncateToHighWatermark)


def _set(target: object, name: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(target, name, value)


_count_only_committed_isr = _set(ReplicationManager, "in_sync", property(lambda manager: manager.isr.members))
_count_proposed_isr = _set(
    ReplicationManager, "in_sync", property(lambda manager: manager.proposed or manager.isr.members)
)
_ask_for_no_epoch = _set(Partition, "check_leader_epoch", lambda replica, epoch: error_codes.NONE)
_find_no_divergence = _set(partition, "leader_end_for", lambda log, leader_epoch: EpochEnd(leader_epoch, 1 << 62))
_no_fence_before_reads = _set(Partition, "serves_reads", lambda replica: replica.replication.is_leading)
_latest_is_the_high_watermark = _set(Partition, "latest_offset", lambda replica: replica.high_watermark)
_producers_are_forgotten = _set(ProducerStates, "judge", lambda states, batch: Judgement(BatchVerdict.ACCEPTED))
_nobody_reads_fences = _set(lease_txn, "kept_fence", lambda kvs, topic_id: KeptFence())
_a_bind_that_is_refused_says_nothing = _set(
    bind_fences, "_BINDING", (error_codes.NONE, error_codes.NOT_LEADER_OR_FOLLOWER)
)
_who_waits_is_heard_of_for_ever = _set(
    FollowerContact, "heard_at", property(lambda contact: contact._clock(), lambda contact, at: None)
)
_no_margin = _set(lease, "MARGIN_FRACTION", 0.0)


class _FenceBelievedOnce:
    """A fence that is asked as often as the real one, but always repeats its first answer."""

    def __init__(self, fence: partition.Fence) -> None:
        self._fence = fence
        self._first: bool | None = None

    def is_live(self) -> bool:
        now = self._fence.is_live()
        self._first = now if self._first is None else self._first
        return self._first


def _no_fence_before_the_answer(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_isr(replica: Partition, offset: int, timeout_s: float) -> int:
        error_code = await replica.replication.wait_for_isr(offset, timeout_s)
        replica._fence.is_live()
        return error_code

    patch.setattr(Partition, "wait_for_isr", wait_for_isr)


def _anybody_may_take_over(patch: pytest.MonkeyPatch) -> None:
    def candidate_place(
        view: ClusterView, topic: Topic, partition_index: int, node_id: int, *, count_dead: bool
    ) -> int:
        live = {*view.brokers, node_id}
        return [each for each in topic.replicas[partition_index] if count_dead or each in live].index(node_id)

    for module in (election, replica_manager):
        patch.setattr(module, "candidate_place", candidate_place)
    patch.setattr(replica_manager, "is_in_sync", lambda *_: True)


def _a_broker_is_its_disk(patch: pytest.MonkeyPatch) -> None:
    keep_id = DataDir._keep_id
    patch.setattr(DataDir, "_keep_id", lambda made, topic_id, index, _: keep_id(made, topic_id, index, made.log_id))
    patch.setattr(data_dir, "_claim", lambda _, node_id: uuid.UUID(int=node_id))


def _all_is_committed_at_take_over(patch: pytest.MonkeyPatch) -> None:
    become_leader = ReplicationManager.become_leader

    def become_leader_of_all(manager: ReplicationManager, *arguments: object) -> None:
        manager.high_watermark = manager._log_end()
        become_leader(manager, *arguments)  # type: ignore[arg-type]

    patch.setattr(ReplicationManager, "become_leader", become_leader_of_all)


def _consumers_read_all(patch: pytest.MonkeyPatch) -> None:
    def read(replica: Partition, offset: int, max_bytes: int) -> ReadResult:
        return replica._read_log(offset, max_bytes, None)

    patch.setattr(Partition, "read", read)


def _nothing_exists_above_the_high_watermark(patch: pytest.MonkeyPatch) -> None:
    read = Partition.read

    def read_below(replica: Partition, offset: int, max_bytes: int) -> ReadResult:
        if offset > replica.high_watermark:
            return ReadResult(error_codes.OFFSET_OUT_OF_RANGE)
        return read(replica, offset, max_bytes)

    patch.setattr(Partition, "read", read_below)


def _older_fences_write(patch: pytest.MonkeyPatch) -> None:
    refusal = WriterFence.refusal
    patch.setattr(WriterFence, "refusal", lambda writers, bound: None if bound else refusal(writers, bound))


def _fences_count_before_etcd_keeps_them(patch: pytest.MonkeyPatch) -> None:
    keep = FenceKeeper._keep

    async def keep_here_first(keeper: FenceKeeper, replica: Partition, asked: FenceBinding) -> int:
        replica.writers.keep(KeptFence(asked.fence, not asked.is_released, replica.writers.revision))
        return await keep(keeper, replica, asked)

    patch.setattr(FenceKeeper, "_keep", keep_here_first)


# The transactions, by the values that they compare.
_TAKE_OVER = ("create partition-leases", "mod partitions", "mod topics")
_BEGIN_EPOCH = ("lease partition-leases", "mod partitions")
_CHANGE_ISR = ("create partition-leases", "mod partitions")
_RELEASE = ("create partition-leases",)
_KEEP_FENCE = ("create partition-leases", "mod topics", "mod fences")
_CLAIM_ID = ("create brokers",)


def _compared(compare: TxnCompare) -> str:
    """The compared property, and the kind of key."""
    target = {1: "create", 2: "mod", 4: "lease"}[compare.message.target]
    tables = ("partition-leases", "partitions", "topics", "fences", "brokers")
    return next(f"{target} {table}" for table in tables if f"/{table}/".encode() in compare.message.key)


def _without(transaction: Sequence[str], compared: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Remove one compare from one kind of transaction."""

    def off(patch: pytest.MonkeyPatch) -> None:
        txn = EtcdClient.txn

        async def run(client: EtcdClient, compares: Sequence[TxnCompare], *operations: Sequence[TxnOp]) -> TxnResult:
            names = [_compared(each) for each in compares]
            if tuple(names) == tuple(transaction):
                compares = [each for each, name in zip(compares, names, strict=True) if name != compared]
            return await txn(client, compares, *operations)

        patch.setattr(EtcdClient, "txn", run)

    return off


def _wanted_isr_with(**fields: object) -> Callable[[pytest.MonkeyPatch], None]:
    """The ISR that would be wanted with other values in these fields of the manager."""

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


def _everybody_lives(patch: pytest.MonkeyPatch) -> None:
    wanted_isr = ReplicationManager.wanted_isr

    def wanted(manager: ReplicationManager, _: Collection[int], gone: Collection[int]) -> frozenset[ReplicaKey] | None:
        return wanted_isr(manager, manager._followers, gone)

    patch.setattr(ReplicationManager, "wanted_isr", wanted)


def _deadline_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    renew = LeaseFence.renew
    patch.setattr(LeaseFence, "renew", lambda fence, sent_at, ttl_s: renew(fence, fence._clock(), ttl_s))


class _FenceNotAskedFirst:
    """Live at its first check, whatever the fence says."""

    def __init__(self, fence: partition.Fence) -> None:
        self._fence = fence
        self._asked = False

    def is_live(self) -> bool:
        now = self._fence.is_live()
        was_asked, self._asked = self._asked, True
        return now or not was_asked


def _append_with(kind: type[_FenceBelievedOnce | _FenceNotAskedFirst]) -> Callable[[pytest.MonkeyPatch], None]:
    """Another fence while a leader appends."""

    def off(patch: pytest.MonkeyPatch) -> None:
        append = Partition.append_as_leader

        def append_with(replica: Partition, *arguments: Any) -> AppendResult:
            with pytest.MonkeyPatch.context() as fence:
                fence.setattr(replica, "_fence", kind(replica._fence))
                return append(replica, *arguments)

        patch.setattr(Partition, "append_as_leader", append_with)

    return off


def _no_fence_where_it_is_committed_already(patch: pytest.MonkeyPatch) -> None:
    def is_committed(replica: Partition, offset: int) -> bool:
        replica._fence.is_live()
        return replica.high_watermark > offset

    patch.setattr(Partition, "is_committed", is_committed)


def _who_is_bound_to_none_writes(patch: pytest.MonkeyPatch) -> None:
    refusal = WriterFence.refusal
    patch.setattr(WriterFence, "refusal", lambda writers, bound: refusal(writers, bound) if bound else None)


def _lower_fences_are_kept(patch: pytest.MonkeyPatch) -> None:
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


def _nobody_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: LeaderRebalance, partitions: object, timeout_s: float) -> bool:
        return True

    patch.setattr(LeaderRebalance, "wait_for_followers", at_once)


THREE = Setting(3, min_insync_replicas=2)
THREE_AND_ONE_IN_SYNC = Setting(3, min_insync_replicas=1)
HANDS_OVER = Setting(3, min_insync_replicas=1, hand_over_after_s=5.0)
CLOCKS_APART = Setting(3, min_insync_replicas=2, rates=(0.97, 1.03, 1.0, 1.0, 1.0))


# Broker 1 leads, 2 and 3 follow. Both have what is acknowledged; only 3 knows that the high watermark has passed it.
_ACKNOWLEDGED: list[Taken] = [
    ("lag", 1),
    ("lag", 2),
    ("produce_idempotent", LEADER, 0),
    ("fetch", 1),
    ("fetch", 2),
    ("fetch", 1),
    ("fetch", 2),
]
_THIRD_LEFT_THE_ISR: list[Taken] = [("crash", 2), ("advance", A_LEASE)]

# Broker 1, the first in line, has died and come back while 2 leads; all are in sync.
_ONE_IS_BACK: list[Taken] = [
    ("crash", 0),
    ("advance", A_LEASE),
    ("restart", 0),
    ("advance", A_SECOND),
    ("advance", SOME_SECONDS),
    ("produce_idempotent", LEADER, 0),
    ("advance", A_SECOND),
]
KIP_903_LATE_FETCH: list[Taken] = [
    *_ONE_IS_BACK,
    # Broker 1's request, which shows that it has all batches, is under way when it dies and leaves the ISR.
    ("lag", 0),
    ("ask", 0),
    ("crash", 0),
    ("advance", A_LEASE),
    ("wipe", 0),
    ("restart", 0),
    ("lag", 0),
    ("arrive", 0),
    ("advance", A_WHILE),
    ("crash", 1),
    ("advance", A_LEASE),
    ("advance", A_SECOND),
]
"""A request of a dead broker puts its successor, whose disk is empty, into the ISR."""
KIP_903_LATE_PROPOSAL: list[Taken] = [
    ("crash", 0),
    ("advance", A_LEASE),
    ("produce_idempotent", LEADER, 0),
    ("advance", A_SECOND),
    ("restart", 0),
    ("lag", 0),
    ("link", 1, SLOW),
    ("watch", 1, 2),
    ("watch", 1, 2),
    *[("fetch", 0)] * 4,
    # Broker 2 proposes that 1 is in sync again; the proposal reaches etcd when 1 has lost its disk.
    ("advance", A_WHILE),
    ("crash", 0),
    ("wipe", 0),
    ("advance", A_LEASE),
    ("restart", 0),
    ("lag", 0),
    ("etcd_applies", 1, 0),
    ("advance", A_WHILE),
    ("crash", 1),
    ("advance", A_LEASE),
    ("advance", A_SECOND),
]
KIP_101: list[Taken] = [*_ACKNOWLEDGED, ("crash", 0), ("advance", A_LEASE)]
"""The leader dies; the follower that has the record, and does not know that it is committed, is elected."""

RULES_OFF = [
    RuleOff(
        "a log is kept, not cut to the high watermark",
        truncate_to_high_watermark,
        Rule.LOST,
        THREE,
        KIP_101,
    ),
    RuleOff(
        "a late fetch tells of one disk",
        _a_broker_is_its_disk,
        Rule.LOST,
        THREE,
        KIP_903_LATE_FETCH,
    ),
    RuleOff(
        "a late proposal names one disk",
        _a_broker_is_its_disk,
        Rule.LOST,
        THREE,
        KIP_903_LATE_PROPOSAL,
    ),
    RuleOff(
        "an expansion counts from the moment it is proposed",
        _count_only_committed_isr,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        [
            *_THIRD_LEFT_THE_ISR,
            ("link", LEADER, DEAF),
            ("restart", 2),
            ("advance", A_SECOND),
            ("advance", A_SECOND),
            ("lag", 2),
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
        ],
    ),
    RuleOff(
        "a shrink counts only once its transaction succeeded",
        _count_proposed_isr,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        [
            ("link", LEADER, SLOW),
            ("lag", 2),
            ("produce_idempotent", LEADER, 0),
            ("advance", A_LEASE),
            ("produce", LEADER, 1),
        ],
    ),
    RuleOff(
        "a fetch of another leader epoch is refused",
        _ask_for_no_epoch,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        [
            # Broker 3 has a record and reports it in a request that is delayed.
            ("lag", 1),
            ("lag", 2),
            ("produce", LEADER, 1),
            ("fetch", 2),
            ("ask", 2),
            # Broker 2, without that record, leads for a moment, too short for an ISR change; 3 truncates to its log.
            ("link", 1, SLOW),
            ("link", 0, CUT),
            ("freeze", 2),
            ("advance", A_LEASE),
            ("watch", 1, 2),
            ("etcd_applies", 1, 0),
            ("etcd_answers", 1, 0),
            ("thaw", 2),
            ("fetch", 2),
            ("keep", 1),
            ("crash", 1),
            # Broker 1 leads again, with the record, and now gets the request, on the connection that it came on.
            ("link", 0, FAST),
            ("advance", A_LEASE),
            ("arrive", 0),
        ],
    ),
    RuleOff(
        "a follower is told where its log leaves the leader's",
        _find_no_divergence,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        [
            ("lag", 1),
            ("lag", 2),
            ("produce", LEADER, 1),
            ("crash", 0),
            ("advance", A_LEASE),
            ("produce_idempotent", LEADER, 0),
            ("restart", 0),
            ("advance", A_LEASE),
            ("advance", A_LEASE),
        ],
    ),
    RuleOff(
        "the fence is looked at after the write",
        _append_with(_FenceBelievedOnce),
        Rule.ZOMBIE,
        THREE,
        [("freeze_within", LEADER, 1, 1), ("produce", LEADER, 1)],
    ),
    RuleOff(
        "the fence is looked at before the answer",
        _no_fence_before_the_answer,
        Rule.ZOMBIE,
        THREE,
        [*_ACKNOWLEDGED[:-1], ("freeze_within", LEADER, 2, 1), ("fetch", 2)],
    ),
    RuleOff(
        "the fence is looked at before a read",
        _no_fence_before_reads,
        Rule.WENT_BACK,
        THREE,
        [
            ("produce", LEADER, 0),
            ("advance", A_SECOND),
            ("link", LEADER, CUT),
            ("advance", A_LEASE),
            ("produce", 1, 0),
            ("advance", A_SECOND),
            ("consume", 1),
            ("consume", 1),
            ("consume", 0),
        ],
    ),
    RuleOff(
        "only a member of the ISR may take over",
        _anybody_may_take_over,
        Rule.LOST,
        THREE,
        [
            *_THIRD_LEFT_THE_ISR,
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            ("restart", 2),
            ("lag", 2),
            ("advance", A_SECOND),
            ("crash", 0),
            ("crash", 1),
            ("advance", A_LEASE),
        ],
    ),
    RuleOff(
        "a new leader waits for the others before it calls its log committed",
        _all_is_committed_at_take_over,
        Rule.LOST,
        THREE,
        [("lag", 2), ("produce", LEADER, 1), ("advance", A_SECOND), ("crash", 0), ("advance", A_LEASE)],
    ),
    RuleOff(
        "consumers see nothing above the high watermark",
        _consumers_read_all,
        Rule.LOST,
        THREE,
        [("lag", 1), ("produce", LEADER, 1), ("consume", LEADER)],
    ),
    RuleOff(
        "a consumer above a new leader's high watermark waits",
        _nothing_exists_above_the_high_watermark,
        Rule.WENT_BACK,
        THREE,
        [*_ACKNOWLEDGED, ("consume", LEADER), *KIP_101[len(_ACKNOWLEDGED) :], ("consume", LEADER)],
    ),
    RuleOff(
        "a new leader tells no latest offset before its epoch's start is committed",
        _latest_is_the_high_watermark,
        Rule.WENT_BACK,
        THREE,
        [*_ACKNOWLEDGED, ("consume", LEADER), *KIP_101[len(_ACKNOWLEDGED) :], ("consume", LEADER)],
    ),
    RuleOff(
        "a producer's last batches are known to the next leader",
        _producers_are_forgotten,
        Rule.DOUBLED,
        THREE,
        [*KIP_101, ("resend", LEADER, 0, 0)],
    ),
    RuleOff(
        "who is bound to an older fence writes nothing",
        _older_fences_write,
        Rule.FENCED,
        THREE,
        [("claim", LEADER, 0), ("claim", LEADER, 1), ("write_fenced", LEADER, 0, 1)],
    ),
    RuleOff(
        "a bind that is refused says what is written behind it",
        _a_bind_that_is_refused_says_nothing,
        Rule.FENCED,
        THREE,
        # The batch on the second connection arrives when nobody owns the partition any more.
        [("claim", LEADER, 0), ("hang_up", LEADER, 0), ("release", LEADER, 0), ("write_fenced", LEADER, 0, 1)],
    ),
    RuleOff(
        "whoever takes over reads the fence",
        _nobody_reads_fences,
        Rule.FENCED,
        THREE,
        [("claim", LEADER, 0), ("crash", LEADER), ("advance", A_LEASE), ("produce", LEADER, 1)],
    ),
    RuleOff(
        "a fence counts only once etcd keeps it",
        _fences_count_before_etcd_keeps_them,
        Rule.FENCED,
        THREE,
        [
            ("claim", LEADER, 0),
            ("link", LEADER, CUT),
            ("claim", LEADER, 1),
            ("advance", SOME_SECONDS),
            ("advance", A_SECOND),
            # The bind is sent again, and the next leader does not know the fence.
            ("bind", LEADER, 1),
            ("crash", LEADER),
            ("advance", A_LEASE),
            ("write_fenced", LEADER, 0, 1),
        ],
    ),
    RuleOff(
        "a fence that etcd keeps late changes nothing that came after it",
        _without(_KEEP_FENCE, "mod fences"),
        Rule.FENCED,
        THREE,
        [
            ("claim", LEADER, 0),
            ("link", LEADER, SLOW),
            ("release", LEADER, 0),
            ("advance", A_SECOND),
            # The call to etcd before the one that stores the release; it reports progress.
            ("etcd_applies", LEADER, 0),
            ("etcd_answers", LEADER, 0),
            ("advance", SOME_SECONDS),
            ("advance", A_SECOND),
            ("link", LEADER, FAST),
            ("claim", LEADER, 1),
            ("etcd_applies", LEADER, 0),
            ("crash", LEADER),
            ("advance", A_LEASE),
            ("produce", LEADER, 1),
        ],
    ),
    RuleOff(
        "nobody takes a partition that has an owner",
        _without(_TAKE_OVER, "create partition-leases"),
        Rule.TWO_LEADERS,
        THREE_AND_ONE_IN_SYNC,
        [
            ("link", 2, SLOW),
            ("crash", 0),
            ("advance", A_LEASE),
            # Broker 3 learns the state that 2 has put, and that 1 has gone, but not that 2 leads.
            ("watch_one", 2, 0, 0),
            ("watch_one", 2, 2, 2),
            ("watch_one", 2, 3, 0),
            ("advance", A_WHILE),
            ("delay_watch", 1, 3, 3),
            ("etcd_applies", 2, 0),
            ("etcd_answers", 2, 0),
        ],
    ),
    RuleOff(
        "who takes over has seen the latest ISR",
        _without(_TAKE_OVER, "mod partitions"),
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        [
            ("lag", 1),
            ("lag", 2),
            # Broker 3 does not learn in time that it has left the ISR.
            ("delay_watch", 2, 2, 3),
            ("advance", A_LEASE),
            ("produce_idempotent", LEADER, 0),
            ("stop", LEADER),
            ("advance", A_SECOND),
        ],
    ),
    RuleOff(
        "an ISR is changed only from what it was when that was decided",
        _without(_CHANGE_ISR, "mod partitions"),
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        [
            ("lag", 2),
            ("advance", A_LEASE),
            # Broker 3 is back, and the leader proposes it for the ISR twice, because the first proposal has no answer.
            ("link", LEADER, SLOW),
            ("catch_up", 2),
            ("advance", A_SECOND),
            ("link", LEADER, FAST),
            ("advance", SOME_SECONDS),
            ("advance", A_SECOND),
            # It leaves the ISR again; then the first proposal arrives.
            ("lag", 2),
            ("advance", A_LEASE),
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            ("etcd_applies", LEADER, 0),
        ],
    ),
    RuleOff(
        "only the very key that was ours is deleted",
        _without(_RELEASE, "create partition-leases"),
        Rule.TWO_LEADERS,
        HANDS_OVER,
        [
            ("stop", 0),
            ("restart", 0),
            ("advance", SOME_SECONDS),
            # Broker 2 gives the partition back to 1. It does not learn that its key is deleted, and deletes it again.
            ("link", 1, DEAF),
            ("advance", SOME_SECONDS),
            ("delay_watch", 0, 3, 3),
            ("advance", A_LEASE),
        ],
    ),
    RuleOff(
        "a broker's key is put only where there is none",
        _without(_CLAIM_ID, "create brokers"),
        Rule.USURPED,
        THREE,
        [
            ("crash", 2),
            ("restart", 2),
            ("advance", SOME_SECONDS),
            *[("advance", A_SECOND)] * 3,
            # Its predecessor's key is deleted now; the call that puts its own key is still on its way when it dies.
            ("link", 2, SLOW),
            ("advance", A_SECOND),
            ("advance", A_SECOND),
            ("etcd_applies", 2, 0),
            ("etcd_answers", 2, 0),
            ("etcd_applies", 2, 0),
            ("etcd_answers", 2, 0),
            ("crash", 2),
            ("restart", 2),
            ("etcd_applies", 2, 0),
        ],
    ),
    RuleOff(
        "only who lives is in sync",
        _everybody_lives,
        Rule.LINGERS,
        THREE,
        [("stop", 2), ("advance", SOME_SECONDS)],
    ),
    RuleOff(
        "only who has caught up of late is in sync",
        _wanted_isr_with(_isr_lag_s=float("inf")),
        Rule.LINGERS,
        THREE,
        [("lag", 2), ("advance", A_LEASE)],
    ),
    RuleOff(
        "who waits for more has caught up as of its last request",
        _who_waits_is_heard_of_for_ever,
        Rule.LINGERS,
        THREE,
        [("produce", LEADER, 1), ("advance", A_SECOND), ("lag", 2), ("advance", A_LEASE)],
    ),
    RuleOff(
        "who joins the ISR has all that is committed",
        _wanted_isr_with(high_watermark=0),
        Rule.LOST,
        THREE,
        [
            ("lag", 2),
            ("advance", A_LEASE),
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            # When it fetches again it has the end of the log with its first request.
            ("fetch", 2),
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            ("ask", 2),
            ("arrive", 0),
            ("advance", A_SECOND),
        ],
    ),
    RuleOff(
        "who joins the ISR has all that there was when the epoch began",
        _wanted_isr_with(epoch_start_offset=0),
        Rule.LOST,
        THREE,
        [
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            # Broker 3 leaves the ISR; later batches are committed, and broker 2 does not know that they are.
            ("lag", 2),
            ("advance", A_LEASE),
            ("lag", 1),
            ("produce_idempotent", LEADER, 0),
            ("fetch", 1),
            ("ask", 1),
            ("arrive", 0),
            ("lose", 0),
            ("crash", 0),
            ("advance", A_LEASE),
            ("ask", 2),
            ("arrive", 0),
            ("advance", A_WHILE),
        ],
    ),
    RuleOff(
        "a lease is believed in for a little less than its TTL",
        _no_margin,
        Rule.TWO_LEADERS,
        CLOCKS_APART,
        [("produce_idempotent", LEADER, 0), ("advance", A_SECOND), ("link", 0, CUT), ("advance", A_LEASE)],
    ),
    RuleOff(
        "a lease is believed in from when its keepalive was sent",
        _deadline_from_the_answer,
        Rule.TWO_LEADERS,
        THREE,
        [
            ("keepalives", LEADER, 1),
            ("advance", SOME_SECONDS),
            ("link", 0, CUT),
            ("advance", A_LEASE),
        ],
    ),
    RuleOff(
        "the fence is looked at before the append",
        _append_with(_FenceNotAskedFirst),
        Rule.ZOMBIE,
        THREE,
        [
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            ("link", LEADER, CUT),
            ("advance", A_LEASE),
            ("resend", 0, 0, 5),
        ],
    ),
    RuleOff(
        "the fence is looked at where nobody has to be waited for",
        _no_fence_where_it_is_committed_already,
        Rule.ZOMBIE,
        THREE,
        [
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            ("freeze_within", LEADER, 1, 1),
            ("resend", LEADER, 0, 0),
        ],
    ),
    RuleOff(
        "who gives way waits until followers have what acks=1 acknowledged",
        _nobody_is_waited_for,
        Rule.GAVE_WAY,
        THREE,
        [("produce", LEADER, 1), ("stop", LEADER), ("advance", A_SECOND)],
    ),
    RuleOff(
        "while a partition is owned, who is bound to no fence writes nothing",
        _who_is_bound_to_none_writes,
        Rule.FENCED,
        THREE,
        [("claim", LEADER, 0), ("produce", LEADER, 1)],
    ),
    RuleOff(
        "a bind of a lower fence is refused",
        _lower_fences_are_kept,
        Rule.FENCED,
        THREE,
        [("claim", LEADER, 0), ("claim", LEADER, 1), ("bind", LEADER, 0), ("write_fenced", LEADER, 0, 1)],
    ),
]
