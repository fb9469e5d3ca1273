"""`python -m tests.simulation.digests SEED WORLDS [claims]`: run simulated worlds, print a digest line for each.

The test of the compiled plain path compares them with those of a process that runs Python alone (KPROXY_PLAIN=off).
"""

from __future__ import annotations

import sys

from kproxy.plain import compiled
from tests.simulation.setting import draw
from tests.simulation.world import Outcome, run_world


def run(seed: int, *, claims: bool) -> Outcome:
    """Run one world, with or without claims."""
    return run_world(seed, setting=draw(seed, claims=True) if claims else None)


def main(seed: int, worlds: int, *, claims: bool) -> None:
    print("python" if compiled is None else "compiled")
    for each in range(seed, seed + worlds):
        print(run(each, claims=claims).digest)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), claims="claims" in sys.argv)
