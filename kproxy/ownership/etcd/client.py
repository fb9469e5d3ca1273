"""The etcd client: a gRPC channel over all configured members for calls, and one more for each stream.

States: NEW --connect()--> OPEN --close()--> CLOSED. `connect` may be called again after it failed, not after close.

Invariants
1. Every call has a deadline. A call that finds no connected member waits for one within its deadline (gRPC's
   wait-for-ready); until then nothing of it was sent.
2. A write is handed to gRPC once. Where its outcome is unknown the error says so (`EtcdError.maybe_applied`) and the
   caller decides; only reads are tried again here.
3. Nothing received is unbounded: a message has at most `max_message_bytes`, a snapshot at most MAX_SNAPSHOT_KEYS keys.
4. Reads are linearizable.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from kproxy.ownership.etcd.errors import (
    EtcdError,
    EtcdMisused,
    EtcdUnavailable,
    LeaseLost,
    TooLarge,
    cancelled_by_grpc,
    from_rpc_error,
    shorten,
)
from kproxy.ownership.etcd.lease import lease_keep_alive
from kproxy.ownership.etcd.messages import (
    PACKAGE,
    EtcdStatus,
    KeyValue,
    Lease,
    OpResult,
    Pages,
    Snapshot,
    TxnResult,
    encode_key,
    op_result,
    prefix_end,
    rpc,
)
from kproxy.ownership.etcd.stream import EtcdStream
from kproxy.ownership.etcd.target import Endpoint, grpc_target, parse_endpoint
from kproxy.ownership.etcd.txn import TxnCompare, TxnOp

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_SNAPSHOT_KEYS = 2_000_000
# etcd counts the whole prefix again for each page, so pages are large.
PAGE_KEYS = 20_000
READ_ATTEMPTS = 3
RETRY_PAUSE_S = 0.1
CONNECT_PAUSE_S = 0.1

_CHANNEL_OPTIONS = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.enable_http_proxy", 0),
    # A member that is gone is tried again soon: leases are short.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Finds a connection that died without a word. etcd forbids pings more often than every 5 s, or with no call open.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Channels of one process that name the same target would share connections, and their breaks.
    ("grpc.use_local_subchannel_pool", 1),
)

_UNARY = {
    "KV": ("Range", "Put", "DeleteRange", "Txn"),
    "Lease": ("LeaseGrant", "LeaseRevoke"),
    "Maintenance": ("Status",),
}
# A Txn may be either.
_READS = frozenset({"Range", "Status"})


class EtcdClient:
    """A client of one etcd cluster. Made on any thread, used on the event loop that ran `connect`.

    `endpoints`: members as `host:port` or `http://host:port`. `timeout_s`: the deadline of each call, in seconds.
    `max_message_bytes`: the longest answer taken.
    Every method but the constructor raises EtcdUnavailable where no member gives a usable answer, EtcdError where etcd
    refuses.
    """

    def __init__(
        self, endpoints: Sequence[str], *, timeout_s: float = 5.0, max_message_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.endpoints = ",".join(endpoints)
        self._endpoints = tuple(endpoints)
        self._timeout_s = timeout_s
        self._options = (*_CHANNEL_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes))
        self._target = ""
        self._channel: Any = None
        self._streams: set[EtcdStream] = set()
        self._closed = False
        self._calls: dict[str, Any] = {}

    async def connect(self) -> EtcdStatus:
        """Open the channel and wait, at most `timeout_s`, until a member answers. EtcdUnavailable says why none did."""
        if self._closed:
            raise EtcdUnavailable(f"The etcd client for {self.endpoints} is closed.")
        if self._channel is None:
            parsed: list[Endpoint] = [parse_endpoint(text) for text in self._endpoints]
            self._target = await grpc_target(parsed)
            self._channel = grpc.aio.insecure_channel(self._target, options=self._options)
            for service, names in _UNARY.items():
                for name in names:
                    self._calls[name] = self._channel.unary_unary(
                        f"/{PACKAGE}.{service}/{name}",
                        request_serializer=getattr(rpc, f"{name}Request").SerializeToString,
                        response_deserializer=getattr(rpc, f"{name}Response").FromString,
                    )
        return await self._first_answer()

    async def _first_answer(self) -> EtcdStatus:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            left = max(deadline - loop.time(), 0.05)
            try:
                # Without wait-for-ready, so that a refused connection tells its reason and does not just time out.
                return await self._status(timeout_s=left, wait_for_ready=False)
            except grpc.aio.AioRpcError as error:
                reason = shorten(error.details() or error.code().name)
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise EtcdMisused(f"What answers at {self.endpoints} is not etcd: {reason}.") from error
                if loop.time() + CONNECT_PAUSE_S >= deadline:
                    hint = "check the address and that etcd runs there"
                    raise EtcdUnavailable(f"etcd at {self.endpoints} does not answer: {hint} ({reason}).") from error
            await asyncio.sleep(CONNECT_PAUSE_S)

    async def close(self) -> None:
        """End every call and connection; what still waits for an answer gets EtcdUnavailable. May be called twice."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(grace=None)
        for stream in list(self._streams):
            await stream.close()

    # Reading

    async def status(self) -> EtcdStatus:
        """What one member says of itself; it need not be the leader."""
        response = await self._call("Status", rpc.StatusRequest(), write=False)
        return _status(response)

    async def get(self, key: str) -> KeyValue | None:
        kvs = (await self.get_snapshot(key)).kvs
        return kvs[0] if kvs else None

    async def get_snapshot(self, key: str, *, revision: int = 0, into: Pages | None = None) -> Snapshot:
        """One key, or its absence, together with the revision at which that was so; the rest as in `get_prefix`."""
        request = rpc.RangeRequest(key=encode_key(key), revision=revision)
        response = await self._call("Range", request, write=False)
        as_of = revision or response.header.revision
        kvs = into if into is not None else Pages()
        kvs.add(response)
        return Snapshot(as_of, response.header.cluster_id, kvs)

    async def get_prefix(self, prefix: str, *, revision: int = 0, into: Pages | None = None) -> Snapshot:
        """Every key that begins with `prefix`, as of `revision` (0: now), in key order, read in pages.

        They are kept as etcd sent them, since there may be a million; behind those that `into` holds already.
        Compacted where `revision` is gone, or went while later pages were read; EtcdError beyond MAX_SNAPSHOT_KEYS.
        """
        start, end = encode_key(prefix) or b"\0", prefix_end(prefix)
        kvs = into if into is not None else Pages()
        limit = PAGE_KEYS
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=limit, revision=revision)
            try:
                response = await self._call("Range", request, write=False)
            except TooLarge:
                if limit == 1:
                    raise
                limit = max(limit // 4, 1)
                continue
            # The first page fixes the revision; its header holds the store's, later ones' may be newer.
            revision = revision or response.header.revision
            kvs.add(response)
            if not response.more:
                return Snapshot(revision, response.header.cluster_id, kvs)
            if len(kvs) >= MAX_SNAPSHOT_KEYS:
                raise EtcdError(f"etcd at {self.endpoints} holds more than {MAX_SNAPSHOT_KEYS} keys under {prefix!r}.")
            start = response.kvs[-1].key + b"\0"

    # Writing

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Set a key and return the revision of that. LeaseLost where `lease_id` does not exist."""
        request = rpc.PutRequest(key=encode_key(key), value=value, lease=lease_id)
        return int((await self._call("Put", request, write=True)).header.revision)

    async def delete(self, key: str) -> bool:
        """Whether there was such a key."""
        response = await self._call("DeleteRange", rpc.DeleteRangeRequest(key=encode_key(key)), write=True)
        return bool(response.deleted)

    async def txn(
        self, compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
    ) -> TxnResult:
        """Run `success` if all of `compares` hold, else `failure`, atomically. LeaseLost as for `put`."""
        request = rpc.TxnRequest(
            compare=[compare.message for compare in compares],
            success=[operation.message for operation in success],
            failure=[operation.message for operation in failure],
        )
        write = any(operation.write for operation in (*success, *failure))
        response = await self._call("Txn", request, write=write)
        responses: tuple[OpResult, ...] = tuple(op_result(each) for each in response.responses)
        return TxnResult(response.succeeded, response.header.revision, response.header.cluster_id, responses)

    # Leases

    async def lease_grant(self, ttl_s: int) -> Lease:
        """A new lease of about `ttl_s` seconds: the TTL that counts is the one in the answer."""
        response = await self._call("LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_s), write=True)
        if response.error:
            raise EtcdError(f"etcd at {self.endpoints} granted no lease: {response.error}")
        return Lease(response.ID, response.TTL)

    async def lease_revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys. A lease that is gone already is what was asked for."""
        try:
            await self._call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease_id), write=True)
        except LeaseLost:
            return

    async def lease_keep_alive(
        self, lease_id: int, *, clock: Callable[[], float], on_renewed: Callable[[float, int], None]
    ) -> None:
        """Renew the lease until cancelled, as `lease.lease_keep_alive` says; LeaseLost when it is gone."""
        await lease_keep_alive(self, lease_id, clock=clock, on_renewed=on_renewed)

    # Used by the rest of this package

    def open_stream(self, service: str, method: str) -> EtcdStream:
        """A bidirectional call on a connection of its own; EtcdUnavailable where the client is not open."""
        if self._channel is None:
            raise EtcdUnavailable(f"The etcd client for {self.endpoints} is not connected.")
        channel = grpc.aio.insecure_channel(self._target, options=self._options)
        stream = EtcdStream(channel, self.endpoints, service, method, on_close=self._streams.discard)
        self._streams.add(stream)
        return stream

    async def _status(self, *, timeout_s: float, wait_for_ready: bool) -> EtcdStatus:
        return _status(await self._attempt("Status", rpc.StatusRequest(), timeout_s, wait_for_ready=wait_for_ready))

    async def _call(self, name: str, request: Any, *, write: bool) -> Any:
        """One call, with what invariants 1 and 2 ask for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        attempt = 1
        while True:
            try:
                return await self._attempt(name, request, deadline - loop.time())
            except grpc.aio.AioRpcError as error:
                pause = RETRY_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
                again = not write and error.code() == grpc.StatusCode.UNAVAILABLE and attempt < READ_ATTEMPTS
                if not again or loop.time() + pause >= deadline:
                    raise from_rpc_error(error, name, self.endpoints, write=write) from error
            attempt += 1
            await asyncio.sleep(pause)

    async def _attempt(self, name: str, request: Any, timeout_s: float, *, wait_for_ready: bool = True) -> Any:
        if self._channel is None:
            raise EtcdUnavailable(f"The etcd client for {self.endpoints} is not connected.")
        try:
            return await self._calls[name](request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except asyncio.CancelledError:
            if cancelled_by_grpc():
                closed = f"The etcd client for {self.endpoints} was closed during {name}."
                raise EtcdUnavailable(closed, maybe_applied=name not in _READS) from None
            raise


def _status(response: Any) -> EtcdStatus:
    header = response.header
    return EtcdStatus(header.cluster_id, header.member_id, header.revision, response.version)
