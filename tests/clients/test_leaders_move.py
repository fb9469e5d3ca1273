"""Idempotent producers through `kproxy serve` to a real Apache Kafka cluster whose leaders move every second.

In `make test` a batch that overtakes another at a move is caught by the simulated worlds, and what Apache Kafka itself
does at a move by test_planned_moves and test_rolled_cluster, which read everything back.
"""

from __future__ import annotations

import os
import uuid
from itertools import takewhile

import pytest

from tests.support.brokers.kafka_jars import KAFKA_VERSION, client_classpath
from tests.support.brokers.leader_moves import check_numbered, moving_leaders, numbered, paced
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.java_client import run_java_client
from tests.support.clients.kafka_io import read_topic
from tests.support.clients.librdkafka_client import run_librdkafka
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import counted

# The first run of all downloads the jars.
pytestmark = [pytest.mark.java, pytest.mark.long, pytest.mark.timeout(900)]

# At least, and for as long as it takes until the leaders have moved so often.
RECORDS, RECORDS_PER_S = (200_000, 10_000) if os.environ.get("KPROXY_TEST_ALL") == "1" else (20_000, 3_000)
LEAST_MOVES = 6
READ_TIMEOUT_S = 60.0
# Of /metrics.
RETRIES = "kproxy_retries_total{"
OUT_OF_ORDER = 'kproxy_errors_total{api="PRODUCE",error="OUT_OF_ORDER_SEQUENCE_NUMBER",'


# Small batches, so that several of each partition are on their way when its leader moves. librdkafka puts one partition
# into a request, hence fewer of them.
@pytest.mark.parametrize(
    ("client", "partitions", "batches"),
    [
        pytest.param("java", 6, {"batch.size": 500}, id="java"),
        pytest.param(
            "librdkafka", 3, {"batch.num.messages": 50, "queue.buffering.max.messages": RECORDS}, id="librdkafka"
        ),
    ],
)
def test_leader_moves_keep_records_complete_and_in_order(
    proxy: KproxyProcess, real_kafka: RealKafka, client: str, partitions: int, batches: dict[str, int]
) -> None:
    topic = real_kafka.create_topic(f"moving-{uuid.uuid4().hex[:10]}", partitions)
    settings = {"bootstrap.servers": proxy.kafka, "enable.idempotence": "true", "acks": "all", "linger.ms": 2}
    # On a busy machine the last records wait for minutes behind the others.
    settings |= {"max.in.flight.requests.per.connection": 5, "delivery.timeout.ms": 600_000, **batches}
    retried, out_of_order = counted(proxy.admin, RETRIES), counted(proxy.admin, OUT_OF_ORDER)
    with moving_leaders(real_kafka, topic) as moves:
        endless = paced(numbered(1 << 40, partitions), RECORDS_PER_S)
        records = takewhile(lambda record: int(record.value) < RECORDS or moves.count < LEAST_MOVES, endless)
        if client == "java":
            run = run_java_client(client_classpath(KAFKA_VERSION), topic, records, settings)
        else:
            run = run_librdkafka(topic, records, settings)
    assert run.errors == {}
    assert run.sent >= RECORDS
    assert counted(proxy.admin, RETRIES) > retried, "the moves were to hit requests on their way"
    # Brokers and clients would put it right between them, by sending again: the proxy is not to need that.
    assert counted(proxy.admin, OUT_OF_ORDER) == out_of_order, "batches overtook others"
    for bootstrap in (real_kafka.bootstrap, proxy.kafka):
        read = read_topic(bootstrap, topic, partitions, run.sent, READ_TIMEOUT_S)
        check_numbered(read, run.acknowledged, run.sent, partitions)
