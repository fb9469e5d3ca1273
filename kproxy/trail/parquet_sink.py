"""Write the trail to Parquet files, each of a minute or some MiB.

A file is written as `.tmp`, synced and renamed, so readers of `*.parquet` see whole files only. Rows of all kinds share
one table; fields that a kind does not have are null, and digests and macs (kproxy.trail.signature) are left out. Arrow
releases the interpreter's lock while it parses the lines, so the event loop does not wait.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.json
import pyarrow.parquet

from kproxy.trail.file_sinks import FILE_MODE, PARQUET_FILE_S, UNFINISHED, TrailFiles
from kproxy.trail.sink import BatchPreference, SinkFailed, on_thread

FILE_BYTES = 8 << 20

_TEXT, _INT, _LONG = pyarrow.string(), pyarrow.int32(), pyarrow.int64()
# The fields of kproxy.trail.rows.
SCHEMA = pyarrow.schema(
    [
        *((name, _TEXT) for name in ("kind", "proxy", "incarnation")),
        *((name, _LONG) for name in ("sequence", "at", "interval_ms", "mark_ms")),
        *((name, _TEXT) for name in ("topic", "topic_id")),
        *((name, _INT) for name in ("partition", "owner")),
        ("revision", _LONG),
        ("acks", _INT),
        ("connection", _LONG),
        *((name, _TEXT) for name in ("peer", "client_id", "principal")),
        ("producer_id", _LONG),
        *((name, _INT) for name in ("producer_epoch", "first_sequence")),
        *((name, _LONG) for name in ("base_offset", "record_count", "batches")),
        *((name, _LONG) for name in ("bytes", "first_acked_at", "last_acked_at")),
        *((name, pyarrow.list_(_LONG)) for name in ("spans", "latency_us")),
    ]
)


class ParquetSink:
    """The Parquet files of one process. The directory exists."""

    def __init__(
        self,
        directory: Path,
        incarnation: str,
        began_ms: int,
        *,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self.preference = BatchPreference(file_bytes, PARQUET_FILE_S)
        self._directory = directory
        self._files = TrailFiles(directory, incarnation, began_ms, "parquet")

    async def write(self, pages: Sequence[bytes]) -> None:
        data = b"\n".join(pages)
        try:
            await on_thread(lambda: self._write(data))
        except (OSError, pyarrow.ArrowException) as error:
            raise SinkFailed(f"{self._directory}: {getattr(error, 'strerror', None) or error}") from error

    async def close(self) -> None:
        """Do nothing: every write closes its file."""

    def _write(self, data: bytes) -> None:
        rows = pyarrow.json.read_json(
            pyarrow.BufferReader(data),
            pyarrow.json.ReadOptions(use_threads=False),
            pyarrow.json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore"),
        )
        path = self._files.next()
        unfinished = path.with_name(path.name + UNFINISHED)
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb") as file:
                pyarrow.parquet.write_table(rows, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            self._files.keep_names()
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._files.give_back()
            raise
