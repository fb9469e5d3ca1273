"""deploy/etcd/roles.sh: each role can do its work, and cannot write another role's keys."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from kproxy.broker.keys import Keys
from kproxy.claims.keys import OwnKeys
from kproxy.config.etcd import EtcdOptions
from kproxy.dev.embedded_etcd import EmbeddedEtcd, find_etcd
from kproxy.etcd import EtcdClient, EtcdDenied
from kproxy.fleet.registration import proxies_prefix
from kproxy.security.in_etcd import AccessKeys
from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import NONE
from tests.support.claims.own_client import OwnClient
from tests.support.clients.kafka_io import produce, read_partition
from tests.support.clients.raw_client import RawClient
from tests.support.etcd.embedded import QUICK, connected
from tests.support.etcd.etcd_secured import PASSWORD
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.served import counted, page, port_of
from tests.support.security import sasl_client as sasl

SCRIPT = Path(__file__).parents[3] / "deploy/etcd/roles.sh"
PREFIX = "/roles"
TOPIC = "gated"
# Each role has a user of the same name.
PROXY, BROKER, ADMIN = "kproxy-proxy", "kproxy-broker", "kproxy-admin"


class Guarded(NamedTuple):
    endpoint: str
    environ: dict[str, str]

    def etcdctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([str(find_etcd().with_name("etcdctl")), *arguments], self.environ)

    def client(self, user: str) -> EtcdClient:
        return EtcdClient([self.endpoint], EtcdOptions(username=user, password=PASSWORD))


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """An etcd with users; the script has run twice, once before them and once as root."""
    directory = tmp_path_factory.mktemp("guarded")
    async with EmbeddedEtcd(directory, extra_arguments=[*QUICK, "--bcrypt-cost", "4"]) as server:
        path = f"{find_etcd().parent}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": server.endpoint}
        site = Guarded(server.endpoint, environ)
        await asyncio.to_thread(make_users, site)
        yield site


def make_users(site: Guarded) -> None:
    done = [run([str(SCRIPT), PREFIX], site.environ)]
    # As granted by earlier versions; the next run narrows it.
    done += (
        site.etcdctl("role", "grant-permission", PROXY, "readwrite", f"{PREFIX}/{earlier}", "--prefix")
        for earlier in ("kproxy/", "kproxy/own")
    )
    for user, role in (("root", "root"), (PROXY, PROXY), (BROKER, BROKER), (ADMIN, ADMIN)):
        done.append(site.etcdctl("user", "add", user, "--new-user-password", PASSWORD))
        done.append(site.etcdctl("user", "grant-role", user, role))
    done.append(site.etcdctl("auth", "enable"))
    site.environ["ETCDCTL_USER"] = f"root:{PASSWORD}"
    done.append(run([str(SCRIPT), PREFIX], site.environ))
    assert all(each.returncode == 0 for each in done), done


@contextmanager
def started(site: Guarded, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KproxyProcess]]:
    """A broker and two proxies, each with its role."""
    there = ["--etcd", site.endpoint, "--prefix", PREFIX, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    broker = ["broker", "--node-id", "1", "--replication-factor", "1", "--data-dir", str(directory / "data")]
    serve = ["serve", "--writer-group", f"{TOPIC}=writers"]
    monkeypatch.setenv("KPROXY_ETCD__PASSWORD", PASSWORD)
    with ExitStack() as stack:
        processes = []
        for number, (command, user) in enumerate(((broker, BROKER), (serve, PROXY), (serve, PROXY))):
            process = KproxyProcess([*command, *there, "--etcd-username", user], directory / f"{number}.stderr")
            stack.callback(process.stop)
            processes.append(process)
        for process in processes:
            process.wait_ready()
        yield processes


async def test_proxy_and_broker_work_with_their_roles(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(guarded, tmp_path, monkeypatch) as (_, proxy, other):
        values = [uuid.uuid4().bytes for _ in range(3)]
        await asyncio.to_thread(produce, proxy.kafka, "plain", values)
        assert await asyncio.to_thread(read_partition, other.kafka, "plain", 0, 3) == values
        # Each is registered and knows the other.
        for each in (proxy, other):
            assert counted(each.admin, "kproxy_fleet_registered") == 1
            assert counted(each.admin, "kproxy_fleet_proxies") == 2
        status, text = await asyncio.to_thread(page, proxy.admin, "/replication")
        assert status == 200, text
        assert '"plain"' in text
        # A claim, and a write that requires it.
        client = await OwnClient.connect("127.0.0.1", port_of(proxy), client_id="writer")
        await client.create_topic(TOPIC, 1)
        response = await client.own("writers", [(TOPIC, 0)])
        assert (response.error_code, [each.error_code for each in response.resources]) == (NONE, [NONE])
        await client.close()
        asked = ["doctor", "--etcd", guarded.endpoint, "--prefix", PREFIX, "--etcd-username", PROXY]
        examined = await asyncio.to_thread(run_kproxy, *asked)
        assert "FAIL" not in examined.stdout, examined.stdout
        for each in (proxy, other):
            assert "denied" not in each.stderr().lower(), each.stderr()
            assert each.stop() == 0
    # Their keys in etcd are gone: they may revoke their own leases.
    left = guarded.etcdctl("get", "--prefix", proxies_prefix(PREFIX), "--keys-only")
    assert left.stdout.strip() == "", left


KEYS = Keys(PREFIX)
OWN = OwnKeys(PREFIX)
BROKERS_KEYS = (
    KEYS.broker(9),
    KEYS.lease("t", 0),
    KEYS.topic("t"),
    KEYS.state("t", 0),
    KEYS.fence("t", 0),
    KEYS.cluster_id,
    KEYS.replication_secret,
)
PROXYS_KEYS = (f"{proxies_prefix(PREFIX)}1000009", OWN.claim("g", "t/0"), OWN.member("9"), OWN.at_work)
ACCESS = AccessKeys(PREFIX)
ADMINS_KEYS = (ACCESS.user("alice"), ACCESS.acl("one"))
# Each writable key of a role, with more characters: a grant ends where the key or its directory ends.
NEXT_KEYS = tuple(
    f"{PREFIX}/{directory}-evil{rest}"
    for directory, rest in (
        *(("kproxy/ownership", ""), ("kproxy/own", "/g"), ("kproxy/own-proxies", "/9"), ("kproxy/own-at-work", "")),
        *(("kproxy/proxies", "/9"), ("kproxy/users", "/u"), ("kproxy/acls", "/a"), ("brokers", "/9")),
        *(("partition-leases", "/t/0"), ("refbroker", "/topics/t"), ("producer-ids", "")),
    )
)
NOBODYS_KEYS = (f"{PREFIX}/metadata/snapshot", f"{PREFIX}/group-leases/g", f"{PREFIX}/else", "/elsewhere", *NEXT_KEYS)


@pytest.mark.parametrize(
    ("user", "may", "may_not"),
    [
        (PROXY, (*PROXYS_KEYS, KEYS.producer_ids), (*BROKERS_KEYS, *ADMINS_KEYS, *NOBODYS_KEYS)),
        (BROKER, (*BROKERS_KEYS, KEYS.producer_ids), (*PROXYS_KEYS, *ADMINS_KEYS, *NOBODYS_KEYS)),
        (ADMIN, ADMINS_KEYS, (*PROXYS_KEYS, *BROKERS_KEYS, *NOBODYS_KEYS, KEYS.producer_ids)),
    ],
)
async def test_each_role_writes_only_its_own_keys(
    user: str, may: tuple[str, ...], may_not: tuple[str, ...], guarded: Guarded
) -> None:
    async with connected(guarded.client(user)) as client:
        for key in may:
            await client.put(key, b"1")
            await client.delete(key)
        for key in may_not:
            with pytest.raises(EtcdDenied):
                await client.put(key, b"1")
            with pytest.raises(EtcdDenied):
                await client.delete(key)


async def test_proxy_reads_users_and_rules_of_administrator(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KPROXY_ETCD__PASSWORD", PASSWORD)
    (tmp_path / "password").write_text("alice-secret")
    admin = ["--etcd", guarded.endpoint, "--prefix", PREFIX, "--etcd-username", ADMIN]
    add_user = ["user", "add", "alice", "--password-file", str(tmp_path / "password"), "--iterations", "4096"]
    add_rule = ["acl", "add", "--principal", "User:alice", "--operation", "describe", "--cluster"]
    for command in (add_user, add_rule):
        ended = await asyncio.to_thread(run_kproxy, *command, *admin)
        assert ended.status == 0, ended
    ended = await asyncio.to_thread(run_kproxy, *add_rule, *admin[:-1], PROXY, "--id", "mine")
    assert (ended.status, "permission denied" in ended.stderr) == (2, True), ended
    config = tmp_path / "kproxy.toml"
    config.write_text(
        '[sasl]\nmechanisms = "PLAIN"\nusers_in_etcd = true\nwithout_tls = true\n[access]\nacls_in_etcd = true\n'
    )
    serve = ["serve", "--config", config, "--listen", "127.0.0.1:0", *admin[:-1], PROXY]
    with serving(serve, tmp_path / "stderr") as proxy:
        client = await RawClient().connect(port_of(proxy))
        client.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", "alice-secret")))
        await client.answer(SASL_HANDSHAKE, 1)
        assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == NONE
        client.abort()
        assert "ACLs are empty" not in proxy.stderr()


async def test_proxy_cannot_read_the_replication_secret(guarded: Guarded) -> None:
    async with connected(guarded.client(PROXY)) as client:
        with pytest.raises(EtcdDenied):
            await client.get(KEYS.replication_secret)


@pytest.mark.parametrize(
    ("prefix", "roles"),
    [
        *(("kafscale", ""), ("/kafscale/", ""), ("/", "")),
        *(("/k", "one"), ("/k", "a,"), ("/k", "a,b,"), ("/k", "a,b,a"), ("/k", "a,b,c,d")),
    ],
)
def test_invalid_arguments_are_refused_before_any_request(prefix: str, roles: str) -> None:
    ended = run([str(SCRIPT), prefix], {"PATH": "/nowhere", "ROLES": roles} if roles else {"PATH": "/nowhere"})
    assert ended.returncode == 2, ended
    assert ended.stderr.startswith("roles.sh: ")
