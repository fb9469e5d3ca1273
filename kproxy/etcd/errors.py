"""What may go wrong with etcd, and the one place where gRPC's errors become ours."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc


class EtcdError(Exception):
    """etcd refused a call, or answered something that cannot be used.

    `maybe_applied` is true where the call was a write and nobody knows whether it took effect: re-read before deciding.
    """

    def __init__(self, message: str, *, maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class EtcdUnavailable(EtcdError):
    """No usable answer: nobody listens, nobody answered in time, or the cluster has no leader."""


class EtcdMisused(EtcdUnavailable):
    """What is configured cannot work, however often it is tried: an address that is none, somebody who is no etcd."""


class EtcdDenied(EtcdError):
    """The user is known and may not do this."""


class LeaseLost(EtcdError):
    """The lease does not exist any more, and none of the keys that stood on it."""


class Compacted(EtcdError):
    """The asked revision has been compacted away: read the present and go on from there."""


class TooLarge(EtcdError):
    """An answer is longer than this client takes in one message: ask for less at a time."""


# With these etcd turns a call away at its door: before anything of it was proposed to the cluster.
_NOT_BEGUN = ("etcdserver: no leader", "etcdserver: rpc not supported for learner")
# And with these before anything of it was applied; another token may do.
_TOKEN_REFUSED = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    # The same, as etcd up to 3.5.1 at least says it, with the code UNKNOWN.
    "auth: revision in header is old",
    "etcdserver: user name is empty",
)


def is_not_begun(error: Any) -> bool:
    """Whether a gRPC error says that nothing was done, and that another member may do it."""
    return (error.details() or "").startswith(_NOT_BEGUN)


def is_token_refused(details: str) -> bool:
    """Whether etcd's words say that it did not take the token, or wants one."""
    return any(words in details for words in _TOKEN_REFUSED)


def is_of_etcd(error: Any) -> bool:
    """Whether etcd said this over a sound connection, and not gRPC for want of one."""
    return (error.details() or "").startswith("etcdserver: ")


def from_rpc_error(error: Any, call: str, endpoints: str, *, write: bool) -> EtcdError:
    """The EtcdError for a gRPC error. etcd tells its own errors by their text; the codes are those of its rpctypes."""
    code, details = error.code(), shorten(error.details() or "")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return EtcdMisused(f"What answers at {endpoints} is not etcd: {details}.")
    if is_token_refused(details) or "authentication failed" in details:
        return EtcdMisused(_WHO_ARE_YOU.format(endpoints, details.removeprefix("etcdserver: ")))
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return EtcdDenied(
            f"etcd at {endpoints} does not permit {call} to this user: give its role the keys ({details})"
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return EtcdUnavailable(f"etcd at {endpoints} is not available for {call}: {details}", maybe_applied=write)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return EtcdUnavailable(f"etcd at {endpoints} did not answer {call} in time: {details}", maybe_applied=write)
    if code == grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
        return Compacted(f"etcd at {endpoints} has compacted the revision that {call} asked for")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return TooLarge(f"etcd at {endpoints} and {call}: {details}")
    if code == grpc.StatusCode.NOT_FOUND and "lease not found" in details:
        return LeaseLost(f"etcd at {endpoints} does not know the lease of {call}")
    # An unknown end says nothing about what the server did; every other code is etcd's refusal.
    unclear = code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    return EtcdError(f"etcd at {endpoints} refused {call}: {code.name} {details}", maybe_applied=write and unclear)


_WHO_ARE_YOU = (
    "etcd at {} does not take this user ({}): give the name with --etcd-username "
    "and the password with --etcd-password-file or KPROXY_ETCD__PASSWORD."
)


def cancelled_by_grpc() -> bool:
    """Whether a CancelledError just caught is gRPC's word for a closed channel, not this task's own cancellation."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def shorten(details: str) -> str:
    """gRPC's own words without its prefix and at most a line long."""
    words = details.rsplit("last error: ", 1)[-1].removeprefix("UNKNOWN: ")
    return words if len(words) <= 200 else words[:197] + "..."
