"""Model a partition on several brokers with all their possible faults, for `test_replication_model`.

The brokers are `simulated_broker`s around one `simulated_etcd`. They fetch from one another over a `simulated_network`.
There a request and its answer wait until a step lets them arrive or loses them, possibly after the broker that asked
was restarted; a killed broker leaves a request and its calls to etcd behind. `replication_clients` records the answers
to producers and a consumer, and after every step `replication_checks` compares them with every replica.

There is one partition. Partitions share the broker's lease and its working time, but no decision about one depends on
another; with two of them every run would take nearly twice as long.

A step is a method of World whose name stands in STEPS, with small numbers for arguments: `world.step("crash", 1)`, or
`crash 1` in a script. A number that selects one of several things wraps, so that every sequence of steps, even a
shortened one, can be replayed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

import structlog

from kproxy.broker.config import LogOptions
from kproxy.broker.disk import read_json
from kproxy.broker.keys import Keys, ReplicaKey, StateValue, TopicValue, decode_value, encode_value
from kproxy.broker.partition import ACKS_ALL, Inconsistent, Partition, validate_consistency
from kproxy.broker.replication.partition_replication import Role
from kproxy.etcd import put_op
from kproxy_codec.record_batch import assign_offsets, parse_header
from tests.support.models.fenced_writers import FencedWriters
from tests.support.models.replication_checks import Judge, Replica, Rule, Violation, replica_at
from tests.support.models.replication_clients import Clients
from tests.support.models.simulated_broker import ISR_LAG_S, PARTITION, PARTITION_INDEX, TOPIC, SimulatedProcess, State
from tests.support.models.simulated_etcd import EtcdStore, KeepAlives, Link
from tests.support.models.simulated_network import Network
from tests.support.wire.record_batches import build_batch

FETCH_INTERVAL_S = 0.5
MAX_FETCH_BYTES = 1 << 20
# A few batches of one record.
SEGMENT_BYTES = 300
# The time until a leader is found, and all are in sync.
FIRST_STEPS_S = 2.0
START_TIME_S = 1000.0
# A broker number that stands for the leader.
LEADER = 5
# In memory, if there is a file system for it.
_SCRATCH = Path("/dev/shm")
_KEYS = Keys("/p")
_TOPIC_ID = uuid.UUID(int=7)
_Method = TypeVar("_Method", bound=Callable[..., None])


class Setting(NamedTuple):
    """The configuration of one run's cluster."""

    brokers: int = 3
    min_insync_replicas: int = 2
    retention_bytes: int = -1
    # The rate of each broker's clock, within the margin of a lease.
    rates: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    # When the first replica becomes leader again; never in most runs, because otherwise it would always lead.
    hand_over_after_s: float = float("inf")


Taken = tuple[Any, ...]
"""A step's name and its numbers."""


class Step(NamedTuple):
    """How many numbers a step takes, whether it has an effect now, and its frequency relative to others."""

    arguments: int
    could: Callable[[World], bool]
    weight: int


# Numbers of steps by what they mean: for `process`, `link` and `advance`.
_WORDS = {"leader": LEADER, "fast": 0, "slow": 1, "deaf": 2, "cut": 3}
_WORDS |= {"a_while": 0, "a_second": 1, "seconds": 2, "a_lease": 3}


def script(*parts: str | list[Taken]) -> list[Taken]:
    """The steps of texts like "crash leader, advance a_lease", and of other scripts."""
    taken: list[Taken] = []
    for part in parts:
        if isinstance(part, str):
            for name, *words in map(str.split, part.split(",")):
                taken.append((name, *(int(_WORDS.get(word, word)) for word in words)))
        else:
            taken += part
    return taken


STEPS: dict[str, Step] = {}
# Steps of writers that claim the partition. Other writers are refused, so that runs with these write little else.
FENCE_STEPS = ("claim", "bind", "write_fenced", "release", "hang_up")


def _step(
    arguments: int, could: Callable[[World], bool] = lambda world: True, *, weight: int = 1
) -> Callable[[_Method], _Method]:
    def note(method: _Method) -> _Method:
        STEPS[method.__name__] = Step(arguments, could, weight)
        return method

    return note


def _any_is(state: State) -> Callable[[World], bool]:
    return lambda world: any(process.state is state for process in world.processes.values())


def _any_waits(*, applied: bool) -> Callable[[World], bool]:
    return lambda world: any(process.client.count_pending(applied=applied) for process in world.processes.values())


_Thing = TypeVar("_Thing")


def _one_of(things: Sequence[_Thing], number: int) -> _Thing:
    return things[number % len(things)]


def _is_claimed(world: World) -> bool:
    return world.writers.is_claimed


class World:
    """The simulated world, a context manager. Steps raise Violation if a rule is broken."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = START_TIME_S
        self.judge = Judge()
        self.store = EtcdStore(lambda: self.now)
        self.clients = Clients(self.judge, lambda: self.now)
        self.writers = FencedWriters(self.judge, self.clients, self.store)
        self.taken: list[Taken] = []
        self.is_over = False
        # The steps taken, with the log lines of the brokers.
        self.trace: list[str] = []
        self._log_config = structlog.get_config()
        structlog.configure(processors=[self._note_log])
        self._directory = Path(tempfile.mkdtemp(prefix="kproxy-model-", dir=_SCRATCH if _SCRATCH.is_dir() else None))
        self._graveyard = self._directory / "graveyard"
        self._graveyard.mkdir()
        self._interrupted: set[int] = set()
        ids = list(range(1, setting.brokers + 1))
        self._all: list[SimulatedProcess] = []
        self.processes = {node_id: self._start(node_id) for node_id in ids}
        self._create_topic(ids)
        self.store.on_change = self._check_ids
        self.network = Network(self.processes)
        self.pass_time(FIRST_STEPS_S)
        self.check()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        try:
            for process in self._all:
                process.bury()
        finally:
            shutil.rmtree(self._directory)
            structlog.configure(**self._log_config)

    def _note_log(self, logger: object, level: str, event: MutableMapping[str, Any]) -> NoReturn:
        self.trace.append(f"    {self.now:.2f} {event.pop('event')} {dict(event)}")
        raise structlog.DropEvent

    def _create_topic(self, replicas: list[int]) -> None:
        isr = [ReplicaKey(node_id, process.log_id) for node_id, process in self.processes.items()]
        for key, value in (
            (_KEYS.state(TOPIC, PARTITION_INDEX), StateValue(-1, isr, _TOPIC_ID)),
            (_KEYS.topic(TOPIC), TopicValue(_TOPIC_ID, [replicas], {})),
        ):
            self.store.apply("Put", put_op(key, encode_value(value)).message.request_put)

    def _start(self, node_id: int) -> SimulatedProcess:
        process = SimulatedProcess(
            node_id,
            self._directory / str(node_id),
            self.store,
            min_insync_replicas=self.setting.min_insync_replicas,
            log_options=LogOptions(SEGMENT_BYTES, retention_bytes=self.setting.retention_bytes),
            hand_over_after_s=self.setting.hand_over_after_s,
            now=lambda: self.now,
            rate=self.setting.rates[node_id - 1],
            on_left_behind=self.judge.broker_lost,
        )
        self._all.append(process)
        return process

    # Taking steps

    def step(self, name: str, *arguments: int) -> None:
        """Take one step, run everything that follows from it at once, and check all rules."""
        if not self.is_over:
            self.taken.append((name, *arguments))
        self.trace.append(f"{name}({', '.join(map(str, arguments))})")
        getattr(self, name)(*arguments)
        self.settle()
        self.check()

    def replay(self, steps: Iterable[Taken]) -> None:
        for name, *arguments in steps:
            self.step(name, *arguments)

    def settle(self) -> None:
        """Run everything that can be done at the present time."""
        while True:
            before = self.store.revision
            for process in self.processes.values():
                process.run()
            if self.store.revision == before:
                return

    def pass_time(self, seconds: float) -> None:
        """Let time pass; every process that is not stopped runs; followers fetch unless they lag."""
        end = self.now + seconds
        fetch_at = self.now
        while True:
            if self.store.expire_leases():
                self.judge.broker_lost()
            if fetch_at <= self.now:
                self._fetch_all()
                fetch_at = self.now + FETCH_INTERVAL_S
            self.settle()
            self._check_leaders()
            if self.now >= end:
                return
            timers = [process.next_timer for process in self.processes.values()]
            upcoming = [when for when in (*timers, self.store.next_expiry(), fetch_at) if when is not None]
            # A clock with another rate may round a timer to just after the present.
            self.now = min(end, max(min(upcoming), self.now + 1e-6))

    def _fetch_all(self) -> None:
        for node_id, process in self.processes.items():
            if node_id not in self.network.lagging and process.state is State.RUNNING:
                self.network.round_trip(process)

    def broker(self, number: int) -> SimulatedProcess:
        """The broker with this number."""
        return self.processes[number % len(self.processes) + 1]

    def process(self, number: int) -> SimulatedProcess:
        """The broker with this number or, from LEADER on, the leader, whose faults matter most."""
        if number >= LEADER:
            for each in self.processes.values():
                if each.state is not State.DEAD and self._leads(each):
                    return each
        return self.broker(number)

    # Time, and processes

    @_step(1, weight=4)
    def advance(self, number: int) -> None:
        """Let time pass, from little (enough for an ISR change) to more than a lease's TTL."""
        seconds = (0.3, 1.0, 4.0, 12.5)[number % 4]
        leader = self._leader_that_is_well()
        going = self._out_of_sync_after(seconds) if leader is not None else set()
        self.pass_time(seconds)
        if leader is not None and leader is self._leader_that_is_well():
            lingering = going.intersection(self.isr()) - {leader.leader_id}
            if lingering:
                self.judge.violated(Rule.LINGERS, f"{sorted(lingering)}, {seconds} s later")

    @_step(1, weight=2)
    def crash(self, number: int) -> None:
        """kill -9."""
        process = self.process(number)
        if process.state is not State.DEAD:
            self._kill(process)

    def _kill(self, process: SimulatedProcess) -> None:
        # A follower nearly always has a request under way.
        self.network.ask(process)
        process.kill(self._graveyard)
        self.judge.broker_lost()

    @_step(2)
    def crash_in_write(self, number: int, kept_bytes: int) -> None:
        """kill -9 during a write: the log ends with a part of a batch that was never answered."""
        process = self.process(number)
        if process.state is State.DEAD or process.partition is None:
            return
        log = process.partition.log
        torn = build_batch([b"torn"])
        assign_offsets(torn, parse_header(torn), log.log_end_offset, max(process.partition.leader_epoch, 0))
        directory = log.directory
        self._kill(process)
        with max(directory.glob("*.log")).open("ab") as file:
            file.write(torn[: 1 + kept_bytes % (len(torn) - 1)])

    @_step(1, _any_is(State.DEAD), weight=3)
    def restart(self, number: int) -> None:
        """A broker that is dead is started again."""
        process = self.broker(number)
        if process.state is State.DEAD:
            self.processes[process.node_id] = self._start(process.node_id)
            self.processes[process.node_id].client.inherit(process.client)
            self.network.lagging.discard(process.node_id)

    @_step(1, _any_is(State.DEAD))
    def wipe(self, number: int) -> None:
        """A dead broker's disk is lost; never the last one with the promised records, nor one that may become so.

        A call that it made as a leader may still come to etcd, and leave it alone in the ISR.
        """
        process = self.broker(number)
        others = set(self.isr()) - {process.node_id}
        if process.state is State.DEAD and others and not process.client.count_pending(applied=False):
            shutil.rmtree(process.directory, ignore_errors=True)

    @_step(1, _any_is(State.DEAD))
    def replace(self, number: int) -> None:
        """A dead broker comes back without its disk, before it has fetched anything."""
        self.wipe(number)
        process = self.broker(number)
        if not process.directory.exists():
            self.restart(number)
            self.lag(number)

    @_step(1)
    def fail_disk(self, number: int) -> None:
        """The disk fails writes to the open log, and their undoing, until the log is opened again."""
        process = self.process(number)
        if process.state is not State.DEAD and process.partition is not None and not process.partition.log.is_closed:
            segment = process.partition.log._segments[-1]
            readable = os.open(segment.path, os.O_RDONLY)
            os.dup2(readable, segment._fd, inheritable=False)
            os.close(readable)
            self.judge.broker_lost()

    @_step(1)
    def stop(self, number: int) -> None:
        """SIGTERM: the broker shuts down in order, as far as this takes no time."""
        process = self.process(number)
        if process.state is State.RUNNING:
            process.begin_stop()

    @_step(1)
    def freeze(self, number: int) -> None:
        """SIGSTOP."""
        process = self.process(number)
        if process.state is State.RUNNING:
            process.state = State.STOPPED

    @_step(1, _any_is(State.STOPPED))
    def thaw(self, number: int) -> None:
        """SIGCONT."""
        process = self.broker(number)
        if process.state is State.STOPPED and process.node_id not in self._interrupted:
            process.state = State.RUNNING

    @_step(3, weight=2)
    def freeze_within(self, number: int, readings: int, duration: int) -> None:
        """SIGSTOP at a place in the broker's next work where it reads its clock, and SIGCONT later."""
        process = self.process(number)
        if process.state is State.RUNNING:
            process.interrupt_at(readings % 4, lambda: self._frozen(process, (1.0, 12.5)[duration % 2]))

    def _frozen(self, process: SimulatedProcess, seconds: float) -> None:
        if process.state is not State.RUNNING:
            return
        self._interrupted.add(process.node_id)
        process.state = State.STOPPED
        self.pass_time(seconds)
        self._interrupted.discard(process.node_id)
        if process.state is State.STOPPED:
            process.state = State.RUNNING

    # Links to etcd

    @_step(2, weight=3)
    def link(self, number: int, kind: int) -> None:
        """A broker's link to etcd becomes fast, slow, deaf or cut."""
        process = self.process(number)
        process.client.link = (Link.FAST, Link.SLOW, Link.DEAF, Link.CUT)[kind % 4]
        process.watches = process.client.link in (Link.FAST, Link.DEAF)

    @_step(2, _any_waits(applied=False), weight=3)
    def etcd_applies(self, number: int, position: int) -> None:
        """A call on its way from a broker reaches etcd."""
        client = self.process(number).client
        count = client.count_pending(applied=False)
        if count:
            client.apply_pending(position % count)

    @_step(2, _any_waits(applied=True), weight=2)
    def etcd_answers(self, number: int, position: int) -> None:
        """An answer on its way to a broker arrives."""
        process = self.process(number)
        count = process.client.count_pending(applied=True)
        if count and process.client.link is not Link.CUT and process.state is State.RUNNING:
            process.client.answer_pending(position % count)

    @_step(3, lambda world: any(process.client.pending for process in world.processes.values()))
    def etcd_loses(self, number: int, position: int, answer: int) -> None:
        """A call to etcd, or its answer, is lost."""
        client = self.process(number).client
        count = client.count_pending(applied=bool(answer % 2))
        if count and answer % 2:
            client.answer_pending(position % count, lost=True)
        elif count:
            client.lose_pending(position % count)

    @_step(2, lambda world: any(process.client.link is Link.SLOW for process in world.processes.values()))
    def watch(self, number: int, revisions: int) -> None:
        """A broker whose link is slow receives the next changes in etcd."""
        process = self.process(number)
        if process.client.link is Link.SLOW and process.state is State.RUNNING:
            process.watch(1 + revisions % 3)

    @_step(3, lambda world: any(process.client.link is Link.SLOW for process in world.processes.values()))
    def watch_one(self, number: int, prefix: int, changes: int) -> None:
        """A broker whose link is slow receives the next changes under one prefix, before those under others."""
        process = self.process(number)
        if process.client.link is Link.SLOW and process.state is State.RUNNING:
            process.watch_one(_one_of(process.view.prefixes, prefix), 1 + changes % 3)

    @_step(3)
    def delay_watch(self, number: int, prefix: int, delay: int) -> None:
        """Delay the changes under one prefix for a broker by this time, from now on."""
        process = self.process(number)
        process.watch_delays[_one_of(process.view.prefixes, prefix)] = (0.0, 0.3, 1.0, 4.0)[delay % 4]

    @_step(2)
    def reload(self, number: int, delay: int) -> None:
        """A broker's watch reloads, as after a compaction; the snapshot arrives after this time."""
        process = self.process(number)
        if process.state is State.RUNNING:
            process.reload((0.0, 0.3, 1.0, 4.0)[delay % 4])

    @_step(2)
    def keepalives(self, number: int, fate: int) -> None:
        """Set the fate of a broker's keepalives from now on."""
        self.process(number).client.keepalives = _one_of(list(KeepAlives), fate)

    # The network between brokers

    @_step(2)
    def block(self, one: int, other: int) -> None:
        """Cut the network between two brokers."""
        self.network.blocked.add(frozenset((self.process(one).node_id, self.process(other).node_id)))

    @_step(0, lambda world: bool(world.network.blocked))
    def unblock_all(self) -> None:
        self.network.blocked.clear()

    @_step(1)
    def lag(self, number: int) -> None:
        """A follower no longer fetches by itself."""
        self.network.lagging.add(self.broker(number).node_id)

    @_step(1, lambda world: bool(world.network.lagging))
    def catch_up(self, number: int) -> None:
        self.network.lagging.discard(self.broker(number).node_id)

    @_step(1, weight=2)
    def fetch(self, number: int) -> None:
        """A follower's request and the leader's answer, without delay."""
        process = self.broker(number)
        if process.state is State.RUNNING:
            self.network.round_trip(process)

    @_step(1, weight=2)
    def ask(self, number: int) -> None:
        """A follower sends its request."""
        process = self.broker(number)
        if process.state is State.RUNNING:
            self.network.ask(process)

    @_step(1, lambda world: bool(world.network.flights), weight=3)
    def arrive(self, position: int) -> None:
        """A request reaches its leader, or an answer the follower."""
        if self.network.flights:
            flight = self.network.flights[position % len(self.network.flights)]
            if flight.fetched is None:
                self.network.serve(flight)
            else:
                self.network.flights.remove(flight)
                self.network.take(flight)

    @_step(1, lambda world: bool(world.network.flights))
    def lose(self, position: int) -> None:
        if self.network.flights:
            del self.network.flights[position % len(self.network.flights)]

    # Producers

    @_step(2, weight=3)
    def produce(self, number: int, acks: int) -> None:
        """A producer that is not idempotent sends a new batch."""
        self.clients.attempt(self.clients.new_batch(-1, -1), self.process(number), (ACKS_ALL, 1, 0)[acks % 3])

    @_step(2, weight=4)
    def produce_idempotent(self, number: int, which: int) -> None:
        """An idempotent producer sends its next batch, or the last one again while its outcome is unknown."""
        producer = self.clients.producers[which % len(self.clients.producers)]
        self.clients.resolve(producer)
        if producer.current is None:
            producer.current = self.clients.new_batch(producer.producer_id, producer.sequence)
            producer.sequence += 1
        attempt = self.clients.attempt(producer.current, self.process(number), ACKS_ALL)
        producer.attempts.append(attempt)

    @_step(3)
    def resend(self, number: int, which: int, position: int) -> None:
        """An acknowledged batch arrives once more: the network had delayed it."""
        producer = self.clients.producers[which % len(self.clients.producers)]
        self.clients.resolve(producer)
        recent = producer.done[-5:] if producer.current is None else producer.done[-4:]
        if recent:
            acks = ACKS_ALL if position < 5 else 1
            self.clients.attempt(recent[position % len(recent)], self.process(number), acks)

    # Writers that claim the partition

    @_step(2, weight=3)
    def claim(self, number: int, which: int) -> None:
        """A writer is granted the partition in etcd, and binds its fence at a broker on a connection of its own."""
        self.writers.claim(which)
        self.writers.bind(which, self.process(number))

    @_step(2, _is_claimed, weight=3)
    def bind(self, number: int, which: int) -> None:
        """A broker receives a writer's latest claim, perhaps once more."""
        self.writers.bind(which, self.process(number))

    @_step(3, lambda world: world.writers.is_granted, weight=6)
    def write_fenced(self, number: int, which: int, acks: int) -> None:
        """A writer whose claim was answered writes, even if another has claimed the partition since."""
        self.writers.write(which, self.process(number), (ACKS_ALL, 1, 0)[acks % 3])

    @_step(2, _is_claimed)
    def release(self, number: int, anew: int) -> None:
        """The claims are given up, or the release is sent to a broker once more."""
        self.writers.release(self.process(number), anew=anew % 3 == 0)

    @_step(2, _is_claimed)
    def hang_up(self, number: int, which: int) -> None:
        """A writer's connection to a broker is closed."""
        self.writers.hang_up(which, self.process(number))

    # A consumer

    @_step(1, weight=2)
    def consume(self, number: int) -> None:
        """The consumer continues reading, from whichever broker serves reads."""
        self.clients.consume(self.process(number))

    # Keeping logs

    @_step(1)
    def keep(self, number: int) -> None:
        """Do what a broker does to its logs every few seconds: checkpoints and retention."""
        process = self.process(number)
        if process.state is State.RUNNING:
            process.loop.create_task(process.keeper.checkpoint())
            process.loop.create_task(process.keeper.remove_old_segments())

    # Checking

    def check(self) -> None:
        """Check all rules."""
        if self.clients.found_meanwhile is not None:
            raise self.clients.found_meanwhile
        self._check_leaders()
        in_sync = self.isr()
        for node_id, process in self.processes.items():
            if process.failure:
                self.judge.violated(Rule.CRASHED, f"broker {node_id}: {process.failure}")
            if node_id in self._interrupted:
                continue  # it is stopped in the middle of its work
            partition = process.partition if process.state is not State.DEAD else None
            replica = self.replica(node_id)
            if self.setting.retention_bytes >= 0:
                self.judge.removed_below = max(self.judge.removed_below, replica.log_start_offset)
            if partition is not None:
                self._check_open(process, partition, replica)
            self.judge.fences_rise(replica)
            if node_id in in_sync:
                self.judge.holds_what_was_promised(replica, "in sync as etcd has it")
                self.judge.holds_what_is_committed(replica)

    def _check_open(self, process: SimulatedProcess, partition: Partition, replica: Replica) -> None:
        label = f"broker {process.node_id}, {partition.role.value} in epoch {partition.leader_epoch}"
        try:
            validate_consistency(partition.log, partition.high_watermark)
        except Inconsistent as error:
            self.judge.violated(Rule.BACKWARDS, f"{label}: {error}")
        if partition.failure:
            self.judge.violated(Rule.LOST, f"{label}: {partition.failure}")
        self.judge.high_watermark(partition, label, partition.high_watermark, partition.log_end_offset)
        self.judge.replica_is_like_others(replica, partition.high_watermark)
        if process.state is State.RUNNING and self._leads(process):
            self.judge.holds_what_was_promised(replica, "the leader")
            self.judge.holds_what_gave_way(replica)
            self.judge.has_no_doubles(replica)

    def _check_leaders(self) -> None:
        leading = [each for each in self.processes.values() if each.state is not State.DEAD and self._leads(each)]
        self.judge.leaders(f"broker {each.node_id}" for each in leading)

    def _check_ids(self) -> None:
        """Check at every change in etcd: a broker that has lost its key is about to learn it."""
        for process in self.processes.values():
            key = self.store.get(_KEYS.broker(process.node_id)) if process.lease_id else None
            if process.state is not State.DEAD and key is not None and key.lease_id != process.lease_id:
                try:
                    self.judge.violated(Rule.USURPED, f"broker {process.node_id}")
                except Violation as violation:
                    self.clients.found_meanwhile = violation

    @staticmethod
    def _leads(process: SimulatedProcess) -> bool:
        return process.leases.led(*PARTITION) is not None and not process.is_fenced()

    def _leader_that_is_well(self) -> Partition | None:
        """The leader, if nothing prevents it from changing the ISR, now or later."""
        partitions = [each.partition for each in self.processes.values() if each.hears_at_once and self._leads(each)]
        for partition in partitions:
            if partition is not None and partition.role is Role.LEADER and partition.replication.proposed is None:
                return partition if self.setting.hand_over_after_s == float("inf") else None
        return None

    def _out_of_sync_after(self, seconds: float) -> set[int]:
        """The brokers that a healthy leader has removed from the ISR by then; none of them comes back by itself."""
        away = {node_id for node_id, process in self.processes.items() if process.state is not State.RUNNING}
        if seconds > ISR_LAG_S * 1.1:
            return away | self.network.lagging
        return {node_id for node_id in away if self.store.get(_KEYS.broker(node_id)) is None} if seconds > 1 else set()

    def state_value(self) -> StateValue | None:
        """The partition's state in etcd."""
        found = self.store.get(_KEYS.state(TOPIC, PARTITION_INDEX))
        return decode_value(found.value, StateValue) if found is not None else None

    def isr(self) -> list[int]:
        """The brokers whose disks have the very logs that are in sync in etcd."""
        state = self.state_value()
        replicas = state.isr if state is not None else []
        return [each.node_id for each in replicas if self._log_id(each.node_id) == each.log_id]

    def _log_id(self, node_id: int) -> uuid.UUID | None:
        found = read_json(self._directory / str(node_id) / "log-ids" / f"{_TOPIC_ID}-{PARTITION_INDEX}")
        return None if found is None else uuid.UUID(str(found["log_id"]))

    def replica(self, node_id: int) -> Replica:
        return replica_at(node_id, self._directory / str(node_id) / f"{TOPIC}-{PARTITION_INDEX}")
