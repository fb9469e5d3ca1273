"""End this process when the one that started it, `kproxy dev` or a test run, is gone, even if that was killed.

The parent hands down the read end of a pipe it alone holds open, and its number in the environment. A thread blocks on
it; nothing is ever written, so it wakes only when the parent has ended, however it did.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_FD = "KPROXY_PARENT_FD"
# Time to stop cleanly before the end is made certain.
GRACE_S = 8.0
INSISTS_AFTER_S = 0.2


def end_with_parent(*, insist: bool = False) -> None:
    """Watch, where a parent asked for it: SIGTERM to ourselves when it is gone, and SIGKILL if that will not do.

    `insist`: SIGTERM comes twice, for a process that serves on for a while after the first.
    """
    number = os.environ.pop(PARENT_FD, "")
    if not number.isdigit():
        return
    threading.Thread(target=_watch, args=(int(number), insist), name="parent-watch", daemon=True).start()


def _watch(read_fd: int, insist: bool) -> None:
    try:
        while os.read(read_fd, 1):
            pass
    except OSError:
        # No such pipe here: somebody else set the variable, and there is no parent to wait for.
        return
    os.kill(os.getpid(), signal.SIGTERM)
    if insist:
        # Two signals at the same instant are one.
        time.sleep(INSISTS_AFTER_S)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
