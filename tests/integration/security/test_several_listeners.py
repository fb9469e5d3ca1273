"""Several proxies with several listeners: each client gets the addresses of its own listener."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient  # type: ignore[attr-defined]

from tests.support.clients.kafka_io import create_topic
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.security.tls_files import Signer
from tests.support.waiting import wait_for

TIMEOUT_S = 60.0


class Proxy:
    def __init__(self, process: KproxyProcess) -> None:
        self.process = process
        listeners = process.fields["listeners"].split(",")
        self.by_name: dict[str, str] = dict(each.partition("@")[::2] for each in listeners)


@pytest.fixture
def proxies(dev_cluster: KproxyProcess, tmp_path: Path, signer: Signer) -> Iterator[list[Proxy]]:
    """Two with both listeners, and one with only the internal one."""
    server = signer.issue("server", "localhost")
    prefix = f"/listeners-{uuid.uuid4().hex[:8]}"
    internal = '[[listeners]]\nname = "internal"\nlisten = "127.0.0.1:0"\n'
    external = '[[listeners]]\nname = "external"\nlisten = "localhost:0"\n'
    external += f'tls.cert = "{server.cert}"\ntls.key = "{server.key}"\n'
    table = f'[ownership]\nownership = "static"\netcd = "{dev_cluster.etcd}"\nprefix = "{prefix}"\n[brokers]\n'
    table += f'1 = "{dev_cluster.kafka}"\n[[topics]]\nname = "t"\nowners = [1, 1, 1, 1, 1, 1, 1, 1]\n'
    started = []
    with ExitStack() as stack:
        for number, listeners in enumerate((internal + external, internal + external, internal)):
            file = tmp_path / f"{number}.toml"
            file.write_text(table + listeners)
            process = serving(["serve", "--config", file, "--admin", "127.0.0.1:0"], tmp_path / f"{number}.stderr")
            started.append(Proxy(stack.enter_context(process)))
        yield started


def told(address: str, **settings: str) -> set[str]:
    found = AdminClient({"bootstrap.servers": address, **settings}).list_topics(timeout=TIMEOUT_S)
    return {f"{each.host}:{each.port}" for each in found.brokers.values()}


def until_told(address: str, addresses: set[str], **settings: str) -> None:
    wait_for(lambda: told(address, **settings) == addresses, what=lambda: told(address, **settings))


def test_clients_learn_listeners_of_the_same_name(proxies: list[Proxy], signer: Signer) -> None:
    tls = {"security.protocol": "SSL", "ssl.ca.location": str(signer.ca)}
    internal = {proxy.by_name["internal"] for proxy in proxies}
    external = {proxy.by_name["external"] for proxy in proxies[:2]}
    assert not internal & external
    for proxy in proxies:
        until_told(proxy.by_name["internal"], internal)
    for proxy in proxies[:2]:
        until_told(proxy.by_name["external"], external, **tls)
    # A leaving proxy is named on neither.
    assert proxies[0].process.stop() == 0
    until_told(proxies[1].by_name["internal"], internal - {proxies[0].by_name["internal"]})
    until_told(proxies[1].by_name["external"], external - {proxies[0].by_name["external"]}, **tls)


def test_client_finds_all_partitions_by_its_listener(
    dev_cluster: KproxyProcess, proxies: list[Proxy], signer: Signer
) -> None:
    create_topic(dev_cluster.kafka, "t", 8)
    settings = {"security.protocol": "SSL", "ssl.ca.location": str(signer.ca)}
    client = AdminClient({"bootstrap.servers": proxies[0].by_name["external"], **settings})
    ids = set(client.list_topics(timeout=TIMEOUT_S).brokers)
    leaders = {each.leader for each in client.list_topics("t", timeout=TIMEOUT_S).topics["t"].partitions.values()}
    assert leaders <= ids


def test_proxies_share_one_file(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    file = tmp_path / "kproxy.toml"
    table = (
        f'[ownership]\nownership = "static"\netcd = "{dev_cluster.etcd}"\nprefix = "/shared-{uuid.uuid4().hex[:8]}"\n'
    )
    table += f'[brokers]\n1 = "{dev_cluster.kafka}"\n[[topics]]\nname = "t"\nowners = [1]\n'
    names = ("in", "out")
    file.write_text(table + "".join(f'[[listeners]]\nname = "{each}"\nlisten = "0.0.0.0:0"\n' for each in names))
    with ExitStack() as stack:
        for number, workers in enumerate("12"):
            told_to_clients = ",".join(f"{each}=pod-{number}.{each}:9092" for each in names)
            arguments = ["serve", "--config", file, "--workers", workers, "--advertise", told_to_clients]
            proxy = Proxy(stack.enter_context(serving(arguments, tmp_path / f"{number}.stderr")))
            ports = {each: proxy.by_name[each].rpartition(":")[2] for each in names}
        for each in names:
            until_told(f"127.0.0.1:{ports[each]}", {f"pod-0.{each}:9092", f"pod-1.{each}:9092"})
