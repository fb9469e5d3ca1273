"""The outcome of a claim: the rows of the Own API's table, and the rows that involve a whole group."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from kproxy.claims.rules import Claim, Decision, Owner, decide, decide_whole
from kproxy_codec.error_codes import FENCED_INSTANCE_ID, INVALID_REQUEST, NONE

A, B, C = (Owner("p", number) for number in (1, 2, 3))
REFUSED, INVALID = Decision(FENCED_INSTANCE_ID), Decision(INVALID_REQUEST)
MAX = (1 << 63) - 1


def granted(generation: int) -> Decision:
    return Decision(NONE, generation, is_new=True)


def held(generation: int) -> Decision:
    return Decision(NONE, generation, is_new=False)


class Row(NamedTuple):
    """The outcome if A requests a resource."""

    what: str
    generation: int
    claim: Claim | None
    whole: Claim | None
    decision: Decision


ROWS = [
    Row("nobody owns it", 1, None, None, granted(1)),
    Row("nobody owns it, a higher generation is asked for", 9, None, None, granted(1)),
    Row("nobody owns it, generation 0", 0, None, None, granted(1)),
    Row("another has a higher generation", 4, Claim(B, 5, 10), None, REFUSED),
    Row("another has the same generation", 5, Claim(B, 5, 10), None, granted(5)),
    Row("another has a lower generation", 6, Claim(B, 5, 10), None, granted(6)),
    Row("the highest there is", MAX, Claim(B, 5, 10), None, granted(MAX)),
    Row("oneself, the same", 5, Claim(A, 5, 10), None, held(5)),
    Row("oneself, higher", 6, Claim(A, 5, 10), None, granted(6)),
    Row("oneself, lower", 4, Claim(A, 5, 10), None, REFUSED),
    Row("generation 0 takes it from another", 0, Claim(B, 5, 10), None, granted(1)),
    Row("generation 0 resets one's own", 0, Claim(A, 5, 10), None, granted(1)),
    Row("generation 0 of what is 1 is a claim of its own", 0, Claim(A, 1, 10), None, granted(1)),
    Row("negative, nobody owns it", -1, None, None, INVALID),
    Row("negative, another owns it", -1, Claim(B, 5, 10), None, INVALID),
    Row("negative, one's own", -(1 << 63), Claim(A, 5, 10), None, INVALID),
    Row("another has the whole, higher", 4, None, Claim(B, 5, 10), REFUSED),
    Row("another has the whole, the same", 5, None, Claim(B, 5, 10), granted(5)),
    Row("another has the whole, lower", 6, None, Claim(B, 5, 10), granted(6)),
    Row("another has the whole, generation 0", 0, None, Claim(B, 5, 10), granted(1)),
    Row("one has it by the whole", 5, None, Claim(A, 5, 10), held(5)),
    Row("one has it by the whole, lower", 4, None, Claim(A, 5, 10), REFUSED),
    Row("one has it by the whole, higher", 6, None, Claim(A, 5, 10), granted(6)),
    Row("the whole was taken after it", 5, Claim(A, 4, 10), Claim(B, 5, 20), granted(5)),
    Row("the whole was taken after it, higher", 4, Claim(A, 4, 10), Claim(B, 5, 20), REFUSED),
    Row("it was taken out of the whole", 4, Claim(B, 3, 20), Claim(C, 2, 10), granted(4)),
    Row("it was taken out of the whole by 0", 2, Claim(B, 1, 20), Claim(C, 9, 10), granted(2)),
    Row("it was taken out of one's own whole", 4, Claim(B, 5, 20), Claim(A, 4, 10), REFUSED),
    Row("one's own, before the whole", 4, Claim(A, 4, 10), Claim(A, 5, 20), REFUSED),
    Row("one's own, as the whole", 5, Claim(A, 4, 10), Claim(A, 5, 20), held(5)),
    Row("raised within one's own whole", 7, Claim(A, 7, 20), Claim(A, 5, 10), held(7)),
    Row("reset within one's own whole, the same", 1, Claim(A, 1, 20), Claim(A, 5, 10), held(1)),
    Row("reset within another's whole", 2, Claim(B, 1, 20), Claim(B, 5, 10), granted(2)),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_resource_claim_gives_expected_outcome(row: Row) -> None:
    assert decide(A, row.generation, row.claim, row.whole) == row.decision


class WholeRow(NamedTuple):
    """The outcome if A requests a whole group."""

    what: str
    claims: list[Claim]
    whole: Claim | None
    decision: Decision


WHOLE_ROWS = [
    WholeRow("nobody owns anything", [], None, granted(1)),
    WholeRow("another has the whole", [], Claim(B, 5, 10), granted(5)),
    WholeRow("oneself has the whole", [], Claim(A, 5, 10), held(5)),
    WholeRow("others have resources", [Claim(B, 5, 10), Claim(C, 7, 11)], None, granted(7)),
    WholeRow("oneself has resources", [Claim(A, 5, 10)], None, granted(5)),
    WholeRow("oneself raised a resource", [Claim(A, 6, 20)], Claim(A, 5, 10), granted(6)),
    WholeRow("oneself reset a resource", [Claim(A, 1, 20)], Claim(A, 5, 10), held(5)),
    WholeRow("oneself has resources from before", [Claim(A, 4, 5)], Claim(A, 5, 10), held(5)),
    WholeRow("a resource was taken out of another's whole", [Claim(C, 3, 20)], Claim(B, 9, 10), granted(3)),
    WholeRow("a resource was taken out of one's own whole", [Claim(C, 9, 20)], Claim(A, 9, 10), granted(9)),
    WholeRow("others had resources before another's whole", [Claim(C, 9, 5)], Claim(B, 9, 10), granted(9)),
    WholeRow("others had resources before one's own whole", [Claim(C, 9, 5)], Claim(A, 9, 10), held(9)),
]


@pytest.mark.parametrize("row", WHOLE_ROWS, ids=lambda row: row.what)
def test_group_claim_gives_expected_outcome(row: WholeRow) -> None:
    assert decide_whole(A, row.claims, row.whole) == row.decision
