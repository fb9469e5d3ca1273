"""Switch off each rule of consumer groups: the search must find a violation for each, which proves that it can.

A rule is one that group.py, journal.py or coordinator.py of `kproxy.broker.groups` states at its head, and is switched
off by a patch of product code for as long as a test runs.

Not included: the look at the lease in `GroupCoordinator._wait`. What a member is told there is in the journal of all
in-sync replicas, and a late answer is as good as one that was long on its way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from kproxy.broker.groups import coordinator, journal
from kproxy.broker.groups.coordinator import GroupCoordinator
from kproxy.broker.groups.group import Group, Join, Member, State, Sync
from kproxy_codec import error_codes as codes
from tests.support.models.group_model import Promise

Patch = pytest.MonkeyPatch
Shard = coordinator._Shard


class RuleOff(NamedTuple):
    """`off` switches the rule off; the search then finds that one of `broken` is."""

    name: str
    off: Callable[[Patch], None]
    broken: frozenset[Promise]


def _set(target: object, name: str, value: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(target, name, value)


# group.py


def any_member_assigns(patch: Patch) -> None:
    sync = Group.sync

    def sync_as_leader(group: Group, asked: Sync, token: int, now: float) -> None:
        if group.state is State.COMPLETING and asked.member_id in group.members:
            group.leader = asked.member_id
        sync(group, asked, token, now)

    patch.setattr(Group, "sync", sync_as_leader)


def leader_assigns_again(patch: Patch) -> None:
    sync = Group.sync

    def sync_again(group: Group, asked: Sync, token: int, now: float) -> None:
        if group.state is State.STABLE and asked.member_id == group.leader and group._sync_error(asked) == codes.NONE:
            group._assign(asked.assignments, now)
        sync(group, asked, token, now)

    patch.setattr(Group, "sync", sync_again)


def without_record(name: str) -> Callable[[Patch], None]:
    """What this method changes is not in the journal."""

    def off(patch: Patch) -> None:
        method = getattr(Group, name)

        def unrecorded(group: Group, *arguments: Any) -> None:
            before = group.is_changed
            method(group, *arguments)
            group.is_changed = before

        patch.setattr(Group, name, unrecorded)

    return off


def _any_generation(group: Group, member_id: str, instance_id: str | None, generation: int) -> int:
    return group._member_error(member_id, instance_id)


def static_members_have_two_ids(patch: Patch) -> None:
    def join_beside(group: Group, old: Member, asked: Join, token: int, new_id: str, now: float) -> None:
        group._add(asked, new_id, token, now)

    def known(group: Group, member_id: str, instance_id: str | None) -> int:
        return codes.NONE if member_id in group.members else codes.UNKNOWN_MEMBER_ID

    patch.setattr(Group, "_replace_static", join_beside)
    patch.setattr(Group, "_member_error", known)


def offsets_before_the_journal(patch: Patch) -> None:
    put = GroupCoordinator._put_offsets

    def put_first(groups: GroupCoordinator, shard: Any, entry: Any, offsets: Any) -> int:
        for each in offsets:
            entry.group.apply_offset(*each)
        return put(groups, shard, entry, offsets)

    patch.setattr(GroupCoordinator, "_put_offsets", put_first)


# journal.py


def removals_are_passed_over(patch: Patch) -> None:
    take = journal.Replay._take
    patch.setattr(journal.Replay, "_take", lambda replay, pairs: take(replay, [p for p in pairs if p[1] is not None]))


def earlier_records_stay(patch: Patch) -> None:
    take = journal.Replay._take

    def take_unknown(replay: journal.Replay, pairs: Any) -> None:
        seen = replay.values
        for key, value in pairs:
            # Keys are kept beside groups' values, by names that no group has.
            if value is None or seen.setdefault(f"\0{key!r}", b"") != b"seen":
                take(replay, [(key, value)])
            seen[f"\0{key!r}"] = b"seen"

    patch.setattr(journal.Replay, "_take", take_unknown)


# coordinator.py


def failed_appends_change_memory(patch: Patch) -> None:
    append = Shard.append

    def append_or_not(shard: Any, pairs: Any) -> tuple[int, int]:
        append(shard, pairs)
        return codes.NONE, shard.last_offset

    patch.setattr(Shard, "append", append_or_not)


async def _settled_at_once(shard: Any, offset: int) -> int:
    return codes.NONE if shard.partition.takes_writes() else codes.NOT_COORDINATOR


def answers_at_once(patch: Patch) -> None:
    def answer(groups: GroupCoordinator, shard: Any, last_offset: int, answers: Any) -> None:
        for token, each in answers:
            groups._resolve(token, each)

    patch.setattr(GroupCoordinator, "_answer", answer)


async def _settled_without_lease(shard: Any, offset: int) -> int:
    return codes.NONE if shard.partition.high_watermark > offset else codes.NOT_COORDINATOR


def no_lease_is_needed(patch: Patch) -> None:
    def find(groups: GroupCoordinator, group_id: str, *, needs_name: bool = False) -> Any:
        shard = groups._shards.get(0)
        if shard is None:
            return codes.NOT_COORDINATOR
        return shard if shard.loading is None else codes.COORDINATOR_LOAD_IN_PROGRESS

    patch.setattr(GroupCoordinator, "_find", find)
    patch.setattr(Shard, "settled", _settled_without_lease)


def appends_and_memory_in_two_steps(patch: Patch) -> None:
    put = GroupCoordinator._put_offsets

    def put_later(groups: GroupCoordinator, shard: Any, entry: Any, offsets: Any) -> int:
        group = entry.group
        kept = {(topic, index): group.offsets.get((topic, index)) for topic, index, _ in offsets}
        error_code = put(groups, shard, entry, offsets)
        if error_code == codes.NONE:
            for key, before in kept.items():
                group.apply_offset(*key, before)
            for each in offsets:
                asyncio.get_running_loop().call_later(1.0, group.apply_offset, *each)
        return error_code

    patch.setattr(GroupCoordinator, "_put_offsets", put_later)


def loading_groups_are_served(patch: Patch) -> None:
    def find(groups: GroupCoordinator, group_id: str, *, needs_name: bool = False) -> Any:
        shard = groups._shards.get(0)
        return shard if shard is not None and shard.partition.takes_writes() else codes.NOT_COORDINATOR

    patch.setattr(GroupCoordinator, "_find", find)


def nobody_hears_of_the_end(patch: Patch) -> None:
    patch.setattr(GroupCoordinator, "_drop", lambda groups, index: groups._shards.pop(index))


def rewriting_waits_for_nobody(patch: Patch) -> None:
    """The log is cut off before in-sync replicas have the records that were written again."""
    rewrite = GroupCoordinator._rewrite

    async def rewrite_at_once(groups: GroupCoordinator, shard: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Shard, "settled", _settled_at_once)
            await rewrite(groups, shard)

    patch.setattr(GroupCoordinator, "_rewrite", rewrite_at_once)


def rewriting_is_of_the_past(patch: Patch) -> None:
    """Offsets are written again as they were when the rewriting began."""
    append_live = GroupCoordinator._append_live

    async def append_old(groups: GroupCoordinator, shard: Any) -> bool:
        old = {group_id: dict(entry.group.offsets) for group_id, entry in shard.entries.items()}
        done = await append_live(groups, shard)
        await asyncio.sleep(1.0)
        for group_id, offsets in old.items():
            shard.append([journal.offset_record(group_id, *key, each) for key, each in offsets.items()])
        return done

    patch.setattr(GroupCoordinator, "_append_live", append_old)


_OFFSETS = frozenset({Promise.BACK})
_GENERATIONS = frozenset({Promise.TWICE, Promise.CHANGED, Promise.SHARED})
_HANGS = frozenset({Promise.HANGS})
_STALE = frozenset({Promise.STALE, Promise.BACK, Promise.CHANGED})

RULES_OFF = [
    RuleOff("only the generation's leader assigns", any_member_assigns, _GENERATIONS),
    RuleOff("an assignment never changes", leader_assigns_again, _GENERATIONS),
    RuleOff("a generation is in the journal", without_record("_complete"), _GENERATIONS),
    RuleOff("assignments are in the journal", without_record("_assign"), _GENERATIONS),
    RuleOff("requests of other generations change nothing", _set(Group, "generation_error", _any_generation), _STALE),
    RuleOff("commits of strangers change nothing", _set(Group, "commit_error", lambda *_: codes.NONE), _OFFSETS),
    RuleOff("one id speaks for a static member", static_members_have_two_ids, _STALE | _GENERATIONS),
    RuleOff(
        "one request of a member waits",
        _set(Group, "_abandon", lambda *_: None),
        _HANGS,
    ),
    RuleOff("offsets are applied from the journal", offsets_before_the_journal, _OFFSETS),
    RuleOff("a later record replaces an earlier one", earlier_records_stay, _OFFSETS | _GENERATIONS),
    RuleOff("a record without a value removes", removals_are_passed_over, _OFFSETS),
    RuleOff("a failed append changes nothing", failed_appends_change_memory, _OFFSETS | _GENERATIONS),
    RuleOff("answers wait for replicas", _set(Shard, "settled", _settled_at_once), _OFFSETS | _GENERATIONS | _STALE),
    RuleOff("generations wait for replicas", answers_at_once, _GENERATIONS | _STALE),
    RuleOff("nothing is told without a lease", no_lease_is_needed, _OFFSETS | _STALE),
    RuleOff("the log and memory change in one step", appends_and_memory_in_two_steps, _OFFSETS),
    RuleOff("nothing is told while groups are loaded", loading_groups_are_served, _OFFSETS | _HANGS),
    RuleOff("who waits hears that the lead ends", nobody_hears_of_the_end, _HANGS),
    RuleOff("sessions begin anew", _set(Group, "begin", lambda *_: None), frozenset({Promise.STAYS})),
    RuleOff("a journal is cut when replicas have the copy", rewriting_waits_for_nobody, _OFFSETS | _GENERATIONS),
    RuleOff("a copy is of the present", rewriting_is_of_the_past, _OFFSETS),
]
