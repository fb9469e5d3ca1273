"""Print what the process was given: the program that test_forked runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> int:
    given = {
        "arguments": sys.argv[1:],
        "environ": {**os.environ},
        "directory": str(Path.cwd()),
        "pid": os.getpid(),
        "session": os.getsid(0),
        # The descriptor of the listing itself is closed again.
        "fds": [int(each.name) for each in [*Path("/proc/self/fd").iterdir()] if each.exists()],
        "stdin": sys.stdin.read(),
    }
    print(json.dumps(given))
    print("complaint", file=sys.stderr)
    return 7
