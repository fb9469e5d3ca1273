"""TLS to etcd: its requirements, and the errors when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from kproxy.config.etcd import EtcdOptions
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.etcd import EtcdClient, EtcdMisused
from kproxy.etcd.lease import lease_keep_alive
from tests.support.etcd.embedded import connected, running, written
from tests.support.etcd.etcd_cluster import etcd_binaries
from tests.support.etcd.etcd_secured import Authority, Pair, TlsCluster, tls_etcd


class Secured(NamedTuple):
    """An etcd for `localhost` that requires certificates of `authority`; `client` is one."""

    authority: Authority
    client: Pair
    url: str
    server: EmbeddedEtcd


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    authority = Authority(directory / "ca")
    async with tls_etcd(directory / "etcd", authority.issue("localhost"), authority.ca) as (server, port):
        yield Secured(authority, authority.issue("client"), f"https://localhost{port}", server)


async def test_both_sides_present_their_certificates(secured: Secured) -> None:
    async with connected(
        EtcdClient([secured.url], EtcdOptions(ca=secured.authority.ca, **secured.client._asdict()))
    ) as client:
        assert await client.put("/a", b"1") > 0
        lease = await client.lease_grant(5)
        renewed = asyncio.Event()
        keeping = lease_keep_alive(client, lease.lease_id, clock=lambda: 0.0, on_renewed=lambda *_: renewed.set())
        async with running(keeping):
            await asyncio.wait_for(renewed.wait(), 30)


async def test_certificate_name_may_differ_from_configured_name(secured: Secured) -> None:
    options = EtcdOptions(ca=secured.authority.ca, server_name="localhost", **secured.client._asdict())
    async with connected(EtcdClient([secured.url.replace("localhost", "127.0.0.1")], options)) as client:
        assert await client.get("/nothing") is None


async def test_tls_errors_are_explained_in_one_sentence(secured: Secured, tmp_path: Path) -> None:
    ca, (cert, key), url, plain = secured.authority.ca, secured.client, secured.url, secured.server.endpoint
    other = Authority(tmp_path / "other")
    stranger, nowhere = other.issue("stranger"), tmp_path / "nowhere.pem"
    own, others = EtcdOptions(ca=ca, cert=cert, key=key), EtcdOptions(ca=other.ca, cert=cert, key=key)
    for to, options, says in (
        (url, others, "not signed by the authorities in .*: name its authority's certificate with --etcd-ca"),
        (url, EtcdOptions(cert=cert, key=key), "not signed by an authority that this machine trusts .*--etcd-ca"),
        (url.replace("localhost", "127.0.0.1"), own, "a certificate for another name than 127.0.0.1: .*server_name"),
        (url, EtcdOptions(ca=ca), "wants a client certificate: give one with --etcd-cert FILE and --etcd-key FILE"),
        (url, EtcdOptions(ca=ca, cert=stranger.cert, key=stranger.key), "does not take the client certificate"),
        (url.replace("https", "http"), EtcdOptions(), "speaks TLS: write https://localhost"),
        (plain.replace("http", "https"), EtcdOptions(ca=ca), "does not speak TLS: write http://127.0.0.1"),
        (plain, EtcdOptions(ca=ca), "which does not use TLS: write https://"),
        (url, EtcdOptions(ca=ca, cert=nowhere, key=key), "etcd's cert .*nowhere.pem cannot be read .No such file"),
        (url, EtcdOptions(ca=key), "etcd's ca .*client.key holds no certificates"),
        (url, EtcdOptions(ca=ca, cert=cert, key=stranger.key), "do not belong together"),
    ):
        client = EtcdClient([to], options)
        with pytest.raises(EtcdMisused, match=says) as raised:
            await client.connect()
        await client.close()
        sentence = str(raised.value)
        assert sentence.endswith(".")
        assert "\n" not in sentence


async def test_each_member_certificate_names_only_its_member(tmp_path: Path) -> None:
    etcd_binaries()
    authority = Authority(tmp_path / "ca")
    cluster = TlsCluster(tmp_path / "etcd", authority)
    try:
        await cluster.start()
        for url in cluster.tls_endpoints:
            alone = EtcdClient([url], EtcdOptions(ca=authority.ca))
            await alone.connect()
            await alone.close()
        async with connected(EtcdClient(cluster.tls_endpoints, EtcdOptions(ca=authority.ca))) as client:
            # Whichever it uses, the next one verifies too.
            for member in cluster.members:
                member.kill()
                assert await written(client, "/a")
                cluster.start_member(member)
                await cluster.healthy(member)
    finally:
        cluster.kill()


async def test_certificates_replaced_on_disk_are_used_on_reconnect(tmp_path: Path) -> None:
    authority, successor = Authority(tmp_path / "ca"), Authority(tmp_path / "new-ca")
    directory, pair = tmp_path / "etcd", authority.issue("localhost")
    async with tls_etcd(directory, pair, authority.ca) as (server, port):
        own = authority.issue("client")
        async with connected(
            EtcdClient([f"https://localhost{port}"], EtcdOptions(ca=authority.ca, cert=own.cert, key=own.key))
        ) as client:
            await server.stop()
            for old, new in ((pair, successor.issue("localhost")), (own, successor.issue("client"))):
                old.cert.write_bytes(new.cert.read_bytes())
                old.key.write_bytes(new.key.read_bytes())
            authority.ca.write_bytes(successor.ca.read_bytes())
            await server.start()
            assert await client.put("/a", b"1") > 0
