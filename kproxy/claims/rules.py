"""What a claim comes to, given who owns what: the table of the Kafka wiki's "Single Reader/Writer", as pure decisions.

A claim of a whole group stands beside the claims of its resources and conflicts with each of them. Of two that conflict
the later one, by fence, is in force; `in_force` says which claims are, `latest` which of the two counts for a resource.
That is so for two of one connection as well: who has a whole group and resets one resource has that one with generation
1 from then on. There is one decision for each resource that is asked for, and nothing here knows how it is carried out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kproxy_codec.error_codes import FENCED_INSTANCE_ID, INVALID_REQUEST, NONE
from kproxy_codec.own import NO_GENERATION

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


def latest(claim: Claim | None, whole: Claim | None) -> Claim | None:
    """What counts for a resource of the claim of its own and that of the whole group: who has it, how, since when."""
    if claim is None or whole is None:
        return claim or whole
    return claim if claim.fence > whole.fence else whole


def decide(asker: Owner, generation: int, claim: Claim | None, whole: Claim | None) -> Decision:
    """What becomes of asking for one resource with `generation`, where `claim` and `whole` stand."""
    if generation < 0:
        return Decision(INVALID_REQUEST)
    standing = latest(claim, whole)
    if generation == RESET or standing is None:
        return Decision(NONE, FIRST_GENERATION, is_new=True)
    if standing.generation > generation:
        return _FENCED
    return Decision(NONE, generation, is_new=standing.owner != asker or standing.generation != generation)


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
