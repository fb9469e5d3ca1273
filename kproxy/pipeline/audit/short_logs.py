"""The headers of logs that are short, read by the driver itself.

Spark starts four Python processes to read a source in Python, one after another, whatever there is to read. Of little
that takes longer than all the rest of an audit. How much is little is bounded, in headers and in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kproxy.pipeline.audit.log_options import read_options, written
from kproxy.pipeline.audit.log_source import LogDataSourceReader
from kproxy.pipeline.audit.schemas import LOG_SCHEMA

MOST_BATCHES: Final = 20_000
# Batches are fetched whole, and their checksums reckoned. Some seconds of work.
MOST_BYTES: Final = 256 << 20


def read_short_log(
    session: Any,
    bootstrap: str,
    *,
    topics: Sequence[str],
    end_offsets: str,
    start_offsets: str | None = None,
    most_batches: int = MOST_BATCHES,
    most_bytes: int = MOST_BYTES,
) -> Any | None:
    """As `log_source.read_log`, what was read; None where there is more than is the driver's. Raises LogReadFailed."""
    offsets = {"startOffsets": start_offsets, "endOffsets": end_offsets}
    reader = LogDataSourceReader(read_options(written(bootstrap, topics, None, offsets)))
    read: list[Any] = []
    room, room_bytes = most_batches, most_bytes
    for piece in reader.partitions():
        for headers in reader.read(piece):
            room -= headers.num_rows
            room_bytes -= sum(headers.column("bytes").to_pylist())
            if room < 0 or room_bytes < 0:
                return None
            read.append(headers)
    if not read:
        return session.createDataFrame([], LOG_SCHEMA)
    import pyarrow as pa

    return session.createDataFrame(pa.Table.from_batches(read), LOG_SCHEMA)
