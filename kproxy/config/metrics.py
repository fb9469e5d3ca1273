"""Define `[metrics]`: how many topics and clients have metrics by name."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

_Names = Annotated[int, Meta(ge=0, le=1_000)]


class MetricsSection(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the busiest topics and clients have series of their own; 0: none, and nothing is counted by name."""

    topics: _Names = 0
    clients: _Names = 0


NOTHING_NAMED: Final = MetricsSection()
