"""Random runs of the replication model, drawn by weights: one seed, one run.

Hypothesis draws from all steps alike, and examines what it has drawn. This search draws from a few named steps, and is
several times as fast. Breaking a rule takes a few steps in the right order, which is rare among all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from tests.support.models.replication_checks import Rule, Violation
from tests.support.models.replication_model import LEADER, STEPS, Setting, Taken, World, broken_by, shortened
from tests.support.models.simulated_broker import SimulatedProcess, State
from tests.support.models.simulated_etcd import Link
from tests.support.models.simulated_loop import NeverRests

STEPS_PER_RUN = 40
# Mostly little time, and sometimes more than a lease's TTL.
ADVANCES = (0, 0, 0, 1, 1, 2, 3, 3)
EVERYTHING = frozenset(Rule)


Weights = Mapping[str | Taken, float]
"""How often a step is drawn relative to others: by its name, with any numbers, or with the given ones."""


class Found(NamedTuple):
    """A run that broke something. `runs` is how many it took."""

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
    weights: Weights,
    watched: frozenset[Rule] = EVERYTHING,
    *,
    begin: Sequence[Taken] = (),
    steps: int = STEPS_PER_RUN,
) -> tuple[list[Taken], Violation | None]:
    """A run that continues from `begin` as drawn from that seed, and the recovery after it if that is watched."""
    random = Random(seed)
    with World(setting, watched) as world:
        try:
            world.replay(begin)
            for _ in range(steps):
                _step(world, random, weights)
            world.recover()
        except Violation as violation:
            return world.taken, violation
        except NeverRests:
            # With a rule off brokers may repeat work without end; the search is not for that.
            if watched == EVERYTHING:
                raise
        return world.taken, None


def _step(world: World, random: Random, weights: Weights) -> None:
    numbers = {what: _numbers(world, what) for what in weights}
    possible = [what for what, drawn_from in numbers.items() if drawn_from]
    [what] = random.choices(possible, [weights[what] for what in possible])
    if not isinstance(what, str):
        world.step(*what)
        return
    # Mostly the first of several: this yields the things that were done one after another.
    others = (0 if random.random() < 0.3 else random.randrange(10) for _ in range(2))
    world.step(what, *[random.choice(numbers[what]), *others][: STEPS[what].arguments])


_BEFALLS: dict[str, Callable[[SimulatedProcess], object]] = {
    "restart": lambda process: process.state is State.DEAD,
    "wipe": lambda process: process.state is State.DEAD,
    "replace": lambda process: process.state is State.DEAD,
    "thaw": lambda process: process.state is State.STOPPED,
    "fetch": lambda process: process.state is State.RUNNING and not process.leads,
    "ask": lambda process: process.state is State.RUNNING and not process.leads,
    "lag": lambda process: not process.leads,
    "etcd_applies": lambda process: process.client.count_pending(applied=False),
    "etcd_answers": lambda process: process.client.count_pending(applied=True),
    "watch": lambda process: process.client.link is Link.SLOW,
    "watch_one": lambda process: process.client.link is Link.SLOW,
}
"""Steps without effect on other brokers."""


def _numbers(world: World, what: str | Taken) -> Sequence[int]:
    """The values of a step's first number; none if the step would have no effect."""
    name = what if isinstance(what, str) else what[0]
    if not STEPS[name].could(world):
        return ()
    if name == "advance":
        return ADVANCES
    if name in ("arrive", "lose"):
        return range(len(world.network.flights))
    befalls = _BEFALLS.get(name)
    if befalls is not None and isinstance(what, str):
        return [node_id - 1 for node_id, process in world.processes.items() if befalls(process)]
    # Mostly a broker; faults of the leader matter most.
    return [LEADER] * len(world.processes) + [node_id - 1 for node_id in world.processes]


def search(
    seeds: Iterable[int],
    settings: Sequence[Setting],
    weights: Weights,
    watched: frozenset[Rule] = EVERYTHING,
    *,
    begin: Sequence[Taken] = (),
    steps: int = STEPS_PER_RUN,
    shorten: bool = True,
) -> Found | None:
    """The first of these runs that breaks a watched rule; each has one of the settings, by its seed."""
    for runs, seed in enumerate(seeds, 1):
        setting = settings[seed % len(settings)]
        taken, violation = run(seed, setting, weights, watched, begin=begin, steps=steps)
        if violation is None:
            continue
        if shorten:
            taken = shortened(setting, taken, watched)
            violation = broken_by(setting, taken, watched) or violation
        return Found(runs, seed, setting, taken, violation)
    return None
