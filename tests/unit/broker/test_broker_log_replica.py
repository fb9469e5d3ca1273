"""The log of a follower on a real disk: what it accepts from a leader, and how it is truncated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kproxy.broker import producer_state
from kproxy.broker.config import LogOptions
from kproxy.broker.leader_epochs import NO_LEADERSHIP, Leadership
from kproxy.broker.log import Log
from kproxy.broker.producer_state import BatchVerdict
from kproxy.broker.segment import LogFailed
from kproxy.broker.validation import ReplicatedBatchInvalid
from kproxy_codec.record_batch import parse_batch
from tests.support.brokers.broker_logs import append, append_values, leader_batches, offsets, read_all
from tests.support.wire.record_batches import build_batch
from tests.unit.broker.replicas import reopened

OPTIONS = LogOptions(segment_bytes=2_000)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    opened = Log.open(tmp_path / "t-0", options=OPTIONS)
    yield opened
    opened.close()


def segment_names(log: Log) -> list[int]:
    return sorted(int(path.stem) for path in log.directory.glob("*.log"))


# Appending the leader's batches


def test_replica_log_equals_leaders_byte_for_byte(log: Log) -> None:
    sent = leader_batches(0, 3, 1, 40, leader_epoch=2) + leader_batches(44, 5, leader_epoch=6)
    assert log.append_replicated(sent) == 49
    assert read_all(log) == sent
    assert log.leader_epochs.entries() == [(2, 0), (6, 44)]
    with reopened(log) as again:
        assert read_all(again) == sent
        assert again.leader_epochs.entries() == [(2, 0), (6, 44)]


@pytest.mark.parametrize("missing_bytes", [1, 50, 65, 70])
def test_truncated_last_batch_waits_for_next_fetch(log: Log, missing_bytes: int) -> None:
    sent = leader_batches(0, 2, 3)
    assert log.append_replicated(sent[:-missing_bytes]) == 2
    assert log.append_replicated(leader_batches(2, 3)) == 5
    assert read_all(log) == sent


def test_empty_fetch_answer_is_accepted(log: Log) -> None:
    assert log.append_replicated(b"") == 0


def test_one_answer_may_fill_several_segments(log: Log) -> None:
    sent = leader_batches(0, *[30] * 20)
    assert log.append_replicated(sent) == 600
    assert len(segment_names(log)) == 4
    assert max(path.stat().st_size for path in log.directory.glob("*.log")) <= OPTIONS.segment_bytes
    assert read_all(log) == sent
    assert all(parse_batch(log.read(offset, 1)).base_offset == offset // 30 * 30 for offset in range(600))


def with_byte(data: bytearray, position: int, value: int) -> bytearray:
    changed = bytearray(data)
    changed[position] ^= value
    return changed


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(leader_batches(6, 1), "the leader sent offset 6; expected 5", id="gap"),
        pytest.param(leader_batches(4, 1), "the leader sent offset 4; expected 5", id="overlap"),
        pytest.param(
            leader_batches(5, 1, leader_epoch=3) + leader_batches(7, 1, leader_epoch=3),
            "expected 6",
            id="gap within",
        ),
        pytest.param(leader_batches(5, 1, leader_epoch=2), "leader epoch 2 at offset 5 is lower than", id="old epoch"),
        pytest.param(
            leader_batches(5, 1, leader_epoch=4) + leader_batches(6, 1, leader_epoch=3),
            "leader epoch 3 at offset 6 is lower than 4",
            id="old epoch within",
        ),
        pytest.param(
            with_byte(leader_batches(5, 1, 1, leader_epoch=3), -1, 1), "CRC of the batch at offset 6", id="crc"
        ),
        pytest.param(with_byte(leader_batches(5, 1, leader_epoch=3), 16, 1), "magic 3", id="magic"),
        pytest.param(with_byte(leader_batches(5, 1, leader_epoch=3), 8, 0x80), "less than its header", id="length"),
    ],
)
def test_non_successive_batch_is_refused_whole(log: Log, sent: bytearray, reason: str) -> None:
    before = leader_batches(0, 5, leader_epoch=3)
    log.append_replicated(before)
    with pytest.raises(ReplicatedBatchInvalid, match=reason):
        log.append_replicated(sent)
    assert (read_all(log), log.log_end_offset) == (before, 5)
    assert log.append_replicated(leader_batches(5, 1, leader_epoch=3)) == 6


def test_epoch_without_records_admits_an_older_one(log: Log) -> None:
    """A leader wrote nothing in epoch 5; the next one still has records of epoch 4 that this replica never saw."""
    log.append_replicated(leader_batches(0, 2, leader_epoch=4))
    log.leader_epochs.assign(5, log.log_end_offset)
    log.append_replicated(leader_batches(2, 1, leader_epoch=4) + leader_batches(3, 1, leader_epoch=6))
    assert log.leader_epochs.entries() == [(4, 0), (6, 3)]


def test_follower_knows_the_leaders_producers(log: Log) -> None:
    log.append_replicated(leader_batches(0, 2, producer_id=7, producer_epoch=0, base_sequence=0))
    again = parse_batch(build_batch([b"v"] * 2, producer_id=7, producer_epoch=0, base_sequence=0))
    assert log.producers.judge(again) == (BatchVerdict.DUPLICATE, 0, 1, "")


# Reading up to the high watermark


@pytest.mark.parametrize(
    ("offset", "up_to", "found"),
    [
        (0, 9, [0, 2, 5]),
        (0, 5, [0, 2]),
        (3, 5, [2]),
        (5, 5, []),
        (0, 0, []),
        (0, 99, [0, 2, 5, 9]),
        (9, 9, []),
    ],
)
def test_read_stops_below_the_limit(log: Log, offset: int, up_to: int, found: list[int]) -> None:
    log.append_replicated(leader_batches(0, 2, 3, 4, 5))
    assert offsets(log.read(offset, 1 << 20, up_to=up_to)) == found


def test_limit_holds_in_every_segment(log: Log) -> None:
    log.append_replicated(leader_batches(0, *[10] * 40))
    for up_to in range(0, 401, 10):
        found, offset = 0, 0
        while data := log.read(offset, 1 << 20, up_to=up_to):
            found += len(offsets(data))
            offset = offsets(data)[-1] + 10
        assert (found, offset) == (up_to // 10, up_to)


# Truncation


@pytest.mark.parametrize(
    ("offset", "end_offset"),
    [(400, 400), (999, 400), (399, 390), (391, 390), (390, 390), (205, 200), (10, 10), (9, 0), (0, 0), (-3, 0)],
)
def test_truncation_drops_every_batch_that_reaches_the_offset(log: Log, offset: int, end_offset: int) -> None:
    sent = leader_batches(0, *[10] * 20, leader_epoch=1) + leader_batches(200, *[10] * 20, leader_epoch=2)
    log.append_replicated(sent)
    log.truncate_to(offset)
    assert (log.log_start_offset, log.log_end_offset) == (0, end_offset)
    left = read_all(log)
    assert left == sent[: len(left)]
    assert offsets(left) == list(range(0, end_offset, 10))
    assert log.leader_epochs.entries() == [(1, 0), (2, 200)][: (end_offset > 0) + (end_offset > 200)]
    assert max(segment_names(log)) <= end_offset
    assert log.append_replicated(leader_batches(end_offset, 7, leader_epoch=3)) == end_offset + 7
    with reopened(log) as again:
        assert (again.truncated_bytes, again.log_end_offset) == (0, end_offset + 7)


def test_truncation_forgets_an_epoch_that_wrote_nothing(log: Log) -> None:
    log.append_replicated(leader_batches(0, 5, leader_epoch=1))
    log.leader_epochs.assign(4, 5)
    log.truncate_to(5)
    assert (log.leader_epochs.latest, log.log_end_offset) == (1, 5)


def idempotent(sequence: int, *, producer_id: int = 9, producer_epoch: int = 0) -> bytearray:
    return build_batch([b"v" * 300], producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=sequence)


@pytest.mark.parametrize("remember_every", [1, 900, 1 << 30])
@pytest.mark.parametrize("dropped", [1, 2, 6, 15])
def test_truncation_restores_producers_of_the_remaining_log(
    log: Log, dropped: int, remember_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of producers that are too old to be remembered otherwise."""
    monkeypatch.setattr(producer_state, "HISTORY_INTERVAL_BYTES", remember_every)
    for sequence in range(20):
        append(log, idempotent(sequence))
    assert len(segment_names(log)) > 3
    left = 20 - dropped
    log.truncate_to(left)
    again = log.producers.judge(parse_batch(idempotent(left - 5)))
    assert (again.verdict, again.base_offset) == (BatchVerdict.DUPLICATE, left - 5)
    assert log.producers.judge(parse_batch(idempotent(left - 6))).verdict is BatchVerdict.OUT_OF_ORDER
    assert log.producers.judge(parse_batch(idempotent(left))).verdict is BatchVerdict.ACCEPTED
    assert log.producers.judge(parse_batch(idempotent(left + 1))).verdict is BatchVerdict.OUT_OF_ORDER


def test_truncation_restores_the_producers_earlier_epoch(log: Log) -> None:
    append(log, idempotent(0))
    append(log, idempotent(0, producer_epoch=1))
    append(log, idempotent(3, producer_id=10))
    log.truncate_to(1)
    assert log.producers.judge(parse_batch(idempotent(1))).verdict is BatchVerdict.ACCEPTED
    assert log.producers.judge(parse_batch(idempotent(7, producer_id=10))).verdict is BatchVerdict.ACCEPTED


def test_truncation_without_readable_producers_fails_the_log(log: Log) -> None:
    for sequence in range(20):
        append(log, idempotent(sequence))
    first = min(log.directory.glob("*.log"))
    damaged = bytearray(first.read_bytes())
    damaged[16] = 1
    first.write_bytes(damaged)
    with pytest.raises(LogFailed, match=f"{first.name} is damaged at byte 0"):
        log.truncate_to(19)
    with pytest.raises(LogFailed):
        append(log, idempotent(19))


def test_truncation_takes_timestamps_back(log: Log) -> None:
    for timestamp in (1000, 9000, 2000):
        append_values(log, 100, timestamp=timestamp)
    log.truncate_to(1)
    assert (log.max_timestamp(), log.find_timestamp(1500)) == ((1000, 0), None)


def test_largest_timestamp_may_precede_the_end(log: Log) -> None:
    log.options = LogOptions()
    for offset in range(60):
        append_values(log, 300, timestamp={20: 9000, 40: 9000, 59: 20_000}.get(offset, 1000))
    log.truncate_to(59)
    assert (log.max_timestamp(), log.find_timestamp(9001)) == ((9000, 20), None)
    assert log.find_timestamp(9000) == (9000, 20)


def test_reset_log_forgets_its_producers_for_good(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_state, "HISTORY_INTERVAL_BYTES", 1)
    append(log, idempotent(0))
    append(log, idempotent(1))
    log.reset_to(100)
    monkeypatch.setattr(producer_state, "HISTORY_INTERVAL_BYTES", 1 << 30)
    log.append_replicated(leader_batches(100, 1, 1))
    log.truncate_to(101)
    assert log.producers.judge(parse_batch(idempotent(7))).verdict is BatchVerdict.ACCEPTED


def test_reset_log_is_empty_at_its_new_start(log: Log) -> None:
    log.append_replicated(leader_batches(0, *[10] * 40, producer_id=1, producer_epoch=0, base_sequence=0))
    log.reset_to(1000)
    assert (log.log_start_offset, log.log_end_offset, log.size_in_bytes) == (1000, 1000, 0)
    assert (log.leader_epochs.entries(), len(log.producers), segment_names(log)) == ([], 0, [1000])
    with reopened(log) as again:
        assert (again.log_start_offset, again.log_end_offset) == (1000, 1000)
        assert again.append_replicated(leader_batches(1000, 2, leader_epoch=8)) == 1002
        assert again.leader_epochs.entries() == [(8, 1000)]


def test_log_may_be_reset_to_its_start(log: Log) -> None:
    log.append_replicated(leader_batches(0, 3))
    log.reset_to(0)
    assert (log.log_start_offset, log.log_end_offset) == (0, 0)
    assert log.append_replicated(leader_batches(0, 3)) == 3


def test_follower_drops_segments_its_leader_dropped(log: Log) -> None:
    log.append_replicated(leader_batches(0, *[10] * 40, leader_epoch=2))
    log.flush()
    second = segment_names(log)[1]
    log.advance_log_start(second - 1)
    assert log.log_start_offset == 0
    log.advance_log_start(second + 1)
    assert log.log_start_offset == second
    assert log.leader_epochs.entries() == [(2, second)]
    log.advance_log_start(5000)
    assert log.log_start_offset == segment_names(log)[0] == segment_names(log)[-1], "the last segment stays"
    assert log.log_end_offset == 400


# State files beside the log


def test_checkpoint_is_found_again(log: Log) -> None:
    assert (log.high_watermark_checkpoint, log.leadership) == (0, NO_LEADERSHIP)
    log.append_replicated(leader_batches(0, 5))
    log.checkpoint(3, Leadership(1, 1234))
    log.checkpoint(5, Leadership(1, 1000))
    with reopened(log) as again:
        assert (again.high_watermark_checkpoint, again.leadership) == (5, (1, 1234)), "a fencing token went back"
        assert [path.name for path in again.directory.iterdir() if path.suffix != ".log"] == ["checkpoint.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"high_watermark": "x"}', b"\x00" * 40])
def test_damaged_checkpoint_is_reported(log: Log, content: bytes) -> None:
    log.checkpoint(0, Leadership(0, 7))
    log.close()
    (log.directory / "checkpoint.json").write_bytes(content)
    with pytest.raises((LogFailed, OSError), match=r"checkpoint\.json is damaged"):
        Log.open(log.directory)


def test_closed_log_writes_no_checkpoint_into_successor(log: Log) -> None:
    log.checkpoint(0, Leadership(0, 7))
    log.close()
    with pytest.raises(LogFailed):
        log.checkpoint(0, Leadership(0, 8))
    again = Log.open(log.directory)
    assert again.leadership == (0, 7)
    again.close()
