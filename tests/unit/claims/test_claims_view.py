"""The pages of the table of claims have every claim in force once, whatever the page size."""

from __future__ import annotations

import itertools
from urllib.parse import urlencode

import msgspec
import pytest

from kproxy.claims.admin import ClaimsAdmin, claims_page, whole_page
from kproxy.claims.keys import ClaimValue, MemberValue, OwnKeys, encode_value
from kproxy.claims.table import OwnTable
from kproxy.etcd import EtcdClient, KeyValue, Snapshot
from kproxy.observe.page import Unanswered
from kproxy.observe.table import (
    MAX_CLAIM_ROWS,
    MAX_CLIENT_TEXT,
    MAX_WRITER_GROUPS,
    ClaimRow,
    ClaimsPage,
    ClaimsQuery,
    FreeOrder,
    MemberRow,
    merge_claims,
)

KEYS = OwnKeys("/kafscale")
# Names with characters that JSON and percent-encoding must escape.
NAMES = ["orders/0", "orders/1", "ü /%", "*", "\x00\n", "\x00" * 1023]


def put(key: str, value: msgspec.Struct, revision: int) -> KeyValue:
    return KeyValue(key, encode_value(value), revision, revision, 1, 7)


def claim(
    group: str, resource: str, revision: int, *, proxy: str = "aa", connection: int = 1, **more: object
) -> KeyValue:
    fields = {"generation": 1, "client": "c", "since": 1_000, **more}
    return put(KEYS.claim(group, resource), ClaimValue(proxy, connection, **fields), revision)  # type: ignore[arg-type]


def member(name: str, host: str, port: int, revision: int = 1, **more: object) -> KeyValue:
    return put(KEYS.member(name), MemberValue(host, port, **more), revision)  # type: ignore[arg-type]


def table(*kvs: KeyValue) -> OwnTable:
    made = OwnTable(KEYS)
    made.on_snapshot(Snapshot(100, 1, kvs))
    return made


def test_page_shows_owner_resource_and_proxy() -> None:
    made = table(
        member("aa", "10.0.0.1", 9092, seen=40, unsettled=[("orders", 3), ("orders", 4)], writer_groups={"t": "h"}),
        member("bb", "::1", 9093, writer_groups={"t": "h", "orders": "g"}),
        claim("g", "orders/0", 41, generation=3, client="active"),
        claim("g", "x", 42, proxy="gone", connection=9),
    )
    assert msgspec.to_builtins(claims_page(made, ClaimsQuery())) == {
        "revision": 100,
        "writer_groups": ["orders=g", "t=h"],
        "differ": True,
        "members": [
            {"proxy": "aa", "address": "10.0.0.1:9092", "seen": 40, "unsettled": 2},
            {"proxy": "bb", "address": "[::1]:9093", "seen": 0, "unsettled": 0},
        ],
        "claims": [
            {
                "group": "g",
                "resource": "orders/0",
                "generation": 3,
                "fence": 41,
                "proxy": "aa",
                "address": "10.0.0.1:9092",
                "connection": 1,
                "client": "active",
                "since": 1_000,
            },
            {
                "group": "g",
                "resource": "x",
                "generation": 1,
                "fence": 42,
                "proxy": "gone",
                "address": "",
                "connection": 9,
                "client": "c",
                "since": 1_000,
            },
        ],
        "next": None,
    }


def test_equally_informed_members_do_not_differ() -> None:
    made = table(*(member(name, "a", 1, writer_groups={"t": "g"}) for name in ("aa", "bb")))
    shown = claims_page(made, ClaimsQuery())
    assert (shown.writer_groups, shown.differ) == (["t=g"], False)
    many = table(member("aa", "a", 1, writer_groups={f"t{number}": "g" for number in range(200)}))
    assert len(claims_page(many, ClaimsQuery()).writer_groups) == MAX_WRITER_GROUPS
    assert not claims_page(table(), ClaimsQuery()).differ


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 11, 12, 13, MAX_CLAIM_ROWS])
def test_pages_together_are_the_whole_table(limit: int) -> None:
    places = list(itertools.product(["g", "h/", "ü%2F"], [*NAMES[:4]]))
    made = table(*(claim(group, resource, revision) for revision, (group, resource) in enumerate(places, 10)))
    pages = [claims_page(made, ClaimsQuery(limit=limit))]
    while pages[-1].next is not None:
        assert len(pages[-1].claims) == limit
        pages.append(claims_page(made, ClaimsQuery(after=pages[-1].next, limit=limit)))
    assert sorted(row.place for row in merge_claims(pages).claims) == sorted(places)
    assert merge_claims(pages) == whole_page(made)


@pytest.mark.parametrize("name", NAMES)
def test_page_begins_behind_any_name(name: str) -> None:
    made = table(claim(name, name, 10), claim(name, name + "!", 11), claim(name, "", 9))
    first = claims_page(made, ClaimsQuery(limit=2))
    assert [row.resource for row in first.claims] == ["", name]
    assert first.next is not None
    # The resource's name fits into an HTTP request together with the group's name.
    assert len(urlencode({"group": name, "after": first.next})) < 8_000
    rest = claims_page(made, ClaimsQuery(after=first.next))
    assert [row.resource for row in rest.claims] == [name + "!"]


def test_page_can_be_of_one_group() -> None:
    made = table(claim("g", "a", 10), claim("h", "a", 11), claim("h", "b", 12), claim("i", "a", 13))
    assert [row.place for row in claims_page(made, ClaimsQuery("h")).claims] == [("h", "a"), ("h", "b")]
    after = claims_page(made, ClaimsQuery("h", limit=1)).next
    assert [row.place for row in claims_page(made, ClaimsQuery("h", after)).claims] == [("h", "b")]
    assert claims_page(made, ClaimsQuery("none")).claims == []


@pytest.mark.parametrize(
    "query",
    [ClaimsQuery(limit=0), ClaimsQuery(limit=MAX_CLAIM_ROWS + 1), ClaimsQuery(after="x"), ClaimsQuery(after="")],
)
def test_invalid_page_is_refused(query: ClaimsQuery) -> None:
    with pytest.raises(ValueError, match="must be "):
        claims_page(table(), query)


def test_resource_of_group_owner_is_not_shown_twice() -> None:
    made = table(
        claim("g", "lost", 10, connection=1),
        claim("g", "", 11, connection=2),
        claim("g", "its own", 9, connection=2),
        claim("g", "taken out of it", 12, connection=3),
        claim("h", "lost", 10, connection=1),
    )
    shown = {row.place: row.connection for row in whole_page(made).claims}
    assert shown == {("g", ""): 2, ("g", "its own"): 2, ("g", "taken out of it"): 3, ("h", "lost"): 1}


def test_full_page_of_long_names_fits_answer() -> None:
    # A control character has one byte, but six in JSON.
    worst = ClaimRow(
        "\x01" * 1024, "\x01" * 1024, 2**63, 2**63, "f" * 16, "h" * 255, 2**63, "\x01" * MAX_CLIENT_TEXT, 2**63
    )
    members = [MemberRow("f" * 16, "h" * 255, 2**63, 2**31)] * 1_000
    groups = [f"{'t' * 249}={name}" for name in ["\x01" * 1024] * MAX_WRITER_GROUPS]
    page = ClaimsPage(revision=2**63, members=members, writer_groups=groups, claims=[worst] * MAX_CLAIM_ROWS)
    assert len(msgspec.json.encode(page)) < 16 << 20
    long = claim("g", "r", 10, client="\x01" * 5_000)
    assert len(claims_page(table(long), ClaimsQuery()).claims[0].client) == MAX_CLIENT_TEXT


async def test_page_without_etcd_raises_unanswered() -> None:
    admin = ClaimsAdmin(EtcdClient(["http://127.0.0.1:1"]), OwnTable(KEYS))
    with pytest.raises(Unanswered, match="not been read"):
        admin.page(ClaimsQuery())
    with pytest.raises(Unanswered, match=r"127.0.0.1:1 is not connected: it is not known which claims are free"):
        await admin.free(FreeOrder("g"))
    admin = ClaimsAdmin(EtcdClient([]), table(claim("g", "a", 10)))
    assert [row.resource for row in admin.page(ClaimsQuery()).claims] == ["a"]
