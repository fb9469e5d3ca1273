"""Hold all claims and members in a table that one mirror of etcd keeps current.

State: for each group its claims by resource, and the claim of the whole group; for each member its published state.

Invariants
1. Changes of claims and members are reported in their order in etcd, because they share a prefix and so a watcher. From
   `revision` R on the table has every member that existed at R and has not ended since.
2. The listener gets a change after the table has it, and the end of each batch after all its changes.
3. A snapshot is reported as the changes that lead to it. Changes that were undone before it are not reported.
4. A claim beyond MAX_CLAIMS and an invalid key or value are skipped, counted, and logged for MAX_LOGGED keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import structlog

from kproxy.claims.keys import OwnKeys, decode_claim, decode_member
from kproxy.claims.rules import Claim, Owner, latest
from kproxy.etcd import KeyValue, Snapshot, WatchEvent
from kproxy_codec.own import WHOLE_GROUP

MAX_CLAIMS: Final = 1_000_000
MAX_LOGGED: Final = 100
_NO_ROWS: Final[Mapping[str, TableRow]] = MappingProxyType({})

log = structlog.get_logger(__name__)


class TableRow(NamedTuple):
    """One claim; `client` and `since` (ms since 1970) are shown to people."""

    group: str
    resource: str
    owner: Owner
    generation: int
    fence: int
    client: str = ""
    since: int = 0

    @property
    def claim(self) -> Claim:
        return Claim(self.owner, self.generation, self.fence)


class Member(NamedTuple):
    """A process that holds claims for its clients; `seen`, `unsettled`, `writer_groups` as in `keys.MemberValue`."""

    host: str
    port: int
    seen: int
    unsettled: frozenset[tuple[str, int]]
    create_revision: int
    writer_groups: Mapping[str, str] = MappingProxyType({})


class TableListener:
    """Acts upon changes, or ignores them. All calls come from the mirror's task and await nothing."""

    def claim_put(self, row: TableRow, before: TableRow | None) -> None:
        """Handle a put claim; `before` is the claim that it replaced."""

    def claim_gone(self, row: TableRow, revision: int) -> None:
        """Handle the deletion of a claim, at `revision`."""

    def member_put(self, name: str, member: Member) -> None:
        """Handle the published state of a new or known process."""

    def member_gone(self, member: str, rows: Sequence[TableRow], revision: int) -> None:
        """Handle the end of a member at `revision`; the `rows` that it held are gone or about to be."""

    def batch_told(self) -> None:
        """Handle the end of a batch: all changes up to the table's revision have been reported."""

    def restored(self) -> None:
        """Handle a restored etcd: fences from before cannot be compared with later ones."""


class OwnTable:
    """The table, as a MirrorListener. It may be read on the event loop that feeds it.

    The table has all changes up to `revision`, which is 0 before the first load.
    """

    def __init__(
        self, keys: OwnKeys, *, listener: TableListener | None = None, counters: Counter[str] | None = None
    ) -> None:
        self.keys = keys
        self.revision = 0
        self.members: dict[str, Member] = {}
        self.count = 0
        # Claims by group and resource; WHOLE_GROUP is the resource of a claim of the whole group.
        self._groups: dict[str, dict[str, TableRow]] = {}
        self.listener = listener or TableListener()
        self._counters = counters if counters is not None else Counter[str]()
        self._logged: set[str] = set()
        # For each member, the latest revision at which claims of the member were deleted, and these claims.
        self._last_gone: dict[str, tuple[int, list[TableRow]]] = {}

    # Reading

    def row(self, group: str, resource: str) -> TableRow | None:
        """Return a resource's claim, in force or not (`rules.in_force`)."""
        return self._groups.get(group, _NO_ROWS).get(resource)

    def whole(self, group: str) -> TableRow | None:
        return self.row(group, WHOLE_GROUP)

    def owner(self, group: str, resource: str) -> TableRow | None:
        """Return the claim in force for a resource, its own or the whole group's."""
        rows = self._groups.get(group, _NO_ROWS)
        return latest(rows.get(resource), rows.get(WHOLE_GROUP))

    def rows_of(self, group: str) -> Mapping[str, TableRow]:
        """Return all claims in a group, by resource."""
        return self._groups.get(group, _NO_ROWS)

    def groups(self) -> Collection[str]:
        """Return the groups with claims, in no order."""
        return self._groups.keys()

    def claims(self) -> Iterator[TableRow]:
        """Yield every claim, by group and resource."""
        for group in sorted(self._groups):
            rows = self._groups[group]
            yield from (rows[resource] for resource in sorted(rows))

    @property
    def synced(self) -> bool:
        return self.revision > 0

    # Calls of the mirror

    def on_restored(self) -> None:
        self._groups.clear()
        self.members.clear()
        self._last_gone.clear()
        self.count = self.revision = 0
        self.listener.restored()

    def on_snapshot(self, snapshot: Snapshot) -> None:
        there = {kv.key: kv for kv in snapshot.kvs}
        for row in list(self.claims()):
            if self.keys.claim(row.group, row.resource) not in there:
                self._claim_gone(row.group, row.resource, snapshot.revision)
        for member in [each for each in self.members if self.keys.member(each) not in there]:
            self._member_gone(member, snapshot.revision)
        for kv in sorted(there.values(), key=lambda kv: kv.mod_revision):
            self._put(kv)
        self._end_batch(snapshot.revision)

    def on_events(self, events: list[WatchEvent], revision: int) -> None:
        for event in events:
            if event.deleted:
                self._delete(event.kv)
            else:
                self._put(event.kv)
        # Not the last event's revision, because more events of that may come with the next batch.
        self._end_batch(revision)

    def _end_batch(self, revision: int) -> None:
        self.revision = max(self.revision, revision)
        self.listener.batch_told()

    def _put(self, kv: KeyValue) -> None:
        try:
            if kv.key.startswith(self.keys.claims):
                self._claim_put(kv)
            elif kv.key.startswith(self.keys.members):
                self._member_put(kv)
        except ValueError as error:
            self._skip(kv.key, str(error))

    def _claim_put(self, kv: KeyValue) -> None:
        group, resource = self.keys.parse_claim(kv.key)
        value = decode_claim(kv.value)
        owner = Owner(value.proxy, value.connection)
        row = TableRow(group, resource, owner, value.generation, kv.mod_revision, value.client, value.since)
        rows = self._groups.setdefault(group, {})
        before = rows.get(resource)
        if before is not None and before.fence >= row.fence:
            return  # reported twice
        if before is None:
            if self.count >= MAX_CLAIMS:
                raise ValueError(f"the table is full: it holds {MAX_CLAIMS} claims")
            self.count += 1
        rows[resource] = row
        self.listener.claim_put(row, before)

    def _member_put(self, kv: KeyValue) -> None:
        name, value = kv.key.removeprefix(self.keys.members), decode_member(kv.value)
        member = Member(
            value.host,
            value.port,
            value.seen,
            frozenset(value.unsettled),
            kv.create_revision,
            MappingProxyType(value.writer_groups),
        )
        self.members[name] = member
        self.listener.member_put(name, member)

    def _delete(self, kv: KeyValue) -> None:
        try:
            if kv.key.startswith(self.keys.claims):
                self._claim_gone(*self.keys.parse_claim(kv.key), kv.mod_revision)
            elif kv.key.startswith(self.keys.members):
                self._member_gone(kv.key.removeprefix(self.keys.members), kv.mod_revision)
        except ValueError as error:
            self._skip(kv.key, str(error))

    def _claim_gone(self, group: str, resource: str, revision: int) -> None:
        rows = self._groups.get(group, {})
        row = rows.get(resource)
        if row is None or row.fence >= revision:
            return
        del rows[resource]
        self.count -= 1
        if not rows:
            del self._groups[group]
        member = row.owner.proxy
        if member in self.members:
            at, gone = self._last_gone.get(member, (0, []))
            if at != revision:
                self._last_gone[member] = revision, [row]
            else:
                # The list is extended in place: a lease may end with a hundred thousand claims.
                gone.append(row)
        self.listener.claim_gone(row, revision)

    def _member_gone(self, member: str, revision: int) -> None:
        if self.members.pop(member, None) is None:
            return
        # A lease that ends deletes all its keys at one revision.
        at, rows = self._last_gone.pop(member, (0, []))
        held = rows if at == revision else []
        groups = self._groups.values()
        held = [*held, *(row for group in groups for row in group.values() if row.owner.proxy == member)]
        self.listener.member_gone(member, held, revision)

    def _skip(self, key: str, reason: str) -> None:
        self._counters["own.skipped"] += 1
        if key not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(key)
            log.warning("claim key ignored", key=key, reason=reason)
