"""The page's JSON alone, and the metrics alone, name who is to blame: a broker, a client, a topic, a principal, etcd.

Each fault is made on purpose at a real proxy process, which has no other trouble. `test_page_live` has the rest of the
page.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kproxy_codec.api_keys import API_VERSIONS
from tests.integration.proxy.test_page_live import asked, until
from tests.support.brokers.scripted_upstream import HOST, Asked, answers_everything
from tests.support.clients.raw_client import RawClient, control_frame, fetch_frame, produce_frame
from tests.support.etcd.embedded import freeze, own_etcd
from tests.support.etcd.leases import lease_key
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.served import Samples, Served, ServedBroker, beside, page, port_of, samples, served
from tests.support.security import sasl_client as sasl
from tests.support.waiting import eventually
from tests.support.wire.record_batches import build_batch

NAMED = ("--metrics-topics", "10", "--metrics-clients", "10")
# Answers of brokers, in seconds; above overview.SLOW_MS.
LATE_S = 0.8
# More than the kernel and a transport take for a client that reads nothing.
LARGE_BYTES = 24 << 20


def late(asked_for: Asked) -> None:
    asyncio.get_running_loop().call_later(LATE_S, answers_everything, asked_for)


def large(asked_for: Asked) -> None:
    results = {place: {"records": bytes(LARGE_BYTES), "high_watermark": 1} for place in asked_for.partitions}
    asked_for.answer(results=results)


async def told(site: KproxyProcess, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The overview, once it holds."""
    overview: dict[str, Any] = await until(site, "/overview", holds)
    return overview


async def metrics(process: KproxyProcess) -> Samples:
    return samples((await asyncio.to_thread(page, process.admin, "/metrics"))[1])


def highest(found: Samples, name: str, label: str) -> str:
    """The label of the series with the highest value."""
    rows = {labels: value for (each, labels), value in found.items() if each == name}
    return dict(max(rows, key=lambda labels: rows[labels]))[label]


async def writes(client: RawClient, **partitions: list[int]) -> None:
    client.send(produce_frame(dict(partitions)))
    await client.answer()


async def introduced(site: Served, name: str) -> RawClient:
    client = await site.client()
    client.send(control_frame(API_VERSIONS, 3, client_software_name=name, client_software_version="1"))
    await client.receive()
    return client


async def test_slow_broker_is_named(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything, late, answers_everything, more=NAMED) as site:
        client = await site.client()
        for _ in range(3):
            for partition in range(3):
                await writes(client, t=[partition])
        overview = await told(site.process, lambda page: "slow" in page["verdict"]["text"])
        assert overview["verdict"]["level"] == "warn"
        assert overview["verdict"]["text"].startswith("serving, 3 brokers, but broker 2 is slow: 8")
        assert [(each["id"], each["state"]) for each in overview["brokers"]] == [(1, "up"), (2, "slow"), (3, "up")]
        assert overview["brokers"][1]["latency_ms"] >= 1000 * LATE_S
        assert highest(await metrics(site.process), "kproxy_broker_request_seconds_sum", "broker") == "2"
        top = await asyncio.to_thread(run_kproxy, "top", "--admin", site.process.admin)
        assert "broker 2 is slow" in top.stdout


@pytest.mark.parametrize("way", ["sending", "reading"])
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_slow_client_is_named(tmp_path: Path, way: str, workers: int) -> None:
    more = [*NAMED, "--workers", str(workers)]
    async with served(tmp_path, answers_everything if way == "sending" else large, more=more) as site:
        for _ in range(5):
            await writes(await introduced(site, "quick"), t=[0]) if way == "sending" else await introduced(
                site, "quick"
            )
        slow = await introduced(site, "snail")
        if way == "sending":
            slow.send(produce_frame()[:-1])
        else:
            slow.pause_reading()
            # A read whose wait is over before its broker answers gets an empty answer.
            slow.send(fetch_frame(max_wait_ms=30_000))
        overview = await told(site.process, lambda page: page["notes"])
        (note,) = overview["notes"]
        assert note["about"] == f"client tests at 127.0.0.1:{slow.own_port}"
        assert note["does"].startswith(
            "has been sending a request for " if way == "sending" else "has not read its answers for "
        )
        # A client harms nobody but itself.
        assert overview["verdict"]["level"] == "good"
        assert f"{note['about']} {note['does']}" in overview["verdict"]["text"]
        first = (await asked(site.process, "/clients", order="slow"))["clients"][0]
        assert (first["software"], first["slow_at"], first["slow_s"] >= 1) == ("snail 1", way, True)
        series = ("kproxy_client_id_slow_seconds", (("at", way), ("client_id", "tests"), ("principal", "")))
        assert (await metrics(site.process))[series] >= 1


async def test_hot_topic_and_partition_are_named(tmp_path: Path) -> None:
    cold = "".join(f'[[topics]]\nname = "cold-{number}"\nowners = [1, 2]\n' for number in range(9))
    hot = '[[topics]]\nname = "hot"\nowners = [1, 2]\n'
    async with served(tmp_path, answers_everything, answers_everything, rooms=cold + hot, more=NAMED) as site:
        client, ends = await site.client(), asyncio.Event()

        async def load() -> None:
            number = 0
            while not ends.is_set():
                number += 1
                client.send(produce_frame({"hot": [1]}, records=bytes(build_batch([bytes(60_000)]))))
                await client.answer()
                await writes(client, hot=[0])
                await writes(client, **{f"cold-{number % 9}": [0]})
                await asyncio.sleep(0.02)

        loading = asyncio.create_task(load())
        overview = await told(site.process, lambda page: page["notes"])
        assert overview["notes"][0]["about"] == "topic hot"
        assert overview["verdict"]["level"] == "good"
        assert "topic hot has 9" in overview["verdict"]["text"]
        (note,) = (each for each in overview["notes"] if each["about"].startswith("partition"))
        assert note["about"] == "partition hot/1"
        assert re.fullmatch(r"has (9\d|100) % of its topic's bytes", note["does"])
        topics = await asked(site.process, "/topics")
        assert (topics["total"], topics["is_counted"], topics["topics"][0]["topic"]) == (11, True, "hot")
        assert topics["topics"][0]["owners"] == {"1": 1, "2": 1}
        assert topics["topics"][0]["busiest"] == 1
        assert topics["topics"][0]["busiest_bytes"] >= 0.9 * topics["topics"][0]["received_bytes"]
        found = await metrics(site.process)
        assert highest(found, "kproxy_topic_bytes_total", "topic") == "hot"
        series = "kproxy_topic_busiest_partition_bytes_total"
        assert highest(found, series, "topic") == "hot"
        assert highest(found, series, "partition") == "1"
        top = await asyncio.to_thread(run_kproxy, "top", "--admin", site.process.admin, "--view", "topics")
        assert top.stdout.splitlines()[3].startswith("hot ")
        ends.set()
        await loading


async def test_denied_principal_is_named(tmp_path: Path) -> None:
    users = sasl.users_file(tmp_path)
    keys = f'[sasl]\nmechanisms = ["PLAIN"]\nusers = "{users}"\nwithout_tls = true\n[access]\n'
    rules = '[[acls]]\nprincipal = "User:alice"\noperations = ["write"]\ntopics = ["t"]\n'
    async with served(tmp_path, answers_everything, rooms=keys + rules, more=NAMED) as site:
        for name in ("alice", "bob"):
            client = await site.client()
            await sasl.log_in(client, name)
            for _ in range(3):
                await writes(client, t=[0])
        overview = await told(site.process, lambda page: page["notes"])
        assert overview["notes"] == [{"about": "User:bob", "does": "was denied 3 times within a minute"}]
        assert "User:bob was denied 3 times" in overview["verdict"]["text"]
        denials = [each for each in overview["events"] if each["kind"] == "denial"]
        assert all("User:bob" in each["text"] for each in denials)
        assert (await asked(site.process, "/topics", order="errors"))["topics"][0]["errors"] == 3
        assert highest(await metrics(site.process), "kproxy_principal_denials_total", "principal") == "User:bob"


async def test_silent_etcd_is_named(tmp_path: Path) -> None:
    broker = await ServedBroker(1, answers_everything).start()
    try:
        async with own_etcd(tmp_path / "etcd") as (server, client):
            brokers = [{"NodeID": 1, "Host": HOST, "Port": broker.port}]
            await client.put("/kafscale/metadata/snapshot", json.dumps({"Brokers": brokers}).encode())
            await client.put(lease_key("/kafscale", "t", 0), b"1")
            arguments = ["serve", "--listen", f"{HOST}:0", "--admin", f"{HOST}:0", "--etcd", server.endpoint]
            async with beside(serving(arguments, tmp_path / "serve.stderr")) as process:
                try:
                    await told(process, lambda page: page["verdict"]["level"] == "good")
                    await freeze(server)
                    overview = await told(process, lambda page: page["verdict"]["level"] == "warn" and page["events"])
                    # Clients are served as before.
                    await writes(await RawClient().connect(port_of(process)), t=[0])
                    assert "the table is stale" in overview["verdict"]["text"]
                    assert "(etcd has been silent for " in overview["verdict"]["text"]
                    assert overview["table_age_s"] > 1
                    assert "the table is stale" in overview["events"][0]["text"]
                    found = await metrics(process)
                    assert found["kproxy_table_stale", (("source", "etcd"),)] == 1
                finally:
                    os.kill(server.pid, signal.SIGCONT)
                await eventually(lambda: _is_good(process))
    finally:
        await broker.stop()


async def _is_good(process: KproxyProcess) -> bool:
    return bool((await asked(process, "/overview"))["verdict"]["level"] == "good")
