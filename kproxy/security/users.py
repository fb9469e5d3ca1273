"""Read and write users with salted credentials in a file; kproxy.security.in_etcd has users in etcd.

The file is TOML with one table, `[users]`: a name and its credentials for SCRAM, at most one for each hash, in the form
of RFC 5803 (`SCRAM-SHA-256$ITERATIONS:SALT$STORED_KEY:SERVER_KEY`). It has no passwords, but anybody who reads it can
try passwords, and anybody with a stored key and an observed exchange can impersonate the user. So the file must not be
readable by everybody, and only its owner may write to it. PLAIN is checked against the same credentials.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import re
import stat
import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from scramp import ScramException, ScramMechanism

from kproxy.config.exposure import Exposed, is_in_read_only_mount
from kproxy.config.parsing import read_file, read_toml, unreadable
from kproxy.config.security import SCRAM_256, SCRAM_512
from kproxy.errors import StartupError

SCRAM_MECHANISMS: Final = (SCRAM_256, SCRAM_512)
LEAST_ITERATIONS: Final = 4_096
MOST_ITERATIONS: Final = 100_000
DEFAULT_ITERATIONS: Final = 8_192
SALT_BYTES: Final = 18
MOST_USERS: Final = 100_000
MOST_NAME_BYTES: Final = 255
MOST_PASSWORD_BYTES: Final = 1_024
_HASHES: Final = {SCRAM_256: "sha256", SCRAM_512: "sha512"}
_FORM: Final = re.compile(
    r"(SCRAM-SHA-(?:256|512))\$([1-9]\d{3,6}):([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+):([A-Za-z0-9+/=]+)"
)
# Only the owner may write, and others may not read. A group may read, because Kubernetes mounts secrets with that mode.
_FORBIDDEN_MODE: Final = stat.S_IWGRP | stat.S_IRWXO


class Credential(NamedTuple):
    """The server's record of a password (RFC 5802). `str` shows the record, only to store it."""

    mechanism: str
    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __str__(self) -> str:
        salt, stored, server = (b64encode(each).decode() for each in (self.salt, self.stored_key, self.server_key))
        return f"{self.mechanism}${self.iterations}:{salt}${stored}:{server}"

    def __repr__(self) -> str:
        return f"<{self.mechanism} credential>"


def make_credential(mechanism: str, password: str, iterations: int, salt: bytes) -> Credential:
    """Salt and hash a password. Raises ValueError for one that SASL forbids, with no part of it in the message."""
    if not password or len(password.encode(errors="surrogatepass")) > MOST_PASSWORD_BYTES:
        raise ValueError(f"a password must have 1 to {MOST_PASSWORD_BYTES} bytes")
    try:
        return Credential(mechanism, *ScramMechanism(mechanism).make_auth_info(password, iterations, salt))
    except (ScramException, UnicodeError) as error:
        raise ValueError("a password must be text without control characters") from error


def parse_credential(text: str) -> Credential:
    """Parse a credential. Raises ValueError, with no part of the text in the message."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("a credential must have the form SCRAM-SHA-256$ITERATIONS:SALT$STORED_KEY:SERVER_KEY")
    mechanism, iterations = match[1], int(match[2])
    salt, stored_key, server_key = (b64decode(each, validate=True) for each in match.groups()[2:])
    size = hashlib.new(_HASHES[mechanism]).digest_size
    if len(stored_key) != size or len(server_key) != size or len(salt) < 12:
        raise ValueError(f"a key of {mechanism} must have {size} bytes, and a salt at least 12")
    if not LEAST_ITERATIONS <= iterations <= MOST_ITERATIONS:
        raise ValueError(f"iterations must be from {LEAST_ITERATIONS} to {MOST_ITERATIONS}")
    return Credential(mechanism, salt, stored_key, server_key, iterations)


Credentials = Mapping[str, Credential]
"""One user's credentials, by mechanism."""


def parse_credentials(texts: object) -> Credentials:
    """Parse the list of one user's credentials. Raises ValueError, with no part of the texts in the message."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("a user must have a list of credentials")
    credentials = [parse_credential(text) for text in texts]
    by_mechanism = {each.mechanism: each for each in credentials}
    if len(by_mechanism) != len(credentials):
        raise ValueError("a user must have one credential for each mechanism")
    return by_mechanism


class Users:
    """The users from one reading of the file or of etcd.

    An unknown user gets a salt, and the check of a password takes the same work for every name. So an exchange does not
    show which users exist, if the credentials of one hash have equal numbers of iterations.

    `created` has a number for each user, which differs after the user is removed and added again. etcd has such
    numbers, the file has none.

    Compromise: the key of the salts is derived from one credential, so that it is the same on all proxies that have
    read the same users, and nothing is stored for it. Without that credential the salts of all unknown users change.
    """

    def __init__(self, by_name: Mapping[str, Credentials], created: Mapping[str, int] = MappingProxyType({})) -> None:
        self.by_name = MappingProxyType(dict(by_name))
        self._created = dict(created)

    @functools.cached_property
    def _source(self) -> Credential:
        """The credential with the least key, which a change of the users seldom replaces."""
        credentials = (each for has in self.by_name.values() for each in has.values())
        nobody = Credential(SCRAM_256, b"", b"", b"", DEFAULT_ITERATIONS)
        return min(credentials, key=lambda each: each.server_key, default=nobody)

    @functools.cached_property
    def _work(self) -> Mapping[str, int]:
        """The most iterations, by mechanism, with which the password of any user is checked."""
        work: dict[str, int] = {}
        for credential in map(_checked, self.by_name.values()):
            work[credential.mechanism] = max(credential.iterations, work.get(credential.mechanism, 0))
        return work

    def find(self, name: str, mechanism: str) -> Credential | None:
        return self.by_name.get(name, {}).get(mechanism)

    def creation(self, name: str) -> int | None:
        """Return the number of a user, which stays until the user is removed; None for an unknown user."""
        return self._created.get(name, 0) if name in self.by_name else None

    def stand_in(self, name: str, mechanism: str) -> Credential:
        """Return a credential that no password matches."""
        key = hmac.digest(self._source.server_key, b"kproxy stand-in", "sha512")
        digest = hmac.digest(key, f"{mechanism}:{name}".encode(errors="surrogatepass"), "sha512")
        size = hashlib.new(_HASHES[mechanism]).digest_size
        unknown = hmac.digest(key, digest, "sha512")[:size]
        return Credential(mechanism, digest[:SALT_BYTES], unknown, unknown, self._source.iterations)

    def check(self, name: str, password: str) -> bool:
        """Whether this is the user's password. The hashing takes milliseconds, outside of Python's lock."""
        known = self.by_name.get(name)
        if known:
            credential = _checked(known)
        else:
            mechanism, most = next(iter(self._work.items()), (SCRAM_256, DEFAULT_ITERATIONS))
            credential = self.stand_in(name, mechanism)._replace(iterations=most)
        try:
            tried = make_credential(credential.mechanism, password, credential.iterations, credential.salt)
        except ValueError:
            return False
        done = {credential.mechanism: credential.iterations}
        for mechanism, most in self._work.items():
            if most > done.get(mechanism, 0):
                left = most - done.get(mechanism, 0)
                hashlib.pbkdf2_hmac(_HASHES[mechanism], password.encode(), credential.salt, left)
        return hmac.compare_digest(tried.stored_key, credential.stored_key)


def _checked(credentials: Credentials) -> Credential:
    """Return the credential with which a password in plain text is checked."""
    return next(iter(credentials.values()))


def check_name(name: str) -> str:
    """Return the name of a user. Raises ValueError for an invalid one."""
    if not name or len(name.encode(errors="surrogatepass")) > MOST_NAME_BYTES or not name.isprintable():
        raise ValueError(f"a user's name must be printable text of at most {MOST_NAME_BYTES} bytes")
    return name


def read_users(file: Path) -> Users:
    """Read the file. Raises StartupError, which never has a credential in it."""
    check_mode(file, "sasl.users")
    try:
        content = read_toml(file, "sasl.users")
    except StartupError as error:
        advice = ": name a file that `kproxy user add` has written." if isinstance(error.__cause__, ValueError) else "."
        raise StartupError(str(error).rstrip(".") + advice) from None
    if set(content) - {"users"} or not isinstance(content.get("users", {}), dict):
        raise StartupError(
            f"sasl.users {file} is not a file of users; expected the one table [users], as `kproxy user add` writes it."
        )
    return Users(_parse(content.get("users", {}), file))


def _parse(given: Mapping[str, object], file: Path) -> dict[str, Credentials]:
    if len(given) > MOST_USERS:
        raise StartupError(f"sasl.users {file} has {len(given)} users; at most {MOST_USERS} are allowed.")
    users: dict[str, Credentials] = {}
    for name, texts in given.items():
        try:
            users[check_name(name)] = parse_credentials(texts)
        except ValueError as error:
            # The error is not chained, because its cause may show the text that was read.
            raise StartupError(
                f"sasl.users {file}: the entry of {name[:100]!r} cannot be used: {error}. Write it "
                "with `kproxy user add`."
            ) from None
    return users


def check_mode(file: Path, key: str) -> None:
    """Raise StartupError for a file with secrets that all users can read, or another can write (config.exposure)."""
    try:
        mode = file.stat().st_mode
        is_fixed = is_in_read_only_mount(file)
    except (OSError, ValueError) as error:
        raise unreadable(key, file, error, f"make it with `kproxy user add --users {file} NAME`") from error
    if not stat.S_ISREG(mode):
        raise StartupError(f"{key} {file} is not a file: name one that `kproxy user add` has written.")
    if mode & _FORBIDDEN_MODE and not is_fixed:
        raise StartupError(str(Exposed(key, file, stat.S_IMODE(mode))))


def write_users(file: Path, users: Mapping[str, Credentials]) -> None:
    """Replace the file in one step, with its own mode less forbidden bits, or 0600 if new. Raises StartupError."""
    lines = ["# Users of kproxy, written by `kproxy user`: salted credentials, no passwords.", "[users]"]
    for name, credentials in sorted(users.items()):
        lines.append(
            f"{json.dumps(name, ensure_ascii=False)} = {json.dumps([str(each) for each in credentials.values()])}"
        )
    try:
        mode = stat.S_IMODE(file.stat().st_mode) & ~_FORBIDDEN_MODE if file.exists() else 0o600
        descriptor, beside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(descriptor, "w") as opened:
                opened.write("\n".join(lines) + "\n")
                opened.flush()
                os.fsync(opened.fileno())
            os.chmod(beside, mode)  # noqa: PTH101 -- a name of mkstemp
            os.replace(beside, file)  # noqa: PTH105 -- the same
        except BaseException:
            os.unlink(beside)  # noqa: PTH108 -- the same
            raise
    except OSError as error:
        raise StartupError(f"the file of users {file} cannot be written: {error.strerror}.") from error


def read_password(file: Path) -> str:
    """Return the password that a file has, without line ends after it. Raises StartupError, which never shows it."""
    content = read_file(file, "--password-file", MOST_PASSWORD_BYTES + 2, "that is not a password")
    try:
        return content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise StartupError(f"--password-file {file} is not UTF-8 text.") from None
