"""What the person at the terminal sees: a line that moves, or lines that stay where it is no terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kproxy.pipeline.ingest.behind import Behind
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.sink import BatchDone
from kproxy.pipeline.progress import Report

# Where lines stay, one now and then is enough.
LINE_EVERY_S: Final = 2.0
# A rate over less is no rate.
_LEAST_RATE_S: Final = 0.05


class Tally:
    """What has been done since the start. Told on Spark's threads and read on ours: each field is replaced whole."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.written = 0
        self.batches = 0
        self.last: BatchDone | None = None
        self.dead: Counter[str] = Counter()
        self._behind: Behind | None = None
        self._behind_after = 0

    @property
    def behind(self) -> Behind | None:
        """What is left, where that was counted since the last micro-batch: before it is another number."""
        return self._behind if self._behind_after == self.batches else None

    def left(self, behind: Behind | None, batches: int) -> None:
        """`behind` was left, if known, when so many `batches` were done."""
        if behind is not None:
            self._behind, self._behind_after = behind, batches

    def done(self, batch: BatchDone) -> None:
        self.written += batch.written
        self.batches += 1
        self.dead = self.dead + Counter(batch.dead)
        self.last = batch

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def line(self) -> str:
        """How it stands, in one line."""
        if self.last is None:
            return "first micro-batch"
        rate = self.last.written / max(self.last.seconds, _LEAST_RATE_S)
        parts = [f"micro-batch {self.last.batch}", _many(self.written, "row"), f"{rate:,.0f} rows/s"]
        if self.behind is not None:
            parts.append(f"{_many(self.behind.left, self.behind.unit.removesuffix('s'))} left")
        if self.dead:
            parts.append(_many(self.dead.total(), "dead letter"))
        return " · ".join(parts)


class Display:
    """The line, kept up to date by `update`."""

    def __init__(self, report: Report, tally: Tally, clock: Callable[[], float] = time.monotonic) -> None:
        self._tally = tally
        self._clock = clock
        self._stage = report.stage("ingest", tally.line())
        self._on_terminal = report.bars is not None
        self._told = 0
        self._next = 0.0

    def update(self) -> None:
        if self._on_terminal:
            self._stage.say(self._tally.line())
        elif self._tally.batches > self._told and self._clock() >= self._next:
            self._told, self._next = self._tally.batches, self._clock() + LINE_EVERY_S
            self._stage.tell(self._tally.line())

    def finish(self) -> None:
        self._stage.finish(f"{_many(self._tally.written, 'row')} in {_many(self._tally.batches, 'micro-batch')}")


def summary(tally: Tally, options: IngestOptions) -> str:
    """What was done, in sentences."""
    done = f"Wrote {_many(tally.written, 'row')} to {options.target} in {_many(tally.batches, 'micro-batch')}."
    if not tally.dead:
        return done
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.dead.items()))
    return f"{done}\n{_many(tally.dead.total(), 'dead letter')} ({reasons}) went to {options.dead_letters}."


def _many(count: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"
