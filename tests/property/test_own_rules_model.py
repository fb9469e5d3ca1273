"""Random claims of several connections have the same outcomes as in a model without keys and fences.

The rules' decisions are carried out as proxies do it: a grant puts one key, at its own revision. A connection that
loses a claim by the grant is severed. Its keys are deleted at once, or some time later and one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kproxy.claims.rules import Claim, Decision, Owner, decide, decide_whole, in_force, latest
from kproxy_codec.error_codes import FENCED_INSTANCE_ID, INVALID_REQUEST, NONE
from kproxy_codec.own import WHOLE_GROUP
from tests.support.rules import examples

RESOURCES = ("r/0", "r/1", "x")
# The number of connections; a new one replaces each severed one.
CONNECTED = 3


class Had(NamedTuple):
    owner: Owner
    generation: int


class Claims(RuleBasedStateMachine):
    """`keys`: the keys in etcd. `has` and `has_rest`: the model's owners of resources, and of the rest of a group."""

    def __init__(self) -> None:
        super().__init__()
        self.revision = 0
        self.keys: dict[str, Claim] = {}
        self.has: dict[str, Had] = {}
        self.has_rest: Had | None = None
        self.connected = [Owner("p", number) for number in range(CONNECTED)]
        self.number = CONNECTED

    @initialize(are_deleted_at_once=st.booleans())
    def begin(self, are_deleted_at_once: bool) -> None:
        self.are_deleted_at_once = are_deleted_at_once

    # Steps

    @rule(who=st.integers(0, CONNECTED - 1), resource=st.sampled_from(RESOURCES), generation=st.integers(-1, 4))
    def claim(self, who: int, resource: str, generation: int) -> None:
        asker, had = self.connected[who], self.model(resource)
        decision = decide(asker, generation, self.keys.get(resource), self.keys.get(WHOLE_GROUP))
        if generation < 0:
            assert decision == Decision(INVALID_REQUEST)
        elif generation == 0:
            assert decision == Decision(NONE, 1, is_new=True)
        elif self.are_deleted_at_once or had is not None:
            assert decision == _expected(asker, generation, had)
        self.carry_out(asker, resource, decision)

    @rule(who=st.integers(0, CONNECTED - 1))
    def claim_whole(self, who: int) -> None:
        asker = self.connected[who]
        claims = [claim for resource, claim in self.keys.items() if resource != WHOLE_GROUP]
        decision = decide_whole(asker, claims, self.keys.get(WHOLE_GROUP))
        had = [each for each in (self.has_rest, *self.has.values()) if each is not None]
        highest = max((each.generation for each in had), default=1)
        assert decision.error_code == NONE
        assert decision.generation >= highest
        if self.are_deleted_at_once:
            assert decision.generation == highest
        if not decision.is_new:
            assert self.has_rest == (asker, decision.generation)
            assert {each.owner for each in had} == {asker}
        self.carry_out(asker, WHOLE_GROUP, decision)

    @rule(who=st.integers(0, CONNECTED - 1))
    def end(self, who: int) -> None:
        self.sever({self.connected[who]})

    @precondition(lambda self: self.lingering())
    @rule(which=st.integers(0, 9))
    def delete(self, which: int) -> None:
        lingering = self.lingering()
        del self.keys[lingering[which % len(lingering)]]
        self.revision += 1

    def carry_out(self, owner: Owner, resource: str, decision: Decision) -> None:
        if not decision.is_new:
            return
        touched = RESOURCES if resource == WHOLE_GROUP else (resource,)
        losers = {had.owner for each in touched if (had := self.model(each)) is not None} - {owner}
        if resource == WHOLE_GROUP and self.has_rest is not None:
            losers |= {self.has_rest.owner} - {owner}
        self.revision += 1
        self.keys[resource] = Claim(owner, decision.generation, self.revision)
        self.sever(losers)
        if resource == WHOLE_GROUP:
            self.has, self.has_rest = {}, Had(owner, decision.generation)
        else:
            self.has[resource] = Had(owner, decision.generation)

    def sever(self, owners: set[Owner]) -> None:
        self.has = {resource: had for resource, had in self.has.items() if had.owner not in owners}
        if self.has_rest is not None and self.has_rest.owner in owners:
            self.has_rest = None
        for owner in owners:
            self.connected[self.connected.index(owner)] = Owner("p", self.number)
            self.number += 1
        if self.are_deleted_at_once:
            while self.lingering():
                self.delete(0)

    def lingering(self) -> list[str]:
        """The keys of severed connections."""
        return [resource for resource, claim in self.keys.items() if claim.owner not in self.connected]

    def model(self, resource: str) -> Had | None:
        return self.has.get(resource, self.has_rest)

    # What always holds

    @invariant()
    def one_at_most_has_a_resource(self) -> None:
        for resource in RESOURCES:
            claim, whole, had = self.keys.get(resource), self.keys.get(WHOLE_GROUP), self.model(resource)
            counts = latest(claim, whole)
            # Among the connected clients, only the true owner is shown as owner; a severed one may still be shown.
            connected = {each for each in (counts, in_force(claim, whole)) if each and each.owner in self.connected}
            assert {each.owner for each in connected} == ({had.owner} if had is not None else set())
            if had is not None:
                assert counts is not None
                assert (counts.owner, counts.generation) == had
            elif self.are_deleted_at_once:
                assert counts is None


def _expected(asker: Owner, generation: int, had: Had | None) -> Decision:
    if had is None:
        return Decision(NONE, 1, is_new=True)
    if generation < had.generation:
        return Decision(FENCED_INSTANCE_ID)
    return Decision(NONE, generation, is_new=had != (asker, generation))


TestClaims = Claims.TestCase
TestClaims.settings = settings(max_examples=examples(150), stateful_step_count=30)
