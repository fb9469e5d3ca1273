"""The trail of a real proxy reaches its sink, despite faults of the proxy, the sink and clients."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from kproxy.trail.rows import Begin, End, Mark, Range, Row
from tests.integration.trail.test_audit_noted import Offsets
from tests.support.audit.audit_trails import is_whole, rows_in_files, trails_in_topic
from tests.support.brokers.small_disk import small_disk
from tests.support.clients.kafka_io import produce
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import STOP_TIMEOUT_S, KproxyProcess, run_kproxy, serving
from tests.support.processes.ports import free_port
from tests.support.processes.running_proxy import both_loops
from tests.support.processes.served import Served, counted, port_of, refused, served, static_proxy
from tests.support.processes.worker_processes import worker_pids
from tests.support.scene import T0, Scene, scene, staged
from tests.support.waiting import eventually, wait_for

# Far below any time-out of the sink, far above a record's time.
SOON_S = 20.0
# How long the rest of a trail is shipped when the proxy stops.
SHIP_REST_S = 5.0


@pytest.fixture
def trail_topic() -> str:
    return f"trail-{uuid.uuid4().hex[:12]}"


@contextmanager
def serve(
    dev: KproxyProcess, directory: Path, *more: str | Path, listen: str = "127.0.0.1:0"
) -> Iterator[KproxyProcess]:
    """A separate proxy in front of the shared brokers."""
    arguments = ["serve", "--listen", listen, "--admin", "127.0.0.1:0", "--etcd", dev.etcd, "--alone"]
    with serving([*arguments, "--audit-interval-s", "0.5", *more], directory / "serve.err") as process:
        yield process


def shipped(process: KproxyProcess) -> float:
    return counted(process.admin, "kproxy_audit_rows_shipped_total")


def told(rows: Iterable[Row], topic: str) -> int:
    """The number of a topic's records in a trail."""
    return sum(row.record_count for row in rows if isinstance(row, Range) and row.topic == topic)


def test_stopped_proxy_ships_its_whole_trail_through_itself(
    dev_cluster: KproxyProcess, tmp_path: Path, trail_topic: str
) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    with serve(dev_cluster, tmp_path, "--audit-sink", f"topic:{trail_topic}") as process:
        produce(process.kafka, topic, [b"v"] * 100)
        # Within its interval: most rows are not shipped yet.
        began = time.monotonic()
        assert process.stop() == 0
        assert time.monotonic() - began < SOON_S
        errors = process.stderr()
    (rows,) = trails_in_topic(dev_cluster.kafka, trail_topic).values()
    assert is_whole(rows)
    assert told(rows, topic) == 100
    assert {row.proxy for row in rows} == {process.kafka}
    assert "audit" not in errors


def test_killed_proxy_leaves_its_shipped_trail(dev_cluster: KproxyProcess, tmp_path: Path, trail_topic: str) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    with serve(dev_cluster, tmp_path, "--audit-sink", f"topic:{trail_topic}") as process:
        produce(process.kafka, topic, [b"v"] * 50)
        wait_for(lambda: shipped(process) >= 2, what="a range")
        # The 50 records may be in several ranges.
        trails = partial(trails_in_topic, dev_cluster.kafka, trail_topic)
        wait_for(lambda: told(chain.from_iterable(trails().values()), topic) == 50, what="all of it")
        process.signal(signal.SIGKILL)
        process.wait()
    (rows,) = trails().values()
    assert told(rows, topic) == 50
    assert not any(isinstance(row, End) for row in rows)
    with serve(dev_cluster, tmp_path, "--audit-sink", f"topic:{trail_topic}"):
        pass
    assert sorted(map(is_whole, trails().values())) == [False, True]


def test_trail_finds_its_route_on_a_closed_network(
    dev_cluster: KproxyProcess, tmp_path: Path, trail_topic: str
) -> None:
    """It listens on all addresses and advertises an unreachable one."""
    more = ("--advertise", "kafka.invalid:9", "--audit-sink", f"topic:{trail_topic}")
    with serve(dev_cluster, tmp_path, *more, listen="0.0.0.0:0") as process:
        wait_for(lambda: shipped(process) >= 1, what="the begin")
        assert counted(process.admin, "kproxy_client_connections") == 0, "the sink is counted among the clients"
    (rows,) = trails_in_topic(dev_cluster.kafka, trail_topic).values()
    assert is_whole(rows)
    assert {row.proxy for row in rows} == {"kafka.invalid:9"}
    assert told(rows, trail_topic) == 0, "the trail tells of itself"


def test_each_worker_has_a_trail_of_its_own(dev_cluster: KproxyProcess, tmp_path: Path, trail_topic: str) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    with serve(dev_cluster, tmp_path, "--workers", "2", "--audit-sink", f"topic:{trail_topic}") as process:
        assert set(worker_pids(process)) == {1, 2}
        for _ in range(6):
            produce(process.kafka, topic, [b"v"] * 10)
        wait_for(lambda: shipped(process) >= 3, what="two begins and a range")
        name = process.kafka
    trails = trails_in_topic(dev_cluster.kafka, trail_topic)
    assert {rows[0].proxy for rows in trails.values()} == {f"{name}/1", f"{name}/2"}
    assert all(map(is_whole, trails.values()))
    assert sum(told(rows, topic) for rows in trails.values()) == 60


def test_trail_is_shipped_to_named_other_cluster(dev_cluster: KproxyProcess, tmp_path: Path, trail_topic: str) -> None:
    """Two proxies in a row; each ships to brokers that do not serve it."""
    with static_proxy(
        tmp_path,
        {1: free_port()},
        more=("--audit-sink", f"topic:{trail_topic}", "--audit-bootstrap", dev_cluster.kafka),
    ) as process:
        wait_for(lambda: shipped(process) >= 1, what="the begin")
    (rows,) = trails_in_topic(dev_cluster.kafka, trail_topic).values()
    assert is_whole(rows)


def ended_in(s: Served, name: str) -> Awaitable[object]:
    return eventually(lambda: counted(s.process.admin, name) == 0, "the rest")


def fails(s: Served, times: int) -> Awaitable[object]:
    return eventually(lambda: counted(s.process.admin, "kproxy_audit_sink_failures_total") >= times, "failures")


def begun(s: Served, rows: int = 1) -> Awaitable[object]:
    return eventually(lambda: shipped(s.process) >= rows, "the begin, and a mark if it is two")


async def terminated(s: Served) -> str:
    """Send SIGTERM; return the process's output."""
    s.process.signal(signal.SIGTERM)
    await s.ended(STOP_TIMEOUT_S)
    return s.process.stderr()


@pytest.mark.parametrize("trouble", ["hangs", pytest.param("refuses", marks=pytest.mark.long)])
async def test_clients_do_not_notice_a_down_sink(tmp_path: Path, trouble: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sink:
        port = sink.getsockname()[1]
        if trouble == "refuses":
            sink.close()
        more = ("--audit-sink", "topic", "--audit-bootstrap", f"127.0.0.1:{port}", "--audit-interval-s", "0.5")
        async with served(tmp_path, Offsets(), more=more) as s:
            client = await s.client()
            slowest = 0.0
            for n in range(200):
                began = time.monotonic()
                client.send(produce_frame(records=batch(n)))
                assert (await client.answer()).codes == {T0: 0}
                slowest = max(slowest, time.monotonic() - began)
                await asyncio.sleep(0.01)
            assert slowest < SOON_S
            await fails(s, 1)
            assert counted(s.process.admin, "kproxy_audit_waiting_bytes") > 0
            assert shipped(s.process) == 0
            client.close()
            began = time.monotonic()
            errors = await terminated(s)
            assert time.monotonic() - began < SHIP_REST_S + SOON_S
        assert errors.count("audit sink failing") == 1
        assert "its last rows are lost" in errors


async def test_full_disk_delays_no_client_and_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        more = ("--audit-sink", f"json:{disk.path / 'trail'}", "--audit-interval-s", "0.3")
        async with served(tmp_path, Offsets(), more=more) as s:
            disk.confine(s.process.pid)
            await begun(s)
            disk.fill()
            # A row for each: they do not fit into the file's last block.
            for n in range(100):
                client = await s.client()
                client.send(produce_frame(records=batch(n)))
                assert (await client.answer(patience_s=SOON_S)).codes == {T0: 0}
                client.close()
            await fails(s, 2)
            disk.free()
            await ended_in(s, "kproxy_audit_waiting_bytes")
            errors = await terminated(s)
        rows = rows_in_files(disk.path / "trail")
    assert is_whole(rows)
    assert told(rows, "t") == 100
    assert "No space left on device" in errors or "File too large" in errors
    assert "audit sink recovered" in errors


async def test_dropped_rows_show_as_missing_numbers(tmp_path: Path) -> None:
    """A sink is down until its memory is full: the gap is exactly the dropped rows."""
    partitions, clients = 40, 60
    wide = {"owners": [1] * partitions, "rooms": "[audit]\nmax_bytes = 1048576\n"}
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        more = ("--audit-sink", f"json:{disk.path / 'trail'}", "--audit-interval-s", "0.3")
        async with served(tmp_path, Offsets(), more=more, **wide) as s:
            disk.confine(s.process.pid)
            await begun(s)
            disk.fill()
            for _ in range(clients):
                client = await s.client()
                client.send(produce_frame({"t": range(partitions)}))
                assert set((await client.answer()).codes.values()) == {0}
                client.close()

            def dropped() -> float:
                return counted(s.process.admin, "kproxy_audit_rows_dropped_total")

            await eventually(lambda: dropped() > 0, "the first drop")
            # Data on its way to the queue arrives within an interval.
            await asyncio.sleep(1)
            assert counted(s.process.admin, "kproxy_audit_waiting_bytes") <= 1 << 20
            disk.free()
            await ended_in(s, "kproxy_audit_waiting_bytes")
            missing = dropped()
            errors = await terminated(s)
        rows = rows_in_files(disk.path / "trail")
    assert [row.sequence for row in rows] == sorted({row.sequence for row in rows})
    assert isinstance(rows[-1], End)
    assert rows[-1].sequence + 1 - len(rows) == missing > 0
    # A mark may be among the dropped rows.
    assert partitions * clients - missing <= told(rows, "t") < partitions * clients
    assert errors.count("audit rows dropped") == 1


async def test_idle_proxy_ships_a_mark(tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    async with served(tmp_path, Offsets(), more=("--audit-sink", f"json:{trail}")) as s:
        await begun(s, rows=2)
    kinds = [type(row) for row in rows_in_files(trail)]
    assert kinds[0] is Begin
    assert kinds[-1] is End
    assert set(kinds[1:-1]) == {Mark}


async def test_trail_has_acknowledgements_during_stop_but_no_cut(tmp_path: Path) -> None:
    trail = tmp_path / "trail"
    async with served(tmp_path, None, limits={"drain_s": 2}, more=("--audit-sink", f"json:{trail}")) as s:
        client = await s.client()
        client.send(*(produce_frame(records=batch(n)) for n in range(3)))
        (await s.broker.next()).answer(results={T0: {"base_offset": 7}})
        assert (await client.answer()).codes == {T0: 0}
        second, _third = await s.broker.next(), await s.broker.next()
        s.process.signal(signal.SIGTERM)
        await refused(port_of(s.process))
        second.answer(results={T0: {"base_offset": 8}})
        assert (await client.answer()).codes == {T0: 0}
        # The third is never answered.
        await s.ended(STOP_TIMEOUT_S)
        assert await client.is_closed()
    rows = rows_in_files(trail)
    assert is_whole(rows)
    assert [row.spans for row in rows if isinstance(row, Range)] == [[7, 2]]


def test_unusable_sink_is_reported_before_any_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # No process would report the owners.
    ended = run_kproxy(
        *("serve", "--listen", "127.0.0.1:0", "--etcd", "http://127.0.0.1:1"),
        *("--audit-sink", f"json:{tmp_path / 'file' / 'trail'}"),
    )
    assert ended.status == 2
    assert ended.stderr.startswith(f"kproxy: audit.sink: the directory {tmp_path / 'file' / 'trail'} cannot be created")


@both_loops
async def test_internal_connection_is_no_client_and_outlives_clients() -> None:
    async with staged(Offsets(), limits={"max_connections": 1}) as s:
        assert await code(s.client, 0) == 0
        inside = await over(s.proxy.listener.connect_inside())
        assert await code(inside, 1) == 0
        assert s.proxy.vitals.client_connections == 1
        await s.proxy.listener.drain()
        assert await s.client.is_closed()
        assert await code(inside, 2) == 0
        # The sink opens another connection after a failure.
        later = await over(s.proxy.listener.connect_inside())
        assert await code(later, 3) == 0
        await s.proxy.listener.stop()
        assert await inside.is_closed()
        assert await later.is_closed()
        with pytest.raises(ConnectionRefusedError):
            s.proxy.listener.connect_inside()
        for each in (inside, later):
            each.abort()


async def over(end: socket.socket) -> RawClient:
    """A client on an existing connection."""
    client = RawClient()
    client._reader, client._writer = await asyncio.open_connection(sock=end)
    return client


async def code(client: RawClient, number: int) -> int:
    client.send(produce_frame(records=batch(number)))
    return (await client.answer()).codes[T0]


@scene(clients=0)
async def test_internal_connection_before_serving_is_refused(s: Scene) -> None:
    fresh = type(s.proxy.listener)(s.proxy.context.limits)
    with pytest.raises(ConnectionRefusedError):
        fresh.connect_inside()
