"""Handle Ctrl-C before and after a command has something to stop.

While modules are imported, KeyboardInterrupt may be raised anywhere: in the first import it shows as a traceback, in a
library as another error, in a callback of the import system as a warning. Nothing has been started then, so the process
just ends.

States: Python's own handler --`end_at_once`--> this one --`interruptible`--> Python's own. Whoever has set another, or
has SIGINT ignored (a shell script's background job), keeps it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def end_at_once() -> None:
    """From now on Ctrl-C ends the process with status 130 and prints nothing."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interruptible() -> None:
    """There may be something to stop from now on: Ctrl-C raises KeyboardInterrupt, or an event loop takes it over."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
