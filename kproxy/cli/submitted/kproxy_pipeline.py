"""`kproxy pipeline` for spark-submit: `spark-submit $(kproxy pipeline path) audit --bootstrap 127.0.0.1:9092`."""

from __future__ import annotations

import sys

from kproxy.cli import main

if __name__ == "__main__":
    sys.exit(main(["pipeline", *sys.argv[1:]]))
