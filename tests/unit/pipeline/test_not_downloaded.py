"""The error when Spark's jars could not be downloaded, by Ivy's report.

The reports were written by Spark 4.0.0 with Ivy 2.5.3, asked for its Kafka connector by `spark.jars.packages` of
repositories that were made to fail, one way each; but for empty lines they are whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kproxy.pipeline.spark import not_downloaded

REPORTS = Path(__file__).with_name("ivy_reports")
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
AT = "http://127.0.0.1:8081/org/apache/spark/spark-sql-kafka-0-10_2.13/4.0.0/spark-sql-kafka-0-10_2.13-4.0.0"

TOLD = {
    "missing": f"http://127.0.0.1:8081 answered and does not give {CONNECTOR}. Use a release of PySpark",
    "half": "http://127.0.0.1:8081 answered and does not give org.apache.kafka:kafka-clients:3.9.0. Use a release",
    "no_jar": f"http://127.0.0.1:8081 answered and does not give {CONNECTOR}. Use a release of PySpark",
    "refused": f"from {AT}.pom (java.net.ConnectException: Connection refused): check the network and run it again",
    "unknown_host": "from http://repository.invalid/org/apache/spark/spark-sql-kafka-0-10_2.13/4.0.0/"
    "spark-sql-kafka-0-10_2.13-4.0.0.pom (host repository.invalid not found): check the network and run it again",
    "failing": f"{AT}.pom answered with an error (Internal Server Error). Run it again later",
    "cut_short": f"{AT}.jar did not come whole (Downloaded file size (1) doesn't match expected Content Length (1000))",
    "proxy": "the network's proxy wants to know who asks",
    # That one of them has no address here says nothing of the release; the one that has it answered.
    "several": "https://repo1.maven.org and http://127.0.0.1:8081 answered and do not give "
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.99, and https://repos.spark-packages.org could not be asked (host "
    "repos.spark-packages.org not found). Use a release of PySpark",
}


@pytest.mark.parametrize("report", TOLD)
def test_reason_for_missing_connector_download_is_reported(report: str) -> None:
    told = str(not_downloaded((REPORTS / f"{report}.txt").read_text()))
    assert told.startswith("Spark could not download its Kafka connector")
    assert TOLD[report] in told
    # Who has been answered has a network.
    assert ("check the network" in told) == (report in ("refused", "unknown_host"))


def test_other_failures_are_not_blamed_on_jars() -> None:
    assert not_downloaded("Java heap space") is None
