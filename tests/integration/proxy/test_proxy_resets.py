"""A connection that ends after any byte of a request or an answer, on the broker's or the client's side.

All offsets run at once through one proxy, each with its own client and broker; half are reset (RST), half closed (FIN).
The halves are swapped if the request is split over two brokers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.brokers.cutting_broker import RESET_AT_CLOSE, Cut, CuttingBroker
from tests.support.brokers.scripted_upstream import HOST, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import RawClient, batch, produce_frame
from tests.support.processes.at_rest import what_is_left
from tests.support.processes.running_proxy import RunningProxy, both_loops, running_proxy
from tests.support.scene import ANSWERS, T0, Scene, scene
from tests.support.waiting import eventually

TIMED_OUT = 7
# On a busy machine any dial and any answer may take a second. Brokers here have nothing to say to a probe.
PATIENT = {"connect_timeout_s": 60.0, "probe_timeout_s": 60.0}
NOT_SUSPICIOUS_S = 60.0
WELL = 1_000
WELL_PARTITION = 999_999
# acks=1 equals acks=all here; the scripts (tests/unit) cover resends.
KINDS = [(-1, 7), (-1, -1), (0, -1)]
KIND_NAMES = [f"acks {acks}, {'idempotent' if producer_id >= 0 else 'plain'}" for acks, producer_id in KINDS]


@pytest.fixture(autouse=True)
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.proxy.waiting_requests.SUSPICIOUS_S", NOT_SUSPICIOUS_S)


def request_to(partition: int, number: int, acks: int, producer_id: int, *, split: bool) -> bytes:
    partitions = [partition, WELL_PARTITION] if split else [partition]
    return produce_frame({"t": partitions}, records=batch(number, producer_id=producer_id), acks=acks, correlation_id=7)


def cuts(acks: int, producer_id: int) -> list[Cut]:
    """Every offset, including the whole request; for an answer, all but its end."""
    request = len(request_to(0, 1, acks, producer_id, split=False))
    answer = 0 if acks == 0 else 4 + 4 + 1 + 1 + 2 + 1 + 4 + 2 + 3 * 8 + 1 + 1 + 1 + 1 + 4 + 1
    return [Cut(False, at, at % 2 == 0) for at in range(request + 1)] + [
        Cut(True, at, at % 2 == 0) for at in range(answer)
    ]


@asynccontextmanager
async def brokers_that_cut(proxy: RunningProxy, cuts: list[Cut]) -> AsyncIterator[list[CuttingBroker]]:
    """A broker and a partition for each of `cuts`."""
    brokers = [CuttingBroker(cut) for cut in cuts]
    try:
        for place, broker in enumerate(brokers):
            broker.start()
            proxy.topology.set_broker(place, broker.address)
            proxy.own(place, partitions=[place])
        await proxy.context.brokers.current()
        yield brokers
    finally:
        for broker in brokers:
            await broker.stop()


class Case:
    """One client, the broker that breaks its connection, and the expected outcome."""

    def __init__(self, place: int, broker: CuttingBroker, acks: int, producer_id: int, *, split: bool) -> None:
        self.place, self.broker = place, broker
        self.acks, self.producer_id, self.split = acks, producer_id, split

    def __str__(self) -> str:
        return f"{self.broker.cut}, split: {self.split}"

    async def run(self, client: RawClient) -> None:
        await self._produce(client, 0, [0])
        # A second attempt after a failure would be a resend: the proxy only recognises batches if the broker does.
        await self._produce(client, 1, [0] if self.producer_id >= 0 else [TIMED_OUT])
        await self._produce(client, 2, [0], acks=-1)
        self._judge()

    async def _produce(self, client: RawClient, number: int, expected: list[int], acks: int | None = None) -> None:
        acks = self.acks if acks is None else acks
        client.send(request_to(self.place, number, acks, self.producer_id, split=self.split))
        if acks == 0:
            # Wait until the batch is there or can no longer arrive.
            await eventually(lambda: self.broker.has_done_with(number), str(self))
            return
        answer = await client.answer()
        assert answer.correlation_id == 7
        codes = {("t", self.place): expected[0]} | ({("t", WELL_PARTITION): 0} if self.split else {})
        assert answer.codes == codes, str(self)
        for result in answer.results:
            is_success = result.error_code == 0
            assert (result.fields["base_offset"] >= 0) is is_success, str(self)
            if is_success and result.partition_index == self.place:
                place = self.broker.appended.index(batch(number, producer_id=self.producer_id))
                assert result.fields["base_offset"] == place, str(self)

    def _judge(self) -> None:
        first, cut, last = (batch(number, producer_id=self.producer_id) for number in range(3))
        appended = self.broker.appended
        assert appended in ([first, cut, last], [first, last]), str(self)
        if self.producer_id >= 0:
            assert cut in appended, str(self)
        else:
            assert self.broker.arrived.count(cut) <= 1, str(self)


@pytest.mark.long(but=4)
@pytest.mark.parametrize(("acks", "producer_id"), KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@both_loops
async def test_broker_may_break_off_anywhere_in_its_answer(acks: int, producer_id: int, split: bool) -> None:
    well = ScriptedUpstream(WELL, answers_everything)
    async with running_proxy(well, limits=PATIENT) as proxy:
        proxy.own(WELL, partitions=[WELL_PARTITION])
        chosen = [cut._replace(resets=cut.resets is not split) for cut in cuts(acks, producer_id)]
        async with brokers_that_cut(proxy, chosen) as brokers:
            cases = [Case(place, broker, acks, producer_id, split=split) for place, broker in enumerate(brokers)]
            clients = [await proxy.client() for _ in cases]
            bystander = await proxy.client()
            running = asyncio.gather(*(case.run(client) for case, client in zip(cases, clients, strict=True)))
            while not running.done():
                bystander.send(produce_frame({"t": [WELL_PARTITION]}))
                assert (await bystander.answer()).codes == {("t", WELL_PARTITION): 0}
                await asyncio.sleep(0.01)
            await running
            assert what_is_left(proxy) == []
            for client in clients:
                client.close()
            await eventually(lambda: len(proxy.listener._sessions) == 1, "only the bystander left")
            await eventually(lambda: all(broker.is_idle for broker in brokers), "broker connections closed")


# Each broker answers all requests for its partition.
well_beside = scene(ANSWERS, ANSWERS, ids=[1, WELL], owners=[1], clients=0, limits=PATIENT)


def ended(client: socket.socket, *, resets: bool) -> None:
    if resets:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
    client.close()


async def connected(proxy: RunningProxy) -> socket.socket:
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (HOST, proxy.port))
    return client


@pytest.mark.parametrize("acks", [-1, pytest.param(1, marks=pytest.mark.long), 0])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@well_beside
async def test_client_may_break_off_anywhere_in_its_request(s: Scene, acks: int, split: bool) -> None:
    """A partial request never reaches a broker; a whole one may, once."""
    s.proxy.own(WELL, partitions=[WELL_PARTITION])
    loop = asyncio.get_running_loop()
    length = len(request_to(0, 0, acks, -1, split=split))
    for at in range(length + 1):
        client = await connected(s.proxy)
        await loop.sock_sendall(client, request_to(0, at, acks, -1, split=split)[:at])
        ended(client, resets=(at % 2 == 0) is not split)
    await s.until_sessions()
    arrived = [asked.records for broker in s.brokers for asked in broker.log]
    whole = batch(length, producer_id=-1)
    assert all(set(records.values()) == {whole} for records in arrived)
    assert all(len(broker.log) <= 1 for broker in s.brokers)
    await eventually(lambda: not any(each.is_open for broker in s.brokers for each in broker.connections))
    assert s.proxy.counters["clients.refused"] == 0


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@well_beside
async def test_client_may_break_off_anywhere_in_its_answer(s: Scene, split: bool) -> None:
    s.proxy.own(WELL, partitions=[WELL_PARTITION])
    bystander = await s.proxy.client()
    bystander.send(produce_frame())
    length = len((await bystander.answer()).frame)
    loop = asyncio.get_running_loop()

    async def break_off(at: int) -> None:
        client = await connected(s.proxy)
        await loop.sock_sendall(client, request_to(0, at, -1, -1, split=split) * 3)
        for _ in range(at):
            await loop.sock_recv(client, 1)
        ended(client, resets=(at % 2 == 0) is not split)

    await asyncio.gather(*(break_off(at) for at in range(length + 1)))
    await s.until_sessions(1)
    bystander.send(produce_frame())
    assert (await bystander.answer()).codes == {T0: 0}
    assert what_is_left(s.proxy) == []
    arrived = [bytes(asked.records[T0]) for asked in s.broker.log]
    assert all(arrived.count(batch(at, producer_id=-1)) <= 3 for at in range(length + 1))
