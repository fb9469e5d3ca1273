"""`kproxy dev` continues when a part of it dies: the others serve, and the part's death is reported and repaired."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka
import psutil
import pytest

from tests.integration.commands.test_dev import ends_last
from tests.support.clients.kafka_io import produce, read_partition
from tests.support.processes.dev import KproxyProcess, dev_arguments, gone, run_kproxy, serving
from tests.support.waiting import PATIENCE_S, wait_for

LEASE_TTL_S = 2


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    """A `kproxy dev` whose parts must all run at a test's end."""
    directory = tmp_path_factory.mktemp("dev")
    arguments = dev_arguments(directory / "data", "--lease-ttl", str(LEASE_TTL_S))
    with serving(arguments, directory / "stderr") as process:
        yield process
        with ends_last(process):
            assert process.stop() == 0
        assert "Traceback" not in process.stderr()


def pid_of(dev: KproxyProcess, part: str) -> int:
    """The part's last reported process id."""
    return int(re.findall(rf"\b{part}\b.*\(pid (\d+)\)$", dev.stderr(), re.MULTILINE)[-1])


def table(dev: KproxyProcess, topic: str) -> tuple[list[int], list[int]]:
    """The brokers, and the owners of the topic's partitions."""
    found = json.loads(run_kproxy("table", "--admin", dev.admin, "--topic", topic, "--json").stdout)
    owners = [each["owner"] for each in found["topics"][0]["partitions"]] if found["topics"] else []
    return [each["id"] for each in found["brokers"]], owners


class Told:
    """The output of dev from now on."""

    def __init__(self, dev: KproxyProcess) -> None:
        self._dev = dev
        self._before = len(dev.stderr())

    @property
    def lines(self) -> list[str]:
        return self._dev.stderr()[self._before :].splitlines()

    def wait(self, part: str, words: str, timeout_s: float = PATIENCE_S) -> str:
        beginning = f"kproxy dev: {part} "

        def found() -> str | None:
            return next((line for line in self.lines if line.startswith(beginning) and words in line), None)

        line = wait_for(found, timeout_s, f"{part} {words!r}: {self.lines}")
        assert isinstance(line, str)
        return line


@contextmanager
def writing(bootstrap: str, topic: str) -> Iterator[None]:
    """Write to partition 0 with an idempotent producer around the block; all records arrive in order."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0})
    written: list[bytes] = []
    failed: list[object] = []

    def write(count: int) -> None:
        for _ in range(count):
            written.append(b"%d" % len(written))
            producer.produce(
                topic, written[-1], partition=0, on_delivery=lambda error, _: error and failed.append(error)
            )

    write(20)
    assert producer.flush(PATIENCE_S) == 0
    write(20)
    producer.poll(0.1)
    yield
    write(20)
    assert producer.flush(PATIENCE_S) == 0
    assert failed == []
    assert read_partition(bootstrap, topic, 0, len(written)) == written


def test_killed_broker_is_reported_and_comes_back(dev: KproxyProcess) -> None:
    topic = f"killed-{uuid.uuid4().hex[:8]}"
    produce(dev.kafka, topic, [b"0"], partition=0)
    # The records read back below are not the topic's first.
    other = f"written-{uuid.uuid4().hex[:8]}"
    victim = table(dev, topic)[1][0]
    pid, told = pid_of(dev, f"broker {victim}"), Told(dev)
    with writing(dev.kafka, other):
        psutil.Process(pid).kill()
        died = told.wait(f"broker {victim}", "was ended by signal 9 (SIGKILL)")
        assert f"(pid {pid})" in died
        assert "The others take over" in died
        wait_for(lambda: victim not in table(dev, topic)[1], what="others that take over")
        produce(dev.kafka, topic, [b"1"], partition=0)
        back = told.wait(f"broker {victim}", "is back")
    assert f"(pid {pid_of(dev, f'broker {victim}')})" in back
    wait_for(lambda: table(dev, topic)[0] == [1, 2, 3], what="three brokers")
    assert read_partition(dev.kafka, topic, 0, 2) == [b"0", b"1"]
    assert len(told.lines) == 2, told.lines


def test_stopped_broker_is_not_restarted(dev: KproxyProcess) -> None:
    told, process = Told(dev), psutil.Process(pid_of(dev, "broker 1"))
    process.suspend()
    try:
        time.sleep(LEASE_TTL_S + 1)
    finally:
        process.resume()
    wait_for(lambda: table(dev, "none")[0] == [1, 2, 3], what="three brokers")
    assert told.lines == []
    assert process.is_running()


def test_killed_etcd_restarts_with_its_data(dev: KproxyProcess) -> None:
    topic, told = f"etcd-{uuid.uuid4().hex[:8]}", Told(dev)
    with writing(dev.kafka, topic):
        psutil.Process(pid_of(dev, "etcd")).kill()
        told.wait("etcd", "was ended by signal 9 (SIGKILL)")
        # Known partitions are listed and written to before it returns.
        assert table(dev, topic)[1]
        back = told.wait("etcd", "is back")
    assert dev.etcd in back
    wait_for(lambda: table(dev, topic)[0] == [1, 2, 3], what="three brokers")
    assert run_kproxy("table", "--etcd", dev.etcd, "--topic", topic).status == 0


def test_killed_proxy_restarts_at_its_address(dev: KproxyProcess) -> None:
    topic, told = f"proxy-{uuid.uuid4().hex[:8]}", Told(dev)
    with writing(dev.kafka, topic):
        psutil.Process(pid_of(dev, "proxy")).kill()
        told.wait("the proxy", "was ended by signal 9 (SIGKILL)")
        assert dev.kafka in told.wait("the proxy", "is back")
    assert table(dev, topic)[0] == [1, 2, 3]
    assert len(told.lines) == 2, told.lines


@pytest.mark.long
def test_broker_that_cannot_start_is_retried_with_reason(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with serving(dev_arguments(data_dir, "--lease-ttl", "1", "--no-audit"), tmp_path / "stderr") as dev:
        told, directory = Told(dev), data_dir / "broker-2"
        psutil.Process(pid_of(dev, "broker 2")).kill()
        told.wait("broker 2", "was ended by signal 9")
        shutil.move(directory, tmp_path / "aside")
        directory.write_text("in the way")
        told.wait("broker 2", "The next attempt is in 6 s")
        pauses = [float(pause) for line in told.lines for pause in re.findall(r"(?:again|is) in (\d+) s", line)]
        assert pauses == sorted(pauses), told.lines
        assert pauses[:2] == [3, 6]
        for line in told.lines[1:]:
            assert "broker 2 could not be started again" in line
            assert str(directory) in line
            assert "cannot be used" in line
        # The others serve meanwhile.
        produce(dev.kafka, "meanwhile", [b"1"])
        directory.unlink()
        shutil.move(tmp_path / "aside", directory)
        told.wait("broker 2", "is back")
        # A restarted part does not outlive it either.
        processes = dev.descendants()
        dev.signal(signal.SIGKILL)
        assert dev.wait() == -signal.SIGKILL
        assert gone(processes)


@pytest.mark.long
def test_interrupt_during_a_restart_stops_dev(tmp_path: Path) -> None:
    with serving(dev_arguments(tmp_path / "data", "--brokers", "2"), tmp_path / "stderr") as dev:
        told = Told(dev)
        with ends_last(dev):
            psutil.Process(pid_of(dev, "etcd")).kill()
            psutil.Process(pid_of(dev, "broker 1")).kill()
            told.wait("broker 1", "was ended by")
            assert dev.stop() == 0
        assert "Traceback" not in dev.stderr()


@pytest.mark.long
def test_no_restart_leaves_brokers_and_etcd_dead(tmp_path: Path) -> None:
    with serving(dev_arguments(tmp_path / "data", "--no-restart"), tmp_path / "stderr") as dev:
        produce(dev.kafka, "t", [b"1"])
        told = Told(dev)
        victim = next(broker for broker in (1, 2, 3) if broker not in table(dev, "t")[1][:1])
        psutil.Process(pid_of(dev, f"broker {victim}")).kill()
        assert "It is not started again, because of --no-restart." in told.wait(f"broker {victim}", "was ended by")
        psutil.Process(pid_of(dev, "etcd")).kill()
        assert "It is not started again, because of --no-restart." in told.wait("etcd", "was ended by")
        assert read_partition(dev.kafka, "t", 0, 1) == [b"1"]
        assert len(told.lines) == 2, told.lines
        with ends_last(dev):
            psutil.Process(pid_of(dev, "proxy")).kill()
            assert dev.wait() == 1
        assert f"the proxy was ended by signal 9; its log is {tmp_path / 'data'}" in dev.stderr()
        assert "Traceback" not in dev.stderr()
