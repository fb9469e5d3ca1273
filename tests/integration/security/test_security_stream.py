"""The stream of security events of real proxies: all events, across workers and rotations, but no secret."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kproxy_codec.api_keys import METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import NONE, TOPIC_AUTHORIZATION_FAILED
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, control_frame, produce_frame
from tests.support.processes.dev import run_kproxy
from tests.support.processes.served import beside, counted, page, port_of, served, static_proxy
from tests.support.security import sasl_client as sasl
from tests.support.security.tls_files import Signer
from tests.support.waiting import eventually

ATTEMPTS = 300
CLIENTS = 10
ACLS = '[[acls]]\nprincipal = "User:alice"\noperations = ["write"]\ntopics = ["t"]\n'
TOKEN = "a-token-of-the-page"
# A wrong password and token, and the existing users' credentials.
SECRETS = ["wrong-secret", *sasl.USERS.values(), TOKEN, *map(str, sasl.credentials_of("alice").values())]


def rooms(directory: Path, *sasl_keys: str, access: str = "") -> str:
    users = sasl.users_file(directory)
    keys = ['mechanisms = ["PLAIN", "SCRAM-SHA-256"]', f'users = "{users}"', "without_tls = true", *sasl_keys]
    file = directory / "events.jsonl"
    return "\n".join(["[sasl]", *keys, "[access]", f'events = "{file}"', access, ""]) + ACLS


def events_in(directory: Path) -> list[dict[str, Any]]:
    """The events in all files, including renamed ones; fails for a partial line or one with a secret."""
    text = "".join(file.read_text("ascii") for file in sorted(directory.glob("events.jsonl*")))
    assert not [secret for secret in SECRETS if secret in text]
    return [json.loads(line) for line in text.splitlines()]


def of_kind(directory: Path, event: str) -> list[dict[str, Any]]:
    return [each for each in events_in(directory) if each["event"] == event]


async def fail(port: int, name: str) -> None:
    client = await RawClient().connect(port)
    assert (await sasl.present(client, sasl.plain(name, "wrong-secret"))).error_code != NONE
    client.abort()


async def alice(port: int) -> RawClient:
    return await sasl.logged_in(await RawClient().connect(port))


async def write_denied(port: int, number: int) -> None:
    client = await alice(port)
    for n in range(ATTEMPTS // CLIENTS):
        client.send(produce_frame({f"denied-{number}-{n}": [0]}, records=batch(n), correlation_id=n))
        (code,) = (await client.answer()).codes.values()
        assert code == TOPIC_AUTHORIZATION_FAILED
    client.abort()


async def rotate(directory: Path) -> None:
    for number in range(1_000):
        await asyncio.sleep(0.05)
        if (directory / "events.jsonl").exists():
            (directory / "events.jsonl").rename(directory / f"events.jsonl.{number}")


async def test_stream_is_complete_over_workers_and_rotations(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything, rooms=rooms(tmp_path), more=["--workers", "2"]) as site:
        proxy = site.process
        port, rotating = port_of(proxy), asyncio.create_task(rotate(tmp_path))
        for begin in range(0, ATTEMPTS, 30):
            await asyncio.gather(*(fail(port, f"user-{n}") for n in range(begin, begin + 30)))
        await asyncio.gather(*(write_denied(port, number) for number in range(CLIENTS)))
        await eventually(lambda: len(of_kind(tmp_path, "denied")) >= ATTEMPTS)
        rotating.cancel()
        said = proxy.stderr()
        assert counted(proxy.admin, "kproxy_security_events_lost_total") == 0
    assert said.count("client not authenticated") <= 2 * 60
    assert said.count("access denied") <= 2 * 5
    told = events_in(tmp_path)
    assert len(list(tmp_path.glob("events.jsonl*"))) > 2
    kinds = Counter(each["event"] for each in told)
    # The supervisor has the admin page and its own events.
    assert kinds == {"started": 3, "stopped": 3, "login": CLIENTS, "login_failed": ATTEMPTS, "denied": ATTEMPTS}
    failed = [each for each in told if each["event"] == "login_failed"]
    assert sorted(each["user"] for each in failed) == sorted(f"user-{n}" for n in range(ATTEMPTS))
    assert {(each["mechanism"], each["renewal"]) for each in failed} == {("PLAIN", False)}
    assert len({each["pid"] for each in failed}) == 2
    denied = [each for each in told if each["event"] == "denied"]
    assert len({tuple(each["names"]) for each in denied}) == ATTEMPTS
    same = {(each["principal"], each["operation"], each["resource"], each["error"]) for each in denied}
    assert same == {("User:alice", "write", "topic", "TOPIC_AUTHORIZATION_FAILED")}


async def test_stream_has_events_of_sessions_rules_and_page(tmp_path: Path) -> None:
    options = rooms(tmp_path, "session_lifetime_s = 1.5", access=f'[admin]\ntoken = "{TOKEN}"')
    async with served(tmp_path, answers_everything, rooms=options) as site:
        proxy = site.process

        async def told(event: str, is_meant: Callable[[dict[str, Any]], bool] = lambda each: True) -> dict[str, Any]:
            found: list[dict[str, Any]] = await eventually(lambda: [*filter(is_meant, of_kind(tmp_path, event))])
            assert len(found) == 1, found
            return found[0]

        client = await alice(port_of(proxy))
        login = await told("login")
        assert login["client"] == f"127.0.0.1:{client.own_port}"
        assert (login["principal"], login["mechanism"], login["renewal"]) == ("User:alice", "PLAIN", False)
        assert 0 < login["session_s"] <= 1.5
        client.send(control_frame(METADATA, 9, topics=[{"name": f"secret-{n}"} for n in range(150)]))
        await client.answer(METADATA, 9)
        denied = await told("denied")
        assert (len(denied["names"]), denied["names_total"], denied["operation"]) == (100, 150, "describe")
        assert (await told("session_ended"))["principal"] == "User:alice"
        client.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", sasl.USERS["alice"])))
        await told("login", lambda each: each["renewal"])
        await asyncio.sleep(1.1)
        client.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", "wrong-secret")))
        assert (await told("login_failed", lambda each: each["renewal"]))["user"] == "alice"

        hasty = await site.client()
        hasty.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("hasty", "wrong-secret")))
        await hasty.answer(SASL_HANDSHAKE, 1)
        hasty.abort()
        await told("login_failed", lambda each: each["user"] == "hasty")
        half = await site.client()
        half.send(sasl.handshake("SCRAM-SHA-256"), sasl.authenticate(b"n,,n=half,r=nonce"))
        await half.answer(SASL_HANDSHAKE, 1)
        await half.answer(SASL_AUTHENTICATE, 2)
        half.abort()
        assert "ended before" in (await told("login_failed", lambda each: each["user"] == "half"))["reason"]

        assert page(proxy.admin, "/table", Authorization="Bearer wrong-secret")[0] == 401
        assert (await told("admin_refused"))["status"] == 401

        sasl.users_file(tmp_path, "bob")
        file = tmp_path / "kproxy.toml"
        file.write_text(file.read_text().replace('["write"]', '["read"]'))
        proxy.signal(signal.SIGHUP)
        users = await told("changed", lambda each: each["what"] == "users")
        assert [users[key] for key in ("added", "removed", "changed")] == [[], ["alice"], []]
        acls = await told("changed", lambda each: each["what"] == "acls")
        assert [acls["added"], acls["removed"]] == [
            ["allow User:alice read topic t"],
            ["allow User:alice write topic t"],
        ]
        (tmp_path / "users.toml").write_text("nonsense wrong-secret")
        proxy.signal(signal.SIGHUP)
        await told("not_reloaded", lambda each: each["what"] == "users")
    assert events_in(tmp_path)[-1]["event"] == "stopped"


async def test_full_disk_does_not_stop_proxy(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.symlink_to("/dev/full")
    async with beside(static_proxy(tmp_path, {1: 1}, rooms=rooms(tmp_path))) as proxy:
        client = await alice(port_of(proxy))
        await eventually(lambda: "security events not written" in proxy.stderr())
        file.unlink()
        await eventually(lambda: file.exists() and of_kind(tmp_path, "login"))
        sasl.users_file(tmp_path, "bob")
        proxy.signal(signal.SIGHUP)
        (ended,) = await eventually(lambda: of_kind(tmp_path, "session_ended"))
        assert (ended["principal"], ended["reason"]) == ("User:alice", "its user was removed")
        client.abort()


async def test_connection_refused_by_tls_is_an_event(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "ca")
    cert, key = signer.issue("pair", "localhost", "127.0.0.1")
    tls = f'[tls]\ncert = "{cert}"\nkey = "{key}"\n[access]\nevents = "{tmp_path / "events.jsonl"}"\n'
    async with served(tmp_path, rooms=tls) as site:
        client = await site.client()
        client.send(control_frame(METADATA, 9, topics=None))
        (refused,) = await eventually(lambda: of_kind(tmp_path, "connection_refused"))
        assert refused["client"] == f"127.0.0.1:{client.own_port}"
        assert refused["outcome"] == "plain_text"


def test_unusable_file_is_an_error_at_start(tmp_path: Path) -> None:
    environ = {"KPROXY_ACCESS__EVENTS": f"{tmp_path}/missing/events.jsonl"}
    serve = ["serve", "--listen", "127.0.0.1:0", "--etcd", "http://127.0.0.1:1"]
    environ_of_check = {**environ, "KPROXY_OWNERSHIP__ETCD": "http://127.0.0.1:1"}
    for ended in (run_kproxy(*serve, environ=environ), run_kproxy("check-config", environ=environ_of_check)):
        assert ended.status == 2
        assert "access.events" in ended.stderr
        assert "make its directory" in ended.stderr
