"""The options of `kproxy serve`, from flags, environment and a TOML file.

A key is the long flag with underscores, in a table by room: `--listen` is `listen` in `[listen]` and
`KPROXY_LISTEN__LISTEN` in the environment. Flags win over the environment, which wins over the file. A key that nobody
knows is an error that names the nearest known one: a misspelt limit would otherwise quietly not hold. Environment
variables without a double underscore (`KPROXY_DEBUG`) are no configuration.

Every error is a StartupError of one sentence that names the value's source.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kproxy.errors import StartupError

ENV_PREFIX = "KPROXY_"
MAX_FILE_BYTES = 16 * 1024 * 1024
DEFAULT_LISTEN = "127.0.0.1:9092"
DEFAULT_ADMIN = "127.0.0.1:9644"
DEFAULT_PREFIX = "/kafscale"
OWNERSHIP_SOURCES = ("etcd", "kafka", "static")
WILDCARDS = ("0.0.0.0", "::", "*")  # noqa: S104 - compared with, not bound

_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Address(NamedTuple):
    """Where to listen or connect. `host` has no brackets, also where it is an IPv6 address; port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, source: str) -> Address:
    """`host:port`, `[IPv6]:port`. StartupError, with `source` as the subject, for anything else."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        bracketed = True
    else:
        bracketed = False
    if not colon:
        raise StartupError(f"{source}: {text!r} has no port: write HOST:PORT, for example {DEFAULT_LISTEN}.")
    if ":" in host and not bracketed:
        raise StartupError(f"{source}: {text!r} is not an address: an IPv6 host goes in brackets, as in [::1]:9092.")
    if not host or any(character.isspace() or character in "/,@[]" for character in host):
        raise StartupError(f"{source}: {text!r} has no usable host: write HOST:PORT, for example {DEFAULT_LISTEN}.")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535):
        raise StartupError(f"{source}: {text!r} has no usable port: a port is a number from 0 to 65535.")
    return Address(host, int(port))


def split_list(value: str | Sequence[str], source: str) -> tuple[str, ...]:
    """`"a,b"` or `["a", "b"]`, neither empty nor with empty parts."""
    parts = tuple(part.strip() for part in (value.split(",") if isinstance(value, str) else value))
    if not parts or not all(parts):
        raise StartupError(f"{source}: {value!r} is not a list of addresses: write them with commas between.")
    return parts


def advertised(listen: Address, advertise: Address | None) -> Address | None:
    """`advertise`, checked: what is listened on cannot be told to clients where it is every address of the machine."""
    if advertise is None and listen.host in WILDCARDS:
        raise StartupError(
            f"clients cannot connect to {listen.host}: with --listen {listen} "
            f"give --advertise HOST:PORT as well, an address that clients reach."
        )
    if advertise is not None and advertise.host in WILDCARDS:
        raise StartupError(f"clients cannot connect to {advertise.host}: give --advertise an address that they reach.")
    return advertise


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`[limits]`: bounds of one listener, in bytes, counts, seconds and milliseconds as the names say."""

    max_request_bytes: _Count = 100 << 20
    max_control_request_bytes: _Count = 1 << 20
    max_answer_bytes: _Count = 128 << 20
    max_connections: _Count = 10_000
    max_in_flight_bytes: _Count = 64 << 20
    max_open_requests: _Count = 1_000
    connect_timeout_s: _Seconds = 1.0
    control_timeout_s: _Seconds = 30.0
    control_attempt_s: _Seconds = 5.0
    deadline_cap_ms: _Count = 120_000
    drain_s: _Seconds = 10.0


class _Listen(msgspec.Struct, kw_only=True):
    listen: str = DEFAULT_LISTEN
    advertise: str | UnsetType = UNSET
    admin: str | UnsetType = UNSET
    workers: int = 1


class _Ownership(msgspec.Struct, kw_only=True):
    ownership: str = "etcd"
    etcd: str | list[str] | UnsetType = UNSET
    prefix: str = DEFAULT_PREFIX
    bootstrap: str | list[str] | UnsetType = UNSET
    table: str | UnsetType = UNSET


_ROOMS: dict[str, type[msgspec.Struct]] = {"listen": _Listen, "ownership": _Ownership, "limits": Limits}
# key path -> (type, default)
_KEYS = {
    f"{room}.{field.name}": (field.type, field.default)
    for room, struct in _ROOMS.items()
    for field in msgspec.structs.fields(struct)
}
_FLAG_PATHS = {path.partition(".")[2]: path for path in _KEYS if not path.startswith("limits.")}


@dataclass(frozen=True)
class ProxyConfig:
    """What `kproxy serve` is told, checked. `admin` None: no admin page. `advertise` None: the address listened on."""

    listen: Address
    advertise: Address | None
    admin: Address | None
    etcd: tuple[str, ...]
    prefix: str
    limits: Limits


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
        settings[path] = _converted(path, value, f"{path} in {file}", strict=True)
    for path, (name, text) in _environment_values(environ).items():
        settings[path] = _converted(path, text, name, strict=False)
    for name, value in (flags or {}).items():
        if value is not None:
            path = _FLAG_PATHS[name]
            settings[path] = _converted(path, value, f"--{name.replace('_', '-')}", strict=False)
    return settings


def build_proxy_config(settings: Mapping[str, Setting]) -> ProxyConfig:
    """Check what is in force and hand it on. Raises StartupError."""
    _refuse_not_yet(settings)
    listen = _address(settings["listen.listen"])
    advertise = _address(settings["listen.advertise"])
    if listen is None:
        raise StartupError("listen.listen is empty: give --listen HOST:PORT.")
    prefix = settings["ownership.prefix"]
    if not str(prefix.value).startswith("/") or str(prefix.value).endswith("/"):
        raise StartupError(f"{prefix.source}: {prefix.value!r} is no prefix of etcd keys: write one like /kafscale.")
    etcd = settings["ownership.etcd"]
    if etcd.value is UNSET:
        raise StartupError(
            "kproxy serve learns the owners from etcd: give its address with --etcd URL[,URL...], for example "
            "--etcd http://127.0.0.1:2379 (or try `kproxy dev`, which brings its own)."
        )
    return ProxyConfig(
        listen=listen,
        advertise=advertised(listen, advertise),
        admin=_address(settings["listen.admin"]),
        etcd=split_list(etcd.value, etcd.source),  # type: ignore[arg-type]  # converted to its type on loading
        prefix=str(prefix.value),
        limits=msgspec.convert(
            {path.partition(".")[2]: each.value for path, each in settings.items() if path.startswith("limits.")},
            Limits,
        ),
    )


def _refuse_not_yet(settings: Mapping[str, Setting]) -> None:
    ownership, workers = settings["ownership.ownership"], settings["listen.workers"]
    if ownership.value not in OWNERSHIP_SOURCES:
        raise StartupError(f"{ownership.source}: {ownership.value!r} is no ownership source: this version has etcd.")
    if ownership.value != "etcd":
        raise StartupError(
            f"{ownership.source}: the ownership source {ownership.value!r} is not there yet: this version has etcd."
        )
    if workers.value != 1:
        raise StartupError(
            f"{workers.source}: {workers.value} worker processes are not there yet: this version runs 1."
        )
    for name in ("bootstrap", "table"):
        setting = settings[f"ownership.{name}"]
        if setting.value is not UNSET:
            raise StartupError(
                f"{setting.source}: it belongs to an ownership source that is not there yet: "
                f"leave it out, this version has etcd."
            )


def _address(setting: Setting) -> Address | None:
    return None if setting.value is UNSET else parse_address(str(setting.value), setting.source)


def _converted(path: str, value: object, source: str, *, strict: bool) -> Setting:
    kind, _ = _KEYS[path]
    try:
        return Setting(path, msgspec.convert(value, kind, strict=strict), source)
    except msgspec.ValidationError as error:
        # msgspec knows no key here: the value was converted by itself.
        raise StartupError(f"{source}: {str(value)[:80]!r} will not do: {str(error).lower()}.") from error


def _file_values(file: Path | None) -> dict[str, object]:
    if file is None:
        return {}
    values: dict[str, object] = {}
    for room, table in _read_toml(file).items():
        if room not in _ROOMS and room in ("brokers", "topics"):
            raise StartupError(
                f"[{room}] in {file}: a static table is not there yet: leave it out, this version has etcd."
            )
        if room not in _ROOMS or not isinstance(table, dict):
            _unknown(room, f"in {file}", f"[{_nearest(room, _ROOMS)}]", isinstance(table, dict))
        for key, value in table.items():
            path = f"{room}.{key}"
            if path not in _KEYS:
                _unknown(path, f"in {file}", _nearest(path, _KEYS), False)
            values[path] = value
    return values


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise StartupError(f"--config {file} cannot be read: {error.strerror}.") from error
    if len(content) > MAX_FILE_BYTES:
        raise StartupError(f"--config {file} is larger than {MAX_FILE_BYTES >> 20} MiB: that is no configuration.")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise StartupError(f"--config {file} is not UTF-8 text (byte {error.start}).") from error
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"--config {file} is not TOML: {str(error)[:200]}.") from error


def _environment_values(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    known = {f"{ENV_PREFIX}{path.replace('.', '__').upper()}": path for path in _KEYS}
    values: dict[str, tuple[str, str]] = {}
    for name, text in environ.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            if name not in known:
                _unknown(name, "in the environment", _nearest(name, known), False)
            values[known[name]] = (name, text)
    return values


def _unknown(name: str, where: str, nearest: str, is_table: bool) -> NoReturn:
    what = f"[{name}]" if is_table else name
    raise StartupError(f"unknown key {what} {where}: did you mean {nearest}?")


def _nearest(name: str, known: Mapping[str, object]) -> str:
    """By the whole path first; a right key in a wrong room has the key for its nearest."""
    for candidate in known:
        if "." in name and candidate.rpartition(".")[2] == name.rpartition(".")[2]:
            return candidate
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
