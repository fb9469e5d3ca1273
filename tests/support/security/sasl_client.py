"""Build the client's side of SASL for tests: frames, messages of each mechanism, keys and tokens."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from kproxy.security.mechanisms import servers
from kproxy.security.sasl import SaslExchange, Times
from kproxy.security.tokens import TokenOptions, TokenVerifier, read_verifier
from kproxy.security.users import SCRAM_MECHANISMS, Credentials, Users, make_credential, write_users
from kproxy_codec.api_keys import SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import NONE
from tests.support.clients.raw_client import RawClient, control_frame

ISSUER = "https://issuer.test/"
AUDIENCE = "kafka.test"
# For tests that are not about access.
ALLOW_ALL = """
[[acls]]
principal = "User:*"
operations = ["admin"]
topics = ["*"]
groups = ["*"]
transactional_ids = ["*"]
cluster = true
"""
USERS = {"alice": "alice-secret", "bob": "bob-secret"}


def plain_users(directory: Path, mechanisms: str = '["PLAIN"]') -> str:
    """The section of a proxy's configuration that lets these users log in, with passwords in plain text."""
    return f'[sasl]\nmechanisms = {mechanisms}\nusers = "{users_file(directory)}"\nwithout_tls = true\n'


async def logged_in(client: RawClient, name: str = "alice") -> RawClient:
    """The client, authenticated by PLAIN."""
    client.send(handshake("PLAIN"))
    assert (await client.answer(SASL_HANDSHAKE, 1)).message.error_code == NONE
    client.send(authenticate(plain(name, USERS[name])))
    assert (await client.answer(SASL_AUTHENTICATE, 2)).message.error_code == NONE
    return client


@cache
def credentials_of(name: str) -> Credentials:
    return {kind: make_credential(kind, USERS[name], 4_096, name.encode().ljust(18)) for kind in SCRAM_MECHANISMS}


def users(*names: str) -> Users:
    return Users({name: credentials_of(name) for name in names or USERS})


def users_file(directory: Path, *names: str) -> Path:
    file = directory / "users.toml"
    write_users(file, {name: credentials_of(name) for name in names or USERS})
    return file


@cache
def signing_key(number: int = 0) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65_537, key_size=2_048)


def jwks(*numbers: int) -> str:
    keys = []
    for number in numbers or (0,):
        key = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(signing_key(number).public_key()))
        keys.append({**key, "kid": f"key-{number}", "use": "sig", "alg": "RS256"})
    return json.dumps({"keys": keys})


def token(number: int = 0, *, lifetime_s: float = 60.0, headers: dict[str, Any] | None = None, **claims: Any) -> str:
    """A token of the issuer for the audience; a claim that is None is left out."""
    given = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": time.time() + lifetime_s, **claims}
    return jwt.encode(
        {name: value for name, value in given.items() if value is not None},
        signing_key(number),
        "RS256",
        headers={"kid": f"key-{number}", **(headers or {})},
    )


def verifier(directory: Path, *numbers: int, **options: Any) -> TokenVerifier:
    file = directory / "jwks.json"
    file.write_text(jwks(*numbers))
    return read_verifier(file, TokenOptions(ISSUER, (AUDIENCE,), **options))


def bearer(text: str) -> bytes:
    return b"n,,\x01auth=Bearer " + text.encode() + b"\x01\x01"


def plain(name: str, password: str, authorization_id: str = "") -> bytes:
    return "\x00".join((authorization_id, name, password)).encode()


def handshake(mechanism: str, version: int = 1) -> bytes:
    return control_frame(SASL_HANDSHAKE, version, mechanism=mechanism)


def authenticate(message: bytes, version: int = 2) -> bytes:
    return control_frame(SASL_AUTHENTICATE, version, auth_bytes=message)


async def present(client: RawClient, message: bytes, mechanism: str = "PLAIN", version: int = 2) -> Any:
    """The proxy's answer to a credential that a client presents by an offered mechanism."""
    client.send(handshake(mechanism))
    assert (await client.answer(SASL_HANDSHAKE, 1)).message.error_code == NONE
    client.send(authenticate(message, version))
    return (await client.answer(SASL_AUTHENTICATE, version)).message


async def log_in(client: RawClient, name: str = "alice") -> None:
    assert (await present(client, plain(name, USERS[name]))).error_code == NONE


class Clock:
    """A clock that a test moves, in seconds; the same number for both clocks of `Times`."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def exchange(
    *mechanisms: str,
    lifetime_s: float = 0.0,
    tokens: TokenVerifier | None = None,
    clock: Clock | None = None,
    allows_v0: bool = False,
) -> SaslExchange:
    """The proxy's side of an exchange, with the users of USERS."""
    known = users()
    now = clock or Clock()
    offered = mechanisms or ("PLAIN", *SCRAM_MECHANISMS)
    return SaslExchange(
        servers(offered, lambda: known, lambda: tokens), Times(now, now, lifetime_s), allows_v0=allows_v0
    )


def carrying(*mechanisms: str, allows_v0: bool = False) -> SaslExchange:
    """An exchange of a listener that forwards identities and has no users."""
    now = Clock()
    offered = servers(mechanisms or ("PLAIN",), lambda: None, lambda: None, unverified_claim="sub")
    return SaslExchange(offered, Times(now, now), carries=True, allows_v0=allows_v0)
