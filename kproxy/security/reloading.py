"""Load values from files, and again when the files change: certificates, authorities, revocation lists, secrets.

States of a value
  settled    the files are as they were at the last attempt
  changing   the files have changed; one more check must find them unchanged, as a certificate and its key are two files

Transitions
  settled  -> changing   a check finds the files changed
  changing -> changing   the next check finds them changed again
  changing -> settled    the next check finds them unchanged, and they are loaded
  any      -> settled    `reload` (SIGHUP) loads them at once

Invariants
1. `current` is always a value that was loaded whole. An invalid file leaves the value as it is; each attempt is
   counted, and logged in one line.
2. Files are read on another thread, in one attempt at a time.
3. Objects made from an earlier value are not changed, so open connections stay.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import structlog

from kproxy.config.proxy import Given
from kproxy.errors import StartupError
from kproxy.security.events import NO_EVENTS, SecurityEvents

log = structlog.get_logger(__name__)

# The time between two checks of the files, in seconds.
LOOK_S: Final = 2.0

T = TypeVar("T")
_Print = tuple[tuple[int, int, int] | None, ...]


class Reloading(Generic[T]):
    """A value that `load` makes of `files`; `named` is its name in the log.

    `load` raises StartupError. `tells`: this process, and not another worker, logs. `entries` returns the parts of a
    value by name, so that security events can name the added, removed and changed parts.
    """

    def __init__(
        self,
        named: str,
        files: Sequence[Path],
        load: Callable[[], T],
        *,
        counters: Counter[str],
        tells: bool = True,
        on_change: Callable[[T], None] = lambda value: None,
        entries: Callable[[T], Mapping[str, object]] = lambda value: {},
    ) -> None:
        self.named = named
        self._files = tuple(files)
        self._load = load
        self._counters = counters
        self._tells = tells
        self._on_change = on_change
        self._entries = entries
        self._attempted = self._seen = _print_of(self._files)
        self.current = load()

    async def look(self, events: SecurityEvents = NO_EVENTS) -> None:
        """Load the files if they have changed, and are the same as at the last check."""
        seen = await asyncio.to_thread(_print_of, self._files)
        before, self._seen = self._seen, seen
        if seen != self._attempted and seen == before:
            await self.reload(events)

    async def reload(self, events: SecurityEvents = NO_EVENTS) -> bool:
        """Load the files now, and record it in `events`; return whether they could be loaded."""
        self._attempted = self._seen = await asyncio.to_thread(_print_of, self._files)
        try:
            value = await asyncio.to_thread(self._load)
        except StartupError as error:
            self._failed(str(error), events)
            return False
        except Exception:  # the boundary: whatever the files hold, the process continues to serve
            log.exception("files not loaded", what=self.named)
            self._failed("an internal error", events)
            return False
        before, self.current = self.current, value
        self._counters["tls.reloads.done"] += 1
        if self._tells:
            log.info("reloaded", what=self.named)
        self._on_change(value)
        if self._tells:
            events.tell("reloaded", what=self.named)
            # This runs on a thread, as there may be many users.
            entries = self._entries
            await asyncio.to_thread(lambda: events.tell_changes(self.named, entries(before), entries(value)))
        return True

    def _failed(self, reason: str, events: SecurityEvents) -> None:
        self._counters["tls.reloads.failed"] += 1
        if self._tells:
            log.error("reload failed", consequence="the last valid files stay in force", what=self.named, reason=reason)
            events.tell("not_reloaded", what=self.named, reason=reason)


class Reloads:
    """All values of one process that are loaded from files.

    `given` has the options as given, for `report_options`; None if another process reports them.
    """

    def __init__(self, given: Given | None = None, events: SecurityEvents = NO_EVENTS) -> None:
        self._given = given
        self._events = events
        self._values: list[Reloading[Any]] = []
        self._turn = asyncio.Lock()

    def add(self, value: Reloading[T]) -> Reloading[T]:
        self._values.append(value)
        return value

    async def run(self) -> None:
        """Check the files at intervals, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            async with self._turn:
                for value in self._values:
                    await value.look(self._events)

    async def reload(self) -> None:
        """Load all files now."""
        async with self._turn:
            for value in self._values:
                await value.reload(self._events)

    async def report_options(self, reported: str = "") -> None:
        """Log the changed options that only a new start applies, or why it would fail, unless that is `reported`."""
        try:
            changed = await asyncio.to_thread(self._given.changed) if self._given is not None else []
        except StartupError as error:
            if str(error) != reported:
                log.error("configuration not usable", consequence="a new start would fail", reason=str(error))
            return
        if changed:
            log.warning("options changed", consequence="a new start applies them", options=", ".join(changed))


def _print_of(files: Sequence[Path]) -> _Print:
    """Return the attributes of the files by which changes of their content are noticed."""
    return tuple(map(_of_one, files))


def _of_one(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
