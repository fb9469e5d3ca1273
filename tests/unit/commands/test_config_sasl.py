"""`[sasl]` and `[oauth]`: accepted values, and the error for any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner

from kproxy.cli import acl, cli, user
from kproxy.config import Address, ProxyConfig, load_proxy_config
from kproxy.config.access import _Operation
from kproxy.config.listeners import ListenerConfig
from kproxy.config.security import SaslOptions
from kproxy.config.tls import ListenerTls
from kproxy.errors import StartupError
from kproxy.security.acls import Operation
from kproxy.security.users import DEFAULT_ITERATIONS, LEAST_ITERATIONS, MOST_ITERATIONS, SCRAM_MECHANISMS
from tests.support.security.sasl_client import ALLOW_ALL
from tests.support.security.tls_files import Signer

ETCD = '[ownership]\netcd = "http://127.0.0.1:2379"\n'
OAUTH = '[oauth]\njwks = "jwks.json"\nissuer = "i"\naudience = "a"\n'


def load(directory: Path, text: str, **environ: str) -> ProxyConfig:
    file = directory / "kproxy.toml"
    file.write_text(ETCD + text)
    return load_proxy_config(file, environ=environ)


def sasl_of(config: ProxyConfig) -> SaslOptions:
    assert config.sasl is not None
    return config.sasl


def assert_refused(directory: Path, text: str, words: Iterable[str]) -> None:
    with pytest.raises(StartupError) as raised:
        load(directory, text)
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)


def test_default_asks_clients_for_no_authentication(tmp_path: Path) -> None:
    assert load(tmp_path, "").sasl is None


def test_every_sasl_option_may_be_set(tmp_path: Path) -> None:
    text = '[sasl]\nmechanisms = ["PLAIN", "SCRAM-SHA-512", "OAUTHBEARER"]\nusers = "users.toml"\nwithout_tls = true\n'
    text += "timeout_s = 3\nsession_lifetime_s = 600\n"
    text += OAUTH + 'principal_claim = "azp"\ngroups_claim = "roles"\nclock_skew_s = 5\n'
    sasl = sasl_of(load(tmp_path, text))
    assert sasl.mechanisms == ("PLAIN", "SCRAM-SHA-512", "OAUTHBEARER")
    assert (sasl.timeout_s, sasl.session_lifetime_s) == (3.0, 600.0)
    assert sasl.oauth is not None
    assert (sasl.oauth.audience, sasl.oauth.principal_claim, sasl.oauth.groups_claim) == (("a",), "azp", "roles")


def test_environment_may_set_every_sasl_option(tmp_path: Path) -> None:
    variables = {"KPROXY_SASL__MECHANISMS": "SCRAM-SHA-256, SCRAM-SHA-512", "KPROXY_SASL__USERS": "u.toml"}
    assert sasl_of(load(tmp_path, "", **variables)).mechanisms == ("SCRAM-SHA-256", "SCRAM-SHA-512")


def test_clear_text_mechanism_needs_explicit_permission(tmp_path: Path) -> None:
    text = '[sasl]\nmechanisms = ["PLAIN", "SCRAM-SHA-512"]\nusers = "u"\n'
    sasl = sasl_of(load(tmp_path, text))
    plain = ListenerConfig("", Address("127.0.0.1", 1), None)
    encrypted = dataclasses.replace(plain, tls=ListenerTls(Path("cert"), Path("key")))
    assert sasl.offered(plain) == ("SCRAM-SHA-512",)
    assert sasl.offered(encrypted) == ("PLAIN", "SCRAM-SHA-512")
    assert sasl_of(load(tmp_path, text + "without_tls = true")).offered(plain) == ("PLAIN", "SCRAM-SHA-512")


USERS = '[sasl]\nmechanisms = ["PLAIN", "SCRAM-SHA-512"]\nusers = "u"\n'
TWO = (
    '[[listeners]]\nname = "in"\nlisten = "127.0.0.1:1"\n{}\n[[listeners]]\nname = "out"\nlisten = "127.0.0.1:2"\n{}\n'
)


def test_each_listener_lists_its_mechanisms(tmp_path: Path, signer: Signer) -> None:
    pair = signer.issue("server", "localhost")
    tls = f'tls.cert = "{pair.cert}"\ntls.key = "{pair.key}"\n'

    def offered(first: str, second: str) -> list[tuple[str, ...]]:
        config = load(tmp_path, USERS + TWO.format(first, second))
        return [sasl_of(config).offered(each) for each in config.listeners]

    both = ("PLAIN", "SCRAM-SHA-512")
    assert offered("", tls) == [("SCRAM-SHA-512",), both]
    assert offered("sasl = []", tls) == [(), both]
    assert offered('sasl = ["SCRAM-SHA-512"]', tls + 'sasl = "PLAIN"') == [("SCRAM-SHA-512",), ("PLAIN",)]


def test_certificate_name_rules_belong_to_a_listener(tmp_path: Path, signer: Signer) -> None:
    pair = signer.issue("server", "localhost")
    tls = f'cert = "{pair.cert}"\nkey = "{pair.key}"\n'
    mutual = tls + f'client_ca = "{signer.ca}"\n'
    rule = "RULE:^CN=([^,]+).*$/$1/L"
    for given in (f'["{rule}", "DEFAULT"]', f'"{rule},DEFAULT"'):
        config = load(tmp_path, f"[tls]\n{mutual}principal_mapping_rules = {given}\n")
        assert config.listeners[0].tls is not None
        assert [each.case for each in config.listeners[0].tls.principals.rules] == ["L", ""]
    for text, word in (
        (f"{mutual}principal_mapping_rules = 'x'\n", "'x' is not a rule"),
        (f"{tls}principal_mapping_rules = 'DEFAULT'\n", "applies only to clients' certificates"),
    ):
        assert_refused(tmp_path, f"[tls]\n{text}", [word])


def test_kinds_of_names_belong_to_listener(tmp_path: Path, signer: Signer) -> None:
    pair = signer.issue("server", "localhost")
    tls = f'tls.cert = "{pair.cert}"\ntls.key = "{pair.key}"\n'
    mutual = tls + f'tls.client_ca = "{signer.ca}"\n'

    def kinds(first: str, second: str) -> list[tuple[str, ...]]:
        config = load(tmp_path, TWO.format(mutual + first, mutual + second))
        return [each.tls.principals.kinds for each in config.listeners if each.tls is not None]

    assert kinds("", 'tls.principal_from = "uri, dns"') == [("subject",), ("uri", "dns")]
    assert kinds('tls.principal_from = ["dns", "subject", "dns"]', 'tls.principal_from = "uri"') == [
        ("dns", "subject"),
        ("uri",),
    ]
    for text, words in (
        (mutual + 'tls.principal_from = ["uri", "email"]', ["unknown kind of name 'email'", "subject, uri, dns"]),
        (mutual + 'tls.principal_from = "URI"', ["unknown kind of name 'URI'", "subject, uri, dns"]),
        (mutual + "tls.principal_from = []", ["value is empty"]),
        (mutual + "tls.principal_from = 7", ["tls.principal_from"]),
        (tls + 'tls.principal_from = "uri"', ["applies only to clients' certificates"]),
    ):
        assert_refused(tmp_path, TWO.format(text, ""), [*words, "principal_from", "listener 'in'"])


AT_BROKERS = '[broker_sasl]\nmechanism = "SCRAM-SHA-512"\nusername = "kproxy"\npassword = "x"\n'
SAFE = AT_BROKERS + "allow_plain_text = true\n"
CLIENT = 'identity = "client"'
USERS_U = 'users = "u"'
BOTH = '["PLAIN", "SCRAM-SHA-512"]'


def section(mechanisms: str, *more: str) -> str:
    return "\n".join([f"[sasl]\nmechanisms = {mechanisms}\nwithout_tls = true", *more, ""])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[sasl]\nmechanisms = "GSSAPI"\nusers = "u"', ["'GSSAPI'", "OAUTHBEARER"]),
        ('[sasl]\nmechanisms = "PLAIN"\nusers = "u"', ["sasl.without_tls = true"]),
        ('[sasl]\nmechanisms = "SCRAM-SHA-256"', ["sasl.users", "sasl.users_in_etcd", "kproxy user add"]),
        (
            section('"SCRAM-SHA-256"', USERS_U, "users_in_etcd = true"),
            ["sasl.users_in_etcd", "sasl.users in", "keep one"],
        ),
        ("[sasl]\nusers_in_etcd = true", ["sasl.users_in_etcd", "sasl.mechanisms"]),
        (section('"OAUTHBEARER"', "users_in_etcd = true") + OAUTH, ["sasl.users_in_etcd", "leave the key out"]),
        ('[sasl]\nusers = "u"', ["sasl.users", "sasl.mechanisms"]),
        (OAUTH, ["oauth.jwks", "sasl.mechanisms"]),
        ('[sasl]\nmechanisms = "SCRAM-SHA-256"\nusers = "u"\n' + OAUTH, ["oauth.jwks", "OAUTHBEARER"]),
        (section('"OAUTHBEARER"'), ["oauth.issuer", "oauth.audience"]),
        (section('"OAUTHBEARER"') + '[oauth]\njwks = "j"\nissuer = "i"', ["oauth.audience"]),
        (section('"OAUTHBEARER"', USERS_U) + OAUTH, ["sasl.users", "leave the key out"]),
        ('[sasl]\nmechanisms = ""\nusers = "u"', ["sasl.mechanisms", "value is empty: "]),
        ('[sasl]\nmechanism = "PLAIN"', ["sasl.mechanism", "sasl.mechanisms"]),
        ('[sasl]\nmechanisms = "SCRAM-SHA-256"\nusers = "u"\ntimeout_s = 0', ["sasl.timeout_s"]),
        (USERS + TWO.format('sasl = ["PLAIN"]', ""), ["PLAIN would send", "the listener in has no TLS"]),
        (USERS + TWO.format('sasl = ["SCRAM-SHA-256"]', ""), ["the listener in", "'SCRAM-SHA-256'", "sasl.mechanisms"]),
        (TWO.format('sasl = ["SCRAM-SHA-256"]', ""), ["the listener in", "there is no SASL"]),
        ('[sasl]\nmechanisms = "PLAIN"\nusers = "u"\n' + TWO.format("", ""), ["the listener in has no TLS"]),
        (USERS + TWO.format("sasl = 1", ""), ["listener 'in'"]),
        # Carried identities.
        (
            SAFE + section(BOTH, USERS_U, CLIENT),
            ["SCRAM-SHA-512 cannot be carried on", "bound to one exchange", "OAUTHBEARER", 'identity = "proxy"'],
        ),
        (SAFE + section('"SCRAM-SHA-512"', USERS_U) + TWO.format(CLIENT, ""), ["SCRAM-SHA-512 cannot be carried on"]),
        (
            SAFE + section(BOTH, USERS_U) + TWO.format(f"{CLIENT}\nsasl = {BOTH}", ""),
            ["the listener in: SCRAM-SHA-512 cannot be carried on"],
        ),
        (SAFE + TWO.format(CLIENT, ""), ["the listener in", "no SASL", "certificate", '"proxy"']),
        (
            SAFE + section('"PLAIN"') + TWO.format(f"{CLIENT}\nsasl = []", CLIENT),
            ["the listener in", "no SASL", "certificate"],
        ),
        (
            SAFE + section('"PLAIN"', CLIENT) + TWO.format("sasl = []", ""),
            ["the listener in", "no SASL", "certificate"],
        ),
        (section('"PLAIN"', CLIENT), ["sasl.identity", "broker_sasl.mechanism"]),
        (section('"PLAIN"') + TWO.format(CLIENT, CLIENT), ["identity of the listener in", "broker_sasl.mechanism"]),
        (
            AT_BROKERS + section('"PLAIN"', CLIENT),
            ["sasl.identity", "broker_tls.enabled", "broker_sasl.allow_plain_text = true"],
        ),
        # The proxy authenticates the clients of the other listener.
        (SAFE + section('"PLAIN"') + TWO.format(CLIENT, ""), ["PLAIN needs users"]),
        (
            SAFE + section('["PLAIN", "OAUTHBEARER"]', USERS_U) + TWO.format(CLIENT, ""),
            ["oauth.issuer", "oauth.audience"],
        ),
        (SAFE + section('"OAUTHBEARER"', CLIENT) + '[oauth]\njwks = "j"\n', ["oauth.issuer", "oauth.audience"]),
        (SAFE + section('"PLAIN"', 'identity = "Client"'), ["sasl.identity"]),
        (SAFE + '[sasl]\nidentity = "client"\n', ["sasl.identity", "sasl.mechanisms"]),
        (SAFE + section('"PLAIN"') + TWO.format('identity = "clients"', ""), ["listener 'in'"]),
    ],
)
def test_conflicting_sasl_options_are_reported(tmp_path: Path, text: str, words: list[str]) -> None:
    assert_refused(tmp_path, text, words)


def test_configuration_decides_where_identities_are_forwarded(tmp_path: Path) -> None:
    config = load(tmp_path, SAFE + section('["PLAIN", "OAUTHBEARER"]', CLIENT))
    assert sasl_of(config).carries(config.listeners[0])
    # Brokers authenticate clients, so the proxy needs neither users nor token keys.
    assert (sasl_of(config).users, sasl_of(config).oauth) == (None, None)
    verified = sasl_of(load(tmp_path, SAFE + section('["PLAIN", "OAUTHBEARER"]', CLIENT, USERS_U) + OAUTH))
    assert None not in (verified.users, verified.oauth)
    other = load(tmp_path, SAFE + section('"PLAIN"', USERS_U))
    assert not sasl_of(other).carries(other.listeners[0])


def test_each_listener_chooses_identity_for_brokers(tmp_path: Path) -> None:
    config = load(tmp_path, SAFE + section(BOTH, USERS_U) + TWO.format(CLIENT, ""))
    sasl, (first, second) = sasl_of(config), config.listeners
    assert (sasl.carries(first), sasl.carries(second)) == (True, False)
    # Mechanisms that cannot be passed on are not offered there.
    assert (sasl.offered(first), sasl.offered(second)) == (("PLAIN",), ("PLAIN", "SCRAM-SHA-512"))


TOKENS = '[sasl]\nmechanisms = "OAUTHBEARER"\nwithout_tls = true\n' + OAUTH


@pytest.mark.parametrize("url", ["https://a.b/keys", "http://127.0.0.1:1/k", "http://[::1]/", "http://localhost/x"])
def test_keys_may_be_at_a_url(tmp_path: Path, url: str) -> None:
    oauth = sasl_of(load(tmp_path, TOKENS.replace("jwks.json", url))).oauth
    assert oauth is not None
    assert (oauth.jwks, oauth.jwks_refresh_s) == (url, 300.0)


@pytest.mark.parametrize(
    "url",
    [
        *("http://a.b/keys", "http://10.0.0.1/", "http://127.0.0.1.b/", "http://localhost.b/", "http://127.1/"),
        *("https://", "https:///keys", "https://a:0/", "https://a:x/", "ftp://a/", "file:///keys", "https://[::1"),
        *("https://u:p@a/", "http://127.0.0.1@a/"),
    ],
)
def test_url_that_others_could_answer_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(StartupError, match=r"oauth\.jwks") as raised:
        load(tmp_path, TOKENS.replace("jwks.json", url))
    assert "u:p" not in str(raised.value)


def test_users_and_rules_may_be_in_etcd(tmp_path: Path) -> None:
    text = '[sasl]\nmechanisms = "SCRAM-SHA-256"\nusers_in_etcd = true\n'
    sasl = sasl_of(load(tmp_path, text))
    assert (sasl.users, sasl.users_in_etcd) == (None, True)
    # Rules in etcd turn ACLs on, even without SASL.
    access = load(tmp_path, "[access]\nacls_in_etcd = true\ndry_run = true\n").access
    assert access is not None
    assert (access.acls, access.acls_in_etcd, access.dry_run) == ((), True, True)
    both = load(tmp_path, "[access]\nacls_in_etcd = true\n" + ALLOW_ALL).access
    assert both is not None
    assert (len(both.acls), both.acls_in_etcd) == (1, True)
    alone = tmp_path / "alone.toml"
    for key, section in (("sasl.users_in_etcd", text), ("access.acls_in_etcd", "[access]\nacls_in_etcd = true\n")):
        alone.write_text('[ownership]\nownership = "kafka"\nbootstrap = "127.0.0.1:1"\n' + section)
        with pytest.raises(StartupError, match=f"{key} in .* requires an etcd"):
            load_proxy_config(alone, environ={})


@pytest.mark.parametrize(
    ("text", "content", "says"),
    [
        ('mechanisms = "SCRAM-SHA-256"\nusers = "{}"\n', None, "sasl.users {} cannot be read"),
        ('mechanisms = "SCRAM-SHA-256"\nusers = "{}"\n', "[user]\n", "sasl.users {} is not a file of users"),
        ('mechanisms = "SCRAM-SHA-256"\nusers = "{}"\n', "[users]\na = []\n", "sasl.users {}: the entry of 'a'"),
        (TOKENS.partition("\n")[2].replace("jwks.json", "{}"), None, "oauth.jwks {} cannot be read"),
        (TOKENS.partition("\n")[2].replace("jwks.json", "{}"), "[]", "oauth.jwks {}"),
    ],
)
def test_check_config_reads_users_and_keys(tmp_path: Path, text: str, content: str | None, says: str) -> None:
    file, named = tmp_path / "kproxy.toml", tmp_path / "named"
    if content is not None:
        named.write_text(content)
        named.chmod(0o600)
    file.write_text(f"{ETCD}[sasl]\n{text.format(named)}")
    with pytest.raises(StartupError) as raised:
        CliRunner().invoke(cli, ["check-config", "--config", str(file)], catch_exceptions=False, standalone_mode=False)
    assert says.format(named) in str(raised.value)


# The options of `kproxy user` and `kproxy acl` for etcd

IN_ETCD = ("--etcd", "http://127.0.0.1:1")
OF_A = (*IN_ETCD, "--principal", "User:a")
WRITES = ("--principal", "User:a", "--operation", "write", "--topic", "t")


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["user", "list"], ["--users FILE", "--etcd URL"]),
        (["user", "list", "--users", "u", "--etcd", "http://127.0.0.1:1"], ["--users FILE", "--etcd URL"]),
        (["user", "list", "--users", "u", "--etcd-username", "root"], ["--etcd-...", "--etcd URL"]),
        (["user", "list", "--etcd", "http://127.0.0.1:1", "--prefix", "kafscale"], ["--prefix", "/kafscale"]),
        (["acl", "check", *WRITES], ["--config FILE", "--etcd URL"]),
        (["acl", "add", *OF_A, "--operation", "write"], ["--topic", "--cluster"]),
        (["acl", "add", *IN_ETCD, "--principal", "a", "--operation", "write", "--cluster"], ["User:NAME"]),
        (["acl", "add", *OF_A, "--operation", "write", "--cluster", "--id", "a/b"], ["--id 'a/b'", "letters"]),
    ],
)
def test_invalid_user_command_is_refused_before_prompting(arguments: list[str], words: list[str]) -> None:
    done = CliRunner().invoke(cli, arguments)
    assert isinstance(done.exception, StartupError), done.output
    assert all(word in str(done.exception) for word in words), str(done.exception)


def test_file_rules_are_checked_and_etcd_rules_named(tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text("[access]\nacls_in_etcd = true\n" + ALLOW_ALL)
    done = CliRunner().invoke(cli, ["acl", "check", "--config", str(file), *WRITES])
    assert done.stdout.startswith("allowed\n")
    assert "--etcd URL" in done.stderr


@pytest.mark.parametrize(("arguments", "stdin"), [(["remove", "nobody"], ""), (["add", "carol"], "\n")])
def test_failed_user_command_leaves_the_file(tmp_path: Path, arguments: list[str], stdin: str) -> None:
    file = tmp_path / "users.toml"
    CliRunner().invoke(cli, ["user", "add", "--users", str(file), "alice"], input="secret")
    before = file.read_text()
    done = CliRunner().invoke(cli, ["user", *arguments, "--users", str(file)], input=stdin)
    assert isinstance(done.exception, StartupError)
    assert file.read_text() == before


def test_oversized_password_file_is_reported_with_limit(tmp_path: Path) -> None:
    long = tmp_path / "long"
    long.write_text("p" * 2_000)
    arguments = ["user", "add", "--users", str(tmp_path / "users.toml"), "--password-file", str(long), "alice"]
    done = CliRunner().invoke(cli, arguments)
    assert f"{long} is larger than 1026 bytes: that is not a password." in str(done.exception)


def test_commands_offer_the_values_files_accept() -> None:
    """The commands have lists of their own, so that `--help` loads no hashing and no rules."""
    iterations = next(parameter for parameter in user.add.params if parameter.name == "iterations")
    assert isinstance(iterations.type, click.IntRange)
    limits = iterations.type.min, iterations.type.max, iterations.default
    assert limits == (LEAST_ITERATIONS, MOST_ITERATIONS, DEFAULT_ITERATIONS)
    assert user._MECHANISMS == SCRAM_MECHANISMS
    assert list(acl._OPERATIONS) == [operation.value for operation in Operation] == list(get_args(_Operation))
