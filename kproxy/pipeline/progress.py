"""Show a job's progress on stderr, because stdout has the result, and stop the job on a signal.

A terminal shows bars; other outputs get plain lines.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from kproxy.pipeline.spark import SparkFailed, as_spark_failure

if TYPE_CHECKING:
    from pyspark import SparkStageInfo


NAME_WIDTH = 9
BAR_WIDTH = 30


class Stage:
    """One line of progress. Its methods may be called from any thread."""

    def __init__(self, report: Report, name: str, doing: str, total: int | None) -> None:
        self._report = report
        self._name = name
        self._total = total or 1
        self._began = time.monotonic()
        self._task = report.bars.add_task(name, total=total, note=doing)

    def advance_to(self, done: int) -> None:
        if done:
            self._report.bars.update(self._task, completed=done, note=f"{done:,} rows")

    def say(self, doing: str) -> None:
        self._report.bars.update(self._task, note=doing)

    def tell(self, sentence: str) -> None:
        """Print a line that bars do not overwrite."""
        self._report.progress.print(f"{self._name:<{NAME_WIDTH}} {sentence}", soft_wrap=True)

    def finish(self, done: str) -> None:
        line = f"{done}, {time.monotonic() - self._began:.1f} s"
        self._report.bars.update(self._task, total=self._total, completed=self._total, note=line)
        if self._report.bars.disable:
            self.tell(line)


class Report:
    """Show progress on stderr, with bars if it is a terminal.

    Open it for the run (`with`), and close it before printing a table, so that no bar is drawn into it.
    """

    def __init__(self, *, progress: Console | None = None) -> None:
        self.progress = progress or Console(stderr=True, highlight=False)
        self.bars = Progress(
            TextColumn("{task.description}", table_column=Column(width=NAME_WIDTH)),
            BarColumn(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
            console=self.progress,
            disable=not self.progress.is_terminal,
        )

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def stage(self, name: str, doing: str, *, total: int | None = None) -> Stage:
        return Stage(self, name, doing, total)

    def say(self, sentence: str) -> None:
        """Print a sentence on stderr. It is never wrapped, as it may contain a path to copy."""
        self.progress.print(Text(sentence), soft_wrap=True)


_POLL_S: Final = 0.5


class JobsProgress(threading.Thread):
    """Show Spark's tasks in `stage` twice a second while the block runs."""

    def __init__(self, session: Any, stage: Stage) -> None:
        super().__init__(name="spark-progress", daemon=True)
        self._session = session
        self._stage = stage
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(timeout=5)

    def run(self) -> None:
        # The caller that waits for Spark gets the same error, so this thread just ends.
        with contextlib.suppress(SparkFailed), as_spark_failure("Progress"):
            tracker = self._session.sparkContext.statusTracker()
            while not self._ended.wait(_POLL_S):
                stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
                if sentence := in_words([info for info in stages if info]):
                    self._stage.say(sentence)


def in_words(stages: Sequence[SparkStageInfo]) -> str:
    """Describe the progress of Spark's active stages; "" without stages."""
    total = sum(info.numTasks for info in stages)
    if not total:
        return ""
    done = sum(info.numCompletedTasks for info in stages)
    if not done and not any(info.numActiveTasks for info in stages):
        # On a full cluster this lasts until there is room.
        return f"waiting for an executor to run the first of {total:,} tasks"
    return f"{stages[0].name.split(' at ')[0]}: {done:,} of {total:,} tasks"


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM call `stop` while the block runs; no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
