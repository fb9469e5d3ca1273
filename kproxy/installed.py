"""Find the installed version and commit, and the command that installs an extra.

The commit is written into wheels and source distributions when they are built (`hatch_build.py`); a checkout asks git.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "kproxy-kafka"
COMMIT_FILE = "_commit.txt"
_PACKAGE = Path(__file__).parent
_GIT_PATIENCE_S = 5.0


def version() -> str:
    """Return the version in `pyproject.toml`.

    "0" if the code is not installed, as on Spark's executors.
    """
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"


def commit() -> str:
    """Return the commit that this was built from, with `-dirty` if files differ.

    Empty if unknown.
    """
    written = _PACKAGE / COMMIT_FILE
    if written.is_file():
        return written.read_text().strip()
    checkout = _PACKAGE.parent
    if not (checkout / ".git").exists():
        return ""
    describe = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        found = subprocess.run(describe, capture_output=True, text=True, timeout=_GIT_PATIENCE_S, check=False)  # noqa: S603 -- no external input
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def install_command(extra: str) -> str:
    """Return the command that installs kproxy with an extra, from the same origin."""
    origin = _origin()
    if origin is None:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    path, is_editable = origin
    return f"pip install {'-e ' if is_editable else ''}{shlex.quote(f'{path}[{extra}]')}"


def _origin() -> tuple[str, bool] | None:
    """The directory or file that this was installed from, and whether it runs from there; None: a package index.

    pip records it in `direct_url.json` (PEP 610).
    """
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        noted = json.loads(text or "{}")
        url = urlsplit(noted.get("url", ""))
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        return None
    if url.scheme != "file":
        return None
    return unquote(url.path), bool(noted.get("dir_info", {}).get("editable"))
