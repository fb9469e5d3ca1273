"""Claim partitions with the Own API and produce to them, on one connection, with pipelining.

Each call sends one request and awaits its answer, PATIENCE_S at most. The `send_` methods send at once and return a
future of the answer, so that several requests may be under way. Answers are matched to requests by correlation id, in
the order of requests, as the protocol requires. If the connection ends first, the missing answers raise
ConnectionError: the outcome of those requests is not known.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple, Self, TypeVar

from kproxy_codec import control
from kproxy_codec.api_keys import API_VERSIONS, CREATE_TOPICS, FETCH, METADATA, OWN, PRODUCE
from kproxy_codec.error_codes import NONE
from kproxy_codec.framing import request_header, response_correlation_id
from kproxy_codec.own import (
    OWN_MAX_VERSION,
    OwnRequest,
    OwnResource,
    OwnResponse,
    encode_own_request,
    parse_own_response,
)
from tests.support.clients.attempts import Stored, stored
from tests.support.clients.raw_client import Answer, RawClient, raw_frame
from tests.support.wire.messages import request_body, sample_request
from tests.support.wire.record_batches import build_batch

PRODUCE_VERSION = 9
FETCH_VERSION = 12
METADATA_VERSION = 12
API_VERSIONS_VERSION = 3
CREATE_TOPICS_VERSION = 7
# A claim may take as long as the proxy's claim timeout.
PATIENCE_S = 60.0
NO_OFFSET = -1

Producer = tuple[int, int, int]
"""A producer's id, its epoch, and the sequence of the first record."""

_Value = TypeVar("_Value")


class Produced(NamedTuple):
    error_code: int
    base_offset: int


class Fetched(NamedTuple):
    error_code: int
    records: list[Stored]


class Leader(NamedTuple):
    node_id: int
    host: str
    port: int


class _Expected(NamedTuple):
    """An expected answer."""

    correlation_id: int
    take: Callable[[bytes], None]
    answer: asyncio.Future[Any]


class OwnClient:
    """One connection. `closed`: it has ended, by `close` or because the other side ended it; `closed_at`: when.

    The time is time.monotonic's; infinite while the connection is open.
    """

    def __init__(self, raw: RawClient, client_id: str) -> None:
        self.raw = raw
        self.client_id = client_id
        self.closed_at = inf
        self._expected: deque[_Expected] = deque()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, host: str, port: int, client_id: str = "tests") -> Self:
        return cls(await RawClient().connect(port, host), client_id)

    @property
    def closed(self) -> bool:
        return self._reading.done()

    async def wait_closed(self, timeout: float = PATIENCE_S) -> bool:
        """Whether the connection ends within `timeout` seconds."""
        await asyncio.wait([self._reading], timeout=timeout)
        return self.closed

    async def close(self) -> None:
        self.raw.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    def abort(self) -> None:
        """Reset the connection."""
        self.raw.abort()

    # Claims

    async def own(
        self, group: str, resources: Sequence[tuple[str, int]] | None, version: int = OWN_MAX_VERSION
    ) -> OwnResponse:
        """Claim (resource, generation) each; None claims the whole group, an empty list binds the group alone."""
        return await self._within(self.send_own(group, resources, version))

    def send_own(
        self, group: str, resources: Sequence[tuple[str, int]] | None, version: int = OWN_MAX_VERSION
    ) -> asyncio.Future[OwnResponse]:
        claimed = None if resources is None else tuple(OwnResource(*each) for each in resources)
        body = encode_own_request(OwnRequest(group, claimed))
        return self._ask(OWN, version, body, lambda frame: parse_own_response(frame, version))

    # Records

    async def produce(
        self,
        topic: str,
        partition: int,
        value: bytes | Sequence[bytes],
        acks: int = -1,
        producer: Producer | None = None,
    ) -> Produced:
        """Send one batch. With acks 0 it returns once the kernel has the request, without an error or an offset."""
        produced = self.send_produce(topic, partition, value, acks, producer)
        await self.raw.sent()
        return await self._within(produced)

    def send_produce(
        self,
        topic: str,
        partition: int,
        value: bytes | Sequence[bytes],
        acks: int = -1,
        producer: Producer | None = None,
    ) -> asyncio.Future[Produced]:
        def only(answer: Mapping[tuple[str, int], Produced]) -> Produced:
            assert set(answer) == {(topic, partition)}, f"{topic}/{partition} was produced, answered is {answer}"
            return answer[topic, partition]

        return self._produce({(topic, partition): value}, acks, producer, only, Produced(NONE, NO_OFFSET))

    def send_produce_many(
        self,
        values: Mapping[tuple[str, int], bytes | Sequence[bytes]],
        acks: int = -1,
        producer: Producer | None = None,
    ) -> asyncio.Future[Mapping[tuple[str, int], Produced]]:
        """A batch for each of several partitions, in one request; by (topic, partition)."""
        return self._produce(values, acks, producer, lambda answer: answer, {})

    def _produce(
        self,
        values: Mapping[tuple[str, int], bytes | Sequence[bytes]],
        acks: int,
        producer: Producer | None,
        read: Callable[[Mapping[tuple[str, int], Produced]], _Value],
        unanswered: _Value,
    ) -> asyncio.Future[_Value]:
        indexes: dict[str, list[int]] = {}
        for topic, partition in values:
            indexes.setdefault(topic, []).append(partition)
        fields = sample_request(PRODUCE, indexes, acks=acks, timeout_ms=round(PATIENCE_S * 1000))
        for asked in fields["topic_data"]:
            for entry in asked["partition_data"]:
                entry["records"] = _batch(values[asked["name"], entry["index"]], producer)

        def results(frame: bytes) -> _Value:
            found = Answer(frame, PRODUCE, PRODUCE_VERSION).results
            answer = {
                (each.topic, each.partition_index): Produced(each.error_code, each.fields["base_offset"])
                for each in found
            }
            assert len(answer) == len(found), f"a partition is answered twice: {found}"
            return read(answer)

        frame = request_body(PRODUCE, PRODUCE_VERSION, fields)
        if acks == 0:
            self._send(PRODUCE, PRODUCE_VERSION, frame)
            done: asyncio.Future[_Value] = asyncio.get_running_loop().create_future()
            done.set_result(unanswered)
            return done
        return self._ask(PRODUCE, PRODUCE_VERSION, frame, results)

    async def fetch(self, topic: str, partition: int, offset: int, *, max_wait_ms: int = 0) -> Fetched:
        """Return the records of one fetch, except those before `offset`, with which a batch may begin."""
        return await self._within(self.send_fetch(topic, partition, offset, max_wait_ms=max_wait_ms))

    def send_fetch(self, topic: str, partition: int, offset: int, *, max_wait_ms: int = 0) -> asyncio.Future[Fetched]:
        fields = sample_request(
            FETCH,
            {topic: [partition]},
            forgotten_topics_data=[],
            rack_id="",
            isolation_level=0,
            max_wait_ms=max_wait_ms,
        )
        # -1: the client knows no leader epoch and has no log.
        unknown = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "log_start_offset": -1}
        fields["topics"][0]["partitions"][0].update(fetch_offset=offset, **unknown)

        def read(frame: bytes) -> Fetched:
            (result,) = Answer(frame, FETCH, FETCH_VERSION).results
            records = stored(result.fields["records"] or b"")
            return Fetched(result.error_code, [each for each in records if each.offset >= offset])

        return self._ask(FETCH, FETCH_VERSION, request_body(FETCH, FETCH_VERSION, fields), read)

    # The cluster

    async def metadata_leader(self, topic: str, partition: int) -> Leader:
        """The proxy that Metadata names as a partition's leader. KeyError if it names none."""
        answer = await self._control(
            METADATA, METADATA_VERSION, topics=[{"name": topic}], allow_auto_topic_creation=False
        )
        brokers = {each.node_id: each for each in answer.brokers}
        (found,) = answer.topics
        leader = {each.partition_index: each.leader_id for each in found.partitions}[partition]
        return Leader(leader, brokers[leader].host, brokers[leader].port)

    async def create_topics(self, topics: Sequence[str], partitions: int) -> None:
        """Return when Metadata has all their partitions."""
        wanted = [
            {"name": each, "num_partitions": partitions, "replication_factor": -1, "assignments": [], "configs": []}
            for each in topics
        ]
        answer = await self._control(CREATE_TOPICS, CREATE_TOPICS_VERSION, topics=wanted, timeout_ms=10_000)
        assert {each.error_code for each in answer.topics} == {NONE}, answer
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(KeyError):
                    for topic in topics:
                        for partition in range(partitions):
                            await self.metadata_leader(topic, partition)
                    return
                await asyncio.sleep(0.02)

    async def create_topic(self, topic: str, partitions: int) -> None:
        await self.create_topics([topic], partitions)

    async def api_versions(self) -> dict[int, tuple[int, int]]:
        """The lowest and the highest version in ApiVersions, by API key."""
        answer = await self._control(
            API_VERSIONS, API_VERSIONS_VERSION, client_software_name="tests", client_software_version="1"
        )
        return {each.api_key: (each.min_version, each.max_version) for each in answer.api_keys}

    async def _control(self, api_key: int, version: int, **fields: Any) -> Any:
        body = control.encode_request(control.build_request(api_key, version, **fields))
        return await self._within(
            self._ask(api_key, version, body, lambda frame: Answer(frame, api_key, version).message)
        )

    # Requests and answers

    def _send(self, api_key: int, version: int, body: bytes) -> int:
        # The transport may learn of the end before the reader does.
        if self.closed or self.raw.is_gone:
            raise ConnectionError("the connection has ended")
        self.raw.correlation_id += 1
        header = request_header(api_key, version, self.raw.correlation_id, self.client_id.encode())
        self.raw.send(raw_frame(header + body))
        return self.raw.correlation_id

    def _ask(self, api_key: int, version: int, body: bytes, read: Callable[[bytes], _Value]) -> asyncio.Future[_Value]:
        answer: asyncio.Future[_Value] = asyncio.get_running_loop().create_future()
        # Retrieve the outcome, because a test need not read that of every request open at the connection's end.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        correlation_id = self._send(api_key, version, body)

        def take(frame: bytes) -> None:
            if not answer.done():
                answer.set_result(read(frame))

        self._expected.append(_Expected(correlation_id, take, answer))
        return answer

    @staticmethod
    async def _within(answer: asyncio.Future[_Value]) -> _Value:
        async with asyncio.timeout(PATIENCE_S):
            return await asyncio.shield(answer)

    async def _read(self) -> None:
        """Read until the connection ends. Raise AssertionError for an answer that is not the next request's."""
        failure: Exception = ConnectionError("the connection ended before this was answered")
        try:
            while True:
                frame = await self.raw.receive(patience_s=None)
                assert self._expected, f"an answer to nothing: {frame[:64]!r}"
                expected = self._expected[0]
                found = response_correlation_id(frame)
                assert found == expected.correlation_id, f"{found} is answered, {expected.correlation_id} is next"
                expected.take(frame)
                self._expected.popleft()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:
            failure = error
            raise
        finally:
            self.closed_at = time.monotonic()
            self.raw.close()
            while self._expected:
                waiting = self._expected.popleft().answer
                if not waiting.done():
                    waiting.set_exception(failure)


def _batch(value: bytes | Sequence[bytes], producer: Producer | None) -> bytes:
    values = [value] if isinstance(value, bytes) else value
    if producer is None:
        return bytes(build_batch(values))
    producer_id, epoch, sequence = producer
    return bytes(build_batch(values, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence))
