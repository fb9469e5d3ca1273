"""What a part of a request is, as far as sending it again and its order are concerned."""

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
    """What is kept in order: a partition's batches. Reads have no order among them, each is a lane of its own."""
    topic, partition_index = exchange.partition(entry)
    if exchange.api.api_key == PRODUCE:
        return topic, partition_index
    return topic, partition_index, exchange.sequence


def place_of(exchange: Exchange, entry: Entry) -> Place | None:
    """Where a produced batch stands among those of its producer; None where it has none, or cannot be read."""
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
    """Whether a broker that has these batches already would know them again.

    So it is where each carries a producer id and none is transactional, for brokers that rebuild their producer state
    from the log. What cannot be read is not recognisable.
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
