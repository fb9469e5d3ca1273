"""Reloads under traffic: no request is lost, and none waits long."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from kproxy_codec.error_codes import NONE
from tests.integration.proxy.test_reload import ACLS, WAYS, Config, code, log_in_json, reload
from tests.support.brokers.scripted_upstream import answers_everything
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.served import counted, served

__all__ = ["log_in_json"]

DONE, FAILED = (f'kproxy_config_reloads_total{{outcome="{outcome}"}}' for outcome in ("done", "failed"))


async def test_traffic_loses_nothing_in_fifty_reloads(tmp_path: Path) -> None:
    rooms = "".join(ACLS.format(operation=operation) for operation in WAYS)
    async with served(tmp_path, answers_everything, answers_everything, rooms=rooms) as s:
        config, stop = Config(tmp_path, rooms), asyncio.Event()

        async def write(client: RawClient) -> int:
            number = 0
            while not stop.is_set():
                client.send(*(produce_frame({"t": [0, 1]}, records=batch(number + n)) for n in range(3)))
                for _ in range(3):
                    assert set((await client.answer()).codes.values()) == {NONE}
                number += 3
            return number

        writing = [asyncio.create_task(write(await s.client())) for _ in range(4)]
        for turn in range(50):
            table = {"owners = [1, 2]": "owners = [2, 1]"} if turn % 2 else {}
            config.write(
                f"{rooms}[[quotas]]\nrequests_per_s = {100_000 + turn}\n"
                f'[log]\nlevel = "{("info", "warning")[turn % 2]}"\n'
                f'[audit]\nsink = "json:{tmp_path / f"trail{turn % 3}"}"\n',
                **{"probe_timeout_s": f"max_open_requests = {100 + turn}\nprobe_timeout_s", **table},
            )
            s.process.signal(signal.SIGHUP)
            while await asyncio.to_thread(counted, s.process.admin, DONE) <= turn:
                await asyncio.sleep(0.01)
        stop.set()
        sent = sum(await asyncio.gather(*writing))
        assert sent > 50
        assert counted(s.process.admin, FAILED) == 0
        assert "Traceback" not in s.process.stderr()


@pytest.mark.long
async def test_large_files_do_not_hold_up_clients(tmp_path: Path) -> None:
    """Rules of 1,000 users, and a comment of 10 MB, while a client writes."""
    rules = "".join(
        f'[[acls]]\nprincipal = "User:u{number}"\noperations = ["read"]\ntopics = ["t{number}", "p{number}-*"]\n'
        for number in range(1_000)
    )
    everybody = ACLS.format(operation="write")
    async with served(tmp_path, answers_everything, rooms=everybody) as s:
        config, client = Config(tmp_path, everybody), await s.client()
        for turn in range(5):
            config.write(everybody + rules + f"# {turn}" + "x" * (10 << 20) * (turn == 4))
            reloading = asyncio.create_task(reload(s.process))
            while not reloading.done():
                assert await code(client) == NONE
            await reloading
        delays = [
            (float(dict(labels)["le"]), count)
            for (name, labels), count in (await s.samples()).items()
            if name == "kproxy_event_loop_delay_seconds_bucket"
        ]
        total = max(count for _, count in delays)
        # A machine may stall for longer, a reload never does.
        assert sum(1 for bound, count in delays if bound >= 0.5 and count >= total - 1) > 0
