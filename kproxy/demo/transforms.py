"""What the demo's job does to its data: DataFrame to DataFrame, no reading, no writing, no session."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from kproxy.demo.flights import COLUMNS, KEY_COLUMN, ROW_NUMBER


def flights_schema() -> StructType:
    """The CSV files' columns. Given, not inferred: a stream needs that, and inference would read the data twice."""
    columns = [StructField(ROW_NUMBER, IntegerType())]
    for name, is_number in COLUMNS.items():
        columns.append(StructField(name, IntegerType() if is_number else StringType()))
    return StructType(columns)


def messages(flights: DataFrame, *, topic: str, partitions: int) -> DataFrame:
    """Kafka messages (key, value, topic) for `flights`, each key's in the order of `n`.

    All rows of a key fall into one of `partitions` Spark partitions, and so to one task, which hands them to one
    producer in the order of `n`: what Kafka then keeps. Rows without a tail number have a null key, no order to keep.
    """
    ordered = flights.repartition(partitions, KEY_COLUMN).sortWithinPartitions(ROW_NUMBER)
    value = F.to_json(F.struct(*ordered.columns), {"ignoreNullFields": "false"})
    return ordered.select(F.col(KEY_COLUMN).alias("key"), value.alias("value"), F.lit(topic).alias("topic"))


def arrivals(records: DataFrame) -> DataFrame:
    """Of Kafka's records what the judge looks at, as it stands on the topic: no order imposed, nothing decoded."""
    return records.select("partition", "offset", "key", "value")
