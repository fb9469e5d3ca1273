"""Read the batch headers of one range of a log by Fetch.

During a read leaders may move, and retention may remove records.

States of a read: AT position --batches--> AT a later one; --the log begins later now--> AT its beginning;
--nothing new--> the same, until patience is exhausted; at or after the range's end --> DONE.

Invariants
1. A batch is returned once, by the range that contains its base offset. The first range also takes the batch that
   begins before it and extends into it.
2. An answer with batches raises the position, or after a corrupt batch `_more_bytes`; otherwise the read fails.
3. At most one answer is in memory, of `max_bytes` and `_more_bytes`, or one batch.
4. A log that ends before the range's end is incomplete. After a change of leaders its end soon advances again; else
   the read fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

from kproxy.pipeline.audit.judge import Batch
from kproxy.pipeline.audit.log_client import (
    EARLIEST,
    LARGEST_BATCH_BYTES,
    LATEST,
    LogClient,
    LogReadFailed,
    Patience,
    TopicPartition,
)
from kproxy_codec import error_codes
from kproxy_codec.errors import CodecError, Truncated
from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import RecordBatch, parse_batch

HEADERS_PER_CHUNK: Final = 8192
MAX_BYTES: Final = 4 << 20
# Compaction may have removed the last batches of a range. One empty answer may be due to a short wait of the broker, so
# several are needed.
EMPTY_ANSWERS: Final = 3


class LogRange(NamedTuple):
    """The offsets of a partition from `start` to before `end`; `is_first`: its first range that is read."""

    which: TopicPartition
    start: int
    end: int
    is_first: bool


CheckCrc = Callable[[Buffer, RecordBatch], bool]


class RangeReader:
    """Read one range, once."""

    def __init__(
        self, client: LogClient, wanted: LogRange, check_crc: CheckCrc | None, max_bytes: int = MAX_BYTES
    ) -> None:
        """Prepare to read `wanted`. `check_crc` None: do not check the CRCs of batches."""
        self._client = client
        self._wanted = wanted
        self._max_bytes = max_bytes
        self._check_crc = check_crc
        self._position = wanted.start
        self._corrupt: RecordBatch | None = None
        # More bytes to fetch for the batches after a corrupt one, which brokers resend until the position is past it.
        self._more_bytes = 0
        self._done = False
        self.bytes_read = 0

    def headers(self) -> Iterator[list[Batch]]:
        """Yield chunks of at most HEADERS_PER_CHUNK headers. Raise LogReadFailed."""
        for records, batches in self.answers():
            self.bytes_read += len(records)
            while chunk := [_header(batch, crc_ok) for batch, crc_ok in islice(batches, HEADERS_PER_CHUNK)]:
                yield chunk

    def answers(self) -> Iterator[tuple[Buffer, Iterator[tuple[RecordBatch, bool | None]]]]:
        """Yield the records of each answer with its new batches, which the caller must exhaust.

        Raise LogReadFailed.
        """
        patience = self._client.patience()
        empty_answers = 0
        while not self._done:
            max_bytes = self._max_bytes + self._more_bytes
            fetched = self._client.fetch(self._wanted.which, self._position, max_bytes, patience)
            if fetched.error_code == error_codes.OFFSET_OUT_OF_RANGE:
                self._move_on(patience)
            elif fetched.error_code != error_codes.NONE:
                raise self._failed(error_codes.name_of(fetched.error_code))
            elif fetched.records:
                before = self._position
                yield fetched.records, self._taken(fetched.records)
                if self._position <= before and not self._done:
                    self._step_over(len(fetched.records))
                self._done = self._done or self._position >= self._wanted.end
                empty_answers = 0
                patience.succeeded()
            elif max(self._position, fetched.high_watermark) >= self._wanted.end:
                empty_answers += 1
                self._done = empty_answers >= EMPTY_ANSWERS
            else:
                self._await_the_end(fetched.high_watermark, patience)

    def _taken(self, records: Buffer) -> Iterator[tuple[RecordBatch, bool | None]]:
        """Yield the range's batches of one answer with their `crc_ok`, and move the position."""
        check_crc, takes_from = self._check_crc, 0 if self._wanted.is_first else self._wanted.start
        for batch in self._batches(records):
            crc_ok = None if check_crc is None else check_crc(records, batch)
            if crc_ok is False:
                # The header of a corrupt batch may be wrong, and so may the offset of the next batch.
                self._corrupt, self._more_bytes = batch, max(self._more_bytes, batch.size_in_bytes)
                self._position = max(self._position, batch.base_offset + 1)
            else:
                self._position = max(self._position, batch.last_offset + 1)
            if batch.base_offset >= takes_from:
                yield batch, crc_ok

    def _batches(self, records: Buffer) -> Iterator[RecordBatch]:
        """Yield the new batches of an answer, up to the range's end or a truncated batch."""
        at, is_behind = 0, True
        while at < len(records):
            try:
                batch = parse_batch(records, at)
            except Truncated:
                # Brokers send the first batch whole (KIP-74).
                if at == 0:
                    raise self._failed("the first batch is incomplete, or its length field is too large") from None
                return
            except CodecError as error:
                raise self._failed(str(error)) from error
            at = batch.end
            if batch.base_offset >= self._wanted.end:
                self._done = True
                return
            is_known = self._corrupt is not None and batch.base_offset == self._corrupt.base_offset
            if is_behind and (batch.last_offset < self._position or is_known):
                continue
            is_behind = False
            yield batch

    def _step_over(self, answer_bytes: int) -> None:
        """Move past the corrupt batch that an answer without new batches consists of."""
        if self._corrupt is None:
            raise self._failed("its leader sends only batches before that offset")
        if answer_bytes >= self._max_bytes + self._more_bytes and self._more_bytes < LARGEST_BATCH_BYTES:
            # The next batch did not fit into the answer.
            self._more_bytes *= 2
        else:
            self._position = max(self._position, self._corrupt.last_offset) + 1

    def _move_on(self, patience: Patience) -> None:
        """Move to the log's current beginning. If the log ends before the position, wait for its end to come back."""
        which = self._wanted.which
        earliest = self._client.list_offsets([which], EARLIEST)[which]
        if earliest > self._position:
            self._position = earliest
            return
        self._await_the_end(self._client.list_offsets([which], LATEST)[which], patience)

    def _await_the_end(self, latest: int, patience: Patience) -> None:
        which, _, end, _ = self._wanted
        self._client.forget_leader(which)
        patience.pause(
            f"The log of {which} was to be read up to offset {end} and ends at {latest} now: "
            f"it was cut off in between, or its leader has not caught up"
        )

    def _failed(self, reason: str) -> LogReadFailed:
        return LogReadFailed(f"{self._wanted.which} cannot be read at offset {self._position}: {reason}.")


def _header(batch: RecordBatch, crc_ok: bool | None) -> Batch:
    first = batch.base_offset, batch.last_offset, batch.record_count
    return Batch(*first, batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.is_control, crc_ok)


def records_in(client: LogClient, wanted: LogRange) -> Iterator[Any]:
    """Yield the records of a range, as kafka-python decodes them. Raise LogReadFailed."""
    from kafka.record.memory_records import MemoryRecords

    for records, batches in RangeReader(client, wanted, None).answers():
        for batch, _ in batches:
            for record in MemoryRecords(bytes(records[batch.position : batch.end])).next_batch() or ():
                if wanted.start <= record.offset < wanted.end:
                    yield record
