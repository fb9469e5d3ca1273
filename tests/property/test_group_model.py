"""Consumer groups keep their promises in random runs, and the search finds a violation if a rule is switched off.

`tests.support.models.group_model` takes the steps and judges, `tests.support.models.group_rules_off` switches the rules
off. `make sim SEEDS=100000` runs any number of seeds, `make sim-rules` every rule.
"""

from __future__ import annotations

import os
import secrets

import pytest

from tests.support.models.group_model import Violation, run
from tests.support.models.group_rules_off import RULES_OFF, RuleOff
from tests.support.rules import examples

RUNS = int(os.environ.get("KPROXY_SIM_SEEDS", examples(120)))
SEED = int(os.environ.get("KPROXY_SIM_FIRST_SEED", "0")) or secrets.randbelow(1 << 40)
# So many runs find each rule that is switched off.
RUNS_OFF = 1_000
STEPS = 300
# Hundreds of runs find these.
FOUND_LATE = ("only the generation's leader assigns", "nothing is told without a lease")


def test_random_events_break_no_group_promise() -> None:
    print(f"KPROXY_SIM_FIRST_SEED={SEED}")
    told = sum(len(run(seed, STEPS).told) for seed in range(SEED, SEED + RUNS))
    assert told > RUNS, "hardly anybody was assigned anything"


@pytest.mark.parametrize(
    "rule_off",
    [
        pytest.param(each, id=each.name.replace(" ", "_"), marks=pytest.mark.long if each.name in FOUND_LATE else ())
        for each in RULES_OFF
    ],
)
def test_each_rule_is_needed(rule_off: RuleOff, monkeypatch: pytest.MonkeyPatch) -> None:
    rule_off.off(monkeypatch)
    found = next((each for each in map(broken_in, range(1, 1 + RUNS_OFF)) if each is not None), None)
    assert found is not None, "the search has not noticed"
    assert found.promise in rule_off.broken, str(found)


def broken_in(seed: int) -> Violation | None:
    try:
        run(seed, STEPS)
    except Violation as violation:
        return violation
    return None
