"""Every metric changes when the counted event happens, and by the right amount."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kproxy.observe.exposition import render
from kproxy.observe.metrics import ProxyCollector
from kproxy.observe.table import TableView
from kproxy.observe.tally import MAX_BROKERS, MAX_DROP_TOPICS, OTHER_BROKERS, Tally
from kproxy.proxy import server
from kproxy.proxy.broker_watch import MAX_GONE
from kproxy.routing.topology import Address
from kproxy_codec.api_keys import API_VERSIONS, METADATA
from tests.support.brokers.scripted_upstream import Script, broker_process
from tests.support.clients.raw_client import batch, fetch_frame, list_offsets_frame, produce_frame, raw_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, in_one_go
from tests.support.processes.served import samples, served
from tests.support.scene import ANSWERS, DOWN, HOLDS, T0, T1, Scene, scene, staged
from tests.support.waiting import eventually

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"
# Those of one broker; all are 0 while it answers.
BROKER_SERIES = (
    "kproxy_broker_hung",
    "kproxy_broker_in_flight_requests",
    "kproxy_broker_oldest_request_age_seconds",
    "kproxy_broker_probe_duration_seconds_count",
    "kproxy_broker_probe_duration_seconds_sum",
    "kproxy_hangs_total",
)
SERIES = re.compile(r"^\| `(kproxy_[a-z0-9_]+)", re.MULTILINE)


class Scrape:
    """One reading of the page."""

    def __init__(self, proxy: RunningProxy, *, age_s: float = 0.5, stale: bool = False) -> None:
        collector = ProxyCollector(
            tally=proxy.context.tally,
            counters=proxy.counters,
            table=TableView(proxy.topology, age_s, stale),
            vitals=proxy.vitals,
        )
        body, content_type = render([collector], "")
        assert content_type.startswith("text/plain")
        self.samples = samples(body.decode())

    def __call__(self, series: str, **labels: str) -> float:
        """The sum of the series with these labels and any others; `name label=value` selects them too."""
        name, *pairs = series.split()
        wanted = {*labels.items(), *(tuple(pair.split("=")) for pair in pairs)}
        return sum(value for (each, has), value in self.samples.items() if each == name and wanted <= {*has})

    def labels(self, name: str) -> list[dict[str, str]]:
        """The labels of each series of this name."""
        return [dict(has) for each, has in self.samples if each == name]


async def one_in_a_turn(things: Iterable[Any], _: object) -> AsyncIterator[Any]:
    for thing in things:
        await asyncio.sleep(0)
        yield thing


@scene(ANSWERS, clients=20)
async def test_vitals_leave_turns_to_clients(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "in_portions", one_in_a_turn)
    for client in s.clients:
        client.send(produce_frame())
        await client.answer()
    sent_bytes = Scrape(s.proxy)("kproxy_client_sent_bytes_total")

    async def look() -> int:
        await s.proxy.listener.vitals()
        return s.proxy.context.tally.sent_bytes

    looking = asyncio.create_task(look())
    turns = 0
    while not looking.done():
        await asyncio.sleep(0)
        turns += 1
        if turns == 5:
            for client in s.clients[::2]:
                client.abort()
    assert turns > 5
    # None is counted twice or missed, whether or not its session has ended.
    assert await looking == sent_bytes


BOTH = {"t": [0, 1]}
UNKNOWN_VERSION = raw_frame(struct.pack(">hhih", API_VERSIONS, 90, 1, 1) + b"x" + bytes(8))


def answers_by(*codes: int) -> Script:
    """A broker that answers t-0 with these codes, one after another, and t-2 with INVALID_RECORD."""
    given = iter(codes)
    return lambda asked: asked.answer(results={T0: next(given), ("t", 2): 87} if codes else {})


# The broker's codes for t-0, the owners, the client's requests, and the page's values.
COUNTED: dict[str, tuple[Sequence[int], Sequence[int], list[bytes], dict[str, int]]] = {
    "requests by API and version": (
        (),
        [1],
        [produce_frame(), produce_frame(version=3), produce_frame(version=3), fetch_frame(), list_offsets_frame()],
        {
            "kproxy_requests_total api=PRODUCE version=9": 1,
            "kproxy_requests_total api=PRODUCE version=3": 2,
            "kproxy_requests_total api=FETCH version=12": 1,
            "kproxy_requests_total api=LIST_OFFSETS version=6": 1,
        },
    ),
    "errors by partition and name": (
        [10],
        [1, 1, 1],
        [
            *(produce_frame({"t": [0, 1, 2]}), produce_frame({"t": [1, 1]}), produce_frame(acks=5), UNKNOWN_VERSION),
            fetch_frame(session_id=77, session_epoch=3),
        ],
        {
            "kproxy_errors_total api=PRODUCE error=MESSAGE_TOO_LARGE": 1,
            "kproxy_errors_total api=PRODUCE error=INVALID_RECORD": 1,
            "kproxy_errors_total api=PRODUCE error=INVALID_REQUEST": 2,
            "kproxy_errors_total api=PRODUCE error=INVALID_REQUIRED_ACKS": 1,
            "kproxy_errors_total api=FETCH error=FETCH_SESSION_ID_NOT_FOUND": 1,
            "kproxy_errors_total api=API_VERSIONS error=UNSUPPORTED_VERSION": 1,
        },
    ),
    # A retried code is not one that the client got.
    "retries by readable cause": (
        [6, 19, 0],
        [1],
        [produce_frame()],
        {
            "kproxy_retries_total cause=NOT_LEADER_OR_FOLLOWER": 1,
            "kproxy_retries_total cause=NOT_ENOUGH_REPLICAS": 1,
            "kproxy_errors_total": 0,
        },
    ),
    "split requests": (
        (),
        [1, 2],
        [produce_frame(BOTH), produce_frame()],
        {"kproxy_split_requests_total": 1, "kproxy_upstream_connections": 2},
    ),
}


@pytest.mark.parametrize("what", COUNTED)
@both_loops
async def test_page_counts_the_actions_of_clients(what: str) -> None:
    codes, owners, frames, series = COUNTED[what]
    async with staged(answers_by(*codes), ANSWERS, owners=owners) as s:
        s.send(*frames)
        for _ in frames:
            await s.client.receive()
        scrape = Scrape(s.proxy)
        assert {each: scrape(each) for each in series} == series


@scene(HOLDS, one_go=True)
async def test_deadlines_are_counted(s: Scene) -> None:
    assert await s.ask(produce_frame(timeout_ms=1)) == [{T0: 7}]
    assert Scrape(s.proxy)("kproxy_deadlines_total") == 1
    assert Scrape(s.proxy)("kproxy_errors_total api=PRODUCE error=REQUEST_TIMED_OUT") == 1


@scene()
async def test_unknown_versions_share_one_label(s: Scene) -> None:
    for api_key, version in ((API_VERSIONS, 2000), (API_VERSIONS, 3000), (METADATA, 4000), (METADATA, -7)):
        client = await s.proxy.client()
        client.send(raw_frame(struct.pack(">hhih", api_key, version, 1, 1) + b"x" + bytes(8)))
        if api_key == API_VERSIONS:
            await client.receive()
        else:
            # Refused before it counts as a request.
            assert await client.is_closed()
    scrape = Scrape(s.proxy)
    assert scrape("kproxy_requests_total", api="API_VERSIONS", version="other") == 2
    assert len(scrape.labels("kproxy_requests_total")) == 1


@scene(ANSWERS, clients=0)
async def test_bytes_are_counted_both_ways_for_closed_connections(s: Scene) -> None:
    sent = received = 0
    for records in (batch(), batch() + bytes(3 << 20)):
        client = await s.proxy.client()
        frame = produce_frame(records=records)
        client.send(frame)
        sent += len(frame)
        received += len(await client.receive())
        assert Scrape(s.proxy)("kproxy_client_sent_bytes_total") == received
        client.close()
        await s.until_sessions()
        assert Scrape(s.proxy)("kproxy_client_sent_bytes_total") == received
        assert Scrape(s.proxy)("kproxy_client_received_bytes_total") == sent


@scene(HOLDS)
async def test_requests_in_flight_are_shown_until_answered(s: Scene) -> None:
    frames = [produce_frame(records=batch(n)) for n in range(3)]
    s.send(*frames)
    first = await s.next()
    # The route is new: the other two wait in the proxy, but still count.
    assert Scrape(s.proxy)("kproxy_in_flight_requests") == 3
    assert Scrape(s.proxy)("kproxy_in_flight_bytes") == sum(map(len, frames))
    first.answer()
    for _ in range(2):
        (await s.next()).answer()
    for _ in range(3):
        await s.client.receive()
    assert Scrape(s.proxy)("kproxy_in_flight_requests") == 0
    assert Scrape(s.proxy)("kproxy_in_flight_bytes") == 0


@scene(HOLDS)
async def test_lost_connection_is_a_cause_of_retries(s: Scene) -> None:
    s.send(produce_frame())
    await s.next()
    await s.broker.stop()
    await eventually(lambda: Scrape(s.proxy)("kproxy_retries_total", cause="CONNECTION_LOST") >= 1)


@scene(DOWN)
async def test_lost_acks_0_batches_are_counted_by_topic(s: Scene) -> None:
    """Invented topics create no unbounded labels."""
    topics = [f"t{n}" for n in range(MAX_DROP_TOPICS + 30)]
    for topic in topics:
        s.proxy.own(1, topic, partitions=[0, 1])
    s.send(produce_frame({topic: [0, 1] if topic == "t0" else [0] for topic in topics}, acks=0))
    assert await s.client.is_closed()
    await eventually(lambda: s.proxy.counters["acks0.undeliverable"] == len(topics) + 1)
    scrape = Scrape(s.proxy)
    for topic, count in {"t0": 2, "t1": 1, "other": 30}.items():
        assert scrape("kproxy_acks0_dropped_total", topic=topic, reason="NOT_LEADER_OR_FOLLOWER") == count
    assert len(scrape.labels("kproxy_acks0_dropped_total")) == MAX_DROP_TOPICS + 1


@scene(clients=2, limits={"max_connections": 2})
async def test_client_connections_are_counted_by_outcome(s: Scene) -> None:
    bad, good = s.clients
    await s.until_sessions(2)
    assert await (await s.proxy.client()).is_closed()
    scrape = Scrape(s.proxy)
    assert scrape("kproxy_client_connections") == 2
    assert scrape("kproxy_client_connections_accepted_total") == 2
    assert scrape("kproxy_client_connections_refused_total") == 1
    assert scrape("kproxy_client_connections_cut_total") == 0
    bad.send(b"\xff\xff\xff\xff")
    assert await bad.is_closed()
    await eventually(lambda: Scrape(s.proxy)("kproxy_client_connections") == 1)
    assert Scrape(s.proxy)("kproxy_client_connections_cut_total") == 1
    good.close()


@scene(HOLDS, owners=[1, 1, 1])
async def test_table_is_described(s: Scene) -> None:
    revision = s.proxy.disown(partitions=[1])
    scrape = Scrape(s.proxy, age_s=7.5, stale=True)
    assert [
        scrape(f"kproxy_table_{name}") for name in ("partitions", "brokers", "revision", "age_seconds", "stale")
    ] == [*(2, 1, revision, 7.5, 1)]
    s.proxy.topology.begin_rebuild()
    assert Scrape(s.proxy)("kproxy_table_partitions") == 0
    assert scrape.labels("kproxy_table_age_seconds") == [{"source": "etcd"}]
    assert not Scrape(s.proxy, age_s=float("inf")).labels("kproxy_table_age_seconds")


@scene(HOLDS, at=100.0)
async def test_produce_is_timed_from_first_byte_to_answer(s: Scene) -> None:
    frame = produce_frame()
    s.send(frame[:20])
    await eventually(lambda: s.proxy.context.tally.received_bytes == 20)
    s.now += 0.02
    s.send(frame[20:])
    asked = await s.next()
    s.now += 0.04
    asked.answer()
    await s.client.receive()
    s.send(fetch_frame(max_wait_ms=0))
    s.now += 5
    (await s.next()).answer(results={T0: {"records": b"x"}})
    await s.client.receive()
    scrape = Scrape(s.proxy)
    assert [scrape("kproxy_produce_duration_seconds_bucket", le=le) for le in ("0.05", "0.1", "+Inf")] == [0, 1, 1]
    assert scrape("kproxy_produce_duration_seconds_sum") == pytest.approx(0.06)
    assert scrape("kproxy_produce_duration_seconds_count") == 1


@scene(clients=0)
async def test_event_loop_delay_is_measured(s: Scene) -> None:
    await eventually(lambda: Scrape(s.proxy)("kproxy_event_loop_delay_seconds_count") >= 1)
    time.sleep(0.4)
    await eventually(lambda: Scrape(s.proxy)("kproxy_event_loop_delay_seconds_sum") > 0.2)


@scene(HOLDS, limits={"drain_s": 0.3}, one_go=True)
async def test_draining_is_shown(s: Scene) -> None:
    s.send(produce_frame())
    await s.next()
    assert Scrape(s.proxy)("kproxy_draining") == 0
    stopping = asyncio.create_task(s.proxy.listener.stop())
    await eventually(lambda: Scrape(s.proxy)("kproxy_draining") == 1)
    await stopping


async def test_process_serves_all_metrics_in_both_formats(tmp_path: Path) -> None:
    """The documentation lists exactly these metrics."""
    named = "[metrics]\ntopics = 5\nclients = 5\n"
    async with served(tmp_path, ANSWERS, more=("--audit-sink", f"json:{tmp_path}/trail"), rooms=named) as s:
        client = await s.client()
        client.send(produce_frame())
        await client.answer()
        status, text = await s.page("/metrics")
        assert status == 200
        shown = samples(text)
        assert shown["kproxy_requests_total", (("api", "PRODUCE"), ("version", "9"))] == 1
        for name in ("kproxy_produce_duration_seconds_count", "kproxy_table_partitions", "kproxy_client_connections"):
            assert shown[name, ()] == 1
        # The metrics of the process and of Python.
        assert shown["process_resident_memory_bytes", ()] > 1 << 20
        assert any(name == "python_info" for name, _ in shown)
        _, text = await s.page("/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert text.endswith("# EOF\n")
    families = set(re.findall(r"^# TYPE (kproxy_[a-z0-9_]+)", text, re.MULTILINE))
    of_the_proxy, _, of_brokers = DOCUMENT.read_text().partition("## The reference brokers")
    assert of_brokers
    documented = {name.removesuffix("_total") for name in SERIES.findall(of_the_proxy)}
    assert documented == families


@scene(ANSWERS, ANSWERS, owners=[2])
async def test_down_brokers_are_shown_until_they_return(s: Scene) -> None:
    def up() -> list[float]:
        return [Scrape(s.proxy)("kproxy_broker_up", broker=broker) for broker in "12"]

    await s.brokers[1].stop_listening()
    assert up() == [1, 1]
    assert await s.ask(produce_frame()) == [{T0: 6}]
    assert up() == [1, 0]
    await s.rises(2)
    while up() != [1, 1]:
        await s.ask(produce_frame())


@scene(ANSWERS, ANSWERS, at=100.0)
async def test_broker_that_left_shows_zero_for_ten_minutes(s: Scene) -> None:
    """Kafka and etcd drop a dead broker within seconds."""
    series = "kproxy_broker_up", (("broker", "2"),)
    brokers = s.proxy.context.brokers
    # The watch ends before its page is requested.
    await eventually(lambda: 2 in [watch.owner for watch in brokers._here])
    s.proxy.topology.remove_broker(2)
    await eventually(lambda: 2 in [watch.owner for watch in brokers._gone])
    for after_s in (0.0, 599.0):
        s.now = 100.0 + after_s
        assert Scrape(s.proxy).samples[series] == 0
    # A broker that returns is shown with its current state.
    s.proxy.topology.set_broker(2, s.brokers[1].address)
    assert Scrape(s.proxy).samples[series] == 1
    s.proxy.topology.remove_broker(2)
    assert Scrape(s.proxy).samples[series] == 0
    s.now += 601.0
    assert series not in Scrape(s.proxy).samples
    assert Scrape(s.proxy)("kproxy_broker_up", broker="1") == 1


@scene(clients=0)
async def test_brokers_that_left_are_bounded(s: Scene) -> None:
    for broker in range(MAX_GONE + 30):
        s.proxy.topology.set_broker(broker, Address("127.0.0.1", 1))
        s.proxy.context.brokers.follow()
        s.proxy.topology.remove_broker(broker)
    shown = [labels["broker"] for labels in Scrape(s.proxy).labels("kproxy_broker_up")]
    # The first brokers are forgotten.
    assert sorted(map(int, shown)) == list(range(30, MAX_GONE + 30))


# A probe waits longer than a broker is stopped here.
@scene(ANSWERS, owners=[1, 2], limits={"probe_timeout_s": 30.0}, one_go=True)
async def test_stopped_broker_alone_moves_its_series(s: Scene) -> None:
    """A broker that stalls for a second is named, though it neither hangs nor is down."""
    well, age, probed = (
        {T0: 0, T1: 0},
        "kproxy_broker_oldest_request_age_seconds",
        "kproxy_broker_probe_duration_seconds",
    )
    with broker_process() as (pid, address):
        s.proxy.topology.set_broker(2, address)
        assert await s.ask(produce_frame(BOTH)) == [well]
        before = Scrape(s.proxy)
        for name in BROKER_SERIES:
            assert [before(name, broker=broker) for broker in "12"] == [0, 0], name
        os.kill(pid, signal.SIGSTOP)
        try:
            s.send(*(produce_frame(BOTH, records=batch(n)) for n in (1, 2)))
            await eventually(lambda: Scrape(s.proxy)(age, broker="2") >= 1.0)
            stopped = Scrape(s.proxy)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert stopped("kproxy_broker_in_flight_requests", broker="2") == 2
        assert [await s.codes() for _ in (1, 2)] == [well, well]
        await eventually(lambda: Scrape(s.proxy)(f"{probed}_count", broker="2") >= 1)
        after = Scrape(s.proxy)
        assert after(f"{probed}_sum", broker="2") > 0.2
        assert [after(name, broker="2") for name in ("kproxy_broker_in_flight_requests", age)] == [0, 0]
        assert after("kproxy_hangs_total") == 0
        for scrape in (stopped, after):
            assert [scrape(name, broker="1") for name in BROKER_SERIES] == [0] * len(BROKER_SERIES)
        # The client closes first, because the broker stops before the proxy.
        s.client.abort()
        await s.until_sessions()


@both_loops
@in_one_go
async def test_errors_and_retries_name_their_broker() -> None:
    async with staged(answers_by(6, 10), DOWN, HOLDS) as s:
        s.send(produce_frame({"t": [0, 1, 2]}, timeout_ms=1), produce_frame(acks=5))
        assert await s.codes() == {T0: 10, T1: 6, ("t", 2): 7}
        await s.client.receive()
        scrape = Scrape(s.proxy)
        series = "kproxy_errors_total"
        shown = {(has["error"], has["broker"]): scrape(series, **has) for has in scrape.labels(series)}
        assert shown == {
            ("MESSAGE_TOO_LARGE", "1"): 1,
            ("NOT_LEADER_OR_FOLLOWER", "2"): 1,
            ("REQUEST_TIMED_OUT", "3"): 1,
            ("INVALID_REQUIRED_ACKS", ""): 1,
        }
        assert scrape("kproxy_retries_total", cause="NOT_LEADER_OR_FOLLOWER", broker="1") == 1
        assert scrape("kproxy_retries_total", cause="NOT_WRITTEN", broker="2") == 2
        assert scrape("kproxy_retries_total") == 3


def test_changing_brokers_create_no_unbounded_labels() -> None:
    tally = Tally()
    for broker in range(MAX_BROKERS + 30):
        tally.error(0, 6, broker)
        tally.error(0, 6, 0)
    assert len(tally.errors) == MAX_BROKERS + 1
    assert tally.errors[0, 6, OTHER_BROKERS] == 30
