"""An ingest on a real Spark, through a real proxy: each source, and the handling of rows that do not fit."""

from __future__ import annotations

import io
import json
import os
import threading
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import confluent_kafka
import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.job import Stop, run, start
from kproxy.pipeline.ingest.options import IngestOptions
from kproxy.pipeline.ingest.progress import Metrics, serving
from kproxy.pipeline.progress import Report
from kproxy.pipeline.spark import SparkFailed
from tests.support.brokers.real_kafka import RealKafka, start_real_kafka
from tests.support.clients.kafka_io import Placed, create_topic, read_topic
from tests.support.processes.dev import KproxyProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

PARTITIONS = 3
SCHEMA = "id INT, name STRING, n INT"


@dataclass
class Job:
    """An ingest to a topic of its own; each `run` is a start of the command without the command line."""

    spark: Any
    options: IngestOptions
    metrics: Metrics
    said: str = ""

    def run(self, **changes: Any) -> str:
        """Run the job to its end; return its output."""
        return self.until(lambda _: False, **changes)

    def until(self, enough: Callable[[float], bool], **changes: Any) -> str:
        """Run to the end, or until `enough` holds for the rows written so far."""
        said, stop = io.StringIO(), Stop()
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                if enough(self.count("rows")):
                    stop.ask()
                    return

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            with Report(progress=Console(file=said, width=200)) as report:
                run(self.spark, replace(self.options, **changes), report, self.metrics, stop)
        finally:
            ended.set()
            watching.join()
            self.said = said.getvalue()
        return self.said

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kproxy_ingest_{name}_total", labels) or 0.0

    def written(self, topic: str | None = None, at_least: int = 1) -> list[Placed]:
        return read_topic(self.options.bootstrap, topic or str(self.options.topic), PARTITIONS, at_least)


@pytest.fixture
def job(spark: Any, dev_cluster: KproxyProcess, tmp_path: Path) -> Job:
    (tmp_path / "in").mkdir()
    options = IngestOptions(
        f"csv:{tmp_path / 'in'}",
        str(tmp_path / "checkpoint"),
        topic=f"ingest-{uuid.uuid4().hex[:8]}",
        bootstrap=dev_cluster.kafka,
        partitions=PARTITIONS,
    )
    return Job(spark, options, Metrics())


@pytest.fixture(scope="module")
def other_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKafka]:
    """One broker; another lane has the three of `real_kafka`."""
    with start_real_kafka(tmp_path_factory.mktemp("kafka"), 1) as kafka:
        yield kafka


def values(records: list[Placed]) -> list[Any]:
    return [json.loads(record.value or b"null") for record in records]


def header(record: Placed, name: str) -> bytes | None:
    return dict(record.headers)[name]


def write_csv(directory: Path, name: str, *lines: str) -> None:
    # Files must be complete when they appear in the source's directory.
    aside = directory.parent / name
    aside.write_text("\n".join(["id,name,n", *lines, ""]))
    aside.rename(directory / name)


def test_files_are_ingested_once_with_first_inferred_schema(job: Job, tmp_path: Path) -> None:
    job.options = replace(job.options, key=("name",), headers=(("row", "_kproxy_row"), ("batch", "_kproxy_batch")))
    write_csv(tmp_path / "in", "one.csv", "1,a,10", "2,b,20", "3,a,30", "4,,40")
    said = job.run()
    assert "The schema, inferred once from the files that are there now" in said
    assert "id INT, name STRING, n INT" in said
    assert "Wrote 4 rows" in said

    # Read by itself, this file would make `n` a text.
    write_csv(tmp_path / "in", "two.csv", "5,a,fifty", "6,b,60")
    letters = tmp_path / "dead"
    said = job.run(dead_letters=f"json:{letters}")
    assert "The schema that was inferred when the job first started: id INT, name STRING, n INT" in said
    assert "Wrote 1 row to" in said
    assert "1 dead letter (1 corrupt) went to json:" in said

    records = job.written(at_least=5)
    assert sorted(value["id"] for value in values(records)) == [1, 2, 3, 4, 6]
    by_id = {json.loads(record.value or b"")["id"]: record for record in records}
    assert by_id[4].value == b'{"id":4,"name":null,"n":40}'
    assert {number: record.key for number, record in by_id.items()} == {1: b"a", 2: b"b", 3: b"a", 4: None, 6: b"b"}
    assert by_id[1].partition == by_id[3].partition
    assert by_id[1].offset < by_id[3].offset
    assert (header(by_id[3], "row") or b"").endswith(b"/in/one.csv#0:2")
    job_id = json.loads((tmp_path / "checkpoint" / "kproxy-ingest.json").read_text())["job_id"]
    assert {number: header(record, "batch") for number, record in by_id.items()} == {
        1: f"{job_id}/0".encode(),
        2: f"{job_id}/0".encode(),
        3: f"{job_id}/0".encode(),
        4: f"{job_id}/0".encode(),
        6: f"{job_id}/1".encode(),
    }
    (letter,) = job.spark.read.json(str(letters)).collect()
    assert (letter["reason"], letter["record"], letter["micro_batch"]) == ("corrupt", "5,a,fifty", 1)
    assert letter["row"].endswith("/in/two.csv#0:0")


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        pytest.param("json", lambda table, path: table.write.json(path), marks=pytest.mark.long),
        ("parquet", lambda table, path: table.write.parquet(path)),
    ],
)
def test_json_and_parquet_are_ingested_like_csv(
    job: Job, tmp_path: Path, kind: str, write: Callable[[Any, str], None]
) -> None:
    table = job.spark.range(100).selectExpr("id", "named_struct('deep', cast(id as string)) as inner", "id % 7 as k")
    write(table.coalesce(2), str(tmp_path / "in" / "part"))
    source = f"{kind}:{tmp_path / 'in' / 'part'}"
    job.run(source=source, key=("k",), value=("id", "inner"), headers=(("kind", f"'{kind}'"),))
    records = job.written(at_least=100)
    expected = [{"id": number, "inner": {"deep": str(number)}} for number in range(100)]
    assert sorted(values(records), key=lambda value: value["id"]) == expected
    assert {header(record, "kind") for record in records} == {kind.encode()}
    assert len({(record.key, record.partition) for record in records}) == 7


@pytest.mark.long
def test_few_files_make_a_micro_batch(job: Job, tmp_path: Path) -> None:
    for number in range(5):
        # The names are in the reverse order of the times.
        write_csv(tmp_path / "in", f"{9 - number}.csv", f"{number},a,{number}")
        os.utime(tmp_path / "in" / f"{9 - number}.csv", (number + 1, number + 1))
    with serving(job.metrics, "127.0.0.1:0") as url:
        said = job.run(schema=SCHEMA, max_files_per_trigger=2, key=("name",))
        page = urllib.request.urlopen(url).read().decode()
    assert "Wrote 5 rows to" in said
    assert "in 3 micro-batches" in said
    assert "kproxy_ingest_rows_total 5.0" in page
    assert 'kproxy_ingest_behind{unit="files"} 0.0' in page
    assert "kproxy_ingest_micro_batch 2.0" in page
    assert [value["id"] for value in values(job.written(at_least=5))] == [0, 1, 2, 3, 4], (
        "not in the order of the files"
    )


def test_file_of_any_age_is_read_or_named(job: Job, tmp_path: Path) -> None:
    write_csv(tmp_path / "in", "new.csv", "1,a,1")
    job.run(schema=SCHEMA)
    write_csv(tmp_path / "in", "of old.csv", "2,a,1")
    # A copy that keeps its time, as `cp -p` makes it.
    os.utime(tmp_path / "in" / "of old.csv", (1_500_000_000, 1_500_000_000))
    with pytest.raises(SparkFailed, match=r"^1 of the files .* not read, .*: file:/.*/in/of old\.csv: see whether"):
        job.run(source_options={"maxFileAge": "1d"})
    assert "Wrote 1 row to" in job.run()
    assert sorted(value["id"] for value in values(job.written(at_least=2))) == [1, 2]


def test_small_files_share_tasks_and_keep_their_numbers(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default, micro-batches have this many for each of the two cores.
    monkeypatch.setattr("kproxy.pipeline.ingest.sources.FILES_PER_CORE", 10)
    # More files than Spark lists without a job.
    files = 40
    for number in range(files):
        write_csv(tmp_path / "in", f"{number:02}.csv", f"{number},a,0", f"{number},b,x", f"{number},a,2")
    letters = str(tmp_path / "dead")
    headers = (("row", "_kproxy_row"),)
    query = start(
        job.spark,
        replace(job.options, schema=SCHEMA, key=("id",), headers=headers, dead_letters=f"json:{letters}"),
    )
    assert query.awaitTermination(240)
    tracker = job.spark.sparkContext.statusTracker()
    stages = [
        stage for each in tracker.getJobIdsForGroup(str(query.runId)) for stage in tracker.getJobInfo(each).stageIds
    ]
    tasks = [tracker.getStageInfo(stage).numTasks for stage in set(stages)]
    assert tasks
    assert max(tasks) < files // 2, f"Spark's stages had {tasks} tasks"
    assert len([*(tmp_path / "checkpoint" / "commits").glob("[0-9]*")]) == 2

    found = {}
    for record in job.written(at_least=2 * files):
        value = json.loads(record.value or b"")
        found[(header(record, "row") or b"").rpartition(b"/")[2].decode()] = (value["id"], value["n"])
    assert found == {f"{n:02}.csv#0:{k}": (n, k) for n in range(files) for k in (0, 2)}
    dead = {row["row"].rpartition("/")[2]: row["record"] for row in job.spark.read.json(letters).collect()}
    assert dead == {f"{n:02}.csv#0:1": f"{n},b,x" for n in range(files)}


def test_unwritable_rows_go_to_dead_letters_by_reason(job: Job, tmp_path: Path) -> None:
    dead = f"dead-{uuid.uuid4().hex[:8]}"
    write_csv(tmp_path / "in", "a.csv", "1,a,1", "2,a,NaN", "x,b,3", f"4,{'long' * 500},4", "5,b,5,6")
    said = job.run(
        schema="id INT, name STRING, n DOUBLE",
        select=("id", "upper(name) AS name", "n"),
        key=("name",),
        max_message_bytes=1_000,
        dead_letters=f"topic:{dead}",
    )
    assert values(job.written()) == [{"id": 1, "name": "A", "n": 1.0}]
    letters = sorted(values(job.written(dead, 4)), key=lambda letter: str(letter["row"]))
    assert [letter["reason"] for letter in letters] == ["not finite", "corrupt", "too large", "corrupt"]
    assert [letter["record_cut"] for letter in letters] == [False, False, True, False]
    assert json.loads(letters[0]["record"]) == {"id": 2, "name": "a", "n": "NaN"}
    assert letters[1]["record"] == "x,b,3"
    assert letters[2]["bytes"] > 4_000
    assert "4 dead letters (2 corrupt, 1 not finite, 1 too large) went to topic:" in said
    assert {reason: job.count("dead_letters", reason=reason) for reason in ("corrupt", "not finite", "too large")} == {
        "corrupt": 2,
        "not finite": 1,
        "too large": 1,
    }


def test_repeated_micro_batch_replaces_its_dead_letters(job: Job, tmp_path: Path) -> None:
    letters = tmp_path / "dead"
    job.options = replace(
        job.options,
        schema=SCHEMA,
        key=("name",),
        headers=(("row", "_kproxy_row"), ("batch", "_kproxy_batch")),
        dead_letters=f"json:{letters}",
    )
    write_csv(tmp_path / "in", "a.csv", "1,a,1", "2,b,x", "3,c,3")
    job.run()
    # The state of a job that was killed after its write, before Spark noted the commit.
    for name in ("0", ".0.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    job.run(tasks=1)
    records = job.written(at_least=4)
    names = Counter((header(record, "row"), header(record, "batch"), record.value) for record in records)
    assert sorted(names.values()) == [2, 2]
    assert [row["record"] for row in job.spark.read.json(str(letters)).collect()] == ["2,b,x"]


@pytest.mark.long
def test_job_without_dead_letters_ends_early(job: Job, tmp_path: Path) -> None:
    job.options = replace(job.options, schema=SCHEMA, key=("name",))
    write_csv(tmp_path / "in", "a.csv", "1,a,1", "2,b,x")
    with pytest.raises(SparkFailed, match=r"a\.csv#0:1 cannot be written, as it cannot be parsed: give --dead-letters"):
        job.run()
    job.run(dead_letters=f"json:{tmp_path / 'dead'}")
    assert values(job.written()) == [{"id": 1, "name": "a", "n": 1}]


@pytest.mark.long
def test_unknown_fields_end_job_or_become_dead_letters(job: Job, tmp_path: Path) -> None:
    job.options = replace(job.options, source=f"json:{tmp_path / 'in'}")
    (tmp_path / "in" / "a.json").write_text('{"id":1}\n')
    job.run()
    (tmp_path / "in" / "b.json").write_text('{"id":2}\n{"ID":3,"name":"n"}\n')
    letters = f"json:{tmp_path / 'dead'}"
    for changes, way_out in (({}, "--dead-letters"), ({"on_new_columns": "fail", "dead_letters": letters}, "--schema")):
        lacks = rf"b\.json#0:1 cannot be written, as it has what the schema lacks \(ID, name\): give (a )?{way_out}"
        with pytest.raises(SparkFailed, match=lacks):
            job.run(**changes)
    assert "1 dead letter (1 new column) went to" in job.run(dead_letters=letters)
    (letter,) = job.spark.read.json(str(tmp_path / "dead")).collect()
    assert letter["record"] == '{"ID":3,"name":"n"}'
    assert {value["id"] for value in values(job.written(at_least=2))} == {1, 2}


@pytest.mark.long
def test_unknown_parquet_columns_end_the_job(job: Job, tmp_path: Path) -> None:
    job.options = replace(job.options, source=f"parquet:{tmp_path / 'in'}")

    def write(select: str) -> None:
        job.spark.sql(f"select {select}").coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))

    write("1L as id, named_struct('a', 1) as deep")
    job.run()
    # The data's types, case and columns may differ; they are read by the schema.
    write("2 as ID")
    assert "Wrote 1 row" in job.run()
    write("3L as id, named_struct('a', 1, 'b', 2) as deep, 4 as more")
    lacks = r"the file file:.*\.parquet has columns that the schema lacks \(deep\.b, more\): give a --schema"
    with pytest.raises(SparkFailed, match=lacks):
        job.run()
    job.run(on_new_columns="ignore")
    assert sorted(value["id"] for value in values(job.written(at_least=3))) == [1, 2, 3]


@pytest.mark.long
def test_parquet_types_may_drift_within_the_schema(job: Job, tmp_path: Path) -> None:
    for name, kind in (("a", pyarrow.int32()), ("b", pyarrow.int64())):
        table = pyarrow.table({"id": pyarrow.array([1], kind), "k": [name]})
        pyarrow.parquet.write_table(table, tmp_path / "in" / f"{name}.parquet")
    job.options = replace(job.options, source=f"parquet:{tmp_path / 'in'}")
    assert "Wrote 2 rows" in job.run(schema="id LONG, k STRING")
    with pytest.raises(SparkFailed, match=r"the file file:.*/a\.parquet has columns that the schema lacks \(k\)"):
        job.run(schema="id LONG", checkpoint=f"{job.options.checkpoint}-narrow")


def test_unreadable_parquet_types_are_named_or_left_out(job: Job, tmp_path: Path) -> None:
    instant = 1_767_312_000_123_456_789
    columns = {
        "at": pyarrow.array([instant], pyarrow.timestamp("ns", "UTC")),
        "time": pyarrow.array([1], pyarrow.time64("us")),
        "uuid": pyarrow.array([b"0123456789abcdef"], pyarrow.uuid()),
        "half": pyarrow.array([1.5], pyarrow.float16()),
    }
    pyarrow.parquet.write_table(pyarrow.table({"id": [7], **columns}), tmp_path / "in" / "a.parquet")
    job.options = replace(job.options, source=f"parquet:{tmp_path / 'in'}")
    with pytest.raises(StartupError, match=r"has a column of a type that Spark does not read \(.+\): give a --schema"):
        job.run()
    given = "id LONG, at LONG"
    with pytest.raises(SparkFailed, match=r"has a column of a type that Spark does not read \(.+\): write the file"):
        job.run(schema=given)
    job.run(schema=given, on_new_columns="ignore")
    assert values(job.written()) == [{"id": 7, "at": instant}]


def test_counts_are_right_without_sparks_metrics(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.pipeline.ingest.sink._observed", lambda _: None)
    write_csv(tmp_path / "in", "a.csv", "1,a,1", "2,b,x", "3,c,3")
    job.run(schema=SCHEMA, dead_letters=f"json:{tmp_path / 'dead'}")
    assert (job.count("rows"), job.count("dead_letters", reason="corrupt")) == (2, 1)


@pytest.mark.long
def test_topic_of_another_cluster_is_copied_verbatim(job: Job, other_kafka: RealKafka) -> None:
    topic = other_kafka.create_topic(f"from-{uuid.uuid4().hex[:8]}", 2)
    sent = [(n % 2, f"k{n % 5}".encode(), bytes([n, 0xFF]) if n % 10 else None) for n in range(40)]
    producer = confluent_kafka.Producer({"bootstrap.servers": other_kafka.bootstrap})
    for number, (partition, key, value) in enumerate(sent):
        producer.produce(topic, value, key, partition, headers=[("n", str(number).encode()), ("none", None)])
    assert producer.flush(30) == 0

    source = {"source": f"kafka:{topic}", "from_bootstrap": other_kafka.bootstrap, "max_offsets_per_trigger": 15}
    headers = (("*", "headers"), ("from", "_kproxy_row"))
    changes = {**source, "key": ("key",), "value_column": "value", "headers": headers}
    said = job.run(**changes)
    assert "Wrote 40 rows" in said
    assert "in 3 micro-batches" in said
    assert job.metrics.registry.get_sample_value("kproxy_ingest_behind", {"unit": "records"}) == 0
    records = job.written(at_least=40)
    assert Counter((record.key, record.value) for record in records) == Counter((key, value) for _, key, value in sent)
    # A key's records were in one or both partitions of the source; each partition's order is kept.
    for key in {key for _, key, _ in sent}:
        for partition in (0, 1):
            copied = [
                int(header(record, "n") or b"")
                for record in records
                if record.key == key and (header(record, "from") or b"").startswith(f"{topic}/{partition}/".encode())
            ]
            assert copied == sorted(copied)
            assert copied == [n for n, (where, theirs, _) in enumerate(sent) if where == partition and theirs == key]
    assert {name for record in records for name, _ in record.headers} == {"n", "none", "from"}

    create_topic(job.options.bootstrap, topic, 2)
    with pytest.raises(StartupError, match="with another Kafka cluster behind --from-bootstrap"):
        job.run(**{**changes, "from_bootstrap": job.options.bootstrap})


@pytest.mark.long
def test_copied_records_keep_timestamps_and_skip_aborted(job: Job, other_kafka: RealKafka) -> None:
    topic = other_kafka.create_topic(f"from-{uuid.uuid4().hex[:8]}", PARTITIONS)
    settings = {"bootstrap.servers": other_kafka.bootstrap, "transactional.id": topic}
    producer = confluent_kafka.Producer(settings)
    producer.init_transactions(30)
    for aborted in (True, False):
        producer.begin_transaction()
        for number in range(30):
            value = b"aborted" if aborted else b"%d" % number
            at_ms = 1_600_000_000_000 + number
            producer.produce(topic, value, b"k%d" % (number % 5), number % PARTITIONS, timestamp=at_ms)
        assert producer.flush(30) == 0
        if aborted:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    # The job reads once, up to the last stable offset that it finds.
    other_kafka.wait_until_stable(topic, PARTITIONS)

    source = {"source": f"kafka:{topic}", "from_bootstrap": other_kafka.bootstrap}
    assert_copied(job, **source)
    create_topic(job.options.bootstrap, f"{topic}-narrow", 1)
    narrow = {"topic": f"{topic}-narrow", "checkpoint": f"{job.options.checkpoint}-narrow", "keep_partitions": True}
    with pytest.raises(StartupError, match=r"has 3 partitions and topic .*-narrow has 1"):
        job.run(**source, **narrow)


def assert_copied(job: Job, **source: str) -> None:
    """Check for 30 records: value `n`, key `k{n % 5}`, rising milliseconds, partition `n % 3`."""
    job.run(**source, key=("key",), value_column="value", keep_partitions=True)
    records = job.written(at_least=30)
    for partition in range(PARTITIONS):
        copied = [
            (each.key, each.value, each.timestamp_ms, each.headers) for each in records if each.partition == partition
        ]
        assert copied == [
            (b"k%d" % (n % 5), b"%d" % n, 1_600_000_000_000 + n, ()) for n in range(partition, 30, PARTITIONS)
        ]


def test_json_values_of_a_topic_become_columns(job: Job) -> None:
    topic = f"json-{uuid.uuid4().hex[:8]}"
    producer = confluent_kafka.Producer({"bootstrap.servers": job.options.bootstrap})
    create_topic(job.options.bootstrap, topic, 1)
    for value in ('{"where": "%s", "n": 1}', '{"where": "%s", "n": 2}', "{", '{"where": "no topic", "n": 3}'):
        producer.produce(topic, value.replace("%s", str(job.options.topic)), b"key")
    assert producer.flush(30) == 0
    # The test makes this topic, because jobs do not make topics that a column names.
    create_topic(job.options.bootstrap, str(job.options.topic), PARTITIONS)
    said = job.run(
        source=f"kafka:{topic}",
        schema="`where` STRING, n INT",
        topic=None,
        topic_column="where",
        key=("kafka.key",),
        value=("n",),
        dead_letters=f"topic:dead-{uuid.uuid4().hex[:8]}",
    )
    assert "2 dead letters (1 corrupt, 1 no topic)" in said
    assert [(record.key, record.value) for record in job.written(at_least=2)] == [
        (b"key", b'{"n":1}'),
        (b"key", b'{"n":2}'),
    ]


def test_numbers_are_written_until_stop_and_continue(job: Job) -> None:
    job.options = replace(job.options, source="rate", rows_per_second=200, trigger="200ms", key=("value",))
    said = job.until(lambda rows: rows > 0)
    assert "Stopped before the end: start it again with the same --checkpoint to go on." in said
    first = int(job.count("rows"))
    job.until(lambda rows: rows > first)
    numbers = [value["value"] for value in values(job.written(at_least=int(job.count("rows"))))]
    assert sorted(numbers) == list(range(int(job.count("rows")))), "stopped between micro-batches nothing comes twice"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": ("nme",)}, r"there is no column nme: the source has id, name, n\."),
        ({"value": ("id", "x")}, "there is no column x"),
        (
            {"headers": (("h", "x"),)},
            r"--header h=x is not valid SQL for these rows \(\[UNRESOLVED.*has id, name, n",
        ),
        ({"select": ("id", "n +")}, r"--select is not valid SQL for these rows \(.*PARSE_SYNTAX_ERROR"),
        ({"topic": None, "topic_column": "x"}, "there is no column x"),
        (
            {"topic": "no-such-topic", "partitions": None},
            "there is no topic no-such-topic at --bootstrap .* --partitions N",
        ),
        ({"bootstrap": "127.0.0.1:1"}, "nothing answers at --bootstrap 127.0.0.1:1"),
        ({"schema": "id INT,, n"}, "--schema cannot be read"),
        ({"schema": "_kproxy_row INT"}, "names that begin with _kproxy_ are reserved"),
        ({"source": "kafka:no-such-topic"}, "there is no topic no-such-topic at --from-bootstrap"),
        ({"source": "parquet:EMPTY"}, "there are no files yet to infer a schema from: give --schema"),
        ({"source": "csv:NOWHERE", "schema": "id INT"}, "there is nothing at .*/nowhere: make the directory"),
        ({"source": "csv:NOWHERE"}, "there are no files yet to infer a schema from: give --schema"),
    ],
)
def test_failed_start_explains_and_frees_the_checkpoint(
    job: Job, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write_csv(tmp_path / "in", "a.csv", "1,a,1")
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": "empty", "NOWHERE": "nowhere"}
    kind, _, place = changes.get("source", "").partition(":")
    if place in places:
        changes = {**changes, "source": f"{kind}:{tmp_path / places[place]}"}
    with pytest.raises(StartupError, match=said):
        job.run(**changes)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.long
def test_checkpoint_belongs_to_one_job(job: Job, spark: Any, tmp_path: Path) -> None:
    write_csv(tmp_path / "in", "a.csv", "1,a,1")
    job.run()
    for changes, said in (
        ({"topic": "another"}, "belongs to a job that writes to topic ingest-.*, not topic another"),
        ({"source": f"csv:{tmp_path}"}, "belongs to a job that reads csv files in file:.*/in, not csv"),
        ({"source": "rate"}, "not numbers, 100 a second"),
    ):
        with pytest.raises(StartupError, match=said):
            job.run(**changes)
    foreign = tmp_path / "foreign"
    stream = spark.readStream.format("rate").load().writeStream.format("noop")
    query = stream.option("checkpointLocation", str(foreign)).start()
    query.stop()
    with pytest.raises(StartupError, match="belongs to another Spark job"):
        job.run(checkpoint=str(foreign))


@pytest.mark.long
def test_mismatching_header_ends_job_without_mixing_columns(job: Job, tmp_path: Path) -> None:
    write_csv(tmp_path / "in", "a.csv", "1,a,1")
    with pytest.raises(
        SparkFailed, match=r"the header of file:.*a\.csv does not name the columns of the schema in their order"
    ):
        job.run(schema="id INT, n INT, name STRING")
