"""Define principals, the names of authenticated clients, and derive them from client certificates.

A principal is written `User:NAME`, as in Kafka. Its groups come from a token's claim or a certificate's attribute.

A certificate's names become a principal's by rules (kproxy.config.principal_rules). A character that is escaped in a
subject (`\\,`) is one character for their patterns, which `.` and `[^,]` match and `,` does not, so that a value cannot
imitate other parts of the name. A URI or DNS name has no escapes. All names of the kind that counts are mapped, in no
order, and the results must agree, so that a name added to a certificate cannot select among several principals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kproxy.config.principal_rules import GROUP_IN_REPLACEMENT, SUBJECT, MappingRule, PrincipalMapping

USER: Final = "User:"
GROUP: Final = "Group:"
EVERY_USER: Final = "User:*"
# Only the size of certificates in a TLS handshake bounds a certificate's names; names in logs and rules need a shorter
# bound.
MOST_NAME_CHARACTERS: Final = 1_000
# The time of a rule's pattern may grow much faster than the names; kproxy.proxy.admission limits it too. Both bounds
# are for the names of one kind together.
MOST_NAMES_CHARACTERS: Final = 4_000
MOST_NAMES: Final = 100
# These are strict: such names have visible ASCII characters alone, so that no URI looks like a subject.
_ALTERNATIVES: Final = {
    "uri": ("URI", re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]+")),
    "dns": ("DNS", re.compile(r"[A-Za-z0-9._*-]+")),
}


class Principal(NamedTuple):
    """The name of a client, and the groups that it belongs to."""

    name: str
    groups: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return USER + self.name


ANONYMOUS: Final = Principal("ANONYMOUS")
"""The principal of a client that need not authenticate, as in Kafka."""


class NoPrincipal(Exception):
    """A certificate has no principal; the message states the reason, without a part of the certificate."""


def map_name(of_certificate: str, rules: Sequence[MappingRule], *, has_escapes: bool = True) -> str | None:
    """Return the principal's name for a certificate's; None if no rule matches or the result is empty."""
    veiled = of_certificate
    if has_escapes:
        veiled = _ESCAPE.sub(lambda escape: _STAND_INS.get(escape[0], escape[0]), of_certificate)
    has_stand_in = any(each in of_certificate for each in _ESCAPES)
    for rule in rules:
        if rule.pattern is None:
            return of_certificate or None
        match = None if has_stand_in else rule.pattern.fullmatch(veiled)
        if match is None:
            continue
        name = _cased(_filled(rule.replacement, match), rule.case)
        # Only spaces are stripped: a name that differs by other white space is another name.
        return "".join(_ESCAPES.get(each, each) for each in name).strip(" ") or None
    return None


def _cased(name: str, case: str) -> str:
    """Change the case, but turn no other letter into an ASCII letter: `K` (U+212A) must not become `k`."""
    if not case:
        return name
    cased = (letter.lower() if case == "L" else letter.upper() for letter in name)
    return "".join(
        before if not before.isascii() and any(each.isascii() for each in after) else after
        for before, after in zip(name, cased, strict=True)
    )


def _filled(replacement: str, match: re.Match[str]) -> str:
    return GROUP_IN_REPLACEMENT.sub(lambda found: match[int(found[1])] or "", replacement)


_GROUP_ATTRIBUTE: Final = "organizationalUnitName"
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
# The escapes that `_escaped` writes, and the characters that replace them during matching, which no text has.
_ESCAPE: Final = re.compile(r"\\(?:00|.)", re.DOTALL)
_STAND_INS: Final = {"\\" + each: chr(0xFDD0 + number) for number, each in enumerate((*',+"\\<>;# ', "00"))}
_ESCAPES: Final = {stand_in: escape for escape, stand_in in _STAND_INS.items()}


def distinguished_name(subject: Sequence[Sequence[tuple[str, str]]]) -> str:
    """Return a subject of `ssl.SSLSocket.getpeercert` in the form of RFC 2253, with the last part first."""
    parts = ["+".join(f"{_SHORT.get(key, key)}={_escaped(value)}" for key, value in part) for part in subject]
    return ",".join(reversed(parts))


def _escaped(value: str) -> str:
    value = _SPECIAL.sub(r"\\\1", value).replace("\x00", "\\00")
    if value.startswith(("#", " ")):
        value = "\\" + value
    return value[:-1] + "\\ " if value.endswith(" ") and not value.endswith("\\ ") else value


def principal_of(certificate: Mapping[str, Any], mapping: PrincipalMapping) -> Principal:
    """The principal of a verified certificate, as `getpeercert` returns it. Raises NoPrincipal.

    Its groups are its organizational units in the subject, if its name is from there: an authority that vouches
    for alternative names may have copied the subject from a request.
    """
    kind, names = _counted(certificate, mapping.kinds)
    if len(names) > MOST_NAMES or sum(map(len, names)) > MOST_NAMES_CHARACTERS:
        raise NoPrincipal("its certificate has too many names, or too long ones")
    is_subject = kind == SUBJECT
    mapped = {map_name(name, mapping.rules, has_escapes=is_subject) for name in names} - {None}
    if len(mapped) > 1:
        raise NoPrincipal("its certificate's names give several principals")
    name = next(iter(mapped), None)
    if name is None:
        raise NoPrincipal("its certificate's name matches no rule")
    # `User:*` stands for every user.
    if len(name) > MOST_NAME_CHARACTERS or name == "*":
        raise NoPrincipal("its certificate's name gives no valid principal")
    attributes = (pair for part in certificate.get("subject", ()) for pair in part if is_subject)
    return Principal(name, frozenset(value for key, value in attributes if key == _GROUP_ATTRIBUTE))


def _counted(certificate: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return the first of these kinds of which there is a name, and all names of that kind. Raises NoPrincipal."""
    for kind in kinds:
        if kind == SUBJECT:
            names = [distinguished_name(certificate.get("subject", ()))]
        else:
            field, valid = _ALTERNATIVES[kind]
            names = [value for of, value in certificate.get("subjectAltName", ()) if of == field]
            if not all(map(valid.fullmatch, names)):
                raise NoPrincipal(f"its certificate has a malformed {kind} name")
        # If subjects alone count, a rule may match an empty subject.
        if any(names) or kinds == (SUBJECT,):
            return kind, names
    raise NoPrincipal(f"its certificate has no {' or '.join(kinds)} name")
