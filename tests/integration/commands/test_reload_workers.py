"""SIGHUP with several workers: the supervisor reads the configuration, and hands it to all of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kproxy_codec.error_codes import NONE, TOPIC_AUTHORIZATION_FAILED
from tests.integration.proxy.test_reload import ACLS, REFUSED, RELOADED, Config, code, lines, log_in_json, reload
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, produce_frame
from tests.support.processes.served import Served, served
from tests.support.processes.worker_processes import clients_of_each, worker_pids
from tests.support.waiting import eventually

__all__ = ["log_in_json"]


@asynccontextmanager
async def two_workers(directory: Path, rooms: str = "") -> AsyncIterator[tuple[Served, Config, list[RawClient]]]:
    """A proxy, its file, and a client of each worker."""
    async with served(directory, answers_everything, rooms=rooms, more=["--workers", "2"]) as s:
        by_worker = await clients_of_each(s.process)
        s.clients += [client for clients in by_worker.values() for client in clients]
        yield s, Config(directory, rooms), [clients[0] for clients in by_worker.values()]


async def test_change_reaches_present_and_later_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path, ACLS.format(operation="write")) as (s, config, clients):
        assert [await code(client) for client in clients] == [NONE, NONE]
        config.write(
            ACLS.format(operation="read") + "[[quotas]]\nconnections = 1000\n",
            probe_timeout_s="max_connections = 5001\nprobe_timeout_s",
        )
        told = await reload(s.process)
        assert told["changed"] == ["limits.max_connections", "acls", "quotas"]

        async def are_refused() -> bool:
            return [await code(client) for client in clients] == [TOPIC_AUTHORIZATION_FAILED] * 2

        await eventually(are_refused)
        # Shared between the two, as at the start.
        await eventually(lambda: is_limited(s, 5_001))
        old = worker_pids(s.process)
        os.kill(old[2], signal.SIGKILL)
        await eventually(lambda: worker_pids(s.process).get(2) not in (None, old[2]))
        await eventually(lambda: is_limited(s, 5_001))
        by_worker = await clients_of_each(s.process)
        s.clients += [client for found in by_worker.values() for client in found]
        assert await code(by_worker[2][0]) == TOPIC_AUTHORIZATION_FAILED
        config.write(ACLS.format(operation="write"))
        await reload(s.process)
        for found in by_worker.values():
            await eventually(lambda client=found[0]: is_written(client))
        facts = json.loads((await s.page("/overview"))[1])["facts"]
        assert "configuration in force since" in facts
        assert (await s.samples())["kproxy_config_reloads_total", (("outcome", "done"),)] == 2
        assert len(lines(s.process, RELOADED)) == 2


async def is_limited(s: Served, limit: int) -> bool:
    return (await s.samples()).get(("kproxy_client_connections_limit", ())) == limit


async def is_written(client: RawClient) -> bool:
    return await code(client) == NONE


async def test_first_quota_throttles_at_all_workers(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (s, config, _):
        config.write("[[quotas]]\nrequests_per_s = 0.5\n")
        await reload(s.process)

        async def is_throttled() -> bool:
            client = await RawClient().connect(int(s.process.kafka.rpartition(":")[2]))
            s.clients.append(client)
            client.send(produce_frame(), produce_frame())
            return [(await client.answer()).fields["throttle_time_ms"] for _ in range(2)][1] > 0

        await eventually(is_throttled)


async def test_invalid_file_is_told_once_for_all(tmp_path: Path) -> None:
    rooms = ACLS.format(operation="write") + "[[quotas]]\nconnections = 1000\n"
    async with two_workers(tmp_path, rooms) as (s, config, clients):
        for number, wrong in enumerate(("[limits\n", "[fleet]\nlease_ttl = 0\n"), 1):
            config.write(ACLS.format(operation="read") + wrong, probe_timeout_s="max_connections = 7\nprobe_timeout_s")
            await reload(s.process, REFUSED)
            # Longer than the files are watched at.
            await asyncio.sleep(5)
            assert len(lines(s.process, REFUSED)) == number
            assert not lines(s.process, "reload failed")
            assert [await code(client) for client in clients] == [NONE, NONE]
            assert await is_limited(s, 10_000)
        facts = json.loads((await s.page("/overview"))[1])["facts"]
        assert "lease_ttl" in facts["last reload failed"]
        assert (await s.samples())["kproxy_config_last_reload_successful", ()] == 0


async def test_hangup_of_worker_alone_ends_nothing(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (s, _, clients):
        pids = worker_pids(s.process)
        for pid in pids.values():
            os.kill(pid, signal.SIGHUP)
        await asyncio.sleep(0.5)
        assert worker_pids(s.process) == pids
        assert [await code(client) for client in clients] == [NONE, NONE]


@pytest.mark.long
async def test_hangups_while_workers_start_are_not_lost(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (s, config, _):
        for turn in range(1, 4):
            old = worker_pids(s.process)
            for pid in old.values():
                os.kill(pid, signal.SIGKILL)
            config.write("", probe_timeout_s=f"max_connections = {5_000 + turn}\nprobe_timeout_s")
            await reload(s.process)
            await eventually(lambda wanted=5_000 + turn: is_limited(s, wanted))
