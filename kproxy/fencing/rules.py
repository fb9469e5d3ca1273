"""What a claim comes to, given who owns what: the table of the Kafka wiki's "Single Reader/Writer", as pure decisions.

A claim of a whole group stands beside the claims of its resources and conflicts with each of them. Of two that conflict
the later one, by fence, is in force; `in_force` says which claims are. There is one decision for each resource that is
asked for, and nothing here knows how it is carried out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from codec.error_codes import FENCED_INSTANCE_ID, INVALID_REQUEST, NONE
from codec.own import NO_GENERATION

FIRST_GENERATION: Final = 1
RESET: Final = 0


class Owner(NamedTuple):
    """A client's connection: a number within the process `proxy`, which is named by its lease in etcd."""

    proxy: str
    connection: int


class Claim(NamedTuple):
    """What somebody owns; `fence` is the revision of the put that granted it."""

    owner: Owner
    generation: int
    fence: int


class Decision(NamedTuple):
    """`error_code` not NONE: nothing changes. `is_new` False: the asker has it already, with this generation."""

    error_code: int
    generation: int = NO_GENERATION
    is_new: bool = False


_FENCED = Decision(FENCED_INSTANCE_ID)


def in_force(claim: Claim | None, whole: Claim | None) -> Claim | None:
    """A resource's claim, where no later one of the whole group by another connection has taken it away."""
    if claim is None or whole is None or claim.owner == whole.owner or claim.fence > whole.fence:
        return claim
    return None


def decide(asker: Owner, generation: int, claim: Claim | None, whole: Claim | None) -> Decision:
    """What becomes of asking for one resource with `generation`, where `claim` and `whole` stand."""
    if generation < 0:
        return Decision(INVALID_REQUEST)
    claim = in_force(claim, whole)
    if claim is not None and whole is not None and claim.owner != whole.owner:
        # It was taken out of the whole, which its owner has lost.
        whole = None
    standing = [each for each in (claim, whole) if each is not None]
    if generation == RESET or not standing:
        return Decision(NONE, FIRST_GENERATION, is_new=True)
    highest = max(each.generation for each in standing)
    if highest > generation:
        return _FENCED
    is_same = highest == generation and standing[0].owner == asker
    return Decision(NONE, generation, is_new=not is_same)


def decide_whole(asker: Owner, claims: Iterable[Claim], whole: Claim | None) -> Decision:
    """What becomes of asking for a whole group, where `claims` of its resources and `whole` stand.

    It is granted, with the highest generation there is among them.
    """
    standing = [claim for each in claims if (claim := in_force(each, whole)) is not None]
    if whole is not None and all(claim.owner == whole.owner for claim in standing):
        standing.append(whole)
    generation = max((claim.generation for claim in standing), default=FIRST_GENERATION)
    is_held = (
        whole is not None
        and whole.owner == asker
        and whole.generation == generation
        and all(claim.owner == asker for claim in standing)
    )
    return Decision(NONE, generation, is_new=not is_held)
