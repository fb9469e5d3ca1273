"""Every table and key of the configuration comes through the chart's values; secrets come from Secrets alone.

pytest collects this file only by its name, as `make check-deploy` does: it needs `helm`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kproxy.config.listeners import SECTION as LISTENERS
from kproxy.config.parsing import Texts
from kproxy.config.proxy import SECRETS, SECTIONS, TABLES, build_proxy_config, load_settings
from tests.support.processes.dev import KPROXY
from tests.support.security.tls_files import Signer
from tests.unit.suite.test_deploy import CHART, chart_script

HELM: Final = os.environ.get("HELM", "helm")
SCRIPT: Final = chart_script()
MOUNTED: Final = "/etc/kproxy-secrets/"
SECURED: Final = CHART / "examples/secured.yaml"
# One for each literal, bound and kind of value that a key takes.
TURNS: Final = range(8)
# Texts of which the chart or Kubernetes uses a part.
TEXTS: Final = {
    "listen.listen": "127.0.0.1:100{}",
    "listen.admin": "127.0.0.1:200{}",
    "listeners.listen": "127.0.0.1:300{}",
    "listen.advertise": "$(POD_NAME).example.org:1{}",
    "listeners.advertise": "$(POD_NAME).example.org:2{}",
    "listeners.name": "name-{}",
    "acls.principal": "User:{}",
    "quotas.principal": "User:{}",
}
BASE: Final[dict[str, Any]] = {"ownership": {"source": "kafka", "bootstrap": ["k:9092"]}, "replicas": 1}
KINDS: Final[dict[str, Any]] = {**SECTIONS, **SCRIPT.TABLE_KINDS}


def helm(values: dict[str, Any], directory: Path, *more: str) -> subprocess.CompletedProcess[str]:
    file = directory / "values.json"
    file.write_text(json.dumps(values))
    command = [HELM, "template", "kproxy", str(CHART), "--namespace", "kproxy", "--kube-version", "1.34.0"]
    return subprocess.run([*command, *more, "-f", str(file)], capture_output=True, text=True, timeout=60, check=False)


def rendered(values: dict[str, Any], directory: Path, *more: str) -> str:
    done = helm(values, directory, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(values: dict[str, Any], directory: Path, *more: str) -> str:
    done = helm(values, directory, *more)
    assert done.returncode != 0, "it renders"
    return done.stderr


def toml_of(manifest: str) -> str:
    (block,) = re.findall(r"^  kproxy.toml: \|\n((?:    .*\n|\n)+)", manifest, re.MULTILINE)
    return "".join(line.removeprefix("    ") for line in block.splitlines(keepends=True))


def advertised(manifest: str) -> str:
    (text,) = re.findall(r"^ +- --advertise=(.*)$", manifest, re.MULTILINE)
    return str(text)


def ports_of(manifest: str, kind: str) -> list[str]:
    """The lines of ports in each object of a kind."""
    found = [each for each in manifest.split("---\n") if f"\nkind: {kind}\n" in each]
    return [line for each in found for line in re.findall(r"(?:containerPort|port|targetPort): (\S+)$", each, re.M)]


def drawn(info: msgspec.inspect.Type, path: str, turn: int) -> Any:
    """A value of a type: over several turns all its literals, bounds and kinds, but no secrets."""
    match info:
        case msgspec.inspect.UnionType():
            kinds = [each for each in info.types if not isinstance(each, msgspec.inspect.NoneType)]
            return drawn(kinds[turn % len(kinds)], path, turn)
        case msgspec.inspect.BoolType():
            return turn % 2 == 1
        case msgspec.inspect.LiteralType():
            return info.values[turn % len(info.values)]
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            least = info.ge if info.ge is not None else 0.5 if info.gt is not None else 0
            return (least, info.le if info.le is not None else 1 << 40)[turn % 2]
        case msgspec.inspect.CustomType() if info.cls is Texts:
            return [drawn(msgspec.inspect.StrType(), path, each) for each in (turn, turn + 1)]
        case msgspec.inspect.StrType() | msgspec.inspect.CustomType():
            return TEXTS.get(path, f'{path} {{}}: "quoted" \\ <tag> & é\n$(X)').replace("{}", str(turn))
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return [drawn(info.item_type, path, each) for each in (turn, turn + 1)]
        case msgspec.inspect.DictType():
            return {"1": "broker-1:9092"}
        case msgspec.inspect.StructType():
            fields = {each.name: each for each in info.fields if f"{path}.{each.name}" not in SECRETS}
            return {name: drawn(each.type, f"{path}.{name}", turn) for name, each in fields.items()}
    raise AssertionError(f"{path}: nothing draws {info}")


def whole_configuration(turn: int, *, several: bool) -> dict[str, Any]:
    left_out = {"tls"} if several else {LISTENERS}
    found = {name: msgspec.inspect.type_info(kind) for name, kind in KINDS.items() if name not in left_out}
    config = {name: drawn(info, name, turn) for name, info in found.items()}
    # The chart refuses other values: the kubelet has no certificate.
    config["admin"]["tls"]["client_auth"] = "optional"
    if several:
        for key in ("listen", "advertise", "proxy_protocol", "proxy_protocol_from"):
            del config["listen"][key]
    return config


def paths(kind: Any, at: str) -> Iterator[str]:
    """The paths of all files in a section or a table."""
    match msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind:
        case msgspec.inspect.ListType() as info:
            yield from paths(info.item_type, at)
        case msgspec.inspect.StructType() as info:
            for each in info.fields:
                yield from paths(each.type, f"{at}.{each.name}")
        case msgspec.inspect.UnionType() as info:
            for each in info.types:
                yield from paths(each, at)
        case msgspec.inspect.CustomType() as info if info.cls is Path:
            yield at


# The file of the keys may also be a URL.
FILES: Final = ["oauth.jwks", *(path for name, kind in KINDS.items() for path in paths(kind, name))]


def nested(path: str, value: object) -> dict[str, Any]:
    """A configuration with one key."""
    for name in reversed(path.split(".")):
        value = [{"name": "a", "listen": "h:1", **value}] if name == LISTENERS else {name: value}  # type: ignore[dict-item]
        value = {LISTENERS: value} if name == LISTENERS else value
    return value  # type: ignore[return-value]


def test_chart_accepts_each_table() -> None:
    assert set(SCRIPT.TABLE_KINDS) == set(TABLES)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("mode", ["gateway", "sidecar"])
def test_each_key_arrives_in_configuration(mode: str, several: bool, tmp_path: Path) -> None:
    for turn in TURNS:
        config = whole_configuration(turn, several=several)
        manifest = rendered({**BASE, "mode": mode, "config": config}, tmp_path)
        file = tmp_path / "kproxy.toml"
        file.write_text(toml_of(manifest))
        if mode == "gateway":
            # Kubernetes puts the pod's name into it.
            told = [(f"{each['name']}=", each.pop("advertise")) for each in config.get(LISTENERS, ())]
            told = told or [("", config["listen"].pop("advertise"))]
            assert advertised(manifest) == ",".join(name + address for name, address in told)
        assert tomllib.loads(file.read_text()) == config
        settings = load_settings(file, environ={})
        assert {path for path, setting in settings.items() if setting.source == "default"} <= {
            *SECRETS,
            *("listen.advertise", "listen.listen", "listen.proxy_protocol", "listen.proxy_protocol_from"),
            *(path for path in settings if path.startswith("tls.") and several),
        }


@pytest.mark.parametrize("path", FILES)
def test_each_file_comes_from_secret(path: str, tmp_path: Path) -> None:
    config = nested(path, {"secretName": "a-secret", "key": "a.key"})
    manifest = rendered({**BASE, "config": config}, tmp_path)
    value: Any = tomllib.loads(toml_of(manifest))
    for name in path.split("."):
        value = value[name][0] if name == LISTENERS else value[name]
    assert value == f"{MOUNTED}a-secret/a.key"
    assert re.search(r"name: a-secret\n +items:\n +- key: a.key\n +path: a-secret/a.key\n", manifest)
    assert f"mountPath: {MOUNTED.rstrip('/')}\n" in manifest


def test_text_without_file_needs_no_secret(tmp_path: Path) -> None:
    config = {"etcd": {"username": {"secretName": "a", "key": "b"}}}
    assert "/config/etcd/username" in refusal({**BASE, "config": config}, tmp_path)


@pytest.mark.parametrize("more", [(), ("--skip-schema-validation",)], ids=["", "without schema"])
@pytest.mark.parametrize("path", sorted(SECRETS))
def test_secret_in_values_is_refused(path: str, more: tuple[str, ...], tmp_path: Path) -> None:
    said = refusal({**BASE, "config": nested(path, "hunter2-hunter2-hunter2")}, tmp_path, *more)
    assert f"config.{path}: a secret" in said
    assert f"config.{path}_file" in said
    assert f"{path}_file" in FILES
    assert "hunter2" not in said


@pytest.mark.parametrize("path", sorted(SECRETS))
def test_secret_in_variable_needs_reference(path: str, tmp_path: Path) -> None:
    name = "KPROXY_" + path.replace(".", "__").upper()
    plain = [{"name": name, "value": "hunter2"}]
    for values in ({"extraEnv": plain}, {"test": {"env": plain}}):
        said = refusal({**BASE, **values}, tmp_path)
        assert f"{name}: a secret" in said
        assert "hunter2" not in said
    reference = [{"name": name, "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]
    assert "secretKeyRef" in rendered({**BASE, "extraEnv": reference}, tmp_path)


def test_secured_gateway_is_valid(tmp_path: Path) -> None:
    """`kproxy check-config` accepts SASL, ACLs, quotas and two listeners, with files at the Secrets' mounts."""
    manifest = rendered({}, tmp_path, "-f", str(SECURED))
    signer = Signer(tmp_path / "ca")
    pair = signer.issue("server", "localhost")
    users = tmp_path / "kproxy-users/users.toml"
    contents = {
        "kproxy-tls/tls.crt": pair.cert.read_bytes(),
        "kproxy-tls/tls.key": pair.key.read_bytes(),
        "kproxy-broker/ca.crt": signer.ca.read_bytes(),
        "kproxy-broker/password": b"hunter2",
        "kproxy-admin/token": b"0123456789abcdef",
        "kproxy-users/users.toml": b"",
    }
    assert set(re.findall(r"^ +path: (\S+/\S+)$", manifest, re.MULTILINE)) - {"/metrics", "/livez", "/readyz"} == set(
        contents
    )
    for name, content in contents.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        file.chmod(0o440)
    users.unlink()
    add = [*KPROXY, "user", "add", "orders", "--users", str(users)]
    subprocess.run(add, input="hunter2hunter2\n", text=True, check=True, capture_output=True, timeout=60)
    file = tmp_path / "kproxy.toml"
    file.write_text(toml_of(manifest).replace(MOUNTED, f"{tmp_path}/"))
    told = advertised(manifest).replace("$(POD_NAME)", "kproxy-0")
    environ = {**os.environ, "KPROXY_LISTEN__ADVERTISE": told}
    check = [*KPROXY, "check-config", "--config", str(file), "--json"]
    done = subprocess.run(check, env=environ, text=True, capture_output=True, check=False, timeout=60)
    said = json.loads(done.stdout)
    assert (done.returncode, said["problem"]) == (0, None)
    assert (len(said["acls"]), len(said["quotas"]), said["warnings"]) == (2, 2, [])
    addresses = {each["name"]: (each["listen"], each["advertise"]) for each in said["listeners"]}
    assert addresses == {
        "internal": ("0.0.0.0:9092", "kproxy-0.kproxy-headless.kproxy.svc.cluster.local:9092"),
        "external": ("0.0.0.0:9093", "kproxy-0.kafka.example.org:9094"),
    }


def test_each_listener_has_ports(tmp_path: Path) -> None:
    listeners = [
        {"name": "a", "listen": "0.0.0.0:1092", "advertise": "$(POD_NAME).example.org:1"},
        {"name": "b", "listen": "[::]:1092", "advertise": "$(POD_NAME).example.org:1"},
        {"name": "c", "listen": "0.0.0.0:1093"},
    ]
    external = {"enabled": True, "domain": "example.org", "port": 9, "listener": "c"}
    manifest = rendered({**BASE, "config": {LISTENERS: listeners}, "external": external}, tmp_path)
    assert advertised(manifest) == "a=$(POD_NAME).example.org:1,b=$(POD_NAME).example.org:1,c=$(POD_NAME).example.org:9"
    assert ports_of(manifest, "StatefulSet") == ["1092", "1093", "9644", "9644", "9644"]
    assert ports_of(manifest, "NetworkPolicy") == ["kafka", "kafka-1093", "admin"]
    bootstrap = ["9092", "kafka", "1093", "kafka-1093"]
    headless = ["1092", "kafka", "1093", "kafka-1093", "9644", "admin"]
    assert ports_of(manifest, "Service") == [*bootstrap, *headless, "9", "1093"]
    said = refusal({**BASE, "config": {LISTENERS: listeners}, "external": {**external, "listener": "d"}}, tmp_path)
    assert "external.listener" in said


def test_addresses_in_config_move_ports(tmp_path: Path) -> None:
    listen = {"listen": "0.0.0.0:1092", "admin": "0.0.0.0:1644", "advertise": "$(POD_NAME).example.org:9"}
    manifest = rendered({**BASE, "config": {"listen": listen}}, tmp_path)
    assert advertised(manifest) == "$(POD_NAME).example.org:9"
    assert ports_of(manifest, "StatefulSet") == ["1092", "1644", "1644", "1644"]
    assert ports_of(manifest, "Service") == ["9092", "kafka", "1092", "kafka", "1644", "admin"]


def test_static_table_is_valid(tmp_path: Path) -> None:
    table = {"brokers": {"1": "broker-1:9092"}, "topics": [{"name": "orders", "owners": [1, 1]}]}
    manifest = rendered({"ownership": {"source": "static"}, "replicas": 1, "config": table}, tmp_path)
    file = tmp_path / "kproxy.toml"
    file.write_text(toml_of(manifest))
    flags = {"advertise": advertised(manifest)}
    owners = build_proxy_config(load_settings(file, flags=flags, environ={})).owners
    assert owners is not None
    assert [(each.name, each.owners) for each in owners.topics] == [("orders", (1, 1))]


def test_drain_delay_of_sidecar_is_added(tmp_path: Path) -> None:
    for given, expected in (({}, 0), ({"limits": {"drain_delay": 3}}, 3)):
        manifest = rendered({**BASE, "mode": "sidecar", "config": given}, tmp_path)
        assert tomllib.loads(toml_of(manifest))["limits"]["drain_delay"] == expected


def test_empty_rules_stay_empty(tmp_path: Path) -> None:
    assert tomllib.loads(toml_of(rendered({**BASE, "config": {"acls": []}}, tmp_path)))["acls"] == []


def test_configuration_comes_from_secret(tmp_path: Path) -> None:
    manifest = rendered({**BASE, "configSecretName": "mine"}, tmp_path)
    assert "kproxy.toml: |" not in manifest
    assert re.search(r"- name: kproxy-config\n +secret:\n +secretName: mine\n", manifest)
