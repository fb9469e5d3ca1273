"""Build the compiled plain path, kproxy/plain/_plain: `python scripts/build_plain.py` builds it in place.

Cython writes the C file, which a source distribution includes; a C compiler and Python's headers build the extension
from it. Without them kproxy runs its plain path in Python, and the last line says so.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1] / "kproxy" / "plain"
SOURCE: Final = PACKAGE / "_plain.pyx"
NAME: Final = f"_plain{sysconfig.get_config_var('EXT_SUFFIX')}"
"""The extension's file name for this interpreter."""
INCLUDE: Final = sysconfig.get_paths()["include"]


class NotBuilt(Exception):
    """The extension cannot be built here; the message is a clause with the reason."""


def write_c(directory: Path) -> Path:
    """Write the C file into `directory`, or copy the one of a source distribution. Raises NotBuilt."""
    file = directory / "_plain.c"
    try:
        from Cython.Compiler.Main import CompilationOptions
        from Cython.Compiler.Main import compile as compile_pyx
    except ImportError as error:
        brought = SOURCE.with_suffix(".c")
        if not brought.is_file():
            raise NotBuilt("Cython is not installed") from error
        if brought != file:
            shutil.copyfile(brought, file)
        return file
    options = CompilationOptions(output_file=str(file), include_path=[str(PACKAGE)])
    result = compile_pyx(str(SOURCE), options, full_module_name="kproxy.plain._plain")
    if result.num_errors:
        raise NotBuilt(f"Cython finds {result.num_errors} errors in {SOURCE.name}")
    return file


def build(directory: Path) -> Path:
    """Build the extension into `directory`; return its file. Raises NotBuilt."""
    compiler = shlex.split(os.environ.get("CC", "") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]
    if shutil.which(compiler[0]) is None:
        raise NotBuilt("there is no C compiler (cc)")
    if not (Path(INCLUDE) / "Python.h").is_file():
        raise NotBuilt(f"there is no Python.h in {INCLUDE}")
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    extension = directory / NAME
    # Not in place: a running process has the old one mapped.
    fresh = directory / f"{NAME}.new"
    command = [*compiler, "-O2", "-fPIC", "-fno-strict-overflow", *shared, f"-I{INCLUDE}", f"-I{PACKAGE}"]
    done = subprocess.run(
        [*command, str(write_c(directory)), "-o", str(fresh)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotBuilt(f"{compiler[0]} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    fresh.replace(extension)
    return extension


def main() -> int:
    try:
        build(PACKAGE)
    except NotBuilt as reason:
        print(f"The plain path is not compiled: {reason}. kproxy runs it in Python, which costs more CPU.")
    else:
        print("The plain path is compiled.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
