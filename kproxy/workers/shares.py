"""Share the rates of quotas among workers by their use, and count connections over all of them, without I/O.

The supervisor has one Ledger. A rate is a limit of one client's account (kproxy.security.quotas), known by its key; it
is divided into PARTS for each worker. Every rate begins with the equal part PARTS at each worker. Workers report their
use each second. A rate enters the ledger when a worker needs more than its share. `round` then shares it again: workers
that need more get equal shares, each other worker gets what it uses and a little more, and none gets less than LEAST.

States of a worker
  ended      no process runs; its shares are free, except for LEAST of each rate, with which its next process begins
  starting   a process runs, and begins with the shares that `begin` returned; it gets no changes
  serving    it reports its use, and gets changes
  telling    as serving, but it has not confirmed that it has applied the last changes

Transitions
  ended    -> starting   `begin`
  starting -> serving    `serve`
  serving  -> telling    `round` returns changes for it
  telling  -> serving    `applied`, with the number of these changes
  any      -> ended      `end`: its process is known to have ended

States of a rate
  equal      not in the ledger: every worker has PARTS
  shared     in the ledger
  returning  no worker has used it for QUIET_ROUNDS: every worker gets PARTS again, and then it is equal

Invariants
1. `held` of a worker is at least what it may use, at every moment: an increase counts once it is sent, a decrease only
   once it is applied or the process has ended. The sum of a rate's `held` is at most PARTS times the number of workers.
2. So no loss, delay or repetition of a message lets the workers' shares exceed the rate in total. A silent worker keeps
   its shares, and gets nothing more after one message that it has not applied.
3. At most MOST_RATES are in the ledger, at most MOST_CHANGES in one message, and as many counts of connections. All
   other rates are equal.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kproxy.security.quotas import DIGEST_BYTES, PARTS

# The time between two reports of a worker, and between two rounds, in seconds.
ROUND_S: Final = 1.0
MOST_RATES: Final = 4_000
MOST_CHANGES: Final = 1_000
# A worker without use keeps this much of its equal part, so that a new client can begin.
LEAST: Final = PARTS // 20
# Smaller changes are not worth a message.
SMALLEST_CHANGE: Final = PARTS // 50
QUIET_ROUNDS: Final = 30


# The key of a rate is a digest and the kind, that of a principal or an address the digest alone.
RateKey = Annotated[bytes, Meta(min_length=DIGEST_BYTES + 1, max_length=DIGEST_BYTES + 1)]
CountKey = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
Counts = Annotated[dict[CountKey, Amount], Meta(max_length=MOST_CHANGES)]


class Shares(msgspec.Struct, frozen=True, tag=True):
    """The message of one round to one worker: its changed shares, and the connections that other workers have."""

    number: int
    parts: Annotated[dict[RateKey, Annotated[int, Meta(ge=1, le=PARTS << 20)]], Meta(max_length=MOST_CHANGES)]
    elsewhere: Counts


@dataclass(slots=True)
class _Worker:
    runs: bool = False
    serves: bool = False
    number: int = 0
    # The shares of the last changes, until they have been applied.
    sent: dict[bytes, int] | None = None
    uses: dict[bytes, tuple[int, bool]] = field(default_factory=dict)
    connections: dict[bytes, int] = field(default_factory=dict)
    # The counts of other workers that were last sent to this one.
    elsewhere: dict[bytes, int] = field(default_factory=dict)

    @property
    def takes(self) -> bool:
        """Whether changes may be sent to the worker."""
        return self.serves and self.sent is None


@dataclass(slots=True)
class _Rate:
    held: list[int]
    quiet: int = 0


class Ledger:
    """The shares of all workers, which are numbered from 0; the module's docstring explains it."""

    def __init__(self, workers: int) -> None:
        self._workers = [_Worker() for _ in range(workers)]
        self._rates: dict[bytes, _Rate] = {}

    def begin(self, worker: int) -> dict[bytes, int]:
        """Note the start of a process; return the shares that it begins with, unless they are PARTS."""
        self._workers[worker] = _Worker(runs=True)
        return {key: rate.held[worker] for key, rate in self._rates.items() if rate.held[worker] != PARTS}

    def serve(self, worker: int) -> None:
        """Note that the process serves."""
        self._workers[worker].serves = self._workers[worker].runs

    def end(self, worker: int) -> None:
        """Note that the process has ended."""
        self._workers[worker] = _Worker()
        for rate in self._rates.values():
            rate.held[worker] = min(rate.held[worker], LEAST)

    def applied(self, worker: int, number: int) -> None:
        """Note that a worker uses the shares of the changes with this number."""
        state = self._workers[worker]
        if state.sent is None or number != state.number:
            return
        for key, parts in state.sent.items():
            self._rates[key].held[worker] = parts
        state.sent = None

    def report(self, worker: int, uses: Sequence[tuple[bytes, int, bool]], connections: Mapping[bytes, int]) -> None:
        """Note the use of a worker in the last second, and its connections."""
        state = self._workers[worker]
        if not state.runs:
            return
        state.uses = {key: (used, is_short) for key, used, is_short in uses}
        state.connections = dict(connections)
        for key, _, is_short in uses:
            if is_short and key not in self._rates and len(self._rates) < MOST_RATES:
                self._rates[key] = _Rate([PARTS] * len(self._workers))

    def round(self) -> dict[int, Shares]:
        """Share the rates again; return the changes to be sent, by worker."""
        parts: list[dict[bytes, int]] = [{} for _ in self._workers]
        for key, rate in list(self._rates.items()):
            self._share(key, rate, parts)
            if rate.quiet >= QUIET_ROUNDS and self._is_equal(key, rate, parts):
                del self._rates[key]
        totals = Counter[bytes]()
        for state in self._workers:
            totals.update(state.connections)
        changes = {}
        for worker, state in enumerate(self._workers):
            if not state.takes:
                continue
            elsewhere = _elsewhere(totals, state.connections)
            if parts[worker] or elsewhere != state.elsewhere:
                state.number += 1
                state.sent, state.elsewhere = parts[worker], elsewhere
                changes[worker] = Shares(state.number, parts[worker], elsewhere)
        return changes

    def _share(self, key: bytes, rate: _Rate, parts: list[dict[bytes, int]]) -> None:
        uses = [state.uses.get(key, (0, False)) for state in self._workers]
        rate.quiet = 0 if any(key in state.uses for state in self._workers) else rate.quiet + 1
        if rate.quiet >= QUIET_ROUNDS:
            aims = [PARTS] * len(uses)
        elif any(is_short for _, is_short in uses):
            aims = aims_of(uses, rate.held)
        else:
            return
        free = PARTS * len(uses) - sum(rate.held)
        for worker, (state, aim) in enumerate(zip(self._workers, aims, strict=True)):
            surplus = rate.held[worker] - aim
            if surplus <= 0 or (surplus < SMALLEST_CHANGE and aim not in (PARTS, LEAST)):
                continue
            if not state.runs:
                rate.held[worker] = aim
                free += surplus
            elif state.takes and len(parts[worker]) < MOST_CHANGES:
                parts[worker][key] = aim
        # The worker that holds least comes first.
        for worker in sorted(range(len(uses)), key=lambda worker: rate.held[worker]):
            state, lack = self._workers[worker], aims[worker] - rate.held[worker]
            given = min(lack, free)
            if given <= 0 or (given < SMALLEST_CHANGE and aims[worker] != PARTS):
                continue
            if state.runs:
                if not state.takes or len(parts[worker]) >= MOST_CHANGES:
                    continue
                parts[worker][key] = rate.held[worker] + given
            rate.held[worker] += given
            free -= given

    def _is_equal(self, key: bytes, rate: _Rate, parts: list[dict[bytes, int]]) -> bool:
        """Whether every worker has PARTS, and no change is on its way or about to be sent."""
        return all(held == PARTS for held in rate.held) and not any(
            key in sent or key in (state.sent or ()) for sent, state in zip(parts, self._workers, strict=True)
        )


def aims_of(uses: Sequence[tuple[int, bool]], held: Sequence[int]) -> list[int]:
    """Return the shares of workers by their use and need for more, if at least one needs more."""
    whole = PARTS * len(uses)
    # Unused shares shrink over two or three rounds, so that a client keeps its share in a short pause.
    wants = [
        whole if is_short else max(LEAST, used * 5 // 4, of_worker // 4)
        for (used, is_short), of_worker in zip(uses, held, strict=True)
    ]
    aims, left = [0] * len(wants), whole
    for before, worker in enumerate(sorted(range(len(wants)), key=lambda worker: wants[worker])):
        aims[worker] = min(wants[worker], left // (len(wants) - before))
        left -= aims[worker]
    return aims


def _elsewhere(totals: Mapping[bytes, int], own: Mapping[bytes, int]) -> dict[bytes, int]:
    """Count the connections at other workers by key, of the keys with the most."""
    others = {key: total - own.get(key, 0) for key, total in totals.items() if total > own.get(key, 0)}
    if len(others) > MOST_CHANGES:
        return dict(heapq.nlargest(MOST_CHANGES, others.items(), key=lambda each: each[1]))
    return others
