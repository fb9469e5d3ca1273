"""Connect to a secured cluster by TLS and SASL, with the options of Kafka's own clients.

Spark's Kafka source and sink take such options as they are. The audit asks brokers itself, from the driver and
from Spark's executors (kproxy.pipeline.audit.log_client), so it reads the same options here, for the same kind of
connections as the proxy's. Executors have only the standard library and packages sent to them, without kproxy.config.

Java's key stores (JKS, PKCS12) are not read: like Kafka's clients, this module accepts PEM (KIP-651).
"""

from __future__ import annotations

import re
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kproxy.security.broker_auth import AccessRefused, BrokerAuth, is_of_tls
from kproxy.security.tls_errors import DialWords, broker_failure

MAX_CONFIG_BYTES: Final = 1 << 20
_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
# In sasl.jaas.config: username="..." with backslashes before quotes and backslashes.
_JAAS: Final = re.compile(r"""\b(username|password)\s*=\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s;]+)""")

_WORDS: Final = DialWords(
    whose="the client's",
    ca="ssl.truststore.location",
    pair="ssl.keystore.location",
    other_name="correct the address that it advertises, or set ssl.endpoint.identification.algorithm to nothing",
    no_tls="name its TLS port, or another security.protocol",
)


class WrongKafkaOption(Exception):
    """An option is missing or invalid; the sentence names it and the remedy, without the value of a secret."""


class KafkaOptions(dict[str, str]):
    """Options of Kafka's clients by name. Values are not shown: a password may be among them. Nobody changes them."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return f"KafkaOptions({', '.join(self)})"


NO_OPTIONS: Final = KafkaOptions()


class Credentials(NamedTuple):
    """A SASL mechanism (PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512), a user name and a password."""

    mechanism: str
    username: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials({self.mechanism})"

    @property
    def prefix(self) -> str:
        return "sasl."

    def read_secret(self) -> str:
        return self.password


class KafkaAccess(BrokerAuth):
    """How to connect to brokers. `tls` None means plain text, `credentials` None means without SASL."""

    def __init__(self, tls: ssl.SSLContext | None, credentials: Credentials | None, *, has_ca: bool = False) -> None:
        super().__init__(sasl=credentials, needs_tls="set security.protocol to SSL or SASL_SSL")
        self.credentials = credentials
        self._context = tls
        self._has_ca = has_ca

    @property
    def is_plain(self) -> bool:
        return self._context is None and self.credentials is None

    def context(self) -> ssl.SSLContext | None:
        return self._context

    def server_name(self, host: str) -> str | None:
        return None if self._context is None else host

    def explain(self, error: OSError, host: str) -> OSError:
        if self._context is None or not is_of_tls(error):
            return error
        return AccessRefused(broker_failure(error, name=host, has_ca=self._has_ca, has_cert=False, words=_WORDS).text)


def read_access(options: Mapping[str, str]) -> KafkaAccess:
    """Read the options for security; other options are ignored. Raise WrongKafkaOption."""
    protocol = options.get("security.protocol", _PROTOCOLS[0]).upper()
    if protocol not in _PROTOCOLS:
        raise WrongKafkaOption(f"Unknown security.protocol {protocol!r}; expected one of {', '.join(_PROTOCOLS)}.")
    if protocol == _PROTOCOLS[0]:
        for name in options:
            if name.startswith(("ssl.", "sasl.")):
                raise WrongKafkaOption(f"{name} needs security.protocol: give one of {', '.join(_PROTOCOLS[1:])}.")
    return KafkaAccess(
        _context(options) if protocol.endswith("SSL") else None,
        _credentials(options) if protocol.startswith("SASL") else None,
        has_ca=any(name.startswith("ssl.truststore") for name in options),
    )


def _credentials(options: Mapping[str, str]) -> Credentials:
    mechanism = options.get("sasl.mechanism", "").upper()
    if mechanism not in _MECHANISMS:
        given = f"is {mechanism!r}" if mechanism else "is missing"
        raise WrongKafkaOption(f"sasl.mechanism {given}; expected one of {', '.join(_MECHANISMS)}.")
    found = {name: _unquoted(value) for name, value in _JAAS.findall(options.get("sasl.jaas.config", ""))}
    if not found.get("username") or "password" not in found:
        raise WrongKafkaOption(
            "sasl.jaas.config lacks a user name or a password; expected, as for Kafka's clients: "
            'CLASS required username="NAME" password="PASSWORD";'
        )
    return Credentials(mechanism, found["username"], found["password"])


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1]) if text[0] in "\"'" else text


def _context(options: Mapping[str, str]) -> ssl.SSLContext:
    authorities = _pem(options, "ssl.truststore", "certificates")
    try:
        # With an empty text, as with None, Python trusts the system's authorities.
        if authorities == "":
            raise ValueError("no certificates")
        context = ssl.create_default_context(cadata=authorities)
    except (ssl.SSLError, TypeError, ValueError) as error:
        text = "The trust store has no certificates in PEM: correct ssl.truststore.certificates, or its .location."
        raise WrongKafkaOption(text) from error
    context.check_hostname = options.get("ssl.endpoint.identification.algorithm", "https") != ""
    pair = _pem(options, "ssl.keystore", "key", "certificate.chain")
    if pair is None:
        return context
    # The library reads pairs only from files. The empty password keeps it from asking for one in a terminal.
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(pair)
        file.flush()
        try:
            context.load_cert_chain(file.name, password=options.get("ssl.key.password", ""))
        except (ssl.SSLError, ValueError) as error:
            raise WrongKafkaOption(
                "The key store has no matching certificate and key in PEM, or ssl.key.password is wrong: correct that, "
                "ssl.keystore.location, or ssl.keystore.key and ssl.keystore.certificate.chain."
            ) from error
    return context


def _pem(options: Mapping[str, str], store: str, *parts: str) -> str | None:
    """Return the content of a store, from its file or from options that are its `parts`; None if it is not given."""
    names = [f"{store}.{part}" for part in parts]
    texts, name = [options[each] for each in names if each in options], f"{store}.location"
    if not texts and name not in options:
        return None
    if (kind := options.get(f"{store}.type", "JKS").upper()) != "PEM":
        raise WrongKafkaOption(f"Unsupported {store}.type {kind}; give a file in PEM, and {store}.type=PEM.")
    if len(texts) == len(names):
        return "\n".join(texts)
    if name not in options:
        raise WrongKafkaOption(f"{' and '.join(names)} go together: give both.")
    location = options[name]
    try:
        if Path(location).stat().st_size > MAX_CONFIG_BYTES:
            raise WrongKafkaOption(f"{name} {location} has more than {MAX_CONFIG_BYTES} bytes: name a file in PEM.")
        return Path(location).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise WrongKafkaOption(f"{name} {location} cannot be read ({why}).") from error


def spark_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options with the prefix that Spark's Kafka source and sink need."""
    return {f"kafka.{name}": value for name, value in options.items()}


def read_properties(text: str, named: str) -> dict[str, str]:
    """Read a properties file as Kafka's tools do: NAME=VALUE lines, # comments, and a backslash to continue a line.

    Raise WrongKafkaOption that names the line. `named` is the file's name as the user gave it.
    """
    options: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, raw in lines:
        line = raw.strip()
        if not line or line[0] in "#!":
            continue
        while line.endswith("\\"):
            line = line[:-1] + next(lines, (0, ""))[1].strip()
        name, separator, value = line.partition("=")
        if not separator or not name.strip():
            raise WrongKafkaOption(f"{named}, line {number}, is not NAME=VALUE.")
        options[name.strip()] = value.strip()
    return options
