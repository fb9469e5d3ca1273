"""All of the chart's alerts fire in a real Prometheus that scrapes real proxies before real brokers.

The rules are the chart's with shorter durations (tests.support.processes.prometheus). `CASES` has the faults that need
one proxy and nothing else's help, with the alerts that they raise; the tests below break clusters.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kproxy_codec import api_keys, own
from kproxy_codec.error_codes import INVALID_RECORD
from tests.support.brokers.faulty_disk import FaultyDisk, build_shim
from tests.support.brokers.real_kafka import start_real_kafka
from tests.support.brokers.reference_broker import BrokerProcess, start_brokers
from tests.support.brokers.scripted_upstream import HOST, Asked, broker_process
from tests.support.claims.own_client import OwnClient
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.etcd.embedded import own_etcd
from tests.support.processes.dev import KPROXY, KproxyProcess, serving
from tests.support.processes.ports import free_port
from tests.support.processes.prometheus import FIRES_WITHIN_S, HOLD_S, RULES, Cause, prometheus
from tests.support.processes.served import ServedBroker, beside, counted, kafka_proxy, port_of, served, static_proxy
from tests.support.scene import ANSWERS
from tests.support.security import sasl_client as sasl
from tests.support.security.tls_files import Signer
from tests.support.waiting import eventually, wait_for
from tests.support.wire.fattest import control_request
from tests.support.wire.record_batches import build_batch

# Prometheus is not everywhere.
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (a package of Debian)"),
]

Broken = AsyncIterator[tuple[Sequence[str], Cause]]
Scene = Callable[[Path], AbstractAsyncContextManager[tuple[Sequence[str], Cause]]]


def once(cause: Cause) -> Cause:
    """What does it the first time only."""
    left = [cause]

    async def do() -> None:
        if left:
            await left.pop()()

    return do


def written(port: int, *partitions: int, **fields: Any) -> Cause:
    """What writes to these partitions of `t`, one after the other, each on a connection of its own."""

    async def write() -> None:
        for partition in partitions:
            client = await RawClient().connect(port)
            client.send(produce_frame({"t": [partition]}, **fields))
            await client.answer()
            client.close()

    return write


@asynccontextmanager
async def slow_broker(tmp_path: Path) -> Broken:
    """Of two brokers, the first takes a second and a half for each request."""

    def script(asked: Asked) -> None:
        asyncio.get_running_loop().call_later(1.5, asked.answer)

    async with served(tmp_path, script, ANSWERS) as s:
        yield [s.process.admin], written(port_of(s.process), 0, 1, 1)


@asynccontextmanager
async def refusing_broker(tmp_path: Path) -> Broken:
    """Of two brokers, the second refuses every batch."""
    async with served(tmp_path, ANSWERS, lambda asked: asked.answer(results={("t", 1): INVALID_RECORD})) as s:
        yield [s.process.admin], written(port_of(s.process), 0, 1)


@asynccontextmanager
async def late_broker(tmp_path: Path) -> Broken:
    """A broker that answers no request."""
    async with served(tmp_path, None) as s:
        yield [s.process.admin], written(port_of(s.process), 0, timeout_ms=300)


@asynccontextmanager
async def full_proxy(tmp_path: Path) -> Broken:
    """One client with nine requests of a hundred KiB that no broker answers, and eight idle ones."""
    limits = {"max_connections": 10, "max_open_requests": 10}
    limits |= {"max_in_flight_bytes": 1 << 20, "max_in_flight_bytes_total": 1 << 20}
    async with served(tmp_path, None, limits=limits) as s:

        async def fill() -> None:
            clients = [await s.client() for _ in range(9)]
            for n in range(9):
                clients[0].send(produce_frame(records=batch(n) + bytes(100 << 10), timeout_ms=600_000))

        yield [s.process.admin], once(fill)


@asynccontextmanager
async def old_certificate(tmp_path: Path) -> Broken:
    """A listener gets another certificate, which is in use when it ends."""
    authority = Signer(tmp_path / "authority")
    pair = authority.issue("listener", "localhost")
    async with served(tmp_path, ANSWERS, rooms=f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n') as s:

        async def replace() -> None:
            authority.issue("listener", "localhost", ends_in_s=25)

        yield [s.process.admin], once(replace)


@asynccontextmanager
async def guessed_password(tmp_path: Path) -> Broken:
    async with served(tmp_path, ANSWERS, rooms=sasl.plain_users(tmp_path) + sasl.ALLOW_ALL) as s:

        async def guess() -> None:
            for _ in range(10):
                client = await s.client()
                client.send(sasl.handshake("PLAIN"), sasl.authenticate(sasl.plain("alice", "guess")))

        yield [s.process.admin], guess


@asynccontextmanager
async def missing_rule(tmp_path: Path) -> Broken:
    """With users and without rules, all is denied."""
    async with served(tmp_path, ANSWERS, rooms=sasl.plain_users(tmp_path)) as s:

        async def write() -> None:
            client = await sasl.logged_in(await s.client())
            client.send(*[produce_frame(records=batch(n)) for n in range(10)])
            for _ in range(10):
                await client.answer()

        yield [s.process.admin], write


@asynccontextmanager
async def unanswered_writer(tmp_path: Path) -> Broken:
    """A claimant ends before a broker without fences has answered its write."""
    async with AsyncExitStack() as stack:
        etcd, _ = await stack.enter_async_context(own_etcd(tmp_path / "etcd"))
        more = ("--etcd", etcd.endpoint, "--writer-group=t=g")
        s = await stack.enter_async_context(served(tmp_path, None, more=more))

        async def write() -> None:
            writer = await OwnClient.connect(HOST, port_of(s.process))
            await writer.own("g", [("t/0", 1)])
            writer.send_produce("t", 0, b"last")
            await s.broker.next()
            await writer.close()

        yield [s.process.admin], once(write)


@asynccontextmanager
async def two_proxies(tmp_path: Path, *more: str) -> AsyncIterator[tuple[KproxyProcess, KproxyProcess]]:
    (tmp_path / "other").mkdir()
    async with served(tmp_path, ANSWERS, more=more) as one, served(tmp_path / "other", ANSWERS, more=more) as other:
        yield one.process, other.process


@asynccontextmanager
async def smaller_fleet(tmp_path: Path) -> Broken:
    """One of two proxies that share an etcd ends by SIGTERM; Prometheus does not know it."""
    async with AsyncExitStack() as stack:
        etcd, _ = await stack.enter_async_context(own_etcd(tmp_path / "etcd"))
        one, other = await stack.enter_async_context(two_proxies(tmp_path, "--etcd", etcd.endpoint))
        await eventually(lambda: counted(one.admin, "kproxy_fleet_proxies ") == 2)

        async def end() -> None:
            other.signal(signal.SIGTERM)

        yield [one.admin], once(end)


@asynccontextmanager
async def dead_proxies(tmp_path: Path) -> Broken:
    """One of two proxies dies, and then the other."""
    async with two_proxies(tmp_path) as alive:
        left = [*alive]

        async def kill() -> None:
            if left:
                left.pop().signal(signal.SIGKILL)
                await asyncio.sleep(2 * HOLD_S)

        yield [each.admin for each in alive], kill


@asynccontextmanager
async def dying_worker(tmp_path: Path) -> Broken:
    async with served(tmp_path, ANSWERS, more=("--workers", "2")) as s:
        *_, worker = s.process.children()

        async def kill() -> None:
            worker.kill()

        yield [s.process.admin], once(kill)


@asynccontextmanager
async def dying_proxy(tmp_path: Path) -> Broken:
    """A proxy is killed and started again, and again."""
    broker = await ServedBroker(1, ANSWERS).start()
    more = ("--admin", f"{HOST}:{free_port()}")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(broker.stop)

        async def start() -> KproxyProcess:
            return await stack.enter_async_context(beside(static_proxy(tmp_path, {1: broker.port}, more=more)))

        started = [await start()]

        async def start_again() -> None:
            started[-1].signal(signal.SIGKILL)
            await asyncio.to_thread(started[-1].wait)
            started.append(await start())
            await asyncio.sleep(2)

        yield [started[0].admin], start_again


CASES: Mapping[Scene, Sequence[tuple[str, Mapping[str, str]]]] = {
    slow_broker: [("KproxyBrokerSlow", {"broker": "1"})],
    refusing_broker: [("KproxyErrors", {"api": "PRODUCE", "error": "INVALID_RECORD", "broker": "2"})],
    late_broker: [("KproxyDeadlines", {})],
    full_proxy: [
        ("KproxyNearLimit", {"limit": f"limits.{each}"})
        for each in ("max_connections", "max_open_requests", "max_in_flight_bytes", "max_in_flight_bytes_total")
    ],
    old_certificate: [("KproxyCertificateExpires", {"use": "listener"}), ("KproxyCertificateExpired", {})],
    guessed_password: [("KproxyAuthenticationsFail", {"mechanism": "PLAIN", "outcome": "failed"})],
    missing_rule: [("KproxyDenials", {"operation": "write", "resource": "topic"})],
    unanswered_writer: [("KproxyOwnUnsettled", {})],
    smaller_fleet: [("KproxyFleetShrunk", {})],
    dead_proxies: [("KproxyDown", {}), ("KproxyAllDown", {})],
    dying_worker: [("KproxyRestarts", {})],
    dying_proxy: [("KproxyRestarts", {})],
}
# What such a fault may raise as well.
BESIDES: Mapping[Scene, set[str]] = {
    late_broker: {"KproxyErrors"},
    missing_rule: {"KproxyErrors"},
    dying_worker: {"KproxyWorkerDown"},
}


@pytest.mark.parametrize("scene", CASES, ids=lambda scene: scene.__name__)
async def test_fault_raises_its_alarm_alone(tmp_path: Path, scene: Scene) -> None:
    """Nothing fires before there is a cause, and no other alert for the same cause."""
    async with scene(tmp_path) as (pages, cause):
        with prometheus(tmp_path / "prometheus", {"kproxy": pages}) as alarms:
            await alarms.stays_quiet()
            for name, labels in CASES[scene]:
                await alarms.until(name, cause, **labels)
            await alarms.fires_only(*(name for name, _ in CASES[scene]), *BESIDES.get(scene, ()))


def test_every_alert_is_made_to_fire() -> None:
    caused = {name for expected in CASES.values() for name, _ in expected}
    caused |= set(re.findall(r'until\("(\w+)"', Path(__file__).read_text()))
    assert caused == set(re.findall(r"- alert: (\w+)", RULES.read_text()))


@pytest.mark.java
async def test_dead_kafka_broker_raises_alarm(tmp_path: Path) -> None:
    """Kafka removes the broker long before the alert's duration is over."""
    with ExitStack() as stack:
        cluster = stack.enter_context(start_real_kafka(tmp_path / "kafka", 3))
        proxy = stack.enter_context(kafka_proxy(tmp_path / "proxy", cluster.bootstrap, "--workers", "2"))
        alarms = stack.enter_context(prometheus(tmp_path / "prometheus", {"kproxy": [proxy.admin]}, hold_s=45))
        victim = cluster.brokers[2]
        broker = str(victim.node_id)
        wait_for(lambda: counted(proxy.admin, f'kproxy_broker_up{{broker="{broker}"}} ') == 1)
        began = time.monotonic()
        victim.kill()
        wait_for(lambda: counted(proxy.admin, "kproxy_table_brokers ") == 2)
        print(f"Kafka dropped it after {time.monotonic() - began:.0f} s")
        await alarms.until("KproxyBrokerDown", broker=broker)
        print(f"the alert fired after {time.monotonic() - began:.0f} s, held for 45 s")
        victim.start()
        await alarms.until_over("KproxyBrokerDown")


async def test_reference_brokers_and_etcd_raise_alarms(tmp_path: Path) -> None:
    async with own_etcd(tmp_path / "etcd") as (etcd, _):
        with ExitStack() as stack:
            options = {"admin": 0, "default_replication_factor": 3, "min_insync_replicas": 3, "lease_ttl_s": 8}
            group = start_brokers((1, 2, 3), tmp_path, etcd.endpoint, "/alarms", disk_may_stall=1, **options)
            brokers = stack.enter_context(group)

            def serve(name: str, *more: str) -> Any:
                arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *more]
                arguments += ["--etcd", etcd.endpoint, "--prefix", "/alarms"]
                arguments += ["--writer-group=gated=g", "--writer-group=single=g"]
                return stack.enter_context(serving(arguments, tmp_path / name))

            taken = ("--advertise", f"127.0.0.1:{free_port()}")
            config = tmp_path / "kproxy.toml"
            config.write_text("")
            proxy = serve("first", "--workers", "2", "--config", str(config))
            proxies = [proxy, serve("named", *taken), serve("not-named", *taken)]
            jobs = {"kproxy": [each.admin for each in proxies], "brokers": [broker.admin for broker in brokers]}
            alarms = stack.enter_context(prometheus(tmp_path / "prometheus", jobs))
            await alarms.until("KproxyNotRegistered")

            admin = AdminClient({"bootstrap.servers": ",".join(broker.address for broker in brokers), "log_level": 0})
            topics = [NewTopic("single", 6, 1), NewTopic("everywhere", 3, 3), NewTopic("gated", 1, 3)]
            for made in admin.create_topics(topics).values():
                made.result(60)
            led = "kproxy_broker_led_partitions "
            wait_for(lambda: sum(counted(broker.admin, led) for broker in brokers) == 10)

            async def write(topic: str, partition: int = 0) -> None:
                writer = await RawClient().connect(port_of(proxy))
                writer.send(produce_frame({topic: [partition]}, acks=1, records=batch(producer_id=-1)))
                await writer.answer()
                writer.close()

            await alarms.until("KproxyWritesRefusedToNonOwners", lambda: write("gated"))

            config.write_text("[")
            proxy.signal(signal.SIGHUP)
            await alarms.until("KproxyConfigNotReloaded", instance=proxy.admin)

            worker = proxy.children()[-1]
            worker.suspend()
            await alarms.until("KproxyWorkerDown", instance=proxy.admin)
            worker.resume()

            async def stall() -> None:
                told = [broker.data_dir.with_name(f"{broker.data_dir.name}.stalled") for broker in brokers]
                for partition in range(3):
                    await write("everywhere", partition)
                for file in told:
                    file.touch()
                await asyncio.sleep(3)
                for file in told:
                    file.unlink()

            await alarms.until("KproxyBrokerDiskSlow", stall)

            victim = brokers[2]
            victim.signal(signal.SIGSTOP)
            await eventually(lambda: counted(brokers[0].admin, "kproxy_broker_live_brokers ") == 2)
            victim.signal(signal.SIGCONT)
            await alarms.until("KproxyBrokerLeaseLost", instance=victim.admin)
            wait_for(lambda: counted(victim.admin, led) > 0, FIRES_WITHIN_S)

            victim.kill()
            await alarms.until("KproxyBrokerUnderReplicated")
            await alarms.until("KproxyBrokerUnderMinIsr")
            # Partitions of "single" that the broker kept: no live broker has a replica.
            await alarms.until("KproxyBrokerPartitionsOffline")
            # Its key is gone with its lease.
            await eventually(lambda: counted(proxy.admin, "kproxy_table_brokers ") == 2)
            await alarms.until("KproxyBrokerDown", broker="3", instance=proxy.admin)

            # Partitions of "single" whose only replica is at the victim: no broker takes the fence.
            claimant = await RawClient().connect(port_of(proxy))
            claim = own.encode_own_request(own.OwnRequest("g", None))
            claimant.send(control_request(api_keys.OWN, own.OWN_MAX_VERSION, claim))
            await alarms.until("KproxyClaimsNotConfirmed", instance=proxy.admin)
            claimant.close()

            os.kill(etcd.pid, signal.SIGSTOP)
            try:
                await alarms.until("KproxyTableStale", instance=proxy.admin)
                await alarms.until("KproxyBrokerHoldsWhatItDoesNotLead", instance=brokers[0].admin)
            finally:
                os.kill(etcd.pid, signal.SIGCONT)


async def test_one_proxy_raises_alarms(tmp_path: Path) -> None:
    """The brokers are in a fixed table, which never removes them."""
    asked: list[Asked] = []

    def assigns_the_same(request: Asked) -> None:
        request.answer(results={("t", 2): {"base_offset": 0}})

    same = await ServedBroker(3, assigns_the_same).start()
    slow = await ServedBroker(4, asked.append).start()
    with broker_process() as (pid, hangs):
        limits = {"probe_timeout_s": 3.0, "max_connections": 6, "max_in_flight_bytes_total": 1 << 20}
        ports = {1: free_port(), 2: hangs.port, 3: same.port, 4: slow.port}
        more = ("--audit-sink", f"json:{tmp_path}/trail")
        async with beside(static_proxy(tmp_path, ports, limits=limits, more=more)) as proxy:
            with prometheus(tmp_path / "prometheus", {"kproxy": [proxy.admin]}) as alarms:
                port = port_of(proxy)

                async def once(partition: int, **fields: Any) -> None:
                    client = await RawClient().connect(port)
                    client.send(produce_frame({"t": [partition]}, **fields))
                    if fields.get("acks") == 0:
                        await client.is_closed()
                    else:
                        await client.answer()
                    client.close()

                await once(0)
                await alarms.until("KproxyBrokerDown", broker="1")
                await once(0, acks=0)
                await alarms.until("KproxyAcks0RecordsLost", topic="t")
                number = iter(range(1000))
                await alarms.until("KproxyOffsetsGivenOutTwice", lambda: once(2, records=batch(next(number))))

                os.kill(pid, signal.SIGSTOP)
                await once(1, timeout_ms=60_000)
                await alarms.until("KproxyBrokerHangs", broker="2")
                os.kill(pid, signal.SIGCONT)

                clients = [await RawClient().connect(port) for _ in range(7)]

                async def connect() -> None:
                    clients.append(await RawClient().connect(port))

                await alarms.until("KproxyClientsRefused", connect)
                for client in clients:
                    client.close()

                await eventually(lambda: counted(proxy.admin, "kproxy_client_connections ") == 0)
                clients = [await RawClient().connect(port) for _ in range(5)]
                for n, client in enumerate(clients):
                    client.send(produce_frame({"t": [3]}, records=batch(n) + bytes(600 << 10), timeout_ms=600_000))
                await alarms.until("KproxyPaused")
                for client in clients:
                    client.close()

                async def stop_shortly() -> None:
                    proxy.signal(signal.SIGSTOP)
                    await asyncio.sleep(0.3)
                    proxy.signal(signal.SIGCONT)

                await alarms.until("KproxyBusy", stop_shortly)
    await same.stop()
    await slow.stop()


async def test_failing_disks_raise_alarms(tmp_path: Path) -> None:
    """Every disk is full for a while: that of the only broker with a partition, and that of the audit trail."""
    shim = build_shim(tmp_path)
    async with own_etcd(tmp_path / "etcd") as (etcd, _):
        broker = BrokerProcess(1, tmp_path / "broker", etcd.endpoint, "/disks", admin=0, num_partitions=200)
        trail = tmp_path / "trail"
        disks = [FaultyDisk(shim, broker.data_dir), FaultyDisk(shim, trail)]
        broker.environ = disks[0].environ
        preload = [f"{name}={value}" for name, value in disks[1].environ.items() if name not in os.environ]
        config = tmp_path / "kproxy.toml"
        config.write_text(f"[audit]\nsink = 'json:{trail}'\ninterval_s = 0.1\nmax_bytes = {1 << 20}\n")
        arguments: list[str | Path] = ["serve", "--config", config, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        arguments += ["--etcd", etcd.endpoint, "--prefix", "/disks"]
        with ExitStack() as stack:
            stack.callback(broker.stop)
            broker.start()
            proxy = stack.enter_context(serving(arguments, tmp_path / "serve.stderr", ("env", *preload, *KPROXY)))
            jobs = {"kproxy": [proxy.admin], "brokers": [broker.admin]}
            alarms = stack.enter_context(prometheus(tmp_path / "prometheus", jobs))
            client = stack.enter_context(broker.client())
            client.metadata("t")
            wait_for(lambda: client.produce("t", 0, build_batch([b"v"])).error_code == 0)

            with disks[0].fails(write=errno.ENOSPC):
                client.produce("t", 0, build_batch([b"v"]))
                await alarms.until("KproxyBrokerDisk", instance=broker.admin)
            wait_for(lambda: client.produce("t", 0, build_batch([b"v"])).error_code == 0)
            await alarms.until_over("KproxyBrokerDisk")

            async def write() -> None:
                writer = await RawClient().connect(port_of(proxy))
                writer.send(produce_frame({"t": range(200)}, acks=1, records=batch(producer_id=-1)))
                await writer.answer()
                writer.close()

            with disks[1].fails(write=errno.ENOSPC):
                await alarms.until("KproxyAuditNotShipped", instance=proxy.admin)
                await alarms.until("KproxyAuditRowsLost", write, instance=proxy.admin)
            await alarms.until_over("KproxyAuditNotShipped")
