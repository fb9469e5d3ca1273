"""Run the command line, as `kproxy` or as `python -m kproxy`."""

import os
import sys


def main() -> int:
    """Run the command in `sys.argv`; return its exit status."""
    try:
        from kproxy.runtime.interrupts import end_at_once

        end_at_once()
        # gRPC would log each failed handshake with etcd; the command reports the error.
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        from kproxy.cli import main as run
    except KeyboardInterrupt:
        return 130
    status = run()
    # The interpreter's own shutdown must not be interrupted either.
    end_at_once()
    return status


if __name__ == "__main__":
    sys.exit(main())
