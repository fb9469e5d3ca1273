"""`kproxy dev`: all parts start, serve, keep their data, and end together, however it ends."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import psutil
import pytest
from confluent_kafka.admin import AdminClient

from kproxy.config import DEFAULT_PREFIX
from kproxy.demo.run import partition_owners
from kproxy.dev.cluster import ChildEnded, DevCluster
from kproxy.trail.rows import Range
from tests.support.audit.audit_trails import trails_in_topic
from tests.support.clients.kafka_io import produce, read_partition
from tests.support.processes.dev import (
    KPROXY,
    KproxyProcess,
    asyncios_own_loop,
    dev_arguments,
    gone,
    run_kproxy,
    serving,
)
from tests.support.processes.served import page
from tests.support.waiting import wait_for


def names(processes: list[psutil.Process]) -> list[str]:
    """The names of the children of `kproxy dev`."""
    found = []
    for process in processes:
        command = process.cmdline()
        found.append(command[4] if command[1:4] == ["-P", "-m", "kproxy"] else Path(command[0]).name)
    return found


def test_dev_runs_etcd_brokers_and_proxy(dev_cluster: KproxyProcess) -> None:
    children = names(dev_cluster.descendants())
    assert (children.count("etcd"), children.count("broker"), children.count("serve")) == (1, 3, 1)
    assert set(dev_cluster.fields) == {"kafka", "admin", "etcd"}


def test_audit_trail_is_in_a_topic(dev_cluster: KproxyProcess) -> None:
    topic = f"audited-{uuid.uuid4().hex[:12]}"
    produce(dev_cluster.kafka, topic, [b"v"] * 20)

    def told() -> int:
        (rows,) = trails_in_topic(dev_cluster.kafka, "__kproxy_audit").values()
        return sum(row.record_count for row in rows if isinstance(row, Range) and row.topic == topic)

    wait_for(lambda: told() == 20, what="the range")


@pytest.mark.long
def test_audit_trail_can_be_switched_off(tmp_path: Path) -> None:
    with serving(dev_arguments(tmp_path / "data", "--brokers", "1", "--no-audit"), tmp_path / "stderr") as dev:
        assert "kproxy_audit_waiting_bytes" not in page(dev.admin, "/metrics")[1]
        assert "__kproxy_audit" not in AdminClient({"bootstrap.servers": dev.kafka}).list_topics(timeout=60).topics


def test_added_proxy_reports_its_start_briefly(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    with serving(["serve", "--etcd", dev_cluster.etcd, "--listen", "127.0.0.1:0"], tmp_path / "stderr") as proxy:
        wait_for(lambda: STARTS[-1] in proxy.stderr(), what="the first round of asking the brokers")
        # The limit of open files depends on the machine.
        lines = [line for line in proxy.stderr().splitlines() if "open files" not in line]
        told = {next(word for word in STARTS if word in line): line for line in lines}
        assert len(lines) == len(STARTS), proxy.stderr()
        # The table, the other proxies, its own entry; the brokers' versions are known after their answers.
        assert [word for word in told if word != STARTS[-1]] == list(STARTS[:-1]), proxy.stderr()
        changed = told["proxies changed"]
        assert "gone" not in changed
        assert dev_cluster.kafka in changed
        assert proxy.kafka not in changed
        # The answers of all brokers are known, not only the first one's.
        assert "brokers=3" in told[STARTS[-1]]


STARTS = (
    "lease table loaded",
    "proxies changed",
    "plain path chosen",
    "proxy registered",
    "APIs offered to clients changed",
)


def replicas(dev: KproxyProcess, topic: str) -> list[int]:
    """The brokers that keep the topic's partition 0, according to a broker; the proxy names only itself."""
    broker = next(line.split()[2] for line in dev.stderr().splitlines() if line.startswith("  broker "))
    metadata = AdminClient({"bootstrap.servers": broker}).list_topics(topic, timeout=60)
    return list(metadata.topics[topic].partitions[0].replicas)


@contextmanager
def ends_last(dev: KproxyProcess) -> Iterator[None]:
    """Expect that it ends in the block, after its children, and that all its processes end."""
    children, processes = dev.children(), dev.descendants()
    yield
    assert gone(children, timeout_s=0), "dev ended before its children"
    assert gone(processes)


def test_records_survive_a_restart(tmp_path: Path) -> None:
    data_dir, topic = tmp_path / "data", "kept"
    with serving(dev_arguments(data_dir, "--replication-factor", "1"), tmp_path / "first") as dev:
        written = produce(dev.kafka, topic, [b"%d" % number for number in range(500)])
        assert len(replicas(dev, topic)) == 1
        with ends_last(dev):
            dev.signal(signal.SIGTERM)
            assert dev.wait() == 0
    with serving(dev_arguments(data_dir), tmp_path / "second") as dev:
        assert read_partition(dev.kafka, topic, 0, len(written)) == written
        # It keeps its original factor; the option applies to new topics.
        assert len(replicas(dev, topic)) == 1
        produce(dev.kafka, "new", [b"1"])
        assert sorted(replicas(dev, "new")) == [1, 2, 3]
        assert dev.stop() == 0


@pytest.mark.long
def test_missing_brokers_are_added_for_default_replicas(tmp_path: Path) -> None:
    with serving(dev_arguments(tmp_path / "data", "--brokers", "2"), tmp_path / "stderr") as dev:
        assert "replicas  2 of each new partition, not 3: there are 2 brokers.\n" in dev.stderr()
        produce(dev.kafka, "t", [b"1"])
        assert sorted(replicas(dev, "t")) == [1, 2]


def test_ctrl_c_stops_dev_despite_connected_client(tmp_path: Path) -> None:
    # In a terminal SIGINT goes to every process of the foreground group, not to dev alone.
    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            [*KPROXY, *map(str, dev_arguments(tmp_path / "data", "--brokers", "1"))],
            stdin=follower,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: _own_terminal(follower),
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready kafka=")
            children = psutil.Process(process.pid).children()
            processes = psutil.Process(process.pid).children(recursive=True)
            producer = confluent_kafka.Producer({"bootstrap.servers": line.split()[1].removeprefix("kafka=")})
            producer.produce("held", b"x")
            assert producer.flush(60) == 0
            began = time.monotonic()
            os.write(leader, b"\x03")
            _, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
            assert time.monotonic() - began < 28
            assert "Traceback" not in stderr
            assert stderr.count("stopping the proxy, the brokers, etcd") == 1
            assert gone(children, timeout_s=0)
            assert gone(processes)
        finally:
            process.kill()
            process.wait()
    finally:
        os.close(leader)
        os.close(follower)


def _own_terminal(terminal: int) -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.mark.long
def test_hangup_stops_it_cleanly(tmp_path: Path) -> None:
    with serving(dev_arguments(tmp_path / "data", "--brokers", "1"), tmp_path / "stderr") as dev, ends_last(dev):
        dev.signal(signal.SIGHUP)
        assert dev.wait() == 0


@pytest.mark.parametrize(
    "delay_s", [pytest.param(each, marks=() if each == 1.0 else pytest.mark.long) for each in (0.3, 1.0, 1.7, 2.4)]
)
def test_signal_while_it_starts_leaves_nothing(tmp_path: Path, delay_s: float) -> None:
    dev = KproxyProcess(dev_arguments(tmp_path / "data"), tmp_path / "stderr")
    time.sleep(delay_s)
    processes = dev.descendants()
    dev.signal(signal.SIGTERM)
    status = dev.wait()
    # Before its handlers are installed, the signal ends it like any program.
    assert status in (0, -signal.SIGTERM), dev.stderr()
    assert gone(processes)
    dev.stop()


def test_killed_dev_leaves_no_orphans(tmp_path: Path) -> None:
    with serving(dev_arguments(tmp_path / "data", "--brokers", "1"), tmp_path / "stderr") as dev:
        processes = dev.descendants()
        assert len(processes) >= 3
        dev.signal(signal.SIGKILL)
        assert dev.wait() == -signal.SIGKILL
        assert gone(processes)


@pytest.mark.long
def test_deliberately_killed_broker_returns_with_its_records(tmp_path: Path) -> None:
    with asyncios_own_loop():
        asyncio.run(_kill_a_broker(tmp_path))


async def _kill_a_broker(tmp_path: Path) -> None:
    topic = "killed"
    async with DevCluster(tmp_path / "data", brokers=2, replication_factor=1, lease_ttl_s=2) as cluster:
        accident = asyncio.ensure_future(cluster.wait())
        written = await asyncio.to_thread(produce, cluster.kafka, topic, [b"1", b"2"])
        owner = (await partition_owners([cluster.etcd], DEFAULT_PREFIX, topic))[0]
        pid = cluster.broker_pids[owner]
        await cluster.kill_broker(owner)
        assert not psutil.pid_exists(pid)
        assert owner not in cluster.broker_pids
        assert owner not in cluster.broker_addresses
        await cluster.restart_broker(owner)
        written += await asyncio.to_thread(produce, cluster.kafka, topic, [b"3"])
        assert await asyncio.to_thread(read_partition, cluster.kafka, topic, 0, 3) == written
        assert not accident.done()
        os.kill(cluster.broker_pids[owner], signal.SIGKILL)
        with pytest.raises(ChildEnded, match=f"the broker {owner} was ended by signal 9"):
            await asyncio.wait_for(accident, timeout=60)


def test_settings_of_callers_do_not_reach_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROXY_LIMITS__MAX_CONNECTIONS", "1")
    monkeypatch.setenv("KPROXY_OWNERSHIP__PREFIX", "/elsewhere")
    with serving(dev_arguments(tmp_path / "data", "--brokers", "1"), tmp_path / "stderr") as dev:
        assert produce(dev.kafka, "t", [b"1"]) == [b"1"]
        assert read_partition(dev.kafka, "t", 0, 1) == [b"1"]


def test_admin_page_reports_health_and_readiness(dev_cluster: KproxyProcess) -> None:
    assert page(dev_cluster.admin, "/livez") == (200, "alive\n")
    assert page(dev_cluster.admin, "/readyz") == (200, "ready\n")
    assert page(dev_cluster.admin, "/nothing")[0] == 404
    assert page(dev_cluster.admin, "/table?limit=0")[0] == 400
    assert page(dev_cluster.admin, "/table?limit=x")[0] == 400


def test_proxy_and_etcd_give_the_same_table(dev_cluster: KproxyProcess) -> None:
    topic = f"table-{uuid.uuid4().hex[:8]}"
    produce(dev_cluster.kafka, topic, [b"1", b"2"])

    def told(*place: str) -> Any:
        """Return the page once the table is not stale, which it is while etcd is silent."""
        table = json.loads(run_kproxy("table", *place, "--topic", topic, "--json").stdout)
        return None if table["stale"] else table

    tables = [
        wait_for(lambda place=place: told(*place), what="a table that is not stale")
        for place in (("--admin", dev_cluster.admin), ("--etcd", dev_cluster.etcd))
    ]
    for table in tables:
        assert [each["id"] for each in table["brokers"]] == [1, 2, 3]
        assert [each["name"] for each in table["topics"]] == [topic]
        assert table["stale"] is False
        assert table["age_s"] < 10
    assert tables[0]["topics"] == tables[1]["topics"]
    assert tables[0]["topics"][0]["partitions"][0]["owner"] in (1, 2, 3)


@pytest.mark.parametrize("place", ["admin", "etcd"])
@pytest.mark.parametrize("shape", [(), ("--json",)])
def test_table_fails_for_unknown_topic(dev_cluster: KproxyProcess, place: str, shape: tuple[str, ...]) -> None:
    ended = run_kproxy("table", f"--{place}", dev_cluster.fields[place], "--topic", "nope", *shape)
    assert ended.status == 1
    assert ended.stderr.startswith("kproxy: no partition of topic 'nope' is in the table: ")
    assert ended.stdout


@pytest.mark.parametrize("place", ["admin", "etcd"])
def test_watched_table_prints_each_change_as_line(dev_cluster: KproxyProcess, tmp_path: Path, place: str) -> None:
    topic = f"watched-{uuid.uuid4().hex[:8]}"
    watch = KproxyProcess(
        ["table", f"--{place}", dev_cluster.fields[place], "--topic", topic, "--watch"], tmp_path / "stderr"
    )
    try:
        first = [watch.read_line() for _ in range(4)]
        assert first[0].startswith("# revision ")
        # The one proxy that clients see.
        assert first[2].startswith("# 1 proxy: ")
        assert dev_cluster.kafka in first[2]
        assert first[3].split() == ["topic", "partition", "owner", "address", "revision"]
        produce(dev_cluster.kafka, topic, [b"1"])
        assert watch.read_line().startswith(f"{topic} 0: nobody -> broker ")
    finally:
        assert watch.stop() == 0, watch.stderr()
    assert watch.stderr() == ""


@pytest.mark.long
def test_watched_table_survives_its_proxy(tmp_path: Path) -> None:
    with serving(dev_arguments(tmp_path / "data", "--brokers", "1"), tmp_path / "stderr") as dev:
        watch = KproxyProcess(["table", "--admin", dev.admin, "--watch", "--json"], tmp_path / "watch")
        try:
            assert json.loads(watch.read_line())["brokers"][0]["id"] == 1
            assert dev.stop() == 0
            wait_for(lambda: "no admin page answers" in watch.stderr())
        finally:
            assert watch.stop() == 0
    assert watch.stderr().count("no admin page answers") == 1
