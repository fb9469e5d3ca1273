"""What several workers share, and what they say as one."""

from __future__ import annotations

import os
import pickle

import msgspec
import pytest

from kproxy.config import Limits, load_proxy_config, share_limits
from kproxy.config.proxy import SHARED_LIMITS, worker_count
from kproxy.errors import StartupError
from kproxy.observe.exposition import Family, Gauge, Sample, family_of, growing, merge
from kproxy.observe.http_page import Readiness
from kproxy.observe.metrics import ProxyCollector, Vitals
from kproxy.observe.table import TableView
from kproxy.observe.tally import Tally
from kproxy.routing.topology import Topology
from kproxy.workers.admin import combine_readiness
from kproxy.workers.channel import Assignment


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_shares_of_a_limit_add_up_to_it(workers: int) -> None:
    limits = Limits(max_connections=1000, max_in_flight_bytes_total=(1 << 20) + 1)
    shares = share_limits(limits, workers)
    assert len(shares) == workers
    for name in SHARED_LIMITS:
        parts = [getattr(share, name) for share in shares]
        assert sum(parts) == getattr(limits, name)
        assert max(parts) - min(parts) <= 1
    for share in shares:
        # Whatever is not about all connections is the same for each.
        alike = {name: getattr(limits, name) for name in SHARED_LIMITS}
        assert msgspec.structs.replace(share, **alike) == limits


@pytest.mark.parametrize("name", SHARED_LIMITS)
def test_a_limit_that_cannot_be_shared_is_named(name: str) -> None:
    assert share_limits(Limits(**{name: 3}), 3)
    with pytest.raises(StartupError, match=rf"^limits\.{name} is 3, which 4 workers"):
        share_limits(Limits(**{name: 3}), 4)


def test_0_workers_are_one_for_each_cpu() -> None:
    assert worker_count(5) == 5
    assert worker_count(0) == (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def test_a_worker_is_told_of_writer_groups_and_limits() -> None:
    config = load_proxy_config(
        flags={"etcd": "http://e:1", "writer_group": ["t=g"]}, environ={"KPROXY_LIMITS__OWN_TIMEOUT_S": "7"}
    )
    told: Assignment = pickle.loads(pickle.dumps(Assignment(1, config)))
    assert (told.config.writer_groups, told.config.limits.own_timeout_s) == ({"t": "g"}, 7)


@pytest.mark.parametrize(
    ("kind", "across", "values", "merged"),
    [
        ("counter", "sum", (1.0, 2.0, 4.0), 7.0),
        ("gauge", "sum", (1.0, 2.0, 4.0), 7.0),
        ("gauge", "max", (1.0, 4.0, 2.0), 4.0),
        ("gauge", "min", (2.0, 1.0, 4.0), 1.0),
        ("gauge", "min", (2.0,), 2.0),
    ],
)
def test_values_of_several_processes_become_one(
    kind: str, across: str, values: tuple[float, ...], merged: float
) -> None:
    pages = [[Family("a", "A.", kind, across, [Sample("a", {}, value)])] for value in values]  # type: ignore[arg-type]
    assert merge(pages) == [Family("a", "A.", kind, across, [Sample("a", {}, merged)])]  # type: ignore[arg-type]


def test_labels_keep_apart_what_is_apart_in_whatever_order_they_stand() -> None:
    def page(*samples: Sample) -> list[Family]:
        return [Family("a", "A.", "counter", "sum", list(samples))]

    first = page(Sample("a_total", {"x": "1", "y": "1"}, 1), Sample("a_total", {"x": "2", "y": "1"}, 10))
    second = page(Sample("a_total", {"y": "1", "x": "1"}, 2), Sample("a_total", {"x": "3", "y": "1"}, 100))
    (family,) = merge([first, second])
    assert {each.labels["x"]: each.value for each in family.samples} == {"1": 3, "2": 10, "3": 100}


def test_what_a_process_shows_outlives_the_wire_and_its_counts_the_process() -> None:
    tally = Tally()
    tally.requests[9] = 5
    tally.produce_buckets[0] = 2
    view = TableView(Topology(), 7.0, True)
    collector = ProxyCollector(
        tally=tally, counters={"splits": 3}, table=lambda: view, vitals=lambda: Vitals(client_connections=4)
    )
    page = [family_of(metric) for metric in collector.collect()]
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(page), type=list[Family])
    assert sent == page
    twice = {sample.name: sample.value for family in merge([sent, sent]) for sample in family.samples}
    assert twice["kproxy_requests_total"] == 10
    assert twice["kproxy_produce_duration_seconds_count"] == 4
    assert twice["kproxy_client_connections"] == 8
    # Of the same table.
    assert (twice["kproxy_table_age_seconds"], twice["kproxy_table_stale"]) == (7.0, 1)
    left = {sample.name: sample.value for family in growing(sent) for sample in family.samples}
    assert left["kproxy_split_requests_total"] == 3
    assert "kproxy_produce_duration_seconds_count" in left
    assert "kproxy_client_connections" not in left


def test_a_gauge_that_says_nothing_of_it_is_summed() -> None:
    assert family_of(Gauge("a", "A.", 1)).across == "sum"
    assert family_of(Gauge("a", "A.", 1, "min")).across == "min"


def test_a_broker_is_up_where_all_processes_say_so() -> None:
    pages = []
    for brokers in ({1: True, 2: False}, {1: True, 2: True, 3: True}):
        vitals = Vitals(brokers=brokers)
        view = TableView(Topology(), 0.0, False)
        collector = ProxyCollector(
            tally=Tally(), counters={}, table=lambda view=view: view, vitals=lambda vitals=vitals: vitals
        )
        pages.append([family_of(metric) for metric in collector.collect()])
    up = {
        sample.labels["broker"]: sample.value
        for family in merge(pages)
        if family.name == "kproxy_broker_up"
        for sample in family.samples
    }
    assert up == {"1": 1, "2": 0, "3": 1}


READY = Readiness(True, "ready")
STALE = Readiness(True, "ready, degraded: the table is stale, the last known owners are used")
HUNG = Readiness(False, "it does not answer")
STARTING = Readiness(False, "starting: the routing table is not loaded yet")


@pytest.mark.parametrize(
    ("said", "ready", "text"),
    [
        ([READY, READY], True, "ready"),
        ([STALE, STALE], True, STALE.text),
        ([STARTING, STARTING], False, STARTING.text),
        ([READY, HUNG], True, "ready, degraded: worker 2: it does not answer"),
        ([STALE, READY], True, f"ready, degraded: worker 1: {STALE.text}"),
        ([HUNG, READY, STARTING], True, f"ready, degraded: worker 1: {HUNG.text}; worker 3: {STARTING.text}"),
        ([HUNG, STARTING], False, f"worker 1: {HUNG.text}; worker 2: {STARTING.text}"),
    ],
)
def test_workers_are_ready_while_one_of_them_is(said: list[Readiness], ready: bool, text: str) -> None:
    assert combine_readiness(dict(enumerate(said, 1))) == Readiness(ready, text)
