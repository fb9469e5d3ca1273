"""Groups of kcat, Java, Go and Node on reference brokers behind a proxy, while members, coordinators and proxies die.

Nothing is lost, no committed offset goes back, and a member that is closed leaves at once.
tests/integration/broker/test_groups.py has the clients of Python.
"""

from __future__ import annotations

import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import confluent_kafka
import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy_codec import api_keys
from kproxy_codec import error_codes as codes
from tests.integration.broker.test_groups import OPTIONS, PARTITIONS, UNREACHABLE, Site, write
from tests.support.brokers.reference_broker import start_brokers
from tests.support.clients.member_processes import COMMANDS, MemberProcess, console_consumer
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import port_of
from tests.support.waiting import wait_for

# The first run of all downloads jars, and modules of Go and Node.
pytestmark = [pytest.mark.java, pytest.mark.long, pytest.mark.timeout(900)]

# Of two Java virtual machines on a busy machine.
START_S = 200.0
CLOSED_WITHIN_S = 1.0
# Their own code waits: Java's virtual machine ends. KafkaJS ends its fetch of up to five seconds, direct at Kafka too:
# closed 1.3 s after its last record it takes 3.7 to 4.0 s there.
CLOSE_LATER = {"console consumer": 5.0, "KafkaJS": 10.0}


class ProxiedSite(Site):
    """Three brokers whose leases end soon, and a proxy that keeps its address when it is started again."""

    def start_proxy(self, stack: ExitStack, directory: Path, listen: str) -> KproxyProcess:
        etcd, prefix = self.brokers[0].arguments[2:4]
        arguments = ["serve", "--listen", listen, "--etcd", etcd, "--prefix", prefix]
        return stack.enter_context(serving(arguments, directory / f"serve-{uuid.uuid4().hex[:6]}.stderr"))


@pytest.fixture
def site(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> Iterator[ProxiedSite]:
    with start_brokers((1, 2, 3), tmp_path, etcd.endpoint, etcd_prefix, lease_ttl_s=2, **OPTIONS) as brokers:
        yield ProxiedSite(brokers, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_group_survives_every_death(site: ProxiedSite, name: str, tmp_path: Path) -> None:
    group, command, committed = f"c-{uuid.uuid4().hex[:12]}", COMMANDS[name], 0
    with ExitStack() as stack:
        proxy = site.start_proxy(stack, tmp_path, "127.0.0.1:0")

        def member() -> MemberProcess:
            return stack.enter_context(MemberProcess(command(proxy.kafka, group, group)))

        written = write(proxy.kafka, group, 0, 30)
        first, second = member(), member()

        def go_on(count: int) -> None:
            """Write so many, and wait until the members have read all."""
            nonlocal written, committed
            written |= write(proxy.kafka, group, len(written), count)
            wait_for(lambda: first.values | second.values >= written, what="all is read")
            before, committed = committed, committed_by(site, group)
            assert before <= committed, "a committed offset went back"

        wait_for(lambda: members(site, group) == 2, START_S, lambda: f"no two members: {first.said} {second.said}")
        go_on(30)
        dead = site.coordinator(group)
        dead.kill()
        go_on(30)
        dead.start()
        proxy.signal(signal.SIGKILL)
        proxy.wait()
        proxy = site.start_proxy(stack, tmp_path, f"127.0.0.1:{port_of(proxy)}")
        go_on(30)
        second.kill()
        go_on(30)
        wait_for(lambda: members(site, group) == 1, what="one member is left")
        took_s = first.close()
        assert took_s < CLOSE_LATER.get(name, CLOSED_WITHIN_S)
        assert members(site, group) == 0
        # It has committed all that it has read; nothing comes again.
        new = write(proxy.kafka, group, len(written), PARTITIONS)
        third = member()
        third.wait_for_values(new)
        assert third.values == new
        print(f"{name}: closed in {took_s:.2f} s")


def committed_by(site: Site, group: str) -> int:
    """The sum of the committed offsets, as soon as there is a coordinator."""

    def told() -> list[int] | None:
        with suppress(*UNREACHABLE), site.coordinator(group).client() as client:
            [found] = client.request(api_keys.OFFSET_FETCH, 8, groups=[{"group_id": group, "topics": None}]).groups
            if found.error_code == codes.NONE:
                return [0, *(each.committed_offset for topic in found.topics for each in topic.partitions)]
        return None

    return sum(wait_for(told, what="a coordinator"))


def members(site: Site, group: str) -> int:
    """The members of a stable group."""
    with site.coordinator(group).client() as client:
        [found] = client.request(api_keys.DESCRIBE_GROUPS, 5, groups=[group]).groups
    return len(found.members) if found.group_state in ("Stable", "Empty") else -1


# What is not offered


def test_consumer_protocol_is_refused_with_the_reason(site: ProxiedSite) -> None:
    """KIP-848. (kafka-python has no such setting.)"""
    write(site.direct, "refused", 0, PARTITIONS)
    settings = {"bootstrap.servers": site.direct, "group.id": "new", "group.protocol": "consumer"}
    consumer = confluent_kafka.Consumer(settings)
    consumer.subscribe(["refused"])
    polled = wait_for(lambda: consumer.poll(0.1), what="an error")
    consumer.close()
    java = console_consumer(site.direct, "refused", "new", "group.protocol=consumer")
    done = subprocess.run(java, capture_output=True, text=True, timeout=START_S, check=False)
    assert "ConsumerGroupHeartbeat fatal error" in str(polled.error())
    assert "Set group.protocol=classic" in done.stdout + done.stderr
