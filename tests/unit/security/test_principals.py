"""Principals of client certificates: a name that differs from another's is not made into it."""

from __future__ import annotations

import pytest

from kproxy.config.principal_rules import parse_rules
from kproxy.security.principals import MOST_SUBJECT_CHARACTERS, Principal, distinguished_name, principal_of

RULES = {case: parse_rules(f"RULE:^CN=((?:\\\\.|[^,])*).*$/$1/{case}") for case in ("", "L", "U")}


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
def test_a_similar_name_is_another_principal(name: str, case: str) -> None:
    admin = principal_of(certificate("admin"), RULES[case])
    assert admin is not None
    assert admin.name == ("ADMIN" if case == "U" else "admin")
    principal = principal_of(certificate(name), RULES[case])
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
        # Others change as in every language.
        ("\u00c4RGER", "L", "\u00e4rger"),
        ("\u03b1\u03b2", "U", "\u0391\u0392"),
    ],
)
def test_case_mapping_makes_no_new_ascii_letter(name: str, case: str, principal: str) -> None:
    assert principal_of(certificate(name), RULES[case]) == Principal(principal)


@pytest.mark.parametrize(
    "rule",
    [
        "RULE:^CN=([^,]+),OU=apps.*$/$1/",
        "RULE:^CN=(.*?),OU=apps.*$/$1/",
        "RULE:^CN=([^,]+),OU=apps(,.*)?$/$1/",
        "RULE:^CN=([^,]+),OU=([^,]+).*$/$2-$1/",
        "RULE:^CN=[^,]+,OU=([^,]+),.*$/$1/",
        r"RULE:^CN=([^,\\]+).*$/$1/",
    ],
)
def test_certificate_value_contains_no_other_name_part(rule: str) -> None:
    """A comma in a value is escaped, and no pattern takes it for the comma between two parts."""
    rules = parse_rules(rule)
    honest = principal_of(named("admin", "apps"), rules)
    assert honest is not None
    for common_name in ("admin,OU=apps", "admin,OU=apps,", "admin\\,OU=apps", "x,OU=apps,OU=y", 'admin"', "admin;x"):
        forged = principal_of(named(common_name, "guests"), rules)
        assert forged is None or ("apps" not in forged.name.split("-") and forged.name != honest.name), forged
        assert forged is None or forged.name != "admin\\"


def named(common_name: str, unit: str) -> dict[str, object]:
    parts = {"organizationName": "Ex", "organizationalUnitName": unit, "commonName": common_name}
    return {"subject": tuple((part,) for part in parts.items())}


def test_escaped_character_may_match_a_pattern() -> None:
    """Names in directories are often like this one, and are written out as in the whole name."""
    for rule in ("RULE:^CN=(.*?),OU=apps.*$/$1/L", "RULE:^CN=([^,]+),OU=apps.*$/$1/L"):
        assert principal_of(named("Doe, John #1", "apps"), parse_rules(rule)) == Principal(
            "doe\\, john #1", frozenset({"apps"})
        )
    rules = parse_rules(["RULE:^CN=(.*),O=Ex$/$1/", "DEFAULT"])
    # What stands for the escaped characters meanwhile is no character of a name.
    assert principal_of({"subject": ((("commonName", "a\ufdd0"),),)}, rules) == Principal("CN=a\ufdd0")
    assert principal_of({"subject": ((("commonName", "a\ufdd0"),),)}, parse_rules("RULE:^CN=(.*)$/$1/")) is None


def test_comma_in_a_name_does_not_end_it() -> None:
    assert distinguished_name((((("commonName", "a,O=b")),),)) == "CN=a\\,O=b"


def test_oversized_subject_has_no_principal() -> None:
    rules = parse_rules("RULE:^CN=([^,]*),.*$/$1/")
    assert principal_of(certificate("x" * 3_000, "app"), rules) == Principal("app")
    assert principal_of(certificate("x" * MOST_SUBJECT_CHARACTERS, "app"), rules) is None
