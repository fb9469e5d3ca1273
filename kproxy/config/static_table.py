"""Parse a static table: brokers by id, owners by topic and partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kproxy.config.parsing import Address, nearest, parse_address, read_toml, unknown
from kproxy.errors import StartupError

# The sections of a static table, which may also be in a file of their own, named by --table.
STATIC_TABLE_SECTIONS = ("brokers", "topics")


class TopicOwners(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One topic of a static table: broker ids by partition index."""

    name: str
    owners: tuple[int, ...]


@dataclass(frozen=True)
class Owners:
    """A static table, checked: every owner is one of `brokers`.

    `where` is the table's file.
    """

    brokers: Mapping[int, Address]
    topics: tuple[TopicOwners, ...]
    where: str


def read_table(file: Path) -> Owners:
    """Read a file that has only a static table. Raises StartupError."""
    return parse_owners(read_toml(file, "--table"), str(file))


def parse_owners(sections: Mapping[str, object], where: str) -> Owners:
    """Parse `brokers`, which maps ids to "host:port", and `topics`, each with a name and owners.

    Raises StartupError, which names the fault and `where`.
    """
    for section in sections:
        if section not in STATIC_TABLE_SECTIONS:
            unknown(section, f"in {where}", f"[{nearest(section, dict.fromkeys(STATIC_TABLE_SECTIONS))}]", True)
    try:
        texts = msgspec.convert(sections.get("brokers", {}), dict[Annotated[int, Meta(ge=0)], str], strict=False)
        topics = msgspec.convert(sections.get("topics", []), tuple[TopicOwners, ...])
    except msgspec.ValidationError as error:
        reason = str(error)[:200]
        raise StartupError(f"the static table in {where} is invalid: {reason[:1].lower()}{reason[1:]}.") from error
    brokers = {number: parse_address(text, f"broker {number} in {where}") for number, text in texts.items()}
    if not brokers:
        raise StartupError(
            f'the static table in {where} has no brokers: write [brokers] with lines like 1 = "host:port".'
        )
    for number, address in brokers.items():
        if address.port == 0:
            raise StartupError(f"broker {number} in {where}: no broker listens on port 0: give its own port.")
    names: set[str] = set()
    for topic in topics:
        if topic.name in names:
            raise StartupError(f"topic {topic.name!r} is listed twice in {where}: keep one of them.")
        names.add(topic.name)
        for partition_index, owner in enumerate(topic.owners):
            if owner not in brokers:
                raise StartupError(
                    f"topic {topic.name!r} in {where} gives partition {partition_index} to broker {owner}, which is "
                    f"not in [brokers]; expected one of {', '.join(map(str, sorted(brokers)))}."
                )
    return Owners(brokers, topics, where)
