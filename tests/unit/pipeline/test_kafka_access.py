"""TLS and SASL options of Kafka's clients are read as Kafka's clients read them, or refused with a sentence."""

from __future__ import annotations

import pickle
import ssl
from pathlib import Path

import pytest

from kproxy.cli.pipeline import kafka_options
from kproxy.errors import StartupError
from kproxy.pipeline.audit.log_client import LogClient, LogReadFailed
from kproxy.pipeline.audit.logs import LogTask
from kproxy.pipeline.audit.run import AuditJob, check
from kproxy.pipeline.audit.trail_place import parse_trail
from kproxy.pipeline.kafka_access import KafkaOptions, WrongKafkaOption, read_access, read_properties
from tests.support.security.tls_files import Signer

LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required"
SCRAM = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "SCRAM-SHA-512",
    "sasl.jaas.config": f'{LOGIN} username="alice" password="a\\"b\\\\c;d";',
}
TRUST = {"security.protocol": "SSL", "ssl.truststore.type": "PEM"}
KEYS = {"security.protocol": "SSL", "ssl.keystore.type": "PEM", "ssl.keystore.key": "secret"}


def test_default_access_is_plain_text() -> None:
    access = read_access({"client.id": "x", "security.protocol": "plaintext"})
    assert access.context() is None
    assert access.credentials is None


def test_jaas_user_and_password_are_read_and_hidden() -> None:
    access = read_access(SCRAM)
    assert access.credentials is not None
    assert tuple(access.credentials) == ("SCRAM-SHA-512", "alice", 'a"b\\c;d')
    assert "a" + '"b' not in repr(access) + repr(access.credentials) + repr(KafkaOptions(SCRAM))
    single = read_access({**SCRAM, "sasl.jaas.config": f"{LOGIN} password='p w' username=bob;"}).credentials
    assert single is not None
    assert single[1:] == ("bob", "p w")


def test_tls_uses_the_given_authorities_and_certificate(tmp_path: Path) -> None:
    signer = Signer(tmp_path / "ca")
    client = signer.issue("client", "client.example.org")
    store = tmp_path / "store.pem"
    store.write_bytes(client.key.read_bytes() + client.cert.read_bytes())
    trust = {**TRUST, "ssl.truststore.location": str(signer.ca)}
    key = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(store)}
    context = read_access({**trust, **key}).context()
    assert context is not None
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert len(context.get_ca_certs()) == 1
    lax = read_access({**trust, "ssl.endpoint.identification.algorithm": ""}).context()
    assert lax is not None
    assert (lax.check_hostname, lax.verify_mode) == (False, ssl.CERT_REQUIRED)
    as_text = {
        **TRUST,
        "ssl.truststore.certificates": signer.ca.read_text(),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.key": client.key.read_text(),
        "ssl.keystore.certificate.chain": client.cert.read_text(),
    }
    inline = read_access(as_text).context()
    assert inline is not None
    assert len(inline.get_ca_certs()) == 1


NO_CERTIFICATES = "The trust store has no certificates in PEM"
WRONG = {
    "no such protocol": ({"security.protocol": "TLS"}, "security.protocol 'TLS'; expected one of PLAINTEXT, SSL"),
    "SASL without a protocol": ({"sasl.mechanism": "PLAIN"}, "sasl.mechanism needs security.protocol"),
    "no mechanism": ({"security.protocol": "SASL_SSL"}, "sasl.mechanism is missing; expected one of PLAIN"),
    "GSSAPI": ({"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"}, "sasl.mechanism is 'GSSAPI'"),
    "no user": ({**SCRAM, "sasl.jaas.config": f'{LOGIN} password="secret";'}, "sasl.jaas.config lacks a user name or"),
    "a Java trust store": ({"security.protocol": "SSL", "ssl.truststore.location": "/x"}, "ssl.truststore.type JKS;"),
    "no such file": (
        {**TRUST, "ssl.truststore.location": "/nonexistent"},
        r"ssl.truststore.location /nonexistent cannot be read \(No such file",
    ),
    "no certificates": ({**TRUST, "ssl.truststore.certificates": "none"}, NO_CERTIFICATES),
    "an empty trust store": ({**TRUST, "ssl.truststore.certificates": ""}, NO_CERTIFICATES),
    "a trust store that is no text": ({**TRUST, "ssl.truststore.certificates": "ä"}, NO_CERTIFICATES),
    "half a key store": (KEYS, "ssl.keystore.key and ssl.keystore.certificate.chain go together"),
    "a key store of noise": (
        {**KEYS, "ssl.keystore.certificate.chain": "secret"},
        "The key store has no matching certificate and key",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unusable_option_is_named_with_remedy(name: str) -> None:
    options, sentence = WRONG[name]
    with pytest.raises(WrongKafkaOption, match=sentence) as raised:
        read_access(options)
    assert "secret" not in str(raised.value)


def test_file_missing_at_connection_time_is_named() -> None:
    name = "ssl.truststore.location"
    gone = KafkaOptions({**TRUST, name: "/nonexistent"})
    with pytest.raises(LogReadFailed, match=f"{name} /nonexistent cannot be read"):
        LogClient("127.0.0.1:1", gone)
    job = AuditJob(bootstrap="127.0.0.1:1", trail=parse_trail("topic"), kafka=gone)
    with pytest.raises(StartupError, match=f"^{name} /nonexistent cannot be read"):
        check(job)


def test_properties_file_is_read_as_by_kafkas_tools(tmp_path: Path) -> None:
    text = (
        "# a comment\n\n  security.protocol = SASL_SSL\nsasl.jaas.config=a required \\\n    username=b;\n!x\nempty=\n"
    )
    expected = {"security.protocol": "SASL_SSL", "sasl.jaas.config": "a required username=b;", "empty": ""}
    assert read_properties(text, "f") == expected
    with pytest.raises(WrongKafkaOption, match=r"^--command-config f, line 2, is not NAME=VALUE\.$"):
        read_properties("a=b\npassword\n", "--command-config f")
    file = tmp_path / "client.properties"
    file.write_text(text)
    given = kafka_options(["kafka.security.protocol=SSL", "x=y=z"], file)
    assert given == {**expected, "security.protocol": "SSL", "x": "y=z"}
    with pytest.raises(StartupError, match=f"--command-config {tmp_path / 'no'} cannot be read"):
        kafka_options([], tmp_path / "no")
    file.write_bytes(b"a=\xff")
    with pytest.raises(StartupError, match="is not UTF-8 text"):
        kafka_options([], file)


def test_options_reach_executors_and_stay_hidden() -> None:
    options = LogTask("h:1", KafkaOptions(SCRAM), {})
    again = pickle.loads(pickle.dumps(options))
    assert again.kafka == SCRAM
    assert "alice" not in repr(options)
