"""Choose a member of an etcd cluster for each call, and detect failed members.

A member has one channel for all calls; every stream has a channel of its own (see `stream.py`). All go to the member
whose last failure is oldest, and so to the same member until it fails. The initial order is random, so that many
proxies spread over the members. A failed member is tried again only when the others have failed since.

States of a member's channel: NONE --a call--> OPEN --gRPC reports a failure--> RETIRED --the last call ends--> closed.

Invariants
1. A call is handed to gRPC only after the channel is connected and the member has answered over it. A call that fails
   before that is `untouched`, and so is a call that etcd refused before proposing it.
2. A member that does not answer a call is asked for its status, over the same channel. If it does not answer this
   either, or has no leader, it has failed: a hung member delays a call by these two times at most, and no later call. A
   busy member answers with its status, and the call continues to wait.
3. A channel on which gRPC, and not etcd itself, reported a failure of the member is never used for a new call: the next
   call opens a new channel, with the present certificates and addresses.
4. A request that a member forwarded to a leader that died is lost silently. So a call has failed if it began under
   another leader and has no answer PATIENCE_S after the change was detected.
5. This module hands no call to gRPC twice; `client.py` decides about retries.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from kproxy.etcd.credentials import TOKEN_FIELD, TlsCredentials
from kproxy.etcd.endpoints import Endpoint
from kproxy.etcd.errors import (
    EtcdError,
    EtcdUnavailable,
    cancelled_by_grpc,
    from_rpc_error,
    is_not_begun,
    is_of_etcd,
    is_token_refused,
    shorten,
)
from kproxy.etcd.messages import PACKAGE, rpc

# The time without an answer after which a member is asked for its status, and the time it has to answer. Each is at
# most a quarter of the call's timeout.
PATIENCE_S = 1.0
LOOK_TIMEOUT_S = 1.0
# The time to open a connection, TLS included.
CONNECT_TIMEOUT_S = 2.0

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # This client decides about retries; a TXT record must not.
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The shortest back-off is also the timeout of one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 1_500),
    ("grpc.max_reconnect_backoff_ms", 1_500),
    # Detect a connection that died silently. etcd forbids pings more often than every 5 s, or without an open call.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Otherwise channels of one process with the same target would share a connection, and its failure.
    ("grpc.use_local_subchannel_pool", 1),
)

_UNARY = {
    "Range": "KV",
    "Put": "KV",
    "DeleteRange": "KV",
    "Txn": "KV",
    "LeaseGrant": "Lease",
    "LeaseRevoke": "Lease",
    "Status": "Maintenance",
    "Authenticate": "Auth",
}

_MEMBER_FAILED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class CallFailed(Exception):
    """A call that failed at one member, with gRPC's error.

    `untouched`: the call had no effect. `elsewhere`: try another member. `token_refused`: try another token.
    """

    def __init__(self, error: Any, *, untouched: bool) -> None:
        self.reason = shorten(error.details() or error.code().name)
        super().__init__(self.reason)
        self.error = error
        self.elsewhere = error.code() in _MEMBER_FAILED
        self.token_refused = is_token_refused(error.details() or "")
        self.untouched = untouched or self.token_refused

    def as_etcd_error(self, name: str, endpoints: str, *, write: bool) -> EtcdError:
        """Convert it to the error for the caller of `name`; `write`: the call is a write."""
        return from_rpc_error(self.error, name, endpoints, write=write and not self.untouched)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call. `hasleader` makes a member without a leader refuse at once instead of waiting."""
    leader = ("hasleader", "true")
    return (leader, (TOKEN_FIELD, token)) if token else (leader,)


class _Channel:
    """One connection to one member, for calls."""

    def __init__(self, channel: Any) -> None:
        self.grpc = channel
        self.calls = {
            name: channel.unary_unary(
                f"/{PACKAGE}.{service}/{name}",
                request_serializer=getattr(rpc, f"{name}Request").SerializeToString,
                response_deserializer=getattr(rpc, f"{name}Response").FromString,
            )
            for name, service in _UNARY.items()
        }
        self.users = 0
        self.retired = False


class Member:
    """One member. `failed_at` is when it last failed, on the monotonic clock."""

    def __init__(self, endpoint: Endpoint, members: Members) -> None:
        self.endpoint = endpoint
        self.failed_at = float("-inf")
        self._members = members
        self._channel: _Channel | None = None
        self._term = 0

    async def call(self, name: str, request: Any, timeout_s: float, token: str) -> Any:
        """Make one call to this member. Raises CallFailed."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        channel = await self._enter()
        try:
            if channel.grpc.get_state() is not grpc.ChannelConnectivity.READY:
                # The error says why a connection was refused, or that there is no leader.
                trouble = await self._trouble(channel, min(timeout_s, CONNECT_TIMEOUT_S), token)
                if trouble is not None:
                    raise self._failed(channel, trouble, untouched=True) from trouble
            left = max(deadline - asyncio.get_running_loop().time(), 0.001)
            calling = asyncio.ensure_future(_call(channel, name, request, left, metadata(token)))
            try:
                return await self._answer(channel, calling, timeout_s, token)
            finally:
                calling.cancel()
        finally:
            await self._leave(channel)

    async def look(self, timeout_s: float) -> None:
        """Connect, and check that the member is etcd, even if it has no leader. Raises CallFailed."""
        channel = await self._enter()
        try:
            await _call(channel, "Status", rpc.StatusRequest(), timeout_s, ())
        except grpc.aio.AioRpcError as error:
            failure = self._failed(channel, error, untouched=True)
            # etcd 3.6 refuses to give its status without a token, but this is an answer too.
            if not failure.token_refused:
                raise failure from error
        finally:
            await self._leave(channel)

    async def _answer(self, channel: _Channel, calling: asyncio.Future[Any], timeout_s: float, token: str) -> Any:
        patience_s, look_s = min(PATIENCE_S, timeout_s / 4), min(LOOK_TIMEOUT_S, timeout_s / 4)
        term, asked_since = self._term, 0
        while True:
            await asyncio.wait((calling,), timeout=patience_s)
            if not calling.done():
                trouble = await self._trouble(channel, look_s, token)
                asked_since += self._term != term
                if trouble is None and asked_since > 1:
                    trouble = _error(grpc.StatusCode.UNAVAILABLE, "etcdserver: another leader was elected meanwhile")
                if trouble is None or calling.done():
                    continue
                raise self._failed(channel, trouble, untouched=False)
            try:
                response = calling.result()
                self._term = response.header.raft_term
                return response
            except grpc.aio.AioRpcError as error:
                raise self._failed(channel, error, untouched=is_not_begun(error)) from error

    async def _trouble(self, channel: _Channel, timeout_s: float, token: str) -> grpc.aio.AioRpcError | None:
        """Ask the member for its status, over the channel of the call (invariant 2); return its error if it failed."""
        try:
            status = await _call(channel, "Status", rpc.StatusRequest(), timeout_s, metadata(token))
            self._term = status.header.raft_term
        except grpc.aio.AioRpcError as error:
            # Any other error, such as a refusal, comes from a live member.
            return error if error.code() in _MEMBER_FAILED else None
        return None

    def _failed(self, channel: _Channel, error: Any, *, untouched: bool) -> CallFailed:
        """Make a CallFailed; if the member failed, put it last and retire the channel."""
        failure = CallFailed(error, untouched=untouched)
        if failure.elsewhere:
            self._members.failed(self)
            if not is_of_etcd(error):
                channel.retired = True
                if self._channel is channel:
                    self._channel = None
        return failure

    async def _enter(self) -> _Channel:
        channel = self._channel
        if channel is None:
            opened = _Channel(await self._members.open_channel(self.endpoint))
            # If another call has opened a channel meanwhile, this one serves only its own call.
            opened.retired = self._channel is not None
            self._channel = self._channel or opened
            channel = opened
        channel.users += 1
        return channel

    async def _leave(self, channel: _Channel) -> None:
        channel.users -= 1
        if channel.retired and channel.users == 0:
            await channel.grpc.close(grace=None)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.retired = True
            await channel.grpc.close(grace=None)


class Members:
    """All members of one cluster. `named` is the text by which errors name them.

    `max_message_bytes` is that of the client.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        credentials: TlsCredentials | None,
        *,
        named: str,
        server_name: str,
        max_message_bytes: int,
    ) -> None:
        self.endpoints = named
        self._credentials = credentials
        self._closed = False
        self._options: tuple[tuple[str, str | int], ...] = (
            *_CHANNEL_OPTIONS,
            ("grpc.max_receive_message_length", max_message_bytes),
        )
        if server_name:
            self._options += (("grpc.ssl_target_name_override", server_name), ("grpc.default_authority", server_name))
        self._members = [Member(endpoint, self) for endpoint in endpoints]
        random.shuffle(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def in_order(self) -> list[Member]:
        """The members in the order in which to try them."""
        return sorted(self._members, key=lambda member: member.failed_at)

    def failed(self, member: Member) -> None:
        """Put the member last."""
        member.failed_at = time.monotonic()

    async def open_channel(self, endpoint: Endpoint, *, window_bytes: int = 0) -> Any:
        """Open a channel that shares no connection with others. Raises EtcdError.

        `window_bytes`: the bytes that etcd may send before they are read; 0: gRPC decides.
        """
        credentials = None if self._credentials is None else await self._credentials.current()
        if self._closed:
            raise EtcdUnavailable(f"The etcd client for {self.endpoints} is closed.")
        options = self._options
        if window_bytes:
            # Otherwise gRPC measures the connection and lets the window grow to megabytes.
            options += (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", window_bytes))
        if credentials is None:
            return grpc.aio.insecure_channel(endpoint.target, options=options)
        return grpc.aio.secure_channel(endpoint.target, credentials, options=options)

    async def close(self) -> None:
        """End every call; pending ones raise EtcdUnavailable."""
        self._closed = True
        for member in self._members:
            await member.close()


async def _call(
    channel: _Channel, name: str, request: Any, timeout_s: float, sent_with: tuple[tuple[str, str], ...]
) -> Any:
    try:
        return await channel.calls[name](request, timeout=timeout_s, metadata=sent_with, wait_for_ready=False)
    except asyncio.CancelledError:
        if cancelled_by_grpc():
            raise _error(grpc.StatusCode.CANCELLED, "the client was closed") from None
        raise


def _error(code: grpc.StatusCode, details: str) -> Any:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
