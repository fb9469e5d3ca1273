"""Whom clients are told to write to where a partition has one claimant."""

from __future__ import annotations

from kproxy.claims.service import OwnService
from kproxy.routing.fleet import Fleet, Proxy


class Claimants:
    """Who is named as the leader of a partition that is written by one claimant: the claimant's proxy."""

    def __init__(self, own: OwnService | None, fleet: Fleet) -> None:
        self._own = own
        self._fleet = fleet

    def leaders(self, topic: bytes, partition_indexes: list[int]) -> list[Proxy]:
        """Who is said to lead each of these partitions; `topic` is its name."""
        leaders = self._fleet.leaders(topic, partition_indexes)
        own = self._own
        group = own.gated.get(topic) if own is not None else None
        if own is None or group is None:
            return leaders
        by_address = {proxy.address: proxy for proxy in self._fleet.proxies}
        for place, partition_index in enumerate(partition_indexes):
            row = own.table.owner(group, f"{topic.decode()}/{partition_index}")
            member = own.table.members.get(row.owner.proxy) if row is not None else None
            if member is not None:
                leaders[place] = by_address.get((member.host, member.port), leaders[place])
        return leaders
