"""Keep the code from growing unnoticed: compare its sizes with `budgets.toml`; `make budgets` lowers the numbers there.

A package's size is its lines of code, docstrings and blanks. The file also has counts that should fall. A size above
its number fails, and so does one below it: the number is lowered in the same commit. Numbers are raised by hand,
in a commit whose message says which feature needs the lines, and what pays for them elsewhere.

Exit status: 0 if all sizes are as in the file, 1 otherwise.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]
FILE: Final = "budgets.toml"
FOLDERS: Final = ("kproxy", "kproxy_spark", "codec", "tests", "bench", "scripts", "examples")
SUFFIXES: Final = frozenset({".py", ".pyx", ".pxi", ".h", ".c"})
# Cython writes it.
GENERATED: Final = frozenset({"kproxy/plain/_plain.c"})
MOST_LINES: Final = 700
LINES: Final = "lines"
COUNTS: Final = "counts"
# A name that is bound to a compiled class where the extension is there.
_TWIN: Final = re.compile(r"\bcompiled\.([A-Z]\w+)(?!\w|\()")
_REBOUND: Final = re.compile(r"^\s*[A-Z][\w, ]* = .*\bcompiled\.[A-Z]")
_WORD: Final = re.compile(r"^\| (?!word \||---)")
_HEAD: Final = """\
# The sizes of this repository. `make check` compares them, `make budgets` lowers them. Who raises one says in the
# commit's message which feature needs it: see scripts/budgets.py.
"""

Sizes = dict[str, dict[str, int]]


def measure(root: Path) -> Sizes:
    """Measure the tree: lines by package, and the counts."""
    lines, counts = Counter[str](), Counter[str](twins=0, glossary_words=0)
    counts["files_above_700_lines"] = 0
    for file in _sources(root):
        text = file.read_text().splitlines()
        lines[_package(file.relative_to(root))] += len(text)
        counts["files_above_700_lines"] += len(text) > MOST_LINES
        if file.is_relative_to(root / "kproxy"):
            counts["twins"] += len({name for line in text if _REBOUND.match(line) for name in _TWIN.findall(line)})
    glossary = (root / "docs" / "glossary.md").read_text().splitlines()
    counts["glossary_words"] = sum(_WORD.match(line) is not None for line in glossary)
    return {LINES: dict(sorted(lines.items())), COUNTS: dict(sorted(counts.items()))}


def _sources(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in SUFFIXES and str(file.relative_to(root)) not in GENERATED:
                yield file


def _package(file: Path) -> str:
    """Return the folder below `kproxy` or `tests`; other folders are one package each."""
    parts = file.parts[:-1]
    return "/".join(parts[:2]) if parts[0] in ("kproxy", "tests") else parts[0]


def judge(sizes: Sizes, budgets: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a sentence for each size that differs from its budget."""
    found = []
    for kind in (LINES, COUNTS):
        given = budgets.get(kind, {})
        for name in sorted({*sizes[kind], *given}):
            size, most = sizes[kind].get(name, 0), given.get(name, 0)
            what = f"{name} has {size:,} lines" if kind == LINES else f"{name.replace('_', ' ')}: {size:,}"
            if size > most:
                found.append(
                    f"{what}, {size - most:,} above the budget of {most:,}: take as many out, or raise it in {FILE} "
                    f"and say in the commit's message what needs them and what pays for them."
                )
            elif size < most:
                found.append(f"{what}, {most - size:,} below the budget of {most:,}: `make budgets` lowers it.")
    return found


def lowered(sizes: Sizes, budgets: Mapping[str, Mapping[str, int]]) -> Sizes:
    """Return the budgets, none of them above its size; packages that no longer exist are left out."""
    return {
        kind: {name: min(most, sizes[kind][name]) for name, most in given.items() if name in sizes[kind]}
        for kind, given in budgets.items()
    }


def _written(budgets: Mapping[str, Mapping[str, int]]) -> str:
    tables = (
        f"\n[{kind}]\n" + "".join(f'"{name}" = {most}\n' for name, most in sorted(given.items()))
        for kind, given in budgets.items()
    )
    return _HEAD + "".join(tables)


def main() -> int:
    parser = argparse.ArgumentParser(prog="budgets", description=__doc__.partition("\n")[0])
    parser.add_argument("--lower", action="store_true", help="lower the numbers in the file to today's sizes")
    lowers = parser.parse_args().lower
    file = REPOSITORY / FILE
    sizes, budgets = measure(REPOSITORY), tomllib.loads(file.read_text())
    if lowers:
        budgets = lowered(sizes, budgets)
        file.write_text(_written(budgets))
    found = judge(sizes, budgets)
    sys.stderr.writelines(f"{sentence}\n" for sentence in found)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
