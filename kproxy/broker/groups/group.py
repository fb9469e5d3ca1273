"""Run one consumer group: its members, generations, assignments and committed offsets.

It has no clock, no I/O and no log: times are arguments, in seconds of one monotonic clock, and answers are returned.

States (Kafka's)
  EMPTY        no members; the group may have offsets
  PREPARING    members are asked to join again; their JoinGroup requests wait
  COMPLETING   a generation has begun; members that sent SyncGroup wait for the leader's assignment
  STABLE       all have an assignment

Transitions
  EMPTY, STABLE, COMPLETING -> PREPARING   a member joins, joins again (with other metadata, or as leader of a STABLE
                                           group), leaves, or times out
  PREPARING  -> COMPLETING (EMPTY if nobody is left)   all have joined, or the rebalance timeout is over
  COMPLETING -> STABLE       the leader's SyncGroup

A group that is forgotten was EMPTY and without offsets: that is Kafka's state Dead.

Use: a request is run on a `draft`. If the draft `is_changed`, it must be in the journal before it replaces the group.
Its `answers` are valid only then. A dropped draft has changed nothing.

Invariants
1. A generation has one assignment for each member, from the leader of that generation, and it never changes.
2. A generation, its members and its assignments are in the journal before an answer names them. So the next coordinator
   continues with the same generation, and uses no number twice.
3. A request of another generation or of an unknown member changes nothing.
4. A static member (KIP-345) has one valid member id at a time: the older one is fenced.
5. At most one JoinGroup and one SyncGroup wait for each member.
6. Offsets are shared by drafts; only `apply_offset` changes them, for a record that is in the journal.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Self

from kproxy_codec import error_codes
from kproxy_codec.errors import CodecError
from kproxy_codec.primitives import INT16
from kproxy_codec.walk import Walk

# How long the first JoinGroup of a member may wait: its client may be gone.
NEW_MEMBER_JOIN_S = 300.0
NEVER = float("inf")
CONSUMER_PROTOCOL = "consumer"


class State(Enum):
    """The states of a group, under the names that ListGroups and DescribeGroups use."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"


class Options(NamedTuple):
    """Settings of groups: Kafka's group.initial.rebalance.delay.ms, limits of session timeouts, bounds of a group."""

    initial_delay_s: float = 3.0
    min_session_s: float = 6.0
    max_session_s: float = 1800.0
    max_members: int = 1_000
    max_metadata_bytes: int = 1 << 20
    max_offsets: int = 20_000

    def takes_session(self, session_s: float) -> bool:
        """Return whether members may have this session timeout."""
        return self.min_session_s <= session_s <= self.max_session_s


class Protocol(NamedTuple):
    """A way to assign partitions that a member supports, with its metadata for the leader."""

    name: str
    metadata: bytes


class Join(NamedTuple):
    """A JoinGroup request. `needs_id`: KIP-394; `can_skip`: KIP-814."""

    member_id: str
    instance_id: str | None
    client_id: str
    session_s: float
    rebalance_s: float
    protocol_type: str
    protocols: tuple[Protocol, ...]
    needs_id: bool = True
    can_skip: bool = True


class Joined(NamedTuple):
    """The answer to JoinGroup; `members` are (member id, instance id, metadata), for the leader."""

    error_code: int
    member_id: str
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


class Sync(NamedTuple):
    """A SyncGroup request; the assignments are the leader's."""

    member_id: str
    instance_id: str | None
    generation: int
    protocol_type: str | None
    protocol: str | None
    assignments: dict[str, bytes]


class Synced(NamedTuple):
    """The answer to SyncGroup."""

    error_code: int
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class CommittedOffset(NamedTuple):
    """A committed offset; times are milliseconds since the epoch, `expires_ms` -1 means the group's retention."""

    offset: int
    leader_epoch: int
    metadata: str
    committed_ms: int
    expires_ms: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member. `join` and `sync` are the tokens of requests that wait, or 0; `deadline` is the end of its session."""

    member_id: str
    instance_id: str | None
    client_id: str
    session_s: float
    rebalance_s: float
    protocols: tuple[Protocol, ...]
    assignment: bytes = b""
    deadline: float = NEVER
    join: int = 0
    sync: int = 0
    is_new: bool = False

    def metadata(self, protocol: str | None) -> bytes:
        """Return the metadata for the selected protocol."""
        return next((each.metadata for each in self.protocols if each.name == protocol), b"")

    @property
    def size_in_bytes(self) -> int:
        """The size of its metadata."""
        return sum(len(each.metadata) for each in self.protocols)

    @property
    def expires_at(self) -> float:
        """When the member is removed unless it sends a request. A member whose request waits here is not removed."""
        return NEVER if self.sync or (self.join and not self.is_new) else self.deadline


class Group:
    """A group; tokens name the requests that wait for `answers`."""

    def __init__(self, group_id: str, options: Options) -> None:
        self.group_id = group_id
        self.options = options
        self.state = State.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol: str | None = None
        self.leader = ""
        self.members: dict[str, Member] = {}
        # Member ids that were assigned but not used yet (KIP-394), and until when they are valid.
        self.pending: dict[str, float] = {}
        # Members that have not sent SyncGroup in this generation.
        self.unsynced: set[str] = set()
        self.offsets: dict[tuple[str, int], CommittedOffset] = {}
        # When the group last changed in the journal: ms since the epoch.
        self.changed_ms = -1
        # The end of the phase: of the time to join, or to send SyncGroup.
        self.phase_ends_at = NEVER
        # The seconds by which the first rebalance may still be delayed; negative: not in that delay.
        self._delay_left_s = -1.0
        self._grew_in_delay = False
        self.answers: list[tuple[int, Joined | Synced]] = []
        self.is_changed = False

    def draft(self) -> Self:
        """Return a copy to run one event on."""
        draft = copy(self)
        draft.members, draft.pending, draft.unsynced = dict(self.members), dict(self.pending), set(self.unsynced)
        draft.answers, draft.is_changed = [], False
        return draft

    def begin(self, now: float) -> None:
        """Start anew from the journal's record: all sessions begin now."""
        self.members = {each.member_id: replace(each, deadline=now + each.session_s) for each in self.members.values()}
        if self.state is State.COMPLETING:
            self.unsynced, self.phase_ends_at = set(self.members), now + self._rebalance_s

    @property
    def is_forgettable(self) -> bool:
        """Whether the group can be dropped without loss."""
        return self.state is State.EMPTY and not self.pending and not self.offsets

    @property
    def next_deadline(self) -> float:
        """When `tick` is due."""
        expiries = [each.expires_at for each in self.members.values()]
        return min(self.phase_ends_at, *self.pending.values(), *expiries, NEVER)

    def waiting(self) -> list[int]:
        """List the tokens of all requests that wait."""
        return [token for each in self.members.values() for token in (each.join, each.sync) if token]

    # Joining

    def join(self, asked: Join, token: int, new_id: str, now: float) -> None:
        """Answer JoinGroup now, or when the rebalance is done. `new_id` is for a member without an id."""
        static = self._static(asked.instance_id)
        error_code = self._join_error(asked, static)
        if error_code != error_codes.NONE:
            self.answers.append((token, Joined(error_code, asked.member_id)))
        elif asked.member_id == "" and static is not None:
            self._replace_static(static, asked, token, new_id, now)
        elif asked.member_id == "" and asked.instance_id is None and asked.needs_id:
            self.pending[new_id] = now + asked.session_s
            self.answers.append((token, Joined(error_codes.MEMBER_ID_REQUIRED, new_id)))
        elif asked.member_id not in self.members:
            self._add(asked, asked.member_id or new_id, token, now)
        else:
            self._join_again(self.members[asked.member_id], asked, token, now)

    def _join_error(self, asked: Join, static: Member | None) -> int:
        if not self.options.takes_session(asked.session_s):
            return error_codes.INVALID_SESSION_TIMEOUT
        if not self._supports(asked):
            return error_codes.INCONSISTENT_GROUP_PROTOCOL
        if asked.member_id:
            is_pending = asked.member_id in self.pending and asked.instance_id is None
            error_code = error_codes.NONE if is_pending else self._member_error(asked.member_id, asked.instance_id)
            if error_code != error_codes.NONE:
                return error_code
        replaced = self.members.get(asked.member_id, static)
        is_full = replaced is None and len(self.members) + len(self.pending) >= self.options.max_members
        if is_full and asked.member_id not in self.pending:
            return error_codes.GROUP_MAX_SIZE_REACHED
        kept = sum(each.size_in_bytes for each in self.members.values() if each is not replaced)
        if kept + sum(len(each.metadata) for each in asked.protocols) > self.options.max_metadata_bytes:
            return error_codes.GROUP_MAX_SIZE_REACHED
        return error_codes.NONE

    def _supports(self, asked: Join) -> bool:
        """Return whether some protocol would suit all members and this one."""
        if not asked.protocol_type or not asked.protocols:
            return False
        if not self.members:
            return True
        common = self._common_protocols()
        return asked.protocol_type == self.protocol_type and any(each.name in common for each in asked.protocols)

    def _common_protocols(self) -> set[str]:
        return set.intersection(*({each.name for each in member.protocols} for member in self.members.values()))

    def _static(self, instance_id: str | None) -> Member | None:
        if instance_id is None:
            return None
        return next((each for each in self.members.values() if each.instance_id == instance_id), None)

    def _member_error(self, member_id: str, instance_id: str | None) -> int:
        static = self._static(instance_id)
        if static is not None and static.member_id != member_id:
            return error_codes.FENCED_INSTANCE_ID
        if member_id not in self.members or (instance_id is not None and static is None):
            return error_codes.UNKNOWN_MEMBER_ID
        return error_codes.NONE

    def _add(self, asked: Join, member_id: str, token: int, now: float) -> None:
        self.pending.pop(member_id, None)
        if not self.members:
            self.protocol_type, self.leader = asked.protocol_type, member_id
        self.members[member_id] = Member(
            member_id=member_id,
            instance_id=asked.instance_id,
            client_id=asked.client_id,
            session_s=asked.session_s,
            rebalance_s=asked.rebalance_s,
            protocols=asked.protocols,
            join=token,
            is_new=True,
            deadline=now + NEW_MEMBER_JOIN_S,
        )
        self._grew_in_delay = self.state is State.PREPARING
        self._prepare(now)

    def _join_again(self, member: Member, asked: Join, token: int, now: float) -> None:
        is_same = member.protocols == asked.protocols
        has_generation = self.state is State.COMPLETING or self.state is State.STABLE
        if has_generation and is_same and not (self.state is State.STABLE and member.member_id == self.leader):
            # Its earlier answer was lost.
            self.answers.append((token, self._joined(member)))
            self._hear(member, now)
            return
        self._abandon(member, error_codes.REBALANCE_IN_PROGRESS)
        self.members[member.member_id] = _renewed(member, asked, join=token)
        self._prepare(now)

    def _replace_static(self, old: Member, asked: Join, token: int, new_id: str, now: float) -> None:
        """Replace a static member by its restarted process, without a rebalance if possible."""
        self._abandon(old, error_codes.FENCED_INSTANCE_ID)
        was_leader = self.leader == old.member_id
        if was_leader:
            self.leader = new_id
        if old.member_id in self.unsynced:
            self.unsynced = self.unsynced - {old.member_id} | {new_id}
        new = _renewed(old, asked, member_id=new_id, deadline=now + asked.session_s)
        self.members = {each.member_id: each for each in (new if one is old else one for one in self.members.values())}
        if self.state is State.STABLE and self._select() == self.protocol:
            self.is_changed = True
            skips = was_leader and asked.can_skip
            joined = self._joined(new)
            if was_leader and not skips:
                # The leader's assignment stays valid: the new process is answered as a follower.
                joined = joined._replace(leader=old.member_id, members=())
            self.answers.append((token, joined._replace(skip_assignment=skips)))
            return
        self.members[new_id] = replace(new, join=token)
        self._prepare(now)

    def _abandon(self, member: Member, error_code: int) -> None:
        """Answer the waiting requests of a member that was replaced, or that has sent another one."""
        if member.join:
            self.answers.append((member.join, Joined(error_code, member.member_id)))
        if member.sync:
            self.answers.append((member.sync, Synced(error_code)))

    def _joined(self, member: Member) -> Joined:
        members = tuple(
            (each.member_id, each.instance_id, each.metadata(self.protocol))
            for each in self.members.values()
            if member.member_id == self.leader
        )
        return Joined(
            error_codes.NONE,
            member.member_id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader,
            members,
        )

    # Rebalancing

    @property
    def _rebalance_s(self) -> float:
        return max((each.rebalance_s for each in self.members.values()), default=0.0)

    def _prepare(self, now: float) -> None:
        """Ask all members to join again, unless this is under way."""
        if self.state is not State.PREPARING:
            for member in self.members.values():
                if member.sync:
                    self.answers.append((member.sync, Synced(error_codes.REBALANCE_IN_PROGRESS)))
                    self._hear(replace(member, sync=0), now)
            delay_s = min(self.options.initial_delay_s, self._rebalance_s) if self.state is State.EMPTY else 0.0
            self.state, self._grew_in_delay = State.PREPARING, False
            self._delay_left_s = self._rebalance_s - delay_s if delay_s > 0 else -1.0
            self.phase_ends_at = now + (delay_s or self._rebalance_s)
        self._try_complete(now)

    def _try_complete(self, now: float) -> None:
        is_delayed = self._delay_left_s >= 0 and bool(self.members)
        if not is_delayed and not self.pending and all(each.join for each in self.members.values()):
            self._complete(now)

    def _complete(self, now: float) -> None:
        """Begin the next generation with the members that joined, and the static members that are away."""
        joined = [each for each in self.members.values() if each.join]
        self.members = {key: each for key, each in self.members.items() if each.join or each.instance_id is not None}
        self._delay_left_s = -1.0
        if self.members and not joined:
            self.phase_ends_at = now + self._rebalance_s
            return
        self.generation, self.is_changed = self.generation + 1, True
        if not joined:
            self.state, self.protocol, self.leader, self.phase_ends_at = State.EMPTY, None, "", NEVER
            self.unsynced = set()
            return
        if self.leader not in {each.member_id for each in joined}:
            self.leader = joined[0].member_id
        self.state, self.protocol = State.COMPLETING, self._select()
        self.unsynced, self.phase_ends_at = set(self.members), now + self._rebalance_s
        self.members = {
            each.member_id: replace(each, join=0, is_new=False, assignment=b"", deadline=now + each.session_s)
            for each in self.members.values()
        }
        self.answers += [(each.join, self._joined(each)) for each in joined]

    def _select(self) -> str:
        """Select the protocol that most members prefer among those that suit all."""
        common = self._common_protocols()
        votes = Counter(
            next(each.name for each in member.protocols if each.name in common) for member in self.members.values()
        )
        return votes.most_common(1)[0][0]

    def sync(self, asked: Sync, token: int, now: float) -> None:
        """Answer SyncGroup now, or when the leader has sent its assignments."""
        error_code = self._sync_error(asked)
        if error_code != error_codes.NONE:
            self.answers.append((token, Synced(error_code)))
            return
        member = self.members[asked.member_id]
        self.unsynced.discard(member.member_id)
        if self.state is State.STABLE:
            self.answers.append((token, self._synced(member)))
            self._hear(member, now)
        else:
            if member.sync:
                self.answers.append((member.sync, Synced(error_codes.REBALANCE_IN_PROGRESS)))
            self.members[member.member_id] = replace(member, sync=token)
            if member.member_id == self.leader:
                self._assign(asked.assignments, now)
        if self.state is State.STABLE and not self.unsynced:
            self.phase_ends_at = NEVER

    def _sync_error(self, asked: Sync) -> int:
        error_code = self.generation_error(asked.member_id, asked.instance_id, asked.generation)
        if error_code != error_codes.NONE:
            return error_code
        if asked.protocol_type not in (None, self.protocol_type) or asked.protocol not in (None, self.protocol):
            return error_codes.INCONSISTENT_GROUP_PROTOCOL
        return error_codes.REBALANCE_IN_PROGRESS if self.state is State.PREPARING else error_codes.NONE

    def _synced(self, member: Member) -> Synced:
        return Synced(error_codes.NONE, self.protocol_type, self.protocol, member.assignment)

    def _assign(self, assignments: dict[str, bytes], now: float) -> None:
        self.state, self.is_changed = State.STABLE, True
        for key, member in self.members.items():
            assigned = replace(member, assignment=assignments.get(key, b""))
            if assigned.sync:
                self.answers.append((assigned.sync, self._synced(assigned)))
                assigned = replace(assigned, sync=0, deadline=now + assigned.session_s)
            self.members[key] = assigned

    # Members

    def generation_error(self, member_id: str, instance_id: str | None, generation: int) -> int:
        """Return the error code for a member of this generation; NONE if the request is valid."""
        error_code = self._member_error(member_id, instance_id)
        if error_code == error_codes.NONE and generation != self.generation:
            return error_codes.ILLEGAL_GENERATION
        return error_code

    def heartbeat(self, member_id: str, instance_id: str | None, generation: int, now: float) -> int:
        """Return the error code for a heartbeat."""
        error_code = self.generation_error(member_id, instance_id, generation)
        if error_code != error_codes.NONE:
            return error_code
        self._hear(self.members[member_id], now)
        return error_codes.REBALANCE_IN_PROGRESS if self.state is State.PREPARING else error_codes.NONE

    def _hear(self, member: Member, now: float) -> None:
        self.members[member.member_id] = replace(member, deadline=now + member.session_s)

    def leave(self, member_id: str, instance_id: str | None, now: float) -> int:
        """Remove a member; a static one may be named by its instance id alone. Return the error code."""
        if self.pending.pop(member_id, None) is not None:
            if self.state is State.PREPARING:
                self._try_complete(now)
            return error_codes.NONE
        static = self._static(instance_id)
        leaving = static.member_id if static is not None and member_id == "" else member_id
        error_code = self._member_error(leaving, instance_id)
        if error_code == error_codes.NONE:
            self._remove(self.members[leaving])
            self._after_removal(now)
        return error_code

    def _remove(self, member: Member) -> None:
        del self.members[member.member_id]
        self.unsynced.discard(member.member_id)
        self._abandon(member, error_codes.UNKNOWN_MEMBER_ID)
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), "")

    def _after_removal(self, now: float) -> None:
        if self.state is State.PREPARING:
            self._try_complete(now)
        elif self.state is not State.EMPTY:
            self._prepare(now)

    def tick(self, now: float) -> None:
        """Remove members whose session has ended, and end the phase if its time is over."""
        lapsed = [member_id for member_id, deadline in self.pending.items() if deadline <= now]
        gone = [each for each in self.members.values() if each.expires_at <= now]
        is_over = self.phase_ends_at <= now
        if is_over and self.state is not State.PREPARING:
            gone += [each for key, each in self.members.items() if key in self.unsynced and each not in gone]
            self.phase_ends_at = NEVER
        for member_id in lapsed:
            del self.pending[member_id]
        for member in gone:
            self._remove(member)
        if gone or (lapsed and self.state is State.PREPARING):
            self._after_removal(now)
        if is_over and self.state is State.PREPARING and self.phase_ends_at <= now:
            self._end_of_joining(now)

    def _end_of_joining(self, now: float) -> None:
        if self._delay_left_s > 0 and self._grew_in_delay:
            delay_s = min(self.options.initial_delay_s, self._delay_left_s)
            self._delay_left_s, self._grew_in_delay = self._delay_left_s - delay_s, False
            self.phase_ends_at = now + delay_s
        else:
            self._complete(now)

    # Offsets

    def commit_error(self, member_id: str, instance_id: str | None, generation: int, now: float) -> int:
        """Return the error code for a commit. A commit without a generation needs a group without members."""
        if generation < 0 and not self.members:
            return error_codes.NONE
        error_code = self.generation_error(member_id, instance_id, generation)
        if error_code == error_codes.NONE and self.state is State.COMPLETING:
            return error_codes.REBALANCE_IN_PROGRESS
        if error_code == error_codes.NONE:
            self._hear(self.members[member_id], now)
        return error_code

    def apply_offset(self, topic: str, partition_index: int, committed: CommittedOffset | None) -> None:
        """Apply a record of the journal; None removes the offset."""
        if committed is None:
            self.offsets.pop((topic, partition_index), None)
        else:
            self.offsets[topic, partition_index] = committed

    def expired_offsets(self, now_ms: int, retention_ms: int) -> list[tuple[str, int]]:
        """List offsets older than the retention, or their own limit, of topics that nobody reads.

        As in Kafka these are all offsets of a group without members, or those of topics to which no member subscribes.
        """
        is_settled = self.state is State.STABLE and self.protocol_type == CONSUMER_PROTOCOL
        if self.pending or (self.members and not is_settled):
            return []
        empty_ms = -1 if self.members else self.changed_ms
        is_read = {topic: self.is_subscribed_to(topic) for topic in {topic for topic, _ in self.offsets}}
        return [
            key
            for key, each in self.offsets.items()
            if not is_read[key[0]]
            and now_ms >= (each.expires_ms if each.expires_ms >= 0 else max(each.committed_ms, empty_ms) + retention_ms)
        ]

    def is_subscribed_to(self, topic: str) -> bool:
        """Return whether a member reads the topic; if its metadata cannot be read, it may."""
        return any(_subscribes(each.metadata(self.protocol), topic) for each in self.members.values())


def _renewed(member: Member, asked: Join, **changed: object) -> Member:
    return replace(
        member,
        client_id=asked.client_id,
        session_s=asked.session_s,
        rebalance_s=asked.rebalance_s,
        protocols=asked.protocols,
        **({"join": 0, "sync": 0} | changed),  # type: ignore[arg-type]
    )


def _subscribes(metadata: bytes, topic: str) -> bool:
    """Read the topics in a consumer's metadata: a version, then an array of names."""
    walk = Walk(metadata, compact=False)
    try:
        walk.skip(INT16.size)
        return any(walk.text() == topic for _ in range(walk.count(INT16.size)))
    except CodecError:
        return True
