"""The sink that a configuration names; what it needs is imported only for it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kproxy.config import AuditOptions
from kproxy.trail.sinks.files import prepare, remove_left_behind
from kproxy.trail.sinks.sink import Sink


def make_sink(options: AuditOptions, incarnation: str, began_ms: int, dial: Callable[[], socket.socket]) -> Sink | None:
    """None where nothing is shipped. `dial` connects to this proxy itself, from any thread. Raises StartupError."""
    if options.sink == "topic":
        from kproxy.trail.sinks.topic import TopicSink

        if options.bootstrap:
            return TopicSink(options.topic, incarnation, bootstrap=[str(each) for each in options.bootstrap])
        return TopicSink(options.topic, incarnation, dial=dial)
    if options.directory is None:
        return None
    prepare(options.directory)
    remove_left_behind(options.directory, began_ms)
    if options.sink == "json":
        from kproxy.trail.sinks.json_lines import JsonSink

        return JsonSink(options.directory, incarnation, began_ms)
    from kproxy.trail.sinks.parquet import FILE_BYTES, ParquetSink

    # While a file is being written, the rows of the next must have room.
    return ParquetSink(options.directory, incarnation, began_ms, file_bytes=min(FILE_BYTES, options.max_bytes // 3))
