"""Information about the installed package: its version, its commit, and how to add an extra."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from kproxy import installed

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("noted", "command"),
    [
        (None, "pip install 'kproxy-kafka[spark]'"),
        ({"url": "https://example.org/kproxy.whl", "archive_info": {}}, "pip install 'kproxy-kafka[spark]'"),
        ({"url": "file:///tmp/k%20p/k-0.1-py3-none-any.whl"}, "pip install '/tmp/k p/k-0.1-py3-none-any.whl[spark]'"),
        ({"url": "file:///src/kproxy", "dir_info": {}}, "pip install '/src/kproxy[spark]'"),
        ({"url": "file:///src/kproxy", "dir_info": {"editable": True}}, "pip install -e '/src/kproxy[spark]'"),
        ([], "pip install 'kproxy-kafka[spark]'"),
    ],
)
def test_extra_is_installed_from_kproxys_own_source(
    monkeypatch: pytest.MonkeyPatch, noted: object, command: str
) -> None:
    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if noted is None else json.dumps(noted)

    monkeypatch.setattr(installed.metadata, "distribution", lambda name: Distribution())
    assert installed.install_command("spark") == command


def test_uninstalled_package_is_treated_as_from_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "DISTRIBUTION", "kproxy-nowhere")
    assert installed.install_command("dev") == "pip install 'kproxy-nowhere[dev]'"
    assert installed.version() == "0"


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for file in [*(ROOT / "kproxy").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = file.read_text()
        named |= {(file.name, each) for each in re.findall(r"install_command\([\"'](\w+)[\"']\)", text)}
        named |= {(file.name, each) for each in re.findall(r"(?:kproxy-kafka|\.|\.whl)\[([a-z]+)\]", text)}
    assert named
    assert not {each for each in named if each[1] not in extras}


def test_checkout_asks_git_for_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*command: str) -> str:
        named = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command]
        return subprocess.run(named, cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    monkeypatch.setattr(installed, "_PACKAGE", tmp_path / "kproxy")
    (tmp_path / "file").write_text("1")
    git("init", "-q")
    git("add", "file")
    git("commit", "-qm", "First")
    commit = installed.commit()
    assert len(commit) >= 12
    assert git("rev-parse", "HEAD").startswith(commit)
    (tmp_path / "file").write_text("2")
    assert installed.commit() == f"{commit}-dirty"


def test_installed_package_knows_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installed, "_PACKAGE", tmp_path)
    assert installed.commit() == ""
    (tmp_path / installed.COMMIT_FILE).write_text("0123456789ab\n")
    assert installed.commit() == "0123456789ab"


def test_workflows_call_only_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    commands = [each for text in workflows for each in re.findall(r"^ *- run: (.*)$", text, re.MULTILINE)]
    assert len(commands) == sum(text.count("run:") for text in workflows) > 0
    assert all(re.fullmatch(r"make [a-z-]+( [A-Z]+=\"[^\"]*\")?", each) for each in commands), commands
    assert {each.split()[1] for each in commands} <= targets
