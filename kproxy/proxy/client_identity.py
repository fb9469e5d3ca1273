"""Forward one client's identity: its broker connections authenticate with the credential that it presented.

The gate (kproxy.proxy.admission) presents each credential before it answers the client: one broker must take it, on
the connection that the client's control requests use. The client gets that broker's message and session lifetime.
Further connections authenticate as they are dialled, and open ones renew their sessions with the new credential, all by
kproxy.security.broker_auth. Other clients share neither the identity nor its answers.

States
  empty       nothing was presented
  presented   a broker is to judge the latest credential; the client's requests wait
  accepted    a broker has taken it
  gone        the client's broker connections are closed; no credential is kept

Transitions
  empty, accepted -> presented   `carry`: the client authenticates, or renews its session
  presented -> accepted          a broker takes it
  presented -> presented         the client is refused, and its connection is being closed
  any -> gone                    `forget`

Invariants
1. The latest credential alone is kept, and none once the client is gone. Nothing else refers to it except the code
   that authenticates with it.
2. A broker's refusal while the credential is presented is the client's answer; any later one ends the client's
   connection, so that the client authenticates again and gets the refusal.
3. A broker that hangs, closes or answers nonsense has judged nothing: the next one is asked, within the time that the
   client has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from kproxy.proxy.broker_connection import Upstream
from kproxy.security.broker_auth import BrokerAuth, IdentityRefused, Session
from kproxy.security.mechanisms import Refused, Step
from kproxy.security.sasl_client import Credential


class NotJudged(Exception):
    """No broker says whether the client's identity is valid; the text gives the reason."""


class ClientIdentity:
    """The identity of one client. `access`: that of the process.

    `authenticate` lets one broker check the current credential, and raises IdentityRefused with that broker's message,
    or NotJudged. `upstreams` are all connections of the client to brokers. `on_refused` gets refusals by invariant 2.
    """

    def __init__(
        self,
        access: BrokerAuth,
        authenticate: Callable[[], Awaitable[Session]],
        upstreams: Callable[[], Iterable[Upstream]],
        on_refused: Callable[[IdentityRefused], None],
    ) -> None:
        self.access = access.carrying(self)
        self._authenticate = authenticate
        self._upstreams = upstreams
        self._on_refused = on_refused
        self.credential: Credential | None = None
        self.number = 0
        self._is_accepted = False

    async def carry(self, step: Step, credential: Credential, within_s: float) -> Step | Refused:
        """Let a broker judge a credential after the proxy (`step`); return the final outcome. Raises NotJudged."""
        self.credential = credential
        self.number += 1
        self._is_accepted = False
        try:
            async with asyncio.timeout(within_s):
                session = await self._authenticate()
        except IdentityRefused as refused:
            return Refused(str(refused), refused.to_client or "Authentication failed")
        except TimeoutError:
            raise NotJudged(f"no broker has judged its identity within {within_s:.1f} s") from None
        self._is_accepted = True
        for upstream in self._upstreams():
            upstream.renew()
        return step._replace(lifetime_s=session.lifetime_s or None)

    def refused(self, error: IdentityRefused) -> None:
        """Note that a broker has refused the identity."""
        if self._is_accepted and error.to_client is not None:
            self._on_refused(error)

    def forget(self) -> None:
        """Forget the credential: the client's broker connections are closed."""
        self.credential = None
        self._is_accepted = False
