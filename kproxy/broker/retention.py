"""What a log no longer has to keep: Kafka's retention.bytes and retention.ms, cleanup.policy=delete."""

from __future__ import annotations

from collections.abc import Sequence

from kproxy.broker.log_options import NO_RETENTION_LIMIT, LogOptions
from kproxy.broker.segment import Segment


def removable(segments: Sequence[Segment], options: LogOptions, now_ms: int, high_watermark: int) -> int:
    """How many of the oldest segments may go. Nothing at or above the high watermark may.

    By size: as long as what is left is no less than `retention_bytes`, and never the last segment. By time: where the
    largest timestamp is older than `retention_ms`. `now_ms` is milliseconds since the epoch, as the timestamps are.
    """
    left_bytes = sum(segment.size_in_bytes for segment in segments)
    count = 0
    for segment in segments:
        if segment.size_in_bytes == 0 or segment.next_offset > high_watermark:
            break
        is_old = (
            options.retention_ms != NO_RETENTION_LIMIT and segment.newest_timestamp() < now_ms - options.retention_ms
        )
        left_bytes -= segment.size_in_bytes
        is_too_much = (
            options.retention_bytes != NO_RETENTION_LIMIT
            and left_bytes >= options.retention_bytes
            and segment is not segments[-1]
        )
        if not is_old and not is_too_much:
            break
        count += 1
    return count
