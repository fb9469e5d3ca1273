"""Handle Ctrl-C before and after a command has something to stop.

While modules are imported, KeyboardInterrupt may be raised anywhere: in the first import it shows as a traceback, in a
library as another error, in a callback of the import system as a warning. Nothing has been started by then, so the
process just ends. `kproxy.__main__` imports this module first: it must import nothing that takes time.

States: Python's own handler --`end_at_once`--> this one --`interruptible`--> Python's own. Any other handler stays, and
so does an ignored SIGINT (a shell script's background job).
"""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def end_at_once() -> None:
    """Let Ctrl-C end the process with status 130 and print nothing."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interruptible() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, or an event loop handle it: there may be something to stop now."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
