"""`python -m bench [SECTION ...]`: run measurements; each section prints a table. Without a section, run all of them.

`python -m bench plain` compares the proxy with haproxy, and with any other proxy by `--peer`. `python -m bench against
CHECKOUT` compares this checkout's proxy with another one's; it runs only if it is named.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from bench.access import access
from bench.acks import REPLICATION_FACTOR, acks
from bench.acks0 import acks0
from bench.acks_cluster import PARTITIONS as ACKS_PARTITIONS
from bench.against import ROUNDS, against
from bench.connections import connections
from bench.consume import consume
from bench.floods import floods
from bench.jobs import jobs
from bench.opening import OPENED_GB, opening
from bench.own import own
from bench.partitions import REPLICATED_PARTITIONS, partitions
from bench.paths import paths
from bench.pipeline import pipeline
from bench.pipeline_audit import RANGES
from bench.pipeline_sink import sink
from bench.pipeline_trail import trail
from bench.plain import ROUNDS as PLAIN_ROUNDS
from bench.plain import plain
from bench.plain_figures import Peer, parse_peer
from bench.quick import quick
from bench.table import PARTITIONS, table
from bench.tls import ROUNDS as TLS_ROUNDS
from bench.tls import tls
from kproxy.errors import StartupError

SECTIONS = (
    "quick, plain, connections, consume, paths, tls, access, floods, table, partitions, opening, acks, acks0, "
    "own, pipeline, trail, sink, jobs"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("sections", metavar="SECTION", nargs="*", help=f"{SECTIONS}; against CHECKOUT")
    parser.add_argument("--partitions", type=int, default=PARTITIONS, help="of the section `table`")
    parser.add_argument(
        "--replicated-partitions", type=int, default=REPLICATED_PARTITIONS, help="of the section `partitions`"
    )
    parser.add_argument("--opened-gb", type=float, default=OPENED_GB, help="of the section `opening`")
    parser.add_argument("--replication-factor", type=int, default=REPLICATION_FACTOR, help="of the section `acks`")
    parser.add_argument("--acks-partitions", type=int, default=ACKS_PARTITIONS, help="of the section `acks`")
    parser.add_argument("--ranges", type=int, default=RANGES, help="of the section `pipeline`, for its audit")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"of the sections `plain` ({PLAIN_ROUNDS}), `tls` ({TLS_ROUNDS}), `access` and `against` ({ROUNDS}); "
        "more tell more",
    )
    parser.add_argument(
        "--this-flags",
        metavar="FLAGS",
        default="",
        help="of the section `against`: serve's flags for this checkout alone: --this-flags='--metrics-topics 100'",
    )
    parser.add_argument(
        "--beside", metavar="CHECKOUT", type=Path, help="of the section `jobs`: another checkout that takes turns"
    )
    parser.add_argument(
        "--peer",
        metavar="NAME=HOST:PORT,PID",
        type=_peer,
        action="append",
        default=[],
        help="of the section `plain`: another proxy to measure, and its process; may be repeated",
    )
    parser.add_argument(
        "--brokers-at",
        metavar="PORT",
        type=int,
        default=0,
        help="of the section `plain`: where its three brokers listen for peers: this port and the next two",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="of the section `plain`: write all figures")
    parser.add_argument("--svg", metavar="DIR", type=Path, help="of the section `plain`: write its plots")
    arguments = parser.parse_args()
    console = Console(width=max(100, Console().width))
    sections = {
        "quick": lambda: quick(console),
        "consume": lambda: consume(console),
        "plain": lambda: plain(
            console,
            max(1, arguments.rounds or PLAIN_ROUNDS),
            arguments.peer,
            arguments.brokers_at,
            arguments.json,
            arguments.svg,
        ),
        "paths": lambda: paths(console),
        "connections": lambda: connections(console),
        "tls": lambda: tls(console, arguments.rounds),
        "access": lambda: access(console, arguments.rounds),
        "floods": lambda: floods(console),
        "table": lambda: table(console, arguments.partitions),
        "partitions": lambda: partitions(console, arguments.replicated_partitions),
        "opening": lambda: opening(console, arguments.opened_gb),
        "acks": lambda: acks(console, arguments.replication_factor, arguments.acks_partitions),
        "acks0": lambda: acks0(console),
        "own": lambda: own(console),
        "pipeline": lambda: pipeline(console, arguments.ranges),
        "trail": lambda: trail(console),
        "sink": lambda: sink(console),
        "jobs": lambda: jobs(console, arguments.beside),
    }
    # The section `pipeline` includes the trail and the sink.
    named = iter(arguments.sections or [name for name in sections if name not in ("trail", "sink")])
    for section in named:
        if section == "against":
            checkout = next(named, None) or parser.error("against is followed by the path of a checkout")
            against(console, Path(checkout), max(2, arguments.rounds or ROUNDS), arguments.this_flags.split())
            continue
        if section not in sections:
            parser.error(f"unknown section {section!r}; expected one of {', '.join(sections)}")
        try:
            sections[section]()
        # Of tests' support code.
        except (StartupError, pytest.skip.Exception) as error:
            raise SystemExit(str(error)) from error


def _peer(text: str) -> Peer:
    try:
        return parse_peer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    main()
