"""A real `kproxy serve` before brokers that answer as KafScale's do, with KafScale's own keys and values."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient
from kproxy.etcd.id_blocks import BLOCK
from kproxy.routing.rendezvous import preferred
from kproxy_codec import api_keys as keys
from tests.support.brokers.kafscale import KafScaleBroker, snapshot_value
from tests.support.brokers.scripted_upstream import Asked
from tests.support.clients.raw_client import RawClient, control_frame, fetch_frame, produce_frame
from tests.support.etcd.embedded import Relay
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of
from tests.support.waiting import eventually

NOT_LEADER, TIMED_OUT, NOT_AVAILABLE, NOT_COORDINATOR, INVALID_REQUEST, NOT_AUTHORIZED = 6, 7, 15, 16, 42, 53
_files = itertools.count()


class KafScale:
    """Two KafScale brokers, their keys in etcd, and proxies in front of them."""

    def __init__(self, client: EtcdClient, prefix: str, directory: Path, stack: AsyncExitStack) -> None:
        self.client = client
        self.prefix = prefix
        self._directory = directory
        self._stack = stack
        self.brokers = [KafScaleBroker(0), KafScaleBroker(1)]

    async def start(self) -> None:
        for broker in self.brokers:
            self._stack.push_async_callback(broker.stop)
            await broker.start()
        await self.list_brokers()

    async def list_brokers(self) -> None:
        """Write the snapshot."""
        ports = {broker.node_id: broker.port for broker in self.brokers}
        await self.client.put(f"{self.prefix}/metadata/snapshot", snapshot_value(ports))

    async def own(self, partition_index: int, broker_id: int) -> None:
        await self.client.put(f"{self.prefix}/partition-leases/orders/{partition_index}", b"%d" % broker_id)

    async def proxy(self, etcd: str = "") -> KproxyProcess:
        """Start another proxy, which is stopped at the end."""
        stderr = self._directory / f"serve-{next(_files)}.stderr"
        config = self._directory / "kproxy.toml"
        config.write_text("[limits]\ncontrol_attempt_s = 1.0\nprobe_timeout_s = 60\n")
        arguments = ["serve", "--config", config, "--listen", "127.0.0.1:0", "--etcd", etcd or self.client.endpoints]
        process = KproxyProcess([*arguments, "--prefix", self.prefix], stderr)
        self._stack.push_async_callback(asyncio.to_thread, process.stop)
        await asyncio.to_thread(process.wait_ready)
        return process

    async def client_of(self, process: KproxyProcess) -> RawClient:
        """A client that knows the proxy's versions, so the proxy knows the brokers'."""
        client = await RawClient().connect(port_of(process))
        self._stack.callback(client.abort)
        await offered(client)
        return client

    async def asked(self, key: int = keys.PRODUCE) -> int:
        """Return the broker that receives the next request of this kind, after it has answered."""
        waiting = {asyncio.create_task(broker.next()): broker for broker in self.brokers}
        done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        [task] = done
        asked = task.result()
        assert asked.header.api_key == key
        if key in (keys.PRODUCE, keys.FETCH):
            asked.answer()
        else:
            asked.answer_message()
        return waiting[task].node_id


async def offered(client: RawClient) -> dict[int, tuple[int, int]]:
    client.send(control_frame(keys.API_VERSIONS, 3, client_software_name="t", client_software_version="1"))
    message = (await client.answer(keys.API_VERSIONS, 3)).message
    return {api.api_key: (api.min_version, api.max_version) for api in message.api_keys}


async def ask(client: RawClient, api_key: int, version: int, **fields: Any) -> Any:
    client.send(control_frame(api_key, version, **fields))
    return (await client.answer(api_key, version, patience_s=60)).message


async def producer_id(client: RawClient, version: int = 4) -> Any:
    return await ask(client, keys.INIT_PRODUCER_ID, version, transactional_id=None, transaction_timeout_ms=1000)


@pytest_asyncio.fixture
async def kafscale(etcd_client: EtcdClient, etcd_prefix: str, tmp_path: Path) -> AsyncIterator[KafScale]:
    async with AsyncExitStack() as stack:
        world = KafScale(etcd_client, etcd_prefix, tmp_path, stack)
        await world.start()
        yield world


async def test_versions_offered_for_kafscale_are_common_ones(kafscale: KafScale) -> None:
    found = await offered(await kafscale.client_of(await kafscale.proxy()))
    assert found == {
        keys.PRODUCE: (0, 9),
        keys.FETCH: (11, 13),
        keys.LIST_OFFSETS: (1, 4),
        keys.METADATA: (0, 12),
        keys.OFFSET_COMMIT: (3, 3),
        keys.OFFSET_FETCH: (5, 5),
        # The proxy's own: librdkafka knows no version above 2, and requires this API for lz4.
        keys.FIND_COORDINATOR: (0, 6),
        keys.JOIN_GROUP: (4, 4),
        keys.HEARTBEAT: (4, 4),
        keys.LEAVE_GROUP: (4, 4),
        keys.SYNC_GROUP: (4, 4),
        keys.DESCRIBE_GROUPS: (5, 5),
        keys.LIST_GROUPS: (0, 5),
        keys.OFFSET_FOR_LEADER_EPOCH: (3, 3),
        keys.ALTER_CONFIGS: (1, 1),
        keys.DELETE_GROUPS: (0, 2),
        # Refused when sent, as by Kafka without group.version.
        keys.CONSUMER_GROUP_HEARTBEAT: (0, 1),
        keys.API_VERSIONS: (0, 4),
        keys.CREATE_TOPICS: (2, 2),
        keys.DELETE_TOPICS: (1, 2),
        # The proxy's own; transactions are not offered, although KafScale lists them with versions -1 to -1.
        keys.INIT_PRODUCER_ID: (0, 5),
        keys.DESCRIBE_CONFIGS: (4, 4),
        keys.CREATE_PARTITIONS: (0, 3),
        # The proxy's own, if it has an etcd.
        keys.OWN: (0, 1),
    }


async def test_requests_follow_the_leases_and_the_address_book(kafscale: KafScale) -> None:
    await kafscale.own(0, 0)
    await kafscale.own(1, 1)
    client = await kafscale.client_of(await kafscale.proxy())

    async def goes_to(partition_index: int) -> int:
        client.send(produce_frame({"orders": [partition_index]}))
        broker = await kafscale.asked()
        assert (await client.answer()).codes == {("orders", partition_index): 0}
        return broker

    assert [await goes_to(0), await goes_to(1), await goes_to(0)] == [0, 1, 0]
    await kafscale.own(0, 1)
    await eventually(lambda: comes_to(goes_to(0), 1))
    # Broker 1 moves, according to the operator.
    moved = await KafScaleBroker(1).start()
    moved.script = lambda asked: asked.answer()
    old, kafscale.brokers[1] = kafscale.brokers[1], moved
    await kafscale.list_brokers()
    await old.stop()
    await eventually(lambda: comes_to(produced(client, 1), 0))
    assert moved.log
    await moved.stop()


async def comes_to(outcome: Awaitable[object], wanted: object) -> bool:
    return await outcome == wanted


async def test_unowned_partition_is_not_offered_to_removed_broker(kafscale: KafScale) -> None:
    """Dead brokers stay in the snapshot."""
    dead = kafscale.brokers.pop()
    await dead.stop()
    partitions = [n for n in range(40) if preferred(b"orders/%d" % n, (0, 1)) == 1][:3]
    kafscale.brokers[0].script = lambda asked: asked.answer()
    client = await kafscale.client_of(await kafscale.proxy())
    for partition_index in partitions:
        client.send(produce_frame({"orders": [partition_index]}))
        assert (await client.answer()).codes == {("orders", partition_index): 0}
    # Its own partition still goes to it, so nowhere, until its lease ends.
    await kafscale.own(partitions[0], 1)
    await eventually(lambda: comes_to(produced(client, partitions[0]), NOT_LEADER))


async def test_unowned_partition_avoids_a_stopping_broker(kafscale: KafScale) -> None:
    """A stopping KafScale broker gives up its leases but keeps its connections, and refuses all requests on them."""
    stopping = kafscale.brokers[1]
    stopping.script = lambda asked: asked.answer(results=dict.fromkeys(asked.partitions, NOT_LEADER))
    kafscale.brokers[0].script = lambda asked: asked.answer()
    partitions = [n for n in range(40) if preferred(b"orders/%d" % n, (0, 1)) == 1][:3]
    client = await kafscale.client_of(await kafscale.proxy())
    for partition_index in partitions:
        assert await produced(client, partition_index) == 0
    assert [len(broker.log) for broker in kafscale.brokers] == [3, 3]
    # If all refuse, the client gets the error.
    kafscale.brokers[0].script = stopping.script
    assert await produced(client, partitions[0]) == NOT_LEADER


async def test_unowned_group_avoids_a_stopping_broker(kafscale: KafScale) -> None:
    client = await kafscale.client_of(await kafscale.proxy())
    group = next(f"g{n}" for n in range(40) if preferred(b"g%d" % n, (0, 1)) == 1)
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}]}]

    def refuse(asked: Asked) -> None:
        refused = [{"name": "t", "partitions": [{"partition_index": 0, "error_code": NOT_COORDINATOR}]}]
        commits = asked.header.api_key == keys.OFFSET_COMMIT
        asked.answer_message(**({"topics": refused} if commits else {"error_code": NOT_COORDINATOR}))

    kafscale.brokers[0].script = lambda asked: asked.answer_message()
    kafscale.brokers[1].script = refuse
    await ask(client, keys.OFFSET_COMMIT, 3, group_id=group, topics=topics)
    assert (await ask(client, keys.JOIN_GROUP, 4, group_id=group, protocol_type="consumer")).error_code == 0
    assert [[asked.header.api_key for asked in broker.log] for broker in kafscale.brokers] == [
        [keys.JOIN_GROUP],
        [keys.OFFSET_COMMIT],
    ]
    # If all have refused, all are asked again.
    kafscale.brokers[0].script = refuse
    answers = [(await ask(client, keys.HEARTBEAT, 4, group_id=group)).error_code for _ in range(4)]
    assert answers == [NOT_COORDINATOR] * 4
    assert {len(broker.log) for broker in kafscale.brokers} == {3}


async def produced(client: RawClient, partition_index: int) -> int:
    client.send(produce_frame({"orders": [partition_index]}))
    return (await client.answer()).codes["orders", partition_index]


async def test_batch_that_may_be_appended_is_not_resent(kafscale: KafScale) -> None:
    """KafScale would not recognise it despite its producer id."""
    await kafscale.own(0, 0)
    kafscale.brokers[0].script = lambda asked: asked.connection.abort()
    client = await kafscale.client_of(await kafscale.proxy())
    client.send(produce_frame({"orders": [0]}))
    assert (await client.answer()).codes == {("orders", 0): TIMED_OUT}
    assert len(kafscale.brokers[0].log) == 1


@pytest.mark.parametrize("version", [11, 12])
async def test_null_records_are_not_forwarded(kafscale: KafScale, version: int) -> None:
    """KafScale sends null, which librdkafka and kafka-python cannot handle."""
    await kafscale.own(0, 0)
    client = await kafscale.client_of(await kafscale.proxy())
    kafscale.brokers[0].script = lambda asked: asked.answer(results={("orders", 0): {"records": None}})
    client.send(fetch_frame({"orders": [0]}, version=version, max_wait_ms=0))
    [result] = (await client.answer(keys.FETCH, version)).results
    assert result.fields["records"] == b""


# Groups


async def test_holder_of_group_lease_coordinates_the_group(kafscale: KafScale) -> None:
    first, second = [await kafscale.client_of(await kafscale.proxy()) for _ in range(2)]
    requests: list[tuple[int, int, dict[str, Any]]] = [
        (keys.JOIN_GROUP, 4, {"protocol_type": "consumer"}),
        (keys.SYNC_GROUP, 4, {}),
        (keys.HEARTBEAT, 4, {}),
        (keys.LEAVE_GROUP, 4, {}),
        (keys.OFFSET_COMMIT, 3, {"topics": []}),
        (keys.OFFSET_FETCH, 5, {"topics": []}),
    ]

    async def goes_to(client: RawClient, group: str, key: int, version: int, fields: dict[str, Any]) -> int:
        client.send(control_frame(key, version, group_id=group, **fields))
        broker = await kafscale.asked(key)
        assert (await client.answer(key, version)).correlation_id == 1
        return broker

    # Without a lease every proxy asks the same broker, and groups are spread.
    groups = [f"g{n}" for n in range(8)]
    for request in requests[:2]:
        at = [[await goes_to(client, group, *request) for group in groups] for client in (first, second)]
        assert at[0] == at[1]
        assert set(at[0]) == {0, 1}
    for holder in (0, 1):
        await kafscale.client.put(f"{kafscale.prefix}/group-leases/a/b", b"%d" % holder)
        await eventually(lambda holder=holder: comes_to(goes_to(first, "a/b", *requests[0]), holder))
        assert [await goes_to(first, "a/b", *request) for request in requests] == [holder] * len(requests)
    # The client waits for an unlisted holder; no other broker is asked.
    await kafscale.client.put(f"{kafscale.prefix}/group-leases/a/b", b"7")
    for client in (first, second):
        async with asyncio.timeout(60):
            while True:
                client.send(control_frame(keys.HEARTBEAT, 4, group_id="a/b"))
                if await anyone_asked(kafscale):
                    await client.answer(keys.HEARTBEAT, 4)
                    continue
                assert (await client.answer(keys.HEARTBEAT, 4)).message.error_code == NOT_AVAILABLE
                break


async def anyone_asked(kafscale: KafScale) -> bool:
    for broker in kafscale.brokers:
        if not await broker.is_silent():
            (await broker.next()).answer_message()
            return True
    return False


async def test_groups_have_a_coordinator_but_transactions_none(kafscale: KafScale) -> None:
    client = await kafscale.client_of(await kafscale.proxy())
    for version in range(7):
        fields = {"coordinator_keys": ["g", "h"]} if version >= 4 else {"key": "g"}
        answer = await ask(client, keys.FIND_COORDINATOR, version, **fields)
        for found in answer.coordinators if version >= 4 else [answer]:
            assert (found.error_code, found.node_id, found.host) == (0, 1_000_000, "127.0.0.1"), version
    found = await ask(client, keys.FIND_COORDINATOR, 3, key="x", key_type=1)
    assert (found.error_code, "no transactions" in found.error_message) == (NOT_AUTHORIZED, True)
    [found] = (await ask(client, keys.FIND_COORDINATOR, 6, coordinator_keys=["x"], key_type=2)).coordinators
    assert (found.error_code, found.node_id) == (INVALID_REQUEST, -1)
    answer = await ask(client, keys.INIT_PRODUCER_ID, 4, transactional_id="x", transaction_timeout_ms=1000)
    assert answer.error_code == NOT_AUTHORIZED
    assert not [asked for broker in kafscale.brokers for asked in broker.log]


# Producer ids


async def test_two_proxies_never_issue_the_same_producer_id(kafscale: KafScale) -> None:
    processes = [await kafscale.proxy(), await kafscale.proxy()]
    taken: list[int] = []

    async def take(process: KproxyProcess, count: int) -> None:
        client = await kafscale.client_of(process)
        fields = {"transactional_id": None, "transaction_timeout_ms": 1000}
        client.send(*(control_frame(keys.INIT_PRODUCER_ID, n % 6, correlation_id=n, **fields) for n in range(count)))
        for n in range(count):
            answer = (await client.answer(keys.INIT_PRODUCER_ID, n % 6)).message
            assert (answer.error_code, answer.producer_epoch) == (0, 0)
            taken.append(answer.producer_id)

    await asyncio.gather(*(take(process, BLOCK // 2 + 100) for process in (*processes, *processes)))
    await asyncio.to_thread(processes[0].stop)
    await take(await kafscale.proxy(), 10)
    assert len(set(taken)) == len(taken) == 4 * (BLOCK // 2 + 100) + 10
    found = await kafscale.client.get(f"{kafscale.prefix}/producer-ids")
    assert found is not None
    assert found.value == b"5000", "the first id that nobody has: two blocks each, and one after the restart"
    assert not [asked for broker in kafscale.brokers for asked in broker.log]


async def test_broker_without_producer_ids_is_asked_once(kafscale: KafScale) -> None:
    """It reports InitProducerId as served, but answers with the id -1."""
    for broker in kafscale.brokers:
        await broker.stop()
    kafscale.brokers = [KafScaleBroker(0, claims_producer_ids=True), KafScaleBroker(1, claims_producer_ids=True)]
    await kafscale.start()
    process = await kafscale.proxy()
    client, other = await kafscale.client_of(process), await kafscale.client_of(process)
    assert (await offered(client))[keys.INIT_PRODUCER_ID] == (0, 4)
    given = [(await producer_id(each, version)).producer_id for each in (client, other) for version in range(5)]
    assert len(set(given)) == 10
    assert min(given) >= 0
    assert len([asked for broker in kafscale.brokers for asked in broker.log]) == 1
    assert (await offered(client))[keys.INIT_PRODUCER_ID] == (0, 5)


async def test_missing_etcd_stops_only_new_producer_ids(kafscale: KafScale, etcd: EmbeddedEtcd) -> None:
    await kafscale.own(0, 0)
    kafscale.brokers[0].script = lambda asked: asked.answer()
    async with Relay(etcd.endpoint) as relay:
        process = await kafscale.proxy(relay.endpoint)
        clients = [await kafscale.client_of(process) for _ in range(3)]
        await relay.shut()
        # The others must wait meanwhile for this to show anything: retried if the machine stalls that long.
        for _ in range(5):
            asking = [asyncio.create_task(producer_id(client)) for client in clients[:2]]
            await asyncio.sleep(0.1)
            assert await produced(clients[2], 0) == 0
            are_waiting = not any(task.done() for task in asking)
            for answer in await asyncio.gather(*asking):
                assert (answer.error_code, answer.producer_id, answer.producer_epoch) == (NOT_AVAILABLE, -1, -1)
            if are_waiting:
                break
        assert are_waiting, "what needs no id waits for etcd"
        await relay.open()
        await eventually(lambda: comes_to(error_of(clients[0]), 0))


async def error_of(client: RawClient) -> int:
    return int((await producer_id(client)).error_code)
