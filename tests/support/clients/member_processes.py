"""Run members of consumer groups as processes, so that tests can kill them.

They are librdkafka's kcat, Java's console consumer, Go's franz-go and Sarama, Node's KafkaJS. Their sessions end after
six seconds.

A test that asks for one whose toolchain is not there is skipped. Go's and Node's are built once per user, with what the
registries have.
"""

from __future__ import annotations

import fcntl
import functools
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import pytest

from kproxy.pipeline.java import user_cache_dir
from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.real_kafka import shared_classes
from tests.support.clients.java import SHORT_JAVA, java_executable
from tests.support.waiting import PATIENCE_S, wait_for

_HERE = Path(__file__).parent
GO_MODULE = _HERE / "go"
_BUILD_TIMEOUT_S = 600.0
_SESSION = "session.timeout.ms=6000"
_BEGINNING = "auto.offset.reset=earliest"
# The console consumer's own form, and that of the others.
_RECORD = re.compile(rb"(?:Partition:)?(\d+)[ \t](?:Offset:)?(\d+)[ \t](.*)\n")

Command = Callable[[str, str, str], Sequence[str | Path]]


class MemberProcess:
    """`read` are (partition, offset, value), `said` the last lines of anything else."""

    def __init__(self, command: Sequence[str | Path]) -> None:
        self.read: list[tuple[int, int, bytes]] = []
        self.said = deque[bytes](maxlen=50)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._reader = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = _RECORD.fullmatch(line)
            if found is not None:
                self.read.append((int(found[1]), int(found[2]), found[3]))
            else:
                self.said.append(line)

    def kill(self) -> None:
        """kill -9, if it still runs."""
        self._process.kill()
        self._end()

    def close(self) -> float:
        """Let it commit and leave; return the seconds that it takes."""
        begin = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        self._end()
        assert self._process.returncode in (0, 130, 143), self.said
        return time.monotonic() - begin

    def _end(self) -> None:
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)

    @property
    def values(self) -> set[bytes]:
        return {value for _, _, value in self.read}

    def wait_for_values(self, wanted: set[bytes]) -> None:
        wait_for(lambda: self.values >= wanted, what=lambda: f"not read: {wanted - self.values}; {self.said}")


def _kcat(bootstrap: str, topic: str, group: str) -> Sequence[str | Path]:
    asked = ["-b", bootstrap, "-G", group, "-u", "-q", "-E", "-X", _BEGINNING, "-X", _SESSION, "-f", "%p %o %s\n"]
    return [program("kcat"), *asked, topic]


def console_consumer(bootstrap: str, topic: str, group: str, *settings: str) -> Sequence[str | Path]:
    command = [java_executable(), *SHORT_JAVA, *shared_classes(), "-cp", kafka_classpath()]
    command += ["org.apache.kafka.tools.consumer.ConsoleConsumer", "--bootstrap-server", bootstrap, "--topic", topic]
    command += ["--group", group]
    for each in settings:
        command += ["--command-property", each]
    for shown in ("partition", "offset"):
        command += ["--formatter-property", f"print.{shown}=true"]
    return command


def _go(library: str) -> Command:
    return lambda bootstrap, topic, group: [_built_by_go(), library, bootstrap, topic, group]


def _kafkajs(bootstrap: str, topic: str, group: str) -> Sequence[str | Path]:
    return [program("node"), built_by_npm() / "member.js", bootstrap, topic, group]


COMMANDS: dict[str, Command] = {
    "kcat": _kcat,
    "console consumer": lambda *named: console_consumer(*named, _BEGINNING, _SESSION),
    "franz-go": _go("franz"),
    "Sarama": _go("sarama"),
    "KafkaJS": _kafkajs,
}


def program(name: str) -> str:
    """Its path, or a skip."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


@functools.cache
def _built_by_go() -> Path:
    return _build("go", [program("go"), "build", "-o", "member", "."]) / "member"


@functools.cache
def built_by_npm() -> Path:
    """The directory of Node's member, with its libraries."""
    return _build("node", [program("npm"), "install", "--no-audit", "--no-fund"])


def _build(sources: str, command: Sequence[str]) -> Path:
    """Build in the user's cache, where the earlier result makes it short."""
    directory = user_cache_dir() / "members" / sources
    directory.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{sources}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.copytree(_HERE / sources, directory, dirs_exist_ok=True)
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory
