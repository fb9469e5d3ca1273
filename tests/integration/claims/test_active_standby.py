"""The pair of examples/active_standby.py as a user runs it, killed and stopped, checked by the brokers' log."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Self

import kafka
import pytest

from kproxy.claims.client import own_sync
from tests.support.claims.owned_topics import WRITERS, OwnedTopics
from tests.support.waiting import wait_for

EXAMPLE = Path(__file__).parents[3] / "examples" / "active_standby.py"
PATIENCE_S = 40.0
# How long a resumed process may try to write.
AWAKE_S = 0.5
WROTE = re.compile(r"wrote number (\d+) at offset (\d+)")


class Writer:
    """One process of the example."""

    def __init__(self, name: str, site: OwnedTopics, topic: str, directory: Path, *more: str) -> None:
        self.name = name
        self._said = directory / f"{name}.out"
        command = [sys.executable, "-P", EXAMPLE, "--name", name, "--bootstrap", site.bootstrap, "--topic", topic]
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [*command, "--group", WRITERS, "--every", "0", *more],
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def has_said(self, what: str, times: int = 1) -> Self:
        wait_for(
            lambda: self.said.count(what) >= times or self.process.poll() is not None, what=lambda: self.said[-2000:]
        )
        assert self.said.count(what) >= times, f"{self.name} said {self.said[-2000:]}"
        return self

    def is_active(self, times: int = 1) -> Self:
        """Wait until it has become active `times` times, and has written since."""
        self.has_said("ACTIVE with fence", times)
        written = self.said.count("wrote")
        return self.has_said("wrote", written + 20)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(PATIENCE_S)


class Writers:
    """Starts writers of one topic, which end with `stack`."""

    def __init__(self, site: OwnedTopics, directory: Path, stack: ExitStack) -> None:
        self.topic = site.topic()
        self._site = site
        self._directory = directory
        self._stack = stack

    def start(self, name: str, *more: str) -> Writer:
        writer = Writer(name, self._site, self.topic, self._directory, *more)
        self._stack.callback(writer.stop)
        return writer


@pytest.fixture
def writers(owned_topics: OwnedTopics, tmp_path: Path) -> Iterator[Writers]:
    with ExitStack() as stack:
        yield Writers(owned_topics, tmp_path, stack)


def test_log_shows_one_writer_after_another(owned_topics: OwnedTopics, writers: Writers) -> None:
    first = writers.start("first").is_active()
    second = writers.start("second").has_said("standing by")
    time.sleep(AWAKE_S)
    assert "ACTIVE with" not in second.said

    first.process.kill()
    second.is_active()

    third = writers.start("third").has_said("standing by")
    with standing_still(second):
        # It remains the owner, as it may resume at any time; another process must take over.
        time.sleep(AWAKE_S)
        assert "ACTIVE with" not in third.said
        fourth = writers.start("fourth", "--take-over").is_active()
    second.has_said("NOT ACTIVE: ").has_said("standing by", 2)
    time.sleep(AWAKE_S)
    assert second.said.count("ACTIVE with") == 1

    fourth.process.terminate()
    assert fourth.process.wait(PATIENCE_S) == 0
    fourth.has_said("ended; what it owned is free")
    wait_for(lambda: "ACTIVE with" in third.said or second.said.count("ACTIVE with") == 2)
    active, standby = (third, second) if "ACTIVE with" in third.said else (second, third)
    with standing_still(active):
        fifth = writers.start("fifth", "--take-over").is_active()
    active.has_said("NOT ACTIVE: ")
    standby.process.kill()
    active.process.kill()
    fifth.process.kill()
    check(owned_topics.log(writers.topic), [first, second, third, fourth, fifth])


def test_writer_continues_after_records_of_another_program(owned_topics: OwnedTopics, writers: Writers) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=owned_topics.bootstrap)
    try:
        with own_sync(producer, WRITERS, [(writers.topic, 0)], 1):
            producer.send(writers.topic, b'{"batch": 0}', partition=0).get(PATIENCE_S)
    finally:
        producer.close()
    writers.start("only").is_active().has_said("wrote number 1 at offset 2")


@contextmanager
def standing_still(writer: Writer) -> Iterator[None]:
    writer.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        writer.process.send_signal(signal.SIGCONT)


def check(log: list[bytes], writers: list[Writer]) -> None:
    """`log`: all records of the partition, from offset 0 on."""
    records = [json.loads(value) for value in log]
    fences = [each["fence"] for each in records]
    assert all(earlier <= later for earlier, later in pairwise(fences)), "a stale fence follows a newer one's record"
    turns = [list(turn) for _, turn in groupby(records, lambda each: (each["writer"], each["fence"]))]
    assert len(turns) == len(set(fences)), "a writer has written in between another one's"
    assert len(turns) >= len(writers)
    for turn in turns:
        assert turn[0]["number"] is None
    # Each begins after all earlier records: none is duplicated or missing.
    numbers = [each["number"] for each in records if each["number"] is not None]
    assert numbers == list(range(1, len(numbers) + 1))
    for writer in writers:
        for number, offset in WROTE.findall(writer.said):
            found = records[int(offset)]
            assert (found["writer"], found["number"]) == (writer.name, int(number)), "what was acknowledged is lost"
