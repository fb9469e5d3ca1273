"""Enforce ACLs on the requests of clients: refuse a request, or the parts of it that its client may not access.

`AccessControl` has the rules of this process, and `ClientAccess` the permissions of one connection's client. These are
kept with the rules that they follow from, so that new rules apply at once. Routes of the compiled plain path that were
proven under earlier rules are forgotten at the next check (`has_changed`). Other threads check long control requests.

A `RequestAccess` checks the permissions of one request. Each refusal is counted, and logged a few times a minute for
each principal; one request logs only the first refusal of a kind. The security events list all of them when the request
is checked, in one event for each operation and kind of resource. With `dry_run` refusals are counted and reported but
not enforced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Self

import structlog

from kproxy.observe.metrics import DENIED
from kproxy.routing.split import NOTHING_REFUSED, Entry
from kproxy.security.acls import CLUSTER_NAME, Operation, Permissions, Resource, Rules
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.principals import ANONYMOUS, Principal
from kproxy_codec.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    TOPIC_AUTHORIZATION_FAILED,
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
    name_of,
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
# At most this many principals are counted by name; all others are counted together.
_MOST_NAMED: Final = 100


class AccessControl:
    """The rules of a process; `rules` returns the current ones."""

    def __init__(
        self,
        rules: Callable[[], Rules],
        counters: Counter[str],
        *,
        dry_run: bool = False,
        events: SecurityEvents = NO_EVENTS,
    ) -> None:
        self._events = events
        self._rules = rules
        self._counters = counters
        self.is_enforced = not dry_run
        self._named: set[str] = set()
        kind = "dry_run" if dry_run else "denied"
        self._counted = {
            (operation, resource): f"access.{kind}.{operation.value}.{resource.value}"
            for operation in Operation
            for resource in Resource
        }

    @property
    def rules(self) -> Rules:
        return self._rules()

    def client(self) -> ClientAccess:
        """Return the permissions of a new connection's client."""
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
        """Count and log a refusal; return whether it is enforced (False in a dry run)."""
        self._counters[self._counted[operation, resource]] += 1
        if self.is_enforced:
            named = str(principal)
            if len(self._named) < _MOST_NAMED:
                self._named.add(named)
            self._counters[DENIED + (named if named in self._named else "other")] += 1
        if not is_logged:
            return self.is_enforced
        told = {
            "most_a_minute": _LOGGED_A_MINUTE,
            "bounded_by": "principal",
            "principal": str(principal),
            "client": peer,
            "operation": operation.value,
            "resource": resource.value,
            "name": name[:249],
        }
        if self.is_enforced:
            log.warning("access denied", **told)
        else:
            log.warning("access would be denied", **told)
        return self.is_enforced

    def tell_denied(
        self, principal: Principal, peer: str, operation: Operation, resource: Resource, names: Iterable[str]
    ) -> None:
        """Append the refusals of a request to the security events."""
        self._events.tell(
            "denied",
            client=peer,
            principal=str(principal),
            operation=operation.value,
            resource=resource.value,
            names=list(names),
            error=name_of(ERRORS[resource]),
            dry_run=not self.is_enforced,
        )


class ClientAccess:
    """The permissions of one connection's client. `is_enforced`: refusals are enforced; False in a dry run."""

    def __init__(self, control: AccessControl) -> None:
        self.control = control
        self.is_enforced = control.is_enforced
        self.peer = "?"
        self.principal = ANONYMOUS
        # The permissions, with their rules and principal: one object, replaced whole, as a thread may still read the
        # old one.
        rules = control.rules
        self._found = rules, self.principal, rules.of(self.principal)
        self._looked_at = self._found[2]

    def authenticated(self, principal: Principal) -> None:
        """Set the client's principal."""
        self.principal = principal
        self._looked_at = self.current()

    def current(self) -> Permissions:
        """The permissions by the rules that were read last."""
        rules, principal = self.control.rules, self.principal
        of_rules, of_principal, permissions = self._found
        if rules is not of_rules or principal is not of_principal:
            permissions = rules.of(principal)
            self._found = rules, principal, permissions
        return permissions

    def has_changed(self) -> bool:
        """Whether the client's permissions have changed since the last check."""
        permissions = self.current()
        changed, self._looked_at = permissions is not self._looked_at, permissions
        return changed

    def allows(self, operation: Operation, resource: Resource, name: str) -> bool:
        """Whether the client may do this, in a request that needs only this permission; reports a refusal."""
        with RequestAccess(self) as access:
            return access.allows(operation, resource, name)

    def may_write(self, topic: bytes) -> bool:
        """Whether the compiled path may have a route to a topic; otherwise requests for it are checked one by one."""
        return self.current().allows(Operation.WRITE, Resource.TOPIC, text(topic))

    def may_read(self, topic: bytes) -> bool:
        """Whether the compiled path may repeat reads of a topic; otherwise each read is checked, and denials told."""
        return self.current().allows(Operation.READ, Resource.TOPIC, text(topic))

    def may_transact(self, transactional_id: bytes) -> bool:
        """Whether the compiled path may take requests with this transactional id; the others are checked one by one."""
        return self.current().allows(Operation.WRITE, Resource.TRANSACTIONAL_ID, text(transactional_id))

    # Requests with partitions

    def refused(self, operation: Operation, request: PartitionedRequest) -> Mapping[Entry, int]:
        """The entries of a request that its client may not access, each with its error code."""
        refused: dict[Entry, int] = {}
        with RequestAccess(self) as access:
            for place, topic in enumerate(request.topics):
                if request.is_nameless(topic):
                    # The id may be any topic's; the client asks again, and by then the name is known.
                    code = UNKNOWN_TOPIC_ID if self.is_enforced else 0
                else:
                    is_allowed = access.allows(operation, Resource.TOPIC, text(topic.name))
                    code = 0 if is_allowed else TOPIC_AUTHORIZATION_FAILED
                if code:
                    refused |= {(place, ordinal): code for ordinal in range(len(topic.partitions))}
        return refused or NOTHING_REFUSED

    def refused_writes(self, request: PartitionedRequest) -> Mapping[Entry, int]:
        """Like `refused`, for a produce request; without the right to its transactional id all entries are refused."""
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


class RequestAccess:
    """The permissions of one request's client. `end`, or leaving `with`, reports the refusals since the last report.

    One thread at a time uses it.
    """

    __slots__ = ("_client", "_denied", "is_enforced")

    def __init__(self, client: ClientAccess) -> None:
        self._client = client
        self.is_enforced = client.is_enforced
        # The names, each once, in order.
        self._denied: dict[tuple[Operation, Resource], dict[str, None]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Report the refusals."""
        client, denied, self._denied = self._client, self._denied, {}
        for (operation, resource), names in denied.items():
            client.control.tell_denied(client.principal, client.peer, operation, resource, names)

    def allows(self, operation: Operation, resource: Resource, name: str) -> bool:
        """Whether the client may do this; a refusal is counted, reported, and logged if it is the first of its kind."""
        return self._client.current().allows(operation, resource, name) or not self._refuse(operation, resource, name)

    def each(self, operation: Operation, resource: Resource) -> Callable[[str], bool]:
        """Return a function of a name that calls `allows` with it."""
        return partial(self.allows, operation, resource)

    def _refuse(self, operation: Operation, resource: Resource, name: str) -> bool:
        names = self._denied.setdefault((operation, resource), {})
        is_first = not names
        names[name] = None
        client = self._client
        return client.control.denied(client.principal, client.peer, operation, resource, name, is_logged=is_first)

    def permits(self, operation: Operation, resource: Resource, name: str) -> bool:
        """Like `allows`, for a resource that the request does not name: nothing is counted."""
        return self._client.current().allows(operation, resource, name) or not self.is_enforced

    def may_create(self, topic: str) -> bool:
        """Whether the client may create a topic: by a permission for it, or for the cluster."""
        if self.permits(Operation.CREATE, Resource.CLUSTER, CLUSTER_NAME):
            return True
        return self.permits(Operation.CREATE, Resource.TOPIC, topic)

    def may_write_some_topic(self) -> bool:
        """Whether the client may be an idempotent producer, as in Kafka: it may write to the cluster or some topic."""
        permissions = self._client.current()
        if permissions.allows_any(Operation.WRITE, Resource.TOPIC):
            return True
        return self.allows(Operation.WRITE, Resource.CLUSTER, CLUSTER_NAME)


def text(name: bytes) -> str:
    """Decode a name from the wire; a name that is not valid text equals no rule's name."""
    return name.decode(errors="replace")
