"""`kproxy doctor` finds what is wrong with an etcd and with a proxy, and nothing where all is well."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kproxy.cli.doctor_checks import Finding, _about_clock, _about_version, examine_etcd, examine_proxy
from kproxy.config import Address, parse_address
from kproxy.config.etcd import EtcdOptions
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.ownership.etcd import EtcdClient, EtcdError
from tests.support.dev import KproxyProcess, run_kproxy
from tests.support.etcd import QUICK
from tests.support.etcd_cluster import ETCD_VERSION, EtcdCluster
from tests.support.etcd_secured import PASSWORD, Authority, enable_users, tls_etcd


def marks(findings: list[Finding]) -> list[str]:
    return [finding.mark for finding in findings]


@pytest.mark.parametrize(
    ("version", "fit"),
    [
        ("3.4.33", False),
        ("3.5.1", False),
        ("3.5.32", False),
        ("3.5.33", True),
        ("3.6.13", False),
        ("3.6.14", True),
        ("3.7.0", True),
        ("3.7.0-rc.1", True),
        ("4.0.0", True),
        ("2.3.8", False),
        ("unknown", False),
    ],
)
def test_releases_with_known_faults_are_warned_of(version: str, fit: bool) -> None:
    assert marks(_about_version("http://a", version)) == ([] if fit else ["warn"])


async def test_three_sound_members_are_well_and_one_that_is_down_is_named(etcd_cluster: EtcdCluster) -> None:
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


async def test_members_that_do_not_belong_together_are_named(etcd: EmbeddedEtcd, etcd_cluster: EtcdCluster) -> None:
    findings = await examine_etcd([etcd.endpoint, etcd_cluster.endpoints[0]], EtcdOptions(), "/kafscale")
    assert Finding("FAIL", "the members named belong to different clusters: name those of one.") in findings
    twice = await examine_etcd([etcd.endpoint, etcd.endpoint.replace("127.0.0.1", "localhost")], EtcdOptions(), "/a")
    assert any("named twice" in finding.text for finding in twice)


async def test_tls_and_users_are_looked_at(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    async with tls_etcd(tmp_path / "etcd", authority.issue("localhost")) as (server, port):
        await enable_users(server.endpoint, prefix="/kafscale/")
        options = EtcdOptions(ca=authority.ca, username="kproxy", password=PASSWORD)
        url = f"https://localhost{port}"
        findings = await examine_etcd([url], options, "/kafscale")
        assert findings[0].mark == "ok"
        assert "TLS, user kproxy, leads" in findings[0].text
        # Its release is old, and it is alone.
        assert marks(findings) == ["ok", "warn", "warn"]
        assert marks(await examine_etcd([url], options, "/elsewhere")) == ["ok", "FAIL", "warn", "warn"]
        wrong = await examine_etcd([url], EtcdOptions(username="kproxy", password=PASSWORD), "/kafscale")
        assert wrong[0].mark == "FAIL"
        assert "--etcd-ca" in wrong[0].text
        assert PASSWORD not in str(findings + wrong)
        assert marks(await _about_clock(url, options)) == []


async def test_a_clock_that_differs_is_warned_of(etcd: EmbeddedEtcd) -> None:
    assert await _about_clock(etcd.endpoint, EtcdOptions()) == []
    (slow,) = await _about_clock(etcd.endpoint, EtcdOptions(), lambda: time.time() + 60)
    assert "behind this machine's" in slow.text
    (fast,) = await _about_clock(etcd.endpoint, EtcdOptions(), lambda: time.time() - 60)
    assert "ahead of this machine's" in fast.text


async def fill(client: EtcdClient) -> None:
    """Until etcd is full: it compares with what it has committed to its file, which it does every now and then."""
    for _ in range(1_000):
        await client.put("/a", bytes(50_000))


async def test_an_alarm_is_a_failure(tmp_path: Path) -> None:
    arguments = [*QUICK, "--quota-backend-bytes", "100000"]
    async with EmbeddedEtcd(tmp_path, extra_arguments=arguments) as server:
        client = EtcdClient([server.endpoint])
        await client.connect()
        with pytest.raises(EtcdError, match="space exceeded"):
            await fill(client)
        await client.close()
        findings = await examine_etcd([server.endpoint], EtcdOptions(), "/kafscale")
        assert any(finding.mark == "FAIL" and "NOSPACE" in finding.text for finding in findings)


async def test_a_proxy_is_asked_whether_it_is_ready(dev_cluster: KproxyProcess) -> None:
    page = parse_address(dev_cluster.admin, "--admin")
    assert await examine_proxy(page) == [Finding("ok", f"the proxy at {page}: ready")]
    (nobody,) = await examine_proxy(Address("127.0.0.1", 1))
    assert (nobody.mark, "--admin" in nobody.text) == ("FAIL", True)
    (broker,) = await examine_proxy(parse_address(dev_cluster.etcd.removeprefix("http://"), "--admin"))
    assert broker.mark == "FAIL"
    assert "no admin page" in broker.text


async def test_the_command_prints_a_line_for_each_and_fails_where_one_does(dev_cluster: KproxyProcess) -> None:
    arguments = ["doctor", "--etcd", dev_cluster.etcd, "--admin", dev_cluster.admin]
    well = await asyncio.to_thread(run_kproxy, *arguments)
    assert (well.status, well.stderr) == (0, "")
    assert [line[:4].strip() for line in well.stdout.splitlines()] == ["ok", "warn", "warn", "ok"]
    bad = await asyncio.to_thread(run_kproxy, "doctor", "--etcd", "ftp://a")
    assert bad.status == 1
    assert bad.stdout.startswith("FAIL  etcd endpoint 'ftp://a'")
