"""Valid options of `kproxy pipeline ingest`, and the errors for all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kproxy.cli import main
from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import (
    DeadLetters,
    FileSource,
    IngestOptions,
    KafkaSource,
    RateSource,
    parse_dead_letters,
    parse_pair,
    parse_source,
    parse_trigger,
)

FILES = IngestOptions(FileSource("csv", "in/"), "ck", topic="flights")
RATE = replace(FILES, source=RateSource(), processing_time="1 seconds")


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
def test_a_source_is_a_format_and_a_place(text: str, expected: tuple[str, str]) -> None:
    assert parse_source(text) == expected


@pytest.mark.parametrize("text", ["", "csv", "csv:", "xml:in/", "rate:5", "in/"])
def test_invalid_source_error_names_valid_ones(text: str) -> None:
    with pytest.raises(StartupError, match="csv:DIR, json:DIR, parquet:DIR, kafka:TOPIC or rate"):
        parse_source(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("available-now", None),
        ("500ms", "500 milliseconds"),
        ("10s", "10000 milliseconds"),
        ("5m", "300000 milliseconds"),
        ("1h", "3600000 milliseconds"),
    ],
)
def test_trigger_is_available_now_or_an_interval(text: str, expected: str | None) -> None:
    assert parse_trigger(text) == expected


@pytest.mark.parametrize("text", ["", "10", "s", "-1s", "once", "10 s s", "1w"])
def test_another_trigger_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="available-now"):
        parse_trigger(text)


def test_dead_letters_go_to_files_or_topic_only() -> None:
    assert parse_dead_letters("json:s3a://b/dead") == DeadLetters("json", "s3a://b/dead")
    assert parse_dead_letters("topic:dead") == DeadLetters("topic", "dead")
    for text in ("dead", "json:", "csv:dead", ""):
        with pytest.raises(StartupError, match=r"json:DIR .* topic:NAME"):
            parse_dead_letters(text)


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
        replace(FILES, source=KafkaSource("other:9092", "flights")),
        replace(FILES, source=KafkaSource("127.0.0.1:9092", "others")),
        replace(FILES, source=FileSource("json", "in/"), key=("a",), on_new_columns="add"),
        replace(FILES, source=KafkaSource("other:9092", "flights", "id INT"), on_new_columns="add"),
        replace(FILES, key=("a",), dead_letters=DeadLetters("topic", "dead"), partitions=1),
    ],
)
def test_valid_options_pass(options: IngestOptions) -> None:
    options.check()


ADDED = "--on-new-columns add .* goes with --from json:, or with --from kafka: and a --schema, and without --value"
ADD: dict[str, Any] = {"source": FileSource("json", "in/"), "on_new_columns": "add"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"topic": None}, "--topic NAME, or --topic-column"),
        ({"topic_column": "where"}, "row by row: give one"),
        ({"topic": "no topic"}, "is no name of a topic"),
        ({"topic": ".."}, "is no name of a topic"),
        ({"topic": "x" * 250}, "is no name of a topic"),
        ({"checkpoint": ""}, "--checkpoint is needed"),
        ({"bootstrap": "nowhere"}, "has no port"),
        ({"value_columns": ("a",), "value_column": "a"}, "give one of them"),
        ({"max_message_bytes": 10}, "--max-message-bytes 10"),
        ({"tasks": 0}, "--tasks 0"),
        ({"kafka_options": {"acks": "1"}}, "--kafka-option acks=1 could lose rows"),
        ({"partitions": 0}, "--partitions 0"),
        ({"dead_letters": DeadLetters("topic", "flights")}, "is the topic that is written to"),
        ({"dead_letters": DeadLetters("topic", "a b")}, "is no name of a topic"),
        ({"keep_partitions": True}, "--keep-partitions goes with --from kafka"),
        ({"source": RateSource()}, "--from rate never ends"),
        ({**ADD, "source": FileSource("csv", "in/")}, ADDED),
        ({**ADD, "source": FileSource("parquet", "in/")}, ADDED),
        ({**ADD, "source": KafkaSource("h:1", "a")}, ADDED),
        ({**ADD, "source": RateSource(), "processing_time": "1s"}, ADDED),
        ({**ADD, "value_columns": ("a",)}, ADDED),
        ({**ADD, "value_column": "a"}, ADDED),
        ({"source": FileSource("csv", "in/", max_files=0)}, "--max-files-per-trigger 0"),
        ({"source": KafkaSource("h:1", "a", max_offsets=0)}, "--max-offsets-per-trigger 0"),
        ({"source": KafkaSource("h:1", "a,,b")}, "--from kafka:"),
        ({"source": KafkaSource("h", "a")}, "--from-bootstrap"),
        ({"source": KafkaSource("a:1,127.0.0.1:9092", "x,flights")}, "copied into itself without end"),
    ],
)
def test_invalid_options_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        replace(FILES, **changes).check()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "csv:in/", "--topic", "t"], "--checkpoint"),
        (["--from", "xml:in/", "--topic", "t", "--checkpoint", "c"], "--from xml:in/ is no source"),
        (["--from", "csv:in/", "--topic", "t", "--checkpoint", "c", "--schema", "@/nowhere/x"], "--schema /nowhere/x"),
        (["--from", "csv:in/", "--topic", "t", "--checkpoint", "c", "--header", "x"], "--header x: give NAME=VALUE"),
        (
            ["--from", "csv:in/", "--topic", "t", "--checkpoint", "c", "--bootstrap", "127.0.0.1:1"],
            "nothing answers at --bootstrap 127.0.0.1:1",
        ),
        (
            ["--from", "csv:in/", "--topic", "t", "--checkpoint", "c", "--conf", "x=1", "--bootstrap", "127.0.0.1:1"],
            "nothing answers at",
        ),
    ],
)
def test_command_reports_errors_before_spark_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "ingest", *arguments]) == 2
    assert said in capsys.readouterr().err
