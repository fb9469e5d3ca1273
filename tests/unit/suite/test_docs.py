"""The guides name files, pages and anchors that exist, and every part of the code has its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
# Keys in etcd begin with kproxy/ too, but have no ending.
FILE = re.compile(r"`((?:codec|kproxy|tests|bench|docs|scripts|deploy|examples)/[\w./*-]+(?:\.\w+|/))`")
TEST = re.compile(r"`(tests/[\w./]+\.py)::(\w+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in HEADING.findall(page.read_text(encoding="utf-8"))
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(FILE.findall(page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not any(ROOT.glob(name))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    missing = []
    for file, name in TEST.findall(page.read_text(encoding="utf-8")):
        path = ROOT / file
        code = path.read_text(encoding="utf-8") if path.is_file() else ""
        if re.search(rf"^(?:async )?def {name}\(", code, re.MULTILINE) is None:
            missing.append(f"{file}::{name}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        other = page if not path else (page.parent / path)
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            dead.append(target)
    assert dead == []


def test_architecture_table_has_twenty_rows_naming_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| `.*` \|", text.partition("## Where to change what")[2], re.MULTILINE)
    assert len(rows) >= 20


def test_the_map_has_every_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "kproxy").glob("*/__init__.py")} - {"fencing"}
    assert [name for name in sorted(packages) if f"`kproxy/{name}/`" not in text] == []
