"""A user who must be stopped: by its removal, and by a rule, which leaves its connection open."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kproxy_codec.error_codes import NONE, TOPIC_AUTHORIZATION_FAILED
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import ServedBroker, beside, port_of, static_proxy
from tests.support.security import sasl_client as sasl
from tests.support.waiting import eventually

ALLOWED = '[[acls]]\nprincipal = "User:alice"\noperations = ["write"]\ntopics = ["t"]\n'
OTHERS = '[[acls]]\nprincipal = "User:bob"\noperations = ["write"]\ntopics = ["t"]\n'
DENIED = f'{ALLOWED}effect = "deny"\n'


async def logged_in(port: int) -> RawClient | None:
    """A client that has logged in as alice; None if it is refused."""
    client = await RawClient().connect(port)
    if (await sasl.present(client, sasl.plain("alice", sasl.USERS["alice"]))).error_code == NONE:
        return client
    client.abort()
    return None


async def is_refused(port: int) -> bool:
    client = await logged_in(port)
    if client is not None:
        client.abort()
    return client is None


async def written(client: RawClient) -> int:
    client.send(produce_frame({"t": [0]}, records=batch(0)))
    return (await client.answer()).codes[("t", 0)]


@asynccontextmanager
async def writing_alice(directory: Path) -> AsyncIterator[tuple[KproxyProcess, RawClient]]:
    """A proxy with users and rules, and a client that has logged in as alice and written."""
    broker = ServedBroker(1, answers_everything)
    await broker.start()
    rooms = f'[sasl]\nmechanisms = "PLAIN"\nusers = "{sasl.users_file(directory)}"\nwithout_tls = true\n'
    async with beside(static_proxy(directory, {1: broker.port}, rooms=rooms + ALLOWED)) as proxy:
        client = await logged_in(port_of(proxy))
        assert client is not None
        assert await written(client) == NONE
        yield proxy, client
    await broker.stop()


@pytest.mark.parametrize(
    ("told", "rules"),
    [(True, OTHERS), (True, DENIED), (False, OTHERS)],
    ids=["taken-by-sighup", "denied-by-sighup", "taken-by-itself"],
)
async def test_rule_stops_user_on_open_connection(tmp_path: Path, told: bool, rules: str) -> None:
    async with writing_alice(tmp_path) as (proxy, client):
        config = tmp_path / "kproxy.toml"
        config.write_text(config.read_text().replace(ALLOWED, rules))
        if told:
            proxy.signal(signal.SIGHUP)

        async def is_stopped() -> bool:
            return await written(client) == TOPIC_AUTHORIZATION_FAILED

        await eventually(is_stopped)
        client.abort()


@pytest.mark.parametrize("told", [True, False], ids=["by-sighup", "by-itself"])
async def test_removal_closes_connections_of_user(tmp_path: Path, told: bool) -> None:
    async with writing_alice(tmp_path) as (proxy, client):
        sasl.users_file(tmp_path, "bob")
        if told:
            proxy.signal(signal.SIGHUP)
        assert await client.is_closed()
        assert await is_refused(port_of(proxy))
