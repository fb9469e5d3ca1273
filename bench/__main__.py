"""`python -m bench [SECTION ...]`: measurements, each section a table; all of them where none is named."""

from __future__ import annotations

import argparse

from rich.console import Console

from bench.acks import REPLICATION_FACTOR, acks
from bench.acks0 import acks0
from bench.own import own
from bench.pipeline import pipeline
from bench.pipeline_audit import RANGES
from bench.quick import quick
from bench.table import PARTITIONS, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", metavar="SECTION", nargs="*", help="quick, table, acks, acks0, own, pipeline")
    parser.add_argument("--partitions", type=int, default=PARTITIONS, help="of the section `table`")
    parser.add_argument("--replication-factor", type=int, default=REPLICATION_FACTOR, help="of the section `acks`")
    parser.add_argument("--ranges", type=int, default=RANGES, help="of the section `pipeline`, for its audit")
    arguments = parser.parse_args()
    console = Console(width=max(100, Console().width))
    sections = {
        "quick": lambda: quick(console),
        "table": lambda: table(console, arguments.partitions),
        "acks": lambda: acks(console, arguments.replication_factor),
        "acks0": lambda: acks0(console),
        "own": lambda: own(console),
        "pipeline": lambda: pipeline(console, arguments.ranges),
    }
    for section in arguments.sections or sections:
        if section not in sections:
            parser.error(f"there is no section {section!r}: {', '.join(sections)}")
        sections[section]()


if __name__ == "__main__":
    main()
