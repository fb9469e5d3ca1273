"""Read and check the configuration of `kproxy serve` from flags, the environment and a TOML file.

`Options` has one struct for each section of the file, whose fields are its keys (kproxy.config.parsing).
`build_proxy_config` checks the options against each other and makes the `ProxyConfig`. `--listen` is `listen` in the
section `[listen]`, and `KPROXY_LISTEN__LISTEN` in the environment; in many sections the flag begins with the
section's name (`--etcd-ca` is `ca` of `[etcd]`). Flags override the environment, which overrides the file. An unknown
key is an error that names the nearest known key; otherwise a misspelt limit would have no effect. Environment variables
without a double underscore (`KPROXY_DEBUG`) are not configuration.

Every error is a StartupError of one sentence that names the value's source.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kproxy.config.access import ACLS, AccessOptions, AccessSection, parse_acls
from kproxy.config.admin import AdminOptions, parse_admin
from kproxy.config.audit import AuditOptions, AuditSection, audit_options, refuse_unwritable_trail
from kproxy.config.broker_sasl import BrokerSasl
from kproxy.config.etcd import EtcdOptions
from kproxy.config.listeners import SECTION as LISTENERS
from kproxy.config.listeners import ListenerConfig, parse_listeners, proxy_senders
from kproxy.config.metrics import NOTHING_NAMED, MetricsSection
from kproxy.config.parsing import (
    DEFAULT_LISTEN,
    Address,
    Secret,
    Texts,
    advertised,
    broker_addresses,
    check_prefix,
    decode,
    keys_of,
    nearest,
    of_section,
    parse_address,
    parse_value,
    parse_writer_groups,
    read_toml,
    unknown,
)
from kproxy.config.quotas import QUOTAS, QuotaOptions, parse_quotas
from kproxy.config.security import OauthOptions, SaslOptions, SaslSection, refuse_unsafe_identity, sasl_options
from kproxy.config.static_table import STATIC_TABLE_SECTIONS, Owners, parse_owners, read_table
from kproxy.config.tls import BrokerTls, ListenerTls
from kproxy.errors import StartupError

# The compiled plain path counts in 64 bits.
_Count = Annotated[int, Meta(ge=1, le=10**15)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[limits]`: bounds of the proxy, a listener or a connection, in the units of their names."""

    max_request_bytes: _Count = 100 << 20
    max_control_request_bytes: _Count = 1 << 20
    max_answer_bytes: _Count = 128 << 20
    max_connections: _Count = 10_000
    # 0 stands for any number.
    max_connections_per_address: Annotated[int, Meta(ge=0)] = 0
    max_in_flight_bytes: _Count = 64 << 20
    max_in_flight_bytes_total: _Count = 512 << 20
    max_open_requests: _Count = 1_000
    # Connections of a listener that have not finished their TLS handshake or PROXY protocol header.
    max_half_open: _Count = 500
    # The time after which an idle connection is closed, 0 for never. The default is Kafka's connections.max.idle.ms.
    idle_s: Annotated[float, Meta(ge=0, le=31_536_000)] = 600.0
    connect_timeout_s: Seconds = 1.0
    probe_timeout_s: Seconds = 2.0
    control_timeout_s: Seconds = 30.0
    control_attempt_s: Seconds = 5.0
    own_timeout_s: Seconds = 30.0
    deadline_cap_ms: _Count = 120_000
    # The time from SIGTERM until clients are disconnected, in which they move by themselves (--drain-delay).
    drain_delay: Annotated[float, Meta(ge=0, le=3_600)] = 0.0
    drain_s: Seconds = 10.0
    # How long a claim waits for the writes of earlier claimants, if brokers have no writer fences.
    own_unsettled_s: Seconds = 60.0


MAX_WORKERS = 256
# The bounds of all client connections together, which workers share.
SHARED_LIMITS = ("max_connections", "max_in_flight_bytes_total")


def worker_count(wanted: int) -> int:
    """Return the number of workers.

    `wanted` 0 stands for one for each CPU that this process may run on.
    """
    if wanted:
        return wanted
    # macOS does not report which CPUs a process may use.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, MAX_WORKERS)


def share_limits(limits: Limits, workers: int) -> tuple[Limits, ...]:
    """Divide `limits` among the workers, so that they hold for all together. Raises StartupError."""
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


ENV_PREFIX = "KPROXY_"
DEFAULT_PREFIX = "/kafscale"
OWNERSHIP_SOURCES = ("etcd", "kafka", "static")
LogLevel = Literal["debug", "info", "warning", "error"]


class ListenSection(msgspec.Struct, kw_only=True):
    """The section `[listen]`: addresses and processes. `workers` 0 stands for one for each CPU."""

    listen: str = DEFAULT_LISTEN
    advertise: str | None = None
    proxy_protocol: bool = False
    proxy_protocol_from: Texts | None = None
    admin: str | None = None
    workers: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] = 1


class OwnershipSection(msgspec.Struct, kw_only=True):
    """The section `[ownership]`: the source of owners, and its options."""

    ownership: str = "etcd"
    etcd: Texts | None = None
    prefix: str = DEFAULT_PREFIX
    bootstrap: Texts | None = None
    refresh_s: Seconds = 30.0
    table: Path | None = None


class FleetSection(msgspec.Struct, kw_only=True):
    """The section `[fleet]`: this proxy among others. `lease_ttl` is in seconds."""

    alone: bool = False
    lease_ttl: Annotated[int, Meta(ge=1, le=3_600)] = 10


class LogSection(msgspec.Struct, kw_only=True):
    """The section `[log]`: options of the log."""

    level: LogLevel = "info"


class ProduceSection(msgspec.Struct, kw_only=True):
    """The section `[produce]`: options of Produce requests."""

    confirm_acks0: bool = True


class OwnSection(msgspec.Struct, kw_only=True):
    """The section `[own]`: options of the Own API."""

    writer_group: str | list[str] | None = None


class Options(msgspec.Struct, kw_only=True):
    """The configuration as given: sections with types and defaults."""

    listen: ListenSection = msgspec.field(default_factory=ListenSection)
    tls: ListenerTls = msgspec.field(default_factory=ListenerTls)
    ownership: OwnershipSection = msgspec.field(default_factory=OwnershipSection)
    etcd: EtcdOptions = msgspec.field(default_factory=EtcdOptions)
    broker_tls: BrokerTls = msgspec.field(default_factory=BrokerTls)
    broker_sasl: BrokerSasl = msgspec.field(default_factory=BrokerSasl)
    fleet: FleetSection = msgspec.field(default_factory=FleetSection)
    produce: ProduceSection = msgspec.field(default_factory=ProduceSection)
    own: OwnSection = msgspec.field(default_factory=OwnSection)
    audit: AuditSection = msgspec.field(default_factory=AuditSection)
    sasl: SaslSection = msgspec.field(default_factory=SaslSection)
    oauth: OauthOptions = msgspec.field(default_factory=OauthOptions)
    access: AccessSection = msgspec.field(default_factory=AccessSection)
    admin: AdminOptions = msgspec.field(default_factory=AdminOptions)
    metrics: MetricsSection = NOTHING_NAMED
    limits: Limits = msgspec.field(default_factory=Limits)
    log: LogSection = msgspec.field(default_factory=LogSection)


SECTIONS: dict[str, type[msgspec.Struct]] = {each.name: each.type for each in msgspec.structs.fields(Options)}
# The flags of other sections begin with the section's name, as their keys alone are ambiguous.
_NOT_IN_FLAGS = ("listen", "ownership", "fleet", "produce", "own", "limits")
# The keys that apply to one source of owners only.
OF_ONE_SOURCE = {"ownership.bootstrap": "kafka", "ownership.refresh_s": "kafka", "ownership.table": "static"}


def _keys_of(section: str, struct: type[msgspec.Struct]) -> Iterator[tuple[str, tuple[Any, object]]]:
    for name, (kind, default) in keys_of(struct).items():
        path = f"{section}.{name}"
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from _keys_of(path, kind)
        else:
            yield path, (kind, default)


# key path -> (type, default); the default None stands for a key that is not given.
KEYS = {path: key for section, struct in SECTIONS.items() for path, key in _keys_of(section, struct)}
# The keys of a configuration without [[listeners]].
OF_ONE_LISTENER = (
    "listen.listen",
    "listen.proxy_protocol",
    "listen.proxy_protocol_from",
    *(path for path in KEYS if path.startswith("tls.")),
)
# Sections within a section, such as `admin.tls`, whose keys have no flags.
_INNER_SECTIONS = {path.rpartition(".")[0] for path in KEYS} - SECTIONS.keys()
# Options that have no flag and are never shown.
SECRETS = frozenset(path for path, (kind, _) in KEYS.items() if kind is Secret)
# Sections without keys of their own: the static table, several listeners, the rules of access, and quotas.
TABLES = (*STATIC_TABLE_SECTIONS, LISTENERS, ACLS, QUOTAS)


def flag_of(path: str) -> str:
    """Return the name of an option's long flag, with underscores; kproxy.cli.config_flags has the existing flags."""
    section, _, key = path.partition(".")
    return key if section in _NOT_IN_FLAGS else path.replace(".", "_")


_FLAG_PATHS = {flag_of(path): path for path in KEYS}


@dataclass(frozen=True)
class Setting:
    """One option in force.

    `source` is `default`, `--flag`, an environment variable or `key in FILE`.
    """

    path: str
    value: object
    source: str


@dataclass(frozen=True)
class Given:
    """The sources of the options: `settings` by key path, from `file`, the environment and `flags`."""

    file: Path | None
    flags: Mapping[str, object]
    settings: Mapping[str, Setting]

    def is_default(self, path: str) -> bool:
        return self.settings[path].source == "default"

    def again(self) -> ProxyConfig:
        """Read the file and the environment again. Raises StartupError."""
        return load_proxy_config(self.file, flags=self.flags)

    def checked(self) -> ProxyConfig:
        """Return the configuration of these options. Raises StartupError."""
        return replace(build_proxy_config(self.settings), given=self)


@dataclass(frozen=True)
class ProxyConfig:
    """The configuration of `kproxy serve`, checked.

    `listeners` has at least one. `admin` None: no admin page. `workers` is at least 1; workers share the `limits` of
    all connections.

    `ownership` says which of `etcd`, `bootstrap` and `owners` is set; the others are empty. `etcd` may be set beside
    any of them: clients learn of all proxies that share it, except those that are `alone`. A proxy is named until
    `lease_ttl_s` after its last sign of life.

    `writer_groups` has, for each topic that only owners may write to, their group, and needs an `etcd`. The bounds of
    `audit` hold for each process by itself. `broker_tls` None: brokers are accessed in plain text; `broker_sasl` None:
    without authentication. `sasl` None: clients need not authenticate. `access` None: all clients may do anything.
    `quotas` None: there are no quotas. `events` None: security events are not written to a file. `given` None: the
    options come from no file or command.
    """

    listeners: tuple[ListenerConfig, ...]
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
    broker_tls: BrokerTls | None = None
    broker_sasl: BrokerSasl | None = None
    sasl: SaslOptions | None = None
    access: AccessOptions | None = None
    quotas: QuotaOptions | None = None
    events: Path | None = None
    admin_options: AdminOptions = field(default_factory=AdminOptions)
    metrics: MetricsSection = NOTHING_NAMED
    log_level: LogLevel = "info"
    given: Given | None = field(default=None, repr=False, compare=False)

    @property
    def listen(self) -> Address:
        """The address of the first listener."""
        return self.listeners[0].listen

    @property
    def advertise(self) -> Address | None:
        """The address that clients of the first listener see, if it is not the listener's own."""
        return self.listeners[0].advertise


def load_proxy_config(
    file: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ProxyConfig:
    """Load and check the options. `flags` has values by long name with underscores.

    Values that are None count as not given.
    """
    return Given(file, flags or {}, load_settings(file, flags=flags, environ=environ)).checked()


def load_settings(
    file: Path | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Setting]:
    """Return every option by key path, with its default if it is not given.

    Raises StartupError.
    """
    settings = {path: Setting(path, default, "default") for path, (_, default) in KEYS.items()}
    for path, value in _file_values(file).items():
        source = f"{path} in {file}"
        is_table = path in TABLES
        settings[path] = Setting(path, value, source) if is_table else _setting(path, value, source, strict=True)
    for path, (name, text) in _environment_values(environ).items():
        settings[path] = _setting(path, text, name, strict=False)
    for name, value in (flags or {}).items():
        if value is not None:
            path = _FLAG_PATHS[name]
            settings[path] = _setting(path, value, f"--{name.replace('_', '-')}", strict=False)
    return settings


def build_proxy_config(settings: Mapping[str, Setting]) -> ProxyConfig:
    """Check the options against each other. Raises StartupError."""
    sections: dict[str, Any] = {}
    for path in KEYS:
        if settings[path].value is not None:
            *outer, key = path.split(".")
            section = sections
            for name in outer:
                section = section.setdefault(name, {})
            section[key] = settings[path].value
    given = msgspec.convert(sections, Options, dec_hook=decode)
    sources = {path: setting.source for path, setting in settings.items()}
    source_of_owners = given.ownership.ownership
    _refuse_what_does_not_fit(source_of_owners, sources)
    admin = None
    if given.listen.admin is not None:
        admin = parse_admin(given.listen.admin, sources["listen.admin"])
    given.admin.check(of_section(sources, "admin"), has_page=admin is not None)
    prefix = check_prefix(given.ownership.prefix, sources["ownership.prefix"])
    workers = worker_count(given.listen.workers)
    share_limits(given.limits, workers)
    audit = audit_options(given.audit, sources)
    tls_to_brokers = given.broker_tls.checked(of_section(sources, "broker_tls"))
    owners = _owners(given.ownership.table, settings, sources) if source_of_owners == "static" else None
    writer_groups = _writer_groups(given, sources["own.writer_group"])
    refuse_unwritable_trail(audit, sources["audit.sink"], owners, writer_groups)
    for path, is_set in (
        ("sasl.users_in_etcd", given.sasl.users_in_etcd),
        ("access.acls_in_etcd", given.access.acls_in_etcd),
    ):
        if is_set and given.ownership.etcd is None:
            raise StartupError(f"{sources[path]} requires an etcd: give --etcd URL[,URL...] as well.")
    listeners = _listeners(given, settings, sources)
    sasl = sasl_options(given.sasl, given.oauth, sources, listeners)
    to_brokers = given.broker_sasl.checked(of_section(sources, "broker_sasl"), with_tls=tls_to_brokers is not None)
    refuse_unsafe_identity(
        sasl,
        listeners,
        sources["sasl.identity"],
        has_own=to_brokers is not None,
        is_secret=tls_to_brokers is not None or given.broker_sasl.allow_plain_text,
    )
    return ProxyConfig(
        listeners=listeners,
        admin=admin,
        ownership=source_of_owners,
        etcd=_etcd(given, sources),
        etcd_options=given.etcd,
        prefix=prefix,
        bootstrap=_bootstrap(given.ownership, sources["ownership.bootstrap"]),
        refresh_s=given.ownership.refresh_s,
        owners=owners,
        alone=given.fleet.alone,
        lease_ttl_s=given.fleet.lease_ttl,
        confirm_acks0=given.produce.confirm_acks0,
        writer_groups=writer_groups,
        audit=audit,
        limits=given.limits,
        workers=workers,
        broker_tls=tls_to_brokers,
        broker_sasl=to_brokers,
        sasl=sasl,
        access=_access(given, settings, sources, with_sasl=sasl is not None),
        quotas=_quotas(settings),
        events=None if given.access.events is None else Path(given.access.events),
        admin_options=given.admin,
        metrics=given.metrics,
        log_level=given.log.level,
    )


def secret_files(config: ProxyConfig, settings: Mapping[str, Setting]) -> Iterator[tuple[str, Path | None]]:
    """Yield the files with secrets and their keys, except the users' file, which is refused if others can read it."""
    for path, setting in settings.items():
        # Private keys, such as `tls.key`, and files of passwords and tokens.
        if path.endswith((".key", "_file")) and isinstance(setting.value, str):
            yield path, Path(setting.value)
        elif path in SECRETS and setting.source.startswith(f"{path} in "):
            yield path, Path(setting.source.removeprefix(f"{path} in "))
    for listener in config.listeners:
        if listener.name and listener.tls is not None:
            yield f"tls.key of listener {listener.name!r}", listener.tls.key


def _quotas(settings: Mapping[str, Setting]) -> QuotaOptions | None:
    quotas = settings.get(QUOTAS)
    if quotas is None:
        return None
    file = quotas.source.rpartition(" in ")[2]
    parse_quotas(quotas.value, file)
    return QuotaOptions(Path(file))


def _access(
    given: Options, settings: Mapping[str, Setting], sources: Mapping[str, str], *, with_sasl: bool
) -> AccessOptions | None:
    acls, options = settings.get(ACLS), AccessOptions(given.access.dry_run, acls_in_etcd=given.access.acls_in_etcd)
    if acls is not None:
        file = acls.source.rpartition(" in ")[2]
        return replace(options, acls=parse_acls(acls.value, file), file=Path(file))
    if with_sasl or options.acls_in_etcd:
        return options
    if options.dry_run:
        raise StartupError(f"{sources['access.dry_run']} needs rules to try: write [[acls]].")
    return None


def _listeners(
    given: Options, settings: Mapping[str, Setting], sources: Mapping[str, str]
) -> tuple[ListenerConfig, ...]:
    several = settings.get(LISTENERS)
    if several is None:
        listen = parse_address(given.listen.listen, sources["listen.listen"])
        told = given.listen.advertise
        advertise = advertised(listen, None if told is None else parse_address(told, sources["listen.advertise"]))
        has_header = given.listen.proxy_protocol
        senders = proxy_senders(given.listen.proxy_protocol_from, has_header, sources["listen.proxy_protocol_from"])
        tls = given.tls.checked(of_section(sources, "tls"))
        return (ListenerConfig("", listen, advertise, has_header, tls, proxy_protocol_from=senders),)
    for path in OF_ONE_LISTENER:
        if sources[path] != "default":
            raise StartupError(f"{sources[path]} does not apply to [[listeners]]: set it there, or remove those.")
    where = several.source.rpartition(" in ")[2]
    return parse_listeners(several.value, where, given.listen.advertise, sources["listen.advertise"])


def _etcd(given: Options, sources: Mapping[str, str]) -> tuple[str, ...]:
    if given.ownership.etcd is not None:
        given.etcd.check(of_section(sources, "etcd"))
        return given.ownership.etcd
    first = next((key for key in given.etcd.__struct_fields__ if getattr(given.etcd, key) is not None), None)
    if first is not None:
        raise StartupError(f"{sources[f'etcd.{first}']} requires an etcd: give --etcd URL[,URL...].")
    if given.ownership.ownership == "etcd":
        raise StartupError(
            "kproxy serve learns the owners from etcd: give its address with --etcd URL[,URL...], for example "
            "--etcd http://127.0.0.1:2379 (or try `kproxy dev`, which starts its own)."
        )
    return ()


def _writer_groups(given: Options, source: str) -> Mapping[str, str]:
    if given.own.writer_group is None:
        return {}
    groups = parse_writer_groups(given.own.writer_group, source)
    if groups and given.ownership.etcd is None:
        raise StartupError(f"{source} requires an etcd, which settles who may write: give --etcd URL[,URL...] as well.")
    return groups


def _bootstrap(given: OwnershipSection, source: str) -> tuple[Address, ...]:
    if given.ownership != "kafka":
        return ()
    if given.bootstrap is None:
        raise StartupError(
            "--ownership kafka learns the owners from a Kafka cluster: give some of its brokers with "
            "--bootstrap HOST:PORT[,HOST:PORT...]."
        )
    return broker_addresses(given.bootstrap, source)


def _owners(table: Path | None, settings: Mapping[str, Setting], sources: Mapping[str, str]) -> Owners:
    inline = [section for section in STATIC_TABLE_SECTIONS if section in sources]
    if table is not None and inline:
        raise StartupError(
            f"the static table is given twice: {sources['ownership.table']} names a file and {sources[inline[0]]} has "
            f"one; keep one of them."
        )
    if table is not None:
        return read_table(table)
    if not inline:
        raise StartupError(
            "--ownership static needs its table: name a file with --table, or write [brokers] and [[topics]] into the "
            "configuration file."
        )
    return parse_owners({each: settings[each].value for each in inline}, sources[inline[0]].rpartition(" in ")[2])


def _refuse_what_does_not_fit(ownership: str, sources: Mapping[str, str]) -> None:
    if ownership not in OWNERSHIP_SOURCES:
        raise StartupError(
            f"{sources['ownership.ownership']}: unknown ownership source {ownership!r}; expected one of "
            f"{', '.join(OWNERSHIP_SOURCES)}."
        )
    for path, source in OF_ONE_SOURCE.items():
        if sources[path] != "default" and ownership != source:
            raise StartupError(f"{sources[path]} applies only to --ownership {source}, not to {ownership}.")
    for section in STATIC_TABLE_SECTIONS:
        if section in sources and ownership != "static":
            raise StartupError(f"{sources[section]} applies only to --ownership static, not to {ownership}.")


def _setting(path: str, value: object, source: str, *, strict: bool) -> Setting:
    taken = parse_value(KEYS[path][0], value, source, strict=strict)
    # These values are shown, and compared, as they were given.
    return Setting(path, value if isinstance(taken, Path | Secret | Texts) else taken, source)


def _file_values(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    values: dict[str, object] = {}
    for section, content in read_toml(file).items():
        if section in TABLES:
            values[section] = content
            continue
        if section not in SECTIONS or not isinstance(content, dict):
            known = {**SECTIONS, **dict.fromkeys(TABLES)}
            unknown(section, f"in {file}", f"[{nearest(section, known)}]", isinstance(content, dict))
        for path, value in _with_inner(section, content):
            if path not in KEYS:
                unknown(path, f"in {file}", nearest(path, KEYS), False)
            values[path] = value
    return values


def _with_inner(section: str, content: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the key paths and values of a section, and of the sections within it."""
    for key, value in content.items():
        path = f"{section}.{key}"
        if path in _INNER_SECTIONS and isinstance(value, dict):
            yield from _with_inner(path, value)
        else:
            yield path, value


def _environment_values(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    known = {f"{ENV_PREFIX}{path.replace('.', '__').upper()}": path for path in KEYS}
    values: dict[str, tuple[str, str]] = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            if name not in known:
                unknown(name, "in the environment", nearest(name, known), False)
            values[known[name]] = (name, text)
    return values
