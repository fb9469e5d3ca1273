"""The compiled plain path behaves like the core in every simulated world.

The bytes that brokers and clients get, the trail's rows and the counters are the same, and so is every rule. Seeds are
new in each run; KPROXY_WORLDS_SEED repeats one.
"""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from kproxy.plain import compiled
from kproxy.proxy import client_session
from kproxy.proxy.partitioned_requests import plain_path
from tests.simulation.digests import run

pytestmark = pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")

# Each run has new worlds, so rare faults are found over many runs, and by `make test-all`.
WORLDS = int(os.environ.get("KPROXY_WORLDS", "24" if os.environ.get("KPROXY_TEST_ALL") == "1" else "6"))
SEED = int(os.environ.get("KPROXY_WORLDS_SEED", "0")) or secrets.randbelow(1 << 40)


class Gate:
    """Refuses half of the requests that a client's compiled path could take."""

    taken = 0
    refused = 0

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def __call__(self) -> bool:
        takes = self._draw.random() < 0.5
        Gate.taken += takes
        Gate.refused += not takes
        return takes


def gated_path(seed: int, *client: Any) -> Any:
    path: Any = plain_path(*client)
    path.may_take = Gate(seed)
    return path


def digests_in_python(seed: int, worlds: int, *, claims: bool = False) -> list[str]:
    """The worlds' digests in a process that runs nothing compiled: all requests go through the core."""
    command = [sys.executable, "-m", "tests.simulation.digests", str(seed), str(worlds), *(["claims"] * claims)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "KPROXY_PLAIN": "off"}
    )
    kind, *digests = done.stdout.splitlines()
    assert (kind, len(digests)) == ("python", worlds)
    return digests


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The digests in Python of the worlds without claims."""
    return digests_in_python(SEED, WORLDS)


def test_worlds_are_the_same_compiled_and_in_python(expected: list[str]) -> None:
    for seed, digest in enumerate(expected, SEED):
        assert str(run(seed, claims=False).digest) == digest, f"KPROXY_WORLDS_SEED={seed}"


def test_worlds_with_claims_match_compiled_and_python() -> None:
    for seed, digest in enumerate(digests_in_python(SEED, max(2, WORLDS // 6), claims=True), SEED):
        assert str(run(seed, claims=True).digest) == digest, f"KPROXY_WORLDS_SEED={seed}"


def test_requests_may_take_either_path_anytime(expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Order, answers, trail and counters are the same, whichever path each request takes."""
    Gate.taken = Gate.refused = 0
    for seed, digest in enumerate(expected, SEED):
        for path in (partial(gated_path, seed), lambda *_: None):
            with monkeypatch.context() as patched:
                patched.setattr(client_session, "plain_path", path)
                outcome = run(seed, claims=False)
            assert not outcome.found, f"KPROXY_WORLDS_SEED={seed}: {outcome.found[:3]}"
            assert str(outcome.digest) == digest, f"KPROXY_WORLDS_SEED={seed}"
    assert min(Gate.taken, Gate.refused) > 10 * WORLDS
