"""A client that has closed its sending side, and admin tools, get Apache Kafka's answers.

The proxy gives the same answers.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import uuid
from collections.abc import Callable
from typing import Any

import kafka
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource
from kafka.admin import ConfigResource as NamedConfig
from kafka.admin import ConfigResourceType

from kproxy_codec import api_keys as keys
from kproxy_codec import control
from kproxy_codec.framing import request_header
from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.oracle import NODES, ONE, PATIENCE_S, RealSide
from tests.support.brokers.real_kafka import RealKafka, shared_classes
from tests.support.brokers.reference_broker import RawClient
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import port_of

REQUESTS = 20


@pytest.fixture(scope="module")
def topic(real_kafka: RealKafka) -> str:
    name = f"whole-{uuid.uuid4().hex[:10]}"
    RealSide(real_kafka).create(name)
    return name


# A client that has closed its sending side

MIXED = "all of them in turn"


def requests(topic: str) -> dict[str, tuple[int, int, dict[str, Any]]]:
    written = [{"name": topic, "partition_data": [{"index": 0, "records": ONE}]}]
    read = [{"topic": topic, "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]}]
    listed = [{"name": topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}]
    broker = [{"resource_type": 2, "resource_name": topic, "configuration_keys": None}]
    return {
        "Produce": (keys.PRODUCE, 9, {"acks": -1, "timeout_ms": 10_000, "topic_data": written}),
        "Fetch": (keys.FETCH, 11, {"max_wait_ms": 100, "min_bytes": 1, "max_bytes": 1000, "topics": read}),
        "ListOffsets": (keys.LIST_OFFSETS, 6, {"replica_id": -1, "topics": listed}),
        "Metadata": (keys.METADATA, 12, {"topics": [{"name": topic}], "allow_auto_topic_creation": False}),
        "ApiVersions": (keys.API_VERSIONS, 0, {}),
        "FindCoordinator": (keys.FIND_COORDINATOR, 4, {"coordinator_keys": [topic], "key_type": 0}),
        "InitProducerId": (keys.INIT_PRODUCER_ID, 4, {"transactional_id": None, "transaction_timeout_ms": 1000}),
        "DescribeConfigs": (keys.DESCRIBE_CONFIGS, 4, {"resources": broker}),
        "DescribeCluster": (keys.DESCRIBE_CLUSTER, 1, {"endpoint_type": 1}),
    }


def half_closed(port: int, sent: list[tuple[int, int, dict[str, Any]]]) -> list[int]:
    """The correlation ids of the answers after the client's end of sending, until the connection ends."""
    frames = []
    for correlation_id, (key, version, fields) in enumerate(sent, 1):
        body = control.encode_request(control.build_request(key, version, **fields))
        message = request_header(key, version, correlation_id, b"half") + body
        frames.append(struct.pack(">i", len(message)) + message)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(b"".join(frames))
        client.shutdown(socket.SHUT_WR)
        stream = client.makefile("rb")
        answered = []
        while head := stream.read(8):
            size, correlation_id = struct.unpack(">ii", head)
            assert len(stream.read(size - 4)) == size - 4
            answered.append(correlation_id)
        return answered


@pytest.mark.parametrize("what", [*requests(""), MIXED])
def test_half_closed_client_gets_answers_as_from_kafka(
    real_kafka: RealKafka, proxy: KproxyProcess, topic: str, what: str
) -> None:
    known = requests(topic)
    asked = [known[what]] * REQUESTS if what != MIXED else (list(known.values()) * REQUESTS)[:REQUESTS]
    everything = list(range(1, REQUESTS + 1))
    for port in (RealSide(real_kafka).port(NODES[0]), port_of(proxy)):
        assert half_closed(port, asked) == everything


# The broker that Metadata names


def virtual_node(proxy: KproxyProcess) -> str:
    with RawClient("127.0.0.1", port_of(proxy)) as client:
        [broker] = client.request(keys.METADATA, 12, topics=[]).brokers
    return str(broker.node_id)


def by_librdkafka(bootstrap: str, node: str) -> set[str]:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    resource = ConfigResource(ConfigResource.Type.BROKER, node)
    return set(admin.describe_configs([resource])[resource].result(PATIENCE_S))


def by_kafka_python(bootstrap: str, node: str) -> set[str]:
    admin = kafka.KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        asked = [NamedConfig(ConfigResourceType.BROKER, node)]
        described: dict[str, dict[str, Any]] = admin.describe_configs(asked, config_filter="all")
    finally:
        admin.close()
    return set(described["broker"][node])


def kafka_configs(bootstrap: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [java_executable(), *SHORT_JAVA, *shared_classes(), "-cp", kafka_classpath(), "kafka.admin.ConfigCommand"]
    return subprocess.run(
        [*command, "--bootstrap-server", bootstrap, "--entity-type", "brokers", *arguments],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("client", [by_librdkafka, by_kafka_python])
def test_clients_describe_the_virtual_broker(
    real_kafka: RealKafka, proxy: KproxyProcess, client: Callable[[str, str], set[str]]
) -> None:
    found = client(f"127.0.0.1:{port_of(proxy)}", virtual_node(proxy))
    assert {"log.retention.ms", "advertised.listeners"} <= found
    assert found == client(real_kafka.brokers[0].address, "1")


@pytest.mark.java
def test_kafka_configs_describes_virtual_brokers(real_kafka: RealKafka, proxy: KproxyProcess) -> None:
    bootstrap, node = f"127.0.0.1:{port_of(proxy)}", virtual_node(proxy)
    for named in ((), ("--entity-name", node)):
        told = kafka_configs(bootstrap, "--describe", "--all", *named)
        assert told.returncode == 0, told.stderr
        assert f"All configs for broker {node} are:" in told.stdout, told.stdout + told.stderr
        assert "log.retention.ms=-1" in told.stdout


@pytest.mark.java
def test_virtual_broker_cannot_be_altered(proxy: KproxyProcess) -> None:
    node = virtual_node(proxy)
    bootstrap = f"127.0.0.1:{port_of(proxy)}"
    told = kafka_configs(bootstrap, "--alter", "--entity-name", node, "--add-config", "log.cleaner.threads=1")
    assert told.returncode != 0
    assert "is the id of a proxy" in told.stderr, told.stdout + told.stderr
