"""Writers that claim a replicated partition from one another, and never stop by themselves: random runs of the model.

The world is that of `test_replication_model`; the runs are drawn here, by weights, for what matters is dense in them:
claims, leaders that change, and an etcd that is slow or loses what it was asked. The first claim alone ends what others
write, so that little of a run that says nothing of fences would say anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from tests.support.replication_checks import Violation
from tests.support.replication_model import LEADER, STEPS, Setting, Taken, World, broken_by, shortened

RUNS = int(os.environ.get("KPROXY_SIM_SEEDS", "25"))
SEED = int(os.environ.get("KPROXY_SIM_FIRST_SEED", "1"))
STEPS_PER_RUN = 60
WEIGHTS = {
    "claim": 6,
    "bind": 4,
    "write_fenced": 16,
    "release": 1,
    "hang_up": 1,
    "produce": 2,
    "advance": 5,
    "crash": 1,
    "restart": 6,
    "freeze": 1,
    "thaw": 4,
    "freeze_within": 1,
    "stop": 0.5,
    "fail_disk": 0.5,
    "link": 3,
    "etcd_applies": 8,
    "etcd_answers": 6,
    "etcd_loses": 1,
    "watch": 2,
}


class Found(NamedTuple):
    """A run that broke something, shortened."""

    seed: int
    setting: Setting
    steps: list[Taken]
    violation: Violation


def run(seed: int) -> tuple[Setting, list[Taken], Violation | None]:
    """A run drawn from that seed, and recovery after it."""
    random = Random(seed)
    handed_over_after_s = random.choice((float("inf"), 5.0))
    setting = Setting(3, random.randint(1, 2), hand_over_after_s=handed_over_after_s)
    with World(setting) as world:
        try:
            for _ in range(STEPS_PER_RUN):
                _step(world, random)
            world.recover()
        except Violation as violation:
            return setting, world.taken, violation
        return setting, world.taken, None


def _step(world: World, random: Random) -> None:
    names = [name for name in WEIGHTS if STEPS[name].could(world)]
    [name] = random.choices(names, [WEIGHTS[name] for name in names])
    # The first number is a broker mostly, and what befalls the leader matters most.
    first = LEADER if random.random() < 0.6 else random.randrange(5)
    world.step(name, *[first, *(random.randrange(10) for _ in range(2))][: STEPS[name].arguments])


def search(seeds: Iterable[int]) -> Found | None:
    for seed in seeds:
        setting, taken, violation = run(seed)
        if violation is not None:
            steps = shortened(setting, taken)
            return Found(seed, setting, steps, broken_by(setting, steps) or violation)
    return None


def test_no_writer_gets_through_behind_its_successor() -> None:
    found = search(range(SEED, SEED + RUNS))
    assert found is None, f"seed {found.seed}: {found.violation}\n{found.setting}\n" + ",\n".join(map(str, found.steps))
