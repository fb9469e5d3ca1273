"""The archive for executors has the right content, runs in Python as it is, and is never incomplete."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kproxy.errors import StartupError
from kproxy.pipeline import session
from kproxy.pipeline.session import PACKAGES, package_archive


def test_archive_has_packages_with_data_without_compiled_files(tmp_path: Path) -> None:
    names = zipfile.ZipFile(package_archive(tmp_path / "new")).namelist()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, "scramp.dist-info"}
    assert "kproxy/pipeline/audit/steps.py" in names
    assert any(name.startswith("kafka/") and name.endswith(".json") for name in names), "kafka-python's schemas"
    assert [name for name in names if name.endswith((".pyc", ".so", ".pyd"))] == []


def test_archive_needs_no_installed_package(tmp_path: Path) -> None:
    """It reads a log with SASL, using only what Spark brings; kafka-python finds its schemas in it."""
    program = (
        "import kproxy.pipeline.audit.steps as tasks, kproxy.pipeline.audit.logs, kproxy.pipeline.audit.trail_rows\n"
        "from kproxy_codec.control import build_request, encode_request\n"
        "assert encode_request(build_request(3, 12, topics=None))\n"
        "from kproxy.security.sasl_client import mechanism\n"
        "assert mechanism('SCRAM-SHA-512', 'alice', 'secret').first()\n"
        "print(tasks.__file__)\n"
    )
    archive = package_archive(tmp_path)
    command = [sys.executable, "-S", "-P", "-c", f"import sys; sys.path.insert(0, {str(archive)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path, env={})
    assert done.stdout.strip() == f"{archive}/kproxy/pipeline/audit/steps.py", done.stderr


def test_failed_archive_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = package_archive(tmp_path).read_bytes()
    monkeypatch.setattr(session, "PACKAGES", ("kproxy_codec", "no_such_package"))
    with pytest.raises(StartupError, match=r"^The package no_such_package is not installed as files"):
        package_archive(tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.read_bytes() == before
