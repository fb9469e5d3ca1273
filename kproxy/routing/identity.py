"""Identify a part of a request for ordering and for sending it again."""

from __future__ import annotations

from collections.abc import Hashable

from kproxy.routing.merge import Exchange
from kproxy.routing.refused import Place
from kproxy.routing.split import Entry
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.errors import CodecError
from kproxy_codec.produce import records_of
from kproxy_codec.record_batch import NO_PRODUCER_ID, iterate_batches, parse_header


def lane_key(exchange: Exchange, entry: Entry) -> Hashable:
    """The key of an entry's lane: a partition for produce. Reads are not ordered, so each has a lane of its own."""
    topic, partition_index = exchange.partition(entry)
    if exchange.api.api_key == PRODUCE:
        return topic, partition_index
    return topic, partition_index, exchange.sequence


def place_of(exchange: Exchange, entry: Entry) -> Place | None:
    """The place of a produced batch among its producer's; None if it has none or cannot be read."""
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
