"""The rules of replication, each switched off: what the model has to find, or it would find nothing.

Every entry patches product code for as long as a test runs, and comes with a run that the model found or that a text
describes: with the rule on nothing happens in it, with the rule off it ends in a Violation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from codec import error_codes
from codec.fetch import EpochEnd
from codec.own import FenceBinding
from kproxy.broker import candidates, data_dir, leases, partition, take_over, turns
from kproxy.broker.apis import bind_fences
from kproxy.broker.cluster import ClusterView, Topic
from kproxy.broker.data_dir import DataDir
from kproxy.broker.fence_keeper import FenceKeeper
from kproxy.broker.keys import log_id_of_version_1
from kproxy.broker.log import Log
from kproxy.broker.partition import AppendResult, Partition, ReadResult
from kproxy.broker.producer_state import Judgement, ProducerStates, Verdict
from kproxy.broker.replication.manager import ReplicationManager
from kproxy.broker.replication.reconciliation import Reconciliation
from kproxy.broker.writer_fence import KeptFence, WriterFence
from kproxy.ownership.etcd import EtcdClient, TxnCompare, TxnOp, TxnResult
from tests.support.replication_checks import Rule
from tests.support.replication_model import LEADER, Setting, Taken

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
    """The StreamBus text's rule, to the letter."""

    def reconcile_as_new_leader(self, log: Log, high_watermark: int, leader_epoch: int) -> int:
        log.truncate_to(high_watermark)
        return super().reconcile_as_new_leader(log, high_watermark, leader_epoch)

    def reconcile_as_new_follower(self, log: Log, high_watermark: int) -> None:
        log.truncate_to(high_watermark)


def truncate_to_high_watermark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partition, "Reconciliation", TruncateToHighWatermark)


def _count_only_committed_isr(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicationManager, "in_sync", property(lambda manager: manager.isr.members))


def _count_proposed_isr(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicationManager, "in_sync", property(lambda manager: manager.proposed or manager.isr.members))


def _ask_for_no_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "check_leader_epoch", lambda replica, epoch: error_codes.NONE)


def _find_no_divergence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(partition, "leader_end_for", lambda log, leader_epoch: EpochEnd(leader_epoch, 1 << 62))


class _FenceBelievedOnce:
    """Is asked as often as the fence was, and says for good what that said first."""

    def __init__(self, fence: partition.Fence) -> None:
        self._fence = fence
        self._first: bool | None = None

    def is_live(self) -> bool:
        now = self._fence.is_live()
        self._first = now if self._first is None else self._first
        return self._first


def _no_fence_after_the_write(patch: pytest.MonkeyPatch) -> None:
    append = Partition.append_as_leader

    def append_without(replica: Partition, *arguments: Any) -> AppendResult:
        fence = replica._fence
        replica._fence = _FenceBelievedOnce(fence)
        try:
            return append(replica, *arguments)
        finally:
            replica._fence = fence

    patch.setattr(Partition, "append_as_leader", append_without)


def _no_fence_before_the_answer(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_isr(replica: Partition, offset: int, timeout_s: float) -> int:
        error_code = await replica.replication.wait_for_isr(offset, timeout_s)
        replica._fence.is_live()
        return error_code

    patch.setattr(Partition, "wait_for_isr", wait_for_isr)


def _no_fence_before_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "serves_reads", lambda replica: replica.replication.is_leading)


def _anybody_may_take_over(patch: pytest.MonkeyPatch) -> None:
    def place_in_line(view: ClusterView, topic: Topic, partition_index: int, node_id: int, *, count_dead: bool) -> int:
        live = {*view.brokers, node_id}
        return [each for each in view.replicas(topic, partition_index) if count_dead or each in live].index(node_id)

    for module in (candidates, leases, turns):
        patch.setattr(module, "place_in_line", place_in_line)
    patch.setattr(leases, "is_in_sync", lambda *_: True)


def _a_broker_is_its_disk(patch: pytest.MonkeyPatch) -> None:
    keep_id = DataDir._keep_id
    patch.setattr(DataDir, "_keep_id", lambda made, topic_id, index, _: keep_id(made, topic_id, index, made.log_id))
    patch.setattr(data_dir, "_claim", lambda _, node_id: log_id_of_version_1(node_id))


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


def _latest_is_the_high_watermark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "latest_offset", lambda replica: replica.high_watermark)


def _producers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerStates, "judge", lambda states, batch: Judgement(Verdict.ACCEPTED))


def _nobody_reads_fences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(take_over, "kept_fence", lambda kvs, topic_id: KeptFence())


def _older_fences_write(patch: pytest.MonkeyPatch) -> None:
    refusal = WriterFence.refusal
    patch.setattr(WriterFence, "refusal", lambda writers, bound: None if bound else refusal(writers, bound))


def _a_bind_that_is_refused_says_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bind_fences, "_BINDING", (error_codes.NONE, error_codes.NOT_LEADER_OR_FOLLOWER))


def _fences_count_before_etcd_keeps_them(patch: pytest.MonkeyPatch) -> None:
    keep = FenceKeeper._keep

    async def keep_here_first(keeper: FenceKeeper, replica: Partition, asked: FenceBinding) -> int:
        replica.writers.keep(KeptFence(asked.fence, not asked.is_released, replica.writers.revision))
        return await keep(keeper, replica, asked)

    patch.setattr(FenceKeeper, "_keep", keep_here_first)


def _late_fences_overwrite(patch: pytest.MonkeyPatch) -> None:
    txn = EtcdClient.txn

    async def unguarded(client: EtcdClient, compares: Sequence[TxnCompare], *operations: Sequence[TxnOp]) -> TxnResult:
        return await txn(client, [each for each in compares if b"/fences/" not in each.message.key], *operations)

    patch.setattr(EtcdClient, "txn", unguarded)


THREE = Setting(3, min_insync_replicas=2)
THREE_AND_ONE_IN_SYNC = Setting(3, min_insync_replicas=1)

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
    # Broker 1's question, which says that it has everything, is under way when it dies and leaves the ISR.
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
"""A question of a dead broker makes its successor, whose disk is empty, one in sync."""
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
    # Broker 2 proposes that 1 is in sync again; etcd hears of it when 1 has lost its disk.
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
"""The leader dies; the follower that has the record, and has not been told that it is committed, is elected."""

RULES_OFF = [
    RuleOff("a log is kept, not cut to the high watermark", truncate_to_high_watermark, Rule.LOST, THREE, KIP_101),
    RuleOff("a late fetch tells of one disk", _a_broker_is_its_disk, Rule.LOST, THREE, KIP_903_LATE_FETCH),
    RuleOff("a late proposal names one disk", _a_broker_is_its_disk, Rule.LOST, THREE, KIP_903_LATE_PROPOSAL),
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
            # Broker 3 has a record and says so, in a question that is late.
            ("lag", 1),
            ("lag", 2),
            ("produce", LEADER, 1),
            ("fetch", 2),
            ("ask", 2),
            # Broker 2, without that record, leads for a moment, too short for an ISR change; 3 truncates to its log.
            ("link", 1, SLOW),
            ("crash", 0),
            ("freeze", 2),
            ("advance", A_LEASE),
            ("watch", 1, 2),
            ("etcd_applies", 1, 0),
            ("etcd_answers", 1, 0),
            ("thaw", 2),
            ("fetch", 2),
            ("keep", 1),
            ("crash", 1),
            # Broker 1 leads again, with the record, and now gets the question.
            ("restart", 0),
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
        _no_fence_after_the_write,
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
        # What is sent on the second connection comes when nobody owns the partition any more.
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
            # Asked again, and the next leader has never heard of it.
            ("bind", LEADER, 1),
            ("crash", LEADER),
            ("advance", A_LEASE),
            ("write_fenced", LEADER, 0, 1),
        ],
    ),
    RuleOff(
        "a fence that etcd keeps late changes nothing that came after it",
        _late_fences_overwrite,
        Rule.FENCED,
        THREE,
        [
            ("claim", LEADER, 0),
            ("link", LEADER, SLOW),
            ("release", LEADER, 0),
            ("advance", A_SECOND),
            # What etcd was asked before it is asked to keep the release: how far it has come.
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
]
