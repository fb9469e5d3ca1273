"""The table of claims: it reports each change, in order, and handles snapshots and invalid values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest

from kproxy.claims.keys import ClaimValue, MemberValue, OwnKeys, encode_value
from kproxy.claims.table import Member, OwnTable, TableRow
from kproxy.etcd import KeyValue, Snapshot, WatchEvent
from kproxy.etcd.messages import Pages, rpc
from kproxy_codec.own import WHOLE_GROUP

KEYS = OwnKeys("/kafscale")


class Told:
    """A listener that records each change, and the table's content at that moment."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def claim_put(self, row: TableRow, before: TableRow | None) -> None:
        self.lines.append(
            f"{row.resource or '*'} to {row.owner.proxy}" + (f" from {before.owner.proxy}" if before else "")
        )

    def claim_gone(self, row: TableRow, revision: int) -> None:
        self.lines.append(f"{row.resource or '*'} gone from {row.owner.proxy} at {revision}")

    def member_put(self, name: str, member: Member) -> None:
        self.lines.append(f"{name} has seen {member.seen}")

    def member_gone(self, member: str, rows: Sequence[TableRow], revision: int) -> None:
        self.lines.append(f"{member} gone at {revision} with {sorted(row.resource for row in rows)}")

    def batch_told(self) -> None:
        self.lines.append(".")

    def restored(self) -> None:
        self.lines.append("restored")


def claim(resource: str, proxy: str, revision: int, *, group: str = "g") -> KeyValue:
    value = encode_value(ClaimValue(proxy, 1, 1))
    return KeyValue(KEYS.claim(group, resource), value, revision, revision, 1, 7)


def member(name: str, revision: int, seen: int = 0) -> KeyValue:
    return KeyValue(KEYS.member(name), encode_value(MemberValue("h", 1, seen)), revision, revision, 1, 7)


def put(kv: KeyValue) -> WatchEvent:
    return WatchEvent(False, kv)


def gone(kv: KeyValue, revision: int) -> WatchEvent:
    return WatchEvent(True, KeyValue(kv.key, b"", 0, revision, 0, 0))


def snapshot(revision: int, *kvs: KeyValue) -> Snapshot:
    pages = Pages()
    pages.add(
        rpc.RangeResponse(
            kvs=[
                rpc.KeyValue(
                    key=kv.key.encode(),
                    value=kv.value,
                    create_revision=kv.create_revision,
                    mod_revision=kv.mod_revision,
                    version=1,
                    lease=kv.lease_id,
                )
                for kv in kvs
            ]
        )
    )
    return Snapshot(revision, 1, pages)


@pytest.fixture
def table() -> OwnTable:
    return OwnTable(KEYS, listener=Told(), counters=Counter())


def told(table: OwnTable) -> list[str]:
    assert isinstance(table.listener, Told)
    lines, table.listener.lines = table.listener.lines, []
    return lines


def test_changes_arrive_in_order_with_previous_values(table: OwnTable) -> None:
    table.on_events([put(member("a", 2)), put(claim("r", "a", 3)), put(claim("r", "b", 4))], 4)
    assert told(table) == ["a has seen 0", "r to a", "r to b from a", "."]
    assert table.revision == 4
    assert table.count == 1


def test_duplicate_event_is_counted_once(table: OwnTable) -> None:
    table.on_events([put(claim("r", "a", 3))], 3)
    table.on_events([put(claim("r", "a", 3)), gone(claim("r", "a", 3), 2)], 3)
    assert told(table) == ["r to a", ".", "."]
    assert table.owner("g", "r") is not None


def test_revision_counts_once_it_is_complete(table: OwnTable) -> None:
    table.on_events([put(claim("r", "a", 3)), put(claim("s", "b", 4))], 3)
    assert table.revision == 3
    table.on_events([put(claim("t", "b", 4))], 4)
    assert table.revision == 4


def test_leaving_member_takes_keys_of_its_lease(table: OwnTable) -> None:
    rows = [claim("r", "a", 3), claim("s", "a", 4), claim("t", "a", 5), claim("u", "b", 6)]
    table.on_events([put(member("a", 2)), *map(put, rows)], 6)
    told(table)
    # t was released before. The end of the lease removes r, s and the member's own key at one revision.
    table.on_events([gone(rows[2], 7)], 7)
    table.on_events([gone(rows[0], 8), gone(rows[1], 8), gone(member("a", 2), 8)], 8)
    assert told(table)[-2:] == ["a gone at 8 with ['r', 's']", "."]
    assert [row.resource for row in table.claims()] == ["u"]


def test_member_deleted_by_hand_keeps_existing_claims(table: OwnTable) -> None:
    table.on_events([put(member("a", 2)), put(claim("r", "a", 3)), gone(member("a", 2), 4)], 4)
    assert "a gone at 4 with ['r']" in told(table)


def test_snapshot_is_reported_as_changes(table: OwnTable) -> None:
    table.on_events([put(member("a", 2)), put(claim("r", "a", 3)), put(claim("s", "a", 4))], 4)
    told(table)
    table.on_snapshot(snapshot(20, claim("s", "b", 12), claim("t", "c", 11)))
    assert told(table) == [
        "r gone from a at 20",
        "a gone at 20 with ['r', 's']",
        "t to c",
        "s to b from a",
        ".",
    ]
    assert table.revision == 20


@pytest.mark.parametrize(
    ("claims", "owner"),
    [
        ([("r", "a", 3)], "a"),
        ([(WHOLE_GROUP, "a", 3)], "a"),
        # The later claim is in force.
        ([("r", "a", 3), (WHOLE_GROUP, "b", 4)], "b"),
        ([(WHOLE_GROUP, "a", 3), ("r", "b", 4)], "b"),
        ([("s", "a", 3)], None),
        ([], None),
    ],
)
def test_last_claimant_is_the_owner(table: OwnTable, claims: list[tuple[str, str, int]], owner: str | None) -> None:
    table.on_events([put(claim("x", "z", 1, group="other")), *(put(claim(*each)) for each in claims)], 9)
    found = table.owner("g", "r")
    assert (found.owner.proxy if found else None) == owner


def test_invalid_entries_are_skipped_and_counted(table: OwnTable) -> None:
    good = claim("r", "a", 3)
    for key, value in (
        (good.key, b"{"),
        (good.key, json.dumps({"proxy": 1}).encode()),
        (KEYS.claims + "only-a-group", good.value),
        (KEYS.claims + "g/%zz", good.value),
        (KEYS.member("a"), b"[]"),
        # Deeper than any decoder goes.
        (good.key, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        (KEYS.all + "ership", b"not ours"),
    ):
        table.on_events([put(KeyValue(key, value, 3, 3, 1, 0))], 3)
    assert not list(table.claims())
    assert not table.members
    assert table._counters["own.skipped"] == 6


def test_restored_etcd_removes_all_earlier_claims(table: OwnTable) -> None:
    table.on_events([put(member("a", 20)), put(claim("r", "a", 30))], 30)
    told(table)
    table.on_restored()
    assert told(table) == ["restored"]
    table.on_snapshot(snapshot(5, claim("r", "b", 4)))
    assert told(table) == ["r to b", "."]
    assert table.revision == 5
