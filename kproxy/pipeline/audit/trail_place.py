"""Parse the place of a trail: a topic or files. This module needs no Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kproxy.config.audit import DEFAULT_TOPIC, read_trail_key
from kproxy.errors import StartupError
from kproxy.pipeline.audit.rules import SHIPPING_MS
from kproxy.trail.file_sinks import PARQUET_FILE_S
from kproxy.trail.signature import Signatures

TOPIC: Final = "topic"
JSON: Final = "json"
PARQUET: Final = "parquet"
# The names of the files of a trail.
PATTERNS: Final = {JSON: "*.jsonl", PARQUET: "*.parquet"}
# For Parquet files also the time to fill a file.
_GATHERING_MS: Final = round(PARQUET_FILE_S * 1000)


class TrailPlace(NamedTuple):
    """The place of a trail: `kind` TOPIC, JSON or PARQUET; `name` of the topic or the directory.

    With `keys`, only rows that are signed with one of them are read.
    """

    kind: str
    name: str
    keys: tuple[bytes, ...] = ()

    def signatures(self) -> Signatures | None:
        return Signatures(self.keys) if self.keys else None

    @property
    def shipping_ms(self) -> int:
        """The longest time, in ms, from closing a row until it can be read there."""
        return SHIPPING_MS + (_GATHERING_MS if self.kind == PARQUET else 0)


def parse_trail(text: str, key_files: Sequence[Path] = ()) -> TrailPlace:
    """Parse `topic`, `topic:NAME`, `json:DIR` or `parquet:DIR`, and read the keys. Raise StartupError."""
    place = parse_place(f"{TOPIC}:{DEFAULT_TOPIC}" if text == TOPIC else text)
    if key_files and place.kind == PARQUET:
        raise StartupError("--trail-key: a trail in Parquet files is not signed; audit it without the key.")
    return place._replace(keys=tuple(read_trail_key(file, "--trail-key") for file in key_files))


def parse_place(text: str) -> TrailPlace:
    """Parse `topic:NAME`, `json:DIR` or `parquet:DIR`. Raise StartupError."""
    kind, _, name = text.partition(":")
    if kind not in (TOPIC, JSON, PARQUET) or not name:
        raise StartupError(f"{text!r} is not a place of an audit trail: give topic:NAME, json:DIR or parquet:DIR.")
    return TrailPlace(kind, name)
