"""Which broker coordinates which consumer group, by the leases that KafScale's brokers hold in etcd.

State: for each group that has a lease, (broker id, revision). Kept by the lease table, read by `kproxy.proxy`.

Invariants
1. An entry changes only upward: what carries a revision at or below the entry's own is ignored.
2. At most MAX_GROUPS entries; what comes beyond is not taken, and such a group goes where one without a lease goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

MAX_GROUPS: Final = 1_000_000


class GroupLease(NamedTuple):
    """`revision` is etcd's mod_revision of the key."""

    broker_id: int
    revision: int


class GroupLeases:
    """The leases of groups."""

    def __init__(self) -> None:
        self._leases: dict[str, GroupLease] = {}

    def holder(self, group: str) -> int | None:
        """The id of the broker that coordinates the group; None where none does."""
        lease = self._leases.get(group)
        return None if lease is None else lease.broker_id

    def __len__(self) -> int:
        return len(self._leases)

    def put(self, group: str, lease: GroupLease) -> None:
        """The group's lease is this one."""
        known = self._leases.get(group)
        if known is None and len(self._leases) >= MAX_GROUPS:
            return
        if known is None or known.revision < lease.revision:
            self._leases[group] = lease

    def remove(self, group: str, revision: int) -> None:
        """The group's lease has gone, as of `revision`."""
        known = self._leases.get(group)
        if known is not None and known.revision <= revision:
            del self._leases[group]

    def load(self, leases: Mapping[str, GroupLease]) -> None:
        """These are all the leases there are."""
        self._leases = dict(leases)
