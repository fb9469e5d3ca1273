"""Printing and comparing claims, and the resources that `kproxy own claim` accepts."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence

import msgspec
import pytest

from kproxy.cli.options import AdminPlace
from kproxy.cli.own_claim import parse_wanted
from kproxy.cli.own_sources import AdminClaims, Change, changes_between
from kproxy.cli.own_view import (
    age,
    describe,
    headline,
    members_line,
    show,
    show_change,
    show_first,
    show_freed,
    writers_line,
)
from kproxy.config import Address
from kproxy.errors import StartupError
from kproxy.observe.table import ClaimRow, ClaimsPage, FreeOrder, FreeOutcome, MemberRow
from kproxy_codec.own import OwnResource

ACTIVE = {"proxy": "aa", "address": "127.0.0.1:9092", "connection": 3, "client": "active"}
STANDBY = {"proxy": "bb", "address": "127.0.0.1:9093", "connection": 5, "client": "standby"}


def row(
    resource: str, fence: int, owner: dict[str, object] = ACTIVE, generation: int = 1, group: str = "g"
) -> ClaimRow:
    fields = {"group": group, "resource": resource, "generation": generation, "fence": fence, "since": 1_000, **owner}
    return msgspec.convert(fields, ClaimRow)


def page(*claims: ClaimRow, members: Sequence[MemberRow] = ()) -> ClaimsPage:
    return ClaimsPage(revision=100, members=list(members), claims=list(claims))


def test_output_without_terminal_is_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    stray = {"proxy": "cc", "address": "", "connection": 7, "client": ""}
    members = [MemberRow("aa", "127.0.0.1:9092", 50, 0), MemberRow("bb", "127.0.0.1:9093", 50, 0)]
    show(page(row("", 12), row("orders/0", 50, STANDBY, 3), row("x", 9, stray), members=members), now_s=61)
    assert capsys.readouterr().out.splitlines() == [
        "# revision 100, 3 claims in 1 group",
        "# 2 proxies offer the Own API: 127.0.0.1:9092, 127.0.0.1:9093",
        "# no topic has a writer group: anybody writes (--writer-group TOPIC=GROUP)",
        "group  resource       generation  fence  client   proxy           connection  since",
        "g      (whole group)  1           12     active   127.0.0.1:9092  3           60 s",
        "g      orders/0       3           50     standby  127.0.0.1:9093  5           60 s",
        "g      x              1           9      -        -               7           60 s",
    ]
    show(page())
    assert capsys.readouterr().out.splitlines()[:2] == [
        "# revision 100, nobody owns anything",
        "# no proxy offers the Own API",
    ]
    show(page(), "h")
    assert capsys.readouterr().out.startswith("# revision 100, nobody owns anything of group h\n")
    assert headline(page(row("a", 1), row("a", 2, group="h"))).endswith("2 claims in 2 groups")


@pytest.mark.parametrize("columns", [80, 120])
def test_terminal_output_is_a_box_with_whole_addresses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    client = "a-long-name-of-some-client@10.0.0.1:50498"
    show(page(row("", 12, {**ACTIVE, "client": client}), row("[b]orders/0", 50, STANDBY, 3)), now_s=61)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    first = next(line for line in lines if line.startswith(" g "))
    assert first.split()[-3:] == ["127.0.0.1:9092", "60", "s"]
    # A name that looks like markup is printed as it is, and a group is printed once.
    second = next(line for line in lines if "[b]orders/0" in line)
    assert second.split() == ["[b]orders/0", "3", "50", "standby", "127.0.0.1:9093", "60", "s"]
    assert "revision 100, 2 claims in 1 group" in lines[0]
    show(page())
    assert "kproxy own claim GROUP RESOURCE" in capsys.readouterr().out


def test_terminal_control_characters_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {**ACTIVE, "client": "\x1b[2Jme"}
    claim = row("\x1b]0;x\x07\n", 5, hostile, group="a\rb")
    show(page(claim))
    show_change(Change("claimed", claim), as_json=False)
    show_freed(FreeOrder("a\rb"), [FreeOutcome(freed=[claim], missing=["\x1b"], whole=claim)], as_json=False)
    printed = capsys.readouterr()
    assert re.findall(r"[\x00-\x09\x0b-\x1f]", printed.out + printed.err) == []
    assert "\ufffd[2Jme" in printed.out


@pytest.mark.parametrize(
    ("members", "line"),
    [
        ([], "no proxy offers the Own API"),
        ([("a:1", 9, 0)], "1 proxy offers the Own API: a:1"),
        ([("a:1", 9, 0), ("b:2", 1, 0)], "2 proxies offer the Own API: a:1, b:2"),
        ([("a:1", 9, 0), ("a:1", 9, 0), ("b:2", 9, 0)], "2 proxies offer the Own API: a:1 (2 processes), b:2"),
        (
            [("a:1", 8, 0), ("b:2", 9, 1)],
            "2 proxies offer the Own API: a:1 [has confirmed no claim since revision 8], b:2 [1 partition not settled]",
        ),
    ],
)
def test_reason_for_waiting_claims_is_printed(members: list[tuple[str, int, int]], line: str) -> None:
    rows = [MemberRow(f"{number}", *each) for number, each in enumerate(members)]
    # The second proxy made the claim, so it has nothing to confirm to itself.
    assert members_line(page(row("a", 9, {**ACTIVE, "proxy": "1"}), members=rows)) == line


@pytest.mark.parametrize(
    ("writer_groups", "differ", "line"),
    [
        (["a=g", "b=h"], False, "writer groups: a=g, b=h"),
        (["a=g"], True, "writer groups: a=g; NOT THE SAME at all proxies: give all of them the same --writer-group"),
        ([f"t{n}=g" for n in range(11)], False, f"writer groups: {', '.join(f't{n}=g' for n in range(10))}, ..."),
    ],
)
def test_topics_that_only_owners_write_are_named(writer_groups: list[str], differ: bool, line: str) -> None:
    assert writers_line(ClaimsPage(revision=1, claims=[], writer_groups=writer_groups, differ=differ)) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "119 min"), (7_200, "2 h"), (172_800, "2 d")],
)
def test_ages_have_one_unit(seconds: int, text: str) -> None:
    assert age(1_000, 1_000 + 1_000 * seconds) == text


A = "active (connection 3 of 127.0.0.1:9092)"
S = "standby (connection 5 of 127.0.0.1:9093)"
CHANGES: dict[str, tuple[list[ClaimRow], list[ClaimRow], list[str]]] = {
    "nothing": ([row("a", 1)], [row("a", 1)], []),
    "claimed": ([], [row("a", 1)], [f"g a claimed by {A}, generation 1, fence 1"]),
    "raised": ([row("a", 1)], [row("a", 2, generation=4)], [f"g a raised by {A}, generation 4, fence 2"]),
    "reset": ([row("a", 1, generation=4)], [row("a", 2)], [f"g a reset by {A}, generation 1, fence 2"]),
    "taken over": (
        [row("a", 1)],
        [row("a", 2, STANDBY, 2)],
        [f"g a taken over by {S} from {A}, generation 2, fence 2"],
    ),
    "freed": ([row("a", 1)], [], [f"g a freed, it was owned by {A}, generation 1, fence 1"]),
    "the whole group": ([], [row("", 3)], [f"g (whole group) claimed by {A}, generation 1, fence 3"]),
    "the whole group over another": (
        [row("a", 1), row("b", 2, STANDBY)],
        [row("", 3, STANDBY), row("b", 2, STANDBY)],
        [
            f"g a taken over with the whole group by {S} from {A}, generation 1, fence 3",
            f"g (whole group) claimed by {S}, generation 1, fence 3",
        ],
    ),
    "out of the whole group": (
        [row("", 1)],
        [row("a", 2, STANDBY)],
        [
            f"g (whole group) freed, it was owned by {A}, generation 1, fence 1",
            f"g a taken over by {S} from {A}, generation 1, fence 2",
        ],
    ),
    "beside its own whole group": (
        [row("", 1)],
        [row("", 1), row("a", 2)],
        [f"g a claimed by {A}, generation 1, fence 2"],
    ),
    "in the order of fences": (
        [],
        [row("a", 8), row("b", 7), row("a", 6, group="h")],
        [
            f"{group} {name} claimed by {A}, generation 1, fence {fence}"
            for group, name, fence in [("h", "a", 6), ("g", "b", 7), ("g", "a", 8)]
        ],
    ),
    "another group's whole": (
        [row("a", 1)],
        [row("", 3, STANDBY, group="h")],
        [
            f"g a freed, it was owned by {A}, generation 1, fence 1",
            f"h (whole group) claimed by {S}, generation 1, fence 3",
        ],
    ),
}


@pytest.mark.parametrize(("before", "after", "lines"), CHANGES.values(), ids=CHANGES)
def test_each_change_is_a_line(before: list[ClaimRow], after: list[ClaimRow], lines: list[str]) -> None:
    assert [describe(change) for change in changes_between(before, after)] == lines


def test_changes_are_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    show_first(page(row("a", 1)), as_json=True)
    show_change(Change("taken over", row("a", 2, STANDBY), row("a", 1)), as_json=True)
    said = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["change"], each["claim"]["fence"]) for each in said] == [("is owned", 1), ("taken over", 2)]
    assert said[1]["before"]["client"] == "active"


FREED: dict[str, tuple[FreeOrder, list[FreeOutcome], int, list[str], list[str]]] = {
    "freed": (FreeOrder("g", ["a"]), [FreeOutcome(freed=[row("a", 1)])], 0, [f"g a is free: {A} is severed"], []),
    "in steps": (
        FreeOrder("g"),
        [FreeOutcome(freed=[row("a", 1)], more=True), FreeOutcome(freed=[row("b", 2)])],
        0,
        [f"g a is free: {A} is severed", f"g b is free: {A} is severed"],
        [],
    ),
    "not owned": (
        FreeOrder("g", ["a", "b"]),
        [FreeOutcome(freed=[row("a", 1)], missing=["b"])],
        1,
        [f"g a is free: {A} is severed"],
        ["kproxy: nobody owns b of group g."],
    ),
    "owned with the whole group": (
        FreeOrder("g", ["b"]),
        [FreeOutcome(missing=["b"], whole=row("", 1))],
        1,
        [],
        [f"kproxy: nobody owns b of group g, but the whole group is owned by {A}: free that with --all."],
    ),
    "nothing owned": (FreeOrder("g"), [FreeOutcome()], 1, [], ["kproxy: nobody owns anything of group g."]),
    "changed": (
        FreeOrder("g"),
        [FreeOutcome(changed=["a"])],
        1,
        [],
        ["kproxy: a of group g has got another owner just now, who keeps it."],
    ),
}


@pytest.mark.parametrize(("order", "outcomes", "status", "out", "err"), FREED.values(), ids=FREED)
def test_freed_resources_are_printed(
    capsys: pytest.CaptureFixture[str],
    order: FreeOrder,
    outcomes: list[FreeOutcome],
    status: int,
    out: list[str],
    err: list[str],
) -> None:
    assert show_freed(order, outcomes, as_json=False) == status
    printed = capsys.readouterr()
    assert (printed.out.splitlines(), printed.err.splitlines()) == (out, err)
    assert show_freed(order, outcomes, as_json=True) == status
    said = msgspec.json.decode(capsys.readouterr().out, type=list[ClaimRow])
    assert said == [claim for outcome in outcomes for claim in outcome.freed]


@pytest.mark.parametrize(
    ("texts", "resources"),
    [
        (["a"], [("a", 1)]),
        (["a=0", "b=7"], [("a", 0), ("b", 7)]),
        (["a=b=2"], [("a=b", 2)]),
        (["orders/0=3", "ü"], [("orders/0", 3), ("ü", 1)]),
    ],
)
def test_resource_may_have_a_generation(texts: list[str], resources: list[tuple[str, int]]) -> None:
    assert parse_wanted("g", texts, False).resources == tuple(OwnResource(*each) for each in resources)
    assert parse_wanted("g", [], True).resources is None


@pytest.mark.parametrize(
    ("group", "texts", "whole", "part"),
    [
        ("g", [], False, "--all"),
        ("g", ["a"], True, "--all"),
        ("", ["a"], False, "invalid name ''"),
        ("g", [""], False, "invalid name ''"),
        ("g", ["=1"], False, "invalid name ''"),
        ("g", ["a" * 1025], False, "1024 bytes"),
        ("g", ["a=-1"], False, "invalid generation '-1'"),
        ("g", ["a=x"], False, "invalid generation 'x'"),
        ("g", ["a="], False, "invalid generation ''"),
        ("g", ["a=1", "a=2"], False, "'a' is named twice"),
        ("g", [f"{number}" for number in range(4097)], False, "at most 4096"),
    ],
)
def test_unclaimable_resource_is_reported(group: str, texts: list[str], whole: bool, part: str) -> None:
    with pytest.raises(StartupError) as raised:
        parse_wanted(group, texts, whole)
    assert part in str(raised.value)


ANSWERS = {
    (404, b"Not Found"): "is not an admin page of kproxy (status 404)",
    (200, b"<html>"): "is not an admin page of kproxy (",
    (200, b"{}"): "is not an admin page of kproxy (Object missing required field `revision`)",
    (503, b"the claims have not been read from etcd yet"): "says: the claims have not been read from etcd yet.",
    (501, b"not offered\n"): "says: not offered.",
    (503, b""): "is not an admin page of kproxy (status 503)",
}


@pytest.mark.parametrize(("answer", "part"), ANSWERS.items(), ids=[f"{status} {body!r}" for status, body in ANSWERS])
async def test_unexpected_page_answer_is_one_sentence(answer: tuple[int, bytes], part: str) -> None:
    status, body = answer

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port: int = server.sockets[0].getsockname()[1]
        with pytest.raises(StartupError) as raised:
            await AdminClaims(AdminPlace(Address("127.0.0.1", port))).page(None)
    assert f"127.0.0.1:{port}" in str(raised.value)
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)
