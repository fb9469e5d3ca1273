"""Check addresses and the path of a report before a job starts, and write files."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kproxy.config import parse_address, split_list
from kproxy.errors import StartupError
from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed

CONNECT_TIMEOUT_S: Final = 5.0
KAFKA_TIMEOUT_S: Final = 20.0
_PLAIN: Final = "PLAINTEXT"
START_OR_ADDRESS: Final = "start it (`kproxy dev`), or give its address"


def check_reachable(bootstrap: str, flag: str, way_out: str = START_OR_ADDRESS) -> None:
    """Raise StartupError if no address in `bootstrap` accepts a connection."""
    why = ""
    for text in split_list(bootstrap, flag):
        address = parse_address(text, flag)
        try:
            with socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S):
                return
        except OSError as error:
            why = error.strerror or str(error)
    raise StartupError(f"nothing answers at {flag} {bootstrap} ({why}): {way_out}.")


def check_kafka(bootstrap: str, flag: str, options: Mapping[str, str]) -> None:
    """Raise StartupError if nothing at `bootstrap` speaks Kafka's protocol; `options` are those of Kafka's clients.

    For a port of etcd or of an admin page, Kafka's own client reports only a timeout.
    """
    check_reachable(bootstrap, flag)
    if options.get("security.protocol", _PLAIN).upper() != _PLAIN:
        return
    try:
        with LogClient(bootstrap, timeout_s=KAFKA_TIMEOUT_S, patience_s=KAFKA_TIMEOUT_S) as client:
            client.partitions(())
    except LogReadFailed as error:
        raise StartupError(f"No Kafka answers at {flag} {bootstrap}: {error}") from error


def check_report(path: Path | None) -> None:
    """Raise StartupError if the report cannot be written to `path`; call it before the job."""
    if path is None:
        return
    try:
        created = not path.exists()
        path.open("ab").close()
    except OSError as error:
        raise StartupError(
            f"The report cannot be written to {path} ({error.strerror}): name another --report."
        ) from error
    if created:
        path.unlink()


def write_whole(path: Path, text: str, what: str) -> None:
    """Write a file, whole or not at all. Raise StartupError if that fails; `what` is the subject of the sentence."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise StartupError(f"{what} could not be written to {path} ({error.strerror}): name another file.") from error
