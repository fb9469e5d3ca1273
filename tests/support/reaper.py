"""End the processes that a killed test run has left: `reaper.py MARK`, which reads a pipe that the test run holds open.

A test run that ends by itself leaves nothing; one that was killed cannot clean up. All its processes inherit a mark in
their environment, and the system closes the pipe, however the run has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

RUN_MARK = "KPROXY_TEST_RUN"
# Processes that notice the end of the test by themselves end better.
GRACE_S = 5.0
# A killed process may have started another just before.
ROUNDS = 5


def marked_processes(mark: str) -> list[psutil.Process]:
    """The living processes that a test run with this mark has started, wherever they are in the process tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.environ().get(RUN_MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            # Another user's process, or one that has ended.
            continue
    return found


def main() -> None:
    mark = sys.argv[1]
    while os.read(0, 1):
        pass
    deadline = time.monotonic() + GRACE_S
    while marked_processes(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(ROUNDS):
        for process in marked_processes(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


if __name__ == "__main__":
    main()
