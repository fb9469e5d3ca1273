"""One simulated world: the proxy's own code between simulated clients and brokers, from its seed to its verdict.

The proxy is what stays of it whatever becomes of its insides: a `ClientSession` for each client connection, a
`ProxyContext` and a `Topology`. What the listener does beside that is done here: it hands over connections, and looks
after deadlines at the same interval.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from kproxy.config import Limits
from kproxy.proxy.client_session import ClientSession
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.dialling import Dialler
from kproxy.routing.fleet import Fleet, Proxy
from kproxy.routing.topology import Address, Topology
from kproxy.trail.rows import Range, decode_page
from kproxy.trail.trail import LOOK_S, Trail
from tests.simulation.clients import KINDS, TICK_S, Client, Connection
from tests.simulation.cluster import Broker, BrokerConnection, Cluster
from tests.simulation.dice import Dice, TimeRandom, What
from tests.simulation.judge import judge
from tests.simulation.network import NetworkLoop, SimulatedTransport
from tests.simulation.setting import Setting, draw

# When all is well again, everything is done in this time; then everybody goes, and nothing is left.
PATIENCE_S: Final = 60.0
REST_S: Final = 15.0
WALL_MS: Final = 1_700_000_000_000
IDENTITY: Final = Proxy(1_000_000, "proxy.test", 19092)


class Outcome(NamedTuple):
    """What came of a world. `digest` is of its whole transcript."""

    seed: int
    found: list[str]
    digest: str
    requests: int
    faults: int
    faults_amid: int
    simulated_s: float
    happened: Counter[str]
    transcript: list[str]


class _Logger:
    """Keeps errors that the proxy logs, and nothing else."""

    def __init__(self, logger: object, processors: object, context: object) -> None:
        pass

    errors: list[str] = []  # noqa: RUF012 - of the world that runs

    def debug(self, event: str, **values: object) -> None:
        """Nobody reads it."""

    info = warning = debug

    def error(self, event: str, **values: object) -> None:
        self.errors.append(f"{event} {values}")

    exception = critical = error

    def bind(self, **values: object) -> _Logger:
        return self

    new = unbind = try_unbind = bind


@contextmanager
def quiet() -> Iterator[None]:
    """What the proxy logs is not printed; loggers that are in use already go on as they are."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=_Logger, cache_logger_on_first_use=False)  # type: ignore[arg-type]
    try:
        yield
    finally:
        structlog.configure(**before)


class World:
    """`found` is what was wrong."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.found: list[str] = []
        self.dice = Dice(setting.seed)
        self.loop = NetworkLoop()  # type: ignore[abstract]
        self.loop.dial = self._dial
        self.limits = msgspec.convert(setting.limits, Limits)
        # Of a Kafka cluster a partition without a leader is nobody's to take.
        self.topology = Topology(offers_unowned=setting.conduct.refuses_before_append)
        self.faults = 0
        self.faults_amid = 0
        self.cluster = Cluster(self.loop, self.dice, setting, self.topology, self.fault, self.found)
        self.pages: list[bytes] = []
        clock = self.loop.time
        self.trail = Trail(
            "proxy.test:19092",
            "0123456789abcdef",
            clock=clock,
            wall_ms=lambda: WALL_MS + int(self.loop.now * 1000),
            deadline_cap_ms=self.limits.deadline_cap_ms,
            interval_s=1.0,
            offer=lambda page, first_sequence, last_sequence: self.pages.append(page),
            on_overlap=lambda overlap: self.found.append(f"an offset was given out twice: {overlap}"),
        )
        self.context = ProxyContext(
            self.topology,
            self.cluster,
            Fleet([IDENTITY]),
            self.limits,
            clock,
            TimeRandom(self.dice, clock),
            dialler=Dialler(clock),
            conduct=setting.conduct,
            confirm_acks0=setting.confirm_acks0,
            trail=self.trail,
        )
        self.clients = [
            KINDS[each.kind](self, number, each, [self.cluster.partitions[place] for place in each.partitions])
            for number, each in enumerate(setting.clients, 1)
        ]
        self._busy = {client.number for client in self.clients}
        self._sessions: dict[ClientSession, Connection] = {}
        self._is_over = False
        # Every connection that ever was, by a name that does not depend on who came first.
        self.lines: dict[tuple[str, int, int, int], SimulatedTransport] = {}
        self._dials: Counter[tuple[int, int]] = Counter()
        self.sessions_left: list[str] = []

    # Driving it

    def run(self) -> None:
        """All of it; what is wrong is in `found`."""
        loop, context = self.loop, self.context
        _Logger.errors.clear()
        context.versions.on_change = self._follow_ranges
        context.health.on_open = self._give_up_broker
        loop.call_soon(self.trail.begin)
        loop.call_soon(self._tick)
        loop.call_later(LOOK_S, self._look)
        for client in self.clients:
            loop.call_later(0.02, client.begin)
        loop.run(self.setting.trouble_s, lambda: bool(self.found))
        loop.call_soon(self.cluster.heal)
        loop.run(self.setting.trouble_s + PATIENCE_S, lambda: not self._busy or bool(self.found))
        self._check_rest()
        for client in self.clients:
            if client.connection is not None and client.connection.transport is not None:
                client.connection.transport.end()
        loop.run(loop.now + REST_S, lambda: not self._sessions)
        self._is_over = True
        loop.call_soon(self._close)
        loop.run(loop.now + REST_S, lambda: not loop.open_tasks and not self.cluster.pauses)
        loop.call_soon(self.trail.end)
        loop.run(loop.now + 0.001)
        self._check_end()

    def _close(self) -> None:
        self.loop.create_task(self.context.versions.close())
        self.loop.create_task(self.context.health.close())

    def _check_rest(self) -> None:
        for client in self.clients:
            if client.number in self._busy and not self.found:
                last = [str(batch) for batch in client.batches if 0 not in batch.codes][-3:]
                self.found.append(f"{client} is not done {PATIENCE_S} s after all is well: {last}")

    def _check_end(self) -> None:
        budget = self.context.budget
        for session in self._sessions:
            self.found.append(f"the session of {session.peer} does not end: {session.open_requests} open requests")
        if (budget.held, budget.arriving, len(budget.waiting)) != (0, 0, 0) or budget.passing is not None:
            self.found.append(f"the budget is not given back: {budget.held} held, {budget.arriving} arriving")
        if self.context.answer_room.held:
            self.found.append(f"{self.context.answer_room.held} bytes of answers are still held")
        self.found += [f"a task does not end: {task}" for task in self.loop.open_tasks]
        self.found += [f"escaped into the event loop: {_told(error)}" for error in self.loop.errors]
        self.found += [f"an error was logged: {error}" for error in _Logger.errors]
        self.found += judge(self)

    def _tick(self) -> None:
        if self._is_over:
            return
        now = self.loop.now
        self.loop.call_later(TICK_S, self._tick)
        self.context.versions.look()
        self.context.answer_room.wake()
        for session in list(self._sessions):
            session.expire(now)

    def _look(self) -> None:
        if not self._is_over:
            self.loop.call_later(LOOK_S, self._look)
            self.trail.look()

    def _follow_ranges(self, ranges: dict[int, tuple[int, int]]) -> None:
        for session in list(self._sessions):
            session.follow_ranges(ranges)

    def _give_up_broker(self, address: Address) -> None:
        for session in list(self._sessions):
            session.give_up_broker(address)

    # Clients

    def connect(self, client: Client, ordinal: int) -> Connection:
        """One more connection of a client; the proxy has it at once."""
        connection = Connection(client, ordinal)
        key = client.number * 1000 + ordinal
        connection.transport = transport = self._line(("client", client.number, 0, ordinal), key, connection)
        self.context.counters["clients.accepted"] += 1
        connection.session = session = ClientSession(self.context, self._closed)
        self._sessions[session] = connection
        self.loop.call_soon(transport.begin, session)
        return connection

    def _closed(self, session: ClientSession) -> None:
        self.loop.create_task(self._end(session))

    async def _end(self, session: ClientSession) -> None:
        try:
            await session.close()
        finally:
            if session.open_requests:
                self.found.append(f"a session has ended with {session.open_requests} open requests")
            del self._sessions[session]

    def done(self, client: Client) -> None:
        """A client has nothing more to do."""
        self._busy.discard(client.number)

    def fault(self, what: str) -> None:
        """Something goes wrong."""
        self.faults += 1
        self.faults_amid += any(
            client.connection is not None and client.connection.in_flight for client in self.clients
        )

    # Connections

    def _line(
        self, name: tuple[str, int, int, int], key: int, far: Connection | BrokerConnection
    ) -> SimulatedTransport:
        dice, slowest_s = self.dice, self.setting.latency_s
        if dice.at(What.LATENCY, key) < 0.1:
            slowest_s *= 10
        transport = SimulatedTransport(
            self.loop,
            dice,
            key,
            far,
            latency_s=0.00005 + slowest_s * dice.at(What.LATENCY, key, 1),
            jitter_s=slowest_s * dice.at(What.LATENCY, key, 2),
            cuts=self.setting.cuts,
            peername=("10.1.0.1", key),
        )
        self.lines[name] = transport
        return transport

    async def _dial(
        self, protocol_factory: Any, host: str, port: int
    ) -> tuple[SimulatedTransport, asyncio.BaseProtocol]:
        protocol = protocol_factory()
        broker = next(each for each in self.cluster.brokers if each.address.host == host)
        # Whose connection it is: a client connection's, or the proxy's own.
        session = getattr(getattr(protocol, "_on_pressure", None), "__self__", None)
        owner = self._sessions.get(session) if isinstance(session, ClientSession) else None
        whose = owner.client.number * 1000 + owner.ordinal if owner is not None else 0
        self._dials[broker.node_id, whose] += 1
        ordinal = self._dials[broker.node_id, whose]
        key = (broker.node_id << 40) + (whose << 16) + ordinal
        reached = self.loop.create_future()
        way_s = 0.0001 + self.setting.latency_s * 2 * self.dice.at(What.DIAL, key)
        self.loop.call_later(way_s, self._reach, broker, port, reached)
        await reached
        far = self.cluster.accept(broker)
        far.session, far.whose = (session, whose) if owner is not None else (None, 0)
        far.transport = transport = self._line(("broker", broker.node_id, whose, ordinal), key, far)
        if broker.is_stalled:
            transport.stall()
        transport.begin(protocol)
        return transport, protocol

    @staticmethod
    def _reach(broker: Broker, port: int, reached: asyncio.Future[None]) -> None:
        if reached.done() or broker.is_deaf:
            return
        if broker.is_up and broker.address.port == port:
            reached.set_result(None)
        else:
            reached.set_exception(ConnectionRefusedError("nobody listens there"))

    # What came of it

    @functools.cached_property
    def rows(self) -> list[Range]:
        """What the trail says was acknowledged."""
        return [row for page in self.pages for row in decode_page(page) if isinstance(row, Range)]

    def transcript(self) -> Iterator[str]:
        """All that the proxy sent, line by line; what it sent in one moment on one connection is one line."""
        for name in sorted(self.lines):
            kind, number, whose, ordinal = name
            of = f" for client connection {whose // 1000}.{whose % 1000}" if whose else ""
            yield f"{kind} {number}, connection {ordinal}{of}"
            at, parts = -1.0, list[bytes]()
            for sent_at, data in self.lines[name].sent:
                if sent_at != at and parts:
                    yield f"  {at:.7f} {b''.join(parts).hex()}"
                    parts = []
                at = sent_at
                parts.append(data)
            if parts:
                yield f"  {at:.7f} {b''.join(parts).hex()}"
        yield "audit trail"
        for page in self.pages:
            for row in page.decode().splitlines():
                yield f"  {row}"
        yield "counters"
        tally = self.context.tally
        counts: dict[str, Mapping[Any, int]] = {
            "requests": tally.requests,
            "errors": tally.errors,
            "retries": tally.retries,
            "unconfirmed": tally.unconfirmed,
            "counters": self.context.counters,
            **{f"drops of {topic.decode()}": codes for topic, codes in sorted(tally.drops.items())},
            "latencies": dict(enumerate(tally.produce_buckets)),
        }
        for counted, told in counts.items():
            yield f"  {counted}: {sorted((str(key), count) for key, count in told.items() if count)}"
        yield f"  bytes: {tally.received_bytes} received, {tally.sent_bytes} sent"
        yield "logs"
        for partition in self.cluster.partitions:
            yield f"  {partition}: {partition.end} {[batch.id for batch in partition.log]}"


def _told(error: dict[str, Any]) -> str:
    exception = error.get("exception")
    return f"{error.get('message')}: {exception!r}"


def run_world(seed: int, *, setting: Setting | None = None, keeps_transcript: bool = False) -> Outcome:
    """Run one world. What escapes from the proxy is among what is found."""
    # All of a world is garbage at once, when it is over: looking for some of it meanwhile takes an eighth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        with quiet():
            outcome = _run(draw(seed) if setting is None else setting, keeps_transcript=keeps_transcript)
        gc.collect(0)
        return outcome
    finally:
        if collects:
            gc.enable()


def _run(setting: Setting, *, keeps_transcript: bool) -> Outcome:
    world = World(setting)
    world.cluster.keeps_history = keeps_transcript
    try:
        world.run()
    except AssertionError as error:
        world.found.append(str(error))
    lines = list(world.transcript())
    return Outcome(
        setting.seed,
        world.found,
        hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest(),
        sum(client.requests for client in world.clients),
        world.faults,
        world.faults_amid,
        world.loop.now,
        world.cluster.happened,
        [*lines, "what befell", *world.cluster.history] if keeps_transcript else [],
    )
