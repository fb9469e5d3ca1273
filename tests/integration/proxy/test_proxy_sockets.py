"""The socket options that the proxy sets, as the kernel reports them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.brokers.scripted_upstream import ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import produce_frame
from tests.support.processes.running_proxy import both_loops, running_proxy

ESTABLISHED = "01"
KEEPALIVE_TIMER = "02"


def timers(*, local: int = 0, remote: int = 0) -> list[str]:
    """The timers of the established connections with this port on this side, or that on the other."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, here, there, state, _, timer, *_ = line.split()
        ports = [int(address.rpartition(":")[2], 16) for address in (here, there)]
        if state == ESTABLISHED and (ports[0] == local or ports[1] == remote):
            found.append(timer.partition(":")[0])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's table of connections is Linux's")
@both_loops
async def test_silently_gone_host_is_detected() -> None:
    upstream = ScriptedUpstream(1, answers_everything)
    async with running_proxy(upstream, introduced=False) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame({"t": [0]}))
        await client.answer()
        assert timers(local=proxy.port) == [KEEPALIVE_TIMER]
        assert timers(remote=upstream.port) == [KEEPALIVE_TIMER]
