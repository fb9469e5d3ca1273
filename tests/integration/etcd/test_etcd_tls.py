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
from tests.support.etcd.etcd_secured import TlsCluster, tls_etcd
from tests.support.security.tls_files import Pair, Signer


class Secured(NamedTuple):
    """An etcd for `localhost` that requires certificates of `authority`; `client` is one."""

    authority: Signer
    client: Pair
    url: str
    server: EmbeddedEtcd


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    authority = Signer(directory / "ca")
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


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("another authority", "not signed by the authorities in .*: name its authority's certificate with --etcd-ca"),
        ("no authority", "not signed by an authority that this machine trusts .*--etcd-ca"),
        ("another name", "has a certificate for another name than 127.0.0.1: .*server_name"),
        ("no client certificate", "wants a client certificate: give one with --etcd-cert FILE and --etcd-key FILE"),
        ("another client certificate", "does not take the client certificate"),
        ("plain to TLS", "speaks TLS: write https://localhost"),
        ("TLS to plain", "does not speak TLS: write http://127.0.0.1"),
        ("certificates and no TLS", "which does not use TLS: write https://"),
        ("missing file", "etcd's cert .*nowhere.pem cannot be read .No such file"),
        ("not a certificate", "etcd's ca .*client.key holds no certificates"),
        ("another's key", "do not belong together"),
    ],
)
async def test_tls_errors_are_explained_in_one_sentence(secured: Secured, tmp_path: Path, case: str, says: str) -> None:
    ca, (cert, key), url = secured.authority.ca, secured.client, secured.url
    other = Signer(tmp_path / "other")
    stranger = other.issue("stranger")
    url, options = {
        "another authority": (url, EtcdOptions(ca=other.ca, cert=cert, key=key)),
        "no authority": (url, EtcdOptions(cert=cert, key=key)),
        "another name": (url.replace("localhost", "127.0.0.1"), EtcdOptions(ca=ca, cert=cert, key=key)),
        "no client certificate": (url, EtcdOptions(ca=ca)),
        "another client certificate": (url, EtcdOptions(ca=ca, cert=stranger.cert, key=stranger.key)),
        "plain to TLS": (url.replace("https", "http"), EtcdOptions()),
        "TLS to plain": (secured.server.endpoint.replace("http", "https"), EtcdOptions(ca=ca)),
        "certificates and no TLS": (secured.server.endpoint, EtcdOptions(ca=ca)),
        "missing file": (url, EtcdOptions(ca=ca, cert=tmp_path / "nowhere.pem", key=key)),
        "not a certificate": (url, EtcdOptions(ca=key)),
        "another's key": (url, EtcdOptions(ca=ca, cert=cert, key=stranger.key)),
    }[case]
    client = EtcdClient([url], options)
    with pytest.raises(EtcdMisused, match=says) as raised:
        await client.connect()
    await client.close()
    sentence = str(raised.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


async def test_each_member_certificate_names_only_its_member(tmp_path: Path) -> None:
    etcd_binaries()
    authority = Signer(tmp_path / "ca")
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
    authority, successor = Signer(tmp_path / "ca"), Signer(tmp_path / "new-ca")
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
