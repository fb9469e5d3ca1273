"""All of the chart's alerts fire in a real Prometheus that scrapes real proxies before real brokers.

The rules are the chart's with shorter durations. pytest collects this file only by its name, as `make check-deploy`
does: it needs `prometheus`.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kproxy_codec import api_keys, own
from tests.support.brokers.faulty_disk import FaultyDisk, build_shim
from tests.support.brokers.real_kafka import start_real_kafka
from tests.support.brokers.reference_broker import BrokerProcess, start_brokers
from tests.support.brokers.scripted_upstream import Asked, broker_process
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.etcd.embedded import own_etcd
from tests.support.processes.dev import KPROXY, serving
from tests.support.processes.ports import free_port
from tests.support.processes.served import ServedBroker, beside, counted, kafka_proxy, port_of, static_proxy
from tests.support.waiting import eventually, wait_for
from tests.support.wire.fattest import control_request
from tests.support.wire.record_batches import build_batch

pytestmark = pytest.mark.timeout(1200)

RULES = Path(__file__).parents[2] / "deploy/helm/kproxy/files/alerts.yaml"
FIRES_WITHIN_S = 180.0
WINDOW_S = 15
Alert = tuple[str, Mapping[str, str]]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._port = port

    def firing(self) -> list[Alert]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/alerts", timeout=60) as answer:
            alerts = json.load(answer)["data"]["alerts"]
        return [(each["labels"]["alertname"], each["labels"]) for each in alerts if each["state"] == "firing"]

    def fires(self, name: str, **labels: str) -> bool:
        return any(each == name and labels.items() <= has.items() for each, has in self.firing())

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=60):
                return True
        except OSError:
            return False

    def wait_scraped(self, targets: int) -> None:
        """Wait until it has the page of every target: counters have their first value."""
        query = f"http://127.0.0.1:{self._port}/api/v1/query?query=sum(up)"

        def up() -> int:
            with urllib.request.urlopen(query, timeout=60) as answer:
                return sum(int(float(each["value"][1])) for each in json.load(answer)["data"]["result"])

        wait_for(lambda: up() == targets, FIRES_WITHIN_S)

    async def until(
        self, name: str, cause: Callable[[], Coroutine[Any, Any, object]] | None = None, **labels: str
    ) -> None:
        """Wait until an alert fires; `cause` is repeated meanwhile."""
        began = time.monotonic()
        while not await asyncio.to_thread(self.fires, name, **labels):
            assert time.monotonic() < began + FIRES_WITHIN_S, f"{name} does not fire; {self.firing()}"
            if cause is not None:
                await cause()
            await asyncio.sleep(0.3)
        print(f"fired after {time.monotonic() - began:3.0f} s: {name} {labels or ''}")


def shortened(rules: str, hold_s: int) -> str:
    """The rules with shorter durations."""
    rules = re.sub(r"(?m)^( +for:) \d+m$", rf"\1 {hold_s}s", rules)
    rules = re.sub(r"\[\d+[mh]\]", f"[{WINDOW_S}s]", rules)
    rules = re.sub(r"(age_seconds >) \d+", rf"\1 {WINDOW_S}", rules)
    return re.sub(r"offset \d+m", f"offset {WINDOW_S}s", rules)


@contextmanager
def prometheus(directory: Path, jobs: Mapping[str, Sequence[str]], *, hold_s: int = 2) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the admin pages of `jobs`, until the block ends."""
    directory.mkdir()
    (directory / "alerts.yaml").write_text(shortened(RULES.read_text(), hold_s))
    scraped = [{"job_name": job, "static_configs": [{"targets": list(pages)}]} for job, pages in jobs.items()]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["alerts.yaml"], "scrape_configs": scraped}
    # JSON is YAML.
    (directory / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        running = Prometheus(port)
        wait_for(running.is_ready, FIRES_WITHIN_S)
        running.wait_scraped(sum(map(len, jobs.values())))
        yield running
    finally:
        process.terminate()
        process.wait(60)


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
        victim.wait_started()
        wait_for(lambda: not alarms.fires("KproxyBrokerDown"), FIRES_WITHIN_S)


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
            wait_for(lambda: not alarms.fires("KproxyBrokerDisk"), FIRES_WITHIN_S)

            async def write() -> None:
                writer = await RawClient().connect(port_of(proxy))
                writer.send(produce_frame({"t": range(200)}, acks=1, records=batch(producer_id=-1)))
                await writer.answer()
                writer.close()

            with disks[1].fails(write=errno.ENOSPC):
                await alarms.until("KproxyAuditNotShipped", instance=proxy.admin)
                await alarms.until("KproxyAuditRowsLost", write, instance=proxy.admin)
            wait_for(lambda: not alarms.fires("KproxyAuditNotShipped"), FIRES_WITHIN_S)
