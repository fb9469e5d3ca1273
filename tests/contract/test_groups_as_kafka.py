"""Conversations with a group coordinator have Apache Kafka's answers, in several versions of each API.

Every conversation goes to Apache Kafka and to reference brokers, directly and through a proxy before each. All fields
of the answers are compared. Where an answer differs on purpose, `BROKER_DIFFERS` says how and why; a difference that is
listed and not seen fails, too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import api_keys as keys
from kproxy_codec import error_codes as codes
from kproxy_codec.coordination import GROUP
from tests.contract.test_answers_as_kafka import Differs, coordinator_port, differences
from tests.support.brokers.group_talk import LEVELS, Place, Talk, protocols, subscription
from tests.support.brokers.oracle import ReferenceSide, Side
from tests.support.brokers.real_kafka import RealKafka
from tests.support.brokers.reference_broker import create_topic
from tests.support.processes.dev import serving
from tests.support.processes.served import kafka_proxy, port_of
from tests.support.waiting import wait_for

# Groups through the proxy: tests/integration/proxy/test_proxy_coordination.py, tests/clients/test_readers.py; groups of
# the reference brokers: tests/integration/broker/test_groups.py, tests/property/test_group_model.py.
pytestmark = pytest.mark.long

OTHER = "of another kind"


# Conversations


def one_member(t: Talk) -> None:
    t.describe("before there is a group")
    t.listed("before there is a group")
    t.fetch("before there is a group")
    t.enter("a first member")
    t.end("a")
    t.commit("before the assignment", by="a")
    t.beat("before the assignment")
    t.sync("the leader", given={"a": b"all"})
    t.sync("the leader again", given={"a": b"other"})
    t.beat("a member")
    t.describe("a stable group")
    t.listed("a stable group")
    t.commit("a member", by="a")
    t.fetch("after a commit")
    t.fetch("a partition twice", (t.place.topic, [0, 0]))
    t.delete("a stable group")
    t.leave("the last member")
    t.beat("a member that left")
    t.leave("a member that left")
    t.describe("a group without members")
    t.listed("a group without members")
    t.commit("without a member")
    t.delete("a group without members")
    t.delete("a deleted group")
    t.describe("a deleted group")
    t.listed("a deleted group")
    t.fetch("a deleted group")
    t.beat("a deleted group")


def two_members(t: Talk) -> None:
    t.settle()
    t.enter("a second member", "b")
    t.await_rebalance()
    t.describe("while members join")
    t.listed("while members join")
    t.sync("while members join")
    t.commit("while members join", by="a")
    t.delete("while members join")
    t.join("the leader, for the second generation")
    t.end("b")
    t.beat("an earlier generation", generation_id=1)
    t.sync("an earlier generation", generation_id=1)
    t.commit("an earlier generation", by="a", generation_id_or_member_epoch=1)
    t.begin_sync("a follower", "b")
    t.sync("the leader, two assigned", given={"a": b"one", "b": b"two"})
    t.end("b")
    t.describe("two members")
    t.join("a follower that joins again", "b")
    t.sync("a follower again", "b")
    t.beat("a later generation", generation_id=99)
    t.beat("a negative generation", generation_id=-1)
    t.commit("a member without its generation", by="a", generation_id_or_member_epoch=-1)
    t.commit("a generation without a member", generation_id_or_member_epoch=2)
    t.leave("a follower", by="b")
    t.beat("after another left")
    t.beat("by who left", "b")
    t.join("the one that is left")
    t.sync("the one that is left", given={"a": b"all", "b": b"nothing"})


def leader_joins_again(t: Talk) -> None:
    t.settle()
    t.join("a leader that joins again")
    t.join("a leader that joins again, before its assignment")
    t.sync("nothing assigned")
    t.describe("nothing assigned")
    t.join("a leader with other metadata", protocols=protocols("range", metadata=b"other"))
    t.join("a leader with another protocol", protocols=protocols("sticky"))
    t.sync("another protocol", protocol_name="sticky", given={"a": b"all"})
    t.describe("another protocol")


def strangers(t: Talk) -> None:
    nobody = {"member_id": "nobody"}
    for where in ("no group", "a group"):
        t.beat(f"a stranger, {where}", "s")
        t.sync(f"a stranger, {where}", "s")
        t.leave(f"a stranger, {where}", by="s")
        t.join(f"a stranger, {where}", "s", member_id="nobody")
        t.commit(f"a stranger, {where}", **nobody, generation_id_or_member_epoch=1)
        t.commit(f"a stranger without a generation, {where}", **nobody)
        t.commit(f"nobody with a generation, {where}", generation_id_or_member_epoch=1)
        t.commit(f"nobody, {where}")
        t.beat(f"an empty member id, {where}", "s", member_id="")
        t.leave(f"an empty member id, {where}", {"member_id": "", "group_instance_id": None}, by="s")
        t.delete_offsets(f"offsets, {where}")
        t.fetch(f"offsets, {where}")
        t.ids.pop("s", None)
        if where == "no group":
            t.delete("a group of offsets")
            t.settle()


def pending_members(t: Talk) -> None:
    if t.version(keys.JOIN_GROUP) < 4:
        return
    t.join("a member without an id")
    t.beat("a pending member")
    t.sync("a pending member")
    t.commit("a pending member", member_id=t.ids["a"], generation_id_or_member_epoch=0)
    t.commit("beside a pending member")
    t.leave("a pending member")
    t.leave("a pending member again")
    t.join("a pending member that left")
    t.ids.clear()
    t.join("another without an id")
    t.delete("a group with a pending member")
    t.join("a pending member of a deleted group")


def static_members(t: Talk) -> None:
    if t.version(keys.JOIN_GROUP) < 5:
        return
    i: dict[str, Any] = {"group_instance_id": "i"}
    t.settle("a", **i)
    old = t.ids["a"]
    t.describe("a static member")
    t.beat("a static member", **i)
    t.beat("another instance", group_instance_id="j")
    t.beat("a static member without its instance")
    t.sync("a static member", **i)
    t.join("a static member with its id", **i)
    t.sync("a static member, for that", given={"a": b"all"}, **i)
    t.join("a restarted static member", "b", **i)
    t.beat("a fenced member", "a", generation_id=t.generations["b"], **i)
    t.sync("a fenced member", "a", generation_id=t.generations["b"], **i)
    t.join("a fenced member", "a", **i)
    t.ids["a"] = old
    t.commit("a fenced member", member_id=old, generation_id_or_member_epoch=t.generations["b"], **i)
    t.leave("a fenced member", {"member_id": old, **i})
    t.join("an id that nobody has, of that instance", "c", member_id="nobody", **i)
    t.join("an id that nobody has, of another instance", "c", member_id="nobody", group_instance_id="j")
    t.ids.pop("c")
    t.sync("a restarted static member", "b", {"b": b"new"}, **i)
    t.beat("a restarted static member", "b", **i)
    t.commit("a restarted static member", by="b", **i)
    t.describe("a restarted static member")
    strange = {"member_id": "", "group_instance_id": "j"}
    t.leave("an instance that nobody has", strange)
    t.leave("two, of whom one is there", strange, {"member_id": "", **i})
    t.describe("an instance that left")


def static_member_changes(t: Talk) -> None:
    if t.version(keys.JOIN_GROUP) < 5:
        return
    i: dict[str, Any] = {"group_instance_id": "i"}
    t.settle("a", protocols=protocols("range", "sticky"), **i)
    t.join("a restarted one with other metadata", "b", protocols=protocols("range", metadata=b"x"), **i)
    t.describe("a restarted one with other metadata")
    t.join("a restarted one with another protocol", "c", protocols=protocols("sticky"), **i)
    t.sync("a restarted one with another protocol", "c", {"c": b"all"}, protocol_name="sticky", **i)
    t.join("a restarted one of another type", "d", protocol_type="connect", **i)


def protocol_mismatches(t: Talk) -> None:
    t.join("no protocols", protocols=[])
    t.join("no protocol type", protocol_type="")
    t.settle()
    t.join("another type", "b", protocol_type="connect")
    t.join("no common protocol", "b", protocols=protocols("roundrobin"))
    t.join("no protocols, beside a member", "b", protocols=[])
    t.join("a member with another type", protocol_type="connect")
    if t.version(keys.SYNC_GROUP) >= 5:
        t.sync("another type", protocol_type="connect")
        t.sync("another protocol", protocol_name="roundrobin")
        t.sync("no type", protocol_type=None, protocol_name=None)
    t.enter("a member with a choice", "b", protocols=protocols("roundrobin", "range"))
    t.await_rebalance()
    t.join("the leader, for one with a choice")
    t.end("b")


def sessions(t: Talk) -> None:
    for ms in (-1, 0, 5_999, 1_800_001, (1 << 31) - 1):
        t.join(f"a session of {ms} ms", session_timeout_ms=ms)
        t.join(f"a session of {ms} ms, of a stranger", "s", session_timeout_ms=ms, member_id="nobody")
        t.ids.clear()
    t.settle(session_timeout_ms=6_000)
    t.enter("a session of 30 minutes", "b", session_timeout_ms=1_800_000)
    t.await_rebalance()
    t.join("the leader", session_timeout_ms=6_000)
    t.end("b")
    t.sync("the leader, two assigned", given={"a": b"one", "b": b"two"})
    # Longer than the one member's session.
    time.sleep(7.5)
    t.beat("a member whose session is over")
    t.commit("a member whose session is over", by="a")
    t.beat("a member whose session is not over", "b")


def without_group_id(t: Talk) -> None:
    t.group = ""
    t.join("an empty group id", member_id="nobody")
    t.join("an empty group id, without a member id", "b")
    t.join("an empty group id, a session of 0", "c", session_timeout_ms=0)
    t.sync("an empty group id")
    t.beat("an empty group id")
    t.leave("an empty group id")
    t.delete_offsets("an empty group id")
    # All that use this group at once commit the same.
    t.commit("an empty group id")
    t.fetch("an empty group id")
    t.describe("an empty group id", "")
    t.commit("an empty group id, a member", member_id="nobody", generation_id_or_member_epoch=1)


def offsets(t: Talk) -> None:
    topic, missing = t.place.topic, f"missing-{t.place.topic}"
    t.commit("an unknown topic", (missing, 0, 5, ""))
    t.describe("a commit failed")
    t.commit("an unknown partition", 99)
    t.commit("partition -1", -1)
    t.commit("a known and an unknown partition", 0, 99)
    t.commit("a known and an unknown topic", 0, (missing, 0, 5, ""))
    t.commit("metadata of 4096 bytes", (topic, 0, 5, "x" * 4096))
    t.commit("metadata of 4097 bytes", (topic, 0, 5, "x" * 4097))
    t.commit("metadata of 4096 bytes and no ASCII", (topic, 0, 5, "ü" * 2048 + "x"))
    t.commit("metadata of 4097 bytes of an unknown topic", (missing, 0, 5, "x" * 4097))
    t.commit("null metadata", (topic, 1, 6, None))
    t.commit("offset -1", (topic, 1, -1, ""))
    t.fetch("offset -1")
    t.commit("offset -9", (topic, 1, -9, ""))
    t.commit("a large offset", (topic, 1, (1 << 63) - 1, ""))
    t.commit("no topics", topics=[])
    t.fetch("committed ones")
    t.fetch("unknown ones", (topic, [99, -1]), (missing, [0]))
    t.fetch("no topics", topics=[])
    if t.version(keys.OFFSET_FETCH) >= 2:
        t.fetch("all", topics=None)
    if t.version(keys.OFFSET_COMMIT) >= 6:
        part = {"partition_index": 0, "committed_offset": 7, "committed_leader_epoch": 3, "committed_metadata": ""}
        t.commit("with a leader epoch", topics=[{"name": topic, "partitions": [part]}])
        t.fetch("with a leader epoch", (topic, [0]))
    else:
        t.commit("kept for an hour", retention_time_ms=3_600_000)
        t.commit("kept for no time", retention_time_ms=0)
        t.fetch("kept for no time")
    t.describe("offsets alone")
    t.listed("offsets alone")


def deleted_offsets(t: Talk) -> None:
    t.delete_offsets("an unknown group")
    t.commit("two partitions", 0, 1)
    t.delete_offsets("one of a group without members")
    t.delete_offsets("one that is gone")
    t.delete_offsets("an unknown partition", "", 99)
    t.delete_offsets("an unknown topic", "missing")
    t.delete_offsets("no topics", topics=[])
    t.fetch("after one was deleted")
    t.settle(protocols=protocols("range", metadata=subscription("other", t.place.topic)))
    t.delete_offsets("a topic that is read", "", 1)
    t.join("a member that reads another topic", protocols=protocols("range", metadata=subscription("other")))
    t.delete_offsets("while members have no assignment", "", 1)
    t.sync("one that reads another topic", given={"a": b"all"})
    t.delete_offsets("a topic that is not read", "", 1)
    t.fetch("after all were deleted")


def deleted_topic(t: Talk) -> None:
    """A topic of the same name begins without offsets, also those of a group with members."""
    name, client = f"gone-{uuid.uuid4().hex[:10]}", t.client("", keys.DESCRIBE_GROUPS)
    t.settle()
    named = {"member_id": t.ids["a"], "generation_id_or_member_epoch": t.generations["a"]}

    def codes_of_commit() -> set[int]:
        parts = [{"partition_index": index, "committed_offset": 7, "committed_metadata": ""} for index in (0, 1)]
        topics = [{"name": name, "partitions": parts}]
        answer = client.request(keys.OFFSET_COMMIT, 7, group_id=t.group, topics=topics, **named)
        return {each.error_code for each in answer.topics[0].partitions}

    def committed() -> set[int]:
        topics = [{"name": name, "partition_indexes": [0, 1]}]
        answer = client.request(keys.OFFSET_FETCH, 5, group_id=t.group, topics=topics)
        return {each.committed_offset for each in answer.topics[0].partitions}

    wait_for(lambda: create_topic(client, name, [[1], [1]]).error_code == codes.NONE)
    wait_for(lambda: codes_of_commit() == {codes.NONE})
    t.note("OffsetFetch: before the topic is deleted", {"offsets": sorted(committed())})
    assert client.request(keys.DELETE_TOPICS, 5, topic_names=[name], timeout_ms=30_000).responses[0].error_code == 0
    wait_for(lambda: committed() == {-1}, what="the offsets are gone")
    wait_for(lambda: create_topic(client, name, [[1], [1]]).error_code == codes.NONE)
    t.note("OffsetFetch: a topic of the same name", {"offsets": sorted(committed())})


def another_type(t: Talk) -> None:
    connect = {"protocol_type": "connect"}
    t.enter(OTHER, **connect)
    t.end("a")
    t.sync(OTHER, given={"a": b"all"}, **connect)
    t.describe(OTHER)
    t.listed(OTHER)
    t.commit(OTHER, by="a")
    t.delete_offsets(OTHER)
    t.delete(OTHER)
    t.leave(OTHER)
    t.describe("of another kind, empty")
    t.delete_offsets("of another kind, empty")
    t.enter("a consumer where another kind was")
    t.end("a")


def filters(t: Talk) -> None:
    t.settle()
    for state in ("Stable", "stable", "Empty", "Nonsense", ""):
        t.listed(f"state {state!r}", states_filter=[state])
    for kind in ("classic", "Classic", "consumer", "share", "nonsense", ""):
        t.listed(f"type {kind!r}", types_filter=[kind])
    t.listed("two states", states_filter=["Empty", "Stable"])
    t.listed("a state and another type", states_filter=["Stable"], types_filter=["consumer"])
    t.describe("several", t.group, f"{t.group}-missing", t.group)
    t.delete("several", f"{t.group}-missing", t.group)
    t.ask("none", keys.DELETE_GROUPS, groups_names=[])
    t.ask("none at all", keys.DESCRIBE_GROUPS, groups=[])


def coordinators(t: Talk) -> None:
    many = t.version(keys.FIND_COORDINATOR) >= 4
    for what, key, kind in (("a group", t.group, 0), ("an empty group id", "", 0), ("type 9", t.group, 9)):
        named = {"coordinator_keys": [key]} if many else {"key": key}
        t.ask(what, keys.FIND_COORDINATOR, key_type=kind, **named)
    if many:
        t.ask("several groups", keys.FIND_COORDINATOR, coordinator_keys=[t.group, "other"], key_type=0)


CONVERSATIONS: list[Callable[[Talk], None]] = [
    one_member,
    two_members,
    leader_joins_again,
    strangers,
    pending_members,
    static_members,
    static_member_changes,
    protocol_mismatches,
    sessions,
    without_group_id,
    offsets,
    deleted_offsets,
    deleted_topic,
    another_type,
    filters,
    coordinators,
]


# Differences on purpose


def offset_read(offset: int, level: str) -> str:
    """The answer of OffsetFetch about one partition, without a leader epoch."""
    epoch, error = ("", "") if level == "old" else (" committed_leader_epoch=-1", " NONE")
    metadata = "m" if offset == 5 else ""
    place = f"topics[1] name=<topic> partitions[1] partition_index=0 committed_offset={offset}"
    return f"{place}{epoch} metadata={metadata} NONE{error}"


BROKER_DIFFERS: Mapping[str, Differs] = {
    f"one_member, {level}: OFFSET_FETCH: a partition twice": Differs(
        offset_read(5, level), "the answer has each partition once"
    )
    for level in LEVELS
}
PROXY_DIFFERS: Mapping[str, Differs] = {
    f"offsets, {level}: OFFSET_FETCH: with a leader epoch": Differs(
        offset_read(7, level), "no answer of the proxy has a leader epoch"
    )
    for level in ("static", "new")
}


# Answers


def hold_all(place: Place) -> dict[str, str]:
    """All conversations, in all versions, side by side."""

    def hold(name: str, level: str, talk: Callable[[Talk], None]) -> dict[str, str]:
        with ExitStack() as stack:
            talking = Talk(place, level, stack)
            talk(talking)
        return {f"{name}, {level}: {what}": answer for what, answer in talking.heard().items()}

    heard: dict[str, str] = {}
    with ThreadPoolExecutor(4) as pool:
        begun = [pool.submit(hold, each.__name__, level, each) for level in LEVELS for each in CONVERSATIONS]
        for each in begun:
            heard |= each.result()
    return heard


class Heard(NamedTuple):
    """The answers by conversation, version and request."""

    kafka: Mapping[str, str]
    kafkas_proxy: Mapping[str, str]
    brokers: Mapping[str, str]
    brokers_proxy: Mapping[str, str]


@pytest.fixture(scope="module")
def heard(
    sides: dict[str, Side], real_kafka: RealKafka, etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Heard]:
    topic = f"talked-of-{uuid.uuid4().hex[:10]}"
    for side in sides.values():
        with side.client(1) as client:
            assert create_topic(client, topic, [[1, 2, 3]] * 2).error_code == codes.NONE
    directory, ours = tmp_path_factory.mktemp("groups"), sides["ours"]
    assert isinstance(ours, ReferenceSide)
    arguments = ["serve", "--listen", "127.0.0.1:0", "--etcd", etcd.endpoint, "--prefix", ours.prefix]
    with (
        kafka_proxy(directory / "kafka", real_kafka.bootstrap) as before_kafka,
        serving(arguments, directory / "ours.stderr") as before_ours,
    ):
        places = [
            Place(coordinator_port(sides[name].port(1), GROUP, "any"), proxy, topic)
            for name, proxy in (
                ("real", None),
                ("real", port_of(before_kafka)),
                ("ours", None),
                ("ours", port_of(before_ours)),
            )
        ]
        # A proxy that has just started may take a group to the wrong broker.
        for each in places:
            assert each.proxy is None or all(coordinator_port(each.proxy, GROUP, f"any-{n}") for n in range(8))
        with ThreadPoolExecutor(len(places)) as pool:
            yield Heard(*pool.map(hold_all, places))


def test_conversations_have_many_answers(heard: Heard) -> None:
    assert len(heard.kafka) >= 400
    assert len({what.split(": ", 1)[1] for what in heard.kafka}) >= 150
    assert PROXY_DIFFERS.keys() | BROKER_DIFFERS.keys() <= heard.kafka.keys()


@pytest.mark.parametrize("place", ["kafkas_proxy", "brokers", "brokers_proxy"])
def test_groups_are_answered_as_kafka_does(heard: Heard, place: str) -> None:
    expected = {"kafkas_proxy": PROXY_DIFFERS, "brokers": BROKER_DIFFERS}.get(place, PROXY_DIFFERS | BROKER_DIFFERS)
    seen = differences(heard.kafka, getattr(heard, place))
    assert seen == {what: (heard.kafka[what], each.answer) for what, each in expected.items()}
