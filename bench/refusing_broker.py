"""Run a null broker that refuses each tenth batch with NOT_LEADER_OR_FOLLOWER, until it is sent again.

Until then it refuses all other batches for that partition, like a broker that is not the leader. It counts on each
connection separately, from different numbers on, so that not all are refused at once. It identifies batches by their
producer's sequence numbers. Requests are for one partition. Each runs in a process of its own and prints its port.
"""

from __future__ import annotations

from itertools import cycle
from struct import unpack_from
from typing import Final

import uvloop

from bench.null_broker import NullBroker, encoded, main
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.error_codes import NOT_LEADER_OR_FOLLOWER
from kproxy_codec.framing import ReceiveArena, parse_request_header
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.produce import parse_produce, records_span

REFUSED_EVERY: Final = 10
BASE_SEQUENCE_OFFSET: Final = 53


class RefusingBroker(NullBroker):
    """One connection."""

    def __init__(self, arena: ReceiveArena, counted: int = 0) -> None:
        super().__init__(arena)
        self._counted = counted
        # By partition: the sequence number of the batch that is to be sent again.
        self._awaited: dict[int, int] = {}

    def answer(self, frame: memoryview) -> bytes | bytearray:
        header = parse_request_header(frame)
        if header.api_key == PRODUCE:
            request = parse_produce(frame, header)
            if self._refuses(request):
                return encoded(request, -1, NOT_LEADER_OR_FOLLOWER, header.correlation_id)
        return super().answer(frame)

    def _refuses(self, request: PartitionedRequest) -> bool:
        (topic,) = request.topics
        (partition_index,) = topic.partitions
        start, _ = records_span(request, topic, 0)
        sequence: int = unpack_from(">i", request.frame, start + BASE_SEQUENCE_OFFSET)[0]
        awaited = self._awaited.get(partition_index)
        if awaited is not None:
            if awaited == sequence:
                del self._awaited[partition_index]
            return awaited != sequence
        self._counted += 1
        if self._counted % REFUSED_EVERY:
            return False
        self._awaited[partition_index] = sequence
        return True


if __name__ == "__main__":
    begin = cycle(range(REFUSED_EVERY))
    uvloop.run(main(lambda arena: RefusingBroker(arena, next(begin))))
