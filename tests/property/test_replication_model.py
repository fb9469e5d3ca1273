"""Replication under faults of brokers, of their links to etcd and to each other: a stateful model.

Hypothesis draws the steps, `tests.support.models.replication_model` takes them on real partitions, logs and lease
managers, and `tests.support.models.replication_checks` judges. `make sim SEEDS=100000` runs it as long as one likes.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.models.replication_checks import Rule, Violation
from tests.support.models.replication_model import (
    FENCE_STEPS,
    LEADER,
    STEPS,
    Setting,
    Taken,
    World,
    broken_by,
    shortened,
)
from tests.support.models.replication_rules_off import (
    A_LEASE,
    A_SECOND,
    KIP_101,
    RULES_OFF,
    SLOW,
    SOME_SECONDS,
    THREE,
    RuleOff,
    Runs,
    truncate_to_high_watermark,
)
from tests.support.models.replication_search import search as search_by_weights

EXAMPLES = int(os.environ.get("KPROXY_SIM_SEEDS", "40"))
SEED = int(os.environ.get("KPROXY_SIM_FIRST_SEED", "1"))
# Of the runs with all rules in force: a new one each time.
NEW_SEED = SEED if "KPROXY_SIM_FIRST_SEED" in os.environ else secrets.randbelow(1 << 40)
REPLICATION = [name for name in STEPS if name not in FENCE_STEPS]
# Rules that are found by random runs, and in how many at most.
EVERY_RULE = os.environ.get("KPROXY_SIM_RULES") == "all"
MOST_RUNS = {Runs.FEW: 1000, Runs.MANY: 5000}
STEPS_PER_RUN = int(os.environ.get("KPROXY_SIM_STEPS", "50"))
# Hypothesis remembers every run of one search, a quarter of a megabyte each.
RUNS_AT_A_TIME = 500


class ReplicationMachine(RuleBasedStateMachine):
    """One cluster; the rules are the model's steps."""

    watched = frozenset(Rule)
    broken: World | None = None
    world: World | None = None

    @initialize(
        brokers=st.integers(3, 5),
        min_insync_replicas=st.integers(1, 2),
        retention_bytes=st.sampled_from([-1, 300]),
        rates=st.permutations([1.0, 1.0, 1.0, 1.03, 0.97]),
        hand_over_after_s=st.sampled_from([float("inf"), float("inf"), 5.0]),
    )
    def begin(
        self, brokers: int, min_insync_replicas: int, retention_bytes: int, rates: list[float], hand_over_after_s: float
    ) -> None:
        setting = Setting(brokers, min_insync_replicas, retention_bytes, tuple(rates), hand_over_after_s)
        self.world = World(setting, self.watched)

    def teardown(self) -> None:
        if self.world is not None:
            try:
                if not self.world.judge.is_broken:
                    self.world.recover()
            finally:
                if self.world.judge.is_broken:
                    type(self).broken = self.world
                self.world.close()


def _add_rule(name: str, arguments: int, copy: int) -> None:
    def take(self: ReplicationMachine, **drawn: int) -> None:
        if self.world is not None:
            self.world.step(name, *drawn.values())

    def could(self: ReplicationMachine) -> bool:
        return self.world is not None and STEPS[name].could(self.world)

    take.__name__ = f"{name}_{copy}"
    numbers = {f"argument_{position}": st.integers(0, 9) for position in range(arguments)}
    setattr(ReplicationMachine, take.__name__, precondition(could)(rule(**numbers)(take)))


for _name, _step in STEPS.items():
    for _copy in range(_step.weight):
        _add_rule(_name, _step.arguments, _copy)


class Found(NamedTuple):
    """A run that broke something, shortened."""

    setting: Setting
    steps: list[Taken]
    violation: Violation


def search(
    examples: int, first_seed: int, watched: frozenset[Rule] = frozenset(Rule), steps: Collection[str] = REPLICATION
) -> Found | None:
    """The first run, of so many drawn from that seed and of those steps, that breaks a rule that is watched."""
    left_out = {
        f"{name}_{copy}": None for name, step in STEPS.items() if name not in steps for copy in range(step.weight)
    }
    Machine: type[ReplicationMachine] = type("Machine", (ReplicationMachine,), left_out)  # noqa: N806 - a class
    Machine.watched = watched
    try:
        for done in range(0, examples, RUNS_AT_A_TIME):
            run_state_machine_as_test(
                seed(f"{first_seed} {done}" if done else first_seed)(Machine),
                settings=settings(
                    max_examples=min(RUNS_AT_A_TIME, examples - done),
                    stateful_step_count=STEPS_PER_RUN,
                    database=None,
                    # Shortening whole steps, as the model can, takes seconds where Hypothesis would take minutes.
                    phases=[Phase.generate],
                    report_multiple_bugs=False,
                    suppress_health_check=list(HealthCheck),
                ),
            )
    except Violation as violation:
        broken = Machine.broken
        if broken is None:
            raise
        steps = shortened(broken.setting, broken.taken, watched)
        return Found(broken.setting, steps, broken_by(broken.setting, steps, watched) or violation)
    return None


def test_random_events_break_no_partition_promise() -> None:
    print(f"KPROXY_SIM_FIRST_SEED={NEW_SEED}")
    found = search(EXAMPLES, NEW_SEED)
    assert found is None, f"{found.violation}\n{found.setting}\n" + ",\n".join(map(str, found.steps))


def test_truncating_to_high_watermark_loses_acknowledged_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the StreamBus text. KIP_101 is such a run, made to be read."""
    truncate_to_high_watermark(monkeypatch)
    loss = broken_by(THREE, KIP_101)
    assert loss is not None
    assert "the leader, has nothing there" in str(loss)


def test_a_world_leaves_nothing_open() -> None:
    """Thousands of runs go through one process, which may have only so many files open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        broken_by(THREE, [*KIP_101, ("restart", 0), ("stop", 1), ("advance", SOME_SECONDS), ("restart", 1)])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


FOUND_ONCE: dict[str, tuple[Setting, list[Taken]]] = {
    # It asked again and again where the logs part, and cut nothing off, since there was nothing.
    "a broker that led and wrote nothing follows again after a restart": (
        Setting(3, min_insync_replicas=1),
        [
            ("produce", LEADER, 1),
            ("link", 1, SLOW),
            ("crash", 0),
            ("freeze", 2),
            ("advance", A_LEASE),
            ("watch", 1, 2),
            ("etcd_applies", 1, 0),
            ("etcd_answers", 1, 0),
            ("keep", 1),
            ("crash", 1),
        ],
    ),
    # What deleted its key came late, when it led again under the same one; and then another led as well.
    "who gives up a partition does not take it again before it is known to have gone": (
        Setting(3, min_insync_replicas=2, hand_over_after_s=5.0),
        [
            ("crash", 0),
            ("advance", A_LEASE),
            ("restart", 0),
            ("advance", A_SECOND),
            ("link", 1, SLOW),
            ("advance", SOME_SECONDS),
            ("advance", SOME_SECONDS),
            ("etcd_applies", 1, 1),
            ("etcd_answers", 1, 0),
            ("etcd_applies", 1, 1),
            ("etcd_answers", 1, 0),
            ("etcd_applies", 1, 0),
            ("advance", A_SECOND),
        ],
    ),
    # The next leader's take-over made a newer state, in sync in which it was still, and then it took over itself.
    "a broker that lost its disk does not lead before it has caught up": (
        Setting(3, min_insync_replicas=2),
        [
            ("produce_idempotent", LEADER, 0),
            ("advance", A_SECOND),
            ("crash", 2),
            ("wipe", 2),
            ("crash", 0),
            ("freeze", 1),
            ("restart", 2),
            ("lag", 2),
            ("advance", A_LEASE),
            ("thaw", 1),
            ("crash", 1),
            ("advance", A_LEASE),
        ],
    ),
}
"""What the model has found in the product, shortened."""


def test_follower_does_not_keep_records_leader_retired() -> None:
    """The leader cannot say where their logs part if it has removed the segment with that offset.

    Without the follower's reset its segment stays, with records of an earlier leader that were never replicated.
    """
    setting = Setting(4, 1, 300, (1.0, 1.0, 1.03, 0.97, 1.0), hand_over_after_s=5.0)
    steps: list[Taken] = [
        ("produce_idempotent", 9, 3),
        ("produce", 4, 8),
        ("advance", 3),
        ("produce", 0, 2),
        ("freeze", 4),
        ("advance", 7),
        ("produce_idempotent", 1, 5),
        ("advance", 3),
        ("produce_idempotent", 1, 3),
        ("advance", 7),
        ("freeze", 5),
        ("advance", 3),
        ("produce_idempotent", 6, 9),
        ("produce_idempotent", 5, 2),
        ("advance", 7),
        ("advance", 8),
        ("produce", 2, 2),
    ]
    assert broken_by(setting, steps) is None


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


SEARCHED = [each for each in RULES_OFF if each.takes is Runs.FEW or EVERY_RULE]
"""Those that random runs find; with KPROXY_SIM_RULES=all also those for which it takes hundreds."""


# Each rule has a run that is written down as well.
@pytest.mark.long(but=4)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule_off", SEARCHED, ids=lambda rule_off: rule_off.name.replace(" ", "_"))
def test_random_runs_find_each_rule_that_is_off(
    rule_off: RuleOff, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a seed, in no more runs than these; what is found is the rule's doing."""
    began_at = time.process_time()
    with monkeypatch.context() as patch:
        rule_off.off(patch)
        runs, watched = MOST_RUNS[rule_off.takes], frozenset({rule_off.found})
        found = search_by_weights(
            range(SEED, SEED + runs),
            [rule_off.setting],
            rule_off.weights,
            watched,
            begin=rule_off.situation,
            steps=rule_off.length,
            shorten=False,
        )
    assert found is not None, f"not in {runs} runs from seed {SEED}"
    with capsys.disabled():
        print(f"\n{rule_off.name}: run {found.runs} from seed {SEED}, {time.process_time() - began_at:.1f} s of CPU")
    assert broken_by(found.setting, found.steps) is None, f"with the rule on, seed {found.seed}"
