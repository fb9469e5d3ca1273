"""Run the same simulated worlds with the product's code of this checkout and of another, and compare what they send.

    scripts/compare_worlds.py OTHER_CHECKOUT --worlds 1000 --seed 1

Both runs use this checkout's simulation, and each checkout's own `kproxy` and `codec`. A world differs if a byte
on a connection, its simulated time, a row of the audit trail, or a counter differs. For the first worlds that
differ, the first difference is shown. The exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent.parent
MOST_SHOWN = 5
MOST_CHARACTERS = 600


class Side(NamedTuple):
    """One of the two sides: a directory that holds its code and the simulation together."""

    name: str
    directory: Path

    @classmethod
    def of(cls, name: str, checkout: Path, directory: Path) -> Side:
        """Link the checkout's code and this simulation into `directory`."""
        directory.mkdir()
        for package, where in (("kproxy", checkout), ("codec", checkout), ("tests", HERE)):
            if not (where / package).is_dir():
                sys.exit(f"{where} has no {package}")
            (directory / package).symlink_to(where / package)
        return cls(name, directory)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.directory), str(self.directory / "codec")]),
            "PYTHONPYCACHEPREFIX": str(self.directory / "pycache"),
        }
        return subprocess.Popen(  # noqa: S603 - this interpreter, on the simulation
            [sys.executable, "-m", "tests.simulation", *arguments],
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def transcript(self, seed: str) -> list[str]:
        """Return all events of one world, line by line."""
        output, _ = self.start("--transcript", "--seed", seed).communicate()
        return output.splitlines()


def compare(sides: tuple[Side, Side], arguments: list[str]) -> Iterator[str]:
    """Yield the seeds of the worlds that differ."""
    processes = [side.start("--digests", *arguments) for side in sides]
    try:
        one, other = (_lines(process) for process in processes)
        for line, other_line in zip_longest(one, other, fillvalue=""):
            if line != other_line:
                yield (line or other_line).split()[0]
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield the output of a process. A process that fails ends the comparison."""
    if process.stdout is not None:
        yield from process.stdout
    if process.wait():
        sys.exit(f"the worlds could not be run: {process.args!r}")


def first_difference(sides: tuple[Side, Side], seed: str) -> Iterator[str]:
    """Yield the first difference of two transcripts in simulated time, in readable form."""
    sys.path.insert(0, str(HERE))
    from tests.simulation.reading import by_heading, readable, time_of

    one, other = by_heading(sides[0].transcript(seed)), by_heading(sides[1].transcript(seed))
    parts: list[tuple[float, str, int]] = []
    for heading in {**one, **other}:
        lines, other_lines = one.get(heading, []), other.get(heading, [])
        for place, (line, other_line) in enumerate(zip_longest(lines, other_lines, fillvalue="")):
            if line != other_line:
                parts.append((min(time_of(line), time_of(other_line)), heading, place))
                break
    if not parts:
        yield f"seed {seed}: the transcripts are the same, the digests are not"
        return
    _, heading, place = min(parts)
    yield f"seed {seed}, {heading} ({len(parts)} parts of the transcript differ)"
    for before in one.get(heading, [])[max(0, place - 2) : place]:
        yield f"  both: {readable(before)[:MOST_CHARACTERS]}"
    for side, parted in zip(sides, (one, other), strict=True):
        for line in parted.get(heading, [])[place : place + 2] or ["(nothing)"]:
            yield f"  {side.name}: {readable(line)[:MOST_CHARACTERS]}"


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--worlds", default="1000", help="how many")
    parser.add_argument("--seed", default="1", help="the first one's")
    parser.add_argument("--processes", default="1", help="how many at a time, for each of the two")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        sides = (
            Side.of("here", HERE, Path(directory) / "here"),
            Side.of("other", options.other.resolve(), Path(directory) / "other"),
        )
        arguments = ["--worlds", options.worlds, "--seed", options.seed, "--processes", options.processes]
        differ = []
        for seed in compare(sides, arguments):
            differ.append(seed)
            if len(differ) <= MOST_SHOWN:
                tell("\n".join(first_difference(sides, seed)))
    tell(f"{len(differ)} of {options.worlds} worlds differ" + (f": seeds {' '.join(differ[:50])}" if differ else ""))
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
