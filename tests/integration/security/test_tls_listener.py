"""TLS listeners: admitted clients, errors of the others, and changed files."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.blocking_client import connect, is_served
from tests.support.processes.dev import KproxyProcess, run_kproxy
from tests.support.processes.served import counted, page, port_of, samples, static_proxy
from tests.support.security.tls_files import Pair, Signer, client_context
from tests.support.waiting import PATIENCE_S, wait_for


class Site:
    """A proxy with a TLS listener, and its authorities."""

    def __init__(self, directory: Path) -> None:
        self.signer = Signer(directory / "ours")
        self.stranger = Signer(directory / "theirs")
        self.server = self.signer.issue("server", "localhost", "127.0.0.1")
        self.client = self.signer.issue("client", "client.example.org")

    def tls(self, *lines: str) -> str:
        return "\n".join(["[tls]", f'cert = "{self.server.cert}"', f'key = "{self.server.key}"', *lines, ""])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@contextlib.contextmanager
def connected(
    process: KproxyProcess, context: ssl.SSLContext, name: str = "localhost", session: ssl.SSLSession | None = None
) -> Iterator[ssl.SSLSocket]:
    with (
        connect(process) as plain,
        context.wrap_socket(plain, server_hostname=name, session=session) as client,
    ):
        yield client


def serves(process: KproxyProcess, context: ssl.SSLContext, name: str = "localhost") -> bool:
    with connected(process, context, name) as client:
        return is_served(client)


def fails(
    process: KproxyProcess, context: ssl.SSLContext, name: str = "localhost", session: ssl.SSLSession | None = None
) -> str:
    """Return a refused client's TLS error, from the handshake or the first read."""
    with (
        pytest.raises((ssl.SSLError, ConnectionError, EOFError)) as raised,
        connected(process, context, name, session) as client,
    ):
        is_served(client)
    error = raised.value
    return str(error.reason) if isinstance(error, ssl.SSLError) else type(error).__name__


def test_server_certificate_alone_serves_clients(site: Site, tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}, rooms=site.tls()) as process:
        assert serves(process, client_context(site.signer.ca))
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context(site.signer.ca)
            context.minimum_version = context.maximum_version = version
            assert serves(process, context)
        assert counted(process.admin, 'kproxy_client_handshakes_total{outcome="done"}') == 3
        told = samples(page(process.admin, "/metrics")[1])
        expiry = told["kproxy_tls_certificate_expiry_timestamp_seconds", (("listener", ""), ("use", "listener"))]
        assert expiry == pytest.approx(time.time() + 30 * 86_400, abs=86_400)


def old_version(site: Site) -> ssl.SSLContext:
    context = client_context(site.signer.ca)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    return context


# The client's credentials, its own TLS error, the log's reason, and the metric's label.
REFUSED: dict[str, tuple[Callable[[Site], ssl.SSLContext], str, str, str]] = {
    "no certificate": (
        lambda site: client_context(site.signer.ca),
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "it presents no certificate, and this listener requires one",
        "no_certificate",
    ),
    "another authority": (
        lambda site: client_context(site.signer.ca, site.stranger.issue("client", "client.example.org")),
        "TLSV1_ALERT_UNKNOWN_CA",
        "not signed by an authority of tls.client_ca",
        "untrusted",
    ),
    "expired": (
        lambda site: client_context(site.signer.ca, site.signer.issue("old", "client.example.org", days=-1)),
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "its certificate has expired",
        "expired",
    ),
    "revoked": (
        lambda site: client_context(
            site.signer.ca, Pair(site.signer.directory / "bad.pem", site.signer.directory / "bad.key")
        ),
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "its certificate is revoked",
        "revoked",
    ),
    "it trusts another authority": (
        lambda site: client_context(site.stranger.ca, site.client),
        "CERTIFICATE_VERIFY_FAILED",
        "does not trust the authority that signed this listener's certificate; it asked for localhost, and the "
        "certificate is for localhost, 127.0.0.1",
        "alert_unknown_ca",
    ),
    "an old version": (
        old_version,
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "it speaks no TLS version that this listener admits",
        "version",
    ),
}


@pytest.fixture(scope="module")
def mutual(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    crl = site.signer.revoke([site.signer.issue("bad", "bad.example.org")])
    directory = tmp_path_factory.mktemp("mutual")
    lines = (f'client_ca = "{site.signer.ca}"', f'client_crl = "{crl}"', "strict_server_name = true")
    with static_proxy(directory, {1: 1}, rooms=site.tls(*lines)) as process:
        yield process


def test_client_certificate_admits_a_client(site: Site, mutual: KproxyProcess) -> None:
    assert serves(mutual, client_context(site.signer.ca, site.client))


@pytest.mark.parametrize("case", REFUSED)
def test_rejected_client_is_named_with_the_reason(site: Site, mutual: KproxyProcess, case: str) -> None:
    context, client_says, log_says, word = REFUSED[case]
    assert fails(mutual, context(site)) == client_says
    wait_for(lambda: log_says in mutual.stderr())
    assert counted(mutual.admin, f'kproxy_client_handshakes_total{{outcome="{word}"}}') >= 1
    assert "Traceback" not in mutual.stderr()


def test_unmatched_server_name_is_refused_where_required(site: Site, mutual: KproxyProcess) -> None:
    context = client_context(site.signer.ca, site.client, check_name=False)
    assert fails(mutual, context, "kafka.example.org") == "TLSV1_UNRECOGNIZED_NAME"
    said = "it asks for kafka.example.org, and the certificate is for localhost, 127.0.0.1"
    wait_for(lambda: said in mutual.stderr())


def test_optional_certificate_is_verified_if_present(site: Site, tmp_path: Path) -> None:
    lines = (f'client_ca = "{site.signer.ca}"', 'client_auth = "optional"')
    with static_proxy(tmp_path, {1: 1}, rooms=site.tls(*lines)) as process:
        assert serves(process, client_context(site.signer.ca))
        assert serves(process, client_context(site.signer.ca, site.client))
        stranger = site.stranger.issue("client", "client.example.org")
        assert fails(process, client_context(site.signer.ca, stranger)) == "TLSV1_ALERT_UNKNOWN_CA"


@pytest.mark.parametrize("client_auth", [pytest.param("none", marks=pytest.mark.long), "required"])
def test_doctor_recognizes_tls(site: Site, tmp_path: Path, client_auth: str) -> None:
    lines = [f'client_auth = "{client_auth}"']
    lines += [f'client_ca = "{site.signer.ca}"'] if client_auth == "required" else []
    with static_proxy(tmp_path, {1: 1}, rooms=site.tls(*lines)) as process:
        asked = ("doctor", "--bootstrap", f"localhost:{port_of(process)}", "--no-write")
        ended = run_kproxy(*asked)
        if client_auth == "none":
            let_in = run_kproxy(*asked, environ={"KPROXY_BROKER_TLS__CA": str(site.signer.ca)})
            assert "speaks Kafka" in let_in.stdout
    assert ended.status == 1
    assert "speaks TLS: give --broker-tls-enabled" in ended.stdout


def test_plain_text_is_recognised(site: Site, tmp_path: Path) -> None:
    with static_proxy(tmp_path, {1: 1}, rooms=site.tls()) as process:
        with (
            connect(process) as client,
            pytest.raises((EOFError, ConnectionError)),
        ):
            is_served(client)
        wait_for(
            lambda: "it speaks plain text, and this listener speaks TLS: set security.protocol=SSL" in process.stderr()
        )
        connection = http.client.HTTPConnection("127.0.0.1", port_of(process), timeout=PATIENCE_S)
        connection.request("GET", "/metrics")
        assert connection.getresponse().status == 400
        connection.close()
        wait_for(lambda: process.stderr().count("handshake rejected") == 2)
        # A load balancer's port check is not logged.
        connect(process).close()
        assert serves(process, client_context(site.signer.ca))
        assert process.stderr().count("handshake rejected") == 2


def shown(process: KproxyProcess, context: ssl.SSLContext) -> int:
    """The serial number of the certificate in a new connection."""
    with connected(process, context) as client:
        certificate = client.getpeercert()
        assert certificate is not None
        return int(str(certificate["serialNumber"]), 16)


def test_new_certificate_serves_new_connections_only(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    context = client_context(site.signer.ca)
    with static_proxy(tmp_path, {1: 1}, rooms=site.tls()) as process, connected(process, context) as old:
        first = shown(process, context)
        # At once after a signal, and soon without one.
        site.signer.issue("server", "localhost")
        process.signal(signal.SIGHUP)
        wait_for(lambda: shown(process, context) != first)
        second = shown(process, context)
        site.signer.issue("server", "localhost")
        wait_for(lambda: shown(process, context) != second)
        third = shown(process, context)
        # Unusable files change nothing, and are reported once.
        good = site.server.cert.read_bytes()
        site.server.cert.write_bytes(b"nonsense")
        wait_for(lambda: "reload failed" in process.stderr())
        time.sleep(3 * 2.0)
        assert process.stderr().count("reload failed") == 1
        assert shown(process, context) == third
        told = samples(page(process.admin, "/metrics")[1])
        assert told["kproxy_tls_reloads_total", (("outcome", "failed"),)] == 1
        assert told["kproxy_tls_reloads_total", (("outcome", "done"),)] >= 2
        site.server.cert.write_bytes(good)
        os.utime(site.server.cert)
        wait_for(lambda: counted(process.admin, 'kproxy_tls_reloads_total{outcome="done"}') >= 3)
        assert is_served(old)


def test_revocation_list_is_read_again(tmp_path: Path) -> None:
    site = Site(tmp_path / "site")
    crl = site.signer.revoke([])
    lines = (f'client_ca = "{site.signer.ca}"', f'client_crl = "{crl}"')
    context = client_context(site.signer.ca, site.client)
    # The only TLS version that resumes sessions of clients with certificates.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with static_proxy(tmp_path, {1: 1}, rooms=site.tls(*lines)) as process, connected(process, context) as client:
        assert is_served(client)
        # OpenSSL forgets the session of a connection that ends without close_notify, so this one stays open.
        session = client.session
        with connected(process, context, session=session) as again:
            assert again.session_reused
        site.signer.revoke([site.client])
        process.signal(signal.SIGHUP)
        wait_for(lambda: "reloaded" in process.stderr())
        # Not even with an earlier session.
        for each in (None, session):
            assert fails(process, context, session=each) == "SSLV3_ALERT_CERTIFICATE_REVOKED"


def test_session_does_not_outlive_the_certificate(site: Site, mutual: KproxyProcess) -> None:
    """Neither by a ticket (TLS 1.3) nor by the proxy's cache (1.2): resumption verifies no certificate."""
    began, before = time.time(), counted(mutual.admin, 'kproxy_client_handshakes_total{outcome="expired"}')
    short = site.signer.issue("short", "client.example.org", ends_in_s=2.0)
    sessions: list[tuple[ssl.SSLContext, ssl.SSLSession | None]] = []
    with contextlib.ExitStack() as open_ones:
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = client_context(site.signer.ca, short)
            context.minimum_version = context.maximum_version = version
            client = open_ones.enter_context(connected(mutual, context))
            assert is_served(client)
            assert client.session is None or not client.session.has_ticket
            sessions.append((context, client.session))
        time.sleep(max(began + 2.1 - time.time(), 0.0))
        for context, session in sessions:
            fails(mutual, context, session=session)
    assert counted(mutual.admin, 'kproxy_client_handshakes_total{outcome="expired"}') == before + 2


@pytest.mark.parametrize("room", [pytest.param("[tls]", marks=pytest.mark.long), "[[listeners]]"])
def test_workers_listen_in_the_same_way(site: Site, tmp_path: Path, room: str) -> None:
    tls = f'tls.cert = "{site.server.cert}"\ntls.key = "{site.server.key}"\n'
    listeners = "".join(f'[[listeners]]\nname = "{name}"\nlisten = "127.0.0.1:0"\n' for name in ("plain", "tls")) + tls
    rooms, listen = (site.tls(), "127.0.0.1:0") if room == "[tls]" else (listeners, None)
    with static_proxy(tmp_path, {1: 1}, rooms=rooms, listen=listen, more=["--workers", "2"]) as process:
        port = port_of(process)
        if listen is None:
            by_name = dict(each.split("@") for each in process.fields["listeners"].split(","))
            assert by_name["plain"] == process.kafka
            port = int(by_name["tls"].rpartition(":")[2])
            with connect(process) as client:
                assert is_served(client)
        context = client_context(site.signer.ca)
        for _ in range(8):
            with (
                connect(process, port) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as client,
            ):
                assert is_served(client)
        assert counted(process.admin, 'kproxy_client_handshakes_total{outcome="done"}') == 8
        # This value is not the sum over the workers.
        ends_at = counted(process.admin, "kproxy_tls_certificate_expiry_timestamp_seconds{")
        assert ends_at == pytest.approx(time.time() + 30 * 86_400, abs=86_400)
