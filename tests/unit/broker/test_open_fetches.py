"""A follower's open fetches on a connection, with real partitions: which are answered, and what they mean."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kproxy.broker import partition as partition_module
from kproxy.broker.partition import Partition
from kproxy.broker.replication import open_fetches
from kproxy.broker.replication.open_fetches import Answered, Asked, OpenFetches
from kproxy_codec import error_codes
from kproxy_codec.fetch import PartitionFetch
from tests.support.brokers.replica_group import ISR_LAG_S, TOPIC_ID, on_disk
from tests.support.brokers.replicating import FOLLOWER, LEADER, append
from tests.unit.broker.replicas import lead, replica

ENOUGH = 1 << 20


class Site:
    """Led partitions, one follower's connection, and a clock."""

    def __init__(self, directory: Path) -> None:
        self.now = 100.0
        self.directory = directory
        self.partitions: list[Partition] = []
        self.fetches = self.connect()

    def connect(self) -> OpenFetches:
        self.fetches = OpenFetches(FOLLOWER, lambda: self.now)
        return self.fetches

    def lead(self, count: int) -> list[Partition]:
        for index in range(len(self.partitions), len(self.partitions) + count):
            led = replica(self.directory / f"t-{index}", LEADER, index, clock=lambda: self.now)
            self.partitions.append(lead(led, LEADER, FOLLOWER))
        return self.partitions

    def ask(self, *offsets: tuple[int, int], withdrawn: Sequence[int] = (), most: int = ENOUGH) -> list[Answered]:
        """Ask for partitions and offsets; return what is answered at once."""
        asked = []
        for index, offset in offsets:
            epoch = 0 if offset else -1
            fetch = PartitionFetch(index, 0, offset, epoch, 0, ENOUGH, on_disk(FOLLOWER).log_id.bytes)
            asked.append(Asked(TOPIC_ID.bytes, fetch, self.partitions[index]))
        self.fetches.take(asked, [(TOPIC_ID.bytes, index) for index in withdrawn])
        return self.fetches.answer(most)

    def lags(self) -> list[float]:
        return [each.replication.follower_progress()[FOLLOWER][1] for each in self.partitions]


def named(answered: Sequence[Answered]) -> list[int]:
    return [fetched.partition_index for _, fetched in answered]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    for each in site.partitions:
        each.close()


def idle(site: Site, count: int) -> None:
    """Give the follower all of these partitions, and let it ask for more."""
    site.lead(count)
    everything = [(index, 0) for index in range(count)]
    assert named(site.ask(*everything)) == list(range(count)), "the first marks are told"
    assert site.ask(*everything) == []


def test_idle_partition_is_answered_once_it_has_news(site: Site) -> None:
    idle(site, 3)
    assert site.ask() == []
    append(site.partitions[1], b"v")
    [(topic_id, fetched)] = site.ask()
    assert (topic_id, fetched.partition_index, fetched.error_code) == (TOPIC_ID.bytes, 1, error_codes.NONE)
    assert fetched.records
    assert site.ask() == [], "what is answered is asked no more"
    [(_, fetched)] = site.ask((1, 1))
    assert (fetched.records, fetched.high_watermark) == (b"", 1), "the high watermark that its own fetch has moved"
    assert site.ask((1, 1)) == []


def test_idle_partition_is_not_checked_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    idle(site, 50)
    looks: list[int] = []
    read = Partition.read_as_replica

    def counted(partition: Partition, *arguments: object) -> object:
        looks.append(partition.partition_index)
        return read(partition, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Partition, "read_as_replica", counted)
    for _ in range(10):
        assert site.ask() == []
    append(site.partitions[7], b"v")
    site.ask()
    assert looks == [7]


def test_idle_follower_is_caught_up_while_it_asks(site: Site) -> None:
    idle(site, 2)
    for _ in range(5):
        site.now += ISR_LAG_S
        site.ask()
        assert site.lags() == [0.0, 0.0]
        assert [each.replication.wanted_isr([LEADER, FOLLOWER]) for each in site.partitions] == [None, None]
    site.now += ISR_LAG_S + 1
    assert site.lags() == [ISR_LAG_S + 1] * 2
    wanted = site.partitions[0].replication.wanted_isr([LEADER, FOLLOWER])
    assert wanted == {on_disk(LEADER)}, "a follower that is frozen leaves"


def test_follower_that_takes_no_records_lags(site: Site) -> None:
    idle(site, 2)
    append(site.partitions[0], b"v")
    for _ in range(5):
        site.now += ISR_LAG_S
        site.ask()
    assert site.lags() == [5 * ISR_LAG_S, 0.0]


def test_withdrawn_partition_lags(site: Site) -> None:
    idle(site, 2)
    site.ask(withdrawn=[0])
    for _ in range(3):
        site.now += ISR_LAG_S
        site.ask()
    assert site.lags() == [3 * ISR_LAG_S, 0.0]
    append(site.partitions[0], b"v")
    assert site.ask() == [], "nobody asks for it"


def test_closed_connection_counts_as_caught_up_no_longer(site: Site) -> None:
    idle(site, 2)
    site.now += 1.0
    site.ask()
    before = site.fetches
    site.connect()
    before.close()
    site.now += 1.0
    site.ask((1, 0))
    assert site.lags() == [1.0, 0.0]
    append(site.partitions[0], b"v")
    assert site.ask() == []


def test_late_end_of_earlier_connection_changes_nothing(site: Site) -> None:
    idle(site, 1)
    before = site.fetches
    site.connect()
    site.ask((0, 0))
    site.ask((0, 0))
    before.close()
    site.now += ISR_LAG_S
    site.ask()
    assert site.lags() == [0.0]


def test_reopened_log_is_described_completely(site: Site) -> None:
    """It is withdrawn and asked for in one request: the follower may know less than was told here."""
    idle(site, 1)
    append(site.partitions[0], b"v")
    site.ask()
    site.ask((0, 1))
    assert site.ask((0, 1)) == []
    [(_, fetched)] = site.ask((0, 1), withdrawn=[0])
    assert (fetched.high_watermark, fetched.log_start_offset) == (1, 0)


def test_moved_log_start_is_reported(site: Site) -> None:
    idle(site, 1)
    append(site.partitions[0], b"v")
    site.ask()
    site.ask((0, 1))
    assert site.ask((0, 1)) == []
    led = site.partitions[0]
    led.log.reset_to(1)
    led.log_shortened()
    [(_, fetched)] = site.ask()
    assert (fetched.log_start_offset, fetched.records) == (1, b"")


def test_closed_partition_is_answered(site: Site) -> None:
    idle(site, 1)
    site.partitions[0].close()
    [(_, fetched)] = site.ask()
    assert fetched.error_code == error_codes.NOT_LEADER_OR_FOLLOWER
    assert site.ask() == []


def test_partition_without_room_comes_first_next_time(site: Site) -> None:
    """Partitions that always have more records do not keep others waiting, whatever their order."""
    idle(site, 4)
    offsets = [0] * 4
    answers: list[list[int]] = []
    asked: list[int] = []
    for _ in range(12):
        for led in site.partitions[:3]:
            append(led, b"v" * 900)
        if not answers:
            append(site.partitions[3], b"v" * 900)
        answered = site.ask(*((index, offsets[index]) for index in asked), most=1_000)
        asked = named(answered)
        answers.append([fetched.partition_index for _, fetched in answered if fetched.records])
        for index in asked:
            offsets[index] += index in answers[-1]
    first = [next(place for place, each in enumerate(answers) if index in each) for index in range(4)]
    assert max(first) <= 4, answers
    counts = [sum(index in each for each in answers) for index in range(3)]
    assert max(counts) - min(counts) <= 1, answers


def test_answer_partitions_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_fetches, "MAX_PARTITIONS", 3)
    site.lead(8)
    got = [named(site.ask(*((index, 0) for index in range(8)))), named(site.ask()), named(site.ask())]
    assert got == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_read_error_does_not_count_as_caught_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    idle(site, 1)
    append(site.partitions[0], b"v")

    def fail(*_: object, **__: object) -> bytes:
        raise OSError("no such sector")

    monkeypatch.setattr(partition_module.Log, "read", fail)
    [(_, fetched)] = site.ask()
    assert fetched.error_code == error_codes.KAFKA_STORAGE_ERROR


def test_random_fetches_replicate_everything(site: Site) -> None:
    """A follower that asks for each partition once more after each answer has every leader's records in the end."""
    seed = time.time_ns() % (1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    partitions = site.lead(6)
    append(partitions[0], b"v" * 50)
    size = partitions[0].log.size_in_bytes
    offsets, marks, to_ask = [0] * 6, [-1] * 6, list(range(6))
    for number in range(320):
        site.now += chance.random()
        is_over = number >= 300
        for index in chance.sample(range(6), 0 if is_over else chance.randrange(3)):
            append(partitions[index], b"v" * 50)
        if not is_over and chance.random() < 0.05:
            site.fetches.close()
            site.connect()
            to_ask = list(range(6))
        most = ENOUGH if is_over else chance.choice([size, 5 * size, ENOUGH])
        answered = site.ask(*((index, offsets[index]) for index in to_ask), most=most)
        for _, fetched in answered:
            offsets[fetched.partition_index] += len(fetched.records) // size
            marks[fetched.partition_index] = fetched.high_watermark
        to_ask = named(answered)
    ends = [each.log_end_offset for each in partitions]
    assert (offsets, marks) == (ends, ends)
