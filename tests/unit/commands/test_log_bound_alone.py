"""Lines of one kind are bounded per minute; omitted lines are counted and reported."""

from __future__ import annotations

from collections.abc import Callable

from kproxy.observe.logging import ANYTHING_ELSE, MINUTE_S, MOST_A_MINUTE, MOST_KINDS, LogBound


class Site:
    """A bound with a simulated clock; `pass_time` runs the calls that are due."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.said: list[tuple[str, str, int]] = []
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.bound = LogBound(
            lambda level, event, count: self.said.append((level, event, count)),
            clock=lambda: self.now,
            later=lambda seconds, call: self.due.append((self.now + seconds, call)),
        )

    def logged(self, event: str, count: int, level: str = "warning") -> int:
        return sum(self.bound.admits(level, event) for _ in range(count))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = [call for at, call in self.due if at <= self.now]
        self.due = [each for each in self.due if each[0] > self.now]
        for call in due:
            call()


def test_suppressed_lines_are_counted_at_minutes_end() -> None:
    site = Site()
    assert site.logged("a", MOST_A_MINUTE) == MOST_A_MINUTE
    site.pass_time(10)
    assert site.logged("a", 7) == 0
    # The bound is first checked after a minute.
    assert [at for at, _ in site.due] == [1000.0 + MINUTE_S]
    site.pass_time(MINUTE_S - 11)
    assert site.said == []
    site.pass_time(1)
    assert site.said == [("warning", "a", 7)]
    site.pass_time(10 * MINUTE_S)
    assert len(site.said) == 1


def test_kinds_and_levels_are_counted_apart() -> None:
    site = Site()
    site.logged("a", MOST_A_MINUTE + 5)
    assert site.logged("b", 10) == 10
    assert site.logged("a", 10, "error") == 10
    site.pass_time(30)
    site.logged("c", MOST_A_MINUTE + 1)
    site.logged("b", MOST_A_MINUTE)
    site.pass_time(30)
    assert [at for at, _ in site.due] == [1090.0], "at the end of c's minute"
    assert [said[1:] for said in site.said] == [("a", 5), ("b", 10)]


def test_each_minute_begins_anew() -> None:
    site = Site()
    for _ in range(3):
        assert site.logged("a", 1000) == MOST_A_MINUTE
        site.pass_time(MINUTE_S)
    assert [said[1:] for said in site.said] == [("a", 940)] * 3
    for _ in range(10):
        # Every minute has fewer events than the bound, so none is left out.
        assert site.logged("b", MOST_A_MINUTE // 2) == MOST_A_MINUTE // 2
        site.pass_time(MINUTE_S)


def test_process_end_reports_the_current_minute() -> None:
    site = Site()
    site.logged("a", MOST_A_MINUTE + 3)
    site.logged("b", MOST_A_MINUTE + 1)
    site.bound.tell(at_once=True)
    assert [said[1:] for said in site.said] == [("a", 3), ("b", 1)]


def test_kinds_that_clients_choose_share_one_limit() -> None:
    site = Site()
    logged = sum(site.logged(f"event {n}", 1) for n in range(MOST_KINDS + 1000))
    assert logged == MOST_KINDS + MOST_A_MINUTE
    site.pass_time(MINUTE_S)
    assert site.said == [("warning", ANYTHING_ELSE, 1000 - MOST_A_MINUTE)]
    assert site.logged("event again", 1) == 1
    # Kinds that were quiet for a minute have made room.
    assert sum(site.logged(f"later {n}", 1) for n in range(MOST_KINDS)) == MOST_KINDS
