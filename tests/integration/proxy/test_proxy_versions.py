"""Versions: the offered ones follow the brokers, and requests use offered versions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.proxy import broker_watch
from kproxy.proxy.apis import SERVED
from kproxy_codec import api_keys as keys
from kproxy_codec.produce import TOPIC_IDS_FROM
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream, answers_everything
from tests.support.clients.raw_client import RawClient, control_frame, fetch_frame, list_offsets_frame, produce_frame
from tests.support.processes.running_proxy import RunningProxy, both_loops, in_one_go
from tests.support.processes.running_proxy import running_among_strangers as running_proxy
from tests.support.scene import HOLDS, Scene, scene, staged
from tests.support.waiting import PATIENCE_S, eventually
from tests.support.wire.messages import EVERY_VERSION

NEWEST = SERVED[keys.PRODUCE].max_version
OLD = 9
UNSUPPORTED = 35
Script = Callable[[Asked], None]


def serves(produce: int, *, answers: Script = answers_everything, fences: range = range(0), **features: Any) -> Script:
    """A broker that serves Produce up to this version, these versions of BindFences, and all others."""
    listed = [{"api_key": key, "min_version": offer.min_version, "max_version": 99} for key, offer in SERVED.items()]
    listed[0] = {"api_key": keys.PRODUCE, "min_version": 0, "max_version": produce}
    if fences:
        listed.append({"api_key": keys.BIND_FENCES, "min_version": fences[0], "max_version": fences[-1]})

    def script(asked: Asked) -> None:
        if asked.header.api_key == keys.API_VERSIONS:
            told = features if asked.header.api_version >= 3 else {}
            asked.answer_message(api_keys=listed, **told)
        else:
            answers(asked)

    return script


def serves_nothing(asked: Asked) -> None:
    if asked.header.api_key == keys.API_VERSIONS:
        asked.answer_message(api_keys=[{"api_key": keys.API_VERSIONS, "min_version": 0, "max_version": 4}])


def holds(asked: Asked) -> None:
    """Keep requests in `log` for the test."""


async def api_versions(client: RawClient, version: int = 4) -> Any:
    client.send(control_frame(keys.API_VERSIONS, version))
    return (await client.answer(keys.API_VERSIONS, version)).message


async def offered_produce(client: RawClient) -> int:
    message = await api_versions(client)
    return next(each.max_version for each in message.api_keys if each.api_key == keys.PRODUCE)


def current_produce(proxy: RunningProxy) -> int:
    return proxy.context.brokers.offered.ranges[keys.PRODUCE][1]


async def is_served(client: RawClient, version: int) -> bool:
    client.send(produce_frame(version=version))
    if version == OLD:
        return (await client.answer(keys.PRODUCE, version)).codes == {("t", 0): 0}
    try:
        return (await client.answer(keys.PRODUCE, version)).codes == {("t", 0): 0}
    except (EOFError, ConnectionError):
        return False


async def join(proxy: RunningProxy, upstream: ScriptedUpstream) -> None:
    if not upstream.port:
        await upstream.start()
    proxy.topology.set_broker(upstream.node_id, upstream.address)


@asynccontextmanager
async def joined(s: Scene, produce: int, node_id: int = 2) -> AsyncIterator[ScriptedUpstream]:
    """Add a broker that serves Produce up to this version; the proxy knows it when the block begins."""
    upstream = ScriptedUpstream(node_id, serves(produce))
    await join(s.proxy, upstream)
    try:
        await eventually(lambda: current_produce(s.proxy) == produce)
        yield upstream
    finally:
        await upstream.stop()


unknown = functools.partial(scene, introduced=False, follows_versions=True, one_go=True)
"""A scene whose brokers are asked by the proxy itself."""


# A broker with fewer versions joins


@unknown(serves(NEWEST, answers=holds))
async def test_late_request_does_not_cost_last_answers(s: Scene) -> None:
    """Closing with unread bytes would reset the connection, so the client closes first."""
    await api_versions(s.client)
    s.send(produce_frame(version=NEWEST, correlation_id=5))
    await eventually(lambda: s.broker.log[-1].header.api_key == keys.PRODUCE)
    async with joined(s, OLD):
        s.send(*(produce_frame(version=NEWEST, correlation_id=100 + number) for number in range(100)))
        await s.client.sent()
        s.broker.log[-1].answer()
        assert (await s.answer(keys.PRODUCE, NEWEST)).correlation_id == 5
        # A reset would raise here.
        assert await s.client._reader.read() == b""
        assert sum(each.header.api_key == keys.PRODUCE for each in s.broker.log) == 1
        s.client.close()
        await s.until_sessions()


@unknown(serves(NEWEST))
async def test_old_broker_joining_closes_idle_client(s: Scene) -> None:
    await api_versions(s.client)
    async with joined(s, OLD):
        assert await s.client.is_closed()
        assert s.proxy.counters["clients.refused"] == 0
        # A request that crosses the end is ignored, not reset: the client closes first.
        for _ in range(2):
            # After a reset the second one fails.
            s.send(produce_frame(version=NEWEST))
            await asyncio.sleep(0.1)
        assert not s.client.is_gone
        s.client.close()
        await s.until_sessions()


@unknown(serves(NEWEST))
async def test_client_without_api_versions_gets_current_limits(s: Scene) -> None:
    """kafka-python 2.0.2 with a pinned version sends no ApiVersions at all."""
    # By name: a connection names a topic in one way only.
    assert await is_served(s.client, TOPIC_IDS_FROM - 1)
    async with joined(s, OLD):
        assert await is_served(s.client, OLD)
        with capture_logs() as logs:
            s.send(produce_frame(version=NEWEST))
            assert (await s.answer(keys.PRODUCE, NEWEST)).codes == {("t", 0): UNSUPPORTED}
        assert [each["reason"] for each in logs if each["event"] == "request refused"] == [
            f"PRODUCE v{NEWEST}: versions 0 to {OLD} are offered"
        ]
        s.proxy.topology.remove_broker(2)
        await eventually(lambda: current_produce(s.proxy) == NEWEST)
        assert await is_served(await s.proxy.client(), NEWEST)


@unknown(serves(NEWEST), serves(OLD), owners=[1])
async def test_client_with_lower_versions_stays_limited(s: Scene) -> None:
    assert await offered_produce(s.client) == OLD
    s.proxy.topology.remove_broker(2)
    await eventually(lambda: current_produce(s.proxy) == NEWEST)
    assert await is_served(s.client, OLD)
    assert not await is_served(s.client, NEWEST)
    # A repeated ApiVersions gets the newer versions.
    other = await s.proxy.client()
    assert await offered_produce(other) == NEWEST
    assert await is_served(other, NEWEST)


@unknown(serves(NEWEST))
async def test_equally_capable_broker_closes_no_client(s: Scene) -> None:
    await api_versions(s.client)
    async with joined(s, NEWEST) as second:
        await eventually(lambda: second.log)
        assert await is_served(s.client, NEWEST)


# First and repeated lookups of versions


@unknown(serves(OLD))
async def test_upgraded_broker_is_asked_again(s: Scene) -> None:
    await eventually(lambda: current_produce(s.proxy) == OLD)
    s.broker.script = serves(NEWEST)
    for connection in s.broker.connections:
        connection.abort()
    await eventually(lambda: current_produce(s.proxy) == NEWEST)


@unknown(serves(NEWEST), clients=0)
async def test_broker_departure_and_failed_attempts_are_logged(s: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_watch, "UNREACHABLE_FOR_S", 0.3)
    told: list[float] = []
    s.proxy.context.brokers.on_lost = lambda: told.append(s.proxy.context.clock())
    await eventually(lambda: s.broker.log)
    await eventually(lambda: s.proxy.context.brokers.offered.ranges)
    assert told == [], "it is there"
    # No client is connected, so only the probes notice.
    await s.broker.stop()
    await eventually(lambda: len(told) >= 3)
    assert told[-1] - told[1] >= 0.28, "not at every look"


@unknown(serves(NEWEST))
async def test_broker_is_asked_at_its_new_address(s: Scene) -> None:
    await eventually(lambda: s.broker.log)
    async with joined(s, OLD, node_id=1):
        pass


@unknown(serves(NEWEST), serves(OLD))
async def test_unreachable_broker_counts_with_last_known_versions(s: Scene) -> None:
    await eventually(lambda: current_produce(s.proxy) == OLD)
    s.proxy.topology.remove_broker(2)
    await eventually(lambda: current_produce(s.proxy) == NEWEST)
    await s.brokers[1].stop()
    s.proxy.topology.set_broker(2, s.brokers[1].address)
    await eventually(lambda: current_produce(s.proxy) == OLD)
    assert await offered_produce(s.client) == OLD


def says_35(asked: Asked) -> None:
    """Answer ApiVersions with error 35 in version 0, whatever the request (KIP-511)."""
    head = asked.header.correlation_id.to_bytes(4, "big")
    body = (35).to_bytes(2, "big") + (1).to_bytes(4, "big") + b"\x00\x12\x00\x00\x00\x00"
    asked.connection.write((len(head) + len(body)).to_bytes(4, "big") + head + body)


@pytest.mark.parametrize("refuses", [says_35, lambda asked: asked.connection.close()], ids=["error 35", "closes"])
@both_loops
@in_one_go
async def test_old_broker_is_asked_for_api_versions_0(refuses: Script) -> None:
    known = serves(OLD)

    def script(asked: Asked) -> None:
        (refuses if asked.header.api_version > 0 else known)(asked)

    async with staged(script, introduced=False) as s:
        assert await offered_produce(s.client) == OLD
        assert [each.header.api_version for each in s.broker.log] == [4, 0]


# Versions of forwarded requests


@pytest.mark.parametrize(
    ("key", "version"), [(keys.PRODUCE, 2), (keys.METADATA, 14), (keys.METADATA, 12), (keys.FETCH, 99), (999, 0)]
)
@unknown(serves_nothing, follows_versions=False)
async def test_unknown_version_closes_the_connection(s: Scene, key: int, version: int) -> None:
    """So does one whose answer has no place for an error, or a malformed request."""
    await api_versions(s.client)
    s.send(head_only(key, version))
    assert await s.client.is_closed()
    assert s.proxy.counters["clients.refused"] == 1
    assert len(s.broker.log) == 1


@unknown(serves_nothing, follows_versions=False)
async def test_unoffered_requests_are_answered_in_their_order(s: Scene) -> None:
    """Clients that pin a version connect again and again if the connection is closed, and tell nobody."""
    await api_versions(s.client)
    frames = {keys.PRODUCE: produce_frame, keys.FETCH: fetch_frame, keys.LIST_OFFSETS: list_offsets_frame}
    for key, version in EVERY_VERSION:
        s.send(frames[key](version=version), control_frame(keys.HEARTBEAT, 4, group_id="g"))
        assert (await s.answer(key, version)).codes == {("t", 0): UNSUPPORTED}
        assert (await s.answer(keys.HEARTBEAT, 4)).message.error_code == UNSUPPORTED
    assert len(s.broker.log) == 1
    told = s.proxy.context.tally.errors.items()
    assert sum(times for (key, code, _), times in told if (key, code) == (keys.FETCH, UNSUPPORTED)) == 15
    # It waits for no answer, and would not notice.
    s.send(produce_frame(acks=0))
    assert await s.client.is_closed()


def head_only(key: int, version: int) -> bytes:
    message = key.to_bytes(2, "big") + version.to_bytes(2, "big") + bytes(4) + b"\xff\xff" + bytes(40)
    return len(message).to_bytes(4, "big") + message


# Features


FEATURES: Mapping[str, Any] = {
    "supported_features": [
        {"name": "transaction.version", "min_version": 0, "max_version": 2},
        {"name": "metadata.version", "min_version": 7, "max_version": 27},
    ],
    "finalized_features": [
        {"name": "transaction.version", "min_version_level": 2, "max_version_level": 2},
        {"name": "metadata.version", "min_version_level": 27, "max_version_level": 27},
    ],
    "finalized_features_epoch": 40,
}


@pytest.mark.parametrize("version", range(5))
@unknown(serves(11, **FEATURES), follows_versions=False)
async def test_features_match_the_offered_versions(s: Scene, version: int) -> None:
    message = await api_versions(s.client, version)
    supported = {each.name: (each.min_version, each.max_version) for each in message.supported_features}
    finalized = {each.name: (each.min_version_level, each.max_version_level) for each in message.finalized_features}
    if version < 3:
        assert (supported, finalized) == ({}, {})
        return
    # Only versions from 4 on can express support from level 0 on.
    lowest = {"transaction.version": (0, 1)} if version >= 4 else {}
    assert supported == {**lowest, "metadata.version": (7, 27)}
    assert finalized == {"transaction.version": (1, 1), "metadata.version": (27, 27)}
    assert message.finalized_features_epoch == 321


# Requests between brokers


# Kafka's requests between brokers, controllers and coordinators: of partitions, transactions, the quorum, the
# registration of brokers, and the state of share groups.
INTERNAL = (
    *(4, 5, 6, 7, keys.WRITE_TXN_MARKERS, 52, 53, 54, 56, keys.ENVELOPE, 59),
    *(62, 63, 64, 67, 70, 73, 80, 81, 82, 83, 84, 85, 86, 87),
)


def serves_all(asked: Asked) -> None:
    """A broker that also offers inter-broker requests."""
    if asked.header.api_key == keys.API_VERSIONS:
        asked.answer_message(api_keys=[{"api_key": key, "min_version": 0, "max_version": 99} for key in range(100)])


@pytest.mark.parametrize("negotiates", [True, False], ids=["asked", "never asked"])
@pytest.mark.parametrize(("key", "version"), [*((key, 0) for key in INTERNAL), (keys.ADD_PARTITIONS_TO_TXN, 4)])
@unknown(serves_all, follows_versions=False)
async def test_inter_broker_requests_are_refused(s: Scene, key: int, version: int, negotiates: bool) -> None:
    """It would use the proxy's rights at the brokers."""
    if negotiates:
        offered = {each.api_key: each.max_version for each in (await api_versions(s.client)).api_keys}
        assert offered.get(key, -1) < version
    s.send(head_only(key, version))
    if key in INTERNAL:
        assert await s.client.is_closed()
    else:
        assert (await s.answer(key, version)).message.error_code == UNSUPPORTED
    assert [each.header.api_key for each in s.broker.log] == [keys.API_VERSIONS] * negotiates


@pytest.mark.parametrize("version", range(1, SERVED[keys.LIST_OFFSETS].max_version + 1))
@unknown(HOLDS, follows_versions=False)
async def test_replica_lists_offsets_as_a_consumer(s: Scene, version: int) -> None:
    """As at Kafka, except that a broker would report offsets beyond the high watermark."""
    for replica_id in (-1, 0, 2**31 - 1):
        s.send(list_offsets_frame(version=version, replica_id=replica_id))
        asked = await s.next()
        assert asked.fields["replica_id"] == -1
        asked.answer()
        assert (await s.answer(keys.LIST_OFFSETS, version)).codes == {("t", 0): 0}


# Fences


@pytest.mark.parametrize(
    ("brokers", "fenced"),
    [
        ([], False),
        ([range(1)], True),
        ([range(3)], True),
        ([range(1), range(1)], True),
        ([range(0)], False),
        ([range(1), range(0)], False),
        # The broker has only a version that the proxy does not support.
        ([range(1), range(1, 3)], False),
        # A broker of unknown versions: as a leader it gets a fence to keep, and answers then.
        ([range(1), None], True),
        ([range(0), None], False),
        ([None], False),
    ],
)
async def test_upstream_has_fences_if_all_brokers_have(
    brokers: list[range | None], fenced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_watch, "ASK_TIMEOUT_S", 0.3)
    async with running_proxy(limits={"probe_timeout_s": 600.0}) as proxy:
        upstreams = [
            ScriptedUpstream(number, holds if fences is None else serves(NEWEST, fences=fences))
            for number, fences in enumerate(brokers, 1)
        ]
        for upstream in upstreams:
            await join(proxy, upstream)
        known = proxy.context.brokers
        assert not known.fenced
        assert [known.has_fences(upstream.node_id) for upstream in upstreams] == [None] * len(brokers)
        await asyncio.wait_for(known.current(), PATIENCE_S)
        assert known.fenced is fenced
        assert [known.has_fences(upstream.node_id) for upstream in upstreams] == [
            None if fences is None else 0 in fences for fences in brokers
        ]
        for upstream in upstreams:
            proxy.topology.remove_broker(upstream.node_id)
            assert known.has_fences(upstream.node_id) is None
            await upstream.stop()
