"""The guides name files, pages, anchors, commands and flags that exist, and every part of the code has its row."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

from kproxy.cli import COMMANDS, cli
from tests.support.pages import ROOT, blocks
from tests.unit.suite.test_deploy import command_named, flags_of

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
# Keys in etcd begin with kproxy/ too, but have no file extension.
FILE = re.compile(r"`((?:codec|kproxy|tests|bench|docs|scripts|deploy|examples)/[\w./*-]+(?:\.\w+|/))`")
TEST = re.compile(r"`(tests/[\w./]+\.py)::(\w+)`")
# A name in code, as the architecture's table lists it beside its files.
NAME = re.compile(r"`([A-Za-z_]\w*)`")
LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
INLINE = re.compile(r"`((?:kproxy|make|pip) [^`]+)`")
BENCHES = re.findall(r'^        "(\w+)": lambda', (ROOT / "bench/__main__.py").read_text(), re.MULTILINE)
# In a block: a line with those that it goes on in, but for what a shell makes of its end.
LINE = re.compile(r"^(?:\S+=\S+ |sudo )*((?:kproxy|make|pip) (?:\\\n|[^\n#|>])*)", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_lists_every_command() -> None:
    rows = re.findall(r"^\| (`kproxy [^|]*) \|", README, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`kproxy ([\w-]+)", row)} == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in FILE.findall(text) if not any(ROOT.glob(name))]
    missing += [name for file, name in TEST.findall(text) if f"def {name}(" not in (ROOT / file).read_text()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            dead.append(target)
    assert dead == []


def check_command(text: str, *, whole: bool = False) -> None:
    """Fail unless the command exists, with its flags; if the text is the `whole` command, its arguments are parsed."""
    program, *words = shlex.split(text.replace("\\\n", " "))
    if program == "make":
        [target, *_] = [word for word in words if "=" not in word]
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), text
        assert {*re.findall(r"SECTION=(\w+)", text)} <= {*BENCHES, "against"}, text
    elif program == "pip":
        for extra in re.findall(r"\[(\w+)\]", text):
            assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), text
    else:
        command: click.Command = cli
        while words and isinstance(command, click.Group) and not words[0].startswith(("-", "...", "COMMAND")):
            command = command_named(words.pop(0).strip(","), command)
        if whole and "..." not in words and not isinstance(command, click.Group):
            command.make_context(command.name, words)
        flags = {word.partition("=")[0].strip(",;:") for word in words if re.match(r"--[a-z]", word)}
        assert flags <= flags_of(command) | {"--help"}, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for command in {" ".join(each.split()) for each in INLINE.findall(prose)}:
        check_command(command)
    for block in blocks(page, "sh", ""):
        for command in LINE.findall(block.text):
            check_command(command, whole=True)


def test_rows_of_architecture_name_code_that_exists() -> None:
    lines = ARCHITECTURE.partition("## Where to change what")[2].splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| to change", "| ---"))]
    assert len(rows) >= 20
    missing = [row for row in rows if FILE.search(row) is None or "`tests/" not in row]
    for row in rows:
        code = "".join((ROOT / name).read_text() for name in FILE.findall(row) if not name.endswith("/"))
        missing += [name for name in NAME.findall(row) if re.search(rf"\b{name}\b", code) is None]
    assert missing == []


def test_map_has_every_package_and_its_parts_size() -> None:
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text(encoding="utf-8"))["lines"]
    packages = {name for name in budgets if name.startswith(("codec", "kproxy/"))}
    for part in ARCHITECTURE.partition("\n## A produce request")[0].split("\n### ")[1:]:
        size = int(re.findall(r": about ([\d,]+) lines\n", part)[0].replace(",", ""))
        named = {name for name in packages if f"| `{name}/" in part}
        assert sum(budgets[name] for name in named) == pytest.approx(size, rel=0.1)
        packages -= named
    assert packages == set()
