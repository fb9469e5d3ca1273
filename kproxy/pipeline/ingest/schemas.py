"""Derive the schema of values from the columns of a DataFrame: Avro, Protobuf and JSON Schema.

Every column may be null, whatever Spark knows of it. Otherwise another expression for a column would change the schema,
and a new column would not be compatible with earlier schemas.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StringType, StructType

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import AVRO, JSON_SCHEMA, PROTOBUF

# By Spark's type: Avro's type or logical type, Protobuf's type, and JSON Schema's type with its format.
SCALARS: Final = {
    "boolean": ("boolean", "bool", "boolean"),
    "byte": ("int", "int32", "integer"),
    "short": ("int", "int32", "integer"),
    "integer": ("int", "int32", "integer"),
    "long": ("long", "int64", "integer"),
    "float": ("float", "float", "number"),
    "double": ("double", "double", "number"),
    "decimal": ("decimal", "string", "number"),
    "string": ("string", "string", "string"),
    "char": ("string", "string", "string"),
    "varchar": ("string", "string", "string"),
    "binary": ("bytes", "bytes", "string"),
    "date": ("date", "string", "string date"),
    "timestamp": ("timestamp-micros", "google.protobuf.Timestamp", "string date-time"),
    "timestamp_ntz": ("local-timestamp-micros", "string", "string"),
}
FORMATS: Final = (AVRO, PROTOBUF, JSON_SCHEMA)
NESTED: Final = (StructType, ArrayType, MapType)
# The name of the message or record.
NAME: Final = "Value"
_NAMES: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOGICAL: Final = {"date": "int", "timestamp-micros": "long", "local-timestamp-micros": "long"}
_TIMESTAMP: Final = 'import "google/protobuf/timestamp.proto";\n\n'


def derived(form: str, kind: StructType) -> str:
    """Return the schema's text; `form` is one of FORMATS. Raise StartupError that names a column without a place."""
    if form == PROTOBUF:
        text = _message(kind, NAME, NAME, "")
        return f'syntax = "proto3";\n\n{_TIMESTAMP if "google" in text else ""}{text}'
    return json.dumps(_avro(kind, NAME) if form == AVRO else {"title": NAME, **_json(kind, NAME)})


def refused(path: str, kind: DataType, form: str, why: str) -> StartupError:
    """Return the error for the column at `path`, which begins with NAME."""
    what = "the value" if path == NAME else f"the column {path.removeprefix(f'{NAME}.')}"
    return StartupError(
        f"{what} ({kind.simpleString()}) cannot be written as {form}: {why}; change it with --select, or omit it "
        "with --value."
    )


def checked(kind: DataType, path: str, form: str) -> tuple[str, str]:
    """Return the type of a scalar in `form`, and its format. Raise StartupError if there is none."""
    found = SCALARS.get(kind.typeName())
    if found is None:
        raise refused(path, kind, form, "the format has no such type")
    name, _, more = found[FORMATS.index(form)].partition(" ")
    return name, more


def value_type(kind: MapType, path: str, form: str) -> DataType:
    """Return the type of a map's values. Raise StartupError if its keys are not text."""
    if not isinstance(kind.keyType, StringType):
        raise refused(path, kind, form, "keys of maps must be STRING")
    return kind.valueType


def _named(name: str, path: str, kind: DataType, form: str) -> str:
    if not _NAMES.fullmatch(name):
        raise refused(f"{path}.{name}", kind, form, "names may have only letters, digits and _")
    return f"{path}.{name}"


def _avro(kind: DataType, path: str) -> Any:
    if isinstance(kind, StructType):
        fields = []
        for field in kind.fields:
            inner = _avro(field.dataType, _named(field.name, path, field.dataType, AVRO))
            fields.append({"name": field.name, "type": ["null", inner], "default": None})
        # The path is the name, so that no two records have the same.
        return {"type": "record", "name": path, "fields": fields}
    if isinstance(kind, ArrayType):
        return {"type": "array", "items": ["null", _avro(kind.elementType, path)]}
    if isinstance(kind, MapType):
        return {"type": "map", "values": ["null", _avro(value_type(kind, path, AVRO), path)]}
    name, _ = checked(kind, path, AVRO)
    if isinstance(kind, DecimalType):
        return {"type": "bytes", "logicalType": name, "precision": kind.precision, "scale": kind.scale}
    return {"type": _LOGICAL[name], "logicalType": name} if name in _LOGICAL else name


def _json(kind: DataType, path: str) -> dict[str, Any]:
    def nullable(inner: DataType, where: str = path) -> dict[str, Any]:
        return {"oneOf": [{"type": "null"}, _json(inner, where)]}

    if isinstance(kind, StructType):
        fields = {field.name: nullable(field.dataType, f"{path}.{field.name}") for field in kind.fields}
        # Closed: registries take a new property of an open object for incompatible.
        return {"type": "object", "properties": fields, "additionalProperties": False}
    if isinstance(kind, ArrayType):
        return {"type": "array", "items": nullable(kind.elementType)}
    if isinstance(kind, MapType):
        return {"type": "object", "additionalProperties": nullable(value_type(kind, path, JSON_SCHEMA))}
    name, form = checked(kind, path, JSON_SCHEMA)
    return {"type": name, **({"format": form} if form else {})}


def _message(kind: StructType, name: str, path: str, indent: str) -> str:
    """Return the text of a Protobuf message, whose fields are numbered in their order."""
    lines = []
    for number, field in enumerate(kind.fields, 1):
        where, one, form = _named(field.name, path, field.dataType, PROTOBUF), field.dataType, "optional {}"
        if isinstance(one, ArrayType):
            form, one = "repeated {}", one.elementType
        elif isinstance(one, MapType):
            form, one = "map<string, {}>", value_type(one, where, PROTOBUF)
        if isinstance(one, StructType):
            of = f"{field.name[:1].upper()}{field.name[1:]}Value"
            lines.append(_message(one, of, where, f"{indent}  "))
        elif isinstance(one, NESTED):
            raise refused(where, field.dataType, PROTOBUF, "arrays and maps cannot contain arrays or maps")
        else:
            of, _ = checked(one, where, PROTOBUF)
        lines.append(f"{indent}  {form.format(of)} {field.name} = {number};\n")
    return f"{indent}message {name} {{\n{''.join(lines)}{indent}}}\n"
