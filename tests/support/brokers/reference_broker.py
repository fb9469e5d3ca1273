"""Run reference brokers as child processes, and send them exactly what a test specifies.

`start_broker` runs a broker for one test; the fixture `cluster` shares three between the tests that only use them.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import control
from kproxy_codec.api_keys import API_VERSIONS, BIND_FENCES, CREATE_TOPICS, FETCH, METADATA, PRODUCE, is_flexible
from kproxy_codec.framing import request_header
from kproxy_codec.own import (
    BIND_FENCES_VERSION,
    BoundFence,
    FenceBinding,
    encode_bind_fences_request,
    parse_bind_fences_response,
)
from kproxy_codec.produce import TOPIC_IDS_FROM
from tests.support.processes import forked

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
# For a broker whose lease no test waits for: a machine that stops for seconds must not end it.
LASTING_TTL_S = 60


class Closed(Exception):
    """The broker closed the connection."""


class BrokerProcess:
    """One broker; its log goes to `{data_dir}.stderr`."""

    def __init__(self, node_id: int, data_dir: Path, etcd: str, prefix: str, **options: Any) -> None:
        self.node_id = node_id
        self.prefix = prefix
        self.data_dir = data_dir
        self.arguments = [
            str(node_id),
            str(data_dir),
            etcd,
            prefix,
            *(f"{key}={value}" for key, value in options.items()),
        ]
        self.stderr_path = data_dir.with_name(f"{data_dir.name}.stderr")
        self.environ: Mapping[str, str] = os.environ
        self.host, self.port = "127.0.0.1", 0
        self.admin = ""
        self._process: forked.Started | None = None

    def start(self, *, wait: bool = True) -> Self:
        with self.stderr_path.open("a") as stderr:
            self._process = forked.start(
                "tests.support.brokers.broker_main",
                self.arguments,
                stdout=None,
                stderr=stderr.fileno(),
                environ=self.environ,
                directory=forked.ROOT,
                text=True,
            )
        return self.wait_ready() if wait else self

    @property
    def process(self) -> forked.Started:
        assert self._process is not None, "not started"
        return self._process

    def wait_ready(self) -> Self:
        """Wait for the ready line and take the address from it."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            ready = selector.select(READY_TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        assert line.startswith("ready kafka="), f"{line!r}; {self.log()[-2000:]}"
        fields = dict(field.partition("=")[::2] for field in line.split()[1:])
        host, _, port = fields["kafka"].rpartition(":")
        self.host, self.port, self.admin = host, int(port), fields.get("admin", "")
        return self

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self.stderr_path.read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(END_TIMEOUT_S)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit status."""
        self.process.terminate()
        return self.process.wait(END_TIMEOUT_S)

    def stop(self) -> None:
        """Ensure that the process has ended, whatever its state."""
        if self.running:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)
            self.kill()
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def client(self) -> RawClient:
        return RawClient(self.host, self.port)


@contextmanager
def start_broker(node_id: int, data_dir: Path, etcd: str, prefix: str, **options: Any) -> Iterator[BrokerProcess]:
    """A broker that serves, until the block ends."""
    broker = BrokerProcess(node_id, data_dir, etcd, prefix, **options)
    try:
        yield broker.start()
    finally:
        broker.stop()


@contextmanager
def start_brokers(
    node_ids: Sequence[int], directory: Path, etcd: str, prefix: str, **options: Any
) -> Iterator[list[BrokerProcess]]:
    """Brokers that start side by side and serve, until the block ends."""
    brokers = [BrokerProcess(node_id, directory / str(node_id), etcd, prefix, **options) for node_id in node_ids]
    try:
        for broker in brokers:
            broker.start(wait=False)
        yield [broker.wait_ready() for broker in brokers]
    finally:
        for broker in brokers:
            broker.stop()


class RawClient:
    """One connection; kafka-python's codecs encode requests and decode answers."""

    def __init__(self, host: str, port: int, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._correlation_id = 0
        self._expected: list[tuple[int, int, int]] = []
        self._topic_ids: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    def close(self) -> None:
        self._socket.close()

    def request(self, api_key: int, api_version: int, **fields: Any) -> control.Message:
        """Send one request; return its answer. Raises Closed."""
        self.send(api_key, api_version, **fields)
        return self.receive()

    def send(self, api_key: int, api_version: int, *, answered: bool = True, **fields: Any) -> None:
        """Send a request whose answer is received later, in order."""
        body = control.encode_request(control.build_request(api_key, api_version, **fields))
        self._correlation_id += 1
        if answered:
            self._expected.append((api_key, api_version, self._correlation_id))
        self.send_bytes(request_header(api_key, api_version, self._correlation_id, b"raw") + body)

    def send_bytes(self, message: bytes) -> None:
        """Send a frame with these bytes in it."""
        self._socket.sendall(struct.pack(">i", len(message)) + message)

    def send_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> control.Message:
        """The answer to the oldest unanswered request. Raises Closed."""
        api_key, api_version, correlation_id = self._expected.pop(0)
        frame = self.receive_frame()
        assert struct.unpack_from(">i", frame)[0] == correlation_id, "an answer to another request"
        tagged = is_flexible(api_key, api_version) and api_key != API_VERSIONS
        return control.decode_response(api_key, api_version, frame[5 if tagged else 4 :])

    def receive_frame(self) -> bytes:
        return self._exactly(struct.unpack(">i", self._exactly(4))[0])

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                more = self._socket.recv(count - len(data))
            except ConnectionError as error:
                raise Closed(str(error)) from error
            if not more:
                raise Closed("end of stream")
            data += more
        return bytes(data)

    def silent_for(self, seconds: float) -> bool:
        """Whether nothing arrives for `seconds`."""
        self._socket.settimeout(seconds)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self._socket.settimeout(self._timeout_s)

    def is_closed(self) -> bool:
        """Whether the broker closes the connection within the answer timeout, without a byte before."""
        try:
            return self._socket.recv(1) == b""
        except ConnectionError:
            return True

    # The most frequent requests

    def produce(self, topic: str, partition: int, records: bytes | bytearray, **options: Any) -> Any:
        """The partition's result; None for acks=0. `options` are those of `send_produce`."""
        self.send_produce(topic, partition, records, **options)
        return self.produced() if options.get("answered", True) else None

    def send_produce(
        self,
        topic: str,
        partition: int,
        records: bytes | bytearray,
        *,
        version: int = 9,
        acks: int = -1,
        answered: bool = True,
        timeout_ms: int = 30_000,
    ) -> None:
        named: dict[str, Any] = {"name": topic}
        if version >= TOPIC_IDS_FROM:
            named = {"topic_id": self.topic_id(topic)}
        data = [{**named, "partition_data": [{"index": partition, "records": bytes(records)}]}]
        self.send(PRODUCE, version, acks=acks, timeout_ms=timeout_ms, topic_data=data, answered=answered)

    def produced(self) -> Any:
        return self.receive().responses[0].partition_responses[0]

    def bind_fences(self, *bindings: FenceBinding) -> list[BoundFence]:
        """Bind fences; return the outcome of each."""
        self.send_bind_fences(*bindings)
        return self.bound()

    def send_bind_fences(self, *bindings: FenceBinding) -> None:
        self._correlation_id += 1
        self._expected.append((BIND_FENCES, BIND_FENCES_VERSION, self._correlation_id))
        header = request_header(BIND_FENCES, BIND_FENCES_VERSION, self._correlation_id, b"raw")
        self.send_bytes(header + encode_bind_fences_request(bindings))

    def bound(self) -> list[BoundFence]:
        api_key, _, correlation_id = self._expected.pop(0)
        assert api_key == BIND_FENCES, "another answer comes first"
        frame = self.receive_frame()
        assert struct.unpack_from(">i", frame)[0] == correlation_id, "an answer to another request"
        return list(parse_bind_fences_response(struct.pack(">i", len(frame)) + frame))

    def metadata(self, *topics: str, version: int = 12, create: bool = True) -> control.Message:
        fields: dict[str, Any] = {"topics": [{"name": topic} for topic in topics]}
        if version >= 4:
            fields["allow_auto_topic_creation"] = create
        return self.request(METADATA, version, **fields)

    def topic_id(self, topic: str) -> Any:
        """The topic's id from the broker, requested once per topic."""
        if topic not in self._topic_ids:
            self._topic_ids[topic] = self.metadata(topic).topics[0].topic_id
        return self._topic_ids[topic]

    def leaders(self, topic: str) -> dict[int, int]:
        """Partition -> leader id, of one topic."""
        found = self.metadata(topic).topics[0]
        return {each.partition_index: each.leader_id for each in found.partitions}


def send_fetch(
    client: RawClient,
    topic: str,
    offset: int = 0,
    *,
    partition: int = 0,
    version: int = 11,
    max_bytes: int = 1 << 20,
    **fields: Any,
) -> None:
    asked = {"partition": partition, "fetch_offset": offset, "partition_max_bytes": max_bytes}
    defaults: dict[str, Any] = {"max_wait_ms": 100, "min_bytes": 1, "max_bytes": 50 << 20}
    client.send(FETCH, version, **(defaults | fields), topics=[{"topic": topic, "partitions": [asked]}])


def fetch(client: RawClient, topic: str, offset: int = 0, **fields: Any) -> Any:
    """The partition's result; `fields` as in `send_fetch`."""
    send_fetch(client, topic, offset, **fields)
    return client.receive().responses[0].partitions[0]


def create_topic(
    client: RawClient, topic: str, replicas: Sequence[Sequence[int]], configs: Mapping[str, object] | None = None
) -> Any:
    """Create a topic with these brokers for each partition; its result."""
    assignments = [{"partition_index": index, "broker_ids": [*each]} for index, each in enumerate(replicas)]
    named = [{"name": name, "value": str(value)} for name, value in (configs or {}).items()]
    asked = {"name": topic, "num_partitions": -1, "replication_factor": -1}
    topics = [{**asked, "assignments": assignments, "configs": named}]
    return client.request(CREATE_TOPICS, 7, topics=topics, timeout_ms=10_000).topics[0]


class Cluster:
    """Brokers 1, 2 and 3."""

    def __init__(self, brokers: list[BrokerProcess]) -> None:
        self.brokers = brokers

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    def leader(self, topic: str, partition: int = 0) -> BrokerProcess:
        """The broker that leads a partition; the topic is created if need be."""
        with self.brokers[0].client() as client:
            return self.brokers[client.leaders(topic)[partition] - 1]


@pytest.fixture(scope="session")
def cluster(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers for the whole run; topics created without a number get three partitions."""
    directory, prefix = tmp_path_factory.mktemp("brokers"), f"/cluster-{os.getpid()}"
    options = {"num_partitions": 3, "lease_ttl_s": LASTING_TTL_S}
    with start_brokers((1, 2, 3), directory, etcd.endpoint, prefix, **options) as brokers:
        yield Cluster(brokers)
