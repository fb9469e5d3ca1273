"""Append each security event to a file: logins, refusals, denials, changes of rules. The file has no rate limit.

A line is one event in JSON, in ASCII: `time` (UTC), `event` and `pid`, and the fields of EVENTS. A list has at most
MOST_ENTRIES, and `NAME_total` is the length of the whole list. No event has a password, a token or a credential.

States
  writing   a thread appends waiting events, in one write of whole lines, as soon as there are any
  failing   the file cannot be written; events wait for the next attempt, after RETRY_S
  closed    no more events are accepted

Transitions
  writing -> failing   the file cannot be opened, locked or written whole
  failing -> writing   a write succeeds
  writing, failing -> closed   the process ends; one more write is tried, for at most CLOSE_S

Invariants
1. `tell` never waits for the file, and may be called on any thread.
2. At most MOST_BYTES wait. Events beyond that, and those that the last write fails to append, are counted as lost. The
   next successful write says how many were lost, and since when (`lost`).
3. A write is whole or undone. Processes that share a file lock it meanwhile, so that the part of a batch that a full
   disk took can be cut off again.
4. Each write goes to the file that has the name. A renamed or removed file is closed, and a new one made.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import json
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import structlog

from kproxy.errors import StartupError
from kproxy.installed import version

if sys.platform != "win32":
    import fcntl

log = structlog.get_logger(__name__)

EVENTS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "started": ("version", "worker"),
        "stopped": (),
        "connection_refused": ("client", "listener", "outcome", "reason"),
        "login": ("client", "listener", "principal", "mechanism", "renewal", "session_s"),
        "login_failed": ("client", "listener", "user", "mechanism", "renewal", "reason"),
        "session_ended": ("client", "listener", "principal", "reason"),
        "denied": ("client", "principal", "operation", "resource", "names", "error", "dry_run"),
        "changed": ("what", "added", "removed", "changed"),
        "reloaded": ("what",),
        "not_reloaded": ("what", "reason"),
        "admin_refused": ("client", "path", "status", "reason"),
        "lost": ("count", "since"),
    }
)
"""The fields of each event."""
# The most characters of a text, which a client may have chosen.
MOST_CHARACTERS: Final = 300
MOST_ENTRIES: Final = 100
MOST_BYTES: Final = 8 << 20
MOST_SHOWN: Final = 500
RETRY_S: Final = 1.0
CLOSE_S: Final = 2.0
# Only the owner may read the file, because it names users.
_MODE: Final = 0o600


class SecurityEvents:
    """The events of this process; `file` None: there is no stream. Raises StartupError for an unusable file.

    `worker`: the number of this process, if several share the port. `wall` is in seconds since the epoch.
    """

    def __init__(
        self,
        file: Path | None,
        counters: Counter[str],
        *,
        worker: int | None = None,
        most_bytes: int = MOST_BYTES,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._counters = counters
        self._worker = worker
        self._most_bytes = most_bytes
        self._wall = wall
        self._changed = threading.Condition()
        self._queue: list[bytes] = []
        # Includes the events that the thread has taken and not written.
        self._waiting_bytes = 0
        self._lost = 0
        self._lost_since = ""
        self._is_closing = self._is_failing = False
        self._descriptor = -1
        self._thread: threading.Thread | None = None
        # The latest events for the admin page; None: nobody shows them.
        self._shown: deque[tuple[str, str]] | None = None
        if file is not None:
            try:
                self._descriptor = _opened(file)
            except OSError as error:
                raise _unusable(file, error.strerror or str(error)) from error

    def tell(self, event: str, **fields: object) -> None:
        """Queue an event of EVENTS, which the thread appends."""
        if self._shown is not None:
            self._shown.append((event, _in_words(fields)))
        if self._file is None:
            return
        line = self._line(event, fields)
        with self._changed:
            if self._is_closing or self._waiting_bytes + len(line) > self._most_bytes:
                self._lose(1)
                return
            self._queue.append(line)
            self._waiting_bytes += len(line)
            self._changed.notify()

    def show(self) -> None:
        """Keep the latest events from now on, at most MOST_SHOWN of them, for `take_shown`."""
        self._shown = deque(maxlen=MOST_SHOWN)

    def take_shown(self) -> Iterator[tuple[str, str]]:
        """Yield the names and the words of the events since the last call."""
        while self._shown:
            yield self._shown.popleft()

    def tell_changes(self, what: str, before: Mapping[str, object], after: Mapping[str, object]) -> None:
        """Record which names were added, removed and changed, if any, without their values."""
        added, removed = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
        changed = sorted(name for name in after.keys() & before.keys() if after[name] != before[name])
        if added or removed or changed:
            self.tell("changed", what=what, added=added, removed=removed, changed=changed)

    async def __aenter__(self) -> Self:
        if self._file is not None:
            # The context has the fields that are bound to every line of this process's log.
            run = contextvars.copy_context().run
            # A file that hangs must not keep the process running.
            self._thread = threading.Thread(target=run, args=(self._write_all,), name="security events", daemon=True)
            self._thread.start()
        self.tell("started", version=version(), worker=self._worker)
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, CLOSE_S)
            if self._thread.is_alive():
                log.error("security events not written", consequence="they are lost", reason="the file hangs")

    def _line(self, event: str, fields: Mapping[str, object]) -> bytes:
        told: dict[str, object] = {"time": self._now(), "event": event, "pid": os.getpid()}
        for name, value in fields.items():
            if isinstance(value, list):
                told[name] = [str(each)[:MOST_CHARACTERS] for each in value[:MOST_ENTRIES]]
                told[f"{name}_total"] = len(value)
            else:
                told[name] = value[:MOST_CHARACTERS] if isinstance(value, str) else value
        return json.dumps(told).encode() + b"\n"

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _lose(self, count: int) -> None:
        """Count events as lost; the caller has the lock."""
        self._lost_since = self._lost_since if self._lost else self._now()
        self._lost += count
        self._counters["security.events_lost"] += count

    # On the thread

    def _write_all(self) -> None:
        waiting: list[bytes] = []
        is_last = False
        while not is_last:
            with self._changed:
                while not (waiting or self._queue or self._lost or self._is_closing):
                    self._changed.wait()
                waiting += self._queue
                self._queue.clear()
                is_last, lost = self._is_closing, self._lost
            if is_last:
                # The thread adds this line itself, so that it is written even if no more events may wait.
                waiting.append(self._line("stopped", {}))
            told = [self._line("lost", {"count": lost, "since": self._lost_since})] if lost else []
            try:
                if waiting or told:
                    self._append(b"".join(waiting + told))
            except OSError as error:
                self._failed(error.strerror or str(error), waiting, is_last=is_last)
                continue
            if self._is_failing:
                with contextlib.suppress(OSError):
                    log.info("security events written again", lost=lost)
            self._is_failing = False
            with self._changed:
                self._waiting_bytes -= sum(map(len, waiting))
                self._lost -= lost
            waiting.clear()

    def _failed(self, reason: str, waiting: list[bytes], *, is_last: bool) -> None:
        """Note the failure, and pause before the next attempt, if there is one."""
        if is_last or not self._is_failing:
            consequence = f"{len(waiting)} are lost" if is_last else "they wait; those that do not fit are lost"
            # The log's file may be on the same disk.
            with contextlib.suppress(OSError):
                log.error("security events not written", consequence=consequence, file=str(self._file), reason=reason)
        self._is_failing = True
        with self._changed:
            if is_last:
                self._lose(len(waiting))
            else:
                self._changed.wait_for(lambda: self._is_closing, RETRY_S)

    def _append(self, lines: bytes) -> None:
        """Append all lines or none. Raises OSError."""
        self._follow_name()
        descriptor = self._descriptor
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            size = os.fstat(descriptor).st_size
            written = os.write(descriptor, lines)
            if written < len(lines):
                os.ftruncate(descriptor, size)
                raise OSError(f"it accepted {written} of {len(lines)} bytes")
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _follow_name(self) -> None:
        """Open the file that has the name, unless it is open. Raises OSError."""
        if self._file is None:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._file.stat(), os.fstat(self._descriptor)):
                return
        before, self._descriptor = self._descriptor, _opened(self._file)
        os.close(before)


def _in_words(fields: Mapping[str, object]) -> str:
    """Return the fields of an event as a short text, without the client's port, so that alike events are equal."""
    words = []
    for name, value in fields.items():
        if isinstance(value, list) and value:
            value = ", ".join(str(each)[:MOST_CHARACTERS] for each in value[:3]) + (", ..." if len(value) > 3 else "")
        if value not in ("", None, False, []) and name not in ("listener", "session_s"):
            text = str(value)[:MOST_CHARACTERS]
            words.append(f"{name} {text.rpartition(':')[0] or text}" if name == "client" else f"{name} {text}")
    return "; ".join(words)


NO_EVENTS: Final = SecurityEvents(None, Counter())


def check_events_file(file: Path) -> None:
    """Check that events can be appended, without making the file. Raises StartupError."""
    found = file if file.exists() else file.parent
    if file.is_dir() or not os.access(found, os.W_OK if found is file else os.W_OK | os.X_OK):
        number = errno.EISDIR if file.is_dir() else errno.EACCES if found.exists() else errno.ENOENT
        raise _unusable(file, os.strerror(number))


def _opened(file: Path) -> int:
    """Open the file. Raises OSError."""
    # Otherwise a FIFO without a reader would hang here.
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, _MODE)
    os.set_blocking(descriptor, True)
    return descriptor


def _unusable(file: Path, reason: str) -> StartupError:
    return StartupError(
        f"access.events: {file} cannot be written to ({reason}): make its directory, grant the right, or name another."
    )
