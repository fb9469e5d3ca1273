"""Users and passwords in etcd: tokens that are obtained, expire and are lost; errors without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kproxy.config.etcd import EtcdOptions, Secret
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import (
    EtcdClient,
    EtcdDenied,
    EtcdMisused,
    EtcdUnavailable,
    PrefixMirror,
    get_op,
    put_op,
)
from kproxy.etcd.lease import RENEWALS_PER_TTL, lease_keep_alive
from tests.support.etcd.embedded import QUICK, connected, running, written
from tests.support.etcd.etcd_cluster import EtcdCluster, running_cluster
from tests.support.etcd.etcd_history import Hearing
from tests.support.etcd.etcd_secured import PASSWORD, ask_gateway, enable_users
from tests.support.waiting import PATIENCE_S, eventually

TOKEN_TTL_S = 1
# The last: the cost of a password, whose minimum in etcd is 4.
USERS = ("--auth-token", "simple", "--auth-token-ttl", str(TOKEN_TTL_S), "--bcrypt-cost", "4")
OPTIONS = EtcdOptions(username="kproxy", password=Secret(PASSWORD))


class Asked(EtcdClient):
    """A client that counts how often it sends its password."""

    def __init__(self, endpoints: list[str], options: EtcdOptions = OPTIONS, **arguments: Any) -> None:
        super().__init__(endpoints, options, **arguments)
        self.times = 0

    async def _authenticate(self, name: str, password: str) -> str:
        self.times += 1
        return await super()._authenticate(name, password)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedEtcd]:
    """An etcd whose user `kproxy` has all keys that begin with /kproxy."""
    directory = tmp_path_factory.mktemp("guarded")
    async with EmbeddedEtcd(directory, extra_arguments=[*QUICK, *USERS]) as server:
        await enable_users(server.endpoint, prefix="/kproxy")
        yield server


async def test_expired_token_is_replaced_unnoticed(guarded: EmbeddedEtcd) -> None:
    async with connected(Asked([guarded.endpoint])) as client:
        await client.put("/kproxy/a", b"1")
        await asyncio.sleep(TOKEN_TTL_S + 1.5)
        before = client.times
        # Many need a new token at once; one requests it. None of the transactions ran twice.
        counts = [client.txn([], [put_op("/kproxy/count", b"")], [get_op("/kproxy/count")]) for _ in range(20)]
        await asyncio.gather(*counts)
        found = await client.get("/kproxy/count")
        assert found is not None
        assert found.version == 20
        # Retried if the machine stalls for a token's lifetime.
        assert before < client.times <= before + 3


async def test_renewals_and_watches_survive_expiring_tokens(guarded: EmbeddedEtcd) -> None:
    async with connected(Asked([guarded.endpoint])) as client, connected(Asked([guarded.endpoint])) as writer:
        lease = await client.lease_grant(8)
        await client.put("/kproxy/leased", b"", lease_id=lease.lease_id)
        hearing, put = Hearing(), list[int]()
        mirror = PrefixMirror(client, ["/kproxy/seen/"], hearing)
        keeping = lease_keep_alive(client, lease.lease_id, clock=time.monotonic, on_renewed=lambda *_: None)
        async with running(keeping), running(mirror.run()):
            await asyncio.wait_for(mirror.wait_synced(), PATIENCE_S)
            for _ in range(3):
                await asyncio.sleep(TOKEN_TTL_S + 0.5)
                put.append(await writer.put("/kproxy/seen/a", b""))
                await eventually(lambda: [change[0] for change in hearing.changes] == put)
            assert await writer.get("/kproxy/leased") is not None
        assert hearing.restores == 0


async def test_user_change_makes_client_fetch_new_tokens(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a key for signing tokens, long enough")
    arguments = [*QUICK, "--bcrypt-cost", "4", "--auth-token", f"jwt,priv-key={secret},sign-method=HS256"]
    async with EmbeddedEtcd(tmp_path / "etcd", extra_arguments=arguments) as server:
        await enable_users(server.endpoint, prefix="/kproxy")
        async with connected(Asked([server.endpoint])) as client:
            root = await ask_gateway(server.endpoint, "auth/authenticate", {"name": "root", "password": PASSWORD})
            await ask_gateway(server.endpoint, "auth/role/add", {"name": "another"}, root["token"])
            assert await client.put("/kproxy/a", b"2") > 0
            assert client.times == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (EtcdOptions(), "does not take this user .*empty.*: give the name with --etcd-username"),
        (EtcdOptions(username="kproxy", password=Secret("hunter2")), "does not take this user .*authentication failed"),
        (EtcdOptions(username="nobody", password=Secret("hunter2")), "does not take this user .*authentication failed"),
        (EtcdOptions(username="kproxy", password_file=Path("/nowhere/hunter2")), "password_file .* cannot be read"),
    ],
)
async def test_rejected_user_is_reported_at_once(guarded: EmbeddedEtcd, options: EtcdOptions, says: str) -> None:
    client = EtcdClient([guarded.endpoint], options)
    with pytest.raises(EtcdMisused, match=says) as raised:
        await client.connect()
    assert "hunter2" not in str(raised.value).replace("/nowhere/hunter2", "")
    assert "hunter2" not in repr(options).replace("/nowhere/hunter2", "")
    await client.close()


async def test_missing_permission_is_named(guarded: EmbeddedEtcd) -> None:
    async with connected(Asked([guarded.endpoint])) as client:
        with pytest.raises(EtcdDenied, match="does not permit Put"):
            await client.put("/elsewhere", b"")
        with pytest.raises(EtcdDenied, match="does not permit Range"):
            await client.get_prefix("/")


async def test_unneeded_password_does_no_harm(etcd: EmbeddedEtcd, etcd_prefix: str) -> None:
    async with connected(Asked([etcd.endpoint])) as client:
        await client.put(f"{etcd_prefix}/a", b"")
        assert client.times == 1


async def test_wrong_password_is_retried_with_growing_pauses(
    guarded: EmbeddedEtcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    async with connected(Asked([guarded.endpoint], EtcdOptions(username="kproxy", password_file=file))) as client:
        file.write_text("outdated\n")
        await asyncio.sleep(TOKEN_TTL_S + 1.5)
        began = time.monotonic()
        refused = 0
        while time.monotonic() < began + 1.5 or refused <= 3 * client.times:
            with pytest.raises(EtcdMisused, match="authentication failed"):
                await client.get("/kproxy/a")
            refused += 1
            await asyncio.sleep(0.01)
            assert time.monotonic() < began + PATIENCE_S, "it tries each time"
        # After 0.1 s, and then after increasing pauses.
        assert client.times <= 6 + (time.monotonic() - began) / 1.5
        file.write_text(f"{PASSWORD}\n")
        await eventually(lambda: client.put("/kproxy/a", b""), ignored=(EtcdMisused,))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def etcd_users(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdCluster]:
    """Three members of a current release, with the same users."""
    async with running_cluster(tmp_path_factory.mktemp("users"), USERS) as cluster:
        await enable_users(cluster.endpoints[0], prefix="/kproxy")
        yield cluster


async def test_tokens_forgotten_by_members_are_replaced(etcd_users: EtcdCluster) -> None:
    async with connected(Asked(etcd_users.endpoints)) as client:
        for member in etcd_users.members:
            member.kill()
            assert await written(client, "/kproxy/a")
            etcd_users.start_member(member)
            await eventually(lambda member=member: takes(member.endpoint))  # type: ignore[misc]


async def test_renewals_survive_token_expiry_between_them(etcd_users: EtcdCluster) -> None:
    """A current etcd checks a stream's token again at each renewal."""
    async with connected(Asked(etcd_users.endpoints)) as client:
        # So rare that nothing keeps the token alive.
        lease = await client.lease_grant(round((TOKEN_TTL_S + 2) * RENEWALS_PER_TTL))
        renewed: list[float] = []
        keeping = lease_keep_alive(
            client, lease.lease_id, clock=time.monotonic, on_renewed=lambda sent_at, _: renewed.append(sent_at)
        )
        async with running(keeping):
            await eventually(lambda: len(renewed) >= 2)
        assert client.times >= 2


async def takes(endpoint: str) -> bool:
    alone = EtcdClient([endpoint], OPTIONS, timeout_s=2)
    try:
        await alone.connect()
    except EtcdUnavailable:
        return False
    finally:
        await alone.close()
    return True
