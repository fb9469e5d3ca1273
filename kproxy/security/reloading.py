"""Values loaded from files, and again when the files change: certificates, authorities, revocation lists, secrets.

States of a value
  settled    the files are as they were at the last attempt
  changing   they have changed; one more look must find them unchanged, as a certificate and its key are two files

Transitions
  settled  -> changing   a look finds them changed
  changing -> changing   the next look finds them changed again
  changing -> settled    the next look finds them unchanged: they are loaded
  any      -> settled    `reload` (SIGHUP): they are loaded at once

Invariants
1. `current` is always a value that was loaded whole. An invalid file leaves it as it is, with one line in the log for
   each attempt, and is counted.
2. Files are read off the event loop, and one attempt at a time.
3. Objects made from an earlier value are not changed: open connections stay.
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

# Between two looks at the files, in seconds.
LOOK_S: Final = 2.0

T = TypeVar("T")
_Print = tuple[tuple[int, int, int] | None, ...]


class Reloading(Generic[T]):
    """The value that `load` makes of `files`; `named` is its name in the log.

    `load` raises StartupError. `tells`: whether this process logs, and not another worker. `entries` are the parts of a
    value by name: security events have which were added, removed and changed.
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
        """Load the files if they have changed and the last look found them so already."""
        seen = await asyncio.to_thread(_print_of, self._files)
        before, self._seen = self._seen, seen
        if seen != self._attempted and seen == before:
            await self.reload(events)

    async def reload(self, events: SecurityEvents = NO_EVENTS) -> bool:
        """Load the files now, and tell `events`; return whether they could be loaded."""
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
            # Users may be many.
            entries = self._entries
            await asyncio.to_thread(lambda: events.tell_changes(self.named, entries(before), entries(value)))
        return True

    def _failed(self, reason: str, events: SecurityEvents) -> None:
        self._counters["tls.reloads.failed"] += 1
        if self._tells:
            log.error("reload failed", consequence="what was loaded before stays", what=self.named, reason=reason)
            events.tell("not_reloaded", what=self.named, reason=reason)


class Reloads:
    """All values of one process that are made of files.

    `given`: the options as given, for `report_options`; None: another process reports.
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
        """Look at the files at intervals, until cancelled."""
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
        """Log which options have changed that only a new start applies, or why it would fail, if not for `reported`."""
        try:
            changed = await asyncio.to_thread(self._given.changed) if self._given is not None else []
        except StartupError as error:
            if str(error) != reported:
                log.error("configuration not usable", consequence="a new start would fail", reason=str(error))
            return
        if changed:
            log.warning("options changed", consequence="a new start applies them", options=", ".join(changed))


def _print_of(files: Sequence[Path]) -> _Print:
    """Return the attributes of the files that show a change of their content."""
    return tuple(map(_of_one, files))


def _of_one(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
