"""Replicas as they are paged, printed in the table, and judged by the doctor."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from kproxy.cli.doctor_checks import about_replicas
from kproxy.cli.table import LiveTable, describe_changes, show
from kproxy.observe.table import (
    ReplicaRow,
    Replication,
    TablePage,
    TableQuery,
    TableView,
    replication_page,
    table_page,
    with_replicas,
)
from kproxy.routing.topology import Address, Ownership, Topology

AT = "127.0.0.1:9644"


def row(partition: int = 0, isr: tuple[int, ...] = (1, 2, 3), *, leader: int = 1, topic: str = "t") -> ReplicaRow:
    return ReplicaRow(topic, partition, leader, 4, [1, 2, 3], list(isr), 2)


def table(*partitions: int) -> TablePage:
    topology = Topology()
    for broker_id in (1, 2, 3):
        topology.set_broker(broker_id, Address("127.0.0.1", 9000 + broker_id))
    topology.load([Ownership(b"t", partition, 1, 10) for partition in partitions], 100)
    return table_page(TableView(topology, 0.25, False))


ROWS = [row(index, topic=topic) for topic in ("a", "a-b", "a.b") for index in (0, 2, 10)]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9, 10])
def test_pages_together_are_all_rows(limit: int) -> None:
    known, found, after = Replication(7, [1, 2], ROWS), [], None
    while True:
        page = replication_page(known, TableQuery(None, after, limit))
        assert (page.revision, page.brokers) == (7, [1, 2])
        found += page.partitions
        after = page.next
        if after is None:
            break
        assert len(page.partitions) == limit
    assert found == ROWS


def test_page_may_be_limited_to_one_topic() -> None:
    known = Replication(7, [], ROWS)
    assert replication_page(known, TableQuery("a-b")).partitions == ROWS[3:6]
    page = replication_page(known, TableQuery("a-b", "a-b/0", 1))
    assert (page.partitions, page.next) == ([ROWS[4]], "a-b/2")
    for query in (TableQuery(limit=0), TableQuery(after="x")):
        with pytest.raises(ValueError, match="must be "):
            replication_page(known, query)


def test_table_has_a_replica_column_when_known(capsys: pytest.CaptureFixture[str]) -> None:
    show(with_replicas(table(0, 1, 2, 3, 4), [row(0), row(1, (1, 3)), row(2, (1,)), row(3, ())]))
    assert capsys.readouterr().out.splitlines() == [
        "# revision 100, etcd heard 0.2 s ago",
        "# 5 partitions owned (broker 1: 5, broker 2: 0, broker 3: 0); 3 under-replicated, 2 refuse acks=all (!)",
        "topic  partition  owner  address         revision  in sync",
        "t      0          1      127.0.0.1:9001  10        1,2,3",
        "t      1          1      127.0.0.1:9001  10        1,3 without 2",
        "t      2          1      127.0.0.1:9001  10        1 without 2,3 !",
        "t      3          1      127.0.0.1:9001  10        none without 1,2,3 !",
        "t      4          1      127.0.0.1:9001  10        -",
    ]


def test_live_table_with_replicas_fits_its_terminal() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, height=14, color_system=None)
    with LiveTable(console) as live:
        live.update(with_replicas(table(*range(40)), [row(index, (1,)) for index in range(40)]))
        lines = written.getvalue().splitlines()
    assert len(lines) <= 14
    assert any(line.rstrip().endswith("127.0.0.1:9001         10   1 without 2,3 !") for line in lines)


def test_json_has_replicas_only_when_known() -> None:
    known, unknown = msgspec.to_builtins(with_replicas(table(0, 1), [row(0, (1, 3))]))["topics"][0]["partitions"]
    assert known["replicas"] == [1, 2, 3]
    assert (known["isr"], known["min_insync_replicas"]) == ([1, 3], 2)
    assert set(unknown) == {"partition", "owner", "revision"}


def test_each_change_of_an_isr_is_a_line() -> None:
    whole, less = (with_replicas(table(0, 1), [row(0, isr), row(1)]) for isr in ((1, 2, 3), (1, 2)))
    assert describe_changes(whole, whole) == []
    assert describe_changes(whole, less) == ["t 0: in sync 1,2 without 3"]
    assert describe_changes(less, whole) == ["t 0: in sync 1,2,3"]
    assert describe_changes(less, table(0, 1)) == [], "etcd does not answer: nothing is known to have changed"
    assert describe_changes(table(0, 1), whole) == []
    assert describe_changes(table(0, 1), less) == ["t 0: in sync 1,2 without 3"]
    is_there = "nobody -> broker 1 at revision 10"
    assert describe_changes(table(), less) == [f"t 0: {is_there}", "t 0: in sync 1,2 without 3", f"t 1: {is_there}"]


def test_missing_replicas_add_no_output() -> None:
    assert about_replicas([], [1, 2], AT) == []


def test_complete_replicas_are_one_line() -> None:
    (finding,) = about_replicas([row(0), row(1)], [1, 2, 3], AT)
    assert (finding.mark, finding.check, finding.at) == ("ok", "replication.isr", AT)
    assert finding.text == "all replicas of 2 partitions are in sync"


def test_missing_broker_and_its_partitions_are_named() -> None:
    rows = [row(0), *(row(index, (1, 2)) for index in range(1, 8))]
    (dead,) = about_replicas(rows, [1, 2], AT)
    assert dead.mark == "warn"
    assert dead.text == (
        "broker 3 is not in sync for 7 of 8 partitions (t/1, t/2, t/3, t/4, t/5 and 2 more): it is down: start it."
    )
    assert (dead.facts["broker"], dead.facts["alive"], dead.facts["count"]) == (3, False, 7)
    assert dead.facts["partitions"] == [f"t/{index}" for index in range(1, 8)]
    (slow,) = about_replicas(rows, [1, 2, 3], AT)
    assert "broker 3 is not in sync" in slow.text
    assert "is down" not in slow.text


def test_partitions_refusing_acks_all_name_missing_brokers() -> None:
    *_, refused = about_replicas([row(0, (1,)), row(1, (1, 2))], [1], AT)
    assert (refused.mark, refused.check) == ("warn", "replication.min_isr")
    assert "1 of 2 partitions (t/0)" in refused.text
    assert "without brokers 2, 3" in refused.text


def test_leaderless_partitions_name_the_awaited_brokers() -> None:
    *_, waits = about_replicas([row(0, (3,), leader=-1), row(1)], [1, 2], AT)
    assert waits.check == "replication.leader"
    assert waits.text == (
        "no broker leads 1 of 2 partitions (t/0), so clients cannot write or read there: start broker 3, the last in "
        "sync."
    )
    *_, soon = about_replicas([row(0, (2, 3), leader=-1)], [1, 2], AT)
    assert "one is elected within seconds" in soon.text
