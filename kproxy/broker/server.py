"""Run the broker as a process: start, serve, keep the lease, stop.

States
  starting   data directory locked, port bound, etcd reached, lease claimed, cluster read, own partitions taken
  serving    the ready line is printed; the lease is held, or lost and being claimed again
  stopping   writes are refused with 6, running requests end, followers get the rest of the logs, logs are flushed, then
             the lease is revoked

Invariants
1. A failed start raises StartupError within bounded time, and releases all resources. If etcd does not answer, the
   broker waits for it and reports this.
2. The lease is revoked after acknowledged records are on the disk and the live in-sync followers have the whole log.
   Each wait has a limit, at most half the lease's TTL. After it the lease is revoked anyway, so that a disk that hangs
   cannot keep the process from ending; other brokers then lead as after a kill -9.
3. Every task is owned here or by the part that started it, and awaited before `run_broker` returns.
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from kproxy.address import Address
from kproxy.broker.apis import registry
from kproxy.broker.broker_lease import BrokerLease, IdInUse
from kproxy.broker.cluster import Change, ClusterView, Kind, Topic, get_or_put
from kproxy.broker.config import BrokerConfig, topic_settings
from kproxy.broker.connection import ClientConnection
from kproxy.broker.context import Answer, Broker, Request
from kproxy.broker.data_dir import DataDir
from kproxy.broker.disk_threads import DiskThreads
from kproxy.broker.fence_keeper import FenceKeeper
from kproxy.broker.groups.coordinator import GroupCoordinator
from kproxy.broker.groups.group import Options
from kproxy.broker.keys import BrokerValue, Keys, PartitionKey, ReplicaKey
from kproxy.broker.log_maintenance import LogMaintenance
from kproxy.broker.partition import ReplicaSettings
from kproxy.broker.replica_manager import ReplicaManager
from kproxy.broker.replication.authentication import SharedSecret
from kproxy.broker.replication.encryption import Encryption
from kproxy.broker.replication.fetchers import ReplicaFetchers
from kproxy.broker.replication.isr_keeper import FollowerPresence, IsrKeeper
from kproxy.broker.replication.listener import ReplicationListener
from kproxy.broker.topics import TopicAdmin
from kproxy.config.tls import ListenerTls
from kproxy.errors import StartupError
from kproxy.etcd import EtcdClient, EtcdError, EtcdMisused, EtcdUnavailable, IdBlocks, PrefixMirror
from kproxy.etcd.lease import LeaseFence, lease_clock
from kproxy.runtime.notify import Reminders, say_ready, say_stopping, say_waiting
from kproxy.runtime.process import raise_open_file_limit
from kproxy.runtime.signals import Signals
from kproxy.runtime.sockets import bind, bound_port
from kproxy.runtime.tasks import in_time
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.tls_acceptor import TlsAcceptor, handshakes_of, load_for_acceptor
from kproxy_codec.framing import ReceiveArena

if TYPE_CHECKING:
    from kproxy.broker.page import BrokerStatus
    from kproxy.observe.http_page import HttpPage

__all__ = ["BrokerConfig", "run_broker"]

SYNC_PATIENCE_S = 5.0
OWN_PARTITIONS_TIMEOUT_S = 10.0
# Added to the TTL: etcd may expire a predecessor's lease this much later.
PREDECESSOR_SLACK_S = 2.0
DRAIN_TIMEOUT_S = 3.0
LINGER_TIMEOUT_S = 1.0
FLUSH_TIMEOUT_S = 5.0
CHECKPOINT_TIMEOUT_S = 5.0
RECLAIM_PAUSE_S = 1.0
FLUSH_THREADS = 8
# Limit of clients with an unfinished TLS handshake, like the proxy's limits.max_half_open.
MAX_HALF_OPEN = 500
T = TypeVar("T")
_logger = structlog.get_logger(__name__)


async def run_broker(config: BrokerConfig) -> None:
    """Run a reference broker until SIGTERM or SIGINT. Raises StartupError."""
    _check(config)
    raise_open_file_limit()
    data_dir = DataDir.open(config.data_dir, config.node_id)
    client = EtcdClient(config.etcd, config.etcd_options, timeout_s=config.etcd_timeout_s)
    try:
        await _Server(config, data_dir, client).run()
    finally:
        await client.close()
        data_dir.close()


def _check(config: BrokerConfig) -> None:
    if not 0 <= config.node_id < 1 << 31:
        raise StartupError(f"--node-id {config.node_id} is not a broker id: give a number from 0 to 2147483647")
    if config.default_replication_factor < 1:
        factor = config.default_replication_factor
        raise StartupError(f"--replication-factor {factor} leaves no copy of a partition: give at least 1")
    if config.lease_ttl_s < 1:
        raise StartupError(f"--lease-ttl {config.lease_ttl_s} is too short: give at least 1 second")
    if config.advertise is None and config.listen[0] in ("", "0.0.0.0", "::"):  # noqa: S104 - refused, not bound
        raise StartupError(f"clients cannot connect to {config.listen[0] or '*'}: give --advertise HOST:PORT as well")


class _Server:
    """One run of the broker."""

    def __init__(self, config: BrokerConfig, data_dir: DataDir, client: EtcdClient) -> None:
        self._config = config
        self._client = client
        self._data_dir = data_dir
        self._keys = Keys(config.prefix)
        self._view = ClusterView(self._keys)
        # A pool of its own, so that other work does not wait for a disk that hangs.
        self._flush_threads = DiskThreads(FLUSH_THREADS, "flush")
        self._replica_manager = ReplicaManager(
            client,
            self._view,
            data_dir,
            config.node_id,
            settings_of=self._settings_of,
            on_identity_lost=self._on_identity_lost,
            hand_over_after_s=config.leader_rebalance_s,
            # Before the followers leave the ISR of a leader whose log they cannot read.
            disk_patience_s=config.isr_lag_s / 2,
            on_leaders_changed=self._on_leaders_changed,
        )
        self._groups = GroupCoordinator(
            self._view,
            self._replica_manager.led,
            time.monotonic,
            Options(config.group_initial_rebalance_delay_s, config.group_min_session_timeout_s),
            config.offsets_rewrite_bytes,
        )
        self._presence = FollowerPresence(config.follower_grace_s, config.isr_lag_s)
        self._isr_keeper = IsrKeeper(
            client,
            self._view,
            self._replica_manager.partitions.values,
            isr_lag_s=config.isr_lag_s,
            on_deposed=self._replica_manager.deposed,
            presence=self._presence,
        )
        self._log_maintenance = LogMaintenance(
            self._replica_manager.hosted.values,
            flush_interval_s=config.flush_interval_s,
            retention_check_interval_s=config.retention_check_interval_s,
        )
        self._mirror = PrefixMirror(client, self._view.prefixes, self._view)
        self._lease: BrokerLease | None = None
        self._broker: Broker | None = None
        self._connections: set[ClientConnection] = set()
        self._reloads = Reloads()
        self._counters = Counter[str]()
        # None: clients use plain text.
        self._acceptor = self._client_acceptor(config.tls)
        self._arena = ReceiveArena()
        self._secret = SharedSecret(client, self._keys)
        self._encryption = Encryption(config.replication_tls, self._reloads)
        self._replication = ReplicationListener(
            lambda: self._secret.current, self._arena, self._presence, self._encryption
        )
        self._fetchers = ReplicaFetchers(
            ReplicaKey(config.node_id, data_dir.log_id),
            self._view,
            self._replica_manager.hosted,
            lambda: self._secret.current,
            self._arena,
            config.max_frame_bytes,
            may_fetch=self._may_fetch,
            encryption=self._encryption,
        )
        self._view.subscribe(self._on_change)
        self._tasks: list[asyncio.Task[None]] = []
        self._lease_losses = 0
        # Lapses of earlier leases.
        self._lease_lapses = 0
        self._not_serving = "starting: what etcd holds has not been read yet"
        self._page: HttpPage | None = None
        self._reminders = Reminders(time.monotonic)

    async def run(self) -> None:
        """Start, serve and stop."""
        listener = await bind(self._connection, *self._config.listen, choose="another --listen")
        with Signals() as signals:
            stopping = asyncio.create_task(signals.stop.wait())
            starting = asyncio.create_task(self._start(listener))
            self._tasks += [
                asyncio.create_task(self._reloads.run()),
                asyncio.create_task(self._reload_at(signals.hangup)),
            ]
            try:
                await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    await starting
                    await asyncio.wait((stopping, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                await self._stop(listener)
            finally:
                await self._end(listener, [starting, stopping])

    def _on_leaders_changed(self, key: PartitionKey) -> None:
        self._fetchers.wake(key)
        self._groups.leader_changed(key)

    # Starting

    async def _reload_at(self, hangup: asyncio.Event) -> None:
        while True:
            await hangup.wait()
            hangup.clear()
            await self._reloads.reload()

    async def _start(self, listener: asyncio.Server) -> None:
        host, port = self._config.advertise or (self._config.listen[0], 0)
        port = port or bound_port(listener)
        replication_port = await self._replication.bind(self._config.replication_listen or (self._config.listen[0], 0))
        admin = await self._open_page()
        try:
            await self._when_etcd_answers(self._client.connect)
            self._lease = BrokerLease(
                self._client,
                self._keys,
                BrokerValue(self._config.node_id, host, port, replication_port, self._data_dir.log_id),
                ttl_s=self._config.lease_ttl_s,
                clock=lease_clock,
                on_claimed=self._on_claimed,
            )
            lease = self._lease
            patience_s = self._config.lease_ttl_s + PREDECESSOR_SLACK_S
            await self._when_etcd_answers(lambda: lease.establish(patience_s))
            mirroring = asyncio.create_task(self._mirror.run())
            self._tasks += [asyncio.create_task(self._hold(lease)), mirroring]
            await self._synced(mirroring)
            self._broker = self._assemble(await self._when_etcd_answers(self._cluster_id))
            await self._when_etcd_answers(self._secret.load)
        except IdInUse as error:
            raise StartupError(
                f"another broker with --node-id {self._config.node_id} is alive ({error}): "
                f"stop it or give another --node-id"
            ) from error
        except EtcdMisused as error:
            raise StartupError(str(error)) from error
        except EtcdError as error:
            raise StartupError(f"{str(error).rstrip('.')}; see --etcd") from error
        await self._log_unknown_logs()
        await self._replication.start(self._broker)
        if lease.fence is not None:
            # If the lease was lost while the start waited for etcd, `_hold` begins.
            self._replica_manager.begin(lease.fence)
        self._tasks += [
            asyncio.create_task(self._replica_manager.run()),
            asyncio.create_task(self._isr_keeper.run()),
            asyncio.create_task(self._log_maintenance.run()),
            asyncio.create_task(self._fetchers.run()),
            asyncio.create_task(self._groups.run()),
        ]
        await self._replica_manager.settle(OWN_PARTITIONS_TIMEOUT_S)
        kafka = Address(self._config.listen[0], bound_port(listener))
        if self._acceptor is not None:
            self._acceptor.open(listener)
        else:
            await listener.start_serving()
        self._not_serving = ""
        say_ready(f"kafka={kafka}{admin} etcd={self._client.endpoints}")

    async def _when_etcd_answers(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Retry `ask` while etcd is unavailable.

        Raises errors that waiting does not fix: EtcdError, IdInUse, StartupError.
        """
        while True:
            try:
                return await ask()
            except EtcdMisused:
                raise
            except EtcdUnavailable as error:
                self._wait(str(error))
                await asyncio.sleep(RECLAIM_PAUSE_S)

    async def _synced(self, mirroring: asyncio.Task[None]) -> None:
        """Wait until the mirror has read the cluster from etcd; raise the mirror's error if it fails."""
        while not await in_time(self._mirror.wait_synced(), mirroring, SYNC_PATIENCE_S):
            why = f" ({self._mirror.last_error})" if self._mirror.last_error is not None else ""
            self._wait(f"What etcd at {self._client.endpoints} holds of the cluster could not be read yet{why}.")

    def _wait(self, sentence: str) -> None:
        self._not_serving = f"starting: {sentence}"
        if self._reminders.is_due(sentence):
            say_waiting(f"{sentence} Start etcd, or give its address with --etcd.")

    async def _log_unknown_logs(self) -> None:
        """Report logs of unknown topics, which stay.

        Their topics may have been deleted while this broker was away, but an etcd that was emptied looks the same.
        """
        topic_ids = [topic.topic_id for topic in self._view.topics.values()]
        try:
            leftovers = await self._data_dir.in_thread(lambda: self._data_dir.logs_of_others(topic_ids))
        except OSError as error:
            _logger.warning("logs not scanned", reason=str(error))
            return
        if leftovers:
            _logger.warning(
                "logs of unknown topics found",
                advice="remove them if the topics were deleted on purpose",
                logs=len(leftovers),
                first=str(leftovers[0]),
            )

    async def _cluster_id(self) -> str:
        """Return the cluster id for clients; the very first broker chooses it."""
        chosen = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=")
        return (await get_or_put(self._client, self._keys.cluster_id, chosen)).decode()

    def _settings_of(self, topic: Topic, partition_index: int) -> ReplicaSettings:
        config = self._config
        of_topic = topic_settings(topic.configs, len(topic.replicas[partition_index]), config)
        return ReplicaSettings(config.node_id, lease_clock, config.isr_lag_s, *of_topic, self._flush_threads)

    def _assemble(self, cluster_id: str) -> Broker:
        return Broker(
            self._config,
            cluster_id,
            self._view,
            self._replica_manager,
            TopicAdmin(self._client, self._view, self._config),
            IdBlocks(self._client, self._keys.producer_ids),
            FenceKeeper(self._client, self._view, on_deposed=self._replica_manager.deposed),
            self._groups,
        )

    # The admin page

    async def _open_page(self) -> str:
        """Serve the admin page if it is configured; return its part of the ready line."""
        if self._config.admin is None:
            return ""
        # Imported here, as in `_status`: brokers without a page do not wait for these imports.
        from kproxy.broker.page import BrokerPages
        from kproxy.observe.http_page import HttpPage
        from kproxy.observe.page_guard import PageGuard

        node_id, replica_manager = self._config.node_id, self._replica_manager
        pages = BrokerPages(node_id, self._view, replica_manager, self._isr_keeper, self._status)
        host, port = self._config.admin
        hosts = [host, *(self._config.advertise or ())[:1]]
        self._page = HttpPage(pages, pages.routes(), PageGuard(hosts=hosts))
        return f" admin={Address(host, await self._page.start(host, port))}"

    def _status(self) -> BrokerStatus:
        from kproxy.broker.page import BrokerStatus

        fence = self._lease.fence if self._lease is not None else None
        silent_s = time.monotonic() - self._mirror.last_heard
        problem = self._not_serving
        if not problem and (fence is None or not fence.is_live()):
            problem = f"no live lease in etcd, so it leads nothing (etcd was last heard {silent_s:.1f} s ago)"
        return BrokerStatus(
            problem,
            fence.remaining_s if fence is not None else 0.0,
            self._lease_lapses + (fence.lapses if fence is not None else 0),
            self._lease_losses,
            silent_s,
            len(self._connections),
            len(self._replication.followers),
            {use: ends_at for use, ends_at in self._certificates() if ends_at is not None},
            {"listener": handshakes_of(self._counters), "replication": self._encryption.handshakes},
        )

    def _certificates(self) -> Sequence[tuple[str, float | None]]:
        """When each certificate ends, by use."""
        listener = self._acceptor.expires_at if self._acceptor is not None else None
        return ("listener", listener), ("replication", self._encryption.expires_at)

    # Serving

    def _client_acceptor(self, tls: ListenerTls | None) -> TlsAcceptor[ClientConnection] | None:
        """The TLS acceptor for clients; None without TLS. Raises StartupError."""
        if tls is None:
            return None
        loaded = self._reloads.add(
            Reloading("TLS of the listener", tls.files, lambda: load_for_acceptor(tls), counters=self._counters)
        )
        return TlsAcceptor(
            "",
            lambda: loaded.current,
            max_half_open=MAX_HALF_OPEN,
            session=lambda _: self._connection(),
            counters=self._counters,
        )

    def _connection(self) -> ClientConnection:
        return ClientConnection(
            self._serve, self._arena, self._config.max_frame_bytes, self._on_opened, self._connections.discard
        )

    def _on_opened(self, connection: ClientConnection) -> bool:
        self._connections.add(connection)
        if len(self._connections) <= self._config.max_connections:
            return True
        _logger.warning("client connection refused", connections=len(self._connections))
        return False

    def _serve(self, request: Request) -> Answer:
        if self._broker is None:
            raise RuntimeError("the broker is not assembled yet, and accepts no connection")
        return registry.serve(self._broker, request)

    def _on_change(self, change: Change) -> None:
        if change.deleted is not None:
            self._groups.topic_deleted(change.topic)
        if change.kind is not Kind.RESTORED:
            return
        # Their fences come from a lost history of etcd.
        for connection in [each for each in self._connections if each.bindings]:
            connection.bindings.clear()
            connection.refuse("etcd was restored, and the fences that it is bound to were granted before")

    # The lease

    def _on_claimed(self, key: str, value: bytes, fence: LeaseFence) -> None:
        self._view.apply_put(key, value, lease_id=fence.lease_id, revision=fence.claim_revision)

    def _on_identity_lost(self, reason: str) -> None:
        if self._lease is not None:
            self._lease.declare_lost(reason)

    def _may_fetch(self) -> bool:
        # A replica on a failing disk leaves the ISR.
        return self._replica_manager.holds_lease and not self._replica_manager.disk.failure

    async def _hold(self, lease: BrokerLease) -> None:
        """Hold the lease; when it is lost, drop all leaderships and begin with a new one."""
        while True:
            held = lease.fence
            reason = await lease.hold()
            self._lease_lapses += held.lapses if held is not None else 0
            self._lease_losses += 1
            self._replica_manager.drop_all("the broker's lease is lost")
            _logger.error("lease lost", reason=reason)
            fence = None
            while fence is None:
                try:
                    fence = await lease.establish(self._config.lease_ttl_s + PREDECESSOR_SLACK_S)
                except IdInUse as error:
                    _logger.error("broker id in use by another process", other=str(error))
                except EtcdError as error:
                    _logger.warning("lease not regained", reason=str(error))
                    await asyncio.sleep(RECLAIM_PAUSE_S)
            self._replica_manager.begin(fence)
            try:
                await self._secret.load()
            except (EtcdError, StartupError) as error:
                _logger.warning("replication secret not reread", reason=str(error))

    # Stopping

    async def _stop(self, listener: asyncio.Server) -> None:
        """Refuse writes, finish running requests, let followers catch up, flush logs, give up the lease."""
        self._not_serving = "stopping: writes are refused, and followers get the rest"
        say_stopping()
        await self._stop_listening(listener)
        self._replica_manager.resign_all()
        self._groups.close()
        loop = asyncio.get_running_loop()
        half_life_s = self._config.lease_ttl_s / 2
        deadline = loop.time() + min(DRAIN_TIMEOUT_S, half_life_s)
        # This runs once per process, so polling is enough.
        while any(each.task is not None for each in self._connections) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await self._replica_manager.drain(deadline - loop.time())
        is_flushed = await self._done_within(
            min(FLUSH_TIMEOUT_S, half_life_s), self._log_maintenance.flush(whatever_the_policy=True)
        )
        if not is_flushed:
            _logger.error("logs not flushed", advice="the disk hangs; what is in the page cache may still get there")
        failed = [task.exception() for task in self._tasks if task.done() and not task.cancelled()]
        await _cancel(self._tasks)
        if self._lease is not None:
            await self._lease.revoke()
        # Other brokers lead now; a checkpoint only shortens the next start.
        if is_flushed:
            await self._done_within(CHECKPOINT_TIMEOUT_S, self._log_maintenance.checkpoint(is_last=True))
        if failed and failed[0] is not None:
            raise failed[0]

    async def _done_within(self, timeout_s: float, work: Awaitable[None]) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await work
                return True
        return False

    async def _end(self, listener: asyncio.Server, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Release all resources, in whatever state."""
        await self._stop_listening(listener)
        await self._close_connections()
        await self._replication.close()
        await _cancel([*self._tasks, *tasks])
        self._log_maintenance.close()
        self._groups.close()
        await self._replica_manager.close()
        self._flush_threads.shutdown()
        if self._lease is not None:
            await self._lease.revoke()
        if self._page is not None:
            await self._page.stop()

    async def _stop_listening(self, listener: asyncio.Server) -> None:
        listener.close()
        if self._acceptor is not None:
            await self._acceptor.close()

    async def _close_connections(self) -> None:
        """Close client connections, after a moment for clients to read their last answers."""
        open_connections = list(self._connections)
        working = [connection.task for connection in open_connections if connection.task is not None]
        for connection in open_connections:
            connection.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINGER_TIMEOUT_S
        while self._connections and loop.time() < deadline:  # noqa: ASYNC110 - as in `_stop`
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        await _cancel(working)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
