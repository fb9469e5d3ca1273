"""Simulate etcd for the proxies of a world: calls, keepalives and watches take simulated time.

The store, and the client down to gRPC, are those of the replication model (tests.support). Each proxy has a client of
its own. Before `late_until` its link to etcd passes no message, in either direction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kproxy.etcd import EtcdUnavailable, LeaseLost
from kproxy.etcd.messages import rpc
from kproxy.etcd.mirror import SIGN_OF_LIFE_WATCH_ID
from tests.simulation.dice import Dice, What
from tests.simulation.network import NetworkLoop
from tests.support.models.simulated_etcd import CLUSTER_ID, EtcdStore, SimulatedEtcdClient

# Far more than the changes of a world's claims while one proxy receives no message.
MOST_UNREAD: Final = 100_000


class WorldEtcd:
    """The store, and its watchers."""

    def __init__(self, loop: NetworkLoop) -> None:
        self.loop = loop
        self.store = EtcdStore(loop.time)
        self.store.on_change = self._changed
        self.watches: dict[_Watch, None] = {}

    def _changed(self) -> None:
        for watch in list(self.watches):
            watch.follow()


class WorldEtcdClient(SimulatedEtcdClient):
    """The link of the proxy `number`; a message takes up to `slowest_s`."""

    def __init__(self, etcd: WorldEtcd, dice: Dice, number: int, slowest_s: float) -> None:
        super().__init__(etcd.store)
        self.etcd = etcd
        self.late_until = 0.0
        # All leases granted to this proxy.
        self.leases: list[int] = []
        self._dice = dice
        self._number = number
        self._slowest_s = slowest_s

    def way_s(self) -> float:
        now = self.etcd.loop.now
        return max(0.0, self.late_until - now) + self._slowest_s * self._dice.at(What.ETCD, self._number, now)

    async def _call(self, name: str, request: Any, *, write: bool) -> Any:
        await asyncio.sleep(self.way_s())
        try:
            response = self.store.apply(name, request)
        except LeaseLost as error:
            response = error
        if name == "LeaseGrant":
            self.leases.append(response.ID)
        await asyncio.sleep(self.way_s())
        if isinstance(response, LeaseLost):
            raise response
        return response

    def lose_lease(self) -> None:
        """Make etcd end the last lease."""
        for lease_id in self.leases[-1:]:
            if lease_id in self.store.leases:
                self.store.leases[lease_id] = self.store.leases[lease_id]._replace(expires_at=self.store.now())
        self.store.expire_leases()

    def open_stream(self, service: str, method: str) -> Any:
        return _Watch(self) if (service, method) == ("Watch", "Watch") else _KeepAlive(self)


class _KeepAlive:
    """One request at a time, and its answer."""

    def __init__(self, client: WorldEtcdClient) -> None:
        self._client = client
        self._ttl_s = 0

    async def write(self, request: Any, timeout_s: float) -> None:
        way_s = self._client.way_s()
        await asyncio.sleep(min(way_s, timeout_s))
        if way_s > timeout_s:
            raise EtcdUnavailable("etcd cannot be reached")
        self._ttl_s = self._client.store.keep_alive(request.ID)

    async def read(self, timeout_s: float) -> Any:
        """None if no answer comes in time."""
        way_s = self._client.way_s()
        await asyncio.sleep(min(way_s, timeout_s))
        return rpc.LeaseKeepAliveResponse(TTL=self._ttl_s) if way_s <= timeout_s else None

    async def close(self) -> None:
        return


class _Watch:
    """One stream with one watcher, which gets all changes in its range in order."""

    def __init__(self, client: WorldEtcdClient) -> None:
        self._client = client
        self._loop = client.etcd.loop
        self._range = (b"", b"")
        self._watch_id = 0
        self._told = 0
        self._comes_at = 0.0
        self._unread: deque[Any] = deque(maxlen=MOST_UNREAD)
        self._wake: Callable[[], None] = lambda: None

    async def write(self, request: Any, timeout_s: float) -> None:
        if request.WhichOneof("request_union") == "cancel_request":
            self._say(request.cancel_request.watch_id, canceled=True)
            return
        create = request.create_request
        self._say(create.watch_id, created=True)
        if create.watch_id != SIGN_OF_LIFE_WATCH_ID:
            self._watch_id, self._range = create.watch_id, (create.key, create.range_end)
            self._told = create.start_revision - 1
            self._client.etcd.watches[self] = None
            self.follow()

    def follow(self) -> None:
        """Deliver the changes."""
        store = self._client.store
        first, behind = self._range
        for _, events in store.events_after(self._told):
            mine = [event for event in events if first <= event.kv.key.encode() < behind]
            if mine:
                self._say(self._watch_id, events=mine)
        self._told = store.revision

    def _say(self, watch_id: int, *, created: bool = False, canceled: bool = False, events: Any = ()) -> None:
        response = rpc.WatchResponse(watch_id=watch_id, created=created, canceled=canceled)
        response.header.revision, response.header.cluster_id = self._client.store.revision, CLUSTER_ID
        for event in events:
            told = response.events.add()
            told.type = int(event.deleted)
            told.kv.key, told.kv.value, told.kv.lease = event.kv.key.encode(), event.kv.value, event.kv.lease_id
            told.kv.create_revision, told.kv.mod_revision = event.kv.create_revision, event.kv.mod_revision
            told.kv.version = event.kv.version
        self._comes_at = max(self._comes_at, self._loop.now + self._client.way_s())
        self._loop.call_at(self._comes_at, self._heard, response)

    def _heard(self, response: Any) -> None:
        self._unread.append(response)
        self._wake()

    async def read(self, timeout_s: float) -> Any:
        """None if nothing comes in time."""
        if not self._unread:
            woken = asyncio.Event()
            self._wake = woken.set
            try:
                async with asyncio.timeout(timeout_s):
                    await woken.wait()
            except TimeoutError:
                return None
        return self._unread.popleft()

    def refused(self, reason: str) -> None:
        """Do nothing: a sign of life ends with this call."""

    async def close(self) -> None:
        self._client.etcd.watches.pop(self, None)
