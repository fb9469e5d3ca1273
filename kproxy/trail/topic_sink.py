"""Write the trail to a topic, as an idempotent producer with one batch in flight.

Messages have the process's incarnation as key, so one partition has all of its trail in order. By default the sink
reaches the cluster through this proxy itself, on a connection that never leaves the process: `dial` makes it, and it
leads to every broker. So the advertised address, other listeners on the port, and a closed listener do not matter.

States: none --a page--> a producer, with an id and a partition --a failure--> none. Connections come and go meanwhile.

Invariants
1. A batch is sent, always with the same sequence, until it is confirmed; only then comes the next one. One that is too
   large for the topic is cut in two, and later ones are smaller.
2. After a refusal for good, or DELIVERY_S, the producer is discarded. The next one, with an id of its own, writes the
   pages again. So pages may be in the topic twice, but none is changed or skipped, and their first copies are in order.
3. Every dial and answer takes TIMEOUT_S at most.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kafka.partitioner.default import murmur2

from kproxy.address import Address
from kproxy.ownership.kafka_client import (
    ANY_VERSION,
    PLAIN_ACCESS,
    WITHOUT_TOPIC_IDS,
    BrokerUnreachable,
    KafkaConnection,
    open_any,
)
from kproxy.security.broker_auth import BrokerAuth
from kproxy.trail.sink import BatchPreference, SinkFailed
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes as codes
from kproxy_codec.control import Message
from kproxy_codec.record_batch import add_sequence
from kproxy_codec.records import encode_batch

T = TypeVar("T")

PARTITIONS: Final = 3
# The most bytes of pages in one batch: brokers accept 1 MiB by default.
BATCH_BYTES: Final = 1 << 20
_TOO_LARGE: Final = (codes.MESSAGE_TOO_LARGE, codes.RECORD_LIST_TOO_LARGE)
CLIENT_ID: Final = b"kproxy-audit"
# A name for the proxy behind `dial`; it is never resolved.
INSIDE: Final = Address("kproxy.invalid", 9092)
TIMEOUT_S = 5.0
# After the time in a request a broker still has some to answer.
TIMEOUT_MS: Final = 4_000
OPEN_S = 10.0
DELIVERY_S: Final = 20.0
PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 1.0
# The most characters of a reason in the log: a broker wrote part of it.
MOST_REASON: Final = 1_000


class _Refused(Exception):
    """A broker's answer has an error."""

    def __init__(self, api_key: int, answer: Message) -> None:
        words = getattr(answer, "error_message", None)
        name = codes.name_of(answer.error_code)
        super().__init__(f"{keys.name_of(api_key)} is refused with {name}{f' ({words})' if words else ''}")
        self.error_code = answer.error_code


@dataclass(slots=True)
class _Producer:
    """An idempotent producer; `sequence` is the sequence number of the next record."""

    partition: int
    producer_id: int
    producer_epoch: int
    sequence: int = 0


class TopicSink:
    """The sink to a topic, at the brokers `bootstrap` or by `dial`, which reaches every broker or raises OSError.

    `access`: TLS and SASL towards `bootstrap`; None: neither.
    """

    def __init__(
        self,
        topic: str,
        incarnation: str,
        *,
        bootstrap: Sequence[Address] = (),
        dial: Callable[[], socket.socket] | None = None,
        access: BrokerAuth | None = None,
    ) -> None:
        self.preference = BatchPreference(BATCH_BYTES)
        self._topic = topic
        self._key = incarnation.encode()
        self._bootstrap = bootstrap
        self._dial = dial
        self._access = access or PLAIN_ACCESS
        self._producer: _Producer | None = None
        # If there is a producer, this connection is to the leader of its partition.
        self._connection: KafkaConnection | None = None
        # The leaders by partition; None if a partition has no leader now.
        self._leaders: dict[int, Address | None] = {}
        # Why the topic could not be created, in case it is missing.
        self._not_made = ""

    async def write(self, pages: Sequence[bytes]) -> None:
        try:
            if self._producer is None:
                self._producer = await self._repeat(self._open, OPEN_S)
            await self._deliver(self._producer, pages)
        except Exception as error:
            await self.close()
            if not isinstance(error, (_Refused, BrokerUnreachable, OSError)):
                raise
            reason = f"topic {self._topic}: {error}"
            if self._not_made:
                reason = f"{reason}; it could not be made: {self._not_made}"
            raise SinkFailed(reason[:MOST_REASON]) from error
        self._not_made = ""

    async def _deliver(self, producer: _Producer, pages: Sequence[bytes]) -> None:
        batch = self._batch(producer, pages)
        try:
            await self._repeat(lambda: self._produce(producer.partition, batch), DELIVERY_S)
        except _Refused as error:
            if error.error_code not in _TOO_LARGE or len(pages) == 1:
                raise
            self.preference = BatchPreference(self.preference.bytes // 2)
            half = len(pages) // 2
            await self._deliver(producer, pages[:half])
            await self._deliver(producer, pages[half:])
        else:
            producer.sequence = add_sequence(producer.sequence, len(pages))

    async def close(self) -> None:
        self._producer = None
        self._disconnect()

    async def _repeat(self, attempt: Callable[[], Awaitable[T]], seconds: float) -> T:
        """Repeat `attempt` for `seconds`, while another one may succeed. Raise the last error."""
        now, pause_s = asyncio.get_running_loop().time, PAUSE_S
        until = now() + seconds
        while True:
            try:
                return await attempt()
            except (_Refused, BrokerUnreachable, OSError) as error:
                self._disconnect()
                is_final = isinstance(error, _Refused) and error.error_code not in codes.PASSING
                if is_final or now() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _open(self) -> _Producer:
        connection = await self._connect()
        asked = {"name": self._topic, "num_partitions": PARTITIONS, "replication_factor": -1}
        created = await connection.ask(keys.CREATE_TOPICS, ANY_VERSION, topics=[asked], timeout_ms=TIMEOUT_MS)
        self._not_made = ""
        for topic in created.topics:
            # After another error the topic may exist as well, or be created by others: writing to it shows that.
            if topic.error_code not in (codes.NONE, codes.TOPIC_ALREADY_EXISTS):
                self._not_made = str(_Refused(keys.CREATE_TOPICS, topic))
        await self._ask_leaders(connection)
        answer = await connection.ask(keys.INIT_PRODUCER_ID, ANY_VERSION, transactional_id=None)
        if answer.error_code != codes.NONE:
            raise _Refused(keys.INIT_PRODUCER_ID, answer)
        self._disconnect()
        # Kafka's producers choose the partition in the same way.
        partition = (murmur2(self._key) & 0x7FFF_FFFF) % len(self._leaders)
        return _Producer(partition, answer.producer_id, answer.producer_epoch)

    async def _produce(self, partition: int, batch: bytes) -> None:
        connection = self._connection
        if connection is None:
            connection = await self._connect()
            await self._ask_leaders(connection)
            leader = self._leaders.get(partition)
            # If there is no leader, this broker's answer has the reason.
            if self._dial is None and leader not in (None, connection.address):
                connection = await self._connect(leader)
        written = [{"name": self._topic, "partition_data": [{"index": partition, "records": batch}]}]
        answer = await connection.ask(
            keys.PRODUCE,
            WITHOUT_TOPIC_IDS,
            transactional_id=None,
            acks=-1,
            timeout_ms=TIMEOUT_MS,
            topic_data=written,
        )
        for each in (each for topic in answer.responses for each in topic.partition_responses):
            # A duplicate: the answer to an earlier attempt was lost.
            if each.error_code in (codes.NONE, codes.DUPLICATE_SEQUENCE_NUMBER):
                return
            raise _Refused(keys.PRODUCE, each)
        raise BrokerUnreachable(f"{connection.address} answered Produce without a result")

    async def _ask_leaders(self, connection: KafkaConnection) -> None:
        answer = await connection.ask(keys.METADATA, WITHOUT_TOPIC_IDS, topics=[{"name": self._topic}])
        brokers = {each.node_id: Address(each.host, each.port) for each in answer.brokers}
        for topic in answer.topics:
            if topic.error_code != codes.NONE:
                raise _Refused(keys.METADATA, topic)
            self._leaders = {each.partition_index: brokers.get(each.leader_id) for each in topic.partitions}
        if not self._leaders:
            raise BrokerUnreachable(f"{connection.address} named no partition of topic {self._topic}")

    async def _connect(self, broker: Address | None = None) -> KafkaConnection:
        """Connect to `broker`; None means any. Raise BrokerUnreachable or OSError."""
        self._disconnect()
        if self._dial is None:
            known = (broker,) if broker else (*self._bootstrap, *filter(None, self._leaders.values()))
            self._connection = await open_any(known, TIMEOUT_S, CLIENT_ID, self._access)
        else:
            self._connection = await KafkaConnection.open(INSIDE, TIMEOUT_S, CLIENT_ID, inside=self._dial())
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def _batch(self, producer: _Producer, pages: Sequence[bytes]) -> bytes:
        numbers = producer.producer_id, producer.producer_epoch, producer.sequence
        return bytes(encode_batch([(self._key, page) for page in pages], time.time_ns() // 1_000_000, *numbers))
