"""Define the interface of audit sinks, and create the sink that a configuration names."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from kproxy.config import AuditOptions
    from kproxy.security.broker_auth import BrokerAuth

_Result = TypeVar("_Result")


class SinkFailed(Exception):
    """Some pages may not be durable: write them again. The text says why."""


class BatchPreference(NamedTuple):
    """The preferred batch: pages of `seconds`, at most `bytes` at once."""

    bytes: int
    seconds: float = 0.0


class Sink(Protocol):
    """Writes pages; it is called once at a time."""

    preference: BatchPreference

    async def write(self, pages: Sequence[bytes]) -> None:
        """Write pages; return when they are durable.

        Raise SinkFailed, after which the next call begins again.
        """
        ...

    async def close(self) -> None:
        """Release all resources.

        A cancelled write may still be under way on its thread.
        """
        ...


async def on_thread(work: Callable[[], _Result]) -> _Result:
    """Run blocking `work` on a daemon thread of its own.

    Return its result or raise its error.

    At its end the interpreter waits for the threads of an executor, and a disk or a broker may hang for long. Pages are
    written a few times a minute, so a thread for each costs little.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def settle(result: _Result | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # there is a result if there is no error

    def run() -> None:
        result: _Result | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - passed on to the caller
            failure = error
        # Once the loop is closed, no caller waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="audit-sink", daemon=True).start()
    return await done


def make_sink(
    options: AuditOptions,
    incarnation: str,
    began_ms: int,
    dial: Callable[[], socket.socket],
    access: BrokerAuth | None = None,
) -> Sink | None:
    """Create the configured sink; None if nothing is shipped. Raise StartupError.

    `dial` connects to this proxy itself. `access`: how to authenticate at another cluster; None for plain text. Only
    the libraries of the configured sink are imported.
    """
    if options.sink == "topic":
        from kproxy.trail.topic_sink import TopicSink

        if options.bootstrap:
            return TopicSink(options.topic, incarnation, bootstrap=options.bootstrap, access=access)
        return TopicSink(options.topic, incarnation, dial=dial)
    if options.directory is None:
        return None
    from kproxy.trail.file_sinks import JsonSink, prepare, remove_left_behind

    prepare(options.directory)
    remove_left_behind(options.directory, began_ms)
    if options.sink == "json":
        return JsonSink(options.directory, incarnation, began_ms)
    from kproxy.trail.parquet_sink import FILE_BYTES, ParquetSink

    # The rows of the next file need memory while a file is being written.
    return ParquetSink(options.directory, incarnation, began_ms, file_bytes=min(FILE_BYTES, options.max_bytes // 3))
