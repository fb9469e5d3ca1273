"""`kproxy serve --workers N`: several processes that look like one proxy; one that dies is soon replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import psutil
import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy.fleet.registration import encode_proxy, proxies_prefix
from kproxy.fleet.view import named_in
from kproxy.observe.table import TablePage
from kproxy.routing.fleet import FIRST_NODE_ID, Proxy
from tests.integration.commands.test_startup_errors import refusal
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.kafka_io import Record, read_topic
from tests.support.clients.librdkafka_client import run_librdkafka
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.served import ServedBroker, page, port_of, refused, samples, served, static_proxy
from tests.support.processes.worker_processes import (
    all_gone,
    clients_of_each,
    connections_of,
    page_at,
    page_sockets,
    shown,
    until,
    worker_pids,
)
from tests.support.rules import examples
from tests.support.waiting import PATIENCE_S

WORKERS = 3
KILLS = examples(2)
T0 = ("t", 0)
# Far below the limit for a worker's end, far above its usual time.
SOON_S = 25.0
TABLE = '[brokers]\n1 = "127.0.0.1:{port}"\n[[topics]]\nname = "t"\nowners = {owners}\n'


def workers(count: int) -> list[str]:
    return ["--workers", str(count)]


async def produced(client: RawClient, n: int = 0) -> None:
    client.send(produce_frame(records=batch(n, producer_id=-1)))
    assert (await client.answer()).codes == {T0: 0}


async def killed(process: KproxyProcess, number: int) -> None:
    """kill -9 a worker; wait until its replacement runs."""
    victim = worker_pids(process)[number]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: worker_pids(process).get(number, victim) != victim, process.stderr)


async def test_connections_are_spread_and_counted_once(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything, more=workers(WORKERS)) as scene:
        process = scene.process
        port = port_of(process)
        assert port > 0
        clients = [await scene.client() for _ in range(120)]
        sent = received = 0
        for n, client in enumerate(clients):
            frames = [produce_frame(records=batch(n, producer_id=-1)), produce_frame(version=3)]
            client.send(*frames)
            sent += sum(map(len, frames))
        for client in clients:
            answer = await client.answer()
            assert answer.codes == {T0: 0}
            received += len(answer.frame) + len(await client.receive())
        # A hash spreads 120 over 3: fewer than 10 would be six standard deviations off.
        spread = {number: connections_of(pid, port) for number, pid in worker_pids(process).items()}
        assert set(spread) == {1, 2, 3}
        assert sum(spread.values()) == 120
        assert min(spread.values()) >= 10, spread
        read = await shown(process)
        assert read["kproxy_requests_total", (("api", "PRODUCE"), ("version", "9"))] == 120
        assert read["kproxy_requests_total", (("api", "PRODUCE"), ("version", "3"))] == 120
        assert read["kproxy_produce_duration_seconds_count", ()] == 240
        assert read["kproxy_produce_duration_seconds_bucket", (("le", "+Inf"),)] == 240
        assert read["kproxy_client_connections", ()] == 120
        assert read["kproxy_client_connections_accepted_total", ()] == 120
        assert read["kproxy_client_received_bytes_total", ()] == sent
        assert read["kproxy_client_sent_bytes_total", ()] == received
        # These are not sums: all workers have the same table.
        assert read["kproxy_table_partitions", ()] == 1
        assert read["kproxy_table_revision", (("source", "static"),)] == 1
        assert read["kproxy_workers", ()] == WORKERS
        for who in ("1", "2", "3", "supervisor"):
            assert read["process_resident_memory_bytes", (("worker", who),)] > 1 << 20


async def test_killed_worker_is_replaced_and_its_counters_stay(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything, more=workers(2)) as scene:
        process = scene.process
        clients = await clients_of_each(process)
        for held in clients.values():
            await produced(held[0])
        before = await shown(process)
        assert before["kproxy_worker_restarts_total", ()] == 0
        await killed(process, 1)
        assert await clients[1][0].is_closed()
        # The other worker is not affected.
        await produced(clients[2][0], 1)
        said: set[tuple[int, str]] = set()
        while (200, "ready\n") not in said:
            said.add(await scene.page("/readyz"))
        # A worker that is starting is neither reported as hung nor waited for.
        assert {text for _, text in said} <= {
            "ready\n",
            "ready, degraded: worker 1: it has ended, and another is starting\n",
            "ready, degraded: worker 1: it is starting\n",
            "ready, degraded: worker 1: starting: the routing table is not loaded yet\n",
        }
        assert {status for status, _ in said} == {200}
        assert "was ended by signal 9" in process.stderr()
        for held in (await clients_of_each(process)).values():
            await produced(held[0])
        after = await shown(process)
        assert after["kproxy_worker_restarts_total", ()] == 1
        assert after["kproxy_workers", ()] == 2
        # Two requests at first, one at the survivor, two at the end.
        assert after["kproxy_requests_total", (("api", "PRODUCE"), ("version", "9"))] == 5
        assert after["kproxy_client_sent_bytes_total", ()] > before["kproxy_client_sent_bytes_total", ()]
        assert after["kproxy_worker_up", (("worker", "1"),)] == 1


@pytest.mark.long
async def test_hung_worker_is_named_and_blocks_no_page(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything, more=workers(2)) as scene:
        process = scene.process
        clients = await clients_of_each(process)
        for held in clients.values():
            await produced(held[0])
        requests = ("kproxy_requests_total", (("api", "PRODUCE"), ("version", "9")))
        assert (await shown(process))[requests] == 2
        hung = worker_pids(process)[1]
        os.kill(hung, signal.SIGSTOP)
        try:
            await produced(clients[2][0], 1)
            read = await shown(process)
            assert read["kproxy_worker_up", (("worker", "1"),)] == 0
            assert read["kproxy_worker_up", (("worker", "2"),)] == 1
            # Its last counts are kept, or they would seem to restart.
            assert read[requests] == 3
            # Later checks do not wait.
            began = time.monotonic()
            for _ in range(20):
                status, text = await scene.page("/readyz")
            assert time.monotonic() - began < 20
            assert (status, text) == (200, "ready, degraded: worker 1: it does not answer\n")
            assert (await scene.page("/table"))[0] == 200
            assert await scene.page("/livez") == (200, "alive\n")
            assert (await scene.page("/table?worker=1"))[0] == 503
        finally:
            os.kill(hung, signal.SIGCONT)
        await until(lambda: page(process.admin, "/readyz") == (200, "ready\n"), process.stderr)
        assert (await shown(process))["kproxy_worker_up", (("worker", "1"),)] == 1


@pytest.mark.long
async def test_hung_workers_fail_the_liveness_check(tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}, more=workers(2)) as process:
        pids = worker_pids(process).values()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        assert await asyncio.to_thread(page, process.admin, "/livez") == (503, "no worker answers\n")
        assert await asyncio.to_thread(page, process.admin, "/readyz") == (503, "it does not answer\n")
        # They would never drain; a second signal ends the wait.
        process.signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, SOON_S) == 0
        assert process.stderr().count("worker killed") == 2


@pytest.mark.long(but=1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_is_passed_on_and_requests_are_answered(tmp_path: Path, number: int) -> None:
    async with served(tmp_path, None, limits={"drain_s": 60}, more=workers(2)) as scene:
        process = scene.process
        clients = [held[0] for held in (await clients_of_each(process)).values()]
        for client in clients:
            client.send(produce_frame())
        asked = [await scene.broker.next() for _ in clients]
        family = [psutil.Process(process.pid), *process.descendants()]
        pages = page_sockets(process)
        process.signal(number)
        await until(lambda: page(process.admin, "/readyz")[0] == 503, process.stderr)
        assert (await scene.page("/readyz"))[1].startswith("draining")
        await refused(port_of(process))
        for each in asked:
            each.answer()
        for client in clients:
            assert (await client.answer()).codes == {T0: 0}
            assert await client.is_closed()
        await scene.ended(SOON_S)
        assert all_gone(family)
        assert not pages[1].parent.exists()


@pytest.mark.long(but=1)
@pytest.mark.parametrize("more", [(), ("--drain-delay", "600")], ids=["", "with_a_delay"])
async def test_killed_supervisor_leaves_no_process(tmp_path: Path, more: tuple[str, ...]) -> None:
    upstream = await ServedBroker(1, answers_everything).start()
    arguments = ["serve", *static_arguments(tmp_path, upstream.port), *workers(2), *more]
    process = KproxyProcess(arguments, tmp_path / "stderr")
    try:
        await asyncio.to_thread(process.wait_ready)
        clients = [held[0] for held in (await clients_of_each(process)).values()]
        family = process.descendants()
        assert len(family) == 2
        pages = page_sockets(process)
        (directory,) = {each.parent for each in pages.values()}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        for each in pages.values():
            assert await asyncio.to_thread(page_at, each, "/readyz") == (200, "ready\n")
        os.kill(process.pid, signal.SIGKILL)
        assert await asyncio.to_thread(all_gone, family)
        assert not directory.exists()
        for client in clients:
            assert await client.is_closed()
    finally:
        process.stop()
    await upstream.stop()


def static_arguments(directory: Path, port: int, owners: str = "[1]") -> list[str | Path]:
    table = directory / "table.toml"
    table.write_text(TABLE.format(port=port, owners=owners))
    return ["--ownership", "static", "--table", table, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]


def partitions(process: KproxyProcess, number: int) -> int:
    """The number of partitions in one worker's table."""
    status, text = page(process.admin, f"/table?worker={number}")
    if status != 200:
        return -1
    return sum(len(topic.partitions) for topic in msgspec.json.decode(text, type=TablePage).topics)


@pytest.mark.long
async def test_reloaded_table_reaches_present_and_later_workers(tmp_path: Path) -> None:
    arguments = static_arguments(tmp_path, 1)
    with serving(["serve", *arguments, *workers(2)], tmp_path / "stderr") as process:
        assert [partitions(process, number) for number in (1, 2)] == [1, 1]
        static_arguments(tmp_path, 1, owners="[1, 1, 1]")
        process.signal(signal.SIGHUP)
        await until(lambda: [partitions(process, number) for number in (1, 2)] == [3, 3], process.stderr)
        # An invalid one is reported once, and reaches no worker.
        static_arguments(tmp_path, 1, owners="[1, 7]")
        process.signal(signal.SIGHUP)
        await until(lambda: "not in [brokers]" in process.stderr(), process.stderr)
        await killed(process, 2)
        await until(lambda: partitions(process, 2) >= 0, process.stderr)
        assert [partitions(process, number) for number in (1, 2)] == [3, 3]
        assert process.stderr().count("not in [brokers]") == 1
        assert await asyncio.to_thread(page, process.admin, "/table?worker=3") == (
            400,
            "unknown worker 3; expected 1 to 2\n",
        )
        shown_by_command = await asyncio.to_thread(run_kproxy, "table", "--admin", process.admin)
        assert "3 partitions owned" in shown_by_command.stdout


async def test_limits_on_all_connections_are_shared_out(tmp_path: Path) -> None:
    limits = {"max_connections": 5, "max_in_flight_bytes_total": 1_000_001}
    async with served(tmp_path, answers_everything, limits=limits, more=workers(2)) as scene:
        process = scene.process
        for _ in range(60):
            await scene.client()
        refused = ("kproxy_client_connections_refused_total", ())
        await until(lambda: samples(page(process.admin, "/metrics")[1])[refused] == 55, process.stderr)
        spread = Counter(connections_of(pid, port_of(process)) for pid in worker_pids(process).values())
        assert spread == {2: 1, 3: 1}


@pytest.mark.long
async def test_taken_port_is_not_shared(tmp_path: Path) -> None:
    """Neither with another program, nor with workers whose port could be shared."""
    arguments = static_arguments(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        sentence = await asyncio.to_thread(refusal, "serve", *arguments, *workers(2), "--listen", address)
        assert f"cannot listen on {address}" in sentence
        assert "--listen" in sentence
    with serving(["serve", *arguments, *workers(2)], tmp_path / "stderr") as process:
        for count in (1, 2):
            said = await asyncio.to_thread(refusal, "serve", *arguments, *workers(count), "--listen", process.kafka)
            assert f"cannot listen on {process.kafka}" in said
        said = await asyncio.to_thread(refusal, "serve", *arguments, *workers(2), "--admin", process.admin)
        assert "--admin" in said


async def test_workers_that_cannot_start_say_why_once() -> None:
    """The server is not an etcd: waiting does not help, and all workers find out."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    endpoint = f"http://127.0.0.1:{port}"
    try:
        said = await asyncio.to_thread(refusal, "serve", "--listen", "127.0.0.1:0", "--etcd", endpoint, *workers(3))
    finally:
        # A server that is collected while it runs waits for ever.
        await server.stop(None)
    assert said.startswith(f"kproxy: What answers at {endpoint} is not etcd")


@pytest.mark.long
async def test_workers_waiting_for_source_say_so_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        etcd_at, address = (f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
    arguments = ["--etcd", etcd_at, "--listen", address, *workers(2)]
    process = KproxyProcess(["serve", *arguments], tmp_path / "stderr")
    try:
        await until(lambda: "Waiting for it" in process.stderr(), process.stderr)
        family = process.descendants()
        assert len(family) == 2
        # The port is taken before a process listens on it.
        assert f"cannot listen on {address}" in await asyncio.to_thread(refusal, "serve", *arguments)
        assert process.stderr().count("Waiting for it") == 1, process.stderr()
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, SOON_S) == 0
        assert all_gone(family)
    finally:
        process.stop()


def proxies(process: KproxyProcess, number: int) -> list[int]:
    """The ports of the proxies that a worker names to clients; empty if it does not answer."""
    status, text = page(process.admin, f"/table?worker={number}")
    return [each.port for each in msgspec.json.decode(text, type=TablePage).proxies] if status == 200 else []


@pytest.mark.long
async def test_workers_are_one_among_several_proxies(
    etcd: EmbeddedEtcd, etcd_client: EtcdClient, etcd_prefix: str, tmp_path: Path
) -> None:
    upstream = await ServedBroker(1).start()
    fleet = ["--etcd", etcd.endpoint, "--prefix", etcd_prefix, "--lease-ttl", "60"]
    with serving(
        ["serve", *static_arguments(tmp_path, upstream.port), *fleet, *workers(2)], tmp_path / "stderr"
    ) as process:
        port = port_of(process)
        mine = Proxy(FIRST_NODE_ID, "127.0.0.1", port)
        assert await named_in(etcd_client, etcd_prefix) == [mine]
        key = f"{proxies_prefix(etcd_prefix)}{FIRST_NODE_ID}"
        entry = await etcd_client.get(key)
        await etcd_client.put(
            f"{proxies_prefix(etcd_prefix)}{FIRST_NODE_ID + 1}", encode_proxy(Proxy(FIRST_NODE_ID + 1, "other", 1))
        )
        await killed(process, 1)
        for number in (1, 2):
            await until(lambda number=number: proxies(process, number) == [port, 1], process.stderr)
        assert await etcd_client.get(key) == entry, "one that is replaced changes nothing about it"
        read = await shown(process)
        assert (read["kproxy_fleet_registered", ()], read["kproxy_fleet_proxies", ()]) == (1, 2)
        assert '"registration":"registered"' in page(process.admin, "/table")[1]
        client = await RawClient().connect(port)
        client.send(produce_frame())
        asked = await upstream.next()
        process.signal(signal.SIGTERM)
        await refused(port)
        # The others no longer send clients here while requests in flight are unanswered.
        assert [each.host for each in await named_in(etcd_client, etcd_prefix)] == ["other"]
        asked.answer()
        assert (await client.answer()).codes == {T0: 0}
        client.close()
        assert await asyncio.to_thread(process.wait, SOON_S) == 0
    await upstream.stop()


def busy(process: KproxyProcess) -> int:
    """The worker with more connections, once both are up: the other may have none."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        held = {pid: connections_of(pid, port_of(process)) for pid in worker_pids(process).values()}
        if len(held) == 2 and any(held.values()):
            return max(held, key=lambda pid: held[pid])
        assert time.monotonic() < deadline, process.stderr()
        time.sleep(0.05)


def test_killed_workers_lose_and_duplicate_no_record(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    """Under an idempotent client, before brokers whose owners are in etcd."""
    topic = f"workers-{uuid.uuid4().hex[:8]}"
    arguments = ["serve", "--etcd", dev_cluster.etcd, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--alone"]
    with serving([*arguments, *workers(2)], tmp_path / "stderr") as process:
        assert process.etcd == dev_cluster.etcd

        sent: list[bytes] = []

        def records(count: int) -> Iterator[Record]:
            for _ in range(count):
                sent.append(b"%d" % len(sent))
                yield Record(sent[-1], bytes(4 << 10))

        def under_fire() -> Iterator[Record]:
            yield from records(100)
            for _ in range(KILLS):
                victim = psutil.Process(busy(process))
                # More than is sent meanwhile, in many requests: some are in flight at the kill.
                yield from records(2_000)
                victim.kill()
                yield from records(500)
                # Otherwise the next round might choose it again while the system still removes it.
                assert all_gone([victim])

        settings = {"enable.idempotence": True, "linger.ms": 0, "batch.num.messages": 10}
        run = run_librdkafka(topic, under_fire(), {"bootstrap.servers": process.kafka, **settings})
        assert run.errors == {}
        assert len(run.acknowledged) == len(sent)
        lying = read_topic(dev_cluster.kafka, topic, 1, len(sent))
        assert sorted(each.key or b"" for each in lying) == sorted(sent)
        at = {(each.partition, each.offset): each.key for each in lying}
        assert all(at[place] == sent[number] for number, place in run.acknowledged.items())
        # The last killed worker may not have been replaced yet.
        assert samples(page(process.admin, "/metrics")[1])["kproxy_worker_restarts_total", ()] >= KILLS - 1
