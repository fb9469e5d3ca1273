"""Parse JSON documents to rows, and find fields that the schema lacks.

A document is parsed twice: by the schema, and for the names of its fields. Spark ignores text after a document, so
`{"a":1} {"a":2}` would be its first half. Each parse puts the text in different brackets, and text after the document
cannot close both.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StringType, StructField, StructType

from kproxy.pipeline.ingest.csv_values import TIMESTAMP_FORMAT, TIMESTAMP_NTZ_FORMAT, widened
from kproxy.pipeline.ingest.transforms import CORRUPT, DOCUMENT, NEW, RECORD, TEXT

_VALUES: Final = "_kproxy_values"
_NAMES: Final = "_kproxy_names"
_ODD: Final = "_kproxy_odd"
_ONE: Final = "_kproxy_one"
# A field of this name marks an object with a duplicate field.
_TWICE: Final = "\0twice"
# Spark's own reading of dates drops the text after them, and gives a time without a date the day of the run.
_DEFAULTS: Final = {
    "dateformat": "yyyy-M-d",
    "timestampformat": TIMESTAMP_FORMAT,
    "timestampntzformat": TIMESTAMP_NTZ_FORMAT,
}
_REQUIRED: Final = {"mode": "PERMISSIVE", "columnnameofcorruptrecord": CORRUPT}
# An escaped backslash or a surrogate pair in JSON.
_WHOLE_ESCAPES: Final = r"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Characters allowed around a document.
_SPACE: Final = " \t\r\n"


def of_records(records: DataFrame, schema: StructType, *, verbatim: bool = False) -> DataFrame:
    """Parse Kafka records whose values are JSON: the columns of `opened`, and the record's own in `kafka`."""
    # A null value is not a document.
    text = F.coalesce(F.col("value").cast("string"), F.lit(""))
    texts = records.select(F.struct(*records.columns).alias(RECORD), text.alias(TEXT))
    return opened(texts, schema, {}, several=False, verbatim=verbatim)


def opened(
    rows: DataFrame, schema: StructType, options: Mapping[str, str], *, several: bool, verbatim: bool = False
) -> DataFrame:
    """Return the fields of `schema` from the documents in TEXT, CORRUPT and NEW, and the other columns of `rows`.

    `several`: TEXT may be an array of documents, each a row. `options` are those of Spark's JSON reader. `verbatim`:
    TEXT is one document, which must be JSON by RFC 8259, and DOCUMENT is its text.
    """
    text = F.col(TEXT)
    listed = F.concat(F.lit("["), text, F.lit("]"))
    if several:
        listed = F.when(text.rlike(r"^\s*\["), text).otherwise(listed)
    nested = F.concat(F.lit("["), listed, F.lit("]"))
    wide = _widened(schema)
    expected = StructType([StructField("rows", ArrayType(wide)), StructField(CORRUPT, StringType())])
    values = _parse(F.concat(F.lit('{"rows":'), listed, F.lit("}")), expected, options)
    names = _parse(nested, ArrayType(_shape(ArrayType(schema))), options)
    odd = F.transform(F.get(_NAMES, 0), lambda one: _odd(schema, one, "", options))
    read = rows.withColumns({_VALUES: values, _NAMES: names}).withColumn(_ODD, odd)
    found = F.col(_VALUES).getField("rows")
    one = F.struct(F.get(found, 0).alias("row"), _none().alias("odd"), text.alias("corrupt"))
    each = F.transform(
        found,
        lambda row, number: F.struct(
            row.alias("row"), F.get(_ODD, number).alias("odd"), F.lit(None).cast("string").alias("corrupt")
        ),
    )
    whole = _is_whole(found, several=several)
    if wide.simpleString() != schema.simpleString():
        narrow = found.try_cast(ArrayType(schema)).cast(ArrayType(wide))
        whole = whole & F.coalesce(F.to_json(narrow) == F.to_json(found), F.lit(False))
    if verbatim:
        # It refuses duplicate fields at any depth, and syntax that Spark accepts beyond the RFC.
        whole = whole & F.try_parse_json(nested).isNotNull()
    else:
        # Spark replaces an unpaired surrogate.
        halved = F.regexp_replace(text, _WHOLE_ESCAPES, " ").rlike(r"\\u[dD][89a-fA-F]")
        whole = whole & ~(text.contains("\\u") & halved)
    exploded = read.withColumn(_ONE, F.explode(F.when(whole, each).otherwise(F.array(one))))
    row, new = F.col(_ONE).getField("row"), F.array_distinct(F.col(_ONE).getField("odd"))
    return exploded.select(
        *(row.getField(field.name).try_cast(field.dataType).alias(field.name) for field in schema.fields),
        *rows.columns,
        F.col(_ONE).getField("corrupt").alias(CORRUPT),
        F.when(F.size(new) > 0, new).alias(NEW),
        *([F.btrim(text, F.lit(_SPACE)).alias(DOCUMENT)] if verbatim else []),
    )


def _widened(kind: DataType) -> Any:
    """Return the type to read first, in which decimals keep digits that `kind` has no room for."""
    if isinstance(kind, StructType):
        return StructType([StructField(field.name, _widened(field.dataType)) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_widened(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _widened(kind.valueType))
    return widened(kind) if isinstance(kind, DecimalType) else kind


def _parse(text: Column, kind: DataType, options: Mapping[str, str]) -> Column:
    # Spark does not tell mode from Mode.
    settings = {**_DEFAULTS, **{name.lower(): value for name, value in options.items()}, **_REQUIRED}
    return F.from_json(text, kind.simpleString() if isinstance(kind, MapType) else kind, settings)


def _is_whole(found: Column, *, several: bool) -> Column:
    """Return whether the whole text was parsed, and no field occurs twice."""
    tests = (
        F.col(_VALUES).getField(CORRUPT).isNull(),
        F.is_valid_utf8(TEXT),
        F.size(_NAMES) == 1,
        F.size(found) == F.size(_ODD) if several else (F.size(found) == 1) & (F.size(_ODD) == 1),
        F.forall(found, lambda row: row.isNotNull()),
        ~F.exists(_ODD, lambda odd: F.array_contains(odd, _TWICE)),
    )
    return F.coalesce(functools.reduce(operator.and_, tests), F.lit(False))


def _shape(kind: DataType) -> DataType:
    """Return the type to parse for names only: a struct becomes a map of its fields' texts by name."""
    if isinstance(kind, StructType):
        return MapType(StringType(), StringType())
    if isinstance(kind, ArrayType):
        return ArrayType(_shape(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(StringType(), _shape(kind.valueType))
    return StringType()


def _has_names(kind: DataType) -> bool:
    return _has_names(kind.elementType) if isinstance(kind, ArrayType) else isinstance(kind, (StructType, MapType))


def _odd(kind: DataType, names: Column, path: str, options: Mapping[str, str]) -> Column:
    """Return the names in `names` (of the `_shape` of `kind`) that `kind` lacks, and _TWICE; never null."""
    if isinstance(kind, ArrayType):
        inner_kind = kind.elementType
        return _or_none(F.flatten(F.transform(names, lambda one: _odd(inner_kind, one, path, options))))
    keys = F.map_keys(names)
    parts = [F.when(F.size(F.array_distinct(keys)) < F.size(keys), F.array(F.lit(_TWICE)))]
    if isinstance(kind, MapType) and _has_names(kind.valueType):
        parts.append(_odd(ArrayType(kind.valueType), F.map_values(names), path, options))
    if isinstance(kind, StructType):
        known = F.array(*map(F.lit, kind.names)).cast("array<string>")
        parts.append(F.transform(F.array_except(keys, known), lambda name: F.concat(F.lit(path), name)))
        for field in kind.fields:
            if _has_names(field.dataType):
                inner = _parse(names.getItem(field.name), _shape(field.dataType), options)
                parts.append(_odd(field.dataType, inner, f"{path}{field.name}.", options))
    return F.concat(*map(_or_none, parts))


def _none() -> Column:
    return F.array().cast("array<string>")


def _or_none(names: Column) -> Column:
    return F.coalesce(names, _none())
