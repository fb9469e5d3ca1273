"""One watch stream with several watchers, and its messages as values.

The stream reports etcd's messages and decides nothing; `mirror.py` interprets them. Any failure ends the stream; the
first call that meets it raises an EtcdError. A stream is not reused after that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kproxy.etcd.client import EtcdClient
from kproxy.etcd.messages import WatchEvent, encode_key, key_value, prefix_end, rpc

# The watcher that `ask_for_sign_of_life` creates and cancels: its messages tell nothing of the others.
SIGN_OF_LIFE_WATCH_ID = 1 << 62

_DELETE = 1


class WatchMessage(NamedTuple):
    """One WatchResponse. `revision` is the store's when it was sent.

    Events of earlier revisions may still follow.

    `fragment`: more of the same follows. `canceled`: the watcher is gone, for `cancel_reason` or, if
    `compact_revision` is not 0, because its start revision has been compacted.
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
        """Decode a slice of the events: one message can have tens of thousands."""
        return [WatchEvent(event.type == _DELETE, key_value(event.kv)) for event in self.raw_events[start:stop]]


class WatchStream:
    """An open Watch call. One task at a time reads.

    Its creator must await `close`.

    `write_timeout_s`: how long a request may wait for a connection or for etcd to take it.
    """

    def __init__(self, client: EtcdClient, *, write_timeout_s: float) -> None:
        self._stream = client.open_stream("Watch", "Watch")
        self._write_timeout_s = write_timeout_s

    async def watch_prefix(self, watch_id: int, prefix: str, start_revision: int, *, fragments: bool) -> None:
        """Create a watcher (`watch_id` > 0) of `prefix` from `start_revision` on."""
        await self._create(watch_id, encode_key(prefix), prefix_end(prefix), start_revision, fragments=fragments)

    async def watch_key(self, watch_id: int, key: str, start_revision: int, *, fragments: bool) -> None:
        """The same for one key."""
        await self._create(watch_id, encode_key(key), b"", start_revision, fragments=fragments)

    async def _create(
        self, watch_id: int, key: bytes, range_end: bytes, start_revision: int, *, fragments: bool
    ) -> None:
        create = rpc.WatchCreateRequest(
            key=key,
            range_end=range_end,
            start_revision=start_revision,
            watch_id=watch_id,
            progress_notify=True,
            fragment=fragments,
        )
        await self._stream.write(rpc.WatchRequest(create_request=create), self._write_timeout_s)

    async def ask_for_sign_of_life(self, key: str) -> None:
        """Cause two messages for SIGN_OF_LIFE_WATCH_ID, the second of them `canceled`. `key`: one that may be read.

        This creates and cancels a watcher. A progress request is not enough: from 3.5.8 on etcd leaves it unanswered
        until the start revision of every watcher has been reached, which is never if there are no writes.
        """
        await self._create(SIGN_OF_LIFE_WATCH_ID, encode_key(key), b"", 0, fragments=False)
        cancel = rpc.WatchCancelRequest(watch_id=SIGN_OF_LIFE_WATCH_ID)
        await self._stream.write(rpc.WatchRequest(cancel_request=cancel), self._write_timeout_s)

    async def read(self, timeout_s: float) -> WatchMessage | None:
        """The next message, or None if none came within `timeout_s`.

        No message is lost by that.
        """
        response = await self._stream.read(timeout_s)
        if response is None:
            return None
        if response.canceled:
            self._stream.refused(response.cancel_reason)
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
        await self._stream.close()
