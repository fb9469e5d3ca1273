"""A log opens correctly after the death of its process at any call to the disk, or after a power cut.

Histories are random; each is run once for every call that it makes, and dies there. The opened log is compared with the
same files without snapshot and indexes, which are read completely, and with the written batches.
"""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from kproxy.broker import log as broker_log
from kproxy.broker import producer_state
from kproxy.broker.config import FLUSH_POLICIES, FlushPolicy, LogOptions
from kproxy.broker.leader_epochs import Leadership
from kproxy.broker.log import Log
from kproxy.broker.segment import LogFailed
from kproxy_codec.record_batch import assign_offsets, iterate_batches, parse_batch
from tests.support.brokers.broker_logs import assert_reads_alike, copied, headers, read_all
from tests.support.brokers.dying_disk import NEVER, Died, DyingDisk
from tests.support.wire.record_batches import build_batch

SEGMENT_BYTES = 800
OPERATIONS = 10
PRODUCERS = (-1, 7, 8)


class History:
    """Random operations on a log, as leaders, followers and the maintenance do them.

    `known` has the last batch that was written at each offset. Below `floor` nothing may be lost, whatever the running
    operation has done; the log ends at `ceiling` at most.
    """

    def __init__(self, disk: DyingDisk, dice: random.Random, flush: FlushPolicy) -> None:
        self.disk = disk
        self.dice = dice
        self.options = LogOptions(SEGMENT_BYTES, flush)
        self.known: dict[int, bytes] = {}
        self.end = self.floor = self.ceiling = self.high_watermark = 0
        self.epoch, self.next_sequence = 0, 0
        self.flushed = 0
        self.reset_at = 0
        self.is_resetting = False
        self.log: Log | None = None

    def run(self) -> None:
        self.open()
        for _ in range(OPERATIONS):
            self.dice.choice(
                (
                    self.append,
                    self.append,
                    self.append_replicated,
                    self.append_replicated,
                    self.truncate,
                    self.remove_old_segments,
                    self.checkpoint,
                    self.checkpoint,
                    self.checkpoint_meanwhile,
                    self.stop,
                    self.die_and_open,
                    self.reset,
                )
            )()
            self.floor = self.ceiling = self.end = self.opened.log_end_offset
            self.note_flushed()

    @property
    def opened(self) -> Log:
        assert self.log is not None
        return self.log

    def note_flushed(self) -> None:
        """Note the flushed records, which stay on the disk even if a reopened log does not know them."""
        if self.log is not None:
            self.flushed = min(max(self.flushed, self.log.flushed_offset), self.log.log_end_offset)

    @property
    def is_unsure(self) -> bool:
        """Whether a power cut may restore some of the records that were dropped together."""
        return self.is_resetting or self.flushed < self.reset_at

    def open(self) -> None:
        self.log = None
        self.log = Log.open(self.disk.directory, options=self.options)
        assert self.log.log_end_offset == self.end

    def build(self, count: int) -> list[bytes]:
        built, offset = [], self.opened.log_end_offset
        for _ in range(count):
            producer_id, records = self.dice.choice(PRODUCERS), self.dice.randint(1, 4)
            data = build_batch(
                [b"%d" % self.dice.getrandbits(64) + bytes(self.dice.randint(0, 150)) for _ in range(records)],
                timestamp=self.dice.randint(1000, 5000),
                producer_id=producer_id,
                producer_epoch=min(producer_id, 0),
                base_sequence=self.next_sequence if producer_id > 0 else -1,
            )
            self.next_sequence += records
            assign_offsets(data, parse_batch(data), offset, self.epoch)
            self.known[offset] = bytes(data)
            offset += records
            built.append(bytes(data))
        self.ceiling = offset
        return built

    def append(self) -> None:
        self.epoch += self.dice.choice((0, 0, 1))
        [data] = self.build(1)
        batch = parse_batch(data)
        self.opened.append(bytearray(data), batch)
        self.opened.producers.update(batch, batch.base_offset)

    def append_replicated(self) -> None:
        self.opened.append_replicated(b"".join(self.build(self.dice.randint(1, 6))))

    def truncate(self) -> None:
        offset = self.dice.randint(self.high_watermark, self.opened.log_end_offset)
        whole = [each.base_offset for each in headers(self.opened) if each.last_offset >= offset]
        self.floor = max(min([*whole, self.opened.log_end_offset]), self.high_watermark)
        self.flushed = min(self.flushed, self.floor)
        self.opened.truncate_to(offset)

    def remove_old_segments(self) -> None:
        log = self.opened
        log.options = LogOptions(SEGMENT_BYTES, self.options.flush, *self.dice.choice(((1000, -1), (-1, 1000))))
        log.remove_old_segments(self.dice.randint(3000, 7000), self.high_watermark)
        log.options = self.options

    def raise_high_watermark(self) -> None:
        ends = [each.last_offset + 1 for each in headers(self.opened)]
        now = self.high_watermark
        self.high_watermark = self.dice.choice([now, *(each for each in ends if each > now)])

    def checkpoint(self, *, is_last: bool = False) -> None:
        self.raise_high_watermark()
        if is_last:
            self.high_watermark = self.opened.log_end_offset
        state = self.opened.state_below(self.high_watermark, is_last=is_last)
        self.opened.checkpoint(self.high_watermark, Leadership(self.epoch, self.dice.randint(0, 9)), state)

    def checkpoint_meanwhile(self) -> None:
        """Use the log otherwise while a thread waits for the disk."""
        left, also = self.dice.randint(0, 12), self.dice.choice((self.append, self.truncate, self.remove_old_segments))

        def count_down() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.disk.before_call = lambda: None
                also()

        self.raise_high_watermark()
        state = self.opened.state_below(self.high_watermark)
        self.disk.before_call = count_down
        with suppress(LogFailed):  # a segment removed meanwhile reports no failure
            self.opened.checkpoint(self.high_watermark, Leadership(self.epoch, 0), state)
        self.disk.before_call = lambda: None
        assert self.opened.failure is None

    def stop(self) -> None:
        self.opened.flush()
        self.note_flushed()
        self.checkpoint(is_last=True)
        self.opened.close()
        self.open()

    def die_and_open(self) -> None:
        with max(self.disk.directory.glob("*.log")).open("ab") as file:
            file.write(bytes(self.dice.choice((0, 30))))
        self.open()

    def reset(self) -> None:
        self.is_resetting = True
        offset = self.opened.log_end_offset + self.dice.randint(0, 3)
        self.flushed = 0
        self.opened.reset_to(offset)
        self.is_resetting, self.reset_at, self.high_watermark = False, offset, offset


def assert_opens(directory: Path, history: History, *, is_killed: bool) -> None:
    """Check that the log opens on the files that a dead process or a power cut has left."""
    options = history.options
    is_only_replica = not (history.is_resetting if is_killed else history.is_unsure)
    whole = Log.open(
        copied(directory, directory.with_name("whole") / "t-0", is_told=False),
        options=options,
        is_only_replica=is_only_replica,
    )
    log = Log.open(directory, options=options, is_only_replica=is_only_replica)
    assert_reads_alike(log, whole)
    if is_only_replica:
        floor = history.floor if is_killed else min(history.floor, history.flushed)
        assert log.log_end_offset >= floor, "what was there has gone: its offsets are given out again"
        found = read_all(log)
        for batch in iterate_batches(found):
            if batch.last_offset < floor:
                assert found[batch.position : batch.end] == history.known[batch.base_offset]
        assert log.log_start_offset <= max(history.high_watermark, floor)
        assert not is_killed or log.log_end_offset <= history.ceiling
    whole.close()
    # The files left there do not harm later writes.
    data = build_batch([b"later"], timestamp=6000)
    assign_offsets(data, parse_batch(data), log.log_end_offset, history.epoch)
    log.append(data, parse_batch(data))
    log.producers.update(parse_batch(data), log.log_end_offset - 1)
    log.checkpoint(log.log_end_offset, log.leadership, log.state_below(log.log_end_offset, is_last=True))
    log.close()
    log = Log.open(directory, options=options)
    whole = Log.open(copied(directory, directory.with_name("later") / "t-0", is_told=False), options=options)
    assert_reads_alike(log, whole)
    log.close()
    whole.close()


def lived(directory: Path, seed: int, flush: FlushPolicy, dies_at: int = NEVER) -> tuple[History, DyingDisk]:
    """Run a history up to the call at which it dies; the log stays open, as after the death of a process."""
    directory.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer_state, "HISTORY_INTERVAL_BYTES", 400)
        patch.setattr(producer_state, "HISTORY_BYTES_PER_PRODUCER", 1)
        patch.setattr(broker_log, "INTERVAL_BYTES", 100)
        disk = DyingDisk(directory, patch, dies_at)
        history = History(disk, random.Random(seed), flush)
        with suppress(Died):
            history.run()
        history.note_flushed()
    return history, disk


@pytest.mark.parametrize("flush", FLUSH_POLICIES)
def test_log_opens_after_death_at_any_call(tmp_path: Path, flush: FlushPolicy) -> None:
    seed = random.SystemRandom().getrandbits(32)
    history, disk = lived(tmp_path / "all" / "t-0", seed, flush)
    history.opened.close()
    assert disk.calls > OPERATIONS
    for dies_at in range(disk.calls):
        print(f"seed {seed}, dies at call {dies_at}")
        place = tmp_path / str(dies_at)
        history, disk = lived(place / "dead" / "t-0", seed, flush, dies_at)
        after_cut = place / "cut" / "t-0"
        after_cut.mkdir(parents=True)
        disk.cut_power(after_cut, random.Random(seed + dies_at))
        assert_opens(after_cut, history, is_killed=False)
        assert_opens(copied(disk.directory, place / "killed" / "t-0"), history, is_killed=True)
        if history.log is not None:
            history.log.close()
        shutil.rmtree(place)
