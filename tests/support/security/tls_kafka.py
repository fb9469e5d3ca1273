"""Run a real Apache Kafka broker with secured listeners, and a plain one for the test itself.

| listener | what it asks for |
| --- | --- |
| PLAINTEXT | nothing |
| SSL | TLS with a client certificate |
| SASL_SSL | TLS, and SASL: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, or OAUTHBEARER with unsecured tokens |

Brokers advertise all listeners, each to its own clients. A session of SASL_SSL ends after `session_s`.
"""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from kproxy_codec.api_keys import API_VERSIONS
from tests.support.brokers.real_kafka import RealKafka, start_real_kafka
from tests.support.clients.raw_client import control_frame
from tests.support.processes.ports import free_port
from tests.support.security.tls_files import Pair, Signer, client_context

USER, PASSWORD = "kproxy", "correct horse, battery=staple"
SCRAM = {"SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256, "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512}
_SECURITY = "org.apache.kafka.common.security"


# num.network.threads, by default.
NETWORK_THREADS = 3


class TlsKafka:
    """`plain` is the broker by its plain listener; `mutual` and `sasl` are addresses. `server` is its certificate."""

    def __init__(self, plain: RealKafka, signer: Signer, server: Pair, mutual_port: int, sasl_port: int) -> None:
        self.plain = plain
        self.signer = signer
        self.server = server
        self.mutual = f"localhost:{mutual_port}"
        self.sasl = f"localhost:{sasl_port}"

    def present(self, shown: Pair, authorities: Path) -> None:
        """Present this certificate to new connections of the SSL listener, and require one of these authorities."""
        store = shown.cert.with_suffix(".store.pem")
        store.write_bytes(shown.key.read_bytes() + shown.cert.read_bytes())
        set_to = {"ssl.keystore.location": store, "ssl.truststore.location": authorities}
        entries = [
            ConfigEntry(f"listener.name.ssl.{name}", str(file), incremental_operation=AlterConfigOpType.SET)
            for name, file in set_to.items()
        ]
        broker = ConfigResource(ResourceType.BROKER, "1", incremental_configs=entries)
        for changed in self.plain.admin().incremental_alter_configs([broker]).values():
            changed.result(30)

    def lets_in(self, client: Pair, authority: Path) -> bool:
        """Whether the SSL listener accepts this certificate and presents one of this authority."""
        with socket.create_connection(("localhost", int(self.mutual.rpartition(":")[2])), 30.0) as plain:
            try:
                with client_context(authority, client).wrap_socket(plain, server_hostname="localhost") as connection:
                    connection.sendall(control_frame(API_VERSIONS, 0))
                    return connection.recv(1) != b""
            except (ssl.SSLError, ConnectionError):
                return False

    def always_lets_in(self, client: Pair, authority: Path) -> bool:
        """Whether all its network threads do: they take new files one by one, and connections in turn."""
        return all(self.lets_in(client, authority) for _ in range(4 * NETWORK_THREADS))


@contextmanager
def start_tls_kafka(directory: Path, *, session_s: float = 0) -> Iterator[TlsKafka]:
    signer = Signer(directory / "brokers-ca")
    server = signer.issue("broker", "localhost")
    # Java requires key and chain in one file.
    store = directory / "broker-store.pem"
    store.write_bytes(server.key.read_bytes() + server.cert.read_bytes())
    ports = {"SSL": free_port(), "SASL_SSL": free_port()}
    listener = "listener.name.sasl_ssl"
    options: dict[str, object] = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": store,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": signer.ca,
        "listener.name.ssl.ssl.client.auth": "required",
        # Certificates of another authority may replace these.
        "ssl.allow.dn.changes": "true",
        "ssl.allow.san.changes": "true",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        f"{listener}.plain.sasl.jaas.config": (
            f'{_SECURITY}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        ),
        f"{listener}.oauthbearer.sasl.jaas.config": (
            f'{_SECURITY}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
        ),
        f"{listener}.connections.max.reauth.ms": round(session_s * 1000),
    }
    for mechanism in SCRAM:
        options[f"{listener}.{mechanism.lower()}.sasl.jaas.config"] = f"{_SECURITY}.scram.ScramLoginModule required;"
    with start_real_kafka(directory / "kafka", 1, host="localhost", more_listeners=ports, more=options) as cluster:
        for kind in SCRAM.values():
            change = UserScramCredentialUpsertion(USER, ScramCredentialInfo(kind, 4_096), PASSWORD.encode())
            for changed in cluster.admin().alter_user_scram_credentials([change]).values():
                changed.result(30)
        yield TlsKafka(cluster, signer, server, ports["SSL"], ports["SASL_SSL"])


def unsecured_token(subject: str, valid_s: float = 3600) -> str:
    """A token that Kafka's own development validator accepts."""
    claims = {"sub": subject, "iat": time.time() - 5, "exp": time.time() + valid_s}
    parts = [json.dumps(each).encode() for each in ({"alg": "none"}, claims)]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."
