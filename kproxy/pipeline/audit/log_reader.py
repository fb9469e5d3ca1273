"""Read the batch headers of one range of a log by Fetch.

During a read leaders may move, and retention may remove records.

States of a read: AT position --batches--> AT a later one; --the log begins later now--> AT its beginning;
--nothing new--> the same, until patience is exhausted; at or after the range's end --> DONE.

Invariants
1. A batch is returned once, by the range that contains its base offset. The first range also takes the batch that
   begins before it and extends into it.
2. The position rises with every answer that has batches; an answer that does not raise it ends the read.
3. At most one answer is in memory, of `max_bytes` or one batch.
4. A log that ends before the range is incomplete. After a change of leaders its end soon advances again; otherwise the
   read fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from kproxy.pipeline.audit.log_client import EARLIEST, LARGEST_BATCH_BYTES, LATEST, LogClient, LogReadFailed, Patience
from kproxy.pipeline.audit.log_options import LogRange
from kproxy_codec import error_codes
from kproxy_codec.errors import CodecError, Truncated
from kproxy_codec.fetch import PartitionFetched
from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import HEADER_BYTES, RecordBatch, parse_batch, parse_header

ROWS_PER_CHUNK: Final = 8192
# Compaction may have removed the last batches of a range. One empty answer may be due to a short wait of the broker, so
# several are needed.
EMPTY_ANSWERS: Final = 3

CheckCrc = Callable[[Buffer, RecordBatch], bool]
Row = tuple[int, int, int, int, int, int, int, int, int, bool, bool, bool | None]
"""base_offset, last_offset, record_count, producer_id, producer_epoch, base_sequence, leader_epoch, max_timestamp,
bytes, is_control, is_transactional, crc_ok (None: not checked)."""


def _row(batch: RecordBatch, crc_ok: bool | None) -> Row:
    return (
        batch.base_offset,
        batch.last_offset,
        batch.record_count,
        batch.producer_id,
        batch.producer_epoch,
        batch.base_sequence,
        batch.partition_leader_epoch,
        batch.max_timestamp,
        batch.size_in_bytes,
        batch.is_control,
        batch.is_transactional,
        crc_ok,
    )


class RangeReader:
    """Read one range, once."""

    def __init__(self, client: LogClient, wanted: LogRange, max_bytes: int, check_crc: CheckCrc | None) -> None:
        """`check_crc` None: do not check the CRCs of batches."""
        self._client = client
        self._wanted = wanted
        self._max_bytes = max_bytes
        self._check_crc = check_crc
        self._position = wanted.start
        self._corrupt: RecordBatch | None = None
        # More bytes to fetch for the batches after a corrupt one, which brokers resend until the position is past it.
        self._more_bytes = 0
        self._done = False

    def rows(self) -> Iterator[list[Row]]:
        """Yield chunks of at most ROWS_PER_CHUNK rows. Raise LogReadFailed."""
        for _, batches in self.answers():
            while rows := [_row(batch, crc_ok) for batch, crc_ok in islice(batches, ROWS_PER_CHUNK)]:
                yield rows

    def answers(self) -> Iterator[tuple[Buffer, Iterator[tuple[RecordBatch, bool | None]]]]:
        """Yield the records of each answer with its new batches, which the caller must exhaust.

        Raise LogReadFailed.
        """
        patience = self._client.patience()
        empty_answers = 0
        while not self._done:
            fetched = self._fetch(patience)
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

    def _fetch(self, patience: Patience) -> PartitionFetched:
        """Fetch an answer with a whole first batch: if the broker truncated it, ask for its size."""
        max_bytes = self._max_bytes + self._more_bytes
        while True:
            fetched = self._client.fetch(self._wanted.which, self._position, max_bytes, patience)
            if fetched.error_code or not fetched.records:
                return fetched
            needed = self._first_bytes(fetched.records)
            if needed <= len(fetched.records):
                return fetched
            if needed <= max_bytes:
                raise self._failed(f"a batch of {needed} bytes is not sent whole")
            max_bytes = needed

    def _first_bytes(self, records: Buffer) -> int:
        """Return the size of the first batch, or of a batch header if the header is truncated."""
        try:
            needed = parse_header(records).size_in_bytes
        except Truncated:
            return HEADER_BYTES
        except CodecError as error:
            raise self._failed(str(error)) from error
        if needed > LARGEST_BATCH_BYTES:
            raise self._failed(f"a batch announces {needed} bytes; at most {LARGEST_BATCH_BYTES} are read")
        return needed

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
