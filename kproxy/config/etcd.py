"""Check the options of connections to etcd: TLS, a client certificate and a user.

They are in `[etcd]` and in flags `--etcd-...`. The password is never a flag, never printed, never part of an error.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from kproxy.config.parsing import Secret, parse_section, read_file, read_secret
from kproxy.config.tls import MAX_FILE_BYTES, load_authorities, load_pair
from kproxy.errors import StartupError


class EtcdOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The section `[etcd]`.

    `ca` None stands for the authorities that this machine trusts. `server_name` is the name in every member's
    certificate, if that is not the host in the member's URL.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    username: str | None = None
    password: Secret | None = None
    password_file: Path | None = None

    def check(self, sources: Mapping[str, str]) -> None:
        """Raise StartupError for options that do not fit together, and for unusable files.

        `sources` has the source of each key that is given.
        """
        values = {key for key in self.__struct_fields__ if getattr(self, key) is not None}

        def needs(key: str, other: str, way_out: str) -> None:
            if key in values and other not in values:
                raise StartupError(f"{sources[key]}: etcd's {key} has no effect without its {other}: {way_out}.")

        needs("cert", "key", "give the certificate's private key with --etcd-key FILE")
        needs("key", "cert", "give the key's certificate with --etcd-cert FILE")
        for key in ("password", "password_file"):
            needs(key, "username", "give the user's name with --etcd-username NAME")
        if values >= {"password", "password_file"}:
            raise StartupError(
                f"etcd's password is given twice: {sources['password']} has one and {sources['password_file']} names a "
                f"file; keep one of them."
            )
        if "username" in values and not values & {"password", "password_file"}:
            raise StartupError(
                f"{sources['username']}: etcd's user needs a password: name a file that holds it with "
                f"--etcd-password-file FILE, or set KPROXY_ETCD__PASSWORD."
            )
        read_tls(self)
        self.read_password()

    @property
    def wants_tls(self) -> bool:
        """Whether an option is set that plain connections would ignore."""
        return bool(self.ca or self.cert or self.server_name)

    def read_password(self) -> str:
        """Return the present password, reading its file again. Raises StartupError."""
        if self.password_file is None:
            return self.password or ""
        named = "etcd's password_file"
        return read_secret(self.password_file, named, "password", MAX_FILE_BYTES, lambda text: text.rstrip("\r\n"))


class TlsFiles(NamedTuple):
    """The content of the files (PEM), read at one time."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


def etcd_options_from(flags: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> EtcdOptions:
    """Return the options of a command without a configuration file, as `parse_section`. Raises StartupError."""
    options, sources = parse_section(EtcdOptions, "etcd", flags, environ)
    options.check(sources)
    return options


def read_tls(options: EtcdOptions) -> TlsFiles:
    """Check and read the files. Raises StartupError naming an unusable file."""
    tls_context(options)
    return TlsFiles(
        None if options.ca is None else _read(options.ca, "ca"),
        None if options.cert is None else _read(options.cert, "cert"),
        None if options.key is None else _read(options.key, "key"),
    )


def tls_context(options: EtcdOptions) -> ssl.SSLContext:
    """Return the options as a context of Python's own TLS. Raises StartupError."""
    context = ssl.create_default_context() if options.ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.ca is not None:
        load_authorities(context, options.ca, "etcd's ca")
    if options.cert is not None and options.key is not None:
        load_pair(context, options.cert, options.key, "etcd's ")
    return context


def _read(file: Path, key: str) -> bytes:
    return read_file(file, f"etcd's {key}", MAX_FILE_BYTES, "that is another file")
