"""Convert the texts that Spark's reader finds in CSV files to values of the schema's types.

Spark's own parsers change values in silence: they read `1f` and `0x1p3` as numbers, round decimals, drop text after a
date, and give a time without a date the day of the run. Here a text becomes exactly the value that it denotes, or its
row is CORRUPT. The reader gives all columns as texts, and null for an empty field (`READER_OPTIONS`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    CharType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VarcharType,
)

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.transforms import CORRUPT, quoted

# Spark reads a text that equals `nullValue` as null, quoted or not. No text equals this one.
READER_OPTIONS: Final = {"nullvalue": "\0kproxy: nothing\0"}
# Java's replacement for bytes that are invalid in the encoding.
REPLACED: Final = "\ufffd"
MAX_DIGITS: Final = 38
_TEXTS: Final = (StringType, CharType, VarcharType, BinaryType)
_WHOLE_NUMBER: Final = "[+-]?[0-9]+"
_NUMBER: Final = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
# A JSON time, or a text that Spark infers as a time: it begins with a date.
_TIME: Final = "H:m[:s[.SSSSSSSSS]]"
TIMESTAMP_NTZ_FORMAT: Final = f"yyyy-M-d['T'{_TIME}][' '{_TIME}]"
TIMESTAMP_FORMAT: Final = f"{TIMESTAMP_NTZ_FORMAT}[XXX][XX][X][' 'VV]"
_DATE: Final = "[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}"
# The form of a type's texts; Spark's cast then decides. Other types accept whatever the cast accepts.
_LOOKS: Final[Mapping[type[DataType], str]] = {
    **dict.fromkeys((ByteType, ShortType, IntegerType, LongType), _WHOLE_NUMBER),
    **dict.fromkeys((FloatType, DoubleType, DecimalType), _NUMBER),
    BooleanType: "(?i:true|false)",
    DateType: _DATE,
    TimestampType: f"{_DATE}([ T].+)?",
    TimestampNTZType: f"{_DATE}([ T][0-9:.]+)?",
}
_FORMATS: Final[Mapping[type[DataType], str]] = {
    DateType: "dateformat",
    TimestampType: "timestampformat",
    TimestampNTZType: "timestampntzformat",
}
# The reader's options for special numbers, and their default names.
_NAMED: Final = (("nanvalue", "NaN", "NaN"), ("positiveinf", "Inf", "Infinity"), ("negativeinf", "-Inf", "-Infinity"))
# The options that keep a written row as it was read.
_DIALECT: Final = ("sep", "delimiter", "quote", "escape", "nullvalue")
_UNCHANGED: Final = {"ignoreleadingwhitespace": "false", "ignoretrailingwhitespace": "false"}


def texts_of(schema: StructType) -> StructType:
    """Return the schema to read a file with."""
    return StructType([*(StructField(name, StringType()) for name in schema.names), StructField(CORRUPT, StringType())])


def valued(rows: DataFrame, schema: StructType, options: Mapping[str, str]) -> DataFrame:
    """Return `rows` with the values of `schema` in place of texts; CORRUPT has the row's text if a value is invalid.

    `options` are those of Spark's CSV reader, in lower case. A text is corrupt too if it has U+FFFD and no encoding was
    named, or a carriage return at the row's end, which is part of a line end, in a file whose first line ends with a
    newline alone. Raise StartupError for the option `locale`.
    """
    if "locale" in options:
        raise StartupError("--source-option locale is not supported: read numbers and dates as STRING with --select.")
    damaged, values = [], {}
    for field in schema.fields:
        text = F.col(quoted(field.name))
        if not isinstance(field.dataType, _TEXTS):
            values[field.name] = value = _value(text, field.dataType, options)
            # An empty quoted field: programs that quote all values use it for null.
            damaged.append((text != "") & value.isNull())
            continue
        values[field.name] = text.cast("binary") if isinstance(field.dataType, BinaryType) else text
        if not names_encoding(options):
            damaged.append(text.contains(REPLACED))
        if field is schema.fields[-1] and finds_line_ends(options):
            damaged.append(text.endswith("\r"))
    dialect = {**_UNCHANGED, **{name: value for name, value in options.items() if name in _DIALECT}}
    told = F.to_csv(F.struct(*map(quoted, schema.names)), dialect)
    # A null text passes each test.
    any_damaged = functools.reduce(operator.or_, (F.coalesce(test, F.lit(False)) for test in (*damaged, F.lit(False))))
    return rows.withColumns({**values, CORRUPT: F.coalesce(CORRUPT, F.when(any_damaged, told))})


def _value(text: Column, kind: DataType, options: Mapping[str, str]) -> Column:
    """Return the value of a text, null if the text is not of the type."""
    pattern = options.get(_FORMATS.get(type(kind), ""))
    if pattern is not None:
        return F.try_to_timestamp(text, F.lit(pattern)).cast(kind)
    value = text.try_cast(kind)
    if isinstance(kind, DecimalType):
        value = F.when(_is_exact(text, value, kind), value)
    looks = F.when(text.rlike(rf"^(?:{_LOOKS.get(type(kind), '(?s:.*)')})\z"), value)
    if not isinstance(kind, (FloatType, DoubleType)):
        return looks
    named = {name: meaning for option, default, meaning in _NAMED for name in (options.get(option, default), meaning)}
    return F.coalesce(looks, *(F.when(text == name, F.lit(meaning).cast(kind)) for name, meaning in named.items()))


def _is_exact(text: Column, value: Column, kind: DecimalType) -> Column:
    """Return whether a decimal keeps all digits: those beyond the scale are zeros, or its exponent makes it fit."""
    plain = text.rlike(rf"^[^.eE]*(\.[0-9]{{0,{kind.scale}}}0*)?\z")
    wide = widened(kind)
    return plain | (text.rlike("[eE]") & (text.try_cast(wide) == value.cast(wide)))


def widened(kind: DecimalType) -> DecimalType:
    """Return the type with as many digits before the point, and the most possible after it."""
    return DecimalType(MAX_DIGITS, MAX_DIGITS - kind.precision + kind.scale)


def finds_line_ends(options: Mapping[str, str]) -> bool:
    """Return whether Spark uses the first line end in a file for all of its rows."""
    return options["multiline"].lower() == "true" and "linesep" not in options


def names_encoding(options: Mapping[str, str]) -> bool:
    return any(name.lower() in ("encoding", "charset") for name in options)
