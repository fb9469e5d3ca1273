"""What a topic may be called: Kafka's own rule."""

from __future__ import annotations

import re

RULE = "its name is made of ASCII letters and digits, '.', '_' and '-', at most 249 of them"
_TOPIC = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")


def is_topic_name(text: str) -> bool:
    return _TOPIC.fullmatch(text) is not None
