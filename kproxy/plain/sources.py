"""Compute a digest of the extension's sources, which shows whether an extension was built from other ones.

The build (scripts/build_plain.py) compiles the digest into the extension. It loads this file by its path, because
kproxy cannot be imported yet.
"""

from __future__ import annotations

import hashlib
from pathlib import Path


def sources_digest(directory: Path) -> str:
    """The digest of the Cython and C sources in `directory`, in hexadecimal."""
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.iterdir() if path.suffix in (".pyx", ".pxi", ".h")):
        text = file.read_bytes()
        digest.update(f"{file.name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()
