"""A leader decides which followers are gone by their connections alone."""

from __future__ import annotations

import pytest

from kproxy.broker.replication.isr_keeper import FollowerPresence
from tests.support.models.simulated_loop import SimulatedLoop

GRACE_S, LONGEST_S = 0.5, 10.0


class Watch:
    """A presence on simulated time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.loop = SimulatedLoop(lambda: self.now)
        self.presence = FollowerPresence(GRACE_S, LONGEST_S)
        self.presence.subscribe(self._changed)
        self.changes: list[frozenset[int]] = []

    def _changed(self) -> None:
        self.changes.append(frozenset(self.presence.gone))

    def tell(self, what: str, node_id: int = 2) -> None:
        async def told() -> None:
            getattr(self.presence, what)(node_id)

        self.loop.create_task(told())
        self.loop.run_ready()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while (timer := self.loop.next_timer) is not None and timer <= end:
            self.now = max(self.now, timer)
            self.loop.run_ready()
        self.now = end

    @property
    def gone(self) -> set[int]:
        return self.presence.gone


@pytest.fixture
def watch() -> Watch:
    return Watch()


def test_reconnecting_follower_is_not_gone(watch: Watch) -> None:
    watch.tell("connected")
    watch.tell("broken")
    watch.advance(GRACE_S - 0.1)
    watch.tell("connected")
    watch.advance(60)
    assert watch.changes == []


def test_absent_follower_is_gone_until_present_long_enough(watch: Watch) -> None:
    watch.tell("connected")
    watch.tell("broken")
    watch.advance(GRACE_S)
    assert watch.gone == {2}
    watch.advance(60)
    watch.tell("connected")
    assert watch.gone == {2}
    watch.advance(GRACE_S)
    assert watch.gone == set()
    assert watch.changes == [{2}, frozenset()]


def test_flapping_follower_is_admitted_ever_more_rarely(watch: Watch) -> None:
    watch.tell("connected")
    waits = []
    for _ in range(8):
        watch.tell("broken")
        watch.advance(GRACE_S)
        watch.tell("connected")
        back_since = watch.now
        while watch.gone:
            watch.advance(GRACE_S)
        waits.append(watch.now - back_since)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    watch.advance(LONGEST_S + 1)
    watch.tell("broken")
    watch.advance(GRACE_S)
    watch.tell("connected")
    watch.advance(GRACE_S)
    assert watch.gone == set(), "it was there for long enough"


def test_follower_never_seen_is_not_gone(watch: Watch) -> None:
    watch.advance(60)
    assert watch.gone == set()


def test_ended_presence_concludes_nothing(watch: Watch) -> None:
    watch.tell("connected")
    watch.tell("broken")
    watch.presence.close()
    watch.advance(60)
    assert watch.changes == []
