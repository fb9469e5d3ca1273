"""TOML files, and the word for a key that nobody knows."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from kproxy.errors import StartupError

MAX_FILE_BYTES = 16 * 1024 * 1024


def read_file(file: Path, named: str, limit: int, otherwise: str) -> bytes:
    """All of a file that people call `named`; `otherwise` says what one of more than `limit` bytes is."""
    try:
        with file.open("rb") as opened:
            content = opened.read(limit + 1)
    except OSError as error:
        raise StartupError(f"{named} {file} cannot be read: {error.strerror}.") from error
    if len(content) > limit:
        raise StartupError(f"{named} {file} is larger than {limit >> 20} MiB: {otherwise}.")
    return content


def read_toml(file: Path, flag: str = "--config") -> dict[str, Any]:
    content = read_file(file, flag, MAX_FILE_BYTES, "that is no configuration")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise StartupError(f"{flag} {file} is not UTF-8 text (byte {error.start}).") from error
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"{flag} {file} is not TOML: {str(error)[:200]}.") from error


def unknown(name: str, where: str, nearest: str, is_table: bool) -> NoReturn:
    what = f"[{name}]" if is_table else name
    raise StartupError(f"unknown key {what} {where}: did you mean {nearest}?")


def nearest(name: str, known: Mapping[str, object]) -> str:
    """By the whole path first; a right key in a wrong room has the key for its nearest."""
    for candidate in known:
        if "." in name and candidate.rpartition(".")[2] == name.rpartition(".")[2]:
            return candidate
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
