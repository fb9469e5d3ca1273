"""Admit clients: a listener's gate handles all requests of a client until it is authenticated.

kproxy.security.sasl decides the SASL exchange; this module passes frames to it, carries out its outcomes and has the
clock. A gate takes the place of the session's compiled plain path (`CompiledPath`) until the client is authenticated,
so that it costs later requests nothing. It takes that place again for a renewal, and when the SASL session ends.

States of a gate
  closed    it begins the client's requests
  open      the client is admitted; the session begins its requests itself
  ended     the connection is being closed

Transitions
  closed -> open     the exchange is authenticated; at once where no SASL is required, with a certificate or without
  open   -> closed   the client renews its session, or its session has ended: the next request must renew it
  open   -> ended    the client's user was removed
  any    -> ended    a failure, the end of the time to authenticate, the end of the connection

Invariants
1. While closed only kproxy.security.sasl reads the client's frames, except for ApiVersions; all frames are at most
   MOST_FRAME_BYTES long.
2. At most one step of a mechanism runs, in a task that `close` awaits; meanwhile the client is not read. Where
   identities are forwarded, the task continues until a broker has judged the client's (kproxy.proxy.client_identity).
3. Of the data that a client sent, the log has only its user's name and its mechanism.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import structlog

from kproxy.config.principal_rules import DEFAULT_MAPPING, PrincipalMapping
from kproxy.proxy.answer_order import Slot
from kproxy.proxy.apis import Ranges
from kproxy.proxy.client_identity import NotJudged
from kproxy.runtime.cpu_limit import TookTooLong, within
from kproxy.security.events import NO_EVENTS, SecurityEvents
from kproxy.security.mechanisms import Refused, Servers, Step
from kproxy.security.principals import ANONYMOUS, NoPrincipal, Principal, distinguished_name, principal_of
from kproxy.security.quotas import Quotas, digest_of
from kproxy.security.sasl import Answer, Failure, ForwardToBroker, Pending, SaslExchange, State, Times, illegal_state
from kproxy.security.users import Users
from kproxy_codec.framing import parse_request_header

if TYPE_CHECKING:
    from kproxy.proxy.client_session import ClientSession

log = structlog.get_logger(__name__)

# Like Kafka's connection.failed.authentication.delay.ms: slows down password guessing.
REFUSAL_DELAY_S: Final = 0.1
# A broker has this fraction of the time to authenticate for judging a client, so that the log can give the reason.
JUDGED_WITHIN: Final = 0.9
# CPU time of all rules for a certificate, on the event loop, in seconds.
MOST_RULES_S: Final = 0.02
# Limit of addresses and principals whose keys are cached.
MOST_KEYS: Final = 4_096
_ADDRESS: Final = "address"
_PRINCIPAL: Final = "principal"


class NotAdmitted(Exception):
    """Closes the client's connection because of what it sent, or failed to send, to authenticate."""


class OpenConnections:
    """The clients' connections of a process, by address and by principal, where these are limited.

    `elsewhere` has the last report of other processes on the same port, by the keys of `counts`.
    """

    def __init__(self) -> None:
        self.by_address: Counter[str] = Counter()
        self.by_principal: Counter[str] = Counter()
        self.elsewhere: Mapping[bytes, int] = {}

    def of_address(self, address: str) -> int:
        """The known connections of an address in all processes."""
        return self.by_address[address] + (self.elsewhere.get(_key_of(_ADDRESS, address), 0) if self.elsewhere else 0)

    def of_principal(self, name: str) -> int:
        """The known connections of a principal in all processes."""
        return self.by_principal[name] + (self.elsewhere.get(_key_of(_PRINCIPAL, name), 0) if self.elsewhere else 0)

    def counts(self, most: int) -> dict[bytes, int]:
        """Return this process's connections by key, of the `most` addresses and principals that have the most."""
        found = [
            (count, kind, name)
            for kind, counts in ((_ADDRESS, self.by_address), (_PRINCIPAL, self.by_principal))
            for name, count in counts.items()
        ]
        if len(found) > most:
            found = heapq.nlargest(most, found)
        return {_key_of(kind, name): count for count, kind, name in found}


@functools.lru_cache(MOST_KEYS)
def _key_of(kind: str, name: str) -> bytes:
    return digest_of(kind, name)


@dataclass(eq=False)
class Admission:
    """A listener's requirements for clients: SASL by `servers`; None: a TLS certificate, or nothing.

    `users` returns the current users: a client's connection ends when its user is removed. `timeout_s` is the time to
    authenticate, `mapping` turns a certificate's names into a principal's. `quotas` returns the current quotas; an
    address has at most `most_of_an_address` connections (0: no limit). The listeners of a process share `connections`.
    `carries`: clients' identities are forwarded to brokers. `allows_v0`: SaslHandshake v0 is accepted. `listener`: its
    name in `events`.
    """

    servers: Servers | None
    times: Times
    _: KW_ONLY
    counters: Counter[str]
    carries: bool
    timeout_s: float = 10.0
    mapping: PrincipalMapping = DEFAULT_MAPPING
    users: Callable[[], Users | None] = lambda: None
    quotas: Callable[[], Quotas] | None = None
    most_of_an_address: int = 0
    connections: OpenConnections = field(default_factory=OpenConnections)
    allows_v0: bool = False
    listener: str = ""
    events: SecurityEvents = NO_EVENTS


class Gate:
    """The gate of one client; see the module's text."""

    def __init__(self, admission: Admission, client: ClientSession) -> None:
        self._admission = admission
        self._client = client
        self._exchange = SaslExchange(
            admission.servers or {}, admission.times, carries=admission.carries, allows_v0=admission.allows_v0
        )
        self._is_open = False
        self._began_at = admission.times.clock()
        self._task: asyncio.Task[None] | None = None
        self._address = ""
        self._counted_as = ""
        self._known_users: Users | None = None
        # The client's principal; set when the client is admitted.
        self._principal: Principal | None = None

    def connected(self, certificate: Any, address: str) -> None:
        """Begin; `certificate` is the client's, as returned by `getpeercert`, or None."""
        admission = self._admission
        if admission.most_of_an_address:
            self._address = address
            admission.connections.by_address[address] += 1
            if admission.connections.of_address(address) > admission.most_of_an_address:
                text = f"its address has more than {admission.most_of_an_address} connections"
                self._refuse_one_more("address_limit", text)
                return
        if admission.servers is not None:
            return
        if not certificate:
            self._admit(ANONYMOUS, "none")
            return
        try:
            principal = within(MOST_RULES_S, lambda: principal_of(certificate, admission.mapping))
        except (NoPrincipal, TookTooLong) as error:
            reason = str(error) or f"the rules for its certificate's names took more than {MOST_RULES_S:g} s"
            self._tell_failed(reason, distinguished_name(certificate.get("subject", ())), "certificate")
            self._client.refuse(NotAdmitted(reason))
            return
        self._admit(principal, "certificate")

    def _refuse_one_more(self, outcome: str, reason: str) -> None:
        self._admission.counters["clients.too_many"] += 1
        self._tell("connection_refused", outcome=outcome, reason=reason)
        self._client.refuse(NotAdmitted(reason))

    def _tell(self, event: str, **fields: object) -> None:
        self._admission.events.tell(event, client=self._client.peer, listener=self._admission.listener, **fields)

    def _tell_failed(self, reason: str, user: str, mechanism: str) -> None:
        renewal = self._principal is not None
        self._tell("login_failed", user=user, mechanism=mechanism, renewal=renewal, reason=reason)

    def _tell_sasl_failed(self, reason: str) -> None:
        self._tell_failed(reason, self._exchange.user, self._exchange.mechanism)

    def _admit(self, principal: Principal, mechanism: str) -> None:
        """Admit the client, unless it has too many connections."""
        admission = self._admission
        if not self._counted_as and admission.quotas is not None:
            self._counted_as = principal.name
            admission.connections.by_principal[principal.name] += 1
            most = admission.quotas().connections(principal)
            if most is not None and admission.connections.of_principal(principal.name) > most:
                self._exchange.time_is_over()
                self._refuse_one_more("principal_limit", f"{principal} has more than {most} connections")
                return
        self._is_open = True
        is_renewal, self._principal = self._principal is not None, principal
        ends_at = self._exchange.session_ends_at
        session_s = None if ends_at is None else round(ends_at - admission.times.clock(), 3)
        self._tell("login", principal=str(principal), mechanism=mechanism, renewal=is_renewal, session_s=session_s)
        self._client.admit(principal)

    def take(self, frame: memoryview, first_byte_at: float, ranges: Ranges) -> bool:
        """Begin a request, as CompiledPath.take; False for ApiVersions, which the session answers."""
        if self._exchange.state is State.AUTHENTICATED:
            # Its session may have ended long ago: the time for a renewal counts from here.
            self._began_at = self._admission.times.clock()
        outcome = self._exchange.receive(frame)
        if isinstance(outcome, ForwardToBroker):
            return False
        self._carry_out(outcome, self._client.place(frame))
        return True

    def renew(self, frame: memoryview, slot: Slot) -> None:
        """Take a SASL request of an authenticated client (KIP-368)."""
        if self._admission.servers is None:
            slot.fill([illegal_state(parse_request_header(frame))])
            return
        outcome = self._exchange.receive(frame)
        if self._exchange.state is State.AUTHENTICATE:
            self._shut()
        if not isinstance(outcome, ForwardToBroker):
            self._carry_out(outcome, slot)

    def _shut(self) -> None:
        self._is_open = False
        self._began_at = self._admission.times.clock()
        self._client.guard()

    def _carry_out(self, outcome: Answer | Failure | Pending, slot: Slot) -> None:
        if isinstance(outcome, Pending):
            self._client.broker_presses(True)
            self._task = asyncio.get_running_loop().create_task(self._finish(outcome, slot))
        elif isinstance(outcome, Failure):
            self._count_failure(outcome.reason)
            self._fail(outcome, slot)
        else:
            slot.fill([outcome.frame])

    async def _finish(self, pending: Pending, slot: Slot) -> None:
        """Await a step and apply its outcome; then read the client again."""
        try:
            result: Step | Refused
            result = await asyncio.to_thread(pending.step) if pending.is_slow else pending.step()
            try:
                outcome = self._exchange.resume(await self._judged(result))
            except NotJudged as error:
                outcome = self._exchange.give_up(str(error))
            if isinstance(outcome, Failure):
                # Before the delay: the connection may be closed during it.
                self._count_failure(outcome.reason)
                if outcome.is_refusal:
                    await asyncio.sleep(REFUSAL_DELAY_S)
                self._fail(outcome, slot)
                return
            # The answer is sent before the session begins requests, since it may end with it.
            slot.fill([outcome.frame])
            if self._exchange.state is State.AUTHENTICATED and self._exchange.principal is not None:
                self._open(self._exchange.principal)
        except Exception:  # the boundary: an error admits nobody
            log.exception("client authentication failed", client=self._client.peer)
            reason = "an error here, see the log"
            self._tell_sasl_failed(reason)
            self._exchange.time_is_over()
            self._client.refuse(NotAdmitted(reason))
        finally:
            self._client.broker_presses(False)

    async def _judged(self, result: Step | Refused) -> Step | Refused:
        """Return the outcome of a step: a broker's if the identity is forwarded. Raises NotJudged."""
        credential = self._exchange.credential
        if credential is None or isinstance(result, Refused) or result.principal is None:
            return result
        if not self._exchange.may_become(result.principal):
            return result
        admission = self._admission
        left_s = self._began_at + admission.timeout_s * JUDGED_WITHIN - admission.times.clock()
        return await self._client.carry(result, credential, max(0.0, left_s))

    def _open(self, principal: Principal) -> None:
        self._count("succeeded")
        log.debug(
            "client authenticated",
            client=self._client.peer,
            principal=str(principal),
            mechanism=self._exchange.mechanism,
        )
        self._admit(principal, self._exchange.mechanism)

    def _count_failure(self, reason: str) -> None:
        self._count("failed")
        self._tell_sasl_failed(reason)
        log.warning(
            "client not authenticated",
            client=self._client.peer,
            mechanism=self._exchange.mechanism or "none",
            reason=reason,
        )

    def _fail(self, failure: Failure, slot: Slot) -> None:
        if failure.frame:
            # The session closes after this answer.
            self._client.drain()
            slot.fill([failure.frame])
        else:
            self._client.refuse(NotAdmitted(failure.reason))

    def _count(self, outcome: str) -> None:
        self._admission.counters[f"sasl.{outcome}.{self._exchange.mechanism}"] += 1

    def look(self, now: float) -> None:
        """Close the connection of a client that takes too long or whose user was removed.

        Require it to authenticate again if its session has ended.
        """
        if not self._is_open:
            is_renewal = self._exchange.state is State.AUTHENTICATED
            if now - self._began_at > self._admission.timeout_s and not is_renewal:
                reason = f"it has not authenticated within {self._admission.timeout_s:g} s"
                if self._exchange.state is not State.FAILED:
                    self._count("timed_out")
                    self._tell_sasl_failed(reason)
                self._exchange.time_is_over()
                self._client.refuse(NotAdmitted(reason))
            return
        ends_at = self._exchange.session_ends_at
        if ends_at is not None and now >= ends_at:
            self.tell_session_ended("it must authenticate again")
            self._shut()
        elif self._exchange.user_creation is not None and self._principal is not None:
            users = self._admission.users()
            if users is self._known_users:
                return
            self._known_users = users
            if users is not None and users.creation(self._principal.name) != self._exchange.user_creation:
                self._client.dismiss("its user was removed")

    def tell_session_ended(self, reason: str) -> None:
        """Append the end of the session to the security events."""
        self._tell("session_ended", principal=str(self._principal), reason=reason)

    async def close(self) -> None:
        """End with the connection."""
        if self._exchange.state is State.AUTHENTICATE:
            self._tell_sasl_failed("its connection has ended before")
        self._exchange.time_is_over()
        for counts, name in (
            (self._admission.connections.by_address, self._address),
            (self._admission.connections.by_principal, self._counted_as),
        ):
            if name:
                counts[name] -= 1
                if not counts[name]:
                    del counts[name]
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
