"""Simulate a cluster of brokers: one log per partition, Kafka's rules for appending, and all faults of brokers.

This is a model, not a broker: replication is perfect. In a world whose brokers recognize resent batches, a new owner
knows every producer's last batches, like a broker that rebuilds that state from the log. In other worlds it knows
nothing, and accepts any sequence number first.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from kproxy.proxy.apis import proxy_ranges
from kproxy.routing.topology import NO_OWNER, Address, Topology
from kproxy_codec import api_keys, control
from tests.simulation import wire
from tests.simulation.broker import DOUBTED_S, Broker, BrokerConnection
from tests.simulation.dice import Dice, What
from tests.simulation.network import NetworkLoop
from tests.simulation.partitions import POLICY_VIOLATION, Batch, Partition
from tests.simulation.setting import REREAD_S, Move, Setting, Trouble

NOT_LEADER: Final = 6
STORAGE_ERROR: Final = 56
REFUSED_BEFORE_APPEND: Final = (5, 6, 19)
# With acks=all a batch may have been appended before brokers answer these codes; otherwise it was not.
REFUSED_AT_ANY_TIME: Final = (3, 6, 56)
OUTCOME_UNKNOWN: Final = (7, 13)
APPENDED_ALL_THE_SAME: Final = 20
REFUSED_FOR_GOOD: Final = (2, 10, 29, 87)
# About one request in thirty that is served late is served when its client and its proxy have given it up.
LONG_PAUSE_S: Final = 1.35
# The share of slowly served claimants' requests that lose their connection meanwhile.
CUT_AMID: Final = 0.5


class Fate(Enum):
    """The outcome of one request."""

    RESET_BEFORE = "the connection is reset, nothing appended"
    RESET_AFTER = "appended; the connection is reset within the answer"
    CLOSED_AFTER = "appended; the connection is closed within the answer"
    SLOW = "served after a while"
    HALVES = "served; the answer comes in halves"
    # False answers
    WRONG_ID = "appended; the answer carries another's correlation_id"
    TWICE = "appended; the answer comes twice"
    INCOMPLETE = "appended; the answer lacks a partition"
    OTHERS = "appended; the answer is for other partitions"
    NOISE = "appended; the answer is noise"


HONEST: Final = (Fate.RESET_BEFORE, Fate.RESET_AFTER, Fate.CLOSED_AFTER, Fate.SLOW, Fate.SLOW, Fate.HALVES)
FATES: Final = tuple(Fate)


@functools.cache
def _introductions(*, gives_out_ids: bool, fenced: bool) -> dict[int, bytes]:
    """Brokers' answers to ApiVersions, by version."""
    ranges = [
        {"api_key": key, "min_version": lowest, "max_version": highest}
        for key, (lowest, highest) in proxy_ranges().items()
        if key != api_keys.OWN and (gives_out_ids or key != api_keys.INIT_PRODUCER_ID)
    ]
    if fenced:
        ranges.append({"api_key": wire.BIND_FENCES, "min_version": 0, "max_version": 0})
    return {
        version: bytes(
            control.encode_response(
                control.build_response(api_keys.API_VERSIONS, version, error_code=0, api_keys=ranges)
            )
        )
        for version in (0, 3, 4)
    }


class Cluster:
    """The brokers, the owners of partitions, and the faults of brokers.

    `on_fault` is called for every fault; `found` receives every broken rule. The proxies' `topologies` receive the
    changes of the table.
    """

    def __init__(
        self,
        loop: NetworkLoop,
        dice: Dice,
        setting: Setting,
        topologies: Sequence[Topology],
        on_fault: Callable[[str], None],
        found: list[str],
    ) -> None:
        self.loop = loop
        self.dice = dice
        self.setting = setting
        self.topologies = topologies
        # The gated topic's partitions, and callbacks for a batch that arrives, is appended or is refused there.
        self.gated: frozenset[Partition] = frozenset()
        self.on_arrival: Callable[[Batch], object] = lambda batch: None
        self.on_append: Callable[[Batch], object] = lambda batch: None
        self.on_refusal: Callable[[Batch], object] = lambda batch: None
        self.batches: dict[int, Batch] = {}
        self.happened: Counter[str] = Counter()
        # The number of requests that brokers have served slowly.
        self.pauses = 0
        # Client connections whose acks=0 requests reached a broker connection's end after the client had gone.
        self.cut_short: set[int] = set()
        # Whether to keep the history of every batch, for debugging.
        self.keeps_history = False
        self.history: list[str] = []
        self._on_fault = on_fault
        self._found = found
        self._is_fenced = setting.claims is not None and setting.claims.fenced
        self._fates = setting.fates
        self._codes = setting.codes
        self._kinds = FATES if setting.lies else HONEST
        self.brokers = [
            Broker(node_id, Address(f"10.0.0.{node_id}", 9092)) for node_id in range(1, setting.brokers + 1)
        ]
        self.partitions: list[Partition] = []
        for topic, count in enumerate(setting.topics):
            name = b"topic-%d" % topic
            for index in range(count):
                number = len(self.partitions)
                owner = number % setting.brokers + 1
                self.partitions.append(Partition(number, name, b"id-%013d" % topic, index, owner))
        self._found_by = {(each.topic, each.index): each for each in self.partitions}
        self._found_by |= {(each.topic_id, each.index): each for each in self.partitions}
        self._revision = 0
        self._introduction = _introductions(gives_out_ids=setting.knows_again, fenced=self._is_fenced)
        for broker in self.brokers:
            self._place(broker)
        for partition in self.partitions:
            self._give(partition, partition.owner)
            self._tell(partition.number, partition.owner, partition.revision)
        for topic in range(len(setting.topics)):
            self._learn_at(topic, setting.late_ids.get(topic, 0.0))
        if setting.claims is not None:
            called = setting.claims.topic.encode()
            self.gated = frozenset(partition for partition in self.partitions if partition.topic == called)
        for move in setting.moves:
            loop.call_at(move.at, self._release, move)
        for trouble in setting.troubles:
            loop.call_at(trouble.at, self._befall, trouble)

    def _learn_at(self, topic: int, at: float) -> None:
        """Let the proxy learn the topic's id at `at`."""
        partition = next(each for each in self.partitions if each.topic == b"topic-%d" % topic)
        for topology in self.topologies:
            if at:
                self.loop.call_at(at, topology.set_topic_id, partition.topic, partition.topic_id)
            else:
                topology.set_topic_id(partition.topic, partition.topic_id)

    def _place(self, broker: Broker, after_s: float = 0.0) -> None:
        """Let the proxies learn a broker's address."""
        for topology in self.topologies:
            if after_s:
                self.loop.call_later(after_s, topology.set_broker, broker.node_id, broker.address)
            else:
                topology.set_broker(broker.node_id, broker.address)

    # Serving requests

    def accept(self, broker: Broker) -> BrokerConnection:
        connection = BrokerConnection(self, broker)
        broker.connections[connection] = None
        return connection

    def serve(self, connection: BrokerConnection, frame: bytes) -> None:
        """Serve one request."""
        key, version, correlation_id, _ = wire.head_of(frame)
        if key == wire.PRODUCE:
            if connection.session is None:
                self._found.append("a produce request came on a broker connection that belongs to no client session")
            self._serve_produce(connection, frame)
        elif key == wire.API_VERSIONS:
            body = correlation_id.to_bytes(4, "big") + self._introduction[version]
            connection.write(len(body).to_bytes(4, "big") + body)
        elif key == wire.BIND_FENCES:
            self._serve_bind(connection, frame)
        else:
            self._serve_read(connection, frame)

    def batches_of(self, request: wire.ProduceRequest) -> list[tuple[bytes, Partition, Batch]]:
        """The batches, with the topic as the request names it."""
        found = []
        for topic, entries in request.topics:
            for index, records in entries:
                batch = self.batches.get(wire.batch_id_of(records))
                partition = self._found_by.get((topic, index))
                if batch is None or partition is not batch.partition or batch.records != records:
                    self._found.append(f"a broker got bytes for {topic!r}/{index} that nobody sent: {records[:80]!r}")
                else:
                    found.append((topic, partition, batch))
        return found

    def _serve_produce(self, connection: BrokerConnection, frame: bytes) -> None:
        try:
            request = wire.read_produce_request(frame)
            batches = self.batches_of(request)
        except wire.NoMessage as error:
            self._found.append(f"broker {connection.broker.node_id} got {error}")
            return
        if not batches:
            self._found.append(f"broker {connection.broker.node_id} got a request for nothing")
            return
        node_id, first = connection.broker.node_id, batches[0][2]
        for _, _, batch in batches:
            batch.arrive(self.loop.now, connection.written_at)
            self.on_arrival(batch)
        fate = self._fate_of(node_id, first)
        if fate is Fate.SLOW:
            # As if the request came later: it is served then, and the requests after it too.
            waits_s = self.dice.at(What.PAUSE, node_id, first.id, first.arrivals) ** 3 * 1.5
            if waits_s > LONG_PAUSE_S:
                # Longer than any client or proxy waits.
                waits_s *= 7
            connection.pause(waits_s, lambda: self._serve_late(connection, request, batches, waits_s))
            cut = self.dice.at(What.CLAIM, node_id, first.id, first.arrivals)
            if first.partition in self.gated and cut < CUT_AMID:
                self._befell("cut amid a claimant's request")
                self.loop.call_later(waits_s * cut, connection.reset)
            return
        self._append_all(connection, request, batches, fate)

    def _serve_late(
        self,
        connection: BrokerConnection,
        request: wire.ProduceRequest,
        batches: list[tuple[bytes, Partition, Batch]],
        waited_s: float,
    ) -> None:
        if connection.is_open or all(partition in self.gated for _, partition, _ in batches):
            # Claimants send nothing twice: their batches are appended even if nobody waits for the answer any more.
            for _, _, batch in batches:
                batch.is_late = not connection.is_open
            self._append_all(connection, request, batches, None)
        if waited_s > DOUBTED_S and not request.acks:
            # Even if it is refused, because the proxy does not doubt a batch that left so long ago.
            for _, _, batch in batches:
                batch.is_excused = True

    def _fate_of(self, node_id: int, first: Batch) -> Fate | None:
        drawn = self.dice.at(What.FATE, node_id, first.id, first.arrivals)
        if drawn >= self._fates:
            return None
        fate = self._kinds[int(drawn / self._fates * len(self._kinds))]
        self._befell(fate.name)
        return fate

    def _note(self, what: str) -> None:
        self.history.append(f"  {self.loop.now:.7f} {what}")

    def _befell(self, what: str) -> None:
        if self.keeps_history:
            self._note(what)
        self.happened[what] += 1
        self._on_fault(what)

    def _append_all(
        self,
        connection: BrokerConnection,
        request: wire.ProduceRequest,
        batches: list[tuple[bytes, Partition, Batch]],
        fate: Fate | None,
    ) -> None:
        if fate is Fate.RESET_BEFORE:
            connection.reset()
            return
        results: wire.Results = []
        has_failed = False
        leader = None
        for topic, partition, batch in batches:
            end = partition.end
            code, offset = self._append(connection, partition, batch, request.acks)
            if partition.end > end and partition in self.gated:
                self.on_append(batch)
            elif code and partition in self.gated:
                self.on_refusal(batch)
            if self.keeps_history:
                self._note(f"{connection.broker.node_id}: {batch}: code {code}, offset {offset}, {fate}")
            if code:
                has_failed, leader = True, partition.owner
            if not results or results[-1][0] != topic:
                results.append((topic, []))
            results[-1][1].append((partition.index, code, offset))
        if request.acks != 0:
            self._answer(connection, request, results, leader, fate, batches[0][2])
        elif has_failed:
            # Close the connection as Kafka does, so that a producer without answers notices.
            connection.cut_short()
            connection.close()

    def _answer(
        self,
        connection: BrokerConnection,
        request: wire.ProduceRequest,
        results: wire.Results,
        leader: int | None,
        fate: Fate | None,
        first: Batch,
    ) -> None:
        version, correlation_id = request.version, request.correlation_id
        throttle_ms = 0
        key = (What.ORDER, first.id, first.arrivals)
        if self.dice.at(*key) < 0.5:
            # Like Kafka, answer in the order of hash tables.
            results = [
                (topic, self.dice.sample(rows, len(rows), *key, place))
                for place, (topic, rows) in enumerate(self.dice.sample(results, len(results), *key))
            ]
        if self._fates and self.dice.at(What.THROTTLE, first.id, first.arrivals) < self._fates / 2:
            throttle_ms = 1 + first.number % 100
        frame = wire.produce_response(version, correlation_id, results, leader, throttle_ms)
        if fate is None:
            connection.write(frame)
            return
        drawn = self.dice.at(What.LATE, connection.broker.node_id, first.id, first.arrivals)
        cut = int(drawn * len(frame))
        if fate in (Fate.RESET_AFTER, Fate.CLOSED_AFTER):
            connection.write(frame[:cut])
            if fate is Fate.RESET_AFTER:
                connection.reset()
            else:
                connection.close()
        elif fate is Fate.HALVES:
            connection.write(frame[:cut])
            connection.pause(drawn * 0.003, lambda: connection.write(frame[cut:]))
        elif fate is Fate.WRONG_ID:
            connection.write(wire.produce_response(version, correlation_id + (1 if drawn < 0.5 else -1), results))
        elif fate is Fate.TWICE:
            connection.write(frame + frame)
        elif fate is Fate.INCOMPLETE:
            connection.write(wire.produce_response(version, correlation_id, results[1:]))
        elif fate is Fate.OTHERS:
            others = [(topic, [(index + 1, code, offset) for index, code, offset in rows]) for topic, rows in results]
            connection.write(wire.produce_response(version, correlation_id, others))
        else:
            connection.write(frame[:8] + bytes(byte ^ 0xA5 for byte in frame[8:]))

    def _append(self, connection: BrokerConnection, partition: Partition, batch: Batch, acks: int) -> tuple[int, int]:
        """Append one partition's batch or refuse it: the code and the base offset of its entry."""
        node_id = connection.broker.node_id
        may_be_late = acks == -1 and not self.setting.semantics.refuses_before_append
        if partition.serving != node_id and not self._takes_over(node_id, partition):
            self.happened["not the owner"] += 1
            is_deposed = not partition.serving and partition.latest == node_id
            if is_deposed and may_be_late and self.dice.at(What.LATE, node_id, batch.id, batch.arrivals) < 0.5:
                # A leader is deposed while it waits for its followers: the batch is in the log all the same.
                code, offset = partition.append(batch)
                return code or NOT_LEADER, offset
            return NOT_LEADER, wire.NO_OFFSET
        if self._is_fenced and partition in self.gated and not partition.fence.lets(connection.bindings.get(partition)):
            self.happened["fenced"] += 1
            return POLICY_VIOLATION, wire.NO_OFFSET
        drawn = self.dice.at(What.CODE, node_id, batch.id, batch.arrivals)
        if drawn >= self._codes:
            return partition.append(batch)
        return self._fail(partition, batch, drawn / self._codes, may_be_late=may_be_late)

    def _takes_over(self, node_id: int, partition: Partition) -> bool:
        """A broker takes an unowned partition that is offered to it, if brokers do so in this world."""
        if partition.owner != NO_OWNER or not self.setting.semantics.refuses_before_append:
            return False
        if not self.setting.knows_again:
            return False
        self.happened["taken over"] += 1
        self._give(partition, node_id)
        partition.serving = partition.latest = node_id
        self.loop.call_later(0.002, self._tell, partition.number, node_id, partition.revision)
        return True

    def _fail(self, partition: Partition, batch: Batch, drawn: float, *, may_be_late: bool) -> tuple[int, int]:
        kinds = 5 if batch.producer < 0 else 4
        kind, drawn = divmod(drawn * kinds, 1.0)
        keeps_offset = False
        if kind == 0:
            code, appends = REFUSED_BEFORE_APPEND[int(drawn * 3)], False
        elif kind == 1:
            which, drawn = divmod(drawn * 3, 1.0)
            code, appends = REFUSED_AT_ANY_TIME[int(which)], may_be_late and drawn < 0.5
            # A refusal after the append keeps the offset, except if a flush fails.
            keeps_offset = code != STORAGE_ERROR or drawn < 0.25
        elif kind == 2:
            code, appends = OUTCOME_UNKNOWN[drawn < 0.5], drawn % 0.5 < 0.25
        elif kind == 3:
            code, appends = APPENDED_ALL_THE_SAME, True
        else:
            code, appends = REFUSED_FOR_GOOD[int(drawn * 4)], False
        self._befell(f"code {code}")
        if not appends:
            return code, wire.NO_OFFSET
        failed, offset = partition.append(batch)
        return failed or code, offset if keeps_offset else wire.NO_OFFSET

    def _serve_read(self, connection: BrokerConnection, frame: bytes) -> None:
        key, correlation_id, topics = wire.read_read_request(frame)
        results = []
        for topic, indexes in topics.items():
            entries = []
            for index in indexes:
                partition = self._found_by[topic, index]
                is_owner = partition.serving == connection.broker.node_id
                entries.append((index, 0 if is_owner else NOT_LEADER, partition.end if is_owner else -1))
            results.append((topic, entries))
        connection.write(wire.read_response(key, correlation_id, results))

    # Fences

    def _serve_bind(self, connection: BrokerConnection, frame: bytes) -> None:
        correlation_id, bindings = wire.read_bind_request(frame)
        bound = []
        for topic, index, fence, is_released in bindings:
            partition = self._found_by[topic, index]
            node_id = connection.broker.node_id
            if partition.serving != node_id and not self._takes_over(node_id, partition):
                code = NOT_LEADER
            else:
                code = partition.fence.keep(fence, is_released=is_released)
            if not is_released:
                connection.bindings[partition] = max(fence, connection.bindings.get(partition, 0))
            if self.keeps_history:
                self._note(f"{node_id}: {partition} {'released' if is_released else 'bound'} at {fence}: code {code}")
            bound.append((topic, index, code, partition.fence.fence))
        connection.write(wire.bind_response(correlation_id, bound))

    # Owners of partitions

    def _give(self, partition: Partition, owner: int) -> None:
        self._revision += 1
        partition.owner, partition.revision = owner, self._revision

    def _tell(self, number: int, owner: int, revision: int) -> None:
        partition = self.partitions[number]
        if self.keeps_history:
            self._note(f"the proxy hears that {partition} is owned by {owner}, revision {revision}")
        for topology in self.topologies:
            topology.set_owner(partition.topic, partition.index, owner, revision)

    async def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> None:
        """Change the topology as an ownership source does."""
        partition = self._found_by.get((topic, partition_index))
        if partition is None:
            return
        if topic == partition.topic_id and self.topologies[0].name_of(topic) is None:
            # The proxy learns this by itself.
            return
        partition.refreshes += 1
        drawn = self.dice.at(What.REFRESH, partition.number, self.loop.now)
        reread_s = REREAD_S if self.setting.slow_rereads else 0.0005 + drawn**4 * 0.3
        await asyncio.sleep(reread_s)
        self._tell(partition.number, partition.owner, partition.revision)

    def _release(self, move: Move) -> None:
        partition = self.partitions[move.partition]
        if not partition.serving:
            # The change is already on its way.
            return
        if partition.serving == move.to and not self.setting.knows_again:
            # The change came by another route; or batches are on their way to a broker that forgets, which must not
            # return.
            return
        self._befell("move")
        partition.serving = 0
        if move.is_released:
            self._give(partition, NO_OWNER)
            if move.told_after_s is not None:
                self.loop.call_later(move.told_after_s / 2, self._tell, partition.number, NO_OWNER, partition.revision)
        self.loop.call_at(move.taken_at, self._take, move)

    def _take(self, move: Move) -> None:
        partition = self.partitions[move.partition]
        if partition.serving:
            # A broker has taken an unowned partition.
            return
        self._give(partition, move.to)
        if move.told_after_s is not None:
            self.loop.call_later(move.told_after_s, self._tell, partition.number, move.to, partition.revision)
        self.loop.call_at(move.served_at, self._begin, move)

    def _begin(self, move: Move) -> None:
        partition = self.partitions[move.partition]
        if partition.serving:
            return
        partition.serving = partition.latest = move.to
        if self.keeps_history:
            self._note(f"{partition} is served by {move.to}, revision {partition.revision}")
        if not self.setting.knows_again:
            partition.known.clear()
            # Batches sent to the broker when it owned the partition before must not arrive now: the log would begin
            # with later ones.
            for connection in list(self.brokers[move.to - 1].connections):
                if connection.is_behind:
                    connection.reset()

    # Faults of brokers

    def _befall(self, trouble: Trouble) -> None:
        broker = self.brokers[trouble.broker - 1]
        self._befell(trouble.kind)
        if trouble.kind == "crash":
            broker.is_up = False
            for connection in list(broker.connections):
                connection.reset()
        elif trouble.kind == "hang":
            broker.is_hung = True
        elif trouble.kind == "stall":
            broker.is_stalled = True
            for connection in broker.connections:
                if connection.transport is not None:
                    connection.transport.stall()
        elif trouble.kind == "deaf":
            broker.is_deaf = True
        elif trouble.kind == "leave":
            for topology in self.topologies:
                topology.remove_broker(broker.node_id)
        elif trouble.kind == "readdress":
            broker.address = Address(broker.address.host, broker.address.port + 1)
            self._place(broker, trouble.lasts_s)
            return
        else:
            self._cut_one(broker)
            return
        self.loop.call_later(trouble.lasts_s, self._recover, broker)
        if trouble.kind in ("crash", "hang"):
            self._lose_leases(broker, trouble)

    def _lose_leases(self, broker: Broker, trouble: Trouble) -> None:
        """Give its partitions to other brokers after a while, if it has not returned by then."""
        now = self.loop.now
        for partition in self.partitions:
            drawn = self.dice.at(What.VICTIM, partition.number, now)
            at = now + 0.05 + drawn
            if partition.owner == broker.node_id and at < min(now + trouble.lasts_s, self.setting.trouble_s):
                to = (broker.node_id + (int(drawn * 1000) % 2 if self.setting.knows_again else 0)) % len(
                    self.brokers
                ) + 1
                self.loop.call_at(at, self._release, Move(at, partition.number, to, at, at + 0.02 * drawn, 0.01, False))

    def _cut_one(self, broker: Broker) -> None:
        keys = {each.transport.key: each for each in broker.connections if each.transport is not None}
        if keys:
            victim = min(keys, key=lambda key: self.dice.at(What.VICTIM, key))
            keys[victim].reset()

    def _recover(self, broker: Broker) -> None:
        if broker.node_id not in self.topologies[0].brokers:
            self._place(broker)
        broker.is_up, broker.is_hung, broker.is_deaf, broker.is_stalled = True, False, False, False
        for connection in list(broker.connections):
            if connection.transport is not None:
                connection.transport.flow()
            connection.serve()

    def heal(self) -> None:
        """Make all brokers serve again without faults, and correct the proxies' tables."""
        self._fates = self._codes = 0.0
        for broker in self.brokers:
            self._recover(broker)
            self._place(broker)
        for partition in self.partitions:
            if partition.owner == NO_OWNER:
                self._give(partition, partition.latest)
            if not partition.serving and not self.setting.knows_again:
                partition.known.clear()
            partition.serving = partition.latest = partition.owner
            self._tell(partition.number, partition.owner, partition.revision)
