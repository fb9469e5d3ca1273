"""`kproxy check-config`: check a configuration and print the options in force."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from kproxy.config import Owners, Setting, build_proxy_config, load_settings
from kproxy.config.access import ACLS, shown
from kproxy.config.exposure import exposed
from kproxy.config.listeners import SECTION as LISTENERS
from kproxy.config.listeners import ListenerConfig
from kproxy.config.proxy import OF_ONE_LISTENER, OF_ONE_SOURCE, SECRETS, TABLES, ProxyConfig, secret_files
from kproxy.config.quotas import QUOTAS, parse_quotas
from kproxy.config.static_table import STATIC_TABLE_SECTIONS
from kproxy.errors import StartupError

# The states of an option, in JSON.
SET, NOT_SET, NOT_SHOWN, NOT_USED = "set", "not_set", "not_shown", "not_used"


@click.command("check-config")
@click.option("--config", metavar="FILE", type=click.Path(path_type=Path), help="The TOML file. [environment alone]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config: Path | None, as_json: bool) -> None:
    """Check a configuration and show the values in force.

    Reads the file and the environment as `kproxy serve` would and prints every option with its source, as TOML that
    could be a file itself. Exits with status 2 and one sentence if `kproxy serve` would refuse the configuration.

    \b
      kproxy check-config --config kproxy.toml
      kproxy check-config --config kproxy.toml --json | jq '.settings["limits.max_connections"]'
    """
    try:
        settings = load_settings(config)
        config_in_force = build_proxy_config(settings)
        access = config_in_force.access
        quotas = parse_quotas(settings[QUOTAS].value, "it") if QUOTAS in settings else ()
        warnings = _try_files(config_in_force)
        warnings += map(str, exposed(secret_files(config_in_force, settings)))
        tables = {ACLS: shown(access.acls) if access is not None else [], QUOTAS: shown(quotas)}
    except StartupError as error:
        if as_json:
            nothing: dict[str, object] = {"settings": {}, "owners": None, "listeners": [], ACLS: [], QUOTAS: []}
            _echo_json({"ok": False, "problem": str(error), "warnings": [], **nothing})
        raise
    owners = config_in_force.owners
    if as_json:
        told = {
            "ok": True,
            "problem": None,
            "warnings": warnings,
            "settings": _as_json(settings),
            "owners": _owners_as_json(owners),
        }
        _echo_json({**told, "listeners": [_listener_as_json(each) for each in config_in_force.listeners], **tables})
    else:
        _echo_toml(settings, owners)
        for warning in warnings:
            click.echo(f"kproxy: warning: {warning}", err=True)
        for table, entries in tables.items():
            for entry in entries:
                lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in entry.items())
                click.echo(f"\n[[{table}]]\n{lines}")


def _try_files(config: ProxyConfig) -> list[str]:
    """Check further files as a start does; return the warnings. Raises StartupError."""
    # Imported here, because it needs all of the proxy.
    from kproxy.proxy.reload import try_files

    lacks_users = try_files(config)
    if config.sasl is None or lacks_users is None:
        return []
    return [f"sasl.users {config.sasl.users} has no users, so nobody can log in with a password: {lacks_users}."]


def _state(setting: Setting, settings: Mapping[str, Setting]) -> str:
    if setting.value is None:
        return NOT_SET
    if setting.path in SECRETS:
        return NOT_SHOWN
    if setting.path in OF_ONE_LISTENER and LISTENERS in settings:
        return NOT_USED
    ownership = settings["ownership.ownership"].value
    return SET if OF_ONE_SOURCE.get(setting.path, ownership) == ownership else NOT_USED


def _echo_toml(settings: Mapping[str, Setting], owners: Owners | None) -> None:
    current = ""
    for path, setting in settings.items():
        if path in TABLES:
            continue
        section, _, key = path.partition(".")
        if section != current:
            click.echo(f"{'' if not current else chr(10)}[{section}]")
            current = section
        state = _state(setting, settings)
        if state == NOT_SET:
            click.echo(f"# {key} is not set")
        elif state == NOT_SHOWN:
            click.echo(f"{f'# {key} is set and not shown':<47} # {setting.source}")
        elif state == NOT_USED:
            where = (
                f"--ownership {OF_ONE_SOURCE[path]}"
                if path in OF_ONE_SOURCE
                else "a configuration without [[listeners]]"
            )
            click.echo(f"# {key} is for {where}")
        else:
            # Strings, numbers and lists of JSON are valid TOML.
            click.echo(f"{f'{key} = {json.dumps(setting.value)}':<47} # {setting.source}")
    if LISTENERS in settings:
        _echo_listeners(settings[LISTENERS])
    if owners is not None:
        inline = [settings[table].source for table in STATIC_TABLE_SECTIONS if table in settings]
        _echo_owners(owners, inline[0].partition(" in ")[2] if inline else "")


def _echo_listeners(setting: Setting) -> None:
    """Print `[[listeners]]` as given; `build_proxy_config` has accepted them."""
    for listener in msgspec.convert(setting.value, list[dict[str, object]]):
        click.echo(f"\n{'[[listeners]]':<47} # {setting.source.partition(' in ')[2]}")
        for key, value in listener.items():
            lines = {f"{key}.{each}": what for each, what in value.items()} if isinstance(value, dict) else {key: value}
            for name, what in lines.items():
                click.echo(f"{name} = {json.dumps(what)}")


def _listener_as_json(listener: ListenerConfig) -> dict[str, object]:
    tls = listener.tls
    return {
        "name": listener.name,
        "listen": str(listener.listen),
        "advertise": None if listener.advertise is None else str(listener.advertise),
        "proxy_protocol": listener.proxy_protocol,
        "proxy_protocol_from": None
        if listener.proxy_protocol_from is None
        else [str(network) for network in listener.proxy_protocol_from],
        "tls": None
        if tls is None
        else {
            "cert": str(tls.cert),
            "client_auth": tls.client_auth or ("none" if tls.client_ca is None else "required"),
            "min_version": tls.min_version,
        },
    }


def _echo_owners(owners: Owners, file: str) -> None:
    """Print the static table, commented out if it has a file of its own, which the output already names."""
    mark = "" if file else "# "
    click.echo(f"\n{f'{mark}[brokers]':<47} # {file or 'in the table'}")
    for number, address in sorted(owners.brokers.items()):
        click.echo(f"{mark}{number} = {json.dumps(str(address))}")
    for topic in owners.topics:
        click.echo(f"\n{mark}[[topics]]\n{mark}name = {json.dumps(topic.name)}\n{mark}owners = {list(topic.owners)}")


def _as_json(settings: Mapping[str, Setting]) -> dict[str, object]:
    told: dict[str, object] = {}
    for path, setting in settings.items():
        if path not in TABLES:
            state = _state(setting, settings)
            value = None if state in (NOT_SET, NOT_SHOWN) else setting.value
            told[path] = {"value": value, "state": state, "source": setting.source}
    return told


def _owners_as_json(owners: Owners | None) -> dict[str, object] | None:
    if owners is None:
        return None
    return {
        "brokers": {str(number): str(address) for number, address in sorted(owners.brokers.items())},
        "topics": [{"name": topic.name, "owners": list(topic.owners)} for topic in owners.topics],
    }


def _echo_json(told: Mapping[str, object]) -> None:
    click.echo(json.dumps(told, indent=2))
