"""The state of a cluster's replicas is visible on brokers' pages, in `kproxy table` and in `kproxy doctor`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy.broker.keys import Keys
from kproxy.cli.doctor_checks import replication_of_proxy
from kproxy.cli.options import AdminPlace
from kproxy.cli.table_sources import tables_from_admin
from kproxy.config import parse_address
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy.observe.table import ReplicaRow, Replication, TablePage
from kproxy.ownership.replication import read_replication
from kproxy_codec import error_codes
from tests.support.brokers.reference_broker import BrokerProcess, start_broker, start_brokers
from tests.support.etcd.embedded import freeze, own_etcd
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.ports import free_port
from tests.support.processes.served import Samples, beside, page, samples, static_proxy
from tests.support.waiting import wait_for
from tests.support.wire.record_batches import build_batch

TTL_S = 2
TOPIC = "t"
DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


class Seen:
    """One broker's `/metrics`."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._admin = broker.admin

    def all(self) -> Samples:
        return samples(page(self._admin, "/metrics")[1])

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.all().get((f"kproxy_broker_{name}", tuple(sorted(labels.items()))))


@contextmanager
def proxy_of(etcd: str, prefix: str, directory: Path, *more: str) -> Iterator[KproxyProcess]:
    arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--etcd", etcd, "--prefix", prefix]
    with serving([*arguments, *more], directory / "serve.stderr") as process:
        yield process


def said(*arguments: str) -> str:
    """Return the output of a command that finds no fault."""
    ended = run_kproxy(*arguments)
    assert ended.status == 0, ended.stderr
    return ended.stdout


def test_follower_that_is_killed_is_seen_everywhere(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    with (
        start_brokers(
            (1, 2, 3), tmp_path, etcd.endpoint, etcd_prefix, admin=0, lease_ttl_s=15, default_replication_factor=3
        ) as brokers,
        proxy_of(etcd.endpoint, etcd_prefix, tmp_path) as proxy,
    ):
        with brokers[0].client() as client:
            leader_id = client.leaders(TOPIC)[0]
        leader, follower = brokers[leader_id - 1], brokers[leader_id % 3]
        missing = follower.node_id
        with leader.client() as client:
            assert client.produce(TOPIC, 0, build_batch([b"one", b"two"])).error_code == error_codes.NONE
        seen = Seen(leader)
        assert seen("under_replicated_partitions") == 0
        assert 0 < (seen("lease_remaining_seconds") or 0) <= 15
        assert seen("follower_connections") == 2
        _every_metric_is_documented(seen)
        in_proxy, in_etcd = ["--admin", proxy.admin], ["--etcd", etcd.endpoint, "--prefix", etcd_prefix]

        def doctored() -> list[dict[str, Any]]:
            """Return the doctor's findings about replicas, by etcd and by the proxy."""
            findings = json.loads(said("doctor", *in_proxy, *in_etcd, "--json"))["findings"]
            return [finding for finding in findings if finding["check"].startswith("replication.")]

        def rarely_doctored() -> list[dict[str, Any]]:
            """Poll slowly for the length of a lease: each check is a process."""
            time.sleep(2)
            return doctored()

        assert [(each["at"], each["result"]) for each in doctored()] == [(etcd.endpoint, "ok"), (proxy.admin, "ok")]

        follower.kill()
        wait_for(lambda: seen("under_replicated_partitions") == 1, what="the ISR shrinks")
        assert (seen("under_min_isr_partitions"), seen("isr_shrinks_total")) == (0, 1)
        with leader.client() as client:
            assert client.produce(TOPIC, 0, build_batch()).error_code == error_codes.NONE
        assert (seen("max_follower_lag_records") or 0) >= 1
        assert "1 of these lack a replica; 0 refuse acks=all" in page(leader.admin, "/")[1]
        in_sync = ",".join(str(each) for each in (1, 2, 3) if each != missing)
        # The proxy reads etcd at most once a second for this.
        wait_for(lambda: "; 1 under-replicated" in said("table", *in_proxy), what="the proxy's table says so")
        lines = said("table", *in_proxy).splitlines()
        assert lines[-1].endswith(f"  {in_sync} without {missing}")
        (shown,) = json.loads(said("table", *in_etcd, "--json"))["topics"]
        assert shown["partitions"][0]["isr"] == [each for each in (1, 2, 3) if each != missing]
        # It left the ISR when its connection broke; its lease ends later.
        wait_for(lambda: not any(finding["facts"]["alive"] for finding in rarely_doctored()), what="its lease ends")
        for finding in doctored():
            assert finding["result"] == "warn"
            assert finding["facts"] == {"broker": missing, "alive": False, "count": 1, "partitions": [f"{TOPIC}/0"]}
            assert f"broker {missing} is not in sync for 1 of 1 partition ({TOPIC}/0)" in finding["text"]

        other = next(each for each in brokers if each not in (leader, follower))
        other.kill()
        wait_for(lambda: seen("under_min_isr_partitions") == 1, what="too few are in sync")
        with leader.client() as client:
            assert client.produce(TOPIC, 0, build_batch()).error_code == error_codes.NOT_ENOUGH_REPLICAS
        lines = said("table", *in_proxy).splitlines()
        assert lines[1].endswith("; 1 under-replicated, 1 refuse acks=all (!)")
        assert lines[-1].endswith(" !")
        refusing = [finding["at"] for finding in doctored() if finding["check"] == "replication.min_isr"]
        assert refusing == [etcd.endpoint, proxy.admin]

        follower.start()
        wait_for(lambda: seen("under_min_isr_partitions") == 0, what="it is in sync again")
        assert seen("isr_expansions_total") == 1


def _every_metric_is_documented(seen: Seen) -> None:
    _, _, of_brokers = DOCUMENT.read_text().partition("## The reference brokers")
    documented = set(re.findall(r"^\| `(kproxy_broker_[a-z_]+)`", of_brokers, re.MULTILINE))
    text = page(seen._admin, "/metrics", Accept="application/openmetrics-text; version=1.0.0")[1]
    shown = set(re.findall(r"^# TYPE (kproxy_[a-z0-9_]+)", text, re.MULTILINE))
    assert {name.removesuffix("_total") for name in documented} == shown


async def test_broker_is_ready_while_its_lease_lives(tmp_path: Path) -> None:
    async with own_etcd(tmp_path / "etcd") as (server, _):
        with ExitStack() as stack:
            starting = start_broker(1, tmp_path / "1", server.endpoint, "/seen", admin=0, lease_ttl_s=TTL_S)
            broker = await asyncio.to_thread(stack.enter_context, starting)
            await _answers(broker.admin, 200, "ready\n")
            await freeze(server)
            try:
                await _answers(broker.admin, 503, "no live lease in etcd, so it leads nothing (etcd was last heard ")
                assert await asyncio.to_thread(page, broker.admin, "/livez") == (200, "alive\n")
                assert await asyncio.to_thread(Seen(broker), "lease_remaining_seconds") == 0
                assert await asyncio.to_thread(Seen(broker), "ready") == 0
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await _answers(broker.admin, 200, "ready\n")
            # etcd may do either first when it wakes up: renew the lease, or end it.
            ended = [await asyncio.to_thread(Seen(broker), f"lease_{how}_total") for how in ("lapses", "losses")]
            assert sum(count or 0 for count in ended) >= 1


async def _answers(admin: str, status: int, beginning: str) -> None:
    """Wait until `/readyz` answers."""

    def asked() -> bool:
        found, text = page(admin, "/readyz")
        return found == status and text.startswith(beginning)

    await asyncio.to_thread(wait_for, asked, what=f"{status} {beginning}")


def test_broker_waiting_for_etcd_says_so_and_lives(tmp_path: Path) -> None:
    admin = free_port()
    broker = BrokerProcess(1, tmp_path / "1", f"http://127.0.0.1:{free_port()}", "/seen", admin=admin)
    broker.start(wait=False)
    try:
        wait_for(lambda: _said(f"127.0.0.1:{admin}", lambda text: text.startswith("starting: etcd at ")))
        assert page(f"127.0.0.1:{admin}", "/livez") == (200, "alive\n")
    finally:
        broker.stop()


def _said(admin: str, is_wanted: Callable[[str], bool]) -> bool:
    try:
        status, text = page(admin, "/readyz")
    except ConnectionError:
        return False
    return status == 503 and is_wanted(text)


def test_taken_address_keeps_broker_from_starting(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    with start_broker(1, tmp_path / "1", etcd.endpoint, etcd_prefix, admin=0) as broker:
        arguments = ["broker", "--node-id", "2", "--data-dir", str(tmp_path / "2"), "--etcd", etcd.endpoint]
        ended = run_kproxy(*arguments, environ={"KPROXY_LISTEN__ADMIN": broker.admin})
        assert ended.status == 2
        assert f"cannot listen on {broker.admin}" in ended.stderr


# Through a proxy


async def test_proxy_reports_unknown_state(tmp_path: Path) -> None:
    async with own_etcd(tmp_path / "etcd") as (server, client):
        await _written(client, "/seen", isr=[1])
        with ExitStack() as stack:
            starting = proxy_of(server.endpoint, "/seen", tmp_path, "--workers", "2")
            proxy = await asyncio.to_thread(stack.enter_context, starting)
            status, text = await asyncio.to_thread(page, proxy.admin, "/replication?topic=t")
            assert (status, json.loads(text)["partitions"][0]["isr"]) == (200, [1])
            assert (await asyncio.to_thread(page, proxy.admin, "/replication?limit=0"))[0] == 400
            await freeze(server)
            try:
                # A read from the last second is still used.
                await asyncio.to_thread(wait_for, lambda: page(proxy.admin, "/replication")[0] == 503)
                (unknown,) = await replication_of_proxy(AdminPlace(parse_address(proxy.admin, "--admin")))
                assert unknown.mark == "warn"
                assert unknown.text.startswith("the in-sync replicas are unknown: ")
                table = await _table(proxy.admin)
                assert table.topics[0].partitions[0].isr is None
            finally:
                os.kill(server.pid, signal.SIGCONT)
            await asyncio.to_thread(wait_for, lambda: page(proxy.admin, "/replication")[0] == 200)


async def test_proxy_without_etcd_reports_no_replicas(tmp_path: Path) -> None:
    async with beside(static_proxy(tmp_path, {1: free_port()})) as proxy:
        status, text = await asyncio.to_thread(page, proxy.admin, "/replication")
        assert (status, "--etcd URL" in text) == (501, True)
        assert await replication_of_proxy(AdminPlace(parse_address(proxy.admin, "--admin"))) == []
        assert (await _table(proxy.admin)).topics[0].partitions[0].isr is None


async def _table(admin: str) -> TablePage:
    async with aclosing(tables_from_admin(AdminPlace(parse_address(admin, "--admin")), None)) as tables:
        table = await anext(tables)
    assert isinstance(table, TablePage)
    return table


# Rows read from etcd


async def test_isr_is_read_by_brokers_in_it(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    known = await _written(etcd_client, etcd_prefix, isr=[3, 1])
    assert known.brokers == [1, 3]
    assert known.rows == [ReplicaRow("t", 0, 1, 4, [1, 2, 3], [1, 3], 2)]


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"configs": {"min.insync.replicas": "1"}}, ReplicaRow("t", 0, 1, 4, [1, 2, 3], [1], 1)),
        ({"configs": {"min.insync.replicas": "9"}}, ReplicaRow("t", 0, 1, 4, [1, 2, 3], [1], 3)),
        ({"owner": "2"}, ReplicaRow("t", 0, -1, 4, [1, 2, 3], [1], 2)),
        ({"owner": "x"}, ReplicaRow("t", 0, -1, 4, [1, 2, 3], [1], 2)),
        ({"is_namesakes": True}, ReplicaRow("t", 0, -1, 4, [1, 2, 3], [1], 2)),
        ({"other_topic": True}, None),
        ({"partition": 1}, None),
    ],
)
async def test_row_matches_etcd(
    change: dict[str, object], row: ReplicaRow | None, etcd_client: EtcdClient, etcd_prefix: str
) -> None:
    known = await _written(etcd_client, etcd_prefix, isr=[1], **change)  # type: ignore[arg-type]
    assert known.rows == ([row] if row is not None else [])


async def test_proxy_reads_no_replicas_before_plain_brokers(etcd_client: EtcdClient, etcd_prefix: str) -> None:
    await etcd_client.put(f"{etcd_prefix}/partition-leases/t/0", b"1")
    await etcd_client.put(f"{etcd_prefix}/brokers/1", b"{}")
    known = await read_replication(etcd_client, etcd_prefix)
    assert (known.brokers, known.rows) == ([], [])


async def _written(
    client: EtcdClient,
    prefix: str,
    *,
    isr: list[int],
    configs: dict[str, str] | None = None,
    owner: str = "1",
    is_namesakes: bool = False,
    other_topic: bool = False,
    partition: int = 0,
) -> Replication:
    """Return the row for one partition of `t` with this state in etcd, among nonsensical keys.

    `is_namesakes`: its lease key is of an earlier topic of that name.
    """
    keys, topic_id = Keys(prefix), str(uuid.uuid4())
    topic = {"topic_id": topic_id, "replicas": [[1, 2, 3]], "configs": configs or {}}
    state = {"version": 2, "leader_epoch": 4, "isr": [[each, str(uuid.uuid4())] for each in isr]}
    state["topic_id"] = str(uuid.uuid4()) if other_topic else topic_id
    if is_namesakes:
        await client.put(keys.lease("t", partition), owner.encode())
    await client.put(keys.topic("t"), json.dumps(topic).encode())
    await client.put(keys.topic("u"), b"no topic")
    await client.put(keys.state("t", partition), json.dumps(state).encode())
    for senseless in ("t/x", "u/0", "t/9"):
        await client.put(f"{keys.states}{senseless}", b"{}")
    if not is_namesakes:
        await client.put(keys.lease("t", partition), owner.encode())
    for node_id in ("1", "3", "me"):
        await client.put(f"{keys.brokers}{node_id}", b"{}")
    return await read_replication(client, prefix)
