"""Random runs of the replication model, drawn by weights: one seed, one run.

Hypothesis draws from all steps alike, and looks at what it has drawn; this draws from few steps, as many as somebody
names, and is several times as fast. What a rule is for takes a few steps in the right order, which are rare among all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import NamedTuple

from tests.support.replication_checks import Rule, Violation
from tests.support.replication_model import LEADER, STEPS, Setting, Taken, World, broken_by, shortened

STEPS_PER_RUN = 40
EVERYTHING = frozenset(Rule)


class Found(NamedTuple):
    """A run that broke something, shortened. `runs` is how many it took."""

    runs: int
    seed: int
    setting: Setting
    steps: list[Taken]
    violation: Violation

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.violation}\n{self.setting}\n" + ",\n".join(map(str, self.steps))


def run(
    seed: int,
    setting: Setting,
    weights: Mapping[str, float],
    watched: frozenset[Rule] = EVERYTHING,
    *,
    steps: int = STEPS_PER_RUN,
) -> tuple[list[Taken], Violation | None]:
    """A run drawn from that seed, and recovery after it where that is watched."""
    random = Random(seed)
    with World(setting, watched) as world:
        try:
            for _ in range(steps):
                _step(world, random, weights)
            world.recover()
        except Violation as violation:
            return world.taken, violation
        return world.taken, None


def _step(world: World, random: Random, weights: Mapping[str, float]) -> None:
    names = [name for name in weights if STEPS[name].could(world)]
    [name] = random.choices(names, [weights[name] for name in names])
    # The first number is a broker mostly, and what befalls the leader matters most.
    first = LEADER if random.random() < 0.5 else random.randrange(5)
    world.step(name, *[first, *(random.randrange(10) for _ in range(2))][: STEPS[name].arguments])


def search(
    seeds: Iterable[int],
    settings: Iterable[Setting],
    weights: Mapping[str, float],
    watched: frozenset[Rule] = EVERYTHING,
    *,
    steps: int = STEPS_PER_RUN,
) -> Found | None:
    """The first of these runs that breaks a rule that is watched; each has one of the settings, by its seed."""
    drawn_from = list(settings)
    for runs, seed in enumerate(seeds, 1):
        setting = Random(f"setting {seed}").choice(drawn_from)
        taken, violation = run(seed, setting, weights, watched, steps=steps)
        if violation is not None:
            few = shortened(setting, taken, watched)
            return Found(runs, seed, setting, few, broken_by(setting, few, watched) or violation)
    return None
