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


class LeaseLost(EtcdError):
    """The lease does not exist any more, and none of the keys that stood on it."""


class Compacted(EtcdError):
    """The asked revision has been compacted away: read the present and go on from there."""


class TooLarge(EtcdError):
    """An answer is longer than this client takes in one message: ask for less at a time."""


def from_rpc_error(error: Any, call: str, endpoints: str, *, write: bool) -> EtcdError:
    """The EtcdError for a gRPC error. etcd tells its own errors by their text; the codes are those of its rpctypes."""
    code, details = error.code(), shorten(error.details() or "")
    if code == grpc.StatusCode.UNAVAILABLE:
        return EtcdUnavailable(f"etcd at {endpoints} is not available for {call}: {details}", maybe_applied=write)
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return EtcdUnavailable(f"etcd at {endpoints} did not answer {call} in time: {details}", maybe_applied=write)
    if code == grpc.StatusCode.OUT_OF_RANGE and "compacted" in details:
        return Compacted(f"etcd at {endpoints} has compacted the revision that {call} asked for")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return TooLarge(f"etcd at {endpoints} and {call}: {details}")
    if code == grpc.StatusCode.NOT_FOUND and "lease not found" in details:
        return LeaseLost(f"etcd at {endpoints} does not know the lease of {call}")
    # A cancelled or unknown end says nothing about what the server did; every other code is etcd's refusal.
    unclear = code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    return EtcdError(f"etcd at {endpoints} refused {call}: {code.name} {details}", maybe_applied=write and unclear)


def cancelled_by_grpc() -> bool:
    """Whether a CancelledError just caught is gRPC's word for a closed channel, not this task's own cancellation."""
    task = asyncio.current_task()
    return task is None or not task.cancelling()


def shorten(details: str) -> str:
    """gRPC's own words without its prefix and at most a line long."""
    words = details.rsplit("last error: ", 1)[-1].removeprefix("UNKNOWN: ")
    return words if len(words) <= 200 else words[:197] + "..."
