"""Run one proxy process from start to stop.

It has listeners, an ownership source and an admin page. A proxy may start before its source is up: it reports the
reason why it waits, also on `/readyz`, and serves once its table, and users and rules in etcd, are loaded. On SIGHUP it
reads its configuration, the files that this names and the source again (kproxy.proxy.reload). On SIGTERM and SIGINT it
leaves the fleet, continues to serve for `drain_delay` or until a second signal, and drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import structlog

from kproxy.claims.admin import ClaimsAdmin
from kproxy.claims.service import OwnService
from kproxy.config import Address, AuditOptions, ProxyConfig
from kproxy.config.listeners import ListenerConfig, advertised_listeners, ready_listeners
from kproxy.config.principal_rules import DEFAULT_MAPPING
from kproxy.config.tls import BrokerTls, Loaded, load_broker_tls
from kproxy.errors import StartupError
from kproxy.fleet.membership import Membership
from kproxy.observe.metrics import Vitals
from kproxy.observe.page import Unanswered
from kproxy.observe.table import NotOffered, TableView
from kproxy.observe.tally import Tally
from kproxy.plain import compiled
from kproxy.proxy import descriptors
from kproxy.proxy.access import AccessControl
from kproxy.proxy.admission import Admission, OpenConnections
from kproxy.proxy.apis import NO_RANGES
from kproxy.proxy.audit import Audit
from kproxy.proxy.claims import attach, open_own
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.overview import ProxyObserver
from kproxy.proxy.process_host import AdminSite, OwnPages, ProcessHost
from kproxy.proxy.reload import ConfigReload, Serving
from kproxy.proxy.server import Listener
from kproxy.proxy.sources import OpenSource, Source, open_source
from kproxy.routing.topology import Topology
from kproxy.runtime.notify import Reminders
from kproxy.runtime.process import open_file_limit
from kproxy.runtime.signals import Signals, until_stopped
from kproxy.runtime.tasks import cancel, unless_failed
from kproxy.security.broker_auth import BrokerAuth
from kproxy.security.events import SecurityEvents
from kproxy.security.files import SecurityFiles
from kproxy.security.in_etcd import AccessInEtcd
from kproxy.security.mechanisms import servers
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.sasl import SASL_APIS, SASL_WITHOUT_V0, Times
from kproxy.security.tls_acceptor import load_for_acceptor
from kproxy.trail.trail import Trail

# For gc.set_threshold: net allocations before the youngest objects are collected, and rounds before older ones are.
COLLECTOR_THRESHOLDS = (20_000, 50, 100)
# The freed memory that the process keeps for large answers, in bytes; glibc takes no more for its first limit.
KEPT_BYTES = 32 << 20
# How long another thread may hold Python's lock, in seconds (Python's default: 5 ms). Threads read long requests.
SWITCH_S = 0.001

log = structlog.get_logger(__name__)


async def run_proxy(config: ProxyConfig, host: ProcessHost | None = None) -> None:
    """Serve until SIGTERM or SIGINT; alone if no `host` is given. Raises StartupError."""
    host = host or ProcessHost(config)
    await until_stopped(lambda signals: _Proxy(config, signals, host).serve())


class _Proxy:
    """The resources of a process while it serves."""

    def __init__(self, config: ProxyConfig, signals: Signals, host: ProcessHost) -> None:
        self._config = config
        self._signals = signals
        self._host = host
        self._topology = Topology(offers_unowned=config.ownership == "etcd")
        self._listener = Listener(config.limits)
        self._opened: OpenSource | None = None
        self._membership: Membership | None = None
        self._own: OwnService | None = None
        self._audit: Audit | None = None
        self._tally = Tally(config.metrics)
        self._counters = Counter[str]()
        self._events = SecurityEvents(config.events, self._counters, worker=host.worker)
        self._reminders = Reminders(time.monotonic)
        self._random = Random()  # noqa: S311 -- spreads retries, guards nothing
        self._reloads = Reloads(self._events)
        self._certificates: dict[str, Reloading[Loaded]] = {}
        self._connections = OpenConnections()
        self._site: AdminSite | None = None
        self._access = self._open_access()
        self._status = host.status(self._counters, self._events)

    @property
    def _tells(self) -> bool:
        """Whether this process, and not another worker, logs what all of them see."""
        return self._host.worker in (None, 1)

    async def serve(self) -> None:
        """Serve until cancelled; then drain."""
        config = self._config
        async with contextlib.AsyncExitStack() as stack:
            ports = await self._bind()
            port = ports[0]
            await stack.enter_async_context(self._events)
            # Before any wait, to report an unusable file or sink at once.
            in_etcd = self._access_in_etcd()
            security = self._open_security(in_etcd)
            fetching = asyncio.create_task(security.key_server.run()) if security.key_server is not None else None
            if fetching is not None:
                stack.push_async_callback(cancel, fetching)
            # Before the first client: a restarted process begins with its predecessor's shares.
            sharing = self._host.share(security.accounts, self._connections)
            if sharing is not None:
                stack.push_async_callback(cancel, sharing)
            audit = self._audit = self._open_audit(port)
            # Another process may have the page.
            if config.admin is not None:
                self._site = AdminSite(config, config.admin, self._reloads, self._counters, self._events)
            pages = self._pages(port)
            stack.push_async_callback(self._host.close)
            await self._host.open(pages, self._site)
            opened = self._opened = await stack.enter_async_context(
                open_source(config, self._topology, self._wait, self._access)
            )
            following = [opened.following]
            if in_etcd is not None:
                following.append(await stack.enter_async_context(in_etcd.open(self._wait)))
            membership = self._membership = await stack.enter_async_context(self._open_membership(ports))
            own = self._own = await stack.enter_async_context(open_own(config, *self._advertised(port), self._counters))
            context = self._context(opened, membership, own, audit.trail, security)
            await stack.enter_async_context(attach(own, context))
            stack.push_async_callback(self._listener.stop)
            # Between the end of the last client and of the listener: the rest of the trail may go through this proxy.
            await stack.enter_async_context(audit.keep())
            stack.push_async_callback(self._listener.drain)
            await self._listener.serve(
                context, fleets=membership.by_listener, admissions=self._admissions(config, security)
            )
            if self._tells:
                log.info("plain path chosen", kind="Python" if compiled is None else "compiled")
                _warn_about_fd_limit(config)
            audit.ship()
            stack.push_async_exit(self._linger)
            stack.push_async_callback(membership.leave)
            stack.callback(self._listener.leave)
            await membership.join()
            _tune_memory()
            sys.setswitchinterval(SWITCH_S)
            # Even if etcd is used only to find the other proxies.
            etcd = f" etcd={','.join(config.etcd)}" if config.etcd else ""
            self._host.ready(
                f"{Address(config.listen.host, port)}{ready_listeners(config.listeners, ports)}", opened.ready or etcd
            )
            stack.callback(self._host.stops)
            failing = asyncio.create_task(membership.failed())
            stack.push_async_callback(cancel, failing)
            looking = asyncio.create_task(self._reloads.run())
            stack.push_async_callback(cancel, looking)
            running = [*following, failing, looking, self._listener.watching]
            running += [task for task in (fetching, sharing) if task is not None]
            if own is not None and own.running is not None:
                running.append(own.running)
            wanted, read = self._host.configurations(self._signals.hangup)
            serving = Serving(
                listener=self._listener,
                source=opened.source,
                security=security,
                audit=audit,
                reloads=self._reloads,
                certificates=self._certificates,
                admissions=lambda changed: self._admissions(changed, security),
            )
            reload = ConfigReload(config, self._reloads, read=read, prepare=serving.prepare, tell=self._status.tell)
            await unless_failed(reload.run(wanted, lambda: _reload_source(opened.source)), running)

    async def _linger(self, kind: type[BaseException] | None, *_: object) -> None:
        """Continue to serve for a while after a stop signal, but not after a failure."""
        if kind is asyncio.CancelledError:
            await self._listener.linger(self._signals.insists)

    def _advertised(self, port: int) -> tuple[str, int]:
        """The advertised address; `port` is the one listened on."""
        return self._config.listeners[0].advertised(port)

    async def _bind(self) -> list[int]:
        """Listen without accepting; return the ports, in the order of the listeners. Raises StartupError."""
        ports = []
        for listener in self._config.listeners:
            tls = None
            if listener.tls is not None:
                named = f"TLS of listener {listener.name}" if listener.name else "TLS of the listener"
                load = partial(load_for_acceptor, listener.tls)
                tls = self._reloads.add(self._reloading(named, listener.tls.files, load))
                self._certificates[listener.name] = tls
            ports.append(
                await self._listener.bind_for(
                    listener,
                    tls,
                    counters=self._counters,
                    shared=self._host.worker is not None,
                    events=self._events,
                )
            )
        return ports

    def _reloading(self, named: str, files: Sequence[Path], load: Callable[[], Loaded]) -> Reloading[Loaded]:
        """Load TLS's files. Raises StartupError."""
        return Reloading(named, files, load, counters=self._counters, tells=self._tells)

    def _open_access(self) -> BrokerAuth:
        """Make the access to brokers. Raises StartupError."""
        options = self._config.broker_tls
        tls = self._reloading_towards(options, "TLS towards brokers")
        self._reloads.replace(None, tls)
        return BrokerAuth(options, tls, self._config.broker_sasl, random=self._random)

    def _audit_access(self, options: AuditOptions) -> BrokerAuth:
        """Make the access to the cluster that the audit trail is shipped to. Raises StartupError."""
        tls = self._reloading_towards(options.tls, "TLS towards the cluster of the audit trail")
        return BrokerAuth(options.tls, tls, options.sasl, random=self._random, needs_tls="set audit.tls")

    def _reloading_towards(self, options: BrokerTls | None, named: str) -> Reloading[Loaded] | None:
        return None if options is None else self._reloading(named, options.files, partial(load_broker_tls, options))

    async def _vitals(self) -> Vitals:
        vitals = await self._listener.vitals()
        of_audit = self._audit.expires_at if self._audit is not None else None
        towards = {"broker": self._access.expires_at, "audit": of_audit}
        ours = {(use, ""): ends_at for use, ends_at in towards.items() if ends_at is not None}
        page = self._site.certificates if self._site is not None else {}
        return replace(vitals, certificates={**vitals.certificates, **ours, **page})

    def _open_membership(self, ports: Sequence[int]) -> Membership:
        host, advertised_port = self._advertised(ports[0])
        # Workers share an address and have one entry, which their supervisor registers.
        registers = self._host.worker is None
        return Membership(
            self._config,
            host,
            advertised_port,
            counters=self._counters,
            registers=registers,
            listeners=advertised_listeners(self._config.listeners, ports),
        )

    def _open_audit(self, port: int) -> Audit:
        """Make the audit trail. Raises StartupError."""
        worker = self._host.worker
        name = str(Address(*self._advertised(port))) + ("" if worker is None else f"/{worker}")
        dial = self._listener.connect_inside
        return Audit(self._config, name, self._counters, self._random, dial, self._audit_access, self._reloads)

    def _access_in_etcd(self) -> AccessInEtcd | None:
        config = self._config
        has_users = config.sasl is not None and config.sasl.users_in_etcd
        has_acls = config.access is not None and config.access.acls_in_etcd
        if not has_users and not has_acls:
            return None
        return AccessInEtcd(
            config.etcd,
            config.etcd_options,
            config.prefix,
            has_users=has_users,
            has_acls=has_acls,
            counters=self._counters,
            tells=self._tells,
            events=self._events,
        )

    def _open_security(self, in_etcd: AccessInEtcd | None) -> SecurityFiles:
        """Load the security files. Raises StartupError."""
        config = self._config
        return SecurityFiles(
            config.sasl,
            config.access,
            config.quotas,
            self._reloads,
            counters=self._counters,
            tells=self._tells,
            in_etcd=in_etcd,
            events=self._events,
        )

    def _admissions(self, config: ProxyConfig, security: SecurityFiles) -> dict[str, Admission]:
        """The requirements for clients, by listener; a listener that is not named has none."""
        for_all = config.access is not None or config.quotas is not None or config.limits.max_connections_per_address
        admissions = {}
        for listener in config.listeners:
            mechanisms = config.sasl.offered(listener) if config.sasl is not None else ()
            shows_certificates = listener.tls is not None and listener.tls.client_ca is not None
            if mechanisms or shows_certificates or for_all:
                admissions[listener.name] = self._admission(config, listener, mechanisms, security)
        return admissions

    def _admission(
        self, config: ProxyConfig, listener: ListenerConfig, mechanisms: tuple[str, ...], security: SecurityFiles
    ) -> Admission:
        sasl = config.sasl
        carries = sasl is not None and bool(mechanisms) and sasl.carries(listener)
        offered = servers(
            mechanisms,
            lambda: security.users,
            lambda: security.tokens,
            unverified_claim=sasl.principal_claim if sasl is not None and carries else None,
        )
        return Admission(
            offered if mechanisms else None,
            Times(time.monotonic, time.time, lifetime_s=sasl.session_lifetime_s if sasl is not None else 0.0),
            timeout_s=sasl.timeout_s if sasl is not None else 0.0,
            mapping=listener.tls.principals if listener.tls is not None else DEFAULT_MAPPING,
            counters=self._counters,
            users=lambda: security.users,
            quotas=(lambda: security.quotas) if config.quotas is not None else None,
            most_of_an_address=config.limits.max_connections_per_address,
            connections=self._connections,
            carries=carries,
            allows_v0=sasl is not None and sasl.handshake_v0,
            listener=listener.name,
            events=self._events,
        )

    def _access_control(self, security: SecurityFiles) -> AccessControl | None:
        access = self._config.access
        if access is None:
            return None
        if not security.has_acls and self._tells:
            advice = "write [[acls]] into the configuration file"
            if access.acls_in_etcd:
                advice = "add rules with `kproxy acl add --etcd`"
            log.warning("ACLs are empty", consequence="nothing is allowed", advice=advice)
        return AccessControl(lambda: security.rules, self._counters, dry_run=access.dry_run, events=self._events)

    def _context(
        self,
        opened: OpenSource,
        membership: Membership,
        own: OwnService | None,
        trail: Trail,
        security: SecurityFiles,
    ) -> ProxyContext:
        security.tell_of_no_users()
        sasl = self._config.sasl
        of_sasl = SASL_APIS if sasl is not None and sasl.handshake_v0 else SASL_WITHOUT_V0
        context = ProxyContext(
            topology=self._topology,
            source=opened.source,
            semantics=opened.semantics,
            version_caps=opened.version_caps,
            fleet=membership.fleet,
            producer_ids=opened.producer_ids,
            leased_coordinators=opened.leased_coordinators,
            own=own,
            sasl_apis=of_sasl if sasl is not None else NO_RANGES,
            access=self._access_control(security),
            quotas=lambda: security.quotas,
            trail=trail,
            limits=self._config.limits,
            clock=time.monotonic,
            random=self._random,
            counters=self._counters,
            tally=self._tally,
            broker_auth=self._access,
            confirm_acks0=self._config.confirm_acks0,
        )
        context.brokers.on_lost = opened.broker_lost
        return context

    def _pages(self, port: int) -> OwnPages:
        observer = ProxyObserver(
            listener=self._listener,
            table=self._view,
            readiness=lambda: self._listener.readiness(self._view()),
            vitals=self._vitals,
            shipping=lambda: self._audit.shipping if self._audit is not None else None,
            claims=lambda: self._own.table.count if self._own is not None else None,
            tally=self._tally,
            counters=self._counters,
            events=self._events,
            name=f"kproxy at {Address(*self._advertised(port))}",
            facts=self._status.facts,
        )
        return OwnPages(observer, self._claims, self._host.replicas)

    def _wait(self, sentence: str) -> None:
        """Report the reason why startup waits."""
        self._listener.waits_for = sentence
        if self._reminders.is_due(sentence):
            self._host.waits(sentence)

    def _claims(self) -> ClaimsAdmin:
        if not self._config.etcd:
            raise NotOffered("the Own API needs etcd for its claims: give the proxy --etcd URL")
        if self._own is None:
            raise Unanswered("starting: claims are not read yet")
        return self._own.admin

    def _view(self) -> TableView:
        if self._opened is None:
            return TableView(self._topology, inf, True, self._config.ownership)
        source, membership = self._opened.source, self._membership
        return TableView(
            self._topology,
            source.age_s,
            source.stale,
            self._config.ownership,
            membership.rows if membership is not None else (),
            membership.registration if membership is not None else "",
        )


async def _reload_source(source: Source) -> None:
    try:
        log.info("ownership reloaded", outcome=await source.reload())
    except StartupError as error:
        log.error("ownership not reloaded", consequence="the known owners stay in force", reason=str(error))


def _warn_about_fd_limit(config: ProxyConfig) -> None:
    max_connections = config.limits.max_connections
    limit, wanted = open_file_limit(), descriptors.wanted(max_connections)
    if limit is not None and limit < wanted:
        enough_for_clients = descriptors.most_clients(limit)
        if config.given is None or config.given.is_default("limits.max_connections"):
            log.info("clients limited by open files", enough_for_clients=enough_for_clients, limit=limit)
            return
        log.warning(
            "open file limit is too low",
            enough_for_clients=enough_for_clients,
            advice="raise it (ulimit -Hn, LimitNOFILE= of systemd), or lower limits.max_connections",
            limit=limit,
            max_connections=max_connections,
            wanted=wanted,
        )


def _tune_memory() -> None:
    """Run Python's cycle collector less often.

    Objects loaded at the start are exempt. Requests are freed by reference count. With its defaults the collector takes
    about a tenth of their CPU time. An answer of megabytes in new memory costs a page fault for each 4 KiB.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)
    if compiled is not None:
        compiled.keep_freed(KEPT_BYTES)
