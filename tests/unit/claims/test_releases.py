"""Releases at leaders that wait until their process is a member again."""

from __future__ import annotations

from collections.abc import Collection

from kproxy.claims.keys import ClaimValue, MemberValue, OwnKeys, encode_value
from kproxy.claims.release import LeaderReleases, Release, WriterGroups
from kproxy.claims.rules import Owner
from kproxy.claims.table import OwnTable, TableRow
from kproxy.etcd import KeyValue, WatchEvent

GROUP = "writers"
KEYS = OwnKeys("/kproxy")


class Brokers:
    """Brokers; `released` are the releases that they received."""

    def __init__(self) -> None:
        self.released: list[Release] = []

    def have_fences(self) -> bool:
        return True

    def partition_indexes(self, topic: str) -> Collection[int]:
        return (0, 1, 2)

    def release(self, release: Release) -> None:
        self.released.append(release)


def test_deferred_releases_are_done_once_unless_owned() -> None:
    brokers, table = Brokers(), OwnTable(KEYS)
    releases = LeaderReleases(table, WriterGroups({"t": GROUP}, brokers), brokers)
    releases.defer([TableRow(GROUP, f"t/{index}", Owner("a1", 1), 1, 5) for index in range(3)], 9)
    member = KeyValue(KEYS.member("b2"), encode_value(MemberValue("h", 1, 0)), 10, 10, 1, 7)
    claim = KeyValue(KEYS.claim(GROUP, "t/1"), encode_value(ClaimValue("b2", 1, 1)), 11, 11, 1, 7)
    table.on_events([WatchEvent(False, member), WatchEvent(False, claim)], 11)
    assert not brokers.released
    releases.release_deferred()
    assert brokers.released == [Release("t", 0, 9), Release("t", 2, 9)]
    releases.release_deferred()
    assert len(brokers.released) == 2
