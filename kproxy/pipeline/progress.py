"""Show a job's progress: bars on a terminal, plain lines elsewhere; on stderr, so that stdout keeps the result."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

NAME_WIDTH = 9
BAR_WIDTH = 30


class Stage:
    """One line of progress. May be told from any thread."""

    def __init__(self, report: Report, name: str, doing: str, total: int | None) -> None:
        self._report = report
        self._name = name
        self._total = total
        self._began = time.monotonic()
        self._task: TaskID | None = None
        if report.bars is not None:
            self._task = report.bars.add_task(name, total=total, note=doing)

    def advance_to(self, done: int) -> None:
        if done and self._report.bars is not None and self._task is not None:
            self._report.bars.update(self._task, completed=done, note=f"{done:,} rows")

    def say(self, doing: str) -> None:
        if self._report.bars is not None and self._task is not None:
            self._report.bars.update(self._task, note=doing)

    def tell(self, sentence: str) -> None:
        """A line that stays, while the work goes on."""
        self._report.progress.print(f"{self._name:<{NAME_WIDTH}} {sentence}", soft_wrap=True)

    def finish(self, done: str) -> None:
        line = f"{done}, {time.monotonic() - self._began:.1f} s"
        if self._report.bars is not None and self._task is not None:
            total = self._total or 1
            self._report.bars.update(self._task, total=total, completed=total, note=line)
        else:
            self.tell(line)


class Report:
    """Show progress on stderr, by bars where that is a terminal.

    Open it for the run (`with`) and close it before a table is printed, so that a bar never stands in it.
    """

    def __init__(self, *, progress: Console | None = None) -> None:
        self.progress = progress or Console(stderr=True, highlight=False)
        self.bars: Progress | None = None

    def __enter__(self) -> Self:
        if self.progress.is_terminal:
            self.bars = Progress(
                TextColumn("{task.description}", table_column=Column(width=NAME_WIDTH)),
                BarColumn(bar_width=BAR_WIDTH),
                TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True)),
                console=self.progress,
            )
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bars is not None:
            self.bars.stop()
            self.bars = None

    def stage(self, name: str, doing: str, *, total: int | None = None) -> Stage:
        return Stage(self, name, doing, total)

    def say(self, sentence: str) -> None:
        """A sentence beside the work, on stderr, never wrapped: it may hold a path to be copied."""
        self.progress.print(Text(sentence), soft_wrap=True)
