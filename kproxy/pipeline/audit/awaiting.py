"""Waiting until trails tell of everything that was acknowledged before some time: then an audit can prove all of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from kafka import KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from kproxy.trail.rows import Begin, End, Mark, Row, decode_page

POLL_MS: Final = 200
# A trail from which nothing came for so long, beyond what it promised, is a dead proxy's: nothing more comes of it.
SILENCE_MS: Final = 5_000
_FOREVER_MS: Final = 1 << 62


@dataclass(slots=True)
class _Trail:
    """What is known of one incarnation: `told_ms`, before which all is told, and `heard_ms`, its last row's time."""

    interval_ms: int = 0
    mark_ms: int = 0
    told_ms: int = 0
    heard_ms: int = 0

    def hear(self, row: Row) -> None:
        self.heard_ms = max(self.heard_ms, row.at)
        match row:
            case Begin():
                self.interval_ms, self.mark_ms = row.interval_ms, row.mark_ms
                told_ms = row.at
            case Mark():
                told_ms = row.at
            case End():
                told_ms = _FOREVER_MS
            case _:
                told_ms = row.at - self.interval_ms
        self.told_ms = max(self.told_ms, told_ms)

    def is_dead(self, now_ms: int) -> bool:
        return now_ms - self.heard_ms > self.interval_ms + self.mark_ms + SILENCE_MS


class Trails:
    """Those in a topic, as far as their rows have been heard."""

    def __init__(self) -> None:
        self._trails: dict[tuple[str, str], _Trail] = {}

    def hear(self, page: bytes | None) -> None:
        try:
            rows = decode_page(page or b"")
        except msgspec.DecodeError:
            # Written by somebody else. The audit counts what it cannot read; here it tells nothing.
            return
        for row in rows:
            self._trails.setdefault((row.proxy, row.incarnation), _Trail()).hear(row)

    def tell_all_before(self, until_ms: int, now_ms: int) -> bool:
        """Whether there is a trail, and each that lives tells of everything before `until_ms`."""
        living = [trail for trail in self._trails.values() if not trail.is_dead(now_ms)]
        return bool(living) and all(trail.told_ms >= until_ms for trail in living)


def await_trails(
    bootstrap: str,
    topic: str,
    until_ms: int,
    timeout_s: float,
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
) -> bool:
    """Wait until the trails in `topic` tell of everything before `until_ms`; False where they do not in time.

    Blocks. A proxy that is killed meanwhile is waited for until it counts as dead; the audit will say what is missing.
    """
    # It logs what it also raises.
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    deadline = time.monotonic() + timeout_s
    trails = Trails()
    try:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap, client_id="kproxy-audit", enable_auto_commit=False)
        try:
            partitions = [TopicPartition(topic, index) for index in consumer.partitions_for_topic(topic) or ()]
            if not partitions:
                return False
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)
            while not trails.tell_all_before(until_ms, wall_ms()):
                if time.monotonic() > deadline:
                    return False
                for records in consumer.poll(timeout_ms=POLL_MS).values():
                    for record in records:
                        trails.hear(record.value)
            return True
        finally:
            consumer.close()
    except KafkaError:
        return False
