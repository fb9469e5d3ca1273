"""Load values from files, and again when the files change: certificates, authorities, revocation lists, secrets.

States of a value
  settled    the files are as they were at the last attempt
  changing   the files have changed; one more check must find them unchanged, as a certificate and its key are two files

Transitions
  settled  -> changing   a check finds the files changed
  changing -> changing   the next check finds them changed again
  changing -> settled    the next check finds them unchanged, and they are loaded
  any      -> settled    `reload`, or a reload of the configuration (kproxy.proxy.reload), loads or refuses them at once

Invariants
1. `current` is always a value that was loaded whole. An invalid file leaves the value as it is. Each attempt is
   counted, and logged by the process that `tells`.
2. After the start, files are read on another thread, in one attempt at a time.
3. Objects made from an earlier value are not changed, so open connections stay.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog

from kproxy.errors import StartupError
from kproxy.security.events import NO_EVENTS, SecurityEvents

log = structlog.get_logger(__name__)

# The time between two checks of the files, in seconds.
LOOK_S: Final = 2.0

T = TypeVar("T")
Source = tuple[Sequence[Path], Callable[[], T]]
"""Files, and the function that makes a value of them."""
Take = Callable[[SecurityEvents], Callable[[], None]]
"""Takes a loaded value, on the event loop. Returns a slow function that reports its changes, for any thread."""
_Print = tuple[tuple[int, int, int] | None, ...]


@dataclass(eq=False)
class Reloading(Generic[T]):
    """A value that `load` makes of `files`; `named` is its name in the log.

    `load` raises StartupError. `tells`: this process, and not another worker, logs. `entries` returns the parts of a
    value by name, so that security events can name the added, removed and changed parts.
    """

    named: str
    files: Sequence[Path]
    load: Callable[[], T]
    _: KW_ONLY
    counters: Counter[str]
    tells: bool = True
    on_change: Callable[[T], None] = lambda value: None
    entries: Callable[[T], Mapping[str, object]] = lambda value: {}

    def __post_init__(self) -> None:
        self._attempted = self._seen = _print_of(self.files)
        self.current = self.load()

    async def look(self, events: SecurityEvents = NO_EVENTS) -> None:
        """Load the files if they have changed, and are the same as at the last check."""
        seen = await asyncio.to_thread(_print_of, self.files)
        before, self._seen = self._seen, seen
        if seen != self._attempted and seen == before:
            await self.reload(events)

    async def reload(self, events: SecurityEvents = NO_EVENTS) -> bool:
        """Load the files now, and record the outcome in `events`; return whether they could be loaded."""
        await asyncio.to_thread(self.pass_over)
        try:
            take = await asyncio.to_thread(self.prepare)
        except StartupError as error:
            self._failed(str(error), events)
            return False
        except Exception:  # the boundary: whatever the files hold, the process continues to serve
            log.exception("files not loaded", what=self.named)
            self._failed("an internal error", events)
            return False
        await asyncio.to_thread(take(events))
        return True

    def prepare(self, source: Source[T] | None = None) -> Take:
        """Load the files, or those of a new `source`, on any thread; return a Take. Raises StartupError."""
        files, load = source or (self.files, self.load)
        seen, value = _print_of(files), load()

        def take(events: SecurityEvents) -> Callable[[], None]:
            self.files, self.load, self._attempted, self._seen = tuple(files), load, seen, seen
            before, self.current = self.current, value
            self.counters["tls.reloads.done"] += 1
            self.on_change(value)
            if not self.tells:
                return lambda: None
            log.info("reloaded", what=self.named)
            events.tell("reloaded", what=self.named)
            entries = self.entries
            return lambda: events.tell_changes(self.named, entries(before), entries(value))

        return take

    def reads(self, file: Path) -> bool:
        """Whether the value is made from this file."""
        return file in self.files

    def pass_over(self) -> None:
        """Do not load the files as they are now."""
        self._attempted = self._seen = _print_of(self.files)

    def _failed(self, reason: str, events: SecurityEvents) -> None:
        if self.tells:
            log.error("reload failed", consequence="the last valid files stay in force", what=self.named, reason=reason)
        self.tell_failed(reason, events)

    def tell_failed(self, reason: str, events: SecurityEvents) -> None:
        """Count an attempt that failed, and record it in `events`."""
        self.counters["tls.reloads.failed"] += 1
        if self.tells:
            events.tell("not_reloaded", what=self.named, reason=reason)


class Reloads:
    """All values of one process that are loaded from files. Only the holder of `turn` changes the values."""

    def __init__(self, events: SecurityEvents = NO_EVENTS) -> None:
        self.events = events
        self._values: list[Reloading[Any]] = []
        self.turn = asyncio.Lock()

    def add(self, value: Reloading[T]) -> Reloading[T]:
        self._values.append(value)
        return value

    def replace(self, before: Reloading[Any] | None, after: Reloading[Any] | None) -> None:
        """Follow the files of one value instead of another's; either may be None."""
        self._values = [each for each in self._values if each is not before] + ([after] if after is not None else [])

    async def run(self) -> None:
        """Check the files at intervals, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            async with self.turn:
                for value in self._values:
                    await value.look(self.events)

    async def reload(self) -> None:
        """Load all files now."""
        async with self.turn:
            for value in self._values:
                await value.reload(self.events)

    def prepare(self, changed: Mapping[Reloading[Any], Source[Any]]) -> Callable[[], Callable[[], None]]:
        """Load all files, for `changed` values those of a new source, on any thread; return a function like a Take.

        Raises StartupError, which names the value that cannot be loaded.
        """
        takes = []
        for value in self._values:
            try:
                takes.append(value.prepare(changed.get(value)))
            except StartupError as error:
                value.pass_over()
                value.tell_failed(str(error), self.events)
                raise StartupError(f"{value.named}: {error}") from error

        def take() -> Callable[[], None]:
            tells = [each(self.events) for each in takes]

            def tell() -> None:
                for each in tells:
                    each()

            return tell

        return take

    def pass_over(self, file: Path) -> None:
        """Do not load this file as it is now: it was refused."""
        for value in self._values:
            if value.reads(file):
                value.pass_over()


def _print_of(files: Sequence[Path]) -> _Print:
    """Return the attributes of the files by which changes of their content are noticed."""
    return tuple(map(_of_one, files))


def _of_one(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
