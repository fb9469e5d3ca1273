"""Check the CRC-32C of a record batch.

The check is not in `record_batch`, because it needs a compiled library and that module does not.
"""

from __future__ import annotations

from crc32c import crc32c

from kproxy_codec.primitives import Buffer
from kproxy_codec.record_batch import ATTRIBUTES_OFFSET, RecordBatch


def crc_is_valid(buffer: Buffer, batch: RecordBatch) -> bool:
    """Whether the CRC-32C in the header matches the bytes it covers. Copies nothing."""
    covered = memoryview(buffer)[batch.position + ATTRIBUTES_OFFSET : batch.end]
    return bool(crc32c(covered) == batch.crc)
