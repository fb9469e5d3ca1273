"""Random reads through the core return every record once and in order, despite moves, failures and seeks."""

from __future__ import annotations

import random
import struct

import pytest

from kproxy.routing.split import split_whole
from kproxy_codec.api_keys import FETCH
from kproxy_codec.error_codes import NOT_LEADER_OR_FOLLOWER
from kproxy_codec.fetch import (
    FetchApi,
    PartitionFetched,
    as_fetch,
    partition_fetch,
    response_ends,
    result_entry,
)
from kproxy_codec.framing import response_header
from kproxy_codec.partitioned import encode_topics, with_length
from kproxy_codec.primitives import Buffer
from tests.support.models.playbook import Playbook

PARTITIONS = 5
STEPS = 400
# A whole answer was passed on while an earlier piece had left a partition of its read in a lane.
FOUND_ONCE = (3170537203,)
WAIT_S = 0.5
_RECORD = struct.Struct(">ii")


class World:
    """A reader of one topic, its brokers and their logs; a record is its partition and its offset."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.play = Playbook({"t": [1, 2, 3, 1, 2]})
        self.owners = [1, 2, 3, 1, 2]
        self.ends = [0] * PARTITIONS
        self.positions = [0] * PARTITIONS
        self.asked: list[int] | None = None
        self.sequence = 0
        self.limits = {"min_bytes": 1, "max_bytes": 1 << 20}

    def asks(self) -> None:
        """Send the next fetch, of some partitions."""
        asked = sorted(self.chance.sample(range(PARTITIONS), self.chance.randint(1, PARTITIONS)))
        if self.chance.random() < 0.7:
            asked = list(range(PARTITIONS))
        self.sequence += 1
        self.asked = asked
        text = " ".join(f"t-{index}@{self.positions[index]}" for index in asked)
        self.play.fetches(self.sequence, text, until_s=WAIT_S, deadline_s=1000, **self.limits)

    def takes(self) -> None:
        """Read the answer, if there is one: the records from the reader's position on."""
        if self.asked is None or self.sequence not in self.play.answered:
            return
        frame = memoryview(bytearray(self.play.bytes_of[self.sequence]))
        version = self.play.exchanges[self.sequence].request.header.api_version
        (topic,) = FetchApi().parse_response(frame, version).topics
        assert topic.partitions == self.asked
        for index, code, end, size in zip(topic.partitions, topic.error_codes, topic.ends, topic.sizes, strict=True):
            assert code in (0, NOT_LEADER_OR_FOLLOWER)
            found = list(_RECORD.iter_unpack(frame[end - 1 - size : end - 1]))
            first = self.positions[index]
            assert found == [(index, first + n) for n in range(len(found))]
            self.positions[index] += len(found)
        self.asked = None

    def answers(self, piece: int) -> None:
        """Let a broker answer: with data, an error where it does not lead, or nothing once its time is over."""
        play = self.play
        sent, flying = play.sent[piece], play.pieces[piece]
        request = as_fetch(sent.exchange.request)
        selection = sent.part or split_whole(request.topics)
        buffers: list[Buffer] = []
        version, found, refuses = request.header.api_version, 0, False
        ((_, ordinals),) = selection
        for ordinal in ordinals:
            entry = partition_fetch(request, request.topics[0].starts[ordinal])
            index, offset = entry.partition_index, entry.fetch_offset
            if self.owners[index] != sent.broker:
                refuses = True
                buffers += result_entry(version, PartitionFetched(index, NOT_LEADER_OR_FOLLOWER))
                continue
            many = self.chance.randint(1, 4) if self.ends[index] > offset else 0
            records = b"".join(_RECORD.pack(index, n) for n in range(offset, min(offset + many, self.ends[index])))
            found += len(records)
            buffers += result_entry(version, PartitionFetched(index, 0, self.ends[index], 0, None, records))
        if found < sent.least_bytes and not refuses and play.now < flying.due:
            return
        head, tail = response_ends(version, 0, [])
        start = response_header(FETCH, version, 7)
        body = [start + head, *encode_topics([(b"t", buffers, len(ordinals))], flexible=True), tail]
        play.answers_bytes(piece, memoryview(bytearray(b"".join(with_length(body)))))

    def step(self, *, calm: bool = False) -> None:
        """Let something happen."""
        chance, play = self.chance, self.play
        self.takes()
        if self.asked is None and (calm or chance.random() < 0.7):
            self.asks()
            self.takes()
        index = chance.randrange(PARTITIONS)
        what = chance.random()
        if not calm and what < 0.3:
            self.ends[index] += chance.randint(1, 3)
        elif not calm and what < 0.36:
            self.owners[index] = chance.randint(1, 3)
            play.moves(f"t-{index}", self.owners[index])
        elif not calm and what < 0.4:
            self.positions[index] = chance.randint(0, self.ends[index]) if self.asked is None else self.positions[index]
        elif not calm and what < 0.42 and play.core._in_flight.connections:
            play.loses(chance.choice(list(play.core._in_flight.connections)))
        elif not calm and what < 0.45 and self.asked is None:
            self.limits = {"min_bytes": chance.choice((1, 20)), "max_bytes": chance.choice((16, 1 << 20))}
        elif what < 0.8 and play.pieces:
            self.answers(chance.choice(list(play.pieces)))
        elif what < 0.9 and play._wakes_at is not None:
            play.wakes()
        else:
            play.waits(chance.choice((0.01, 0.1)))
            while play._wakes_at is not None and play._wakes_at <= play.now:
                play.wakes()
            play.ticks()
        self.takes()


def test_random_reads_get_each_record_once(record_property: pytest.RecordProperty) -> None:
    for seed in (*FOUND_ONCE, *(random.randrange(1 << 32) for _ in range(15))):
        print(f"seed {seed}")
        record_property("seed", seed)
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        world.limits = {"min_bytes": 1, "max_bytes": 1 << 20}
        for _ in range(30 * STEPS):
            if world.positions == world.ends:
                break
            world.step(calm=True)
        assert world.positions == world.ends
