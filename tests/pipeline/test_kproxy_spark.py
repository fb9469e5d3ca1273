"""`kproxy_spark`, the face of the jobs for programs: rows written, audits read, logs and trails as tables."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException

import kproxy_spark
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.data_sources import LOG_SCHEMA, TRAIL_SCHEMA, shared
from kproxy.pipeline.ingest.job import start
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.trail.rows import encode_page
from tests.support.audit.forged_trail import ForgedTrail
from tests.support.clients.kafka_io import create_topic, produce, read_topic
from tests.support.pages import blocks
from tests.support.processes.dev import KproxyProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PARTITIONS = 2
V1_SINKS = "spark.sql.sources.useV1SourceList"


@pytest.fixture
def topic() -> str:
    return f"spark-{uuid.uuid4().hex[:10]}"


def values(kproxy: KproxyProcess, topic: str, at_least: int) -> dict[bytes | None, list[Any]]:
    found: dict[bytes | None, list[Any]] = {}
    for record in read_topic(kproxy.kafka, topic, PARTITIONS, at_least):
        found.setdefault(record.key, []).append(json.loads(record.value or b"null"))
    return found


def test_frame_is_written_by_ingest_rules(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    before = spark.conf.get(V1_SINKS)
    rows = spark.range(0, 40, 1, 3).selectExpr("id", "id % 4 as k", "if(id = 7, double('nan'), id / 2) as half")
    options = {"topic": topic, "bootstrap_servers": dev_cluster.kafka, "key": "k"}
    with pytest.raises(kproxy_spark.StartupError, match=r"there is no topic .*--partitions"):
        kproxy_spark.start(rows, **options)
    options["partitions"] = PARTITIONS
    with pytest.raises(kproxy_spark.SparkFailed, match=r'the row \{"id":7.* NaN or infinite.*give --dead-letters'):
        kproxy_spark.start(rows.where("id = 7"), **options)
    done = kproxy_spark.start(rows, dead_letters=f"topic:dead-{topic}", **options)
    assert (done.rows, done.written, done.dead) == (40, 39, {"not finite": 1})
    found = values(dev_cluster, topic, 39)
    assert {key: [value["id"] for value in each] for key, each in found.items()} == {
        b"%d" % k: [n for n in range(k, 40, 4) if n != 7] for k in range(4)
    }
    assert found[b"1"][0] == {"id": 1, "k": 1, "half": 0.5}
    # The program's session is as it was.
    assert spark.conf.get(V1_SINKS) == before


def test_stream_goes_on_from_its_checkpoint(spark: Any, dev_cluster: KproxyProcess, topic: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    stream = spark.readStream.text(str(tmp_path / "in"))
    options = {"topic": topic, "bootstrap_servers": dev_cluster.kafka, "partitions": PARTITIONS}
    with pytest.raises(kproxy_spark.StartupError, match="needs a checkpoint"):
        kproxy_spark.start(stream, **options)
    done: list[Any] = []
    for lines in ("one\ntwo\n", "three\n"):
        (tmp_path / "in" / lines[:3]).write_text(lines)
        query = kproxy_spark.start(stream, checkpoint=str(tmp_path / "ck"), on_batch=done.append, **options)
        assert query.awaitTermination(240)
    assert [(each.batch, each.written) for each in done] == [(0, 2), (1, 1)]
    assert sorted(value["value"] for value in values(dev_cluster, topic, 3)[None]) == ["one", "three", "two"]
    with pytest.raises(kproxy_spark.StartupError, match="belongs to a job that writes to topic"):
        kproxy_spark.start(stream, checkpoint=str(tmp_path / "ck"), **{**options, "topic": f"{topic}-other"})


@pytest.mark.long
def test_any_source_of_spark_is_ingested(spark: Any, dev_cluster: KproxyProcess, topic: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\ntwo\n")
    options = IngestOptions(
        f"spark:text:{tmp_path}/in",
        str(tmp_path / "ck"),
        topic=topic,
        bootstrap=dev_cluster.kafka,
        partitions=PARTITIONS,
        headers=(("row", "_kproxy_row"),),
    )
    assert start(spark, options).awaitTermination(240)
    found = {value: dict(headers)["row"] for _, _, _, value, headers in _placed(dev_cluster, topic, 2)}
    assert {value: row.rpartition(b"/")[2] for value, row in found.items()} == {
        b'{"value":"one"}': b"a.txt#0:0",
        b'{"value":"two"}': b"a.txt#0:1",
    }
    # A source without files: its rows have no names.
    log = replace(
        options,
        source="spark:kproxy_log",
        checkpoint=str(tmp_path / "log"),
        source_options={"kafka.bootstrap.servers": dev_cluster.kafka, "subscribe": topic},
        topic=f"log-{topic}",
        key=("partition",),
    )
    assert start(spark, log).awaitTermination(240)
    batches = values(dev_cluster, f"log-{topic}", 1)
    assert sum(each["record_count"] for found in batches.values() for each in found) == 2


def _placed(kproxy: KproxyProcess, topic: str, at_least: int) -> list[Any]:
    found = read_topic(kproxy.kafka, topic, PARTITIONS, at_least)
    return [(each.partition, each.offset, each.key, each.value, each.headers) for each in found]


# tests/pipeline/test_audit_engines.py compares all tables of both engines.
@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.long)])
def test_audit_is_an_object_on_either_engine(
    request: pytest.FixtureRequest, dev_cluster: KproxyProcess, topic: str, engine: str
) -> None:
    trail = ForgedTrail("f" * 16)
    produce(dev_cluster.kafka, topic, [b"value"] * 30)
    produce(dev_cluster.kafka, f"trail-{topic}", [encode_page([trail.begin(), trail.acked(topic, 0, 33), trail.end()])])
    options = {"bootstrap_servers": dev_cluster.kafka, "trail": f"topic:trail-{topic}", "topics": [topic]}
    found = kproxy_spark.audit(request.getfixturevalue("spark") if engine == "spark" else None, **options)
    assert (found.verdict, found.exit_status) == ("Loss", 1)
    assert (found.counts.acked, found.counts.present, found.counts.lost) == (33, 30, 3)
    assert [(each.kind, each.topic, each.first_offset, each.last_offset) for each in found.findings] == [
        ("lost", topic, 30, 32)
    ]
    assert found.extents[topic, 0] == (0, 30)


def test_logs_and_trails_are_tables(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    trail = ForgedTrail("f" * 16)
    create_topic(dev_cluster.kafka, topic, PARTITIONS)
    produce(dev_cluster.kafka, topic, [b"value"] * 30, partition=1)
    produce(dev_cluster.kafka, f"trail-{topic}", [encode_page([trail.begin(), trail.acked(topic, 0, 33)])])
    kproxy_spark.register(spark)
    where = {"kafka.bootstrap.servers": dev_cluster.kafka}
    log = spark.read.format("kproxy_log").options(**where, subscribe=topic).load()
    assert log.columns == LOG_SCHEMA.names
    rows = log.collect()
    assert {(row.topic, row.partition, row.crc_ok) for row in rows} == {(topic, 1, True)}
    assert sum(row.record_count for row in rows) == 30
    trails = spark.read.format("kproxy_trail").options(**where, subscribe=f"trail-{topic}").load()
    assert trails.columns == TRAIL_SCHEMA.names
    begin, acked = trails.orderBy("sequence").collect()
    assert (begin.kind, acked.topic, acked.spans, acked.shipped_at > 0) == ("begin", topic, [0, 33], True)
    # An empty partition alone, and options that are wrong.
    create_topic(dev_cluster.kafka, f"empty-{topic}", 1)
    assert spark.read.format("kproxy_log").options(**where, subscribe=f"empty-{topic}").load().collect() == []
    for options, said in (
        ({}, "are needed"),
        ({**where, "subscribe": "nowhere"}, "There is no topic nowhere"),
        ({**where, "subscribe": topic, "from": "x"}, "Unknown option from; expected one of"),
        ({**where, "subscribe": topic, "maxOffsetsPerTrigger": "0"}, "Invalid maxOffsetsPerTrigger 0; expected"),
    ):
        with pytest.raises(Exception, match=said):
            spark.read.format("kproxy_log").options(**options).load().collect()


@pytest.mark.long
def test_log_stream_has_each_batch_once(spark: Any, dev_cluster: KproxyProcess, topic: str, tmp_path: Path) -> None:
    create_topic(dev_cluster.kafka, topic, PARTITIONS)
    kproxy_spark.register(spark)
    options = {"kafka.bootstrap.servers": dev_cluster.kafka, "subscribe": topic}

    def run() -> None:
        rows = spark.readStream.format("kproxy_log").options(**options).load()
        sink = rows.select("partition", "base_offset", "record_count").writeStream.format("json")
        query = sink.option("checkpointLocation", f"{tmp_path}/ck").trigger(availableNow=True).start(f"{tmp_path}/out")
        assert query.awaitTermination(240)

    for _ in range(2):
        for partition in range(PARTITIONS):
            produce(dev_cluster.kafka, topic, [b"value"] * 10, partition=partition)
        run()
    # Nothing is new.
    run()
    found = spark.read.json(f"{tmp_path}/out").collect()
    offsets = sorted((row.partition, row.base_offset + n) for row in found for n in range(row.record_count))
    assert offsets == [(partition, n) for partition in range(PARTITIONS) for n in range(20)]


def test_micro_batch_has_at_most_given_offsets(
    spark: Any, dev_cluster: KproxyProcess, topic: str, tmp_path: Path
) -> None:
    create_topic(dev_cluster.kafka, topic, PARTITIONS)
    for each in [b"value"] * 12:
        produce(dev_cluster.kafka, topic, [each], partition=1)
    kproxy_spark.register(spark)
    options = {"kafka.bootstrap.servers": dev_cluster.kafka, "subscribe": topic, "maxOffsetsPerTrigger": "5"}
    rows = spark.readStream.format("kproxy_log").options(**options).load()
    sink = rows.writeStream.format("noop").option("checkpointLocation", f"{tmp_path}/ck").trigger(availableNow=True)
    query = sink.start()
    try:
        if spark.version < "4.2":
            with pytest.raises(PySparkException, match=r"maxOffsetsPerTrigger needs Spark 4\.2"):
                query.awaitTermination(240)
            return
        assert query.awaitTermination(240)
        assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [5, 5, 2]
    finally:
        query.stop()


@pytest.mark.parametrize(
    ("most", "ends"), [(100, [10, 30, 7]), (40, [10, 30, 7]), (39, [10, 30, 7]), (10, [3, 8, 7]), (1, [1, 1, 7])]
)
def test_partitions_share_a_micro_batch(most: int, ends: list[int]) -> None:
    wanted = {TopicPartition("t", index): end for index, end in enumerate([10, 30, 7])}
    starts = dict.fromkeys(wanted, 0) | {TopicPartition("t", 2): 7}
    assert [*shared(starts, wanted, most).values()] == ends
    # A topic that was created again is not taken for one that has come to its end.
    starts[TopicPartition("t", 2)] = 8
    assert shared(starts, wanted, 1)[TopicPartition("t", 2)] == 7


def test_columns_of_tables_are_documented() -> None:
    text = "\n".join(block.text for block in blocks("spark.md", "text"))
    for schema in (LOG_SCHEMA, TRAIL_SCHEMA):
        assert " ".join(schema.names) in " ".join(text.split())
