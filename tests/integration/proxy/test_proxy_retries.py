"""Retries and order on real connections: dials that fail, connections that are lost or hang, and owners that move.

The core's decisions (the retry table, the order of batches) are in tests/unit/routing/test_fanout_*.py; each of these
fails if its rule is switched off (test_fanout_switches.py).
"""

from __future__ import annotations

import asyncio
import time

import pytest

from kproxy.routing import fanout, retry
from kproxy.routing.topology import Address
from tests.support.clients.raw_client import batch, produce_frame
from tests.support.processes.running_proxy import both_loops, in_one_go
from tests.support.scene import DOWN, HOLDS, NOT_WRITTEN, T0, Scene, scene, staged
from tests.support.waiting import eventually

NOT_LEADER, TIMED_OUT = 6, 7
TRANSACTIONAL = produce_frame(records=batch(is_transactional=True))
# The shortest deadline: one second.
SHORT_MS = 1000


# Refused before the append


@scene(HOLDS, HOLDS, owners=[1], one_go=True)
async def test_batch_refused_by_former_owner_goes_to_new(s: Scene) -> None:
    used = s.proxy.topology.revision
    s.produces(0, producer_id=-1)
    (asked,) = await s.takes(0)
    s.proxy.source.on_refresh = lambda *_: s.proxy.own(2)
    asked.answer(results={T0: NOT_LEADER})
    await s.accepts(0, at=2, results={T0: {"base_offset": 4}})
    assert s.proxy.source.refreshed == [("t", 0, used)]
    answer = await s.answer()
    assert answer.codes == {T0: 0}
    assert answer.results[0].fields["base_offset"] == 4


@scene(HOLDS, HOLDS, owners=[1], one_go=True)
async def test_refusals_before_the_reread_ends_do_not_count(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka's lookups wait for each other: more attempts fail before one ends than are allowed afterwards."""
    monkeypatch.setattr(retry, "BACKOFF_S", (0.001,))
    monkeypatch.setattr(retry, "WAIT_S", 20.0)
    used = s.proxy.topology.revision
    read, seen = asyncio.Event(), list[int]()

    async def refresh(topic: bytes, partition_index: int, seen_revision: int) -> None:
        seen.append(seen_revision)
        await read.wait()
        s.proxy.own(2)

    monkeypatch.setattr(s.proxy.source, "refresh", refresh)
    s.produces(0, producer_id=-1)
    for _ in range(retry.MAX_ATTEMPTS + 1):
        await s.accepts(0, results={T0: NOT_LEADER})
    (last,) = await s.takes(0)
    read.set()
    await eventually(lambda: s.proxy.topology.owner(b"t", 0) == 2)
    last.answer(results={T0: NOT_LEADER})
    await s.accepts(0, at=2)
    assert await s.gets(0) == [0]
    assert seen == [used]


# Batches that may have been appended


@pytest.mark.parametrize("speaks", [False, True], ids=["unknown", "known"])
@both_loops
@in_one_go
async def test_broker_of_unknown_versions_gets_no_resend(speaks: bool) -> None:
    """Brokers without idempotence append it twice, and a just started broker may be one."""
    async with staged(HOLDS, introduced=speaks) as s:
        s.produces(0)
        # It may have been appended when the broker ends.
        (await s.next()).connection.abort()
        if speaks:
            await s.accepts(0)
        assert await s.gets(0) == [0 if speaks else TIMED_OUT]
        assert len(s.broker.log) == (2 if speaks else 1)


@scene(HOLDS, one_go=True)
async def test_lost_connection_resends_idempotent_batches_in_order(s: Scene) -> None:
    await s.prove()
    s.produces(0, 1, 2, 3)
    asked = await s.takes(0, 1, 2, 3)
    asked[0].answer()
    assert await s.gets(0) == [0]
    asked[0].connection.abort()
    (again,) = await s.takes(1)
    # Alone, until the new connection has shown that the broker accepts it.
    assert await s.broker.is_silent()
    again.answer()
    await s.accepts(2, 3)
    assert await s.gets(1, 2, 3) == [0, 0, 0]
    assert len(s.broker.log) == 1 + 4 + 3


@scene(HOLDS, HOLDS, owners=[1], one_go=True)
async def test_silent_former_owner_does_not_block_lane_forever(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended, not dead: its connection stays open, and the client's batches wait until it is closed."""
    monkeypatch.setattr(fanout, "HUNG_AFTER_S", 0.2)
    await s.prove()
    s.produces(1, timeout_ms=SHORT_MS)
    await s.takes(1)
    assert await s.gets(1) == [TIMED_OUT]
    s.proxy.own(2)
    s.produces(1)
    await s.accepts(1, at=2)
    assert await s.gets(1) == [0]
    assert not s.broker.connections[0].is_open


# Requests that were not written


@scene(DOWN, one_go=True)
async def test_refused_dial_is_tried_thrice_then_answered_6(s: Scene) -> None:
    began = time.monotonic()
    assert await s.ask(TRANSACTIONAL) == [{T0: NOT_LEADER}]
    assert time.monotonic() - began < 5
    # One more if the first pause ended before the owner was looked up.
    assert s.proxy.retries(NOT_WRITTEN) in (2, 3)


@pytest.mark.parametrize("host", ["x" * 70, "a..b", "no.such.host.invalid", "\udc80"], ids=range(4))
@scene(owners=[1], one_go=True)
async def test_undialable_address_counts_as_refused_dial(s: Scene, host: str) -> None:
    s.proxy.topology.set_broker(1, Address(host, 1))
    assert await s.ask(produce_frame()) == [{T0: NOT_LEADER}]
