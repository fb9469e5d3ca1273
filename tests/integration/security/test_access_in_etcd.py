"""Users and rules of access in etcd apply at once, and survive the loss of etcd."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import NamedTuple

import aiokafka  # type: ignore[import-untyped]
import aiokafka.errors  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy.security.in_etcd import AccessKeys, encode_user
from kproxy_codec.api_keys import API_VERSIONS
from kproxy_codec.error_codes import NONE, TOPIC_AUTHORIZATION_FAILED
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame
from tests.support.etcd.embedded import own_etcd
from tests.support.processes.dev import Ended, KproxyProcess, run_kproxy, serving
from tests.support.processes.ports import free_port
from tests.support.processes.served import ServedBroker, counted
from tests.support.security import sasl_client as sasl
from tests.support.security.secured_clients import CLIENTS, OK
from tests.support.waiting import eventually

IN_ETCD = """
[sasl]
mechanisms = ["PLAIN", "SCRAM-SHA-256"]
users_in_etcd = true
without_tls = true

[access]
acls_in_etcd = true
"""
MECHANISM = "SCRAM-SHA-256"
TOPIC = "orders"
PASSWORD = "first-secret"
# The report of a client whose login fails.
REFUSED = "_AUTHENTICATION"


class Site(NamedTuple):
    """A proxy of two workers, before a broker, with users and rules in etcd."""

    proxy: KproxyProcess
    keys: AccessKeys
    where: list[str]
    directory: Path

    async def kproxy(self, *arguments: str) -> Ended:
        return await asyncio.to_thread(run_kproxy, *arguments, *self.where)

    async def done(self, *arguments: str) -> str:
        """Return the output of a command that must succeed."""
        ended = await self.kproxy(*arguments)
        assert ended.status == 0, ended
        return ended.stdout

    async def add_user(self, name: str, password: str = PASSWORD) -> None:
        file = self.directory / "password"
        file.write_text(password)
        await self.done("user", "add", name, "--password-file", str(file), "--iterations", "4096")

    async def allow(self, name: str) -> str:
        """Let a user write to the topic; return the rule's id."""
        told = await self.done(
            *("acl", "add", "--principal", f"User:{name}", "--topic", TOPIC),
            *("--operation", "write", "--operation", "create"),
        )
        return told.split()[-1]

    async def log_in(self, name: str, password: str = PASSWORD) -> str:
        """Log in and write one record; return the client's report."""
        return await asyncio.to_thread(CLIENTS["librdkafka"], self.proxy.kafka, TOPIC, MECHANISM, name, password)

    async def until_login(self, report: str, name: str, password: str = PASSWORD) -> None:
        await until(report, lambda: self.log_in(name, password))

    async def admit(self, name: str) -> None:
        """Add a user that may write to the topic, and wait until it can."""
        await self.add_user(name)
        await self.allow(name)
        await self.until_login(OK, name)


async def until(answer: object, ask: Callable[[], Awaitable[object]]) -> None:
    """Ask until this is the answer."""

    async def is_answered() -> bool:
        return await ask() == answer

    await eventually(is_answered)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("in-etcd")
    prefix = f"/{directory.name}"
    where = ["--etcd", etcd.endpoint, "--prefix", prefix]
    config = directory / "kproxy.toml"
    config.write_text(IN_ETCD)
    own = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    broker = ["broker", "--node-id", "1", "--replication-factor", "1", "--data-dir", directory / "data"]
    with (
        serving([*broker, *where, "--listen", "127.0.0.1:0"], directory / "broker.stderr"),
        serving(["serve", "--config", config, "--workers", "2", *where, *own], directory / "serve.stderr") as proxy,
    ):
        yield Site(proxy, AccessKeys(prefix), where, directory)


async def test_etcd_user_logs_in_at_once_until_removed(site: Site) -> None:
    assert await site.log_in("alice") == REFUSED
    await site.admit("alice")
    assert await site.done("user", "list") == "alice\tSCRAM-SHA-256, SCRAM-SHA-512\n"
    # The user gets another password, and is removed later.
    await site.add_user("alice", "second-secret")
    await site.until_login(OK, "alice", "second-secret")
    await site.until_login(REFUSED, "alice")
    await site.done("user", "remove", "alice")
    await site.until_login(REFUSED, "alice", "second-secret")
    assert (await site.kproxy("user", "remove", "alice")).status == 2
    assert "secret" not in site.proxy.stderr()


async def test_connections_end_with_their_user(site: Site) -> None:
    """Even if it is added again at once, unless with the same password."""
    await site.admit("erin")
    client = await RawClient().connect(int(site.proxy.kafka.rpartition(":")[2]))
    assert (await sasl.present(client, sasl.plain("erin", PASSWORD))).error_code == NONE
    await site.add_user("erin", "second-secret")
    await site.until_login(REFUSED, "erin")
    client.send(control_frame(API_VERSIONS, 0))
    assert (await client.answer(API_VERSIONS, 0)).message.error_code == NONE
    await site.done("user", "remove", "erin")
    await site.add_user("erin", "second-secret")
    assert await client.is_closed()
    await site.until_login(OK, "erin", "second-secret")
    assert site.proxy.stderr().count("its user was removed") == 1


async def test_changed_rule_applies_to_open_connection(site: Site) -> None:
    await site.add_user("bob")
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=site.proxy.kafka,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism=MECHANISM,
        sasl_plain_username="bob",
        sasl_plain_password=PASSWORD,
    )

    async def may_write() -> bool:
        try:
            await producer.send_and_wait(TOPIC, b"x", partition=0)
        except aiokafka.errors.TopicAuthorizationFailedError:
            return False
        return True

    await producer.start()
    try:
        # No rule allows this: with SASL, everything is denied by default.
        assert not await may_write()
        rule = await site.allow("bob")
        await until(True, may_write)
        connections = counted(site.proxy.admin, "kproxy_authentications_total")
        denial = await site.done(
            *("acl", "add", "--principal", "User:*", "--operation", "admin", "--topic", "ord*"), "--deny"
        )
        await until(False, may_write)
        listed = (await site.done("acl", "list")).splitlines()
        assert f"{rule}\tallow\tUser:bob create, write on topic {TOPIC}" in listed
        assert f"{denial.split()[-1]}\tdeny\tUser:* admin on topic ord*" in listed
        checked = await site.kproxy("acl", "check", "--principal", "User:bob", "--operation", "write", "--topic", TOPIC)
        assert (checked.status, checked.stdout.split()[0]) == (1, "denied")
        await site.done("acl", "remove", denial.split()[-1])
        await until(True, may_write)
        await site.done("acl", "remove", rule)
        await until(False, may_write)
        assert counted(site.proxy.admin, "kproxy_authentications_total") == connections
    finally:
        await producer.stop()


async def test_invalid_value_changes_nothing_and_is_logged_once(site: Site, etcd_client: EtcdClient) -> None:
    await site.admit("carol")
    failed = counted(site.proxy.admin, 'kproxy_tls_reloads_total{outcome="failed"}')
    await etcd_client.put(site.keys.user("carol"), b'{"credentials": ["SCRAM-SHA-256$4096:TOPSECRET"]}')
    await etcd_client.put(site.keys.acl("broken"), b'{"principal": "User:carol", "operations": ["fly"], "topics": []}')
    # Both workers count both.
    await eventually(lambda: counted(site.proxy.admin, 'kproxy_tls_reloads_total{outcome="failed"}') == failed + 4)
    assert await site.log_in("carol") == OK
    await site.admit("dave")
    # A change of another key does not apply the invalid value either.
    assert await site.log_in("carol") == OK
    lines = [line for line in site.proxy.stderr().splitlines() if "reload failed" in line]
    assert len(lines) == 2, lines
    assert site.keys.user("carol") in lines[0]
    assert "a credential must have the form" in lines[0]
    assert site.keys.acl("broken") in lines[1]
    assert "its last good value stays" in lines[0]
    assert "TOPSECRET" not in site.proxy.stderr()
    for what, key in (("user", site.keys.user("carol")), ("acl", site.keys.acl("broken"))):
        listed = await site.kproxy(what, "list")
        assert (listed.status, key in listed.stderr, "carol\t" in listed.stdout) == (1, True, False), listed
    await etcd_client.delete(site.keys.user("carol"))
    await etcd_client.delete(site.keys.acl("broken"))
    await site.until_login(REFUSED, "carol")


# Starts and outages without etcd


@asynccontextmanager
async def starting(directory: Path, endpoint: str, broker: ServedBroker, port: int) -> AsyncIterator[KproxyProcess]:
    """A proxy with a fixed table, which needs etcd only for users and rules."""
    config = directory / "kproxy.toml"
    config.write_text(
        f'[ownership]\nownership = "static"\netcd = "{endpoint}"\n[fleet]\nalone = true\n[brokers]\n'
        f'1 = "127.0.0.1:{broker.port}"\n[[topics]]\nname = "t"\nowners = [1]\n[[topics]]\nname = "u"\nowners = [1]\n'
        + IN_ETCD
    )
    arguments = ["serve", "--config", config, "--listen", f"127.0.0.1:{port}", "--admin", "127.0.0.1:0"]
    process = KproxyProcess(arguments, directory / "serve.stderr")
    try:
        yield process
    finally:
        await asyncio.to_thread(process.stop)


async def written(port: int, name: str, topic: str) -> int | str:
    """Log in and write; return the error code, or REFUSED if the login fails."""
    client = await RawClient().connect(port)
    try:
        if (await sasl.present(client, sasl.plain(name, sasl.USERS[name]))).error_code != NONE:
            return REFUSED
        client.send(produce_frame({topic: [0]}, records=batch(0)))
        return (await client.answer()).codes[(topic, 0)]
    finally:
        client.abort()


async def test_proxy_admits_clients_only_after_etcd_answers(tmp_path: Path) -> None:
    keys, port = AccessKeys("/kafscale"), free_port()
    broker = ServedBroker(1, answers_everything)
    await broker.start()
    async with own_etcd(tmp_path / "etcd") as (server, client):
        await client.put(keys.user("alice"), encode_user(sasl.credentials_of("alice")))
        await client.put(keys.acl("one"), b'{"principal": "User:alice", "operations": ["write"], "topics": ["t"]}')
        await server.stop()
        async with starting(tmp_path, server.endpoint, broker, port) as process:
            await eventually(lambda: "users and rules of access" in process.stderr(), process.stderr)
            with closing(socket.socket()) as taken:
                assert taken.connect_ex(("127.0.0.1", port)) != 0
            await server.start()
            await asyncio.to_thread(process.wait_ready)
            assert await written(port, "alice", "t") == NONE
            await client.put(keys.user("bob"), encode_user(sasl.credentials_of("bob")))
            await until(TOPIC_AUTHORIZATION_FAILED, lambda: written(port, "bob", "t"))
            await server.stop()
            assert [await written(port, "alice", topic) for topic in ("t", "u")] == [NONE, TOPIC_AUTHORIZATION_FAILED]
            assert await written(port, "bob", "t") == TOPIC_AUTHORIZATION_FAILED
            # Changes apply again once it is back.
            await server.start()
            await client.delete(keys.user("bob"))
            await until(REFUSED, lambda: written(port, "bob", "t"))
            assert await written(port, "alice", "t") == NONE
    await broker.stop()
