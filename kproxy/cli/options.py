"""Define the options that several commands share: addresses, etcd, and access to brokers.

`--bootstrap` names Kafka addresses and `--admin` a proxy's admin page, in every command that needs one. Without the
flag the variable KPROXY_BOOTSTRAP or KPROXY_ADMIN applies, then the default. They are not configuration of `kproxy
serve`, whose own --bootstrap and --admin are keys of `kproxy.config.proxy`.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import click
from click.core import ParameterSource

from kproxy.cli.config_flags import config_flags
from kproxy.config import DEFAULT_ADMIN, DEFAULT_LISTEN, DEFAULT_PREFIX, Address, parse_address, split_list
from kproxy.config.broker_sasl import BrokerSasl
from kproxy.config.etcd import EtcdOptions, etcd_options_from
from kproxy.config.parsing import keys_of, parse_section, parse_value
from kproxy.config.tls import (
    BrokerTls,
    ListenerTls,
    ReplicationTls,
    ReplicationTlsSection,
    load_broker_tls,
    replication_tls,
)
from kproxy.errors import StartupError

if TYPE_CHECKING:
    from kproxy.etcd import EtcdClient
    from kproxy.security.broker_auth import BrokerAuth

BOOTSTRAP_VARIABLE = "KPROXY_BOOTSTRAP"
ADMIN_VARIABLE = "KPROXY_ADMIN"
# The prefix of the flags --admin-...
ADMIN_FLAGS = "--admin-"
ADMIN_VARIABLES = "KPROXY_ADMIN_"

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
Entry = TypeVar("Entry")
F = TypeVar("F", bound=Command)

_RANKS = (ParameterSource.DEFAULT, ParameterSource.ENVIRONMENT, ParameterSource.COMMANDLINE)


def flag(names: str, metavar: str | None, text: str, **more: Any) -> Callable[[F], F]:
    """Make a flag. `names` are its names and its parameter's, with spaces. The help shows a default and `multiple`."""
    if more.get("multiple"):
        text += " (repeatable)"
    more.setdefault("show_default", "default" in more)
    return click.option(*names.split(), metavar=metavar, help=text, **more)


def file_flag(names: str, text: str, **more: Any) -> Callable[[F], F]:
    """Make a flag that names a file."""
    return flag(names, "FILE", text, type=click.Path(path_type=Path, dir_okay=False), **more)


class Asked(NamedTuple):
    """Addresses to connect to, as given.

    `source` is the flag or variable to name in errors.
    """

    text: str
    source: str
    given_by: ParameterSource = ParameterSource.COMMANDLINE

    @property
    def rank(self) -> int:
        """The precedence: 0 for the default, 1 for a variable, 2 for a flag."""
        return _RANKS.index(self.given_by)

    def address(self) -> Address:
        """Parse one address. Raises StartupError."""
        return parse_address(self.text, self.source)

    def addresses(self) -> tuple[Address, ...]:
        """Parse one or several addresses. Raises StartupError."""
        return tuple(parse_address(part, self.source) for part in split_list(self.text, self.source))


class _PageAccess(BrokerTls, frozen=True):
    """The flags `--admin-...`: access to a page with TLS."""

    prefix: ClassVar[str] = ADMIN_FLAGS


class AdminPlace(NamedTuple):
    """A proxy's admin page to query: with `context` None in plain text, otherwise by TLS with the options `tls`."""

    address: Address
    tls: BrokerTls | None = None
    context: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return str(self.address) if self.tls is None else f"https://{self.address}"

    @property
    def server_name(self) -> str | None:
        """The name that the page's certificate must have; None in plain text."""
        return None if self.tls is None else self.tls.server_name or self.address.host


class EtcdPlace(NamedTuple):
    """An etcd to query instead of a proxy or a file."""

    endpoints: tuple[str, ...]
    options: EtcdOptions
    prefix: str


def bootstrap_option(text: str, *, default: str | None = DEFAULT_LISTEN, otherwise: str = DEFAULT_LISTEN) -> Decorator:
    """Add --bootstrap: the parameter `bootstrap`, an Asked.

    The parameter is None if the flag is not given and `default` is None.

    `text` is the help, `otherwise` the behaviour without the flag.
    """
    shown = f"{text} [${BOOTSTRAP_VARIABLE}, else {otherwise}]"
    return _asking("--bootstrap", "H:P[,H:P...]", BOOTSTRAP_VARIABLE, shown, default)


def admin_option(text: str, *, default: str | None = DEFAULT_ADMIN, otherwise: str = DEFAULT_ADMIN) -> Decorator:
    """Add --admin as `bootstrap_option` does (parameter `admin`), and the flags --admin-... for `admin_place`."""
    asking = _asking(
        "--admin",
        "H:P",
        ADMIN_VARIABLE,
        f"{text} A page with TLS is https://H:P. [${ADMIN_VARIABLE}, else {otherwise}]",
        default,
    )
    return lambda command: _with(command, (asking, *_ADMIN_FLAGS))


_ADMIN_FLAGS = (
    flag(
        "--admin-ca",
        "FILE",
        f"For https: the CA certificates that sign the page's. [${ADMIN_VARIABLES}CA, else the machine's]",
    ),
    flag(
        "--admin-cert",
        "FILE",
        f"For https: the client certificate for the page, with its chain. [${ADMIN_VARIABLES}CERT, else none]",
    ),
    flag("--admin-key", "FILE", f"The private key of --admin-cert. [${ADMIN_VARIABLES}KEY, else none]"),
    flag(
        "--admin-server-name",
        "NAME",
        f"For https: the name in the page's certificate. [${ADMIN_VARIABLES}SERVER_NAME, else the host]",
    ),
)


def admin_place(asked: Asked, flags: Mapping[str, object]) -> AdminPlace:
    """Return the requested admin page. `flags`, such as `admin_ca`, override the environment. Raises StartupError."""
    scheme, separator, rest = asked.text.partition("://")
    if separator and scheme not in ("http", "https"):
        raise StartupError(f"{asked.source}: {asked.text[:300]!r} is not an admin page: write H:P or https://H:P.")
    address = parse_address(rest.rstrip("/"), asked.source) if separator else asked.address()
    given = {key: flags.get(f"admin_{key}") for key in ("ca", "cert", "key", "server_name")}
    if scheme != "https" or not separator:
        first = next((key for key, value in given.items() if value is not None), None)
        if first is not None:
            flag = f"{ADMIN_FLAGS}{first}".replace("_", "-")
            raise StartupError(f"{flag} applies only to a page with TLS: give --admin https://{address}.")
        return AdminPlace(address)
    sources, values = dict[str, str](), dict[str, Any]()
    for key, value in given.items():
        variable = f"{ADMIN_VARIABLES}{key.upper()}"
        sources[key] = variable if value is None else f"{ADMIN_FLAGS}{key}".replace("_", "-")
        if value is not None or variable in os.environ:
            text = os.environ[variable] if value is None else value
            values[key] = parse_value(keys_of(_PageAccess)[key][0], text, sources[key], strict=False)
    tls = _PageAccess(enabled=True, **values).checked(sources)
    return AdminPlace(address, tls, None if tls is None else load_broker_tls(tls).context)


def _asking(flag: str, metavar: str, variable: str, text: str, default: str | None) -> Decorator:
    def asked(context: click.Context, option: click.Parameter, value: str | None) -> Asked | None:
        if value is None:
            return None if default is None else Asked(default, flag, ParameterSource.DEFAULT)
        if context.get_parameter_source(option.name or "") is ParameterSource.ENVIRONMENT:
            return Asked(value, variable, ParameterSource.ENVIRONMENT)
        return Asked(value, flag)

    return click.option(flag, metavar=metavar, envvar=variable, help=text, callback=asked)


def etcd_place(etcd: str | None, prefix: str | None, etcd_access: Mapping[str, str | None]) -> EtcdPlace | None:
    """Return the etcd of --etcd, if given. Raises StartupError."""
    if etcd is not None:
        return EtcdPlace(split_list(etcd, "--etcd"), etcd_options_from(etcd_access), prefix or DEFAULT_PREFIX)
    if any(value is not None for value in etcd_access.values()):
        raise StartupError("the flags --etcd-... need an etcd: give --etcd URL as well.")
    return None


def etcd_place_flags(text: str, *, required: bool = False) -> Decorator:
    """Add the parameters of `etcd_place`: --etcd with the help `text`, --etcd-…, --prefix."""
    flags = (
        flag("--etcd", "URL[,URL...]", text, required=required),
        config_flags("etcd"),
        flag("--prefix", None, "With --etcd: the prefix of the keys.", default=DEFAULT_PREFIX),
    )
    return lambda command: _with(command, flags)


async def entries_in_etcd(
    place: EtcdPlace, prefix: str, parse_key: Callable[[str], str], parse: Callable[[bytes], Entry]
) -> tuple[dict[str, Entry], int]:
    """Return the entries under a prefix by name, and the number of ignored ones, which are named on stderr.

    Proxies ignore entries for which `parse_key` or `parse` raises ValueError. Raises StartupError for an error of etcd.
    """
    entries, ignored = dict[str, Entry](), 0
    async with etcd_client(place) as client:
        kvs = (await client.get_prefix(prefix)).kvs
    for kv in kvs:
        try:
            entries[parse_key(kv.key.removeprefix(prefix))] = parse(kv.value)
        except ValueError as error:
            ignored += 1
            click.echo(f"kproxy: proxies ignore {kv.key} ({error}).", err=True)
    return entries, ignored


@asynccontextmanager
async def etcd_client(place: EtcdPlace) -> AsyncIterator[EtcdClient]:
    """Yield a connected client. Raises StartupError for each error of etcd, also in the body."""
    from kproxy.etcd import EtcdClient, EtcdError

    client = EtcdClient(place.endpoints, place.options)
    try:
        await client.connect()
        yield client
    except EtcdError as error:
        raise StartupError(str(error)) from error
    finally:
        await client.close()


def asks_proxy_or_etcd(command: Command) -> Command:
    """Add the parameters of `asked_place`: --admin…, --etcd…, --prefix."""
    flags = (admin_option("Ask the proxy with this admin page."), etcd_place_flags("Ask etcd instead of a proxy."))
    return _with(command, flags)


def asked_place(admin: Asked, etcd: str | None, prefix: str | None, **access: str | None) -> AdminPlace | EtcdPlace:
    """Return the admin page or the etcd to query. Raises StartupError."""
    of_page = {key: value for key, value in access.items() if key.startswith("admin_")}
    place = etcd_place(etcd, prefix, {key: value for key, value in access.items() if key not in of_page})
    if place is None:
        return admin_place(admin, of_page)
    if admin.given_by is ParameterSource.COMMANDLINE or any(value is not None for value in of_page.values()):
        raise StartupError("--admin asks a proxy and --etcd asks etcd: give one of them.")
    return place


def broker_auth(flags: Mapping[str, str | bool | None]) -> BrokerAuth:
    """Return the access to brokers for a command without a configuration file.

    `flags`, such as `broker_tls_ca`, override the environment (KPROXY_BROKER_TLS__CA). Raises StartupError.
    """
    from kproxy.security.broker_auth import BrokerAuth

    given_tls, tls_sources = parse_section(BrokerTls, "broker_tls", flags, os.environ)
    given_sasl, sasl_sources = parse_section(BrokerSasl, "broker_sasl", flags, os.environ)
    tls = given_tls.checked(tls_sources)
    return BrokerAuth.once(tls, given_sasl.checked(sasl_sources, with_tls=tls is not None))


def listener_tls_from(flags: Mapping[str, str | None]) -> ListenerTls | None:
    """Return the TLS of a command's only listener, by `flags` such as `tls_cert`; None without TLS.

    The environment does not count, as it is often that of `kproxy serve` on the same machine. Raises StartupError.
    """
    given, sources = parse_section(ListenerTls, "tls", flags, {})
    return given.checked(sources)


def replication_tls_from(flags: Mapping[str, str | None]) -> ReplicationTls | None:
    """Return the TLS options between reference brokers; None without TLS.

    `flags`, such as `replication_tls_ca`, override the environment (KPROXY_REPLICATION_TLS__CA). Raises StartupError.
    """
    return replication_tls(*parse_section(ReplicationTlsSection, "replication_tls", flags, os.environ))


def _with(command: Command, flags: Sequence[Decorator]) -> Command:
    """Add `flags`, in order."""
    for flag in reversed(flags):
        command = flag(command)
    return command
