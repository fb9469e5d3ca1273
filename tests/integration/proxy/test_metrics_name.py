"""A slow broker, a hung one, a hot topic and a busy client are each found by the labels of the series that move."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kproxy.observe.busiest import MOST_NAME_BYTES, MOST_TRACKED, RANK_S, Busiest
from kproxy.observe.tally import BROKER_ERRORS, STAGES
from kproxy.proxy.broker_watch import GONE_FOR_S
from tests.integration.proxy.test_metrics import Scrape
from tests.support.brokers.reference_broker import start_brokers
from tests.support.brokers.scripted_upstream import Asked, Script
from tests.support.clients.raw_client import batch, fetch_frame, produce_frame
from tests.support.etcd.embedded import own_etcd
from tests.support.processes.running_proxy import both_loops, in_one_go
from tests.support.processes.served import Samples, Served, page, served
from tests.support.scene import ANSWERS, HOLDS, T0, Scene, scene, staged
from tests.support.waiting import eventually

SLOW_S = 0.2
NAMED = "[metrics]\ntopics = 1\nclients = 2\n"


def answers_after(seconds: float) -> Script:
    """A broker that answers each request after this time."""

    def script(asked: Asked) -> None:
        asyncio.get_running_loop().call_later(seconds, asked.answer)

    return script


def by(samples: Samples, series: str, label: str, **others: str) -> dict[str, float]:
    """The values of the series with these labels, by one more label."""
    return {
        dict(has)[label]: value
        for (name, has), value in samples.items()
        if name == series and others.items() <= dict(has).items()
    }


def mean(samples: Samples, series: str, label: str, **others: str) -> dict[str, float]:
    """The mean time of a histogram's series that have counted something, by one more label."""
    counts = by(samples, f"{series}_count", label, **others)
    sums = by(samples, f"{series}_sum", label, **others)
    return {each: sums[each] / count for each, count in counts.items() if count}


def of_client(client_id: bytes, frame: bytes) -> bytes:
    """A request of another client: with an id as long as the usual one."""
    assert len(client_id) == len(b"tests")
    return frame.replace(b"tests", client_id, 1)


async def ask(s: Served, *frames: bytes) -> None:
    """Send these produce requests one after another, on a connection of their own."""
    client = await s.client()
    for frame in frames:
        client.send(frame)
        await client.answer()


def produced_at(topic: str, partition: int, size: int = 100) -> bytes:
    return produce_frame({topic: [partition]}, records=batch() + bytes(size))


async def test_slow_broker_is_named(tmp_path: Path) -> None:
    async with served(tmp_path, ANSWERS, answers_after(SLOW_S), ANSWERS) as s:
        await asyncio.gather(*(ask(s, *[produced_at("t", n)] * 4) for n in range(3)))
        seen = await s.samples()
    took = mean(seen, "kproxy_broker_request_seconds", "broker", api="PRODUCE")
    assert took.keys() == {"1", "2", "3"}
    assert took.pop("2") >= SLOW_S
    assert max(took.values()) < SLOW_S / 2
    # And the stages say that it is a broker.
    spent = by(seen, "kproxy_produce_stage_seconds_sum", "stage")
    assert max(spent, key=lambda stage: spent[stage]) == "broker"
    assert by(seen, "kproxy_broker_sent_bytes_total", "broker")["2"] >= 4 * len(produced_at("t", 1))
    assert all(count > 0 for count in by(seen, "kproxy_broker_received_bytes_total", "broker").values())
    assert by(seen, "kproxy_upstream_connections", "broker") == {"1": 1, "2": 1, "3": 1}


async def test_slow_broker_delays_others_in_order_only(tmp_path: Path) -> None:
    """A client's later requests wait for their turn: the broker that answered them at once is not blamed."""
    async with served(tmp_path, answers_after(SLOW_S), ANSWERS) as s:
        client = await s.client()
        for _ in range(3):
            client.send(produced_at("t", 0), produced_at("t", 1))
            for _ in range(2):
                await client.answer()
        seen = await s.samples()
    took = mean(seen, "kproxy_broker_request_seconds", "broker", api="PRODUCE")
    assert took["1"] >= SLOW_S > 2 * took["2"]
    spent = by(seen, "kproxy_produce_stage_seconds_sum", "stage")
    assert spent["order"] >= 3 * SLOW_S * 0.9
    # The dials are in `queue`.
    assert spent["queue"] + spent["reading"] + spent["writing"] < spent["order"]


@scene(HOLDS, HOLDS, limits={"probe_timeout_s": 0.3}, one_go=True)
async def test_hung_broker_is_named_with_its_bytes(s: Scene) -> None:
    frame = produce_frame({"t": [1]})
    s.brokers[1].answers_probes = False
    s.send(frame)
    asked = await s.brokers[1].next()
    waiting = Scrape(s.proxy)
    assert [waiting("kproxy_broker_in_flight_bytes", broker=each) for each in "12"] == [0, len(frame)]
    assert [waiting("kproxy_broker_in_flight_requests", broker=each) for each in "12"] == [0, 1]
    assert await s.codes() == {("t", 1): 7}
    hung = Scrape(s.proxy)
    assert [hung("kproxy_broker_hung", broker=each) for each in "12"] == [0, 1]
    assert [hung("kproxy_broker_connection_errors_total", broker=each, kind="timeout") for each in "12"] == [0, 1]
    assert [hung("kproxy_hung_brokers"), hung("kproxy_hangs_total", broker="2")] == [1, 1]
    assert [hung("kproxy_broker_up", broker=each) for each in "12"] == [1, 0]
    assert hung("kproxy_broker_in_flight_bytes") == 0
    assert hung("kproxy_broker_request_seconds_count") == 0
    asked.connection.abort()
    s.brokers[1].wake()
    await eventually(lambda: Scrape(s.proxy)("kproxy_hung_brokers") == 0)
    assert [Scrape(s.proxy)(f"kproxy_{name}", broker="2") for name in ("broker_hung", "hangs_total")] == [0, 1]


@scene(HOLDS, at=100.0)
async def test_stages_of_a_request_add_up(s: Scene) -> None:
    frame = produce_frame()
    s.send(frame[:20])
    await eventually(lambda: s.proxy.context.tally.received_bytes == 20)
    s.now += 0.02
    s.send(frame[20:], produce_frame(records=batch(1)), produce_frame(records=batch(2)))
    first = await s.next()
    s.now += 0.1
    # The route was new: only now the other two leave.
    first.answer()
    second, third = await s.next(), await s.next()
    s.now += 0.4
    third_answer = third.reply()
    second.answer()
    s.now += 1.6
    third.connection.write(third_answer)
    for _ in range(3):
        await s.client.receive()
    await eventually(lambda: Scrape(s.proxy)("kproxy_produce_stage_seconds_count", stage="writing") == 3)
    scrape = Scrape(s.proxy)
    spent = {stage: scrape("kproxy_produce_stage_seconds_sum", stage=stage) for stage in STAGES}
    assert spent["reading"] == pytest.approx(0.02)
    assert spent["queue"] == pytest.approx(0.2)
    # The second answer may have been read before the time advanced, or after.
    assert spent["broker"] == pytest.approx(0.1 + 0.4 + 2.0, abs=1.61)
    assert spent["order"] == spent["writing"] == 0
    whole = scrape("kproxy_produce_duration_seconds_sum")
    assert sum(spent.values()) == pytest.approx(whole)
    assert scrape("kproxy_broker_request_seconds_sum", broker="1", api="PRODUCE") == pytest.approx(spent["broker"])


@scene(HOLDS, HOLDS, at=100.0)
async def test_answers_wait_in_order_and_for_readers(s: Scene) -> None:
    for number in (0, 1):
        s.send(produce_frame({"t": [number]}))
        (await s.brokers[number].next()).answer()
        await s.client.receive()
    s.send(produce_frame({"t": [0]}), produce_frame({"t": [1]}))
    slow, quick = await s.next(), await s.brokers[1].next()
    quick.answer()
    await eventually(lambda: Scrape(s.proxy)("kproxy_broker_in_flight_requests", broker="2") == 0)
    # Only of what is not answered.
    frame_bytes = len(produce_frame({"t": [0]}))
    assert [Scrape(s.proxy)("kproxy_broker_in_flight_bytes", broker=each) for each in "12"] == [frame_bytes, 0]
    s.now += 3.0
    slow.answer()
    for _ in range(2):
        await s.client.receive()
    scrape = Scrape(s.proxy)
    spent = {stage: scrape("kproxy_produce_stage_seconds_sum", stage=stage) for stage in STAGES}
    assert spent == {"reading": 0, "queue": 0, "broker": 3.0, "order": 3.0, "writing": 0}
    assert [scrape("kproxy_broker_request_seconds_sum", broker=each) for each in "12"] == [3.0, 0.0]


@scene(HOLDS)
async def test_fetches_are_timed_apart(s: Scene) -> None:
    s.send(fetch_frame(max_wait_ms=0))
    (await s.next()).answer(results={T0: {"records": b"x"}})
    await s.client.receive()
    scrape = Scrape(s.proxy)
    assert [scrape("kproxy_broker_request_seconds_count", api=api) for api in ("PRODUCE", "FETCH")] == [0, 1]
    assert scrape("kproxy_produce_stage_seconds_count") == 0


def errors_of(s: Scene, broker: str = "1") -> dict[str, float]:
    scrape = Scrape(s.proxy)
    counts = {kind: scrape("kproxy_broker_connection_errors_total", broker=broker, kind=kind) for kind in BROKER_ERRORS}
    return {kind: count for kind, count in counts.items() if count}


@both_loops
@in_one_go
async def test_errors_of_connections_have_kinds() -> None:
    async with staged(HOLDS) as s:
        s.send(produce_frame())
        (await s.next()).answer(77)
        await eventually(lambda: errors_of(s).get("invalid", 0) == 1)
        await eventually(lambda: Scrape(s.proxy)("kproxy_broker_dials_total", broker="1") >= 2)
        (await s.next()).connection.abort()
        await eventually(lambda: errors_of(s).get("closed", 0) == 1)
        await s.next()
        await s.broker.stop()
        await eventually(lambda: errors_of(s).get("refused", 0) >= 1)
        assert errors_of(s).keys() == {"invalid", "closed", "refused"}


@scene(ANSWERS, ANSWERS, at=100.0)
async def test_series_end_with_their_broker(s: Scene) -> None:
    assert await s.ask(produce_frame({"t": [0]}), produce_frame({"t": [1]}))
    s.proxy.context.tally.error(0, 6, 2)
    s.proxy.context.tally.retry(6, 2)
    s.proxy.context.tally.hang(2)
    await eventually(lambda: 2 in [watch.owner for watch in s.proxy.context.brokers._here])
    s.client.abort()
    await s.until_sessions()

    def series_of(broker: str) -> set[str]:
        return {name for name, has in Scrape(s.proxy).samples if ("broker", broker) in has}

    assert "kproxy_errors_total" in series_of("2") - series_of("1")
    s.proxy.topology.remove_broker(2)
    assert "kproxy_broker_request_seconds_sum" in series_of("2")
    s.now += GONE_FOR_S + 1
    assert series_of("2") == set()
    assert "kproxy_broker_request_seconds_sum" in series_of("1")
    # Nothing is kept of it, so that other ids have room. One that comes back begins anew.
    assert s.proxy.context.tally.by_broker.keys() == {1}
    s.proxy.topology.set_broker(2, s.brokers[1].address)
    (client,) = [await s.proxy.client()]
    client.send(produce_frame({"t": [1]}))
    await client.answer()
    scrape = Scrape(s.proxy)
    assert [scrape("kproxy_broker_request_seconds_count", broker=each, api="PRODUCE") for each in "12"] == [1, 1]
    assert scrape("kproxy_errors_total") == 0


async def test_hot_topic_is_named(tmp_path: Path) -> None:
    topics = '[[topics]]\nname = "hot"\nowners = [1]\n'
    async with served(tmp_path, ANSWERS, rooms=topics + NAMED) as s:
        await ask(s, produced_at("t", 0), *[produced_at("hot", 0, 5_000)] * 3, produce_frame({"t": [0], "hot": [0]}))
        seen = await s.samples()
    # The first topic has the only name until topics are ranked.
    assert by(seen, "kproxy_topic_requests_total", "topic") == {"t": 2, "other": 4}
    received = by(seen, "kproxy_topic_bytes_total", "topic")
    assert received["other"] > 3 * 5_000
    assert 100 < received["t"] < 1_000


async def test_busy_client_is_named(tmp_path: Path) -> None:
    async with served(tmp_path, ANSWERS, rooms=NAMED) as s:
        busy, calm = of_client(b"spark", produced_at("t", 0, 50_000)), produced_at("t", 0)
        await asyncio.gather(ask(s, *[busy] * 5), ask(s, of_client(b"flink", calm)))
        await ask(s, of_client(b"first", calm), of_client(b"third", calm))
        for client in s.clients:
            client.abort()
        seen = await s.samples()
        while seen["kproxy_client_connections", ()]:
            seen = await s.samples()
    requests = by(seen, "kproxy_client_id_requests_total", "client_id", principal="")
    assert requests["spark"] == 5
    assert requests["flink"] == 1
    assert by(seen, "kproxy_client_id_requests_total", "client_id", principal="other") == {"other": 2}
    assert by(seen, "kproxy_client_id_received_bytes_total", "client_id")["spark"] == 5 * len(busy)
    sent = by(seen, "kproxy_client_id_sent_bytes_total", "client_id")
    assert sent["spark"] == 5 * sent["flink"] > 0


@scene(HOLDS, clients=0)
async def test_late_answer_of_forgotten_client_is_counted(s: Scene) -> None:
    clock = Clock()
    busiest = s.proxy.context.tally.clients = Busiest(("client_id", "principal"), 1, clock)
    s.clients = [await s.proxy.client() for _ in range(2)]
    for client in s.clients:
        client.send(of_client(b"first" if client is s.client else b"other", produced_at("t", 0)))
        late = await s.next()
    for _ in range(2):
        # Nothing is used between the two rankings.
        clock.now += RANK_S
        busiest.read()
    late.answer()
    sent = await s.clients[1].receive()
    s.clients[1].close()
    await s.until_sessions(1)
    assert sum(use[2] for _, use in busiest.read()) == len(sent)


async def test_names_are_not_counted_by_default(tmp_path: Path) -> None:
    async with served(tmp_path, ANSWERS) as s:
        await ask(s, produced_at("t", 0))
        seen = await s.samples()
    assert not [name for name, _ in seen if name.startswith(("kproxy_topic_", "kproxy_client_id_"))]


async def pages_of_proxies(tmp_path: Path) -> AsyncIterator[str]:
    for number in ("1", "2"):
        (tmp_path / number).mkdir()
        more = ("--audit-sink", f"json:{tmp_path}/trail", "--workers", number)
        async with served(tmp_path / number, ANSWERS, more=more, rooms=NAMED) as s:
            await ask(s, produced_at("t", 0))
            yield (await s.page("/metrics"))[1]


# promtool is not everywhere.
@pytest.mark.long
async def test_real_pages_pass_promtool(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (the Debian package prometheus)")
    pages = [each async for each in pages_of_proxies(tmp_path)]
    async with own_etcd(tmp_path / "etcd") as (etcd, _):
        with start_brokers((1,), tmp_path, etcd.endpoint, "/pages", admin=0) as (broker,):
            pages.append(page(broker.admin, "/metrics")[1])
    for text in pages:
        # The names of the process and of Python are their library's.
        ours = [line for line in text.splitlines() if "kproxy_" in line.partition("{")[0]]
        assert len(ours) > 50
        done = subprocess.run(
            [promtool, "check", "metrics"], input="\n".join(ours) + "\n", text=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def used(busiest: Busiest, name: bytes, requests: int = 1, size: int = 10) -> None:
    use = busiest.find((name,))
    assert not use.is_over
    use.requests += requests
    use.received_bytes += size * requests


def test_busier_name_takes_a_shown_ones_place() -> None:
    clock = Clock()
    busiest = Busiest(("topic",), 2, clock)
    used(busiest, b"a", 5)
    used(busiest, b"b", 4)
    used(busiest, b"c", 100)
    assert dict(busiest.read()) == {(b"a",): (5, 50, 0), (b"b",): (4, 40, 0), (b"other",): (100, 1_000, 0)}
    clock.now = RANK_S
    busiest.read()
    used(busiest, b"c", 3)
    used(busiest, b"b", 2)
    assert dict(busiest.read()) == {(b"a",): (5, 50, 0), (b"c",): (3, 30, 0), (b"other",): (102, 1_020, 0)}
    # A little more is not enough: names would change all the time.
    used(busiest, b"b", 4)
    used(busiest, b"a", 4)
    clock.now = 2 * RANK_S
    busiest.read()
    assert {name for name, _ in busiest.read()} == {(b"a",), (b"c",), (b"other",)}


def test_names_are_bounded_and_forgotten() -> None:
    clock = Clock()
    busiest = Busiest(("topic",), 2, clock)
    kept = busiest.find((b"0",))
    unused = busiest.find((b"5",))
    for number in range(MOST_TRACKED + 50):
        if number != 5:
            used(busiest, b"%d" % number)
    used(busiest, b"x" * (MOST_NAME_BYTES + 1))
    assert len(busiest.read()) == 3
    assert len(busiest.uses()) == MOST_TRACKED
    # Nothing was written to a partition of theirs.
    assert busiest.partitions() == []
    assert dict(busiest.read())[b"other",][0] == MOST_TRACKED + 50 + 1 - 3 + 1
    clock.now = RANK_S
    busiest.read()
    assert (kept.is_over, unused.is_over) == (False, True)
    # There is room again for those that come from now on.
    clock.now = 2 * RANK_S
    busiest.read()
    used(busiest, b"hot", 50)
    clock.now = 3 * RANK_S
    busiest.read()
    assert (b"hot",) in dict(busiest.read())
