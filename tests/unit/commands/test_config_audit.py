"""The destination of the audit trail: read from flags, environment and file; refused if it cannot be written there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kproxy.cli import main
from kproxy.config import Address, AuditOptions, load_proxy_config
from kproxy.errors import StartupError
from kproxy.installed import install_command

ETCD = {"etcd": "http://127.0.0.1:2379"}
STATIC = '[ownership]\nownership = "static"\n[brokers]\n1 = "h:1"\n[[topics]]\nname = "{topic}"\nowners = [1]\n'


def load(toml: str = "", directory: Path | None = None, **given: Mapping[str, Any]) -> AuditOptions:
    file = None
    if directory is not None:
        file = directory / "kproxy.toml"
        file.write_text(toml)
    return load_proxy_config(file, flags=given.get("flags", ETCD), environ=given.get("environ", {})).audit


SINKS = {
    "none": AuditOptions(),
    "topic": AuditOptions("topic"),
    "topic:a.b": AuditOptions("topic", "a.b"),
    "json:/var/log/a:b": AuditOptions("json", directory=Path("/var/log/a:b")),
    "parquet:trail": AuditOptions("parquet", directory=Path("trail")),
}


@pytest.mark.parametrize(("text", "options"), SINKS.items(), ids=SINKS)
def test_sink_is_a_kind_and_a_place(text: str, options: AuditOptions) -> None:
    assert load(flags={**ETCD, "audit_sink": text}) == options


def test_flags_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    toml = '[audit]\nsink = "topic:file"\nbootstrap = ["a:1", "b:2"]\ninterval_s = 2\nmax_bytes = 1048576\n'
    from_file = AuditOptions("topic", "file", None, (Address("a", 1), Address("b", 2)), 2.0, 1 << 20)
    assert load(toml, tmp_path) == from_file
    environ = {"KPROXY_AUDIT__SINK": "topic:environ", "KPROXY_AUDIT__INTERVAL_S": "3", "KPROXY_AUDIT__BOOTSTRAP": "c:3"}
    options = load(toml, tmp_path, environ=environ, flags={**ETCD, "audit_interval_s": 0.5})
    assert options == AuditOptions("topic", "environ", None, (Address("c", 3),), 0.5, 1 << 20)


KEY_FILE = '[audit]\nsink = "{sink}"\nkey_file = "{file}"\n'


def test_trail_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    assert load(KEY_FILE.format(sink="json:d", file=file), tmp_path).key == b"0123456789abcdef"
    with pytest.raises(StartupError, match=r"audit.key_file .*only to topics and JSON files; audit.sink is none"):
        load(KEY_FILE.format(sink="none", file=file), tmp_path)
    file.write_text("0123456789abcde\n")
    with pytest.raises(StartupError, match=r"audit.key_file .*has 15 bytes; expected at least 16: .*openssl rand"):
        load(KEY_FILE.format(sink="topic", file=file), tmp_path)


WRONG = {
    "no kind": ('[audit]\nsink = "kafka"\n', "unknown audit sink 'kafka'; expected none, topic"),
    "no directory": ('[audit]\nsink = "json:"\n', "unknown audit sink 'json:'"),
    "no topic": ('[audit]\nsink = "topic:"\n', "unknown audit sink 'topic:'"),
    "no topic's name": ('[audit]\nsink = "topic:a/b"\n', "'a/b' cannot be a topic"),
    "too seldom": ("[audit]\ninterval_s = 61\n", "audit.interval_s"),
    "too little": ("[audit]\nmax_bytes = 1000\n", "audit.max_bytes"),
    "a cluster for files": ('[audit]\nsink = "json:d"\nbootstrap = "a:1"\n', "audit.bootstrap .*kind topic.* json:d"),
    "TLS without another cluster": (
        '[audit]\nsink = "topic"\ntls.enabled = true\n',
        "audit.tls.enabled .*audit.bootstrap",
    ),
    "SASL without a secret": (
        '[audit]\nsink = "topic"\nbootstrap = "a:1"\nsasl.mechanism = "SCRAM-SHA-256"\nsasl.username = "u"\n',
        "audit.sasl.password_file or KPROXY_AUDIT__SASL__PASSWORD",
    ),
    "a secret in plain text": (
        '[audit]\nsink = "topic"\nbootstrap = "a:1"\n'
        '[audit.sasl]\nmechanism = "PLAIN"\nusername = "u"\npassword = "p"\n',
        "set audit.tls.enabled, or use a SCRAM mechanism",
    ),
    "no port": ('[audit]\nsink = "topic"\nbootstrap = "a"\n', "audit.bootstrap .* no port"),
    "port 0": ('[audit]\nsink = "topic"\nbootstrap = "a:0"\n', "no broker listens on a:0"),
    "misspelt": ('[audit]\nsinks = "topic"\n', r"audit.sinks .*did you mean audit.sink\?"),
    "an owner's topic": (
        '[audit]\nsink = "topic:t"\n[own]\nwriter_group = "t=g"\n',
        "audit.sink .*only owners write to t by own.writer_group",
    ),
}


@pytest.mark.parametrize(("toml", "sentence"), WRONG.values(), ids=WRONG)
def test_invalid_audit_option_is_refused(tmp_path: Path, toml: str, sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        load(toml, tmp_path)


def test_static_table_must_name_the_audit_topic(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no owner for __kproxy_audit: add it as one"):
        load('[audit]\nsink = "topic"\n' + STATIC.format(topic="t"), tmp_path, flags={})
    assert load('[audit]\nsink = "topic"\n' + STATIC.format(topic="__kproxy_audit"), tmp_path, flags={}).sink == "topic"
    elsewhere = '[audit]\nsink = "topic"\nbootstrap = "a:1"\n'
    assert load(elsewhere + STATIC.format(topic="t"), tmp_path, flags={}).sink == "topic"


def test_parquet_without_its_library_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.config.audit.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=re.escape(f"{install_command('parquet')}`, or write json:d")):
        load(flags={**ETCD, "audit_sink": "parquet:d"})


def test_check_config_shows_unset_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kproxy.toml"
    members = [f"http://etcd-{number}.example.org:2379" for number in range(3)]
    file.write_text(f'[ownership]\netcd = {json.dumps(members)}\n[audit]\nsink = "json:trail"\n')
    assert main(["check-config", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert '[audit]\nsink = "json:trail"' in shown
    assert f"etcd = {json.dumps(members)} # ownership.etcd in {file}" in shown
    assert "# bootstrap is not set" in shown
    assert "interval_s = 5.0" in shown
