"""Handle Ctrl-C: end the process at once until a command has started something, then interrupt the command.

While modules are imported, KeyboardInterrupt may be raised anywhere: it becomes a traceback in the first import,
another error in a library, a warning in a callback of the import system. The command has started nothing by then, so
the process just ends. `kproxy.__main__` imports this module first, so it must import nothing that takes time.

States: Python's own handler --`end_at_once`--> `_end` --`interruptible`--> Python's own. Any other handler is kept,
and so is an ignored SIGINT (a shell script's background job).
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def end_at_once() -> None:
    """Let Ctrl-C end the process with status 130 and print nothing."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interruptible() -> None:
    """Restore Python's own handler: Ctrl-C raises KeyboardInterrupt, or an event loop handles it."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def hold_hangups() -> None:
    """Keep SIGHUP until kproxy.runtime.signals takes it: it must not end a command that is starting."""
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
