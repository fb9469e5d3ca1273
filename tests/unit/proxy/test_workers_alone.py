"""The state that several workers share, and the figures that they report together."""

from __future__ import annotations

import os
import pickle
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from kproxy.config import Limits, load_proxy_config, share_limits
from kproxy.config.metrics import MetricsSection
from kproxy.config.proxy import SHARED_LIMITS, worker_count
from kproxy.errors import StartupError
from kproxy.observe.exposition import FOLDS, MOST_NAMES_KEPT, growing, merge, of_known_brokers, parse, render
from kproxy.observe.http_page import Readiness
from kproxy.observe.metrics import BrokerVitals, ProxyCollector, Vitals, own_process
from kproxy.observe.table import TableView
from kproxy.observe.tally import OTHER_TOPICS, Tally
from kproxy.routing.topology import Topology
from kproxy.security.quotas import DIGEST_BYTES, PARTS
from kproxy.trail.shipper import ShipperVitals
from kproxy.workers.channel import (
    Assignment,
    Channel,
    ChannelClosed,
    ChannelMisused,
    Shares,
    Usage,
    encode,
    next_message,
    next_order,
)
from kproxy.workers.pages import combine_readiness
from kproxy.workers.shares import MOST_CHANGES


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
        # Limits that are not shared by all connections are the same in each worker.
        alike = {name: getattr(limits, name) for name in SHARED_LIMITS}
        assert msgspec.structs.replace(share, **alike) == limits


@pytest.mark.parametrize("name", SHARED_LIMITS)
def test_limit_that_cannot_be_shared_is_named(name: str) -> None:
    assert share_limits(Limits(**{name: 3}), 3)
    with pytest.raises(StartupError, match=rf"^limits\.{name} is 3, which 4 workers"):
        share_limits(Limits(**{name: 3}), 4)


def test_0_workers_are_one_for_each_cpu() -> None:
    assert worker_count(5) == 5
    assert worker_count(0) == (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def test_worker_learns_writer_groups_and_limits() -> None:
    config = load_proxy_config(
        flags={"etcd": "http://e:1", "writer_group": ["t=g"]}, environ={"KPROXY_LIMITS__OWN_TIMEOUT_S": "7"}
    )
    told: Assignment = pickle.loads(pickle.dumps(Assignment(1, config)))
    assert (told.config.writer_groups, told.config.limits.own_timeout_s) == ({"t": "g"}, 7)


def family(kind: str, name: str, *lines: tuple[str, dict[str, str], float]) -> Metric:
    made = Metric(name, "A.", kind)
    for line in lines:
        made.add_sample(*line)
    return made


@pytest.mark.parametrize(
    ("kind", "name", "values", "merged"),
    [
        ("counter", "a", (1.0, 2.0, 4.0), 7.0),
        ("gauge", "kproxy_client_connections", (1.0, 2.0, 4.0), 7.0),
        ("gauge", "kproxy_table_age_seconds", (1.0, 4.0, 2.0), 4.0),
        ("gauge", "kproxy_table_revision", (2.0, 1.0, 4.0), 1.0),
        ("gauge", "kproxy_table_revision", (2.0,), 2.0),
    ],
)
def test_values_of_several_processes_become_one(kind: str, name: str, values: tuple[float, ...], merged: float) -> None:
    pages = [[family(kind, name, ("a", {}, value))] for value in values]
    assert merge(pages) == [family(kind, name, ("a", {}, merged))]


def test_labels_are_distinct_in_any_order() -> None:
    first = family("counter", "a", ("a_total", {"x": "1", "y": "1"}, 1), ("a_total", {"x": "2", "y": "1"}, 10))
    second = family("counter", "a", ("a_total", {"y": "1", "x": "1"}, 2), ("a_total", {"x": "3", "y": "1"}, 100))
    (merged,) = merge([[first], [second]])
    assert {each.labels["x"]: each.value for each in merged.samples} == {"1": 3, "2": 10, "3": 100}


def collector_of(tally: Tally, *, splits: int = 0, **vitals: Any) -> ProxyCollector:
    """A collector that shows every family of metrics."""
    return ProxyCollector(
        tally=tally,
        counters={"splits": splits},
        table=TableView(Topology(), 7.0, True),
        vitals=Vitals(**vitals),
        shipping=ShipperVitals(waiting_bytes=3, age_s=1.25),
    )


def page_of(collector: ProxyCollector) -> list[Metric]:
    """The metrics that a supervisor reads from it."""
    return parse(render((*own_process(), collector), "")[0])


def test_process_counts_outlive_the_process() -> None:
    tally = Tally()
    tally.served[9] = 5
    tally.produce.count(0.1)
    tally.produce.count(0.2)
    tally.hang(1)
    tally.probe(1, 0.5)
    collector = collector_of(tally, splits=3, client_connections=4, brokers={1: BrokerVitals(True, False, 2, 0.5)})
    sent = page_of(collector)
    assert sent == list(collector.collect()), "all of them, in order, and nothing of the process"
    twice = {sample.name: sample.value for each in merge([sent, sent]) for sample in each.samples}
    assert twice["kproxy_requests_total"] == 10
    assert twice["kproxy_produce_duration_seconds_count"] == 4
    assert twice["kproxy_produce_duration_seconds_sum"] == 2 * (0.1 + 0.2)
    assert twice["kproxy_client_connections"] == 8
    assert twice["kproxy_broker_in_flight_requests"] == 4
    assert twice["kproxy_broker_oldest_request_age_seconds"] == 0.5
    assert twice["kproxy_hangs_total"] == 2
    assert twice["kproxy_broker_probe_duration_seconds_count"] == 2
    assert twice["kproxy_broker_probe_duration_seconds_sum"] == 1.0
    # Both processes read the same table.
    assert (twice["kproxy_table_age_seconds"], twice["kproxy_table_stale"]) == (7.0, 1)
    left = {sample.name: sample.value for each in growing(sent) for sample in each.samples}
    assert left["kproxy_split_requests_total"] == 3
    assert "kproxy_produce_duration_seconds_count" in left
    assert left["kproxy_broker_probe_duration_seconds_count"] == 1
    assert "kproxy_client_connections" not in left


@given(st.lists(st.binary(max_size=300), max_size=5))
@example([b'a"} 1\n# HELP b', b"\\", b"\\n", b"\r\n ", "\u2028\x85,".encode(), b"", b"other", b"\xff{"])
def test_client_chosen_names_survive_the_channel(topics: list[bytes]) -> None:
    tally = Tally()
    for topic in topics:
        tally.drop(topic, 3)
        tally.leave_unconfirmed(topic, 2)
    collector = collector_of(tally)
    assert page_of(collector) == list(collector.collect())


def test_invalid_topic_name_creates_no_series() -> None:
    """A few dozens of series would each cost a reader of `/metrics` time."""
    tally = Tally()
    for n in range(3):
        tally.drop(b'"' * 249 + b"%d" % n, 3)
    tally.drop(b"a" * 249, 3)
    assert tally.drops == {OTHER_TOPICS: {3: 3}, b"a" * 249: {3: 1}}


def test_every_fold_names_an_existing_gauge() -> None:
    """Or what each process counts of the same events."""
    kinds = {each.name: each.type for each in collector_of(Tally(MetricsSection(clients=1))).collect()}
    assert {name: kinds.get(name) for name in FOLDS} == {
        **dict.fromkeys(FOLDS, "gauge"),
        "kproxy_owner_changes": "counter",
    }


def test_names_of_ended_processes_are_bounded() -> None:
    past: list[Metric] = []
    for process in range(3):
        tally = Tally(MetricsSection(topics=1_000))
        assert tally.topics is not None
        for topic in range(1_000):
            tally.topics.find((b"%d-%d" % (process, topic),)).requests += 1
        past = growing(merge([past, page_of(collector_of(tally))]))
    assert [len(each.samples) for each in past if each.name == "kproxy_topic_requests"] == [MOST_NAMES_KEPT]


def test_brokers_that_all_processes_forgot_have_no_series() -> None:
    """Also not in what ended processes counted."""
    tally = Tally()
    for broker in (1, 2):
        tally.hang(broker)
        tally.of_broker(broker).dials += 1
    tally.error(0, 6)
    page = page_of(collector_of(tally, brokers={1: BrokerVitals(True), 2: BrokerVitals(True)}))
    later = page_of(collector_of(tally, brokers={1: BrokerVitals(True)}))
    families = of_known_brokers(merge([growing(page), later]))
    assert {each.labels["broker"] for family in families for each in family.samples if "broker" in each.labels} == {
        *"1",
        "",
    }


def test_broker_is_up_when_all_processes_agree() -> None:
    up, down = BrokerVitals(True), BrokerVitals(False)
    said = ({1: up, 2: down}, {1: up, 2: up, 3: up})
    shown = {
        sample.labels["broker"]: sample.value
        for each in merge([page_of(collector_of(Tally(), brokers=brokers)) for brokers in said])
        if each.name == "kproxy_broker_up"
        for sample in each.samples
    }
    assert shown == {"1": 1, "2": 0, "3": 1}


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


async def test_longest_reports_fit_a_frame() -> None:
    ours, theirs = socket.socketpair()
    supervisor, worker = await Channel.over(ours), await Channel.over(theirs)
    keys = [n.to_bytes(DIGEST_BYTES, "big") for n in range(MOST_CHANGES + 1)]
    uses, counts = [(key + b"\2", 1 << 40, True) for key in keys], dict.fromkeys(keys, 1 << 40)
    usage = Usage(uses[1:], dict(list(counts.items())[1:]))
    worker.send(encode(usage))
    assert await next_message(supervisor) == usage
    shares = Shares(7, {key: PARTS << 20 for key, _, _ in uses[1:]}, usage.connections)
    supervisor.send(encode(shares))
    assert await next_order(worker) == shares
    wrong_uses = ([(b"short", 1, True)], [(uses[0][0], -1, True)], uses)
    for wrong in (Usage([], counts), *(Usage(each, {}) for each in wrong_uses)):
        worker.send(encode(wrong))
        with pytest.raises(ChannelMisused):
            await next_message(supervisor)
    await worker.close()
    with pytest.raises(ChannelClosed):
        await next_message(supervisor)
    await supervisor.close()
