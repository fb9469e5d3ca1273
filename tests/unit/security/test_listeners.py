"""`[[listeners]]`, `[tls]`, `[broker_tls]` and `[broker_sasl]`: valid values, and the errors for others."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import tomllib
from pathlib import Path

import pytest

from kproxy.cli import main
from kproxy.config import Address, ProxyConfig, load_proxy_config
from kproxy.config.certificates import meet
from kproxy.config.tls import ListenerTls, load_broker_tls, load_listener_tls
from kproxy.errors import StartupError
from kproxy.security.tls_acceptor import MOST_HELLO_BYTES, is_among, load_for_acceptor
from kproxy.security.tls_errors import client_failure
from tests.support.security.client_hello import EXTENSIONS, PADDING, client_hello
from tests.support.security.tls_files import Pair, Signer, client_context

ETCD = '[ownership]\netcd = "http://a:1"\n'


@pytest.fixture(scope="module")
def server(signer: Signer) -> Pair:
    return signer.issue("server", "localhost")


def load(text: str, directory: Path, **environ: str) -> ProxyConfig:
    file = directory / "kproxy.toml"
    file.write_text(ETCD + text)
    return load_proxy_config(file, environ=environ)


def error_of(text: str, directory: Path, **environ: str) -> str:
    with pytest.raises(StartupError) as raised:
        load(text, directory, **environ)
    sentence = str(raised.value)
    assert sentence.endswith((".", "?"))
    assert "\n" not in sentence
    return sentence


def tls(pair: Pair, prefix: str = "tls.") -> str:
    return f'{prefix}cert = "{pair.cert}"\n{prefix}key = "{pair.key}"\n'


def test_file_may_define_several_listeners(signer: Signer, server: Pair, tmp_path: Path) -> None:
    text = '[[listeners]]\nname = "internal"\nlisten = "10.0.0.1:9092"\n'
    text += '[[listeners]]\nname = "external"\nlisten = "0.0.0.0:9093"\nadvertise = "kafka.example.org:9093"\n'
    text += "proxy_protocol = true\n" + tls(server) + f'tls.client_ca = "{signer.ca}"\n'
    config = load(text, tmp_path)
    internal, external = config.listeners
    assert (internal.name, internal.listen, internal.advertise, internal.is_plain) == (
        "internal",
        Address("10.0.0.1", 9092),
        None,
        True,
    )
    assert (external.advertise, external.proxy_protocol) == (Address("kafka.example.org", 9093), True)
    assert external.tls is not None
    assert (external.tls.client_auth, external.tls.client_ca) == (None, signer.ca)
    assert config.listen == internal.listen


def test_listeners_of_a_family_share_name(tmp_path: Path) -> None:
    texts = (
        'name = "a"\nlisten = "0.0.0.0:9092"\n',
        'name = "b"\nlisten = "[::]:9092"\n',
        'name = "c"\nlisten = "[::]:1"\n',
    )
    given = [f"[[listeners]]\n{text}" for text in texts]
    named = [f'{each}advertise = "h:9092"\n' for each in given[:2]]
    config = load("".join([*named, f'{given[2]}advertise = "h:1"\n']), tmp_path)
    assert [each.only_ipv6 for each in config.listeners] == [False, True, False]
    other = f'{given[2]}advertise = "h:9092"\n'
    assert "two have the same advertised address, h:9092" in error_of(named[0] + other, tmp_path)


def test_option_advertises_listeners_by_name(tmp_path: Path) -> None:
    texts = ['name = "in"\nlisten = "0.0.0.0:1"\n', 'name = "out"\nlisten = "0.0.0.0:2"\nadvertise = "old:2"\n']
    text = "".join(f"[[listeners]]\n{each}" for each in [*texts, 'name = "self"\nlisten = "127.0.0.1:3"\n'])
    config = load(text, tmp_path, KPROXY_LISTEN__ADVERTISE="in=pod-0.kproxy:1, out=pod-0.example.org:9094")
    assert [each.advertise for each in config.listeners] == [
        Address("pod-0.kproxy", 1),
        Address("pod-0.example.org", 9094),
        None,
    ]
    for wrong, says in {
        "h:1": "write NAME=HOST:PORT",
        "in=h": "has no port",
        "in=h:1,inn=h:2": "unknown listener 'inn'",
        "in=h:1,in=h:2": "listener 'in' is listed twice",
        "in=h:1,out=h:1": "two have the same advertised address, h:1",
        "in=0.0.0.0:1": "clients cannot connect to 0.0.0.0",
    }.items():
        assert says in error_of(text, tmp_path, KPROXY_LISTEN__ADVERTISE=wrong)


ONE = '[[listeners]]\nname = "a"\nlisten = "127.0.0.1:1"\n'
REFUSED = {
    "unknown key": (
        ONE + 'advertize = "x"\n',
        "unknown key listeners.advertize in .*: did you mean listeners.advertise",
    ),
    "unknown key of tls": (
        ONE + 'tls.certt = "x"\n',
        r"unknown key listeners.tls.certt in .*: did you mean .*tls.cert\?",
    ),
    "unknown section": ('[[listener]]\nname = "a"\n', r"unknown key listener in .*: did you mean \[listener?s?"),
    "no name": ('[[listeners]]\nlisten = "127.0.0.1:1"\n', "listener 1 in .* needs a name"),
    "a bad name": ('[[listeners]]\nname = "a b"\nlisten = "h:1"\n', "needs a name"),
    "no address": ('[[listeners]]\nname = "a"\n', "needs an address"),
    "a wildcard": ('[[listeners]]\nname = "a"\nlisten = "0.0.0.0:1"\n', "set its advertise"),
    "a number": (ONE + "advertise = 5\n", "invalid value .5. .expected `str`"),
    "two of a name": (ONE + '[[listeners]]\nname = "a"\nlisten = "127.0.0.1:2"\n', "two have the same name, a"),
    "two of an address": (ONE + '[[listeners]]\nname = "b"\nlisten = "127.0.0.1:1"\n', "same address, 127.0.0.1:1"),
    "no table": ('listeners = "a"\n', "listeners in|unknown key"),
    "also the other one": (
        ONE + '[listen]\nlisten = "h:1"\n',
        r"listen.listen in .* does not apply to \[\[listeners",
    ),
    "also the other tls": (ONE + '[tls]\nmin_version = "1.3"\n', r"tls.min_version in .* does not apply to"),
    "no key": ('[tls]\ncert = "x"\n', "tls.cert in .*: the certificate has no effect without its private key"),
    "no certificate": ('[tls]\nclient_ca = "x"\n', "tls.client_ca in .*: TLS needs the listener's certificate"),
    "an old version": ('[tls]\nmin_version = "1.1"\n', "min_version"),
    "half a pair": ('[broker_tls]\ncert = "x"\n', "set broker_tls.key as well"),
    "a check without a list": ('[broker_tls]\ncrl_check = "leaf"\n', "set broker_tls.crl"),
    "no such file": ('[broker_tls]\nca = "/nowhere.pem"\n', "broker_tls.ca /nowhere.pem cannot be read"),
    "no mechanism": ('[broker_sasl]\nusername = "u"\n', "broker_sasl.username in .* needs a mechanism"),
    "another mechanism": ('[broker_sasl]\nmechanism = "GSSAPI"\n', "mechanism"),
    "no user": ('[broker_sasl]\nmechanism = "SCRAM-SHA-256"\n', "needs broker_sasl.username"),
    "no token": ('[broker_sasl]\nmechanism = "OAUTHBEARER"\n', "needs a token"),
    "a token for a user": (
        '[broker_sasl]\nmechanism = "PLAIN"\ntoken_file = "x"\n',
        "broker_sasl.token_file in .* does not fit PLAIN",
    ),
    "in plain text": (
        '[broker_sasl]\nmechanism = "PLAIN"\nusername = "u"\npassword = "hunter2"\n',
        "PLAIN shows its secret to everybody",
    ),
    "no authority": ('[tls]\n{server}client_auth = "required"\n', "set tls.client_ca"),
    "an authority of no use": ('[tls]\n{server}client_ca = "{ca}"\nclient_auth = "none"\n', "tls.client_auth is none"),
    "no list in the file": ('[tls]\n{server}client_ca = "{ca}"\nclient_crl = "{ca}"\n', "holds no revocation list"),
    "a client's check without a list": (
        '[tls]\n{server}client_ca = "{ca}"\nclient_crl_check = "leaf"\n',
        "set tls.client_crl",
    ),
    "a certificate among the lists": (
        '[tls]\n{server}client_ca = "{ca}"\nclient_crl = "{lists}"\n',
        "holds a certificate, which would be trusted",
    ),
    "a certificate among the broker's lists": (
        '[broker_tls]\nca = "{ca}"\ncrl = "{lists}"\n',
        "holds a certificate, which would be trusted",
    ),
    "another's key": ("[tls]\n{strangers}", "do not belong together"),
    "an old certificate": ("[tls]\n{old}", "has expired: give one"),
}


@pytest.fixture(scope="module")
def files(signer: Signer, server: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Certificates and lists for the texts of REFUSED."""
    stranger = Signer(tmp_path_factory.mktemp("stranger"))
    lists = stranger.directory / "lists.pem"
    lists.write_text(signer.revoke([]).read_text() + stranger.revoke([]).read_text() + stranger.ca.read_text())
    strangers = Pair(server.cert, stranger.issue("server", "localhost").key)
    pairs = {"server": server, "strangers": strangers, "old": signer.issue("old", "localhost", days=-1)}
    return {"ca": signer.ca, "lists": lists} | {name: tls(pair, "") for name, pair in pairs.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_conflicting_listener_options_are_reported(files: dict[str, object], tmp_path: Path, case: str) -> None:
    text, says = REFUSED[case]
    sentence = error_of(text.format(**files), tmp_path)
    assert re.search(says, sentence), sentence
    assert "hunter2" not in sentence


class Authorities:
    """A root, an authority below it, and a certificate of each."""

    def __init__(self, directory: Path) -> None:
        self.root = Signer(directory / "root")
        self.below = Signer(directory / "below", self.root)
        self.direct = self.root.issue("direct", "localhost", "127.0.0.1")
        self.indirect = self.below.issue("indirect", "localhost")

    def lists(self, name: str, *files: Path) -> Path:
        """One file with all of these lists."""
        together = self.root.directory / f"{name}.pem"
        together.write_bytes(b"".join(file.read_bytes() for file in files))
        return together


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return Authorities(tmp_path_factory.mktemp("authorities"))


# Whether the root revoked the authority; whose lists the file has; what is presented; the failure's word if the chain
# is checked, and if only the leaf is.
CHAINS = {
    "a leaf of the root": (False, "root", "direct", "", ""),
    "a leaf below": (False, "root below", "indirect", "", ""),
    "a leaf below, and the list of its authority alone": (False, "below", "indirect", "revocation_list", ""),
    "a leaf below, and the list of the root alone": (False, "root", "indirect", "revocation_list", "revocation_list"),
    "a revoked authority": (True, "root below", "indirect", "revoked", ""),
    "a leaf of the root beside a revoked authority": (True, "root", "direct", "", ""),
}


@pytest.mark.parametrize("side", ["client", "broker"])
@pytest.mark.parametrize("case", CHAINS)
def test_revoked_authority_is_noticed_in_chain(authorities: Authorities, tmp_path: Path, side: str, case: str) -> None:
    is_revoked, whose, shown, *words = CHAINS[case]
    files = {
        "root": authorities.root.revoke([authorities.below] if is_revoked else []),
        "below": authorities.below.revoke([]),
    }
    crl = authorities.lists("lists", *(files[each] for each in whose.split()))
    pair: Pair = getattr(authorities, shown)
    own, ca = authorities.direct, authorities.root.ca
    for check, word in zip(("", "leaf"), words, strict=True):
        key = f'crl_check = "{check}"\n' if check else ""
        text = f'[broker_tls]\nca = "{ca}"\ncrl = "{crl}"\n{key}'
        text += f'[tls]\n{tls(own, "")}client_ca = "{ca}"\nclient_crl = "{crl}"\n'
        config = load(text + (f"client_{key}" if key else ""), tmp_path)
        (listener,) = config.listeners
        assert listener.tls is not None
        assert config.broker_tls is not None
        if side == "client":
            server, client = load_listener_tls(listener.tls).context, client_context(ca, pair)
        else:
            server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), load_broker_tls(config.broker_tls).context
            server.load_cert_chain(pair.cert, pair.key)
        if not word:
            meet(server, client, name="localhost")
            continue
        with pytest.raises(ssl.SSLCertVerificationError) as raised:
            meet(server, client, name="localhost")
        assert client_failure(raised.value, names=(), asked_for="").word == word


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('proxy_protocol = true\nproxy_protocol_from = ["10.0.0.300"]', "'10.0.0.300' is no address and no"),
        ('proxy_protocol = true\nproxy_protocol_from = ["10.0.0.1/8"]', "has host bits set"),
        ('proxy_protocol = true\nproxy_protocol_from = ["balancer.test"]', "'balancer.test' is no address"),
        ("proxy_protocol = true\nproxy_protocol_from = []", "proxy_protocol_from"),
        (f"proxy_protocol = true\nproxy_protocol_from = {['10.0.0.1'] * 257}", "has 257 entries; at most 256"),
        ('proxy_protocol_from = ["10.0.0.1"]', "set proxy_protocol = true"),
    ],
)
@pytest.mark.parametrize("room", ["[listen]\n", '[[listeners]]\nname = "a"\nlisten = "127.0.0.1:1"\n'])
def test_proxy_header_senders_are_addresses_and_networks(tmp_path: Path, room: str, text: str, says: str) -> None:
    assert says in error_of(f"{room}{text}\n", tmp_path)


def test_address_is_found_in_networks(tmp_path: Path) -> None:
    text = '[listen]\nproxy_protocol = true\nproxy_protocol_from = ["10.0.0.0/8", "192.0.2.7", "fd00::/8"]\n'
    (listener,) = load(text, tmp_path).listeners
    assert listener.proxy_protocol_from is not None
    for host in ("10.255.0.1", "192.0.2.7", "fd00::1", "fd00::1%eth0", "::ffff:10.0.0.1"):
        assert is_among(host, listener.proxy_protocol_from), host
    for host in ("11.0.0.1", "192.0.2.8", "fe80::1%eth0", "::ffff:11.0.0.1", "::1", "::10.0.0.1"):
        assert not is_among(host, listener.proxy_protocol_from), host


def test_flags_and_environment_may_configure_one_listener(server: Pair, tmp_path: Path) -> None:
    environ = {
        "KPROXY_TLS__CERT": str(server.cert),
        "KPROXY_TLS__KEY": str(server.key),
        "KPROXY_LISTEN__PROXY_PROTOCOL": "true",
    }
    (listener,) = load("", tmp_path, **environ).listeners
    assert listener.tls is not None
    assert (listener.name, listener.proxy_protocol, listener.tls.client_ca) == ("", True, None)


def test_broker_key_with_tls_means_tls(signer: Signer, tmp_path: Path) -> None:
    assert load("", tmp_path).broker_tls is None
    assert load(f'[broker_tls]\nca = "{signer.ca}"\nenabled = false\n', tmp_path).broker_tls is None
    on = (
        f'[broker_tls]\nca = "{signer.ca}"\n',
        "[broker_tls]\nenabled = true\n",
        '[broker_tls]\nmin_version = "1.3"\n',
    )
    for text in on:
        assert load(text, tmp_path).broker_tls is not None


def test_secret_of_the_proxy_is_never_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text(ETCD + '[broker_sasl]\nmechanism = "SCRAM-SHA-512"\nusername = "kproxy"\n')
    monkeypatch.setenv("KPROXY_BROKER_SASL__PASSWORD", "hunter2")
    config = load_proxy_config(file)
    assert config.broker_sasl is not None
    assert (config.broker_sasl.read_secret(), "hunter2" in repr(config)) == ("hunter2", False)
    for more in ([], ["--json"]):
        assert main(["check-config", "--config", str(file), *more]) == 0
        assert "hunter2" not in capsys.readouterr().out


def test_check_config_prints_a_valid_file(server: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, again = tmp_path / "kproxy.toml", tmp_path / "again.toml"
    file.write_text(
        ETCD + ONE + '[[listeners]]\nname = "b"\nlisten = "127.0.0.1:2"\nproxy_protocol = true\n' + tls(server)
    )
    assert main(["check-config", "--config", str(file)]) == 0
    printed = capsys.readouterr().out
    assert [each["name"] for each in tomllib.loads(printed)["listeners"]] == ["a", "b"]
    again.write_text(printed)
    assert load_proxy_config(again, environ={}).listeners == load_proxy_config(file, environ={}).listeners
    assert main(["check-config", "--config", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["tls"] is None) for each in told["listeners"]] == [("a", True), ("b", False)]
    assert told["settings"]["tls.cert"]["state"] == "not_set"
    assert told["settings"]["listen.listen"]["state"] == "not_used"


@pytest.mark.parametrize("side", ["client", "broker"])
def test_tls_disables_renegotiation_compression_and_old_versions(
    signer: Signer, server: Pair, tmp_path: Path, side: str
) -> None:
    """CVE-2009-3555, CVE-2011-1473 and CVE-2012-4929."""
    text = f'[broker_tls]\nca = "{signer.ca}"\n'
    text += f'[[listeners]]\nname = "a"\nlisten = "10.0.0.1:9092"\n{tls(server)}'
    config = load(text, tmp_path)
    (listener,) = config.listeners
    assert listener.tls is not None
    assert config.broker_tls is not None
    context = (load_listener_tls(listener.tls) if side == "client" else load_broker_tls(config.broker_tls)).context
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.options & ssl.OP_NO_COMPRESSION
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.check_hostname is (side == "broker")
    assert context.verify_mode is (ssl.CERT_REQUIRED if side == "broker" else ssl.CERT_NONE)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_session_is_not_resumed_at_another_listener(signer: Signer, server: Pair, version: ssl.TLSVersion) -> None:
    """As in CVE-2025-23419: a session made without a client certificate must not open such a listener."""
    open_one = load_for_acceptor(ListenerTls(*server)).context
    closed_one = load_for_acceptor(ListenerTls(*server, client_ca=signer.ca, client_auth="required")).context
    stranger = client_context(signer.ca)
    stranger.minimum_version = stranger.maximum_version = version
    session = talk(open_one, stranger, None)[1].session
    assert talk(open_one, stranger, session)[0].session_reused
    with pytest.raises(ssl.SSLError, match="did not return a certificate"):
        talk(closed_one, stranger, session)


def talk(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Do a handshake in memory and let the client read a byte, which brings tickets. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = server.wrap_bio(to_server, to_client, server_side=True)
    there = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    for _ in range(4):
        for side in (there, here):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    here.write(b"x")
    assert there.read(1) == b"x"
    return here, there


def test_hello_longer_than_usual_is_refused(server: Pair) -> None:
    """In any portions; a length that clients may need some day is accepted."""
    context = load_for_acceptor(ListenerTls(*server)).context
    for padding, is_refused in ((7_800, False), (8_192, True)):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        listener = context.wrap_bio(incoming, outgoing, server_side=True)
        hello = client_hello({**EXTENSIONS, PADDING: bytes(padding)})
        errors = []
        for at in range(0, len(hello), 1_000):
            incoming.write(hello[at : at + 1_000])
            try:
                listener.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                errors.append(str(error))
                break
        assert bool(errors) == is_refused
        assert bool(outgoing.pending) != is_refused
        assert not errors or errors == [f"its first message has more than {MOST_HELLO_BYTES} bytes"]


def test_certificate_chain_may_exceed_the_hello(signer: Signer, server: Pair, tmp_path: Path) -> None:
    options = ListenerTls(*server, client_ca=signer.ca, client_auth="required")
    issued = signer.issue("client", "app")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(issued.cert.read_bytes() + signer.ca.read_bytes() * 40)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    listener = load_for_acceptor(options).context.wrap_bio(to_server, to_client, server_side=True)
    dialling = client_context(signer.ca, Pair(chain, issued.key))
    client = dialling.wrap_bio(to_client, to_server, server_hostname="localhost")
    sent = 0
    for _ in range(3):
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        sent = max(sent, to_server.pending)
        with contextlib.suppress(ssl.SSLWantReadError):
            listener.do_handshake()
    assert sent > MOST_HELLO_BYTES
    assert listener.getpeercert()
