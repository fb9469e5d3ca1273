"""Generate a trail and its log of any size inside Spark, to measure the audit and to test it at scale.

All rows come from row numbers, so trail and log agree, and a test that damages one knows the expected findings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.pandas.types import from_arrow_schema

from kproxy.pipeline.audit.columns import HEADERS
from kproxy.pipeline.audit.judge import Batch, Bounds
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.logs import Chunk
from kproxy.pipeline.audit.trail_rows import TrailRow, rows_of_files
from kproxy.trail.parquet_sink import SCHEMA

BEGAN_AT = 1_760_000_000_000
INTERVAL_MS = 5_000
_SEQUENCES = 1 << 31


class Shape(NamedTuple):
    """The shape of the trail. Each row has `spans` spans of `batches` batches of `records` records.

    `producers` alternate span by span in each partition: with more than one producer and more than one span, no two
    spans of a row are contiguous, which is the worst case for merging them. The rows are spread evenly over `seconds`,
    through `proxies` proxies, to `topics` topics of `partitions` partitions.
    """

    ranges: int = 10_000_000
    topics: int = 4
    partitions: int = 16
    proxies: int = 3
    producers: int = 1
    spans: int = 1
    batches: int = 1
    records: int = 100
    samples: int = 1
    seconds: int = 3_600

    @property
    def logs(self) -> int:
        return self.topics * self.partitions


_TRAIL: Final = {
    each.name: each.dataType for each in from_arrow_schema(SCHEMA).fields if each.name in TrailRow.__slots__
}


def _named(frame: DataFrame, columns: dict[str, Column], kinds: Mapping[str, Any]) -> DataFrame:
    """Return `frame` with the columns of `kinds`; a column that `columns` does not have is null."""
    nothing = F.lit(None)
    return frame.select(*(columns.get(name, nothing).cast(kind).alias(name) for name, kind in kinds.items()))


def synthetic_trail(session: Any, shape: Shape) -> DataFrame:
    """Return rows of trails: for each proxy a whole trail, from its begin to its end."""
    i = F.col("id")
    log, nth = i % shape.logs, F.floor(i / shape.logs)
    block, producer = F.floor(nth / shape.producers), nth % shape.producers
    span_records = shape.batches * shape.records
    base = block * (shape.producers * shape.spans * span_records)
    starts = [base + (producer + k * shape.producers) * span_records for k in range(shape.spans)]
    at = F.lit(BEGAN_AT + INTERVAL_MS) + F.floor(i * (shape.seconds * 1000 / shape.ranges))
    ranges = {
        "kind": F.lit("range"),
        "proxy": F.concat(F.lit("proxy-"), i % shape.proxies, F.lit(":9092")),
        "incarnation": F.lpad(F.hex(i % shape.proxies), 16, "0"),
        "sequence": F.floor(i / shape.proxies) + 1,
        "at": at,
        "topic": F.concat(F.lit("topic-"), log % shape.topics),
        "partition": F.floor(log / shape.topics),
        "owner": log % 3,
        "revision": log + 100,
        "acks": F.lit(-1),
        "connection": producer,
        "peer": F.lit("192.0.2.1:50000"),
        "client_id": F.lit("synthetic"),
        "producer_id": log * shape.producers + producer,
        "producer_epoch": F.lit(0),
        "first_sequence": (block * (shape.spans * span_records)) % _SEQUENCES,
        "base_offset": starts[0],
        "record_count": F.lit(shape.spans * span_records),
        "batches": F.lit(shape.spans * shape.batches),
        "bytes": F.lit(shape.spans * span_records * 100),
        "first_acked_at": at - 1_000,
        "last_acked_at": at - 500,
        "spans": F.array(*(part for start in starts for part in (start, F.lit(span_records)))),
        "latency_us": F.array(*(F.pmod(F.xxhash64(i, F.lit(k)), F.lit(20_000)) + 500 for k in range(shape.samples))),
    }
    begins = session.range(shape.proxies).select((F.col("id") % shape.proxies).alias("id"))
    who = {"proxy": ranges["proxy"], "incarnation": ranges["incarnation"]}
    begin = {"kind": F.lit("begin"), "sequence": F.lit(0), "at": F.lit(BEGAN_AT)}
    promise = {"interval_ms": F.lit(INTERVAL_MS), "mark_ms": F.lit(10_000)}
    # The proxy with the remainder p has the ranges p, p + proxies, …
    rows_of_it = F.ceil((F.lit(shape.ranges) - i) / shape.proxies)
    ended_at = F.lit(BEGAN_AT + 2 * INTERVAL_MS + shape.seconds * 1000)
    end = {"kind": F.lit("end"), "sequence": rows_of_it + 1, "at": ended_at}
    return (
        _named(session.range(shape.ranges), ranges, _TRAIL)
        .unionByName(_named(begins, {**who, **begin, **promise}, _TRAIL))
        .unionByName(_named(begins, {**who, **end}, _TRAIL))
    )


def synthetic_log(session: Any, shape: Shape) -> DataFrame:
    """Return HEADERS: the batches that are acknowledged in the trail, each once."""
    per_row = shape.spans * shape.batches
    i, part = F.floor(F.col("id") / per_row), F.col("id") % per_row
    log, nth = i % shape.logs, F.floor(i / shape.logs)
    block, producer = F.floor(nth / shape.producers), nth % shape.producers
    k, batch = F.floor(part / shape.batches), part % shape.batches
    span_records = shape.batches * shape.records
    base = (
        block * (shape.producers * shape.spans * span_records)
        + (producer + k * shape.producers) * span_records
        + batch * shape.records
    )
    sequence = block * (shape.spans * span_records) + part * shape.records
    headers = {
        "topic": F.concat(F.lit("topic-"), log % shape.topics),
        "partition": F.floor(log / shape.topics),
        "base_offset": base,
        "last_offset": base + (shape.records - 1),
        "record_count": F.lit(shape.records),
        "producer_id": log * shape.producers + producer,
        "producer_epoch": F.lit(0),
        "base_sequence": sequence % _SEQUENCES,
        "is_control": F.lit(False),
        "crc_ok": F.lit(True),
    }
    return _named(session.range(shape.ranges * per_row), headers, HEADERS)


def synthetic_bounds(shape: Shape) -> dict[TopicPartition, Bounds]:
    """Return bounds of every log, from offset 0 to an end behind everything in the trail."""
    blocks = math.ceil(math.ceil(shape.ranges / shape.logs) / shape.producers)
    end = blocks * (shape.producers * shape.spans * shape.batches * shape.records)
    return {
        TopicPartition(f"topic-{log % shape.topics}", log // shape.topics): Bounds(0, end, False, None)
        for log in range(shape.logs)
    }


def trail_rows(rows: Iterable[Any]) -> Iterator[TrailRow]:
    """Yield the frame's rows as an audit reads them."""
    return rows_of_files(row.asDict() for row in rows)


def log_chunks(rows: Iterable[Any]) -> Iterator[Chunk]:
    """Yield the frame's batches as an audit reads them."""
    batches: dict[TopicPartition, list[Batch]] = defaultdict(list)
    for topic, partition, *header in rows:
        batches[TopicPartition(topic, partition)].append(Batch(*header))
    return (Chunk(which, each) for which, each in batches.items())
