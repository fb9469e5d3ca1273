"""Followers that fetch from correct leaders, and from leaders that come and go, hang, or send false answers."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.broker import segment
from kproxy.broker.config import LogOptions
from kproxy.broker.partition import Partition
from kproxy.broker.replication import authentication, fetchers, listener
from kproxy.broker.replication.authentication import ListenerHandshake, Secret
from kproxy_codec import control, error_codes, partitioned
from kproxy_codec.api_keys import FETCH, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.fetch import PartitionFetched, partition_fetch, response_ends, result_entry
from kproxy_codec.fetch import parse_fetch as parse
from kproxy_codec.framing import frame_message, parse_request_header, response_header
from kproxy_codec.partitioned import encode_topics
from tests.support.brokers.broker_logs import leader_batches, read_all
from tests.support.brokers.replicating import LEADER, SECRET, FollowerSide, LeaderSide, Pair, append, fetching, pair
from tests.support.waiting import PATIENCE_S, eventually

T, U = uuid.uuid4(), uuid.uuid4()
# A leader with this wait shows which events do not wait for it.
LONG_WAIT_MS = 600_000
ANOTHER = Secret.of("another cluster's secret, as long as this one's")


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make followers learn the high watermark at their next request, and redial after a pause."""
    monkeypatch.setattr(fetchers, "MAX_WAIT_MS", 50)
    monkeypatch.setattr(fetchers, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path) as both:
        yield both


async def replicated(*replicas: tuple[Partition, Partition]) -> None:
    """Wait until the follower's log equals the leader's, and it knows the high watermark."""
    for leader, follower in replicas:
        await _reaches(follower, leader.log_end_offset)
        assert read_all(follower.log) == read_all(leader.log)


async def _reaches(follower: Partition, offset: int) -> None:
    await eventually(lambda: follower.log_end_offset >= offset, what="records")
    await eventually(lambda: follower.high_watermark >= offset, what="what is committed")


async def test_appended_records_are_fetched(both: Pair) -> None:
    replicas = [both.replicate(*topic, index) for topic in (("t", T), ("u", U)) for index in range(3)]
    for number, (leader, _) in enumerate(replicas):
        for each in range(number + 1):
            assert append(leader, b"v%d" % each, b"w" * 1000).error_code == error_codes.NONE
    for leader, _ in replicas:
        assert await leader.wait_for_isr(leader.log_end_offset - 1, PATIENCE_S) == error_codes.NONE
    await replicated(*replicas)


async def test_hung_disk_delays_only_its_own_partition(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With flush policy always the next request confirms the flush, so only that partition's request waits."""
    hangs, goes_on, sync = threading.Event(), threading.Event(), segment._sync_data

    def wait(fd: int) -> None:
        hangs.set()
        assert goes_on.wait(3 * PATIENCE_S)
        sync(fd)

    (slow, slow_follower), others = both.replicate("t", T, 0), [both.replicate("u", U, each) for each in range(3)]
    slow_follower.log.options = LogOptions(flush="always")
    monkeypatch.setattr(segment, "_sync_data", wait)
    try:
        append(slow, b"first")
        assert await asyncio.to_thread(hangs.wait, PATIENCE_S)
        for number in range(5):
            for leader, _ in others:
                append(leader, b"v")
            for leader, _ in others:
                assert await leader.wait_for_isr(number, PATIENCE_S) == error_codes.NONE
        append(slow, b"second")
        assert (slow_follower.log_end_offset, slow.high_watermark) == (1, 0)
    finally:
        goes_on.set()
    assert await slow.wait_for_isr(1, PATIENCE_S) == error_codes.NONE
    await replicated((slow, slow_follower), *others)


async def test_dead_lease_stops_fetches_and_dials(both: Pair) -> None:
    """Another process may have the broker's id by then, and this broker's log must not count as that one's."""
    leader, follower = both.replicate("t", T, 0)
    append(leader, b"before")
    await replicated((leader, follower))
    both.follower.holds_lease = False
    append(leader, b"after")
    await asyncio.sleep(0.3)
    assert leader.replication.follower_progress()[both.follower.node_id][0] == 1
    assert leader.high_watermark == 1
    await both.leader.restart()
    await asyncio.sleep(0.3)
    assert not both.leader.listener.followers
    both.follower.holds_lease = True
    await replicated((leader, follower))


async def test_append_does_not_wait_for_leaders_long_poll(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "MAX_WAIT_MS", LONG_WAIT_MS)
    leader, _ = both.replicate("t", T, 0)
    for number in range(20):
        append(leader, b"v%d" % number)
        assert await leader.wait_for_isr(number, PATIENCE_S) == error_codes.NONE


async def test_newly_followed_partition_skips_leaders_long_poll(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a take-over: a broker becomes the leader of another's partitions one by one."""
    monkeypatch.setattr(fetchers, "MAX_WAIT_MS", LONG_WAIT_MS)
    for index in range(5):
        leader, _ = both.replicate("t", T, index)
        append(leader, b"v")
        assert await leader.wait_for_isr(0, PATIENCE_S) == error_codes.NONE


async def test_leader_unaware_of_its_lease_is_asked_again(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile fetches of its other partitions continue, although the leader waits for the lease."""
    monkeypatch.setattr(fetchers, "MAX_WAIT_MS", LONG_WAIT_MS)
    early = both.follower.follow("t", 1, T)
    leader, _ = both.replicate("t", T, 0)
    for number in range(5):
        append(leader, b"v")
        assert await leader.wait_for_isr(number, PATIENCE_S) == error_codes.NONE
        await asyncio.sleep(fetchers.PARTITION_PAUSE_S / 2)
    assert early.log_end_offset == 0
    late = both.leader.lead("t", 1, T)
    append(late, b"v")
    assert await late.wait_for_isr(0, PATIENCE_S) == error_codes.NONE


async def test_partitions_beyond_request_limit_are_fetched_in_turn(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fetchers, partitioned):
        monkeypatch.setattr(module, "MAX_PARTITIONS", 3)
    replicas = [both.replicate(*topic, index) for topic in (("t", T), ("u", U)) for index in range(4)]
    for leader, _ in replicas:
        append(leader, b"v")
    await replicated(*replicas)


async def test_one_request_fetches_many_partitions(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has a cost per partition on both sides, so there is not one for each append."""
    rest_s = 0.05
    monkeypatch.setattr(fetchers, "PARTITIONS_WITHOUT_REST", 3)
    monkeypatch.setattr(fetchers, "REST_S_PER_PARTITION", rest_s)
    replicas = [both.replicate("t", T, index) for index in range(4)]
    loop = asyncio.get_running_loop()
    _, follower = replicas[0]
    begin, steps, end = loop.time(), 0, follower.log_end_offset
    for number in range(100):
        for each, _ in replicas:
            append(each, b"v%d" % number)
        await asyncio.sleep(0.002)
        steps += follower.log_end_offset != end
        end = follower.log_end_offset
    assert steps <= (loop.time() - begin) / rest_s + 2
    await replicated(*replicas)


async def test_slow_disk_does_not_cost_the_lease(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --flush always each partition of an answer waits for the disk."""
    events: list[str] = []
    take_fetched = Partition.take_fetched

    def slowly(partition: Partition, *answer: Any) -> bool:
        time.sleep(0.02)
        events.append("taken")
        return take_fetched(partition, *answer)

    async def others() -> None:
        while True:
            events.append("others")
            await asyncio.sleep(0)

    monkeypatch.setattr(Partition, "take_fetched", slowly)
    leaders = [both.leader.lead("t", index, T) for index in range(20)]
    for leader in leaders:
        append(leader, b"v")
    replicas = [(leader, both.follower.follow("t", index, T)) for index, leader in enumerate(leaders)]
    at_work = asyncio.create_task(others())
    await replicated(*replicas)
    at_work.cancel()
    assert ("taken", "taken") not in set(pairwise(events))


async def test_batch_larger_than_all_limits_is_fetched(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "MAX_BYTES", 1_000)
    leader, follower = both.replicate("t", T, 0)
    append(leader, b"v" * 3_000_000)
    append(leader, b"w")
    await replicated((leader, follower))


async def test_returned_leader_is_fetched_from_again(both: Pair) -> None:
    leader, follower = both.replicate("t", T, 0)
    append(leader, b"before")
    await replicated((leader, follower))
    with capture_logs() as logs:
        await both.leader.listener.close()
        append(leader, b"meanwhile")
        await eventually(lambda: [each for each in logs if each["event"] == "leader not reachable"])
        await asyncio.sleep(0.3)
        await both.leader.restart()
        await replicated((leader, follower))
    reasons = [each["reason"] for each in logs if each["event"] == "leader not reachable"]
    assert 1 <= len(reasons) == len(set(reasons)), "a reason is told once, however often it is met"


async def test_leader_that_listens_elsewhere_is_followed_there(both: Pair) -> None:
    leader, follower = both.replicate("t", T, 0)
    append(leader, b"before")
    await replicated((leader, follower))
    await both.leader.listener.close()
    both.leader.port = 0
    await both.leader.restart()
    append(leader, b"after")
    both.follower.tell_broker(LEADER, both.leader.port)
    await replicated((leader, follower))


async def test_partition_no_longer_followed_is_not_fetched(both: Pair) -> None:
    leader, follower = both.replicate("t", T, 0)
    append(leader, b"v")
    await replicated((leader, follower))
    follower.follow_nobody()
    both.follower.fetchers.wake()
    await eventually(lambda: not both.leader.listener.followers)
    append(leader, b"w")
    both.follower.follow("t", 0, T)
    await replicated((leader, follower))
    assert both.leader.listener.followers == {2}


async def test_diverged_tail_is_truncated_at_once(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader reports the divergence point without waiting for records."""
    monkeypatch.setattr(fetchers, "MAX_WAIT_MS", LONG_WAIT_MS)
    leader = both.leader.lead("t", 0, T, epoch=1)
    follower = both.follower.open("t", 0, T)
    follower.log.append_replicated(leader_batches(0, 2, 1, leader_epoch=0))
    both.follower.hosted[b"t", 0] = follower
    both.follower.follow("t", 0, T, epoch=1)
    await eventually(lambda: follower.log_end_offset == 0)
    append(leader, b"v")
    assert await leader.wait_for_isr(0, PATIENCE_S) == error_codes.NONE
    assert read_all(follower.log) == read_all(leader.log)


# Slow peers, and peers that are not brokers


async def test_unauthenticated_peer_is_closed_in_time(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is silent, or sends a byte now and then."""
    leader, follower = both.replicate("t", T, 0)
    append(leader, b"v")
    await replicated((leader, follower))
    monkeypatch.setattr(listener, "AUTHENTICATION_TIMEOUT_S", 0.5)
    with capture_logs() as logs:
        silent, dripping = [await asyncio.open_connection("127.0.0.1", both.leader.port) for _ in range(2)]
        for byte in frame_message(b"\x00\x11\x00\x01" + bytes(60)):
            if dripping[0].at_eof() or dripping[1].is_closing():
                break
            dripping[1].write(bytes([byte]))
            await asyncio.sleep(0.02)
        for reader, writer in (silent, dripping):
            # A byte that comes after the end resets the connection.
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()
    assert [each["reason"] for each in logs if each["event"] == "client connection closed"] == [
        "not authenticated within 0 s"
    ] * 2
    append(leader, b"w")
    await replicated((leader, follower))
    assert both.leader.listener.followers == {2}, "whoever has authenticated stays"


# Leaders that send false answers

Behave = Callable[["Liar", memoryview], Awaitable[bytes]]


class Liar:
    """Listens like a leader; `behave` returns the answer to each request, length first. b"" closes the connection."""

    def __init__(self, behave: Behave, secret: Secret = SECRET) -> None:
        self.behave = behave
        self.secret = secret
        self.fetches = 0
        self.dialled = 0
        self.handshake = ListenerHandshake(secret)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.dialled += 1
        self.handshake = ListenerHandshake(self.secret)
        try:
            while True:
                length = await reader.readexactly(4)
                frame = memoryview(bytearray(length + await reader.readexactly(int.from_bytes(length, "big"))))
                if parse_request_header(frame).api_key == FETCH:
                    self.fetches += 1
                answer = await self.behave(self, frame)
                writer.write(answer)
                if not answer:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def in_good_faith(liar: Liar, frame: memoryview) -> bytes:
    """As an honest listener authenticates."""
    header = parse_request_header(frame)
    body = frame[header.body_offset :]
    if header.api_key == SASL_HANDSHAKE:
        return answering(frame, mechanisms=[authentication.MECHANISM])
    message = control.decode_request(SASL_AUTHENTICATE, header.api_version, body)
    return answering(frame, auth_bytes=liar.handshake.answer(bytes(message.auth_bytes)))


def answering(frame: memoryview, **fields: object) -> bytes:
    api_key, version, correlation_id, _ = parse_request_header(frame)
    response = control.build_response(api_key, version, **{"error_code": 0, **fields})
    return frame_message(response_header(api_key, version, correlation_id), control.encode_response(response))


def fetched(frame: memoryview, *results: PartitionFetched, topic_id: uuid.UUID = T, **changes: int) -> bytes:
    """A well-formed answer to a fetch."""
    head, tail = response_ends(13, 0, [], changes.get("error_code", 0))
    entries = [part for each in results for part in result_entry(13, each)]
    array = encode_topics([(topic_id.bytes, entries, len(results))], flexible=True, by_id=True)
    correlation_id = parse_request_header(frame).correlation_id + changes.get("correlation_id", 0)
    return frame_message(response_header(FETCH, 13, correlation_id), head, *array, tail)


def good(index: int = 0, **changes: object) -> PartitionFetched:
    """Three records from the start of the log."""
    honest = PartitionFetched(index, 0, 3, 0, None, bytes(leader_batches(0, 3)))
    return honest._replace(**changes)  # type: ignore[arg-type]


def once_authenticated(make: Callable[[memoryview], bytes]) -> Behave:
    """Knows the secret, and sends false answers once authenticated."""

    async def behave(liar: Liar, frame: memoryview) -> bytes:
        return make(frame) if parse_request_header(frame).api_key == FETCH else in_good_faith(liar, frame)

    return behave


async def _lets_anybody_in(liar: Liar, frame: memoryview) -> bytes:
    """Accept any peer, and claim to know the secret."""
    if parse_request_header(frame).api_key == SASL_HANDSHAKE:
        return answering(frame, mechanisms=[authentication.MECHANISM])
    try:
        return in_good_faith(liar, frame)
    except authentication.AuthenticationFailed:
        return answering(frame, auth_bytes=b"v=" + b"A" * 43 + b"=")


async def _wants_no_proof(_: Liar, frame: memoryview) -> bytes:
    if parse_request_header(frame).api_key == FETCH:
        return fetched(frame, good())
    return answering(frame, **({"mechanisms": []} if parse_request_header(frame).api_key == SASL_HANDSHAKE else {}))


async def _announces_much(_: Liar, __: memoryview) -> bytes:
    return struct.pack(">i", fetchers.UNAUTHENTICATED_FRAME_BYTES + 1)


async def _speaks_another_mechanism(_: Liar, frame: memoryview) -> bytes:
    return answering(frame, error_code=error_codes.UNSUPPORTED_SASL_MECHANISM, mechanisms=["PLAIN"])


async def _hangs_up(_: Liar, __: memoryview) -> bytes:
    return b""


async def _talks_nonsense(_: Liar, __: memoryview) -> bytes:
    return frame_message(b"HTTP/1.1 400 Bad Request")


def _costly(liar: Liar) -> Liar:
    liar.secret = SECRET._replace(iterations=authentication.MAX_ITERATIONS + 1)
    return liar


# Before the listener has proved anything, it gets no fetch.
STRANGERS: dict[str, tuple[Callable[[], Liar], str]] = {
    "does not know the secret": (lambda: Liar(_lets_anybody_in, ANOTHER), "signature"),
    "wants no proof and has none": (lambda: Liar(_wants_no_proof), "Malformed"),
    "asks for much hashing": (lambda: _costly(Liar(_lets_anybody_in)), "iterations"),
    "announces more than 64 KiB": (lambda: Liar(_announces_much), "65537 bytes"),
    "speaks another mechanism": (lambda: Liar(_speaks_another_mechanism), "UNSUPPORTED_SASL_MECHANISM"),
    "hangs up": (lambda: Liar(_hangs_up), "closed the connection"),
    "talks nonsense": (lambda: Liar(_talks_nonsense), "matches no request"),
}


@asynccontextmanager
async def lied_to(tmp_path: Path, liar: Liar) -> AsyncIterator[tuple[FollowerSide, LeaderSide, Partition]]:
    """A follower of two partitions whose leader is false, and an honest leader that is not used yet."""
    server = await asyncio.start_server(liar.serve, "127.0.0.1", 0)
    follower, honest = FollowerSide(tmp_path / "follower"), LeaderSide(tmp_path / "leader")
    await honest.start()
    try:
        async with fetching(follower):
            partition = follower.follow("t", 0, T)
            follower.tell_broker(LEADER, server.sockets[0].getsockname()[1])
            yield follower, honest, partition
    finally:
        server.close()
        await honest.listener.close()
        for each in honest.leases.partitions.values():
            each.close()


async def _is_found_out(tmp_path: Path, liar: Liar, reason: str) -> Partition:
    """Check that the follower accepts nothing, logs the reason once, and continues with an honest leader."""
    with capture_logs() as logs:
        async with lied_to(tmp_path, liar) as (follower, honest, partition):
            await eventually(lambda: liar.dialled >= 3)
            assert (partition.log_end_offset, partition.high_watermark) == (0, 0)
            leader = honest.lead("t", 0, T)
            append(leader, b"honest")
            follower.tell_broker(LEADER, honest.port)
            await replicated((leader, partition))
    reasons = [each["reason"] for each in logs if each["event"] == "leader not reachable"]
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert not [each for each in logs if each["log_level"] == "error"]
    return partition


@pytest.mark.parametrize("case", STRANGERS)
async def test_non_broker_listener_is_asked_nothing(tmp_path: Path, case: str) -> None:
    make, reason = STRANGERS[case]
    liar = make()
    await _is_found_out(tmp_path, liar, reason)
    assert liar.fetches == 0


# Knows the secret, and sends invalid answers: no part of them counts, even the valid ones.
LIES: dict[str, tuple[Callable[[memoryview], bytes], str]] = {
    "another partition": (lambda frame: fetched(frame, good(1)), "matches no request"),
    "one more partition": (lambda frame: fetched(frame, good(), good(1)), "matches no request"),
    "a partition twice": (lambda frame: fetched(frame, good(), good()), "matches no request"),
    "another topic": (lambda frame: fetched(frame, good(), topic_id=U), "matches no request"),
    "another question": (lambda frame: fetched(frame, good(), correlation_id=1), "matches no request"),
    "an error of the whole": (lambda frame: fetched(frame, good(), error_code=70), "FETCH_SESSION_ID_NOT_FOUND"),
    "an answer cut short": (lambda frame: frame_message(fetched(frame, good())[4:-20]), "invalid answer"),
    "an answer with more behind": (lambda frame: frame_message(fetched(frame, good())[4:], b"x"), "invalid answer"),
    "more than 100 MiB": (lambda _: struct.pack(">i", (100 << 20) + 1), "invalid answer"),
    "a length below zero": (lambda _: b"\xff" * 4, "invalid answer"),
    "nothing, and hangs up": (lambda _: b"", "closed the connection"),
}


@pytest.mark.parametrize("case", LIES)
async def test_invalid_answer_of_leader_is_rejected(tmp_path: Path, case: str) -> None:
    make, reason = LIES[case]
    await _is_found_out(tmp_path, Liar(once_authenticated(make)), reason)


async def test_second_answer_of_leader_is_rejected(tmp_path: Path) -> None:
    liar = Liar(once_authenticated(lambda frame: fetched(frame, good(records=b"", high_watermark=0)) * 2))
    with capture_logs() as logs:
        async with lied_to(tmp_path, liar):
            await eventually(lambda: liar.dialled >= 3)
    assert {each["reason"][:29] for each in logs if each["event"] == "leader not reachable"} == {
        "the answer matches no request"
    }


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(bytes(leader_batches(0, 3))[:-1] + b"\xff", id="a wrong CRC"),
        pytest.param(bytes(leader_batches(0, 3))[:-1], id="half a batch"),
        pytest.param(b"\x00" * 100, id="no batch"),
        pytest.param(bytes(leader_batches(-5, 3)), id="offsets below zero"),
    ],
)
async def test_invalid_records_change_no_log(tmp_path: Path, records: bytes) -> None:
    def make(frame: memoryview) -> bytes:
        """One partition's result is invalid; the other's is valid."""
        asked = parse(frame, parse_request_header(frame))
        wanted = [partition_fetch(asked, start) for topic in asked.topics for start in topic.starts]
        return fetched(
            frame,
            *(
                good(each.partition_index, records=records if each.partition_index == 0 else good().records)
                if each.fetch_offset == 0
                else PartitionFetched(each.partition_index, 0, 3, 0)
                for each in wanted
            ),
        )

    liar = Liar(once_authenticated(make))
    with capture_logs() as logs:
        async with lied_to(tmp_path, liar) as (follower, _, partition):
            other = follower.follow("t", 1, T)
            await eventually(lambda: other.high_watermark == 3 and liar.fetches > 10)
            assert (partition.log_end_offset, partition.log.size_in_bytes) == (0, 0)
    assert liar.dialled == 1
    # Retried only after a pause.
    assert len([each for each in logs if "refused" in each["event"]]) < 50


async def test_leader_that_hangs_is_dialled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "MAX_WAIT_MS", 50)
    monkeypatch.setattr(fetchers, "ANSWER_PATIENCE_S", 0.5)

    async def behave(liar: Liar, frame: memoryview) -> bytes:
        if parse_request_header(frame).api_key == FETCH:
            await asyncio.sleep(3600)
        return in_good_faith(liar, frame)

    await _is_found_out(tmp_path, Liar(behave), "no answer in time")


async def test_hung_leader_of_idle_partitions_costs_no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "ANSWER_PATIENCE_S", 1.0)
    monkeypatch.setattr(fetchers, "PARTITION_PAUSE_S", 0.05)
    looks = 0
    until = fetchers._Fetcher._until

    async def counted(*args: Any, **options: Any) -> None:
        nonlocal looks
        looks += 1
        await until(*args, **options)

    monkeypatch.setattr(fetchers._Fetcher, "_until", counted)
    await _is_found_out_after(tmp_path, lambda liar: liar.fetches == 2)
    # uvloop's timers may be a millisecond early, which allows a hundred looks.
    assert looks < 2_000


async def test_hung_leader_is_dialled_again_when_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "ANSWER_PATIENCE_S", 0.5)
    monkeypatch.setattr(fetchers, "PARTITION_PAUSE_S", 0.05)
    await _is_found_out_after(tmp_path, lambda liar: liar.fetches == 3)


async def _is_found_out_after(tmp_path: Path, hangs: Callable[[Liar], bool]) -> None:
    """Check that it leads one of three requested partitions, answers late, and hangs at some point."""

    async def behave(liar: Liar, frame: memoryview) -> bytes:
        if parse_request_header(frame).api_key != FETCH:
            return in_good_faith(liar, frame)
        if liar.fetches == 1:
            refused = [PartitionFetched(index, error_codes.NOT_LEADER_OR_FOLLOWER) for index in (1, 2)]
            return fetched(frame, good(), *refused)
        await asyncio.sleep(3600 if hangs(liar) else 0.2)
        return fetched(frame, good(records=b""))

    liar, follower = Liar(behave), FollowerSide(tmp_path)
    server = await asyncio.start_server(liar.serve, "127.0.0.1", 0)
    follower.tell_broker(LEADER, server.sockets[0].getsockname()[1])
    replicas = [follower.follow("t", index, T) for index in range(3)]
    with capture_logs() as logs:
        async with server, fetching(follower):
            await eventually(lambda: liar.dialled > 1, what="another attempt")
    assert [each["reason"] for each in logs if each["event"] == "leader not reachable"] == ["no answer in time"]
    assert "fetcher failed" not in {each["event"] for each in logs}
    for replica in replicas:
        replica.close()


async def test_listener_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "CONNECT_TIMEOUT_S", 0.1)

    async def behave(_: Liar, __: memoryview) -> bytes:
        await asyncio.sleep(3600)
        return b""

    await _is_found_out(tmp_path, Liar(behave), "no answer in time")
