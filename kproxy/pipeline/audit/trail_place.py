"""Where a trail is: in a topic or in files. Nothing here needs Spark."""

from __future__ import annotations

from typing import Final, NamedTuple

from kproxy.config.audit import DEFAULT_TOPIC
from kproxy.errors import StartupError
from kproxy.trail.file_sinks import PARQUET_FILE_S

TOPIC: Final = "topic"
JSON: Final = "json"
PARQUET: Final = "parquet"
# The time from closing a row until it can be read: some seconds; for Parquet also the time to fill a file.
SHIPPING_MS: Final = 5_000
_GATHERING_MS: Final = round(PARQUET_FILE_S * 1000)


class TrailPlace(NamedTuple):
    """The place of a trail: `kind` TOPIC, JSON or PARQUET; `name` of the topic or the directory."""

    kind: str
    name: str

    @property
    def shipping_ms(self) -> int:
        """The longest time from closing a row until it can be read there."""
        return SHIPPING_MS + (_GATHERING_MS if self.kind == PARQUET else 0)


def parse_trail(text: str) -> TrailPlace:
    """Parse `topic`, `topic:NAME`, `json:DIR` or `parquet:DIR`. Raise StartupError if it is none of them."""
    return parse_place(f"{TOPIC}:{DEFAULT_TOPIC}" if text == TOPIC else text)


def parse_place(text: str) -> TrailPlace:
    """Parse `topic:NAME`, `json:DIR` or `parquet:DIR`. Raise StartupError."""
    kind, _, name = text.partition(":")
    if kind not in (TOPIC, JSON, PARQUET) or not name:
        raise StartupError(f"{text!r} is no place of an audit trail: give topic:NAME, json:DIR or parquet:DIR.")
    return TrailPlace(kind, name)
