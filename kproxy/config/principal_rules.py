"""Parse rules that map the name in a client's certificate to a principal's, as `ssl.principal.mapping.rules` in Kafka.

A certificate's name is its subject as RFC 2253 writes it (`CN=app,OU=team,O=org`), or one of its alternative names: a
URI or a DNS name. The first rule that matches counts. A rule is `DEFAULT`, which keeps the whole name, or
`RULE:PATTERN/REPLACEMENT/`, optionally with `L` or `U` for lower or upper case. PATTERN is a regular expression for the
whole name, and `$1` in REPLACEMENT is its first group. A `/` in either is written `\\/`. One text may have several
rules, separated by commas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

SUBJECT: Final = "subject"
KINDS: Final = (SUBJECT, "uri", "dns")
MOST_RULES: Final = 100
_RULE: Final = re.compile(r"DEFAULT|RULE:((?:\\.|[^\\/])+)/((?:\\.|[^\\/])*)/([LU]?)", re.DOTALL)
_BETWEEN: Final = re.compile(r"\s*,\s*")
GROUP_IN_REPLACEMENT: Final = re.compile(r"\$(\d)")


class MappingRule(NamedTuple):
    """One rule. Without a pattern it is DEFAULT. `case` is `L`, `U` or empty."""

    pattern: re.Pattern[str] | None = None
    replacement: str = ""
    case: str = ""


class PrincipalMapping(NamedTuple):
    """The rules, and the kinds of names to which they apply. The first kind that a certificate has counts."""

    rules: tuple[MappingRule, ...] = (MappingRule(),)
    kinds: tuple[str, ...] = (SUBJECT,)


DEFAULT_MAPPING: Final = PrincipalMapping()


def parse_kinds(given: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of names, in order, once each. Raises ValueError for an unknown kind, as `parse_rules`."""
    kinds = tuple(dict.fromkeys(given))
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"unknown kind of name {kind[:80]!r}: give some of {', '.join(KINDS)}")
    return kinds


def parse_rules(given: str | Iterable[str]) -> tuple[MappingRule, ...]:
    """Parse rules, in order. Raises ValueError for an invalid rule, with a sentence that lacks only its subject."""
    texts = [given] if isinstance(given, str) else given
    rules = [_compiled(match) for text in texts for match in _split(text)]
    if not 0 < len(rules) <= MOST_RULES:
        raise ValueError(f"{len(rules)} rules; expected 1 to {MOST_RULES}")
    return tuple(rules)


def _split(text: str) -> Iterator[re.Match[str]]:
    """Yield the rules of one text, in which a rule may have commas."""
    text = text.strip()
    at = 0
    while True:
        match = _RULE.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 200]!r} is not a rule: write DEFAULT or RULE:PATTERN/REPLACEMENT/")
        yield match
        if match.end() == len(text):
            return
        comma = _BETWEEN.match(text, match.end())
        if comma is None:
            raise ValueError(f"{text[at : at + 200]!r} is not a rule: write DEFAULT or RULE:PATTERN/REPLACEMENT/")
        at = comma.end()


def _compiled(match: re.Match[str]) -> MappingRule:
    if match[0] == "DEFAULT":
        return MappingRule()
    pattern, replacement, case = match[1].replace("\\/", "/"), match[2].replace("\\/", "/"), match[3]
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{match[0][:200]!r} has no valid pattern ({error})") from error
    highest = max((int(number) for number in GROUP_IN_REPLACEMENT.findall(replacement)), default=0)
    if highest > compiled.groups:
        raise ValueError(f"{match[0][:200]!r} names the group ${highest}, but its pattern has only {compiled.groups}")
    return MappingRule(compiled, replacement, case)
