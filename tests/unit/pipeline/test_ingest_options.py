"""Valid options of `kproxy pipeline ingest`, and the errors for all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kproxy.cli import main
from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import AVAILABLE_NOW, IngestOptions, parse_pair

FILES = IngestOptions("csv:in/", "ck", topic="flights")
RATE = replace(FILES, source="rate")
RECORDS = replace(FILES, source="kafka:flights", from_bootstrap="other:9092")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("csv:in/", ("csv", "in/")),
        ("json:s3a://bucket/in/*.json", ("json", "s3a://bucket/in/*.json")),
        ("parquet:/data", ("parquet", "/data")),
        ("kafka:a,b", ("kafka", "a,b")),
        ("rate", ("rate", "")),
    ],
)
def test_source_is_a_format_and_a_place(text: str, expected: tuple[str, str]) -> None:
    options = replace(FILES, source=text)
    options.check()
    assert (options.format, options.where) == expected


@pytest.mark.parametrize("text", ["", "csv", "csv:", "xml:in/", "rate:5", "in/"])
def test_invalid_source_error_names_valid_ones(text: str) -> None:
    with pytest.raises(StartupError, match="csv:DIR, json:DIR, parquet:DIR, kafka:TOPIC or rate"):
        replace(FILES, source=text).check()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (AVAILABLE_NOW, None),
        (None, None),
        ("500ms", "500 milliseconds"),
        ("10s", "10000 milliseconds"),
        ("5m", "300000 milliseconds"),
        ("1h", "3600000 milliseconds"),
    ],
)
def test_trigger_is_available_now_or_an_interval(text: str | None, expected: str | None) -> None:
    assert replace(FILES, trigger=text).processing_time == expected


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "once", "10 s s", "1w"])
def test_another_trigger_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="available-now"):
        replace(FILES, trigger=text).check()


def test_dead_letters_go_to_files_or_topic_only() -> None:
    files, topic = replace(FILES, dead_letters="json:s3a://b/dead"), replace(FILES, dead_letters="topic:dead")
    assert (files.letters_directory, files.letters_topic) == ("s3a://b/dead", None)
    assert (topic.letters_directory, topic.letters_topic) == (None, "dead")
    for text in ("dead", "json:", "csv:dead", ""):
        with pytest.raises(StartupError, match=r"json:DIR .* topic:NAME"):
            replace(FILES, dead_letters=text).check()


def test_pair_value_may_contain_an_equals_sign() -> None:
    assert parse_pair("sasl.jaas.config=a b=c", "--kafka-option") == ("sasl.jaas.config", "a b=c")
    for text in ("acks", "=1", ""):
        with pytest.raises(StartupError, match="--kafka-option"):
            parse_pair(text, "--kafka-option")


@pytest.mark.parametrize(
    "options",
    [
        FILES,
        RATE,
        replace(FILES, topic=None, topic_column="where"),
        RECORDS,
        replace(FILES, source="kafka:others"),
        replace(FILES, source="json:in/", key=("a",), on_new_columns="add"),
        replace(RECORDS, schema="id INT", on_new_columns="add"),
        replace(FILES, key=("a",), dead_letters="topic:dead", partitions=1),
        replace(FILES, value_format="avro", registry="https://r/apis/ccompat/v7", value=("a",)),
        replace(
            FILES, value_format="protobuf", registry="http://[::1]:8081/", topic=None, topic_column="a", subject="s"
        ),
    ],
)
def test_valid_options_pass(options: IngestOptions) -> None:
    options.check()


URL = "http://registry:8081"
AVRO: dict[str, Any] = {"value_format": "avro", "registry": URL}
ADDED = "--on-new-columns add .* goes with --from json:, or with --from kafka: and a --schema, and without --value"
ADD: dict[str, Any] = {"source": "json:in/", "on_new_columns": "add"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topic": None}, "--topic NAME, or --topic-column"),
        ({"topic_column": "where"}, "row by row: give one"),
        ({"topic": "no topic"}, "is not a topic name"),
        ({"topic": ".."}, "is not a topic name"),
        ({"topic": "x" * 250}, "is not a topic name"),
        ({"checkpoint": ""}, "--checkpoint is needed"),
        ({"bootstrap": "nowhere"}, "has no port"),
        ({"value": ("a",), "value_column": "a"}, "give one of them"),
        ({"max_message_bytes": 10}, "--max-message-bytes 10"),
        ({"tasks": 0}, "--tasks 0"),
        ({"kafka_options": {"acks": "1"}}, "--kafka-option acks=1 could lose rows"),
        ({"partitions": 0}, "--partitions 0"),
        ({"dead_letters": "topic:flights"}, "is the topic that is written to"),
        ({"dead_letters": "topic:a b"}, "is not a topic name"),
        ({"keep_partitions": True}, "--keep-partitions goes with --from kafka"),
        ({"source": "rate", "trigger": AVAILABLE_NOW}, "--from rate never ends"),
        ({**ADD, "source": "csv:in/"}, ADDED),
        ({**ADD, "source": "parquet:in/"}, ADDED),
        ({**ADD, "source": "kafka:a"}, ADDED),
        ({**ADD, "source": "rate"}, ADDED),
        ({**ADD, "value": ("a",)}, ADDED),
        ({**ADD, "value_column": "a"}, ADDED),
        ({"max_files_per_trigger": 0}, "--max-files-per-trigger 0"),
        ({"max_offsets_per_trigger": 0}, "--max-offsets-per-trigger 0"),
        ({"source": "kafka:a,,b"}, "--from kafka:"),
        ({"source": "kafka:a", "from_bootstrap": "h"}, "--from-bootstrap"),
        ({"registry": URL}, "are for values with a --value-format"),
        ({"subject": "t"}, "are for values with a --value-format"),
        ({"value_format": "avro"}, "--value-format needs --registry URL"),
        ({**AVRO, "registry": "registry:8081"}, "Invalid --registry; expected a URL such as https://registry:8081"),
        ({**AVRO, "registry": "http://alice:secret@registry"}, "Invalid --registry; .* user in --registry-user"),
        (
            {**AVRO, "registry_user": "alice"},
            "--registry-user needs a password, in --registry-password-file or KPROXY_",
        ),
        ({**AVRO, "topic": None, "topic_column": "a"}, "name the one --subject"),
        ({**AVRO, **ADD}, "goes without --value-format"),
        ({"source": "kafka:x,flights", "from_bootstrap": "a:1,127.0.0.1:9092"}, "copied into itself without end"),
    ],
)
def test_invalid_options_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        replace(FILES, **changes).check()


TO = ["--topic", "t", "--checkpoint", "c"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "csv:in/", "--topic", "t"], "--checkpoint"),
        (TO, "--from is missing"),
        ([*TO, "--format", "csv"], "--from csv is not a source"),
        ([*TO, "--format", "delta", "--from", "in", "--bootstrap", "h:1:1"], "h:1:1"),
        ([*TO, "--from", "xml:in/"], "--from xml:in/ is not a source"),
        ([*TO, "--from", "csv:in/", "--schema", "@/nowhere/x"], "--schema /nowhere/x"),
        ([*TO, "--from", "csv:in/", "--header", "x"], "Invalid --header x; expected NAME=VALUE"),
        ([*TO, "--from", "csv:in/", "--bootstrap", "127.0.0.1:1"], "nothing answers at --bootstrap 127.0.0.1:1"),
        ([*TO, "--from", "csv:in/", "--conf", "x=1", "--bootstrap", "127.0.0.1:1"], "nothing answers at"),
    ],
)
def test_command_reports_errors_before_spark_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "ingest", *arguments]) == 2
    assert said in capsys.readouterr().err
