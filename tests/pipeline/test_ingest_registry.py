"""Values with a schema in a registry: written by Spark, read back by other decoders with the registered schema.

The registry is a stand-in, and in long runs Apicurio.
"""

from __future__ import annotations

import datetime
import io
import json
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import fastjsonschema  # type: ignore[import-untyped]
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

import kproxy_spark
from kproxy.cli import main
from kproxy.pipeline.ingest.options import AVRO, JSON_SCHEMA, LATEST, PROTOBUF
from tests.support.clients.kafka_io import read_topic
from tests.support.clients.schema_registry import apicurio, schema_of, standing_in
from tests.support.pages import blocks
from tests.support.processes.dev import KproxyProcess

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

UTC = datetime.UTC
# A column in SQL, and its value as Avro's reader, Protobuf's JSON and JSON have it. The hour comes twice in Berlin.
COLUMNS: dict[str, tuple[str, Any, Any, Any]] = {
    "b": ("true", True, True, True),
    "i8": ("tinyint(-128)", -128, -128, -128),
    "i16": ("smallint(32767)", 32767, 32767, 32767),
    "i": ("int(-2147483648)", -(2**31), -(2**31), -(2**31)),
    "l": ("9223372036854775807", 2**63 - 1, str(2**63 - 1), 2**63 - 1),
    "f": ("float(0.1)", struct.unpack("f", struct.pack("f", 0.1))[0], 0.1, 0.1),
    "d": ("double(0.1)", 0.1, 0.1, 0.1),
    "money": ("-12345678.90BD", Decimal("-12345678.90"), "-12345678.90", Decimal("-12345678.90")),
    "wide": (
        "cast('1234567890123456789012345678.0000000001' as decimal(38,10))",
        Decimal("1234567890123456789012345678.0000000001"),
        "1234567890123456789012345678.0000000001",
        Decimal("1234567890123456789012345678.0000000001"),
    ),
    "s": ("'é \"€\" 😀'", 'é "€" 😀', 'é "€" 😀', 'é "€" 😀'),
    "none": ("''", "", "", ""),
    "bin": ("x'00ff80'", b"\x00\xff\x80", "AP+A", "AP+A"),
    "day": ("date'1899-12-31'", datetime.date(1899, 12, 31), "1899-12-31", "1899-12-31"),
    "at": (
        "timestamp'2026-10-25 02:30:00.000001+01:00'",
        datetime.datetime(2026, 10, 25, 1, 30, 0, 1, UTC),
        "2026-10-25T01:30:00.000001Z",
        "2026-10-25T01:30:00.000001Z",
    ),
    "early": (
        "timestamp'1815-06-18 11:35:00.999999Z'",
        datetime.datetime(1815, 6, 18, 11, 35, 0, 999999, UTC),
        "1815-06-18T11:35:00.999999Z",
        "1815-06-18T11:35:00.999999Z",
    ),
    "local": (
        "timestamp_ntz'2026-03-29 02:30:00.5'",
        datetime.datetime(2026, 3, 29, 2, 30, 0, 500000),
        "2026-03-29T02:30:00.500000",
        "2026-03-29T02:30:00.500000",
    ),
    "inner": (
        "named_struct('x', 1, 'deep', named_struct('at', timestamp_micros(1), 'no', cast(null as string)))",
        {"x": 1, "deep": {"at": datetime.datetime(1970, 1, 1, 0, 0, 0, 1, UTC), "no": None}},
        {"x": 1, "deep": {"at": "1970-01-01T00:00:00.000001Z"}},
        {"x": 1, "deep": {"at": "1970-01-01T00:00:00.000001Z", "no": None}},
    ),
    "days": (
        "array(date'1970-01-02', date'0001-01-01')",
        [datetime.date(1970, 1, 2), datetime.date(1, 1, 1)],
        ["1970-01-02", "0001-01-01"],
        ["1970-01-02", "0001-01-01"],
    ),
    "items": (
        "array(named_struct('price', 1.5BD), named_struct('price', null))",
        [{"price": Decimal("1.5")}, {"price": None}],
        [{"price": "1.5"}, {}],
        [{"price": Decimal("1.5")}, {"price": None}],
    ),
    "counts": ("map('a', 1L, 'é', -2L)", {"a": 1, "é": -2}, {"a": "1", "é": "-2"}, {"a": 1, "é": -2}),
    "named": (
        "map('k', named_struct('local', timestamp_ntz'1969-12-31 23:59:59.999999'))",
        {"k": {"local": datetime.datetime(1969, 12, 31, 23, 59, 59, 999999)}},
        {"k": {"local": "1969-12-31T23:59:59.999999"}},
        {"k": {"local": "1969-12-31T23:59:59.999999"}},
    ),
}


@pytest.fixture(scope="module", params=["stand-in", pytest.param("apicurio", marks=pytest.mark.long)])
def registry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "apicurio":
        with apicurio(tmp_path_factory.mktemp("registry")) as url:
            yield url
        return
    with standing_in() as started:
        yield started.url


@pytest.fixture
def target(dev_cluster: KproxyProcess, registry: str) -> dict[str, Any]:
    topic = f"registry-{uuid.uuid4().hex[:8]}"
    return {"topic": topic, "partitions": 1, "bootstrap_servers": dev_cluster.kafka, "registry": registry}


def read(target: dict[str, Any], at_least: int) -> list[tuple[bytes | None, bytes | None]]:
    records = read_topic(target["bootstrap_servers"], target["topic"], 1, at_least)
    return [(record.key, record.value) for record in records]


def decoded(form: str, target: dict[str, Any], value: bytes, directory: Path) -> Any:
    """The value as a consumer reads it, with the schema that its id names."""
    magic, schema_id = struct.unpack(">bI", value[:5])
    assert magic == 0
    text = schema_of(target["registry"], schema_id)
    if form == AVRO:
        into = io.BytesIO(value[5:])
        found = fastavro.schemaless_reader(into, fastavro.parse_schema(json.loads(text)), None)
        assert into.read() == b""
        return found
    if form == JSON_SCHEMA:
        fastjsonschema.validate(json.loads(text), json.loads(value[5:]))
        return json.loads(value[5:], parse_float=lambda digits: Decimal(digits) if len(digits) > 3 else float(digits))
    assert value[5] == 0, "not the first message"
    (directory / "a.proto").write_text(text)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{directory}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={directory / 'set'}", "a.proto"], check=True)
    files = descriptor_pb2.FileDescriptorSet.FromString((directory / "set").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("Value")).FromString(value[6:])
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


@pytest.mark.parametrize(("number", "form"), [(1, AVRO), (2, PROTOBUF), (3, JSON_SCHEMA)])
def test_every_type_is_read_back(spark: Any, target: dict[str, Any], number: int, form: Any, tmp_path: Path) -> None:
    selected = [f"if(id = 0, {sql}, null) AS {name}" for name, (sql, *_) in COLUMNS.items()]
    rows = spark.range(0, 2, 1, 1).selectExpr("id", *selected)
    options = {**target, "value_format": form, "key": "id", "value": tuple(COLUMNS)}
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        done = kproxy_spark.start(rows, **options)
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert (done.written, done.dead) == (2, {})
    (_, full), (_, empty) = sorted(read(target, 2))
    expected = {name: each[number] for name, each in COLUMNS.items()}
    assert decoded(form, target, full or b"", tmp_path) == expected
    nothing = {} if form == PROTOBUF else dict.fromkeys(COLUMNS)
    assert decoded(form, target, empty or b"", tmp_path) == nothing


def test_rows_that_do_not_fit_are_dead_letters(spark: Any, target: dict[str, Any], tmp_path: Path) -> None:
    schema = json.dumps({"type": "record", "name": "R", "fields": [{"name": "n", "type": "long"}]})
    options = {**target, "value_format": AVRO, "value_schema": schema}
    rows = spark.range(4).selectExpr("if(id = 2, null, named_struct('n', if(id = 1, null, id))) AS r", "id")
    with pytest.raises(
        kproxy_spark.SparkFailed, match=r"does not fit the schema in the registry \(TypeError: .*field n\): give --d"
    ):
        kproxy_spark.start(rows, value_column="r", **options)
    done = kproxy_spark.start(rows, value_column="r", key="id", dead_letters=f"json:{tmp_path / 'dead'}", **options)
    assert (done.written, done.dead) == (3, {"not of the schema": 1})
    (letter,) = spark.read.json(str(tmp_path / "dead")).collect()
    assert json.loads(letter["record"]) == {"r": {"n": None}, "id": 1}
    found = dict(each for each in read(target, 3) if each[0] is not None)
    # A struct that is null is a null value.
    assert found.pop(b"2") is None
    read_back = {key: decoded(AVRO, target, value or b"", tmp_path)["n"] for key, value in found.items()}
    assert read_back == {b"0": 0, b"3": 3}
    # NaN is a number of Avro's.
    done = kproxy_spark.start(spark.sql("select double('nan') AS n"), value_format=AVRO, subject="nan", **target)
    assert (done.written, done.dead) == (1, {})


def test_refused_schemas_write_nothing(spark: Any, target: dict[str, Any]) -> None:
    def start(rows: Any, **more: Any) -> None:
        kproxy_spark.start(rows, **{"value_format": AVRO, **target, **more})

    one = spark.range(1)
    with pytest.raises(kproxy_spark.StartupError, match=r"no subject \S+-value at --registry \S+: register its schema"):
        start(one, value_schema=LATEST)
    with pytest.raises(kproxy_spark.StartupError, match=r"the column i \(interval month\) cannot be written as avro"):
        start(spark.sql("select interval '1' month AS i"))
    with pytest.raises(kproxy_spark.StartupError, match=r"--value-column id is not a STRUCT"):
        start(one, value_column="id")
    with pytest.raises(kproxy_spark.StartupError, match=r"is not valid Avro \(JSONDecodeError"):
        start(one, value_schema="{")
    start(one)
    start(one, value_schema=LATEST)
    with pytest.raises(kproxy_spark.StartupError, match=r"not compatible with earlier ones of subject .*\(409: "):
        start(one.selectExpr("string(id) AS id"))
    # A new column is compatible.
    start(one.selectExpr("id", "1 AS more"))
    assert len({value for _, value in read(target, 3)}) == 2


@pytest.mark.long
def test_stream_goes_on_with_its_schema(spark: Any, target: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    stream = spark.readStream.schema("id LONG, name STRING").json(str(tmp_path / "in"))
    options = {
        **target,
        "value_format": PROTOBUF,
        "checkpoint": str(tmp_path / "ck"),
        "select": ("id", "upper(name) n"),
    }
    for number in range(2):
        (tmp_path / "in" / f"{number}.json").write_text(json.dumps({"id": number, "name": "a"}) + "\n")
        query = kproxy_spark.start(stream, **options)
        assert query.awaitTermination(240)
    values = [value or b"" for _, value in read(target, 2)]
    assert [decoded(PROTOBUF, target, value, tmp_path) for value in values] == [{"id": str(n), "n": "A"} for n in "01"]
    assert len({value[:5] for value in values}) == 1


@pytest.mark.long
def test_documented_reading_gives_the_rows(spark: Any, target: dict[str, Any]) -> None:
    rows = spark.range(3).selectExpr("id", "id / 4 AS amount")
    kproxy_spark.start(rows, value_format=AVRO, **target)
    (text,) = (block.text for block in blocks("ingest.md", "python") if "fastavro" in block.text)
    text = text.replace("http://registry:8081", target["registry"]).replace(
        "127.0.0.1:9092", target["bootstrap_servers"]
    )
    scope: dict[str, Any] = {"spark": spark}
    exec(text.replace('"payments', f'"{target["topic"]}'), scope)
    assert sorted(json.loads(row["value"])["amount"] for row in scope["rows"].collect()) == [0.0, 0.25, 0.5]


def test_command_asks_registry_before_spark(
    dev_cluster: KproxyProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["pipeline", "ingest", "--from", "csv:in/", "--topic", "t", "--checkpoint", str(tmp_path)]
    arguments += ["--bootstrap", dev_cluster.kafka, "--value-format", "avro", "--registry-user", "bob"]
    (tmp_path / "password").write_text("wrong\n")
    with standing_in() as started:
        started.user = ("bob", "right")
        asked = [*arguments, "--registry", started.url, "--value-schema", "latest"]
        assert main([*asked, "--registry-password-file", str(tmp_path / "password")]) == 2
        assert "refuses the user bob for subject t-value (401: Unauthorized)" in capsys.readouterr().err
        monkeypatch.setenv("KPROXY_REGISTRY_PASSWORD", "right")
        assert main(asked) == 2
        assert f"there is no subject t-value at --registry {started.url}" in capsys.readouterr().err
