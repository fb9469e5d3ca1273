"""Run simulated worlds: `python -m tests.simulation --worlds 10000 --seed 1` on all cores (`make worlds`)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.world import Outcome, run_world

# The most worlds that are reported in full, and the most lines for each.
MOST_TOLD = 10
MOST_FOUND = 5


class Summary:
    """The results of many worlds."""

    def __init__(self) -> None:
        self.worlds = 0
        self.requests = 0
        self.fewest_requests = sys.maxsize
        self.amid = 0
        self.faults = 0
        self.simulated_s = 0.0
        self.happened: Counter[str] = Counter()
        self.broken: list[Outcome] = []

    def add(self, outcome: Outcome) -> None:
        self.worlds += 1
        self.requests += outcome.requests
        self.fewest_requests = min(self.fewest_requests, outcome.requests)
        self.amid += outcome.faults_amid > 0
        self.faults += outcome.faults_amid
        self.simulated_s += outcome.simulated_s
        self.happened += outcome.happened
        if outcome.found:
            self.broken.append(outcome)

    def __str__(self) -> str:
        return (
            f"{self.worlds} worlds, {self.requests / self.worlds:.0f} produce requests each, {self.fewest_requests} at "
            f"least, {self.simulated_s / self.worlds:.1f} s simulated; in {self.amid / self.worlds:.0%} a fault "
            f"happened while something was unanswered, {self.faults / self.worlds:.0f} of them in each; "
            f"{len(self.broken)} broke a rule"
        )

    def complaints(self) -> Iterator[str]:
        """The findings, world by world, starting with the first."""
        for outcome in self.broken[:MOST_TOLD]:
            yield f"seed {outcome.seed}: {len(outcome.found)} found"
            yield from (f"    {found}" for found in outcome.found[:MOST_FOUND])


def run_in(executor: ProcessPoolExecutor, seeds: Iterable[int]) -> Iterator[Outcome]:
    """Run these worlds on the processes of `executor`; the outcomes in the order of the seeds."""
    return executor.map(run_world, seeds, chunksize=10)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--worlds", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one's")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument(
        "--digests", action="store_true", help="print only each world's seed, digest and how much was wrong"
    )
    parser.add_argument("--transcript", action="store_true", help="print all of the world with the seed")
    options = parser.parse_args()
    if options.transcript:
        outcome = run_world(options.seed, keeps_transcript=True)
        print("\n".join([*outcome.transcript, "found", *(f"  {found}" for found in outcome.found)]))
        return bool(outcome.found)
    summary, began = Summary(), time.perf_counter()
    with ProcessPoolExecutor(options.processes) as executor:
        for outcome in run_in(executor, range(options.seed, options.seed + options.worlds)):
            summary.add(outcome)
            if options.digests:
                print(outcome.seed, outcome.digest, len(outcome.found), flush=True)
    took_s = time.perf_counter() - began
    if options.digests:
        return 0
    pace = summary.worlds / took_s * 60 / options.processes
    print(summary, f"{pace:.0f} worlds a minute on each of {options.processes} cores", sep="\n")
    print(dict(summary.happened.most_common()))
    print(*summary.complaints(), sep="\n")
    return bool(summary.broken)


if __name__ == "__main__":
    sys.exit(main())
