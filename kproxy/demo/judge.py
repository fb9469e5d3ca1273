"""Compare the records read back with the rows sent. Pure.

State: for each row number whether it was seen; for each non-null key its Kafka partition and the highest `n` seen; for
each Kafka partition its last offset. `see` gets every record in the order of Kafka's offsets and never sorts: sorting
would hide the faults in the order.

Invariants
1. Every record is counted in `read`, whatever is wrong with it.
2. A record whose `n` was seen before is a duplicate and nothing else: order is judged on first occurrences.
3. A record that differs in any byte from its row's message is altered. If its `n` cannot be read, its row is missing as
   well.
4. Examples kept per fault are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True)
class RowsVerdict:
    """The outcome. `sent` is Spark's own count of rows written, `read` the number of records read back."""

    sent: int
    read: int
    missing: Fault
    duplicated: Fault
    out_of_order: Fault
    altered: Fault
    scattered_keys: Fault
    offsets_not_rising: Fault
    rows_by_partition: dict[int, int]

    @property
    def faults(self) -> dict[str, Fault]:
        return {
            "missing": self.missing,
            "duplicated": self.duplicated,
            "out of order": self.out_of_order,
            "altered": self.altered,
            "keys in two partitions": self.scattered_keys,
            "offsets not rising": self.offsets_not_rising,
        }

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
        self._rows_by_partition: dict[int, int] = {}
        self.read = 0
        self._duplicated = Fault()
        self._out_of_order = Fault()
        self._altered = Fault()
        self._scattered_keys = Fault()
        self._offsets_not_rising = Fault()

    def see(self, partition: int, offset: int, key: bytes | None, value: bytes | None) -> None:
        """Judge the record at `offset` of `partition`."""
        self.read += 1
        self._rows_by_partition[partition] = self._rows_by_partition.get(partition, 0) + 1
        if offset <= self._last_offset.get(partition, -1):
            self._offsets_not_rising.add(f"{offset} after {self._last_offset[partition]} in partition {partition}")
        self._last_offset[partition] = offset

        n = _row_number(value)
        if n is None or value is None or not 1 <= n <= len(self._seen):
            self._altered.add(f"offset {offset} of partition {partition} is no row of ours")
            return
        if self._seen[n - 1]:
            self._duplicated.add(f"n={n} again at offset {offset} of partition {partition}")
            return
        self._seen[n - 1] = 1
        if fingerprint(key, value) != self._fingerprints[n - 1]:
            self._altered.add(f"n={n} at offset {offset} of partition {partition}")
        if key is not None:
            self._follow(key, partition, offset, n)

    def _follow(self, key: bytes, partition: int, offset: int, n: int) -> None:
        home = self._key_partition.setdefault(key, partition)
        if home != partition:
            # There is no order between two partitions.
            if key not in self._scattered:
                self._scattered.add(key)
                self._scattered_keys.add(f"{key.decode(errors='replace')} in partitions {home} and {partition}")
            return
        highest = self._key_highest.get(key, 0)
        if n < highest:
            self._out_of_order.add(f"n={n} after n={highest} at offset {offset} of partition {partition}")
        else:
            self._key_highest[key] = n

    def verdict(self, *, sent: int) -> RowsVerdict:
        missing = Fault(self._seen.count(0))
        position = self._seen.find(0)
        while position != -1 and len(missing.examples) < MAX_EXAMPLES:
            missing.examples.append(f"n={position + 1}")
            position = self._seen.find(0, position + 1)
        return RowsVerdict(
            sent,
            self.read,
            missing,
            self._duplicated,
            self._out_of_order,
            self._altered,
            self._scattered_keys,
            self._offsets_not_rising,
            self._rows_by_partition,
        )


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
