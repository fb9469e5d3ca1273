"""Keep a copy of a few prefixes current: load, watch, lose no change.

Single keys can be mirrored too; whatever holds for a prefix holds for them. All prefixes share one watch stream, with a
watcher each. So there is one stream to break, fall silent and be replaced, and one connection whose loss is noticed at
once. But etcd guarantees order only within a watcher, so each prefix has a revision of its own.

States and transitions
    LOADING    nothing is known, or it is void     --_load--> RESUMING
    RESUMING   everything up to `seen` is known    --a stream opens--> WATCHING
                                                   --another cluster, or an older revision--> LOADING
    WATCHING   later changes arrive                --a break--> RESUMING
                                                   --Compacted, TooLarge, another cluster, distrust()--> LOADING
A failure in LOADING or RESUMING leads back to the same state after a longer pause. RESUMING that does not come straight
from a load begins with `_prove_same_history`.

Invariants
1. `seen` of a prefix: every change to it up to that revision has been handed to the listener. A new watcher starts at
   seen + 1. It moves only by complete messages: to the last event of an unfragmented message or of the last fragment,
   or to the revision in a progress notification of that very watcher. It never moves to the header of a message with
   events: a watcher that catches up is sent old events under a new header.
2. Listeners get the changes to one prefix in order of revision. Only the one revision that a break cut in two may be
   handed over twice; a listener that compares mod_revisions is not affected.
3. Messages and fragments are handed over as they come and not collected. A message has a size limit. A change beyond
   it, such as the end of a lease with millions of keys, causes a load, which comes in pages.
4. A snapshot replaces everything, as of its revision. It is handed over once all of it has been read, and kept encoded
   until then: decoded, a million keys would take 300 MiB.
5. Revisions compare only within one history. Another cluster id, or a linearizable read below a revision already seen,
   means a restored etcd: LOADING, and `on_restored` before the snapshot. Until then the listener keeps its state.
6. On a silent stream a sign of life is asked for every `progress_interval_s`; one silent for `quiet_limit_s` is
   replaced. A member that has lost the others still answers for seconds, so a linearizable read, which needs a
   majority, is made at the same interval. `last_heard` is the earlier of the last message on the stream and the last
   such read: at that time the copy was linked to a live cluster.

Fragments are accepted but not requested. etcd (3.4 up to 3.6.16 at least) measures a fragment anew for each event it
adds, which is quadratic, and it is silent meanwhile: 100,000 small deletions at one revision took 3.6.16 14 s of CPU in
fragments, so the stream would be replaced, and the work begun again, before the first fragment came; in one message
0.8 s. 300,000 in one message took 2.3 s, nearly all of it the deletion itself.

A watch stream has several watchers. It reports etcd's messages as values and decides nothing. Any failure ends it; the
first call that meets the failure raises an EtcdError.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from kproxy.etcd.client import EtcdClient
from kproxy.etcd.errors import Compacted, EtcdError, EtcdUnavailable, TooLarge
from kproxy.etcd.messages import Pages, Snapshot, WatchEvent, encode_key, key_value, prefix_end, rpc

# The watcher that `ask_for_sign_of_life` creates and cancels: its messages say nothing about the others.
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

    async def watch(self, watch_id: int, key: str, start_revision: int, *, exact: bool, fragments: bool) -> None:
        """Create a watcher of a key, or of a prefix unless `exact`, from `start_revision` on."""
        create = rpc.WatchCreateRequest(
            key=encode_key(key),
            range_end=b"" if exact else prefix_end(key),
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
        await self.watch(SIGN_OF_LIFE_WATCH_ID, key, 0, exact=True, fragments=False)
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


# Events handed over at once, in one message or several: the loop serves its other tasks in between.
CHUNK_EVENTS = 1_000
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
# The time that a watch request may wait for a connection.
REQUEST_TIMEOUT_S = 3.0

log = structlog.get_logger(__name__)


class MirrorState(enum.Enum):
    LOADING = "loading"
    WATCHING = "watching"
    RESUMING = "resuming"


class MirrorListener(Protocol):
    """The receiver of a mirror's changes, one call at a time.

    An exception from any call ends `run`.
    """

    def on_restored(self) -> None:
        """etcd was restored: earlier revisions do not compare with later ones.

        A snapshot follows.
        """

    def on_snapshot(self, snapshot: Snapshot) -> Awaitable[None] | None:
        """Take the whole content of all prefixes at the snapshot's revision.

        Return an awaitable if that takes long.
        """

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        """Take changes to one prefix, in order.

        With them the prefix is complete up to `revision`.
        """


class _Restored(EtcdError):
    """etcd has a history other than the mirrored one."""


class _Watched:
    """One prefix, or with `exact` one key.

    `seen` is that of invariant 1; `delivered` is the highest revision of any event handed over.
    """

    __slots__ = ("delivered", "exact", "prefix", "seen")

    def __init__(self, prefix: str, *, exact: bool = False) -> None:
        self.prefix = prefix
        self.exact = exact
        self.seen = 0
        self.delivered = 0


class PrefixMirror:
    """Mirrors `prefixes`, and the single `keys`, into `listener`.

    `run` is one coroutine that the caller owns.

    `clock` gives seconds; `last_heard` is on it. An etcd that cannot be reached, or refuses, is tried again for ever:
    `last_error` says why nothing new comes.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefixes: Sequence[str],
        listener: MirrorListener,
        *,
        keys: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        progress_interval_s: float = 2.0,
        quiet_limit_s: float = 8.0,
        fragments: bool = False,
    ) -> None:
        if not prefixes or len(set(prefixes)) != len(prefixes) or not all(prefixes):
            raise ValueError("a mirror needs different prefixes, none of them empty")
        self._client = client
        self._listener = listener
        self._clock = clock
        self._progress_interval_s = progress_interval_s
        self._quiet_limit_s = quiet_limit_s
        self._fragments = fragments
        # The position is the watch id, which etcd wants above 0.
        watched = [*map(_Watched, prefixes), *(_Watched(key, exact=True) for key in keys)]
        self._watched = dict(enumerate(watched, start=1))
        self._cluster_id = 0
        self._synced = asyncio.Event()
        self._restored = False
        self._failures = 0
        # Events handed over since the loop had its last turn, at least.
        self._in_turn = 0
        self.state = MirrorState.LOADING
        self._stream_heard_at = float("-inf")
        self._confirmed_at = float("-inf")
        self.last_error: EtcdError | None = None

    async def wait_synced(self) -> None:
        """Wait for the first snapshot, maybe for ever: the caller has a deadline."""
        await self._synced.wait()

    def distrust(self) -> None:
        """Load anew soon: the caller's own read shows that etcd was restored."""
        self._restored = True

    @property
    def last_heard(self) -> float:
        """The time of invariant 6; -inf before the first load."""
        return min(self._stream_heard_at, self._confirmed_at)

    async def run(self) -> None:
        """Mirror until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="etcd-mirror-watch")
            tasks.create_task(self._confirm(), name="etcd-mirror-confirm")

    async def _follow(self) -> None:
        while True:
            try:
                await self._once()
            except (Compacted, TooLarge, _Restored) as error:
                self.state = MirrorState.LOADING
                self._restored |= isinstance(error, _Restored)
                log.warning("etcd mirror reloading", prefixes=self._prefixes(), reason=str(error))
                await self._pause(error)
            except EtcdError as error:
                if self.state is MirrorState.WATCHING:
                    self.state = MirrorState.RESUMING
                log.warning("etcd mirror interrupted", prefixes=self._prefixes(), reason=str(error))
                await self._pause(error)

    async def _once(self) -> None:
        """Go from any state to WATCHING, and watch until an error ends it."""
        if self.state is MirrorState.LOADING:
            await self._load()
        else:
            await self._prove_same_history()
        stream = WatchStream(self._client, write_timeout_s=REQUEST_TIMEOUT_S)
        try:
            await self._watch(stream)
        finally:
            await stream.close()

    async def _pause(self, error: EtcdError) -> None:
        self.last_error = error
        longest = min(FIRST_PAUSE_S * 2.0 ** min(self._failures, 10), LONGEST_PAUSE_S)
        self._failures += 1
        # Jitter keeps many proxies from returning at the same instant.
        await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret

    def _prefixes(self) -> list[str]:
        return [watched.prefix for watched in self._watched.values()]

    async def _load(self) -> None:
        revision, cluster_id, kvs = 0, 0, Pages()
        for watched in self._watched.values():
            get = self._client.get_snapshot if watched.exact else self._client.get_prefix
            page = await get(watched.prefix, revision=revision, into=kvs)
            if cluster_id not in (0, page.cluster_id):
                raise _Restored("two pages of one load came from different clusters")
            revision, cluster_id = page.revision, page.cluster_id
        self._cluster_id = cluster_id
        for watched in self._watched.values():
            watched.seen = watched.delivered = revision
        if self._restored:
            self._restored = False
            self._listener.on_restored()
        began = self._clock()
        taking = self._listener.on_snapshot(Snapshot(revision, cluster_id, kvs))
        if taking is not None:
            await taking
        self._stream_heard_at = self._confirmed_at = began
        self.state = MirrorState.RESUMING
        self._synced.set()

    async def _confirm(self) -> None:
        """Make a linearizable read, which needs a majority, again and again."""
        while True:
            await asyncio.sleep(self._progress_interval_s)
            if self.state is MirrorState.LOADING:
                continue
            try:
                await self._prove_same_history()
            except _Restored:
                self.distrust()
            except EtcdError as error:
                # `last_heard` shows that the read failed; the stream decides on its own what to do.
                log.debug("etcd mirror not confirmed", reason=str(error))

    async def _prove_same_history(self) -> None:
        """Check by a linearizable read, which unlike a lagging member is never behind, that etcd was not restored."""
        asked_at, cluster_id = self._clock(), self._cluster_id
        seen = max(watched.seen for watched in self._watched.values())
        now = await self._client.get_snapshot(self._watched[1].prefix)
        if cluster_id != self._cluster_id:
            # A load came in between: this read does not compare.
            return
        if now.cluster_id != self._cluster_id or now.revision < seen:
            raise _Restored(
                f"etcd was restored: cluster {now.cluster_id:x} at revision {now.revision}, "
                f"where cluster {self._cluster_id:x} had reached {seen}"
            )
        self._confirmed_at = max(self._confirmed_at, asked_at)

    async def _watch(self, stream: WatchStream) -> None:
        for watch_id, watched in self._watched.items():
            await stream.watch(
                watch_id, watched.prefix, watched.seen + 1, exact=watched.exact, fragments=self._fragments
            )
        self.state = MirrorState.WATCHING
        quiet_since = self._clock()
        while True:
            message = await stream.read(self._progress_interval_s)
            if self._restored:
                raise _Restored("etcd was restored, as another read has shown")
            if message is not None:
                self._stream_heard_at = quiet_since = self._clock()
                await self._take(message)
            elif self._clock() - quiet_since >= self._quiet_limit_s:
                raise EtcdUnavailable(
                    f"etcd at {self._client.endpoints} has said nothing on a watch for {self._quiet_limit_s:g} s."
                )
            else:
                await stream.ask_for_sign_of_life(self._watched[1].prefix)

    async def _take(self, message: WatchMessage) -> None:
        if message.cluster_id != self._cluster_id:
            raise _Restored(f"etcd is another cluster now: {message.cluster_id:x}, before it was {self._cluster_id:x}")
        if message.compact_revision:
            raise Compacted(f"etcd has compacted up to revision {message.compact_revision}")
        if message.canceled and message.watch_id != SIGN_OF_LIFE_WATCH_ID:
            raise EtcdError(f"etcd at {self._client.endpoints} cancelled a watch: {message.cancel_reason}")
        if message.created:
            return
        # Not before: etcd first confirms a watch that it refuses, and that must not be retried at once.
        self._failures = 0
        self.last_error = None
        watched = self._watched.get(message.watch_id)
        if watched is None:
            return
        if message.event_count():
            await self._deliver(watched, message)
        elif not message.fragment:
            watched.seen = watched.delivered = max(watched.seen, message.revision)

    async def _deliver(self, watched: _Watched, message: WatchMessage) -> None:
        count = message.event_count()
        for start in range(0, count, CHUNK_EVENTS):
            # Events handed over before a break come again after it; all but the revision cut in two are old.
            events = [
                event
                for event in message.events(start, start + CHUNK_EVENTS)
                if event.kv.mod_revision >= watched.delivered
            ]
            last = start + CHUNK_EVENTS >= count
            if events:
                watched.delivered = events[-1].kv.mod_revision
            if last and not message.fragment:
                watched.seen = max(watched.seen, watched.delivered)
            if events:
                self._listener.on_events(events, watched.seen)
            self._in_turn += len(events)
            if not last or self._in_turn >= CHUNK_EVENTS:
                self._in_turn = 0
                await asyncio.sleep(0)
