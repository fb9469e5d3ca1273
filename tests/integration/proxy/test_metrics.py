"""Every metric changes when the counted event happens, and by the right amount."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kproxy.observe.exposition import render
from kproxy.observe.metrics import ProxyCollector
from kproxy.observe.table import TableView
from kproxy.observe.tally import MAX_BROKERS, MAX_DROP_TOPICS, OTHER_BROKERS, Tally
from kproxy.proxy import server
from kproxy.proxy.broker_health import MAX_GONE
from kproxy.routing.topology import Address
from kproxy_codec.api_keys import API_VERSIONS, METADATA
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, answers_everything, broker_process
from tests.support.clients.raw_client import batch, fetch_frame, list_offsets_frame, produce_frame, raw_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, in_one_go, running_proxy
from tests.support.processes.served import ServedBroker, page, port_of, samples, static_proxy
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

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels, whatever others they have."""
        return sum(
            value for (each, has), value in self.samples.items() if each == name and labels.items() <= dict(has).items()
        )


@both_loops
async def test_vitals_leave_turns_to_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TURN_S", 0.0)
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        clients = [await proxy.client() for _ in range(20)]
        for client in clients:
            client.send(produce_frame())
            await client.answer()
        sent_bytes = Scrape(proxy)("kproxy_client_sent_bytes_total")

        async def look() -> int:
            vitals = await proxy.listener.vitals()
            return vitals.sent_bytes + proxy.context.tally.sent_bytes

        looking = asyncio.create_task(look())
        turns = 0
        while not looking.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 5:
                for client in clients[::2]:
                    client.abort()
        assert turns > 5
        # None is counted twice or left out, whether its session has ended meanwhile or not.
        assert await looking == sent_bytes


@both_loops
async def test_requests_are_counted_by_api_and_version() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(), produce_frame(version=3), produce_frame(version=3), fetch_frame())
        client.send(list_offsets_frame())
        for _ in range(5):
            await client.receive()
        scrape = Scrape(proxy)
        assert scrape("kproxy_requests_total", api="PRODUCE", version="9") == 1
        assert scrape("kproxy_requests_total", api="PRODUCE", version="3") == 2
        assert scrape("kproxy_requests_total", api="FETCH", version="12") == 1
        assert scrape("kproxy_requests_total", api="LIST_OFFSETS", version="6") == 1


@both_loops
async def test_versions_that_a_client_invents_are_one_label() -> None:
    async with running_proxy() as proxy:
        for api_key, version in ((API_VERSIONS, 2000), (API_VERSIONS, 3000), (METADATA, 4000), (METADATA, -7)):
            client = await proxy.client()
            client.send(raw_frame(struct.pack(">hhih", api_key, version, 1, 1) + b"x" + bytes(8)))
            if api_key == API_VERSIONS:
                await client.receive()
            else:
                # Refused before it is a request.
                assert await client.is_closed()
        scrape = Scrape(proxy)
        assert scrape("kproxy_requests_total", api="API_VERSIONS", version="other") == 2
        assert len([name for name, _ in scrape.samples if name == "kproxy_requests_total"]) == 1


@both_loops
async def test_bytes_are_counted_both_ways_for_closed_connections() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        sent = received = 0
        for records in (batch(), batch() + bytes(3 << 20)):
            client = await proxy.client()
            frame = produce_frame(records=records)
            client.send(frame)
            sent += len(frame)
            received += len(await client.receive())
            assert Scrape(proxy)("kproxy_client_sent_bytes_total") == received
            client.close()
            await eventually(lambda: not proxy.listener._sessions)
            assert Scrape(proxy)("kproxy_client_sent_bytes_total") == received
            assert Scrape(proxy)("kproxy_client_received_bytes_total") == sent


@both_loops
async def test_requests_in_flight_are_shown_until_answered() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        frames = [produce_frame(records=batch(n)) for n in range(3)]
        client.send(*frames)
        first = await upstream.next()
        # The route is new: the other two wait in the proxy, and count all the same.
        assert Scrape(proxy)("kproxy_in_flight_requests") == 3
        assert Scrape(proxy)("kproxy_in_flight_bytes") == sum(map(len, frames))
        first.answer()
        for _ in range(2):
            (await upstream.next()).answer()
        for _ in range(3):
            await client.receive()
        assert Scrape(proxy)("kproxy_in_flight_requests") == 0
        assert Scrape(proxy)("kproxy_in_flight_bytes") == 0


@both_loops
async def test_error_codes_are_counted_by_partition_and_name() -> None:
    def script(asked: Asked) -> None:
        asked.answer(results={("t", 0): 10, ("t", 2): 87})

    upstream = ScriptedUpstream(1, script)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 1, 2])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1, 2]}), produce_frame({"t": [1, 1]}), produce_frame(acks=5))
        for _ in range(3):
            await client.receive()
        client.send(fetch_frame(session_id=77, session_epoch=3))
        await client.receive()
        scrape = Scrape(proxy)
        for error, partitions in {
            "MESSAGE_TOO_LARGE": 1,
            "INVALID_RECORD": 1,
            "INVALID_REQUEST": 2,
            "INVALID_REQUIRED_ACKS": 1,
        }.items():
            assert scrape("kproxy_errors_total", api="PRODUCE", error=error) == partitions, error
        assert scrape("kproxy_errors_total", api="FETCH", error="FETCH_SESSION_ID_NOT_FOUND") == 1


@both_loops
async def test_unknown_api_versions_version_counts_as_its_error() -> None:
    async with running_proxy() as proxy:
        client = await proxy.client()
        client.send(raw_frame(struct.pack(">hhih", API_VERSIONS, 90, 1, 1) + b"x" + bytes(8)))
        await client.receive()
        assert Scrape(proxy)("kproxy_errors_total", api="API_VERSIONS", error="UNSUPPORTED_VERSION") == 1


@both_loops
async def test_retries_are_counted_by_readable_cause() -> None:
    codes = iter([6, 19, 0])
    upstream = ScriptedUpstream(1, lambda asked: asked.answer(results={("t", 0): next(codes)}))
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        assert (await client.answer()).codes == {("t", 0): 0}
        scrape = Scrape(proxy)
        assert scrape("kproxy_retries_total", cause="NOT_LEADER_OR_FOLLOWER") == 1
        assert scrape("kproxy_retries_total", cause="NOT_ENOUGH_REPLICAS") == 1
        # A code that is retried is not one that the client got.
        assert not [labels for name, labels in scrape.samples if name == "kproxy_errors_total"]


@pytest.mark.parametrize(
    ("event", "cause"), [(lambda up: up.stop_listening(), "NOT_WRITTEN"), (lambda up: up.stop(), "CONNECTION_LOST")]
)
@both_loops
async def test_connection_events_have_named_causes(event: Callable[[ScriptedUpstream], object], cause: str) -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        if cause == "NOT_WRITTEN":
            await event(upstream)  # type: ignore[misc]
            client.send(produce_frame())
        else:
            client.send(produce_frame())
            await upstream.next()
            await event(upstream)  # type: ignore[misc]
        await eventually(lambda: Scrape(proxy)("kproxy_retries_total", cause=cause) >= 1)


@both_loops
async def test_split_requests_are_counted() -> None:
    first, second = ScriptedUpstream(1, answers_everything), ScriptedUpstream(2, answers_everything)
    async with running_proxy(first, second) as proxy:
        proxy.own(1)
        proxy.own(2, partitions=[1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1]}), produce_frame({"t": [0]}))
        for _ in range(2):
            await client.receive()
        assert Scrape(proxy)("kproxy_split_requests_total") == 1
        assert Scrape(proxy)("kproxy_upstream_connections") == 2


@both_loops
@in_one_go
async def test_deadlines_are_counted() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame(timeout_ms=1))
        assert (await client.answer()).codes == {("t", 0): 7}
        assert Scrape(proxy)("kproxy_deadlines_total") == 1
        assert Scrape(proxy)("kproxy_errors_total", api="PRODUCE", error="REQUEST_TIMED_OUT") == 1


@both_loops
async def test_lost_acks_0_batches_are_counted_by_topic() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        for topic in ("t", "u"):
            proxy.own(1, topic, partitions=[0, 1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1], "u": [0]}, acks=0))
        assert await client.is_closed()
        await eventually(lambda: proxy.counters["acks0.undeliverable"] == 3)
        scrape = Scrape(proxy)
        assert scrape("kproxy_acks0_dropped_total", topic="t", reason="NOT_LEADER_OR_FOLLOWER") == 2
        assert scrape("kproxy_acks0_dropped_total", topic="u", reason="NOT_LEADER_OR_FOLLOWER") == 1


@both_loops
async def test_invented_topics_create_no_unbounded_labels() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        await upstream.stop_listening()
        topics = [f"t{n}" for n in range(MAX_DROP_TOPICS + 30)]
        for topic in topics:
            proxy.own(1, topic)
        client = await proxy.client()
        client.send(produce_frame({topic: [0] for topic in topics}, acks=0))
        assert await client.is_closed()
        await eventually(lambda: proxy.counters["acks0.undeliverable"] == len(topics))
        scrape = Scrape(proxy)
        series = {labels: n for (name, labels), n in scrape.samples.items() if name == "kproxy_acks0_dropped_total"}
        assert len(series) == MAX_DROP_TOPICS + 1
        assert scrape("kproxy_acks0_dropped_total", topic="other", reason="NOT_LEADER_OR_FOLLOWER") == 30


@both_loops
async def test_client_connections_are_counted_by_outcome() -> None:
    async with running_proxy(limits={"max_connections": 2}) as proxy:
        bad, good = await proxy.client(), await proxy.client()
        assert await (await proxy.client()).is_closed()
        scrape = Scrape(proxy)
        assert scrape("kproxy_client_connections") == 2
        assert scrape("kproxy_client_connections_accepted_total") == 2
        assert scrape("kproxy_client_connections_refused_total") == 1
        assert scrape("kproxy_client_connections_cut_total") == 0
        bad.send(b"\xff\xff\xff\xff")
        assert await bad.is_closed()
        await eventually(lambda: Scrape(proxy)("kproxy_client_connections") == 1)
        assert Scrape(proxy)("kproxy_client_connections_cut_total") == 1
        good.close()


@both_loops
async def test_the_table_is_described() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream) as proxy:
        proxy.own(1, partitions=[0, 1, 5])
        revision = proxy.disown(partitions=[1])
        scrape = Scrape(proxy, age_s=7.5, stale=True)
        assert scrape("kproxy_table_partitions") == 2
        assert scrape("kproxy_table_brokers") == 1
        assert scrape("kproxy_table_revision") == revision
        assert scrape("kproxy_table_age_seconds") == 7.5
        assert scrape("kproxy_table_stale") == 1
        proxy.topology.begin_rebuild()
        assert Scrape(proxy)("kproxy_table_partitions") == 0
        assert ("kproxy_table_age_seconds", ()) not in Scrape(proxy, age_s=float("inf")).samples


@both_loops
async def test_produce_is_timed_from_first_byte_to_answer() -> None:
    upstream = ScriptedUpstream(1)
    now = [100.0]
    async with running_proxy(upstream, clock=lambda: now[0]) as proxy:
        proxy.own(1)
        client = await proxy.client()
        frame = produce_frame()
        client.send(frame[:20])
        await eventually(lambda: proxy.context.tally.received_bytes == 20)
        now[0] += 0.02
        client.send(frame[20:])
        asked = await upstream.next()
        now[0] += 0.04
        asked.answer()
        await client.receive()
        client.send(fetch_frame(max_wait_ms=0))
        now[0] += 5
        (await upstream.next()).answer(results={("t", 0): {"records": b"x"}})
        await client.receive()
        scrape = Scrape(proxy)
        buckets = {
            dict(labels)["le"]: count
            for (name, labels), count in scrape.samples.items()
            if name == "kproxy_produce_duration_seconds_bucket"
        }
        assert (buckets["0.05"], buckets["0.1"], buckets["+Inf"]) == (0, 1, 1)
        assert scrape("kproxy_produce_duration_seconds_sum") == pytest.approx(0.06)
        assert scrape("kproxy_produce_duration_seconds_count") == 1


@both_loops
async def test_event_loop_delay_is_measured() -> None:
    async with running_proxy() as proxy:
        await eventually(lambda: Scrape(proxy)("kproxy_event_loop_delay_seconds_count") >= 1)
        time.sleep(0.4)
        await eventually(lambda: Scrape(proxy)("kproxy_event_loop_delay_seconds_sum") > 0.2)


@both_loops
@in_one_go
async def test_draining_is_shown() -> None:
    upstream = ScriptedUpstream(1)
    async with running_proxy(upstream, limits={"drain_s": 0.3}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        await upstream.next()
        assert Scrape(proxy)("kproxy_draining") == 0
        stopping = asyncio.create_task(proxy.listener.stop())
        await eventually(lambda: Scrape(proxy)("kproxy_draining") == 1)
        await stopping


async def test_process_serves_all_metrics_in_both_formats(tmp_path: Path) -> None:
    """And every one of them is in the documentation, and nothing else is."""
    upstream = await ServedBroker(1, answers_everything).start()
    with static_proxy(tmp_path, {1: upstream.port}, more=("--audit-sink", f"json:{tmp_path}/trail")) as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(process))
        writer.write(produce_frame())
        await reader.readexactly(4)
        status, text = await asyncio.to_thread(page, process.admin, "/metrics")
        assert status == 200
        shown = samples(text)
        assert shown["kproxy_requests_total", (("api", "PRODUCE"), ("version", "9"))] == 1
        assert shown["kproxy_produce_duration_seconds_count", ()] == 1
        assert shown["kproxy_table_partitions", ()] == 1
        assert shown["kproxy_client_connections", ()] == 1
        # The process' and Python's own.
        assert shown["process_resident_memory_bytes", ()] > 1 << 20
        assert any(name == "python_info" for name, _ in shown)
        _, text = await asyncio.to_thread(
            page, process.admin, "/metrics", Accept="application/openmetrics-text; version=1.0.0"
        )
        assert text.endswith("# EOF\n")
        writer.close()
    await upstream.stop()
    families = set(re.findall(r"^# TYPE (kproxy_[a-z0-9_]+)", text, re.MULTILINE))
    of_the_proxy, _, of_brokers = DOCUMENT.read_text().partition("## The reference brokers")
    assert of_brokers
    documented = {name.removesuffix("_total") for name in SERIES.findall(of_the_proxy)}
    assert documented == families


@both_loops
@in_one_go
async def test_brokers_that_hang_are_shown_until_they_answer() -> None:
    upstream = ScriptedUpstream(1)
    upstream.answers_probes = False
    async with running_proxy(upstream, limits={"probe_timeout_s": 0.2}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}))
        await client.answer()
        assert Scrape(proxy)("kproxy_hung_brokers") == 1
        assert Scrape(proxy)("kproxy_broker_hung", broker="1") == 1
        assert Scrape(proxy)("kproxy_hangs_total", broker="1") == 1
        assert Scrape(proxy)("kproxy_broker_up", broker="1") == 0
        for probe in upstream.probes:
            probe.connection.abort()
        upstream.answers_probes = True
        await eventually(lambda: Scrape(proxy)("kproxy_hung_brokers") == 0)
        assert Scrape(proxy)("kproxy_broker_hung", broker="1") == 0
        assert Scrape(proxy)("kproxy_hangs_total", broker="1") == 1


@both_loops
async def test_down_brokers_are_shown_until_they_return() -> None:
    first, second = ScriptedUpstream(1, answers_everything), ScriptedUpstream(2, answers_everything)
    async with running_proxy(first, second) as proxy:
        proxy.own(2)
        client = await proxy.client()
        await second.stop_listening()
        assert [Scrape(proxy)("kproxy_broker_up", broker=broker) for broker in "12"] == [1, 1]
        client.send(produce_frame())
        assert (await client.answer()).codes == {("t", 0): 6}
        assert [Scrape(proxy)("kproxy_broker_up", broker=broker) for broker in "12"] == [1, 0]
        await second.start(second.port)
        while Scrape(proxy)("kproxy_broker_up", broker="2") == 0:
            client.send(produce_frame())
            await client.answer()


@both_loops
async def test_broker_that_left_shows_zero_for_ten_minutes() -> None:
    """Kafka and etcd drop a dead broker within seconds."""
    now = [100.0]
    first, second = ScriptedUpstream(1, answers_everything), ScriptedUpstream(2, answers_everything)
    series = "kproxy_broker_up", (("broker", "2"),)
    async with running_proxy(first, second, clock=lambda: now[0]) as proxy:
        health = proxy.context.health
        # No page is asked for before it has left.
        await eventually(lambda: 2 in health._here)
        proxy.topology.remove_broker(2)
        await eventually(lambda: 2 in health._gone)
        for after_s in (0.0, 599.0):
            now[0] = 100.0 + after_s
            assert Scrape(proxy).samples[series] == 0
        # One that comes back is shown as it is.
        proxy.topology.set_broker(2, second.address)
        assert Scrape(proxy).samples[series] == 1
        proxy.topology.remove_broker(2)
        assert Scrape(proxy).samples[series] == 0
        now[0] += 601.0
        assert series not in Scrape(proxy).samples
        assert Scrape(proxy)("kproxy_broker_up", broker="1") == 1


@both_loops
async def test_brokers_that_left_are_bounded() -> None:
    async with running_proxy() as proxy:
        for broker in range(MAX_GONE + 30):
            proxy.topology.set_broker(broker, Address("127.0.0.1", 1))
            proxy.context.health.follow()
            proxy.topology.remove_broker(broker)
        shown = [dict(labels)["broker"] for name, labels in Scrape(proxy).samples if name == "kproxy_broker_up"]
        # The first are forgotten.
        assert sorted(map(int, shown)) == list(range(30, MAX_GONE + 30))


@both_loops
@in_one_go
async def test_stopped_broker_alone_moves_its_series() -> None:
    """A broker that stands still for a second is named, though it neither hangs nor is down."""
    healthy = ScriptedUpstream(1, answers_everything)
    with broker_process() as (pid, address):
        # A probe waits longer than a broker is stopped here.
        async with running_proxy(healthy, limits={"probe_timeout_s": 30.0}) as proxy:
            proxy.topology.set_broker(2, address)
            proxy.own(1)
            proxy.own(2, partitions=[1])
            client = await proxy.client()
            client.send(produce_frame({"t": [0, 1]}))
            assert (await client.answer()).codes == {("t", 0): 0, ("t", 1): 0}
            before = Scrape(proxy)
            for name in BROKER_SERIES:
                assert [before(name, broker=broker) for broker in "12"] == [0, 0], name
            os.kill(pid, signal.SIGSTOP)
            try:
                for n in (1, 2):
                    client.send(produce_frame({"t": [0, 1]}, records=batch(n)))
                name = "kproxy_broker_oldest_request_age_seconds"
                await eventually(lambda: Scrape(proxy)(name, broker="2") >= 1.0)
                stopped = Scrape(proxy)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert stopped("kproxy_broker_in_flight_requests", broker="2") == 2
            for _ in (1, 2):
                assert (await client.answer()).codes == {("t", 0): 0, ("t", 1): 0}
            count = "kproxy_broker_probe_duration_seconds_count"
            await eventually(lambda: Scrape(proxy)(count, broker="2") >= 1)
            after = Scrape(proxy)
            assert after("kproxy_broker_probe_duration_seconds_sum", broker="2") > 0.2
            assert after("kproxy_broker_in_flight_requests", broker="2") == 0
            assert after("kproxy_broker_oldest_request_age_seconds", broker="2") == 0
            assert after("kproxy_hangs_total") == 0
            for scrape in (stopped, after):
                assert [scrape(name, broker="1") for name in BROKER_SERIES] == [0] * len(BROKER_SERIES)


@both_loops
async def test_errors_and_retries_name_their_broker() -> None:
    codes = iter([6, 10])
    first = ScriptedUpstream(1, lambda asked: asked.answer(results={("t", 0): next(codes)}))
    second, silent = ScriptedUpstream(2), ScriptedUpstream(3)
    async with running_proxy(first, second, silent) as proxy:
        await second.stop_listening()
        for broker in (1, 2, 3):
            proxy.own(broker, partitions=[broker - 1])
        client = await proxy.client()
        client.send(produce_frame({"t": [0, 1, 2]}, timeout_ms=1), produce_frame(acks=5))
        assert (await client.answer()).codes == {("t", 0): 10, ("t", 1): 6, ("t", 2): 7}
        await client.receive()
        scrape = Scrape(proxy)
        shown = {
            tuple(dict(labels)[label] for label in ("error", "broker")): count
            for (name, labels), count in scrape.samples.items()
            if name == "kproxy_errors_total"
        }
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
