"""A claimant's reaction to any answer. The client library is scripted by each test, on asyncio's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from kproxy.claims.client.claimant import Claimant, State
from kproxy.claims.client.errors import ConnectionLost, OwnError, OwnRefused, Severed
from kproxy.claims.client.plan import NO_LEADER, plan_of
from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    INVALID_REQUEST,
    NONE,
    REQUEST_TIMED_OUT,
)
from kproxy_codec.own import OwnedResource, OwnRequest, OwnResponse

Answer = int | Exception | OwnedResource | OwnResponse


class Connection:
    """A connection to one node."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.is_open = True
        self.on_closed: list[Callable[[], None]] = []


class Library:
    """A client library whose waits take no time. Claims get the outcomes in `answers`, and are then granted."""

    def __init__(self, *answers: Answer) -> None:
        self.answers: Iterator[Answer] = iter(answers)
        self.asked: list[tuple[int, list[tuple[str, int]] | None]] = []
        self.leaders: dict[tuple[str, int], int | None] = {}
        self.connections: dict[int, Connection] = {}
        self.time = 0.0
        self.pinged = 0
        self.answers_pings = True
        self.is_busy_now = False
        self.rejects_refreshes = 0
        self.told: list[Severed] = []

    def now(self) -> float:
        return self.time

    async def wait(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)

    def wake(self) -> None:
        pass

    async def refresh(self, topics: Collection[str]) -> None:
        if self.rejects_refreshes:
            self.rejects_refreshes -= 1
            raise ConnectionLost("no proxy answers")

    def leader(self, topic: str, partition: int) -> int | None:
        return self.leaders.get((topic, partition))

    def any_node(self) -> int | None:
        return 9

    async def open(self, node: int) -> Connection:
        connection = self.connections.get(node)
        if connection is None or not connection.is_open:
            connection = self.connections[node] = Connection(node)
        return connection

    def is_open(self, connection: Connection) -> bool:
        return connection.is_open

    def is_busy(self, connection: Connection) -> bool:
        return self.is_busy_now

    def watch(self, connection: Connection, on_closed: Callable[[], None]) -> None:
        connection.on_closed.append(on_closed)

    async def ask(self, connection: Connection, request: OwnRequest, timeout_s: float) -> OwnResponse:
        names = None if request.resources is None else [(each.resource, each.generation) for each in request.resources]
        self.asked.append((connection.node, names))
        answer = next(self.answers, NONE)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, OwnResponse):
            return answer
        if isinstance(answer, OwnedResource):
            return OwnResponse(NONE, request.group, (answer,))
        answered = []
        for name, generation in names if names is not None else [("", 4)]:
            granted = max(generation, 1) if answer == NONE else -1
            answered.append(OwnedResource(name, answer, granted, 100 + len(self.asked) if answer == NONE else -1))
        return OwnResponse(NONE, request.group, tuple(answered))

    async def ping(self, connection: Connection, timeout_s: float) -> None:
        self.pinged += 1
        if not self.answers_pings:
            raise ConnectionLost("it has not answered")

    def shut(self, connection: Connection) -> None:
        if connection.is_open:
            connection.is_open = False
            for told in connection.on_closed:
                told()


def claimant_of(library: Library, *resources: str, **changes: Any) -> Claimant[Connection]:
    given: dict[str, Any] = {"generation": 2, "stand_by": False, "reclaim": False, "timeout_s": 10.0, **changes}
    generation = given.pop("generation")
    plan = plan_of("g", resources or None, generation, check_every_s=1.0, **given)
    return Claimant(plan, library, library.told.append)


@pytest.mark.parametrize(
    ("generation", "stand_by", "answers", "asked"),
    [
        (3, False, [], [3]),
        # A first claim gets generation 1, which the same connection then raises.
        (3, False, [OwnedResource("t/0", NONE, 1, 7)], [3, 3]),
        (0, False, [], [0]),
        (3, True, [], [2, 3]),
        (3, True, [OwnedResource("t/0", NONE, 1, 7)], [2, 3]),
        (3, True, [FENCED_INSTANCE_ID] * 3, [2, 2, 2, 2, 3]),
        # Another claim with a higher generation comes between the grant and the raise.
        (3, True, [NONE, FENCED_INSTANCE_ID], [2, 3, 2, 3]),
        (3, False, [REQUEST_TIMED_OUT, COORDINATOR_NOT_AVAILABLE, REQUEST_TIMED_OUT], [3, 3, 3, 3]),
        # The proxy would take a repeated 0 as another claim, unless it never received the first.
        (0, False, [REQUEST_TIMED_OUT, REQUEST_TIMED_OUT], [0, 1, 1]),
        (0, False, [COORDINATOR_NOT_AVAILABLE], [0, 0]),
        (3, False, [OwnResponse(COORDINATOR_NOT_AVAILABLE, "g")], [3, 3]),
        (3, False, [ConnectionLost("it ended")], [3, 3]),
    ],
)
async def test_claim_is_repeated_until_owned_with_its_generation(
    generation: int, stand_by: bool, answers: list[Answer], asked: list[int]
) -> None:
    library = Library(*answers)
    library.leaders["t", 0] = 5
    claimant = claimant_of(library, "t/0", generation=generation, stand_by=stand_by)
    await claimant.claim()
    assert [names for _, names in library.asked] == [[("t/0", each)] for each in asked]
    assert {node for node, _ in library.asked} == {5}
    assert claimant.held["t/0"].generation == max(generation, 1)
    assert claimant.is_valid


@pytest.mark.parametrize(
    ("answers", "error_code", "asked"),
    [
        ([FENCED_INSTANCE_ID], FENCED_INSTANCE_ID, 1),
        ([INVALID_REQUEST], INVALID_REQUEST, 1),
        ([OwnResponse(INVALID_REQUEST, "g")], INVALID_REQUEST, 1),
        ([REQUEST_TIMED_OUT] * 1_000, REQUEST_TIMED_OUT, 101),
        ([COORDINATOR_NOT_AVAILABLE] * 1_000, COORDINATOR_NOT_AVAILABLE, 101),
    ],
)
async def test_refused_claim_leaves_no_connection(answers: list[Answer], error_code: int, asked: int) -> None:
    library = Library(*answers)
    library.leaders["t", 0] = 5
    claimant = claimant_of(library, "t/0")
    with pytest.raises(OwnRefused) as refused:
        await claimant.claim()
    assert refused.value.error_code == error_code
    assert abs(len(library.asked) - asked) <= 2
    assert claimant.state is State.LEFT
    assert library.connections[5].is_open == (error_code == FENCED_INSTANCE_ID)


async def test_answer_naming_something_else_is_ignored() -> None:
    library = Library(OwnedResource("t/1", NONE, 2, 7))
    with pytest.raises(OwnError, match="names other resources"):
        await claimant_of(library, "t/0").claim()
    assert not library.connections[9].is_open


async def test_claims_go_to_leaders_and_leaderless_together() -> None:
    library = Library()
    library.leaders.update({("t", 0): 5, ("t", 1): 6, ("t", 2): 5})
    claimant = claimant_of(library, "t/0", "t/1", "t/2", "a job", "unknown/0", generation=1)
    await claimant.claim()
    assert {node: [name for name, _ in names or []] for node, names in library.asked} == {
        5: ["t/0", "t/2", "a job", "unknown/0"],
        6: ["t/1"],
    }
    alone = Library()
    await claimant_of(alone, "a job", generation=1).claim()
    assert [node for node, _ in alone.asked] == [9]
    whole = Library()
    claimant = claimant_of(whole, generation=1)
    await claimant.claim()
    assert whole.asked == [(9, None)]
    assert claimant.held[""].generation == 4


async def test_partition_without_a_leader_is_awaited() -> None:
    library = Library()
    library.leaders["t", 0] = NO_LEADER
    with pytest.raises(OwnError, match="t/0 has no leader"):
        await claimant_of(library, "t/0").claim()
    assert library.asked == []
    library.rejects_refreshes = 3
    library.leaders["t", 0] = 5
    await claimant_of(library, "t/0").claim()


async def test_refused_claim_releases_all_the_others() -> None:
    granted, fenced = OwnedResource("t/0", NONE, 1, 7), OwnedResource("t/1", FENCED_INSTANCE_ID)
    library = Library(OwnResponse(NONE, "g", (granted, fenced)))
    library.leaders.update({("t", 0): 5, ("t", 1): 5})
    claimant = claimant_of(library, "t/0", "t/1", stand_by=True)
    first = await library.open(5)
    await claimant.claim()
    assert not first.is_open, "the other one of two that stand by may need it"
    assert library.connections[5].is_open


async def test_resource_with_moved_leader_is_claimed_there() -> None:
    library = Library()
    library.leaders["t", 0] = 5
    claimant = claimant_of(library, "t/0", generation=1)
    first = await library.open(5)
    first.on_closed.append(lambda: None)
    asked_before = library.ask

    async def ask(connection: Connection, request: OwnRequest, timeout_s: float) -> OwnResponse:
        library.leaders["t", 0] = 6
        return await asked_before(connection, request, timeout_s)

    library.ask = ask  # type: ignore[method-assign]
    await claimant.claim()
    assert [node for node, _ in library.asked] == [5, 6]
    assert not first.is_open
    assert claimant.held["t/0"].node == 6


async def kept(claimant: Claimant[Connection], until: Callable[[], bool]) -> None:
    keeping = asyncio.create_task(claimant.keep())
    async with asyncio.timeout(60):
        while not until():
            await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait([keeping])


async def owned(library: Library, **changes: Any) -> Claimant[Connection]:
    library.leaders.update({("t", 0): 5, ("t", 1): 6})
    claimant = claimant_of(library, "t/0", "t/1", **changes)
    await claimant.claim()
    return claimant


async def test_one_lost_connection_severs_all_of_it_once() -> None:
    library = Library()
    claimant = await owned(library)
    library.shut(library.connections[6])
    assert claimant.state is State.SEVERED
    assert not claimant.is_valid
    library.shut(library.connections[5])
    assert [each.resources for each in library.told] == [("t/1",)]
    assert claimant.severed is library.told[0]


@pytest.mark.parametrize("is_moved_for_good", [False, True])
async def test_leader_that_moves_for_good_severs(is_moved_for_good: bool) -> None:
    library = Library()
    claimant = await owned(library)
    library.leaders["t", 1] = 5
    looks = library.pinged

    def seen() -> bool:
        if not is_moved_for_good and library.pinged >= looks + 2:
            library.leaders["t", 1] = 6
        return claimant.state is State.SEVERED or library.pinged >= looks + 12

    await kept(claimant, seen)
    assert (claimant.state is State.SEVERED) == is_moved_for_good
    assert library.connections[6].is_open != is_moved_for_good


@pytest.mark.parametrize("is_busy", [False, True])
async def test_unresponsive_connection_is_closed_unless_answer_is_due(is_busy: bool) -> None:
    library = Library()
    claimant = await owned(library)
    library.answers_pings, library.is_busy_now = False, is_busy
    began = library.time
    await kept(claimant, lambda: claimant.state is State.SEVERED or library.time > began + 20)
    assert (claimant.state is State.SEVERED) != is_busy


async def test_lost_claim_is_repeated_alone_before_sending() -> None:
    library = Library()
    claimant = await owned(library, reclaim=True, generation=5)
    before, went = len(library.asked), []
    library.shut(library.connections[6])
    assert claimant.state is State.RECLAIMING
    assert not claimant.is_valid
    claimant.when_settled(lambda: went.append(claimant.state))
    assert went == []
    library.answers = iter([FENCED_INSTANCE_ID, OwnedResource("t/1", NONE, 1, 7)])
    await kept(claimant, lambda: claimant.state is State.OWNED)
    # The proxy may not have seen the end of the lost connection when the client asks again.
    assert library.asked[before:] == [(6, [("t/1", 4)]), (6, [("t/1", 4)]), (6, [("t/1", 5)])]
    assert went == [State.OWNED]
    assert library.told == []


async def test_lost_claim_not_regained_in_time_is_severed() -> None:
    library = Library()
    claimant = await owned(library, reclaim=True)
    library.answers = iter([FENCED_INSTANCE_ID] * 1_000)
    library.shut(library.connections[6])
    went: list[State] = []
    claimant.when_settled(lambda: went.append(claimant.state))
    began = library.time
    await kept(claimant, lambda: claimant.state is State.SEVERED)
    assert 10 <= library.time - began < 11
    assert "it could not be claimed again: t/1 of the group g is owned with a generation above 1" in str(
        claimant.severed
    )
    assert went == [State.SEVERED]


async def test_claimant_leaving_while_claiming_owns_nothing() -> None:
    library = Library(*[REQUEST_TIMED_OUT] * 1_000)
    claimant = claimant_of(library, "a job")
    claiming = asyncio.create_task(claimant.claim())
    while len(library.asked) < 3:
        await asyncio.sleep(0)
    claimant.release()
    with pytest.raises(OwnError, match="was released meanwhile"):
        await claiming
    assert not library.connections[9].is_open
    assert claimant.state is State.LEFT


async def test_failing_application_callback_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    library = Library()
    claimant = await owned(library)

    def fail(severed: Severed) -> None:
        raise ZeroDivisionError

    claimant._on_severed = fail
    library.shut(library.connections[6])
    assert claimant.state is State.SEVERED
    assert "on_severed failed" in caplog.text
