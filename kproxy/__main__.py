"""`python -m kproxy`, and the command `kproxy`."""

import os
import sys


def main() -> int:
    """Run the command of `sys.argv`; its exit status."""
    try:
        from kproxy.runtime.interrupts import end_at_once

        end_at_once()
        # gRPC tells each failed handshake with etcd in words of its own; what is wrong is said by the command.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        from kproxy.cli import main as run
    except KeyboardInterrupt:
        return 130
    status = run()
    # What the interpreter still does at its end is nothing to interrupt either.
    end_at_once()
    return status


if __name__ == "__main__":
    sys.exit(main())
