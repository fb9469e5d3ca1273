"""Find the pages of docs/ and the blocks of code in them, for tests that run the blocks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Block(NamedTuple):
    kind: str
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.kind}-at-line-{self.line}"


def blocks(page: str | Path, *kinds: str) -> list[Block]:
    """The blocks of a page in their order, of these kinds or all; those in lists, too."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```([\w{}]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    every = [
        Block(each[2], re.sub(f"^{each[1]}", "", each[3], flags=re.M), text.count("\n", 0, each.start()) + 1)
        for each in found
    ]
    assert text.count("```") == 2 * len(every), f"a block of {page} is not recognised"
    return [each for each in every if not kinds or each.kind in kinds]


def shell(script: str, directory: Path, *, said: str = "", **environ: str) -> str:
    """Run it in bash as it stands, with this installation's commands, and return its output. It must succeed."""
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **environ},
        input=said,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ended.returncode == 0, (script, ended)
    return ended.stdout
