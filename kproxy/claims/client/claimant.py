"""Claim resources and detect their loss, with any client library (`plan.Driver`).

A claim belongs to a connection, so it is made on the connection on which the library produces or fetches. For
`topic/partition` this is the connection to the leader that Metadata names; after the claim, that is the claiming proxy.
For any other resource, and for a whole group, it is a connection to any proxy.

States and transitions:
    CLAIMING    -> OWNED        all claims are granted with the wanted generation, and no leader has moved meanwhile
    OWNED       -> RECLAIMING   a connection with claims has closed; without `reclaim` -> SEVERED
    RECLAIMING  -> OWNED        the lost claims are granted again
    OWNED, RECLAIMING -> SEVERED    claiming again has failed, or `keep` has failed with another error
    any         -> LEFT         the claims are released

Invariants:
    1. SEVERED is final, and holds for all resources: once one of several is lost, none is owned any more.
    2. `is_valid` is true only while OWNED and every connection with claims is open, as far as this process can know.
    3. The state is SEVERED or RECLAIMING before a request on the lost connection is reported as failed, and before the
       library can send again: produce and fetch requests wait while RECLAIMING and fail once SEVERED.
    4. While CLAIMING, a refusal of one of several resources releases all of them before they are requested again.
    5. In LEFT every connection that may have a claim is closed.

A first claim is granted with generation 1, whatever generation was requested (the Kafka wiki's "Single Reader/Writer").
A second request on the same connection raises it to the requested generation, before the resource counts as owned.
"""

from __future__ import annotations

import enum
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Generic
from weakref import WeakSet

from kproxy.claims.client.errors import ConnectionLost, OwnError, OwnRefused, Severed
from kproxy.claims.client.plan import NO_LEADER, ClaimPlan, ConnectionT, Driver, Held
from kproxy.claims.rules import FIRST_GENERATION, RESET
from kproxy_codec.error_codes import COORDINATOR_NOT_AVAILABLE, FENCED_INSTANCE_ID, NONE, REQUEST_TIMED_OUT
from kproxy_codec.own import WHOLE_GROUP, OwnedResource, OwnRequest, OwnResource, resource_partition

_ASK_AGAIN_S = 0.1
_TRY_AGAIN_S = 0.25
# In units of `check_every_s`: how long an answer may take when nothing else is in flight.
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
    """Raised to try again or, if no time is left, to raise `problem`."""

    def __init__(self, problem: OwnError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Claimant(Generic[ConnectionT]):
    """The claims of one `own(...)`. `on_severed` is called once, in the step that makes the state SEVERED."""

    def __init__(self, plan: ClaimPlan, driver: Driver[ConnectionT], on_severed: Callable[[Severed], None]) -> None:
        self.plan = plan
        self.state = State.CLAIMING
        self.severed: Severed | None = None
        self._driver = driver
        self._on_severed = on_severed
        self.held: dict[str, Held[ConnectionT]] = {}
        # The latest grants, those lost since included.
        self.granted: dict[str, Held[ConnectionT]] = {}
        self._lost: set[str] = set()
        self._watched: list[ConnectionT] = []
        # Connections that may have claims: an unanswered request may have made one, too.
        self._claimed_on: list[ConnectionT] = []
        self._moved: set[str] = set()
        self._held_back: list[Callable[[], None]] = []

    @property
    def is_valid(self) -> bool:
        return self.state is State.OWNED and all(self._driver.is_open(each.connection) for each in self.held.values())

    # Claiming

    async def claim(self) -> None:
        """Claim all resources. After OwnError, or any other exception, nothing is claimed."""
        plan = self.plan
        deadline = None if plan.stand_by else self._driver.now() + plan.timeout_s
        generation = plan.yielding if plan.stand_by else plan.generation
        try:
            await self._claim(plan.resources, generation, deadline)
        except BaseException:
            self.release()
            raise
        # Nothing else has run since the last check of the leaders.
        self.state = State.OWNED

    async def _claim(self, resources: Sequence[str], generation: int, deadline: float | None) -> None:
        while True:
            try:
                return await self._claim_once(resources, generation, deadline)
            except _Again as again:
                problem = again.problem
            except ConnectionLost as lost:
                problem = OwnError(f"{self._described(resources)} could not be claimed: {lost}.")
            self._check_wanted()
            if self.state is State.CLAIMING:
                self._forget()
            if deadline is not None and self._driver.now() >= deadline:
                raise problem
            # Two clients that always ask for the same resources at the same time would never succeed.
            await self._driver.wait(_TRY_AGAIN_S * random.uniform(0.5, 1.5))  # noqa: S311 - no secret

    async def _claim_once(self, resources: Sequence[str], generation: int, deadline: float | None) -> None:
        names_of = defaultdict(list)
        for resource, node in (await self._nodes(resources)).items():
            names_of[node].append(resource)
        for node, names in names_of.items():
            connection = await self._driver.open(node)
            self._watch(connection)
            await self._ask(connection, node, dict.fromkeys(names, generation), deadline)
        await self._check_leaders(resources)

    async def _nodes(self, resources: Sequence[str]) -> dict[str, int]:
        """Return the node on which to claim each resource."""
        driver = self._driver
        partitions = {each: partition for each in resources if (partition := resource_partition(each)) is not None}
        await driver.refresh({topic for topic, _ in partitions.values()})
        nodes = {each: driver.leader(*partition) for each, partition in partitions.items()}
        if leaderless := [each for each, node in nodes.items() if node == NO_LEADER]:
            raise _Again(OwnError(f"{', '.join(leaderless)} has no leader; check the brokers, then claim again."))
        known = [node for node in nodes.values() if node is not None]
        somewhere = next(iter(known), None)
        if somewhere is None:
            somewhere = next((each.node for each in self.held.values()), driver.any_node())
        if somewhere is None:
            raise ConnectionLost("no proxy is known")
        # If a partition does not exist yet, the proxy that claims it leads it after its creation.
        return {each: somewhere if (node := nodes.get(each)) is None else node for each in resources}

    async def _ask(self, connection: ConnectionT, node: int, asked: dict[str, int], deadline: float | None) -> None:
        """Ask until each resource is granted with the generation of the plan."""
        while asked:
            self._check_wanted()
            self._claimed_on.append(connection)
            response = await self._driver.ask(connection, self._request(asked), self.plan.timeout_s)
            if response.error_code == NONE and {each.resource for each in response.resources} != set(asked):
                raise OwnError(f"The answer to the claim of {self._described(asked)} names other resources.")
            answers = response.resources
            if response.error_code != NONE:
                answers = tuple(OwnedResource(each, response.error_code) for each in asked)
            if all(each.error_code == FENCED_INSTANCE_ID for each in answers):
                # The connection has no claim: a client that stands by keeps using it.
                self._claimed_on.pop()
            later = {}
            for each in answers:
                generation = self._next_generation(each, asked[each.resource], deadline)
                if generation is not None:
                    later[each.resource] = generation
                else:
                    self.held[each.resource] = Held(connection, node, each.generation, each.fence)
                    self.granted[each.resource] = self.held[each.resource]
            if any(each.error_code in _RETRIABLE for each in answers):
                await self._driver.wait(_ASK_AGAIN_S)
            asked = later

    def _request(self, asked: Mapping[str, int]) -> OwnRequest:
        if WHOLE_GROUP in asked:
            return OwnRequest(self.plan.group, None)
        return OwnRequest(self.plan.group, tuple(OwnResource(*each) for each in asked.items()))

    def _next_generation(self, owned: OwnedResource, asked: int, deadline: float | None) -> int | None:
        """Return None for an owned resource, else the next generation to ask with. Raises OwnRefused, _Again."""
        code = owned.error_code
        if code == NONE:
            is_raised = owned.resource == WHOLE_GROUP or owned.generation >= self.plan.generation
            return None if is_raised else self.plan.generation
        refused = OwnRefused(code, self.plan.group, owned.resource, asked)
        if code in _RETRIABLE and (deadline is None or self._driver.now() < deadline):
            # The claim exists but is unconfirmed; another request with 0 would make another claim.
            return FIRST_GENERATION if asked == RESET and code == REQUEST_TIMED_OUT else asked
        if code == FENCED_INSTANCE_ID and (self.plan.stand_by or self.state is State.RECLAIMING):
            raise _Again(refused)
        raise refused

    async def _check_leaders(self, resources: Sequence[str]) -> None:
        """Check that Metadata names the claiming nodes as leaders, since records are sent to the leaders."""
        topics = self._topics(resources)
        if WHOLE_GROUP in resources:
            # The claim changes the leaders. The next answer may be to a request from before the grant.
            await self._driver.refresh(topics)
        for _ in range(_LOOKS_AT_LEADERS):
            await self._driver.refresh(topics)
            if not self._elsewhere():
                break
            await self._driver.wait(_ASK_AGAIN_S)
        else:
            raise _Again(OwnError(f"{self._described(self._elsewhere())} was claimed by another client meanwhile."))
        self._check_wanted()
        if gone := [each for each in resources if each not in self.held]:
            raise ConnectionLost(f"the connection with the claim of {', '.join(gone)} has closed")

    def _check_wanted(self) -> None:
        if self.state is State.LEFT:
            raise OwnError(f"The claim of {self._described(self.plan.resources)} was released meanwhile.")

    def _topics(self, resources: Iterable[str]) -> set[str]:
        return {partition[0] for each in resources if (partition := resource_partition(each)) is not None}

    def _elsewhere(self) -> set[str]:
        """Return the resources that Metadata places on another node than the one they were claimed on."""
        found = set()
        for resource, held in self.held.items():
            partition = resource_partition(resource)
            leader = self._driver.leader(*partition) if partition is not None else None
            if leader not in (None, NO_LEADER, held.node):
                found.add(resource)
        return found

    # Keeping

    async def keep(self) -> None:
        """Detect lost claims, and claim them again if the plan says so, until SEVERED or LEFT."""
        try:
            while self.state in (State.OWNED, State.RECLAIMING):
                if self._lost:
                    await self._reclaim()
                    continue
                await self._driver.wait(self.plan.check_every_s)
                if self.state is State.OWNED:
                    await self._check()
        except Exception as error:
            log.exception("watch of the claims on %s failed", self._described(self.plan.resources))
            self._sever(self.plan.resources, f"{type(error).__name__}: {error}")

    async def _reclaim(self) -> None:
        lost = tuple(sorted(self._lost))
        try:
            await self._claim(lost, self.plan.yielding, self._driver.now() + self.plan.timeout_s)
        except OwnError as error:
            if self.state is State.RECLAIMING:
                self._sever(lost, f"it could not be claimed again: {error}")
            return
        self._lost = {each for each in self._lost if each not in self.held}
        if self.state is State.RECLAIMING and not self._lost:
            self._become(State.OWNED)

    async def _check(self) -> None:
        """Close connections that broke silently, or whose proxy hangs, since they do not close by themselves."""
        for connection in _distinct(each.connection for each in self.held.values()):
            if self._driver.is_open(connection) and not self._driver.is_busy(connection):
                try:
                    await self._driver.ping(connection, _PING_PATIENCE * self.plan.check_every_s)
                except ConnectionLost:
                    self._driver.shut(connection)
        moved = self._elsewhere()
        for resource in moved & self._moved & self.held.keys():
            self._driver.shut(self.held[resource].connection)
        self._moved = moved
        if moved:
            await self._refresh_quietly(moved)

    async def _refresh_quietly(self, resources: Iterable[str]) -> None:
        try:
            await self._driver.refresh(self._topics(resources))
        except ConnectionLost as lost:
            log.debug("leader not known: %s", lost)

    def _watch(self, connection: ConnectionT) -> None:
        if not any(connection is each for each in self._watched):
            self._watched.append(connection)
            self._driver.watch(connection, lambda: self._closed(connection))

    def _closed(self, connection: ConnectionT) -> None:
        lost = [each for each, held in self.held.items() if held.connection is connection]
        self._watched = [each for each in self._watched if each is not connection]
        self._claimed_on = [each for each in self._claimed_on if each is not connection]
        for each in lost:
            del self.held[each]
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
            # The callback is the application's, and runs inside the client library.
            log.exception("callback on_severed failed")

    def _become(self, state: State) -> None:
        self.state = state
        if state is not State.RECLAIMING:
            held_back, self._held_back = self._held_back, []
            for go_on in held_back:
                go_on()

    def close_ended(self) -> None:
        """Close connections whose end the library reports only in a later step of its loop."""
        for held in [each for each in self.held.values() if not self._driver.is_open(each.connection)]:
            self._driver.shut(held.connection)

    def when_settled(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` at once or, while RECLAIMING, at the end of that state."""
        if self.state is State.RECLAIMING:
            self._held_back.append(go_on)
        else:
            go_on()

    # Leaving

    def release(self) -> list[ConnectionT]:
        """Close and return the connections with claims. The proxies then free these claims."""
        shut = self._forget()
        self._become(State.LEFT)
        self._driver.wake()
        return shut

    def _forget(self) -> list[ConnectionT]:
        connections = _distinct(self._claimed_on)
        self._claimed_on.clear()
        self.held.clear()
        for connection in connections:
            self._driver.shut(connection)
        return connections

    def _described(self, resources: Collection[str]) -> str:
        names = "all of it" if WHOLE_GROUP in resources else ", ".join(sorted(resources))
        return f"{names} of the group {self.plan.group}"


class Ownership:
    """The resources of an application, and whether it still owns them. Any thread may read this object.

    `resources` has the claimed names. It is empty for the whole group, whose name in `fences` is "".
    """

    def __init__(self, claimant: Claimant[Any]) -> None:
        self._claimant = claimant
        self.group = claimant.plan.group
        self.resources = tuple(each for each in claimant.plan.resources if each != WHOLE_GROUP)

    @property
    def is_valid(self) -> bool:
        """Whether the resources are owned, as far as this process knows. Only an acknowledgement proves a write."""
        return self._claimant.is_valid

    @property
    def severed(self) -> Severed | None:
        """The reason for the loss of the ownership, once the loss is final."""
        return self._claimant.severed

    @property
    def fences(self) -> Mapping[str, int]:
        """The fence of each resource's latest grant. Fences rise with every grant, those to other clients included.

        A fence is -1 if the proxy sends none. A loss does not change the fences.
        """
        return {resource: each.fence for resource, each in self._claimant.granted.copy().items()}

    @property
    def generations(self) -> Mapping[str, int]:
        """The generation with which each resource is owned, or was last owned."""
        return {resource: each.generation for resource, each in self._claimant.granted.copy().items()}

    def check(self) -> None:
        """Raise Severed if the ownership is lost."""
        if self._claimant.severed is not None:
            raise self._claimant.severed


_clients_in_use: WeakSet[Any] = WeakSet()


def enter(kafka: object) -> None:
    """Refuse a second ownership on one client: both would share its connections, and the first to end closes them."""
    if kafka in _clients_in_use:
        raise RuntimeError("this client already owns resources; name all of them in one own(), or use another client")
    _clients_in_use.add(kafka)


def leave(kafka: object) -> None:
    """Allow another ownership on the client."""
    _clients_in_use.discard(kafka)
