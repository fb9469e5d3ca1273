"""A partition accepts writes by its fence: every case of a fence and a binding, and the rules for all cases."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.broker.writer_fence import UNBOUND, FenceComparison, KeptFence, WriterFence

OWNED, OPEN = True, False
BIND, RELEASE = False, True


@pytest.mark.parametrize(
    ("fence", "is_owned", "bound", "refusal"),
    [
        (0, OPEN, UNBOUND, None),
        (0, OPEN, 7, "this connection is bound to fence 7, which is not kept here yet"),
        (7, OWNED, 7, None),
        (7, OWNED, UNBOUND, "only its owner, with fence 7, may write, and this connection has no fence"),
        (7, OWNED, 6, "its owner writes behind fence 7, and this connection is bound to the older 6"),
        (7, OWNED, 8, "this connection is bound to fence 8, which is not kept here yet"),
        (7, OPEN, UNBOUND, None),
        (7, OPEN, 6, "it was released behind fence 7, and this connection is bound to the older 6"),
        (7, OPEN, 7, None),
        (7, OPEN, 8, "this connection is bound to fence 8, which is not kept here yet"),
    ],
)
def test_fence_rules_decide_who_may_write(fence: int, is_owned: bool, bound: int, refusal: str | None) -> None:
    assert WriterFence(KeptFence(fence, is_owned)).refusal(bound) == refusal


@pytest.mark.parametrize(
    ("fence", "is_owned", "asked", "is_released", "standing"),
    [
        (0, OPEN, 7, BIND, FenceComparison.HIGHER),
        (0, OPEN, 7, RELEASE, FenceComparison.HIGHER),
        (7, OWNED, 6, BIND, FenceComparison.LOWER),
        (7, OWNED, 7, BIND, FenceComparison.HOLDS),
        (7, OWNED, 8, BIND, FenceComparison.HIGHER),
        (7, OWNED, 6, RELEASE, FenceComparison.HOLDS),
        (7, OWNED, 7, RELEASE, FenceComparison.HOLDS),
        (7, OWNED, 8, RELEASE, FenceComparison.HIGHER),
        (7, OPEN, 6, BIND, FenceComparison.LOWER),
        # One transaction may end one grant and begin another.
        (7, OPEN, 7, BIND, FenceComparison.HIGHER),
        (7, OPEN, 8, BIND, FenceComparison.HIGHER),
        (7, OPEN, 7, RELEASE, FenceComparison.HOLDS),
        (7, OPEN, 8, RELEASE, FenceComparison.HIGHER),
    ],
)
def test_bind_and_release_give_expected_outcomes(
    fence: int, is_owned: bool, asked: int, is_released: bool, standing: FenceComparison
) -> None:
    assert WriterFence(KeptFence(fence, is_owned)).compare(asked, is_released=is_released) is standing


@pytest.mark.parametrize(
    ("kept", "after"),
    [
        (KeptFence(8, OPEN, 20), (8, OPEN, 20)),
        (KeptFence(7, OPEN, 20), (7, OPEN, 20)),
        # Another client has deleted the key or put an older fence: the known fence stays.
        (KeptFence(6, OPEN, 20), (7, OWNED, 20)),
        (KeptFence(), (7, OWNED, 0)),
    ],
)
def test_etcd_news_never_lowers_the_fence(kept: KeptFence, after: tuple[int, bool, int]) -> None:
    writers = WriterFence(KeptFence(7, OWNED, 10))
    writers.keep(kept)
    assert (writers.fence, writers.is_owned, writers.revision) == after


class Ask(NamedTuple):
    connection: int
    fence: int
    is_released: bool
    # Without an answer of etcd, the next request finds what was applied; or there is no next request.
    answered: bool
    new_leader: bool


ASKS = st.lists(st.builds(Ask, st.integers(0, 2), st.integers(1, 6), st.booleans(), st.booleans(), st.booleans()))


@given(ASKS)
def test_lower_fence_never_writes_behind_a_higher(asks: list[Ask]) -> None:
    """Three connections bind and release at random, and write after each message."""
    writers, kept = WriterFence(), KeptFence()
    bindings: dict[int, int] = {}
    written: list[int] = []
    for ask in asks:
        standing = writers.compare(ask.fence, is_released=ask.is_released)
        if standing is FenceComparison.HIGHER and writers.revision != kept.revision:
            writers.keep(kept)
            standing = writers.compare(ask.fence, is_released=ask.is_released)
        if standing is FenceComparison.HIGHER:
            kept = KeptFence(ask.fence, not ask.is_released, kept.revision + 1)
            if ask.answered:
                writers.keep(kept)
        if not ask.is_released and (standing is not FenceComparison.HIGHER or ask.answered):
            bindings[ask.connection] = max(ask.fence, bindings.get(ask.connection, UNBOUND))
        if ask.new_leader:
            writers = WriterFence(kept)
        for connection in range(3):
            bound = bindings.get(connection, UNBOUND)
            if writers.refusal(bound) is None and bound:
                written.append(bound)
            if writers.is_owned and bound != writers.fence:
                assert writers.refusal(bound) is not None
    assert written == sorted(written)
