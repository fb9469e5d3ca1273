"""The Own API's table of cases (semantics §5), on two proxies with two workers each, before reference brokers.

Every case runs three times: with its connections at two proxies, at two workers of one, and at one worker. The
decisions for all combinations of generations and whole groups are in tests/unit/claims/test_own_rules.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import NamedTuple

import pytest

from kproxy_codec.api_keys import OWN
from kproxy_codec.error_codes import (
    FENCED_INSTANCE_ID,
    INVALID_REQUEST,
    NONE,
    POLICY_VIOLATION,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from tests.support.brokers.scripted_upstream import HOST, answers_everything
from tests.support.claims.own_cases import (
    CaseRun,
    Checked,
    New,
    Place,
    Refused,
    Same,
    Step,
    breaks,
    closes,
    comes_back,
    freed,
    holds,
    led_by,
    may_not_read,
    may_not_write,
    own,
    pipelined,
    reads,
    served,
    severed,
    take,
    writes,
)
from tests.support.claims.own_client import Fetched, OwnClient
from tests.support.claims.own_proxies import OPEN_TOPIC, OwnSite, on_site
from tests.support.processes.served import ServedBroker, port_of, static_proxy

FENCED, INVALID = Refused(FENCED_INSTANCE_ID), Refused(INVALID_REQUEST)
READERS = "readers"


class Case(NamedTuple):
    what: str
    steps: list[Step]


def a_owns(generation: int, resource: str = "0") -> list[Step]:
    """A claims a resource until its generation is above 1: a first claim is granted with 1."""
    return [own("A", [(resource, 1)], New(1)), own("A", [(resource, generation)], New(generation))]


def partly_refused() -> Step:
    """A owns partition 0; in one request it writes both partitions, and an unprotected topic."""

    async def send(run: CaseRun) -> Checked:
        places = [(run.topic, 0), (run.topic, 1), (OPEN_TOPIC, 0)]
        answer = run.clients["A"].send_produce_many(dict.fromkeys(places, run.value("A")))

        async def check() -> None:
            found = [(await answer)[place].error_code for place in places]
            assert found == [NONE, POLICY_VIOLATION, NONE]

        return check()

    return send


async def gets_none(fetched: asyncio.Future[Fetched]) -> None:
    """Its connection ends instead."""
    with pytest.raises(ConnectionError):
        await fetched


def claimed_while_it_waits() -> Step:
    """A, which owns partition 0 as a reader, waits for records; B claims it, and A gets none."""

    async def send(run: CaseRun) -> Checked:
        fetched = run.clients["A"].send_fetch(run.topic, 0, await run.end_of(0), max_wait_ms=30_000)
        await (await own("B", [("0", 1)], New(1), group=READERS)(run))
        return gets_none(fetched)

    return send


def claimed_while_nobody_had_it() -> Step:
    """B, bound to the readers, waits for records of partition 0, which is unowned until A claims it."""

    async def send(run: CaseRun) -> Checked:
        fetched = run.clients["B"].send_fetch(run.topic, 0, await run.end_of(0), max_wait_ms=30_000)
        for step in (own("A", [("0", 1)], New(1), group=READERS), own("C", [("0", 1)], New(1)), writes("C", 0)):
            await (await step(run))
        return gets_none(fetched)

    return send


def claimed_behind_another_answer() -> Step:
    """B, bound to the readers, fetches partition 1, which is empty, and then partition 0. The second answer waits for
    the first when A claims partition 0, and B does not get it.
    """

    async def send(run: CaseRun) -> Checked:
        first = run.clients["B"].send_fetch(run.topic, 1, await run.end_of(1), max_wait_ms=20_000)
        second = run.clients["B"].send_fetch(run.topic, 0, 0)
        # The broker has answered the second fetch by now.
        await asyncio.sleep(0.3)
        await (await own("A", [("0", 1)], New(1), group=READERS)(run))

        async def check() -> None:
            with contextlib.suppress(ConnectionError):
                await first
            with pytest.raises(ConnectionError):
                await second

        return check()

    return send


AWKWARD = ["*", "%2A", "/", "//", "a/b/c", "-/-1", "t/01", "ein Wort", "Straße/ß", "\x00", "n" * 1_024]

CASES = [
    Case(
        "nobody owns it",
        [
            own("A", [("0", 1)], New(1)),
            writes("A", 0),
            may_not_write("A", 1),
            may_not_write("B", 0, 1),
            served("B"),
            holds("C", 0, "A"),
            led_by("A", 0),
        ],
    ),
    Case(
        "another owns it with a higher generation",
        [
            *a_owns(5),
            own("B", [("0", 4)], FENCED),
            own("B", [("0", 1)], FENCED),
            served("A", "B"),
            writes("A", 0),
            may_not_write("B", 0),
            own("A", [("0", 5)], Same(5)),
        ],
    ),
    Case(
        "another owns it with the same generation",
        [
            *a_owns(5),
            writes("A", 0),
            own("B", [("0", 5)], New(5)),
            severed("A"),
            writes("B", 0),
            may_not_write("C", 0),
            led_by("B", 0),
            comes_back("A"),
            may_not_write("A", 0),
            own("A", [("0", 5)], New(5)),
            severed("B"),
            writes("A", 0),
            holds("C", 0, "A", "B", "A"),
        ],
    ),
    Case(
        "another owns it with a lower generation",
        [
            own("A", [("0", 1)], New(1)),
            own("B", [("0", 7)], New(7)),
            severed("A"),
            writes("B", 0),
            own("C", [("0", 6)], FENCED),
            served("B", "C"),
        ],
    ),
    Case(
        "one owns it oneself with a lower generation, and raises it",
        [own("A", [("0", 1)], New(1)), writes("A", 0), own("A", [("0", 4)], New(4)), writes("A", 0), served("A")],
    ),
    Case(
        "generation 0 of what another owns",
        [
            *a_owns(7),
            writes("A", 0),
            own("B", [("0", 0)], New(1)),
            severed("A"),
            writes("B", 0),
            own("C", [("0", 1)], New(1)),
            severed("B"),
            writes("C", 0),
            holds("C", 0, "A", "B", "C"),
        ],
    ),
    Case(
        "a negative generation",
        [
            own("B", [("0", -1)], INVALID),
            own("A", [("0", -1), ("1", 1)], INVALID, New(1)),
            may_not_write("A", 0),
            writes("A", 1),
            own("A", [("1", -(2**63))], INVALID),
            own("B", [("1", -1)], INVALID),
            served("A", "B"),
            writes("A", 1),
        ],
    ),
    Case(
        "an empty list binds the group, and claims nothing",
        [
            own("A", []),
            may_not_write("A", 0),
            own("A", [("0", 1)], error_code=INVALID_REQUEST, group=READERS),
            own("A", [], error_code=INVALID_REQUEST, group=READERS),
            own("B", [("0", 1)], New(1)),
            served("A"),
        ],
    ),
    Case(
        "the whole group, of which nobody owns anything",
        [
            own("A", None, New(1)),
            writes("A", 0, 1),
            may_not_write("B", 0, 1),
            led_by("A", 0, 1),
            own("A", None, Same(1)),
            own("A", [("0", 1)], Same(1, of="")),
            writes("A", 0, 1),
        ],
    ),
    Case(
        "the whole group, of which others own resources",
        [
            *a_owns(2),
            own("B", [("1", 1)], New(1)),
            own("B", [("1", 6)], New(6)),
            writes("A", 0),
            writes("B", 1),
            own("C", None, New(6)),
            severed("A", "B"),
            writes("C", 0, 1),
            own("C", [("0", 5)], FENCED),
            own("C", [("0", 6)], Same(6, of="")),
            holds("C", 0, "A", "C"),
            holds("C", 1, "B", "C"),
        ],
    ),
    Case(
        "a resource out of another's whole group",
        [
            own("A", None, New(1)),
            writes("A", 0, 1),
            own("B", [("0", 1)], New(1)),
            severed("A"),
            writes("B", 0),
            may_not_write("B", 1),
            freed(""),
            own("C", [("1", 5)], New(1)),
            served("B"),
            writes("C", 1),
        ],
    ),
    Case(
        "another group on a connection that is bound to one",
        [
            own("A", [("0", 1)], New(1)),
            own("A", [("0", 1)], error_code=INVALID_REQUEST, group=READERS),
            own("A", None, error_code=INVALID_REQUEST, group=READERS),
            served("A"),
            writes("A", 0),
            own("B", [("0", 1)], New(1), group=READERS),
            served("A"),
        ],
    ),
    Case("a group without a name", [own("A", [("0", 1)], error_code=INVALID_REQUEST, group=""), served("A")]),
    Case(
        "the connection ends",
        [
            *a_owns(9),
            own("A", [("1", 1)], New(1)),
            writes("A", 0),
            closes("A"),
            freed("0", "1"),
            may_not_write("B", 0),
            own("B", [("0", 2)], New(1)),
            writes("B", 0),
            holds("C", 0, "A", "B"),
        ],
    ),
    Case(
        "the connection is reset",
        [*a_owns(9), breaks("A"), freed("0"), own("B", [("0", 9)], New(1)), writes("B", 0)],
    ),
    Case(
        "the connection that has the whole group ends",
        [own("A", None, New(1)), closes("A"), freed(""), own("B", [("1", 3)], New(1)), writes("B", 1)],
    ),
    Case(
        "who loses one resource loses all, in every request",
        [
            own("A", [("0", 1), ("1", 1), ("x", 1)], New(1), New(1), New(1)),
            own("B", [("x", 1)], New(1)),
            severed("A"),
            freed("0", "1"),
            own("C", [("0", 7), ("1", 7)], New(1), New(1)),
            served("B"),
            writes("C", 0, 1),
        ],
    ),
    Case(
        "several resources are decided one by one",
        [
            *a_owns(5),
            own("B", [("0", 4), ("1", 1), ("x", -1)], FENCED, New(1), INVALID),
            served("A", "B"),
            writes("A", 0),
            writes("B", 1),
            may_not_write("A", 1),
            may_not_write("B", 0),
        ],
    ),
    Case(
        "a resource that is named twice",
        [
            own("A", [("0", 1), ("1", 1), ("0", 2)], INVALID, New(1), INVALID),
            may_not_write("A", 0),
            writes("A", 1),
            own("B", [("0", 1)], New(1)),
            served("A"),
        ],
    ),
    Case(
        "a resource without a name",
        [own("A", [("", 1), ("0", 1)], INVALID, New(1)), own("B", [("1", 1)], New(1)), served("A"), writes("A", 0)],
    ),
    Case(
        "resources that are no partition",
        [
            own("A", [(name, 1) for name in AWKWARD], *[New(1)] * len(AWKWARD)),
            own("A", [(name, 1) for name in AWKWARD], *[Same(1)] * len(AWKWARD)),
            own("C", [("0", 1)], New(1)),
            served("A"),
            own("B", [(name, 1) for name in reversed(AWKWARD)], *[New(1)] * len(AWKWARD)),
            severed("A"),
        ],
    ),
    Case(
        "partitions that do not exist",
        [
            own("A", [("99", 1), ("0", 1)], Refused(UNKNOWN_TOPIC_OR_PARTITION), New(1)),
            writes("A", 0),
            own("A", [("no-such-topic/0", 1)], New(1)),
        ],
    ),
    Case(
        "version 0 has no fence, and claims as version 1 does",
        [
            own("A", [("0", 1)], New(1), version=0),
            own("A", [("0", 1)], Same(1), version=0),
            own("A", [("0", 3)], New(3), version=0),
            own("B", [("0", 2)], FENCED, version=0),
            writes("A", 0),
            own("B", [("0", 3)], New(3)),
            severed("A"),
            own("C", None, New(3), version=0),
            severed("B"),
            writes("C", 0),
        ],
    ),
    Case(
        "what is produced behind a claim sees what became of it",
        [
            may_not_write("A", 0),
            pipelined(own("A", [("0", 1)], New(1)), *[writes("A", 0)] * 3),
            pipelined(own("A", [("0", 4)], New(4)), writes("A", 0), own("A", [("0", 4)], Same(4)), writes("A", 0)),
            pipelined(own("B", [("0", 3)], FENCED), may_not_write("B", 0), served("B")),
            pipelined(own("B", [("0", 4)], New(4)), writes("B", 0)),
            severed("A"),
            holds("C", 0, *"AAAAAB"),
        ],
    ),
    Case(
        "who is not the owner, with any acks",
        [
            own("A", [("0", 1)], New(1)),
            may_not_write("B", 0, acks=-1),
            may_not_write("B", 0, acks=1),
            writes("B", 0, acks=0),
            severed("B"),
            may_not_write("C", 1, acks=1),
            writes("A", 0, acks=1),
            writes("A", 0, acks=0),
            writes("A", 0, acks=-1),
            served("A"),
            holds("C", 0, "A", "A", "A"),
        ],
    ),
    Case(
        "a request of which one may write a part",
        [own("A", [("0", 1)], New(1)), partly_refused(), served("A"), holds("A", 0, "A"), holds("A", 1)],
    ),
    Case(
        "whoever claims it in another group is no writer",
        [
            own("A", [("0", 1)], New(1), group=READERS),
            may_not_write("A", 0),
            own("B", [("0", 1)], New(1)),
            writes("B", 0),
            served("A"),
            reads("A", 0),
        ],
    ),
    Case(
        "readers of one group keep each other out",
        [
            own("A", [("0", 1)], New(1), group=READERS),
            own("B", [], group=READERS),
            reads("A", 0, 1),
            may_not_read("B", 0),
            reads("B", 1),
            reads("C", 0, 1),
            own("B", [("0", 1)], New(1), group=READERS),
            severed("A"),
            reads("B", 0),
            own("C", None, New(1), group=READERS),
            severed("B"),
            reads("C", 0, 1),
        ],
    ),
    Case(
        "a reader loses what it is reading",
        [own("A", [("0", 1)], New(1), group=READERS), claimed_while_it_waits(), severed("A"), reads("B", 0)],
    ),
    Case(
        "a reader of what nobody owns, until somebody does",
        [
            own("B", [], group=READERS),
            reads("B", 0),
            claimed_while_nobody_had_it(),
            severed("B"),
            reads("A", 0),
            served("A", "C"),
        ],
    ),
    Case(
        "a reader whose answer waits for another",
        [
            own("C", [("0", 1), ("1", 1)], New(1), New(1)),
            writes("C", 0, 1),
            own("B", [], group=READERS),
            claimed_behind_another_answer(),
            severed("B"),
            reads("A", 0),
        ],
    ),
]

# The locations of a case's connections: A and B at two proxies, at two workers of one, at one worker.
PLACES = {
    "two proxies": {"A": Place(0, 1), "B": Place(1, 1), "C": Place(1, 2)},
    "two workers": {"A": Place(0, 1), "B": Place(0, 2), "C": Place(1, 1)},
    "one worker": {"A": Place(1, 2), "B": Place(1, 2), "C": Place(1, 2)},
}


# Each case runs in one place without `long`; neighbouring cases use different places.
IN_PLACES = [
    pytest.param(case, where, id=f"{case.what}-{where}", marks=[pytest.mark.long] * (turn != number % len(PLACES)))
    for number, case in enumerate(CASES)
    for turn, where in enumerate(PLACES)
]


@pytest.mark.parametrize(("case", "where"), IN_PLACES)
@on_site
async def test_claim_sequences_give_expected_outcomes(own_site: OwnSite, case: Case, where: str) -> None:
    run = CaseRun(own_site.topic(case.what), where, PLACES[where], own_site.pool, own_site.etcd, own_site.keys)
    try:
        await run.open(*PLACES[where])
        await take(run, case.steps)
    finally:
        await run.close()


@on_site
async def test_own_is_offered_where_there_is_an_etcd(own_site: OwnSite) -> None:
    for place in (Place(0, 1), Place(0, 2), Place(1, 1)):
        client = await own_site.pool.connect(place)
        assert (await client.api_versions())[OWN] == (0, 1)
        await client.close()


async def test_own_is_not_offered_without_an_etcd(tmp_path: Path) -> None:
    upstream = await ServedBroker(1, answers_everything).start()
    with static_proxy(tmp_path, {1: upstream.port}) as proxy:
        client = await OwnClient.connect(HOST, port_of(proxy))
        assert OWN not in await client.api_versions()
        with pytest.raises(ConnectionError):
            await client.own("g", [("t/0", 1)])
        await client.close()
    await upstream.stop()
