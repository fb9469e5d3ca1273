"""End a run of the replication model: end all faults, and judge the run."""

from __future__ import annotations

from collections.abc import Sequence

from kproxy.broker.partition import ACKS_ALL
from kproxy_codec import error_codes
from tests.support.models.replication_checks import Rule, Violation
from tests.support.models.replication_model import LEADER, Setting, Taken, World
from tests.support.models.simulated_broker import State

RECOVERY_S = 90.0
RECOVERY_CHECK_S = 3.0


def _is_whole(world: World) -> bool:
    """Whether all brokers run and are in sync."""
    everybody = world.processes.values()
    has_begun = all(
        each.state is State.RUNNING and each.partition is not None and not each.leases.stopping for each in everybody
    )
    return has_begun and sum(each.leads for each in everybody) == 1 and sorted(world.isr()) == list(world.processes)


def recover(world: World) -> None:
    """All faults end: the partition must come back, with all promised records."""
    world.is_over = True
    world.trace.append("recover()")
    world.network.mend()
    _mend_brokers(world)
    leaders = [each.node_id for each in world.processes.values() if each.leads]
    if len(leaders) != 1 or sorted(world.isr()) != list(world.processes):
        world.judge.violated(Rule.STUCK, f"leaders are {leaders}, in sync are {world.isr()}")
    if world.writers.is_claimed:
        _claim_and_release(world)
    _produce_until_acknowledged(world)
    _consume_to_the_end(world)


def _mend_brokers(world: World) -> None:
    end = world.now + RECOVERY_S
    while world.now < end:
        for number in range(len(world.processes)):
            world.thaw(number)
            world.restart(number)
            world.link(number, 0)
            world.broker(number).interrupt_never()
            world.broker(number).hear_at_once()
        world.pass_time(RECOVERY_CHECK_S)
        if _is_whole(world):
            break
    world.check()


def _claim_and_release(world: World) -> None:
    world.step("claim", LEADER, 0)
    end, result = world.now + RECOVERY_S, None
    while world.now < end and (result is None or result.error_code != error_codes.NONE):
        world.step("bind", LEADER, 0)
        world.step("advance", 1)
        if world.writers.writer(0).is_granted:
            attempt = world.writers.write(0, world.process(LEADER), ACKS_ALL)
            world.step("advance", 1)
            result = attempt.result if attempt is not None else None
    if result is None or result.error_code != error_codes.NONE:
        world.judge.violated(Rule.STUCK, f"the latest claimant was told {result}")
    while world.now < end and not world.writers.is_released:
        world.step("release", LEADER, 0)
        world.step("advance", 1)
    if not world.writers.is_released:
        world.judge.violated(Rule.STUCK, "the claim is not released")


def _produce_until_acknowledged(world: World) -> None:
    for which in range(len(world.clients.producers)):
        world.step("produce_idempotent", LEADER, which)
    end = world.now + RECOVERY_S
    while world.now < end and world.clients.unresolved():
        world.step("advance", 1)
        for producer in world.clients.unresolved():
            if producer.attempts[-1].result is not None:
                world.step("produce_idempotent", LEADER, world.clients.producers.index(producer))
    for producer in world.clients.unresolved():
        results = [attempt.result for attempt in producer.attempts]
        world.judge.violated(Rule.STUCK, f"producer {producer.producer_id} got no acknowledgement: {results}")


def _consume_to_the_end(world: World) -> None:
    end, ends = world.now + RECOVERY_S, {}
    while world.now < end:
        world.step("consume", LEADER)
        ends = {node_id: world.replica(node_id).log_end_offset for node_id in world.processes}
        if set(ends.values()) == {world.clients.position}:
            return
        world.step("advance", 0)
    world.judge.violated(Rule.STUCK, f"logs end at {ends}, the consumer is at {world.clients.position}")


def broken_by(setting: Setting, steps: Sequence[Taken]) -> Violation | None:
    """The violation shown by the steps, or by the recovery after them."""
    with World(setting) as world:
        try:
            world.replay(steps)
            recover(world)
        except Violation as violation:
            return violation
    return None


def shortened(setting: Setting, steps: Sequence[Taken]) -> list[Taken]:
    """As few of the steps as still break the same rule: no step can be left out, nor any eight."""
    found = broken_by(setting, steps)
    if found is None:
        raise ValueError("nothing is broken by these steps")
    left, size = list(steps), 8
    while size:
        position = 0
        while position < len(left):
            fewer = left[:position] + left[position + size :]
            again = broken_by(setting, fewer)
            if again is not None and again.rule is found.rule:
                left = fewer
            else:
                position += size
        size //= 2
    return left
