"""Write into packages which commit they were built from, and the compiled plain path.

`kproxy --version` shows the commit (`kproxy.installed`): KPROXY_COMMIT, else what git says of the checkout. A source
distribution brings its own along.

A wheel has the extension where it can be built (scripts/build_plain.py), and is then of one Python and platform;
otherwise it is of all. A source distribution has the extension's C file.
"""

from __future__ import annotations

import os
import runpy
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackageHook(BuildHookInterface[Any]):
    """An editable install has neither: it asks git when it is asked, and `make install` builds in place."""

    _written: Path | None = None
    _built: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            self._add_commit(build_data)
            self._add_extension(build_data)

    def _add_commit(self, build_data: dict[str, Any]) -> None:
        package = Path(self.root) / "kproxy"
        # By its path: neither kproxy nor what it needs is there while it is built.
        installed = runpy.run_path(str(package / "installed.py"))
        name: str = installed["COMMIT_FILE"]
        if (package / name).is_file():
            return
        commit = os.environ.get("KPROXY_COMMIT", "") or installed["commit"]()
        if commit:
            self._written = Path(tempfile.mkdtemp(prefix="kproxy-commit-")) / name
            self._written.write_text(f"{commit}\n")
            build_data["force_include"][str(self._written)] = f"kproxy/{name}"

    def _add_extension(self, build_data: dict[str, Any]) -> None:
        script = runpy.run_path(str(Path(self.root) / "scripts" / "build_plain.py"))
        self._built = Path(tempfile.mkdtemp(prefix="kproxy-plain-"))
        make = script["build"] if self.target_name == "wheel" else script["write_c"]
        try:
            file: Path = make(self._built)
        except script["NotBuilt"] as reason:
            self.app.display_warning(f"The plain path is not compiled: {reason}.")
            return
        build_data["force_include"][str(file)] = f"kproxy/plain/{file.name}"
        if self.target_name == "wheel":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._written is not None:
            self._written.unlink()
            self._written.parent.rmdir()
        if self._built is not None:
            shutil.rmtree(self._built)
            self._written = None
