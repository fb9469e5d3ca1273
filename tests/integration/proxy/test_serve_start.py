"""`kproxy serve` starts before its ownership source, and reads it again on SIGHUP."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kproxy.config import load_proxy_config
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy.proxy import sources
from kproxy.routing.topology import Topology
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.etcd.embedded import QUICK, connected, put_many
from tests.support.processes.dev import KPROXY, KproxyProcess
from tests.support.processes.ports import free_port, free_ports
from tests.support.processes.served import ServedBroker, page, port_of, served, static_proxy
from tests.support.waiting import eventually

PATIENCE_S = 60.0
T0 = ("t", 0)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections but never sends a byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@asynccontextmanager
async def started(stderr: Path, *arguments: str) -> AsyncIterator[KproxyProcess]:
    """A proxy that need not be ready soon."""
    process = KproxyProcess(["serve", "--listen", "127.0.0.1:0", *arguments], stderr)
    try:
        yield process
    finally:
        await asyncio.to_thread(process.stop)


async def is_ready(admin: str) -> bool:
    return await asyncio.to_thread(page, admin, "/readyz") == (200, "ready\n")


def waiting(process: KproxyProcess) -> Awaitable[object]:
    """Wait until it reports that it waits for its source."""
    return eventually(lambda: "Waiting for it" in process.stderr(), process.stderr)


async def test_proxy_waits_for_an_etcd_started_later(tmp_path: Path) -> None:
    etcd_port, admin_port = free_ports(2)
    endpoint, admin = f"http://127.0.0.1:{etcd_port}", f"127.0.0.1:{admin_port}"
    async with started(tmp_path / "stderr", "--etcd", endpoint, "--admin", admin) as process:
        await waiting(process)
        assert process.stderr().count(f"kproxy: etcd at {endpoint} does not answer") == 1
        assert "--etcd" in process.stderr()
        assert await asyncio.to_thread(page, admin, "/livez") == (200, "alive\n")
        status, text = await asyncio.to_thread(page, admin, "/readyz")
        assert status == 503
        assert text.startswith(f"starting: etcd at {endpoint} does not answer")
        broker = await ServedBroker(1).start()
        async with (
            EmbeddedEtcd(tmp_path / "etcd", client_port=etcd_port, extra_arguments=QUICK) as etcd,
            connected(EtcdClient([etcd.endpoint])) as client,
        ):
            address = b'{"node_id": 1, "host": "127.0.0.1", "port": %d}' % broker.port
            await put_many(client, [("/kafscale/brokers/1", address), ("/kafscale/partition-leases/t/0", b"1")])
            await asyncio.to_thread(process.wait_ready)
            # It may have loaded an empty table.
            await eventually(lambda: is_ready(admin))
            assert await produced(process, broker) == 1
        await broker.stop()


async def produced(process: KproxyProcess, *brokers: ServedBroker) -> int:
    """The id of the broker among `brokers` that receives records for t-0."""
    client = await RawClient().connect(port_of(process))
    client.send(produce_frame(records=batch(0)))
    asking = {asyncio.ensure_future(broker.next()): broker for broker in brokers}
    done, pending = await asyncio.wait(asking, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    (task,) = done
    task.result().answer()
    assert (await client.answer()).codes == {T0: 0}
    client.close()
    return asking[task].node_id


async def reloaded(process: KproxyProcess, outcome: str) -> None:
    """Send SIGHUP; wait until it reports this outcome."""
    seen = process.stderr().count(outcome)
    process.signal(signal.SIGHUP)
    await eventually(lambda: process.stderr().count(outcome) > seen, process.stderr)


async def test_proxy_waits_for_kafka_cluster_and_names_it(tmp_path: Path, silent_port: int) -> None:
    bootstrap = f"nowhere.invalid:9092,127.0.0.1:{silent_port}"
    async with started(tmp_path / "stderr", "--ownership", "kafka", "--bootstrap", bootstrap) as process:
        await waiting(process)
        said = process.stderr()
        assert f"no Kafka cluster answers at nowhere.invalid:9092, 127.0.0.1:{silent_port} (" in said
        assert "--bootstrap" in said
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0


async def test_missing_kafka_cluster_is_named_soon() -> None:
    flags = {"ownership": "kafka", "bootstrap": f"127.0.0.1:{free_port()}"}
    config = load_proxy_config(None, flags=flags, environ={})
    named: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group, asyncio.timeout(PATIENCE_S):
        began = time.monotonic()
        opening = group.create_task(sources.open_source(config, Topology(), named.set_result).__aenter__())
        assert "no Kafka cluster answers" in await named
        assert time.monotonic() - began < sources.PATIENCE_S
        opening.cancel()


@pytest.mark.long
async def test_second_waiting_proxy_finds_its_port_taken(tmp_path: Path) -> None:
    port, etcd_port = free_ports(2)
    listen = ["--listen", f"127.0.0.1:{port}", "--etcd", f"127.0.0.1:{etcd_port}"]
    async with (
        started(tmp_path / "one", *listen) as one,
        started(tmp_path / "two", *listen) as two,
    ):
        for process in (one, two):
            await waiting(process)
        async with EmbeddedEtcd(tmp_path / "etcd", client_port=etcd_port, extra_arguments=QUICK):
            lines = await asyncio.gather(*(asyncio.to_thread(process.read_line) for process in (one, two)))
            assert sorted(line.partition(" ")[0].strip() for line in lines) == ["", "ready"]
            refused = one if not lines[0] else two
            assert await asyncio.to_thread(refused.wait, PATIENCE_S) == 2
            assert f"kproxy: cannot listen on 127.0.0.1:{port} (" in refused.stderr()


@pytest.mark.parametrize(
    "silent", [pytest.param(False, id="refused", marks=pytest.mark.long), pytest.param(True, id="silent")]
)
async def test_waiting_proxy_ends_on_request(tmp_path: Path, silent: bool, silent_port: int) -> None:
    port = silent_port if silent else free_port()
    async with started(tmp_path / "stderr", "--etcd", f"127.0.0.1:{port}") as process:
        await waiting(process)
        # There is nothing to reload yet, and no reason to end.
        process.signal(signal.SIGHUP)
        await asyncio.sleep(0.2)
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
        assert process.stderr().count("Waiting for it") == 1


async def test_static_table_is_reread_on_sighup(tmp_path: Path) -> None:
    second = await ServedBroker(2).start()
    async with served(tmp_path, None) as s:
        process, first = s.process, s.broker
        file = tmp_path / "kproxy.toml"
        before = file.read_text()
        assert await produced(process, first, second) == 1
        # An invalid table changes nothing, and is reported.
        for wrong in ("[brokers]\n1 = ", before.replace("owners = [1]", "owners = [3]"), "[brokres]\n"):
            file.write_text(wrong)
            await reloaded(process, "configuration not reloaded")
            assert await produced(process, first, second) == 1
        file.write_text(before.replace("owners = [1]", "owners = [2]").replace("1 = ", "2 = ", 1))
        file.write_text(file.read_text().replace(str(first.port), str(second.port)))
        await reloaded(process, "ownership reloaded")
        assert "1 partitions and 1 brokers" in process.stderr()
        assert await produced(process, first, second) == 2
        table = await s.page("/table")
        assert f'"port":{first.port}' not in table[1].replace(" ", "")
    await second.stop()


async def test_proxy_ends_when_its_terminal_closes(tmp_path: Path) -> None:
    """A closed terminal also sends SIGHUP, and then the process should end."""
    file = tmp_path / "owners.toml"
    file.write_text('[brokers]\n1 = "127.0.0.1:1"\n[[topics]]\nname = "t"\nowners = [1]\n')
    master, terminal = pty.openpty()
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*KPROXY, "serve", "--ownership", "static", "--table", str(file), "--listen", "127.0.0.1:0"],
            stdin=terminal,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    os.close(terminal)
    try:
        await eventually(lambda: "ready " in (tmp_path / "out").read_text(), (tmp_path / "out").read_text)
        os.close(master)
        process.send_signal(signal.SIGHUP)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


async def test_server_that_is_not_etcd_ends_the_proxy(tmp_path: Path) -> None:
    etcd_port = free_port()
    """It serves without one; no waiting mends what answers there then."""
    arguments = ["--etcd", f"http://127.0.0.1:{etcd_port}"]
    with static_proxy(tmp_path, {1: 1}, more=arguments) as process:
        server = grpc.aio.server()
        server.add_insecure_port(f"127.0.0.1:{etcd_port}")
        await server.start()
        try:
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == 2, process.stderr()
        finally:
            await server.stop(None)
        assert f"kproxy: What answers at http://127.0.0.1:{etcd_port} is not etcd" in process.stderr()


# Only a bug ends this task, so the test ends it.
WITHOUT_DEADLINES = """
import sys
from kproxy.cli import main
from kproxy.proxy.server import Listener

async def fail(*_):
    raise RuntimeError("no deadline is watched")

Listener._watch_deadlines = fail
sys.exit(main())
"""


async def test_proxy_that_cannot_watch_deadlines_ends(tmp_path: Path) -> None:
    command = (sys.executable, "-P", "-c", WITHOUT_DEADLINES)
    with static_proxy(tmp_path, {1: free_port()}, command=command) as process:
        assert await asyncio.to_thread(process.wait) not in (0, -signal.SIGKILL)
        assert "no deadline is watched" in process.stderr()
