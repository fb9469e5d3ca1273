"""Search for violations by random runs of the replication model: one seed, one run.

Breaking a rule takes a few steps in the right order, which is rare. So steps are drawn by weights, mostly for brokers
on which they have an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import NamedTuple

from tests.support.models.replication_checks import Violation
from tests.support.models.replication_model import LEADER, STEPS, Setting, Taken, World
from tests.support.models.replication_recovery import broken_by, recover, shortened
from tests.support.models.simulated_broker import SimulatedProcess, State
from tests.support.models.simulated_etcd import Link

# Mostly little time, sometimes more than a lease's TTL.
ADVANCES = (0, 0, 0, 1, 1, 2, 3, 3)


Weights = Mapping[str, float]
"""How often a step is drawn relative to others, with any numbers."""


class Found(NamedTuple):
    """A run that broke a rule."""

    seed: int
    setting: Setting
    steps: list[Taken]
    violation: Violation

    def __str__(self) -> str:
        steps = ", ".join(" ".join(map(str, step)) for step in self.steps)
        return f"seed {self.seed}: {self.violation}\n{self.setting}\n{steps}"


def run(seed: int, setting: Setting, weights: Weights, steps: int) -> tuple[list[Taken], Violation | None]:
    """Run the steps drawn from this seed, and the recovery after them."""
    random = Random(seed)
    with World(setting) as world:
        try:
            for _ in range(steps):
                _step(world, random, weights)
            recover(world)
        except Violation as violation:
            return world.taken, violation
        return world.taken, None


def _step(world: World, random: Random, weights: Weights) -> None:
    numbers = {name: _numbers(world, name) for name in weights}
    possible = [name for name, drawn_from in numbers.items() if drawn_from]
    [name] = random.choices(possible, [weights[each] for each in possible])
    # Mostly the first of several, so that consecutive steps concern the same thing.
    others = (0 if random.random() < 0.3 else random.randrange(10) for _ in range(2))
    world.step(name, *[random.choice(numbers[name]), *others][: STEPS[name].arguments])


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


def _numbers(world: World, name: str) -> Sequence[int]:
    """The values of a step's first number; none if the step would have no effect."""
    if not STEPS[name].could(world):
        return ()
    if name == "advance":
        return ADVANCES
    if name in ("arrive", "lose"):
        return range(len(world.network.flights))
    befalls = _BEFALLS.get(name)
    if befalls is not None:
        return [node_id - 1 for node_id, process in world.processes.items() if befalls(process)]
    # Mostly a broker; faults of the leader matter most.
    return [LEADER] * len(world.processes) + [node_id - 1 for node_id in world.processes]


def search(seeds: Iterable[int], settings: Sequence[Setting], weights: Weights, steps: int) -> Found | None:
    """The first of these runs that breaks a rule, shortened; each has one of the settings, by its seed."""
    for seed in seeds:
        setting = settings[seed % len(settings)]
        taken, violation = run(seed, setting, weights, steps)
        if violation is not None:
            taken = shortened(setting, taken)
            return Found(seed, setting, taken, broken_by(setting, taken) or violation)
    return None
