"""The schema registry as ingest asks it, the schemas that it derives, and the values that fit them or do not."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    CalendarIntervalType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import AVRO, JSON_SCHEMA, LATEST, PROTOBUF, IngestOptions
from kproxy.pipeline.ingest.registry import Registry
from kproxy.pipeline.ingest.schemas import FORMATS, SCALARS, derived
from kproxy.pipeline.ingest.values import Encoder, compiled
from tests.support.clients.schema_registry import StandIn, standing_in
from tests.support.processes.ports import free_port

DOCS = Path(__file__).parents[3] / "docs" / "ingest.md"
SCHEMA = '{"type": "record", "name": "Value", "fields": [{"name": "a", "type": "long"}]}'


@pytest.fixture
def registry() -> Iterator[StandIn]:
    with standing_in() as started:
        yield started


def options(url: str, value_format: Any = AVRO, **more: Any) -> IngestOptions:
    made = IngestOptions("csv:in/", "ck", topic="t", value_format=value_format, registry=url, **more)
    made.check()
    return made


def of(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def encoder(form: str, schema: str, kind: StructType) -> Encoder:
    return Encoder(form, compiled(schema) if form == PROTOBUF else schema.encode(), kind.json(), b"")


def test_schema_is_registered_once(registry: StandIn) -> None:
    assert [Registry(options(registry.url)).id_of(SCHEMA) for _ in range(2)] == [1, 1]
    assert registry.schemas == [(SCHEMA, "AVRO")]
    # The second time it was looked up, which needs no right to write.
    assert [each for each in registry.asked if each.endswith("/versions")] == ["POST /subjects/t-value/versions"]


def test_latest_schema_is_taken_from_its_subject(registry: StandIn) -> None:
    asked = options(f"{registry.url}/", subject="a/b ä", value_schema=LATEST)
    with pytest.raises(StartupError, match=rf"no subject a/b ä at --registry {registry.url}/: register its schema"):
        Registry(asked).latest()
    given = Registry(replace(asked, value_schema=SCHEMA))
    given.id_of(SCHEMA)
    assert (Registry(asked).latest(), given.latest()) == ((1, SCHEMA), None)


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ((401, b"<html>"), r"--registry http://\S+ refuses a client without a user for subject t-value \(401: no mess"),
        ((403, b'{"error_code":40301,"message":"not yours"}'), r"\(403: not yours\): give --registry-user, and its pa"),
        (
            (404, b'{"error_code":404,"message":"HTTP 404 Not Found"}'),
            "is not a schema registry .*answer: 404 for subject",
        ),
        ((404, b"<html>"), "is not a schema registry .* its base address"),
        ((200, b"[]"), "is not a schema registry .*answer: 200"),
        ((200, b'{"cluster":"etcd"}'), "is not a schema registry"),
        (
            (422, b'{"error_code":42201,"message":"Either\\nbad"}'),
            r"subject t-value at .* \(422: Either bad\): correct",
        ),
        ((500, b'{"error_code":50001,"message":"Error in the store"}'), r"\(500: Error in the store\): see the regis"),
    ],
)
def test_refusals_name_registry_subject_and_message(registry: StandIn, instead: tuple[int, bytes], said: str) -> None:
    registry.instead = instead
    with pytest.raises(StartupError, match=said):
        Registry(options(registry.url)).id_of(SCHEMA)


def test_incompatible_schema_is_refused_by_registry(registry: StandIn) -> None:
    Registry(options(registry.url)).id_of(SCHEMA)
    said = (
        r"not compatible with earlier ones of subject t-value at --registry \S+ \(409: Schema being registered is inc"
    )
    with pytest.raises(StartupError, match=said):
        Registry(options(registry.url)).id_of(SCHEMA.replace("long", "string"))
    with pytest.raises(StartupError, match="has schemas of AVRO, not PROTOBUF: give another --subject"):
        Registry(options(registry.url, PROTOBUF)).latest()


def test_user_and_password_are_sent_but_not_shown(registry: StandIn) -> None:
    registry.user = ("alice", "sécret")
    mine = options(registry.url, registry_user="alice", registry_password="sécret")
    assert Registry(mine).id_of(SCHEMA) == 1
    assert "sécret" not in repr(mine)
    with pytest.raises(StartupError, match=r"refuses the user alice for subject t-value \(401: Unauthorized\)"):
        Registry(replace(mine, registry_password="wrong")).latest()


def test_absent_registry_is_named() -> None:
    with pytest.raises(StartupError, match=r"no answer from --registry http://127.0.0.1:\d+ \(.*refused\): start it"):
        Registry(options(f"http://127.0.0.1:{free_port()}")).latest()


def test_missing_library_error_names_the_extra(registry: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.pipeline.ingest.registry._NEEDED", {AVRO: "no_such_library"})
    with pytest.raises(StartupError, match=r"--value-format avro needs no_such_library: run `pip install .*registry\]"):
        Registry(options(registry.url)).latest()
    Registry(options(registry.url, JSON_SCHEMA)).latest()


STRUCT = of(x=CalendarIntervalType())


@pytest.mark.parametrize(
    ("kind", "forms", "said"),
    [
        (of(a=CalendarIntervalType()), FORMATS, r"column a \(interval\) cannot be written as \S+: the format has no"),
        (of(s=ArrayType(STRUCT)), FORMATS, r"the column s\.x \(interval\) cannot be written"),
        (of(m=MapType(LongType(), LongType())), FORMATS, r"the column m .*keys of maps must be STRING"),
        (
            StructType([StructField("a b", LongType())]),
            (AVRO, PROTOBUF),
            r"the column a b \(bigint\) .*letters, digits",
        ),
        (
            of(a=ArrayType(ArrayType(LongType()))),
            (PROTOBUF,),
            r"the column a \(array<array<bigint>>\) .*cannot contain arrays",
        ),
        (of(a=MapType(StringType(), ArrayType(LongType()))), (PROTOBUF,), "arrays and maps cannot contain arrays"),
    ],
)
def test_column_without_a_type_is_named(kind: StructType, forms: tuple[str, ...], said: str) -> None:
    for form in FORMATS:
        if form in forms:
            with pytest.raises(StartupError, match=said):
                derived(form, kind)
        else:
            assert derived(form, kind)


def record(*fields: tuple[str, Any]) -> str:
    return json.dumps(
        {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields]}
    )


def proto(*lines: str) -> str:
    return 'syntax = "proto3"; import "google/protobuf/timestamp.proto"; message M { ' + " ".join(lines) + " }"


MONEY = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 1}


@pytest.mark.parametrize(
    ("form", "schema", "kind", "said"),
    [
        (AVRO, "{", of(a=LongType()), "is not valid Avro"),
        (AVRO, record(("a", "nonsense")), of(a=LongType()), "is not valid Avro"),
        (AVRO, record(("b", "long")), of(b=LongType(), a=LongType()), r"the column a \(bigint\) .*has no such field"),
        (AVRO, record(("a", "long"), ("b", "long")), of(a=LongType()), "of the schema's field b: add one"),
        (
            AVRO,
            record(("a", ["null", "int"])),
            of(a=LongType()),
            r"the column a \(bigint\) .*the schema has int for it",
        ),
        (AVRO, record(("a", ["int", "string"])), of(a=LongType()), "a union of several types for it"),
        (AVRO, record(("a", MONEY)), of(a=DecimalType(9, 2)), "the schema has decimal of scale 1 for it"),
        (AVRO, record(("a", "long")), of(a=TimestampType()), r"the column a \(timestamp\) .*has long for it"),
        (AVRO, record(("a", "long")), of(a=ArrayType(LongType())), "has long for it"),
        (AVRO, record(("a", {"type": "map", "values": "int"})), of(a=MapType(StringType(), LongType())), "has int for"),
        (PROTOBUF, "message M {", of(a=LongType()), "cannot be compiled by protoc .*value.proto"),
        (PROTOBUF, 'syntax = "proto3";', of(a=LongType()), "has no message"),
        (PROTOBUF, 'import "other.proto"; message M {}', of(a=LongType()), "cannot be compiled .*other.proto"),
        (PROTOBUF, proto("int64 b = 1;"), of(a=LongType()), r"the column a \(bigint\) .*has no such field"),
        (PROTOBUF, proto("int32 a = 1;"), of(a=LongType()), "the schema has int32 for it"),
        (PROTOBUF, proto("repeated int64 a = 1;"), of(a=LongType()), "the schema has array for it"),
        (PROTOBUF, proto("map<int32, int64> a = 1;"), of(a=MapType(StringType(), LongType())), "a map by int32 for it"),
        (
            PROTOBUF,
            proto("google.protobuf.Timestamp a = 1;"),
            of(a=StringType()),
            r"google\.protobuf\.Timestamp for it",
        ),
        (PROTOBUF, proto("message I { int32 x = 1; } I a = 1;"), of(a=of(y=LongType())), r"the column a\.y .*no such"),
    ],
)
def test_given_schema_must_fit_the_columns(form: str, schema: str, kind: StructType, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        encoder(form, schema, kind).writer()


def test_given_avro_schema_decides_types() -> None:
    suit = {"type": "enum", "name": "S", "symbols": ["up", "down"]}
    millis = {"type": "long", "logicalType": "timestamp-millis"}
    node = {"type": "record", "name": "N", "fields": [{"name": "x", "type": ["null", "S"]}]}
    schema = record(("at", millis), ("s", suit), ("n", ["long", "null"]), ("r", {"type": "array", "items": node}))
    more = json.loads(schema)
    more["fields"].append({"name": "d", "type": "string", "default": "none"})
    kind = of(n=ByteType(), s=StringType(), at=TimestampType(), r=ArrayType(of(x=StringType())))
    made = encoder(AVRO, json.dumps(more), kind)
    value, problem = made.value((5, "up", 1_000, [("down",), (None,)]))
    assert problem is None
    read = fastavro.schemaless_reader(io.BytesIO(value or b""), fastavro.parse_schema(more), None)
    assert {**read, "at": read["at"].timestamp()} == {
        "n": 5,
        "s": "up",
        "at": 0.001,
        "r": [{"x": "down"}, {"x": None}],
        "d": "none",
    }
    local = {"type": "long", "logicalType": "local-timestamp-millis"}
    times = encoder(AVRO, record(("t", local)), of(t=TimestampNTZType()))
    assert times.value(("1969-12-31 23:59:59.999",)) == (b"\x01", None)
    assert "has microseconds" in str(times.value(("1970-01-01 00:00:00.0001",))[1])
    assert times.value(("+12026-01-01 00:00:00",))[0] is None
    for row, said in (
        ((5, "up", 1_001, []), "has microseconds"),
        ((5, "off", 1_000, []), "off"),
        ((5, None, 1_000, []), "None"),
        ((5, "up", 1_000, [None]), "None"),
    ):
        value, problem = made.value(row)
        assert value is None
        assert said in str(problem)


def test_given_protobuf_schema_decides_types() -> None:
    text = proto(
        "enum E { ZERO = 0; ONE = 1; }", "sint64 n = 7;", "E e = 2;", "map<string, string> m = 3;", "int32 z = 4;"
    )
    kind = of(e=StringType(), n=LongType(), m=MapType(StringType(), DecimalType(20, 10)))
    made = encoder(PROTOBUF, text, kind)
    tiny = Decimal("0.0000000001")
    assert made.value(("ONE", -1, {"k": tiny})) == (b"\0\x10\x01\x1a\x11\n\x01k\x12\x0c0.0000000001\x38\x01", None)
    assert made.value((None, None, None)) == (b"\0", None)
    assert made.value(("TWO", 1, {}))[0] is None
    assert made.value(("ONE", 1, {"k": None}))[0] is None
    # Python's dates end with the year 9999.
    dates = encoder(PROTOBUF, derived(PROTOBUF, of(d=DateType())), of(d=DateType()))
    assert dates.value((10_000_000,))[0] is None
    assert dates.value((-1,)) == (b"\0\n\n1969-12-31", None)


def test_required_field_without_value_is_no_value() -> None:
    made = encoder(PROTOBUF, 'syntax = "proto2"; message M { required int32 a = 1; }', of(a=IntegerType()))
    assert made.value((1,)) == (b"\0\x08\x01", None)
    value, problem = made.value((None,))
    assert value is None
    assert "a" in str(problem)


def test_new_column_keeps_earlier_fields() -> None:
    before, after = (of(a=LongType()), of(a=LongType(), b=DoubleType()))
    value, _ = encoder(AVRO, derived(AVRO, before), before).value((1,))
    schemas = [fastavro.parse_schema(json.loads(derived(AVRO, kind))) for kind in (before, after)]
    assert fastavro.schemaless_reader(io.BytesIO(value or b""), *schemas) == {"a": 1, "b": None}


def test_documented_types_are_those_derived() -> None:
    rows = [line.strip("|").split("|") for line in DOCS.read_text().splitlines() if line.startswith("| ")]
    told = {row[0].strip(): [cell.split("`")[1] for cell in row[1:] if "`" in cell] for row in rows if len(row) == 4}
    names = {"byte": "TINYINT", "short": "SMALLINT", "integer": "INT", "long": "BIGINT"}
    for kind, expected in SCALARS.items():
        of_kind = next(cells for name, cells in told.items() if names.get(kind, kind.upper()) in name.split(", "))
        assert of_kind == [each.split(" ")[0] for each in expected], kind
