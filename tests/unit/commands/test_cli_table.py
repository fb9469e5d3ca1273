"""Paging, printing and comparing the routing table."""

from __future__ import annotations

import io
import math

import msgspec
import pytest
from rich.console import Console

from kproxy.cli.table import LiveTable, describe_changes, footline, headline, rows_of, show
from kproxy.observe.table import ProxyRow, TablePage, TableView, merge_pages, table_page
from kproxy.routing.topology import Address, Ownership, Topology


def topology(partitions: int = 6) -> Topology:
    table = Topology()
    for broker_id in (1, 2, 3):
        table.set_broker(broker_id, Address("127.0.0.1", 9000 + broker_id))
    rows = [
        Ownership(topic, index, 1 + index % 3, 10 + index)
        for topic in (b"flights", b"a")
        for index in range(partitions)
    ]
    table.load(rows, 100)
    return table


def page(table: Topology, *, stale: bool = False, age_s: float = 0.25, **narrowed: object) -> TablePage:
    return table_page(TableView(table, age_s, stale), **narrowed)  # type: ignore[arg-type]


def test_page_holds_the_table_and_its_age() -> None:
    everything = page(topology(2), stale=True)
    assert msgspec.to_builtins(everything) == {
        "source": "etcd",
        "revision": 100,
        "age_s": 0.25,
        "stale": True,
        "brokers": [{"id": id_, "host": "127.0.0.1", "port": 9000 + id_} for id_ in (1, 2, 3)],
        "proxies": [],
        "registration": "",
        "topics": [
            {
                "name": name,
                "partitions": [
                    {"partition": 0, "owner": 1, "revision": 10},
                    {"partition": 1, "owner": 2, "revision": 11},
                ],
            }
            for name in ("a", "flights")
        ],
        "next": None,
    }
    assert page(topology(), age_s=math.inf).age_s is None


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 7, 11, 12, 13])
def test_pages_together_are_the_whole_table(limit: int) -> None:
    table = topology()
    pages = [page(table, limit=limit)]
    while pages[-1].next is not None:
        assert len(list(rows_of(pages[-1]))) == limit
        pages.append(page(table, limit=limit, after=pages[-1].next))
    assert len(pages) == math.ceil(12 / limit)
    assert merge_pages(pages) == page(table)


def test_page_can_be_of_one_topic() -> None:
    table = topology()
    assert [topic.name for topic in page(table, topic="flights").topics] == ["flights"]
    assert page(table, topic="none").topics == []
    assert [row.partition for row in rows_of(page(table, topic="flights", after="flights/3"))] == [4, 5]


@pytest.mark.parametrize(
    "narrowed", [{"limit": 0}, {"limit": 10_001}, {"after": "x"}, {"after": "/1"}, {"after": "t/-1"}]
)
def test_invalid_page_is_refused(narrowed: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be "):
        page(topology(), **narrowed)


def test_output_without_terminal_is_plain_columns(capsys: pytest.CaptureFixture[str]) -> None:
    table = topology(2)
    table.remove_broker(2)
    table.set_broker(1, Address("::1", 9001))
    show(page(table))
    assert capsys.readouterr().out.splitlines() == [
        "# revision 100, etcd heard 0.2 s ago",
        "# 4 partitions owned (broker 1: 2, broker 2: 2, broker 3: 0)",
        "topic    partition  owner  address     revision",
        "a        0          1      [::1]:9001  10",
        "a        1          2      -           11",
        "flights  0          1      [::1]:9001  10",
        "flights  1          2      -           11",
    ]


def test_headline_states_the_tables_age() -> None:
    table = topology()
    assert "STALE" not in headline(page(table))
    assert headline(page(table, stale=True, age_s=600)).endswith(
        "etcd heard 10 min ago: STALE, the last known owners serve on"
    )
    assert headline(page(table, age_s=math.inf)) == "revision 100, etcd has not been heard yet"


@pytest.mark.parametrize(
    ("source", "age_s", "line"),
    [
        ("kafka", 3.0, "revision 0, the Kafka cluster heard 3.0 s ago"),
        ("kafka", math.inf, "revision 0, the Kafka cluster has not been heard yet"),
        ("static", 0.0, "revision 0, a fixed table"),
    ],
)
def test_headline_names_the_source(source: str, age_s: float, line: str) -> None:
    assert headline(table_page(TableView(Topology(), age_s, False, source))) == line
    assert footline(page(Topology()), []) == "0 partitions owned (no brokers)"


ONE, OTHER = ProxyRow(1_000_000, "10.0.0.1", 9092, True), ProxyRow(1_000_001, "::1", 9093)


@pytest.mark.parametrize(
    ("proxies", "registration", "line"),
    [
        ([ONE], "", "1 proxy: 1000000 at 10.0.0.1:9092 (this one)"),
        ([ONE, OTHER], "registered", "2 proxies: 1000000 at 10.0.0.1:9092 (this one), 1000001 at [::1]:9093"),
        ([OTHER], "out", "1 proxy: 1000001 at [::1]:9093; this one is out"),
        ([ONE], "standing by", "1 proxy: 1000000 at 10.0.0.1:9092 (this one); this one is standing by"),
    ],
)
def test_advertised_proxies_are_one_line(
    proxies: list[ProxyRow], registration: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TableView(topology(), 0.0, False, proxies=proxies, registration=registration)
    show(table_page(view))
    assert capsys.readouterr().out.splitlines()[2] == f"# {line}"
    assert describe_changes(page(topology()), table_page(view)) == [line]


def test_each_change_is_a_line() -> None:
    table = topology(2)
    before = page(table)
    assert describe_changes(before, before) == []
    table.set_owner(b"a", 0, 3, 101)
    table.set_owner(b"a", 1, -1, 102)
    table.set_owner(b"new", 0, 1, 103)
    table.set_owner(b"flights", 0, 1, 104)
    table.remove_broker(2)
    table.set_broker(3, Address("10.0.0.3", 9003))
    assert describe_changes(before, page(table, stale=True)) == [
        "a 0: broker 1 -> broker 3 at revision 101",
        "a 1: broker 2 -> nobody at revision 104",
        "flights 0: broker 1 -> broker 1 at revision 104",
        "new 0: nobody -> broker 1 at revision 103",
        "broker 2 at 127.0.0.1:9002 is gone",
        "broker 3 at 127.0.0.1:9003 is gone",
        "broker 3 at 10.0.0.3:9003 is there",
        "revision 104, etcd heard 0.2 s ago: STALE, the last known owners serve on",
    ]


def test_live_table_fits_terminal_and_survives_problems() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=14, color_system=None)
    proxies = [ProxyRow(1_000_000 + number, "127.0.0.1", 9092 + number) for number in range(9)]
    with LiveTable(console) as live:
        live.problem("nobody answers.")
        live.update(table_page(TableView(topology(40), 0.25, False, proxies=proxies)))
        shown = written(console)
        assert "... and 76 more" in shown
        assert len(shown.splitlines()) <= 14
        live.problem("nobody answers any more.")
        shown = written(console)
        assert "nobody answers any more." in shown
        assert "As last told" in shown
        assert "revision 100" in shown
        assert len(shown.splitlines()) <= 14


def written(console: Console) -> str:
    """Return the text written since the last call."""
    file = console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    file.seek(0)
    file.truncate()
    return text.rpartition("\x1b[2K")[2]
