"""Clients wait hardly longer through a proxy than direct when leaders move between live brokers of Apache Kafka.

Each client writes to two partitions of one topic, which move together: to one of them direct, to the other one through
a proxy of its own. A shared proxy would learn of a move from one client, and help the others.

With acks=0 no client can wait. A Kafka broker closes the connection on which such records come for a partition that it
does not lead. A client behind the proxy must notice as well, unless the proxy finds the new leader by itself.

With KPROXY_TEST_MOVES leaders move more often, and more releases of the Java client write.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

import psutil
import pytest

from tests.support.brokers.kafka_jars import KAFKA_VERSION
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import read_topic
from tests.support.clients.steady_writers import MODES, Mode, Running, Writer, find, writing
from tests.support.processes.dev import KproxyProcess
from tests.support.processes.served import kafka_proxy, port_of

# The first run of all downloads the jars.
pytestmark = [pytest.mark.java, pytest.mark.timeout(900)]

LEAST_MOVES = 3
MOVES = int(os.environ.get("KPROXY_TEST_MOVES", LEAST_MOVES))
JAVA = (KAFKA_VERSION,) if MOVES <= LEAST_MOVES else ("0.11.0.3", "2.1.1", "2.8.2", "3.9.1", KAFKA_VERSION)
# By default of two kinds: who is told by acknowledgements and who is closed depends on the proxy alone.
EVERY_KIND = MOVES > LEAST_MOVES or os.environ.get("KPROXY_TEST_ALL") == "1"
PYTHONS = ("kafka-python", "aiokafka") if EVERY_KIND else ()
CLIENTS = ("librdkafka", *PYTHONS, *(f"java {version}" for version in JAVA))
# What a client waits for where something is lost takes it 30 s; a busy machine stops a process for some.
MORE_THAN_DIRECT_S = 15.0
# With acks=0.
NOTICED_S = 15.0
# What takes longer is not waited for.
HANG_S = 60.0
START_S = 60.0
# Acknowledgements before the next move.
SETTLED = 20
LOOK_S = 0.05


@pytest.fixture(scope="module")
def proxies(real_kafka: RealKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, KproxyProcess]]:
    """One for each client."""
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("proxies")
        yield {name: stack.enter_context(kafka_proxy(directory / name, real_kafka.bootstrap)) for name in CLIENTS}


def writers_of(
    mode: Mode, proxies: dict[str, KproxyProcess], real_kafka: RealKafka
) -> tuple[str, dict[str, Writer], dict[str, Writer]]:
    """A topic, and by client who writes to it direct and through a proxy."""
    topic = real_kafka.create_topic(f"planned-{uuid.uuid4().hex[:10]}", 2 * len(CLIENTS), leader=1)
    direct, proxied = {}, {}
    for number, name in enumerate(CLIENTS):
        direct[name] = Writer(name, real_kafka.bootstrap, topic, 2 * number, mode)
        proxied[name] = Writer(name, proxies[name].kafka, topic, 2 * number + 1, mode)
    return topic, direct, proxied


# What clients do by default; the other modes wait as long.
@pytest.mark.long
@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=() if each == "idempotent" else pytest.mark.long) for each in MODES]
)
def test_planned_move_delays_clients_hardly_more_than_direct(
    mode: str, proxies: dict[str, KproxyProcess], real_kafka: RealKafka
) -> None:
    topic, direct, proxied = writers_of(MODES[mode], proxies, real_kafka)
    with writing([*direct.values(), *proxied.values()]) as running:
        gaps = move_leaders(running, real_kafka, topic)
    read = read_topic(real_kafka.bootstrap, topic, 2 * len(CLIENTS), 0)
    for way, writers in (("direct", direct), ("proxied", proxied)):
        for name, writer in writers.items():
            waited = [round(gap, 2) for gap in gaps[writer]]
            print(f"{mode:13} {name:13} {way:7} s {waited}, {find(writer, read)}, {writer.problems[:3]}")

    for name, writer in proxied.items():
        assert writer.problems == [], name
        found = find(writer, read)
        assert found.is_in_order, name
        # With acks=1 Kafka itself loses at each move what the next leader has not fetched.
        assert found.lost == 0 or mode == "acks-1", name
        # What was appended before the leader was deposed, and refused after that, a plain producer writes again.
        assert found.twice <= (0 if MODES[mode].is_idempotent else MOVES), name
    longer = {name: median(gaps[proxied[name]]) - median(gaps[direct[name]]) for name in CLIENTS}
    assert max(longer.values()) < MORE_THAN_DIRECT_S, longer


def move_leaders(running: Running, real_kafka: RealKafka, topic: str) -> dict[Writer, list[float]]:
    """The longest time without an acknowledgement, in seconds, by writer and move. The first hang ends it."""
    assert running.all_acknowledged(0.0, SETTLED, time.monotonic() + START_S), "a writer has not begun"
    gaps: dict[Writer, list[float]] = {writer: [] for writer in running.writers}
    for _ in range(MOVES):
        began = time.monotonic()
        real_kafka.move_leaders(topic)
        moved = time.monotonic()
        goes_on = running.all_acknowledged(moved, SETTLED, moved + HANG_S)
        ended = time.monotonic()
        for writer, waited in gaps.items():
            waited.append(writer.longest_gap(began, ended))
        if not goes_on:
            break
    return gaps


# acks=0


class Noticed(NamedTuple):
    """Seconds after a move; HANG_S where it did not happen."""

    written: float
    closed: float


def test_planned_move_delivers_records_or_closes_the_client(
    proxies: dict[str, KproxyProcess], real_kafka: RealKafka
) -> None:
    topic, direct, proxied = writers_of(Mode("0"), proxies, real_kafka)
    noticed: dict[Writer, list[Noticed]] = {writer: [] for writer in (*direct.values(), *proxied.values())}
    with writing(list(noticed)) as running:
        for _ in range(MOVES):
            assert running.all_acknowledged(time.monotonic(), SETTLED, time.monotonic() + START_S), "a writer stands"
            for writer, seen in watch_move(real_kafka, proxies, topic, list(noticed)).items():
                noticed[writer].append(seen)
    read = read_topic(real_kafka.bootstrap, topic, 2 * len(CLIENTS), 0)
    for way, writers in (("direct", direct), ("proxied", proxied)):
        for name, writer in writers.items():
            times = [(round(seen.written, 2), round(seen.closed, 2)) for seen in noticed[writer]]
            sent, there = len(writer.acknowledged_at), sum(each.partition == writer.partition for each in read)
            print(f"{name:13} {way:7} (written, closed) after s {times}, {there} of {sent}, {writer.problems[:3]}")

    for name, writer in proxied.items():
        assert find(writer, read).is_in_order, name
        assert median(seen.written for seen in noticed[writer]) < HANG_S, name
        assert median(min(seen) for seen in noticed[writer]) < NOTICED_S, name


def watch_move(
    real_kafka: RealKafka, proxies: dict[str, KproxyProcess], topic: str, writers: list[Writer]
) -> dict[Writer, Noticed]:
    """Move the leaders, and look for records at the new one and for connections that end."""
    clients = {name: client_ports(proxy) for name, proxy in proxies.items()}
    real_kafka.move_leaders(topic)
    moved = time.monotonic()
    leader = real_kafka.leaders(topic)[0]
    [broker] = [broker for broker in real_kafka.brokers if broker.node_id == leader]
    stored = {writer: len(broker.stored(topic, writer.partition)) for writer in writers}
    written: dict[Writer, float] = {}
    closed: dict[str, float] = {}
    while len(written) < len(writers) and time.monotonic() < moved + HANG_S:
        time.sleep(LOOK_S)
        after = time.monotonic() - moved
        for writer in writers:
            if len(broker.stored(topic, writer.partition)) > stored[writer]:
                written.setdefault(writer, after)
        for name, proxy in proxies.items():
            if clients[name] - client_ports(proxy):
                closed.setdefault(name, after)
    return {
        writer: Noticed(
            written.get(writer, HANG_S),
            HANG_S if writer.bootstrap == real_kafka.bootstrap else closed.get(writer.name, HANG_S),
        )
        for writer in writers
    }


def client_ports(proxy: KproxyProcess) -> set[int]:
    """The other ends of the connections that clients have to a proxy."""
    held = psutil.Process(proxy.pid).net_connections("tcp")
    return {each.raddr.port for each in held if each.raddr and each.laddr.port == port_of(proxy)}
