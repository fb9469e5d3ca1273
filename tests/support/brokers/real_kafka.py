"""Run a real Apache Kafka cluster: KRaft, every node is broker and controller, on free ports of this machine.

`real_kafka` is one cluster of three for the whole run; tests use different topics, and a test that takes a broker down
brings it back.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import kafka
import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from kproxy.pipeline.java import user_cache_dir
from tests.support.brokers.kafka_jars import KAFKA_VERSION, kafka_classpath
from tests.support.clients.java import java_executable
from tests.support.processes.ports import free_port, free_ports
from tests.support.waiting import wait_for

CLUSTER_ID = "a3Byb3h5LXRlc3RzLTAwMQ"
# Long, because Java takes minutes if other processes use most of two cores.
START_TIMEOUT_S = 400.0
ADMIN_TIMEOUT_S = 60.0
# Settings for a small machine: a simple collector, few threads, and little memory.
_JAVA_OPTIONS = ("-Xms96m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:ActiveProcessorCount=2")
RACKS = {
    "broker.rack": "rack-{node}",
    "replica.selector.class": "org.apache.kafka.common.replica.RackAwareReplicaSelector",
}
_CLASSES = "classes.jsa"
_CHECKPOINT = "bootstrap.checkpoint"
# The port listens before the broker serves.
_STARTED = "Kafka Server started"
_LOG4J = """\
status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %m (%c)%n%throwable
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""
# Of Kafka before 4.0.
_LOG4J1 = """\
log4j.rootLogger=INFO, console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %m (%c)%n
"""


class RealBroker:
    """One node; its log goes to `{directory}/log`. `version` is that of Kafka, from the next start on."""

    def __init__(
        self, node_id: int, port: int, directory: Path, options: Mapping[str, str], java_options: Sequence[str]
    ) -> None:
        self.node_id = node_id
        self.version = KAFKA_VERSION
        self.port = port
        self.log_path = directory / "log"
        self._data = Path(options["log.dirs"])
        self._properties = directory / "server.properties"
        self._log4j = directory / "log4j2.properties"
        self._log4j1 = directory / "log4j.properties"
        self._java_options = java_options
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True)
        self._log4j.write_text(_LOG4J)
        self._log4j1.write_text(_LOG4J1)
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in options.items()))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_directory(self, topic: str, partition: int) -> Path:
        """The directory of a partition's segments on this broker."""
        return self._data / f"{topic}-{partition}"

    def stored(self, topic: str, partition: int) -> bytes:
        """The bytes of a partition on this broker's disk; it must not have removed any of them."""
        segments = sorted(self.log_directory(topic, partition).glob("*.log"))
        return b"".join(segment.read_bytes() for segment in segments)

    def format(self) -> Path:
        """Format the data directory for a broker to start on, by Kafka's own tool; return the checkpoint in it."""
        done = subprocess.run(
            [*self._java(), "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(self._properties)],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return self._data / _CHECKPOINT

    def format_as(self, checkpoint: Path) -> None:
        """Format the data directory with another one's checkpoint, because a run of the tool takes 1 s of CPU."""
        self._data.mkdir(parents=True)
        shutil.copyfile(checkpoint, self._data / _CHECKPOINT)
        # Kafka's own ids never begin with a dash.
        directory_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
        ids = {"version": 1, "cluster.id": CLUSTER_ID, "node.id": self.node_id, "directory.id": directory_id}
        (self._data / "meta.properties").write_text("".join(f"{name}={each}\n" for name, each in ids.items()))

    def start(self, *java_options: str, wait: bool = True) -> None:
        """Start, and wait until it serves; the options are only for this start."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._java(*java_options), "kafka.Kafka", str(self._properties)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        assert self._process is not None, "not started"
        deadline = time.monotonic() + START_TIMEOUT_S
        while _STARTED not in self.log():
            assert self._process.poll() is None, f"broker {self.node_id} ended: {self.log()[-3000:]}"
            assert time.monotonic() < deadline, f"broker {self.node_id} has not started: {self.log()[-3000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9; no effect if the broker is not running."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(ADMIN_TIMEOUT_S)

    def terminate(self) -> None:
        """Send SIGTERM, at which the broker hands over its leaderships and ends; wait for the end."""
        assert self._process is not None, "not started"
        self._process.terminate()
        self._process.wait(START_TIMEOUT_S)

    def move(self) -> None:
        """From the next start on, clients connect to another port of this machine."""
        moved = free_port()
        before, self.port = self.port, moved
        properties = self._properties.read_text()
        self._properties.write_text(
            properties.replace(f"PLAINTEXT://127.0.0.1:{before}", f"PLAINTEXT://127.0.0.1:{moved}")
        )

    def reconfigure(self, before: str, after: str) -> None:
        """Replace a part of the configuration, from the next start on."""
        properties = self._properties.read_text()
        assert before in properties
        self._properties.write_text(properties.replace(before, after))

    def pause(self) -> None:
        """Suspend the process: it keeps its connections and does nothing."""
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGCONT)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _java(self, *java_options: str) -> list[str]:
        return [
            java_executable(),
            *_JAVA_OPTIONS,
            *self._java_options,
            *java_options,
            f"-Dlog4j2.configurationFile={self._log4j}",
            f"-Dlog4j.configuration=file:{self._log4j1}",
            "-cp",
            kafka_classpath(self.version),
        ]


class RealKafka:
    """The nodes of one cluster."""

    def __init__(self, brokers: list[RealBroker]) -> None:
        self.brokers = brokers
        self._admin: AdminClient | None = None

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.address for broker in self.brokers)

    def admin(self) -> AdminClient:
        """A client that talks to the brokers themselves."""
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        return self._admin

    def create_topic(self, name: str, partitions: int, *, leader: int | None = None, **config: str) -> str:
        """Create a topic with a replica on every node, and wait until each partition has a leader with its log.

        If given, `leader` leads all partitions.
        """
        named = {k.replace("_", "."): v for k, v in config.items()}
        if leader is None:
            topic = NewTopic(name, partitions, len(self.brokers), config=named)
        else:
            replicas = sorted((broker.node_id for broker in self.brokers), key=lambda node_id: node_id != leader)
            topic = NewTopic(name, partitions, replica_assignment=[replicas] * partitions, config=named)
        self.admin().create_topics([topic])[name].result(ADMIN_TIMEOUT_S)
        deadline = time.monotonic() + ADMIN_TIMEOUT_S
        while not self.takes_writes(name, partitions):
            assert time.monotonic() < deadline, f"{name} has no leaders: {self.leaders(name)}"
            time.sleep(0.05)
        return name

    def takes_writes(self, topic: str, partitions: int) -> bool:
        """Whether all partitions have leaders, and these have their logs.

        A broker accepts the second batch of an unknown producer. If the first batch came before the log was there, it
        then has no place, and is refused until the producer gives up.
        """
        try:
            return len(self.leaders(topic)) == partitions and len(self.end_offsets(topic, partitions)) == partitions
        except KafkaException:
            return False

    def end_offsets(
        self, topic: str, partitions: int, level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED
    ) -> dict[int, int]:
        """The leaders' offsets by partition: the last stable offset for READ_COMMITTED. Raises KafkaException."""
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(topic, index): latest for index in range(partitions)}
        ends = self.admin().list_offsets(asked, isolation_level=level)
        return {place.partition: int(end.result(ADMIN_TIMEOUT_S).offset) for place, end in ends.items()}

    def wait_until_stable(self, topic: str, partitions: int) -> None:
        """Wait until no transaction is open in the topic.

        A commit returns when the coordinator has stored it. The partitions' markers follow some milliseconds later, or
        seconds on a busy machine, and until then a reader of committed records sees none of the transaction.
        """
        wait_for(lambda: self._is_stable(topic, partitions), ADMIN_TIMEOUT_S, f"{topic} has no open transactions")

    def _is_stable(self, topic: str, partitions: int) -> bool:
        try:
            return self.end_offsets(topic, partitions, IsolationLevel.READ_COMMITTED) == self.end_offsets(
                topic, partitions
            )
        except KafkaException as error:
            # The client may know no leaders, and does not ask again: another one does.
            if error.args[0].code() != KafkaError._NOENT:
                raise
            self._admin = None
            return False

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete records as retention does: the log begins at that offset from here on."""
        place = TopicPartition(topic, partition, before)
        self.admin().delete_records([place])[place].result(ADMIN_TIMEOUT_S)

    def delete_topic(self, name: str) -> None:
        self.admin().delete_topics([name])[name].result(ADMIN_TIMEOUT_S)

    def move_leaders(self, topic: str) -> None:
        """Move every partition's leadership to the next of its replicas; the data stays in place."""
        found = self.admin().list_topics(topic, timeout=ADMIN_TIMEOUT_S).topics[topic].partitions
        rotated = {
            kafka.TopicPartition(topic, index): [*partition.replicas[1:], partition.replicas[0]]
            for index, partition in found.items()
        }
        admin = kafka.KafkaAdminClient(bootstrap_servers=self.bootstrap)
        try:
            refused = {place: error for place, error in admin.alter_partition_reassignments(rotated).items() if error}
            assert refused == {}
            wanted = {place.partition: replicas[0] for place, replicas in rotated.items()}
            deadline = time.monotonic() + ADMIN_TIMEOUT_S
            while self.leaders(topic) != wanted:
                assert time.monotonic() < deadline, f"{topic}: {self.leaders(topic)} instead of {wanted}"
                admin.elect_leaders(0, {topic: sorted(wanted)}, raise_errors=False)
        finally:
            admin.close()

    def leaders(self, topic: str) -> dict[int, int]:
        """The leaders by partition, of those that have one."""
        found = self.admin().list_topics(topic, timeout=ADMIN_TIMEOUT_S).topics[topic].partitions
        return {index: partition.leader for index, partition in found.items() if partition.leader >= 0}

    def wait_until_in_sync(self, topics: Sequence[str], timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every node has all of these topics again."""
        deadline = time.monotonic() + timeout_s
        while any(self.replicas_in_sync(topic) < len(self.brokers) for topic in topics):
            assert time.monotonic() < deadline, "a broker is not in sync again"
            time.sleep(0.1)

    def replicas_in_sync(self, topic: str) -> int:
        """The smallest number over the partitions of a topic."""
        found = self.admin().list_topics(topic, timeout=ADMIN_TIMEOUT_S).topics[topic].partitions
        return min(len(partition.isrs) for partition in found.values())


@contextmanager
def start_real_kafka(
    directory: Path,
    nodes: int,
    *,
    first_id: int = 1,
    host: str = "127.0.0.1",
    more_listeners: Mapping[str, int] = MappingProxyType({}),
    more: Mapping[str, object] = MappingProxyType({}),
    java_options: Sequence[str] = (),
    version: str = KAFKA_VERSION,
) -> Iterator[RealKafka]:
    """A cluster of `nodes` that serves, until the block ends.

    A single node may have `more_listeners`, by name and port at `host`. `more` are further options of the brokers, in
    which {node} is a broker's id; `java_options` those of their Java. The data directories are formatted by `version`.
    """
    started_before = _started_before()
    ids = range(first_id, first_id + nodes)
    brokers = _brokers(directory, ids, host, more_listeners, more, [*shared_classes(), *java_options])
    try:
        for broker in brokers:
            broker.version = version
            if version == KAFKA_VERSION:
                broker.format_as(started_before / _CHECKPOINT)
            else:
                broker.format()
        for broker in brokers:
            broker.start(wait=False)
        for broker in brokers:
            broker.wait_ready()
        yield RealKafka(brokers)
    finally:
        for broker in brokers:
            broker.kill()


def shared_classes() -> list[str]:
    """Options of a Java with Kafka's jars first in its class path: the archive has their classes parsed and verified.

    That saves a broker 2 s of CPU, a tool half a second. Java ignores what does not fit.
    """
    classes = _started_before() / _CLASSES
    return [f"-XX:SharedArchiveFile={classes}"] if classes.exists() else []


@functools.cache
def _started_before() -> Path:
    """A directory in the user's cache with files from one broker that was started and stopped to make them.

    It has Java's archive of the broker's classes, if this Java writes one, and the checkpoint that every data directory
    begins with.
    """
    java, jars = Path(java_executable()).resolve(), Path(kafka_classpath()).parent
    versions = [(str(each), each.stat().st_mtime_ns) for each in (java, jars)]
    digest = hashlib.sha256(repr((versions, _JAVA_OPTIONS)).encode()).hexdigest()[:16]
    kept = user_cache_dir() / "kafka" / f"started-{digest}"
    with (jars.parent / "started.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.is_dir():
            with tempfile.TemporaryDirectory(dir=jars.parent, prefix=".starting-") as name:
                aside = Path(name)
                (aside / "kept").mkdir()
                (broker,) = _brokers(aside / "broker", [1], "127.0.0.1", {}, {}, [])
                shutil.copyfile(broker.format(), aside / "kept" / _CHECKPOINT)
                try:
                    broker.start(f"-XX:ArchiveClassesAtExit={aside / 'kept' / _CLASSES}")
                    broker.terminate()
                finally:
                    broker.kill()
                (aside / "kept").rename(kept)
    return kept


def _brokers(
    directory: Path,
    ids: Sequence[int],
    host: str,
    more_listeners: Mapping[str, int],
    more: Mapping[str, object],
    java_options: Sequence[str],
) -> list[RealBroker]:
    """The brokers of a cluster, before formatting."""
    nodes = len(ids)
    ports = free_ports(2 * nodes)
    voters = ",".join(f"{number}@127.0.0.1:{port}" for number, port in zip(ids, ports[nodes:], strict=True))
    brokers = []
    for number, kafka_port, controller_port in zip(ids, ports[:nodes], ports[nodes:], strict=True):
        listeners = {"PLAINTEXT": kafka_port, "CONTROLLER": controller_port}
        addresses = {name: f"127.0.0.1:{port}" for name, port in listeners.items()}
        addresses |= {name: f"{host}:{port}" for name, port in more_listeners.items()}
        options = {
            "process.roles": "broker,controller",
            "node.id": number,
            "controller.quorum.voters": voters,
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(f"{name}://{address}" for name, address in addresses.items()),
            "log.dirs": directory / str(number) / "data",
            "default.replication.factor": nodes,
            "min.insync.replicas": max(1, nodes - 1),
            "num.partitions": 3,
            "offsets.topic.replication.factor": nodes,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": nodes,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "num.network.threads": 2,
            "num.io.threads": 4,
            # Tests write records of past years; Kafka removes those after a week, at 30 s and then every 5 minutes.
            "log.retention.ms": -1,
            "log.cleaner.dedupe.buffer.size": 8 << 20,
            # By default the cleaner looks for work every 15 s.
            "log.cleaner.backoff.ms": 500,
            # Longer than a busy machine stops a controller; otherwise brokers would be fenced as they start.
            "broker.session.timeout.ms": 6000,
            "broker.heartbeat.interval.ms": 500,
            "replica.lag.time.max.ms": 5000,
            # A replica that asks its next leader too early would wait for a second.
            "replica.fetch.backoff.ms": 100,
            "group.initial.rebalance.delay.ms": 0,
            **more,
        }
        text = {key: str(value).replace("{node}", str(number)) for key, value in options.items()}
        brokers.append(RealBroker(number, kafka_port, directory / str(number), text, java_options))
    return brokers


@pytest.fixture(scope="session")
def real_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKafka]:
    """Three brokers for the whole run, each topic on all of them; an acknowledged batch is on at least two.

    Each broker is a rack of its own, and sends readers that name another rack there.
    """
    with start_real_kafka(tmp_path_factory.mktemp("kafka"), 3, more=RACKS) as cluster:
        yield cluster
