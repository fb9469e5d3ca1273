"""TLS between brokers: who speaks it, whose certificate is accepted, and why a handshake failed.

Each broker has a mode (`--replication-tls-mode`), and its key in etcd names it (`BrokerValue.replication_tls`):

  (none)     it has no certificate: its listener and its fetchers speak plain text
  optional   its listener admits TLS and plain text; its fetchers speak TLS with leaders whose keys name a mode
  required   its listener admits TLS alone, and its fetchers speak TLS alone

| fetcher  | leader (none) | leader optional | leader required |
| (none)   | plain text    | plain text      | refused         |
| optional | plain text    | TLS             | TLS             |
| required | refused       | TLS             | TLS             |

So a cluster changes without a stop by (none) -> optional -> required, one broker at a time.

Invariants
1. A broker in mode required neither sends nor accepts a byte of replication outside TLS, whatever etcd or the other
   side says. No registration is read for that decision (`speaks_tls`).
2. A dial by TLS that fails is never repeated in plain text.
3. Both certificates are signed by an authority of `--replication-tls-ca`. The fetcher's leader has the name that it
   advertises; the listener's follower has the name that the broker of its proved id advertises (`identity_error`).
4. TLS replaces nothing of the authentication inside it (kproxy.broker.replication.authentication).
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kproxy.broker.cluster import LiveBroker
from kproxy.broker.connection import ClientConnection
from kproxy.config.certificates import is_among
from kproxy.config.tls import LoadedReplication, ReplicationTls, load_replication_tls
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.tls_acceptor import EntranceContext, TlsAcceptor, handshakes_of
from kproxy.security.tls_errors import DialWords, ListenerWords, broker_failure
from kproxy_codec.foreign import foreign_protocol

REQUIRED = "required"
CLOSED = "the leader closed the connection"
# Connections whose handshake is not finished: brokers need a few milliseconds, and the oldest goes.
MAX_HALF_OPEN = 64
_OPTIONS = "--replication-tls-cert, --replication-tls-key and --replication-tls-ca"
_TURN_ON = f"give it {_OPTIONS}"
_THIS_ONE = f"give this broker {_OPTIONS}"
_UNTIL_ALL = "or this one --replication-tls-mode optional until all brokers have them"
_LISTENER_WORDS = ListenerWords(
    client_ca="--replication-tls-ca",
    client_auth=_TURN_ON,
    min_version="1.2 and later",
    speak_tls=f"{_TURN_ON}, {_UNTIL_ALL}",
)
_DIAL_WORDS = DialWords(
    whose="this broker's",
    ca="--replication-tls-ca",
    pair="--replication-tls-cert and --replication-tls-key",
    other_name="its certificate and its --advertise have to agree",
    no_tls=f"{_TURN_ON}, {_UNTIL_ALL}",
)


def speaks_tls(ours: str, leaders: str) -> bool:
    """Whether a fetcher of a broker in mode `ours` speaks TLS with a leader in mode `leaders`; empty: without one.

    A mode that only a later release knows is one with TLS.
    """
    return ours == REQUIRED or bool(ours and leaders)


def identity_error(names: tuple[str, ...], node_id: int, live: LiveBroker | None) -> str:
    """The reason why a certificate with these names is not that of broker `node_id`, empty if it is.

    `live` is that broker according to etcd.
    """
    if live is None:
        return f"etcd has no live broker {node_id} whose name the certificate could have"
    if not is_among(live.host, names):
        shown = ", ".join(names[:10]) or "no name"
        return (
            f"broker {node_id} advertises {live.host[:255]}, and the certificate shown is for {shown}: its certificate "
            f"and its --advertise have to agree"
        )
    return ""


class TowardsLeader(NamedTuple):
    """How a leader is dialled: `context` None for plain text. `host` is the name to find there, `mode` the leader's."""

    context: ssl.SSLContext | None
    host: str
    mode: str

    def explain(self, error: Exception | None) -> str:
        """Say why the connection could not be made or was lost; `error` None: the leader closed it."""
        text = CLOSED if error is None else str(error)
        if error is not None and not isinstance(error, (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)):
            return text
        if self.context is None:
            return f"{text}; it requires TLS: {_THIS_ONE}" if self.mode == REQUIRED else text
        if error is None:
            return f"{text} before it had accepted this broker: see its log"
        failure = broker_failure(error, name=self.host, has_ca=True, has_cert=True, words=_DIAL_WORDS)
        if failure.word == "gone" and not self.mode:
            return f"{failure.text}, and has no TLS by its key in etcd: {_DIAL_WORDS.no_tls}"
        return failure.text


class Encryption:
    """TLS of one broker's replication, with files that `reloads` follows; without `options` there is none.

    `host` is the name that the broker advertises. Raises StartupError.
    """

    def __init__(self, options: ReplicationTls | None, host: str, reloads: Reloads) -> None:
        self.mode: str = "" if options is None else options.mode
        self._counters = Counter[str]()
        self._tls: Reloading[LoadedReplication] | None = None
        if options is not None:
            self._tls = reloads.add(
                Reloading("TLS between brokers", options.files, _loader(options, host), counters=self._counters)
            )

    @property
    def expires_at(self) -> float | None:
        """When this broker's certificate ends, in seconds since the epoch; None without one."""
        certificate = self._tls.current.listener.certificate if self._tls is not None else None
        return None if certificate is None else certificate.expires_at

    @property
    def handshakes(self) -> dict[str, int]:
        """The ended handshakes of the listener, by outcome."""
        return handshakes_of(self._counters)

    def towards(self, leader: LiveBroker) -> TowardsLeader:
        """How to dial a leader now."""
        tls = self._tls if speaks_tls(self.mode, leader.replication_tls) else None
        return TowardsLeader(None if tls is None else tls.current.dial, leader.host, leader.replication_tls)

    def acceptor(self, session: Callable[[], ClientConnection]) -> TlsAcceptor[ClientConnection] | None:
        """The way into the replication listener; None if it speaks plain text alone."""
        tls = self._tls
        if tls is None:
            return None
        return TlsAcceptor(
            "replication",
            lambda: tls.current.listener,
            admits_plain_text=self.mode != REQUIRED,
            max_half_open=MAX_HALF_OPEN,
            session=lambda _: session(),
            counters=self._counters,
            words=_LISTENER_WORDS,
        )


NO_ENCRYPTION = Encryption(None, "", Reloads())
"""That of a broker without a certificate."""


def _loader(options: ReplicationTls, host: str) -> Callable[[], LoadedReplication]:
    return lambda: load_replication_tls(options, host, EntranceContext)


def without_tls(error: Exception) -> str:
    """The reason why bytes are no request of a follower, for a listener without TLS."""
    foreign = foreign_protocol(error)
    if foreign is not None and foreign.protocol == "TLS":
        return f"it speaks TLS, and this broker has no certificate: {_THIS_ONE}"
    return str(error)
