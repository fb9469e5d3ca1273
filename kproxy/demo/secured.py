"""Make the certificates and the user for a demo whose own proxy requires TLS or SASL; they are for one run."""

from __future__ import annotations

import datetime
import secrets
from pathlib import Path
from typing import Final, NamedTuple

from kproxy.config.security import SCRAM_512
from kproxy.pipeline.kafka_access import NO_OPTIONS, KafkaOptions
from kproxy.security.users import DEFAULT_ITERATIONS, SALT_BYTES, make_credential, write_users

USER: Final = "demo"
_VALID: Final = datetime.timedelta(days=2)
_LOGIN: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"
_ACLS: Final = f"""
[[acls]]
principal = "User:{USER}"
operations = ["admin"]
topics = ["*"]
groups = ["*"]
transactional_ids = ["*"]
cluster = true
"""


class Secured(NamedTuple):
    """`config` is the proxy's file, None for none. `kafka` has the options of Kafka's clients."""

    config: Path | None = None
    kafka: KafkaOptions = NO_OPTIONS

    @property
    def protocol(self) -> str:
        return self.kafka.get("security.protocol", "PLAINTEXT")


PLAIN: Final = Secured()


def secure(directory: Path, *, tls: bool, sasl: bool) -> Secured:
    """Make the files that the proxy and its clients need for TLS, SASL, or both, in `directory`."""
    if not (tls or sasl):
        return PLAIN
    directory.mkdir(parents=True)
    config = ""
    protocol = f"{'SASL_' if sasl else ''}{'SSL' if tls else 'PLAINTEXT'}"
    kafka = {"security.protocol": protocol}
    if tls:
        authority = _make_certificates(directory)
        config += f'[tls]\ncert = "{directory / "server.pem"}"\nkey = "{directory / "server.key"}"\n'
        kafka |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(authority)}
    if sasl:
        password, users = secrets.token_urlsafe(24), directory / "users.toml"
        credential = make_credential(SCRAM_512, password, DEFAULT_ITERATIONS, secrets.token_bytes(SALT_BYTES))
        write_users(users, {USER: {SCRAM_512: credential}})
        config += f'[sasl]\nmechanisms = ["{SCRAM_512}"]\nusers = "{users}"\n{_ACLS}'
        login = f'{_LOGIN} required username="{USER}" password="{password}";'
        kafka |= {"sasl.mechanism": SCRAM_512, "sasl.jaas.config": login}
    file = directory / "kproxy.toml"
    file.write_text(config)
    return Secured(file, KafkaOptions(kafka))


def _make_certificates(directory: Path) -> Path:
    """Write a server's certificate for this machine and its key; return the file of the authority."""
    # Imported here, because only the demo's extra installs it.
    import trustme

    authority, ends_at = trustme.CA(), datetime.datetime.now(datetime.UTC) + _VALID
    server = authority.issue_cert("localhost", "127.0.0.1", not_after=ends_at)
    key, file = directory / "server.key", directory / "authority.pem"
    key.touch(0o600)
    server.private_key_pem.write_to_path(key)
    server.cert_chain_pems[0].write_to_path(directory / "server.pem")
    authority.cert_pem.write_to_path(file)
    return file
