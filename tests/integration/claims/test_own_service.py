"""Processes that keep claims on one etcd, without brokers: their exchanges, whatever etcd reports."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest_asyncio

from kproxy.claims.keys import ClaimValue, OwnKeys, encode_value
from kproxy.claims.release import Release
from kproxy.claims.service import OwnService
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, put_op
from kproxy.etcd.mirror import CHUNK_EVENTS
from kproxy_codec.error_codes import FENCED_INSTANCE_ID, NONE
from kproxy_codec.own import FenceBinding, OwnRequest, OwnResource
from tests.support.claims.own_services import own_service
from tests.support.etcd.embedded import Relay, connected, running
from tests.support.processes.dev import KproxyProcess
from tests.support.waiting import eventually

GROUP = "writers"
# etcd takes at most 128 operations in a transaction.
OPERATIONS = 100


class FencedBrokers:
    """Brokers that know fences; `released` lists the released ones."""

    def __init__(self) -> None:
        self.released: list[Release] = []

    def have_fences(self) -> bool:
        return True

    def partition_indexes(self, topic: str) -> Collection[int]:
        return ()

    def release(self, release: Release) -> None:
        self.released.append(release)


class Site:
    """Services on one prefix."""

    def __init__(self, client: EtcdClient, prefix: str, stack: AsyncExitStack) -> None:
        self.client = client
        self.keys = OwnKeys(prefix)
        self._prefix = prefix
        self._stack = stack

    async def service(self, client: EtcdClient | None = None, *, port: int = 1) -> OwnService:
        """A service whose brokers know fences, and which is a member."""
        own = own_service(client or self.client, self._prefix, port=port, writer_groups={"t": GROUP})
        own.brokers.attach(FencedBrokers())
        await self._stack.enter_async_context(running(own.run()))
        await own.wait_ready()
        return own


@pytest_asyncio.fixture
async def site(etcd_client: EtcdClient, etcd_prefix: str) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        yield Site(etcd_client, etcd_prefix, stack)


async def bound(bindings: list[FenceBinding], deadline: float) -> dict[tuple[str, int], int]:
    """Let every leader accept all bindings."""
    return {each[:2]: NONE for each in bindings}


async def claim(own: OwnService, resource: str = "t/0", sever: Callable[[str], None] = lambda reason: None) -> int:
    """Claim on a new connection; return its fence."""
    request = OwnRequest(GROUP, (OwnResource(resource, 0),))
    (owned,) = (await own.own(own.connection("tests", sever), request, bound)).resources
    assert owned.error_code == NONE
    return owned.fence


async def test_keys_of_ended_lease_are_released_by_others(site: Site) -> None:
    """Of an ended lease's keys, the process's own is reported first: its claims seem to persist."""
    holder, other = await site.service(port=1), await site.service(port=2)
    brokers = FencedBrokers()
    released = brokers.released
    other.brokers.attach(brokers)
    fence = await claim(holder)
    await eventually(lambda: other.table.row(GROUP, "t/0") is not None, what="the other knows of the claim")
    (kept,) = (await site.client.get_prefix(site.keys.claims)).kvs
    await site.client.lease_revoke(kept.lease_id)
    await eventually(lambda: bool(released), what="the partition is released")
    assert [each[:2] for each in released] == [("t", 0)]
    assert released[0].revision > fence


@asynccontextmanager
async def behind(etcd: EmbeddedEtcd) -> AsyncIterator[tuple[Relay, EtcdClient]]:
    async with Relay(etcd.endpoint) as relay, connected(EtcdClient([relay.endpoint])) as client:
        yield relay, client


async def test_claim_reported_in_fragments_is_confirmed(site: Site, etcd: EmbeddedEtcd) -> None:
    """A process that was cut off sees a claim together with the end of a lease whose keys need several fragments."""
    count = CHUNK_EVENTS + OPERATIONS
    lease = await site.client.lease_grant(60)
    value = encode_value(ClaimValue("gone", 1, 1))
    for start in range(0, count, OPERATIONS):
        keys = [site.keys.claim("many", f"r{number}") for number in range(start, start + OPERATIONS)]
        await site.client.txn([], [put_op(key, value, lease.lease_id) for key in keys], [])
    async with behind(etcd) as (relay, client):
        cut_off = await site.service(client)
        assert cut_off.table.count == count
        await relay.shut()
        put = await site.client.put(site.keys.claim(GROUP, "r"), encode_value(ClaimValue("somebody", 1, 1)))
        await site.client.lease_revoke(lease.lease_id)
        other = await site.service(port=2)
        await relay.open()
        await eventually(
            lambda: any(each.port == 1 and each.seen >= put for each in other.table.members.values()),
            what="the claim is confirmed",
        )
        # The claim waits for the members at its time, not for those that return later.
        assert cut_off.is_live()


async def test_claim_is_decided_by_etcd_not_by_table(site: Site) -> None:
    """A table lags: neither a refusal nor a grant may rely on it."""
    first, late = await site.service(port=1), await site.service(port=2)
    severed: list[str] = []
    owner = first.connection("owner", severed.append)
    for generation in (1, 5):
        await first.own(owner, OwnRequest(GROUP, (OwnResource("t/0", generation),)), bound)
    fence = owner.held["t/0"].fence
    await eventually(lambda: late.table.revision >= fence, what="the other knows of the claim")
    late.table._groups.clear()
    asker = late.connection("asker", severed.append)
    (lower,) = (await late.own(asker, OwnRequest(GROUP, (OwnResource("t/0", 3),)), bound)).resources
    assert (lower.error_code, severed) == (FENCED_INSTANCE_ID, [])
    late.table._groups.clear()
    (equal,) = (await late.own(asker, OwnRequest(GROUP, (OwnResource("t/0", 5),)), bound)).resources
    assert (equal.error_code, equal.generation) == (NONE, 5)
    assert equal.fence > fence
    assert len(severed) == 1


async def test_release_deletes_only_its_own_claim(site: Site) -> None:
    """The end of a connection may be processed after another client has claimed its resources."""
    own = await site.service()
    earlier = await claim(own)
    later = await claim(own)
    own._deletions.add(GROUP, "t/0", earlier)
    await own.all_freed()
    assert await site.client.get(site.keys.claim(GROUP, "t/0")) is not None
    own._deletions.add(GROUP, "t/0", later)
    await own.all_freed()
    assert await site.client.get(site.keys.claim(GROUP, "t/0")) is None


FORGETFUL = """
import sys
from kproxy.cli import main
from kproxy.claims.table import OwnTable

def put(self, kv):
    raise LookupError(f"a mistake, at {kv.key}")

OwnTable._claim_put = put
sys.exit(main())
"""


async def test_proxy_that_cannot_keep_claims_ends_with_reason(site: Site, tmp_path: Path) -> None:
    """Otherwise it would continue to serve and refuse every claim, unnoticed."""
    arguments = ["serve", "--listen", "127.0.0.1:0", "--etcd", site.client.endpoints, "--prefix", site.keys.prefix]
    process = KproxyProcess(arguments, tmp_path / "stderr", (sys.executable, "-P", "-c", FORGETFUL))
    try:
        await asyncio.to_thread(process.wait_ready)
        await site.client.put(site.keys.claim(GROUP, "r"), encode_value(ClaimValue("somebody", 1, 1)))
        assert await asyncio.to_thread(process.wait) != 0
        assert "a mistake, at " in process.stderr()
    finally:
        process.stop()
