"""Access control: the operations that a principal may do on resources. Pure rules.

As in Kafka a denial wins over any permission, and nothing is allowed without a rule. Read, write, delete and
alter of a resource include its description; `admin` includes every operation. A rule is for a user, for every user
(`User:*`), or for a group.

Invariants
1. `Permissions.allows` depends on the rules and the principal alone; its cache has at most MOST_CACHED decisions.
2. The permissions of at most MOST_PRINCIPALS are kept; connections of one principal share theirs.
3. Of two rules for the same name, operation and principal the denial counts, whatever their order and form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from kproxy.config.access import AclSection
from kproxy.security.principals import GROUP, USER, Principal

MOST_CACHED: Final = 10_000
MOST_PRINCIPALS: Final = 1_000
EVERY_USER: Final = "User:*"


class Operation(Enum):
    """An action on a resource, as an ACL grants it."""

    READ = "read"
    WRITE = "write"
    DESCRIBE = "describe"
    CREATE = "create"
    DELETE = "delete"
    ALTER = "alter"
    OWN = "own"
    ADMIN = "admin"


class Resource(Enum):
    """A kind of resource that an ACL protects."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional id"
    CLUSTER = "cluster"


CLUSTER_NAME: Final = "kafka-cluster"
"""The name of the only resource of its kind, as in Kafka."""
_DESCRIBING: Final = frozenset({Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER})


class Acl(NamedTuple):
    """One rule for one pattern. `subject` is `User:NAME`, `User:*` or `Group:NAME`."""

    subject: str
    is_denial: bool
    operations: frozenset[Operation]
    resource: Resource
    name: str
    is_prefix: bool

    def grants(self, operation: Operation) -> bool:
        """Whether its operations include this one."""
        if operation in self.operations or Operation.ADMIN in self.operations:
            return True
        # A denial of reading does not deny the description, as in Kafka.
        return operation is Operation.DESCRIBE and not self.is_denial and not _DESCRIBING.isdisjoint(self.operations)

    def covers(self, name: str) -> bool:
        return name.startswith(self.name) if self.is_prefix else name == self.name


def acls_of(sections: Iterable[AclSection]) -> list[Acl]:
    """The rules of `[[acls]]`, one for each pattern."""
    acls = []
    for given in sections:
        operations = frozenset(Operation(name) for name in given.operations)
        named = {
            Resource.TOPIC: given.topics,
            Resource.GROUP: given.groups,
            Resource.TRANSACTIONAL_ID: given.transactional_ids,
            Resource.CLUSTER: [CLUSTER_NAME] if given.cluster else None,
        }
        for resource, names in named.items():
            for name in names or ():
                is_prefix = name.endswith("*")
                pattern = name[:-1] if is_prefix else name
                acls.append(Acl(given.principal, given.effect == "deny", operations, resource, pattern, is_prefix))
    return acls


class Rules:
    """All rules."""

    def __init__(self, acls: Iterable[Acl]) -> None:
        self._by_subject: dict[str, list[Acl]] = {}
        self._known: dict[Principal, Permissions] = {}
        for acl in acls:
            self._by_subject.setdefault(acl.subject, []).append(acl)

    def of(self, principal: Principal) -> Permissions:
        """Return the permissions of a principal."""
        known = self._known.get(principal)
        if known is None:
            subjects = [EVERY_USER, USER + principal.name, *(GROUP + group for group in principal.groups)]
            acls = [acl for subject in dict.fromkeys(subjects) for acl in self._by_subject.get(subject, ())]
            if len(self._known) >= MOST_PRINCIPALS:
                self._known.clear()
            known = self._known[principal] = Permissions(acls)
        return known


class _Patterns(NamedTuple):
    literals: frozenset[str]
    prefixes: tuple[str, ...]

    def cover(self, name: str) -> bool:
        # An empty tuple of prefixes matches nothing.
        return name in self.literals or name.startswith(self.prefixes)


class _Decided(NamedTuple):
    allowed: _Patterns
    denied: _Patterns


class Permissions:
    """The permissions of one principal, with a cache of decisions."""

    def __init__(self, acls: Iterable[Acl]) -> None:
        self._acls = list(acls)
        self._compiled: dict[tuple[Operation, Resource], _Decided] = {}
        self._cache: dict[tuple[Operation, Resource, str], bool] = {}

    def allows(self, operation: Operation, resource: Resource, name: str) -> bool:
        """Whether it may do this."""
        key = (operation, resource, name)
        known = self._cache.get(key)
        if known is None:
            decided = self._decided(operation, resource)
            known = decided.allowed.cover(name) and not decided.denied.cover(name)
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            self._cache[key] = known
        return known

    def allows_any(self, operation: Operation, resource: Resource) -> bool:
        """Whether there is a resource of this kind with which it may do this, as far as the rules name any."""
        allowed, denied = self._decided(operation, resource)
        if any(not denied.cover(name) for name in allowed.literals):
            return True
        # Everything below an allowed prefix is denied only if the prefix itself is.
        return any(not prefix.startswith(denied.prefixes) for prefix in allowed.prefixes)

    def _decided(self, operation: Operation, resource: Resource) -> _Decided:
        key = (operation, resource)
        found = self._compiled.get(key)
        if found is None:
            fitting = [acl for acl in self._acls if acl.resource is resource and acl.grants(operation)]
            found = self._compiled[key] = _Decided(
                _patterns(acl for acl in fitting if not acl.is_denial),
                _patterns(acl for acl in fitting if acl.is_denial),
            )
        return found

    def reasons(self, operation: Operation, resource: Resource, name: str) -> Mapping[str, list[Acl]]:
        """The rules that `allow` and those that `deny` this."""
        fitting = [acl for acl in self._acls if acl.resource is resource and acl.grants(operation) and acl.covers(name)]
        return {
            "allow": [acl for acl in fitting if not acl.is_denial],
            "deny": [acl for acl in fitting if acl.is_denial],
        }


def _patterns(acls: Iterable[Acl]) -> _Patterns:
    fitting = list(acls)
    return _Patterns(
        frozenset(acl.name for acl in fitting if not acl.is_prefix),
        tuple(sorted({acl.name for acl in fitting if acl.is_prefix})),
    )
