"""Compare the records that the demo read back with the rows that it sent. This module does no I/O.

State: for each row number whether it was seen; for each non-null key its Kafka partition and the highest `n` seen; for
each Kafka partition its last offset. `see` gets every record in the order of Kafka's offsets and never sorts: sorting
would hide the faults in the order.

Invariants
1. Every record is counted in `read`, whatever is wrong with it.
2. A record whose `n` was seen before is a duplicate: content and order of rows are judged on first occurrences.
3. The first record of an `n` is altered if it differs in any byte from its row's message. A record without a valid `n`
   is altered, and its row is missing as well.
4. Examples kept per fault are bounded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kproxy.demo.flights import ROW_NUMBER, fingerprint

MAX_EXAMPLES: Final = 3


@dataclass(slots=True)
class Fault:
    """A fault: how often it occurred, and the first few cases in words."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, example: str) -> None:
        self.count += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(example)


MISSING: Final = "missing"
DUPLICATED: Final = "duplicated"
OUT_OF_ORDER: Final = "out of order"
ALTERED: Final = "altered"
SCATTERED: Final = "keys in two partitions"
NOT_RISING: Final = "offsets not rising"


@dataclass(frozen=True, slots=True)
class RowsVerdict:
    """The outcome. `sent` is Spark's own count of rows written, `read` the number of records read back."""

    sent: int
    read: int
    faults: Mapping[str, Fault]
    rows_by_partition: Mapping[int, int]

    @property
    def clean(self) -> bool:
        return not any(fault.count for fault in self.faults.values())


class Judge:
    """Pass every record to `see`, then call `verdict`. `fingerprints` are those of the expected messages, by n - 1."""

    def __init__(self, fingerprints: Sequence[int]) -> None:
        self._fingerprints = fingerprints
        self._seen = bytearray(len(fingerprints))
        self._key_partition: dict[bytes, int] = {}
        self._key_highest: dict[bytes, int] = {}
        self._scattered: set[bytes] = set()
        self._last_offset: dict[int, int] = {}
        self._rows_by_partition: Counter[int] = Counter()
        self.read = 0
        names = (MISSING, DUPLICATED, OUT_OF_ORDER, ALTERED, SCATTERED, NOT_RISING)
        self._faults = {name: Fault() for name in names}

    def see(self, partition: int, offset: int, key: bytes | None, value: bytes | None) -> None:
        """Judge the record at `offset` of `partition`."""
        self.read += 1
        self._rows_by_partition[partition] += 1
        if offset <= self._last_offset.get(partition, -1):
            self._faults[NOT_RISING].add(f"{offset} after {self._last_offset[partition]} in partition {partition}")
        self._last_offset[partition] = offset

        n = _row_number(value)
        if n is None or value is None or not 1 <= n <= len(self._seen):
            self._faults[ALTERED].add(f"offset {offset} of partition {partition} is no row of ours")
            return
        if self._seen[n - 1]:
            self._faults[DUPLICATED].add(f"n={n} again at offset {offset} of partition {partition}")
            return
        self._seen[n - 1] = 1
        if fingerprint(key, value) != self._fingerprints[n - 1]:
            self._faults[ALTERED].add(f"n={n} at offset {offset} of partition {partition}")
        if key is not None:
            self._follow(key, partition, offset, n)

    def _follow(self, key: bytes, partition: int, offset: int, n: int) -> None:
        home = self._key_partition.setdefault(key, partition)
        if home != partition:
            # There is no order between two partitions.
            if key not in self._scattered:
                self._scattered.add(key)
                self._faults[SCATTERED].add(f"{key.decode(errors='replace')} in partitions {home} and {partition}")
            return
        highest = self._key_highest.get(key, 0)
        if n < highest:
            self._faults[OUT_OF_ORDER].add(f"n={n} after n={highest} at offset {offset} of partition {partition}")
        else:
            self._key_highest[key] = n

    def verdict(self, *, sent: int) -> RowsVerdict:
        """Return the outcome. Call it once, after the last record."""
        missing = self._faults[MISSING]
        position = self._seen.find(0)
        while position != -1 and missing.count < MAX_EXAMPLES:
            missing.add(f"n={position + 1}")
            position = self._seen.find(0, position + 1)
        missing.count = self._seen.count(0)
        return RowsVerdict(sent, self.read, self._faults, self._rows_by_partition)


def _row_number(value: bytes | None) -> int | None:
    """Return the `n` in a message's JSON; None unless it is a JSON object with an integer `n`."""
    if value is None:
        return None
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        return None
    n = fields.get(ROW_NUMBER) if isinstance(fields, dict) else None
    return n if isinstance(n, int) and not isinstance(n, bool) else None
