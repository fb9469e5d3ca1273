"""Apply a changed configuration while clients are served (SIGHUP).

States
  settled     one configuration is in force
  preparing   another is read, checked and loaded on a thread; clients are served by the one in force

Transitions
  settled   -> preparing   SIGHUP; in a worker: its supervisor has sent a configuration
  preparing -> settled     it is in force; or it was refused, and nothing has changed

Invariants
1. All or nothing: the functions of PARTS do all that may fail. They return functions that cannot fail, and these run in
   one turn of the event loop.
2. If a signal comes while a configuration is being read, the configuration is read once more.
3. Each key that differs is in force, or named with the advice to restart (kproxy.config.changes).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from kproxy.config import ProxyConfig
from kproxy.config.changes import differing, merge
from kproxy.config.proxy import KEYS
from kproxy.config.tls import Loaded
from kproxy.errors import StartupError
from kproxy.observe.logging import set_level
from kproxy.ownership.static_table import StaticTable
from kproxy.proxy.admission import Admission
from kproxy.proxy.audit import Audit
from kproxy.proxy.server import Listener
from kproxy.proxy.sources import Source
from kproxy.security.events import SecurityEvents, check_events_file
from kproxy.security.files import SecurityFiles
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.tls_acceptor import load_for_acceptor
from kproxy.trail.file_sinks import check_directory

log = structlog.get_logger(__name__)

Apply = Callable[[], Callable[[], None] | None]
"""Applies a prepared part; it may return what is left to do, on any thread."""
Read = Callable[[ProxyConfig], tuple[ProxyConfig, Sequence[str]]]
"""Takes the configuration of the start; returns the one to be in force, and the keys that need a restart.

It runs on a thread, and raises StartupError.
"""
Tell = Callable[[str, Sequence[str], Sequence[str]], None]
"""Takes the end of a reload: why nothing has changed, or an empty text; the changed keys; those that need a restart."""


@dataclass(frozen=True)
class Serving:
    """The parts of the process that have a configuration. `certificates` are those of listeners with TLS, by name."""

    listener: Listener
    source: Source
    security: SecurityFiles
    audit: Audit
    reloads: Reloads
    certificates: Mapping[str, Reloading[Loaded]]
    admissions: Callable[[ProxyConfig], Mapping[str, Admission]]

    def prepare(self, config: ProxyConfig) -> list[Apply]:
        """Do on any thread what may fail; return what applies the configuration. Raises StartupError."""
        return [part(self, config) for _, part in PARTS]


def _files(serving: Serving, config: ProxyConfig) -> Apply:
    tls = {serving.certificates[each.name]: each.tls for each in config.listeners if each.tls is not None}
    return serving.reloads.prepare(
        {value: (options.files, partial(load_for_acceptor, options)) for value, options in tls.items()}
    )


def _owners(serving: Serving, config: ProxyConfig) -> Apply:
    source, owners = serving.source, config.owners
    return partial(source.load, owners) if isinstance(source, StaticTable) and owners is not None else lambda: None


# Sections and keys, and the function that prepares them. Rules come after the files that have them.
PARTS: Final[Sequence[tuple[Sequence[str], Callable[[Serving, ProxyConfig], Apply]]]] = (
    (("tls", "listeners"), _files),
    (("acls", "quotas"), lambda serving, config: serving.security.prepare(config.access, config.quotas)),
    (("limits",), lambda serving, config: partial(serving.listener.change, config.limits, serving.admissions(config))),
    (("audit",), lambda serving, config: serving.audit.prepare(config)),
    (("brokers", "topics", "ownership.table"), _owners),
    (("log",), lambda serving, config: partial(set_level, config.log_level)),
)


def try_files(config: ProxyConfig) -> str | None:
    """Check the files of users, tokens, events and the trail as a start does, on any thread without an event loop.

    Return the advice if users are required and there are none. Raises StartupError.
    """
    if config.audit.directory is not None:
        check_directory(config.audit.directory)
    if config.events is not None:
        check_events_file(config.events)

    async def read() -> SecurityFiles:
        # Keys from a URL need an event loop, even though no key is fetched here.
        return SecurityFiles(config.sasl, None, None, Reloads(), counters=Counter())

    return asyncio.run(read()).lacks_users


def read_again(started: ProxyConfig) -> tuple[ProxyConfig, Sequence[str]]:
    """Read the file as a start would, and take what may change without one. Raises StartupError."""
    if started.given is None or started.given.file is None:
        log.info("configuration file not given", advice="name one with --config")
    if started.given is None:
        return started, ()
    given, restart = merge(started, started.given.again())
    return given.checked(), restart


class ReloadStatus:
    """Tells people of reloads: in the log, on the admin page, by security events and metrics."""

    def __init__(self, counters: Counter[str], events: SecurityEvents, wall: Callable[[], float] = time.time) -> None:
        self._counters = counters
        self._events = events
        self._wall = wall
        self._failure = ""
        counters["config.since"], counters["config.successful"] = int(wall()), 1

    def tell(self, reason: str, changed: Sequence[str], restart: Sequence[str]) -> None:
        self._failure = reason and f"{_utc(self._wall())}: {reason}"
        self._counters["config.successful"] = 0 if reason else 1
        self._counters[f"config.reloads.{'failed' if reason else 'done'}"] += 1
        if reason:
            advice = "repair it (`kproxy check-config` tries it), and send SIGHUP again"
            log.error("configuration not reloaded", consequence="nothing has changed", advice=advice, reason=reason)
            self._events.tell("not_reloaded", what="configuration", reason=reason)
            return
        self._counters["config.since"] = int(self._wall())
        log.info("configuration reloaded", changed=list(changed))
        for key in restart:
            log.warning("configuration key needs a restart", most_a_minute=len(KEYS), key=key)
        self._events.tell("reloaded", what="configuration")

    def facts(self) -> dict[str, str]:
        """Return what the admin page shows."""
        since = {"configuration in force since": _utc(self._counters["config.since"])}
        return since | ({"last reload failed": self._failure} if self._failure else {})


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


class ConfigReload:
    """Applies configurations, one after another."""

    def __init__(
        self,
        config: ProxyConfig,
        reloads: Reloads,
        *,
        read: Read,
        prepare: Callable[[ProxyConfig], Sequence[Apply]],
        tell: Tell,
    ) -> None:
        self._started = self._config = config
        self._reloads = reloads
        self._read = read
        self._prepare_parts = prepare
        self._tell = tell

    async def run(self, wanted: asyncio.Event, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """Reload whenever `wanted` is set, until cancelled; `then` is awaited after each configuration in force."""
        while True:
            await wanted.wait()
            # Before the file is read (invariant 2).
            wanted.clear()
            try:
                await self._reload()
            except StartupError as error:
                self._tell(str(error), (), ())
            except Exception:  # the boundary: whatever the file holds, the process continues to serve
                log.exception("configuration not reloaded")
                self._tell("an internal error: see the log", (), ())
            else:
                if then is not None:
                    await then()

    async def _reload(self) -> None:
        async with self._reloads.turn:
            config, restart, parts = await asyncio.to_thread(self._prepare)
            left = [apply() for apply in parts]
            before, self._config = self._config, config
            for finish in left:
                if finish is not None:
                    await asyncio.to_thread(finish)
        settings = [each.given.settings if each.given is not None else {} for each in (before, config)]
        self._tell("", differing(*settings), restart)

    def _prepare(self) -> tuple[ProxyConfig, Sequence[str], Sequence[Apply]]:
        """Do what may fail, on a thread. Raises StartupError."""
        try:
            config, restart = self._read(self._started)
            return config, restart, self._prepare_parts(config)
        except StartupError:
            if self._started.given is not None and self._started.given.file is not None:
                # Otherwise its rules are soon read by themselves, and reported once more.
                self._reloads.pass_over(self._started.given.file)
            raise
