"""An audit requests the ends of logs again while readers do not see records acknowledged by one replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.logs import ENDS_PATIENCE_S, ends_behind
from kproxy.pipeline.audit.trail_rows import Acked, acked_in
from tests.support.audit.trails import BEGAN_AT, Trail, trail_rows

ZERO, ONE, OTHER = TopicPartition("t", 0), TopicPartition("t", 1), TopicPartition("gone", 0)


class Site:
    """Gives its answers one after another, then repeats the last; its time advances only in sleep."""

    def __init__(self, answers: Sequence[Mapping[TopicPartition, int]]) -> None:
        self._answers = answers
        self.asked = 0
        self.now = 100.0

    def ask(self) -> Mapping[TopicPartition, int]:
        self.asked += 1
        return self._answers[min(self.asked, len(self._answers)) - 1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ends(self, told: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, int]:
        return ends_behind(told, self.ask, clock=lambda: self.now, sleep=self.sleep)


@pytest.mark.parametrize(
    ("told", "answers", "asked"),
    [
        pytest.param({}, [{ZERO: 5}], 1, id="nothing by one replica alone"),
        pytest.param({ZERO: 5}, [{ZERO: 5}], 1, id="all of it is shown"),
        pytest.param({ZERO: 5}, [{ZERO: 3}, {ZERO: 4}, {ZERO: 6}], 3, id="shown by and by"),
        pytest.param({ZERO: 5, ONE: 2}, [{ZERO: 5, ONE: 1}, {ZERO: 5, ONE: 2}], 2, id="each partition counts"),
        pytest.param({OTHER: 5}, [{ZERO: 5}], 1, id="of a topic that is not read"),
    ],
)
def test_log_ends_are_read_until_acknowledgements_show(
    told: Mapping[TopicPartition, int], answers: Sequence[Mapping[TopicPartition, int]], asked: int
) -> None:
    site = Site(answers)
    assert site.ends(told) == answers[-1]
    assert site.asked == asked


def test_missing_acknowledgements_are_awaited_for_seconds() -> None:
    site = Site([{ZERO: 3}])
    assert site.ends({ZERO: 5}) == {ZERO: 3}
    assert ENDS_PATIENCE_S <= site.now - 100.0 < ENDS_PATIENCE_S + 1


def test_single_replica_acknowledgements_are_reported_by_partition() -> None:
    trail = Trail()
    trail.acked("t", 0, 100, acks=1)
    trail.acked("t", 100, 5, 110, 10, acks=1)
    trail.acked("t", 120, 10)
    trail.acked("t", 7, 1, partition=1, acks=1, at=2_000)
    trail.acked("by-all", 0, 10)
    trail.end(60_000)
    whole = Acked()
    for part in (trail_rows(trail.rows[:3]), trail_rows(trail.rows[3:])):
        whole.add(acked_in(part, BEGAN_AT + 1_500))
    assert whole == Acked({("t", 1): 7}, {("t", 0): 120, ("t", 1): 8, ("by-all", 0): 0}, 7)
