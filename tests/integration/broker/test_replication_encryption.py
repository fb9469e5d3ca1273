"""TLS between brokers: pairs that replicate, errors of the others, and new certificates.

The first half runs a leader and a follower in this process, the second half runs broker processes. The last test covers
TLS of clients.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.broker.replication import fetchers
from kproxy.broker.replication.encryption import NO_ENCRYPTION, Encryption
from kproxy.config.tls import ReplicationTls
from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.errors import StartupError
from kproxy.security.reloading import Reloads
from kproxy_codec import error_codes
from kproxy_codec.api_keys import API_VERSIONS
from tests.support.brokers.broker_logs import read_all
from tests.support.brokers.follower_client import FollowerClient, Replication, replication_of
from tests.support.brokers.reference_broker import BrokerProcess, Closed, create_topic, start_brokers
from tests.support.brokers.replicating import LEADER, FollowerSide, append, fetching, pair
from tests.support.processes.dev import serving
from tests.support.processes.served import page, port_of, samples
from tests.support.security.tls_files import Pair, Signer, client_context
from tests.support.waiting import PATIENCE_S, eventually, wait_for
from tests.support.wire.record_batches import build_batch

HOST = "127.0.0.1"
TOPIC, TOPIC_ID = "replicated", uuid.uuid4()
IDS = (1, 2, 3)


class Site:
    """Two authorities, and certificates for this host."""

    def __init__(self, directory: Path) -> None:
        self.ours, self.theirs = Signer(directory / "ours"), Signer(directory / "theirs")
        self.both = directory / "both.pem"
        self.both.write_bytes(self.ours.ca.read_bytes() + self.theirs.ca.read_bytes())
        self.pair = self.ours.issue("broker", HOST)

    def options(self, shown: Pair | None = None, ca: Path | None = None) -> ReplicationTls:
        cert, key = shown or self.pair
        return ReplicationTls(cert, key, ca or self.ours.ca)

    def encryption(self, *, by_tls: bool = True) -> Encryption:
        return Encryption(self.options(), Reloads()) if by_tls else NO_ENCRYPTION


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetchers, "MAX_WAIT_MS", 50)
    monkeypatch.setattr(fetchers, "FIRST_PAUSE_S", 0.01)


def reasons(logs: list[Any], event: str) -> list[str]:
    return [each["reason"] for each in logs if each["event"] == event]


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("by_tls", [False, True])
async def test_follower_gets_records(site: Site, tmp_path: Path, by_tls: bool) -> None:
    leaders = site.encryption(by_tls=by_tls)
    async with pair(tmp_path, leaders, site.encryption(by_tls=by_tls)) as both:
        ours, theirs = both.replicate(TOPIC, TOPIC_ID, 0)
        append(ours, b"v" * 300_000)
        assert await ours.wait_for_isr(0, PATIENCE_S) == error_codes.NONE
        assert read_all(theirs.log) == read_all(ours.log)
    assert leaders.handshakes == ({"done": 1} if by_tls else {})


# The follower's TLS, the event and reason in the leader's log, and the reason in the follower's.
REFUSED = {
    False: (
        "handshake rejected",
        "it speaks plain text, and this listener speaks TLS: give it --replication-tls-cert",
        "before it had accepted this broker: see its log",
    ),
    True: (
        "client connection closed",
        "it speaks TLS, and this broker has no certificate: give this broker --replication-tls-cert",
        "if it has no TLS, give it --replication-tls-cert",
    ),
}


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("by_tls", REFUSED)
async def test_plain_and_tls_mismatch_names_the_remedy(site: Site, tmp_path: Path, by_tls: bool) -> None:
    event, leader_says, follower_says = REFUSED[by_tls]
    with capture_logs() as logs:
        async with pair(tmp_path, site.encryption(by_tls=not by_tls), site.encryption(by_tls=by_tls)) as both:
            ours, theirs = both.replicate(TOPIC, TOPIC_ID, 0)
            append(ours, b"v")
            await eventually(lambda: reasons(logs, event) and reasons(logs, "leader not reachable"), what=str(logs))
            await asyncio.sleep(0.2)
            assert theirs.log_end_offset == 0
            assert not both.leader.listener.followers
            # At the end of the block the follower may be dialling, which the leader logs as its end.
            said, told = reasons(logs, event), reasons(logs, "leader not reachable")
    assert all(leader_says in reason for reason in said), logs
    assert all(follower_says in reason for reason in told), logs


@asynccontextmanager
async def dialled(site: Site, directory: Path, tls: ssl.SSLContext | None = None) -> AsyncIterator[list[bytes]]:
    """A listener at a leader's address that a follower with TLS dials; yield the first bytes of each connection."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        # A Kafka answer, in case the follower would accept it.
        writer.write(bytes(100))
        writer.close()

    follower = FollowerSide(directory, encryption=site.encryption())
    async with await asyncio.start_server(listen, HOST, 0, ssl=tls) as server, fetching(follower):
        follower.tell_broker(LEADER, server.sockets[0].getsockname()[1])
        follower.follow(TOPIC, 0, TOPIC_ID)
        yield heard


@pytest.mark.usefixtures("_short_waits")
async def test_follower_with_tls_never_sends_plain_text(site: Site, tmp_path: Path) -> None:
    """Whoever puts the leader's key or listens at its address gets only the first message of TLS."""
    async with dialled(site, tmp_path) as first_bytes:
        await eventually(lambda: len(first_bytes) >= 3)
    assert {each[:3] for each in first_bytes} == {b"\x16\x03\x01"}


# The certificate of the listener at a leader's address, and the reason in the follower's log.
LEADERS: dict[str, tuple[Callable[[Site], Pair], str]] = {
    "another authority": (
        lambda site: site.theirs.issue("broker", HOST),
        "its certificate is not signed by the authorities in --replication-tls-ca",
    ),
    "expired": (lambda site: site.ours.issue("old", HOST, days=-1), "its certificate has expired"),
}


@pytest.mark.usefixtures("_short_waits")
@pytest.mark.parametrize("case", LEADERS)
async def test_follower_trusts_only_brokers_and_explains(site: Site, tmp_path: Path, case: str) -> None:
    shown, reason = LEADERS[case]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*shown(site))
    with capture_logs() as logs:
        async with dialled(site, tmp_path, context) as heard:
            await eventually(
                lambda: any(reason in said for said in reasons(logs, "leader not reachable")),
                lambda: logs,
                timeout_s=PATIENCE_S,
            )
    assert heard == [], "it was told something"


# Certificates that the broker refuses at its start


def _encryption(site: Site, shown: Pair, ca: Path | None = None) -> Encryption:
    return Encryption(site.options(shown, ca), Reloads())


def test_unacceptable_certificate_is_a_startup_error(site: Site) -> None:
    with pytest.raises(StartupError, match=r"other brokers would refuse it .*signed by an authority in --replication"):
        _encryption(site, site.theirs.issue("server", HOST))
    with pytest.raises(StartupError, match=r"--replication-tls-cert .* cannot be used: certificate has expired"):
        _encryption(site, site.ours.issue("old", HOST, days=-1))
    with pytest.raises(StartupError, match=r"--replication-tls-cert .* and --replication-tls-key .* do not belong"):
        _encryption(site, Pair(site.pair.cert, site.ours.issue("other", HOST).key))
    with pytest.raises(StartupError, match=r"--replication-tls-ca .* holds no certificates"):
        _encryption(site, site.pair, ca=site.pair.key)


# Brokers as processes


class Brokers:
    """Three brokers with a topic of one partition, which all of them keep."""

    def __init__(self, brokers: list[BrokerProcess], etcd: str, prefix: str) -> None:
        self.brokers = brokers
        self.etcd, self.prefix = etcd, prefix

    def create(self, min_insync_replicas: int) -> None:
        with self.brokers[0].client() as client:
            created = create_topic(client, TOPIC, [IDS], {"min.insync.replicas": min_insync_replicas})
        assert created.error_code == error_codes.NONE, created
        self.wait_in_sync(*IDS)

    @property
    def leader(self) -> BrokerProcess:
        def found() -> int:
            running = next(each for each in self.brokers if each.process.poll() is None)
            with running.client() as client:
                return client.leaders(TOPIC)[0]

        return self.brokers[wait_for(lambda: max(found(), 0), what="a leader") - 1]

    def in_sync(self) -> set[int]:
        with self.leader.client() as client:
            return set(client.metadata(TOPIC).topics[0].partitions[0].isr_nodes)

    def wait_in_sync(self, *ids: int) -> None:
        wait_for(lambda: self.in_sync() == set(ids), what=lambda: "\n".join(each.log() for each in self.brokers))

    def write(self) -> int:
        """Write a record with acks=all; return its offset."""
        with self.leader.client() as client:
            produced = client.produce(TOPIC, 0, build_batch([b"v"]), acks=-1)
        assert produced.error_code == error_codes.NONE, produced
        return int(produced.base_offset)

    def replication(self, broker: BrokerProcess) -> Replication:
        return replication_of(self.etcd, self.prefix, broker.node_id)

    def restart(self, broker: BrokerProcess, tls: ReplicationTls) -> None:
        """Restart cleanly, with other options."""
        broker.terminate()
        broker.stop()
        self.start(broker, tls)

    def start(self, broker: BrokerProcess, tls: ReplicationTls) -> None:
        arguments = [each for each in broker.arguments if not each.startswith("replication_tls=")]
        broker.arguments = [*arguments, f"replication_tls={as_option(tls)}"]
        broker.start()


def as_option(tls: ReplicationTls) -> str:
    return ",".join(map(str, tls.files))


Start = Callable[[ReplicationTls], Brokers]


@pytest.fixture
def processes(etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path) -> Iterator[Start]:
    """Start brokers with these TLS options."""
    options = {"lease_ttl_s": 60, "admin": 0, "isr_lag_s": 2, "leader_rebalance_s": 600}
    with ExitStack() as stack:

        def start(tls: ReplicationTls) -> Brokers:
            by_tls = {"replication_tls": as_option(tls)}
            brokers = start_brokers(IDS, tmp_path, etcd.endpoint, etcd_prefix, **options, **by_tls)
            return Brokers(stack.enter_context(brokers), etcd.endpoint, etcd_prefix)

        yield start


# The connecting peer, and the reason in the listener's log.
FOLLOWERS: dict[str, tuple[Callable[[Site], ssl.SSLContext], str]] = {
    "no certificate": (lambda site: client_context(site.ours.ca), "it presents no certificate"),
    "another authority": (
        lambda site: client_context(site.ours.ca, site.theirs.issue("follower", HOST)),
        "not signed by an authority of --replication-tls-ca",
    ),
    "expired": (
        lambda site: client_context(site.ours.ca, site.ours.issue("late", HOST, days=-1)),
        "its certificate has expired",
    ),
}


def test_brokers_replicate_by_mutual_tls_and_exclude_others(site: Site, processes: Start) -> None:
    """With `min.insync.replicas` 3 all brokers have an acknowledged record."""
    brokers = processes(site.options())
    brokers.create(min_insync_replicas=3)
    assert [brokers.write() for _ in range(3)] == [0, 1, 2]
    leader, ours = brokers.leader, client_context(site.ours.ca, site.pair)
    follower = next(each for each in brokers.brokers if each is not leader)
    way = brokers.replication(leader)
    # The secret alone is not enough.
    with way.client() as client, pytest.raises(Closed):
        client.authenticate(9, way.secret)
    wait_for(lambda: "it speaks plain text, and this listener speaks TLS" in leader.log())
    for context, reason in FOLLOWERS.values():
        with pytest.raises((OSError, Closed)), way.client() as client:
            client.secure(context(site)).request(API_VERSIONS, 0)
        wait_for(lambda reason=reason: reason in leader.log(), what=reason)  # type: ignore[misc]
    # A certificate without the secret is not enough either.
    with way.client().secure(ours) as client:
        client.send_fetch(follower.node_id, [])
        assert client.is_closed()
    assert brokers.write() == 3
    assert brokers.in_sync() == set(IDS)


def test_broker_with_wrong_certificate_stays_out_of_isr(site: Site, processes: Start) -> None:
    brokers = processes(site.options())
    brokers.create(min_insync_replicas=2)
    brokers.write()
    leader = brokers.leader
    outsider = next(each for each in brokers.brokers if each is not leader)
    outsider.terminate()
    outsider.stop()
    rest = {each.node_id for each in brokers.brokers} - {outsider.node_id}
    brokers.wait_in_sync(*rest)
    # It trusts the others, but they do not trust it.
    brokers.start(outsider, site.options(shown=site.theirs.issue("broker", HOST), ca=site.both))
    refused = "it does not trust the authority that signed this broker's certificate"
    wait_for(lambda: refused in outsider.log(), what=outsider.log)
    wait_for(lambda: "its certificate is not signed by an authority of --replication-tls-ca" in leader.log())
    brokers.write()
    assert brokers.in_sync() == rest
    assert "follower authenticated" not in outsider.log()
    brokers.restart(outsider, site.options())
    brokers.wait_in_sync(*IDS)
    brokers.write()


def test_certificates_change_and_no_replica_leaves_the_isr(site: Site, tmp_path: Path, processes: Start) -> None:
    """They move to another authority in three steps, and existing connections stay."""
    files = tmp_path / "files"
    files.mkdir()
    options = ReplicationTls(files / "cert", files / "key", files / "ca")
    new = site.theirs.issue("new", HOST)

    def put(shown: Pair, ca: Path) -> None:
        for source, target in zip((*shown, ca), options.files, strict=True):
            aside = target.with_suffix(".aside")
            aside.write_bytes(source.read_bytes())
            aside.replace(target)

    put(site.pair, site.ours.ca)
    brokers = processes(options)
    brokers.create(min_insync_replicas=3)
    brokers.write()
    authenticated = [each.log().count("follower authenticated") for each in brokers.brokers]

    def reload(event: str, count: int) -> None:
        for each in brokers.brokers:
            each.signal(signal.SIGHUP)
        wait_for(lambda: all(each.log().count(event) == count for each in brokers.brokers))
        brokers.write()

    put(site.pair, site.both)
    reload("] reloaded", 1)
    put(new, site.both)
    reload("] reloaded", 2)
    put(new, site.theirs.ca)
    reload("] reloaded", 3)
    # Files that others would refuse change nothing.
    put(site.pair, site.theirs.ca)
    reload("reload failed", 1)
    put(new, site.theirs.ca)
    # This time they notice without a signal.
    wait_for(lambda: all(each.log().count("] reloaded") == 4 for each in brokers.brokers))
    brokers.write()
    assert [each.log().count("follower authenticated") for each in brokers.brokers] == authenticated
    assert not any("ISR changed" in each.log() or "leader not reachable" in each.log() for each in brokers.brokers)
    told = samples(page(brokers.leader.admin, "/metrics")[1])
    assert told["kproxy_broker_tls_handshakes_total", (("outcome", "done"), ("use", "replication"))] == 2
    expiry = told["kproxy_broker_tls_certificate_expiry_timestamp_seconds", (("use", "replication"),)]
    assert expiry == pytest.approx(time.time() + 30 * 86_400, abs=86_400)
    # New connections use the new certificates.
    way = brokers.replication(brokers.leader)
    with way.client().secure(client_context(site.theirs.ca, new)) as client:
        assert client.request(API_VERSIONS, 0).error_code == error_codes.NONE
    with pytest.raises(ssl.SSLCertVerificationError), way.client() as client:
        client.secure(client_context(site.ours.ca, site.pair))
    follower = next(each for each in brokers.brokers if each is not brokers.leader)
    brokers.restart(follower, options)
    brokers.wait_in_sync(*IDS)
    brokers.write()


def test_broker_admits_clients_by_tls_certificate(
    site: Site, etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path
) -> None:
    client_pair = site.theirs.issue("client", "client.example.org")
    flags = {
        "tls-cert": site.pair.cert,
        "tls-key": site.pair.key,
        "tls-client-ca": site.theirs.ca,
        "replication-tls-cert": site.pair.cert,
        "replication-tls-key": site.pair.key,
        "replication-tls-ca": site.ours.ca,
    }
    arguments = ["broker", "--node-id", "1", "--replication-factor", "1", "--data-dir", tmp_path / "data"]
    arguments += ["--etcd", etcd.endpoint, "--prefix", etcd_prefix, "--admin", f"{HOST}:0"]
    arguments += [part for flag, file in flags.items() for part in (f"--{flag}", file)]
    with serving(arguments, tmp_path / "stderr") as process:
        port = port_of(process)
        with FollowerClient(HOST, port).secure(client_context(site.ours.ca, client_pair)) as client:
            client.metadata(TOPIC)
            produced = client.produce(TOPIC, 0, build_batch([b"v" * 300_000]), acks=-1)
            assert produced.error_code == error_codes.NONE
        # A broker's certificate is not a client's.
        for context in (client_context(site.ours.ca), client_context(site.ours.ca, site.pair)):
            with pytest.raises((OSError, Closed)), FollowerClient(HOST, port) as client:
                client.secure(context).metadata(TOPIC)
        with FollowerClient(HOST, port) as client, pytest.raises(Closed):
            client.metadata(TOPIC)
        for reason in (
            "it presents no certificate, and this listener requires one",
            "its certificate is not signed by an authority of tls.client_ca",
            "it speaks plain text, and this listener speaks TLS: set security.protocol=SSL",
        ):
            wait_for(lambda reason=reason: reason in process.stderr(), what=reason)  # type: ignore[misc]
        told = samples(page(process.admin, "/metrics")[1])
        assert told["kproxy_broker_tls_handshakes_total", (("outcome", "done"), ("use", "listener"))] == 1
        assert {each[1] for each in told if each[0].endswith("expiry_timestamp_seconds")} == {
            (("use", "listener"),),
            (("use", "replication"),),
        }
        assert process.stop() == 0
