"""Give Spark two data sources: `kproxy_log`, a row for each batch of a log, and `kproxy_trail`, the rows of trails.

Both read a cluster by Fetch, with `LogClient`. Spark calls them in Python workers: a worker of the driver gets offsets
and plans pieces, a task of an executor reads one piece. An offset of a stream is the end of each partition, by topic
and number.

Invariants
1. A log is read up to the high watermark at planning. A stream's next micro-batch begins where the last one ended.
2. A batch is in the piece with its base offset, so it is read once.
3. A partition that cannot be read fails the query: a table without it would look complete.
4. With `maxOffsetsPerTrigger` each micro-batch reads from every partition that is behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kproxy.pipeline.audit.columns import HEADERS, arrow_schema
from kproxy.pipeline.audit.log_client import EARLIEST, LogClient, LogReadFailed, Offsets, TopicPartition
from kproxy.pipeline.audit.log_reader import LogRange, RangeReader, records_in
from kproxy.pipeline.audit.logs import crc_check, cut, ends_of
from kproxy.pipeline.audit.trail_rows import TrailRow, rows_in
from kproxy.pipeline.kafka_access import KafkaOptions
from kproxy.trail.parquet_sink import SCHEMA

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # Spark 4.0 and 4.1
    ReadAllAvailable = ReadMaxRows = SupportsTriggerAvailableNow = None

DEFAULT_TRAIL: Final = "__kproxy_audit"
LOG_SCHEMA: Final = arrow_schema(HEADERS)
_READ: Final = (("previous", pa.string()), ("shipped_at", pa.int64()), ("digest", pa.string()))
TRAIL_SCHEMA: Final = pa.schema([*(each for each in SCHEMA if each.name in TrailRow.__slots__), *_READ])
ROWS_PER_BATCH: Final = 5_000
# The offsets of a trail's topic are pages of rows.
_PAGES_PER_PIECE: Final = 2_000
_KAFKAS: Final = "kafka."
_BOOTSTRAP: Final = "bootstrap.servers"
_KNOWN: Final = "subscribe, startingOffsets, maxOffsetsPerTrigger, kafka.*"

Ends = dict[str, dict[str, int]]
"""An offset of a stream, as JSON."""


@dataclass
class Piece(InputPartition):  # type: ignore[misc]
    """Ranges of logs that one task reads."""

    ranges: Sequence[LogRange]


class _Reader:
    """Read logs, for a table or a stream."""

    most: int | None = None

    def __init__(self, options: Mapping[str, str], topics: str | None) -> None:
        """Read the options. Raise LogReadFailed if one is missing, unknown or invalid."""
        given = {name.lower(): value for name, value in options.items()}
        kafka = {name.removeprefix(_KAFKAS): value for name, value in given.items() if name.startswith(_KAFKAS)}
        self._bootstrap = kafka.pop(_BOOTSTRAP, "")
        self._kafka = KafkaOptions(kafka)
        self._topics = tuple(filter(None, map(str.strip, given.pop("subscribe", topics or "").split(","))))
        self._starts_late = given.pop("startingoffsets", "earliest") == "latest"
        most = given.pop("maxoffsetspertrigger", "")
        self.most_a_trigger = int(most) if most.isdecimal() else 0
        unknown = sorted(name for name in given if not name.startswith(_KAFKAS))
        if not self._bootstrap or not self._topics:
            raise LogReadFailed("The options kafka.bootstrap.servers (HOST:PORT) and subscribe (TOPIC) are needed.")
        if unknown:
            raise LogReadFailed(f"Unknown option {unknown[0]}; expected one of {_KNOWN}.")
        if most and not self.most_a_trigger:
            raise LogReadFailed(f"Invalid maxOffsetsPerTrigger {most}; expected a number of at least 1.")
        if most and ReadMaxRows is None:
            raise LogReadFailed("maxOffsetsPerTrigger needs Spark 4.2: leave it out, or install a later pyspark.")

    def _client(self) -> LogClient:
        return LogClient(self._bootstrap, self._kafka)

    def _pieces(self, starts: Offsets, ends: Offsets) -> list[Piece]:
        """Return the pieces to read. `starts` lacks partitions to read from their beginning. Raise LogReadFailed."""
        for which, start in starts.items():
            if ends.get(which, start) < start:
                raise LogReadFailed(
                    f"{which} ends at offset {ends[which]} but was read up to {start}: the log was truncated, or "
                    "the topic was recreated; start again with another checkpointLocation."
                )
        with self._client() as client:
            begins = client.list_offsets([which for which in ends if which not in starts], EARLIEST)
        return [
            Piece([each._replace(is_first=each.is_first and each.which in begins) for each in piece])
            for piece in cut({**begins, **starts}, ends, self.most)
        ]

    def pieces(self, start: Ends, end: Ends) -> list[Piece]:
        # Spark 4.0 reads no table without a partition.
        return self._pieces(_offsets(start), _offsets(end)) or [Piece(())]

    def first(self) -> Ends:
        """Return the end offsets at which a stream begins."""
        return self.last() if self._starts_late else {}

    def last(self) -> Ends:
        with self._client() as client:
            return _as_json(ends_of(client, self._topics))

    def within(self, start: Ends, end: Ends, most: int) -> Ends:
        """Return an offset about `most` offsets after `start` but not after `end`; partitions share `most`."""
        starts, ends = _offsets(start), _offsets(end)
        with self._client() as client:
            starts = client.list_offsets([which for which in ends if which not in starts], EARLIEST) | starts
        return _as_json(shared(starts, ends, most))

    def read(self, partition: Piece) -> Iterator[Any]:
        """Yield the rows of a piece in Arrow batches. Raise LogReadFailed."""
        with self._client() as client:
            for wanted in partition.ranges:
                yield from self._read(client, wanted)

    def _read(self, client: LogClient, wanted: LogRange) -> Iterator[Any]:
        raise NotImplementedError


class _LogReader(_Reader):
    def _read(self, client: LogClient, wanted: LogRange) -> Iterator[Any]:
        for headers in RangeReader(client, wanted, crc_check()).headers():
            columns = zip(*((*wanted.which, *each) for each in headers), strict=True)
            yield pa.record_batch([pa.array(*each) for each in zip(columns, LOG_SCHEMA.types, strict=True)], LOG_SCHEMA)


class _TrailReader(_Reader):
    most = _PAGES_PER_PIECE

    def _read(self, client: LogClient, wanted: LogRange) -> Iterator[Any]:
        pages = records_in(client, wanted)
        rows = (asdict(row) for page in pages for row in rows_in(page.value or b"", page.timestamp))
        while chunk := list(islice(rows, ROWS_PER_BATCH)):
            yield pa.RecordBatch.from_pylist(chunk, TRAIL_SCHEMA)


@dataclass
class _Table(DataSourceReader):  # type: ignore[misc]
    log: _Reader

    def partitions(self) -> list[Piece]:
        return self.log.pieces({}, self.log.last())

    def read(self, partition: Piece) -> Iterator[Any]:
        return self.log.read(partition)


@dataclass
class _Stream(DataSourceStreamReader, SupportsTriggerAvailableNow or object):  # type: ignore[misc]
    log: _Reader
    last: Ends | None = None

    def initialOffset(self) -> Ends:  # noqa: N802 - Spark's name
        return self.log.first()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self.last = self.log.last()

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        return ReadMaxRows(self.log.most_a_trigger) if self.log.most_a_trigger else ReadAllAvailable()

    def latestOffset(self, start: Ends | None = None, limit: Any = None) -> Ends:  # noqa: N802 - Spark's name
        end = self.last or self.log.last()
        # Spark before 4.2 gives no start and knows no limit.
        return end if start is None or not hasattr(limit, "max_rows") else self.log.within(start, end, limit.max_rows)

    def partitions(self, start: Ends, end: Ends) -> list[Piece]:
        return self.log.pieces(start, end)

    def read(self, partition: Piece) -> Iterator[Any]:
        return self.log.read(partition)


def shared(starts: Offsets, ends: Offsets, most: int) -> Offsets:
    """Return the ends of a micro-batch of about `most` offsets; a partition's share is by how far it is behind."""
    behind = {which: max(0, end - starts[which]) for which, end in ends.items()}
    total = sum(behind.values())
    if total <= most:
        return ends
    return {which: starts[which] - (-each * most // total) if each else ends[which] for which, each in behind.items()}


def _as_json(ends: Offsets) -> Ends:
    found: Ends = {}
    # Sorted: Spark compares offsets by their JSON.
    for (topic, partition), end in sorted(ends.items()):
        found.setdefault(topic, {})[str(partition)] = end
    return found


def _offsets(ends: Ends) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, int(index)): end for topic, each in ends.items() for index, end in each.items()}


class KproxyLog(DataSource):  # type: ignore[misc]
    """`kproxy_log`: a data source of the headers of topics' batches."""

    kind: type[_Reader] = _LogReader
    arrow: Any = LOG_SCHEMA
    topics: str | None = None

    @classmethod
    def name(cls) -> str:
        return "kproxy_log"

    def schema(self) -> StructType:
        return from_arrow_schema(self.arrow)

    def reader(self, schema: StructType) -> _Table:
        return _Table(self.kind(self.options, self.topics))

    def streamReader(self, schema: StructType) -> _Stream:  # noqa: N802 - Spark's name
        return _Stream(self.kind(self.options, self.topics))


class KproxyTrail(KproxyLog):
    """`kproxy_trail`: a data source of the rows of the proxies' trails in a topic."""

    kind = _TrailReader
    arrow = TRAIL_SCHEMA
    topics = DEFAULT_TRAIL

    @classmethod
    def name(cls) -> str:
        return "kproxy_trail"


SOURCES: Final = (KproxyLog, KproxyTrail)
