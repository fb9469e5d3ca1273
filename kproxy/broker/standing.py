"""How a broker stands at a moment, for its admin page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """`problem`: why clients should not be sent here; empty where they should.

    `lease_lapses`: how often the lease was renewed only after it might have ended. `etcd_silent_s`: since etcd was last
    heard, infinite before that.
    """

    problem: str
    lease_remaining_s: float
    lease_lapses: int
    lease_losses: int
    etcd_silent_s: float
    client_connections: int
    follower_connections: int
