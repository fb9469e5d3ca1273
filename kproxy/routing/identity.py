"""Identify the partitions and batches of requests, so that batches keep their order and can be resent.

Order is kept per topic name and partition index. A client may name its topic by id (KIP-516) in one request and by name
in the next, as franz-go does. So ids are replaced by names, and requests that came before the name was known are
renamed when the topology learns it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeAlias

from kproxy.routing.actions import View
from kproxy.routing.merge import Exchange
from kproxy.routing.refused import Place
from kproxy.routing.split import Entry
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.errors import CodecError
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.produce import records_of
from kproxy_codec.record_batch import NO_PRODUCER_ID, iterate_batches, parse_header

LaneKey: TypeAlias = Hashable
"""The key of a lane (kproxy.routing.lanes)."""


def lane_key(exchange: Exchange, entry: Entry) -> LaneKey:
    """The key of an entry's lane: the partition for Produce. Each entry of another request has a lane of its own."""
    topic, partition_index = exchange.partition(entry)
    if exchange.api.api_key == PRODUCE:
        return topic, partition_index
    return topic, partition_index, exchange.sequence


class TopicNames:
    """Replaces topic ids by names; remembers at most `max_nameless` ids without a known name."""

    __slots__ = ("_nameless", "_topology", "_view")

    def __init__(self, view: View) -> None:
        self._view = view
        self._topology = view.topology
        # A dict: an empty set takes 216 bytes.
        self._nameless: dict[bytes, None] = {}

    def put(self, request: PartitionedRequest) -> None:
        """Replace the ids of a new request by known names."""
        for topic in request.topics:
            name = self._topology.name_of(topic.wire)
            if name is not None:
                topic.name = name
            elif len(self._nameless) < self._view.max_nameless:
                self._nameless[topic.wire] = None

    def learn(self, exchanges: Iterable[Exchange]) -> list[tuple[LaneKey, LaneKey]]:
        """Apply new names to these exchanges; return the changed lane keys, old and new."""
        names = {each: name for each in self._nameless if (name := self._topology.name_of(each)) is not None}
        if not names:
            return []
        for each in names:
            del self._nameless[each]
        renamed: list[tuple[LaneKey, LaneKey]] = []
        for exchange in exchanges:
            for topic in exchange.request.topics:
                if topic.name in names and exchange.request.is_nameless(topic):
                    topic.name = names[topic.wire]
                    renamed += [((topic.wire, index), (topic.name, index)) for index in topic.partitions]
        return renamed


def place_of(exchange: Exchange, entry: Entry) -> Place | None:
    """The sequence position of a produced batch; None if it has none or cannot be read."""
    if exchange.api.api_key != PRODUCE:
        return None
    try:
        batch = parse_header(records_of(exchange.request, exchange.topic(entry), entry[1]))
    except CodecError:
        return None
    if batch.producer_id == NO_PRODUCER_ID:
        return None
    return Place(batch.producer_id, batch.producer_epoch, batch.base_sequence)


def is_recognisable(exchange: Exchange, entry: Entry) -> bool:
    """Whether a broker that already has these batches would recognise them.

    True if each carries a producer id and none is transactional, for brokers that rebuild their producer state from the
    log. Unreadable batches are not recognisable.
    """
    if exchange.api.api_key != PRODUCE:
        return True
    records = records_of(exchange.request, exchange.topic(entry), entry[1])
    try:
        batches = list(iterate_batches(records))
    except CodecError:
        return False
    return bool(batches) and all(
        batch.producer_id != NO_PRODUCER_ID and not batch.is_transactional for batch in batches
    )
