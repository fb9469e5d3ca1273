"""Decide whether a claim succeeds, by the table of the Kafka wiki's "Single Reader/Writer", in pure functions.

A claim of a whole group exists beside the claims of its resources and conflicts with each of them. Of two claims that
conflict, the one with the higher fence, the later one, is in force. `in_force` drops claims that are not in force, and
`latest` returns the claim that counts for a resource, also of two claims of one connection: a connection that has a
whole group and resets one resource has that resource with generation 1 from then on. Each requested resource gets one
decision; `acquire` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol, TypeVar

from kproxy_codec.error_codes import FENCED_INSTANCE_ID, INVALID_REQUEST, NONE
from kproxy_codec.own import NO_GENERATION

FIRST_GENERATION: Final = 1
RESET: Final = 0


class Owner(NamedTuple):
    """A claimant: a client's connection, by its number within the process `proxy`, which is named by its lease."""

    proxy: str
    connection: int


class Claim(NamedTuple):
    """A claim in etcd; `fence` is the revision of the put that made it."""

    owner: Owner
    generation: int
    fence: int


class Decision(NamedTuple):
    """With an `error_code` nothing changes. `is_new` False: the claimant already has this claim and generation."""

    error_code: int
    generation: int = NO_GENERATION
    is_new: bool = False


_FENCED = Decision(FENCED_INSTANCE_ID)


def in_force(claim: Claim | None, whole: Claim | None) -> Claim | None:
    """Return a resource's claim, unless another connection has claimed the whole group later."""
    if claim is None or whole is None or claim.owner == whole.owner or claim.fence > whole.fence:
        return claim
    return None


class _Fenced(Protocol):
    @property
    def fence(self) -> int: ...


_FencedT = TypeVar("_FencedT", bound=_Fenced)


def latest(claim: _FencedT | None, whole: _FencedT | None) -> _FencedT | None:
    """Return the later of a resource's own claim and the whole group's, which counts for the resource."""
    if claim is None or whole is None:
        return claim or whole
    return claim if claim.fence > whole.fence else whole


def decide(asker: Owner, generation: int, claim: Claim | None, whole: Claim | None) -> Decision:
    """Decide a request for one resource with `generation`, if etcd has `claim` and `whole`."""
    if generation < 0:
        return Decision(INVALID_REQUEST)
    standing = latest(claim, whole)
    if generation == RESET or standing is None:
        return Decision(NONE, FIRST_GENERATION, is_new=True)
    if standing.generation > generation:
        return _FENCED
    return Decision(NONE, generation, is_new=standing.owner != asker or standing.generation != generation)


def decide_whole(asker: Owner, claims: Iterable[Claim], whole: Claim | None) -> Decision:
    """Decide a request for a whole group, if etcd has `claims` of its resources and `whole`.

    The group is granted, with the highest generation among these claims.
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
