"""Keep a local copy of a few etcd prefixes current: load them, then watch them without losing a change.

Single keys can be mirrored too; every rule for a prefix applies to them. All prefixes share one watch stream, with a
watcher each. So only one stream can break, fall silent and be replaced, and the loss of its connection is noticed at
once. But etcd guarantees order only within a watcher, so each prefix has its own revision.

States and transitions
    LOADING    no copy, or an invalid one         --_load--> RESUMING
    RESUMING   everything up to `seen` is known    --a stream opens--> WATCHING
                                                   --another cluster, or an older revision--> LOADING
    WATCHING   later changes arrive                --a break--> RESUMING
                                                   --Compacted, TooLarge, another cluster, distrust()--> LOADING
A failure in LOADING or RESUMING leads back to the same state after a longer pause. RESUMING begins with
`_prove_same_history`, except directly after a load.

Invariants
1. `seen` of a prefix: every change to it up to that revision has been handed to the listener. A new watcher starts at
   seen + 1. It advances only by complete messages: to the last event of an unfragmented message or of the last
   fragment, or to the revision in a progress notification of that very watcher. It never advances to the revision in
   the header of a message with events: etcd sends old events under a new header to a watcher that catches up.
2. Listeners get the changes to one prefix in order of revision. Only the changes of one revision, if a break splits
   them, may be handed over twice; this does not affect a listener that compares mod_revisions.
3. Messages and fragments are handed over as they arrive and not collected. A message has a size limit. A larger change,
   such as the end of a lease with millions of keys, causes a load, which is read in pages.
4. A snapshot replaces everything, as of its revision. It is handed over once all of it has been read, and kept encoded
   until then: decoded, a million keys would take 300 MiB.
5. Revisions compare only within one history. Another cluster id, or a linearizable read below a revision already seen,
   means a restored etcd: back to LOADING, and `on_restored` before the snapshot. Until then listeners keep their state.
6. A silent stream is asked for a sign of life every `progress_interval_s`, and replaced after `quiet_limit_s`. A member
   that has lost the others still answers for seconds, so a linearizable read, which needs a majority, is made at the
   same interval. `last_heard` is the earlier of the last message on the stream and the last such read: at that time the
   copy was connected to a live cluster.

Fragments are accepted, but not requested by default. etcd (3.4 up to 3.6.16 at least) measures a fragment again for
each event it adds, which is quadratic, and sends nothing meanwhile. etcd 3.6.16 took 14 s of CPU for 100,000 small
deletions at one revision in fragments: the stream would be replaced before the first fragment came, and the work would
begin again. In one message they took 0.8 s. 300,000 in one message took 2.3 s, nearly all for the deletion itself.

A watch stream has several watchers. It returns etcd's messages and decides nothing. Any failure ends it; the next call
raises an EtcdError.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import structlog

from kproxy.etcd.client import EtcdClient
from kproxy.etcd.errors import Compacted, EtcdError, EtcdUnavailable, TooLarge
from kproxy.etcd.messages import Pages, Snapshot, WatchEvent, encode_key, prefix_end, rpc, watch_event

# The watcher that `ask_for_sign_of_life` creates and cancels: its messages carry no information about the others.
SIGN_OF_LIFE_WATCH_ID = 1 << 62


class WatchStream:
    """An open Watch call, read by one task at a time.

    Its creator must await `close`.

    `write_timeout_s`: the time that a request may wait for a connection or for etcd to accept it.
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
        """Cause two messages for SIGN_OF_LIFE_WATCH_ID, the second `canceled`. `key`: one that the user may read.

        This creates and cancels a watcher. A progress request is not enough: from 3.5.8 on etcd answers it only once
        the start revision of every watcher has been reached, and so never if there are no writes.
        """
        await self.watch(SIGN_OF_LIFE_WATCH_ID, key, 0, exact=True, fragments=False)
        cancel = rpc.WatchCancelRequest(watch_id=SIGN_OF_LIFE_WATCH_ID)
        await self._stream.write(rpc.WatchRequest(cancel_request=cancel), self._write_timeout_s)

    async def read(self, timeout_s: float) -> Any | None:
        """The next WatchResponse, or None if none came within `timeout_s`.

        A timeout loses no message. The revision in its header is the store's when etcd sent it: events of earlier
        revisions may still follow. `fragment`: more parts of the same message follow. `canceled`: the watcher has
        ended, for `cancel_reason` or, if `compact_revision` is not 0, because its start revision has been compacted.
        """
        response = await self._stream.read(timeout_s)
        if response is not None and response.canceled:
            self._stream.refused(response.cancel_reason)
        return response

    async def close(self) -> None:
        await self._stream.close()


# The most events handed over before the event loop serves its other tasks, in one message or several.
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
    """The receiver of a mirror's changes, one call at a time. An exception from any call ends `run`."""

    def on_restored(self) -> None:
        """Handle a restored etcd: revisions from before cannot be compared with later ones. A snapshot follows."""

    def on_snapshot(self, snapshot: Snapshot) -> Awaitable[None] | None:
        """Replace the state by all keys of all prefixes at the snapshot's revision.

        Return an awaitable if this takes long.
        """

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        """Take changes to one prefix, in order. After them the prefix is complete up to `revision`."""


class _Restored(EtcdError):
    """The history in etcd is not the mirrored one."""


@dataclass(slots=True, eq=False)
class _Watched:
    """One prefix, or with `exact` one key.

    `seen` is defined by invariant 1; `delivered` is the highest revision of any event handed over.
    """

    prefix: str
    exact: bool = False
    seen: int = 0
    delivered: int = 0


@dataclass(eq=False)
class PrefixMirror:
    """Mirrors `prefixes`, and the single `keys`, into `listener`.

    `run` is one coroutine that the caller owns.

    `clock` gives seconds; `last_heard` is on it. If etcd cannot be reached, or refuses, the mirror retries for ever:
    `last_error` says why no change arrives.
    """

    client: EtcdClient
    prefixes: Sequence[str]
    listener: MirrorListener
    _: KW_ONLY
    keys: Sequence[str] = ()
    clock: Callable[[], float] = time.monotonic
    progress_interval_s: float = 2.0
    quiet_limit_s: float = 8.0
    fragments: bool = False

    def __post_init__(self) -> None:
        if not self.prefixes or len(set(self.prefixes)) != len(self.prefixes) or not all(self.prefixes):
            raise ValueError("invalid prefixes; expected different ones, none of them empty")
        # The position is the watch id, which must be above 0 for etcd.
        watched = [*map(_Watched, self.prefixes), *(_Watched(key, exact=True) for key in self.keys)]
        self._watched = dict(enumerate(watched, start=1))
        self._cluster_id = 0
        self._synced = asyncio.Event()
        self._restored = False
        self._failures = 0
        # An upper bound of the events handed over since the event loop last served other tasks.
        self._in_turn = 0
        self.state = MirrorState.LOADING
        self._stream_heard_at = float("-inf")
        self._confirmed_at = float("-inf")
        self.last_error: EtcdError | None = None

    async def wait_synced(self) -> None:
        """Wait for the first snapshot, maybe for ever: the caller has a deadline."""
        await self._synced.wait()

    def distrust(self) -> None:
        """Load again soon, because the caller's own read has shown that etcd was restored."""
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
        stream = WatchStream(self.client, write_timeout_s=REQUEST_TIMEOUT_S)
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
            get = self.client.get_snapshot if watched.exact else self.client.get_prefix
            page = await get(watched.prefix, revision=revision, into=kvs)
            if cluster_id not in (0, page.cluster_id):
                raise _Restored("two pages of one load came from different clusters")
            revision, cluster_id = page.revision, page.cluster_id
        self._cluster_id = cluster_id
        for watched in self._watched.values():
            watched.seen = watched.delivered = revision
        if self._restored:
            self._restored = False
            self.listener.on_restored()
        began = self.clock()
        taking = self.listener.on_snapshot(Snapshot(revision, cluster_id, kvs))
        if taking is not None:
            await taking
        self._stream_heard_at = self._confirmed_at = began
        self.state = MirrorState.RESUMING
        self._synced.set()

    async def _confirm(self) -> None:
        """Make a linearizable read, which needs a majority, again and again."""
        while True:
            await asyncio.sleep(self.progress_interval_s)
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
        """Check that etcd was not restored, by a linearizable read, which unlike a lagging member is never behind."""
        asked_at, cluster_id = self.clock(), self._cluster_id
        seen = max(watched.seen for watched in self._watched.values())
        now = await self.client.get_snapshot(self._watched[1].prefix)
        if cluster_id != self._cluster_id:
            # A load came in between, so this read cannot be compared.
            return
        if now.cluster_id != self._cluster_id or now.revision < seen:
            raise _Restored(
                f"etcd was restored: cluster {now.cluster_id:x} at revision {now.revision}, "
                f"but cluster {self._cluster_id:x} had reached {seen}"
            )
        self._confirmed_at = max(self._confirmed_at, asked_at)

    async def _watch(self, stream: WatchStream) -> None:
        for watch_id, watched in self._watched.items():
            await stream.watch(
                watch_id, watched.prefix, watched.seen + 1, exact=watched.exact, fragments=self.fragments
            )
        self.state = MirrorState.WATCHING
        quiet_since = self.clock()
        while True:
            message = await stream.read(self.progress_interval_s)
            if self._restored:
                raise _Restored("etcd was restored: another read has shown it")
            if message is not None:
                self._stream_heard_at = quiet_since = self.clock()
                await self._take(message)
            elif self.clock() - quiet_since >= self.quiet_limit_s:
                raise EtcdUnavailable(
                    f"etcd at {self.client.endpoints} has sent nothing on a watch for {self.quiet_limit_s:g} s."
                )
            else:
                await stream.ask_for_sign_of_life(self._watched[1].prefix)

    async def _take(self, message: Any) -> None:
        cluster_id = message.header.cluster_id
        if cluster_id != self._cluster_id:
            raise _Restored(f"etcd is now cluster {cluster_id:x}; before, it was {self._cluster_id:x}")
        if message.compact_revision:
            raise Compacted(f"etcd has compacted up to revision {message.compact_revision}")
        if message.canceled and message.watch_id != SIGN_OF_LIFE_WATCH_ID:
            raise EtcdError(f"etcd at {self.client.endpoints} cancelled a watch: {message.cancel_reason}")
        if message.created:
            return
        # Not earlier: etcd confirms a watch before it refuses it, and a refused watch must not be retried at once.
        self._failures = 0
        self.last_error = None
        watched = self._watched.get(message.watch_id)
        if watched is None:
            return
        if message.events:
            await self._deliver(watched, message)
        elif not message.fragment:
            watched.seen = watched.delivered = max(watched.seen, message.header.revision)

    async def _deliver(self, watched: _Watched, message: Any) -> None:
        count = len(message.events)
        for start in range(0, count, CHUNK_EVENTS):
            # After a break etcd sends some events again. Skip those below the last revision that was handed over.
            events = [
                watch_event(event)
                for event in message.events[start : start + CHUNK_EVENTS]
                if event.kv.mod_revision >= watched.delivered
            ]
            last = start + CHUNK_EVENTS >= count
            if events:
                watched.delivered = events[-1].kv.mod_revision
            if last and not message.fragment:
                watched.seen = max(watched.seen, watched.delivered)
            if events:
                self.listener.on_events(events, watched.seen)
            self._in_turn += len(events)
            if not last or self._in_turn >= CHUNK_EVENTS:
                self._in_turn = 0
                await asyncio.sleep(0)
