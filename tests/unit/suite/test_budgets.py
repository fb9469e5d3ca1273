"""Sizes are measured by package, and each package that differs from its budget is named."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from scripts import budgets
from scripts.budgets import COUNTS, FILE, LINES, REPOSITORY, measure

REBOUND = "from kproxy import plain\nif plain:\n    Slot, Order = compiled.Slot, compiled.Order\n"
NOT_REBOUND = "path = compiled.CompiledPath(1)\nOther = something\n# compiled.Slot\n"


def tree(root: Path) -> Path:
    for folder in (*budgets.FOLDERS, "docs", "kproxy/proxy", "kproxy/plain", "tests/unit/proxy"):
        (root / folder).mkdir(parents=True)
    (root / "kproxy/errors.py").write_text("a\n\n# b\n")
    (root / "kproxy/proxy/a.py").write_text(REBOUND + NOT_REBOUND)
    (root / "kproxy/proxy/read.me").write_text("x\n" * 50)
    (root / "kproxy/plain/_plain.c").write_text("x\n" * 5_000)
    (root / "tests/unit/proxy/test_a.py").write_text("x\n" * 701)
    (root / "bench/b.py").write_text("x")
    (root / "docs/glossary.md").write_text("# Words\n\n| word | meaning |\n| --- | --- |\n| lane | a |\n| slot | b |\n")
    return root


def test_sizes_are_measured_by_package(tmp_path: Path) -> None:
    assert measure(tree(tmp_path)) == {
        LINES: {"bench": 1, "kproxy": 3, "kproxy/proxy": 6, "tests/unit": 701},
        COUNTS: {"files_above_700_lines": 1, "glossary_words": 2, "twins": 2},
    }


def test_command_never_raises_a_number(tmp_path: Path) -> None:
    (tree(tmp_path) / "scripts").joinpath("budgets.py").write_text((REPOSITORY / "scripts/budgets.py").read_text())
    given = '[lines]\n"kproxy/proxy" = 5\n"kproxy" = 9\n[counts]\n"twins" = 9\n'
    (tmp_path / FILE).write_text(given)
    ran = subprocess.run(
        [sys.executable, tmp_path / "scripts/budgets.py", "--lower"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "kproxy/proxy has 6 lines, 1 above the budget of 5" in ran.stderr
    written = tomllib.loads((tmp_path / FILE).read_text())
    assert written == {LINES: {"kproxy": 3, "kproxy/proxy": 5}, COUNTS: {"twins": 2}}
