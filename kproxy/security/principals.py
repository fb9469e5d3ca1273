"""Principals: the names of authenticated clients, and how client certificates become names.

A principal is written `User:NAME`, as in Kafka. Its groups come from a token's claim or a certificate's attribute.

A certificate's name becomes a principal's by rules (kproxy.config.principal_rules). A character that is escaped in it
(`\\,`) is one character for their patterns, which `.` and `[^,]` match and `,` does not: who chooses a value must not
write other parts of the name into it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kproxy.config.principal_rules import GROUP_IN_REPLACEMENT, MappingRule

USER: Final = "User:"
GROUP: Final = "Group:"
# A subject is at most as long as the certificate that a TLS handshake admits; names in logs and rules are not.
MOST_NAME_CHARACTERS: Final = 1_000
# Patterns of rules may take a time that grows faster than the subject, on the event loop.
MOST_SUBJECT_CHARACTERS: Final = 4_000


class Principal(NamedTuple):
    """The name of a client, and the groups that it belongs to."""

    name: str
    groups: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return USER + self.name


ANONYMOUS: Final = Principal("ANONYMOUS")
"""A client that does not have to authenticate, as in Kafka."""


def map_name(distinguished_name: str, rules: Sequence[MappingRule]) -> str | None:
    """The principal's name for a certificate's; None where no rule matches or nothing is left of it."""
    veiled = _ESCAPE.sub(lambda escape: _STAND_INS.get(escape[0], escape[0]), distinguished_name)
    has_stand_in = any(each in distinguished_name for each in _ESCAPES)
    for rule in rules:
        if rule.pattern is None:
            return distinguished_name or None
        match = None if has_stand_in else rule.pattern.fullmatch(veiled)
        if match is None:
            continue
        name = _cased(_filled(rule.replacement, match), rule.case)
        # Only the space: a name that differs by another white space is another name.
        return "".join(_ESCAPES.get(each, each) for each in name).strip(" ") or None
    return None


def _cased(name: str, case: str) -> str:
    """Change the case, but no other letter into an ASCII one: `K` (U+212A) must not become `k`."""
    if not case:
        return name
    cased = (letter.lower() if case == "L" else letter.upper() for letter in name)
    return "".join(
        before if not before.isascii() and any(each.isascii() for each in after) else after
        for before, after in zip(name, cased, strict=True)
    )


def _filled(replacement: str, match: re.Match[str]) -> str:
    return GROUP_IN_REPLACEMENT.sub(lambda found: match[int(found[1])] or "", replacement)


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
# All that `_escaped` writes, and the characters that stand for it while patterns are matched: no text has these.
_ESCAPE: Final = re.compile(r"\\(?:00|.)", re.DOTALL)
_STAND_INS: Final = {"\\" + each: chr(0xFDD0 + number) for number, each in enumerate((*',+"\\<>;# ', "00"))}
_ESCAPES: Final = {stand_in: escape for escape, stand_in in _STAND_INS.items()}


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
    subject_name = distinguished_name(subject)
    if len(subject_name) > MOST_SUBJECT_CHARACTERS:
        return None
    name = map_name(subject_name, rules)
    if name is None or len(name) > MOST_NAME_CHARACTERS:
        return None
    return Principal(name, frozenset(value for part in subject for key, value in part if key == group_attribute))
