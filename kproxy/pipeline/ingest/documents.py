"""Parse JSON documents to rows, and find fields that the schema lacks.

A document is parsed twice: by the schema, and for the names of its fields. Spark ignores text after a document, so
`{"a":1} {"a":2}` would be its first half. The two times the text is between different brackets, and text after the
document cannot close both of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from kproxy.pipeline.ingest.transforms import CORRUPT, DOCUMENT, NEW, RECORD, TEXT

_VALUES: Final = "_kproxy_values"
_NAMES: Final = "_kproxy_names"
_ONE: Final = "_kproxy_one"
_NO_NAMES: Final = "array<string>"
# What may be around a document.
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
    read = rows.withColumns(
        {
            _VALUES: _parse(F.concat(F.lit('{"rows":'), listed, F.lit("}")), _expected(schema), options),
            _NAMES: _parse(nested, ArrayType(_shape(ArrayType(schema))), options),
        }
    )
    found, names = F.col(_VALUES).getField("rows"), F.get(_NAMES, 0)
    one = F.struct(F.get(found, 0).alias("row"), F.lit(None).cast(_shape(schema)).alias("names"), text.alias("corrupt"))
    each = F.transform(
        found,
        lambda row, number: F.struct(
            row.alias("row"), F.get(names, number).alias("names"), F.lit(None).cast("string").alias("corrupt")
        ),
    )
    whole = _is_whole(schema, found, names, options, several=several)
    if verbatim:
        # It refuses a field that is there twice, at any depth, and what Spark reads beyond the RFC.
        whole = whole & F.try_parse_json(nested).isNotNull()
    parts = F.when(whole, each).otherwise(F.array(one))
    exploded = read.withColumn(_ONE, F.explode(parts))
    row = F.col(_ONE).getField("row")
    new = F.array_distinct(_lacking(schema, F.col(_ONE).getField("names"), "", options))
    return exploded.select(
        *(row.getField(field.name).alias(field.name) for field in schema.fields),
        *rows.columns,
        F.col(_ONE).getField("corrupt").alias(CORRUPT),
        F.when(F.size(new) > 0, new).alias(NEW),
        *([F.btrim(text, F.lit(_SPACE)).alias(DOCUMENT)] if verbatim else []),
    )


def _expected(schema: StructType) -> StructType:
    return StructType([StructField("rows", ArrayType(schema)), StructField(CORRUPT, StringType())])


def _parse(text: Column, kind: DataType, options: Mapping[str, str]) -> Column:
    required = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": CORRUPT}
    settings = {name: value for name, value in options.items() if name.lower() not in map(str.lower, required)}
    return F.from_json(text, kind.simpleString() if isinstance(kind, MapType) else kind, {**settings, **required})


def _is_whole(schema: StructType, found: Column, names: Column, options: Mapping[str, str], *, several: bool) -> Column:
    """Whether the whole text was parsed, and no field occurs twice."""
    count = F.size(found) == F.size(names)
    if not several:
        count = count & (F.size(found) == 1)
    tests = (
        F.col(_VALUES).getField(CORRUPT).isNull(),
        F.is_valid_utf8(TEXT),
        F.size(_NAMES) == 1,
        count,
        F.forall(found, lambda row: row.isNotNull()),
        _unique(ArrayType(schema), names, options),
    )
    whole = tests[0]
    for test in tests[1:]:
        whole = whole & test
    return F.coalesce(whole, F.lit(False))


def _shape(kind: DataType) -> DataType:
    """Return the type to parse for names only: a struct becomes a map of its fields' texts by name."""
    if isinstance(kind, StructType):
        return MapType(StringType(), StringType())
    if isinstance(kind, ArrayType):
        return ArrayType(_shape(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(StringType(), _shape(kind.valueType))
    return StringType()


def _has_fields(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_fields(kind.elementType)
    if isinstance(kind, MapType):
        return _has_fields(kind.valueType)
    return isinstance(kind, StructType)


def _has_names(kind: DataType) -> bool:
    return _has_names(kind.elementType) if isinstance(kind, ArrayType) else isinstance(kind, (StructType, MapType))


def _unique(kind: DataType, names: Column, options: Mapping[str, str]) -> Column:
    """Whether no object in `names` (of the `_shape` of `kind`) has a name twice; never null."""
    if isinstance(kind, ArrayType):
        inner_kind = kind.elementType
        return F.coalesce(F.forall(names, lambda one: _unique(inner_kind, one, options)), F.lit(True))
    found = F.coalesce(F.size(F.array_distinct(F.map_keys(names))) == F.size(F.map_keys(names)), F.lit(True))
    if isinstance(kind, MapType) and _has_names(kind.valueType):
        return found & _unique(ArrayType(kind.valueType), F.map_values(names), options)
    for field in kind.fields if isinstance(kind, StructType) else ():
        if _has_names(field.dataType):
            inner = _parse(names.getItem(field.name), _shape(field.dataType), options)
            found = found & _unique(field.dataType, inner, options)
    return found


def _lacking(kind: DataType, names: Column, path: str, options: Mapping[str, str]) -> Column:
    """Return the names in `names` (of the `_shape` of `kind`) that `kind` lacks; never null."""
    if isinstance(kind, StructType):
        known = F.array(*map(F.lit, kind.names)).cast(_NO_NAMES)
        here = F.transform(F.array_except(F.map_keys(names), known), lambda name: F.concat(F.lit(path), name))
        parts = [F.coalesce(here, F.array().cast(_NO_NAMES))]
        for field in kind.fields:
            if _has_fields(field.dataType):
                inner = _parse(names.getItem(field.name), _shape(field.dataType), options)
                parts.append(_lacking(field.dataType, inner, f"{path}{field.name}.", options))
        return F.concat(*parts)
    if isinstance(kind, MapType):
        return _lacking(ArrayType(kind.valueType), F.map_values(names), path, options)
    assert isinstance(kind, ArrayType)  # noqa: S101 - nothing else `_has_fields`
    inner_kind = kind.elementType
    found = F.flatten(F.transform(names, lambda one: _lacking(inner_kind, one, path, options)))
    return F.coalesce(found, F.array().cast(_NO_NAMES))
