"""A new configuration's options are taken by a serving proxy, or named as those that need a restart."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from kproxy.config import ProxyConfig, load_proxy_config
from kproxy.config.changes import RELOADED, differing, merge
from kproxy.config.proxy import KEYS, TABLES, Setting
from kproxy.proxy.reload import PARTS
from tests.support.security.tls_files import Signer

ACLS = '[[acls]]\nprincipal = "User:a"\noperations = ["read"]\ntopics = ["{topic}"]\n'
TABLE = '[ownership]\nownership = "static"\n[brokers]\n1 = "a:{port}"\n'
USERS = '[sasl]\nmechanisms = "SCRAM-SHA-512"\nusers = "users.toml"\n'


def load(directory: Path, toml: str, etcd: str | None = "http://127.0.0.1:1") -> ProxyConfig:
    file = directory / "kproxy.toml"
    file.write_text(toml)
    return load_proxy_config(file, flags={"etcd": etcd}, environ={})


def settings(config: ProxyConfig) -> dict[str, Setting]:
    assert config.given is not None
    return dict(config.given.settings)


def merged(started: ProxyConfig, now: ProxyConfig) -> tuple[dict[str, Any], list[str]]:
    """The values of the keys that a reload changes, and the keys that need a restart."""
    given, restart = merge(started, now)
    taken = differing(settings(started), given.settings)
    return {path: given.settings[path].value if path in given.settings else None for path in taken}, restart


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> ProxyConfig:
    return load(tmp_path_factory.mktemp("started"), "")


@pytest.mark.parametrize("path", [*KEYS, *TABLES])
def test_each_key_is_taken_or_named(started: ProxyConfig, path: str) -> None:
    other = Setting(path, "another value", "the file")
    assert started.given is not None
    now = replace(started, given=replace(started.given, settings={**settings(started), path: other}))
    is_taken = bool({path, path.partition(".")[0]} & RELOADED)
    assert merged(started, now) == (({path: "another value"}, []) if is_taken else ({}, [path]))
    # A key that is left out has its default again.
    back = {path: settings(started)[path].value if path in settings(started) else None}
    assert merged(now, started) == ((back, []) if is_taken else ({}, [path]))


def test_each_reloaded_section_has_its_function() -> None:
    assert sorted(chain.from_iterable(names for names, _ in PARTS)) == sorted(RELOADED)


def test_unchanged_configuration_changes_nothing(tmp_path: Path) -> None:
    toml = USERS + ACLS.format(topic="t") + "[[quotas]]\nconnections = 3\n"
    assert merged(load(tmp_path, toml), load(tmp_path, toml)) == ({}, [])


@pytest.mark.parametrize(
    ("before", "after", "restart"),
    [
        ("", ACLS.format(topic="t"), ["acls"]),
        (ACLS.format(topic="t"), "", ["acls"]),
        (ACLS.format(topic="t"), ACLS.format(topic="u"), []),
        # With users there are rules, if only that nobody may do anything.
        (USERS, USERS + ACLS.format(topic="t"), []),
        (USERS + ACLS.format(topic="t"), USERS, []),
        ("", "[[quotas]]\nconnections = 3\n", []),
    ],
)
def test_rules_are_not_switched_on_or_off(tmp_path: Path, before: str, after: str, restart: list[str]) -> None:
    started, now = load(tmp_path, before), load(tmp_path, after)
    assert merged(started, now)[1] == restart
    assert merge(started, now)[0].checked().access == (started if restart else now).access


def test_table_stays_with_its_source(tmp_path: Path) -> None:
    static, moved = load(tmp_path, TABLE.format(port=1)), load(tmp_path, TABLE.format(port=2))
    assert merged(static, moved) == ({"brokers": {"1": "a:2"}}, [])
    etcd = load(tmp_path, "")
    assert merged(static, etcd) == ({}, ["ownership.ownership", "brokers"])
    assert merged(etcd, static) == ({}, ["ownership.ownership", "brokers"])
    assert merge(static, etcd)[0].checked().owners == static.owners


def test_listener_takes_files_and_keeps_its_shape(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "ca")
    pairs = [signer.issue(stem, "localhost") for stem in ("one", "two")]
    one, two = (f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n' for pair in pairs)
    files = ["tls.cert", "tls.key"]
    assert merged(load(tmp_path, one), load(tmp_path, two)) == (
        dict(zip(files, map(str, pairs[1]), strict=True)),
        [],
    )
    assert merged(load(tmp_path, ""), load(tmp_path, one)) == ({}, files)
    assert merged(load(tmp_path, one), load(tmp_path, "")) == ({}, files)
    assert merged(load(tmp_path, one), load(tmp_path, f'[listen]\nlisten = "127.0.0.1:1"\n{two}'))[1] == [
        "listen.listen"
    ]

    def listeners(port: int, *tables: str) -> ProxyConfig:
        texts = (
            f'[[listeners]]\nname = "l{number}"\nlisten = "127.0.0.1:{port}{number}"\n'
            + table.replace("[tls]", "[listeners.tls]")
            for number, table in enumerate(tables)
        )
        return load(tmp_path, "".join(texts))

    assert merged(listeners(10, one, ""), listeners(10, two, ""))[1] == []
    for now in (listeners(11, two, ""), listeners(10, two), listeners(10, two, one), load(tmp_path, two)):
        assert merged(listeners(10, one, ""), now)[1][-1] == "listeners"
    assert merged(load(tmp_path, two), listeners(10, one, ""))[1] == [*files, "listeners"]
