"""Run one simulated world: the proxy's own code between simulated clients and brokers, from a seed to a verdict.

A proxy here is a `ClientSession` for each client connection, a `ProxyContext` and a `Topology`, whatever is inside
them. The world does the listener's other work: it hands over connections, and checks deadlines at the same interval.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from kproxy.config import Limits
from kproxy.observe.tally import STAGES
from kproxy.proxy.broker_connection import Upstream
from kproxy.proxy.client_session import ClientSession
from kproxy.proxy.connections import NumberedConnections
from kproxy.routing.topology import Address, Topology
from kproxy.trail.rows import Range, decode_page
from tests.simulation.broker import Broker, BrokerConnection
from tests.simulation.claimants import KINDS
from tests.simulation.clients import TICK_S, Client, Connection
from tests.simulation.cluster import Cluster
from tests.simulation.dice import Dice, What
from tests.simulation.etcd import WorldEtcd
from tests.simulation.grants import Grants, Holder
from tests.simulation.judge import judge
from tests.simulation.network import NetworkLoop, SimulatedTransport
from tests.simulation.partitions import Batch
from tests.simulation.proxy import SimulatedProxy
from tests.simulation.setting import LeaseTrouble, Setting, draw

# After all faults have ended, all work is done within this time; then every client leaves, and nothing is left.
PATIENCE_S: Final = 60.0
REST_S: Final = 15.0


class Outcome(NamedTuple):
    """The result of a world. `digest` is of its whole transcript."""

    seed: int
    found: list[str]
    digest: str
    requests: int
    faults: int
    faults_amid: int
    simulated_s: float
    happened: Counter[str]
    transcript: list[str]


def _nobody(client: str) -> None:
    """Do nothing with severed connections."""


class _Logger:
    """A logger that keeps only the errors that the proxy logs."""

    def __init__(self, logger: object, processors: object, context: object) -> None:
        pass

    errors: list[str] = []  # noqa: RUF012 - of the world that runs
    on_severed: Callable[[str], object] = _nobody

    def debug(self, event: str, **values: object) -> None:
        """Ignore the event."""

    info = debug

    def warning(self, event: str, **values: object) -> None:
        if event == "client connection severed":
            type(self).on_severed(str(values["client"]))

    def error(self, event: str, **values: object) -> None:
        self.errors.append(f"{event} {values}")

    exception = critical = error

    def bind(self, **values: object) -> _Logger:
        return self

    new = unbind = try_unbind = bind


@contextmanager
def quiet() -> Iterator[None]:
    """Do not print the proxy's log while the block runs; loggers that are already in use are unchanged."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=_Logger, cache_logger_on_first_use=False)  # type: ignore[arg-type]
    try:
        yield
    finally:
        structlog.configure(**before)


class World:
    """`found` receives the findings; `etcd` holds the claims, in worlds that have them."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.found: list[str] = []
        self.dice = Dice(setting.seed)
        self.loop = NetworkLoop()  # type: ignore[abstract]
        self.loop.dial = self._dial
        self.limits = msgspec.convert(setting.limits, Limits)
        self.faults = 0
        self.faults_amid = 0
        claims = setting.claims
        # A partition of a Kafka cluster without a leader must not be taken by a broker.
        offers_unowned = setting.semantics.refuses_before_append
        topologies = [Topology(offers_unowned=offers_unowned) for _ in range(claims.proxies if claims else 1)]
        self.cluster = Cluster(self.loop, self.dice, setting, topologies, self.fault, self.found)
        etcd = WorldEtcd(self.loop)
        self.etcd = etcd.store
        self.grants = Grants(self.loop, self.etcd, self.limits.own_unsettled_s, self.found)
        self.cluster.on_arrival = self.grants.arrived
        self.cluster.on_append = self.grants.appended
        self.cluster.on_refusal = self._refused
        self.proxies = [
            SimulatedProxy(number, self.loop, self.dice, setting, self.limits, topology, self.cluster, self.found, etcd)
            for number, topology in enumerate(topologies)
        ]
        self.clients = [
            KINDS[each.kind](self, number, each, [self.cluster.partitions[place] for place in each.partitions])
            for number, each in enumerate(setting.clients, 1)
        ]
        self._busy = {client.number for client in self.clients}
        self._sessions: dict[ClientSession, Connection] = {}
        self._is_over = False
        # Every connection ever opened, by a name that does not depend on the order of opening.
        self.lines: dict[tuple[str, int, int, int], SimulatedTransport] = {}
        self._dials: Counter[tuple[int, int]] = Counter()
        self.sessions_left: list[str] = []

    # Driving the world

    def run(self) -> None:
        """Run the whole world; `found` has the findings."""
        loop = self.loop
        _Logger.errors.clear()
        for proxy in self.proxies:
            proxy.context.brokers.on_change = functools.partial(self._follow_ranges, proxy)
            proxy.context.brokers.on_open = functools.partial(self._give_up_broker, proxy)
            proxy.begin()
        loop.call_soon(self._tick)
        for trouble in self.setting.claims.troubles if self.setting.claims else ():
            loop.call_at(trouble.at, self._befall, trouble)
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
        for proxy in self.proxies:
            loop.call_soon(proxy.trail.end)
        loop.run(loop.now + 0.001)
        self._check_end()

    def _close(self) -> None:
        for proxy in self.proxies:
            proxy.close()

    def _refused(self, batch: Batch) -> None:
        """A claimant's refused request may soon be sent again, which is a good time to lose a lease."""
        now = self.loop.now
        drawn = self.dice.at(What.LEASE, batch.id, batch.arrivals)
        if self.setting.claims is None or drawn >= self.setting.claims.lapses or now > self.setting.trouble_s:
            return
        proxy = self.clients[batch.client - 1].proxy_of(batch.connection)
        at = now + 0.02 * self.dice.at(What.LEASE, batch.id, -batch.arrivals)
        lasts_s = 0.3 * self.dice.at(What.LEASE, -batch.id, batch.arrivals)
        self.loop.call_at(at, self._befall, LeaseTrouble(at, "suspend", proxy, lasts_s))

    def severed(self, peer: str) -> None:
        """The proxy has severed the connection of the client with this name."""
        self.cluster.happened["severed"] += 1
        self.grants.severed(int(peer.rpartition(":")[2]))

    def _befall(self, trouble: LeaseTrouble) -> None:
        if self._is_over:
            return
        proxy = self.proxies[trouble.proxy]
        self.fault(trouble.kind)
        self.cluster.happened[trouble.kind] += 1
        if trouble.kind == "suspend":
            proxy.suspend(trouble.lasts_s)
            served = [each for each in self._sessions.values() if each.proxy == proxy.number]
            self.grants.lapsed(Holder(each.client.number, each.ordinal) for each in served)
        else:
            proxy.make_late(trouble.lasts_s)

    def _check_rest(self) -> None:
        for client in self.clients:
            if client.number in self._busy and not self.found:
                last = [str(batch) for batch in client.batches if 0 not in batch.codes][-3:]
                self.found.append(f"{client} is not done {PATIENCE_S} s after all is well: {last}")

    def _check_end(self) -> None:
        for session in self._sessions:
            self.found.append(f"the session of {session.peer} does not end: {session.open_requests} open requests")
        for context in (proxy.context for proxy in self.proxies):
            budget = context.budget
            if (budget.held, budget.arriving, len(budget.waiting)) != (0, 0, 0) or budget.passing is not None:
                self.found.append(f"the budget is not given back: {budget.held} held, {budget.arriving} arriving")
            if context.answer_memory.held:
                self.found.append(f"{context.answer_memory.held} bytes of answers are still held")
        self.found += [f"a task does not end: {task}" for task in self.loop.open_tasks]
        self.found += [f"escaped into the event loop: {_told(error)}" for error in self.loop.errors]
        self.found += [f"an error was logged: {error}" for error in _Logger.errors]
        self.found += judge(self)

    def _tick(self) -> None:
        if self._is_over:
            return
        now = self.loop.now
        self.loop.call_later(TICK_S, self._tick)
        for proxy in self.proxies:
            proxy.context.brokers.look()
            proxy.context.answer_memory.wake()
        self.etcd.expire_leases()
        for session in list(self._sessions):
            session.expire(now)

    def _follow_ranges(self, proxy: SimulatedProxy, ranges: dict[int, tuple[int, int]]) -> None:
        for session in self._sessions_of(proxy):
            session.follow_ranges(ranges)

    def _give_up_broker(self, proxy: SimulatedProxy, address: Address) -> None:
        for session in self._sessions_of(proxy):
            session.give_up_broker(address)

    def _sessions_of(self, proxy: SimulatedProxy) -> list[ClientSession]:
        return [session for session, connection in self._sessions.items() if connection.proxy == proxy.number]

    # Clients

    def connect(self, client: Client, ordinal: int) -> Connection:
        """Open one more connection of a client; the proxy gets it at once."""
        connection = Connection(client, ordinal, client.proxy_of(ordinal))
        context = self.proxies[connection.proxy].context
        key = client.number * 1000 + ordinal
        connection.transport = transport = self._line(("client", client.number, 0, ordinal), key, connection)
        context.counters["clients.accepted"] += 1
        connection.session = session = ClientSession(context, self._closed)
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
        """Record a fault."""
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
        session = self._session_of(protocol)
        owner = self._sessions[session] if session is not None else None
        whose = owner.client.number * 1000 + owner.ordinal if owner is not None else 0
        self._dials[broker.node_id, whose] += 1
        ordinal = self._dials[broker.node_id, whose]
        key = (broker.node_id << 40) + (whose << 16) + ordinal
        reached = self.loop.create_future()
        way_s = 0.0001 + self.setting.latency_s * 2 * self.dice.at(What.DIAL, key)
        if self.setting.claims is not None and self.dice.at(What.DIAL, key, 1) < 0.2:
            # Leave time for a claim to be lost meanwhile.
            way_s += 0.2 * self.dice.at(What.DIAL, key, 2)
        self.loop.call_later(way_s, self._reach, broker, port, reached)
        await reached
        far = self.cluster.accept(broker)
        far.session, far.whose = session, whose
        far.transport = transport = self._line(("broker", broker.node_id, whose, ordinal), key, far)
        if broker.is_stalled:
            transport.stall()
        transport.begin(protocol)
        return transport, protocol

    def _session_of(self, upstream: Upstream) -> ClientSession | None:
        """The client session that a broker connection belongs to; None: it is the proxy's own.

        The judge excuses losses by owner. An unknown owner ends the world, because its verdict would be wrong.
        """
        keeper = upstream._keeper
        if keeper is None:
            return None
        session = keeper._client
        is_of_client = isinstance(session, ClientSession)
        is_known = is_of_client or (session is None and not isinstance(keeper, NumberedConnections))
        if not is_known:
            self.found.append(f"a broker connection has an unknown owner: {session!r}")
        return session if is_of_client else None

    @staticmethod
    def _reach(broker: Broker, port: int, reached: asyncio.Future[None]) -> None:
        if reached.done() or broker.is_deaf:
            return
        if broker.is_up and broker.address.port == port:
            reached.set_result(None)
        else:
            reached.set_exception(ConnectionRefusedError("nobody listens there"))

    # Results

    @functools.cached_property
    def rows(self) -> list[Range]:
        """The batches that are acknowledged in the trail."""
        pages = [page for proxy in self.proxies for page in proxy.pages]
        return [row for page in pages for row in decode_page(page) if isinstance(row, Range)]

    def transcript(self) -> Iterator[str]:
        """Everything that the proxy sent, line by line; what it sent in one moment on one connection is one line."""
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
        for proxy in self.proxies:
            yield from _told_by(proxy)
        yield "logs"
        for partition in self.cluster.partitions:
            yield f"  {partition}: {partition.end} {[batch.id for batch in partition.log]}"


def _told_by(proxy: SimulatedProxy) -> Iterator[str]:
    which = f" of proxy {proxy.number}" if proxy.number else ""
    yield f"audit trail{which}"
    yield from _acknowledged(proxy)
    yield f"counters{which}"
    tally = proxy.context.tally
    counts: dict[str, Mapping[Any, int]] = {
        "requests": tally.requests,
        "errors": tally.errors,
        "retries": tally.retries,
        "unconfirmed": tally.unconfirmed,
        # Only the number of adopted requests depends on whether they took the plain path.
        "counters": {name: count for name, count in proxy.context.counters.items() if name != "plain.left"},
        **{f"drops of {topic.decode()}": codes for topic, codes in sorted(tally.drops.items())},
        "latencies": dict(enumerate(tally.produce.buckets)),
        **{f"time in {stage}": dict(enumerate(getattr(tally, stage).buckets)) for stage in STAGES},
    }
    for counted, told in counts.items():
        yield f"  {counted}: {sorted((str(key), count) for key, count in told.items() if count)}"
    yield f"  bytes: {tally.received_bytes} received, {tally.sent_bytes} sent"
    for broker, of_broker in sorted(tally.by_broker.items()):
        yield f"  broker {broker}: {of_broker.sent_bytes} sent, {of_broker.received_bytes} received, {of_broker.dials}"
        yield f"    {of_broker.produce.buckets} {of_broker.fetch.buckets} {sorted(of_broker.errors.items())}"


def _acknowledged(proxy: SimulatedProxy) -> Iterator[str]:
    """The offsets that were acknowledged to each producer, and their sums.

    Rows begin where an ownership or the id of a topic is first known, which the core and the plain path may see one
    answer apart.
    """
    offsets: dict[str, set[int]] = {}
    sums: dict[str, Counter[str]] = {}
    for page in proxy.pages:
        for row in decode_page(page):
            if not isinstance(row, Range):
                continue
            key = f"{row.topic}/{row.partition} of {row.owner} to {row.peer} as {row.producer_id}/{row.producer_epoch}"
            found = offsets.setdefault(key, set())
            for first, count in zip(row.spans[::2], row.spans[1::2], strict=True):
                found.update(range(first, first + count))
            sums.setdefault(key, Counter()).update(records=row.record_count, batches=row.batches, bytes=row.bytes)
    for key in sorted(offsets):
        yield f"  {key}: {sorted(sums[key].items())} {sorted(offsets[key])}"


def _told(error: dict[str, Any]) -> str:
    exception = error.get("exception")
    return f"{error.get('message')}: {exception!r}"


def run_world(seed: int, *, setting: Setting | None = None, keeps_transcript: bool = False) -> Outcome:
    """Run one world. Exceptions that escape from the proxy are among the findings."""
    # A world becomes garbage only at its end, so that a collector would waste an eighth of the time.
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
    _Logger.on_severed = world.severed
    try:
        world.run()
    except AssertionError as error:
        world.found.append(str(error))
    finally:
        # Objects that outlive a world would keep it alive, and the collector would no longer find later garbage.
        _Logger.on_severed = _nobody
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
