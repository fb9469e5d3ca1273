"""TLS and SASL for the demo's own proxy: certificates and a user, made for one run."""

from __future__ import annotations

import datetime
import ipaddress
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
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    keys = {owner: ec.generate_private_key(ec.SECP256R1()) for owner in ("authority", "server")}
    issuer = name("kproxy demo")

    def builder(subject: x509.Name, owner: str) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(keys[owner].public_key())
        made = made.serial_number(x509.random_serial_number())
        return made.not_valid_before(now - _VALID).not_valid_after(now + _VALID)

    authority = builder(issuer, "authority").add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    server = builder(name("localhost"), "server").add_extension(names, critical=False)
    for owner, certificate in (("authority", authority), ("server", server)):
        signed = certificate.sign(keys["authority"], hashes.SHA256())
        (directory / f"{owner}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    key = directory / "server.key"
    key.touch(0o600)
    key.write_bytes(keys["server"].private_bytes(*form))
    return directory / "authority.pem"
