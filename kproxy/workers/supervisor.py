"""Start the workers and replace those that end, in a process that serves no client and holds no table.

States
  starting   the port is held, so that no other process takes it; the workers start
  serving    all of them have served once, and `ready` has been printed; one that ends is replaced
  stopping   SIGTERM or SIGINT has been forwarded; they drain
  stopped    no process is left

Transitions
  starting -> serving   the last worker is ready
  starting -> stopped   one worker could not start: the others are stopped, and this command reports its error
  starting, serving -> stopping  SIGTERM, SIGINT
  stopping -> stopped   all have ended, by SIGKILL if one takes longer than `drain_delay`, `drain_s` and STOP_MARGIN_S
                        together, or at once on a second signal

Invariants
1. A socket that never listens, and so takes no connections, holds each port; port 0 is one port for all workers.
2. Workers do not outlive this process, however it ends (kproxy.runtime.process).
3. Limits of all client connections hold for all workers together (kproxy.config.share_limits). So do quotas, by shares
   that follow the use (kproxy.workers.shares).
4. This process alone reads the configuration again. An invalid one reaches no worker.
5. The workers' common address has one entry among the proxies in etcd. This process registers it when all workers serve
   and removes it before they drain; replacing a worker does not change it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from kproxy.config import Address, ProxyConfig, share_limits
from kproxy.config.listeners import ListenerConfig, advertised_listeners, ready_listeners
from kproxy.errors import StartupError
from kproxy.fleet.membership import Membership
from kproxy.observe.logging import set_level
from kproxy.observe.page import ReplicaPages
from kproxy.proxy.process_host import AdminSite
from kproxy.proxy.reload import Apply, ConfigReload, ReloadStatus, read_again, try_files
from kproxy.runtime.notify import Reminders, say_ready, say_stopping, say_waiting
from kproxy.runtime.signals import Signals, until_stopped
from kproxy.runtime.sockets import bind, bound_port
from kproxy.runtime.tasks import cancel, unless_failed
from kproxy.security.events import SecurityEvents
from kproxy.security.reloading import Reloads
from kproxy.workers.channel import Assignment
from kproxy.workers.pages import WorkerPages
from kproxy.workers.process import Slot, WorkerCommand
from kproxy.workers.shares import ROUND_S, Ledger

# The time of a worker beside its drain: last bytes for slow clients, the rest of its audit trail, and the end of its
# interpreter.
STOP_MARGIN_S = 15.0

log = structlog.get_logger(__name__)


async def run_workers(config: ProxyConfig, launch: WorkerCommand) -> None:
    """Run workers until SIGTERM or SIGINT. Raises StartupError."""
    if not hasattr(socket, "SO_REUSEPORT"):
        raise StartupError(f"--workers {config.workers}: this system cannot share a port between processes: run 1.")
    await until_stopped(lambda signals: _Supervisor(config, launch, signals).serve())


class _Supervisor:
    def __init__(self, config: ProxyConfig, launch: WorkerCommand, signals: Signals) -> None:
        self._config = config
        self._launch = launch
        self._signals = signals
        self._slots: list[Slot] = []
        self._ports: list[int] = []
        self._ledger = Ledger(config.workers)
        self._reminders = Reminders(time.monotonic)
        # The counters, events and files of the admin page; each worker has its own.
        self._counters = Counter[str]()
        self._events = SecurityEvents(config.events, self._counters)
        self._reloads = Reloads(self._events)
        self._status = ReloadStatus(self._counters, self._events)

    async def serve(self) -> None:
        """Serve until cancelled; then drain the workers."""
        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            ports = self._ports
            for listener in config.listeners:
                held = await _hold(listener)
                stack.callback(held.close)
                ports.append(bound_port(held))
            self._slots = self._make_slots()
            await stack.enter_async_context(self._events)
            membership = Membership(
                config,
                *config.listeners[0].advertised(ports[0]),
                counters=Counter(),
                listeners=advertised_listeners(config.listeners, ports),
            )
            site = None
            if config.admin is not None:
                site = AdminSite(config, config.admin, self._reloads, self._counters, self._events)
            replicas = ReplicaPages(config)
            stack.push_async_callback(replicas.close)
            pages = WorkerPages(
                self._slots,
                lambda: membership.registration,
                replicas=replicas,
                events=self._events,
                certificates=lambda: site.certificates if site is not None else {},
                counters=self._counters,
                facts=self._status.facts,
            )
            admin = ""
            if site is not None:
                page, admin = await site.start(pages.page(site.guard))
                stack.push_async_callback(page.stop)
            stack.push_async_callback(self._stop)
            keepers = [slot.keep() for slot in self._slots]
            keepers.append(asyncio.create_task(self._share_rates(), name="shares of rates"))
            stack.push_async_callback(cancel, keepers[-1])
            ready, *_ = await unless_failed(asyncio.gather(*(slot.first for slot in self._slots)), keepers)
            await stack.enter_async_context(membership)
            stack.push_async_callback(membership.leave)
            await membership.join()
            stack.callback(pages.drain)
            named = ready_listeners(config.listeners, ports)
            say_ready(f"kafka={Address(config.listen.host, ports[0])}{named}{admin}{ready.source}")
            stack.callback(say_stopping)
            following = asyncio.create_task(membership.failed())
            stack.push_async_callback(cancel, following)
            looking = asyncio.create_task(self._reloads.run())
            stack.push_async_callback(cancel, looking)
            reload = ConfigReload(config, self._reloads, read=read_again, prepare=self._prepare, tell=self._tell)
            await unless_failed(reload.run(self._signals.hangup), [*keepers, following, looking])

    def _divide(self, config: ProxyConfig) -> list[ProxyConfig]:
        """Return the configuration of each worker, on the ports that are held. Raises StartupError."""
        workers = self._config.workers
        listeners = tuple(
            dataclasses.replace(each, listen=Address(each.listen.host, port))
            for each, port in zip(config.listeners, self._ports, strict=True)
        )
        quotas = dataclasses.replace(config.quotas, share=1 / workers) if config.quotas is not None else None
        of_all = dataclasses.replace(config, listeners=listeners, admin=None, workers=1, quotas=quotas)
        return [dataclasses.replace(of_all, limits=limits) for limits in share_limits(config.limits, workers)]

    def _make_slots(self) -> list[Slot]:
        return [
            Slot(
                Assignment(number, config),
                self._launch,
                clock=time.monotonic,
                on_wait=self._wait,
                ledger=self._ledger,
            )
            for number, config in enumerate(self._divide(self._config), 1)
        ]

    def _prepare(self, config: ProxyConfig) -> list[Apply]:
        """Check the configuration for all workers; return the steps that apply it. Raises StartupError."""
        try_files(config)
        configs, take = self._divide(config), self._reloads.prepare({})

        def hand_over() -> None:
            self._config = config
            set_level(config.log_level)
            for slot, each in zip(self._slots, configs, strict=True):
                slot.reload(each)
                slot.follow()

        return [take, hand_over]

    def _tell(self, reason: str, changed: Sequence[str], restart: Sequence[str]) -> None:
        self._status.tell(reason, changed, restart)
        for slot in self._slots if reason else ():
            slot.follow(refused=True)

    async def _share_rates(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            for slot in self._slots:
                slot.follow()
            for worker, shares in self._ledger.round().items():
                self._slots[worker].tell(shares)

    def _wait(self, sentence: str) -> None:
        """Report a wait once, as all workers wait for the same."""
        if self._reminders.is_due(sentence):
            say_waiting(sentence)

    async def _stop(self) -> None:
        limits = self._config.limits
        ending = asyncio.gather(*(slot.stop() for slot in self._slots))
        insisting = asyncio.create_task(self._signals.insists.wait())
        try:
            await asyncio.wait(
                (ending, insisting),
                timeout=limits.drain_delay + limits.drain_s + STOP_MARGIN_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not ending.done():
                for slot in self._slots:
                    slot.kill()
            await ending
        finally:
            await cancel(insisting)


async def _hold(listener: ListenerConfig) -> asyncio.Server:
    """Hold the port for the workers. Raises StartupError if another process has it."""
    listen, only_ipv6 = listener.listen, listener.only_ipv6
    if listen.port:
        # SO_REUSEPORT shares silently: another proxy on the port would get half of the connections, with a table of its
        # own.
        (await bind(asyncio.Protocol, *listen, only_ipv6=only_ipv6)).close()
    held = await bind(asyncio.Protocol, *listen, shared=True, only_ipv6=only_ipv6)
    for each in held.sockets:
        # A process that wants the port for itself is refused from now on, not only once a worker listens.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held
