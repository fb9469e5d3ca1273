"""Descriptors: as many as the system allows; when they run short, only new clients are refused."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from kproxy.proxy.descriptors import NEW_S, Descriptors, most_clients, wanted
from kproxy_codec.api_keys import PRODUCE
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KPROXY, dev_arguments, serving
from tests.support.processes.served import served, static_proxy
from tests.support.processes.worker_processes import worker_pids
from tests.support.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the limit is POSIX's")


def takes_what_is_produced(asked: Asked) -> None:
    if asked.header.api_key == PRODUCE:
        asked.answer()


def under(ulimit: str) -> tuple[str, ...]:
    """The command `kproxy` under a limit on open files."""
    return ("bash", "-c", f'ulimit {ulimit}; exec "$@"', "-", *KPROXY)


async def produced(client: RawClient, partitions: list[int]) -> str:
    """The codes for a batch to each of these partitions."""
    try:
        client.send(produce_frame({"t": partitions}, records=batch(producer_id=-1)))
        codes = (await client.answer()).codes.values()
    except (ConnectionError, asyncio.IncompleteReadError):
        return "closed"
    return ",".join(map(str, sorted(set(codes))))


async def test_soft_limit_is_raised(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    async with served(tmp_path, takes_what_is_produced, command=under("-S -n 64")) as s:
        assert psutil.Process(s.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (min(hard, 1 << 20), hard)
        clients = [await s.client() for _ in range(100)]
        assert Counter([await produced(client, [0]) for client in clients]) == {"0": 100}


def test_soft_limit_of_workers_is_raised_too(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with static_proxy(tmp_path, {1: 1}, command=under("-S -n 256"), more=["--workers", "2"]) as process:
        for pid in worker_pids(process).values():
            assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)


# The configured limit, and the messages. The default gives no warning at a first start.
@pytest.mark.parametrize(
    ("limits", "words"),
    [({"max_connections": 1000}, ["512", "LimitNOFILE"]), ({"max_connections": 100}, None), ({}, ["[info"])],
)
def test_low_hard_limit_on_files_is_reported(tmp_path: Path, limits: dict[str, int], words: list[str] | None) -> None:
    with static_proxy(tmp_path, {1: 1}, command=under("-n 512"), limits=limits) as process:
        said = [line for line in process.stderr().splitlines() if "open file" in line]
        assert [all(word in line for word in words or ()) for line in said] == [True] * (words is not None), said


def test_development_cluster_admits_clients_by_file_limit(tmp_path: Path) -> None:
    arguments = dev_arguments(tmp_path / "data", "--brokers", "1")
    with serving(arguments, tmp_path / "stderr", under("-n 2048")) as process:
        assert "open files" not in process.stderr() + (tmp_path / "data" / "logs" / "proxy.log").read_text()


@pytest.mark.parametrize("limit", [64, 1024, 20_000, 1 << 20])
def test_file_limit_admits_most_clients_and_no_more(limit: int) -> None:
    assert wanted(most_clients(limit)) <= limit < wanted(most_clients(limit) + 1)


@pytest.mark.parametrize("brokers", [pytest.param(1, marks=pytest.mark.long), 3])
async def test_descriptor_shortage_refuses_only_new_clients(tmp_path: Path, brokers: int) -> None:
    """Every accepted connection is served: its room for broker connections goes to no other."""
    partitions = list(range(brokers))
    async with served(tmp_path, *[takes_what_is_produced] * brokers, command=under("-n 128")) as s:
        first = await s.client()
        assert await produced(first, partitions) == "0"
        # All are connected before the first needs a broker.
        clients = [await s.client() for _ in range(200)]
        got = Counter(await asyncio.gather(*(produced(client, partitions) for client in clients)))
        assert set(got) == {"0", "closed"}, got
        assert got["0"] >= 60 // (brokers + 2), got
        assert await produced(first, partitions) == "0"
        assert (await s.samples())["kproxy_client_connections_refused_total", ()] == got["closed"]
        assert "too few open files" in s.process.stderr()
        for client in clients:
            client.abort()

        async def all_are_admitted() -> bool:
            again = [await s.client() for _ in range(5)]
            results = [await produced(client, partitions) for client in again]
            for client in again:
                client.abort()
            return results == ["0"] * len(again)

        await eventually(all_are_admitted, "those who come later are served, as the others have left")


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
    # They came and left: the remaining ones count.
    assert descriptors.admit(20, clients=0, brokers=1)
