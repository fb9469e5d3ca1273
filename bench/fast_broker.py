"""`python -m bench.fast_broker [PORT]`: run a null broker that answers a known request without parsing it.

A request is known by its length and its beginning, up to the first batch's header: `bench.load` repeats the same
request, and the proxy makes the same parts of it. An answer to a known one takes two joins, even for a hundred
partitions, so that a proxy does not wait for the broker.

Invariants
1. All partitions of one broker process have one end offset, `next_offset`. It goes up with each request by the most
   records of its batches, so no offset is assigned twice, and batches of one size leave no gap.
2. At most MAX_KNOWN_SHAPES requests are known.
"""

from __future__ import annotations

import sys
from struct import unpack_from
from typing import NamedTuple

import uvloop

from bench.null_broker import LAST_OFFSET_DELTA_OFFSET, MAX_KNOWN_SHAPES, OFFSET_BYTES, NullBroker, encoded, main
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.framing import RESPONSE_CORRELATION_ID_OFFSET, parse_request_header
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.primitives import INT64
from kproxy_codec.produce import parse_produce, records_span

# The parts of a request: its length, API key and version; the correlation id; the rest of the header, the first topic
# and the beginning of its first batch.
_CORRELATION_ID = slice(8, 12)
_BEGINNING = slice(12, 76)
_RESPONSE_BODY = RESPONSE_CORRELATION_ID_OFFSET + 4


class _Known(NamedTuple):
    """The answer to a known request: its encoded `length`, and its `pieces` between the correlation id and offsets."""

    length: bytes
    pieces: list[bytes]
    records: int


class FastBroker(NullBroker):
    """One connection of the broker."""

    known: dict[bytes, _Known] = {}  # noqa: RUF012 -- shared by the process on purpose
    next_offset = 0

    def answer(self, frame: memoryview) -> bytes | bytearray:
        key = bytes(frame[: _CORRELATION_ID.start]) + bytes(frame[_BEGINNING])
        known = self.known.get(key)
        if known is None:
            header = parse_request_header(frame)
            if header.api_key != PRODUCE:
                return super().answer(frame)
            request = parse_produce(frame, header)
            if request.acks == 0:
                return b""
            known = _learn(request)
            if len(self.known) < MAX_KNOWN_SHAPES:
                self.known[key] = known
        offset = FastBroker.next_offset
        FastBroker.next_offset = offset + known.records
        return b"".join((known.length, frame[_CORRELATION_ID], INT64.pack(offset).join(known.pieces)))


def _learn(request: PartitionedRequest) -> _Known:
    none, all_ones = (encoded(request, base_offset) for base_offset in (0, -1))
    # All eight bytes of an offset differ, and no other byte does.
    differing = [place for place, (one, other) in enumerate(zip(none, all_ones, strict=True)) if one != other]
    pieces, end = [], _RESPONSE_BODY
    for place in differing[::OFFSET_BYTES]:
        pieces.append(none[end:place])
        end = place + OFFSET_BYTES
    records = [
        unpack_from(">i", request.frame, records_span(request, topic, ordinal)[0] + LAST_OFFSET_DELTA_OFFSET)[0] + 1
        for topic in request.topics
        for ordinal in range(len(topic.partitions))
    ]
    return _Known(none[:RESPONSE_CORRELATION_ID_OFFSET], [*pieces, none[end:]], max(records))


if __name__ == "__main__":
    uvloop.run(main(FastBroker, int(sys.argv[1]) if len(sys.argv) > 1 else 0))
