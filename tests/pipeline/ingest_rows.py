"""Return the messages that an ingest makes of files, without a topic."""

from __future__ import annotations

from typing import Any

from kproxy.pipeline.ingest import sources, transforms
from kproxy.pipeline.ingest.options import IngestOptions

BATCH_TIMEOUT_S = 240


def options_of(source: str, schema: str | None = None, **options: Any) -> IngestOptions:
    return IngestOptions(source, "ck", topic="t", schema=schema, **options)


def infer(spark: Any, source: str, **source_options: str) -> Any:
    """The schema that is inferred from all existing files."""
    return sources.infer_schema(spark, options_of(source, source_options=source_options))


def read_files(spark: Any, source: str, schema: str, **options: Any) -> list[Any]:
    """The rows of all existing files, `encoded`."""
    seen: list[Any] = []
    asked = options_of(source, schema, **options)
    session = sources.own_session(spark)
    rows = sources.read(session, asked, sources.parse_schema(schema))

    def take(batch: Any, _: int) -> None:
        seen.extend(transforms.encoded(transforms.placed(batch), asked, batch="b").collect())

    query = rows.writeStream.foreachBatch(take).trigger(availableNow=True).start()
    assert query.awaitTermination(BATCH_TIMEOUT_S)
    return sorted(seen, key=lambda row: (row[transforms.FILE], row[transforms.BLOCK], row[transforms.ORDER][3]))
