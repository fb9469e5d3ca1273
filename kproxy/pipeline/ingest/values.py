"""Encode values in the wire format of schema registries: a zero byte, the schema's id in four bytes, the payload.

The driver registers the schema, and with Avro and Protobuf checks the columns against it, before anything is written.
Spark itself makes JSON; its Python workers make Avro and Protobuf, with this module and the extra `registry`.
"""

from __future__ import annotations

import functools
import io
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf.message import EncodeError
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name Spark's own documentation uses
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StructType

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import AVRO, JSON_SCHEMA, PROTOBUF, IngestOptions
from kproxy.pipeline.ingest.registry import SHOWN, Registry
from kproxy.pipeline.ingest.schemas import NAME, NESTED, checked, derived, refused, value_type

PROTOC_TIMEOUT_S: Final = 60.0
# What a worker returns for a row: the value, or the reason why there is none.
_MADE: Final = "value binary, problem string"
_TIMESTAMP: Final = "google.protobuf.Timestamp"
# What fastavro and Protobuf raise for a value that their schema does not take.
_UNFIT: Final = (ArithmeticError, AttributeError, EncodeError, LookupError, TypeError, ValueError, struct.error)
# Types of a given schema that hold all that the derived one would hold; `-millis` refuses microseconds row by row.
_WIDER: Final = {
    "int": ("long", "double"),
    "int32": ("sint32", "sfixed32", "int64", "sint64", "sfixed64", "double"),
    "int64": ("sint64", "sfixed64"),
    "float": ("double",),
    "string": ("enum",),
    "bytes": ("fixed",),
    "timestamp-micros": ("timestamp-millis",),
    "local-timestamp-micros": ("local-timestamp-millis",),
}
_LOGICAL: Final = re.compile(r"date|decimal|(local-)?timestamp-mi(cro|lli)s")

Convert = Callable[[Any], Any]


class RegisteredValues:
    """Encodes the values of a job with a `value_format`; the schema is registered when it is first needed."""

    def __init__(self, options: IngestOptions) -> None:
        self._options = options
        self._made: dict[str, Convert] = {}

    def column(self, record: Column, kind: StructType, as_json: Column) -> Column:
        """Return the values of the column `record`, each with its problem if any. Raise StartupError.

        `as_json` is the same column as JSON.
        """
        # Not its JSON: micro-batches may differ from their stream in what may be null.
        name = kind.simpleString()
        if name not in self._made:
            self._made = {name: self._registered(kind)}
        return self._made[name](as_json if self._options.value_format == JSON_SCHEMA else _numbers(record, kind))

    def _registered(self, kind: StructType) -> Convert:
        form, registry = str(self._options.value_format), Registry(self._options)
        latest = registry.latest()
        text = latest[1] if latest is not None else self._options.value_schema or derived(form, kind)
        schema = compiled(text) if form == PROTOBUF else text.encode()
        if form != JSON_SCHEMA:
            Encoder(form, schema, kind.json()).writer()
        prefix = struct.pack(">bI", 0, registry.id_of(text) if latest is None else latest[0])
        if form == JSON_SCHEMA:
            no_problem = F.lit(None).cast("string").alias("problem")
            return lambda value: F.struct(F.concat(F.lit(prefix), value).alias("value"), no_problem)
        # Deterministic functions are called once for each use of their column.
        encode = Encoder(form, schema, kind.json(), prefix).value
        made: Convert = F.udf(encode, _MADE, useArrow=False).asNondeterministic()
        return made


class Encoder(NamedTuple):
    """Encode rows as values. `schema` is Avro's text, or Protobuf's compiled files; `kind` is Spark's JSON."""

    form: str
    schema: bytes
    kind: str
    prefix: bytes = b""

    def value(self, row: Any) -> tuple[bytes | None, str | None]:
        try:
            return None if row is None else self.prefix + self.writer()(row), None
        except _UNFIT as error:
            return None, f"{type(error).__name__}: {error}"[:SHOWN]

    @functools.lru_cache(maxsize=16)  # noqa: B019 - all that it holds is the job's
    def writer(self) -> Callable[[Any], bytes]:
        """Return the function that encodes a row's payload. Raise StartupError if columns do not fit the schema."""
        kind = StructType.fromJson(json.loads(self.kind))
        return (_avro_writer if self.form == AVRO else _proto_writer)(self.schema, kind)


def _numbers(column: Column, kind: DataType) -> Column:
    """Return the column with numbers for dates and times: Python's depend on its time zone, and end in 9999."""
    if isinstance(kind, StructType):
        fields = [_numbers(column.getField(each.name), each.dataType).alias(each.name) for each in kind.fields]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda each: _numbers(each, kind.elementType))
    if isinstance(kind, MapType):
        return F.transform_values(column, lambda _, each: _numbers(each, kind.valueType))
    if kind.typeName() == "timestamp_ntz":
        # Spark's own functions to a number convert it by the session's time zone.
        return column.cast("string")
    number = {"date": F.unix_date, "timestamp": F.unix_micros}.get(kind.typeName())
    return column if number is None else number(column)


class _Shape(NamedTuple):
    """A type of a schema: its name, the fields of a record or the one type in an array or map (by the name "")."""

    name: str
    parts: Mapping[str, Any] = {}
    # Fields without which there is no record.
    needed: tuple[str, ...] = ()
    scale: int = 0
    # Makes a message of its fields.
    made: Callable[..., Any] | None = None


def _fit(form: str, look: Callable[[Any], _Shape], kind: DataType, node: Any, path: str) -> Convert:
    """Return the function from a column's Python value to the library's value. Raise StartupError.

    `look` returns the shape of `node`, a node of the schema.
    """
    shape = look(node)
    made = shape.made or dict
    if isinstance(kind, StructType) and shape.name == "record":
        fields = _fields(form, look, kind, shape, path)
        return _unless_null(lambda row: made(**{name: how(one) for (name, how), one in zip(fields, row, strict=True)}))
    if isinstance(kind, ArrayType) and shape.name == "array":
        each = _fit(form, look, kind.elementType, shape.parts[""], path)
        return _unless_null(lambda values: [each(one) for one in values])
    if isinstance(kind, MapType) and shape.name == "map":
        each = _fit(form, look, value_type(kind, path, form), shape.parts[""], path)
        return _unless_null(lambda values: {key: each(one) for key, one in values.items()})
    wanted = None if isinstance(kind, NESTED) else checked(kind, path, form)[0]
    short = isinstance(kind, DecimalType) and form == AVRO and shape.scale < kind.scale
    if short or (shape.name != wanted and shape.name not in _WIDER.get(str(wanted), ())):
        more = f" of scale {shape.scale}" if short else ""
        raise refused(path, kind, form, f"the schema has {shape.name}{more} for it")
    convert: Convert = _SCALARS.get((form, kind.typeName()), lambda value: value)
    if shape.name.endswith("-millis"):
        return _unless_null(lambda time: _millis(convert(time)))
    return _unless_null(convert if shape.made is None else lambda value: made(**convert(value)))


def _fields(
    form: str, look: Callable[[Any], _Shape], kind: StructType, shape: _Shape, path: str
) -> list[tuple[str, Convert]]:
    if missing := [name for name in shape.needed if name not in kind.names]:
        raise StartupError(f"no column has the name of the schema's field {missing[0]}: add one with --select.")
    fields = []
    for field in kind.fields:
        where = f"{path}.{field.name}"
        if field.name not in shape.parts:
            raise refused(where, field.dataType, form, "the schema has no such field")
        fields.append((field.name, _fit(form, look, field.dataType, shape.parts[field.name], where)))
    return fields


def _unless_null(how: Convert) -> Convert:
    return lambda value: None if value is None else how(value)


def _millis(micros: int) -> int:
    if micros % 1000:
        raise ValueError("a time has microseconds, but its type in the schema has milliseconds")
    return micros // 1000


_SCALARS: Final[Mapping[tuple[str, str], Convert]] = {
    (PROTOBUF, "binary"): bytes,
    (PROTOBUF, "decimal"): "{:f}".format,
    (PROTOBUF, "date"): lambda days: (date(1970, 1, 1) + timedelta(days)).isoformat(),
    (PROTOBUF, "timestamp"): lambda micros: {"seconds": micros // 1_000_000, "nanos": micros % 1_000_000 * 1000},
    (PROTOBUF, "timestamp_ntz"): lambda text: datetime.fromisoformat(text).isoformat(),
    (AVRO, "timestamp_ntz"): lambda text: (datetime.fromisoformat(text) - datetime(1970, 1, 1)) // timedelta.resolution,
}


def _avro_writer(schema: bytes, kind: StructType) -> Callable[[Any], bytes]:
    import fastavro

    named: dict[str, Any] = {}
    try:
        parsed = fastavro.parse_schema(json.loads(schema), named)
    except (ValueError, LookupError, TypeError, AttributeError, fastavro.schema.SchemaParseException) as error:
        raise StartupError(f"the schema of the values is not valid Avro ({error!r}): correct it.") from error
    convert = _fit(AVRO, functools.partial(_avro_shape, named), kind, parsed, NAME)

    def write(row: Any) -> bytes:
        into = io.BytesIO()
        fastavro.schemaless_writer(into, parsed, convert(row))
        return into.getvalue()

    return write


def _avro_shape(named: Mapping[str, Any], node: Any) -> _Shape:
    if isinstance(node, list):
        types = [each for each in node if each != "null"]
        return _avro_shape(named, types[0]) if len(types) == 1 else _Shape("a union of several types")
    node = named.get(node, node) if isinstance(node, str) else node
    node = node if isinstance(node, dict) else {"type": node}
    name = str(node["type"])
    if name == "record":
        needed = tuple(field["name"] for field in node["fields"] if "default" not in field)
        return _Shape(name, {field["name"]: field["type"] for field in node["fields"]}, needed)
    if name in ("array", "map"):
        return _Shape(name, {"": node["items" if name == "array" else "values"]})
    logical = str(node.get("logicalType"))
    return _Shape(logical if _LOGICAL.fullmatch(logical) else name, scale=node.get("scale", 0))


def compiled(text: str) -> bytes:
    """Compile the text of a .proto file. Raise StartupError."""
    with tempfile.TemporaryDirectory() as directory:
        source, compiled = Path(directory, "value.proto"), Path(directory, "compiled")
        source.write_text(text, encoding="utf-8")
        command = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{directory}", "--include_imports"]
        command += [f"--descriptor_set_out={compiled}", source.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROTOC_TIMEOUT_S, check=False)  # noqa: S603
        if done.returncode != 0:
            said = " ".join(done.stderr.split())[:SHOWN]
            raise StartupError(f"the schema of the values cannot be compiled by protoc ({said}): correct it.")
        return compiled.read_bytes()


def _proto_writer(schema: bytes, kind: StructType) -> Callable[[Any], bytes]:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool

    pool, files = DescriptorPool(), FileDescriptorSet.FromString(schema).file
    for file in files:
        pool.Add(file)
    messages = pool.FindFileByName(files[-1].name).message_types_by_name
    if not messages:
        raise StartupError("the schema of the values has no message: give a .proto file with one.")
    convert = _fit(PROTOBUF, _proto_shape, kind, messages[files[-1].message_type[0].name], NAME)
    # A zero byte stands for the first message of the file.
    return lambda row: b"\0" + convert(row).SerializeToString(deterministic=True)


def _proto_shape(node: Any) -> _Shape:
    """Return the shape of a message, of a field, or of a field's one element (in a list)."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto
    from google.protobuf.message_factory import GetMessageClass

    field = node[0] if isinstance(node, list) else node
    message = getattr(field, "message_type", field)
    if node is field is not message:
        if message is not None and message.GetOptions().map_entry:
            key = _proto_shape(message.fields_by_name["key"]).name
            name = "map" if key == "string" else f"a map by {key}"
            return _Shape(name, {"": message.fields_by_name["value"]})
        if field.is_repeated:
            return _Shape("array", {"": [field]})
    if message is None:
        return _Shape(FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower())
    name = _TIMESTAMP if message.full_name == _TIMESTAMP else "record"
    return _Shape(name, message.fields_by_name, made=GetMessageClass(message))
