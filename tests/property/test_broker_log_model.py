"""Compare the log with a model in memory: after any operations in any order, both have the same content.

The model is a list of batches. A killed broker leaves the written batches; a torn write is cut off. Power cuts are
tested by test_broker_log_deaths.
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kproxy.broker import log, producer_state
from kproxy.broker.config import LogOptions
from kproxy.broker.disk import DiskError
from kproxy.broker.leader_epochs import NO_LEADERSHIP, Leadership
from kproxy.broker.log import Log
from kproxy.broker.producer_state import BatchVerdict
from kproxy.broker.segment import Segment
from kproxy.broker.validation import ReplicatedBatchInvalid
from kproxy_codec.fetch import EpochEnd
from kproxy_codec.record_batch import RecordBatch, assign_offsets, iterate_batches, parse_batch
from tests.support.brokers.broker_logs import read_all
from tests.support.rules import examples
from tests.support.wire.record_batches import build_batch

SEGMENT_BYTES = 1500
USUAL_EVERY_BYTES = producer_state.HISTORY_INTERVAL_BYTES
USUAL_SNAPSHOT_BYTES = log.INTERVAL_BYTES
TIMESTAMPS = st.integers(1000, 5000)
PRODUCERS = (7, 8)


class Written(NamedTuple):
    """A batch in the log."""

    data: bytes
    header: RecordBatch

    @property
    def end(self) -> int:
        return self.header.last_offset + 1


class Sent(NamedTuple):
    """A batch that will be written; `producer_id` -1 for none."""

    record_count: int
    value_bytes: int
    timestamp: int
    producer_id: int


BATCHES = st.builds(Sent, st.integers(1, 9), st.integers(0, 300), TIMESTAMPS, st.sampled_from((-1, *PRODUCERS)))


@contextmanager
def no_room() -> Iterator[None]:
    """Let no file of this process grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def counted_scans() -> Iterator[list[int]]:
    """The offsets of the batches that are read while logs are opened."""
    scanned: list[int] = []
    usual = Segment._scan

    def scan(self: Segment, length: int) -> Iterator[tuple[RecordBatch, memoryview]]:
        for batch, window in usual(self, length):
            scanned.append(batch.base_offset)
            yield batch, window

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "_scan", scan)
        yield scanned


class LogMachine(RuleBasedStateMachine):
    """`batches` is what the log must hold, from `start` on; `left_open` are logs that a killed broker did not close."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="log-model-")) / "t-0"
        self.options = LogOptions(SEGMENT_BYTES)
        producer_state.HISTORY_INTERVAL_BYTES = 700
        log.INTERVAL_BYTES = 200
        self.log = Log.open(self.directory, options=self.options)
        self.left_open: list[Log] = []
        self.batches: list[Written] = []
        self.start = 0
        self.leader_epoch = 0
        self.next_sequence = 0
        self.flushed_end = 0
        self.checkpoint = (0, NO_LEADERSHIP)

    @initialize(flush=st.sampled_from(("interval", "never", "always")))
    def begin(self, flush: str) -> None:
        self.options = LogOptions(SEGMENT_BYTES, flush)  # type: ignore[arg-type]
        self.log.options = self.options

    def teardown(self) -> None:
        producer_state.HISTORY_INTERVAL_BYTES = USUAL_EVERY_BYTES
        log.INTERVAL_BYTES = USUAL_SNAPSHOT_BYTES
        for each in (self.log, *self.left_open):
            each.close()
        shutil.rmtree(self.directory.parent)

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else self.start

    def build(self, sent: Sent, base_offset: int) -> Written:
        """The batch as written to a log; its producer uses no sequence number twice."""
        sequence = -1
        if sent.producer_id >= 0:
            sequence = self.next_sequence
            self.next_sequence += sent.record_count
        data = build_batch(
            [b"%d" % (base_offset + each) + bytes(sent.value_bytes) for each in range(sent.record_count)],
            timestamp=sent.timestamp,
            producer_id=sent.producer_id,
            producer_epoch=0 if sent.producer_id >= 0 else -1,
            base_sequence=sequence,
        )
        assign_offsets(data, parse_batch(data), base_offset, self.leader_epoch)
        return Written(bytes(data), parse_batch(data))

    def build_all(self, sent: list[Sent]) -> list[Written]:
        built: list[Written] = []
        for each in sent:
            built.append(self.build(each, built[-1].end if built else self.end))
        return built

    # Appends by leaders and followers

    @rule(sent=BATCHES)
    def append(self, sent: Sent) -> None:
        (written,) = self.build_all([sent])
        self.log.append(bytearray(written.data), written.header)
        self.log.producers.update(written.header, written.header.base_offset)
        self.batches.append(written)

    @rule(sent=BATCHES)
    def append_and_take_back(self, sent: Sent) -> None:
        (written,) = self.build_all([sent])
        self.log.append(bytearray(written.data), written.header)
        self.log.undo_append()

    @rule(sent=st.lists(BATCHES, min_size=1, max_size=8), cut=st.integers(0, 200))
    def append_replicated(self, sent: list[Sent], cut: int) -> None:
        written = self.build_all(sent)
        answer = b"".join(each.data for each in written)
        cut_at = max(len(answer) - cut, 0)
        whole = [each for each in written if answer.index(each.data) + len(each.data) <= cut_at]
        self.batches += whole
        assert self.log.append_replicated(answer[:cut_at]) == self.end

    @rule(sent=st.lists(BATCHES, min_size=1, max_size=3), gap=st.sampled_from((-2, -1, 1, 2)))
    def refuse_a_gap(self, sent: list[Sent], gap: int) -> None:
        written = self.build_all(sent)
        moved = bytearray(b"".join(each.data for each in written))
        moved[0:8] = (written[0].header.base_offset + gap).to_bytes(8, "big", signed=True)
        self.refused(bytes(moved))

    @rule(sent=st.lists(BATCHES, min_size=1, max_size=3), where=st.integers(0, 10_000))
    def refuse_a_flipped_bit(self, sent: list[Sent], where: int) -> None:
        written = self.build_all(sent)
        damaged = bytearray(b"".join(each.data for each in written))
        damaged[17 + where % (len(written[0].data) - 17)] ^= 1  # after the bytes that the CRC does not cover
        self.refused(bytes(damaged))

    def refused(self, answer: bytes) -> None:
        try:
            self.log.append_replicated(answer)
        except ReplicatedBatchInvalid:
            return
        raise AssertionError("it was taken")

    @rule()
    def begin_epoch(self) -> None:
        self.leader_epoch += 1
        self.log.leader_epochs.assign(self.leader_epoch, self.end)

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        # Records below the stored high watermark are never removed, and batches are committed as a whole.
        committed = next((each.end for each in self.batches if each.end >= self.checkpoint[0]), self.checkpoint[0])
        offset = data.draw(st.integers(min(max(self.start - 1, committed), self.end + 1), self.end + 1))
        self.batches = [each for each in self.batches if each.end <= offset]
        self.flushed_end = min(self.flushed_end, self.end)
        self.log.truncate_to(offset)

    @rule(distance=st.integers(0, 50))
    def reset(self, distance: int) -> None:
        self.start = self.flushed_end = self.end + distance
        self.batches = []
        self.log.reset_to(self.start)

    # Removal from the start

    @rule(data=st.data(), by_size=st.booleans(), by_time=st.booleans(), now_ms=TIMESTAMPS)
    def remove_old_segments(self, data: st.DataObject, by_size: bool, by_time: bool, now_ms: int) -> None:
        high_watermark = data.draw(st.sampled_from([self.start, *(each.end for each in self.batches)]))
        retention_bytes = data.draw(st.integers(0, 4000)) if by_size else -1
        self.log.options = LogOptions(
            SEGMENT_BYTES, self.options.flush, retention_bytes, retention_ms=500 if by_time else -1
        )
        removed = self.log.remove_old_segments(now_ms, high_watermark)
        self.log.options = self.options
        gone = self.moved_start()
        assert (removed > 0) == (len(gone) > 0)
        assert self.start <= max(high_watermark, gone[-1].end if gone else 0)
        assert all(each.end <= high_watermark for each in gone), "what is not committed was removed"
        if by_size and not by_time:
            assert not gone or sum(len(each.data) for each in self.batches) >= retention_bytes
        elif not by_size and not by_time:
            assert not gone
        elif by_time and not by_size:
            assert all(each.header.max_timestamp < now_ms - 500 for each in gone)

    @rule(data=st.data())
    def advance_log_start(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, self.end + 1))
        self.log.advance_log_start(offset)
        self.moved_start()
        assert self.start <= offset

    def moved_start(self) -> list[Written]:
        """Follow the log, which alone knows where its segments end; only whole batches may be missing."""
        self.start = self.log.log_start_offset
        gone = [each for each in self.batches if each.end <= self.start]
        self.batches = self.batches[len(gone) :]
        assert not self.batches or self.batches[0].header.base_offset == self.start, "a batch was cut in two"
        self.flushed_end = max(self.flushed_end, self.start)
        return gone

    # Stored state, and its loss

    @rule()
    def flush(self) -> None:
        self.log.flush()
        self.flushed_end = self.end

    @rule(data=st.data(), fencing_token=st.integers(0, 50))
    def write_checkpoint(self, data: st.DataObject, fencing_token: int) -> None:
        high_watermark = data.draw(st.integers(0, self.end))
        leadership = Leadership(self.leader_epoch, fencing_token)
        self.log.checkpoint(high_watermark, leadership, self.log.state_below(high_watermark))
        if self.options.flush != "never":
            self.flushed_end = self.end
        self.checkpoint = (min(high_watermark, self.log.flushed_offset), max(leadership, self.checkpoint[1]))

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.open_again(torn=False)

    @rule()
    def stop_in_good_order(self) -> None:
        """Stop in order: the next opening reads no batch."""
        self.log.flush()
        self.flushed_end = self.end
        self.log.checkpoint(self.end, self.checkpoint[1], self.log.state_below(self.end, is_last=True))
        self.checkpoint = (self.end, self.checkpoint[1])
        self.log.close()
        with counted_scans() as scanned:
            self.open_again(torn=False)
        assert not scanned

    @rule(which=st.integers(0, 9), left=st.sampled_from((0, 0.5, None)))
    def lose_a_snapshot(self, which: int, left: float | None) -> None:
        """Tear or remove any file from which an opening could begin."""
        paths = sorted((*self.directory.glob("*.index"), *self.directory.glob("*.snapshot")))
        if paths:
            path = paths[which % len(paths)]
            if left is None:
                path.unlink()
            else:
                os.truncate(path, int(path.stat().st_size * left))
            self.left_open.append(self.log)
            self.open_again(torn=False)

    @rule(torn=st.binary(max_size=100), whole_header=st.booleans(), sent=BATCHES, torn_at=st.integers(1, 400))
    def kill_in_mid_write(self, torn: bytes, whole_header: bool, sent: Sent, torn_at: int) -> None:
        """Kill the process: the page cache keeps its writes, but the last one may have stopped anywhere."""
        self.left_open.append(self.log)
        if whole_header:
            (unwritten,) = self.build_all([sent])
            torn = unwritten.data[: min(torn_at, len(unwritten.data) - 1)]
        with self.last_file().open("ab") as file:
            file.write(torn)
        self.open_again(torn=len(torn) > 0)

    def last_file(self) -> Path:
        return max(self.directory.glob("*.log"))

    def open_again(self, *, torn: bool) -> None:
        self.log = Log.open(self.directory, options=self.options)
        if self.options.flush == "always":
            self.flushed_end = self.end
        assert (self.log.truncated_bytes > 0) == torn
        assert (self.log.high_watermark_checkpoint, self.log.leadership) == self.checkpoint

    @rule(sent=st.lists(BATCHES, min_size=1, max_size=3), what=st.sampled_from(("leader", "follower", "checkpoint")))
    def find_the_disk_full(self, sent: list[Sent], what: str) -> None:
        written = self.build_all(sent)
        files = sorted(path.name for path in self.directory.iterdir())
        try:
            with no_room():
                if what == "leader":
                    self.log.append(bytearray(written[0].data), written[0].header)
                elif what == "follower":
                    self.log.append_replicated(b"".join(each.data for each in written))
                else:
                    if self.options.flush != "never":
                        self.flushed_end = self.end
                    self.log.checkpoint(self.end, NO_LEADERSHIP)
        except DiskError:
            assert sorted(path.name for path in self.directory.iterdir()) == files, "something was left behind"
            return
        raise AssertionError("a full disk took it")

    # Invariants

    @invariant()
    def offsets_are_the_models(self) -> None:
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
        assert self.log.failure is None

    @invariant()
    def what_is_taken_for_flushed_was(self) -> None:
        assert self.log.flushed_offset <= self.flushed_end

    @invariant()
    def bytes_are_the_models(self) -> None:
        assert read_all(self.log) == b"".join(each.data for each in self.batches)
        assert self.log.size_in_bytes == sum(len(each.data) for each in self.batches)

    @invariant()
    def reads_end_at_the_limit_and_begin_with_the_batch_asked_for(self) -> None:
        limits = [self.start, *(each.end for each in self.batches[-4:])]
        for batch in self.batches[-3:]:
            for offset in (batch.header.base_offset, batch.header.last_offset):
                for up_to in limits:
                    found = list(iterate_batches(self.log.read(offset, 1 << 20, up_to=up_to)))
                    assert all(each.last_offset < up_to for each in found)
                    assert bool(found) == (batch.end <= up_to)
                    assert not found or found[0].base_offset == batch.header.base_offset

    @invariant()
    def epochs_are_those_of_the_batches(self) -> None:
        expected: dict[int, int] = {}
        for each in self.batches:
            expected.setdefault(each.header.partition_leader_epoch, each.header.base_offset)
        known = self.log.leader_epochs.entries()
        assert known[: len(expected)] == list(expected.items())
        assert all(start == self.end for _, start in known[len(expected) :]), "an epoch without a batch"
        last = self.batches[-1].header.partition_leader_epoch if self.batches else -1
        if not known[len(expected) :]:
            assert self.log.leader_epochs.end_offset_for(1 << 30, self.end) == (
                EpochEnd(last, self.end) if self.batches else EpochEnd(-1, -1)
            )

    @invariant()
    def times_lead_to_the_first_batch_that_reaches_them(self) -> None:
        for timestamp in (1000, 3000, 4500):
            reaching = [each.header for each in self.batches if each.header.max_timestamp >= timestamp]
            found = self.log.find_timestamp(timestamp)
            assert found == ((reaching[0].base_timestamp, reaching[0].base_offset) if reaching else None)
        newest = max(self.batches, key=lambda each: each.header.max_timestamp, default=None)
        assert self.log.max_timestamp() == (
            (newest.header.max_timestamp, newest.header.last_offset) if newest is not None else (-1, -1)
        )

    @invariant()
    def a_resend_of_a_producers_last_batch_is_known(self) -> None:
        for producer_id in PRODUCERS:
            own = [each.header for each in self.batches if each.header.producer_id == producer_id]
            if not own:
                continue
            judge, last = self.log.producers.judge, own[-1]
            assert judge(last) == (BatchVerdict.DUPLICATE, last.base_offset, last.last_offset, "")
            following = last._replace(base_sequence=last.base_sequence + last.record_count)
            assert judge(following).verdict is BatchVerdict.ACCEPTED
            skipping = following._replace(base_sequence=following.base_sequence + 1)
            assert judge(skipping).verdict is BatchVerdict.OUT_OF_ORDER


TestLogAgainstModel = LogMachine.TestCase
TestLogAgainstModel.settings = settings(
    max_examples=examples(60), stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
