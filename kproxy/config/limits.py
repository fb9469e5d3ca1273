"""The bounds of one listener."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`[limits]`: bounds of one listener, in bytes, counts, seconds and milliseconds as the names say."""

    max_request_bytes: _Count = 100 << 20
    max_control_request_bytes: _Count = 1 << 20
    max_answer_bytes: _Count = 128 << 20
    max_connections: _Count = 10_000
    max_in_flight_bytes: _Count = 64 << 20
    max_in_flight_bytes_total: _Count = 512 << 20
    max_open_requests: _Count = 1_000
    connect_timeout_s: Seconds = 1.0
    probe_timeout_s: Seconds = 2.0
    control_timeout_s: Seconds = 30.0
    control_attempt_s: Seconds = 5.0
    own_timeout_s: Seconds = 30.0
    deadline_cap_ms: _Count = 120_000
    # After SIGTERM, before clients are let go: they go elsewhere by themselves meanwhile. The flag is --drain-delay.
    drain_delay: Annotated[float, Meta(ge=0, le=3_600)] = 0.0
    drain_s: Seconds = 10.0
    # How long what earlier writers may still write keeps claims waiting, before brokers that keep no fences.
    own_unsettled_s: Seconds = 60.0
