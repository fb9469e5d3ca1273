"""The admin page with TLS, of one process and of workers, and the commands that use it."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.dev import KproxyProcess, run_kproxy
from tests.support.processes.ports import free_port
from tests.support.processes.served import samples, static_proxy
from tests.support.security.tls_files import Pair, Signer, client_context
from tests.support.waiting import wait_for

PATIENCE_S = 60.0
FREE = b'{"group": "g", "resources": ["t/0"]}'
EXPIRY = ("kproxy_tls_certificate_expiry_timestamp_seconds", (("listener", ""), ("use", "admin")))


def rooms(pair: Pair, *lines: str) -> str:
    return "\n".join(["[admin]", f'tls.cert = "{pair.cert}"', f'tls.key = "{pair.key}"', *lines, ""])


@contextlib.contextmanager
def proxy(directory: Path, options: str, workers: int = 1) -> Iterator[KproxyProcess]:
    with static_proxy(directory, {1: free_port()}, rooms=options, more=["--workers", str(workers)]) as process:
        yield process


def connected(process: KproxyProcess, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    host, _, port = process.admin.rpartition(":")
    return http.client.HTTPSConnection(host, int(port), context=context, timeout=PATIENCE_S)


def ask(
    connection: http.client.HTTPSConnection, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, str]:
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection.request("GET" if body is None else "POST", path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def get(process: KproxyProcess, context: ssl.SSLContext, path: str, **headers: str) -> tuple[int, str]:
    with contextlib.closing(connected(process, context)) as connection:
        return ask(connection, path, **headers)


def shown(process: KproxyProcess, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection presents."""
    host, _, port = process.admin.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as client,
    ):
        certificate = client.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


@pytest.mark.parametrize("workers", [1, 2])
def test_admin_page_uses_tls_and_reloads_files(tmp_path: Path, workers: int) -> None:
    signer = Signer(tmp_path / "ours")
    context = client_context(signer.ca)
    pair = signer.issue("page", "127.0.0.1")
    token = tmp_path / "token"
    token.write_text("the-first-token-of-all\n")
    with proxy(tmp_path, rooms(pair, f'token_file = "{token}"'), workers) as process:
        assert process.admin.count(":") == 1
        with contextlib.closing(connected(process, context)) as old:
            assert ask(old, "/livez") == (200, "alive\n")
            assert ask(old, "/table")[0] == 401
            assert ask(old, "/table", Authorization="Bearer the-first-token-of-all")[0] == 200
            told = samples(get(process, context, "/metrics")[1])
            assert told[EXPIRY] == pytest.approx(time.time() + 30 * 86_400, abs=86_400)
            before = shown(process, context)
            # At once after a signal.
            signer.issue("page", "127.0.0.1")
            token.write_text("the-second-token-of-all\n")
            process.signal(signal.SIGHUP)
            wait_for(lambda: shown(process, context) != before)
            wait_for(lambda: ask(old, "/table", Authorization="Bearer the-second-token-of-all")[0] == 200)
            assert ask(old, "/table", Authorization="Bearer the-first-token-of-all")[0] == 401
            if workers > 1:
                return
            # Soon without one; unusable files change nothing.
            before = shown(process, context)
            token.write_text("short\n")
            signer.issue("page", "127.0.0.1")
            wait_for(lambda: shown(process, context) != before)
            wait_for(lambda: "reload failed" in process.stderr())
            assert ask(old, "/table", Authorization="Bearer the-second-token-of-all")[0] == 200
            told = samples(get(process, context, "/metrics")[1])
            assert told["kproxy_tls_reloads_total", (("outcome", "failed"),)] == 1
            assert told["kproxy_tls_reloads_total", (("outcome", "done"),)] >= 3
            assert "the-first" not in process.stderr()
            assert "short" not in process.stderr()


@pytest.fixture(scope="module")
def mutual(signer: Signer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    """A page that requires certificates."""
    options = rooms(signer.issue("page", "127.0.0.1", "localhost"), f'tls.client_ca = "{signer.ca}"')
    with proxy(tmp_path_factory.mktemp("mutual"), options) as process:
        yield process


def test_foreign_page_cannot_change_anything_with_tls(signer: Signer, mutual: KproxyProcess) -> None:
    context = client_context(signer.ca, signer.issue("client", "client.test"))

    def free(**headers: str) -> int:
        with contextlib.closing(connected(mutual, context)) as connection:
            return ask(connection, "/own/free", FREE, **headers)[0]

    # No etcd here, so there are no claims.
    assert free() == 501
    assert free(Origin=f"https://{mutual.admin}") == 501
    # The same address in plain text is another origin.
    assert free(Origin=f"http://{mutual.admin}") == 403
    assert free(Origin="https://evil.test") == 403
    assert free(Host="evil.test") == 403


def test_rejected_client_gets_the_reason(signer: Signer, mutual: KproxyProcess) -> None:
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        get(mutual, client_context(signer.ca), "/livez")
    wait_for(
        lambda: "it presents no certificate, and this listener requires one (admin.tls.client_auth)" in mutual.stderr()
    )
    host, _, port = mutual.admin.rpartition(":")
    plain = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    plain.request("GET", "/livez")
    answer = plain.getresponse()
    assert (answer.status, answer.read()) == (400, b"this page speaks TLS: ask https:// instead of http://\n")
    plain.close()
    wait_for(lambda: "it speaks HTTP, and this listener speaks TLS: ask https://" in mutual.stderr())
    assert "Traceback" not in mutual.stderr()
    # Each is counted, a flood logs only a few, and Kafka clients are counted separately.
    host, _, port = mutual.admin.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            stranger.sendall(b"HELO")
            stranger.recv(1)
    admitted = client_context(signer.ca, signer.issue("client", "client.test"))
    told = samples(get(mutual, admitted, "/metrics")[1])
    outcomes = {
        labels[0][1]: count for (name, labels), count in told.items() if name == "kproxy_admin_handshakes_total"
    }
    assert outcomes["no_certificate"] >= 1
    assert outcomes["plain_text"] >= 21
    assert outcomes["done"] >= 1
    assert mutual.stderr().count('"failure": "plain_text"') <= 5
    assert not any(name == "kproxy_client_handshakes_total" for name, _ in told)


def test_commands_use_tls_for_the_page(signer: Signer, mutual: KproxyProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    client = signer.issue("client", "client.test")
    flags = ["--admin", f"https://{mutual.admin}", "--admin-ca", signer.ca]
    flags += ["--admin-cert", client.cert, "--admin-key", client.key]
    table = run_kproxy("table", *flags, "--json")
    assert table.status == 0, table.stderr
    assert json.loads(table.stdout)["topics"][0]["name"] == "t"
    monkeypatch.setenv("KPROXY_ADMIN", f"https://{mutual.admin}")
    for name, value in {"CA": signer.ca, "CERT": client.cert, "KEY": client.key}.items():
        monkeypatch.setenv(f"KPROXY_ADMIN_{name}", str(value))
    # Without an etcd the page has no claims to show.
    assert "the Own API needs etcd" in run_kproxy("own", "list").stderr
    doctor = run_kproxy("doctor")
    assert f"the proxy at https://{mutual.admin}" in doctor.stdout


# A command's arguments, with the page's address for PAGE, and its error.
REFUSED = {
    "plain text": (["--admin", "PAGE"], "speaks TLS: give --admin https://PAGE"),
    "flags of TLS in plain text": (["--admin", "PAGE", "--admin-ca", "OURS"], "give --admin https://PAGE"),
    "no certificate": (["--admin", "https://PAGE", "--admin-ca", "OURS"], "set --admin-cert and --admin-key"),
    "another authority": (["--admin", "https://PAGE", "--admin-ca", "THEIRS"], "by the authorities in --admin-ca"),
    "the machine's": (["--admin", "https://PAGE"], "set --admin-ca to its authority"),
    "another name": (
        ["--admin", "https://PAGE", "--admin-ca", "OURS", "--admin-server-name", "other.test"],
        "for another name than other.test",
    ),
    "no file": (["--admin", "https://PAGE", "--admin-ca", "/nowhere"], "--admin-ca /nowhere cannot be read"),
    "no key": (["--admin", "https://PAGE", "--admin-cert", "OURS"], "set --admin-key as well"),
    "another scheme": (["--admin", "ftp://PAGE"], "write H:P or https://H:P"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_command_names_the_remedy(signer: Signer, mutual: KproxyProcess, tmp_path: Path, case: str) -> None:
    words = {"PAGE": mutual.admin, "OURS": str(signer.ca), "THEIRS": str(Signer(tmp_path / "theirs").ca)}
    given, says = REFUSED[case]
    for word, value in words.items():
        given, says = [each.replace(word, value) for each in given], says.replace(word, value)
    done = run_kproxy("table", *given)
    assert done.status == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_top_shows_a_page_with_tls_and_token(signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [tmp_path / "token", tmp_path / "another"]
    for number, file in enumerate(tokens):
        file.write_text(f"the-token-number-{number}\n")
    options = rooms(signer.issue("watched", "127.0.0.1"), f'token_file = "{tokens[0]}"')
    theirs = Signer(tmp_path / "theirs").ca
    with proxy(tmp_path, options) as process:

        def top(ca: Path, *more: str) -> tuple[int, str]:
            done = run_kproxy("top", "--admin", f"https://{process.admin}", "--admin-ca", ca, *more)
            assert done.stderr.count("\n") == (done.status == 2)
            return done.status, done.stderr if done.status == 2 else done.stdout

        assert top(signer.ca) == (
            2,
            f"kproxy: the admin page at https://{process.admin} refuses the request (this page needs its token: "
            f"Authorization: Bearer TOKEN): name the file with its token in KPROXY_ADMIN_TOKEN_FILE.\n",
        )
        monkeypatch.setenv("KPROXY_ADMIN_TOKEN_FILE", str(tokens[1]))
        assert top(signer.ca) == (
            2,
            f"kproxy: the admin page at https://{process.admin} refuses the request (the token of "
            f"KPROXY_ADMIN_TOKEN_FILE is not the page's): give the one of its admin.token_file.\n",
        )
        monkeypatch.setenv("KPROXY_ADMIN_TOKEN_FILE", str(tokens[0]))
        status, said = top(theirs)
        assert (status, "by the authorities in --admin-ca" in said) == (2, True)
        for view, heading in (("brokers", "produce/s"), ("topics", "owners (parts)"), ("clients", "slow")):
            status, said = top(signer.ca, "--view", view)
            # Its broker is down.
            assert (status, heading in said) == (1, True)


def refused_by_client(listening: socket.socket, context: ssl.SSLContext) -> None:
    listening.settimeout(PATIENCE_S)
    with listening.accept()[0] as connection, contextlib.suppress(OSError):
        context.wrap_socket(connection, server_side=True).close()


def test_plain_or_expired_page_is_named(signer: Signer, tmp_path: Path) -> None:
    flags = ["--admin-ca", signer.ca]
    with proxy(tmp_path, "") as process:
        done = run_kproxy("table", "--admin", f"https://{process.admin}", *flags)
        assert "it does not speak TLS there: give --admin H:P without https://" in done.stderr
    old = signer.issue("old", "127.0.0.1", days=-1)
    file = tmp_path / "expired.toml"
    file.write_text('[ownership]\netcd = "http://127.0.0.1:1"\n[listen]\nadmin = ":0"\n' + rooms(old))
    ended = run_kproxy("serve", "--config", file)
    assert (ended.status, "admin.tls.cert" in ended.stderr, "expired" in ended.stderr) == (2, True, True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(old.cert, old.key)
        answering = threading.Thread(target=refused_by_client, args=(listening, context))
        answering.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        done = run_kproxy("table", "--admin", f"https://{address}", *flags)
        answering.join(PATIENCE_S)
    assert "its certificate has expired" in done.stderr


def test_page_without_an_address_has_no_tls(signer: Signer, tmp_path: Path) -> None:
    pair = signer.issue("alone", "127.0.0.1")
    file = tmp_path / "kproxy.toml"
    for options, says in (
        (rooms(pair), "needs an admin page"),
        (f'[listen]\nadmin = ":0"\n[admin]\ntls.cert = "{pair.cert}"\n', "set admin.tls.key"),
        (f'[listen]\nadmin = ":0"\n[admin]\ntls.kay = "{pair.key}"\n', "did you mean admin.tls.key"),
        ('[listen]\nadmin = ":0"\n[admin]\ntls.client_auth = "required"\n', "admin.tls.cert"),
        (f'[listen]\nadmin = ":0"\n{rooms(pair)}tls.client_crl = "x"\n', "admin.tls.client_auth is none"),
    ):
        file.write_text(f'[ownership]\netcd = "http://127.0.0.1:1"\n{options}')
        ended = run_kproxy("check-config", "--config", file)
        assert ended.status == 2
        assert says in ended.stderr
