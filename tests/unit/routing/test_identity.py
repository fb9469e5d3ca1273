"""The identity of a batch, by which a broker recognizes it, and its place among its producer's batches."""

from __future__ import annotations

import pytest

from kproxy.routing.identity import is_recognisable, lane_key, place_of
from kproxy.routing.merge import Exchange
from kproxy.routing.refused import Place
from kproxy_codec.api_keys import LIST_OFFSETS, PRODUCE
from tests.support.models.playbook_words import parse, read_request
from tests.support.wire.messages import APIS
from tests.support.wire.record_batches import build_batch

ENTRY = (0, 0)


def batch(producer_id: int = 7, *, is_transactional: bool = False) -> bytes:
    return bytes(
        build_batch(producer_id=producer_id, producer_epoch=2, base_sequence=5, is_transactional=is_transactional)
    )


def produced(records: bytes | None) -> Exchange:
    topics = [{"name": "t", "partition_data": [{"index": 0, "records": records}]}]
    request = parse(PRODUCE, 9, {"transactional_id": None, "acks": -1, "timeout_ms": 1, "topic_data": topics}, 7)
    return Exchange(APIS[PRODUCE], request, 1, 10.0)


@pytest.mark.parametrize(
    ("records", "known"),
    [
        (batch(), True),
        (batch() + batch(), True),
        (batch(-1), False),
        (batch() + batch(-1), False),
        (batch(is_transactional=True), False),
        (b"", False),
        (None, False),
        (b"no batch", False),
        (batch()[:-1], False),
    ],
    ids=["idempotent", "two", "plain", "one is plain", "transactional", "empty", "none", "odd", "cut short"],
)
def test_non_idempotent_batch_is_not_recognised_again(records: bytes | None, known: bool) -> None:
    assert is_recognisable(produced(records), ENTRY) is known


@pytest.mark.parametrize(
    ("records", "place"), [(batch(), Place(7, 2, 5)), (batch(-1), None), (b"", None), (None, None), (b"odd", None)]
)
def test_only_producer_batches_have_a_sequence(records: bytes | None, place: Place | None) -> None:
    assert place_of(produced(records), ENTRY) == place


def test_read_is_repeatable_in_any_order() -> None:
    exchanges = [Exchange(APIS[LIST_OFFSETS], read_request(LIST_OFFSETS, "t-0"), n, 10.0) for n in (1, 2)]
    assert all(is_recognisable(each, ENTRY) and place_of(each, ENTRY) is None for each in exchanges)
    assert len({lane_key(each, ENTRY) for each in exchanges}) == 2
    assert lane_key(produced(batch()), ENTRY) == (b"t", 0)
