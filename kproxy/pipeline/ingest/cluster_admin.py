"""Query the clusters of a job with kafka-clients' admin client.

It takes the same options as Spark's Kafka sink.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pyspark.sql import SparkSession

from kproxy.errors import StartupError
from kproxy.pipeline.preflight import check_reachable
from kproxy.pipeline.spark import SparkFailed, as_spark_failure

REQUEST_TIMEOUT_S: Final = 20
LEADERS_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.1


class Cluster:
    """One cluster; `flag` is the option that gave its address, for errors."""

    def __init__(self, jvm: Any, admin: Any, bootstrap: str, flag: str) -> None:
        self._jvm = jvm
        self._admin = admin
        self._where = f"{flag} {bootstrap}"

    def cluster_id(self) -> str | None:
        """Return the cluster's id, None if it does not report one."""
        try:
            found = self._await(self._admin.describeCluster().clusterId(), "does not say which cluster it is")
        except SparkFailed:
            # The id only tells whether two addresses belong to one cluster; without it they are not compared.
            return None
        return None if found is None else str(found)

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions, None if there is no such topic. Raise SparkFailed if the query fails."""
        with_leaders = self._leaders(topic)
        return None if with_leaders is None else with_leaders[1]

    def create(self, topic: str, partitions: int) -> None:
        """Create the topic with the cluster's default replication and wait for its leaders. Raise SparkFailed."""
        optional = self._jvm.java.util.Optional
        new = self._jvm.org.apache.kafka.clients.admin.NewTopic(topic, optional.of(partitions), optional.empty())
        made = self._admin.createTopics(self._jvm.java.util.Collections.singletonList(new))
        try:
            self._await(made.all(), f"could not create the topic {topic}")
        except SparkFailed as error:
            # Another client has created it meanwhile, which is fine.
            if "TopicExistsException" not in str(error):
                raise
        deadline = time.monotonic() + LEADERS_TIMEOUT_S
        while (found := self._leaders(topic)) is None or found[0] < found[1]:
            if time.monotonic() > deadline:
                raise SparkFailed(f"The topic {topic} was created and has no leaders yet: start the job again")
            time.sleep(_POLL_S)

    def _leaders(self, topic: str) -> tuple[int, int] | None:
        """Return how many partitions have a leader, and how many there are; None if there is no such topic."""
        asked = self._admin.describeTopics(self._jvm.java.util.Collections.singletonList(topic))
        try:
            found = self._await(asked.allTopicNames(), f"does not tell of the topic {topic}")
        except SparkFailed as error:
            if "UnknownTopicOrPartitionException" in str(error):
                return None
            raise
        partitions = list(found.get(topic).partitions())
        return sum(1 for each in partitions if each.leader() is not None), len(partitions)

    def _await(self, future: Any, what: str) -> Any:
        with as_spark_failure(f"{self._where} {what}"):
            return future.get(REQUEST_TIMEOUT_S, self._jvm.java.util.concurrent.TimeUnit.SECONDS)


@contextlib.contextmanager
def asking(session: SparkSession, bootstrap: str, flag: str, options: Mapping[str, str]) -> Iterator[Cluster]:
    """Connect to the cluster at `bootstrap`; `options` are Kafka's.

    Raise StartupError if nothing listens there or Spark has no Kafka connector, SparkFailed if it is not Kafka.
    """
    check_reachable(bootstrap, flag)
    jvm: Any = session._jvm
    settings = jvm.java.util.Properties()
    limits = {"default.api.timeout.ms": REQUEST_TIMEOUT_S * 1000, "request.timeout.ms": REQUEST_TIMEOUT_S * 1000}
    for name, value in {**limits, **options, "bootstrap.servers": bootstrap}.items():
        settings.setProperty(name, str(value))
    try:
        with as_spark_failure(f"{flag} {bootstrap} cannot be asked"):
            admin = jvm.org.apache.kafka.clients.admin.Admin.create(settings)
    except TypeError as error:
        # py4j takes a missing class for a package, and a package cannot be called.
        connector = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{session.version}"
        raise StartupError(f"this Spark has no Kafka connector: start it with --packages {connector}.") from error
    try:
        yield Cluster(jvm, admin, bootstrap, flag)
    finally:
        with as_spark_failure(f"{flag} {bootstrap} cannot be left"):
            admin.close()
