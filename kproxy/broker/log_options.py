"""How a log is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FlushPolicy = Literal["always", "interval", "never"]
"""When what was appended is brought to the disk (fsync).

always    before an append is answered, or counts for the high watermark: what is acknowledged survives a power cut
interval  by the log keeper, every second or as configured: a power cut may take what came since, kill -9 nothing
never     when the operating system sees fit, and when the broker stops in good order

Whichever it is, a thread waits for the disk, never the event loop.
"""

FLUSH_POLICIES: tuple[FlushPolicy, ...] = get_args(FlushPolicy)
DEFAULT_SEGMENT_BYTES = 1 << 30
# As in Kafka's retention.bytes and retention.ms.
NO_RETENTION_LIMIT = -1


@dataclass(frozen=True)
class LogOptions:
    """Sizes are bytes. `retention_bytes` and `retention_ms` say what is kept at least; -1 keeps everything."""

    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    flush: FlushPolicy = "interval"
    retention_bytes: int = NO_RETENTION_LIMIT
    retention_ms: int = NO_RETENTION_LIMIT
