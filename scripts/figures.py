"""Copy the figures of docs/performance.md into docs/deploy.md: `make docs`; --check reports stale ones."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
SOURCE, TARGET = DOCS / "performance.md", DOCS / "deploy.md"
_BEGIN, _END = "<!-- {}: written by `make docs` from performance.md -->\n", "<!-- end of {} -->\n"
_UNITS = {"B": 1, "KiB": 1 << 10, "MB": 10**6}
_SHAPE = re.compile(r"(\d+) × (\d+) (B|KiB|MB)")
# The columns of the table of CPU times that show how the cost follows from partitions and bytes.
SHAPES = ("1 × 1 KiB", "1 × 16 KiB", "3 × 16 KiB", "10 × 16 KiB", "1 × 1 MB")
_MEMORY = re.compile(
    r"A quiet client connection holds \d+ KiB of memory, \d+ KiB with one broker connection of its own, "
    r"\d+ KiB with three"
)


def cpu_times(source: str) -> dict[str, float]:
    """Return CPU µs of kproxy for a request, by its shape: the first table with these columns."""
    lines = source.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("| |") and SHAPES[0] in line)
    shapes, kproxy = (
        [cell.strip() for cell in line.strip("|").split("|")][1:]
        for line in (lines[at], next(line for line in lines[at:] if line.startswith("| kproxy |")))
    )
    return {shape: float(cell.split()[0].replace(",", "")) for shape, cell in zip(shapes, kproxy, strict=True)}


def cpu_table(source: str) -> str:
    times = cpu_times(source)
    rows = []
    for shape in SHAPES:
        match = _SHAPE.fullmatch(shape)
        if match is None:
            raise ValueError(f"{shape} is not a shape")
        batches, size = int(match[1]), int(match[2]) * _UNITS[match[3]]
        cpus = times[shape] * 1e-6 * 100e6 / (batches * size)
        rows.append(f"| {shape} | {times[shape]:.0f} | {cpus:.2f} |\n")
    return "".join(["| request | µs | CPUs for 100 MB/s |\n| --- | --- | --- |\n", *rows])


def memory_sentence(source: str) -> str:
    match = _MEMORY.search(" ".join(source.split()))
    if match is None:
        raise ValueError("performance.md does not state the memory of a quiet client connection")
    return textwrap.fill(f"{match[0]}.", 120) + "\n"


def written(target: str, source: str) -> str:
    """Return docs/deploy.md with both parts between their marks."""
    for name, part in (("CPU times", cpu_table(source)), ("memory", memory_sentence(source))):
        begin, end = _BEGIN.format(name), _END.format(name)
        head, _, rest = target.partition(begin)
        target = head + begin + part + end + rest.partition(end)[2]
    return target


def main() -> int:
    old = TARGET.read_text()
    new = written(old, SOURCE.read_text())
    if old == new:
        return 0
    if "--check" in sys.argv[1:]:
        sys.stderr.write("not up to date: docs/deploy.md: run `make docs`\n")
        return 1
    TARGET.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
