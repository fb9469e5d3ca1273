"""The compiled plain path does in every simulated world what the Python one does.

The bytes that brokers and clients get, the trail's rows and the counters are the same, and so is every rule. Seeds are
new in each run; KPROXY_WORLDS_SEED repeats one.
"""

from __future__ import annotations

import os
import random
import secrets
from functools import partial
from typing import Any

import pytest

from kproxy.plain import compiled
from kproxy.proxy import client_session
from kproxy.proxy.requests import plain_path
from tests.simulation.setting import draw
from tests.simulation.world import Outcome, run_world

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")

WORLDS = int(os.environ.get("KPROXY_WORLDS", "24"))
SEED = int(os.environ.get("KPROXY_WORLDS_SEED", "0")) or secrets.randbelow(1 << 40)


class Gate:
    """A client's compiled path that takes only some of the requests that it could take."""

    taken = 0
    refused = 0

    def __init__(self, path: Any, seed: int) -> None:
        self._path = path
        self._draw = random.Random(seed)

    def take(self, *request: Any) -> bool:
        if self._draw.random() < 0.5:
            Gate.refused += 1
            return False
        taken: bool = self._path.take(*request)
        Gate.taken += taken
        return taken


def gated_path(seed: int, *client: Any) -> Gate:
    return Gate(plain_path(*client), seed)


def run_by(monkeypatch: pytest.MonkeyPatch, path: Any, seed: int, *, claims: bool = False) -> Outcome:
    with monkeypatch.context() as patched:
        patched.setattr(client_session, "plain_path", path)
        return run_world(seed, setting=draw(seed, claims=True) if claims else None)


@pytest.mark.parametrize("claims", [False, True])
def test_worlds_are_the_same_compiled_and_in_python(monkeypatch: pytest.MonkeyPatch, claims: bool) -> None:
    for seed in range(SEED, SEED + (WORLDS // 6 if claims else WORLDS)):
        outcomes = [run_by(monkeypatch, path, seed, claims=claims) for path in (plain_path, lambda *_: None)]
        assert outcomes[0].digest == outcomes[1].digest, f"KPROXY_WORLDS_SEED={seed}"


def test_requests_may_go_either_way_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way each request goes, order, answers, trail and counters are the same."""
    Gate.taken = Gate.refused = 0
    for seed in range(SEED, SEED + WORLDS):
        gated = run_by(monkeypatch, partial(gated_path, seed), seed)
        assert not gated.found, f"KPROXY_WORLDS_SEED={seed}: {gated.found[:3]}"
        assert gated.digest == run_by(monkeypatch, lambda *_: None, seed).digest, f"KPROXY_WORLDS_SEED={seed}"
    assert min(Gate.taken, Gate.refused) > 10 * WORLDS
