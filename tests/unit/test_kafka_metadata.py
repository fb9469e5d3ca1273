"""What the table makes of a cluster's Metadata, answer by answer, from a broker that says what the test tells it to."""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from codec import api_keys as keys
from codec.control import build_response, encode_response
from codec.error_codes import (
    LEADER_NOT_AVAILABLE,
    REPLICA_NOT_AVAILABLE,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from codec.headers import parse_request_header, response_header
from kproxy.ownership.kafka_client import MAX_ANSWER_BYTES
from kproxy.ownership.kafka_metadata import METADATA_VERSION, KafkaMetadata
from kproxy.routing.topology import MAX_PARTITION_INDEX, Address, Topology
from tests.support.etcd import eventually, running

TOPIC_ID = uuid.UUID(int=1)
ANOTHER_ID = uuid.UUID(int=2)
BROKERS = {1: "a", 2: "b", 3: "c"}


def partition(index: int, leader: int, epoch: int, error_code: int = 0) -> dict[str, Any]:
    return {"error_code": error_code, "partition_index": index, "leader_id": leader, "leader_epoch": epoch}


def topic(*partitions: dict[str, Any], name: str = "t", topic_id: uuid.UUID | None = TOPIC_ID) -> dict[str, Any]:
    return {"error_code": 0, "name": name, "topic_id": topic_id, "partitions": list(partitions)}


def metadata(
    topics: Sequence[dict[str, Any]] = (), brokers: dict[int, str] | None = None, version: int = METADATA_VERSION
) -> bytes:
    named = [{"node_id": number, "host": host, "port": 9092} for number, host in (brokers or BROKERS).items()]
    return encode_response(build_response(keys.METADATA, version, brokers=named, topics=topics))


class ScriptedBroker:
    """Serves ApiVersions, and for every Metadata request `body`, changed by `distort` where that is set."""

    def __init__(self) -> None:
        self.body = metadata()
        self.distort: Callable[[bytes], bytes] | None = None
        self.holds = asyncio.Event()
        self.holds.set()
        self.asked = 0
        self.newest_metadata = METADATA_VERSION + 1
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
                body = self.body
                if header.api_key == keys.API_VERSIONS:
                    served = [(keys.API_VERSIONS, 4), (keys.METADATA, self.newest_metadata)]
                    ranges = [{"api_key": key, "min_version": 0, "max_version": highest} for key, highest in served]
                    body = encode_response(build_response(keys.API_VERSIONS, 0, api_keys=ranges))
                else:
                    self.asked += 1
                    await self.holds.wait()
                answer = response_header(header.api_key, header.api_version, header.correlation_id) + body
                answer = struct.pack(">i", len(answer)) + answer
                if self.distort is not None and header.api_key == keys.METADATA:
                    answer = self.distort(answer)
                writer.write(answer)
        except (OSError, EOFError):
            writer.close()


class Followed:
    """A source that follows a scripted broker, read anew on demand; `now` is its clock."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.topology = Topology(offers_unowned=False)
        self.now = 100.0
        self.source = KafkaMetadata(
            [Address("127.0.0.1", broker.port)],
            self.topology,
            clock=lambda: self.now,
            interval_s=3600,
            timeout_s=2,
            stale_after_s=90,
        )

    async def read(self, *topics: dict[str, Any], brokers: dict[int, str] | None = None) -> dict[int, int]:
        """Have this answered, and return topic t's owners by partition."""
        self.broker.body = metadata(topics, brokers)
        await self.reread()
        return self.owners()

    async def reread(self) -> None:
        await asyncio.wait_for(self.source.refresh(b"any", 0, 0), 10)

    def owners(self, name: bytes = b"t") -> dict[int, int]:
        return {row.partition_index: row.owner for row in self.topology.ownerships() if row.topic == name}


@asynccontextmanager
async def followed() -> AsyncIterator[Followed]:
    broker = ScriptedBroker()
    async with broker.serve():
        following = Followed(broker)
        async with running(following.source.run()):
            await asyncio.wait_for(following.source.wait_synced(), 10)
            yield following


async def test_leaders_are_owners_and_brokers_have_addresses() -> None:
    async with followed() as table:
        assert await table.read(topic(partition(0, 1, 5), partition(1, 3, 0))) == {0: 1, 1: 3}
        assert table.topology.brokers == {number: Address(host, 9092) for number, host in BROKERS.items()}


async def test_a_leader_of_an_earlier_epoch_is_not_brought_back() -> None:
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


async def test_an_unchanged_owner_keeps_its_revision() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5), partition(1, 1, 5)))
        revision, version = table.topology.owner_revision(b"t", 0), table.topology.version
        # Elected again under a higher epoch: still where requests go.
        await table.read(topic(partition(0, 1, 6), partition(1, 1, 5)))
        assert (table.topology.owner_revision(b"t", 0), table.topology.version) == (revision, version)
        await table.read(topic(partition(0, 1, 6), partition(1, 2, 6)))
        assert table.topology.owner_revision(b"t", 0) == revision
        assert table.topology.owner_revision(b"t", 1) > revision


async def test_a_topic_made_anew_begins_anew() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 50), partition(1, 1, 50)))
        assert await table.read(topic(partition(0, 2, 0), topic_id=ANOTHER_ID)) == {0: 2}
        assert await table.read(topic(partition(0, 3, 1), topic_id=ANOTHER_ID)) == {0: 3}


async def test_topics_are_found_by_their_ids() -> None:
    async with followed() as table:
        other = topic(partition(0, 3, 1), name="u", topic_id=ANOTHER_ID)
        await table.read(topic(partition(0, 1, 5)), other)
        assert (table.topology.owner(TOPIC_ID.bytes, 0), table.topology.owner(ANOTHER_ID.bytes, 0)) == (1, 3)
        # Deleted, the one; made anew, under the id of neither, the other.
        third = uuid.UUID(int=3)
        await table.read(topic(partition(0, 2, 0), name="u", topic_id=third))
        assert table.topology.topic_ids == {b"u": third.bytes}
        assert table.topology.owner(third.bytes, 0) == 2
        # An id that is none, and one that two topics have: those go by their names, and nothing else is the worse.
        none, twice = topic(partition(0, 1, 5), topic_id=uuid.UUID(int=0)), topic(partition(0, 2, 1), name="v")
        await table.read(none, twice, {**twice, "name": "w"})
        assert (table.owners(), table.owners(b"v"), table.owners(b"w")) == ({0: 1}, {0: 2}, {0: 2})
        assert list(table.topology.topic_ids.values()) == [TOPIC_ID.bytes]


async def test_a_topic_with_an_error_stays_as_it_was_known() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5), partition(1, 2, 5)))
        for error_code in (LEADER_NOT_AVAILABLE, TOPIC_AUTHORIZATION_FAILED):
            assert await table.read({**topic(), "error_code": error_code}) == {0: 1, 1: 2}
            assert table.topology.topic_ids == {b"t": TOPIC_ID.bytes}
        assert await table.read(topic(partition(0, 2, 4), partition(1, 2, 5))) == {0: 1, 1: 2}, "its epochs are known"
        assert await table.read({**topic(), "error_code": UNKNOWN_TOPIC_OR_PARTITION}) == {}
        assert table.topology.topic_ids == {}


async def test_without_topic_ids_epochs_are_kept_apart_by_name() -> None:
    async with followed() as table:
        table.broker.newest_metadata = 9
        table.broker.cut()
        for answers in (
            [topic(partition(0, 1, 9), topic_id=None), topic(partition(0, 1, 2), name="u", topic_id=None)],
            [topic(partition(0, 2, 10), topic_id=None), topic(partition(0, 2, 3), name="u", topic_id=None)],
        ):
            table.broker.body = metadata(
                [{key: value for key, value in each.items() if key != "topic_id"} for each in answers], version=9
            )
            # The first reading finds the connection cut.
            await table.reread()
            await table.reread()
        assert (table.owners(b"t"), table.owners(b"u")) == ({0: 2}, {0: 2})


async def test_a_partition_without_a_leader_has_no_owner() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5), partition(1, 2, 5)))
        assert await table.read(topic(partition(0, -1, 6, LEADER_NOT_AVAILABLE), partition(1, 2, 5))) == {1: 2}
        assert await table.read(topic(partition(0, 1, 5), partition(1, 2, 5))) == {1: 2}, "the earlier leader lags"
        assert await table.read(topic(partition(0, 3, 7), partition(1, 2, 5))) == {0: 3, 1: 2}
        # A replica that is down is none of a producer's business; a leader that the broker does not stand by is.
        assert await table.read(topic(partition(0, 1, 8, REPLICA_NOT_AVAILABLE))) == {0: 1}
        assert await table.read(topic(partition(0, 1, 8, UNKNOWN_TOPIC_OR_PARTITION))) == {}


async def test_what_an_answer_does_not_name_is_gone() -> None:
    async with followed() as table:
        rows = topic(partition(0, 1, 5), partition(1, 2, 5)), topic(partition(0, 3, 1), name="u", topic_id=ANOTHER_ID)
        await table.read(*rows)
        assert table.owners(b"u") == {0: 3}
        assert await table.read(topic(partition(0, 1, 5)), brokers={1: "a", 2: "moved"}) == {0: 1}
        assert table.owners(b"u") == {}
        assert table.topology.brokers == {1: Address("a", 9092), 2: Address("moved", 9092)}
        await table.read(*rows)
        assert (table.owners(), table.owners(b"u")) == ({0: 1, 1: 2}, {0: 3})
        assert await table.read({**rows[0], "error_code": UNKNOWN_TOPIC_OR_PARTITION}) == {}


async def test_a_partition_index_out_of_range_costs_nothing() -> None:
    async with followed() as table:
        wild = [partition(index, 1, 1) for index in (-1, -(2**31), MAX_PARTITION_INDEX + 1, 2**31 - 1)]
        assert await table.read(topic(*wild, partition(2, 1, 1))) == {2: 1}


async def test_a_broker_that_knows_no_brokers_yet_is_not_believed() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        table.broker.body = encode_response(build_response(keys.METADATA, METADATA_VERSION, brokers=[], topics=[]))
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
async def test_an_answer_that_is_none_is_not_believed_and_the_next_connection_is_a_new_one(distortion: str) -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        table.broker.distort = DISTORTED[distortion]
        began = time.monotonic()
        assert await table.read(topic(partition(0, 2, 6))) == {0: 1}
        assert time.monotonic() - began < 5
        wanted = f"127.0.0.1:{table.broker.port} did not answer {keys.name_of(keys.METADATA)} ("
        assert str(table.source.last_error).startswith(wanted)
        table.broker.distort = None
        await eventually(lambda: table.owners() == {0: 2}, what="read again by itself")


async def test_wishes_at_one_time_share_a_read_that_begins_after_them() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        asked = table.broker.asked
        table.broker.holds.clear()
        early = asyncio.ensure_future(table.reread())
        await eventually(lambda: table.broker.asked == asked + 1)
        late = [asyncio.ensure_future(table.reread()) for _ in range(50)]
        await asyncio.sleep(0)
        late[0].cancel()
        table.broker.body = metadata([topic(partition(0, 2, 6))])
        table.broker.holds.set()
        await asyncio.gather(early, *late, return_exceptions=True)
        assert table.broker.asked == asked + 2
        assert [each.cancelled() for each in late] == [True] + [False] * 49
        assert table.owners() == {0: 2}


async def test_who_knows_an_older_entry_need_not_wait() -> None:
    async with followed() as table:
        await table.read(topic(partition(0, 1, 5)))
        seen = table.topology.owner_revision(b"t", 0)
        await table.read(topic(partition(0, 2, 6)))
        asked = table.broker.asked
        await table.source.refresh(b"t", 0, seen)
        assert table.broker.asked == asked
        await asyncio.wait_for(table.source.refresh(b"t", 0, table.topology.owner_revision(b"t", 0)), 10)
        assert table.broker.asked == asked + 1


async def test_without_a_broker_the_last_known_table_serves_on_and_tells_its_age() -> None:
    broker = ScriptedBroker()
    async with broker.serve():
        table = Followed(broker)
        assert table.source.stale
        async with running(table.source.run()):
            await asyncio.wait_for(table.source.wait_synced(), 10)
            await table.read(topic(partition(0, 1, 5)))
            assert (table.source.age_s, table.source.stale) == (0, False)
            broker.holds.clear()
            table.now += 91
            waiting = asyncio.ensure_future(table.reread())
            await asyncio.sleep(0.05)
            broker.cut()
            await waiting
            assert (table.source.age_s, table.source.stale) == (91, True)
            assert table.owners() == {0: 1}
            broker.holds.set()
            await eventually(lambda: not table.source.stale)
            assert table.owners() == {0: 1}


async def test_nobody_waits_for_a_source_that_has_ended() -> None:
    async with followed() as table:
        asked = table.broker.asked
        table.broker.holds.clear()
        during = asyncio.ensure_future(table.reread())
        await eventually(lambda: table.broker.asked == asked + 1)
        behind = asyncio.ensure_future(table.reread())
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(during, behind), 5)
    await asyncio.wait_for(table.source.refresh(b"t", 0, 0), 5)
