"""Define the errors that applications get from claims; each message says what the application can do."""

from __future__ import annotations

from kproxy_codec.error_codes import (
    COORDINATOR_NOT_AVAILABLE,
    FENCED_INSTANCE_ID,
    GROUP_AUTHORIZATION_FAILED,
    INVALID_REQUEST,
    REQUEST_TIMED_OUT,
    THROTTLING_QUOTA_EXCEEDED,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
    name_of,
)
from kproxy_codec.own import WHOLE_GROUP

_SENTENCES = {
    FENCED_INSTANCE_ID: "{what} is owned with a generation above {generation}; claim it with a higher one to take it "
    "over, or with stand_by=True to wait until it is free.",
    REQUEST_TIMED_OUT: "{what} is not granted yet: not every proxy and broker has confirmed that nothing of an earlier "
    "owner is on its way any more; ask again, for longer.",
    COORDINATOR_NOT_AVAILABLE: "{what} cannot be claimed now, as the proxies do not reach etcd; look at etcd and ask "
    "again.",
    INVALID_REQUEST: "{what} cannot be claimed so: this client has claimed in another group on the same connection, or "
    "a name is empty; use one client for each group.",
    UNKNOWN_TOPIC_OR_PARTITION: "{what} is refused, as no broker has such a partition; look at its number, or add "
    "partitions to the topic, and ask again.",
    THROTTLING_QUOTA_EXCEEDED: "{what} cannot be claimed, as etcd has as many claims as it may; end what claims so "
    "much and ask again.",
    GROUP_AUTHORIZATION_FAILED: "{what} may not be claimed by this user; ask for the right to this group.",
    TOPIC_AUTHORIZATION_FAILED: "{what} may not be claimed by this user; ask for the right to write to this topic.",
}
NOT_OFFERED = (
    "Nothing can be owned here: what this client is connected to does not offer the Own API; connect it to a kproxy "
    "that uses etcd."
)


class OwnError(Exception):
    """A claim failed, or its ownership is lost."""


class OwnNotOffered(OwnError):
    """The client does not speak to a kproxy that offers the Own API."""


class OwnRefused(OwnError):
    """A claim was answered with `error_code`, a Kafka error code (kproxy_codec.error_codes). Nothing is claimed."""

    def __init__(self, error_code: int, group: str, resource: str, generation: int) -> None:
        what = f"{'All of it' if resource == WHOLE_GROUP else resource} of the group {group}"
        sentence = _SENTENCES.get(error_code, "{what} is refused with {name}.")
        super().__init__(sentence.format(what=what, generation=generation, name=name_of(error_code)))
        self.error_code = error_code
        self.group = group
        self.resource = resource
        self.generation = generation


class Severed(OwnError):
    """The ownership is lost. Records that were sent and not acknowledged may have been written, or not."""

    def __init__(self, group: str, resources: tuple[str, ...], sentence: str) -> None:
        super().__init__(sentence)
        self.group = group
        self.resources = resources


class ConnectionLost(Exception):
    """A connection ended or could not be opened; the claimant asks again. Never raised to applications."""
