"""Define the JSON of the admin page: the state of a process, its recent changes, and pages of topics and clients.

The proxy, its workers and the reference broker share it. A field that a process does not have is None, and left out.
The fields are documented in docs/metrics.md. `fold` joins the overviews of several workers into one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import chain
from typing import Any, Final, Literal, TypeVar

import msgspec

Level = Literal["good", "warn", "bad"]
_WORST: Final[tuple[Level, ...]] = ("good", "warn", "bad")
# Brokers and proxies in an overview, those in trouble first. The rest is counted.
MAX_SHOWN: Final = 100
MAX_EVENTS: Final = 100
# Events of the same kind within this time are one line, in ms.
ONE_LINE_MS: Final = 60_000
# Events that several workers see of the same thing, within this time, are one; in ms.
SAME_MS: Final = 5_000
# Of clients and of topics.
MAX_ROWS: Final = 1_000
MAX_PARTITION_ROWS: Final = 1_000
# The longest text that a client chooses, in characters.
MAX_TEXT: Final = 100
# Things that the verdict names.
MAX_NAMED: Final = 4
# Rows that are sorted in a step.
_SORTED_AT_ONCE: Final = 500

SECURITY: Final[Mapping[str, tuple[str, Level]]] = {
    "denied": ("denial", "warn"),
    "login_failed": ("denial", "warn"),
    "connection_refused": ("denial", "warn"),
    "admin_refused": ("denial", "warn"),
    "changed": ("reload", "good"),
    "reloaded": ("reload", "good"),
    "not_reloaded": ("reload", "bad"),
}
"""The kind and the level of security events (kproxy.security.events) that are shown."""

_Thing = TypeVar("_Thing")


class Verdict(msgspec.Struct, frozen=True):
    """The state in one line. `level`: good, warn (degraded) or bad (clients are not served)."""

    level: Level
    text: str


class Rates(msgspec.Struct, frozen=True):
    """Per second, over the last ten seconds."""

    requests: float = 0.0
    received_bytes: float = 0.0
    sent_bytes: float = 0.0


class Note(msgspec.Struct, frozen=True):
    """A part of the verdict: a client, a principal, a topic or a partition that it names, and what that `does`."""

    about: str
    does: str


State = Literal["up", "slow", "down", "hung", "gone"]


class BrokerLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One broker. `state`: up, slow (a Produce request takes SLOW_MS or more on average), down, hung (it takes requests
    and does not answer) or gone (it has left the table).

    `partitions` is how many it owns. `latency_ms` (mean) and `slowest_ms` (an upper bound of 99 %) are of the Produce
    requests of the last ten seconds. `errors` of the last minute: partitions that it refused and connections that
    failed. `lacking`: its replicas that are not in sync. `this`: it is the broker that answers.
    """

    id: int
    address: str
    state: State
    partitions: int | None = None
    latency_ms: float | None = None
    slowest_ms: float | None = None
    requests: float | None = None
    in_flight: int | None = None
    oldest_s: float | None = None
    errors: int | None = None
    connections: int | None = None
    lacking: int | None = None
    this: bool = False


class ProxyLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A proxy that clients see; `this` is true for the one that answers."""

    id: int
    address: str
    this: bool = False


class WorkerLine(msgspec.Struct, frozen=True):
    """A worker process. `text` is as its `/readyz` says it."""

    number: int
    level: Level
    text: str
    clients: int = 0
    restarts: int = 0


class LimitLine(msgspec.Struct, frozen=True):
    """A limit beside its use. `key` is that of the configuration."""

    name: str
    key: str
    used: float
    limit: float
    unit: Literal["", "B"] = ""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that changed. `at` is the last of `count` times, `since` the first; in ms since 1970."""

    at: int
    since: int
    kind: str
    level: Level
    text: str
    count: int = 1


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a process. `at` and `started` are in ms since 1970, `table_age_s` None: not known.

    `kind` is proxy or broker. `claims` None: no Own API.
    """

    kind: Literal["proxy", "broker"]
    name: str
    version: str
    at: int
    started: int
    verdict: Verdict
    notes: list[Note] = []
    source: str | None = None
    table_age_s: float | None = None
    rates: Rates | None = None
    clients: int | None = None
    partitions: int | None = None
    claims: int | None = None
    brokers: list[BrokerLine] = []
    brokers_total: int = 0
    proxies: list[ProxyLine] | None = None
    workers: list[WorkerLine] | None = None
    limits: list[LimitLine] | None = None
    facts: dict[str, str] = {}
    events: list[Event] = []


class PartitionLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A partition. `owner` -1: nobody. `since`: when the owner was noticed, in ms since 1970, None: since the start.

    `moves`: how often it got another owner, or one again, since the process began. `isr` and `replicas` are those of
    reference brokers.
    """

    topic: str
    partition: int
    owner: int
    revision: int
    since: int | None = None
    moves: int = 0
    isr: list[int] | None = None
    replicas: list[int] | None = None
    min_insync_replicas: int | None = None


class PartitionsPage(msgspec.Struct, frozen=True):
    """A page of partitions. `next` is the `after` of the next page, None on the last."""

    partitions: list[PartitionLine]
    next: str | None = None


class ClientLine(msgspec.Struct, frozen=True, kw_only=True):
    """A client connection. `since`: when it was made, in ms since 1970.

    `requests`, `received_bytes` and `sent_bytes` are per second: since the last reading of the page, if that was in the
    last ten seconds, else since the connection was made. `oldest_s`: for how long its oldest request has been the next
    to be answered by a broker, `oldest_at` that broker, -1: none. `slow_s`: for how long the client has kept the proxy
    waiting, `slow_at` with what: it is still `sending` a request, or not `reading` its answers.
    """

    address: str
    client_id: str
    software: str
    principal: str
    since: int
    requests: float
    received_bytes: float
    sent_bytes: float
    in_flight: int
    oldest_s: float
    oldest_at: int
    slow_s: float = 0.0
    slow_at: str = ""
    worker: int | None = None


class ClientsPage(msgspec.Struct, frozen=True):
    """The first clients in the order that was asked for. `total` is the number of those that match."""

    clients: list[ClientLine]
    total: int


class TopicLine(msgspec.Struct, frozen=True, kw_only=True):
    """A topic. `owners`: how many partitions each broker owns, of those that own most; `unowned`: those that none owns.

    `moves` as in PartitionLine. `errors`: partitions that were answered with an error, since the process began.
    `requests` (Produce) and `received_bytes` (their batches) are per second over the last ten, None: not counted.
    `busiest`: the partition with more than half of the bytes, if any has (see Use); it has at least `busiest_bytes`.
    """

    topic: str
    partitions: int
    owners: dict[int, int]
    unowned: int
    moves: int
    errors: int
    requests: float | None = None
    received_bytes: float | None = None
    busiest: int | None = None
    busiest_bytes: float | None = None


class TopicsPage(msgspec.Struct, frozen=True):
    """The first topics in the order that was asked for. `is_counted`: `metrics.topics` is on."""

    topics: list[TopicLine]
    total: int
    is_counted: bool = False


class RowsQuery(msgspec.Struct, frozen=True):
    """A request for `limit` topics or clients that match `search`, after `skip`; both together at most MAX_ROWS."""

    order: str = "rate"
    search: str = ""
    skip: int = 0
    limit: int = 50

    def check(self, orders: Iterable[str]) -> None:
        """Raise ValueError if it is out of bounds."""
        if self.order not in orders:
            raise ValueError(f"order must be one of {', '.join(orders)}")
        if self.skip < 0 or self.limit < 1 or self.skip + self.limit > MAX_ROWS:
            raise ValueError(f"skip and limit together must be a number from 1 to {MAX_ROWS}: search instead")


CLIENT_ORDERS: Final[Mapping[str, Callable[[ClientLine], tuple[float, float]]]] = {
    "rate": lambda line: (line.received_bytes + line.sent_bytes + 1024 * line.requests, line.oldest_s),
    "oldest": lambda line: (line.oldest_s, float(line.in_flight)),
    "slow": lambda line: (line.slow_s, line.oldest_s),
}
"""The keys by which clients are ordered, the largest first."""
TOPIC_ORDERS: Final[Mapping[str, Callable[[TopicLine], float]]] = {
    "rate": lambda line: line.received_bytes or 0.0,
    "moves": lambda line: line.moves,
    "errors": lambda line: line.errors,
    "name": lambda line: 0.0,
}
"""The same for topics, which are in the order of their names otherwise."""


def merge_clients(pages: Sequence[ClientsPage], query: RowsQuery) -> ClientsPage:
    """Join the first `skip + limit` clients of several workers."""
    rows = nlargest(
        query.skip + query.limit, (line for page in pages for line in page.clients), CLIENT_ORDERS[query.order]
    )
    return ClientsPage(rows[query.skip :], sum(page.total for page in pages))


def merge_topics(pages: Sequence[TopicsPage], query: RowsQuery) -> TopicsPage:
    """Join the first `skip + limit` topics of several workers: each counts its own requests and errors."""
    merged: dict[str, TopicLine] = {}
    for line in sorted((line for page in pages for line in page.topics), key=lambda line: line.topic):
        known = merged.get(line.topic)
        merged[line.topic] = line if known is None else _fold_topic(known, line)
    rows = nlargest(query.skip + query.limit, merged.values(), TOPIC_ORDERS[query.order])
    is_counted = any(page.is_counted for page in pages)
    return TopicsPage(rows[query.skip :], max((page.total for page in pages), default=0), is_counted)


def _fold_topic(one: TopicLine, other: TopicLine) -> TopicLine:
    def both(name: str) -> Any:
        values = [value for line in (one, other) if (value := getattr(line, name)) is not None]
        return sum(values) if values else None

    # The same vote as in Use.
    busiest = max(one, other, key=lambda line: line.busiest_bytes or 0.0)
    return msgspec.structs.replace(
        one,
        moves=max(one.moves, other.moves),
        busiest=busiest.busiest,
        busiest_bytes=both("busiest_bytes") if one.busiest == other.busiest else busiest.busiest_bytes,
        **{name: both(name) for name in ("errors", "requests", "received_bytes")},
    )


async def first_of(things: AsyncIterator[_Thing], most: int, rank: Callable[[_Thing], Any]) -> tuple[list[_Thing], int]:
    """Return the `most` things of the highest rank, and the number of all. It sorts a few at a time."""
    best, some, total = list[_Thing](), list[_Thing](), 0
    async for thing in things:
        total += 1
        some.append(thing)
        if len(some) == _SORTED_AT_ONCE:
            best, some = nlargest(most, chain(best, some), rank), []
            await asyncio.sleep(0)
    return nlargest(most, chain(best, some), rank), total


class Timeline:
    """A ring of events. The same event again within ONE_LINE_MS adds to its line, which becomes the newest."""

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def add(self, kind: str, level: Level, text: str, count: int = 1) -> None:
        now = self._wall_ms()
        event = Event(at=now, since=now, kind=kind, level=level, text=text[: 4 * MAX_TEXT], count=count)
        for known in self._events:
            if (known.kind, known.text) == (kind, event.text) and now - known.at <= ONE_LINE_MS:
                self._events.remove(known)
                event = msgspec.structs.replace(event, since=known.since, count=known.count + count)
                break
        self._events.append(event)

    @property
    def latest(self) -> list[Event]:
        """The events, the newest first."""
        return list(reversed(self._events))


def worst(levels: Iterable[Level]) -> Level:
    """Return the worst level; good if there is none."""
    return max(levels, key=_WORST.index, default="good")


_TROUBLE: Final = {"hung": 0, "down": 1, "gone": 2, "slow": 3, "up": 4}
# The mean time of a broker's Produce requests from which it is called slow.
SLOW_MS: Final = 500.0


def state_of(state: State, latency_ms: float | None) -> State:
    """Return `state`, or "slow" if the broker is up and its mean latency is at least SLOW_MS."""
    return "slow" if state == "up" and (latency_ms or 0.0) >= SLOW_MS else state


def serving(
    brokers: Sequence[BrokerLine], total: int, table_age_s: float | None, notes: Sequence[Note], problem: str = ""
) -> Verdict:
    """Return the verdict on a proxy that serves `total` brokers, `problem` being the reason why it is degraded."""
    troubled = [line for line in brokers if line.state != "up"]
    named = [
        f"broker {line.id} is {line.state}{f': {in_time(line.latency_ms or 0.0)}' if line.state == 'slow' else ''}"
        for line in sorted(troubled, key=lambda line: _TROUBLE[line.state])
    ]
    level: Level = "warn" if troubled or problem else "good"
    text = f"serving, {problem or f'{total} broker{_s(total)}'}"
    text += f", but {_some(named, ', ')}" if named else ""
    text += f", table {table_age_s:.1f} s old" if table_age_s is not None else ""
    return Verdict(level, _some([text, *(f"{note.about} {note.does}" for note in notes)], "; "))


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def _some(texts: Sequence[str], between: str) -> str:
    return between.join(texts[:MAX_NAMED]) + (f"{between}..." if len(texts) > MAX_NAMED else "")


def in_time(ms: float) -> str:
    """Return a duration in the unit that suits it."""
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def shown(brokers: Iterable[BrokerLine]) -> list[BrokerLine]:
    """Return at most MAX_SHOWN brokers by id; those in trouble come before others."""
    lines = sorted(brokers, key=lambda line: (_TROUBLE[line.state], -(line.oldest_s or 0.0), line.id))[:MAX_SHOWN]
    return sorted(lines, key=lambda line: line.id)


def fold(overviews: Sequence[Overview], events: Iterable[Event]) -> Overview:
    """Join the overviews of several workers, of which there is at least one; `events` are those of their supervisor."""
    first = overviews[0]
    by_broker: dict[int, list[BrokerLine]] = {}
    for overview in overviews:
        for line in overview.brokers:
            by_broker.setdefault(line.id, []).append(line)
    limits: dict[str, LimitLine] = {}
    for each in (line for overview in overviews for line in overview.limits or ()):
        known = limits.get(each.key, msgspec.structs.replace(each, used=0.0, limit=0.0))
        limits[each.key] = _fold_limit(known, each)
    rates = [overview.rates or Rates() for overview in overviews]
    brokers = [_fold_broker(lines) for _, lines in sorted(by_broker.items())][:MAX_SHOWN]
    table_age_s = max((each.table_age_s for each in overviews if each.table_age_s is not None), default=None)
    notes = list({note.about: note for overview in overviews for note in overview.notes}.values())
    return msgspec.structs.replace(
        first,
        verdict=serving(brokers, first.brokers_total, table_age_s, notes),
        notes=notes,
        table_age_s=table_age_s,
        rates=Rates(*(sum(values) for values in zip(*map(msgspec.structs.astuple, rates), strict=True))),
        clients=sum(overview.clients or 0 for overview in overviews),
        brokers=brokers,
        limits=list(limits.values()),
        events=_fold_events([*events, *(event for overview in overviews for event in overview.events)]),
    )


# Limits of one connection, or of the whole process, that workers do not share.
_OF_ONE: Final = frozenset({"limits.max_open_requests", "limits.max_in_flight_bytes"})


def _fold_limit(known: LimitLine, line: LimitLine) -> LimitLine:
    if line.key in _OF_ONE:
        return msgspec.structs.replace(line, used=max(known.used, line.used))
    return msgspec.structs.replace(line, used=known.used + line.used, limit=known.limit + line.limit)


def _fold_broker(lines: Sequence[BrokerLine]) -> BrokerLine:
    """Join what several workers know of one broker: sums of each one's own, the worst of the rest."""
    requests = sum(line.requests or 0.0 for line in lines)
    timed = [line for line in lines if line.latency_ms is not None]
    weighted = sum((line.requests or 0.0) * (line.latency_ms or 0.0) for line in timed)
    return msgspec.structs.replace(
        min(lines, key=lambda line: _TROUBLE[line.state]),
        requests=round(requests, 1),
        latency_ms=weighted / requests if requests else None,
        slowest_ms=max((line.slowest_ms for line in timed if line.slowest_ms is not None), default=None),
        in_flight=sum(line.in_flight or 0 for line in lines),
        oldest_s=max(line.oldest_s or 0.0 for line in lines),
        errors=sum(line.errors or 0 for line in lines),
        connections=sum(line.connections or 0 for line in lines),
    )


# Kinds of events that every worker sees of the same thing.
_SHARED: Final = frozenset({"moves", "broker", "fleet", "table", "reload"})


def _fold_events(events: Iterable[Event]) -> list[Event]:
    folded: list[Event] = []
    for event in sorted(events, key=lambda each: each.at):
        for place, known in enumerate(folded[-MAX_EVENTS:], max(0, len(folded) - MAX_EVENTS)):
            if (known.kind, known.text) == (event.kind, event.text) and event.at - known.at <= SAME_MS:
                counts = known.count, event.count
                count = max(counts) if event.kind in _SHARED else sum(counts)
                since = min(known.since, event.since)
                folded[place] = msgspec.structs.replace(known, at=event.at, since=since, count=count)
                break
        else:
            folded.append(event)
    return sorted(folded, key=lambda each: -each.at)[:MAX_EVENTS]
