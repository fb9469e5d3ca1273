"""Keys and values in etcd that make no sense: they are passed over, counted by reason, and logged once a key."""

from __future__ import annotations

from collections import Counter

import structlog

from kproxy.etcd import KeyValue
from kproxy.ownership.lease_keys import Senseless

log = structlog.get_logger(__name__)


class SkippedKeys:
    """Logs `event`, for at most `most_logged` keys; counts in `counts`, under the reason behind `counted_as`."""

    def __init__(self, event: str, counts: Counter[str], *, counted_as: str = "", most_logged: int) -> None:
        self._event = event
        self._counts = counts
        self._counted_as = counted_as
        self._most_logged = most_logged
        self._logged: set[str] = set()

    def skip(self, kv: KeyValue, reason: Senseless) -> None:
        self._counts[f"{self._counted_as}{reason}"] += 1
        if kv.key not in self._logged and len(self._logged) < self._most_logged:
            self._logged.add(kv.key)
            log.warning(self._event, key=kv.key[:300], value=repr(kv.value[:80]), reason=str(reason))
