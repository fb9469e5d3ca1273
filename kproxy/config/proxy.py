"""The bounds of one listener.

What several worker processes share.

Where the audit trail goes: the room `[audit]`.

The options of `kproxy serve`, from flags, environment and a TOML file.

A key is the long flag with underscores, in a table by room: `--listen` is `listen` in `[listen]` and
`KPROXY_LISTEN__LISTEN` in the environment. Flags win over the environment, which wins over the file. A key that nobody
knows is an error that names the nearest known one: a misspelt limit would otherwise quietly not hold. Environment
variables without a double underscore (`KPROXY_DEBUG`) are no configuration.

Every error is a StartupError of one sentence that names the value's source.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kproxy.config.etcd import SECRETS, EtcdOptions, EtcdRoom, etcd_options
from kproxy.config.parsing import (
    DEFAULT_LISTEN,
    RULE,
    Address,
    advertised,
    is_topic_name,
    nearest,
    parse_address,
    parse_writer_groups,
    read_toml,
    split_list,
    unknown,
)
from kproxy.config.static_table import TABLE_ROOMS, Owners, parse_owners, read_table
from kproxy.errors import StartupError
from kproxy.installed import install_command

_Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`[limits]`: bounds of one listener, in bytes, counts, seconds and milliseconds as the names say."""

    max_request_bytes: _Count = 100 << 20
    max_control_request_bytes: _Count = 1 << 20
    max_answer_bytes: _Count = 128 << 20
    max_connections: _Count = 10_000
    max_in_flight_bytes: _Count = 64 << 20
    max_in_flight_bytes_total: _Count = 512 << 20
    max_open_requests: _Count = 1_000
    connect_timeout_s: Seconds = 1.0
    probe_timeout_s: Seconds = 2.0
    control_timeout_s: Seconds = 30.0
    control_attempt_s: Seconds = 5.0
    own_timeout_s: Seconds = 30.0
    deadline_cap_ms: _Count = 120_000
    # After SIGTERM, before clients are let go: they go elsewhere by themselves meanwhile. The flag is --drain-delay.
    drain_delay: Annotated[float, Meta(ge=0, le=3_600)] = 0.0
    drain_s: Seconds = 10.0
    # How long what earlier writers may still write keeps claims waiting, before brokers that keep no fences.
    own_unsettled_s: Seconds = 60.0


MAX_WORKERS = 256
# The bounds that hold for all client connections together.
SHARED_LIMITS = ("max_connections", "max_in_flight_bytes_total")


def worker_count(wanted: int) -> int:
    """As many as wanted; 0: one for each CPU that this process may run on."""
    if wanted:
        return wanted
    # macOS does not say which CPUs a process may use.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_WORKERS)


def share_limits(limits: Limits, workers: int) -> tuple[Limits, ...]:
    """The limits of each worker, so that what all of them hold together is within `limits`. Raises StartupError."""
    for name in SHARED_LIMITS:
        if getattr(limits, name) < workers:
            raise StartupError(
                f"limits.{name} is {getattr(limits, name)}, which {workers} workers cannot share: raise it, or give "
                f"fewer --workers."
            )
    return tuple(
        msgspec.structs.replace(
            limits, **{name: _share(getattr(limits, name), number, workers) for name in SHARED_LIMITS}
        )
        for number in range(workers)
    )


def _share(total: int, number: int, workers: int) -> int:
    return total // workers + (number < total % workers)


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


ENV_PREFIX = "KPROXY_"
DEFAULT_PREFIX = "/kafscale"
OWNERSHIP_SOURCES = ("etcd", "kafka", "static")


class _Listen(msgspec.Struct, kw_only=True):
    listen: str = DEFAULT_LISTEN
    advertise: str | UnsetType = UNSET
    admin: str | UnsetType = UNSET
    workers: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] = 1


class _Ownership(msgspec.Struct, kw_only=True):
    ownership: str = "etcd"
    etcd: str | list[str] | UnsetType = UNSET
    prefix: str = DEFAULT_PREFIX
    bootstrap: str | list[str] | UnsetType = UNSET
    refresh_s: Seconds = 30.0
    table: str | UnsetType = UNSET


class _Fleet(msgspec.Struct, kw_only=True):
    alone: bool = False
    lease_ttl: Annotated[int, Meta(ge=1, le=3_600)] = 10


class _Produce(msgspec.Struct, kw_only=True):
    confirm_acks0: bool = True


class _Own(msgspec.Struct, kw_only=True):
    writer_group: str | list[str] | UnsetType = UNSET


ROOMS: dict[str, type[msgspec.Struct]] = {
    "listen": _Listen,
    "ownership": _Ownership,
    "etcd": EtcdRoom,
    "fleet": _Fleet,
    "produce": _Produce,
    "own": _Own,
    "audit": AuditRoom,
    "limits": Limits,
}
# As a key there says too little by itself, its flag has the room's name before it.
_NAMED_ROOMS = ("etcd", "audit")


def flag_of(path: str) -> str:
    """An option's long flag, with underscores."""
    room, _, key = path.partition(".")
    return f"{room}_{key}" if room in _NAMED_ROOMS else key


# Keys that mean something for one source of owners alone.
OF_ONE_SOURCE = {"ownership.bootstrap": "kafka", "ownership.refresh_s": "kafka", "ownership.table": "static"}
# key path -> (type, default)
_KEYS = {
    f"{room}.{field.name}": (field.type, field.default)
    for room, struct in ROOMS.items()
    for field in msgspec.structs.fields(struct)
}
# Limits are for the file and the environment, but for these.
_LIMITS_WITH_FLAGS = ("limits.drain_delay",)
_FLAG_PATHS = {
    flag_of(path): path
    for path in _KEYS
    if (not path.startswith("limits.") or path in _LIMITS_WITH_FLAGS) and path not in SECRETS
}


@dataclass(frozen=True)
class ProxyConfig:
    """What `kproxy serve` is told, checked. `admin` None: no admin page. `advertise` None: the address listened on.

    `workers`: at least 1; what `limits` says of all connections holds for them together.

    `etcd`, `bootstrap` or `owners` is there, as `ownership` says; the others are empty. But `etcd` may be there beside
    any of them: proxies that share one are all named to clients, unless they are `alone`. `lease_ttl_s` is how long one
    is named after it was last heard of.

    `writer_groups`: of each topic that only owners write to the group in which they own; such topics need an `etcd`.
    `audit`: what becomes of the audit trail; its bounds hold for each process by itself.
    """

    listen: Address
    advertise: Address | None
    admin: Address | None
    ownership: str
    etcd: tuple[str, ...]
    etcd_options: EtcdOptions
    prefix: str
    bootstrap: tuple[Address, ...]
    refresh_s: float
    owners: Owners | None
    alone: bool
    lease_ttl_s: int
    confirm_acks0: bool
    writer_groups: Mapping[str, str]
    audit: AuditOptions
    limits: Limits
    workers: int


@dataclass(frozen=True)
class Setting:
    """One option as it is in force: `source` is `default`, `--flag`, an environment variable or `key in FILE`."""

    path: str
    value: object
    source: str


def load_proxy_config(
    file: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ProxyConfig:
    """The options in force. `flags` by long name with underscores; None values count as not given."""
    return build_proxy_config(load_settings(file, flags=flags, environ=environ))


def load_settings(
    file: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Setting]:
    """Every option by key path, those not given at their defaults."""
    settings = {path: Setting(path, default, "default") for path, (_, default) in _KEYS.items()}
    for path, value in _file_values(file).items():
        source = f"{path} in {file}"
        table = path in TABLE_ROOMS
        settings[path] = Setting(path, value, source) if table else _converted(path, value, source, strict=True)
    for path, (name, text) in _environment_values(environ).items():
        settings[path] = _converted(path, text, name, strict=False)
    for name, value in (flags or {}).items():
        if value is not None:
            path = _FLAG_PATHS[name]
            settings[path] = _converted(path, value, f"--{name.replace('_', '-')}", strict=False)
    return settings


def build_proxy_config(settings: Mapping[str, Setting]) -> ProxyConfig:
    """Check what is in force and hand it on. Raises StartupError."""
    _refuse_what_does_not_fit(settings)
    listen = _address(settings["listen.listen"])
    advertise = _address(settings["listen.advertise"])
    if listen is None:
        raise StartupError("listen.listen is empty: give --listen HOST:PORT.")
    prefix = settings["ownership.prefix"]
    if not str(prefix.value).startswith("/") or str(prefix.value).endswith("/"):
        raise StartupError(f"{prefix.source}: {prefix.value!r} is no prefix of etcd keys: write one like /kafscale.")
    ownership = str(settings["ownership.ownership"].value)
    limits = msgspec.convert(
        {path.partition(".")[2]: each.value for path, each in settings.items() if path.startswith("limits.")}, Limits
    )
    workers = worker_count(int(str(settings["listen.workers"].value)))
    share_limits(limits, workers)
    audit = _audit(settings)
    owners = _owners(settings) if ownership == "static" else None
    writer_groups = _writer_groups(settings)
    _refuse_unwritable_trail(audit, settings["audit.sink"], owners, writer_groups)
    return ProxyConfig(
        listen=listen,
        advertise=advertised(listen, advertise),
        admin=_address(settings["listen.admin"]),
        ownership=ownership,
        etcd=_etcd(settings) if ownership == "etcd" or settings["ownership.etcd"].value is not UNSET else (),
        etcd_options=_etcd_options(settings),
        prefix=str(prefix.value),
        bootstrap=_bootstrap(settings) if ownership == "kafka" else (),
        refresh_s=msgspec.convert(settings["ownership.refresh_s"].value, float),
        owners=owners,
        alone=bool(settings["fleet.alone"].value),
        lease_ttl_s=msgspec.convert(settings["fleet.lease_ttl"].value, int),
        confirm_acks0=bool(settings["produce.confirm_acks0"].value),
        writer_groups=writer_groups,
        audit=audit,
        limits=limits,
        workers=workers,
    )


def _audit(settings: Mapping[str, Setting]) -> AuditOptions:
    room = {path.partition(".")[2]: setting for path, setting in settings.items() if path.startswith("audit.")}
    bootstrap = room["bootstrap"]
    return audit_options(
        msgspec.convert({key: each.value for key, each in room.items() if each.value is not UNSET}, AuditRoom),
        {key: setting.source for key, setting in room.items()},
        _addresses(bootstrap) if bootstrap.value is not UNSET else (),
    )


def _refuse_unwritable_trail(
    audit: AuditOptions, sink: Setting, owners: Owners | None, writer_groups: Mapping[str, str]
) -> None:
    """What is shipped through this proxy itself must be let through."""
    if audit.sink != "topic" or audit.bootstrap:
        return
    if audit.topic in writer_groups:
        raise StartupError(
            f"{sink.source}: only owners write to {audit.topic} by own.writer_group, and the audit trail is nobody's: "
            f"name another topic."
        )
    if owners is not None and all(topic.name != audit.topic for topic in owners.topics):
        raise StartupError(
            f"{sink.source}: the static table has no owner for {audit.topic}: write it a [[topics]] of its own, or "
            f"ship elsewhere with --audit-bootstrap HOST:PORT[,HOST:PORT...]."
        )


def _etcd(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    etcd = settings["ownership.etcd"]
    if etcd.value is UNSET:
        raise StartupError(
            "kproxy serve learns the owners from etcd: give its address with --etcd URL[,URL...], for example "
            "--etcd http://127.0.0.1:2379 (or try `kproxy dev`, which brings its own)."
        )
    return split_list(etcd.value, etcd.source)  # type: ignore[arg-type]  # converted to its type on loading


def _etcd_options(settings: Mapping[str, Setting]) -> EtcdOptions:
    given = {
        path.partition(".")[2]: setting
        for path, setting in settings.items()
        if path.startswith("etcd.") and setting.value is not UNSET
    }
    if given and settings["ownership.etcd"].value is UNSET:
        first = next(iter(given.values()))
        raise StartupError(f"{first.source}: it is about an etcd, and none is named: give --etcd URL[,URL...].")
    values = {key: setting.value for key, setting in given.items()}
    return etcd_options(values, {key: setting.source for key, setting in given.items()})


def _writer_groups(settings: Mapping[str, Setting]) -> Mapping[str, str]:
    given = settings["own.writer_group"]
    if given.value is UNSET:
        return {}
    groups = parse_writer_groups(given.value, given.source)  # type: ignore[arg-type]  # converted on loading
    if groups and settings["ownership.etcd"].value is UNSET:
        raise StartupError(
            f"{given.source}: who may write is settled in etcd, and none is named: give --etcd URL[,URL...] as well."
        )
    return groups


def _bootstrap(settings: Mapping[str, Setting]) -> tuple[Address, ...]:
    bootstrap = settings["ownership.bootstrap"]
    if bootstrap.value is UNSET:
        raise StartupError(
            "--ownership kafka learns the owners from a Kafka cluster: give some of its brokers with "
            "--bootstrap HOST:PORT[,HOST:PORT...]."
        )
    return _addresses(bootstrap)


def _addresses(bootstrap: Setting) -> tuple[Address, ...]:
    parts = split_list(bootstrap.value, bootstrap.source)  # type: ignore[arg-type]  # converted on loading
    addresses = tuple(parse_address(part, bootstrap.source) for part in parts)
    for address in addresses:
        if address.port == 0:
            raise StartupError(f"{bootstrap.source}: nobody listens on {address}: write a broker's own port.")
    return addresses


def _owners(settings: Mapping[str, Setting]) -> Owners:
    table, inline = settings["ownership.table"], [room for room in TABLE_ROOMS if room in settings]
    if table.value is not UNSET and inline:
        raise StartupError(
            f"the static table stands twice: {table.source} names a file and {settings[inline[0]].source} has one; "
            f"keep one of them."
        )
    if table.value is UNSET and not inline:
        raise StartupError(
            "--ownership static needs its table: name a file with --table, or write [brokers] and [[topics]] into the "
            "configuration file."
        )
    if table.value is UNSET:
        return _inline_table(Path(settings[inline[0]].source.rpartition(" in ")[2]))
    return read_table(Path(str(table.value)))


def _inline_table(file: Path) -> Owners:
    """The table in a configuration file. Raises StartupError."""
    values = _file_values(file)
    rooms = {room: values[room] for room in TABLE_ROOMS if room in values}
    return parse_owners(rooms, str(file), partial(_inline_table, file))


def _refuse_what_does_not_fit(settings: Mapping[str, Setting]) -> None:
    ownership = settings["ownership.ownership"]
    if ownership.value not in OWNERSHIP_SOURCES:
        raise StartupError(
            f"{ownership.source}: {ownership.value!r} is no ownership source: there are {', '.join(OWNERSHIP_SOURCES)}."
        )
    for path, source in OF_ONE_SOURCE.items():
        setting = settings[path]
        if setting.source != "default" and ownership.value != source:
            raise StartupError(f"{setting.source}: it belongs to --ownership {source}; this is {ownership.value}.")
    for room in TABLE_ROOMS:
        if room in settings and ownership.value != "static":
            raise StartupError(f"{settings[room].source}: it belongs to --ownership static; this is {ownership.value}.")


def _address(setting: Setting) -> Address | None:
    return None if setting.value is UNSET else parse_address(str(setting.value), setting.source)


def _converted(path: str, value: object, source: str, *, strict: bool) -> Setting:
    kind, _ = _KEYS[path]
    try:
        return Setting(path, msgspec.convert(value, kind, strict=strict), source)
    except msgspec.ValidationError as error:
        # msgspec knows no key here: the value was converted by itself.
        shown = "this" if path in SECRETS else repr(str(value)[:80])
        raise StartupError(f"{source}: {shown} will not do: {str(error).lower()}.") from error


def _file_values(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    values: dict[str, object] = {}
    for room, table in read_toml(file).items():
        if room in TABLE_ROOMS:
            values[room] = table
            continue
        if room not in ROOMS or not isinstance(table, dict):
            unknown(room, f"in {file}", f"[{nearest(room, ROOMS)}]", isinstance(table, dict))
        for key, value in table.items():
            path = f"{room}.{key}"
            if path not in _KEYS:
                unknown(path, f"in {file}", nearest(path, _KEYS), False)
            values[path] = value
    return values


def _environment_values(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    known = {f"{ENV_PREFIX}{path.replace('.', '__').upper()}": path for path in _KEYS}
    values: dict[str, tuple[str, str]] = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            if name not in known:
                unknown(name, "in the environment", nearest(name, known), False)
            values[known[name]] = (name, text)
    return values
