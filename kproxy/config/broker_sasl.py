"""Check the options by which the proxy itself authenticates to brokers: `[broker_sasl]`, and `sasl` of `[audit]`.

Secrets are never flags, never printed, and never part of an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

import msgspec

from kproxy.config.parsing import Secret, given_keys, read_secret
from kproxy.errors import StartupError

MAX_SECRET_BYTES: Final = 64 << 10
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


class BrokerSasl(msgspec.Struct, frozen=True):
    """The section `[broker_sasl]`: a user with a password, or with OAUTHBEARER a file with a token.

    Errors name the options with `prefix`.
    """

    prefix: ClassVar[str] = "broker_sasl."
    tls_prefix: ClassVar[str] = "broker_tls."

    mechanism: Mechanism | None = None
    username: str | None = None
    password: Secret | None = None
    password_file: Path | None = None
    token_file: Path | None = None
    allow_plain_text: bool = False

    def read_secret(self) -> str:
        """Return the current password or token, reading its file again. Raises StartupError."""
        kind = "token" if self.mechanism == "OAUTHBEARER" else "password"
        file, named = (self.token_file if kind == "token" else self.password_file), f"{self.prefix}{kind}_file"
        if file is None:
            return self.password or ""
        return read_secret(file, named, kind, MAX_SECRET_BYTES, lambda text: text.strip("\r\n "))

    def checked(self, sources: Mapping[str, str], *, with_tls: bool) -> Self | None:
        """Return itself, or None if the proxy does not authenticate to brokers. Raises StartupError."""
        given = [key for key in given_keys(self) if key != "allow_plain_text"]
        if self.mechanism is None:
            if given:
                raise StartupError(
                    f"{sources[given[0]]} needs a mechanism: set {self.prefix}mechanism to PLAIN, "
                    f"SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER."
                )
            return None
        takes = ("token_file",) if self.mechanism == "OAUTHBEARER" else ("username", "password", "password_file")
        for key in given:
            if key != "mechanism" and key not in takes:
                raise StartupError(f"{sources[key]} does not fit {self.mechanism}, which takes {', '.join(takes)}.")
        source = sources["mechanism"]
        if self.mechanism == "OAUTHBEARER":
            if self.token_file is None:
                raise StartupError(f"{source}: OAUTHBEARER needs a token: name its file with {self.prefix}token_file.")
        elif self.username is None or (self.password is None and self.password_file is None):
            raise StartupError(
                f"{source}: {self.mechanism} needs {self.prefix}username, and its password in "
                f"{self.prefix}password_file or KPROXY_{self.prefix.upper().replace('.', '__')}PASSWORD."
            )
        if self.password is not None and self.password_file is not None:
            raise StartupError(f"{sources['password_file']}: the password is also in {sources['password']}; keep one.")
        if self.mechanism in ("PLAIN", "OAUTHBEARER") and not with_tls and not self.allow_plain_text:
            raise StartupError(
                f"{source}: {self.mechanism} shows its secret to everybody on the network: set "
                f"{self.tls_prefix}enabled, or use a SCRAM mechanism, or set {self.prefix}allow_plain_text."
            )
        self.read_secret()
        return self


class AuditSasl(BrokerSasl, frozen=True):
    """The section `sasl` of `[audit]`."""

    prefix: ClassVar[str] = "audit.sasl."
    tls_prefix: ClassVar[str] = "audit.tls."
