"""What tells an extension that is built from the sources beside it from an older one: a digest of those sources.

The build (scripts/build_plain.py) compiles it into the extension, by this file's path: neither kproxy nor what it needs
is there yet.
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
