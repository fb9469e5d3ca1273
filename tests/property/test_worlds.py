"""The proxy loses, doubles and reorders nothing in simulated worlds with faults of brokers, clients and the network.

Every request is answered once, in time. In some worlds clients claim partitions, and write to none that they have lost.

`KPROXY_WORLDS` is the number of worlds, and `KPROXY_WORLDS_SEED` the first one's seed; without it each run has new
seeds. `make worlds WORLDS=10000` runs any number, on all cores.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import pytest

from kproxy.proxy.broker_connection import Upstream
from tests.simulation.__main__ import Summary
from tests.simulation.setting import draw
from tests.simulation.world import run_world

WORLDS = int(os.environ.get("KPROXY_WORLDS", "80" if os.environ.get("KPROXY_TEST_ALL") == "1" else "20"))
SEED = int(os.environ.get("KPROXY_WORLDS_SEED", "0")) or secrets.randbelow(1 << 40)
TESTS = 4


@pytest.mark.parametrize("part", range(TESTS))
def test_worlds_lose_duplicate_reorder_or_delay_nothing(part: int) -> None:
    summary = Summary()
    for seed in range(SEED + part, SEED + WORLDS, TESTS):
        summary.add(run_world(seed))
    assert not summary.broken, "\n".join(
        [f"KPROXY_WORLDS_SEED={summary.broken[0].seed} KPROXY_WORLDS=1", str(summary), *summary.complaints()]
    )
    if summary.worlds >= 10:
        assert summary.amid >= summary.worlds / 2, f"too little happens: {summary}"
        assert summary.requests >= 200 * summary.worlds


def test_claimed_partitions_are_written_only_by_owner() -> None:
    summary = Summary()
    for seed in range(SEED, SEED + WORLDS // TESTS):
        summary.add(run_world(seed, setting=draw(seed, claims=True)))
    assert not summary.broken, "\n".join([str(summary), *summary.complaints()])
    # Fenced batches are rare: one world in eight or so has some.
    seldom = ("suspend", "fenced") if summary.worlds >= 200 else ()
    if summary.worlds >= 10:
        for what in ("claim: 0", "severed", *seldom):
            assert summary.happened[what], f"too little happens: {summary.happened}"


def test_slow_rereads_refuse_no_batch() -> None:
    summary = Summary()
    for seed in range(SEED, SEED + WORLDS // TESTS):
        summary.add(run_world(seed, setting=draw(seed, slow_rereads=True)))
    assert not summary.broken, "\n".join([f"KPROXY_WORLDS_SEED={SEED}", str(summary), *summary.complaints()])
    assert summary.happened["move"] >= summary.worlds


@pytest.mark.parametrize("claims", [False, True])
def test_world_is_the_same_each_time(claims: bool) -> None:
    first, second = (run_world(SEED, setting=draw(SEED, claims=claims)) for _ in range(2))
    assert first.digest == second.digest, f"KPROXY_WORLDS_SEED={SEED}"


@pytest.mark.parametrize("keeper", ["lost", "without a client"])
def test_world_fails_without_owners_of_connections(keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Upstream.__init__

    def begin_without_owner(upstream: Upstream, *values: Any, **named: Any) -> None:
        begin(upstream, *values, **named)
        if keeper == "lost":
            upstream._keeper = None
        elif upstream._keeper is not None:
            upstream._keeper._client = None  # type: ignore[attr-defined]

    monkeypatch.setattr(Upstream, "__init__", begin_without_owner)
    found = run_world(SEED).found
    assert any("belongs to no client session" in each or "unknown owner" in each for each in found)
