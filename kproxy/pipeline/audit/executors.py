"""What Spark's executors need of this project, as one archive for `spark.submit.pyFiles` or `--py-files`.

`kproxy`, `kproxy_codec` and kafka-python are pure Python and run from a zip. Compiled libraries are not in it: pyarrow,
which Spark itself needs for data sources in Python, and crc32c, without which nobody checks batches' CRCs.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Final

from kproxy import installed
from kproxy.errors import StartupError

PACKAGES: Final = ("kafka", "kproxy", "kproxy_codec")
_LEFT_OUT: Final = ("__pycache__",)
# The earliest that a zip can say: the archive depends on nothing but what is in it.
_DATE: Final = (1980, 1, 1, 0, 0, 0)


def package_archive(directory: Path) -> Path:
    """Pack the installed packages into `directory`; the archive. Raises StartupError where one cannot be packed.

    It is there whole or not at all: another job may be handing the one of before to its executors.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"kproxy-{installed.version()}.zip"
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        _pack(unfinished)
        return unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _pack(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in PACKAGES:
            root = _location(name)
            for file in _files(root):
                entry = zipfile.ZipInfo(f"{name}/{file.relative_to(root).as_posix()}", _DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes())


def _location(name: str) -> Path:
    spec = util.find_spec(name)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        if Path(location).is_dir():
            return Path(location)
    raise StartupError(f"The package {name} is not installed as files, so it cannot be sent to Spark's executors.")


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not any(part in _LEFT_OUT for part in path.parts):
            yield path
