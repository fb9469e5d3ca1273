"""Invalid values of security settings: each error names the setting, the file and the remedy."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.cli.check_config import _try_files
from kproxy.config import build_proxy_config, load_settings
from kproxy.config.parsing import unreadable
from kproxy.config.proxy import KEYS
from kproxy.errors import StartupError
from tests.support.processes.dev import run_kproxy
from tests.support.security.sasl_client import jwks, users_file
from tests.support.security.tls_files import Signer

ETCD = '[ownership]\netcd = "https://127.0.0.1:2379"\n'
SECTIONS = ("tls", "broker_tls", "broker_sasl", "sasl", "oauth", "admin", "audit.tls", "audit.sasl", "etcd", "access")


class Site:
    """Valid files, invalid ones, and a valid configuration for each section."""

    def __init__(self, place: Path) -> None:
        self.place = place
        signer = Signer(place / "ca")
        server, client = signer.issue("server", "localhost"), signer.issue("client", "c")
        password, token, keys, users = place / "password", place / "token", place / "jwks.json", users_file(place)
        password.write_text("a-password")
        token.write_text("a-token-of-twenty-or-so")
        keys.write_text(jwks())
        (place / "directory").mkdir()
        (place / "empty").touch(0o600)
        (place / "garbage").write_bytes(bytes(range(256)) * 8)
        (place / "garbage").chmod(0o600)
        pair = f'cert = "{client.cert}"\nkey = "{client.key}"\n'
        towards = f'[broker_tls]\nca = "{signer.ca}"\n{pair}'
        scram = f'mechanism = "SCRAM-SHA-512"\nusername = "u"\npassword_file = "{password}"\n'
        page = f'cert = "{server.cert}"\nkey = "{server.key}"\nclient_ca = "{signer.ca}"\n'
        elsewhere = '[audit]\nsink = "topic"\nbootstrap = "h:1"\n[audit.{}]\n'
        self.good = {
            "tls": f"[tls]\n{page}",
            "broker_tls": towards,
            "broker_sasl": f"[broker_sasl]\n{scram}",
            "sasl": f'[sasl]\nmechanisms = ["SCRAM-SHA-512"]\nusers = "{users}"\n',
            "oauth": '[sasl]\nmechanisms = ["OAUTHBEARER"]\nwithout_tls = true\n'
            f'[oauth]\njwks = "{keys}"\nissuer = "i"\naudience = "a"\n',
            "admin": '[listen]\nadmin = "127.0.0.1:0"\n[admin]\n',
            "admin.tls": '[listen]\nadmin = "127.0.0.1:0"\n[admin.tls]\n' + page,
            "audit.tls": elsewhere.format("tls") + f'ca = "{signer.ca}"\n{pair}',
            "audit.sasl": elsewhere.format("sasl") + scram,
            "etcd": f'[etcd]\nca = "{signer.ca}"\n{pair}username = "u"\npassword_file = "{password}"\n',
            "access": "[access]\n",
        }
        self.swapped = {"cert": server.key, "key": server.cert, "crl": server.cert, "client_crl": server.cert}
        self.swapped |= {"ca": server.key, "client_ca": server.key, "users": keys, "jwks": users}

    def with_value(self, path: str, value: object) -> Path:
        """A configuration with this value."""
        section, _, key = path.rpartition(".")
        text = self.good[section]
        if key == "token_file" and section != "admin":
            text = text.partition("mechanism")[0] + 'mechanism = "OAUTHBEARER"\nallow_plain_text = true\n'
        if key == "password":
            text = re.sub("password_file.*\n", "", text)
        lines = [line for line in text.splitlines() if line.partition(" ")[0] != key]
        lines.insert(lines.index(f"[{section}]") + 1, f"{key} = {json.dumps(value)}")
        file = self.place / "kproxy.toml"
        file.write_text(ETCD + "\n".join(lines) + "\n")
        return file


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def error_of(file: Path) -> str:
    """The error of `check-config`, empty if there is none."""
    try:
        _try_files(build_proxy_config(load_settings(file, environ={})))
    except StartupError as error:
        return str(error)
    return ""


FILES = sorted(
    path
    for path in KEYS
    if path.startswith(tuple(f"{section}." for section in SECTIONS))
    and path.rpartition(".")[2]
    in ("cert", "key", "ca", "client_ca", "crl", "client_crl", "users", "jwks", "password_file", "token_file")
)


def names(path: str, said: str) -> bool:
    """Whether an error names the setting."""
    return path in said or (path.startswith("etcd.") and f"etcd's {path.removeprefix('etcd.')}" in said)


@pytest.mark.parametrize("path", FILES)
def test_unusable_file_is_named_with_the_remedy(site: Site, path: str) -> None:
    key = path.rpartition(".")[2]
    files = {name: site.place / name for name in ("missing", "directory", "empty", "garbage")}
    if key in site.swapped:
        files["swapped"] = Path(site.swapped[key])
    for name, file in files.items():
        said = error_of(site.with_value(path, str(file)))
        if (path, name) == ("sasl.users", "empty"):
            assert said == ""
            continue
        assert names(path, said), said
        assert str(file) in said, said
        # The remedy follows the reason.
        assert re.search(r": (name|give|write|run|make) .{8,}\.$", said), said
    for value in ("", 7, ["a"], "a\0b"):
        said = error_of(site.with_value(path, value))
        assert said.startswith(path), said
        assert re.search(r": (give|write) ", said), said


@pytest.mark.parametrize(
    "path",
    sorted(path for path in KEYS if path.startswith(tuple(f"{each}." for each in SECTIONS)) and path not in FILES),
)
def test_wrong_value_type_is_reported_with_accepted_ones(site: Site, path: str) -> None:
    values = [{"a": 1}, [1], "a\0b"]
    if path.rpartition(".")[2] not in ("mechanisms", "audience", "hosts", "principal_mapping_rules"):
        values += [["a"]]
    for value in values:
        if isinstance(value, dict):
            file = site.with_value(path, 0)
            file.write_text(file.read_text().replace(" = 0\n", " = {a = 1}\n"))
        else:
            file = site.with_value(path, value)
        said = error_of(file)
        assert path in said, said
        assert re.search(r": (give|write) .+\.$", said), said


def test_empty_list_and_empty_part_differ(site: Site) -> None:
    for value in ("", [], [""]):
        said = error_of(site.with_value("oauth.audience", value))
        assert re.search(r"^oauth.audience in .*: the value is empty: give one", said), said
    said = error_of(site.with_value("oauth.audience", "a,,b"))
    assert "oauth.audience" in said
    assert "'a,,b' has an empty part: write values" in said


def test_unreadable_file_is_reported_with_the_user() -> None:
    """Root may run this test, and can read every file."""
    said = str(unreadable("tls.key", Path("server.key"), PermissionError(errno.EACCES, "Permission denied")))
    way_out = f"let the user of this process (uid {os.geteuid()}) read it"
    assert said == f"tls.key server.key cannot be read (Permission denied): {way_out}."


@pytest.mark.parametrize(
    ("path", "name"), [("sasl.users", "missing"), ("oauth.jwks", "garbage"), ("tls.cert", "empty")]
)
def test_start_reports_the_same_with_same_status(site: Site, path: str, name: str) -> None:
    file = site.with_value(path, str(site.place / name))
    said = error_of(file)
    for command in ("check-config", "serve"):
        done = run_kproxy(command, "--config", file)
        assert (done.status, done.stdout, done.stderr) == (2, "", f"kproxy: {said}\n")


def test_keys_at_a_url_are_checked_without_fetching(site: Site) -> None:
    assert error_of(site.with_value("oauth.jwks", "https://127.0.0.1:1/keys")) == ""


def test_file_without_users_causes_a_warning(site: Site) -> None:
    file, empty = site.with_value("sasl.users", str(site.place / "empty")), site.place / "empty"
    done = CliRunner().invoke(cli, ["check-config", "--config", str(file)])
    assert done.exit_code == 0
    warning = f"sasl.users {empty} has no users, so nobody can log in with a password: "
    warning += f"add one with `kproxy user add --users {empty} NAME`."
    assert done.stderr == f"kproxy: warning: {warning}\n"
    told = CliRunner().invoke(cli, ["check-config", "--config", str(file), "--json"])
    assert (json.loads(told.stdout)["ok"], json.loads(told.stdout)["warnings"]) == (True, [warning])
