"""Switch off each rule of replication: the model must find a violation for each, which proves that it can.

Every entry patches product code for as long as a test runs, and has a run that the model found or that a text
describes: with the rule on it finds nothing, with the rule off it ends in a Violation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from tests.support.models import broken_rules
from tests.support.models.replication_checks import Rule
from tests.support.models.replication_model import Setting, Taken, script


class RuleOff(NamedTuple):
    """`off` switches the rule off; `steps` then end in a violation of `found`."""

    name: str
    off: Callable[[pytest.MonkeyPatch], None]
    found: Rule
    setting: Setting
    steps: list[Taken]


THREE = Setting(3, min_insync_replicas=2)
THREE_AND_ONE_IN_SYNC = Setting(3, min_insync_replicas=1)
HANDS_OVER = Setting(3, min_insync_replicas=1, hand_over_after_s=5.0)
CLOCKS_APART = Setting(3, min_insync_replicas=2, rates=(0.97, 1.03, 1.0, 1.0, 1.0))


# Broker 1 leads, 2 and 3 follow. Both have what is acknowledged; only 3 knows that the high watermark has passed it.
_ACKNOWLEDGED = script("lag 1, lag 2, produce_idempotent leader 0, fetch 1, fetch 2, fetch 1, fetch 2")
_THIRD_LEFT_THE_ISR = script("crash 2, advance a_lease")

# Broker 1, the first in line, has died and come back while 2 leads; all are in sync.
_ONE_IS_BACK = script(
    "crash 0, advance a_lease, restart 0, advance a_second, advance seconds, produce_idempotent leader 0",
    "advance a_second",
)
KIP_903_LATE_FETCH = script(
    _ONE_IS_BACK,
    # Broker 1's request, which shows that it has all batches, is under way when it dies and leaves the ISR.
    "lag 0, ask 0, crash 0, advance a_lease, wipe 0, restart 0, lag 0, arrive 0, advance a_while, crash 1",
    "advance a_lease, advance a_second",
)
"""A request of a dead broker puts its successor, whose disk is empty, into the ISR."""
KIP_903_LATE_PROPOSAL = script(
    "crash 0, advance a_lease, produce_idempotent leader 0, advance a_second, restart 0, lag 0, link 1 slow",
    "watch 1 2, watch 1 2, fetch 0, fetch 0, fetch 0, fetch 0",
    # Broker 2 proposes that 1 is in sync again; the proposal reaches etcd when 1 has lost its disk.
    "advance a_while, crash 0, wipe 0, advance a_lease, restart 0, lag 0, etcd_applies 1 0, advance a_while",
    "crash 1, advance a_lease, advance a_second",
)
KIP_101 = script(_ACKNOWLEDGED, "crash 0, advance a_lease")
"""The leader dies; the follower that has the record, and does not know that it is committed, is elected."""

RULES_OFF = [
    RuleOff(
        "a log is kept, not cut to the high watermark",
        broken_rules.truncate_to_high_watermark,
        Rule.LOST,
        THREE,
        KIP_101,
    ),
    RuleOff(
        "a late fetch tells of one disk",
        broken_rules.a_broker_is_its_disk,
        Rule.LOST,
        THREE,
        KIP_903_LATE_FETCH,
    ),
    RuleOff(
        "a late proposal names one disk",
        broken_rules.a_broker_is_its_disk,
        Rule.LOST,
        THREE,
        KIP_903_LATE_PROPOSAL,
    ),
    RuleOff(
        "an expansion counts from the moment it is proposed",
        broken_rules.count_only_committed_isr,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        script(
            _THIRD_LEFT_THE_ISR,
            "link leader deaf, restart 2, advance a_second, advance a_second, lag 2, produce_idempotent leader 0",
            "advance a_second",
        ),
    ),
    RuleOff(
        "a shrink counts only once its transaction succeeded",
        broken_rules.count_proposed_isr,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        script("link leader slow, lag 2, produce_idempotent leader 0, advance a_lease, produce leader 1"),
    ),
    RuleOff(
        "a fetch of another leader epoch is refused",
        broken_rules.ask_for_no_epoch,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        script(
            # Broker 3 has a record and reports it in a request that is delayed.
            "lag 1, lag 2, produce leader 1, fetch 2, ask 2",
            # Broker 2, without that record, leads for a moment, too short for an ISR change; 3 truncates to its log.
            "link 1 slow, link 0 cut, freeze 2, advance a_lease, watch 1 2, etcd_applies 1 0, etcd_answers 1 0",
            "thaw 2, fetch 2, keep 1, crash 1",
            # Broker 1 leads again, with the record, and now gets the request, on the connection that it came on.
            "link 0 fast, advance a_lease, arrive 0",
        ),
    ),
    RuleOff(
        "a follower is told where its log leaves the leader's",
        broken_rules.find_no_divergence,
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        script(
            "lag 1, lag 2, produce leader 1, crash 0, advance a_lease, produce_idempotent leader 0, restart 0",
            "advance a_lease, advance a_lease",
        ),
    ),
    RuleOff(
        "the fence is looked at after the write",
        broken_rules.append_with(broken_rules.FenceBelievedOnce),
        Rule.ZOMBIE,
        THREE,
        script("freeze_within leader 1 1, produce leader 1"),
    ),
    RuleOff(
        "the fence is looked at before the answer",
        broken_rules.no_fence_before_the_answer,
        Rule.ZOMBIE,
        THREE,
        script(_ACKNOWLEDGED[:-1], "freeze_within leader 2 1, fetch 2"),
    ),
    RuleOff(
        "the fence is looked at before a read",
        broken_rules.no_fence_before_reads,
        Rule.WENT_BACK,
        THREE,
        script(
            "produce leader 0, advance a_second, link leader cut, advance a_lease, produce 1 0, advance a_second",
            "consume 1, consume 1, consume 0",
        ),
    ),
    RuleOff(
        "only a member of the ISR may take over",
        broken_rules.anybody_may_take_over,
        Rule.LOST,
        THREE,
        script(
            _THIRD_LEFT_THE_ISR,
            "produce_idempotent leader 0, advance a_second, restart 2, lag 2, advance a_second, crash 0, crash 1",
            "advance a_lease",
        ),
    ),
    RuleOff(
        "a new leader waits for the others before it calls its log committed",
        broken_rules.all_is_committed_at_take_over,
        Rule.LOST,
        THREE,
        script("lag 2, produce leader 1, advance a_second, crash 0, advance a_lease"),
    ),
    RuleOff(
        "consumers see nothing above the high watermark",
        broken_rules.consumers_read_all,
        Rule.LOST,
        THREE,
        script("lag 1, produce leader 1, consume leader"),
    ),
    RuleOff(
        "a consumer above a new leader's high watermark waits",
        broken_rules.nothing_exists_above_the_high_watermark,
        Rule.WENT_BACK,
        THREE,
        script(_ACKNOWLEDGED, "consume leader, crash 0, advance a_lease, consume leader"),
    ),
    RuleOff(
        "a new leader tells no latest offset before its epoch's start is committed",
        broken_rules.latest_is_the_high_watermark,
        Rule.WENT_BACK,
        THREE,
        script(_ACKNOWLEDGED, "consume leader, crash 0, advance a_lease, consume leader"),
    ),
    RuleOff(
        "a producer's last batches are known to the next leader",
        broken_rules.producers_are_forgotten,
        Rule.DOUBLED,
        THREE,
        script(KIP_101, "resend leader 0 0"),
    ),
    RuleOff(
        "who is bound to an older fence writes nothing",
        broken_rules.older_fences_write,
        Rule.FENCED,
        THREE,
        script("claim leader 0, claim leader 1, write_fenced leader 0 1"),
    ),
    RuleOff(
        "a bind that is refused says what is written behind it",
        broken_rules.a_bind_that_is_refused_says_nothing,
        Rule.FENCED,
        THREE,
        # The batch on the second connection arrives when nobody owns the partition any more.
        script("claim leader 0, hang_up leader 0, release leader 0, write_fenced leader 0 1"),
    ),
    RuleOff(
        "whoever takes over reads the fence",
        broken_rules.nobody_reads_fences,
        Rule.FENCED,
        THREE,
        script("claim leader 0, crash leader, advance a_lease, produce leader 1"),
    ),
    RuleOff(
        "a fence counts only once etcd keeps it",
        broken_rules.fences_count_before_etcd_keeps_them,
        Rule.FENCED,
        THREE,
        script(
            "claim leader 0, link leader cut, claim leader 1, advance seconds, advance a_second",
            # The bind is sent again, and the next leader does not know the fence.
            "bind leader 1, crash leader, advance a_lease, write_fenced leader 0 1",
        ),
    ),
    RuleOff(
        "a fence that etcd keeps late changes nothing that came after it",
        broken_rules.without(broken_rules.KEEP_FENCE, "mod fences"),
        Rule.FENCED,
        THREE,
        script(
            "claim leader 0, link leader slow, release leader 0, advance a_second",
            # The etcd call before the one that stores the release; its answer makes progress.
            "etcd_applies leader 0, etcd_answers leader 0, advance seconds, advance a_second, link leader fast",
            "claim leader 1, etcd_applies leader 0, crash leader, advance a_lease, produce leader 1",
        ),
    ),
    RuleOff(
        "nobody takes a partition that has an owner",
        broken_rules.without(broken_rules.TAKE_OVER, "create partition-leases"),
        Rule.TWO_LEADERS,
        THREE_AND_ONE_IN_SYNC,
        script(
            "link 2 slow, crash 0, advance a_lease",
            # Broker 3 learns the state that 2 has put, and that 1 has gone, but not that 2 leads.
            "watch_one 2 0 0, watch_one 2 2 2, watch_one 2 3 0, advance a_while, delay_watch 1 3 3",
            "etcd_applies 2 0, etcd_answers 2 0",
        ),
    ),
    RuleOff(
        "who takes over has seen the latest ISR",
        broken_rules.without(broken_rules.TAKE_OVER, "mod partitions"),
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        script(
            "lag 1, lag 2",
            # Broker 3 does not learn in time that it has left the ISR.
            "delay_watch 2 2 3, advance a_lease, produce_idempotent leader 0, stop leader, advance a_second",
        ),
    ),
    RuleOff(
        "an ISR is changed only from what it was when that was decided",
        broken_rules.without(broken_rules.CHANGE_ISR, "mod partitions"),
        Rule.LOST,
        THREE_AND_ONE_IN_SYNC,
        script(
            "lag 2, advance a_lease",
            # Broker 3 is back, and the leader proposes it for the ISR twice, because the first proposal has no answer.
            "link leader slow, catch_up 2, advance a_second, link leader fast, advance seconds, advance a_second",
            # It leaves the ISR again; then the first proposal arrives.
            "lag 2, advance a_lease, produce_idempotent leader 0, advance a_second, etcd_applies leader 0",
        ),
    ),
    RuleOff(
        "only the very key that was ours is deleted",
        broken_rules.without(broken_rules.RELEASE, "create partition-leases"),
        Rule.TWO_LEADERS,
        HANDS_OVER,
        script(
            "stop 0, restart 0, advance seconds",
            # Broker 2 gives the partition back to 1. It does not learn that its key is deleted, and deletes it again.
            "link 1 deaf, advance seconds, delay_watch 0 3 3, advance a_lease",
        ),
    ),
    RuleOff(
        "a broker's key is put only where there is none",
        broken_rules.without(broken_rules.CLAIM_ID, "create brokers"),
        Rule.USURPED,
        THREE,
        script(
            "crash 2, restart 2, advance seconds, advance a_second, advance a_second, advance a_second",
            # Its predecessor's key is deleted now; the call that puts its own key is still on its way when it dies.
            "link 2 slow, advance a_second, advance a_second, etcd_applies 2 0, etcd_answers 2 0",
            "etcd_applies 2 0, etcd_answers 2 0, crash 2, restart 2, etcd_applies 2 0",
        ),
    ),
    RuleOff(
        "only who lives is in sync",
        broken_rules.everybody_lives,
        Rule.LINGERS,
        THREE,
        script("stop 2, advance seconds"),
    ),
    RuleOff(
        "only who has caught up of late is in sync",
        broken_rules.wanted_isr_with(_isr_lag_s=float("inf")),
        Rule.LINGERS,
        THREE,
        script("lag 2, advance a_lease"),
    ),
    RuleOff(
        "who waits for more has caught up as of its last request",
        broken_rules.who_waits_is_heard_of_for_ever,
        Rule.LINGERS,
        THREE,
        script("produce leader 1, advance a_second, lag 2, advance a_lease"),
    ),
    RuleOff(
        "who joins the ISR has all that is committed",
        broken_rules.wanted_isr_with(high_watermark=0),
        Rule.LOST,
        THREE,
        script(
            "lag 2, advance a_lease, produce_idempotent leader 0, advance a_second",
            # With its first fetch it has everything up to the end of the log.
            "fetch 2, produce_idempotent leader 0, advance a_second, ask 2, arrive 0, advance a_second",
        ),
    ),
    RuleOff(
        "who joins the ISR has all that there was when the epoch began",
        broken_rules.wanted_isr_with(epoch_start_offset=0),
        Rule.LOST,
        THREE,
        script(
            "produce_idempotent leader 0, advance a_second",
            # Broker 3 leaves the ISR; later batches are committed, and broker 2 does not know that they are.
            "lag 2, advance a_lease, lag 1, produce_idempotent leader 0, fetch 1, ask 1, arrive 0, lose 0",
            "crash 0, advance a_lease, ask 2, arrive 0, advance a_while",
        ),
    ),
    RuleOff(
        "a lease is believed in for a little less than its TTL",
        broken_rules.no_margin,
        Rule.TWO_LEADERS,
        CLOCKS_APART,
        script("produce_idempotent leader 0, advance a_second, link 0 cut, advance a_lease"),
    ),
    RuleOff(
        "a lease is believed in from when its keepalive was sent",
        broken_rules.deadline_from_the_answer,
        Rule.TWO_LEADERS,
        THREE,
        script("keepalives leader 1, advance seconds, link 0 cut, advance a_lease"),
    ),
    RuleOff(
        "the fence is looked at before the append",
        broken_rules.append_with(broken_rules.FenceNotAskedFirst),
        Rule.ZOMBIE,
        THREE,
        script("produce_idempotent leader 0, advance a_second, link leader cut, advance a_lease, resend 0 0 5"),
    ),
    RuleOff(
        "the fence is looked at where nobody has to be waited for",
        broken_rules.no_fence_where_it_is_committed_already,
        Rule.ZOMBIE,
        THREE,
        script("produce_idempotent leader 0, advance a_second, freeze_within leader 1 1, resend leader 0 0"),
    ),
    RuleOff(
        "who gives way waits until followers have what acks=1 acknowledged",
        broken_rules.nobody_is_waited_for,
        Rule.GAVE_WAY,
        THREE,
        script("produce leader 1, stop leader, advance a_second"),
    ),
    RuleOff(
        "while a partition is owned, who is bound to no fence writes nothing",
        broken_rules.who_is_bound_to_none_writes,
        Rule.FENCED,
        THREE,
        script("claim leader 0, produce leader 1"),
    ),
    RuleOff(
        "a bind of a lower fence is refused",
        broken_rules.lower_fences_are_kept,
        Rule.FENCED,
        THREE,
        script("claim leader 0, claim leader 1, bind leader 0, write_fenced leader 0 1"),
    ),
]
