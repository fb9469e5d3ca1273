"""A Spark data source that reads logs, with one row for each record batch's header.

The headers are read by Fetch from any Kafka address. After `register`, `session.read.format("kproxy_log")` has the
batches of topics. Spark's planner asks the cluster for the partitions and cuts their logs into pieces; its tasks read
the pieces. Records are not decoded, compressed or not.

Spark plans again for every action on a DataFrame, so the end "latest" may differ each time: give offsets for one end.

Executors need this package, `kproxy_codec` and kafka-python (`kproxy.pipeline.session` packs them), pyarrow, which
Spark itself needs for data sources in Python, and crc32c, without which CRCs are not checked (crc_ok is null).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from kproxy.pipeline.audit.columns import LOG, arrow_schema
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.log_options import LogOptions, LogRange, Offsets, offsets_as_json, read_options, written
from kproxy.pipeline.audit.log_reader import Row
from kproxy.pipeline.audit.logs import headers_in, plan
from kproxy.pipeline.audit.schemas import LOG_SCHEMA
from kproxy.pipeline.kafka_access import NO_OPTIONS
from kproxy.routing.topology import Address

LOG_FORMAT: Final = "kproxy_log"


def register(session: Any) -> None:
    """Register the format in a SparkSession; it may be called again."""
    session.dataSource.register(LogDataSource)


def log_options(
    bootstrap: str,
    *,
    topics: Sequence[str],
    starts: Offsets | None = None,
    ends: Offsets | None = None,
    kafka: Mapping[str, str] = NO_OPTIONS,
    **more: str | int,
) -> dict[str, str]:
    """Return the options of the format. `kafka` has options of Kafka's clients for TLS and SASL."""
    given = {"startOffsets": starts, "endOffsets": ends}
    offsets = {name: offsets_as_json(each) for name, each in given.items() if each is not None}
    return written(bootstrap, topics, None, {**offsets, **more}, kafka)


def read_log(session: Any, options: Mapping[str, str]) -> Any:
    """Read the batches with a base offset before the end, as a DataFrame of LOG_SCHEMA."""
    # Report wrong options here, because Spark's planner would wrap the error in a Java stack trace.
    read_options(options)
    register(session)
    return session.read.format(LOG_FORMAT).options(**options).load()


class LogPiece(InputPartition):  # type: ignore[misc]  # pyspark's types are not followed
    """The ranges that one task reads, and the leaders of their partitions at planning time."""

    def __init__(self, ranges: Sequence[LogRange], leaders: Sequence[Address | None]) -> None:
        super().__init__(None)
        self.ranges = tuple(ranges)
        self.leaders = tuple(leaders)


class LogDataSource(DataSource):  # type: ignore[misc]
    """Format "kproxy_log"."""

    @classmethod
    def name(cls) -> str:
        return LOG_FORMAT

    def schema(self) -> StructType:
        return LOG_SCHEMA

    def reader(self, schema: Any) -> LogDataSourceReader:
        return LogDataSourceReader(read_options(self.options))


class LogDataSourceReader(DataSourceReader):  # type: ignore[misc]
    """Plan on the driver, read in tasks."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options

    def partitions(self) -> list[LogPiece]:
        """Cut the logs into pieces. Raise LogReadFailed."""
        with self._options.client() as client:
            pieces = plan(self._options, client)
            return [LogPiece(ranges, [client.leader(each.which) for each in ranges]) for ranges in pieces]

    def read(self, partition: LogPiece | None) -> Iterator[Any]:
        """Yield Arrow batches. Raise LogReadFailed."""
        # Spark passes None if there is nothing to read.
        if partition is None:
            return
        with self._options.client() as client:
            for wanted, leader in zip(partition.ranges, partition.leaders, strict=True):
                if leader is not None:
                    client.remember_leader(wanted.which, leader)
                for rows in headers_in(self._options, client, wanted):
                    yield as_arrow(wanted.which, rows)


def as_arrow(which: TopicPartition, rows: Sequence[Row]) -> Any:
    """Return an Arrow batch with the types of LOG_SCHEMA, which Spark takes unchanged."""
    import pyarrow as pa

    schema = arrow_schema(LOG)
    columns: list[Sequence[Any]] = [[which.topic] * len(rows), [which.partition] * len(rows), *zip(*rows, strict=True)]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, each.type) for values, each in zip(columns, schema, strict=True)], schema=schema
    )
