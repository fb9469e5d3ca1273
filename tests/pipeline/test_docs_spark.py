"""The page about Spark: its programs write and read, by Spark and through a proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kproxy.pipeline.spark import kafka_connector
from tests.support.pages import blocks
from tests.support.processes.dev import KproxyProcess, dev_arguments, serving
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.spark, pytest.mark.java, pytest.mark.timeout(600)]


@pytest.mark.long
def test_programs_of_the_page_write_and_read(spark: Any, tmp_path: Path) -> None:
    batch, stream, read, write, write_stream, audit, tables = blocks("spark.md", "python")
    names: dict[str, Any] = {"spark": spark}

    def run(text: str, dev: KproxyProcess) -> None:
        exec(text.replace("127.0.0.1:9092", dev.kafka).replace("/tmp/", f"{tmp_path}/"), names)

    with serving(dev_arguments(tmp_path / "data"), tmp_path / "stderr") as dev:
        run(batch.text, dev)
        run(read.text, dev)
        rows = names["rows"].collect()
        assert sorted(int(row["value"]) for row in rows) == list(range(1000))
        run(stream.text, dev)
        query = names["query"]
        try:
            wait_for(lambda: any(each["numInputRows"] for each in query.recentProgress), what="rows are written")
        finally:
            query.stop()
        run(write.text, dev)
        assert names["done"].written == 1000
        (tmp_path / "payments-in").mkdir()
        (tmp_path / "payments-in" / "a.json").write_text('{"id":1,"amount":2.5}\n{"id":2}\n')
        run(write_stream.text, dev)
        run(tables.text, dev)
        assert names["log"].groupBy().sum("record_count").collect() == [(1002,)]
        run(audit.text, dev)
        assert sum(end for _, end in names["audited"].extents.values()) == 1002
        assert names["audited"].counts.lost == 0


def test_connector_is_named_as_spark_needs_it() -> None:
    [submit] = blocks("spark.md", "sh")
    assert kafka_connector().rpartition(":")[0] in submit.text
