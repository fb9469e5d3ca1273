"""Call etcd and open streams to it, through any of its members, as long as a majority of them works.

States: NEW --connect()--> OPEN --close()--> CLOSED. `connect` may be called again after a failure, not after `close`.

Guarantees, with three members of which any one is killed, hangs, or is cut off
- A call that begins afterwards is answered by another member. Detection costs 2 s once (`members.py`, invariant 2).
- A call in flight: a read goes to another member; a write fails as `maybe_applied` as soon as the failure of the member
  is detected, and at its deadline at the latest.
- While another leader is elected, which takes etcd a second or two, the same holds for every call.
- A keepalive moves to another member after a quarter of the TTL, a watch 4 s after it fell silent.

Invariants
1. Every call has one deadline, `timeout_s` after its start, even if it needs several members or a new token.
2. A write is retried only if it had no effect: no connection, a refusal before it was proposed, a refused token. If its
   outcome is unknown, the error says so (`EtcdError.maybe_applied`) and the caller decides. A read is retried after any
   failure of a member.
3. Received data is bounded: a message has at most `max_message_bytes`, a snapshot at most MAX_SNAPSHOT_KEYS keys.
4. Reads of keys are linearizable, whichever member answers.
5. This module never blocks the event loop: files are read on a thread, and gRPC resolves names.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from kproxy.config.etcd import EtcdOptions
from kproxy.errors import StartupError
from kproxy.etcd.credentials import TlsCredentials, Token
from kproxy.etcd.endpoints import Endpoint, diagnose, parse_endpoints
from kproxy.etcd.errors import (
    EtcdDenied,
    EtcdError,
    EtcdMisused,
    EtcdUnavailable,
    LeaseLost,
    TooLarge,
)
from kproxy.etcd.members import CONNECT_TIMEOUT_S, CallFailed, Members
from kproxy.etcd.messages import (
    EtcdStatus,
    KeyValue,
    Lease,
    Pages,
    Snapshot,
    TxnCompare,
    TxnOp,
    TxnResult,
    encode_key,
    key_value,
    prefix_end,
    rpc,
)
from kproxy.etcd.stream import EtcdStream

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_SNAPSHOT_KEYS = 2_000_000
# etcd counts the whole prefix again for each page, so pages are large.
PAGE_KEYS = 20_000
# Retries of a page after the first, each with the deadline of a call.
PAGE_ATTEMPTS = 4
# The pause before all members are tried once more.
RETRY_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
CONNECT_PAUSE_S = 0.1
RECONNECT_PAUSE_S = 0.5
# A token may expire between its arrival and its use; a token that etcd never accepts must not be requested for ever.
TOKENS_PER_CALL = 3


class EtcdClient:
    """A client of one etcd cluster.

    Made on any thread, used on the event loop that ran `connect`.

    `endpoints`: members as `host:port`, `http://host:port` or `https://host:port`. `timeout_s`: the deadline of each
    call, in seconds. `max_message_bytes`: the longest answer accepted.
    Every method that calls etcd raises EtcdUnavailable if no member gives a usable answer, and EtcdError if etcd
    refuses.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        options: EtcdOptions = EtcdOptions(),  # noqa: B008 - it is frozen
        *,
        timeout_s: float = 5.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.endpoints = ",".join(endpoints)
        self._texts = tuple(endpoints)
        self._options = options
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._parsed: tuple[Endpoint, ...] = ()
        self._members: Members | None = None
        self._token = Token(options, self._authenticate)
        self._streams: set[EtcdStream] = set()
        self._closed = False

    async def connect(self) -> EtcdStatus:
        """Wait, at most `timeout_s`, until a member answers and accepts the configured user.

        Raises EtcdUnavailable with the reason if none does; its subclass EtcdMisused is not worth a retry.
        """
        if self._closed:
            raise EtcdUnavailable(f"The etcd client for {self.endpoints} is closed.")
        if self._members is None:
            self._members = await self._make_members()
        await self._find_one(self._members)
        await self._prove_user()
        return await self.status()

    async def _make_members(self) -> Members:
        self._parsed = parse_endpoints(self._texts)
        tls = self._parsed[0].tls
        if self._options.wants_tls and not tls:
            raise EtcdMisused(
                f"Certificates are given for etcd at {self.endpoints}, which does not use TLS: write https://."
            )
        credentials = TlsCredentials(self._options) if tls else None
        if credentials is not None:
            await credentials.current()
        return Members(
            self._parsed,
            credentials,
            named=self.endpoints,
            server_name=self._options.server_name or "",
            max_message_bytes=self._max_message_bytes,
        )

    async def _find_one(self, members: Members) -> None:
        """Wait until any member gives any answer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            reason = ""
            for member in members.in_order():
                left = max(deadline - loop.time(), 0.05)
                try:
                    await member.look(min(left, CONNECT_TIMEOUT_S))
                except CallFailed as failure:
                    if not failure.elsewhere:
                        raise failure.as_etcd_error("Status", self.endpoints, write=False) from failure
                    reason = reason or failure.reason
                else:
                    return
            await self._give_up_if_hopeless()
            if loop.time() + CONNECT_PAUSE_S >= deadline:
                hint = "check the address and that etcd runs there"
                raise EtcdUnavailable(f"etcd at {self.endpoints} does not answer: {hint} ({reason}).")
            await asyncio.sleep(CONNECT_PAUSE_S)

    async def _give_up_if_hopeless(self) -> None:
        """Raise EtcdMisused if every member has a fault that only a person can fix."""
        found = await asyncio.gather(*(diagnose(each, self._options) for each in self._parsed))
        if found[0] is not None and all(found):
            raise EtcdMisused(found[0])

    async def _prove_user(self) -> None:
        """Read from one member, so that a missing or wrong password is reported now and not on first use."""
        request = rpc.RangeRequest(key=b"\0", limit=1, serializable=True)
        try:
            await self._call("Range", request, write=False)
        except EtcdDenied:
            # etcd accepted the user; the user's role does not matter for this check.
            return

    async def close(self) -> None:
        """End every call and connection; pending calls raise EtcdUnavailable. May be called twice."""
        self._closed = True
        members, self._members = self._members, None
        if members is not None:
            await members.close()
        for stream in list(self._streams):
            await stream.close()

    # Reading

    async def status(self) -> EtcdStatus:
        """The status of one member, which need not be the leader."""
        response = await self._call("Status", rpc.StatusRequest(), write=False)
        return _status(response)

    async def get(self, key: str) -> KeyValue | None:
        kvs = (await self.get_snapshot(key)).kvs
        return kvs[0] if kvs else None

    async def get_snapshot(self, key: str, *, revision: int = 0, into: Pages | None = None) -> Snapshot:
        """Read one key, or its absence, with the revision of the read. Parameters and errors as in `get_prefix`."""
        request = rpc.RangeRequest(key=encode_key(key), revision=revision)
        response = await self._call("Range", request, write=False)
        as_of = revision or response.header.revision
        kvs = into if into is not None else Pages()
        kvs.add(response)
        return Snapshot(as_of, response.header.cluster_id, kvs)

    async def get_prefix(self, prefix: str, *, revision: int = 0, into: Pages | None = None) -> Snapshot:
        """Read every key under `prefix`, as of `revision` (0: now), in key order.

        The keys are kept encoded, since there may be a million, and appended to `into`. Raises Compacted if `revision`
        is compacted before or during the read, and EtcdError for more than MAX_SNAPSHOT_KEYS keys.
        """
        start, end = encode_key(prefix) or b"\0", prefix_end(prefix)
        kvs = into if into is not None else Pages()
        limit, failures = PAGE_KEYS, 0
        is_first = True
        while True:
            request = rpc.RangeRequest(key=start, range_end=end, limit=limit, revision=revision)
            try:
                response = await self._call("Range", request, write=False)
            except TooLarge:
                if limit == 1:
                    raise
                limit = max(limit // 4, 1)
                continue
            except EtcdUnavailable:
                failures += 1
                # The pages read so far stay valid: one late page must not cause a million keys to be read again.
                if is_first or failures == PAGE_ATTEMPTS:
                    raise
                continue
            is_first, failures = False, 0
            # The first page fixes the revision: the headers of later pages may have newer ones.
            revision = revision or response.header.revision
            kvs.add(response)
            if not response.more:
                return Snapshot(revision, response.header.cluster_id, kvs)
            if len(kvs) >= MAX_SNAPSHOT_KEYS:
                raise EtcdError(f"etcd at {self.endpoints} holds more than {MAX_SNAPSHOT_KEYS} keys under {prefix!r}.")
            start = response.kvs[-1].key + b"\0"

    # Writing

    async def put(self, key: str, value: bytes, *, lease_id: int = 0) -> int:
        """Set a key; return the revision. Raises LeaseLost if `lease_id` does not exist."""
        request = rpc.PutRequest(key=encode_key(key), value=value, lease=lease_id)
        return int((await self._call("Put", request, write=True)).header.revision)

    async def delete(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        response = await self._call("DeleteRange", rpc.DeleteRangeRequest(key=encode_key(key)), write=True)
        return bool(response.deleted)

    async def txn(
        self, compares: Sequence[TxnCompare], success: Sequence[TxnOp], failure: Sequence[TxnOp] = ()
    ) -> TxnResult:
        """Run `success` if all of `compares` hold, else `failure`, atomically. Raises LeaseLost like `put`."""
        request = rpc.TxnRequest(
            compare=[compare.message for compare in compares],
            success=[operation.message for operation in success],
            failure=[operation.message for operation in failure],
        )
        write = any(operation.write for operation in (*success, *failure))
        response = await self._call("Txn", request, write=write)
        found = tuple(next(map(key_value, each.response_range.kvs), None) for each in response.responses)
        return TxnResult(response.succeeded, response.header.revision, response.header.cluster_id, found)

    # Leases

    async def lease_grant(self, ttl_s: int) -> Lease:
        """Create a lease of about `ttl_s` seconds; the TTL in the answer is the one that applies."""
        response = await self._call("LeaseGrant", rpc.LeaseGrantRequest(TTL=ttl_s), write=True)
        if response.error:
            raise EtcdError(f"etcd at {self.endpoints} granted no lease: {response.error}")
        return Lease(response.ID, response.TTL)

    async def lease_revoke(self, lease_id: int) -> None:
        """End a lease, if it still exists, and delete its keys."""
        try:
            await self._call("LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease_id), write=True)
        except LeaseLost:
            return

    # Used by the rest of this package

    def open_stream(self, service: str, method: str) -> EtcdStream:
        """Open a bidirectional call on a connection of its own. Raises EtcdUnavailable if the client is not open."""
        stream = EtcdStream(self._open_members(), self._token, service, method, on_close=self._streams.discard)
        self._streams.add(stream)
        return stream

    def _open_members(self) -> Members:
        if self._members is None:
            state = "closed" if self._closed else "not connected"
            raise EtcdUnavailable(f"The etcd client for {self.endpoints} is {state}.")
        return self._members

    async def _authenticate(self, name: str, password: str) -> str:
        request = rpc.AuthenticateRequest(name=name, password=password)
        return str((await self._call("Authenticate", request, write=False)).token)

    async def _call(self, name: str, request: Any, *, write: bool) -> Any:
        """Make one call as invariants 1 and 2 demand."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        failures = tokens = 0
        while True:
            token = "" if name == "Authenticate" else await self._token_by(deadline, name)
            members = self._open_members()
            member = members.in_order()[0]
            try:
                return await member.call(name, request, deadline - loop.time(), token)
            except CallFailed as failure:
                tokens += failure.token_refused
                if failure.token_refused and tokens < TOKENS_PER_CALL and self._token.refused(token):
                    continue
                failures += 1
                pause = _pause_s(failures, len(members))
                again = failure.elsewhere and (failure.untouched or not write)
                if not again or loop.time() + pause >= deadline:
                    raise failure.as_etcd_error(name, self.endpoints, write=write) from failure
            await asyncio.sleep(pause)

    async def _token_by(self, deadline: float, name: str) -> str:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._token.get()
        except TimeoutError:
            raise EtcdUnavailable(f"etcd at {self.endpoints} gave no token for {name} in time.") from None


async def connect(client: EtcdClient, waits: Callable[[EtcdError], None]) -> None:
    """Connect, however long it takes.

    Call `waits` with the reason of each failed attempt.

    Raises StartupError for an error that a retry cannot fix.
    """
    while True:
        try:
            await client.connect()
            return
        except EtcdMisused as error:
            raise StartupError(str(error)) from error
        except EtcdError as error:
            waits(error)
            await asyncio.sleep(RECONNECT_PAUSE_S)


def _pause_s(failures: int, members: int) -> float:
    """The pause before the next attempt: 0 before another member, and longer each time that all have failed."""
    rounds, position = divmod(failures, members)
    if position:
        return 0.0
    longest = min(RETRY_PAUSE_S * 2.0 ** min(rounds, 10), LONGEST_PAUSE_S)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


def _status(response: Any) -> EtcdStatus:
    header = response.header
    return EtcdStatus(
        header.cluster_id,
        header.member_id,
        header.revision,
        response.version,
        response.leader,
        tuple(response.errors),
    )
