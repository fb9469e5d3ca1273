"""Run Kafka's command line tools, direct and through a proxy, and compare outcomes with kafka_tools.toml.

All commands of a tool run direct, then all through the proxy, each side on topics, groups and users of its own, whose
names end with the side. Two outputs are the same if the exit status is, and the set of lines after each side's
addresses, node ids and names are replaced, as well as what no two runs share: times, generated ids and widths of
columns. Lines about the other side's things are left out. Lines are a set because one proxy stands for three brokers.
"""

from __future__ import annotations

import base64
import re
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.brokers.kafka_jars import kafka_classpath
from tests.support.brokers.real_kafka import shared_classes
from tests.support.clients.java import SHORT_JAVA, java_executable, java_program

TABLE = Path(__file__).with_name("kafka_tools.toml")
PATIENCE_S = 90.0
DIRECT, PROXIED = "direct", "proxied"
_SOURCE = Path(__file__).with_name("ToolRuns.java")
_HUNG = "hung"
# What no two runs share.
_VOLATILE = (
    (re.compile(r"^\d\d:\d\d:\d\d\.\d+ \[[^]]*\] ", re.MULTILINE), ""),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "UUID"),
    # Kafka's own ids are 16 bytes in base64. Some of its names are as long.
    (re.compile(r"(?<![\w-])(?!([a-z-]+|[A-Z_]+|([A-Za-z][a-z]+)+)(?![\w-]))[\w-]{22}(?![\w-])"), "UUID"),
    (re.compile(r"\b(adminclient|consumer-[\w-]+)-\d+\b"), r"\1"),
    (re.compile(r"\bEpoch: \d+"), "Epoch:"),
    (re.compile(r"\b1[6-9]\d{11}\b"), "TIME"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.:,]\d+Z?\b"), "TIME"),
    # A trace of a tool's calls; the error stands above it.
    (re.compile(r"^\s*(at [\w.$/]+\(.*\)|\.\.\. \d+ more)$", re.MULTILINE), ""),
    # An assignment by the new protocol of groups may take two steps.
    (re.compile(r'^.*"partitions_assigned","partitions":\[\].*$', re.MULTILINE), ""),
)
_NUMBERS = re.compile(r"\d+([.,]\d+)*(E-?\d+)?|NaN")


@dataclass(frozen=True)
class Command:
    """A row of the table. Words in capitals stand for names of the side; `stdin` and `file` are inputs with them.

    The outcome is `refused`, a text that the tool shows; or `differs`, the reason, where the tool shows `shows`;
    otherwise it is the same. `loose`: the numbers in it differ in any two runs. `alone`: the tool needs a Java of its
    own, because it works at Java's end. `short`: runs in `make test`.
    """

    script: str
    main: str
    run: str
    stdin: str = ""
    file: str = ""
    refused: str = ""
    differs: str = ""
    shows: str = ""
    loose: bool = False
    alone: bool = False
    short: bool = False


def commands() -> dict[str, list[Command]]:
    """The table, by tool."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text())
    return {
        tool["script"]: [
            Command(tool["script"], tool["main"], **{**row, "run": f"{tool.get('connect', '')} {row['run']}".strip()})
            for row in tool["commands"]
        ]
        for tool in table["tools"]
    }


@dataclass
class Side:
    """`names` are what the words of commands stand for; `nodes` the ids that clients see there."""

    name: str
    kafka: str
    nodes: Sequence[int]
    files: Path
    own_nodes: Sequence[int]
    names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        own = ("TOPIC", "NEW", "PENDING", "GROUP", "MEMBERS", "STREAMS", "SHARE", "USER", "TRANSACTION")
        self.names = {word: f"{word.lower()}-{self.name}" for word in own}
        self.names |= {"KAFKA": self.kafka, "NODES": ",".join(map(str, self.nodes)), "NODE": str(self.nodes[0])}
        self.names |= {"BROKERS": ",".join(map(str, self.own_nodes)), "BROKER": str(self.own_nodes[0])}
        self.names |= {"FILE": str(self.files / f"{self.name}.json")}

    def fill(self, text: str) -> str:
        """Put the names in place of the words."""
        return re.sub(rf"\b({'|'.join(self.names)})\b", lambda word: self.names[word[1]], text)

    def comparable(self, output: str, *, loose: bool) -> frozenset[str]:
        """The lines of an output without what differs between the sides and between any two runs."""
        other = f"-{PROXIED if self.name == DIRECT else DIRECT}"
        text = "\n".join(line for line in output.splitlines() if other not in line)
        text = text.replace(self.names["FILE"], "FILE").replace(str(self.files), "FILES")
        text = re.sub(rf"-{self.name}\b", "-SIDE", text)
        for pattern, instead in _VOLATILE:
            text = pattern.sub(instead, text)
        for address in self.kafka.split(","):
            text = text.replace(address, "KAFKA")
            host, _, port = address.partition(":")
            text = re.sub(rf"\b{re.escape(host)}(\s+){port}\b", r"KAFKA", text)
        ids = "|".join(map(str, {*self.nodes, *self.own_nodes}))
        text = re.sub(rf"\b({ids})\b", "NODE", text)
        text = re.sub(r"NODE(, *NODE)+", "NODE", text)
        text = re.sub(r"KAFKA(, *KAFKA)+", "KAFKA", text)
        if loose:
            # A list may be of any length, too.
            text = re.sub(r"(0|\{[^{}]*\})(, ?\1)+", r"\1", _NUMBERS.sub("0", text))
        return frozenset(re.sub(r"\s+|-{4,}", " ", line).strip() for line in text.splitlines()) - {""}


@dataclass(frozen=True)
class Ran:
    """How a command ended on one side: the exit status or "hung", both streams, and what is compared of them."""

    status: str
    output: str
    comparable: frozenset[str]


class Tools:
    """Runs tools in a Java that is started when there is none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: Command, side: Side) -> Ran:
        Path(side.names["FILE"]).write_text(side.fill(command.file))
        stdin, arguments = side.fill(command.stdin), list(map(side.fill, _words(command.run)))
        run = _run_alone if command.alone else self._run
        status, output = run(command.main, stdin, arguments)
        return Ran(status, output, side.comparable(output, loose=command.loose))

    def _run(self, main: str, stdin: str, arguments: Sequence[str]) -> tuple[str, str]:
        encoded = [":" + base64.b64encode(text.encode()).decode() for text in (main, stdin, *arguments)]
        process = self._process = self._process or _start()
        assert process.stdin is not None
        assert process.stdout is not None
        print(round(PATIENCE_S * 1000), *encoded, file=process.stdin, flush=True)
        status, _, output = process.stdout.readline().strip().partition(" :")
        assert status, f"Java ended at {main} {arguments}"
        if status == _HUNG:
            self.close()
        return status, base64.b64decode(output).decode()

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


def _run_alone(main: str, stdin: str, arguments: Sequence[str]) -> tuple[str, str]:
    command = [java_executable(), *SHORT_JAVA, *shared_classes(), "-cp", kafka_classpath(), main, *arguments]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return _HUNG, (expired.stdout or b"").decode()
    return str(done.returncode), done.stdout


def _words(run: str) -> list[str]:
    """The arguments of a command; one with blanks stands in single quotes."""
    return [quoted or word for quoted, word in re.findall(r"'([^']*)'|(\S+)", run)]


def _start() -> subprocess.Popen[str]:
    command = java_program(_SOURCE, kafka_classpath(), *shared_classes())
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@contextmanager
def kafka_tools() -> Iterator[Tools]:
    tools = Tools()
    try:
        yield tools
    finally:
        tools.close()


def unexpected(command: Command, direct: Ran, proxied: Ran) -> str | None:
    """What is not as the table says, with both outputs; None if all is."""
    shown = command.refused or command.shows
    is_same = (direct.status, direct.comparable) == (proxied.status, proxied.comparable)
    if proxied.status == _HUNG:
        problem = "it hangs"
    elif not shown:
        problem = "" if is_same else "it differs"
    elif is_same:
        problem = "it is the same"
    else:
        problem = "" if shown in proxied.output else f"it does not show {shown!r}"
    if not problem:
        return None
    only = {DIRECT: direct.comparable - proxied.comparable, PROXIED: proxied.comparable - direct.comparable}
    found = "".join(f"\n  {side}: {line}" for side, lines in only.items() for line in sorted(lines))
    heads = f"{command.script} {command.run}: {problem}; status {direct.status} direct, {proxied.status} proxied"
    return f"{heads}; lines only there:{found}"
