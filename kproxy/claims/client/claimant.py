"""How a client comes to own something and learns that it does not any more, whichever library carries its requests.

A claim stands on a connection, so it is asked for on the very one that the library produces on (or fetches on): for
`topic/partition` the one to the node that Metadata names as the partition's leader, which after the claim is the
proxy that holds it; for any other resource, and for a whole group, one of them.

States and transitions:
    CLAIMING    -> OWNED        all of it is granted, with the generation asked for, and nothing has moved meanwhile
    OWNED       -> RECLAIMING   a connection with claims has closed, and `reclaim` says to claim them again
    RECLAIMING  -> OWNED        they are granted again
    OWNED, RECLAIMING -> SEVERED    a connection with claims has closed; or claiming again has failed
    any         -> LEFT         the claims are given back

Invariants:
    1. SEVERED is final, and whole: of several resources none is owned any more once one has been lost.
    2. `is_valid` is true only while OWNED and every connection with claims is open, as far as this process can know.
    3. SEVERED and RECLAIMING stand before anybody who waits on the lost connection hears of its end, and before the
       library can send again: produce and fetch requests wait while RECLAIMING and fail once SEVERED.
    4. Nobody keeps a part: whoever is refused one of several resources gives all of them back before asking again.
    5. In LEFT every connection on which something was asked for is closed.

A first claim is granted with generation 1 whatever was asked for (the Kafka wiki's "Single Reader/Writer"): it is
raised to the generation asked for, on the same connection, before it counts as owned.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic

from kproxy.claims.client.errors import ConnectionLost, OwnError, OwnRefused, Severed
from kproxy.claims.client.plan import NO_LEADER, ClaimPlan, ConnectionT, Driver, Held
from kproxy.claims.rules import FIRST_GENERATION, RESET
from kproxy_codec.error_codes import COORDINATOR_NOT_AVAILABLE, FENCED_INSTANCE_ID, NONE, REQUEST_TIMED_OUT
from kproxy_codec.own import WHOLE_GROUP, OwnedResource, OwnRequest, OwnResource, resource_partition

_ASK_AGAIN_S = 0.1
_TRY_AGAIN_S = 0.25
# Of `check_every_s`: how long an answer may take when nothing else is under way.
_PING_PATIENCE = 2
_LOOKS_AT_LEADERS = 3
_RETRIABLE = (REQUEST_TIMED_OUT, COORDINATOR_NOT_AVAILABLE)

log = logging.getLogger(__name__)


class State(enum.Enum):
    CLAIMING = enum.auto()
    OWNED = enum.auto()
    RECLAIMING = enum.auto()
    SEVERED = enum.auto()
    LEFT = enum.auto()


def _distinct(connections: Iterable[ConnectionT]) -> list[ConnectionT]:
    return list({id(each): each for each in connections}.values())


class _Again(Exception):
    """Not now; `problem` is what to raise where there is no time left."""

    def __init__(self, problem: OwnError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Claimant(Generic[ConnectionT]):
    """One `own(...)`. `on_severed` is called once, where the library tells of the connection's end."""

    def __init__(self, plan: ClaimPlan, driver: Driver[ConnectionT], on_severed: Callable[[Severed], None]) -> None:
        self.plan = plan
        self.state = State.CLAIMING
        self.severed: Severed | None = None
        self._driver = driver
        self._on_severed = on_severed
        self._held: dict[str, Held[ConnectionT]] = {}
        # The latest grants, what is lost since included.
        self.granted: dict[str, Held[ConnectionT]] = {}
        self._lost: set[str] = set()
        self._watched: list[ConnectionT] = []
        # With every request that a claim may stand for: an unanswered one, too.
        self._claimed_on: list[ConnectionT] = []
        self._moved: set[str] = set()
        self._held_back: list[Callable[[], None]] = []

    @property
    def is_valid(self) -> bool:
        return self.state is State.OWNED and all(self._driver.is_open(each.connection) for each in self._held.values())

    @property
    def held(self) -> dict[str, Held[ConnectionT]]:
        return self._held

    # Claiming

    async def claim(self) -> None:
        """Own all of it. Raises OwnError, with nothing claimed; so does whatever else ends it early."""
        plan = self.plan
        deadline = None if plan.stand_by else self._driver.now() + plan.timeout_s
        generation = plan.yielding if plan.stand_by else plan.generation
        try:
            await self._claim(plan.resources, generation, deadline)
        except BaseException:
            self.give_back()
            raise
        # Between the last look and here nothing else has run.
        self.state = State.OWNED

    async def _claim(self, resources: Sequence[str], generation: int, deadline: float | None) -> None:
        while True:
            try:
                return await self._claim_once(resources, generation, deadline)
            except _Again as again:
                problem = again.problem
            except ConnectionLost as lost:
                problem = OwnError(f"{self._described(resources)} could not be claimed: {lost}.")
            self._go_on()
            if self.state is State.CLAIMING:
                self._forget()
            if deadline is not None and self._driver.now() >= deadline:
                raise problem
            # Two that ask for the same at the same moments would for ever find a part with each other.
            await self._driver.wait(_TRY_AGAIN_S * random.uniform(0.5, 1.5))  # noqa: S311 - no secret

    async def _claim_once(self, resources: Sequence[str], generation: int, deadline: float | None) -> None:
        names_of = defaultdict(list)
        for resource, node in (await self._nodes(resources)).items():
            names_of[node].append(resource)
        for node, names in names_of.items():
            connection = await self._driver.open(node)
            self._watch(connection)
            await self._ask(connection, node, dict.fromkeys(names, generation), deadline)
        await self._see_leaders(resources)

    async def _nodes(self, resources: Sequence[str]) -> dict[str, int]:
        """Where each is to be claimed."""
        driver = self._driver
        partitions = {each: partition for each in resources if (partition := resource_partition(each)) is not None}
        await driver.refresh({topic for topic, _ in partitions.values()})
        nodes = {each: driver.leader(*partition) for each, partition in partitions.items()}
        if leaderless := [each for each, node in nodes.items() if node == NO_LEADER]:
            raise _Again(OwnError(f"{', '.join(leaderless)} has no leader; look at the brokers and ask again."))
        known = [node for node in nodes.values() if node is not None]
        somewhere = next(iter(known), None)
        if somewhere is None:
            somewhere = next((each.node for each in self._held.values()), driver.any_node())
        if somewhere is None:
            raise ConnectionLost("no proxy is known")
        # A partition that does not exist yet is led by whoever claimed it, once it does.
        return {each: somewhere if (node := nodes.get(each)) is None else node for each in resources}

    async def _ask(self, connection: ConnectionT, node: int, asked: dict[str, int], deadline: float | None) -> None:
        """Until each is granted with the generation that was asked for in the first place."""
        while asked:
            self._go_on()
            self._claimed_on.append(connection)
            response = await self._driver.ask(connection, self._request(asked), self.plan.timeout_s)
            if response.error_code == NONE and {each.resource for each in response.resources} != set(asked):
                raise OwnError(f"The answer to the claim of {self._described(asked)} names something else.")
            answers = response.resources
            if response.error_code != NONE:
                answers = tuple(OwnedResource(each, response.error_code) for each in asked)
            if all(each.error_code == FENCED_INSTANCE_ID for each in answers):
                # It goes on serving whoever stands by.
                self._claimed_on.pop()
            later = {}
            for each in answers:
                generation = self._judge(each, asked[each.resource], deadline)
                if generation is not None:
                    later[each.resource] = generation
                else:
                    self._held[each.resource] = Held(connection, node, each.generation, each.fence)
                    self.granted[each.resource] = self._held[each.resource]
            if any(each.error_code in _RETRIABLE for each in answers):
                await self._driver.wait(_ASK_AGAIN_S)
            asked = later

    def _request(self, asked: Mapping[str, int]) -> OwnRequest:
        if WHOLE_GROUP in asked:
            return OwnRequest(self.plan.group, None)
        return OwnRequest(self.plan.group, tuple(OwnResource(*each) for each in asked.items()))

    def _judge(self, owned: OwnedResource, asked: int, deadline: float | None) -> int | None:
        """None where it is owned now; the generation to ask with next; or raises OwnRefused or _Again."""
        code = owned.error_code
        if code == NONE:
            is_raised = owned.resource == WHOLE_GROUP or owned.generation >= self.plan.generation
            return None if is_raised else self.plan.generation
        refused = OwnRefused(code, self.plan.group, owned.resource, asked)
        if code in _RETRIABLE and (deadline is None or self._driver.now() < deadline):
            # It stands, unconfirmed; asking with 0 once more would be one more claim.
            return FIRST_GENERATION if asked == RESET and code == REQUEST_TIMED_OUT else asked
        if code == FENCED_INSTANCE_ID and (self.plan.stand_by or self.state is State.RECLAIMING):
            raise _Again(refused)
        raise refused

    async def _see_leaders(self, resources: Sequence[str]) -> None:
        """Metadata names, for each, the node on which it was claimed: what is produced takes that connection."""
        topics = self._topics(resources)
        if WHOLE_GROUP in resources:
            # Who leads changes with it. What the next answer says may have been asked for before it was granted.
            await self._driver.refresh(topics)
        for _ in range(_LOOKS_AT_LEADERS):
            await self._driver.refresh(topics)
            if not self._elsewhere():
                break
            await self._driver.wait(_ASK_AGAIN_S)
        else:
            raise _Again(OwnError(f"{self._described(self._elsewhere())} was claimed by somebody else meanwhile."))
        self._go_on()
        if gone := [each for each in resources if each not in self._held]:
            raise ConnectionLost(f"the connection that {', '.join(gone)} was claimed on has closed")

    def _go_on(self) -> None:
        if self.state is State.LEFT:
            raise OwnError(f"{self._described(self.plan.resources)} is not wanted any more.")

    def _topics(self, resources: Iterable[str]) -> set[str]:
        return {partition[0] for each in resources if (partition := resource_partition(each)) is not None}

    def _elsewhere(self) -> set[str]:
        """What Metadata names another node for than the one that it was claimed on."""
        found = set()
        for resource, held in self._held.items():
            partition = resource_partition(resource)
            leader = self._driver.leader(*partition) if partition is not None else None
            if leader not in (None, NO_LEADER, held.node):
                found.add(resource)
        return found

    # Keeping

    async def keep(self) -> None:
        """See to it that what is lost is noticed, and claimed again where that is wanted; until it is over."""
        try:
            while self.state in (State.OWNED, State.RECLAIMING):
                if self._lost:
                    await self._reclaim()
                    continue
                await self._driver.wait(self.plan.check_every_s)
                if self.state is State.OWNED:
                    await self._check()
        except Exception as error:
            log.exception("nobody sees any more whether %s is owned", self._described(self.plan.resources))
            self._sever(self.plan.resources, f"{type(error).__name__}: {error}")

    async def _reclaim(self) -> None:
        lost = tuple(sorted(self._lost))
        try:
            await self._claim(lost, self.plan.yielding, self._driver.now() + self.plan.timeout_s)
        except OwnError as error:
            if self.state is State.RECLAIMING:
                self._sever(lost, f"it could not be claimed again: {error}")
            return
        self._lost = {each for each in self._lost if each not in self._held}
        if self.state is State.RECLAIMING and not self._lost:
            self._become(State.OWNED)

    async def _check(self) -> None:
        """A connection that is cut, or whose proxy stands still, does not close by itself."""
        for connection in _distinct(each.connection for each in self._held.values()):
            if self._driver.is_open(connection) and not self._driver.is_busy(connection):
                try:
                    await self._driver.ping(connection, _PING_PATIENCE * self.plan.check_every_s)
                except ConnectionLost:
                    self._driver.shut(connection)
        moved = self._elsewhere()
        for resource in moved & self._moved & self._held.keys():
            self._driver.shut(self._held[resource].connection)
        self._moved = moved
        if moved:
            await self._refresh_quietly(moved)

    async def _refresh_quietly(self, resources: Iterable[str]) -> None:
        try:
            await self._driver.refresh(self._topics(resources))
        except ConnectionLost as lost:
            log.debug("who leads is not known now: %s", lost)

    def _watch(self, connection: ConnectionT) -> None:
        if not any(connection is each for each in self._watched):
            self._watched.append(connection)
            self._driver.watch(connection, lambda: self._closed(connection))

    def _closed(self, connection: ConnectionT) -> None:
        lost = [each for each, held in self._held.items() if held.connection is connection]
        self._watched = [each for each in self._watched if each is not connection]
        self._claimed_on = [each for each in self._claimed_on if each is not connection]
        for each in lost:
            del self._held[each]
        if not lost or self.state not in (State.OWNED, State.RECLAIMING):
            return
        if self.plan.reclaim:
            self._lost.update(lost)
            self._become(State.RECLAIMING)
            self._driver.wake()
        else:
            self._sever(lost, "somebody else claimed it, or the connection broke")

    def _sever(self, lost: Sequence[str], why: str) -> None:
        self.severed = Severed(self.plan.group, tuple(lost), f"{self._described(lost)} is not owned any more: {why}.")
        self._become(State.SEVERED)
        self._driver.wake()
        try:
            self._on_severed(self.severed)
        except Exception:
            # It is the application's own, and called from inside the client library.
            log.exception("on_severed failed")

    def _become(self, state: State) -> None:
        self.state = state
        if state is not State.RECLAIMING:
            held_back, self._held_back = self._held_back, []
            for go_on in held_back:
                go_on()

    def notice(self) -> None:
        """What the library has not told yet, as it does so in a later step of its loop."""
        for held in [each for each in self._held.values() if not self._driver.is_open(each.connection)]:
            self._driver.shut(held.connection)

    def when_settled(self, go_on: Callable[[], None]) -> None:
        """At once, or when it is known whether what was lost is owned again."""
        if self.state is State.RECLAIMING:
            self._held_back.append(go_on)
        else:
            go_on()

    # Leaving

    def give_back(self) -> list[ConnectionT]:
        """All claims are free once the proxies have seen the connections' ends. Returns these connections."""
        shut = self._forget()
        self._become(State.LEFT)
        self._driver.wake()
        return shut

    def _forget(self) -> list[ConnectionT]:
        connections = _distinct(self._claimed_on)
        self._claimed_on.clear()
        self._held.clear()
        for connection in connections:
            self._driver.shut(connection)
        return connections

    def _described(self, resources: Collection[str]) -> str:
        names = "all of it" if WHOLE_GROUP in resources else ", ".join(sorted(resources))
        return f"{names} of the group {self.plan.group}"
