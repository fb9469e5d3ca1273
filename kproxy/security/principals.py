"""Principals: the names of authenticated clients, and how client certificates become names.

A principal is written `User:NAME`, as in Kafka. Its groups come from a token's claim or a certificate's attribute.

A certificate's name is its subject as RFC 2253 writes it (`CN=app,OU=team,O=org`). Rules turn it into a principal's
name, as Kafka's `ssl.principal.mapping.rules` do: the first one that matches counts. A rule is `DEFAULT`, which takes
the whole name, or `RULE:PATTERN/REPLACEMENT/`, with `L` or `U` behind it for lower or upper case. PATTERN is a regular
expression for the whole name, and `$1` in REPLACEMENT is its first group. A `/` in them is written `\\/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

USER: Final = "User:"
GROUP: Final = "Group:"
MOST_RULES: Final = 100
# A subject is at most as long as the certificate that a TLS handshake admits; names in logs and rules are not.
MOST_NAME_CHARACTERS: Final = 1_000


class Principal(NamedTuple):
    """The name of a client, and the groups that it belongs to."""

    name: str
    groups: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return USER + self.name


ANONYMOUS: Final = Principal("ANONYMOUS")
"""A client that nothing was asked of, as in Kafka."""


class MappingRule(NamedTuple):
    """One rule; without a pattern it is DEFAULT. `case` is `L`, `U` or empty."""

    pattern: re.Pattern[str] | None = None
    replacement: str = ""
    case: str = ""


DEFAULT_RULES: Final = (MappingRule(),)
_RULE: Final = re.compile(r"RULE:((?:\\.|[^\\/])+)/((?:\\.|[^\\/])*)/([LU]?)", re.DOTALL)
_GROUP_IN_REPLACEMENT: Final = re.compile(r"\$(\d)")


def parse_rules(texts: Iterable[str]) -> tuple[MappingRule, ...]:
    """Parse mapping rules, in order. Raises ValueError with a sentence's predicate for one that is no rule."""
    rules = []
    for text in texts:
        if text == "DEFAULT":
            rules.append(MappingRule())
            continue
        match = _RULE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:200]!r} is no rule: write DEFAULT or RULE:PATTERN/REPLACEMENT/")
        pattern, replacement, case = match[1].replace("\\/", "/"), match[2].replace("\\/", "/"), match[3]
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{text[:200]!r} has no valid pattern ({error})") from error
        highest = max((int(number) for number in _GROUP_IN_REPLACEMENT.findall(replacement)), default=0)
        if highest > compiled.groups:
            raise ValueError(f"{text[:200]!r} names the group ${highest}, and its pattern has {compiled.groups}")
        rules.append(MappingRule(compiled, replacement, case))
    if not 0 < len(rules) <= MOST_RULES:
        raise ValueError(f"there are {len(rules)} rules; between 1 and {MOST_RULES} are taken")
    return tuple(rules)


def map_name(distinguished_name: str, rules: Sequence[MappingRule]) -> str | None:
    """The principal's name for a certificate's; None where no rule matches or nothing is left of it."""
    for rule in rules:
        if rule.pattern is None:
            return distinguished_name or None
        match = rule.pattern.fullmatch(distinguished_name)
        if match is None:
            continue
        name = _filled(rule.replacement, match)
        name = name.lower() if rule.case == "L" else name.upper() if rule.case == "U" else name
        return name.strip() or None
    return None


def _filled(replacement: str, match: re.Match[str]) -> str:
    return _GROUP_IN_REPLACEMENT.sub(lambda found: match[int(found[1])] or "", replacement)


_SHORT: Final = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "STREET",
    "userId": "UID",
}
_SPECIAL: Final = re.compile(r'([,+"\\<>;])')


def distinguished_name(subject: Sequence[Sequence[tuple[str, str]]]) -> str:
    """A subject, as `ssl.SSLSocket.getpeercert` returns it, in the form of RFC 2253: the last part comes first."""
    parts = ["+".join(f"{_SHORT.get(key, key)}={_escaped(value)}" for key, value in part) for part in subject]
    return ",".join(reversed(parts))


def _escaped(value: str) -> str:
    value = _SPECIAL.sub(r"\\\1", value).replace("\x00", "\\00")
    if value.startswith(("#", " ")):
        value = "\\" + value
    return value[:-1] + "\\ " if value.endswith(" ") and not value.endswith("\\ ") else value


def principal_of(
    certificate: Any, rules: Sequence[MappingRule], group_attribute: str = "organizationalUnitName"
) -> Principal | None:
    """The principal of a verified certificate, as `getpeercert` returns it; None where no rule matches.

    Its groups are the values of `group_attribute` in the subject.
    """
    subject = certificate.get("subject", ()) if certificate else ()
    name = map_name(distinguished_name(subject), rules)
    if name is None or len(name) > MOST_NAME_CHARACTERS:
        return None
    return Principal(name, frozenset(value for part in subject for key, value in part if key == group_attribute))
