"""Principals of client certificates: different names do not become the same principal."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvloop

from kproxy.config.access import AclSection
from kproxy.config.principal_rules import MappingRule, PrincipalMapping, parse_rules
from kproxy.security.acls import Rules, acls_of
from kproxy.security.principals import (
    MOST_NAME_CHARACTERS,
    MOST_NAMES,
    MOST_NAMES_CHARACTERS,
    NoPrincipal,
    Principal,
    distinguished_name,
    principal_of,
)
from tests.support.security.tls_files import Signer, client_context
from tests.support.waiting import PATIENCE_S

RULES = {case: parse_rules(f"RULE:^CN=((?:\\\\.|[^,])*).*$/$1/{case}") for case in ("", "L", "U")}


def named_by(
    fields: Mapping[str, Any], rules: Sequence[MappingRule], kinds: Sequence[str] = ("subject",)
) -> Principal | None:
    """The principal of a certificate; None if it has none."""
    try:
        return principal_of(fields, PrincipalMapping(tuple(rules), tuple(kinds)))
    except NoPrincipal:
        return None


def certificate(*names: str) -> dict[str, object]:
    """The fields of a certificate with these common names, the last one first in its distinguished name."""
    return {"subject": tuple((("commonName", name),) for name in names)}


@pytest.mark.parametrize(
    "name",
    [
        "admin\x00",
        "admin\x00.example.org",
        "admin\n",
        "admin\t",
        "admin\x1f",
        "admin\x85",
        "admin\u00a0",
        "admin\u2003",
        "admin\u3000",
        "adm\u0131n",
        "\uff41dmin",
        "admin,CN=x",
        "admin+CN=x",
        " admin",
        "admin\\",
    ],
)
@pytest.mark.parametrize("case", RULES)
def test_similar_name_is_another_principal(name: str, case: str) -> None:
    admin = named_by(certificate("admin"), RULES[case])
    assert admin is not None
    assert admin.name == ("ADMIN" if case == "U" else "admin")
    principal = named_by(certificate(name), RULES[case])
    assert principal is None or principal.name != admin.name


@pytest.mark.parametrize(
    ("name", "case", "principal"),
    [
        # The sign of kelvin, and letters whose upper case is an ASCII letter, keep their form.
        ("\u212aate", "L", "\u212aate"),
        ("\u0130", "L", "\u0130"),
        ("adm\u0131n", "U", "ADM\u0131N"),
        ("a\u017fk", "U", "A\u017fK"),
        ("stra\u00dfe", "U", "STRA\u00dfE"),
        # Other letters change as in every language.
        ("\u00c4RGER", "L", "\u00e4rger"),
        ("\u03b1\u03b2", "U", "\u0391\u0392"),
    ],
)
def test_case_mapping_makes_no_new_ascii_letter(name: str, case: str, principal: str) -> None:
    assert named_by(certificate(name), RULES[case]) == Principal(principal)


@pytest.mark.parametrize(
    "rule",
    [
        "RULE:^CN=([^,]+),OU=apps.*$/$1/",
        "RULE:^CN=(.*?),OU=apps.*$/$1/",
        "RULE:^CN=([^,]+),OU=apps(,.*)?$/$1/",
        "RULE:^CN=([^,]+),OU=([^,]+).*$/$2-$1/",
        "RULE:^CN=[^,]+,OU=([^,]+),.*$/$1/",
        "RULE:^CN=([^,+]+),OU=apps.*$/$1/",
        r"RULE:^CN=([^,\\]+).*$/$1/",
    ],
)
def test_certificate_value_contains_no_other_name_part(rule: str) -> None:
    """Commas in values are escaped, and no pattern takes one for the comma between two parts."""
    rules = parse_rules(rule)
    honest = named_by(named("admin", "apps"), rules)
    assert honest is not None
    for common_name in (
        "admin,OU=apps",
        "admin,OU=apps,",
        "admin\\,OU=apps",
        "x,OU=apps,OU=y",
        'admin"',
        "admin;x",
        "admin+CN=x",
    ):
        forged = named_by(named(common_name, "guests"), rules)
        assert forged is None or ("apps" not in forged.name.split("-") and forged.name != honest.name), forged
        assert forged is None or forged.name != "admin\\"


def named(common_name: str, unit: str) -> dict[str, object]:
    parts = {"organizationName": "Ex", "organizationalUnitName": unit, "commonName": common_name}
    return {"subject": tuple((part,) for part in parts.items())}


def test_escaped_character_may_match_a_pattern() -> None:
    """Directories often have such names, which are written as in the whole name."""
    for rule in ("RULE:^CN=(.*?),OU=apps.*$/$1/L", "RULE:^CN=([^,]+),OU=apps.*$/$1/L"):
        assert named_by(named("Doe, John #1", "apps"), parse_rules(rule)) == Principal(
            "doe\\, john #1", frozenset({"apps"})
        )
    rules = parse_rules(["RULE:^CN=(.*),O=Ex$/$1/", "DEFAULT"])
    # The placeholder for escaped characters is not valid in a name.
    assert named_by({"subject": ((("commonName", "a\ufdd0"),),)}, rules) == Principal("CN=a\ufdd0")
    assert named_by({"subject": ((("commonName", "a\ufdd0"),),)}, parse_rules("RULE:^CN=(.*)$/$1/")) is None


def test_parts_of_a_name_have_their_short_forms() -> None:
    short = {
        "commonName": "CN",
        "countryName": "C",
        "domainComponent": "DC",
        "localityName": "L",
        "organizationName": "O",
        "organizationalUnitName": "OU",
        "stateOrProvinceName": "ST",
        "streetAddress": "STREET",
        "userId": "UID",
        "serialNumber": "serialNumber",
    }
    assert [distinguished_name((((name, "x"),),)) for name in short] == [f"{each}=x" for each in short.values()]


def test_oversized_subject_has_no_principal() -> None:
    rules = parse_rules("RULE:^CN=([^,]*),.*$/$1/")
    assert named_by(certificate("x" * 3_000, "app"), rules) == Principal("app")
    assert named_by(certificate("x" * MOST_NAMES_CHARACTERS, "app"), rules) is None


URI = "spiffe://example.org/ns/apps/sa/"
RULE_OF_URI = r"RULE:^spiffe:\/\/example\.org\/ns\/apps\/sa\/([^\/]+)$/$1/L"
RULE_OF_HOST = r"RULE:^([^.]+)\.example\.org$/$1/L"
DEFAULT = "DEFAULT"


def alternatives(*names: tuple[str, str]) -> dict[str, object]:
    """The fields of a certificate with these alternative names, and names of other kinds that never count."""
    others = (("email", "admin"), ("DirName", ((("commonName", "admin"),),)), ("IP Address", "10.0.0.1"))
    return {**named("admin", "admins"), "subjectAltName": (*others, *names)}


def uris(*names: str) -> dict[str, object]:
    return alternatives(*(("URI", name) for name in names))


def hosts(*names: str) -> dict[str, object]:
    return alternatives(*(("DNS", name) for name in names))


@pytest.mark.parametrize(
    ("kinds", "principal"),
    [
        (("subject",), "CN=admin,OU=admins,O=Ex"),
        (("uri",), URI + "app"),
        (("uri", "dns", "subject"), URI + "app"),
        (("subject", "uri"), "CN=admin,OU=admins,O=Ex"),
        # Two names of this kind.
        (("dns",), None),
        (("dns", "uri"), None),
    ],
)
def test_first_kind_with_names_counts(kinds: Sequence[str], principal: str | None) -> None:
    fields = alternatives(("DNS", "a.example.org"), ("URI", URI + "app"), ("DNS", "b.example.org"))
    found = named_by(fields, parse_rules(DEFAULT), kinds)
    assert (found and found.name) == principal


def test_kind_without_names_is_skipped() -> None:
    kinds = ("uri", "dns", "subject")
    assert named_by(hosts("a.example.org"), parse_rules(DEFAULT), kinds) == Principal("a.example.org")
    by_subject = Principal("CN=admin,OU=admins,O=Ex", frozenset({"admins"}))
    assert named_by(alternatives(), parse_rules(DEFAULT), kinds) == by_subject
    nameless = {"subject": (), "subjectAltName": (("URI", URI + "app"),)}
    assert named_by(nameless, parse_rules(DEFAULT), ("subject", "uri")) == Principal(URI + "app")
    # No rule for the first kind: later kinds are not tried.
    assert named_by(uris("https://example.org"), parse_rules([RULE_OF_URI, "RULE:^CN=.*$/x/"]), kinds) is None


@pytest.mark.parametrize(
    ("fields", "rules", "kind", "reason"),
    [
        (hosts("a.example.org", "b.example.org"), [DEFAULT], "dns", "give several principals"),
        (hosts("a.example.org", "b.example.org"), [RULE_OF_HOST, DEFAULT], "dns", "give several principals"),
        (hosts("a.example.org", "A.example.org"), [DEFAULT], "dns", "give several principals"),
        (hosts("a.example.org", "x.other.org"), [RULE_OF_HOST, DEFAULT], "dns", "give several principals"),
        (hosts("a.other.org"), [RULE_OF_HOST], "dns", "matches no rule"),
        (uris(), [DEFAULT], "uri", "has no uri name"),
        (hosts("*.example.org"), [RULE_OF_HOST], "dns", "gives no valid principal"),
        (hosts("a.example.org", "*.example.org"), [RULE_OF_HOST], "dns", "give several principals"),
        (uris(URI + "x" * MOST_NAME_CHARACTERS), [DEFAULT], "uri", "gives no valid principal"),
        (uris(URI + "x" * MOST_NAMES_CHARACTERS), [RULE_OF_URI], "uri", "too many names"),
        (hosts(*["a.example.org"] * (MOST_NAMES + 1)), [DEFAULT], "dns", "too many names"),
        (hosts(*["a" * 1_000 + str(n) for n in range(4)]), ["RULE:a.*/a/"], "dns", "too many names"),
    ],
)
def test_ambiguous_names_give_no_principal(fields: Mapping[str, Any], rules: list[str], kind: str, reason: str) -> None:
    with pytest.raises(NoPrincipal, match=reason):
        principal_of(fields, PrincipalMapping(parse_rules(rules), (kind,)))


def test_names_that_agree_give_one_principal() -> None:
    twice = ("A.example.org", "a.example.org", "a.example.org", "a.other.org")
    assert named_by(hosts(*twice), parse_rules(RULE_OF_HOST), ("dns",)) == Principal("a")
    both = (URI + "App", "https://example.org/app", URI + "APP")
    assert named_by(uris(*both), parse_rules(RULE_OF_URI), ("uri",)) == Principal("app")
    assert named_by(hosts(*["a.org"] * MOST_NAMES), parse_rules(DEFAULT), ("dns",)) == Principal("a.org")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            ("URI", URI + f"app{mark}")
            for mark in ("\x00", "\x00x", "\n", "\nDNS:app", " ", "\u00a0", "\u0131", "\ufdd0")
        ),
        *(("DNS", f"app{mark}.example.org") for mark in ("\x00", "\n", " ", "\u0131", ",", "=", "\\", "/", ":")),
        ("URI", ""),
        ("DNS", ""),
        # Without a scheme it looks like a name of another kind.
        ("URI", "CN=admin,OU=admins,O=Ex"),
        ("URI", "CN=admin:x"),
        ("URI", "app.example.org"),
        ("URI", "//example.org/app"),
    ],
)
def test_malformed_name_gives_no_principal(kind: str, name: str) -> None:
    """Nor do valid names beside it, of this kind or a later one."""
    fields = alternatives((kind, name), (kind, URI + "app" if kind == "URI" else "app.example.org"))
    kinds = (kind.lower(), "subject")
    for rules in (DEFAULT, "RULE:.*/app/", "RULE:(.*)/$1/L"):
        with pytest.raises(NoPrincipal, match="malformed"):
            principal_of(fields, PrincipalMapping(parse_rules(rules), kinds))


def test_backslash_in_uri_is_literal() -> None:
    name = URI + r"a\,OU=apps"
    assert named_by(uris(name), parse_rules(DEFAULT), ("uri",)) == Principal(name)
    assert named_by(uris(name), parse_rules(r"RULE:.*\/(.)\\,OU=(.*)/$1-$2/"), ("uri",)) == Principal("a-apps")
    assert named_by(uris(name), parse_rules("RULE:.*sa\\/([^,]+),.*/$1/"), ("uri",)) == Principal("a\\")


def test_only_subjects_have_groups() -> None:
    """An authority may check alternative names only, and copy the subject from the request."""
    for kinds, groups in (("subject", {"admins"}), ("uri", set())):
        found = named_by(uris(URI + "app"), parse_rules(DEFAULT), (kinds,))
        assert found is not None
        assert found.groups == groups


@pytest.mark.parametrize("name", ["*", "\\*", " *", "* "])
def test_client_without_certificate_is_anonymous(name: str) -> None:
    for rule in (*RULES.values(), parse_rules("RULE:^CN=(.*)$/$1/"), parse_rules("RULE:.*/*/")):
        found = named_by(certificate(name), rule)
        assert found is None or found.name != "*"


def test_principal_asterisk_may_do_what_everybody_may() -> None:
    """Users and tokens may have this name."""
    given = [AclSection(principal=f"User:{name}", operations=["write"], topics=[name]) for name in ("*", "a")]
    rules = Rules(acls_of(given))
    assert rules.of(Principal("*")).subjects == rules.of(Principal("stranger")).subjects


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_event_loops_show_the_same_names(run: Callable[[Coroutine[Any, Any, Any]], Any], tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    names = [("URI", "spiffe://a/b\\,\x00c"), ("DNS", "*.a"), ("URI", "\u00e4:\n"), ("DNS", ""), ("DNS", "*.a")]
    pair = signer.issue_named("client", *((kind, name.encode()) for kind, name in names), common_name="app")

    async def shown() -> Mapping[str, Any]:
        found = asyncio.get_running_loop().create_future()

        async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("peercert"))
            writer.close()

        async with await asyncio.start_server(take, "127.0.0.1", 0, ssl=server) as listener:
            port = listener.sockets[0].getsockname()[1]
            context = client_context(signer.ca, pair, check_name=False)
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            fields: Mapping[str, Any] = await asyncio.wait_for(found, PATIENCE_S)
            writer.close()
            return fields

    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*signer.issue("server", "localhost"))
    server.load_verify_locations(signer.ca)
    server.verify_mode = ssl.CERT_REQUIRED
    fields = run(shown())
    assert fields["subjectAltName"] == tuple(names)
    assert named_by(fields, parse_rules(DEFAULT)) == Principal("CN=app")


def test_order_and_repetition_of_names_do_not_matter() -> None:
    seed = secrets.randbelow(1 << 32)
    random = Random(seed)
    pool = [("URI", URI + each) for each in "aAb"] + [("DNS", f"{each}.example.org") for each in "aAb*"]
    rules = parse_rules([RULE_OF_URI, RULE_OF_HOST])
    for _ in range(300):
        names = random.sample(pool, random.randint(0, 4))
        kinds = random.sample(["uri", "dns"], random.randint(1, 2))
        counted = next((each for each in kinds if each.upper() in dict(names)), None)
        mapped = {name.rpartition("/")[2].partition(".")[0].lower() for kind, name in names if kind.lower() == counted}
        expected = Principal(mapped.pop()) if len(mapped) == 1 and mapped != {"*"} else None
        shuffled = random.choices(names, k=3) + random.sample(names, len(names)) if names else []
        assert named_by(alternatives(*shuffled), rules, kinds) == expected, f"{names} {kinds}; seed {seed}"
