"""Read logs with Spark: one row for each record batch's header.

The headers come by Fetch through any Kafka address. Formats for `session.read.format(…)` after `register`:
"kproxy_log", the batches of topics, and "kproxy_bounds", where the log of each partition begins and ends. Spark's
planner asks the cluster for the partitions and cuts their logs into pieces; its tasks read the pieces. Records are not
decoded, compressed or not.

Spark plans anew for every action on a DataFrame, so the end "latest" may differ each time; use `fix_ends` for one end.

Executors need this package, `kproxy_codec` and kafka-python (`kproxy.pipeline.session` packs them), pyarrow, which
Spark itself needs for data sources in Python, and crc32c, without which crc_ok is null: not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogReadFailed, TopicPartition
from kproxy.pipeline.audit.log_options import (
    LogOptions,
    LogRange,
    Offsets,
    cut,
    expect_partitions,
    offsets_as_json,
    parse_offsets,
    read_options,
    written,
)
from kproxy.pipeline.audit.log_reader import CheckCrc, RangeReader, Row
from kproxy.pipeline.audit.schemas import BOUNDS_SCHEMA, LOG_SCHEMA
from kproxy.pipeline.kafka_access import NO_OPTIONS
from kproxy.routing.topology import Address

LOG_FORMAT: Final = "kproxy_log"
BOUNDS_FORMAT: Final = "kproxy_bounds"
# Short, as the user waits for it at the start of a job.
FIRST_PATIENCE_MS: Final = 10_000


def register(session: Any) -> None:
    """Register both formats in a SparkSession; may be repeated."""
    session.dataSource.register(LogDataSource)
    session.dataSource.register(BoundsDataSource)


def read_log(
    session: Any,
    bootstrap: str,
    *,
    topics: Sequence[str] = (),
    pattern: str | None = None,
    start_offsets: str | None = None,
    end_offsets: str | None = None,
    offsets_per_partition: int | None = None,
    max_bytes: int | None = None,
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> Any:
    """Read the batches of `topics`, or of those whose names match `pattern`, as a DataFrame of LOG_SCHEMA.

    Offsets: `earliest`, `latest` or JSON as of `fix_ends`; batches with a base offset before the end are read. `kafka`,
    here and below: options of Kafka's clients about TLS and SASL.
    """
    more = {
        "startOffsets": start_offsets,
        "endOffsets": end_offsets,
        "offsetsPerPartition": offsets_per_partition,
        "maxBytes": max_bytes,
    }
    options = written(bootstrap, topics, pattern, more, kafka)
    # Report wrong options here; from Spark's planner the error has a Java stack trace around it.
    read_options(options)
    register(session)
    return session.read.format(LOG_FORMAT).options(**options).load()


def bounds_now(
    bootstrap: str,
    *,
    topics: Sequence[str],
    compacted: Sequence[str] | None = None,
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> list[tuple[str, int, int, int, bool, str | None]]:
    """Return rows of BOUNDS_SCHEMA, queried from this process without Spark. Raise LogReadFailed.

    `compacted`: the compacted topics; None to ask the brokers.
    """
    more = {"compactedTopics": None if compacted is None else ",".join(compacted)}
    return list(BoundsDataSourceReader(read_options(written(bootstrap, topics, None, more, kafka))).read(None))


def fix_ends(bootstrap: str, *, topics: Sequence[str], kafka: Mapping[str, str] = NO_OPTIONS) -> str:
    """Return where logs end now, as JSON for `end_offsets`, queried from this process without Spark.

    Raise LogReadFailed with one sentence, for example if a topic is missing or no broker answers.
    """
    options = read_options(written(bootstrap, topics, None, {"patienceMs": FIRST_PATIENCE_MS}, kafka))
    with options.client() as client:
        return offsets_as_json(client.list_offsets(options.partitions(client), LATEST))


def fix_starts(
    bootstrap: str, *, topics: Sequence[str], from_ms: int, ends: str, kafka: Mapping[str, str] = NO_OPTIONS
) -> str:
    """Return the first offsets with timestamps at `from_ms` or later, as JSON like `ends`; the end if there is none.

    Queried from this process without Spark. Raise LogReadFailed.
    """
    _, behind = parse_offsets(ends, "endOffsets")
    options = read_options(written(bootstrap, topics, None, {"patienceMs": FIRST_PATIENCE_MS}, kafka))
    with options.client() as client:
        found = client.list_offsets(behind, from_ms)
    return offsets_as_json(
        {which: end if found[which] < 0 else min(found[which], end) for which, end in behind.items()}
    )


class LogPiece(InputPartition):  # type: ignore[misc]  # pyspark's types are not followed
    """The ranges that one task reads, and the leaders of their partitions at planning."""

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
        options = self._options
        with options.client() as client:
            partitions = options.partitions(client)
            earliest = client.list_offsets(partitions, EARLIEST)
            latest = client.list_offsets(partitions, LATEST)
            starts = _resolve(options.start_offsets, "startOffsets", earliest, latest)
            ends = _resolve(options.end_offsets, "endOffsets", earliest, latest)
            pieces = cut(starts, ends, options.offsets_per_partition)
            return [LogPiece(ranges, [client.leader(each.which) for each in ranges]) for ranges in pieces]

    def read(self, partition: LogPiece | None) -> Iterator[Any]:
        """Yield Arrow batches. Raise LogReadFailed."""
        # Spark passes None if there is nothing to read.
        if partition is None:
            return
        check_crc = _crc_check(self._options.check_crc)
        with self._options.client() as client:
            for wanted, leader in zip(partition.ranges, partition.leaders, strict=True):
                if leader is not None:
                    client.remember_leader(wanted.which, leader)
                for rows in RangeReader(client, wanted, self._options.max_bytes, check_crc).rows():
                    yield _as_arrow(wanted.which, rows)


class BoundsDataSource(DataSource):  # type: ignore[misc]
    """Format "kproxy_bounds"."""

    @classmethod
    def name(cls) -> str:
        return BOUNDS_FORMAT

    def schema(self) -> StructType:
        return BOUNDS_SCHEMA

    def reader(self, schema: Any) -> BoundsDataSourceReader:
        return BoundsDataSourceReader(read_options(self.options))


class BoundsDataSourceReader(DataSourceReader):  # type: ignore[misc]
    """Query all bounds in one task: a few numbers for each partition."""

    def __init__(self, options: LogOptions) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: Any) -> Iterator[tuple[str, int, int, int, bool, str | None]]:
        """Yield the bounds of each partition. Raise LogReadFailed."""
        options = self._options
        with options.client() as client:
            partitions = options.partitions(client)
            topics = {which.topic for which in partitions}
            told = options.compacted_topics
            compacted = client.compacted(topics) if told is None else set(told)
            ends = client.list_offsets(partitions, LATEST)
            starts = client.list_offsets(partitions, EARLIEST)
            topic_ids = client.topic_ids
        for which in partitions:
            topic, partition = which
            yield topic, partition, starts[which], ends[which], topic in compacted, topic_ids.get(topic)


def _resolve(text: str, option: str, earliest: Offsets, latest: Offsets) -> dict[TopicPartition, int]:
    """Return an offset for each partition, none before its log's beginning."""
    default, mentioned = parse_offsets(text, option)
    expect_partitions(mentioned, earliest, option)
    named = {EARLIEST: earliest, LATEST: latest}
    resolved = {}
    for which, begins in earliest.items():
        offset = mentioned.get(which, default)
        resolved[which] = max(begins, named[offset][which] if offset in named else offset)
    return resolved


def _crc_check(option: str) -> CheckCrc | None:
    if option == "false":
        return None
    try:
        from kproxy_codec.record_crc import crc_is_valid
    except ImportError as error:
        if option == "auto":
            return None
        raise LogReadFailed(
            "An executor has no crc32c, so batches cannot be checked: install it there, or set option checkCrc to auto."
        ) from error
    return crc_is_valid


def _as_arrow(which: TopicPartition, rows: Sequence[Row]) -> Any:
    """Return an Arrow batch with the types of LOG_SCHEMA, which Spark takes unchanged."""
    import pyarrow as pa

    long, integer, boolean = pa.int64(), pa.int32(), pa.bool_()
    types = [long, long, integer, long, integer, integer, integer, long, integer, boolean, boolean, boolean]
    columns = [pa.array([which.topic] * len(rows), pa.string()), pa.array([which.partition] * len(rows), integer)]
    columns += [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=_COLUMNS)


_COLUMNS: Final = LOG_SCHEMA.names


MOST_BATCHES: Final = 20_000
# Batches are fetched whole and their checksums computed: some seconds of work.
MOST_BYTES: Final = 256 << 20


def read_short_log(
    session: Any,
    bootstrap: str,
    *,
    topics: Sequence[str],
    end_offsets: str,
    start_offsets: str | None = None,
    most_batches: int = MOST_BATCHES,
    most_bytes: int = MOST_BYTES,
    kafka: Mapping[str, str] = NO_OPTIONS,
) -> Any | None:
    """Read short logs in this process, as `read_log` does.

    None if they exceed the bounds. Raise LogReadFailed. Spark starts four Python processes, one after another, to read
    a source in Python. For short logs that takes longer than the rest of an audit.
    """
    offsets = {"startOffsets": start_offsets, "endOffsets": end_offsets}
    reader = LogDataSourceReader(read_options(written(bootstrap, topics, None, offsets, kafka)))
    read: list[Any] = []
    room, room_bytes = most_batches, most_bytes
    for piece in reader.partitions():
        for headers in reader.read(piece):
            room -= headers.num_rows
            room_bytes -= sum(headers.column("bytes").to_pylist())
            if room < 0 or room_bytes < 0:
                return None
            read.append(headers)
    if not read:
        return session.createDataFrame([], LOG_SCHEMA)
    import pyarrow as pa

    return session.createDataFrame(pa.Table.from_batches(read), LOG_SCHEMA)
