"""Which group's claims let clients write to a topic, as people write it: `TOPIC=GROUP`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kproxy.config.topic_name import RULE, is_topic_name
from kproxy.errors import StartupError
from kproxy_codec.own import MAX_NAME_BYTES


def parse_writer_groups(value: str | Sequence[str], source: str) -> Mapping[str, str]:
    """Group by topic, of texts that each hold one `TOPIC=GROUP` or several with commas between.

    Raises StartupError, with `source` as the subject.
    """
    groups: dict[str, str] = {}
    for text in [value] if isinstance(value, str) else value:
        for pair in text.split(","):
            topic, group = _parse_pair(pair.strip(), source)
            if groups.setdefault(topic, group) != group:
                raise StartupError(
                    f"{source}: topic {topic!r} has two writer groups, {groups[topic]!r} and {group!r}: keep one."
                )
    return groups


def _parse_pair(pair: str, source: str) -> tuple[str, str]:
    topic, equals, group = (part.strip() for part in pair.partition("="))
    if not equals or not group:
        raise StartupError(
            f"{source}: {pair[:300]!r} names no topic and its writer group: write TOPIC=GROUP, for example "
            f"orders=writers."
        )
    if not is_topic_name(topic):
        raise StartupError(f"{source}: {topic[:300]!r} cannot be a topic: {RULE}.")
    if len(group.encode()) > MAX_NAME_BYTES:
        raise StartupError(f"{source}: the writer group of {topic!r} has a name of more than {MAX_NAME_BYTES} bytes.")
    return topic, group
