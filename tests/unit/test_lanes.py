"""Lanes by themselves, where the wire cannot be made to tell a rule from the ones before it."""

from __future__ import annotations

import pytest

from codec.produce_response import PRODUCE_API
from kproxy.routing.lanes import Item, Lanes, Pause
from kproxy.routing.merge import Exchange
from tests.support.messages import PRODUCE, head_of, request_body, request_frame, sample_request

KEY = (b"t", 0)


def item(sequence: int) -> Item:
    frame = request_frame(PRODUCE, 9, request_body(PRODUCE, 9, sample_request(PRODUCE, {"t": [0]})))
    request = PRODUCE_API.parse_request(frame, head_of(frame))
    return Item(Exchange(PRODUCE_API, request, sequence, 10.0), (0, 0), 6)


@pytest.mark.parametrize(("earlier_waits", "sent"), [(True, False), (False, True)])
def test_what_waits_before_a_batch_that_was_appended_is_not_sent_after_it(earlier_waits: bool, sent: bool) -> None:
    lanes = Lanes()
    lanes.probe(KEY, 2)
    waiting = item(1 if earlier_waits else 3)
    lanes.refused(KEY, waiting, Pause(0.0, 0.0, 0), ())
    release = lanes.settled(KEY, 2, appended=True, given_up=False)
    assert release == (([waiting], []) if sent else ([], [waiting]))
    assert len(lanes) == 0
