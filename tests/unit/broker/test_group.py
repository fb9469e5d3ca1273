"""One group alone: what its members are told, by state and event."""

from __future__ import annotations

from typing import Any

import pytest

from kproxy.broker.groups.group import CommittedOffset, Group, Join, Joined, Options, Protocol, State, Sync, Synced
from kproxy_codec import error_codes as codes

SESSION_S, REBALANCE_S, DELAY_S = 10.0, 60.0, 3.0
RANGE = (Protocol("range", b"r"),)
NOT_DELAYED = Options(initial_delay_s=0.0)


def join(
    member: str = "", *, instance: str | None = None, protocols: tuple[Protocol, ...] = RANGE, **more: Any
) -> Join:
    fields = {"session_s": SESSION_S, "rebalance_s": REBALANCE_S, "protocol_type": "consumer", "needs_id": False}
    return Join(member, instance, "client", protocols=protocols, **(fields | more))


def sync(member: str, generation: int, **assignments: bytes) -> Sync:
    return Sync(member, None, generation, None, None, assignments)


class Driver:
    """A group and the answers so far, by token; a member's requests are numbered."""

    def __init__(self, options: Options = NOT_DELAYED) -> None:
        self.group = Group("g", options)
        self.answers: dict[int, Joined | Synced] = {}
        self.changes = 0
        self.now = 0.0
        self._token = 0

    def _take(self) -> None:
        self.answers.update(self.group.answers)
        self.changes += self.group.is_changed
        self.group.answers, self.group.is_changed = [], False

    def join(self, asked: Join, new_id: str = "") -> int:
        self._token += 1
        self.group.join(asked, self._token, new_id or f"new-{self._token}", self.now)
        self._take()
        return self._token

    def sync(self, asked: Sync) -> int:
        self._token += 1
        self.group.sync(asked, self._token, self.now)
        self._take()
        return self._token

    def leave(self, member: str, instance: str | None = None) -> int:
        error_code = self.group.leave(member, instance, self.now)
        self._take()
        return error_code

    def pass_time(self, seconds: float) -> None:
        """Wait, with ticks when they are due."""
        end = self.now + seconds
        while self.group.next_deadline <= end:
            self.now = max(self.now, self.group.next_deadline)
            self.group.tick(self.now)
            self._take()
        self.now = end

    def joined(self, token: int) -> Joined:
        answer = self.answers[token]
        assert isinstance(answer, Joined)
        return answer

    def code(self, token: int) -> int | None:
        return self.answers[token].error_code if token in self.answers else None


@pytest.fixture
def pair() -> Driver:
    """Members a, which leads, and b, with assignments, in generation 2."""
    driver = Driver()
    driver.join(join(), "a")
    driver.sync(sync("a", 1, a=b"all"))
    driver.join(join(), "b")
    driver.join(join("a"))
    driver.sync(sync("b", 2))
    driver.sync(sync("a", 2, a=b"one", b=b"two"))
    assert (driver.group.state, driver.group.generation, driver.group.leader) == (State.STABLE, 2, "a")
    return driver


def test_first_member_leads_and_assigns() -> None:
    driver = Driver()
    joined = driver.joined(driver.join(join(), "a"))
    assert joined == Joined(codes.NONE, "a", 1, "consumer", "range", "a", (("a", None, b"r"),))
    synced = driver.answers[driver.sync(sync("a", 1, a=b"all"))]
    assert synced == Synced(codes.NONE, "consumer", "range", b"all")
    assert driver.changes == 2, "a generation and its assignments are to be in the journal"


def test_first_rebalance_waits_for_more_members() -> None:
    driver = Driver(Options(initial_delay_s=DELAY_S))
    first = driver.join(join(), "a")
    driver.pass_time(DELAY_S - 1)
    second = driver.join(join(), "b")
    driver.pass_time(DELAY_S)
    assert driver.code(first) is None, "a member came during the delay: it begins again"
    driver.pass_time(1)
    assert {driver.joined(token).generation for token in (first, second)} == {1}


def test_delay_ends_with_the_rebalance_timeout() -> None:
    driver = Driver(Options(initial_delay_s=DELAY_S))
    first = driver.join(join(rebalance_s=7.0), "a")
    for number in range(6):
        driver.pass_time(1)
        driver.join(join(rebalance_s=7.0), f"b{number}")
    driver.pass_time(1)
    assert driver.joined(first).generation == 1


def test_member_id_is_required_once() -> None:
    driver = Driver()
    told = driver.joined(driver.join(join(needs_id=True), "a"))
    assert (told.error_code, told.member_id) == (codes.MEMBER_ID_REQUIRED, "a")
    assert driver.joined(driver.join(join("a", needs_id=True))).generation == 1


def test_unused_member_id_lapses_and_holds_nobody_up() -> None:
    driver = Driver()
    driver.join(join(needs_id=True), "a")
    other = driver.join(join(), "b")
    assert driver.code(other) is None
    driver.pass_time(SESSION_S)
    assert driver.joined(other).generation == 1
    assert driver.code(driver.join(join("a"))) == codes.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize(
    ("asked", "error_code"),
    [
        (join("c"), codes.UNKNOWN_MEMBER_ID),
        (join(session_s=1.0), codes.INVALID_SESSION_TIMEOUT),
        (join(protocols=(Protocol("sticky", b""),)), codes.INCONSISTENT_GROUP_PROTOCOL),
        (join(protocols=()), codes.INCONSISTENT_GROUP_PROTOCOL),
        (join(protocol_type="connect"), codes.INCONSISTENT_GROUP_PROTOCOL),
        (join(protocols=(Protocol("range", bytes(1 << 20)),)), codes.GROUP_MAX_SIZE_REACHED),
    ],
)
def test_refused_join_changes_nothing(pair: Driver, asked: Join, error_code: int) -> None:
    assert pair.code(pair.join(asked)) == error_code
    assert pair.group.state is State.STABLE


def test_full_group_takes_no_member() -> None:
    driver = Driver(NOT_DELAYED._replace(max_members=1))
    driver.join(join(), "a")
    assert driver.code(driver.join(join())) == codes.GROUP_MAX_SIZE_REACHED


def test_follower_that_joins_again_gets_the_same_generation(pair: Driver) -> None:
    again = pair.joined(pair.join(join("b")))
    assert (again.generation, again.members) == (2, ())
    assert pair.group.state is State.STABLE


@pytest.mark.parametrize("asked", [join("a"), join("b", protocols=(Protocol("range", b"other"),)), join()])
def test_leader_and_changed_members_begin_a_rebalance(pair: Driver, asked: Join) -> None:
    token = pair.join(asked)
    assert (pair.group.state, pair.code(token)) == (State.PREPARING, None)
    assert pair.group.heartbeat("b", None, 2, pair.now) == codes.REBALANCE_IN_PROGRESS


def test_rebalance_timeout_drops_who_does_not_join_again(pair: Driver) -> None:
    token = pair.join(join(), "c")
    for _ in range(int(REBALANCE_S)):
        pair.pass_time(1)
        for member in "ab":
            pair.group.heartbeat(member, None, 2, pair.now)
    joined = pair.joined(token)
    assert (joined.generation, joined.leader, set(pair.group.members)) == (3, "c", {"c"})


def test_protocol_with_most_votes_is_selected() -> None:
    driver = Driver(Options(initial_delay_s=DELAY_S))
    x, y, z = (Protocol(name, name.encode()) for name in "xyz")
    tokens = [driver.join(join(protocols=each)) for each in ((x, y), (y, x), (y, x, z))]
    driver.pass_time(2 * DELAY_S)
    assert {driver.joined(token).protocol for token in tokens} == {"y"}


def test_assignment_is_answered_late_and_again(pair: Driver) -> None:
    driver = Driver()
    driver.join(join(), "a")
    waiting = driver.sync(sync("a", 1))
    assert driver.code(waiting) == codes.NONE
    assert pair.answers[pair.sync(sync("b", 2))] == Synced(codes.NONE, "consumer", "range", b"two")


def test_followers_wait_for_the_leaders_assignment(pair: Driver) -> None:
    first = pair.join(join("a"))
    pair.join(join("b"))
    assert pair.joined(first).generation == 3
    waiting = pair.sync(sync("b", 3))
    assert pair.code(waiting) is None
    pair.join(join(), "c")
    assert pair.code(waiting) == codes.REBALANCE_IN_PROGRESS


def test_member_that_never_syncs_is_removed(pair: Driver) -> None:
    pair.join(join("a"))
    pair.join(join("b"))
    pair.sync(sync("a", 3, a=b"all"))
    for _ in range(int(REBALANCE_S)):
        pair.pass_time(1)
        for member in "ab":
            pair.group.heartbeat(member, None, 3, pair.now)
    assert (pair.group.state, set(pair.group.members)) == (State.PREPARING, {"a"})


@pytest.mark.parametrize(
    ("member", "instance", "generation", "error_code"),
    [
        ("a", None, 2, codes.NONE),
        ("a", None, 1, codes.ILLEGAL_GENERATION),
        ("a", None, 3, codes.ILLEGAL_GENERATION),
        ("c", None, 2, codes.UNKNOWN_MEMBER_ID),
        ("a", "unknown", 2, codes.UNKNOWN_MEMBER_ID),
        ("", None, -1, codes.UNKNOWN_MEMBER_ID),
    ],
)
def test_only_members_of_the_generation_are_heard(
    pair: Driver, member: str, instance: str | None, generation: int, error_code: int
) -> None:
    assert pair.group.commit_error(member, instance, generation, pair.now) == error_code
    assert pair.group.heartbeat(member, instance, generation, pair.now) == error_code
    asked = Sync(member, instance, generation, None, None, {})
    assert pair.code(pair.sync(asked)) == error_code


def test_commit_waits_for_the_assignment(pair: Driver) -> None:
    pair.join(join("a"))
    assert pair.group.commit_error("b", None, 2, pair.now) == codes.NONE, "what is revoked may still be committed"
    pair.join(join("b"))
    assert pair.group.commit_error("b", None, 3, pair.now) == codes.REBALANCE_IN_PROGRESS


def test_silent_member_is_removed(pair: Driver) -> None:
    pair.pass_time(SESSION_S / 2)
    pair.group.heartbeat("a", None, 2, pair.now)
    pair.pass_time(SESSION_S / 2)
    assert (pair.group.state, set(pair.group.members)) == (State.PREPARING, {"a"})


def test_group_is_empty_when_all_are_gone(pair: Driver) -> None:
    assert [pair.leave("a"), pair.leave("b"), pair.leave("b")] == [codes.NONE, codes.NONE, codes.UNKNOWN_MEMBER_ID]
    assert (pair.group.state, pair.group.generation, pair.group.is_forgettable) == (State.EMPTY, 3, True)
    assert pair.group.commit_error("", None, -1, pair.now) == codes.NONE


def test_draft_that_is_dropped_changes_nothing(pair: Driver) -> None:
    before = (dict(pair.group.members), pair.group.generation, pair.group.state)
    draft = pair.group.draft()
    draft.leave("a", None, 0.0)
    draft.leave("b", None, 0.0)
    assert draft.is_changed
    assert (pair.group.members, pair.group.generation, pair.group.state) == before


def static_pair() -> Driver:
    driver = Driver(Options(initial_delay_s=DELAY_S))
    driver.join(join(instance="i-a"), "a")
    driver.join(join(instance="i-b"), "b")
    driver.pass_time(2 * DELAY_S)
    driver.sync(sync("a", 1, a=b"one", b=b"two"))
    driver.sync(sync("b", 1))
    return driver


@pytest.mark.parametrize(
    ("instance", "can_skip", "leader", "members", "skips"),
    [("i-b", True, "a", 0, False), ("i-a", True, "a2", 2, True), ("i-a", False, "a", 0, False)],
)
def test_restarted_static_member_keeps_its_assignment(
    instance: str, can_skip: bool, leader: str, members: int, skips: bool
) -> None:
    driver = static_pair()
    old = instance[-1]
    joined = driver.joined(driver.join(join(instance=instance, can_skip=can_skip), f"{old}2"))
    assert (joined.generation, joined.leader, len(joined.members), joined.skip_assignment) == (
        1,
        leader,
        members,
        skips,
    )
    assert driver.group.heartbeat(old, instance, 1, driver.now) == codes.FENCED_INSTANCE_ID
    assert driver.code(driver.join(join(old, instance=instance))) == codes.FENCED_INSTANCE_ID
    synced = driver.answers[driver.sync(Sync(f"{old}2", instance, 1, None, None, {}))]
    assert synced == Synced(codes.NONE, "consumer", "range", {"a": b"one", "b": b"two"}[old])


def test_static_member_that_is_away_keeps_its_place() -> None:
    driver = static_pair()
    token = driver.join(join("a", instance="i-a"))
    driver.pass_time(SESSION_S - 1)
    assert driver.code(token) is None
    driver.join(join(instance="i-b"), "b2")
    assert (driver.joined(token).generation, set(driver.group.members)) == (2, {"a", "b2"})


def test_static_member_leaves_by_its_instance_id() -> None:
    driver = static_pair()
    assert driver.leave("", "i-c") == codes.UNKNOWN_MEMBER_ID
    assert driver.leave("x", "i-a") == codes.FENCED_INSTANCE_ID
    assert driver.leave("", "i-a") == codes.NONE
    assert set(driver.group.members) == {"b"}


def test_take_over_continues_the_generation(pair: Driver) -> None:
    pair.join(join("a"))
    pair.join(join("b"))
    waiting = pair.sync(sync("b", 3))
    pair.now = 1000.0
    pair.group.begin(pair.now)
    pair.pass_time(SESSION_S - 1)
    assert set(pair.group.members) == {"a", "b"}, "sessions begin anew"
    pair.sync(sync("a", 3, b=b"two"))
    assert pair.code(waiting) == codes.NONE


@pytest.mark.parametrize(
    ("committed_ms", "expires_ms", "now_ms", "is_expired"),
    [(0, -1, 1_099, False), (0, -1, 1_100, True), (500, -1, 1_499, False), (0, 50, 60, True), (0, 5_000, 1_200, False)],
)
def test_offsets_expire_when_the_group_is_empty(
    committed_ms: int, expires_ms: int, now_ms: int, is_expired: bool
) -> None:
    driver = Driver()
    driver.group.changed_ms = 100
    driver.group.apply_offset("t", 0, CommittedOffset(7, -1, "", committed_ms, expires_ms))
    assert driver.group.expired_offsets(now_ms, 1_000) == ([("t", 0)] if is_expired else [])
    driver.join(join(), "a")
    assert driver.group.expired_offsets(1 << 60, 1_000) == []


def test_topics_that_members_left_expire() -> None:
    driver = Driver()
    driver.join(join(protocols=(Protocol("range", b"\0\1\0\0\0\2\0\1t\0\1u\0\0\0\0"),)), "a")
    assert [driver.group.is_subscribed_to(topic) for topic in "tuv"] == [True, True, False]
    for topic in "tuv":
        driver.group.apply_offset(topic, 0, CommittedOffset(7, -1, "", 50))
    assert driver.group.expired_offsets(1 << 60, 1_000) == [], "its generation has no assignment"
    driver.sync(sync("a", 1))
    assert driver.group.expired_offsets(1_049, 1_000) == []
    assert driver.group.expired_offsets(1_050, 1_000) == [("v", 0)]
