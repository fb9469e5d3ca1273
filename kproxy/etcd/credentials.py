"""Supply the credentials of connections to etcd: TLS from files, and a token for a user's password.

Token: NONE --a call needs it--> ASKING --etcd answers--> HELD --etcd refuses it--> NONE
                                        --etcd has no users--> OFF --etcd asks for a user after all--> NONE
                                        --etcd refuses--> NONE, and no request before a pause is over

Invariants
1. One Authenticate is in flight at a time; all callers wait for it.
2. A wrong password is retried at growing intervals (REFUSAL_PAUSE_S up to LONGEST_PAUSE_S), and read again each time:
   etcd spends a tenth of a second of CPU on each check. Meanwhile callers get the last refusal at once.
3. A token newer than the refused one is kept: `refused` names the token that etcd did not accept.
4. No log line, error or repr contains the password or the token.
5. If certificates cannot be read any more, for example while they are replaced, the last valid ones are used.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from kproxy.config.etcd import EtcdOptions, TlsFiles, read_tls
from kproxy.errors import StartupError
from kproxy.etcd.errors import EtcdError, EtcdMisused

REFUSAL_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
# The metadata field of etcd's tokens.
TOKEN_FIELD = "token"  # noqa: S105 - a name
# The text of etcd's error if a password is given and authentication is off.
_NO_USERS = "authentication is not enabled"

log = structlog.get_logger(__name__)


class TlsCredentials:
    """gRPC's credentials, renewed when the files have changed."""

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._stamps: tuple[object, ...] = ()
        self._credentials: Any = None

    async def current(self) -> Any:
        """The credentials of a new channel. Raises EtcdMisused if the files could never be used."""
        try:
            files, stamps = await asyncio.to_thread(self._read)
        except StartupError as error:
            if self._credentials is None:
                raise EtcdMisused(str(error)) from error
            log.warning("etcd certificates not reread", reason=str(error))
            return self._credentials
        if files is not None:
            self._credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
            self._stamps = stamps
        return self._credentials

    def _read(self) -> tuple[TlsFiles | None, tuple[object, ...]]:
        """The files (None if unchanged), and their time stamps from before the read."""
        options = self._options
        stamps = tuple(_stamp(file) for file in (options.ca, options.cert, options.key))
        if self._credentials is not None and stamps == self._stamps:
            return None, stamps
        return read_tls(options), stamps


def _stamp(file: Path | None) -> object:
    if file is None:
        return None
    try:
        status = file.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_ino, status.st_size)


class Token:
    """The token of one user. `authenticate` asks etcd and raises EtcdError."""

    def __init__(
        self,
        options: EtcdOptions,
        authenticate: Callable[[str, str], Awaitable[str]],
    ) -> None:
        self._options = options
        self._authenticate = authenticate
        self._asking = asyncio.Lock()
        self._token = ""
        self._off = not options.username
        self._refusals = 0
        self._refusal = ""
        self._not_before = float("-inf")

    async def get(self) -> str:
        """The token to send, "" for none. Raises EtcdError."""
        if self._token or self._off:
            return self._token
        async with self._asking:
            if not (self._token or self._off):
                await self._ask()
            return self._token

    def refused(self, token: str) -> bool:
        """Drop `token`, which etcd refused; return whether another token may be accepted."""
        if not self._options.username:
            return False
        if token == self._token:
            self._token, self._off = "", False
        return True

    async def _ask(self) -> None:
        if self._refusal and time.monotonic() < self._not_before:
            raise EtcdMisused(self._refusal)
        try:
            password = await asyncio.to_thread(self._options.read_password)
            self._token = await self._authenticate(self._options.username or "", password)
        except StartupError as error:
            raise self._put_off(EtcdMisused(str(error))) from error
        except EtcdMisused as error:
            raise self._put_off(error) from error
        except EtcdError as error:
            if _NO_USERS not in str(error):
                raise
            # Continue without a token, like etcd's own clients: authentication may be enabled later.
            log.warning("etcd authentication disabled", username=self._options.username)
            self._off = True
        self._refusals, self._refusal = 0, ""

    def _put_off(self, refusal: EtcdMisused) -> EtcdMisused:
        longest = min(REFUSAL_PAUSE_S * 2.0 ** min(self._refusals, 10), LONGEST_PAUSE_S)
        self._refusals += 1
        self._refusal = str(refusal)
        self._not_before = time.monotonic() + longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
        return refusal
