"""Enforce the rules on the connections of clients: which partitions are refused, and which requests.

`AccessControl` has the rules of this process, `ClientAccess` is one connection's view of them. Its permissions are kept
with the rules that they follow, so that new rules count at once; routes of the compiled plain path, which were proven
under earlier ones, are forgotten at the next check (`has_changed`). Long requests are checked on other threads.

Each refusal is counted, and logged a few times a minute for each principal; of the many that one request may have, the
first alone is logged. With `dry_run` refusals are counted and logged but not enforced.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kproxy.routing.split import NOTHING_REFUSED, Entry
from kproxy.security.acls import CLUSTER_NAME, Operation, Permissions, Resource, Rules
from kproxy.security.principals import ANONYMOUS, Principal
from kproxy_codec.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    TOPIC_AUTHORIZATION_FAILED,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
)
from kproxy_codec.partitioned import PartitionedRequest
from kproxy_codec.primitives import skip_string

log = structlog.get_logger(__name__)

ERRORS: Final[Mapping[Resource, int]] = {
    Resource.TOPIC: TOPIC_AUTHORIZATION_FAILED,
    Resource.GROUP: GROUP_AUTHORIZATION_FAILED,
    Resource.TRANSACTIONAL_ID: TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    Resource.CLUSTER: CLUSTER_AUTHORIZATION_FAILED,
}
_LOGGED_A_MINUTE: Final = 5


class AccessControl:
    """The rules of a process; `rules` returns those that were read last."""

    def __init__(self, rules: Callable[[], Rules], counters: Counter[str], *, dry_run: bool = False) -> None:
        self._rules = rules
        self._counters = counters
        self._dry_run = dry_run
        kind = "dry_run" if dry_run else "denied"
        self._counted = {
            (operation, resource): f"access.{kind}.{operation.value}.{resource.value}"
            for operation in Operation
            for resource in Resource
        }
        # Whoever reads a long message of a client has it meanwhile.
        self.turn = asyncio.Lock()

    @property
    def rules(self) -> Rules:
        return self._rules()

    def client(self) -> ClientAccess:
        """The view of a new connection."""
        return ClientAccess(self)

    def denied(
        self,
        principal: Principal,
        peer: str,
        operation: Operation,
        resource: Resource,
        name: str,
        *,
        is_logged: bool = True,
    ) -> bool:
        """Count and log a refusal; return whether it is one."""
        self._counters[self._counted[operation, resource]] += 1
        if not is_logged:
            return not self._dry_run
        told = {
            "most_a_minute": _LOGGED_A_MINUTE,
            "bounded_by": "principal",
            "principal": str(principal),
            "client": peer,
            "operation": operation.value,
            "resource": resource.value,
            "name": name[:249],
        }
        if self._dry_run:
            log.warning("access would be denied", **told)
            return False
        log.warning("access denied", **told)
        return True

    @property
    def is_enforced(self) -> bool:
        return not self._dry_run


class ClientAccess:
    """The permissions of one connection's client."""

    def __init__(self, control: AccessControl) -> None:
        self._control = control
        self.peer = "?"
        self.principal = ANONYMOUS
        # The permissions, with the rules and the principal that they are of: one object, which is replaced whole,
        # because a thread may find older ones at the same time.
        rules = control.rules
        self._found = rules, self.principal, rules.of(self.principal)
        self._looked_at = self._found[2]

    def authenticated(self, principal: Principal) -> None:
        """Set the client's principal."""
        self.principal = principal
        self._looked_at = self._current()

    @property
    def turn(self) -> asyncio.Lock:
        """That of the process: see AccessControl."""
        return self._control.turn

    def _current(self) -> Permissions:
        rules, principal = self._control.rules, self.principal
        of_rules, of_principal, permissions = self._found
        if rules is not of_rules or principal is not of_principal:
            permissions = rules.of(principal)
            self._found = rules, principal, permissions
        return permissions

    def has_changed(self) -> bool:
        """Whether the client's permissions have changed since the last check."""
        permissions = self._current()
        changed, self._looked_at = permissions is not self._looked_at, permissions
        return changed

    def allows(self, operation: Operation, resource: Resource, name: str) -> bool:
        """Whether the client may do this; a refusal is counted and logged."""
        if self._current().allows(operation, resource, name):
            return True
        return not self._control.denied(self.principal, self.peer, operation, resource, name)

    def each(self, operation: Operation, resource: Resource) -> Callable[[str], bool]:
        """Return `allows` for the names of one request: the first refusal is logged, all are counted."""
        is_logged = True

        def allows(name: str) -> bool:
            nonlocal is_logged
            if self._current().allows(operation, resource, name):
                return True
            logs, is_logged = is_logged, False
            return not self._control.denied(self.principal, self.peer, operation, resource, name, is_logged=logs)

        return allows

    def permits(self, operation: Operation, resource: Resource, name: str) -> bool:
        """The same for something that the client has not asked for by name: nothing is counted."""
        return self._current().allows(operation, resource, name) or not self._control.is_enforced

    @property
    def is_enforced(self) -> bool:
        """Whether refusals count; see AccessControl."""
        return self._control.is_enforced

    def may_create(self, topic: str) -> bool:
        """Whether the client may create a topic: by a permission for it, or for the cluster."""
        if self.permits(Operation.CREATE, Resource.CLUSTER, CLUSTER_NAME):
            return True
        return self.permits(Operation.CREATE, Resource.TOPIC, topic)

    def may_write_some_topic(self) -> bool:
        """Whether the client may be an idempotent producer, as in Kafka: it may write to the cluster or some topic."""
        permissions = self._current()
        if permissions.allows(Operation.WRITE, Resource.CLUSTER, CLUSTER_NAME):
            return True
        if permissions.allows_any(Operation.WRITE, Resource.TOPIC):
            return True
        return not self._control.denied(self.principal, self.peer, Operation.WRITE, Resource.CLUSTER, CLUSTER_NAME)

    def may_write(self, topic: bytes) -> bool:
        """Whether a route of the compiled path may lead to a topic; otherwise its requests are checked one by one."""
        return self._current().allows(Operation.WRITE, Resource.TOPIC, text(topic))

    # Requests with partitions

    def refused(self, operation: Operation, request: PartitionedRequest) -> Mapping[Entry, int]:
        """The entries of a request that its client may not have, each with its error code."""
        refused: dict[Entry, int] = {}
        allows = self.each(operation, Resource.TOPIC)
        for place, topic in enumerate(request.topics):
            if request.is_nameless(topic):
                # It may be any topic; by the time when the client asks again, its name is known.
                code = UNKNOWN_TOPIC_ID if self._control.is_enforced else 0
            else:
                code = 0 if allows(text(topic.name)) else TOPIC_AUTHORIZATION_FAILED
            if code:
                refused |= {(place, ordinal): code for ordinal in range(len(topic.partitions))}
        return refused or NOTHING_REFUSED

    def refused_writes(self, request: PartitionedRequest) -> Mapping[Entry, int]:
        """The same for a produce request; without the right to its transactional id all entries are refused."""
        header = request.header
        start, end, _ = skip_string(
            request.frame, header.body_offset, len(request.frame), compact=request.flexible, nullable=True
        )
        if start >= 0:
            name = text(bytes(request.frame[start:end]))
            if not self.allows(Operation.WRITE, Resource.TRANSACTIONAL_ID, name):
                return {
                    (place, ordinal): TRANSACTIONAL_ID_AUTHORIZATION_FAILED
                    for place, topic in enumerate(request.topics)
                    for ordinal in range(len(topic.partitions))
                }
        return self.refused(Operation.WRITE, request)


def text(name: bytes) -> str:
    """Decode a name from the wire; a name that is not valid text equals no rule's name."""
    return name.decode(errors="replace")
