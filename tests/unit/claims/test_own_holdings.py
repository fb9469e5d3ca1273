"""The claims of a connection: the fence of its writes, the partitions it may read, and the claims left at its end."""

from __future__ import annotations

from kproxy.claims.connection import ClaimingConnection
from kproxy_codec.own import WHOLE_GROUP

# A topic that the group writes, and one that it does not.
GATED, OTHER = "t/0", "u/0"


def holdings(severed: list[str] | None = None) -> ClaimingConnection:
    made = ClaimingConnection(
        1, "tests", (severed if severed is not None else []).append, lambda topic, group: topic == "t"
    )
    made.group = "g"
    return made


def fence(of: ClaimingConnection, topic: bytes = b"t", partition_index: int = 0) -> int:
    return of.write_fence(topic, partition_index)


def test_claim_counts_once_it_is_granted() -> None:
    own = holdings()
    own.learn(GATED, 1, 10)
    assert fence(own) == 0
    assert not own.may_read(GATED)
    own.grant([GATED])
    assert fence(own) == 10
    assert own.may_read(GATED)
    assert fence(own, partition_index=1) == 0
    assert not own.may_read("t/1")


def test_whole_group_claim_covers_every_written_partition() -> None:
    own = holdings()
    own.learn(WHOLE_GROUP, 1, 10)
    assert fence(own) == 0
    own.grant([WHOLE_GROUP])
    assert [fence(own), fence(own, partition_index=7), fence(own, b"u")] == [10, 10, 0]
    assert own.may_read(OTHER)


def test_later_of_resource_and_group_claim_counts() -> None:
    for of_resource, of_whole in ((10, 20), (20, 10)):
        own = holdings()
        own.learn(GATED, 2, of_resource)
        own.learn(WHOLE_GROUP, 3, of_whole)
        latest = own.latest(GATED)
        assert latest is not None
        assert latest.fence == 20
        # Confirming one resource does not need the whole group confirmed.
        own.grant([GATED])
        assert fence(own) == 20
        own.grant([WHOLE_GROUP])
        assert [fence(own), fence(own, partition_index=1)] == [20, of_whole]


def test_group_owner_is_granted_single_resources_too() -> None:
    own = holdings()
    own.learn(WHOLE_GROUP, 1, 10)
    own.grant([GATED])
    assert [fence(own), fence(own, partition_index=1)] == [10, 0]
    assert not own.may_read("t/1")


def test_earlier_claim_reported_late_changes_nothing() -> None:
    own = holdings()
    own.learn(GATED, 2, 20)
    own.grant([GATED])
    assert own.learn(GATED, 1, 10).fence == 20
    assert own.learn(GATED, 2, 20).is_granted
    raised = own.learn(GATED, 3, 30)
    assert (raised.fence, raised.is_granted) == (30, False)


def test_released_resource_may_not_be_written_or_read() -> None:
    for resource in (GATED, WHOLE_GROUP):
        own = holdings()
        own.learn(resource, 1, 10)
        own.grant([resource])
        given_up = own.forget(resource)
        assert given_up is not None
        assert given_up.fence == 10
        assert fence(own) == 0
        assert not own.may_read(GATED)
        assert own.forget(resource) is None
        own.grant([resource])
        assert fence(own) == 0


def test_ended_connection_holds_nothing_and_severs_once() -> None:
    severed: list[str] = []
    own = holdings(severed)
    own.learn(GATED, 1, 10)
    own.learn(WHOLE_GROUP, 1, 11)
    own.grant([GATED, WHOLE_GROUP])
    own.sever("why")
    assert own.end().keys() == {GATED, WHOLE_GROUP}
    own.sever("again")
    own.grant([GATED])
    assert severed == ["why"]
    assert fence(own) == 0
    assert not own.may_read(GATED)
