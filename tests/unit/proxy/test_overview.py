"""What the admin page shows: events, times of the table, the fold of workers, many partitions and clients."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from kproxy.config.metrics import MetricsSection
from kproxy.observe.http_page import Readiness
from kproxy.observe.metrics import BrokerVitals, Vitals
from kproxy.observe.overview import (
    MAX_EVENTS,
    MAX_SHOWN,
    BrokerLine,
    Event,
    LimitLine,
    Note,
    Overview,
    Rates,
    RowsQuery,
    Timeline,
    TopicLine,
    TopicsPage,
    Verdict,
    fold,
    merge_topics,
    shown,
)
from kproxy.observe.page_guard import MOST_SESSIONS, SESSION_S, _Sessions
from kproxy.observe.table import TableView
from kproxy.observe.tally import Tally
from kproxy.proxy.overview import MAX_TIMES, ProxyObserver, TableTimes
from kproxy.proxy.server import Listener
from kproxy.routing.topology import NO_OWNER, Address, Topology
from kproxy.security.events import SecurityEvents
from kproxy_codec.api_keys import PRODUCE

PARTITIONS: Final = 100_000
CLIENTS: Final = 10_000
# Of CPU, on a machine that is busy; a walk over all at once takes some 100 ms.
LONGEST_TURN_S: Final = 0.03


class Session:
    """What is read of a client's session."""

    software, principal, open_requests, client_id = "till 7", "", 0, "till"

    def __init__(self, number: int) -> None:
        self.peer = f"10.0.0.1:{number}"
        self.opened_at = 0.0
        self.begun_requests = self.received_bytes = self.sent_bytes = 0
        self.waits_s = self.slow_s = 0.0

    def slow(self, now: float) -> tuple[float, str]:
        return self.slow_s, "sending" if self.slow_s else ""

    def unanswered(self, now: float) -> list[tuple[int, int, int, float]]:
        return [(2, 1, 100, self.waits_s)] if self.waits_s else []


class Site:
    """An observer of a topology and of sessions that the test changes, with its clock."""

    def __init__(self, topics: int = 0) -> None:
        self.now = 100.0
        self.topology = Topology()
        self.sessions: list[Session] = []
        self.vitals: dict[int, BrokerVitals] = {}
        self.tally = Tally(MetricsSection(topics=topics), self.clock)
        self.counters = Counter[str]()
        self.events = SecurityEvents(None, self.counters)
        self.stale = False
        brokers = SimpleNamespace(vitals=lambda: self.vitals)
        listener = SimpleNamespace(
            context=SimpleNamespace(brokers=brokers), tell_sent=self.nothing, clients=self.clients
        )
        self.observer = ProxyObserver(
            listener=cast(Listener, listener),
            table=lambda: TableView(self.topology, 0.2, self.stale),
            readiness=self.readiness,
            vitals=self.all_vitals,
            shipping=lambda: None,
            claims=lambda: None,
            tally=self.tally,
            counters=self.counters,
            events=self.events,
            name="kproxy",
            clock=self.clock,
            wall_ms=lambda: round(1000 * self.now),
        )

    def clock(self) -> float:
        # Portions are measured in real time.
        return self.now + time.perf_counter() % 0.5 / 1000

    async def clients(self) -> AsyncIterator[Session]:
        for number, session in enumerate(self.sessions):
            yield session
            if number % 100 == 99:
                await asyncio.sleep(0)

    async def nothing(self) -> None:
        pass

    async def readiness(self) -> Readiness:
        return Readiness(True, "ready")

    async def all_vitals(self) -> Vitals:
        return Vitals(brokers=self.vitals)

    async def second(self) -> list[str]:
        """Let a second pass; return the texts of all events, the newest first."""
        self.now += 1.0
        await self.observer.sample()
        return [each.text for each in (await self.observer.overview()).events]

    def place(self, broker: int, *partitions: int) -> None:
        self.topology.set_broker(broker, Address("b", broker))
        self.vitals[broker] = BrokerVitals(up=True)
        for partition in partitions:
            self.topology.set_owner(b"t", partition, broker, self.topology.revision + 1)


async def test_moves_of_owners_are_told() -> None:
    site = Site()
    site.place(1, 0, 1)
    site.place(2, 2)
    assert await site.second() == []
    assert [each.since for each in (await site.observer.partitions("", None, None, 10)).partitions] == [None] * 3
    for partition in (0, 1):
        site.topology.set_owner(b"t", partition, 2, site.topology.revision + 1)
    assert await site.second() == ["partitions moved (broker 1: 2 → 0, broker 2: 1 → 3)"]
    found = (await site.observer.partitions("T/1", 2, None, 10)).partitions
    assert [(each.partition, each.owner, each.moves, each.since) for each in found] == [
        (1, 2, 1, round(1000 * site.now))
    ]
    site.topology.set_owner(b"t", 2, NO_OWNER, site.topology.revision + 1)
    assert (await site.second())[0] == "partitions have no owner (broker 2: 3 → 2)"
    assert [each.partition for each in (await site.observer.partitions("", NO_OWNER, None, 10)).partitions] == [2]


async def test_troubles_of_brokers_are_told() -> None:
    site = Site()
    site.place(1)
    await site.second()
    site.vitals[1] = BrokerVitals(up=False)
    site.tally.error(PRODUCE, 6, 1, partitions=3)
    site.tally.retry(6, 1)
    site.tally.of_broker(1).errors["refused"] += 1
    site.events.tell("denied", client="10.0.0.9:1234", principal="User:eve", names=["a", "b", "c", "d"])
    site.stale = True
    told = await site.second()
    for text in (
        "broker 1 at b:1 cannot be reached",
        "error answers to PRODUCE: NOT_LEADER_OR_FOLLOWER (broker 1)",
        "batches sent again: NOT_LEADER_OR_FOLLOWER (broker 1)",
        "connection errors: refused (broker 1)",
        "denied: client 10.0.0.9; principal User:eve; names a, b, c, ...",
        "the table is stale: the last known owners are used",
    ):
        assert text in told
    line = (await site.observer.overview()).brokers[0]
    assert (line.state, line.errors) == ("down", 4)
    site.topology.remove_broker(1)
    assert (await site.second())[0] == "broker 1 at b:1 has left the table"
    overview = await site.observer.overview()
    assert overview.verdict == Verdict("warn", "serving, 0 brokers, but broker 1 is gone, table 0.2 s old")
    assert overview.brokers[0].address == "b:1"
    assert len(await site.second()) == len(told) + 1


@pytest.mark.parametrize("is_back_at_once", [True, False])
async def test_returning_broker_is_counted_from_zero(is_back_at_once: bool) -> None:
    site = Site()
    site.place(1)

    def fail(times: int) -> None:
        site.tally.error(PRODUCE, 6, 1, partitions=times)
        site.tally.of_broker(1).errors["refused"] += times
        for _ in range(times):
            site.tally.of_broker(1).answered(PRODUCE, 0.004)

    await site.second()
    fail(5)
    await site.second()
    # As ten minutes after it has left the table.
    site.tally.forget(1)
    if not is_back_at_once:
        await site.second()
    fail(2)
    await site.second()
    overview = await site.observer.overview()
    (line,) = overview.brokers
    assert (line.errors, line.latency_ms, line.requests > 0) == (14, 4.0, True)
    assert [each.count for each in overview.events] == [7, 7]


async def test_latency_is_of_the_last_seconds() -> None:
    site = Site()
    site.place(1)
    await site.second()
    for _ in range(10):
        site.tally.of_broker(1).answered(PRODUCE, 0.004)
    await site.second()
    line = (await site.observer.overview()).brokers[0]
    assert (line.latency_ms, line.slowest_ms, line.requests) == (4.0, 5.0, pytest.approx(10, abs=0.5))
    for _ in range(11):
        await site.second()
    assert (await site.observer.overview()).brokers[0].latency_ms is None


async def test_clients_come_by_rate_or_by_age() -> None:
    site = Site()
    site.sessions = [Session(number) for number in range(3)]
    assert (await site.observer.clients(RowsQuery())).total == 3
    site.now += 2.0
    site.sessions[1].begun_requests = 20
    site.sessions[2].waits_s = 3.0
    busiest = (await site.observer.clients(RowsQuery(limit=1))).clients[0]
    assert (busiest.address, busiest.requests) == ("10.0.0.1:1", pytest.approx(10, abs=0.1))
    oldest = (await site.observer.clients(RowsQuery(order="oldest"))).clients[0]
    assert (oldest.address, oldest.oldest_s, oldest.oldest_at) == ("10.0.0.1:2", 3.0, 2)
    assert (await site.observer.clients(RowsQuery(search="10.0.0.1:2"))).total == 1


async def test_topics_come_in_their_order() -> None:
    site = Site(topics=5)
    site.place(1, 0, 1)
    site.place(2, 2)
    site.topology.set_owner(b"zoo", 0, 1, 10)
    site.topology.set_owner(b"zoo", 1, NO_OWNER, 11)
    site.topology.set_owner(b"zoo", 0, 2, 12)
    await site.second()
    site.now += 4.0
    assert site.tally.topics is not None
    use = site.tally.topics.find((b"t",))
    use.requests, use.received_bytes = 50, 5_000_000
    site.tally.topics.find((b"zoo",)).requests = 5
    site.tally.topic_error(b"zoo")
    await site.second()
    page = await site.observer.topics(RowsQuery())
    assert (page.total, page.is_counted) == (2, True)
    hot, cold = page.topics
    assert (hot.topic, hot.partitions, hot.owners, hot.unowned, hot.moves) == ("t", 3, {1: 2, 2: 1}, 0, 0)
    assert (cold.topic, cold.partitions, cold.owners, cold.unowned, cold.moves) == ("zoo", 2, {2: 1}, 1, 1)
    assert (hot.received_bytes, hot.requests, cold.errors) == (pytest.approx(1e6, rel=0.1), pytest.approx(10, 0.1), 1)
    assert [each.topic for each in (await site.observer.topics(RowsQuery(order="name"))).topics] == ["t", "zoo"]
    for order in ("moves", "errors"):
        assert [each.topic for each in (await site.observer.topics(RowsQuery(order=order))).topics] == ["zoo", "t"]
    assert [each.topic for each in (await site.observer.topics(RowsQuery(skip=1))).topics] == ["zoo"]
    assert (await site.observer.topics(RowsQuery(search="ZO"))).total == 1
    with pytest.raises(ValueError, match="order must be one of rate, moves, errors, name"):
        await site.observer.topics(RowsQuery(order="oldest"))
    assert (await site.observer.overview()).notes == [Note("topic t", "has 100 % of the bytes")]
    for _ in range(12):
        await site.second()
    assert (await site.observer.overview()).notes == []


def test_topics_of_workers_are_joined() -> None:
    def of(topic: str, received_bytes: float | None, moves: int = 0) -> TopicLine:
        return TopicLine(
            topic=topic, partitions=2, owners={1: 2}, unowned=0, moves=moves, errors=1, received_bytes=received_bytes
        )

    pages = [
        TopicsPage([of("a", 30, 4), of("b", 20)], 7, is_counted=True),
        TopicsPage([of("b", 25, 2), of("c", 5)], 7, is_counted=True),
    ]
    joined = merge_topics(pages, RowsQuery(limit=2))
    assert [(each.topic, each.received_bytes, each.moves, each.errors) for each in joined.topics] == [
        ("b", 45, 2, 2),
        ("a", 30, 4, 1),
    ]
    assert joined.total == 7
    assert [each.topic for each in merge_topics(pages, RowsQuery(order="name", skip=1)).topics] == ["b", "c"]
    assert merge_topics([TopicsPage([of("a", None)], 1)] * 2, RowsQuery()).topics[0].received_bytes is None


async def longest_turn(work: Any) -> float:
    """The longest time, in seconds of CPU, in which nothing else ran on the event loop."""
    # The collector would look at all objects of the tests; a proxy exempts its own.
    gc.disable()
    try:
        task, longest, before = asyncio.ensure_future(work), 0.0, time.thread_time()
        while not task.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
        await task
        return longest
    finally:
        gc.enable()


async def test_many_partitions_and_clients_stall_nobody() -> None:
    site = Site()
    site.sessions = [Session(number) for number in range(CLIENTS)]
    site.clock = time.perf_counter  # type: ignore[method-assign]
    site.observer.clock = site.observer._clients._clock = time.perf_counter
    for topic in range(100):
        for partition in range(PARTITIONS // 100):
            site.topology.set_owner(b"t%d" % topic, partition, partition % 3, topic * 1_000 + partition + 1)
    observer = site.observer
    turns = {
        "sample": await longest_turn(observer.sample()),
        "search": await longest_turn(observer.partitions("t99/999", None, None, 100)),
        "owner": await longest_turn(observer.partitions("", 7, None, 1000)),
        "topics": await longest_turn(observer.topics(RowsQuery(limit=1000))),
        "clients": await longest_turn(observer.clients(RowsQuery(limit=1000))),
        "no client": await longest_turn(observer.clients(RowsQuery(search="nobody"))),
    }
    assert max(turns.values()) < LONGEST_TURN_S, turns


def test_same_events_are_one_line() -> None:
    now = 0
    timeline = Timeline(lambda: now)
    for now in (0, 1_000, 50_000):  # noqa: B007 -- the timeline's clock
        timeline.add("error", "warn", "refused", 2)
    assert timeline.latest == [Event(at=50_000, since=0, kind="error", level="warn", text="refused", count=6)]
    now = 200_000
    timeline.add("error", "warn", "refused")
    assert [each.count for each in timeline.latest] == [1, 6]
    for number in range(2 * MAX_EVENTS):
        timeline.add("error", "warn", str(number))
    assert len(timeline.latest) == MAX_EVENTS


def test_table_times_are_bounded_and_late_at_most() -> None:
    times = TableTimes()
    for version in range(3 * MAX_TIMES):
        times.note(10 * version, version)
    assert len(times._times) <= MAX_TIMES
    assert times.of(0) is None
    assert times.of(10 * 3 * MAX_TIMES) is None
    assert times.of(29 * MAX_TIMES + 1) == 29 * MAX_TIMES // 10 + 1
    found = [times.of(10 * version) for version in range(1, 3 * MAX_TIMES)]
    assert all(at is not None and at >= version for version, at in enumerate(found, 1))


def test_brokers_in_trouble_are_shown_first() -> None:
    lines = [BrokerLine(id=number, address="", state="up") for number in range(2 * MAX_SHOWN)]
    lines[-1] = BrokerLine(id=999, address="", state="hung")
    assert len(shown(lines)) == MAX_SHOWN
    assert shown(lines)[-1].id == 999


def test_workers_are_folded() -> None:
    notes = [Note("User:eve", "was denied")] * 6 + [Note("User:max", "waits")]

    def of(latency_ms: float, requests: float, state: Any, used: int, event: Event) -> Overview:
        broker = BrokerLine(
            id=1, address="", state=state, latency_ms=latency_ms, requests=requests, in_flight=1, errors=2
        )
        limits = [
            LimitLine("", "limits.max_connections", used, 100),
            LimitLine("", "limits.max_open_requests", used, 9),
        ]
        verdict = Verdict("good", "")
        return Overview(
            kind="proxy", name="", version="", at=0, started=0, verdict=verdict, rates=Rates(1, 2, 3), clients=2,
            brokers=[broker], limits=limits, events=[event], notes=notes[used:] or notes[:1],
        )  # fmt: skip

    moves = [Event(at=at, since=at, kind="moves", level="warn", text="moved", count=4) for at in (1_000, 2_000)]
    folded = fold([of(10, 30, "up", 5, moves[0]), of(20, 10, "down", 7, moves[1])], [])
    line = folded.brokers[0]
    assert (line.state, line.latency_ms, line.requests, line.in_flight, line.errors) == ("down", 12.5, 40, 2, 4)
    assert folded.rates == Rates(2, 4, 6)
    assert folded.clients == 4
    assert [(each.used, each.limit) for each in folded.limits or []] == [(12, 200), (7, 9)]
    assert [each.count for each in folded.events] == [4]
    assert folded.verdict == Verdict(
        "warn", "serving, 0 brokers, but broker 1 is down; User:eve was denied; User:max waits"
    )
    errors = [Event(at=1, since=1, kind="error", level="warn", text="e", count=4)] * 2
    assert [each.count for each in fold([of(1, 1, "up", 1, errors[0]), of(1, 1, "up", 1, errors[1])], []).events] == [8]


def test_sessions_are_bounded_in_number_and_time() -> None:
    now = 0.0
    sessions = _Sessions(lambda: now)
    first = sessions.open("token")
    assert sessions.has(first, "token")
    assert not sessions.has(first, "another token")
    assert not sessions.has("guess", "token")
    others = [sessions.open("token") for _ in range(MOST_SESSIONS)]
    assert not sessions.has(first, "token")
    now = SESSION_S
    assert not any(sessions.has(each, "token") for each in others)
