"""The trail of a real proxy arrives where it is shipped to, despite faults of the proxy, its sink and its clients."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from kproxy.trail.rows import Begin, End, Mark, Range, Row
from tests.integration.trail.test_audit_noted import Offsets
from tests.support.audit.audit_trails import is_whole, rows_in_files, trails_in_topic
from tests.support.brokers.scripted_upstream import ScriptedUpstream
from tests.support.brokers.small_disk import small_disk
from tests.support.clients.kafka_io import produce
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.running_proxy import both_loops, running_proxy
from tests.support.processes.served import ServedBroker, counted, port_of, refused, static_proxy
from tests.support.processes.worker_processes import worker_pids
from tests.support.waiting import wait_for

# Far below any time-out of the sink, far above what a record takes.
SOON_S = 20.0
# What is left of a trail is shipped for so long, when the proxy stops.
SHIP_REST_S = 5.0


@pytest.fixture
def trail_topic() -> str:
    return f"trail-{uuid.uuid4().hex[:12]}"


@contextmanager
def serve(
    dev: KproxyProcess, directory: Path, *more: str | Path, listen: str = "127.0.0.1:0"
) -> Iterator[KproxyProcess]:
    """A proxy of its own before the shared brokers."""
    arguments = ["serve", "--listen", listen, "--admin", "127.0.0.1:0", "--etcd", dev.etcd, "--alone"]
    with serving([*arguments, "--audit-interval-s", "0.5", *more], directory / "serve.err") as process:
        yield process


def shipped(process: KproxyProcess) -> float:
    return counted(process.admin, "kproxy_audit_rows_shipped_total")


def told(rows: Iterable[Row], topic: str) -> int:
    """Records of a topic that a trail has."""
    return sum(row.record_count for row in rows if isinstance(row, Range) and row.topic == topic)


def test_stopped_proxy_ships_its_whole_trail_through_itself(
    dev_cluster: KproxyProcess, tmp_path: Path, trail_topic: str
) -> None:
    topic = f"t-{uuid.uuid4().hex[:12]}"
    with serve(dev_cluster, tmp_path, "--audit-sink", f"topic:{trail_topic}") as process:
        produce(process.kafka, topic, [b"v"] * 100)
        # Within its interval: most of what is to be told is not shipped yet.
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
        # There may be more than one range of them.
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
    """It listens everywhere and is known by an address that leads nowhere from here."""
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
    """Two proxies in a row, and neither is served by the brokers that it ships to."""
    upstream = asyncio.run(_address_of_nobody())
    with static_proxy(
        tmp_path,
        {1: upstream},
        more=("--audit-sink", f"topic:{trail_topic}", "--audit-bootstrap", dev_cluster.kafka),
    ) as process:
        wait_for(lambda: shipped(process) >= 1, what="the begin")
    (rows,) = trails_in_topic(dev_cluster.kafka, trail_topic).values()
    assert is_whole(rows)


async def _address_of_nobody() -> int:
    upstream = await ServedBroker(1).start()
    await upstream.stop()
    return upstream.port


@pytest.mark.parametrize("trouble", ["hangs", pytest.param("refuses", marks=pytest.mark.long)])
async def test_clients_do_not_notice_a_down_sink(tmp_path: Path, trouble: str) -> None:
    upstream = await ServedBroker(1, Offsets()).start()
    with socket.create_server(("127.0.0.1", 0)) as sink:
        port = sink.getsockname()[1]
        if trouble == "refuses":
            sink.close()
        more = ("--audit-sink", "topic", "--audit-bootstrap", f"127.0.0.1:{port}", "--audit-interval-s", "0.5")
        with static_proxy(tmp_path, {1: upstream.port}, more=more) as process:
            client = await RawClient().connect(port_of(process))
            slowest = 0.0
            for n in range(200):
                began = time.monotonic()
                client.send(produce_frame(records=batch(n)))
                assert (await client.answer()).codes == {("t", 0): 0}
                slowest = max(slowest, time.monotonic() - began)
                await asyncio.sleep(0.01)
            assert slowest < SOON_S
            await asyncio.to_thread(
                wait_for, lambda: counted(process.admin, "kproxy_audit_sink_failures_total") >= 1, what="a failure"
            )
            assert counted(process.admin, "kproxy_audit_waiting_bytes") > 0
            assert shipped(process) == 0
            client.close()
            began = time.monotonic()
            process.signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0
            assert time.monotonic() - began < SHIP_REST_S + SOON_S
            errors = process.stderr()
        assert errors.count("audit sink failing") == 1
        assert "its last rows are lost" in errors
    await upstream.stop()


async def test_full_disk_delays_no_client_and_loses_nothing(tmp_path: Path) -> None:
    upstream = await ServedBroker(1, Offsets()).start()
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        more = ("--audit-sink", f"json:{disk.path / 'trail'}", "--audit-interval-s", "0.3")
        with static_proxy(tmp_path, {1: upstream.port}, more=more) as process:
            disk.confine(process.pid)
            await asyncio.to_thread(wait_for, lambda: shipped(process) >= 1, what="the begin")
            disk.fill()
            # A row for each: they do not fit into what the file's last block has left.
            for n in range(100):
                client = await RawClient().connect(port_of(process))
                client.send(produce_frame(records=batch(n)))
                assert (await client.answer(patience_s=SOON_S)).codes == {("t", 0): 0}
                client.close()
            await asyncio.to_thread(
                wait_for, lambda: counted(process.admin, "kproxy_audit_sink_failures_total") >= 2, what="failures"
            )
            disk.free()
            await asyncio.to_thread(
                wait_for, lambda: counted(process.admin, "kproxy_audit_waiting_bytes") == 0, what="the rest"
            )
            process.signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0
            errors = process.stderr()
        rows = rows_in_files(disk.path / "trail")
    assert is_whole(rows)
    assert told(rows, "t") == 100
    assert "No space left on device" in errors or "File too large" in errors
    assert "audit sink recovered" in errors
    await upstream.stop()


async def test_dropped_rows_show_as_missing_numbers(tmp_path: Path) -> None:
    """A sink that is down for so long that the memory for it is full: a gap, of exactly what was dropped."""
    partitions, clients = 40, 60
    upstream = await ServedBroker(1, Offsets()).start()
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        more = ("--audit-sink", f"json:{disk.path / 'trail'}", "--audit-interval-s", "0.3")
        brokers = dict.fromkeys(range(1, partitions + 1), upstream.port)
        with static_proxy(tmp_path, brokers, more=more, rooms="[audit]\nmax_bytes = 1048576\n") as process:
            disk.confine(process.pid)
            await asyncio.to_thread(wait_for, lambda: shipped(process) >= 1, what="the begin")
            disk.fill()
            for _ in range(clients):
                client = await RawClient().connect(port_of(process))
                client.send(produce_frame({"t": range(partitions)}))
                assert set((await client.answer()).codes.values()) == {0}
                client.close()

            def dropped() -> float:
                return counted(process.admin, "kproxy_audit_rows_dropped_total")

            await asyncio.to_thread(wait_for, lambda: dropped() > 0, what="the first drop")
            # What is on its way to the queue comes within an interval.
            await asyncio.sleep(1)
            assert counted(process.admin, "kproxy_audit_waiting_bytes") <= 1 << 20
            disk.free()
            await asyncio.to_thread(
                wait_for, lambda: counted(process.admin, "kproxy_audit_waiting_bytes") == 0, what="the rest"
            )
            missing = dropped()
            process.signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait) == 0
            errors = process.stderr()
        rows = rows_in_files(disk.path / "trail")
    assert [row.sequence for row in rows] == sorted({row.sequence for row in rows})
    assert isinstance(rows[-1], End)
    assert rows[-1].sequence + 1 - len(rows) == missing > 0
    # A mark may be among what was dropped.
    assert partitions * clients - missing <= told(rows, "t") < partitions * clients
    assert errors.count("audit rows dropped") == 1
    await upstream.stop()


async def test_idle_proxy_ships_a_mark(tmp_path: Path) -> None:
    upstream = await ServedBroker(1, Offsets()).start()
    trail = tmp_path / "trail"
    with static_proxy(tmp_path, {1: upstream.port}, more=("--audit-sink", f"json:{trail}")) as process:
        await asyncio.to_thread(wait_for, lambda: shipped(process) >= 2, what="a mark")
    kinds = [type(row) for row in rows_in_files(trail)]
    assert kinds[0] is Begin
    assert kinds[-1] is End
    assert set(kinds[1:-1]) == {Mark}
    await upstream.stop()


async def test_trail_has_acknowledgements_during_stop_but_no_cut(
    tmp_path: Path,
) -> None:
    upstream = await ServedBroker(1).start()
    trail = tmp_path / "trail"
    more = ("--audit-sink", f"json:{trail}")
    with static_proxy(tmp_path, {1: upstream.port}, limits={"drain_s": 2}, more=more) as process:
        client = await RawClient().connect(port_of(process))
        client.send(*(produce_frame(records=batch(n)) for n in range(3)))
        (await upstream.next()).answer(results={("t", 0): {"base_offset": 7}})
        assert (await client.answer()).codes == {("t", 0): 0}
        second, _third = await upstream.next(), await upstream.next()
        process.signal(signal.SIGTERM)
        await refused(port_of(process))
        second.answer(results={("t", 0): {"base_offset": 8}})
        assert (await client.answer()).codes == {("t", 0): 0}
        # The third is never answered.
        assert await asyncio.to_thread(process.wait) == 0
        assert await client.is_closed()
        client.close()
    rows = rows_in_files(trail)
    assert is_whole(rows)
    assert [row.spans for row in rows if isinstance(row, Range)] == [[7, 2]]
    await upstream.stop()


def test_unusable_sink_is_reported_before_any_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # Nobody is there who would tell the owners.
    ended = run_kproxy(
        *("serve", "--listen", "127.0.0.1:0", "--etcd", "http://127.0.0.1:1"),
        *("--audit-sink", f"json:{tmp_path / 'file' / 'trail'}"),
    )
    assert ended.status == 2
    assert ended.stderr.startswith(f"kproxy: audit.sink: the directory {tmp_path / 'file' / 'trail'} cannot be made")


@both_loops
async def test_internal_connection_is_no_client_and_outlives_clients() -> None:
    upstream = ScriptedUpstream(1, Offsets())
    async with running_proxy(upstream, limits={"max_connections": 1}) as proxy:
        proxy.own(1)
        client = await proxy.client()
        client.send(produce_frame())
        await client.answer()
        inside = RawClient()
        # As a sink does it, on a thread of its own.
        end = await asyncio.to_thread(proxy.listener.connect_inside)
        inside._reader, inside._writer = await asyncio.open_connection(sock=end)
        inside.send(produce_frame(records=batch(1)))
        assert (await inside.answer()).codes == {("t", 0): 0}
        assert proxy.vitals.client_connections == 1
        await proxy.listener.drain()
        assert await client.is_closed()
        inside.send(produce_frame(records=batch(2)))
        assert (await inside.answer()).codes == {("t", 0): 0}
        # One more, by which the sink begins anew after a failure.
        later = RawClient()
        later._reader, later._writer = await asyncio.open_connection(sock=proxy.listener.connect_inside())
        later.send(produce_frame(records=batch(3)))
        assert (await later.answer()).codes == {("t", 0): 0}
        await proxy.listener.stop()
        assert await inside.is_closed()
        assert await later.is_closed()
        with pytest.raises(ConnectionRefusedError):
            proxy.listener.connect_inside()
        for each in (inside, later):
            each.abort()


async def test_internal_connection_before_serving_is_refused() -> None:
    async with running_proxy() as proxy:
        fresh = type(proxy.listener)(proxy.context.limits)
        with pytest.raises(ConnectionRefusedError):
            fresh.connect_inside()
