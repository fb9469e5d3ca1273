"""Rendezvous hashing: of a set of candidates, the same choice everywhere, and only the share of one that leaves moves.

Brokers: which of the live ones a partition without an owner is offered to first, so that first touches spread and do
not race. Proxies: which of them clients are told leads a partition, or coordinates a group. Every proxy makes the same
choice from the same set, on every machine and with every version of Python: digests of bytes, read as big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b, shake_128

# So many partitions get their weights from one digest.
BLOCK = 1024
_WEIGHT_BYTES = 8


def preferred(key: bytes, candidates: Iterable[int]) -> int | None:
    """The candidate with the highest weight for `key`; None where there is no candidate."""
    return max(candidates, key=lambda candidate: (_weight(key, candidate), candidate), default=None)


def _weight(key: bytes, candidate: int) -> bytes:
    return blake2b(key + b"\0" + str(candidate).encode(), digest_size=8).digest()


def preferred_by_index(key: bytes, indexes: Sequence[int], candidates: Iterable[int]) -> list[int]:
    """The candidate with the highest weight for each (`key`, index), in the order of `indexes` (from 0 to 2**63 - 1).

    A digest of any length yields as many weights as are needed at once, some five times cheaper than one by one: an
    answer may name 10,000 partitions. ValueError where there is no candidate.
    """
    ordered = sorted(candidates)
    if not ordered:
        raise ValueError("a choice among nobody")
    if len(ordered) == 1:
        return ordered * len(indexes)
    highest: dict[int, int] = {}
    for index in indexes:
        block, place = divmod(index, BLOCK)
        if place >= highest.get(block, 0):
            highest[block] = place
    chosen = {block: _choose(key, block, place + 1, ordered) for block, place in highest.items()}
    return [chosen[index // BLOCK][index % BLOCK] for index in indexes]


def _choose(key: bytes, block: int, count: int, candidates: Sequence[int]) -> list[int]:
    """The choices of the first `count` indexes of a block; of equal weights the higher candidate's counts."""
    layout = struct.Struct(f">{count}Q")
    columns = [
        layout.unpack(shake_128(struct.pack(">iq", candidate, block) + key).digest(count * _WEIGHT_BYTES))
        for candidate in reversed(candidates)
    ]
    latest = len(candidates) - 1
    return [candidates[latest - weights.index(max(weights))] for weights in zip(*columns, strict=True)]
