"""Three members, one of which is killed, stopped or cut off: calls, renewals and watches continue with the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from kproxy.etcd import EtcdClient, EtcdUnavailable, PrefixMirror, get_op, put_op
from kproxy.etcd import members as members_module
from kproxy.etcd.lease import lease_keep_alive
from tests.support.etcd.embedded import Relay, connected, running
from tests.support.etcd.etcd_cluster import EtcdCluster
from tests.support.etcd.etcd_history import Hearing
from tests.support.waiting import PATIENCE_S, eventually

# The limit of a call. A member's failure or an election costs a call far less.
TIMEOUT_S = 60.0
SOON_S = TIMEOUT_S / 2
# At least, of connections under transactions.
CUTS = 6


class Failures:
    """The cluster behind relays, and the three ways in which its member `n` fails and recovers."""

    def __init__(self, cluster: EtcdCluster, relays: list[Relay]) -> None:
        self.cluster = cluster
        self.relays = relays

    @property
    def endpoints(self) -> list[str]:
        return [relay.endpoint for relay in self.relays]

    async def fail(self, how: str, n: int) -> None:
        member = self.cluster.members[n]
        if how == "killed":
            member.kill()
        elif how == "stopped":
            await member.freeze()
        else:
            self.relays[n].blackhole()

    async def mend(self, how: str, n: int) -> None:
        member = self.cluster.members[n]
        if how == "killed":
            self.cluster.start_member(member)
        elif how == "stopped":
            member.thaw()
        else:
            await self.relays[n].restore()
        await self.cluster.healthy()


@asynccontextmanager
async def failures(cluster: EtcdCluster) -> AsyncIterator[Failures]:
    relays = [Relay(endpoint) for endpoint in cluster.endpoints]
    for relay in relays:
        await relay.open()
    try:
        yield Failures(cluster, relays)
    finally:
        for relay in relays:
            await relay.shut()


def used_by(client: EtcdClient) -> int:
    """Return the endpoints that the client uses."""
    endpoint = client._open_members().in_order()[0].endpoint
    return [int(text.rpartition(":")[2]) for text in client.endpoints.split(",")].index(endpoint.port)


@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.long), "cut off"])
async def test_calls_renewals_and_watches_survive_a_member(
    etcd_cluster: EtcdCluster, etcd_prefix: str, how: str
) -> None:
    async with (
        failures(etcd_cluster) as members,
        connected(EtcdClient(members.endpoints, timeout_s=TIMEOUT_S)) as client,
    ):
        key = f"{etcd_prefix}/seen"
        await client.put(key, b"")
        lease = await client.lease_grant(24)
        await client.put(f"{etcd_prefix}/leased", b"", lease_id=lease.lease_id)
        renewed: list[float] = []
        keeping = lease_keep_alive(
            client, lease.lease_id, clock=time.monotonic, on_renewed=lambda sent_at, _: renewed.append(sent_at)
        )
        hearing = Hearing()
        mirror = PrefixMirror(client, [f"{etcd_prefix}/"], hearing)

        def revisions() -> list[int]:
            return [change[0] for change in hearing.changes]

        async with running(keeping), running(mirror.run()):
            await asyncio.wait_for(mirror.wait_synced(), PATIENCE_S)
            await eventually(lambda: bool(renewed))
            failing = used_by(client)
            await members.fail(how, failing)
            failed_at = time.monotonic()
            try:
                assert await client.get(key) is not None
                assert time.monotonic() - failed_at < SOON_S
                # From now on no call is delayed, not even every third.
                took, revision = [], 0
                for n in range(30):
                    began = time.monotonic()
                    revision = await client.put(key, b"%d" % n)
                    took.append(time.monotonic() - began)
                assert used_by(client) != failing
                held_up = [each for each in took if each >= members_module.PATIENCE_S]
                # The machine itself may delay one.
                assert len(held_up) <= 5, "a member that is known to have failed holds nothing up"
                await eventually(lambda: revision in revisions(), what="the watch has moved")
                assert (revisions(), hearing.restores) == (sorted(revisions()), 0)
                await eventually(lambda: renewed[-1] > failed_at, what="the renewals have moved")
            finally:
                await members.mend(how, failing)
            assert await client.get(f"{etcd_prefix}/leased") is not None


@pytest.mark.parametrize(
    "loop_factory", [pytest.param(asyncio.SelectorEventLoop, marks=pytest.mark.long), uvloop.new_event_loop]
)
def test_client_fails_over_on_both_event_loops(
    etcd_cluster: EtcdCluster, etcd_prefix: str, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def fail_over() -> None:
        async with failures(etcd_cluster) as members, connected(EtcdClient(members.endpoints)) as client:
            used = used_by(client)
            members.relays[used].blackhole()
            assert await client.get(f"{etcd_prefix}/a") is None
            assert used_by(client) != used

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(fail_over())


async def test_transaction_during_failure_runs_at_most_once(etcd_cluster: EtcdCluster, etcd_prefix: str) -> None:
    """Each adds one to the version of one key, so the version counts their executions."""
    async with (
        failures(etcd_cluster) as members,
        connected(EtcdClient(members.endpoints, timeout_s=TIMEOUT_S)) as client,
    ):
        key = f"{etcd_prefix}/count"
        done = unknown = refused = 0
        is_over = False

        async def write() -> None:
            nonlocal done, unknown, refused
            while not is_over:
                try:
                    await client.txn([], [put_op(key, b"")], [get_op(key)])
                except EtcdUnavailable as error:
                    unknown += error.maybe_applied
                    refused += not error.maybe_applied
                else:
                    done += 1
                await asyncio.sleep(0.002)

        async def disturb() -> None:
            nonlocal is_over
            for turn in range(CUTS * 10):
                wanted = done + 50
                await eventually(lambda wanted=wanted: done >= wanted, "transactions are done")  # type: ignore[misc]
                if turn >= CUTS and unknown:
                    break
                await members.relays[used_by(client)].cut()
            is_over = True

        async with asyncio.TaskGroup() as tasks:
            for work in (disturb(), *(write() for _ in range(8))):
                tasks.create_task(work)
        found = await client.get(key)
        assert found is not None
        assert done <= found.version <= done + unknown
        assert unknown > 0, "no transaction met a failure"
        assert refused == 0, "where nothing was done it is done at another member"


async def test_write_during_election_is_soon_uncertain(etcd_cluster: EtcdCluster, etcd_prefix: str) -> None:
    # If the machine stalls, etcd gives it up by itself before there is another leader.
    for _ in range(5):
        if "another leader was elected meanwhile" in await said_of_a_write_amid_an_election(etcd_cluster, etcd_prefix):
            return
    pytest.fail("nobody notices the election")


async def said_of_a_write_amid_an_election(etcd_cluster: EtcdCluster, etcd_prefix: str) -> str:
    leader, follower = etcd_cluster.leader(), etcd_cluster.followers()[0]
    async with connected(EtcdClient([follower.endpoint], timeout_s=TIMEOUT_S)) as client:
        await leader.freeze()
        try:
            # The follower forwards it to the known leader and gets no answer; etcd itself gives up after 6 s.
            with pytest.raises(EtcdUnavailable) as raised:
                await client.put(f"{etcd_prefix}/a", b"")
            assert raised.value.maybe_applied
            assert await client.put(f"{etcd_prefix}/a", b"again") > 0
        finally:
            leader.thaw()
            await etcd_cluster.healthy()
    return str(raised.value)


async def test_calls_without_majority_end_in_time_and_recover(etcd_cluster: EtcdCluster) -> None:
    async with connected(EtcdClient(etcd_cluster.endpoints, timeout_s=3)) as client:
        stopped = etcd_cluster.members[:2]
        for member in stopped:
            await member.freeze()
        try:
            for call in (client.put("/a", b""), client.get("/a")):
                began = time.monotonic()
                with pytest.raises(EtcdUnavailable):
                    await call
                assert time.monotonic() - began < SOON_S
        finally:
            for member in stopped:
                member.thaw()
            await etcd_cluster.healthy()
        await eventually(lambda: client.put("/a", b""), ignored=(EtcdUnavailable,))


async def test_slow_live_member_is_awaited(etcd_cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # No call is answered in so short a time: the client asks for the member's status each time, and gets it.
    monkeypatch.setattr(members_module, "PATIENCE_S", 0.0)
    async with connected(EtcdClient(etcd_cluster.endpoints)) as client:
        used = used_by(client)
        for _ in range(20):
            await client.get("/a")
        assert used_by(client) == used
