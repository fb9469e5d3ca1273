"""Collect what a proxy's admin page shows: recent changes, rates, and the current brokers, clients and partitions.

`sample` is called once a second, even if nobody looks at the page: it compares counters, brokers and the table with
those of a second ago, notes what changed as events, and keeps the counts for rates. Everything else is done when a page
is requested, in portions.

Invariants
1. `sample` looks at brokers and at counters, which are bounded, and never at requests. In portions it adds up the bytes
   that were sent to clients. When the table has changed it counts the owners of all partitions, for at most a twentieth
   of the time.
2. The lines of clients are made once a second at most, however many pages are requested. They are dropped when nobody
   has asked for them for WINDOW_S.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite
from typing import Final, Literal, NamedTuple, TypeVar

from kproxy.address import Address
from kproxy.installed import version
from kproxy.observe.busiest import Used
from kproxy.observe.http_page import Readiness
from kproxy.observe.metrics import BrokerVitals, Vitals, denials_of
from kproxy.observe.overview import (
    CLIENT_ORDERS,
    MAX_NAMED,
    MAX_PARTITION_ROWS,
    SECURITY,
    TOPIC_ORDERS,
    BrokerLine,
    ClientLine,
    ClientsPage,
    Level,
    LimitLine,
    Note,
    Overview,
    PartitionLine,
    PartitionsPage,
    ProxyLine,
    Rates,
    RowsQuery,
    State,
    Timeline,
    TopicLine,
    TopicsPage,
    Verdict,
    first_of,
    in_time,
    serving,
    shown,
    state_of,
)
from kproxy.observe.table import TableView, parse_place
from kproxy.observe.tally import BROKER_BOUNDS_S, BROKER_ERRORS, OTHER_BROKERS, Tally
from kproxy.proxy.server import Listener
from kproxy.routing.retry import event_name
from kproxy.routing.topology import NO_OWNER, Topology
from kproxy.runtime.tasks import in_portions
from kproxy.security.events import SecurityEvents
from kproxy.trail.shipper import ShipperVitals
from kproxy_codec import api_keys, error_codes

# Rates and latencies are those of this many samples; there is one a second.
WINDOW_S: Final = 10
# Errors are counted over this many spans of ERRORS_EVERY samples.
ERROR_SPANS: Final = 12
ERRORS_EVERY: Final = 5
# Times of changes of the table; when there are more, every second of the older half is dropped.
MAX_TIMES: Final = 4_000
# Rows looked at in a step.
STEP_ROWS: Final = 10_000
# Brokers of a topic that are shown, those with most of its partitions.
MAX_OWNERS: Final = 10
# A topic is named if it has this share of all bytes of two topics or more, and this many bytes a second. So is a
# partition among those of its topic.
HOT_SHARE: Final = 0.8
HOT_BYTES: Final = 100_000
_COUNTERS: Final[Mapping[str, tuple[str, Level, str]]] = {
    "deadlines": ("error", "warn", "requests were answered at their deadline"),
    "clients.too_many": ("denial", "warn", "clients were refused: too many connections"),
    "clients.refused": ("denial", "warn", "clients were cut off: see the log"),
    "acks0.undeliverable": ("error", "bad", "acks=0 batches were lost"),
    "producer_ids.refused": ("error", "warn", "producers got no producer id: etcd does not answer"),
    "own.severed": ("claim", "warn", "clients were severed: another has their claims"),
    "quotas.throttled": ("quota", "warn", "requests were throttled by a quota"),
    "audit.rows_dropped": ("audit", "bad", "rows of the audit trail were lost"),
    "audit.overlaps": ("audit", "bad", "offsets were assigned twice"),
}
_TROUBLES: Final[Mapping[State, tuple[Level, str]]] = {
    "down": ("bad", "cannot be reached"),
    "hung": ("bad", "hangs: it takes requests and does not answer"),
    "gone": ("warn", "has left the table"),
}
_WAITS: Final = {"sending": "has been sending a request for", "reading": "has not read its answers for"}
_Key = TypeVar("_Key", bound=Hashable)


def _grown(before: dict[_Key, int], now: Mapping[_Key, int]) -> Iterator[tuple[_Key, int]]:
    """Yield what has grown, by how much, and note it in `before`.

    A count that is lower than before, or missing, is of a broker that was forgotten (Tally.forget): it restarts at 0.
    """
    for key in before.keys() - now.keys():
        del before[key]
    for key, count in list(now.items()):
        was = before.get(key, 0)
        if count != was:
            before[key] = count
            if more := count if count < was else count - was:
                yield key, more


@dataclass(frozen=True, slots=True)
class _Timed:
    """The Produce requests of a broker: their number by bucket, and the sum of their times."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BROKER_BOUNDS_S) + 1))
    seconds: float = 0.0


class _TopicRates(NamedTuple):
    """The use of a topic per second, and of its `busiest` partition: `busiest_bytes` at least."""

    requests: float
    received: float
    busiest: int
    busiest_bytes: float


_UNUSED: Final = _TopicRates(0.0, 0.0, -1, 0.0)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    requests: int
    received_bytes: int
    sent_bytes: int
    brokers: Mapping[int, _Timed]


class TableTimes:
    """When each version of the table was noticed, in ms: the end of the second in which it came to be."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._times: list[int] = []

    def note(self, version: int, wall_ms: int) -> None:
        if self._versions and self._versions[-1] >= version:
            return
        self._versions.append(version)
        self._times.append(wall_ms)
        if len(self._versions) > MAX_TIMES:
            half = MAX_TIMES // 2
            # The first stays: what it covers was there at the start.
            del self._versions[1:half:2], self._times[1:half:2]

    def of(self, version: int) -> int | None:
        """Return when a version was noticed; None: it was there at the first look, or is newer than the last one."""
        place = bisect_left(self._versions, version)
        return self._times[place] if 0 < place < len(self._versions) else None


@dataclass(eq=False, kw_only=True)
class ProxyObserver:
    """Observes one process. The callables return what their names say; `claims` the number of claims, None without any.

    `events` are shown once this observes. `facts` returns more of these for the page.
    """

    listener: Listener
    table: Callable[[], TableView]
    readiness: Callable[[], Awaitable[Readiness]]
    vitals: Callable[[], Awaitable[Vitals]]
    shipping: Callable[[], ShipperVitals | None]
    claims: Callable[[], int | None]
    tally: Tally
    counters: Mapping[str, int]
    events: SecurityEvents
    name: str
    facts: Callable[[], Mapping[str, str]] = dict
    clock: Callable[[], float] = time.monotonic
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000

    def __post_init__(self) -> None:
        self._started = self.wall_ms()
        self.events.show()
        self._timeline = Timeline(self.wall_ms)
        self._clients = _Clients(self.listener, self.clock, self.wall_ms)
        self._samples: deque[_Sample] = deque(maxlen=WINDOW_S + 1)
        self._sampled = 0
        # By broker, and denials by principal.
        self._errors: deque[Counter[int | str]] = deque([Counter()], maxlen=ERROR_SPANS)
        # Requests and bytes of each topic at the ends of spans.
        self._topics: deque[tuple[float, Mapping[bytes, Used]]] = deque(maxlen=WINDOW_S // ERRORS_EVERY)
        self._times = TableTimes()
        self._before_errors: dict[tuple[int, int, int], int] = {}
        self._before_retries: dict[tuple[int, int], int] = {}
        self._before_kinds: dict[tuple[int, str], int] = {}
        self._before_counters: dict[str, int] = {}
        self._before_denials: dict[str, int] = {}
        self._brokers: dict[int, tuple[State, str]] | None = None
        self._proxies: dict[int, str] | None = None
        self._is_stale = False
        self._counted_version = -1
        self._count_due = -inf
        self._moves = 0
        self._owned: Counter[int] | None = None

    # Once a second

    async def sample(self) -> None:
        """Note what has changed since the last call."""
        context = self.listener.context
        if context is None:
            return
        now, view = self.clock(), self.table()
        self._times.note(view.topology.version, self.wall_ms())
        if self._sampled % ERRORS_EVERY == 0:
            self._errors.append(Counter())
            if self.tally.topics is not None:
                self._topics.append((now, self.tally.topics.uses()))
                self.tally.topics.vote_anew()
        self._sampled += 1
        self._note_brokers(view.topology, context.brokers.vitals())
        self._note_counts()
        self._note_others(view)
        await self._note_owners(view.topology)
        await self.listener.tell_sent()
        tally = self.tally
        self._samples.append(
            _Sample(
                now,
                sum(tally.requests.values()),
                tally.received_bytes,
                tally.sent_bytes,
                {
                    broker: _Timed(counts.produce.buckets, counts.produce.seconds)
                    for broker, counts in tally.by_broker.items()
                },
            )
        )
        self._clients.forget_if_unused()

    def _note_brokers(self, topology: Topology, vitals: Mapping[int, BrokerVitals]) -> None:
        before, known = self._brokers, self._brokers or {}
        now = self._brokers = {
            # A broker that has left keeps its address.
            broker: (_state(topology, broker, each), _address(topology, broker) or known.get(broker, ("", ""))[1])
            for broker, each in vitals.items()
        }
        if before is None:
            return
        for broker, (state, address) in now.items():
            was, at = before.get(broker, ("gone", ""))
            if state == was:
                continue
            level, text = _TROUBLES.get(state, ("good", "has joined" if was == "gone" else "answers again"))
            self._timeline.add("broker", level, f"broker {broker} at {address or at} {text}")

    def _note_counts(self) -> None:
        tally, errors = self.tally, self._errors[-1]
        for (api_key, code, broker), count in _grown(self._before_errors, tally.errors):
            errors[broker] += count
            text = f"error answers to {api_keys.name_of(api_key)}: {error_codes.name_of(code)}{_by(broker)}"
            self._timeline.add("error", "warn", text, count)
        for (event, broker), count in _grown(self._before_retries, tally.retries):
            self._timeline.add("retry", "warn", f"batches sent again: {event_name(event)}{_by(broker)}", count)
        kinds = {
            (broker, kind): each.errors[kind] for broker, each in tally.by_broker.items() for kind in BROKER_ERRORS
        }
        for (broker, kind), count in _grown(self._before_kinds, kinds):
            errors[broker] += count
            self._timeline.add("error", "warn", f"connection errors: {kind}{_by(broker)}", count)
        for name, count in _grown(self._before_counters, {name: self.counters.get(name, 0) for name in _COUNTERS}):
            self._timeline.add(*_COUNTERS[name], count)
        for name, count in _grown(self._before_denials, denials_of(self.counters)):
            errors[name] += count
        for name, text in self.events.take_shown():
            if name in SECURITY:
                self._timeline.add(*SECURITY[name], f"{name.replace('_', ' ')}: {text}")

    def _note_others(self, view: TableView) -> None:
        if view.stale != self._is_stale:
            self._is_stale = view.stale
            text = "the table is stale: the last known owners are used" if view.stale else "the table is fresh again"
            self._timeline.add("table", "bad" if view.stale else "good", text)
        proxies = {each.id: str(Address(each.host, each.port)) for each in view.proxies}
        if self._proxies is not None:
            for node_id in proxies.keys() - self._proxies.keys():
                self._timeline.add("fleet", "good", f"proxy {node_id} at {proxies[node_id]} has joined")
            for node_id in self._proxies.keys() - proxies.keys():
                self._timeline.add("fleet", "warn", f"proxy {node_id} at {self._proxies[node_id]} has left")
        self._proxies = proxies

    async def _note_owners(self, topology: Topology) -> None:
        """Count the partitions of each broker, and tell of moves."""
        began = self.clock()
        if topology.version == self._counted_version or began < self._count_due:
            return
        self._counted_version = topology.version
        owned: Counter[int] = Counter()
        names = topology.names
        async for topic in in_portions(names, self.clock):
            owned.update(await self._owners(topology, topic))
        owned.pop(NO_OWNER, None)
        self._count_due = self.clock() + 20 * (self.clock() - began)
        before, self._owned = self._owned, owned
        moves = sum(topology.owner_changes.values())
        moved, self._moves = moves - self._moves, moves
        if before is None:
            return
        if moved > 0:
            self._timeline.add("moves", "warn", f"partitions moved ({_spread(before, owned)})", moved)
        lost = before.total() - owned.total()
        if lost > 0:
            self._timeline.add("moves", "warn", f"partitions have no owner ({_spread(before, owned)})", lost)

    # The pages

    async def overview(self) -> Overview:
        vitals, view = await self.vitals(), self.table()
        readiness, topology = await self.readiness(), view.topology
        table_age_s = round(view.age_s, 1) if isfinite(view.age_s) and view.source != "static" else None
        brokers = [self._broker(topology, broker, vitals) for broker in vitals.brokers]
        total = sum(line.state != "gone" for line in brokers)
        notes, problem = self._notes(vitals), readiness.text.removeprefix("ready").removeprefix(", ")
        if view.stale and problem and table_age_s:
            problem += f" ({view.source} has been silent for {table_age_s:.0f} s)"
        verdict = Verdict("bad", readiness.text)
        if readiness.ready:
            verdict = serving(brokers, total, None if problem else table_age_s, notes, problem)
        return Overview(
            kind="proxy",
            name=self.name,
            version=version(),
            at=self.wall_ms(),
            started=self._started,
            verdict=verdict,
            notes=notes,
            source=view.source,
            table_age_s=table_age_s,
            rates=self._rates(),
            clients=vitals.client_connections,
            partitions=topology.owned_count,
            claims=self.claims(),
            brokers=shown(brokers),
            brokers_total=total,
            proxies=[ProxyLine(each.id, str(Address(each.host, each.port)), each.this) for each in view.proxies][:200],
            limits=_limits(vitals, self.shipping()),
            facts={**_facts(vitals, view), **self.facts()},
            events=self._timeline.latest,
        )

    def _broker(self, topology: Topology, broker: int, vitals: Vitals) -> BrokerLine:
        known = vitals.brokers[broker]
        timed, span_s = self._timed(broker)
        requests = sum(timed.buckets)
        past_most = next(
            (place for place, sofar in enumerate(accumulate(timed.buckets)) if sofar >= 0.99 * requests), 0
        )
        slowest_s = (*BROKER_BOUNDS_S, 2 * BROKER_BOUNDS_S[-1])[past_most]
        address = _address(topology, broker) or (self._brokers or {}).get(broker, ("gone", ""))[1]
        latency_ms = round(1000 * timed.seconds / requests, 2) if requests else None
        return BrokerLine(
            id=broker,
            address=address,
            state=state_of(_state(topology, broker, known), latency_ms),
            partitions=self._owned[broker] if self._owned is not None else None,
            latency_ms=latency_ms,
            slowest_ms=1000 * slowest_s if requests else None,
            requests=round(requests / span_s, 1),
            in_flight=known.in_flight,
            oldest_s=round(known.oldest_s, 1),
            errors=sum(span[broker] for span in self._errors),
            connections=vitals.upstream_connections.get(broker, 0),
        )

    def _timed(self, broker: int) -> tuple[_Timed, float]:
        """Return a broker's Produce requests of the last WINDOW_S, and how long that is."""
        if len(self._samples) < 2:
            return _Timed(), 1.0
        first, last = self._samples[0], self._samples[-1]
        old, new = first.brokers.get(broker, _Timed()), last.brokers.get(broker, _Timed())
        if sum(new.buckets) < sum(old.buckets):  # The broker was forgotten in between.
            old = _Timed()
        buckets = [now - before for now, before in zip(new.buckets, old.buckets, strict=True)]
        return _Timed(buckets, new.seconds - old.seconds), last.at - first.at

    def _rates(self) -> Rates:
        if len(self._samples) < 2:
            return Rates()
        first, last = self._samples[0], self._samples[-1]
        span_s = last.at - first.at
        return Rates(
            round((last.requests - first.requests) / span_s, 1),
            round((last.received_bytes - first.received_bytes) / span_s),
            round((last.sent_bytes - first.sent_bytes) / span_s),
        )

    def _notes(self, vitals: Vitals) -> list[Note]:
        """Name the clients, principals and topics that stand out."""
        notes = [
            Note(
                f"client {each.client_id or '?'} at {each.address}",
                f"{_WAITS[each.slow_at]} {in_time(1000 * each.slow_s)}",
            )
            for each in vitals.slow
        ]
        denied = sum(self._errors, Counter[int | str]())
        notes += [
            Note(name, f"was denied {count:,} times within a minute")
            for name, count in denied.most_common()
            if isinstance(name, str)
        ]
        rates = self._topic_rates()
        total = sum(each.received for each in rates.values())
        if rates and total >= HOT_BYTES:
            topic, most = max(rates.items(), key=lambda item: item[1].received)
            if len(rates) > 1 and most.received >= HOT_SHARE * total:
                notes.append(Note(f"topic {_text(topic)}", f"has {int(100 * (most.received / total))} % of the bytes"))
        for topic, each in sorted(rates.items(), key=lambda item: -item[1].busiest_bytes)[:MAX_NAMED]:
            is_one_of_many = len(self.table().topology.partition_indexes(topic)) > 1
            if is_one_of_many and each.busiest_bytes >= max(HOT_BYTES, HOT_SHARE * each.received):
                share = f"has {int(100 * each.busiest_bytes / each.received)} % of its topic's bytes"
                notes.append(Note(f"partition {_text(topic)}/{each.busiest}", share))
        return notes[:MAX_NAMED]

    def _topic_rates(self) -> dict[bytes, _TopicRates]:
        """Return the use per second of the topics that were used lately."""
        if self.tally.topics is None or not self._topics:
            return {}
        (since, before), now = self._topics[0], self.tally.topics.uses()
        span_s = max(1.0, self.clock() - since)
        rates = {}
        for topic, counts in now.items():
            was = before.get(topic)
            if was is None or was.requests > counts.requests:
                # A topic that was not used for a while is counted from 0 again.
                was = Used(0, 0, counts.partition, 0)
            of_busiest = counts.partition_bytes
            if was.partition == counts.partition and was.partition_bytes <= of_busiest:
                of_busiest -= was.partition_bytes
            if requests := counts.requests - was.requests:
                received = counts.received_bytes - was.received_bytes
                busiest = (counts.partition, min(of_busiest, received) / span_s)
                rates[topic] = _TopicRates(requests / span_s, received / span_s, *busiest)
        return rates

    async def topics(self, query: RowsQuery) -> TopicsPage:
        """Return the page that was asked for. Raises ValueError."""
        query.check(TOPIC_ORDERS)
        topology, wanted = self.table().topology, query.search.lower().encode()
        is_counted = self.tally.topics is not None
        rates, errors = self._topic_rates(), self.tally.topic_errors
        ranks: Mapping[str, Callable[[bytes], float]] = {
            "rate": lambda topic: rates.get(topic, _UNUSED).received,
            "moves": topology.topic_moves,
            "errors": lambda topic: errors[topic],
            "name": lambda _: 0.0,
        }
        matching = (topic async for topic in in_portions(topology.names, self.clock) if wanted in topic.lower())
        names, total = await first_of(matching, query.skip + query.limit, ranks[query.order])
        lines = []
        for topic in names[query.skip :]:
            owned = await self._owners(topology, topic)
            unowned = owned.pop(NO_OWNER, 0)
            used = rates.get(topic, _UNUSED)
            has_busiest = 2 * used.busiest_bytes > used.received
            lines.append(
                TopicLine(
                    topic=_text(topic),
                    partitions=owned.total() + unowned,
                    owners=dict(owned.most_common(MAX_OWNERS)),
                    unowned=unowned,
                    moves=topology.topic_moves(topic),
                    errors=errors[topic],
                    requests=round(used.requests, 1) if is_counted else None,
                    received_bytes=round(used.received) if is_counted else None,
                    busiest=used.busiest if has_busiest else None,
                    busiest_bytes=round(used.busiest_bytes) if has_busiest else None,
                )
            )
        return TopicsPage(lines, total, is_counted)

    @staticmethod
    async def _owners(topology: Topology, topic: bytes) -> Counter[int]:
        """Count the partitions of a topic by owner, STEP_ROWS in a turn of the event loop."""
        owned, last = Counter[int](), len(topology.partition_indexes(topic))
        for first in range(0, last, STEP_ROWS):
            owned.update(topology.count_owned(topic, first, first + STEP_ROWS))
            if last > STEP_ROWS:
                await asyncio.sleep(0)
        return owned

    async def clients(self, query: RowsQuery) -> ClientsPage:
        """Return the page that was asked for. Raises ValueError."""
        query.check(CLIENT_ORDERS)
        wanted = query.search.lower()
        matching = (
            line
            async for line in in_portions(await self._clients.lines(), self.clock)
            if wanted in f"{line.client_id} {line.software} {line.principal} {line.address}".lower()
        )
        rows, total = await first_of(matching, query.skip + query.limit, CLIENT_ORDERS[query.order])
        return ClientsPage(rows[query.skip :], total)

    async def partitions(self, search: str, owner: int | None, after: str | None, limit: int) -> PartitionsPage:
        """Return partitions whose `topic` or `topic/partition` has `search` in it, of one owner if named (-1: of none).

        Those without an owner are only shown if they are asked for: their topics may be deleted. Raises ValueError.
        """
        if not 1 <= limit <= MAX_PARTITION_ROWS:
            raise ValueError(f"limit must be a number from 1 to {MAX_PARTITION_ROWS}")
        start = parse_place(after) if after is not None else (b"", -1)
        topology, wanted, lines = self.table().topology, search.lower().encode(), list[PartitionLine]()
        names = topology.names
        async for topic in in_portions(names[bisect_left(names, start[0]) :], self.clock):
            is_wanted = wanted in topic.lower()
            if not is_wanted and b"/" not in wanted:
                continue
            first = start[1] + 1 if topic == start[0] else 0
            began = self.clock()
            for index in range(first, len(topology.partition_indexes(topic))):
                of = topology.owner(topic, index)
                if (of == NO_OWNER if owner is None else of != owner) or not (
                    is_wanted or wanted in b"%b/%d" % (topic.lower(), index)
                ):
                    if self.clock() - began > 0.001:
                        await asyncio.sleep(0)
                        began = self.clock()
                    continue
                if len(lines) == limit:
                    return PartitionsPage(lines, f"{lines[-1].topic}/{lines[-1].partition}")
                lines.append(self._partition(topology, topic, index, of))
        return PartitionsPage(lines)

    def _partition(self, topology: Topology, topic: bytes, index: int, owner: int) -> PartitionLine:
        return PartitionLine(
            _text(topic),
            index,
            owner,
            topology.owner_revision(topic, index),
            self._times.of(topology.owner_version(topic, index)),
            topology.owner_moves(topic, index),
        )


class _Clients:
    """The lines of all clients, of at most a second ago (invariant 2)."""

    def __init__(self, listener: Listener, clock: Callable[[], float], wall_ms: Callable[[], int]) -> None:
        self._listener = listener
        self._clock = clock
        self._wall_ms = wall_ms
        self._walking = asyncio.Lock()
        self._lines: list[ClientLine] | None = None
        self._walked_at = -inf
        # By session: its counts at the last walk.
        self._seen: dict[tuple[int, float], tuple[int, int, int]] = {}

    def forget_if_unused(self) -> None:
        if self._lines is not None and self._clock() - self._walked_at > WINDOW_S and not self._walking.locked():
            self._lines, self._seen = None, {}

    async def lines(self) -> list[ClientLine]:
        async with self._walking:
            if self._lines is None or self._clock() - self._walked_at >= 1.0:
                await self._walk()
            return self._lines or []

    async def _walk(self) -> None:
        now, wall_ms = self._clock(), self._wall_ms()
        before, before_at = (self._seen, self._walked_at) if now - self._walked_at <= WINDOW_S else ({}, now)
        seen, lines = {}, []
        async for session in self._listener.clients():
            key = (id(session), session.opened_at)
            counts = seen[key] = (session.begun_requests, session.received_bytes, session.sent_bytes)
            was, since = (before[key], before_at) if key in before else ((0, 0, 0), session.opened_at)
            span_s = max(1.0, now - since)
            oldest_s, oldest_at = max(
                ((age_s, broker) for broker, _, _, age_s in session.unanswered(now)), default=(0, -1)
            )
            slow_s, slow_at = session.slow(now)
            lines.append(
                ClientLine(
                    address=session.peer,
                    client_id=session.client_id or "",
                    software=session.software,
                    principal=session.principal,
                    since=wall_ms - round(1000 * (now - session.opened_at)),
                    requests=round((counts[0] - was[0]) / span_s, 1),
                    received_bytes=round((counts[1] - was[1]) / span_s),
                    sent_bytes=round((counts[2] - was[2]) / span_s),
                    in_flight=session.open_requests,
                    oldest_s=round(oldest_s, 1),
                    oldest_at=oldest_at,
                    slow_s=round(slow_s, 1),
                    slow_at=slow_at,
                )
            )
        self._seen, self._lines, self._walked_at = seen, lines, now


def _state(topology: Topology, broker: int, vitals: BrokerVitals) -> State:
    if broker not in topology.brokers:
        return "gone"
    return "hung" if vitals.hung else "up" if vitals.up else "down"


def _address(topology: Topology, broker: int) -> str:
    address = topology.address(broker)
    return "" if address is None else str(address)


def _text(topic: bytes) -> str:
    return topic.decode("utf-8", "replace")


def _by(broker: int) -> str:
    return "" if broker == NO_OWNER else " (other brokers)" if broker == OTHER_BROKERS else f" (broker {broker})"


def _spread(before: Counter[int], now: Counter[int]) -> str:
    """Describe how the number of partitions of brokers changed, of those with the greatest changes."""
    changed = sorted(
        (broker for broker in before.keys() | now.keys() if before[broker] != now[broker]),
        key=lambda broker: (-abs(now[broker] - before[broker]), broker),
    )
    words = [f"broker {broker}: {before[broker]} → {now[broker]}" for broker in changed[:MAX_NAMED]]
    return ", ".join(words) + (", ..." if len(changed) > MAX_NAMED else "") or "each broker has as many as before"


def _limits(vitals: Vitals, shipping: ShipperVitals | None) -> list[LimitLine]:
    def line(name: str, key: str, used: float, unit: Literal["", "B"] = "") -> LimitLine:
        return LimitLine(name, f"limits.{key}", used, getattr(vitals.limits, key), unit)

    lines = [
        line("client connections", "max_connections", vitals.client_connections),
        line("bytes in flight", "max_in_flight_bytes_total", vitals.in_flight_bytes, "B"),
        line("requests of one client", "max_open_requests", vitals.most_requests),
        line("bytes of one client", "max_in_flight_bytes", vitals.most_bytes, "B"),
    ]
    if vitals.half_open_limit:
        lines.append(
            LimitLine("handshakes", "limits.max_half_open", vitals.half_open_connections, vitals.half_open_limit)
        )
    if shipping is not None and shipping.max_bytes:
        lines.append(
            LimitLine("audit rows that wait", "audit.max_bytes", shipping.waiting_bytes, shipping.max_bytes, "B")
        )
    return lines


def _facts(vitals: Vitals, view: TableView) -> dict[str, str]:
    facts = {"owners from": view.source, "revision": str(view.topology.revision)}
    if view.registration:
        facts["registration"] = view.registration
    if vitals.paused_connections:
        facts["clients not read"] = f"{vitals.paused_connections}: too much is in flight"
    if vitals.certificates:
        ends_at = min(vitals.certificates.values())
        facts["next certificate ends"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends_at))
    return facts
