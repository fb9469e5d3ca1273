"""Users, keys and names of certificates: what is read from files, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jwt
import pytest
from structlog.testing import capture_logs

from kproxy.config.access import AccessOptions
from kproxy.config.principal_rules import PrincipalMapping, parse_rules
from kproxy.config.quotas import QuotaOptions
from kproxy.config.security import PLAIN, OauthOptions, SaslOptions, Texts
from kproxy.errors import StartupError
from kproxy.security.acls import Operation, Resource
from kproxy.security.files import SecurityFiles
from kproxy.security.principals import NoPrincipal, Principal, distinguished_name, map_name, principal_of
from kproxy.security.reloading import Reloads
from kproxy.security.tokens import LATEST_S, InvalidToken, TokenOptions, read_verifier
from kproxy.security.users import Credential, Users, make_credential, parse_credential, read_users, write_users
from tests.support.security import sasl_client as client

# Users


def test_file_of_users_is_written_and_read(tmp_path: Path) -> None:
    file = client.users_file(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    users = read_users(file)
    assert users.by_name == client.users().by_name
    assert users.check("alice", "alice-secret")
    assert not users.check("alice", "bob-secret")
    assert not users.check("nobody", "alice-secret")
    assert "secret" not in file.read_text()


def test_written_names_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "users.toml"
    names = ['a"b', "a\\b", "ü", "a b", "a=b", "a.b", "[users]", "#"]
    write_users(file, {name: client.credentials_of("alice") for name in names})
    assert set(read_users(file).by_name) == set(names)


@pytest.mark.parametrize(("mode", "is_fine"), [(0o600, 1), (0o640, 1), (0o400, 1), (0o644, 0), (0o660, 0), (0o606, 0)])
def test_file_open_to_others_is_refused(tmp_path: Path, mode: int, is_fine: int) -> None:
    file = client.users_file(tmp_path)
    file.chmod(mode)
    if is_fine:
        read_users(file)
    else:
        with pytest.raises(StartupError, match="chmod 600"):
            read_users(file)


@pytest.mark.parametrize(
    "text",
    [
        "[user]",
        "[users]\na = 1",
        "[users]\na = []",
        "[users]\na = ['SECRET']",
        "[users]\na = ['SCRAM-SHA-256$4096:AAAA$AAAA:SECRET']",
        "[users]\n'' = ['x']",
        "users = 3",
        "[users",
    ],
)
def test_broken_file_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "users.toml"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(StartupError) as raised:
        read_users(file)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(("iterations", "is_taken"), [(4_095, False), (4_096, True), (100_000, True), (100_001, False)])
def test_credential_has_4096_to_100000_iterations(iterations: int, is_taken: bool) -> None:
    credential = Credential("SCRAM-SHA-256", bytes(12), bytes(32), bytes(32), iterations)
    with contextlib.nullcontext() if is_taken else pytest.raises(ValueError, match="from 4096 to 100000"):
        assert parse_credential(str(credential)) == credential


async def test_file_without_users_causes_a_warning(tmp_path: Path) -> None:
    """At the start, and when the file becomes empty; the proxy starts all the same."""
    file = tmp_path / "users.toml"
    write_users(file, {})
    sasl, reloads = SaslOptions(mechanisms=Texts(["SCRAM-SHA-512"]), users=file), Reloads()
    files = SecurityFiles(sasl, None, None, reloads, counters=Counter())
    with capture_logs() as lines:
        files.tell_of_no_users()
    assert [(each["event"], each["log_level"]) for each in lines] == [("user list is empty", "warning")]
    assert f"kproxy user add --users {file} NAME" in lines[0]["advice"]
    credential = make_credential("SCRAM-SHA-512", "pw", 4096, b"s" * 18)
    for users, told in (({"a": {credential.mechanism: credential}}, 0), ({}, 1)):
        write_users(file, users)
        with capture_logs() as lines:
            await reloads.reload()
        assert [each["event"] for each in lines].count("user list is empty") == told
        assert (files.lacks_users is None) is (told == 0)


def test_credentials_are_those_of_the_standard() -> None:
    # RFC 7677, section 3.
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    made = make_credential("SCRAM-SHA-256", "pencil", 4_096, salt)
    salted = hashlib.pbkdf2_hmac("sha256", b"pencil", salt, 4_096)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    assert made.stored_key == hashlib.sha256(client_key).digest()
    assert parse_credential(str(made)) == made
    assert "W22Z" not in repr(made)


@pytest.mark.parametrize("password", ["", "\x07", "x" * 1_025, "\ud800"])
def test_password_that_sasl_forbids_is_refused(password: str) -> None:
    assert make_credential("SCRAM-SHA-256", "x" * 1_024, 4_096, bytes(18))
    with pytest.raises(ValueError, match="1 to 1024 bytes" if len(password) > 1 else "password"):
        make_credential("SCRAM-SHA-256", password, 4_096, bytes(18))


def test_stand_in_salts_agree_and_outlast_changes() -> None:
    """Each worker had its own salt for an unknown user, and a restart changed it."""
    one, other = client.users(), client.users()
    stand_in = one.stand_in("nobody", "SCRAM-SHA-256")
    assert other.stand_in("nobody", "SCRAM-SHA-256") == stand_in
    assert one.stand_in("somebody", "SCRAM-SHA-256").salt != stand_in.salt
    # The salts of unknown users depend on one credential only; the others may change.
    source = min((each.server_key, name) for name, has in one.by_name.items() for each in has.values())[1]
    assert client.users(source).stand_in("nobody", "SCRAM-SHA-256") == stand_in


@pytest.mark.parametrize(
    "shapes",
    [
        [("SCRAM-SHA-512", 8_192)],
        [("SCRAM-SHA-256", 8_192), ("SCRAM-SHA-512", 8_192)],
        [("SCRAM-SHA-512", 4_096), ("SCRAM-SHA-512", 20_000)],
    ],
)
def test_password_check_costs_the_same_always(shapes: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        f"user-{number}": {mechanism: make_credential(mechanism, "secret", iterations, bytes(18))}
        for number, (mechanism, iterations) in enumerate(shapes)
    }
    users, work, compute = Users(known), Counter[str](), hashlib.pbkdf2_hmac

    def count(name: str, password: bytes, salt: bytes, iterations: int, *more: Any) -> bytes:
        work[name] += iterations
        return compute(name, password, salt, iterations, *more)

    monkeypatch.setattr(hashlib, "pbkdf2_hmac", count)

    def cost(name: str, password: str) -> Counter[str]:
        work.clear()
        assert users.check(name, password) == (name in known and password == "secret")
        return Counter(work)

    usual = cost("nobody", "wrong")
    assert sum(usual.values()) >= max(iterations for _, iterations in shapes)
    for name in known:
        assert cost(name, "wrong") == cost(name, "secret") == usual
    # Names that SASL forbids need no computation.
    assert [cost(name, "\x00") for name in (*known, "nobody")] == [Counter()] * (len(known) + 1)


async def test_files_are_read_again_and_survive_bad_ones(tmp_path: Path) -> None:
    users_file = client.users_file(tmp_path, "alice")
    config = tmp_path / "kproxy.toml"
    config.write_text('[[acls]]\nprincipal = "User:alice"\noperations = ["read"]\ntopics = ["a"]\n')
    config_text = config.read_text()
    sasl = SaslOptions(mechanisms=Texts([PLAIN]), users=users_file, without_tls=True)
    access = AccessOptions(file=config)
    reloads, counters = Reloads(), Counter[str]()
    files = SecurityFiles(sasl, access, QuotaOptions(config, share=0.5), reloads, counters=counters)

    def names() -> set[str]:
        assert files.users is not None
        return set(files.users.by_name)

    def may_read(topic: str) -> bool:
        return files.rules.of(Principal("alice")).allows(Operation.READ, Resource.TOPIC, topic)

    assert (names(), may_read("a"), may_read("b")) == ({"alice"}, True, False)
    client.users_file(tmp_path, "alice", "bob")
    config.write_text(config_text.replace('"a"]', '"b"]') + "[[quotas]]\nrequests_per_s = 100\n")
    await reloads.reload()
    assert (names(), may_read("a"), may_read("b")) == ({"alice", "bob"}, False, True)
    assert files.quotas.limits(Principal("alice"))
    users_file.write_text("[users]\na = ['SECRET']")
    config.write_text("[[acls]]\n")
    with capture_logs() as logs:
        await reloads.reload()
    failed = [(each["event"], each["what"]) for each in logs if each["log_level"] == "error"]
    assert failed == [("reload failed", "users"), ("reload failed", "acls")]
    assert "SECRET" not in str(logs)
    assert (names(), may_read("b"), counters["tls.reloads.failed"]) == ({"alice", "bob"}, True, 2)
    # The rules and quotas are gone with their section of the file; only users must be valid.
    config.write_text("")
    await reloads.reload()
    assert (may_read("b"), files.quotas.limits(Principal("alice"))) == (False, False)


# Tokens


@pytest.mark.parametrize("exp", [10**18, 10**400], ids=["milliseconds and more", "beyond any number"])
def test_non_time_token_expiry_means_latest(tmp_path: Path, exp: int) -> None:
    """An answer had no room for the number: the client was refused with a traceback in the log."""
    assert client.verifier(tmp_path).verify(client.token(exp=exp)).expires_at == LATEST_S


def test_sound_token_is_verified(tmp_path: Path) -> None:
    verified = client.verifier(tmp_path).verify(client.token())
    assert verified.principal.name == "alice"
    assert time.time() < verified.expires_at < time.time() + 61


def test_key_is_chosen_by_its_id(tmp_path: Path) -> None:
    verifier = client.verifier(tmp_path, 0, 1)
    assert verifier.verify(client.token(1)).principal.name == "alice"
    with pytest.raises(InvalidToken):
        verifier.verify(client.token(1, headers={"kid": "key-0"}))
    with pytest.raises(InvalidToken, match="no key of the set"):
        verifier.verify(client.token(2))


def test_tokens_are_checked_as_configured(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(client.jwks(0))
    checks: dict[str, Any] = {"audience": Texts(["a", "b"]), "principal_claim": "name", "groups_claim": "teams"}
    oauth = OauthOptions(jwks=str(keys), issuer=client.ISSUER, **checks)
    sasl = SaslOptions(mechanisms=Texts(["OAUTHBEARER"]), oauth=oauth)
    tokens = SecurityFiles(sasl, None, None, Reloads(), counters=Counter()).tokens
    assert tokens is not None
    verified = tokens.verify(client.token(aud="b", name="carol", teams=["x"]))
    assert verified.principal == Principal("carol", frozenset({"x"}))
    for wrong in ({"aud": "c"}, {"iss": "https://other.test/"}):
        with pytest.raises(InvalidToken):
            tokens.verify(client.token(**{"aud": "a", "name": "carol", **wrong}))


def _unsigned(**header: Any) -> str:
    def part(content: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()

    claims = {"iss": client.ISSUER, "aud": client.AUDIENCE, "sub": "alice", "exp": time.time() + 60}
    return f"{part(header)}.{part(claims)}."


def _signed_by_the_public_key() -> str:
    """A known confusion: HMAC with the public key as its secret."""
    from cryptography.hazmat.primitives import serialization

    pem = (
        client.signing_key(0)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    head = _unsigned(alg="HS256", kid="key-0").rstrip(".")
    signature = hmac.digest(pem, head.encode(), "sha256")
    return f"{head}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def _signed_with(algorithm: str) -> str:
    """Signed by the right key, whose entry in the set is for RS256."""
    claims = {"iss": client.ISSUER, "aud": client.AUDIENCE, "sub": "alice", "exp": time.time() + 60}
    return jwt.encode(claims, client.signing_key(0), algorithm, headers={"kid": "key-0"})


def _with_a_key_of_its_own() -> str:
    own = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(client.signing_key(3).public_key()))
    headers = {"kid": "key-0", "jwk": own, "jku": "https://evil.test/", "x5u": "file:///etc/passwd"}
    return client.token(3, headers=headers)


@pytest.mark.parametrize(
    "make",
    [
        lambda: client.token(iss="https://other.test/"),
        lambda: client.token(iss=client.ISSUER[:-1]),
        lambda: client.token(iss=f"{client.ISSUER}x"),
        lambda: client.token(headers={"crit": ["other"], "other": True}),
        lambda: _signed_with("PS256"),
        lambda: _signed_with("RS512"),
        lambda: client.token(aud="other"),
        lambda: client.token(aud=None),
        lambda: client.token(iss=None),
        lambda: client.token(sub=None),
        lambda: client.token(sub=""),
        lambda: client.token(sub="a\nb"),
        lambda: client.token(exp=None),
        lambda: client.token(lifetime_s=-60),
        lambda: client.token(nbf=time.time() + 600),
        lambda: client.token(2, headers={"kid": "key-0"}),
        lambda: client.token()[:-4] + "AAAA",
        lambda: _unsigned(alg="none", kid="key-0"),
        lambda: _unsigned(alg="RS256", kid="key-0"),
        _signed_by_the_public_key,
        _with_a_key_of_its_own,
        lambda: "",
        lambda: "a.b.c",
        lambda: "..",
        lambda: "x" * 10_000,
    ],
)
def test_any_other_token_is_refused(tmp_path: Path, make: Any) -> None:
    token = make()
    with pytest.raises(InvalidToken) as raised:
        client.verifier(tmp_path).verify(token)
    assert not token or token not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"keys": []}',
        '{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}',
        '{"keys": [{"kty": "RSA", "n": "!", "e": "AQAB"}]}',
        '{"keys": [3]}',
        "[" * 100_000,
    ],
)
def test_set_without_public_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(text)
    with pytest.raises(StartupError, match="jwks"):
        read_verifier(file, TokenOptions(client.ISSUER, (client.AUDIENCE,)))


# Names of certificates

SUBJECT = (
    (("countryName", "DE"),),
    (("organizationName", "Example, Inc."),),
    (("organizationalUnitName", "writers"),),
    (("commonName", "app-1.example.org"),),
)


def test_subject_is_written_as_in_rfc_2253() -> None:
    assert distinguished_name(SUBJECT) == "CN=app-1.example.org,OU=writers,O=Example\\, Inc.,C=DE"
    assert distinguished_name(((("commonName", " #a "),),)) == "CN=\\ #a\\ "


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (["DEFAULT"], "CN=app-1.example.org,OU=writers,O=Example\\, Inc.,C=DE"),
        (["RULE:^CN=([^,]+),.*$/$1/"], "app-1.example.org"),
        (["RULE:^CN=([^.]+)\\..*,OU=([^,]+),.*$/$2-$1/U"], "WRITERS-APP-1"),
        (["RULE:^CN=([^.]+)\\..*$/$1/L", "DEFAULT"], "app-1"),
        (["RULE:^CN=nobody$/x/"], None),
        (["RULE:^CN=nobody$/x/", "RULE:.*C=DE/german/"], "german"),
        # As in Kafka, a rule must match the whole name.
        (["RULE:CN=app/x/"], None),
        (["RULE:.*//"], None),
    ],
)
def test_mapping_rules_turn_subject_into_name(rules: list[str], name: str | None) -> None:
    assert map_name(distinguished_name(SUBJECT), parse_rules(rules)) == name


def test_one_text_may_have_several_rules() -> None:
    kafka = "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/, RULE:^CN=a\\/{1,2}b,.*$/x,y\\/z/L,DEFAULT"
    patterns = [rule.pattern.pattern if rule.pattern is not None else "" for rule in parse_rules(kafka)]
    assert patterns == ["^CN=(.*?),OU=ServiceUsers.*$", "^CN=a/{1,2}b,.*$", ""]
    assert [rule.replacement for rule in parse_rules(kafka)] == ["$1", "x,y/z", ""]
    assert parse_rules(kafka) == parse_rules(["RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/", kafka.split("/, ")[1]])


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "default",
        "DEFAULT,",
        ",DEFAULT",
        "DEFAULTDEFAULT",
        "RULE:",
        "RULE:a/b",
        "RULE:(/x/",
        "RULE:a/$1/",
        "RULE:a/b/X",
    ],
)
def test_invalid_rule_is_refused(rule: str) -> None:
    with pytest.raises(ValueError, match=r"rule|pattern|group"):
        parse_rules([rule])


def test_certificate_has_groups() -> None:
    principal = principal_of({"subject": SUBJECT}, PrincipalMapping(parse_rules(["RULE:^CN=([^,]+),.*$/$1/"])))
    assert (str(principal), principal.groups) == ("User:app-1.example.org", frozenset({"writers"}))
    with pytest.raises(NoPrincipal):
        principal_of({}, PrincipalMapping())
