"""Apply an audit's rules: which rows it judges, and which times the trails prove. This module needs no Spark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kproxy.pipeline.audit.proof import TrailName, TrailPart, Unproven, trails, unproven

# Defaults.
# The time from closing a row until it can be read in a topic or in lines of JSON.
SHIPPING_MS: Final = 5_000
WINDOW_MS: Final = 10_000
LATE_AFTER_MS: Final = 60_000
MAX_FINDINGS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules:
    """The rules of an audit: records acknowledged from `from_ms` to before `to_ms`; None for no limit.

    `read_at_ms`: when the trail was read; `read_from_ms`: only rows shipped since then were read, None for all.
    `topics`: () for all in the trail. `window_ms`: the length of a window. A row that is shipped more than
    `late_after_ms` after it was closed is late; a live proxy's rows take up to `shipping_ms` until they can be read. At
    most `max_findings` of a kind are listed; the counts include all. `deleted_topics`: topics that the user says were
    deleted on purpose. `promised_ms`: by trail, how long its proxy may keep a row open, as the trails themselves say.
    """

    read_at_ms: int
    topics: tuple[str, ...] = ()
    from_ms: int | None = None
    read_from_ms: int | None = None
    to_ms: int | None = None
    window_ms: int = WINDOW_MS
    late_after_ms: int = LATE_AFTER_MS
    shipping_ms: int = SHIPPING_MS
    max_findings: int = MAX_FINDINGS
    deleted_topics: tuple[str, ...] = ()
    promised_ms: Mapping[TrailName, int] = field(default_factory=dict)

    def window(self, at: int) -> int:
        """Return the start of the window that contains `at`."""
        return at - at % self.window_ms

    def judges(self, topic: str, last_acked_at: int) -> bool:
        """Return whether a row of the trail is judged."""
        is_in_time = (self.from_ms is None or last_acked_at >= self.from_ms) and (
            self.to_ms is None or last_acked_at < self.to_ms
        )
        return is_in_time and (not self.topics or topic in self.topics)

    def is_gone(self, topic: str, topic_id: str | None, living: Mapping[str, str | None]) -> bool:
        """Return whether a row is of a deleted topic; `living`: the ids of the existing topics.

        A topic of the same name with another id is another topic: their offsets are unrelated. Rows without an id count
        as the existing topic's. If no topic has the name, the user must have declared it deleted, else it counts as
        existing.
        """
        if topic not in living:
            return topic in self.deleted_topics
        now = living[topic]
        return topic_id is not None and now is not None and topic_id != now

    def prove(self, parts: Mapping[TrailName, TrailPart]) -> tuple[AuditRules, list[Unproven]]:
        """Return these rules with what the trails promise, and the times that the trails do not prove."""
        whole = trails(parts)
        missing = unproven(
            whole,
            read_at_ms=self.read_at_ms,
            shipping_ms=self.shipping_ms,
            from_ms=self.from_ms,
            to_ms=self.to_ms,
            read_from_ms=self.read_from_ms,
        )
        return replace(self, promised_ms={name: trail.interval_ms for name, trail in whole.items()}), missing
