"""Many connections that claim the same resource, and malicious requests, on two proxies with two workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import pytest

from kproxy.claims.keys import decode_claim
from kproxy_codec.api_keys import OWN
from kproxy_codec.error_codes import FENCED_INSTANCE_ID, NONE, POLICY_VIOLATION
from kproxy_codec.framing import request_header
from kproxy_codec.own import MAX_RESOURCES, OwnRequest, OwnResource, encode_own_request
from tests.support.claims.own_cases import Place, writers_of
from tests.support.claims.own_client import OwnClient
from tests.support.claims.own_proxies import OwnSite, on_site
from tests.support.clients.raw_client import raw_frame
from tests.support.waiting import PATIENCE_S

PLACES = [Place(0, 1), Place(0, 2), Place(1, 1), Place(1, 2)]
CONNECTIONS = 50
CLAIMS_EACH = 4
# Resources of one request, which takes about a second.
MANY = 1_000
# Enough attempts to see which is served sooner.
ATTEMPTS = 5


class Grant(NamedTuple):
    """`asked_at` and `told_at`: seconds, the monotonic clock."""

    fence: int
    generation: int
    asked_at: float
    told_at: float
    client: OwnClient


class Storm:
    """Connections that claim one resource, with any generation, and reconnect when severed."""

    def __init__(self, site: OwnSite, topic: str) -> None:
        self.grants: list[Grant] = []
        self.codes: set[int] = set()
        self.clients: list[OwnClient] = []
        self.severed = 0
        self._site = site
        self._topic = topic

    async def claim(self, number: int) -> None:
        chance = Random(number)
        place = PLACES[number % len(PLACES)]
        client = await self._connect(place)
        for _ in range(CLAIMS_EACH):
            asked_at = time.monotonic()
            try:
                response = await client.own(
                    writers_of(self._topic), [(f"{self._topic}/0", chance.choice((0, 1, 1, 2)))]
                )
            except ConnectionError:
                self.severed += 1
                client = await self._connect(place)
                continue
            (found,) = response.resources
            self.codes.add(found.error_code)
            if found.error_code == NONE:
                self.grants.append(Grant(found.fence, found.generation, asked_at, time.monotonic(), client))

    async def _connect(self, place: Place) -> OwnClient:
        client = await self._site.pool.connect(place)
        self.clients.append(client)
        return client


@on_site
async def test_claim_storm_leaves_one_owner_and_rising_fences(own_site: OwnSite) -> None:
    topic = own_site.topic("storm")

    storm = Storm(own_site, topic)
    try:
        await asyncio.gather(*map(storm.claim, range(CONNECTIONS)))
        grants = sorted(storm.grants)
        # Most are severed before they learn of their grant, if the machine has time.
        assert grants
        assert storm.severed >= CONNECTIONS
        assert storm.codes <= {NONE, FENCED_INSTANCE_ID}
        by_fence: dict[int, set[OwnClient]] = {}
        for grant in grants:
            by_fence.setdefault(grant.fence, set()).add(grant.client)
        assert all(len(clients) == 1 for clients in by_fence.values()), "two were given one fence"
        for earlier, later in ((one, other) for one in grants for other in grants if one.told_at < other.asked_at):
            assert earlier.fence <= later.fence, f"fences went back: {earlier}, then {later}"
        owner = grants[-1].client
        assert not owner.closed, "the latest owner was severed by nobody"
        for client in storm.clients:
            if not client.closed:
                code = (await client.produce(topic, 0, b"the storm is over")).error_code
                assert code == (NONE if client is owner else POLICY_VIOLATION)
        assert len((await owner.fetch(topic, 0, 0)).records) == 1
    finally:
        for client in storm.clients:
            await client.close()


def _own(request: OwnRequest, version: int = 1) -> bytes:
    return raw_frame(request_header(OWN, version, 1, b"tests") + encode_own_request(request))


def _resources(count: int) -> tuple[OwnResource, ...]:
    return tuple(OwnResource(f"r{number}", 1) for number in range(count))


# A few: tests/property/test_codec_own.py covers the rest.
HARMFUL: dict[str, Callable[[], bytes]] = {
    "one resource too many": lambda: _own(OwnRequest("g", _resources(MAX_RESOURCES + 1))),
    "a group without end": lambda: raw_frame(request_header(OWN, 1, 1, b"tests") + b"\xff\xff\xff\xff\x0f"),
    "a billion resources": lambda: raw_frame(request_header(OWN, 1, 1, b"tests") + b"\x02g\x80\x94\xeb\xdc\x03"),
    "cut short": lambda: raw_frame(_own(OwnRequest("g", _resources(2)))[4:-5]),
    "version 2": lambda: _own(OwnRequest("g", ()), 2),
    "a broker's own": lambda: raw_frame(request_header(OWN + 1, 0, 1, b"tests") + b"\x01\x00"),
}


@pytest.mark.parametrize("harm", HARMFUL)
@on_site
async def test_harmful_request_ends_only_its_connection(own_site: OwnSite, harm: str) -> None:
    topic = own_site.topic("harm")

    owner, villain = [await own_site.pool.connect(PLACES[0]) for _ in range(2)]
    assert (await owner.own(writers_of(topic), [(f"{topic}/0", 1)])).resources[0].error_code == NONE
    villain.raw.send(HARMFUL[harm]())
    assert await villain.wait_closed(PATIENCE_S)
    assert (await owner.produce(topic, 0, b"as ever")).error_code == NONE
    await owner.close()


# tests/integration/proxy/test_loop_turns.py measures such requests.
@pytest.mark.long
@on_site
async def test_request_with_many_resources_blocks_no_one(own_site: OwnSite) -> None:
    """Others are served while the resources are claimed and freed."""
    topic = own_site.topic("many")
    resources = [(f"r{number}", 1) for number in range(MANY)]

    async def is_served_meanwhile(owner: OwnClient, number: int) -> bool:
        greedy = await own_site.pool.connect(PLACES[0])
        claiming = greedy.send_own(f"greedy-{number}", resources)
        (granted,) = (await owner.own(writers_of(topic), [(f"{topic}/0", number)])).resources
        assert (granted.error_code, granted.generation) == (NONE, number)
        is_sooner = not claiming.done()
        granted_to_greedy = (await asyncio.wait_for(claiming, 2 * PATIENCE_S)).resources
        assert [each.resource for each in granted_to_greedy] == [resource for resource, _ in resources]
        assert {each.error_code for each in granted_to_greedy} == {NONE}
        await greedy.close()
        assert (await owner.produce(topic, 0, b"as ever")).error_code == NONE
        return is_sooner

    owner = await own_site.pool.connect(PLACES[0])
    # If the machine stalls, both answers arrive before one is read.
    for number in range(1, ATTEMPTS + 1):
        if await is_served_meanwhile(owner, number):
            break
    else:
        pytest.fail("it waits until the many are claimed")
    await owner.close()


@pytest.mark.long
@on_site
async def test_claim_flood_blocks_no_one(own_site: OwnSite) -> None:
    """Twenty connections send two hundred claims each at once, and read no answer before the last."""
    topic = own_site.topic("flood")

    async def is_served_meanwhile() -> bool:
        flooding = [await own_site.pool.connect(PLACES[number % 4]) for number in range(20)]
        answers = [
            client.send_own(f"flood-{number}", [(f"r{n % 7}", 0)])
            for number, client in enumerate(flooding)
            for n in range(200)
        ]
        owner = await own_site.pool.connect(PLACES[0])
        (granted,) = (await owner.own(writers_of(topic), [(f"{topic}/0", 1)])).resources
        assert granted.error_code == NONE
        assert (await owner.produce(topic, 0, b"as ever")).error_code == NONE
        is_sooner = not all(answer.done() for answer in answers)
        for client in [*flooding, owner]:
            await client.close()
        await own_site.until_nothing_is_claimed()
        return is_sooner

    for _ in range(ATTEMPTS):
        if await is_served_meanwhile():
            return
    pytest.fail("it waits until the flood is over")


@on_site
async def test_client_with_long_name_does_not_fill_etcd(own_site: OwnSite) -> None:
    """The name is part of each claim of its connection."""
    topic = own_site.topic("endless name")

    client = await own_site.pool.connect(PLACES[0])
    client.client_id = "ü" * 16_000
    assert (await client.own(writers_of(topic), [(f"{topic}/0", 1)])).resources[0].error_code == NONE
    claim = await own_site.etcd.get(own_site.keys.claim(writers_of(topic), f"{topic}/0"))
    assert claim is not None
    assert decode_claim(claim.value).client.startswith("ü" * 50 + "@127.0.0.1:")
    assert len(claim.value) < 400
    await client.close()
