"""Both jobs on a real Spark cluster: a master, a worker, and executors that have only the files sent to them."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pyarrow.parquet
import pytest

from kproxy.pipeline.audit.report_facts import UNPROVEN
from tests.support.clients.java import require_java
from tests.support.clients.kafka_io import read_topic
from tests.support.clients.spark_cluster import bare_python, spark_cluster
from tests.support.processes.dev import KproxyProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

ROWS = 200
# One application for both: an executor takes seconds to start. The jobs take the session that is there.
APPLICATION = """
import sys

from kproxy.cli import main
from kproxy.demo.run import audit_when_proven
from kproxy.pipeline.audit.run import AuditJob
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.session import SessionOptions, open_session

master, bootstrap, topic, directory = sys.argv[1:]
settings = {
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
}
ingest = ["--from", f"json:{directory}/in", "--schema", "id INT, name STRING", "--key", "name", "--partitions", "2"]
ingest += ["--topic", topic, "--checkpoint", f"{directory}/checkpoint", "--on-new-columns", "add"]
copy = ["--from", f"kafka:{topic}", "--key", "key", "--value-column", "value", "--partitions", "2"]
copy += ["--topic", f"{topic}-copy", "--checkpoint", f"{directory}/copy"]
audit = ["--topics", topic, "--output", f"{directory}/tables", "--engine", "spark"]
with open_session(SessionOptions("both jobs", master=master, settings=settings)):
    status = main(["pipeline", "ingest", "--bootstrap", bootstrap, *ingest])
    status = status or main(["pipeline", "ingest", "--bootstrap", bootstrap, *copy])
    job = AuditJob(bootstrap=bootstrap, trail=parse_trail("topic"), topics=(topic,))
    assert audit_when_proven(job, timeout_s=120).verdict.clean
    sys.exit(status or main(["pipeline", "audit", "--bootstrap", bootstrap, *audit]))
"""


@pytest.mark.long
def test_both_jobs_run_with_only_spark_and_pyarrow(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    topic = f"cluster-{uuid.uuid4().hex[:10]}"
    (tmp_path / "in").mkdir()
    lines = [f'{{"id":{number},"name":"name {number % 7}","new":{number}.50}}' for number in range(ROWS)]
    (tmp_path / "in" / "rows.json").write_text("\n".join(lines) + "\n")
    python = bare_python(tmp_path)
    with spark_cluster(require_java(), tmp_path, python) as master:
        done = subprocess.run(
            [sys.executable, "-P", "-c", APPLICATION, master, dev_cluster.kafka, topic, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=540,
            check=False,
            env={**os.environ, "PYSPARK_PYTHON": str(python)},
        )

    # Executors have no crc32c: their batches are unchecked.
    assert done.returncode == UNPROVEN, done.stderr[-3000:]
    assert f"Wrote {ROWS} rows to topic {topic}" in done.stderr
    written, copied = (
        sorted(
            (each.key or b"", each.value or b"", each.timestamp_ms)
            for each in read_topic(dev_cluster.kafka, name, 2, ROWS)
        )
        for name in (topic, f"{topic}-copy")
    )
    # A class that executors got from the driver wrote these.
    assert {value for _, value, _ in written} == {line.encode() for line in lines}
    assert copied == written
    assert done.stdout.startswith("Unproven. "), done.stdout
    assert "not checked against checksums" in done.stdout
    partitions = pyarrow.parquet.read_table(tmp_path / "tables" / "partitions").to_pylist()
    assert sum(each["present"] for each in partitions) == ROWS
