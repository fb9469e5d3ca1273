"""`kproxy doctor` finds the faults of an etcd and of a proxy, and none if all is well."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kproxy.cli.doctor_checks import (
    Finding,
    _about_clock,
    _about_version,
    examine_etcd,
    examine_kafka,
    examine_proxy,
)
from kproxy.cli.options import AdminPlace
from kproxy.config import Address, parse_address
from kproxy.config.etcd import EtcdOptions
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, EtcdError
from kproxy_codec.api_keys import API_VERSIONS, METADATA
from kproxy_codec.control import decode_request
from kproxy_codec.error_codes import UNKNOWN_TOPIC_OR_PARTITION
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream
from tests.support.clients.kafka_io import read_partition
from tests.support.etcd.embedded import QUICK, connected
from tests.support.etcd.etcd_cluster import ETCD_VERSION, EtcdCluster
from tests.support.etcd.etcd_secured import PASSWORD, enable_users, tls_etcd
from tests.support.processes.dev import KproxyProcess, run_kproxy, serving
from tests.support.processes.ports import free_port
from tests.support.security.tls_files import Signer
from tests.support.waiting import wait_for


def marks(findings: list[Finding]) -> list[str]:
    return [finding.mark for finding in findings]


FAULTY = ("2.3.8", "3.4.33", "3.4.44", "3.5.1", "3.5.32", "3.6.13", "3.7.0", "unknown")
SOUND = ("3.5.33", "3.6.14", "3.7.1", "3.8.0-rc.1", "4.0.0")


@pytest.mark.parametrize("version", [*FAULTY, *SOUND])
def test_releases_with_known_faults_cause_warnings(version: str) -> None:
    assert marks(_about_version("http://a", version)) == (["warn"] if version in FAULTY else [])


async def test_doctor_passes_sound_members_and_names_down_one(etcd_cluster: EtcdCluster) -> None:
    findings = await examine_etcd(etcd_cluster.endpoints, EtcdOptions(), "/kafscale")
    assert marks(findings) == ["ok", "ok", "ok"], findings
    assert all(f"etcd {ETCD_VERSION}, no TLS, no user" in finding.text for finding in findings)
    assert sum("leads" in finding.text for finding in findings) == 1
    down = etcd_cluster.followers()[0]
    down.kill()
    findings = await examine_etcd(etcd_cluster.endpoints, EtcdOptions(), "/kafscale")
    etcd_cluster.start_member(down)
    await etcd_cluster.healthy()
    assert sorted(marks(findings)) == ["FAIL", "ok", "ok"]
    assert next(finding for finding in findings if finding.mark == "FAIL").text.count(down.endpoint) == 1


async def test_members_of_different_clusters_are_named(etcd: EmbeddedEtcd, etcd_cluster: EtcdCluster) -> None:
    findings = await examine_etcd([etcd.endpoint, etcd_cluster.endpoints[0]], EtcdOptions(), "/kafscale")
    (differ,) = (finding for finding in findings if finding.mark == "FAIL")
    assert differ.text == "the members named belong to different clusters: name those of one."
    assert (differ.check, differ.at) == ("etcd.members", f"{etcd.endpoint},{etcd_cluster.endpoints[0]}")
    twice = await examine_etcd([etcd.endpoint, etcd.endpoint.replace("127.0.0.1", "localhost")], EtcdOptions(), "/a")
    assert any("named twice" in finding.text for finding in twice)


async def test_tls_and_users_are_checked(tmp_path: Path) -> None:
    authority = Signer(tmp_path / "ca")
    async with tls_etcd(tmp_path / "etcd", authority.issue("localhost")) as (server, port):
        await enable_users(server.endpoint, prefix="/kafscale/")
        options = EtcdOptions(ca=authority.ca, username="kproxy", password=PASSWORD)
        url = f"https://localhost{port}"
        findings = await examine_etcd([url], options, "/kafscale")
        assert findings[0].mark == "ok"
        assert "TLS, user kproxy, leads" in findings[0].text
        # Its release is old, and it is the only member.
        assert marks(findings) == ["ok", "warn", "warn"]
        assert marks(await examine_etcd([url], options, "/elsewhere")) == ["ok", "FAIL", "warn", "warn"]
        wrong = await examine_etcd([url], EtcdOptions(username="kproxy", password=PASSWORD), "/kafscale")
        assert wrong[0].mark == "FAIL"
        assert "--etcd-ca" in wrong[0].text
        assert PASSWORD not in str(findings + wrong)
        assert marks(await _about_clock(url, options)) == []


async def test_differing_clock_causes_a_warning(etcd: EmbeddedEtcd) -> None:
    assert await _about_clock(etcd.endpoint, EtcdOptions()) == []
    (slow,) = await _about_clock(etcd.endpoint, EtcdOptions(), lambda: time.time() + 60)
    assert "behind this machine's" in slow.text
    (fast,) = await _about_clock(etcd.endpoint, EtcdOptions(), lambda: time.time() - 60)
    assert "ahead of this machine's" in fast.text


async def fill(client: EtcdClient) -> None:
    """Fill etcd, which periodically compares with the size committed to its file."""
    for _ in range(1_000):
        await client.put("/a", bytes(50_000))


async def test_alarm_is_a_failure(tmp_path: Path) -> None:
    arguments = [*QUICK, "--quota-backend-bytes", "100000"]
    async with EmbeddedEtcd(tmp_path, extra_arguments=arguments) as server:
        async with connected(EtcdClient([server.endpoint])) as client:
            with pytest.raises(EtcdError, match="space exceeded"):
                await fill(client)
        findings = await examine_etcd([server.endpoint], EtcdOptions(), "/kafscale")
        assert any(finding.mark == "FAIL" and "NOSPACE" in finding.text for finding in findings)


async def test_readiness_of_a_proxy_is_checked(dev_cluster: KproxyProcess) -> None:
    page = AdminPlace(parse_address(dev_cluster.admin, "--admin"))
    assert await examine_proxy(page) == [Finding("ok", f"the proxy at {page}: ready", "proxy.ready", str(page))]
    (nobody,) = await examine_proxy(AdminPlace(Address("127.0.0.1", 1)))
    assert (nobody.mark, "--admin" in nobody.text) == ("FAIL", True)
    (broker,) = await examine_proxy(AdminPlace(parse_address(dev_cluster.etcd.removeprefix("http://"), "--admin")))
    assert broker.mark == "FAIL"
    assert "is not an admin page" in broker.text


async def test_doctor_prints_one_line_each_and_fails_once(dev_cluster: KproxyProcess) -> None:
    arguments = ["doctor", "--etcd", dev_cluster.etcd, "--admin", dev_cluster.admin]
    well = await asyncio.to_thread(run_kproxy, *arguments)
    assert (well.status, well.stderr) == (0, "")
    # Findings about replicas depend on the topics of other tests: see test_replication_seen.
    lines = [line for line in well.stdout.splitlines() if "in sync" not in line]
    assert [line[:4].strip() for line in lines] == ["ok", "warn", "warn", "ok"]
    bad = await asyncio.to_thread(run_kproxy, "doctor", "--etcd", "ftp://a")
    assert bad.status == 1
    assert bad.stdout.startswith("FAIL  etcd endpoint 'ftp://a'")


def examined(*arguments: str, environ: Mapping[str, str] | None = None) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit status and the findings in JSON, which match the text."""
    ended = run_kproxy("doctor", *arguments, "--json", environ=environ)
    told = json.loads(ended.stdout)
    assert ended.stderr == ""
    assert told["ok"] is (ended.status == 0)
    assert all(set(finding) == {"result", "check", "at", "text", "facts"} for finding in told["findings"])
    return ended.status, told["findings"]


def results(findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(finding["check"], finding["result"]) for finding in findings]


LOOKED = [("kafka.bootstrap", "ok"), ("kafka.named", "ok")]
ALL_WELL = [*LOOKED, ("kafka.topic", "ok"), ("kafka.write", "ok"), ("kafka.read", "ok")]


def test_doctor_writes_and_reads_back_a_record(dev_cluster: KproxyProcess) -> None:
    topic = f"probe-{uuid.uuid4().hex}"
    before, nothing = examined("--bootstrap", dev_cluster.kafka, "--no-write", "--topic", topic)
    assert (before, results(nothing)) == (0, LOOKED)
    for offset, created in enumerate((True, False)):
        status, findings = examined("--topic", topic, environ={"KPROXY_BOOTSTRAP": dev_cluster.kafka})
        assert (status, results(findings)) == (0, ALL_WELL)
        assert {finding["at"] for finding in findings} == {dev_cluster.kafka}
        about_topic, written, read = (finding["facts"] for finding in findings[2:])
        assert about_topic == {"topic": topic, "partitions": 1, "created": created}
        assert (written["partition"], written["offset"]) == (read["partition"], read["offset"]) == (0, offset)
        assert written["ms"] > 0
        assert f"partition 0, offset {offset}" in findings[3]["text"]
    values = read_partition(dev_cluster.kafka, topic, 0, 2)
    assert [json.loads(value)["written by"] for value in values] == ["kproxy doctor"] * 2
    said = run_kproxy("doctor", "--bootstrap", dev_cluster.kafka).stdout.splitlines()
    assert [line[:6] for line in said] == ["ok    "] * 5
    assert "kproxy-doctor" in said[2]


def test_address_where_nothing_speaks_kafka_is_named(dev_cluster: KproxyProcess) -> None:
    dead = f"127.0.0.1:{free_port()}"
    status, (nobody,) = examined("--bootstrap", dead)
    assert (status, nobody["check"], nobody["result"], nobody["at"]) == (1, "kafka.bootstrap", "fail", dead)
    assert f"{dead} cannot be reached" in nobody["text"]
    assert "--bootstrap H:P" in nobody["text"]
    # Clients cope with one dead address, but users should know about it.
    status, findings = examined("--bootstrap", f"{dead},{dev_cluster.kafka}")
    assert (status, results(findings)) == (1, [("kafka.bootstrap", "fail"), *ALL_WELL])
    status, (page,) = examined("--bootstrap", dev_cluster.admin)
    assert (status, "it speaks HTTP, not Kafka" in page["text"]) == (1, True)


def test_unreachable_advertised_address_is_named(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    advertised = f"127.0.0.1:{free_port()}"
    serve = ["serve", "--etcd", dev_cluster.etcd, "--alone", "--listen", "127.0.0.1:0", "--advertise", advertised]
    with serving(serve, tmp_path / "serve") as proxy:
        status, findings = examined("--bootstrap", proxy.kafka)
        assert (status, results(findings)) == (
            1,
            [("kafka.bootstrap", "ok"), ("kafka.named", "fail"), ("kafka.topic", "ok"), ("kafka.write", "fail")],
        )
        assert findings[1]["at"] == findings[3]["at"] == advertised
        assert f"{proxy.kafka} tells clients to connect to it" in findings[1]["text"]
        assert "--advertise" in findings[1]["text"]
        assert "no record was written" in findings[3]["text"]


def test_down_broker_shows_in_its_partitions(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> None:
    there = ["--etcd", etcd.endpoint, "--prefix", etcd_prefix, "--lease-ttl", "6"]
    with ExitStack() as stack:

        def start(number: int) -> KproxyProcess:
            # One replica each: no broker takes over.
            keeps = ["--replication-factor", "1", "--data-dir", str(tmp_path / f"data-{number}")]
            arguments = ["broker", "--node-id", str(number), *keeps, *there]
            return stack.enter_context(serving(arguments, tmp_path / f"broker-{number}"))

        brokers = {number: start(number) for number in (1, 2)}
        serve = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *there]
        proxy = stack.enter_context(serving(serve, tmp_path / "serve"))
        wait_for(lambda: examined("--bootstrap", proxy.kafka)[0] == 0)
        table = json.loads(run_kproxy("table", "--admin", proxy.admin, "--json").stdout)
        ((partition,),) = (topic["partitions"] for topic in table["topics"])
        brokers[partition["owner"]].signal(signal.SIGKILL)
        brokers[partition["owner"]].wait()
        status, findings = examined("--bootstrap", proxy.kafka)
        assert (status, results(findings)[:2], findings[-1]["result"]) == (1, LOOKED, "fail")
        assert findings[-1]["check"] in ("kafka.topic", "kafka.write")
        assert re.search("(NOT_LEADER_OR_FOLLOWER|LEADER_NOT_AVAILABLE).*try again", findings[-1]["text"])
        status, findings = examined("--admin", proxy.admin)
        (trouble,) = (finding for finding in findings if finding["check"] == "proxy.broker")
        assert (status, trouble["result"], trouble["facts"]["broker"]) == (0, "warn", partition["owner"])
        assert f"broker {partition['owner']} at 127.0.0.1:" in trouble["text"]
        start(partition["owner"])
        wait_for(lambda: examined("--bootstrap", proxy.kafka)[0] == 0, timeout_s=90)


def test_unwritable_topic_is_named_with_remedy(dev_cluster: KproxyProcess, tmp_path: Path) -> None:
    owned = f"owned-{uuid.uuid4().hex}"
    serve = ["serve", "--etcd", dev_cluster.etcd, "--alone", "--listen", "127.0.0.1:0", "--writer-group", f"{owned}=g"]
    with serving(serve, tmp_path / "serve") as proxy:
        status, findings = examined("--bootstrap", proxy.kafka, "--topic", owned)
        assert (status, results(findings)) == (1, [*ALL_WELL[:3], ("kafka.write", "fail")])
        assert "POLICY_VIOLATION" in findings[3]["text"]
        assert "name another topic with --topic" in findings[3]["text"]
    status, findings = examined("--bootstrap", dev_cluster.kafka, "--topic", "no such")
    assert (status, results(findings)) == (1, [*LOOKED, ("kafka.topic", "fail")])
    assert "INVALID_TOPIC_EXCEPTION" in findings[2]["text"]


def test_missing_and_wrong_logins_are_named(tmp_path: Path) -> None:
    users, config, password = (tmp_path / name for name in ("users.toml", "kproxy.toml", "password"))
    password.write_text("wonderland")
    password.chmod(0o600)
    assert run_kproxy("user", "add", "alice", "--users", users, "--password-file", password).status == 0
    config.write_text(
        f"""
        brokers.1 = "127.0.0.1:{free_port()}"
        ownership.ownership = "static"
        sasl = {{mechanisms = ["SCRAM-SHA-512"], users = "{users}"}}
        """
    )
    with serving(["serve", "--listen", "127.0.0.1:0", "--config", str(config)], tmp_path / "serve") as proxy:
        asked = ["--bootstrap", proxy.kafka, "--no-write"]
        status, (finding,) = examined(*asked)
        assert (status, "wants SASL: give --broker-sasl-mechanism" in finding["text"]) == (1, True)
        asked += ["--broker-sasl-mechanism", "SCRAM-SHA-512", "--broker-sasl-username", "alice"]
        status, (finding,) = examined(*asked, environ={"KPROXY_BROKER_SASL__PASSWORD": "underland"})
        assert (status, "correct the flags --broker-tls-... and --broker-sasl-" in finding["text"]) == (1, True)
        status, findings = examined(*asked, environ={"KPROXY_BROKER_SASL__PASSWORD": "wonderland"})
        assert (status, results(findings)) == (0, LOOKED)


class OneOf(ScriptedUpstream):
    """A broker of the cluster `named`, without topics; it names `brokers`."""

    named = ""
    brokers: Sequence[ScriptedUpstream] = ()

    def take(self, asked: Asked) -> None:
        if asked.header.api_key == API_VERSIONS:
            highest = {METADATA: 12, API_VERSIONS: 4}
            ranges = [{"api_key": key, "min_version": 0, "max_version": each} for key, each in highest.items()]
            asked.answer_message(error_code=0, api_keys=ranges)
            return
        request = decode_request(METADATA, asked.header.api_version, asked.body)
        missing = {"error_code": UNKNOWN_TOPIC_OR_PARTITION, "partitions": []}
        asked.answer_message(
            brokers=[{"node_id": each.node_id, "host": "127.0.0.1", "port": each.port} for each in self.brokers],
            cluster_id=self.named,
            controller_id=1,
            topics=[{**missing, "name": topic.name} for topic in request.topics],
        )


@asynccontextmanager
async def clusters(*named: str) -> AsyncIterator[list[Address]]:
    """A broker of each cluster; the first lists all of them."""
    brokers = [await OneOf(number).start() for number, _ in enumerate(named, 1)]
    for broker, name in zip(brokers, named, strict=True):
        broker.named, broker.brokers = name, brokers
    try:
        yield [Address("127.0.0.1", broker.port) for broker in brokers]
    finally:
        for broker in brokers:
            await broker.stop()


async def test_missing_topic_that_is_not_created_is_named() -> None:
    async with clusters("A") as (address,):
        findings = await examine_kafka([address], "none")
        assert marks(findings) == ["ok", "ok", "FAIL"]
        assert "create it, or name an existing one with --topic" in findings[2].text


async def test_address_of_another_cluster_is_named() -> None:
    """As when two clusters advertise one name, or an address was reassigned."""
    async with clusters("A", "B") as (ours, theirs):
        findings = await examine_kafka([ours], None)
        assert marks(findings) == ["ok", "ok", "FAIL"]
        assert findings[2].at == str(theirs)
        assert "belongs to another cluster (B, not A)" in findings[2].text
        findings = await examine_kafka([ours, theirs], None)
        assert any("belong to different clusters" in finding.text for finding in findings)
