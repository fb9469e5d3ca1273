"""Where an audit finds what it needs, looked at before Spark starts: a sentence now, not a stack trace in a minute."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from kproxy.config.parsing import is_topic_name
from kproxy.config.proxy import DEFAULT_TOPIC
from kproxy.errors import StartupError
from kproxy.pipeline.audit.log_client import EARLIEST, LATEST, LogClient, TopicPartition
from kproxy.pipeline.audit.log_connection import LogReadFailed
from kproxy.pipeline.audit.log_options import parse_bootstrap
from kproxy.pipeline.audit.trail import JSON, PARQUET, TOPIC, TrailPlace, parse_place

PATIENCE_S: Final = 5.0
_ENDINGS: Final = {JSON: ".jsonl", PARQUET: ".parquet"}


def parse_trail(text: str) -> TrailPlace:
    """`topic`, `topic:NAME`, `json:DIR` or `parquet:DIR`. Raises StartupError."""
    return parse_place(f"{TOPIC}:{DEFAULT_TOPIC}" if text == TOPIC else text)


def check_places(bootstrap: str, trail: TrailPlace, trail_bootstrap: str, topics: Sequence[str]) -> None:
    """Raises StartupError where nothing answers, where there is no trail, or where a topic is not there."""
    here = _topics(bootstrap, "--bootstrap")
    missing = sorted(set(topics) - here.keys())
    if missing:
        raise StartupError(f"There is no topic {missing[0]} at --bootstrap {bootstrap}: see what --topics names.")
    if trail.kind == TOPIC:
        _check_topic(trail.name, trail_bootstrap)
    elif "://" not in trail.name:
        _check_files(trail)


def existing(bootstrap: str, topics: Collection[str]) -> tuple[str, ...]:
    """Those of `topics` that there are, in order.

    One that is not told of may be hidden: brokers are asked for it by name, and must say that there is no such topic.
    Raises LogReadFailed, where one may not be read for instance.
    """
    with LogClient(parse_bootstrap(bootstrap), timeout_s=PATIENCE_S, patience_s=2 * PATIENCE_S) as client:
        there = set(topics) & client.partitions(None).keys()
        hidden = [topic for topic in topics if topic not in there and is_topic_name(topic)]
        if hidden:
            there |= client.partitions_if_any(hidden).keys()
    return tuple(sorted(there))


def _check_topic(name: str, bootstrap: str) -> None:
    there = _topics(bootstrap, "--trail-bootstrap")
    partitions = [TopicPartition(name, index) for index in range(there.get(name, 0))]
    with _client(bootstrap, "--trail-bootstrap") as client:
        try:
            begin = client.list_offsets(partitions, EARLIEST)
            end = client.list_offsets(partitions, LATEST)
        except LogReadFailed as error:
            raise StartupError(f"The trail in topic {name} cannot be read: {error}") from error
    if begin == end:
        state = f"topic {name} at {bootstrap} is empty" if partitions else f"there is no topic {name} at {bootstrap}"
        raise StartupError(f"No audit trail: {state}; start the proxies with --audit-sink topic, or give --trail.")


def _check_files(trail: TrailPlace) -> None:
    directory, ending = Path(trail.name), _ENDINGS[trail.kind]
    if not directory.is_dir():
        raise StartupError(f"No audit trail: {directory} is no directory; give --trail {trail.kind}:DIR.")
    if not any(directory.glob(f"*{ending}")):
        raise StartupError(f"No audit trail: {directory} has no file *{ending}.")


def _topics(bootstrap: str, flag: str) -> dict[str, int]:
    """Numbers of partitions by topic."""
    with _client(bootstrap, flag) as client:
        try:
            return dict(client.partitions(None))
        except LogReadFailed as error:
            raise StartupError(f"No Kafka answers at {flag} {bootstrap}: {error}") from error


def _client(bootstrap: str, flag: str) -> LogClient:
    try:
        addresses = parse_bootstrap(bootstrap)
    except LogReadFailed as error:
        raise StartupError(f"{flag} {bootstrap} is no address: give HOST:PORT of a kproxy or of a broker.") from error
    return LogClient(addresses, timeout_s=PATIENCE_S, patience_s=PATIENCE_S)
