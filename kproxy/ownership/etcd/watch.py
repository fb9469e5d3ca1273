"""One watch stream: several watchers on it, and what comes back, as values.

The stream gives what etcd said and decides nothing; `mirror.py` knows what it means. Any failure ends the stream and is
reported once, as an EtcdError, by whichever call meets it first. A stream is not reused after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc.aio

from kproxy.ownership.etcd.client import EtcdClient
from kproxy.ownership.etcd.errors import EtcdUnavailable, cancelled_by_grpc, from_rpc_error
from kproxy.ownership.etcd.messages import WatchEvent, encode_key, key_value, prefix_end, rpc

# What etcd answers a progress request with: the stream is alive, but it speaks for no watcher. Before 3.5.8 such an
# answer can overtake events of the revision it names, so it must never count as having seen that revision.
STREAM_WATCH_ID = -1

_DELETE = 1


class WatchMessage(NamedTuple):
    """One WatchResponse. `revision` is the store's when it was sent; events of earlier revisions may still follow.

    `fragment`: more of the same follows. `canceled`: the watcher is gone, for `cancel_reason` or, where
    `compact_revision` is not 0, because what it wanted has been compacted away.
    """

    watch_id: int
    cluster_id: int
    revision: int
    created: bool
    canceled: bool
    compact_revision: int
    cancel_reason: str
    fragment: bool
    raw_events: Any

    def event_count(self) -> int:
        return len(self.raw_events)

    def events(self, start: int, stop: int) -> list[WatchEvent]:
        """A slice of the events: one message can hold tens of thousands, and the loop has other work."""
        return [WatchEvent(event.type == _DELETE, key_value(event.kv)) for event in self.raw_events[start:stop]]


class WatchStream:
    """An open Watch call. One task at a time reads; `close` must be awaited by whoever opened it.

    `write_timeout_s`: how long a request may wait for a connection or for etcd to take it.
    """

    def __init__(self, client: EtcdClient, *, write_timeout_s: float) -> None:
        self._endpoints = client.endpoints
        self._write_timeout_s = write_timeout_s
        self._call = client.open_stream("Watch", "Watch", "Watch")
        # Cancelling a gRPC read ends the call, so a read that was not in time goes on and is waited for again.
        self._reading: asyncio.Task[Any] | None = None

    async def watch_prefix(self, watch_id: int, prefix: str, start_revision: int) -> None:
        """Ask for a watcher (`watch_id` > 0) of every change under `prefix` from `start_revision` on."""
        create = rpc.WatchCreateRequest(
            key=encode_key(prefix),
            range_end=prefix_end(prefix),
            start_revision=start_revision,
            watch_id=watch_id,
            progress_notify=True,
            fragment=True,
        )
        await self._write(rpc.WatchRequest(create_request=create))

    async def request_progress(self) -> None:
        """Ask for a sign of life: a message for STREAM_WATCH_ID, or from etcd 3.5.8 on none while a watcher lags."""
        await self._write(rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))

    async def _write(self, request: Any) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                with self._errors():
                    await self._call.write(request)
        except TimeoutError:
            raise EtcdUnavailable(
                f"etcd at {self._endpoints} took no watch request for {self._write_timeout_s:g} s."
            ) from None

    async def read(self, timeout_s: float) -> WatchMessage | None:
        """The next message, or None where none came within `timeout_s`; nothing is lost by that."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait((self._reading,), timeout=timeout_s)
        if not done:
            return None
        with self._errors():
            response = self._reading.result()
        self._reading = None
        if response is grpc.aio.EOF:
            raise EtcdUnavailable(f"etcd at {self._endpoints} ended the watch stream.")
        return WatchMessage(
            response.watch_id,
            response.header.cluster_id,
            response.header.revision,
            response.created,
            response.canceled,
            response.compact_revision,
            response.cancel_reason,
            response.fragment,
            response.events,
        )

    async def close(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            # Whatever the last read would have said is of no interest any more.
            await asyncio.wait((self._reading,))
            if not self._reading.cancelled():
                self._reading.exception()
            self._reading = None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "Watch", self._endpoints, write=False) from error
        except asyncio.InvalidStateError as error:
            raise EtcdUnavailable(f"etcd at {self._endpoints} ended the watch stream: {error}") from error
        except asyncio.CancelledError:
            if cancelled_by_grpc():
                raise EtcdUnavailable(f"The etcd client for {self._endpoints} was closed.") from None
            raise
