"""The limits for claims of one connection and of all: one process's claims, on a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest import mock

from kproxy.claims import acquire, service
from kproxy.claims.connection import ClaimingConnection
from kproxy.claims.service import OwnService
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy_codec.error_codes import FENCED_INSTANCE_ID, INVALID_REQUEST, NONE, THROTTLING_QUOTA_EXCEEDED
from kproxy_codec.own import FenceBinding, OwnRequest, OwnResource
from tests.support.claims.own_services import own_service
from tests.support.etcd.embedded import connected, running
from tests.support.waiting import PATIENCE_S, eventually

GROUP = "g"
MOST = 5


@asynccontextmanager
async def claims(etcd: EmbeddedEtcd, prefix: str) -> AsyncIterator[OwnService]:
    async with connected(EtcdClient([etcd.endpoint])) as client:
        own = own_service(client, prefix, timeout_s=PATIENCE_S)
        async with running(own.run()):
            await asyncio.wait_for(own.wait_ready(), PATIENCE_S)
            yield own


def connection(own: OwnService, severed: list[str]) -> ClaimingConnection:
    """Like a session's: its end frees its claims."""
    client = own.connection("tests", lambda reason: (severed.append(reason), own.ended(client))[0])
    return client


async def bind(bindings: list[FenceBinding], deadline: float) -> dict[tuple[str, int], int]:
    raise AssertionError(f"no topic has a writer group here: {bindings}")


async def claim(own: OwnService, client: ClaimingConnection, *resources: str, generation: int = 1) -> list[int]:
    """Claim each resource; return the error codes."""
    asked = tuple(OwnResource(each, generation) for each in resources)
    response = await own.own(client, OwnRequest(GROUP, asked), bind)
    assert response.error_code == NONE
    return [each.error_code for each in response.resources]


async def test_connection_claims_limited_number_of_resources(etcd: EmbeddedEtcd, etcd_prefix: str) -> None:
    with mock.patch.object(service, "MAX_CLAIMS_PER_CONNECTION", MOST):
        async with claims(etcd, etcd_prefix) as own:
            greedy, other = connection(own, []), connection(own, [])
            assert await claim(own, greedy, "a", "b", "c") == [NONE] * 3
            assert await claim(own, greedy, "d", "e", "f") == [INVALID_REQUEST] * 3
            assert await claim(own, greedy, "d", "e") == [NONE] * 2
            assert await claim(own, greedy, "f") == [INVALID_REQUEST]
            assert own.held_count == MOST
            assert await claim(own, other, "f") == [NONE]


async def test_claims_of_all_connections_are_limited(etcd: EmbeddedEtcd, etcd_prefix: str) -> None:
    """A resource claimed already may be claimed again: the table has it, and its owner is severed."""
    with mock.patch.object(acquire, "FULL", MOST):
        async with claims(etcd, etcd_prefix) as own:
            severed: list[str] = []
            first, second = connection(own, severed), connection(own, [])
            assert await claim(own, first, *"abcde") == [NONE] * MOST
            assert await claim(own, second, "f") == [THROTTLING_QUOTA_EXCEEDED]
            assert await claim(own, second, "a", generation=0) == [NONE]
            assert len(severed) == 1
            await eventually(lambda: own.table.count <= 1)
            assert await claim(own, second, "f", "b") == [NONE] * 2
            assert await claim(own, connection(own, []), "g", "c", generation=1) == [NONE] * 2
            assert await claim(own, connection(own, []), "h") == [THROTTLING_QUOTA_EXCEEDED]
            assert await claim(own, second, "a", generation=2) == [NONE]
            assert await claim(own, connection(own, []), "a", "i") == [FENCED_INSTANCE_ID, THROTTLING_QUOTA_EXCEEDED]
