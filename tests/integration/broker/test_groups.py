"""Unchanged consumers in groups on reference brokers: they share partitions, commit, and survive their coordinator."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
import pytest

from kproxy.broker.groups.coordinator import partition_for
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import api_keys, control
from kproxy_codec import error_codes as codes
from tests.support.brokers.reference_broker import BrokerProcess, Closed, RawClient, start_brokers
from tests.support.clients.group_members import MEMBERS, Member
from tests.support.clients.kafka_io import produce
from tests.support.processes.dev import serving
from tests.support.waiting import PATIENCE_S, wait_for

PARTITIONS = 3
OFFSETS_TOPIC = "__consumer_offsets"
OPTIONS: dict[str, Any] = {
    "num_partitions": PARTITIONS,
    "default_replication_factor": 3,
    "group_initial_rebalance_delay_s": 0.3,
    "group_min_session_timeout_s": 1,
}
# The clients' own close takes about as long as an answer to LeaveGroup.
CLOSED_WITHIN_S = 3.0
UNREACHABLE = (OSError, Closed)


class Site(NamedTuple):
    """Three brokers, and a proxy before them."""

    brokers: list[BrokerProcess]
    proxy: str

    @property
    def direct(self) -> str:
        return ",".join(each.address for each in self.brokers)

    def coordinator(self, group: str) -> BrokerProcess:
        with next(each for each in self.brokers if each.process.poll() is None).client() as client:
            found = wait_for(lambda: find(client, group).node_id + 1, what="the group has a coordinator")
        return self.brokers[int(found) - 2]


@pytest.fixture(scope="module")
def site(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory, prefix = tmp_path_factory.mktemp("groups"), f"/groups-{os.getpid()}"
    arguments = ["serve", "--listen", "127.0.0.1:0", "--etcd", etcd.endpoint, "--prefix", prefix]
    with (
        start_brokers((1, 2, 3), directory, etcd.endpoint, prefix, lease_ttl_s=60, **OPTIONS) as brokers,
        serving(arguments, directory / "serve.stderr") as proxy,
    ):
        yield Site(brokers, proxy.kafka)


@pytest.fixture
def name() -> str:
    """A name for a topic and a group."""
    return f"g-{uuid.uuid4().hex[:12]}"


def write(bootstrap: str, topic: str, first: int, count: int) -> set[bytes]:
    values = [b"%d" % number for number in range(first, first + count)]
    for partition in range(PARTITIONS):
        produce(bootstrap, topic, values[partition::PARTITIONS], partition)
    return set(values)


@pytest.mark.long(but=4)
@pytest.mark.parametrize("way", [pytest.param("direct", marks=pytest.mark.long), "proxy"])
@pytest.mark.parametrize("client", MEMBERS)
def test_members_share_partitions_and_continue(site: Site, name: str, client: str, way: str) -> None:
    bootstrap, member = getattr(site, way), MEMBERS[client]
    early = write(bootstrap, name, 0, 30)
    with member(bootstrap, name, name) as first:
        first.wait_for_values(early)
        assert first.assigned == {0, 1, 2}
        with member(bootstrap, name, name) as second:
            wait_for(lambda: shares(first, second), what=lambda: f"{first.assigned}, {second.assigned}")
            late = write(bootstrap, name, 30, 30)
            wait_for(lambda: first.values | second.values >= early | late, what="both read all")
        wait_for(lambda: len(first.assigned) == PARTITIONS, what="one has all partitions of the one that left")
    assert max(first.closed_in_s, second.closed_in_s) < CLOSED_WITHIN_S
    new = write(bootstrap, name, 60, 3)
    with member(bootstrap, name, name) as third:
        third.wait_for_values(new)
    assert third.values == new, "what was read and committed came again"


def shares(first: Member, second: Member) -> bool:
    return (
        bool(first.assigned and second.assigned)
        and first.assigned | second.assigned == {0, 1, 2}
        and (not first.assigned & second.assigned)
    )


@pytest.mark.long(but=1)
@pytest.mark.parametrize("client", MEMBERS)
def test_silent_members_partitions_go_to_another(site: Site, name: str, client: str) -> None:
    """The silent member is made by hand, and sends nothing after its SyncGroup."""
    written = write(site.direct, name, 0, 9)
    with site.coordinator(name).client() as silent:
        join_alone(silent, name, session_timeout_ms=1500)
        with MEMBERS[client](site.direct, name, name) as member:
            member.wait_for_values(written)
            assert member.assigned == {0, 1, 2}


def join_alone(client: RawClient, group: str, *, session_timeout_ms: int = 10_000) -> tuple[str, int]:
    """Join by hand as the only member; return its id and generation."""
    fields: dict[str, Any] = {
        "group_id": group,
        "session_timeout_ms": session_timeout_ms,
        "rebalance_timeout_ms": 5_000,
        "protocol_type": "consumer",
        "protocols": [{"name": name, "metadata": b""} for name in ("range", "roundrobin")],
    }
    told = client.request(api_keys.JOIN_GROUP, 9, member_id="", **fields)
    assert told.error_code == codes.MEMBER_ID_REQUIRED
    joined = client.request(api_keys.JOIN_GROUP, 9, member_id=told.member_id, **fields)
    assert (joined.error_code, joined.leader) == (codes.NONE, told.member_id)
    member = {"group_id": group, "member_id": joined.member_id, "generation_id": joined.generation_id}
    assignment = [{"member_id": joined.member_id, "assignment": b"all"}]
    synced = client.request(
        api_keys.SYNC_GROUP, 5, **member, protocol_type="consumer", protocol_name="range", assignments=assignment
    )
    assert (synced.error_code, synced.assignment) == (codes.NONE, b"all")
    return joined.member_id, joined.generation_id


# The coordinator


@pytest.fixture
def mortal(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> Iterator[Site]:
    """Brokers whose leases end soon."""
    arguments = ["serve", "--listen", "127.0.0.1:0", "--etcd", etcd.endpoint, "--prefix", etcd_prefix]
    with (
        start_brokers((1, 2, 3), tmp_path, etcd.endpoint, etcd_prefix, lease_ttl_s=2, **OPTIONS) as brokers,
        serving(arguments, tmp_path / "serve.stderr") as proxy,
    ):
        yield Site(brokers, proxy.kafka)


@pytest.mark.long(but=1)
@pytest.mark.parametrize("client", MEMBERS)
def test_members_survive_death_of_coordinator(mortal: Site, name: str, client: str) -> None:
    written, member = write(mortal.direct, name, 0, 30), MEMBERS[client]
    with member(mortal.direct, name, name) as first, member(mortal.proxy, name, name) as second:
        wait_for(lambda: first.values | second.values >= written and shares(first, second), what="both read")
        dead = mortal.coordinator(name)
        dead.kill()
        written |= write(mortal.proxy, name, 30, 30)
        wait_for(lambda: first.values | second.values >= written, what="the rest is read")
        # Both have found the next coordinator: aiokafka that is closed before never ends.
        wait_for(lambda: all_committed(mortal, name) == len(written), what="all is committed")
        dead.start()
    new = write(mortal.direct, name, 60, 3)
    with member(mortal.direct, name, name) as third:
        third.wait_for_values(new)
    assert third.values == new, "what was read and committed came again"


def all_committed(site: Site, group: str) -> int:
    with suppress(*UNREACHABLE), site.coordinator(group).client() as client:
        return sum(offsets_of(client, group).values())
    return 0


def test_commits_never_go_back_when_coordinators_die(mortal: Site, name: str) -> None:
    """One member commits ever higher offsets, another reads them, while coordinators are killed one by one."""
    write(mortal.direct, name, 0, 3)
    committed, stopping = [0], threading.Event()

    def keep_committing() -> None:
        while not stopping.is_set():
            with suppress(*UNREACHABLE), mortal.coordinator(name).client() as client:
                while commit(client, name, name, committed[0] + 1) == codes.NONE and not stopping.is_set():
                    committed[0] += 1

    def read_until(wanted: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while committed[0] < wanted:
            assert time.monotonic() < deadline, f"{committed[0]} commits, not {wanted}"
            with suppress(*UNREACHABLE), mortal.coordinator(name).client() as client:
                while committed[0] < wanted:
                    least = committed[0]
                    [found] = client.request(
                        api_keys.OFFSET_FETCH, 8, groups=[{"group_id": name, "topics": None}]
                    ).groups
                    if found.error_code != codes.NONE:
                        break
                    offset = found.topics[0].partitions[0].committed_offset if found.topics else 0
                    assert offset >= least, f"{least} had been committed, {offset} is read"

    committing = threading.Thread(target=keep_committing)
    committing.start()
    try:
        for _ in range(2):
            read_until(committed[0] + 50)
            dead = mortal.coordinator(name)
            dead.kill()
            read_until(committed[0] + 50)
            dead.start()
    finally:
        stopping.set()
        committing.join(PATIENCE_S)


# The requests themselves


def offsets_of(client: RawClient, group: str, version: int = 8) -> dict[tuple[str, int], int]:
    if version >= 8:
        [found] = client.request(api_keys.OFFSET_FETCH, version, groups=[{"group_id": group, "topics": None}]).groups
    else:
        found = client.request(api_keys.OFFSET_FETCH, version, group_id=group, topics=None)
    assert found.error_code in (codes.NONE, codes.COORDINATOR_LOAD_IN_PROGRESS, codes.NOT_COORDINATOR)
    return {(t.name, each.partition_index): each.committed_offset for t in found.topics for each in t.partitions}


def commit(client: RawClient, group: str, topic: str, offset: int, version: int = 8, **member: Any) -> int:
    fields = {"partition_index": 0, "committed_offset": offset, "committed_metadata": "m"}
    identity = {"member_id": "", "generation_id_or_member_epoch": -1} | member
    topics = [{"name": topic, "partitions": [fields]}]
    answer = client.request(api_keys.OFFSET_COMMIT, version, group_id=group, topics=topics, **identity)
    code: int = answer.topics[0].partitions[0].error_code
    return code


def find(client: RawClient, group: str, version: int = 4) -> control.Message:
    if version >= 4:
        return client.request(api_keys.FIND_COORDINATOR, version, key_type=0, coordinator_keys=[group]).coordinators[0]
    return client.request(api_keys.FIND_COORDINATOR, version, key=group)


@pytest.mark.parametrize("version", range(7))
def test_coordinator_is_the_partitions_leader(site: Site, name: str, version: int) -> None:
    with site.brokers[0].client() as client:
        found = find(client, name, version)
        leaders = client.leaders(OFFSETS_TOPIC)
    assert found.error_code == codes.NONE
    assert found.node_id == leaders[partition_for(name, len(leaders))]
    assert found.port == site.brokers[found.node_id - 1].port


def test_other_brokers_are_not_the_coordinator(site: Site, name: str) -> None:
    write(site.direct, name, 0, 3)
    coordinator = site.coordinator(name)
    with next(each for each in site.brokers if each is not coordinator).client() as client:
        assert commit(client, name, name, 1) == codes.NOT_COORDINATOR
        heartbeat = {"group_id": name, "generation_id": 1, "member_id": "m"}
        assert client.request(api_keys.HEARTBEAT, 4, **heartbeat).error_code == codes.NOT_COORDINATOR
        [described] = client.request(api_keys.DESCRIBE_GROUPS, 6, groups=[name]).groups
        assert described.error_code == codes.NOT_COORDINATOR
        old = client.request(api_keys.OFFSET_FETCH, 1, group_id=name, topics=[{"name": name, "partition_indexes": [0]}])
        assert old.topics[0].partitions[0].error_code == codes.NOT_COORDINATOR


def test_commits_by_topic_id_are_read_back(site: Site, name: str) -> None:
    write(site.direct, name, 0, 3)
    with site.coordinator(name).client() as client:
        topic_id = client.metadata(name, create=False).topics[0].topic_id
        partition = {"partition_index": 0, "committed_offset": 2, "committed_metadata": ""}
        topics = [{"topic_id": topic_id, "partitions": [partition]}]
        answer = client.request(api_keys.OFFSET_COMMIT, 10, group_id=name, topics=topics)
        assert [(each.topic_id, each.partitions[0].error_code) for each in answer.topics] == [(topic_id, codes.NONE)]
        for asked in (None, [{"topic_id": topic_id, "partition_indexes": [0]}]):
            groups = [{"group_id": name, "topics": asked}]
            [found] = client.request(api_keys.OFFSET_FETCH, 10, groups=groups).groups
            assert [(each.topic_id, each.partitions[0].committed_offset) for each in found.topics] == [(topic_id, 2)]


def test_offsets_topic_is_internal_and_not_written(site: Site) -> None:
    with site.brokers[0].client() as client:
        find(client, "any")
        [topic] = client.metadata(OFFSETS_TOPIC).topics
    assert (topic.is_internal, len(topic.partitions)) == (True, 50)
    assert {len(each.replica_nodes) for each in topic.partitions} == {3}
    producer = confluent_kafka.Producer({"bootstrap.servers": site.direct, "message.timeout.ms": 5_000})
    failed: list[Any] = []
    producer.produce(OFFSETS_TOPIC, b"x", on_delivery=lambda error, _: failed.append(error))
    producer.flush()
    assert [each.code() for each in failed] == [codes.INVALID_TOPIC_EXCEPTION]
