"""How far Spark is with what another thread has it do, told to a stage of the terminal's progress."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kproxy.pipeline.progress import Stage
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

if TYPE_CHECKING:
    from pyspark import SparkStageInfo

_POLL_S: Final = 0.5


class JobsProgress:
    """Tells `stage` of Spark's tasks twice a second, from a thread of its own, while the block lasts."""

    def __init__(self, session: Any, stage: Stage) -> None:
        self._session = session
        self._stage = stage
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="spark-progress", daemon=True)
        self._done: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(timeout=5)

    def _follow(self) -> None:
        try:
            with as_spark_failure("Progress"):
                tracker = self._session.sparkContext.statusTracker()
                while not self._ended.wait(_POLL_S):
                    self._tell(tracker)
        except SparkFailed:
            # Whoever waits for Spark hears of it by himself.
            return

    def _tell(self, tracker: Any) -> None:
        if sentence := in_words([info for info in map(tracker.getStageInfo, tracker.getActiveStageIds()) if info]):
            self._stage.say(sentence)


def in_words(stages: Sequence[SparkStageInfo]) -> str:
    """How far the stages are that Spark is at; "" where there are none."""
    total = sum(info.numTasks for info in stages)
    if not total:
        return ""
    done = sum(info.numCompletedTasks for info in stages)
    if not done and not any(info.numActiveTasks for info in stages):
        # On a cluster that has no room it stays like this until somebody makes some.
        return f"waiting for an executor to run the first of {total:,} tasks"
    return f"{stages[0].name.split(' at ')[0]}: {done:,} of {total:,} tasks"
