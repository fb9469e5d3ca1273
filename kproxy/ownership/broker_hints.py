"""Ask brokers for the leaders of partitions while etcd is silent.

Reference brokers answer Metadata from the leases in etcd. If a broker has lost its own lease, it names no leader, and
another broker is asked. KafScale's brokers, whose answers ignore the leases, are not asked.

An answer is only a hint (kproxy.routing.topology): the broker that it names checks its own lease before it appends, so
a wrong hint costs one attempt.

Invariants
1. At most BURST questions are asked at once and RATE_PER_S a second on average, each about one batch of re-reads. A
   question goes to at most MAX_ASKED brokers and takes at most ASK_S.
2. A partition that the source has changed since the question began gets no hint.
3. Only partitions of the question get hints, and only the brokers that these hints name get addresses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from random import Random

import structlog

from kproxy.ownership.kafka_client import BrokerUnreachable, open_any
from kproxy.ownership.lease_keys import Partition
from kproxy.ownership.pace import Pace
from kproxy.routing.topology import Address, Topology
from kproxy.security.broker_auth import BrokerAuth
from kproxy_codec.api_keys import BIND_FENCES
from kproxy_codec.error_codes import NONE
from kproxy_codec.metadata import MetadataReader

BURST = 3
RATE_PER_S = 3.0
MAX_ASKED = 3
ASK_S = 3.0
# The limit of the dial and of each answer: a broker that hangs must leave time for others.
TIMEOUT_S = 1.0

log = structlog.get_logger(__name__)


class BrokerHints:
    """Gives hints to `topology`; `access` opens connections to brokers."""

    def __init__(self, topology: Topology, access: BrokerAuth, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._topology = topology
        self._access = access
        self._pace = Pace(clock, BURST, RATE_PER_S)
        self._order = Random()  # noqa: S311 -- spreads questions, guards nothing

    async def ask(self, partitions: Sequence[Partition], is_wanted: Callable[[], bool]) -> bool:
        """Ask for the leaders of `partitions`; return whether a route has changed.

        An answer is used only if `is_wanted()` is still true.
        """
        await asyncio.sleep(self._pace.due_in_s())
        self._pace.spend()
        asked = {partition: self._topology.owner_revision(*partition) for partition in partitions}
        try:
            async with asyncio.timeout(ASK_S):
                answer = await self._answer(asked)
        except TimeoutError:
            answer = None
        return answer is not None and await self._take(answer, asked, is_wanted)

    async def _answer(self, asked: dict[Partition, int]) -> MetadataReader | None:
        """Return the first useful answer; None if there is none."""
        topics = [{"name": topic.decode("ascii")} for topic in dict.fromkeys(topic for topic, _ in asked)]
        in_doubt = {self._topology.owner(*partition) for partition in asked}
        # Owners in doubt last, others in random order, so that a broker cut off from etcd is not always first.
        broker_ids = sorted(self._topology.brokers, key=lambda each: (each in in_doubt, self._order.random()))
        untried = list(dict.fromkeys(self._topology.brokers[broker_id] for broker_id in broker_ids))
        for _ in range(MAX_ASKED):
            try:
                connection = await open_any(untried, TIMEOUT_S, access=self._access)
            except BrokerUnreachable as error:
                log.debug("brokers not asked for owners", reason=str(error))
                return None
            untried.remove(connection.address)
            try:
                if connection.offered(BIND_FENCES) is not None:
                    answer = await connection.metadata(topics)
                    if any(topic.error_code == NONE for topic in answer.topics):
                        return answer
            except BrokerUnreachable as error:
                log.debug("owners not found", reason=str(error))
            finally:
                connection.abort()
        return None

    async def _take(self, answer: MetadataReader, asked: dict[Partition, int], is_wanted: Callable[[], bool]) -> bool:
        topology = self._topology
        addresses = {broker.node_id: Address(broker.host, broker.port) for broker in answer.brokers}
        changed = False
        for topic in answer.topics:
            await asyncio.sleep(0)
            if not is_wanted():
                break
            if topic.error_code != NONE or topic.name is None:
                continue
            for error_code, index, leader, _ in topic.partitions():
                partition = Partition(topic.name, index)
                if error_code != NONE or leader not in addresses or partition not in asked:
                    continue
                if topology.owner_revision(*partition) == asked[partition]:
                    changed |= topology.hint_broker(leader, addresses[leader])
                    changed |= topology.hint_owner(*partition, leader)
        return changed
