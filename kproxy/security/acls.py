"""Decide by rules, as pure functions, which operations a principal may do on resources.

As in Kafka, a denial overrides any permission, and nothing is allowed without a rule. To allow read, write, delete or
alter of a resource allows describe too, but to deny one of them does not deny describe; `admin` includes every
operation. A rule is for a user, for every user (`User:*`), or for a group.

Invariants
1. `Permissions.allows` depends on the rules and the principal alone. Its cost grows with the logarithm of the number of
   rules, and the names in its arguments are not kept.
2. The permissions of at most MOST_PRINCIPALS are kept; connections of one principal share theirs. They stay the same
   object if a change of rules does not concern them.
3. If two rules concern the same name, operation and principal, the denial applies, in any order and form.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from kproxy.config.access import AclSection
from kproxy.security.principals import EVERY_USER, GROUP, USER, Principal

MOST_PRINCIPALS: Final = 1_000


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

    # The hash of Enum is Python code, and each decision computes it several times.
    __hash__ = object.__hash__


class Resource(Enum):
    """A kind of resource that an ACL protects."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional id"
    CLUSTER = "cluster"

    __hash__ = object.__hash__


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

    def __str__(self) -> str:
        effect, operations = (
            "deny" if self.is_denial else "allow",
            ",".join(sorted(each.value for each in self.operations)),
        )
        return f"{effect} {self.subject} {operations} {self.resource.value} {self.name}{'*' if self.is_prefix else ''}"

    def grants(self, operation: Operation) -> bool:
        """Whether the rule's operations include this one."""
        if operation in self.operations or Operation.ADMIN in self.operations:
            return True
        # As in Kafka, a rule that denies reading does not deny describing.
        return operation is Operation.DESCRIBE and not self.is_denial and not _DESCRIBING.isdisjoint(self.operations)

    def covers(self, name: str) -> bool:
        return name.startswith(self.name) if self.is_prefix else name == self.name


def acls_of(sections: Iterable[AclSection]) -> list[Acl]:
    """Return the rules of `[[acls]]`, one for each pattern."""
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
    """All rules. `before` has the earlier rules, whose unchanged parts are used again."""

    def __init__(self, acls: Iterable[Acl], before: Rules | None = None) -> None:
        grouped: dict[str, list[Acl]] = {}
        for acl in acls:
            grouped.setdefault(acl.subject, []).append(acl)
        earlier = before._subjects if before is not None else {}
        self._subjects: dict[str, _Subject] = {}
        for name, of_subject in grouped.items():
            found = earlier.get(name)
            self._subjects[name] = found if found is not None and found.acls == of_subject else _Subject(of_subject)
        self._earlier = before._known if before is not None else {}
        self._known: dict[Principal, Permissions] = {}

    def of(self, principal: Principal) -> Permissions:
        """Return the permissions of a principal."""
        known = self._known.get(principal)
        if known is None:
            names = dict.fromkeys((EVERY_USER, USER + principal.name, *(GROUP + group for group in principal.groups)))
            subjects = [self._subjects[name] for name in names if name in self._subjects]
            known = self._earlier.get(principal)
            if known is None or known.subjects != subjects:
                known = Permissions(subjects)
            if len(self._known) >= MOST_PRINCIPALS:
                self._known.clear()
            self._known[principal] = known
        return known


class _Patterns:
    """Literal names and prefixes. No prefix begins with another one, so that at most one fits a name."""

    __slots__ = ("literals", "prefixes")

    def __init__(self, acls: Iterable[Acl]) -> None:
        fitting = list(acls)
        self.literals = frozenset(acl.name for acl in fitting if not acl.is_prefix)
        self.prefixes: list[str] = []
        # In sorted order a prefix comes right before all names that begin with it.
        for prefix in sorted({acl.name for acl in fitting if acl.is_prefix}):
            if not self.prefixes or not prefix.startswith(self.prefixes[-1]):
                self.prefixes.append(prefix)

    def cover(self, name: str) -> bool:
        return name in self.literals or self.begin(name)

    def begin(self, name: str) -> bool:
        """Whether the name begins with one of the prefixes, of which only the last one up to the name can fit."""
        place = bisect_right(self.prefixes, name)
        return place > 0 and name.startswith(self.prefixes[place - 1])


class _Decided(NamedTuple):
    allowed: _Patterns
    denied: _Patterns


class _Subject:
    """The rules of one subject."""

    def __init__(self, acls: Sequence[Acl]) -> None:
        self.acls = acls
        self._decided: dict[tuple[Operation, Resource], _Decided] = {}

    def decided(self, operation: Operation, resource: Resource) -> _Decided:
        key = (operation, resource)
        found = self._decided.get(key)
        if found is None:
            fitting = [acl for acl in self.acls if acl.resource is resource and acl.grants(operation)]
            found = self._decided[key] = _Decided(
                _Patterns(acl for acl in fitting if not acl.is_denial),
                _Patterns(acl for acl in fitting if acl.is_denial),
            )
        return found


class Permissions:
    """The permissions of one principal, which are the rules of its subjects."""

    def __init__(self, subjects: Sequence[_Subject]) -> None:
        self.subjects = subjects
        self._decided: dict[tuple[Operation, Resource], list[_Decided]] = {}
        self._any: dict[tuple[Operation, Resource], bool] = {}

    def allows(self, operation: Operation, resource: Resource, name: str) -> bool:
        """Whether the principal may do this."""
        is_allowed = False
        for allowed, denied in self._of(operation, resource):
            if denied.cover(name):
                return False
            is_allowed = is_allowed or allowed.cover(name)
        return is_allowed

    def allows_any(self, operation: Operation, resource: Resource) -> bool:
        """Whether the principal may do this with any resource of this kind, as far as the rules name one."""
        key = (operation, resource)
        found = self._any.get(key)
        if found is None:
            decided = self._of(operation, resource)
            # Everything below an allowed prefix is denied only if the prefix itself is.
            found = self._any[key] = any(
                not any(each.denied.cover(name) for each in decided)
                for allowed, _ in decided
                for name in allowed.literals
            ) or any(
                not any(each.denied.begin(prefix) for each in decided)
                for allowed, _ in decided
                for prefix in allowed.prefixes
            )
        return found

    def _of(self, operation: Operation, resource: Resource) -> list[_Decided]:
        key = (operation, resource)
        found = self._decided.get(key)
        if found is None:
            found = self._decided[key] = [each.decided(operation, resource) for each in self.subjects]
        return found

    def reasons(self, operation: Operation, resource: Resource, name: str) -> Mapping[str, list[Acl]]:
        """Return the rules that `allow` and those that `deny` this."""
        fitting = [
            acl
            for subject in self.subjects
            for acl in subject.acls
            if acl.resource is resource and acl.grants(operation) and acl.covers(name)
        ]
        return {
            "allow": [acl for acl in fitting if not acl.is_denial],
            "deny": [acl for acl in fitting if acl.is_denial],
        }
