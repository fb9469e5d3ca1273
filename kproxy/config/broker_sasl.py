"""SASL towards brokers with the proxy's own identity: `[broker_sasl]`, and `sasl` of `[audit]`.

Secrets are never flags, never printed, and never part of an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kproxy.config.parsing import read_file
from kproxy.errors import StartupError

MAX_SECRET_BYTES: Final = 64 << 10
SECRETS: Final = frozenset({"broker_sasl.password", "audit.sasl.password"})
# RFC 7677, and Kafka's clients: with fewer the proof of a password is guessed quickly.
LEAST_SCRAM_ITERATIONS: Final = 4_096
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


class BrokerSaslSection(msgspec.Struct, kw_only=True):
    """`[broker_sasl]` as given, or `sasl` of `[audit]`."""

    mechanism: Mechanism | UnsetType = UNSET
    username: str | UnsetType = UNSET
    password: str | UnsetType = UNSET
    password_file: str | UnsetType = UNSET
    token_file: str | UnsetType = UNSET
    allow_plain_text: bool = False


@dataclass(frozen=True)
class BrokerSasl:
    """The options, checked: a user with a password, or with OAUTHBEARER a file with a token.

    Errors name the options with `prefix`.
    """

    mechanism: Mechanism
    username: str = ""
    password: str = field(default="", repr=False)
    password_file: Path | None = None
    token_file: Path | None = None
    prefix: str = "broker_sasl."

    def read_secret(self) -> str:
        """The present password or token: a file may change. Raises StartupError."""
        kind = "token" if self.mechanism == "OAUTHBEARER" else "password"
        file, named = (self.token_file if kind == "token" else self.password_file), f"{self.prefix}{kind}_file"
        if file is None:
            return self.password
        try:
            secret = read_file(file, named, MAX_SECRET_BYTES, "that is another file").decode().strip("\r\n ")
        except UnicodeDecodeError:
            # Not chained: the cause has the content of the file.
            raise StartupError(f"{named} {file} is not UTF-8 text: name the file that has the {kind}.") from None
        if not secret:
            raise StartupError(f"{named} {file} is empty: write the {kind} into it.")
        return secret


def broker_sasl(
    given: BrokerSaslSection,
    sources: Mapping[str, str],
    prefix: str = "broker_sasl.",
    tls_prefix: str = "broker_tls.",
    *,
    with_tls: bool,
) -> BrokerSasl | None:
    """Check the options; None if the proxy does not authenticate to brokers. Raises StartupError."""
    values = {key: value for key, value in msgspec.structs.asdict(given).items() if value is not UNSET}
    values.pop("allow_plain_text")
    if given.mechanism is UNSET:
        if values:
            raise StartupError(
                f"{sources[next(iter(values))]}: it needs a mechanism: set {prefix}mechanism to PLAIN, "
                f"SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER."
            )
        return None
    for key, value in values.items():
        if not value:
            raise StartupError(f"{sources[key]}: it is empty: give a value, or leave it out.")
    takes = ("token_file",) if given.mechanism == "OAUTHBEARER" else ("username", "password", "password_file")
    for key in values:
        if key != "mechanism" and key not in takes:
            raise StartupError(f"{sources[key]}: it is not for {given.mechanism}, which takes {', '.join(takes)}.")
    source = sources["mechanism"]
    if given.mechanism == "OAUTHBEARER":
        if "token_file" not in values:
            raise StartupError(f"{source}: OAUTHBEARER needs a token: name its file with {prefix}token_file.")
    elif "username" not in values or not {"password", "password_file"} & values.keys():
        raise StartupError(
            f"{source}: {given.mechanism} needs {prefix}username, and its password in {prefix}password_file or "
            f"KPROXY_{prefix.upper().replace('.', '__')}PASSWORD."
        )
    if "password" in values and "password_file" in values:
        raise StartupError(f"{sources['password_file']}: the password is also in {sources['password']}; keep one.")
    if given.mechanism in ("PLAIN", "OAUTHBEARER") and not with_tls and not given.allow_plain_text:
        raise StartupError(
            f"{source}: {given.mechanism} shows its secret to everybody on the way to the brokers: set "
            f"{tls_prefix}enabled, or take a SCRAM mechanism, or set {prefix}allow_plain_text."
        )
    options = BrokerSasl(
        mechanism=given.mechanism,
        username=given.username or "",
        password=given.password or "",
        password_file=Path(given.password_file) if given.password_file is not UNSET else None,
        token_file=Path(given.token_file) if given.token_file is not UNSET else None,
        prefix=prefix,
    )
    options.read_secret()
    return options
