"""Descriptors: as many as the system allows; when they run short, only new clients are not served."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kproxy.proxy.descriptors import NEW_S, Descriptors, most_clients, wanted
from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KPROXY, KproxyProcess, dev_arguments
from tests.support.processes.served import ServedBroker, page, port_of, samples
from tests.support.processes.worker_processes import worker_pids
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the limit is POSIX's")


def takes_what_is_produced(asked: Asked) -> None:
    if asked.header.api_key == PRODUCE:
        asked.answer()


@contextmanager
def limited_proxy(
    directory: Path, ulimit: str, ports: list[int], *more: str, limits: str = ""
) -> Iterator[KproxyProcess]:
    """`kproxy serve` under a limit on open files, before these brokers, each of which owns one partition of `t`."""
    file = directory / "kproxy.toml"
    file.write_text(
        f'[ownership]\nownership = "static"\n[limits]\n{limits}\n[brokers]\n'
        + "".join(f'{n + 1} = "127.0.0.1:{port}"\n' for n, port in enumerate(ports))
        + f'[[topics]]\nname = "t"\nowners = {[n + 1 for n in range(len(ports))]}\n'
    )
    shell = ("bash", "-c", f'ulimit {ulimit}; exec "$@"', "-", *KPROXY)
    arguments = ["serve", "--config", file, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *more]
    process = KproxyProcess(arguments, directory / "stderr", shell)
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


async def produced(client: RawClient, partitions: list[int]) -> str:
    """What a client gets for a batch to each of these."""
    try:
        client.send(produce_frame({"t": partitions}, records=batch(producer_id=-1)))
        codes = (await client.answer()).codes.values()
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    return ",".join(map(str, sorted(set(codes))))


async def test_the_soft_limit_does_not_hold(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    upstream = await ServedBroker(1, takes_what_is_produced).start()
    with limited_proxy(tmp_path, "-S -n 64", [upstream.port]) as process:
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)
        clients = [await RawClient().connect(port_of(process)) for _ in range(100)]
        assert Counter([await produced(client, [0]) for client in clients]) == {"0": 100}
        for client in clients:
            client.abort()
    await upstream.stop()


async def test_workers_have_it_raised_as_well(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limited_proxy(tmp_path, "-S -n 256", [1], "--workers", "2") as process:
        for pid in worker_pids(process).values():
            assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)


async def test_low_hard_limit_on_files_is_reported(tmp_path: Path) -> None:
    with limited_proxy(tmp_path, "-n 512", [1], limits="max_connections = 1000") as process:
        said = [line for line in process.stderr().splitlines() if "open files" in line]
        assert len(said) == 1, process.stderr()
        assert "512" in said[0]
        assert "LimitNOFILE" in said[0]
    with limited_proxy(tmp_path, "-n 512", [1], limits="max_connections = 100") as process:
        assert "open files" not in process.stderr()
    # The default is nobody's wish: no warning at a first start.
    with limited_proxy(tmp_path, "-n 512", [1]) as process:
        said = [line for line in process.stderr().splitlines() if "open files" in line]
        assert ["[info" in line for line in said] == [True], process.stderr()


def test_development_cluster_admits_clients_by_file_limit(tmp_path: Path) -> None:
    shell = ("bash", "-c", 'ulimit -n 2048; exec "$@"', "-", *KPROXY)
    process = KproxyProcess(dev_arguments(tmp_path / "data", "--brokers", "1"), tmp_path / "stderr", shell)
    try:
        process.wait_ready()
        said = process.stderr() + (tmp_path / "data" / "logs" / "proxy.log").read_text()
        assert "open files" not in said
    finally:
        process.stop()


@pytest.mark.parametrize("limit", [64, 1024, 20_000, 1 << 20])
def test_file_limit_admits_most_clients_and_no_more(limit: int) -> None:
    assert wanted(most_clients(limit)) <= limit < wanted(most_clients(limit) + 1)


@pytest.mark.parametrize("brokers", [pytest.param(1, marks=pytest.mark.long), 3])
async def test_descriptor_shortage_refuses_only_new_clients(tmp_path: Path, brokers: int) -> None:
    """Every connection that is taken is served: the room for its way to brokers is not given to another."""
    upstreams = [await ServedBroker(n + 1, takes_what_is_produced).start() for n in range(brokers)]
    partitions = list(range(brokers))
    with limited_proxy(tmp_path, "-n 128", [upstream.port for upstream in upstreams]) as process:
        first = await RawClient().connect(port_of(process))
        assert await produced(first, partitions) == "0"
        # All of them are there before the first of them needs a broker.
        clients = [await RawClient().connect(port_of(process)) for _ in range(200)]
        got = Counter(await asyncio.gather(*(produced(client, partitions) for client in clients)))
        assert set(got) == {"0", "closed"}, got
        assert got["0"] >= 60 // (brokers + 2), got
        assert await produced(first, partitions) == "0"
        shown = samples(await asyncio.to_thread(lambda: page(process.admin, "/metrics")[1]))
        assert shown["kproxy_client_connections_refused_total", ()] == got["closed"]
        assert "too few open files" in process.stderr()
        for client in clients:
            client.abort()

        async def all_are_admitted() -> bool:
            again = [await RawClient().connect(port_of(process)) for _ in range(5)]
            results = [await produced(client, partitions) for client in again]
            for client in again:
                client.abort()
            return results == ["0"] * len(again)

        await eventually(all_are_admitted, "those who come later are served, as the others have left")
    for upstream in upstreams:
        await upstream.stop()


def test_early_client_keeps_its_descriptors() -> None:
    now = [100.0]
    descriptors = Descriptors(800, lambda: now[0])
    # 700 may be in use; each of these is one, and may need two more.
    admitted = next(n for n in range(1000) if not descriptors.admit(n, clients=n, brokers=1))
    assert 700 // 3 - 1 <= admitted <= 700 // 3 + 1
    now[0] += NEW_S
    assert not descriptors.admit(admitted, clients=admitted, brokers=1)
    now[0] += NEW_S
    assert descriptors.admit(admitted, clients=admitted, brokers=1)
    assert not descriptors.admit(698, clients=admitted, brokers=1)
    # They came and went: what is left counts.
    assert descriptors.admit(20, clients=0, brokers=1)
