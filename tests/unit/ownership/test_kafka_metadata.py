"""How the table reads a cluster's Metadata, answer by answer, from a broker whose answers the test sets."""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.ownership.kafka_client import MAX_ANSWER_BYTES
from kproxy.ownership.kafka_leaders import PORTION
from kproxy.ownership.kafka_metadata import BURST, MAX_DOUBTED, RATE_PER_S, WHOLE_APART_S, KafkaMetadata
from kproxy.routing.topology import MAX_PARTITION_INDEX, NO_OWNER, Address, Topology
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, decode_request, encode_response
from kproxy_codec.error_codes import (
    LEADER_NOT_AVAILABLE,
    REPLICA_NOT_AVAILABLE,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy_codec.framing import RequestHeader, parse_request_header, response_header
from kproxy_codec.metadata import HIGHEST_VERSION as METADATA_VERSION
from kproxy_codec.metadata import MetadataReader
from tests.support.etcd.embedded import running
from tests.support.waiting import eventually

# Metadata versions.
TOPIC_IDS_FROM = 10
TOPIC_ID = uuid.UUID(int=1)
ANOTHER_ID = uuid.UUID(int=2)
# No server listens there, and a dial fails at once.
BROKERS = {1: "127.0.0.11", 2: "127.0.0.12", 3: "127.0.0.13"}
PORT = 1


def partition(index: int, leader: int, epoch: int, error_code: int = 0) -> dict[str, Any]:
    return {"error_code": error_code, "partition_index": index, "leader_id": leader, "leader_epoch": epoch}


def topic(*partitions: dict[str, Any], name: str = "t", topic_id: uuid.UUID | None = TOPIC_ID) -> dict[str, Any]:
    return {"error_code": 0, "name": name, "topic_id": topic_id, "partitions": list(partitions)}


class ScriptedBroker:
    """Serves ApiVersions, and the requested part of `topics` and `brokers` in Metadata, changed by `distort`."""

    def __init__(self) -> None:
        self.topics: Sequence[dict[str, Any]] = ()
        self.brokers = BROKERS
        self.cluster_id = "one"
        # The names and ids of each request; None for all topics.
        self.asked_for: list[list[str | uuid.UUID] | None] = []
        self.distort: Callable[[bytes], bytes] | None = None
        self.holds = asyncio.Event()
        self.holds.set()
        self.newest_metadata = METADATA_VERSION + 1
        self.is_reference = False
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._converse, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            self.cut()

    @property
    def asked(self) -> int:
        return len(self.asked_for)

    def _metadata(self, frame: memoryview, header: RequestHeader) -> bytes:
        version = header.api_version
        request = decode_request(keys.METADATA, version, frame[header.body_offset :])
        wanted = None if request.topics is None else [each.name or each.topic_id for each in request.topics]
        self.asked_for.append(wanted)
        found = [each for each in self.topics if wanted is None or {each["name"], each.get("topic_id")} & {*wanted}]
        for each in wanted or ():
            if not any(each in (topic["name"], topic.get("topic_id")) for topic in found):
                missing = {"name": each, "error_code": UNKNOWN_TOPIC_OR_PARTITION}
                by_id = {"name": None, "topic_id": each, "error_code": UNKNOWN_TOPIC_ID}
                found.append({**(missing if isinstance(each, str) else by_id), "partitions": []})
        if version < TOPIC_IDS_FROM:
            found = [{key: value for key, value in each.items() if key != "topic_id"} for each in found]
        named = [{"node_id": number, "host": host, "port": PORT} for number, host in self.brokers.items()]
        fields = {"brokers": named, "topics": found, "cluster_id": self.cluster_id}
        return encode_response(build_response(keys.METADATA, version, **fields))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                prefix = await reader.readexactly(4)
                frame = memoryview(prefix + await reader.readexactly(struct.unpack(">i", prefix)[0]))
                header = parse_request_header(frame)
                if header.api_key == keys.API_VERSIONS:
                    served = [(keys.API_VERSIONS, 4), (keys.METADATA, self.newest_metadata)]
                    if self.is_reference:
                        served.append((keys.BIND_FENCES, 0))
                    ranges = [{"api_key": key, "min_version": 0, "max_version": highest} for key, highest in served]
                    body = encode_response(build_response(keys.API_VERSIONS, 0, api_keys=ranges))
                else:
                    body = self._metadata(frame, header)
                    await self.holds.wait()
                answer = response_header(header.api_key, header.api_version, header.correlation_id) + body
                answer = struct.pack(">i", len(answer)) + answer
                if self.distort is not None and header.api_key == keys.METADATA:
                    answer = self.distort(answer)
                writer.write(answer)
        except (OSError, EOFError):
            writer.close()


class Followed:
    """A source that follows a scripted broker, and reads on demand; `now` is its clock's time."""

    def __init__(
        self, broker: ScriptedBroker, *others: ScriptedBroker, interval_s: float = 3600, timeout_s: float = 2
    ) -> None:
        self.broker = broker
        self._patience_s = 5 * timeout_s
        self.topology = Topology(offers_unowned=False)
        self.now = 100.0
        self.clock: Callable[[], float] = lambda: self.now
        self.source = KafkaMetadata(
            [Address("127.0.0.1", each.port) for each in (broker, *others)],
            self.topology,
            clock=lambda: self.clock(),
            interval_s=interval_s,
            timeout_s=timeout_s,
            stale_after_s=90,
        )

    async def read(self, *topics: dict[str, Any], brokers: dict[int, str] | None = None) -> dict[int, int]:
        """Set the broker's answer; return topic t's owners by partition."""
        self.broker.topics, self.broker.brokers = topics, brokers or BROKERS
        await self.reread()
        return self.owners()

    async def reread(self) -> None:
        # Keeps this read from waiting for the pace of earlier reads.
        self.now += 1
        await asyncio.wait_for(self.source.reload(), self._patience_s)

    def owners(self, name: bytes = b"t") -> dict[int, int]:
        return {row.partition_index: row.owner for row in self.topology.ownerships() if row.topic == name}


@asynccontextmanager
async def followed(interval_s: float = 3600, timeout_s: float = 30) -> AsyncIterator[Followed]:
    broker = ScriptedBroker()
    async with broker.serve():
        following = Followed(broker, interval_s=interval_s, timeout_s=timeout_s)
        async with running(following.source.run()):
            await asyncio.wait_for(following.source.wait_synced(), 60)
            yield following


async def test_leaders_are_owners_and_brokers_have_addresses() -> None:
    async with followed() as table:
        assert await table.read(topic(partition(0, 1, 5), partition(1, 3, 0))) == {0: 1, 1: 3}
        assert table.topology.brokers == {number: Address(host, PORT) for number, host in BROKERS.items()}


async def test_leader_of_earlier_epoch_is_not_restored() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        assert await table.read(topic(partition(0, 2, 6))) == {0: 2}
        revision = table.topology.owner_revision(b"t", 0)
        assert await table.read(topic(partition(0, 1, 5))) == {0: 2}, "a broker that lags behind"
        assert await table.read(topic(partition(0, -1, 5, LEADER_NOT_AVAILABLE))) == {0: 2}
        assert table.topology.owner_revision(b"t", 0) == revision
        assert await table.read(topic(partition(0, 1, 5))) == {0: 2}, "what lagged is not the new measure"
        assert await table.read(topic(partition(0, 1, 7))) == {0: 1}
        assert table.topology.owner_revision(b"t", 0) > revision


async def test_unchanged_owner_keeps_its_revision() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5), partition(1, 1, 5)))
        revision, version = table.topology.owner_revision(b"t", 0), table.topology.version
        # The leader is elected again with a higher epoch; it still gets requests.
        await table.read(topic(partition(0, 1, 6), partition(1, 1, 5)))
        assert (table.topology.owner_revision(b"t", 0), table.topology.version) == (revision, version)
        await table.read(topic(partition(0, 1, 6), partition(1, 2, 6)))
        assert table.topology.owner_revision(b"t", 0) == revision
        assert table.topology.owner_revision(b"t", 1) > revision


async def test_table_knows_existing_partitions() -> None:
    def lacking(table: Followed, *names: bytes) -> list[tuple[bytes, int]]:
        return [(name, index) for name in names for index in (-1, 0, 1, 2) if table.topology.lacks(name, index)]

    every = [(b"u", -1), (b"u", 0), (b"u", 1), (b"u", 2)]
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5), partition(1, -1, 5, LEADER_NOT_AVAILABLE)))
        assert lacking(table, b"t", b"u") == [(b"t", -1), (b"t", 2), *every], "one without a leader is there"
        by_id = table.topology.topic_ids[b"t"]
        assert lacking(table, by_id) == [(by_id, -1), (by_id, 2)]
        await table.read(topic(partition(0, 2, 0), topic_id=ANOTHER_ID))
        assert lacking(table, b"t") == [(b"t", -1), (b"t", 1), (b"t", 2)]
        await table.read()
        assert lacking(table, b"t") == [(b"t", -1), (b"t", 0), (b"t", 1), (b"t", 2)]
        table.topology.begin_rebuild()
        assert lacking(table, b"t", b"u") == [], "nothing is known of another cluster yet"


async def test_recreated_topic_replaces_its_entries() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 50), partition(1, 1, 50)))
        assert await table.read(topic(partition(0, 2, 0), topic_id=ANOTHER_ID)) == {0: 2}
        assert await table.read(topic(partition(0, 3, 1), topic_id=ANOTHER_ID)) == {0: 3}


async def test_new_partitions_of_a_topic_are_added() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        revision = table.topology.owner_revision(b"t", 0)
        assert await table.read(topic(partition(0, 1, 5), partition(1, 2, 0), partition(2, 3, 0))) == {0: 1, 1: 2, 2: 3}
        assert table.topology.owner_revision(b"t", 0) == revision
        assert await table.read(topic(partition(0, 1, 5), partition(1, 3, 1), partition(2, 2, 1))) == {0: 1, 1: 3, 2: 2}


async def test_swapped_broker_addresses_are_followed() -> None:
    async with followed() as table:
        rows = topic(partition(0, 1, 5), partition(1, 2, 5))
        await table.read(rows)
        swapped = {1: BROKERS[2], 2: BROKERS[1], 3: BROKERS[3]}
        assert await table.read(rows, brokers=swapped) == {0: 1, 1: 2}
        assert table.topology.brokers == {number: Address(host, PORT) for number, host in swapped.items()}


async def test_topics_are_found_by_their_ids() -> None:
    async with followed() as table:
        other = topic(partition(0, 3, 1), name="u", topic_id=ANOTHER_ID)
        await table.read(topic(partition(0, 1, 5)), other)
        assert (table.topology.owner(TOPIC_ID.bytes, 0), table.topology.owner(ANOTHER_ID.bytes, 0)) == (1, 3)
        # One topic was deleted; the other was created again, and neither id is its own.
        third = uuid.UUID(int=3)
        await table.read(topic(partition(0, 2, 0), name="u", topic_id=third))
        assert table.topology.topic_ids == {b"u": third.bytes}
        assert table.topology.owner(third.bytes, 0) == 2
        # A null id, and an id that two topics share: those topics are routed by name, the others are not affected.
        none, twice = topic(partition(0, 1, 5), topic_id=uuid.UUID(int=0)), topic(partition(0, 2, 1), name="v")
        await table.read(none, twice, {**twice, "name": "w"})
        assert (table.owners(), table.owners(b"v"), table.owners(b"w")) == ({0: 1}, {0: 2}, {0: 2})
        assert list(table.topology.topic_ids.values()) == [TOPIC_ID.bytes]


async def test_topic_with_an_error_keeps_its_entry() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5), partition(1, 2, 5)))
        for error_code in (LEADER_NOT_AVAILABLE, TOPIC_AUTHORIZATION_FAILED):
            assert await table.read({**topic(), "error_code": error_code}) == {0: 1, 1: 2}
            assert table.topology.topic_ids == {b"t": TOPIC_ID.bytes}
        assert await table.read(topic(partition(0, 2, 4), partition(1, 2, 5))) == {0: 1, 1: 2}, "its epochs are known"
        assert await table.read({**topic(), "error_code": UNKNOWN_TOPIC_OR_PARTITION}) == {}
        assert table.topology.topic_ids == {}


async def test_epochs_without_topic_ids_are_kept_by_name() -> None:
    async with followed() as table:
        table.broker.newest_metadata = 9
        table.broker.cut()
        for answers in (
            [topic(partition(0, 1, 9), topic_id=None), topic(partition(0, 1, 2), name="u", topic_id=None)],
            [topic(partition(0, 2, 10), topic_id=None), topic(partition(0, 2, 3), name="u", topic_id=None)],
        ):
            table.broker.topics = answers
            await table.reread()
        assert (table.owners(b"t"), table.owners(b"u")) == ({0: 2}, {0: 2})


async def test_partition_without_a_leader_has_no_owner() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5), partition(1, 2, 5)))
        assert await table.read(topic(partition(0, -1, 6, LEADER_NOT_AVAILABLE), partition(1, 2, 5))) == {1: 2}
        assert await table.read(topic(partition(0, 1, 5), partition(1, 2, 5))) == {1: 2}, "the earlier leader lags"
        assert await table.read(topic(partition(0, 3, 7), partition(1, 2, 5))) == {0: 3, 1: 2}
        # A missing replica does not matter to a producer, but an error of the leader does.
        assert await table.read(topic(partition(0, 1, 8, REPLICA_NOT_AVAILABLE))) == {0: 1}
        assert await table.read(topic(partition(0, 1, 8, UNKNOWN_TOPIC_OR_PARTITION))) == {}


async def test_entry_missing_from_an_answer_is_removed() -> None:
    async with followed() as table:
        rows = topic(partition(0, 1, 5), partition(1, 2, 5)), topic(partition(0, 3, 1), name="u", topic_id=ANOTHER_ID)
        await table.read(*rows)
        assert table.owners(b"u") == {0: 3}
        assert await table.read(topic(partition(0, 1, 5)), brokers={1: BROKERS[1], 2: "127.0.0.14"}) == {0: 1}
        assert table.owners(b"u") == {}
        assert table.topology.brokers == {1: Address(BROKERS[1], PORT), 2: Address("127.0.0.14", PORT)}
        await table.read(*rows)
        assert (table.owners(), table.owners(b"u")) == ({0: 1, 1: 2}, {0: 3})
        assert await table.read({**rows[0], "error_code": UNKNOWN_TOPIC_OR_PARTITION}) == {}


async def test_partition_index_out_of_range_is_ignored() -> None:
    async with followed() as table:
        wild = [partition(index, 1, 1) for index in (-1, -(2**31), MAX_PARTITION_INDEX + 1, 2**31 - 1)]
        assert await table.read(topic(*wild, partition(2, 1, 1))) == {2: 1}


async def test_answer_without_brokers_is_ignored() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        table.broker.topics, table.broker.brokers = [], {}
        await table.reread()
        assert table.owners() == {0: 1}
        assert "no brokers" in str(table.source.last_error)
        assert await table.read(topic(partition(0, 2, 6))) == {0: 2}
        assert table.source.last_error is None


DISTORTED: dict[str, Callable[[bytes], bytes]] = {
    "another correlation id": lambda answer: answer[:4] + b"\x7f\xff\xff\xff" + answer[8:],
    "cut short": lambda answer: struct.pack(">i", len(answer) - 12) + answer[4:-8],
    "bytes left over": lambda answer: struct.pack(">i", len(answer) - 1) + answer[4:] + b"abc",
    "a negative length": lambda answer: struct.pack(">i", -1),
    "a length of gigabytes": lambda answer: struct.pack(">i", 2**31 - 1),
    "just too long": lambda answer: struct.pack(">i", MAX_ANSWER_BYTES + 1),
    "nothing": lambda answer: b"",
}


@pytest.mark.parametrize("distortion", DISTORTED)
async def test_invalid_answer_is_ignored_on_a_new_connection(distortion: str) -> None:
    # The wait for "nothing comes" is longer than any wait for an answer in this test.
    async with followed(timeout_s=2 if distortion == "nothing" else 90) as table:
        await table.read(topic(partition(0, 1, 5)))
        table.broker.distort = DISTORTED[distortion]
        async with asyncio.timeout(60):
            assert await table.read(topic(partition(0, 2, 6))) == {0: 1}
        wanted = f"127.0.0.1:{table.broker.port} did not answer {keys.name_of(keys.METADATA)} ("
        assert str(table.source.last_error).startswith(wanted)
        table.broker.distort = None
        await eventually(lambda: table.owners() == {0: 2}, what="read again by itself")


async def test_concurrent_refreshes_share_a_later_read() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        asked = table.broker.asked
        table.broker.holds.clear()
        early = asyncio.ensure_future(table.reread())
        await eventually(lambda: table.broker.asked == asked + 1)
        late = [asyncio.ensure_future(table.reread()) for _ in range(50)]
        await asyncio.sleep(0)
        late[0].cancel()
        table.broker.topics = [topic(partition(0, 2, 6))]
        table.broker.holds.set()
        await asyncio.gather(early, *late, return_exceptions=True)
        assert table.broker.asked == asked + 2
        assert [each.cancelled() for each in late] == [True] + [False] * 49
        assert table.owners() == {0: 2}


async def test_refresh_of_an_older_entry_returns_at_once() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        seen = table.topology.owner_revision(b"t", 0)
        await table.read(topic(partition(0, 2, 6)))
        asked = table.broker.asked
        await table.source.refresh(b"t", 0, seen)
        assert table.broker.asked == asked
        await asyncio.wait_for(table.source.refresh(b"t", 0, table.topology.owner_revision(b"t", 0)), 60)
        assert table.broker.asked == asked + 1


async def test_table_without_brokers_stays_and_reports_age() -> None:
    broker = ScriptedBroker()
    async with broker.serve():
        table = Followed(broker)
        assert table.source.stale
        async with running(table.source.run()):
            await asyncio.wait_for(table.source.wait_synced(), 60)
            await table.read(topic(partition(0, 1, 5)))
            assert (table.source.age_s, table.source.stale) == (0, False)
            broker.holds.clear()
            table.now += 91
            waiting = asyncio.ensure_future(table.source.reload())
            await asyncio.sleep(0.05)
            broker.cut()
            await waiting
            assert (table.source.age_s, table.source.stale) == (91, True)
            assert table.owners() == {0: 1}
            broker.holds.set()
            await eventually(lambda: not table.source.stale)
            assert table.owners() == {0: 1}


async def test_closed_source_ends_every_refresh() -> None:
    async with followed() as table:
        asked = table.broker.asked
        table.broker.holds.clear()
        during = asyncio.ensure_future(table.reread())
        await eventually(lambda: table.broker.asked == asked + 1)
        behind = asyncio.ensure_future(table.reread())
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(during, behind), 60)
    await asyncio.wait_for(table.source.refresh(b"t", 0, 0), 60)


async def test_only_doubted_topics_are_requested() -> None:
    async with followed() as table:
        other = topic(partition(0, 3, 1), name="u", topic_id=ANOTHER_ID)
        await table.read(topic(partition(0, 1, 5)), other)
        table.broker.topics = [topic(partition(0, 2, 6)), topic(partition(0, 2, 2), name="u", topic_id=ANOTHER_ID)]
        await asyncio.wait_for(table.source.refresh(b"t", 0, table.topology.owner_revision(b"t", 0)), 60)
        assert table.broker.asked_for[-1] == ["t"]
        assert (table.owners(), table.owners(b"u")) == ({0: 2}, {0: 3}), "of the other one nothing was said"
        await asyncio.wait_for(table.source.refresh(b"new", 7, 0), 60)
        assert table.broker.asked_for[-1] == ["new"]
        # A topic that the cluster has lost is removed, whichever request found it.
        table.broker.topics = [other]
        await asyncio.wait_for(table.source.refresh(b"t", 0, table.topology.owner_revision(b"t", 0)), 60)
        assert (table.owners(), table.owners(b"u")) == ({}, {0: 3})
        assert table.topology.topic_ids == {b"u": ANOTHER_ID.bytes}


async def test_unknown_id_is_requested_by_id() -> None:
    async with followed() as table:
        made = uuid.uuid4()
        table.broker.topics = [topic(partition(0, 2, 0), name="made", topic_id=made)]
        await asyncio.wait_for(table.source.refresh(made.bytes, 0, 0), 60)
        assert table.broker.asked_for[-1] == [made]
        assert table.topology.owner(made.bytes, 0) == 2
        strange = uuid.uuid4()
        await asyncio.wait_for(table.source.refresh(strange.bytes, 0, 0), 60)
        assert table.topology.owner(strange.bytes, 0) == NO_OWNER
        assert table.owners(b"made") == {0: 2}
        # Brokers with older Metadata versions would take the id for an empty name.
        table.broker.newest_metadata = METADATA_VERSION - 1
        table.broker.cut()
        await table.reread()
        await asyncio.wait_for(table.source.refresh(strange.bytes, 0, 0), 60)
        assert table.broker.asked_for[-1] is None


async def test_invalid_topic_is_not_requested() -> None:
    async with followed() as table:
        asked = table.broker.asked
        for name in (b"", b"\xff\x00", b"x" * 250):
            await asyncio.wait_for(table.source.refresh(name, 0, 0), 60)
        assert table.broker.asked == asked


async def test_refresh_storm_costs_few_requests_a_second() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        table.clock = time.monotonic
        asked, rounds, began = table.broker.asked, 0, time.monotonic()
        while time.monotonic() - began < 2:
            # Clients ask again and again; each waits for a read that began after its request.
            await asyncio.wait_for(asyncio.gather(*(table.source.refresh(b"t%d" % n, 0, 0) for n in range(20))), 60)
            rounds += 1
        assert asked < table.broker.asked <= asked + BURST + (time.monotonic() - began + 1) * RATE_PER_S
        assert rounds <= table.broker.asked - asked


async def test_many_doubted_topics_are_requested_as_all() -> None:
    async with followed() as table:
        for count, named in ((MAX_DOUBTED, True), (MAX_DOUBTED + 1, False)):
            wishes = [table.source.refresh(b"topic-%d" % number, 0, 0) for number in range(count)]
            await asyncio.wait_for(asyncio.gather(*wishes), 60)
            assert (table.broker.asked_for[-1] is not None) is named


async def test_lost_broker_causes_one_full_read() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        asked = table.broker.asked
        table.broker.topics = [topic(partition(0, 2, 6))]
        table.now += WHOLE_APART_S
        for _ in range(100):
            table.source.broker_lost()
        await eventually(lambda: table.owners() == {0: 2})
        assert table.broker.asked_for[asked:] == [None]
        table.source.broker_lost()
        await asyncio.sleep(0.05)
        assert table.broker.asked == asked + 1, "there was one a moment ago"
        table.now += WHOLE_APART_S
        table.source.broker_lost()
        await eventually(lambda: table.broker.asked == asked + 2)


async def test_departed_broker_causes_no_refresh() -> None:
    first, second = ScriptedBroker(), ScriptedBroker()
    async with second.serve():
        async with first.serve():
            first.topics, second.topics = [topic(partition(0, 1, 5))], [topic(partition(0, 2, 6))]
            table = Followed(first, second)
            following = asyncio.ensure_future(table.source.run())
            await asyncio.wait_for(table.source.wait_synced(), 60)
            assert table.owners() == {0: 1}
        try:
            await asyncio.wait_for(table.source.refresh(b"t", 0, table.topology.owner_revision(b"t", 0)), 60)
            assert table.owners() == {0: 2}, "by the first read, of the other broker"
            assert table.source.last_error is None
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_all_is_read_anew_at_the_interval() -> None:
    async with followed(interval_s=0.1) as table:
        table.now += 1
        table.broker.topics = [topic(partition(0, 2, 6))]
        for _ in range(20):
            table.now += 0.1
            await asyncio.sleep(0.01)
        await eventually(lambda: table.owners() == {0: 2})


async def test_another_cluster_replaces_the_table() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 50)), topic(partition(0, 3, 1), name="u", topic_id=ANOTHER_ID))
        before = table.topology.owner_revision(b"t", 0)
        table.broker.cluster_id = "another"
        # The same id under a lower epoch, which within one cluster would be a broker that lags behind.
        with capture_logs() as logs:
            assert await table.read(topic(partition(0, 2, 0)), brokers={2: "127.0.0.15"}) == {0: 2}
        assert [(each["before"], each["now"]) for each in logs if each["log_level"] == "error"] == [("one", "another")]
        assert table.owners(b"u") == {}
        assert table.topology.brokers == {2: Address("127.0.0.15", PORT)}
        assert table.topology.owner_revision(b"t", 0) > before, "what was routed before is told from what is now"


async def test_lagging_broker_is_not_asked_repeatedly() -> None:
    """A broker without contact to the controllers repeats an old state for ever."""
    cut_off, current = ScriptedBroker(), ScriptedBroker()
    cut_off.topics, current.topics = [topic(partition(0, 1, 5))], [topic(partition(0, 2, 6))]
    async with cut_off.serve(), current.serve():
        cut_off.brokers = current.brokers = {1: "127.0.0.1"}
        table = Followed(cut_off, current)
        async with running(table.source.run()):
            await asyncio.wait_for(table.source.wait_synced(), 60)
            assert table.owners() == {0: 1}
            for _ in range(2):
                await asyncio.wait_for(table.source.refresh(b"t", 0, table.topology.owner_revision(b"t", 0)), 60)
            assert table.owners() == {0: 2}
            # The lagging broker's answer does not restore the old state.
            for _ in range(4):
                await table.reread()
                assert table.owners() == {0: 2}
            assert cut_off.asked >= 3, "nobody is asked about everything twice in a row"


async def test_large_cluster_is_read_in_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long read would take a second in which no client is served."""
    sizes, turn = [5_000, *[50] * 300, 5_000], 0
    read_in: list[int] = []
    changed_in: list[int] = []
    # A busy machine needs seconds to write and to read it.
    async with followed(timeout_s=30) as table:
        read_some, set_owner = MetadataReader.read_some, table.topology.set_owner
        monkeypatch.setattr(MetadataReader, "read_some", lambda *given: read_in.append(turn) or read_some(*given))
        monkeypatch.setattr(table.topology, "set_owner", lambda *given: changed_in.append(turn) or set_owner(*given))
        table.broker.topics = [
            topic(*(partition(n, 1, 0) for n in range(size)), name=f"t{number}", topic_id=uuid.uuid4())
            for number, size in enumerate(sizes)
        ]
        reading = asyncio.ensure_future(table.reread())
        while not reading.done():
            turn += 1
            await asyncio.sleep(0)
        await reading
        assert table.topology.owned_count == sum(sizes)
        assert max(Counter(read_in).values()) == 1
        assert max(Counter(changed_in).values()) < 2 * PORTION
        table.broker.topics = []
        read_in.clear()
        changed_in.clear()
        reading = asyncio.ensure_future(table.reread())
        while not reading.done():
            turn += 1
            await asyncio.sleep(0)
        await reading
        assert table.topology.owned_count == 0
        assert max(Counter(changed_in).values()) < 2 * PORTION
