"""Ctrl-C while a command starts: it ends without a traceback, whenever the signal comes."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kproxy.config.etcd import EtcdOptions
from kproxy.etcd.endpoints import Endpoint, diagnose
from kproxy.ownership.kafka_client import BrokerUnreachable, KafkaConnection
from kproxy.routing.topology import Address
from tests.support.processes.dev import Ended, run_kproxy
from tests.support.processes.ports import free_port

INTERRUPTED = 130
# Sends itself SIGINT when it imports the module with that number, or after some seconds if it imports fewer.
SIGNALLED = """
import os, signal, sys, threading
at = int(sys.argv.pop(1))
class AtImport:
    looked_for = 0
    def find_spec(self, *_):
        AtImport.looked_for += 1
        if AtImport.looked_for == at:
            os.kill(os.getpid(), signal.SIGINT)
timer = threading.Timer(2.5, os.kill, (os.getpid(), signal.SIGINT))
timer.daemon = True
timer.start()
from kproxy.__main__ import main
sys.meta_path.insert(0, AtImport())
sys.exit(main())
"""
# From the first module of `kproxy` to modules that are imported while the event loop runs.
MOMENTS = (1, 2, 5, 60, 350, 900, 10_000) if os.environ.get("KPROXY_TEST_ALL") == "1" else (1, 60, 900, 10_000)


COMMANDS = {
    "serve": ["serve", "--etcd", "ETCD", "--listen", "127.0.0.1:0"],
    "workers": ["serve", "--etcd", "ETCD", "--listen", "127.0.0.1:0", "--workers", "2"],
    "broker": ["broker", "--etcd", "ETCD", "--node-id", "1", "--data-dir", "DIR"],
    "dev": ["dev", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data-dir", "DIR"],
    "table": ["table", "--etcd", "ETCD", "--watch"],
    "own": ["own", "watch", "--etcd", "ETCD"],
}


@pytest.mark.long(but=3)
@pytest.mark.parametrize("command", list(COMMANDS))
def test_interrupt_while_a_command_starts_is_quiet(tmp_path: Path, command: str) -> None:
    def interrupted(moment: int) -> Ended:
        places = {"ETCD": f"http://127.0.0.1:{free_port()}", "DIR": str(tmp_path / str(moment))}
        arguments = [places.get(argument, argument) for argument in COMMANDS[command]]
        return run_kproxy(*arguments, command=(sys.executable, "-P", "-c", SIGNALLED, str(moment)))

    with ThreadPoolExecutor(2) as threads:
        for moment, ended in zip(MOMENTS, threads.map(interrupted, MOMENTS), strict=True):
            assert "Traceback" not in ended.stderr, (moment, ended.stderr)
            assert "never" not in ended.stderr, (moment, ended.stderr)
            # If it is already running it stops as usual, and may have reported its progress.
            assert ended.status in (INTERRUPTED, 0), (moment, ended)
            said = [line for line in ended.stderr.splitlines() if line]
            assert [line for line in said if not line.startswith(("kproxy", "  ", "Point", "Ctrl-C"))] == [], moment


async def _dial_broker() -> None:
    try:
        await KafkaConnection.open(Address("nowhere.invalid", 9092), 5.0)
    except BrokerUnreachable:
        return


@pytest.mark.parametrize(
    "look_up",
    [
        lambda: diagnose(Endpoint("nowhere.invalid", 2379), EtcdOptions()),
        _dial_broker,
    ],
    ids=["etcd", "broker"],
)
async def test_late_name_lookup_failure_is_not_logged(
    look_up: Callable[[], Awaitable[object]],
) -> None:
    """A resolver may take longer than a dial, and its later failure matters to no one."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context["message"]))
    for steps in range(1, 5):
        looking = asyncio.ensure_future(look_up())
        for _ in range(steps):
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    await asyncio.sleep(0.3)
    gc.collect()
    assert said == []
