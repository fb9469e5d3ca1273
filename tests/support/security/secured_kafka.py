"""Run a real Kafka broker as the reference: SASL and ACLs on one listener, neither on another.

Its users are those of tests.support.security.sasl_client. On the plain listener everybody is a super user; PROXY, which
authenticates by PLAIN, is one on both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from confluent_kafka.admin import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from tests.support.brokers.real_kafka import RealKafka, start_real_kafka
from tests.support.processes.ports import free_port
from tests.support.security.sasl_client import AUDIENCE, ISSUER, USERS

# The proxy's own user, and its password.
PROXY, PROXY_SECRET = "kproxy", "own-secret"
_SECURITY = "org.apache.kafka.common.security"
_MECHANISMS = {"SCRAM-SHA-256": ScramMechanism.SCRAM_SHA_256, "SCRAM-SHA-512": ScramMechanism.SCRAM_SHA_512}


class SecuredKafka:
    """`plain` is the cluster by its plain listener, `secured` the address of the other one."""

    def __init__(self, plain: RealKafka, port: int) -> None:
        self.plain = plain
        self.secured = f"127.0.0.1:{port}"

    def revoke(self, name: str) -> None:
        """Restart the broker without this PLAIN user."""
        (broker,) = self.plain.brokers
        broker.terminate()
        broker.reconfigure(f' user_{name}="{USERS[name]}"', "")
        broker.start()


@contextlib.contextmanager
def start_secured_kafka(
    directory: Path,
    *,
    session_s: float = 0,
    mechanisms: Sequence[str] = ("PLAIN", *_MECHANISMS),
    tokens: bool = False,
    keys: Path | None = None,
) -> Iterator[SecuredKafka]:
    """Start a broker that offers `mechanisms` and ends sessions after `session_s`, 0: never.

    With `tokens` it also accepts unsecured ones by OAUTHBEARER, with `keys` those signed by a key of that JWKS file.
    """
    offered = [*mechanisms, *(["OAUTHBEARER"] if tokens or keys else [])]
    port = free_port()
    listener = "listener.name.sasl_plaintext"
    known = " ".join(f'user_{name}="{password}"' for name, password in {PROXY: PROXY_SECRET, **USERS}.items())
    options: dict[str, object] = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "sasl.enabled.mechanisms": ",".join(offered),
        f"{listener}.plain.sasl.jaas.config": f"{_SECURITY}.plain.PlainLoginModule required {known};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{PROXY}",
        f"{listener}.connections.max.reauth.ms": round(session_s * 1000),
    }
    bearer, java_options = f"{listener}.oauthbearer", list[str]()
    if tokens:
        options[f"{bearer}.sasl.jaas.config"] = (
            f'{_SECURITY}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker";'
        )
    elif keys is not None:
        java_options = [f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys.as_uri()}"]
        options |= {
            f"{bearer}.sasl.jaas.config": f"{_SECURITY}.oauthbearer.OAuthBearerLoginModule required;",
            f"{bearer}.sasl.server.callback.handler.class": (
                f"{_SECURITY}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            ),
            "sasl.oauthbearer.jwks.endpoint.url": keys.as_uri(),
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
        }
    for mechanism in _MECHANISMS:
        options[f"{listener}.{mechanism.lower()}.sasl.jaas.config"] = f"{_SECURITY}.scram.ScramLoginModule required;"
    with start_real_kafka(
        directory, 1, more_listeners={"SASL_PLAINTEXT": port}, more=options, java_options=java_options
    ) as cluster:
        for kind in _MECHANISMS.values():
            # A request may change a user only once.
            changes = [
                UserScramCredentialUpsertion(name, ScramCredentialInfo(kind, 4_096), password.encode())
                for name, password in USERS.items()
            ]
            for change in cluster.admin().alter_user_scram_credentials(changes).values():
                change.result(30)
        yield SecuredKafka(cluster, port)
