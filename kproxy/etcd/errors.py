"""Define the errors of the etcd client, and convert gRPC's errors to them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc


class EtcdError(Exception):
    """etcd refused a call, or gave an unusable answer.

    `maybe_applied`: the call was a write whose outcome is unknown, so re-read before you decide.
    """

    def __init__(self, message: str, *, maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class EtcdUnavailable(EtcdError):
    """No usable answer: nothing listens, a timeout, or no leader."""


class EtcdMisused(EtcdUnavailable):
    """The configuration cannot work, for example an invalid address, a wrong password, a server that is not etcd."""


class EtcdDenied(EtcdError):
    """etcd knows the user, but the user lacks the permission."""


class LeaseLost(EtcdError):
    """The lease and its keys do not exist any more."""


class Compacted(EtcdError):
    """The requested revision has been compacted: read the present state instead."""


class TooLarge(EtcdError):
    """An answer exceeds this client's message limit: ask for less."""


# The texts with which etcd refuses a call before it proposes anything to the cluster.
_NOT_BEGUN = ("etcdserver: no leader", "etcdserver: rpc not supported for learner")
# The texts with which etcd refuses a call before it applies anything; another token may work.
_TOKEN_REFUSED = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    # The same refusal in etcd up to 3.5.1 at least, with the code UNKNOWN.
    "auth: revision in header is old",
    "etcdserver: user name is empty",
)


def is_not_begun(error: Any) -> bool:
    """Whether the error shows that the call had no effect, so that another member may be asked."""
    return (error.details() or "").startswith(_NOT_BEGUN)


def is_token_refused(details: str) -> bool:
    """Whether etcd's error text says that it refused the token, or requires one."""
    return any(words in details for words in _TOKEN_REFUSED)


def is_of_etcd(error: Any) -> bool:
    """Whether the error is from etcd, and not from gRPC itself."""
    return (error.details() or "").startswith("etcdserver: ")


def from_rpc_error(error: Any, call: str, endpoints: str, *, write: bool) -> EtcdError:
    """Convert a gRPC error. etcd's own errors are recognized by the texts and codes of etcd's package rpctypes."""
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
    # After UNKNOWN or INTERNAL the server may have applied the write; every other code is a refusal by etcd.
    unclear = code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    return EtcdError(f"etcd at {endpoints} refused {call}: {code.name} {details}", maybe_applied=write and unclear)


_WHO_ARE_YOU = (
    "etcd at {} does not take this user ({}): give the name with --etcd-username "
    "and the password with --etcd-password-file or KPROXY_ETCD__PASSWORD."
)


def cancelled_by_grpc() -> bool:
    """Whether a CancelledError is from gRPC's closed channel, not this task."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def shorten(details: str) -> str:
    """gRPC's error text without its prefix, at most 200 characters."""
    words = details.rsplit("last error: ", 1)[-1].removeprefix("UNKNOWN: ")
    return words if len(words) <= 200 else words[:197] + "..."
