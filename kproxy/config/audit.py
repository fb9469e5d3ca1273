"""Check the options of the audit trail: `[audit]`.

Every error is a StartupError that names the value's source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kproxy.config.broker_sasl import AuditSasl
from kproxy.config.parsing import (
    TOPIC_NAME_RULE,
    Address,
    Texts,
    broker_addresses,
    given_keys,
    is_topic_name,
    of_section,
    read_file,
)
from kproxy.config.static_table import Owners
from kproxy.config.tls import AuditTls
from kproxy.errors import StartupError
from kproxy.installed import install_command

DEFAULT_TOPIC = "__kproxy_audit"
MIN_KEY_BYTES = 16
_MOST_KEY_BYTES = 4096
SinkKind = Literal["none", "topic", "json", "parquet"]


class AuditSection(msgspec.Struct, kw_only=True):
    """The section `[audit]`: `interval_s` in seconds, `max_bytes` in bytes; `tls` and `sasl` belong to `bootstrap`."""

    sink: str = "none"
    bootstrap: Texts | None = None
    interval_s: Annotated[float, Meta(ge=0.1, le=60)] = 5.0
    max_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 30)] = 16 << 20
    key_file: Path | None = None
    tls: AuditTls = msgspec.field(default_factory=AuditTls)
    sasl: AuditSasl = msgspec.field(default_factory=AuditSasl)


@dataclass(frozen=True)
class AuditOptions:
    """The checked options of `[audit]`.

    `topic` is the topic of trails, even if this proxy ships none there: writes to it are never in a trail. `directory`
    is set for files only. With `bootstrap` empty the trail is shipped through this proxy itself; otherwise `tls` and
    `sasl` are the access to that cluster, as `broker_tls` and `broker_sasl` of ProxyConfig. The row of an
    acknowledgement is closed within `interval_s` seconds. At most `max_bytes` are kept while the sink accepts nothing.
    `key` signs the rows.
    """

    sink: SinkKind = "none"
    topic: str = DEFAULT_TOPIC
    directory: Path | None = None
    bootstrap: tuple[Address, ...] = ()
    interval_s: float = 5.0
    max_bytes: int = 16 << 20
    key: bytes | None = field(default=None, repr=False)
    tls: AuditTls | None = None
    sasl: AuditSasl | None = None


def _audit_access(
    given: AuditSection, sources: Mapping[str, str], *, is_elsewhere: bool
) -> tuple[AuditTls | None, AuditSasl | None]:
    of_access = [f"{section.prefix}{key}" for section in (given.tls, given.sasl) for key in given_keys(section)]
    if of_access and not is_elsewhere:
        raise StartupError(
            f"{sources[of_access[0]]} applies only to a trail in another cluster: name that in audit.bootstrap. "
            f"A trail that is shipped through the proxy itself uses broker_tls and broker_sasl."
        )
    tls = given.tls.checked(of_section(sources, "audit.tls"))
    return tls, given.sasl.checked(of_section(sources, "audit.sasl"), with_tls=tls is not None)


def read_trail_key(file: Path, source: str) -> bytes:
    """Read the key that signs trails. Raises StartupError."""
    key = read_file(file, source, _MOST_KEY_BYTES, "that is not a key").strip()
    if len(key) < MIN_KEY_BYTES:
        raise StartupError(
            f"{source}: the key in {file} has {len(key)} bytes; expected at least {MIN_KEY_BYTES}: write a random key, "
            f"as `openssl rand -hex 32` prints."
        )
    return key


def audit_options(given: AuditSection, sources: Mapping[str, str]) -> AuditOptions:
    """Check the section. Raises StartupError."""
    source = sources["audit.sink"]
    bootstrap = broker_addresses(given.bootstrap, sources["audit.bootstrap"])
    kind, colon, place = given.sink.partition(":")
    topic, directory = DEFAULT_TOPIC, None
    if kind == "topic" and (place or not colon):
        topic = place or DEFAULT_TOPIC
        if not is_topic_name(topic):
            raise StartupError(f"{source}: {topic[:300]!r} cannot be a topic: {TOPIC_NAME_RULE}.")
    elif kind in ("json", "parquet") and place:
        directory = Path(place)
    elif given.sink != "none":
        raise StartupError(
            f"{source}: unknown audit sink {given.sink[:300]!r}; expected none, topic, topic:NAME, "
            f"json:DIR or parquet:DIR."
        )
    if bootstrap and kind != "topic":
        raise StartupError(
            f"{sources['audit.bootstrap']} applies only to an audit sink of kind topic; audit.sink is {given.sink}."
        )
    tls, sasl = _audit_access(given, sources, is_elsewhere=bool(bootstrap))
    if kind == "parquet" and find_spec("pyarrow") is None:
        raise StartupError(
            f"{source}: Parquet files need pyarrow, which is not installed: run `{install_command('parquet')}`, or "
            f"write json:{place}."
        )
    key = None
    if given.key_file is not None:
        if kind not in ("topic", "json"):
            raise StartupError(
                f"{sources['audit.key_file']} applies only to topics and JSON files; audit.sink is {given.sink}."
            )
        key = read_trail_key(given.key_file, sources["audit.key_file"])
    return AuditOptions(
        sink=msgspec.convert(kind, SinkKind),
        topic=topic,
        directory=directory,
        bootstrap=bootstrap,
        interval_s=given.interval_s,
        max_bytes=given.max_bytes,
        key=key,
        tls=tls,
        sasl=sasl,
    )


def refuse_unwritable_trail(
    audit: AuditOptions, source: str, owners: Owners | None, writer_groups: Mapping[str, str]
) -> None:
    """Refuse to ship a trail through this proxy itself to a topic that not every client may write to."""
    if audit.sink != "topic" or audit.bootstrap:
        return
    if audit.topic in writer_groups:
        raise StartupError(
            f"{source}: only owners write to {audit.topic} by own.writer_group, and the audit trail is not an owner: "
            f"name another topic."
        )
    if owners is not None and all(topic.name != audit.topic for topic in owners.topics):
        raise StartupError(
            f"{source}: the static table has no owner for {audit.topic}: add it as one of [[topics]], or "
            f"ship the trail to another cluster with --audit-bootstrap HOST:PORT[,HOST:PORT...]."
        )
