"""Tell on stderr, and the service manager, what a serving command waits for: at once, and again every REMIND_S."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kproxy.runtime.notify import notify

# A sentence that is still true is repeated after this time, in seconds.
REMIND_S = 60.0
MAX_SENTENCES = 16


class Reminders:
    """Which sentences are due to be said. `clock` is in seconds.

    Attempts may fail for changing reasons; each sentence has its own time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def is_due(self, sentence: str) -> bool:
        """Whether to say it now; then it is not due again before REMIND_S are over."""
        now = self._clock()
        said_at = self._said.pop(sentence, None)
        due = said_at is None or now - said_at >= REMIND_S
        self._said[sentence] = now if said_at is None or due else said_at
        if len(self._said) > MAX_SENTENCES:
            del self._said[next(iter(self._said))]
        return due


def say_waiting(sentence: str) -> None:
    """`sentence` names what keeps the command from serving, and the way out."""
    sys.stderr.write(f"kproxy: {sentence} Waiting for it.\n")
    sys.stderr.flush()
    notify(f"STATUS={sentence} Waiting for it.")
