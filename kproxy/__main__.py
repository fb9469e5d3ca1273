"""`python -m kproxy`, and the command `kproxy`."""

import sys

from kproxy.cli import main

if __name__ == "__main__":
    sys.exit(main())
