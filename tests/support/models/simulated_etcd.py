"""Simulate etcd: linearizable transactions, leases that end, watches, and a client whose link may fail.

The client is kproxy's own EtcdClient down to the call to gRPC, so that transactions, the outcome of a write, and the
keepalives of a lease are product code. Transactions are interpreted here from the same messages that etcd would get.

A broker's link to etcd is
  FAST   a call is applied and answered at once, events are reported at once
  SLOW   calls and answers wait until the model says so: applied late, answered late, also after the caller gave up
  DEAF   a call is applied at once, its answer is lost
  CUT    nothing gets through; what was on its way already may still be applied
KeepAlives describes the fate of its keepalives, unless the link is cut.

A lease ends when the store learns that time has passed (`expire_leases`), never before the end of its TTL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from kproxy.etcd import EtcdClient, EtcdUnavailable, KeyValue, LeaseLost, Snapshot, WatchEvent
from kproxy.etcd.messages import decode_key, key_value, rpc

CLUSTER_ID = 0xC1
CALL_TIMEOUT_S = 5.0
_EQUAL = 0
_LESS = 2


class _Lease(NamedTuple):
    ttl_s: int
    expires_at: float


class EtcdStore:
    """The data of an etcd cluster. `now` is the time of etcd's leader, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.revision = 1
        self.kvs: dict[bytes, Any] = {}
        self.leases: dict[int, _Lease] = {}
        self.history: list[tuple[int, list[WatchEvent]]] = []
        self.on_change: Callable[[], None] = lambda: None
        self._next_lease_id = 1000

    # Reads of the model itself

    def get(self, key: str) -> KeyValue | None:
        kv = self.kvs.get(key.encode())
        return key_value(kv) if kv is not None else None

    def snapshot(self, prefixes: list[str]) -> Snapshot:
        """All keys under the prefixes, as a mirror would load them."""
        starts = tuple(prefix.encode() for prefix in prefixes)
        kvs = [key_value(kv) for key, kv in sorted(self.kvs.items()) if key.startswith(starts)]
        return Snapshot(self.revision, CLUSTER_ID, kvs)

    def events_after(self, revision: int, up_to: int | None = None) -> list[tuple[int, list[WatchEvent]]]:
        """The changes after `revision`, up to and including another."""
        # Every revision but the first has an entry.
        return self.history[revision - 1 : None if up_to is None else up_to - 1]

    # Calls

    def apply(self, name: str, request: Any) -> Any:
        """Carry out a call; return its answer. Raises LeaseLost."""
        apply = {
            "Range": self._range,
            "Put": self._put,
            "DeleteRange": self._delete_range,
            "Txn": self._txn,
            "LeaseGrant": self._grant,
            "LeaseRevoke": self._revoke,
        }[name]
        response = apply(request)
        response.header.revision, response.header.cluster_id = self.revision, CLUSTER_ID
        return response

    def _range(self, request: Any) -> Any:
        if not request.range_end:
            found = [self.kvs[request.key]] if request.key in self.kvs else []
        else:
            found = [kv for key, kv in sorted(self.kvs.items()) if request.key <= key < request.range_end]
        return rpc.RangeResponse(kvs=found, count=len(found))

    def _put(self, request: Any) -> Any:
        self._check_leases([request])
        self._commit([self._set(request)])
        return rpc.PutResponse()

    def _delete_range(self, request: Any) -> Any:
        gone = self._matching(request)
        self._commit([self._unset(key) for key in gone])
        return rpc.DeleteRangeResponse(deleted=len(gone))

    def _txn(self, request: Any) -> Any:
        succeeded = all(self._holds(compare) for compare in request.compare)
        operations = request.success if succeeded else request.failure
        self._check_leases([each.request_put for each in operations if each.WhichOneof("request") == "request_put"])
        response = rpc.TxnResponse(succeeded=succeeded)
        events: list[WatchEvent] = []
        for operation in operations:
            answer = response.responses.add()
            kind = operation.WhichOneof("request")
            if kind == "request_range":
                answer.response_range.CopyFrom(self._range(operation.request_range))
            elif kind == "request_put":
                events.append(self._set(operation.request_put))
                answer.response_put.SetInParent()
            else:
                gone = self._matching(operation.request_delete_range)
                events += [self._unset(key) for key in gone]
                answer.response_delete_range.deleted = len(gone)
        self._commit(events)
        return response

    def _holds(self, compare: Any) -> bool:
        if compare.result == _LESS and compare.range_end and compare.WhichOneof("target_union") == "mod_revision":
            return all(
                kv.mod_revision < compare.mod_revision
                for key, kv in self.kvs.items()
                if compare.key <= key < compare.range_end
            )
        if compare.result != _EQUAL:
            raise NotImplementedError("only comparisons for equality, and of a range with a later revision, are made")
        kv = self.kvs.get(compare.key)
        kind = compare.WhichOneof("target_union")
        if kind is None:
            # An unset union compares with zero, like that of key_absent, which protobuf omits.
            kind = {1: "create_revision", 2: "mod_revision"}[compare.target]
        if kind == "value" and kv is None:
            return False
        found = getattr(kv, kind) if kv is not None else 0
        return bool(found == getattr(compare, kind))

    def _matching(self, request: Any) -> list[bytes]:
        if not request.range_end:
            return [request.key] if request.key in self.kvs else []
        return [key for key in sorted(self.kvs) if request.key <= key < request.range_end]

    def _check_leases(self, puts: list[Any]) -> None:
        for put in puts:
            if put.lease and put.lease not in self.leases:
                raise LeaseLost(f"etcd does not know the lease {put.lease:x}")

    def _set(self, put: Any) -> WatchEvent:
        revision = self.revision + 1
        known = self.kvs.get(put.key)
        kv = rpc.KeyValue(
            key=put.key,
            value=put.value,
            lease=put.lease,
            mod_revision=revision,
            create_revision=known.create_revision if known is not None else revision,
            version=known.version + 1 if known is not None else 1,
        )
        self.kvs[put.key] = kv
        return WatchEvent(False, key_value(kv))

    def _unset(self, key: bytes) -> WatchEvent:
        del self.kvs[key]
        return WatchEvent(True, KeyValue(decode_key(key), b"", 0, self.revision + 1, 0, 0))

    def _commit(self, events: list[WatchEvent]) -> None:
        if events:
            self.revision += 1
            self.history.append((self.revision, events))
            self.on_change()

    # Leases

    def _grant(self, request: Any) -> Any:
        self._next_lease_id += 1
        # etcd grants no TTL under 2 s.
        ttl_s = max(request.TTL, 2)
        self.leases[self._next_lease_id] = _Lease(ttl_s, self.now() + ttl_s)
        return rpc.LeaseGrantResponse(ID=self._next_lease_id, TTL=ttl_s)

    def _revoke(self, request: Any) -> Any:
        if request.ID not in self.leases:
            raise LeaseLost(f"etcd does not know the lease {request.ID:x}")
        self._end(request.ID)
        return rpc.LeaseRevokeResponse()

    def keep_alive(self, lease_id: int) -> int:
        """The TTL in seconds, 0 for a lease that is gone."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return 0
        self.leases[lease_id] = lease._replace(expires_at=self.now() + lease.ttl_s)
        return lease.ttl_s

    def next_expiry(self) -> float | None:
        return min((lease.expires_at for lease in self.leases.values()), default=None)

    def expire_leases(self) -> bool:
        """End the leases that are over by now; return whether there were any."""
        over = [lease_id for lease_id, lease in self.leases.items() if lease.expires_at <= self.now()]
        for lease_id in over:
            self._end(lease_id)
        return bool(over)

    def _end(self, lease_id: int) -> None:
        del self.leases[lease_id]
        self._commit([self._unset(key) for key, kv in sorted(self.kvs.items()) if kv.lease == lease_id])


class Link(Enum):
    FAST = "fast"
    SLOW = "slow"
    DEAF = "deaf"
    CUT = "cut"


class KeepAlives(Enum):
    """The fate of a broker's keepalives."""

    ANSWERED = "answered at once"
    ANSWERED_LATE = "they count at once, and are answered late"
    ARRIVE_LATE = "they count late, and are answered then"
    UNANSWERED = "they count, and the answers are lost"
    LOST = "lost"


# Less than the product's time limit for an answer, more than the margin of a lease.
LATE_KEEPALIVE_S = 1.9


class PendingCall:
    """A call on its way: to etcd, and then, with `response` set, back."""

    def __init__(self, name: str, request: Any, answered: asyncio.Future[Any]) -> None:
        self.name = name
        self.request = request
        self.response: Any = None
        self._answered = answered

    @property
    def is_applied(self) -> bool:
        return self.response is not None

    def apply(self, store: EtcdStore) -> None:
        try:
            self.response = store.apply(self.name, self.request)
        except LeaseLost as error:
            self.response = error

    def answer(self) -> None:
        """Deliver the answer to the caller, if it still waits."""
        if self._answered.done():
            return
        if isinstance(self.response, Exception):
            self._answered.set_exception(self.response)
        else:
            self._answered.set_result(self.response)


class SimulatedEtcdClient(EtcdClient):
    """kproxy's client with the simulated store in place of gRPC."""

    def __init__(self, store: EtcdStore) -> None:
        super().__init__(["etcd:2379"], timeout_s=CALL_TIMEOUT_S)
        self.store = store
        self.link = Link.FAST
        self.keepalives = KeepAlives.ANSWERED
        self.pending: list[PendingCall] = []

    async def _call(self, name: str, request: Any, *, write: bool) -> Any:
        call = PendingCall(name, request, asyncio.get_running_loop().create_future())
        if self.link in (Link.FAST, Link.DEAF):
            call.apply(self.store)
            if self.link is Link.FAST:
                call.answer()
        elif self.link is Link.SLOW:
            self.pending.append(call)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await call._answered
        except TimeoutError:
            raise EtcdUnavailable(f"etcd did not answer {name} in time", maybe_applied=write) from None

    def apply_pending(self, position: int) -> None:
        """Deliver one of the calls on their way to etcd."""
        self._waiting_for(applied=False)[position].apply(self.store)

    def answer_pending(self, position: int, *, lost: bool = False) -> None:
        """Deliver one of the answers on their way back to its caller, if there still is one."""
        call = self._waiting_for(applied=True)[position]
        self.pending.remove(call)
        if not lost:
            call.answer()

    def lose_pending(self, position: int) -> None:
        """Lose one of the calls on their way to etcd."""
        self.pending.remove(self._waiting_for(applied=False)[position])

    def inherit(self, predecessor: SimulatedEtcdClient) -> None:
        """Take over the requests of a dead process: they may still reach etcd, but nobody gets their answers."""
        self.pending += predecessor._waiting_for(applied=False)

    def _waiting_for(self, *, applied: bool) -> list[PendingCall]:
        return [call for call in self.pending if call.is_applied is applied]

    def count_pending(self, *, applied: bool) -> int:
        return len(self._waiting_for(applied=applied))

    def open_stream(self, service: str, method: str) -> Any:
        if (service, method) != ("Lease", "LeaseKeepAlive"):
            raise NotImplementedError(f"{service}.{method}")
        return _KeepAliveStream(self)


class _KeepAliveStream:
    """One request at a time and its answer, by the value of `client.keepalives` at the time of the request."""

    def __init__(self, client: SimulatedEtcdClient) -> None:
        self._client = client
        self._lease_id = 0
        self._ttl_s: int | None = None
        self._fate = KeepAlives.ANSWERED

    async def write(self, request: Any, timeout_s: float) -> None:
        if self._client.link is Link.CUT:
            await asyncio.sleep(timeout_s)
            raise EtcdUnavailable("etcd cannot be reached")
        self._lease_id, self._fate = request.ID, self._client.keepalives
        if self._fate not in (KeepAlives.LOST, KeepAlives.ARRIVE_LATE):
            self._ttl_s = self._client.store.keep_alive(request.ID)

    async def read(self, timeout_s: float) -> Any:
        """None if no answer comes in time."""
        if self._fate in (KeepAlives.ANSWERED_LATE, KeepAlives.ARRIVE_LATE):
            await asyncio.sleep(min(LATE_KEEPALIVE_S, timeout_s))
        if self._client.link is Link.CUT:
            raise EtcdUnavailable("etcd cannot be reached any more")
        if self._fate is KeepAlives.ARRIVE_LATE:
            self._ttl_s = self._client.store.keep_alive(self._lease_id)
        if self._fate in (KeepAlives.UNANSWERED, KeepAlives.LOST):
            await asyncio.sleep(timeout_s)
            return None
        return rpc.LeaseKeepAliveResponse(TTL=self._ttl_s)

    async def close(self) -> None:
        return
