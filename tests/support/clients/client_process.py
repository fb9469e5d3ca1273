"""Run clients that need a process of their own, all with one interface: records on stdin, outcomes on stdout.

In: a line for each record, "partition key value [header-name header-value]...". Out, when the input has ended and all
records have an outcome: "sent COUNT", then "ack NUMBER PARTITION OFFSET" or "error NUMBER WHAT" for each record,
numbered from 0 in order of input, and "record PARTITION OFFSET KEY VALUE [HEADER-NAME HEADER-VALUE]..." for each that
was read back. Bytes are ":" and base64, "-" stands for null.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import NamedTuple

from tests.support.clients.kafka_io import Placed, Record

TIMEOUT_S = 180.0


class ClientRun(NamedTuple):
    """`acknowledged` is the partition and offset of each record by its number."""

    sent: int
    acknowledged: dict[int, tuple[int, int]]
    errors: dict[int, str]
    read: list[Placed]


def run_client(command: Sequence[str | os.PathLike[str]], records: Iterable[Record]) -> ClientRun:
    """Run a client over `records`, which it gets as fast as it reads them; assert its exit status."""
    with TemporaryFile() as said, TemporaryFile() as complained:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=complained)
        try:
            assert process.stdin is not None
            # A client that ended early reports the reason on stderr.
            with suppress(BrokenPipeError), process.stdin as lines:
                lines.writelines(map(_line, records))
            status = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        complained.seek(0)
        assert status == 0, complained.read().decode(errors="replace")[-3000:]
        said.seek(0)
        return _parse(said.read().decode("ascii").splitlines())


def _line(record: Record) -> bytes:
    fields = ["-" if record.partition is None else str(record.partition), _encode(record.key), _encode(record.value)]
    for name, value in record.headers:
        fields += [name, _encode(value)]
    return " ".join(fields).encode("ascii") + b"\n"


def _parse(lines: list[str]) -> ClientRun:
    run = ClientRun(int(lines[0].removeprefix("sent ")), {}, {}, [])
    for line in lines[1:]:
        kind, first, *rest = line.split(" ")
        if kind == "ack":
            assert int(first) not in run.acknowledged, f"acknowledged twice: {line}"
            run.acknowledged[int(first)] = (int(rest[0]), int(rest[1]))
        elif kind == "error":
            run.errors[int(first)] = " ".join(rest)
        else:
            offset, key, value, *headers = rest
            pairs = tuple((headers[at], _decode(headers[at + 1])) for at in range(0, len(headers), 2))
            run.read.append(Placed(int(first), int(offset), _decode(key), _decode(value), pairs))
    return run


def _encode(field: bytes | None) -> str:
    return "-" if field is None else f":{base64.b64encode(field).decode()}"


def _decode(field: str) -> bytes | None:
    return None if field == "-" else base64.b64decode(field[1:])
