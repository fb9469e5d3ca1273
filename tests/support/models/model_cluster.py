"""Model three brokers with one log per partition, Kafka's rules for appending to it, and all possible faults.

The logs are lists, replication is perfect, and a new owner knows every producer's last batches, like a broker that
rebuilds this state from the log. The model shows whether the proxy in front of it keeps its promises.

A connection's requests are served strictly one after another, each after a short pause. A `Fate` is drawn for every
request: most succeed, some meet a fault of a broker, at any possible point. In addition owners change, brokers crash
and restart, connections are reset at any time, and addresses change.

Requests of a connection that are not being served yet are lost with it, as when a process ends.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from enum import Enum
from random import Random

from kproxy.routing.retry import BrokerSemantics
from kproxy_codec.record_batch import parse_header
from tests.support.brokers.scripted_upstream import Asked, Partition, ScriptedUpstream, UpstreamConnection
from tests.support.processes.running_proxy import RunningProxy

NOT_LEADER = 6
OUT_OF_ORDER = 45
# Kafka remembers five batches of each producer.
RETAINED_BATCHES = 5
REFUSED_BEFORE_APPEND = (5, 6, 19)
# With acks=all a batch may have been appended before brokers answer these codes; otherwise it was not.
REFUSED_AT_ANY_TIME = (3, 6, 56)
STORAGE_ERROR = 56
OUTCOME_UNKNOWN = (7, 13)
APPENDED_ALL_THE_SAME = 20
REFUSED_FOR_GOOD = (2, 10, 29, 87)


# The format of producers' records: producer:partition:number.
NAME = re.compile(rb"\d+:\('\w', \d+\):-?\d+")


def name_in(records: bytes) -> str:
    found = NAME.search(records)
    return found.group().decode() if found else "?"


class Fate(Enum):
    """The outcome of one request, or of one partition of it."""

    SERVED = "served"
    # The connection
    RESET_BEFORE = "the connection is reset, nothing appended"
    RESET_AFTER = "appended; the connection is reset within the answer"
    CLOSED_AFTER = "appended; the connection is closed within the answer"
    WRONG_ID = "appended; the answer carries another's correlation_id"
    TWICE = "appended; the answer comes twice"
    INCOMPLETE = "appended; the answer lacks a partition"
    NOTHING = "appended; the answer is noise"
    IN_PIECES = "served; the answer comes in pieces"
    HUNG = "served after a while"


FAULTS = [fate for fate in Fate if fate is not Fate.SERVED]


class ModelCluster:
    """`trouble` in [0, 1] is the share of requests with a fault; `seed` decides which."""

    def __init__(self, partitions: list[Partition], seed: int, *, semantics: BrokerSemantics, trouble: float) -> None:
        self.random = Random(seed)
        self.semantics = semantics
        self.trouble = trouble
        self.brokers = [ScriptedUpstream(node_id, self._enqueue) for node_id in (1, 2, 3)]
        self.logs: dict[Partition, list[bytes]] = {partition: [] for partition in partitions}
        self.owners = {partition: self.random.randint(1, 3) for partition in partitions}
        self.happened: Counter[str] = Counter()
        # The outcomes of the batches that arrived, for debugging.
        self.history: deque[str] = deque(maxlen=50_000)
        # The broker that serves a partition, 0 for none, and the broker that served it last.
        self._serving: dict[Partition, int] = dict(self.owners)
        self._latest: dict[Partition, int] = dict(self.owners)
        # By partition and producer id: (base_sequence, offset) of its last batches.
        self._known: dict[tuple[Partition, int], deque[tuple[int, int]]] = {}
        self._queues: dict[UpstreamConnection, deque[Asked]] = {}

    # Serving

    def _enqueue(self, asked: Asked) -> None:
        queue = self._queues.setdefault(asked.connection, deque())
        queue.append(asked)
        if len(queue) == 1:
            self._serve_later(queue)

    def _serve_later(self, queue: deque[Asked]) -> None:
        fate = self._draw_fate()
        pause_s = self.random.random() * 0.001
        if fate is Fate.HUNG:
            pause_s = 1.6 if self.random.random() < 0.05 else self.random.random() * 0.3
        asyncio.get_running_loop().call_later(pause_s, self._serve, queue, fate)

    def _draw_fate(self) -> Fate:
        fate = self.random.choice(FAULTS) if self.random.random() < self.trouble else Fate.SERVED
        self.happened[fate.name] += 1
        return fate

    def _serve(self, queue: deque[Asked], fate: Fate) -> None:
        asked = queue[0]
        if not asked.connection.is_open:
            queue.clear()
            return
        if fate is Fate.RESET_BEFORE:
            for partition in asked.partitions:
                self._note(asked, partition, fate.name)
            asked.connection.abort()
            queue.clear()
            return
        results = {partition: self._append(asked, partition) for partition in asked.partitions}
        for partition, result in results.items():
            self._note(asked, partition, f"{result} {fate.name}")
        if asked.fields["acks"] != 0:
            pause_s = self._answer(asked, results, fate)
        else:
            pause_s = 0.0
            if any("error_code" in result for result in results.values()):
                # Close the connection as Kafka does, so that a producer without answers notices.
                asked.connection.close()
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._serve_next, queue)
        else:
            self._serve_next(queue)

    def _serve_next(self, queue: deque[Asked]) -> None:
        if queue:
            queue.popleft()
        if queue:
            self._serve_later(queue)

    def _answer(self, asked: Asked, results: dict[Partition, dict[str, int]], fate: Fate) -> float:
        """Write the answer or something else; return the seconds for which the connection is busy with it."""
        connection = asked.connection
        reply = asked.reply(results=results)
        cut = self.random.randrange(len(reply))
        if fate in (Fate.RESET_AFTER, Fate.CLOSED_AFTER):
            connection.write(reply[:cut])
            if fate is Fate.RESET_AFTER:
                connection.abort()
            else:
                connection.close()
        elif fate is Fate.WRONG_ID:
            connection.write(asked.reply(asked.header.correlation_id + self.random.choice((-1, 1)), results=results))
        elif fate is Fate.TWICE:
            connection.write(reply + reply)
        elif fate is Fate.INCOMPLETE:
            connection.write(asked.reply(topics=[(topic, indexes[1:]) for topic, indexes in asked.topics]))
        elif fate is Fate.NOTHING:
            connection.write(reply[:8] + self.random.randbytes(len(reply) - 8))
        elif fate is Fate.IN_PIECES:
            connection.write(reply[:cut])
            pause_s = self.random.random() * 0.002
            asyncio.get_running_loop().call_later(pause_s, self._write_rest, connection, reply[cut:])
            return pause_s + 0.001
        else:
            connection.write(reply)
        return 0.0

    @staticmethod
    def _write_rest(connection: UpstreamConnection, rest: bytes) -> None:
        if connection.is_open:
            connection.write(rest)

    # Appending

    def _append(self, asked: Asked, partition: Partition) -> dict[str, int]:
        """Append one partition's batch or refuse it; the fields of its entry in the answer."""
        node_id = asked.connection.upstream.node_id
        records = asked.records[partition]
        if self._serving[partition] != node_id:
            self.happened["not the owner"] += 1
            is_deposed = not self._serving[partition] and self._latest[partition] == node_id
            if is_deposed and self._may_refuse_late(asked) and self.random.random() < 0.5:
                # A leader that is deposed while it waits for the others: the batch is in the log nevertheless.
                return {**self._append_batch(partition, records), "error_code": NOT_LEADER}
            return {"error_code": NOT_LEADER}
        code, appends = 0, True
        if self.random.random() < self.trouble:
            code, appends = self._draw_code(asked, records)
            self.happened[f"code {code}"] += 1
        if appends:
            result = self._append_batch(partition, records)
            if "error_code" in result:
                return result
            # A refusal after the append keeps the offset, except if a flush fails.
            keeps_offset = code in REFUSED_AT_ANY_TIME and (code != STORAGE_ERROR or self.random.random() < 0.5)
            return {**result, "error_code": code} if keeps_offset or not code else {"error_code": code}
        return {"error_code": code}

    def _draw_code(self, asked: Asked, records: bytes) -> tuple[int, bool]:
        """An error code, and whether the batch is appended nevertheless."""
        kinds = ["before", "any time", "unknown", "all the same"]
        if parse_header(records).producer_id < 0:
            # An idempotent producer does not survive a gap in its sequence.
            kinds.append("for good")
        kind = self.random.choice(kinds)
        if kind == "before":
            return self.random.choice(REFUSED_BEFORE_APPEND), False
        if kind == "any time":
            is_late = self._may_refuse_late(asked) and self.random.random() < 0.5
            return self.random.choice(REFUSED_AT_ANY_TIME), is_late
        if kind == "unknown":
            return self.random.choice(OUTCOME_UNKNOWN), self.random.random() < 0.5
        if kind == "all the same":
            return APPENDED_ALL_THE_SAME, True
        return self.random.choice(REFUSED_FOR_GOOD), False

    def _may_refuse_late(self, asked: Asked) -> bool:
        return not self.semantics.refuses_before_append and asked.fields["acks"] == -1

    def _append_batch(self, partition: Partition, records: bytes) -> dict[str, int]:
        log = self.logs[partition]
        header = parse_header(records)
        if header.producer_id >= 0:
            known = self._known.setdefault((partition, header.producer_id), deque(maxlen=RETAINED_BATCHES))
            for sequence, offset in known:
                if sequence == header.base_sequence:
                    return {"base_offset": offset}
            if known and header.base_sequence != known[-1][0] + 1:
                self.happened["out of order"] += 1
                return {"error_code": OUT_OF_ORDER}
            known.append((header.base_sequence, len(log)))
        log.append(records)
        return {"base_offset": len(log) - 1}

    def _note(self, asked: Asked, partition: Partition, what: str) -> None:
        broker = asked.connection.upstream
        self.history.append(
            f"{asyncio.get_running_loop().time():.3f} {name_in(asked.records[partition])} "
            f"at {broker.node_id}/{broker.connections.index(asked.connection)}: {what}"
        )

    def history_of(self, producer: int, partition: Partition, most: int = 50) -> str:
        """The beginning and the end of the history of a producer's batches."""
        lines = [line for line in self.history if f" {producer}:{partition}:" in line]
        if len(lines) > most:
            lines[most // 2 : -(most // 2)] = ["..."]
        return "\n".join(lines)

    # Faults of the cluster

    async def make_trouble(self, proxy: RunningProxy) -> None:
        """Move, cut and crash until cancelled; the cluster is whole again by then or in `heal`."""
        proxy.source.on_refresh = lambda topic, index, _: self._tell(proxy, (topic, index))
        await asyncio.gather(
            *(self._move(proxy, partition) for partition in self.owners), self._cut(), self._crash(proxy)
        )

    async def heal(self, proxy: RunningProxy) -> None:
        """Make all brokers serve again, and correct the proxy's table."""
        self.trouble = 0.0
        for broker in self.brokers:
            if not broker.is_listening:
                await broker.start()
            proxy.topology.set_broker(broker.node_id, broker.address)
        for partition, owner in self.owners.items():
            self._serving[partition] = owner
            self._tell(proxy, partition)

    async def _move(self, proxy: RunningProxy, partition: Partition) -> None:
        topic, index = partition
        while True:
            await asyncio.sleep(self.random.uniform(0.02, 0.2))
            self.happened["moves"] += 1
            self._serving[partition] = 0
            if self.random.random() < 0.2:
                proxy.disown(topic, [index])
            await self._lag()
            # Move it at random; sometimes it returns to its former broker.
            self.owners[partition] = self.random.randint(1, 3)
            if self.random.random() < 0.7:
                self._tell(proxy, partition)
            await self._lag()
            self._serving[partition] = self._latest[partition] = self.owners[partition]

    async def _lag(self) -> None:
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.random() * self.random.choice((0.004, 0.05)))

    def _tell(self, proxy: RunningProxy, partition: Partition) -> None:
        topic, index = partition
        if proxy.topology.owner(topic.encode(), index) != self.owners[partition]:
            proxy.own(self.owners[partition], topic, [index])

    async def _cut(self) -> None:
        """Reset connections with all bytes on their way in both directions."""
        while True:
            await asyncio.sleep(self.random.uniform(0.02, 0.2))
            connections = [each for broker in self.brokers for each in broker.connections if each.is_open]
            if connections:
                self.happened["cuts"] += 1
                self.random.choice(connections).abort()

    async def _crash(self, proxy: RunningProxy) -> None:
        """Let brokers die and restart, at the same address or at another one, or change only their address."""
        while True:
            await asyncio.sleep(self.random.uniform(0.1, 0.4))
            broker = self.random.choice(self.brokers)
            self.happened["crashes"] += 1
            await broker.stop_listening()
            if self.random.random() < 0.7:
                for connection in broker.connections:
                    connection.abort()
            await asyncio.sleep(self.random.random() * 0.1)
            await broker.start(broker.port if self.random.random() < 0.7 else 0)
            proxy.topology.set_broker(broker.node_id, broker.address)
