"""Rendezvous hashing: which of the live brokers a partition without an owner is offered to first.

Every proxy makes the same choice from the same set, so first touches spread over the brokers and do not race.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def preferred(key: bytes, candidates: Iterable[int]) -> int | None:
    """The candidate with the highest weight for `key`; None where there is no candidate."""
    return max(candidates, key=lambda candidate: (_weight(key, candidate), candidate), default=None)


def _weight(key: bytes, candidate: int) -> bytes:
    return blake2b(key + b"\0" + str(candidate).encode(), digest_size=8).digest()
