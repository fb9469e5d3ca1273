"""`[sasl]` and `[oauth]`: what is taken, and the sentence for what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kproxy.cli import cli
from kproxy.config import ProxyConfig, load_proxy_config
from kproxy.errors import StartupError

ETCD = '[ownership]\netcd = "http://127.0.0.1:2379"\n'
OAUTH = '[oauth]\njwks = "jwks.json"\nissuer = "i"\naudience = "a"\n'


def load(directory: Path, text: str, **environ: str) -> ProxyConfig:
    file = directory / "kproxy.toml"
    file.write_text(ETCD + text)
    return load_proxy_config(file, environ=environ)


def test_without_it_nothing_is_asked_of_clients(tmp_path: Path) -> None:
    assert load(tmp_path, "").sasl is None


def test_everything_may_be_set(tmp_path: Path) -> None:
    text = '[sasl]\nmechanisms = ["PLAIN", "SCRAM-SHA-512", "OAUTHBEARER"]\nusers = "users.toml"\nwithout_tls = true\n'
    text += "timeout_s = 3\nsession_lifetime_s = 600\n"
    text += OAUTH + 'principal_claim = "azp"\ngroups_claim = "roles"\nclock_skew_s = 5\n'
    sasl = load(tmp_path, text).sasl
    assert sasl is not None
    assert sasl.mechanisms == ("PLAIN", "SCRAM-SHA-512", "OAUTHBEARER")
    assert (sasl.timeout_s, sasl.session_lifetime_s) == (3.0, 600.0)
    assert sasl.oauth is not None
    assert (sasl.oauth.audience, sasl.oauth.principal_claim, sasl.oauth.groups_claim) == (("a",), "azp", "roles")


def test_the_environment_may_set_it(tmp_path: Path) -> None:
    variables = {"KPROXY_SASL__MECHANISMS": "SCRAM-SHA-256, SCRAM-SHA-512", "KPROXY_SASL__USERS": "u.toml"}
    sasl = load(tmp_path, "", **variables).sasl
    assert sasl is not None
    assert sasl.mechanisms == ("SCRAM-SHA-256", "SCRAM-SHA-512")


def test_what_others_could_read_is_offered_where_it_is_allowed_alone(tmp_path: Path) -> None:
    text = '[sasl]\nmechanisms = ["PLAIN", "SCRAM-SHA-512"]\nusers = "u"\n'
    sasl = load(tmp_path, text).sasl
    assert sasl is not None
    assert sasl.offered(is_encrypted=False) == ("SCRAM-SHA-512",)
    assert sasl.offered(is_encrypted=True) == ("PLAIN", "SCRAM-SHA-512")
    sasl = load(tmp_path, text + "without_tls = true").sasl
    assert sasl is not None
    assert sasl.offered(is_encrypted=False) == ("PLAIN", "SCRAM-SHA-512")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[sasl]\nmechanisms = "GSSAPI"\nusers = "u"', ["'GSSAPI'", "OAUTHBEARER"]),
        ('[sasl]\nmechanisms = "PLAIN"\nusers = "u"', ["sasl.without_tls = true"]),
        ('[sasl]\nmechanisms = "SCRAM-SHA-256"', ["sasl.users", "kproxy user add"]),
        ('[sasl]\nusers = "u"', ["sasl.users", "sasl.mechanisms"]),
        (OAUTH, ["oauth.jwks", "sasl.mechanisms"]),
        ('[sasl]\nmechanisms = "SCRAM-SHA-256"\nusers = "u"\n' + OAUTH, ["oauth.jwks", "OAUTHBEARER"]),
        ('[sasl]\nmechanisms = "OAUTHBEARER"\nwithout_tls = true', ["oauth.issuer", "oauth.audience"]),
        (
            '[sasl]\nmechanisms = "OAUTHBEARER"\nwithout_tls = true\n[oauth]\njwks = "j"\nissuer = "i"',
            ["oauth.audience"],
        ),
        (
            '[sasl]\nmechanisms = "OAUTHBEARER"\nusers = "u"\nwithout_tls = true\n' + OAUTH,
            ["sasl.users", "leave it out"],
        ),
        ('[sasl]\nmechanism = "PLAIN"', ["sasl.mechanism", "sasl.mechanisms"]),
        ('[sasl]\nmechanisms = "SCRAM-SHA-256"\nusers = "u"\ntimeout_s = 0', ["sasl.timeout_s"]),
    ],
)
def test_what_does_not_fit_is_told_in_a_sentence(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(StartupError) as raised:
        load(tmp_path, text)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_check_config_shows_it(tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(ETCD + '[sasl]\nmechanisms = "SCRAM-SHA-256"\nusers = "users.toml"\n')
    shown = CliRunner().invoke(cli, ["check-config", "--config", str(file), "--json"], catch_exceptions=False)
    settings = json.loads(shown.output)["settings"]
    assert settings["sasl.users"]["value"] == "users.toml"
    assert settings["oauth.jwks"]["state"] == "not_set"


# `kproxy user`


def test_users_are_added_listed_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"

    def run(*arguments: str, stdin: str = "") -> str:
        done = CliRunner().invoke(cli, ["user", *arguments, "--users", str(file)], input=stdin, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert run("add", "alice", stdin="pass word \n") == "added alice: SCRAM-SHA-256, SCRAM-SHA-512\n"
    assert file.stat().st_mode & 0o777 == 0o600
    (tmp_path / "password").write_text("other\n")
    output = run("add", "alice", "--mechanism", "SCRAM-SHA-512", "--password-file", str(tmp_path / "password"))
    assert output == "changed alice: SCRAM-SHA-512\n"
    run("add", "bob", stdin="x")
    assert run("list") == "alice\tSCRAM-SHA-512\nbob\tSCRAM-SHA-256, SCRAM-SHA-512\n"
    assert run("remove", "alice") == "removed alice\n"
    assert run("list") == "bob\tSCRAM-SHA-256, SCRAM-SHA-512\n"


@pytest.mark.parametrize(("arguments", "stdin"), [(["remove", "nobody"], ""), (["add", "carol"], "\n")])
def test_what_cannot_be_done_leaves_the_file(tmp_path: Path, arguments: list[str], stdin: str) -> None:
    file = tmp_path / "users.toml"
    CliRunner().invoke(cli, ["user", "add", "--users", str(file), "alice"], input="secret")
    before = file.read_text()
    done = CliRunner().invoke(cli, ["user", *arguments, "--users", str(file)], input=stdin)
    assert isinstance(done.exception, StartupError)
    assert file.read_text() == before
