"""Where the audit trail goes: the room `[audit]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kproxy.config.address import Address
from kproxy.config.topic_name import RULE, is_topic_name
from kproxy.errors import StartupError
from kproxy.installed import install_command

DEFAULT_TOPIC = "__kproxy_audit"
SinkKind = Literal["none", "topic", "json", "parquet"]


class AuditRoom(msgspec.Struct, kw_only=True):
    """`[audit]` as it is written: `interval_s` in seconds, `max_bytes` in bytes."""

    sink: str = "none"
    bootstrap: str | list[str] | UnsetType = UNSET
    interval_s: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    max_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 30)] = 16 << 20


@dataclass(frozen=True)
class AuditOptions:
    """What becomes of the trail, checked.

    `topic` is what the topic is called that trails are shipped to, also where this one goes elsewhere or nowhere:
    writes to it are never in a trail. `directory` is there for files alone. `bootstrap` empty: through the proxy
    itself. What is acknowledged is in a row that is closed within `interval_s` seconds. `max_bytes` are kept while the
    sink takes nothing.
    """

    sink: SinkKind = "none"
    topic: str = DEFAULT_TOPIC
    directory: Path | None = None
    bootstrap: tuple[Address, ...] = ()
    interval_s: float = 5.0
    max_bytes: int = 16 << 20


def audit_options(room: AuditRoom, sources: Mapping[str, str], bootstrap: tuple[Address, ...]) -> AuditOptions:
    """`sources` says by key where each value comes from. Raises StartupError."""
    source = sources["sink"]
    kind, colon, place = room.sink.partition(":")
    topic, directory = DEFAULT_TOPIC, None
    if kind == "topic" and (place or not colon):
        topic = place or DEFAULT_TOPIC
        if not is_topic_name(topic):
            raise StartupError(f"{source}: {topic[:300]!r} cannot be a topic: {RULE}.")
    elif kind in ("json", "parquet") and place:
        directory = Path(place)
    elif room.sink != "none":
        raise StartupError(
            f"{source}: {room.sink[:300]!r} is nowhere for an audit trail to go: write none, topic, topic:NAME, "
            f"json:DIR or parquet:DIR."
        )
    if bootstrap and kind != "topic":
        raise StartupError(f"{sources['bootstrap']}: it belongs to an audit sink of kind topic; this is {room.sink}.")
    if kind == "parquet" and find_spec("pyarrow") is None:
        raise StartupError(
            f"{source}: Parquet files need pyarrow, which is not installed: run `{install_command('parquet')}`, or "
            f"write json:{place}."
        )
    return AuditOptions(
        sink=msgspec.convert(kind, SinkKind),
        topic=topic,
        directory=directory,
        bootstrap=bootstrap,
        interval_s=room.interval_s,
        max_bytes=room.max_bytes,
    )
