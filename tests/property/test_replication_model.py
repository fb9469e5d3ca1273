"""Replication keeps its promises under faults of brokers and of their links, in random and in fixed runs.

`tests.support.models.replication_search` draws the steps, `tests.support.models.replication_model` takes them on real
partitions, logs and lease managers, and `tests.support.models.replication_checks` judges. `make sim SEEDS=100000` runs
any number.
"""

from __future__ import annotations

import os
import secrets
from itertools import product
from math import inf
from pathlib import Path
from random import Random

import pytest

from tests.support.models.broken_rules import truncate_to_high_watermark
from tests.support.models.replication_model import FENCE_STEPS, STEPS, Setting, Taken, script
from tests.support.models.replication_recovery import broken_by
from tests.support.models.replication_rules_off import KIP_101, RULES_OFF, THREE, RuleOff
from tests.support.models.replication_search import search
from tests.support.rules import examples

RUNS = int(os.environ.get("KPROXY_SIM_SEEDS", examples(60)))
# A new seed each time.
SEED = int(os.environ.get("KPROXY_SIM_FIRST_SEED", "0")) or secrets.randbelow(1 << 40)
STEPS_PER_RUN = int(os.environ.get("KPROXY_SIM_STEPS", "50"))
# Fences have runs of their own (test_writer_fence_model).
WEIGHTS = {name: step.weight for name, step in STEPS.items() if name not in FENCE_STEPS}
_CLOCKS = Random(0)
SETTINGS = [
    Setting(brokers, min_isr, retention_bytes, tuple(_CLOCKS.sample((1.0, 1.0, 1.0, 1.03, 0.97), 5)), hand_over_after_s)
    for brokers, min_isr, retention_bytes, hand_over_after_s in product((3, 4, 5), (1, 2), (-1, 300), (inf, inf, 5.0))
]


def test_random_events_break_no_partition_promise() -> None:
    print(f"KPROXY_SIM_FIRST_SEED={SEED}")
    found = search(range(SEED, SEED + RUNS), SETTINGS, WEIGHTS, STEPS_PER_RUN)
    assert found is None, str(found)


def test_truncating_to_high_watermark_loses_acknowledged_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the StreamBus text. KIP_101 is such a run, made to be read."""
    truncate_to_high_watermark(monkeypatch)
    loss = broken_by(THREE, KIP_101)
    assert "the leader, has nothing there" in str(loss)


def test_world_leaves_nothing_open() -> None:
    """Thousands of runs share one process, whose number of open files is limited."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        broken_by(THREE, script(KIP_101, "restart 0, stop 1, advance seconds, restart 1"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


FOUND_ONCE: dict[str, tuple[Setting, list[Taken]]] = {
    # The broker once asked repeatedly where the logs diverge, and did not truncate, because its log was empty.
    "a broker that led and wrote nothing follows again after a restart": (
        Setting(3, min_insync_replicas=1),
        script(
            "produce leader 1, link 1 slow, crash 0, freeze 2, advance a_lease, watch 1 2, etcd_applies 1 0",
            "etcd_answers 1 0, keep 1, crash 1",
        ),
    ),
    # The broker's deletion of its key was late: it led again under the same key, and then another broker led as well.
    "who gives up a partition does not take it again before it is known to have gone": (
        Setting(3, min_insync_replicas=2, hand_over_after_s=5.0),
        script(
            "crash 0, advance a_lease, restart 0, advance a_second, link 1 slow, advance seconds",
            "advance seconds, etcd_applies 1 1, etcd_answers 1 0, etcd_applies 1 1, etcd_answers 1 0",
            "etcd_applies 1 0, advance a_second",
        ),
    ),
    # The next leader's take-over wrote a newer state with the broker still in sync, and then the broker took over.
    "a broker that lost its disk does not lead before it has caught up": (
        Setting(3, min_insync_replicas=2),
        script(
            "produce_idempotent leader 0, advance a_second, crash 2, wipe 2, crash 0, freeze 1, restart 2, lag 2",
            "advance a_lease, thaw 1, crash 1, advance a_lease",
        ),
    ),
    # The leader cannot tell where the logs diverge if it has removed the segment with that offset: without a reset the
    # follower keeps its segment, with records of an earlier leader that were never replicated.
    "a follower does not keep records that its leader has retired": (
        Setting(4, 1, 300, (1.0, 1.0, 1.03, 0.97, 1.0), hand_over_after_s=5.0),
        script(
            "produce_idempotent 9 3, produce 4 8, advance a_lease, produce 0 2, freeze 4, advance 7",
            "produce_idempotent 1 5, advance a_lease, produce_idempotent 1 3, advance 7, freeze 5",
            "advance a_lease, produce_idempotent 6 9, produce_idempotent 5 2, advance 7, advance 8, produce 2 2",
        ),
    ),
}
"""The violations that the model has found in the product, shortened."""


@pytest.mark.parametrize("name", FOUND_ONCE)
def test_earlier_counterexamples_stay_fixed(name: str) -> None:
    setting, steps = FOUND_ONCE[name]
    assert broken_by(setting, steps) is None


@pytest.mark.parametrize("rule_off", RULES_OFF, ids=lambda rule_off: rule_off.name.replace(" ", "_"))
def test_each_rule_is_needed(rule_off: RuleOff, monkeypatch: pytest.MonkeyPatch) -> None:
    assert broken_by(rule_off.setting, rule_off.steps) is None, "with the rule on"
    rule_off.off(monkeypatch)
    violation = broken_by(rule_off.setting, rule_off.steps)
    assert violation is not None, "the model has not noticed"
    assert violation.rule is rule_off.found, str(violation)
