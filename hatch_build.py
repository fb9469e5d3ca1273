"""Write into packages which commit they were built from; `kproxy --version` tells it (`kproxy.installed`).

The commit is KPROXY_COMMIT, else what git says of the checkout. A source distribution brings its own along.
"""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """An editable install has none: it asks git when it is asked."""

    _written: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root) / "kproxy"
        # By its path: neither kproxy nor what it needs is there while it is built.
        installed = runpy.run_path(str(package / "installed.py"))
        name: str = installed["COMMIT_FILE"]
        if version == "editable" or (package / name).is_file():
            return
        commit = os.environ.get("KPROXY_COMMIT", "") or installed["commit"]()
        if commit:
            self._written = Path(tempfile.mkdtemp(prefix="kproxy-commit-")) / name
            self._written.write_text(f"{commit}\n")
            build_data["force_include"][str(self._written)] = f"kproxy/{name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._written is not None:
            self._written.unlink()
            self._written.parent.rmdir()
            self._written = None
