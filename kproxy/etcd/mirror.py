"""A local copy of a few prefixes, kept current: load at a revision, watch from the next, never lose a change between.

A single key can be mirrored beside them; what is said here of a prefix holds for it.
All prefixes share one watch stream, with a watcher each. One stream is one thing that can break, fall silent and be
replaced, and one connection whose loss is noticed at once; but etcd promises order only within a watcher, so each
prefix keeps a revision of its own.

States and transitions
    LOADING    nothing is known, or what is known is void  --_load--> RESUMING
    RESUMING   everything up to `seen` is known            --a stream opens--> WATCHING
                                                           --another cluster, or an older revision--> LOADING
    WATCHING   and what comes after it is on its way       --a break--> RESUMING
                                       --Compacted, TooLarge, another cluster, distrust()--> LOADING
A failure in LOADING or RESUMING leads back to the same state after a longer pause. RESUMING that does not come straight
from a load begins with `_prove_same_history`.

Invariants
1. `seen` of a prefix: every change to it up to that revision has been handed to the listener. A new watcher starts at
   seen + 1. It moves by complete messages alone: to the last event of an unfragmented message or of the last fragment,
   or to the revision in a progress notification of that very watcher. Never to the header of a message with events:
   a watcher that catches up is sent old events under a new header.
2. Listeners get the changes to one prefix in order of revision. Only the one revision that a break cut in two may be
   handed over twice; whoever applies "as of mod_revision" notices nothing.
3. Nothing is collected: messages and fragments are handed on as they come. A message has a size limit; what does not
   fit, the end of a lease with millions of keys, is answered by a load, which comes in pages.
4. A snapshot means: this is all there is, as of its revision; forget the rest. It is handed over once all of it
   has been read, and is kept as it came until then: decoded, a million keys would take 300 MiB.
5. Revisions compare within one history only. Another cluster id, or a linearizable read below a revision already seen,
   is a restored etcd: LOADING, and `on_restored` before the snapshot. Until then the listener keeps what it has.
6. Silence on the stream is broken by asking every `progress_interval_s`; one that stays silent for `quiet_limit_s` is
   replaced. A member that has lost the others answers such questions for seconds, so a linearizable read, which needs a
   majority, is made in the same rhythm. `last_heard` is the earlier of the last word on the stream and the last
   such read: at that time the copy was linked to a living cluster.

Fragments are understood and not asked for. etcd (3.4 up to 3.6.16 at least) measures a fragment anew for each event it
adds, which is quadratic, and it is silent meanwhile: 100,000 small deletions at one revision took 3.6.16 14 s of CPU in
fragments, so that a stream would be replaced, and the work begun again, before the first one came; in one message
0.8 s. 300,000 in one message took 2.3 s, nearly all of it the deletion itself.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from kproxy.etcd.client import EtcdClient
from kproxy.etcd.errors import Compacted, EtcdError, EtcdUnavailable, TooLarge
from kproxy.etcd.messages import Pages, Snapshot, WatchEvent
from kproxy.etcd.watch import SIGN_OF_LIFE_WATCH_ID, WatchMessage, WatchStream

# Events handed over in one go: the loop serves its other tasks between.
CHUNK_EVENTS = 1_000
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
# How long a watch request may wait for a connection.
REQUEST_TIMEOUT_S = 3.0

log = structlog.get_logger(__name__)


class MirrorState(enum.Enum):
    LOADING = "loading"
    WATCHING = "watching"
    RESUMING = "resuming"


class MirrorListener(Protocol):
    """What a mirror talks to, one call at a time. An exception out of any call ends `run`."""

    def on_restored(self) -> None:
        """etcd was restored: no revision told so far compares with what comes now, which is a snapshot."""

    def on_snapshot(self, snapshot: Snapshot) -> Awaitable[None] | None:
        """The whole content of all prefixes at the snapshot's revision. To be awaited where taking it in takes long."""

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        """Changes to one prefix, in order; with them everything up to `revision` has been told for that prefix."""


class _Restored(EtcdError):
    """etcd has another history than the one mirrored."""


class _Watched:
    """One prefix, or with `exact` one key.

    `seen` is invariant 1's; `delivered` the highest revision of which anything was handed over.
    """

    __slots__ = ("delivered", "exact", "prefix", "seen")

    def __init__(self, prefix: str, *, exact: bool = False) -> None:
        self.prefix = prefix
        self.exact = exact
        self.seen = 0
        self.delivered = 0


class PrefixMirror:
    """Mirrors `prefixes`, and the single `keys`, into `listener`. `run` is one coroutine that the caller owns.

    `clock` gives seconds; `last_heard` is on it. An etcd that cannot be reached, or refuses, is tried again for ever:
    `last_error` says why there is nothing new.
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
        self.state = MirrorState.LOADING
        self._stream_heard_at = float("-inf")
        self._confirmed_at = float("-inf")
        self.last_error: EtcdError | None = None

    async def wait_synced(self) -> None:
        """Until the first snapshot has been handed over. It may take for ever; the caller has the deadline."""
        await self._synced.wait()

    def distrust(self) -> None:
        """For a caller whose own read shows that etcd was restored: load anew, within a progress interval."""
        self._restored = True

    @property
    def last_heard(self) -> float:
        """On the clock: as invariant 6 says; -inf before the first load."""
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
                log.warning("etcd_mirror_reloads", prefixes=self._prefixes(), reason=str(error))
                await self._pause(error)
            except EtcdError as error:
                if self.state is MirrorState.WATCHING:
                    self.state = MirrorState.RESUMING
                log.warning("etcd_mirror_interrupted", prefixes=self._prefixes(), reason=str(error))
                await self._pause(error)

    async def _once(self) -> None:
        """From whatever state to WATCHING, and watch until something ends it."""
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
        # Jitter keeps many proxies from coming back in the same instant.
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
        """Have a majority speak, again and again."""
        while True:
            await asyncio.sleep(self._progress_interval_s)
            if self.state is MirrorState.LOADING:
                continue
            try:
                await self._prove_same_history()
            except _Restored:
                self.distrust()
            except EtcdError as error:
                # That nobody confirms is seen by `last_heard`; the stream has its own view of what to do about it.
                log.debug("etcd_not_confirmed", reason=str(error))

    async def _prove_same_history(self) -> None:
        """A lagging member may truthfully be behind us; a linearizable read may not."""
        asked_at, cluster_id = self._clock(), self._cluster_id
        seen = max(watched.seen for watched in self._watched.values())
        now = await self._client.get_snapshot(self._watched[1].prefix)
        if cluster_id != self._cluster_id:
            # Loaded anew meanwhile: this read is of another time.
            return
        if now.cluster_id != self._cluster_id or now.revision < seen:
            raise _Restored(
                f"etcd was restored: cluster {now.cluster_id:x} at revision {now.revision}, "
                f"where cluster {self._cluster_id:x} had reached {seen}"
            )
        self._confirmed_at = max(self._confirmed_at, asked_at)

    async def _watch(self, stream: WatchStream) -> None:
        for watch_id, watched in self._watched.items():
            watch = stream.watch_key if watched.exact else stream.watch_prefix
            await watch(watch_id, watched.prefix, watched.seen + 1, fragments=self._fragments)
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
        # Not before: a watch that is refused is first said to be created, and must not be asked for again at once.
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
            # What was handed over before a break comes again after it; all but the revision that was cut in two is old.
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
            if not last:
                await asyncio.sleep(0)
