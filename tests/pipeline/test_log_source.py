"""The formats "kproxy_log" and "kproxy_bounds" in a real Spark, through a real proxy.

Also on executors that have nothing of this project but the archive that it packs for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from importlib import util
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from codec.partitioned import TOPIC_ID_BYTES
from kproxy.pipeline.audit import log_source
from kproxy.pipeline.audit.executors import package_archive
from kproxy.pipeline.audit.log_connection import LogReadFailed
from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, LOG_SCHEMA
from kproxy.pipeline.topic import create_topic
from tests.support.dev import KproxyProcess
from tests.support.java import require_java
from tests.support.kafka_io import TIMEOUT_S, produce
from tests.support.ports import free_port

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

RECORDS = [40, 0, 25]


@pytest.fixture(scope="module")
def topic(dev_cluster: KproxyProcess) -> str:
    """Batches of five records; an empty partition between two others."""
    name = f"source-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, len(RECORDS))
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": dev_cluster.kafka, "enable.idempotence": True, "linger.ms": 1000}
    )
    for first in range(0, max(RECORDS), 5):
        for partition, records in enumerate(RECORDS):
            for _ in range(5 if first < records else 0):
                producer.produce(name, b"value", partition=partition)
        assert producer.flush(TIMEOUT_S) == 0
    return name


def test_each_batch_is_a_row_whatever_task_reads_it(spark: Any, dev_cluster: KproxyProcess, topic: str) -> None:
    ends = log_source.fix_ends(dev_cluster.kafka, topics=[topic])
    assert ends == f'{{"{topic}":{{"0":40,"1":0,"2":25}}}}'
    produce(dev_cluster.kafka, topic, [b"later"], partition=1)
    # Pieces of 12 offsets: their borders lie within batches.
    log = log_source.read_log(spark, dev_cluster.kafka, topics=[topic], end_offsets=ends, offsets_per_partition=12)
    assert log.schema == LOG_SCHEMA
    rows = log.collect()
    assert log.rdd.getNumPartitions() == 7
    found = sorted((row.partition, row.base_offset, row.last_offset, row.record_count) for row in rows)
    assert found == [(p, n, n + 4, 5) for p, records in enumerate(RECORDS) for n in range(0, records, 5)]
    assert {(row.topic, row.producer_epoch, row.is_control, row.is_transactional) for row in rows} == {
        (topic, 0, False, False)
    }
    assert all(row.base_sequence == row.base_offset and row.crc_ok and row.bytes > 61 for row in rows)
    assert len({row.producer_id for row in rows}) == 1


def test_where_logs_begin_and_end_is_asked_when_it_is_read(spark: Any, dev_cluster: KproxyProcess) -> None:
    name = f"bounds-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, 2)
    bounds = log_source.read_bounds(spark, dev_cluster.kafka, pattern=f"{name}.*", compacted=[name])
    assert bounds.schema == BOUNDS_SCHEMA
    produce(dev_cluster.kafka, name, [b"value"] * 3, partition=1)
    rows = sorted(map(tuple, bounds.collect()))
    topic_id = rows[0][-1]
    assert rows == [(name, 0, 0, 0, True, topic_id), (name, 1, 0, 3, True, topic_id)]
    assert len(bytes.fromhex(topic_id)) == TOPIC_ID_BYTES


def test_a_topic_that_is_not_there_is_named_by_the_driver_and_by_spark(spark: Any, dev_cluster: KproxyProcess) -> None:
    from pyspark.errors import AnalysisException

    said = f"There is no topic missing at {dev_cluster.kafka}."
    with pytest.raises(LogReadFailed, match=f"^{said}$"):
        log_source.fix_ends(dev_cluster.kafka, topics=["missing"])
    with pytest.raises(AnalysisException, match=said):
        log_source.read_log(spark, dev_cluster.kafka, topics=["missing"]).collect()


def test_options_are_judged_before_spark_sees_them(spark: Any) -> None:
    with pytest.raises(LogReadFailed, match="Say what to read"):
        log_source.read_log(spark, f"127.0.0.1:{free_port()}")


# The driver finds this package as ever; its workers and executors are started without any installed package but those
# that Spark needs for a source in Python, and the archive.
CLUSTER_JOB = """
import sys
from pathlib import Path

import kproxy.pipeline.spark as spark
from kproxy.pipeline.audit import log_source
from kproxy.pipeline.java import find_java

directory, archive, python, bootstrap, topic = sys.argv[1:]
settings = {"spark.master": "local-cluster[1,1,512]", "spark.executor.memory": "512m", "spark.submit.pyFiles": archive}
driver = spark.SparkDriver(find_java(), Path(directory), settings=settings)
spark._PACKAGE_ROOT = Path(directory)
try:
    driver.start()
    driver.session.sparkContext.pythonExec = python
    log = log_source.read_log(driver.session, bootstrap, topics=[topic])
    print(sorted((row.partition, row.base_offset, row.crc_ok) for row in log.collect()))
    print(sorted(map(tuple, log_source.read_bounds(driver.session, bootstrap, topics=[topic]).collect())))
finally:
    driver.stop()
"""


def test_executors_need_the_archive_and_what_spark_needs(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    require_java()
    name = f"cluster-{uuid.uuid4().hex[:10]}"
    create_topic(dev_cluster.kafka, name, 1)
    produce(dev_cluster.kafka, name, [b"value"] * 3)
    archive = package_archive(tmp_path / "archive")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CLUSTER_JOB,
            tmp_path / "spark",
            archive,
            bare_python(tmp_path),
            dev_cluster.kafka,
            name,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": repository()},
    )
    # Without crc32c nobody has looked at the CRC.
    log, bounds = done.stdout.splitlines() or ("", "")
    assert log == "[(0, 0, None)]", done.stderr[-3000:]
    assert bounds.startswith(f"[('{name}', 0, 0, 3, False, '")


def repository() -> str:
    return str(Path(log_source.__file__).parents[3])


def bare_python(directory: Path) -> Path:
    """This interpreter without its installed packages, but for what Spark wants of its workers."""
    packages = directory / "packages"
    packages.mkdir()
    for name in ("pyarrow", "numpy", "pandas"):
        spec = util.find_spec(name)
        if spec is not None and spec.origin is not None:
            root = Path(spec.origin).parent
            for found in [root, *root.parent.glob(f"{name}.libs")]:
                (packages / found.name).symlink_to(found)
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python
