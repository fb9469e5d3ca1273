"""Encrypt replication between brokers with TLS, and explain failed connections.

A broker with `--replication-tls-cert`, `--replication-tls-key` and `--replication-tls-ca` uses only TLS, as leader and
as follower; one without uses only plain text. So either all brokers of a cluster have TLS, or none.

Invariants
1. With TLS a broker neither sends nor accepts a byte of replication in plain text, whatever etcd or the peer says.
2. Both sides present a certificate that an authority of the CA file has signed. Names in it are ignored: the SCRAM
   authentication (kproxy.broker.replication.authentication) identifies the broker.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial

from kproxy.broker.connection import ClientConnection
from kproxy.config.tls import LoadedReplication, ReplicationTls, load_replication_tls
from kproxy.security.reloading import Reloading, Reloads
from kproxy.security.tls_acceptor import AcceptorContext, TlsAcceptor, handshakes_of
from kproxy.security.tls_errors import DialWords, ListenerWords, broker_failure
from kproxy_codec.foreign import foreign_protocol

CLOSED = "the leader closed the connection"
# Limit of connections with an unfinished handshake; beyond it the oldest is closed. Brokers need a few milliseconds.
MAX_HALF_OPEN = 64
_OPTIONS = "--replication-tls-cert, --replication-tls-key and --replication-tls-ca"
_TURN_ON = f"give it {_OPTIONS}"
_LISTENER_WORDS = ListenerWords(
    client_ca="--replication-tls-ca", client_auth=_TURN_ON, min_version="1.2 and later", speak_tls=_TURN_ON
)
_DIAL_WORDS = DialWords(
    whose="this broker's",
    ca="--replication-tls-ca",
    pair="--replication-tls-cert and --replication-tls-key",
    no_tls=_TURN_ON,
)


class Encryption:
    """TLS of one broker's replication, with files that `reloads` follows; without `options` there is none.

    Raises StartupError.
    """

    def __init__(self, options: ReplicationTls | None, reloads: Reloads) -> None:
        self._counters = Counter[str]()
        self._tls: Reloading[LoadedReplication] | None = None
        if options is not None:
            load = partial(load_replication_tls, options, AcceptorContext)
            self._tls = reloads.add(Reloading("TLS between brokers", options.files, load, counters=self._counters))

    @property
    def expires_at(self) -> float | None:
        """When this broker's certificate ends, in seconds since the epoch; None without one."""
        certificate = self._tls.current.listener.certificate if self._tls is not None else None
        return None if certificate is None else certificate.expires_at

    @property
    def handshakes(self) -> dict[str, int]:
        """The ended handshakes of the listener, by outcome."""
        return handshakes_of(self._counters)

    @property
    def dial(self) -> ssl.SSLContext | None:
        """The context for a connection to a leader; None for plain text."""
        return None if self._tls is None else self._tls.current.dial

    def acceptor(self, session: Callable[[], ClientConnection]) -> TlsAcceptor[ClientConnection] | None:
        """The TLS acceptor of the replication listener; None if it uses plain text."""
        tls = self._tls
        if tls is None:
            return None
        return TlsAcceptor(
            "replication",
            lambda: tls.current.listener,
            max_half_open=MAX_HALF_OPEN,
            session=lambda _: session(),
            counters=self._counters,
            words=_LISTENER_WORDS,
        )

    def explain(self, error: Exception | None, host: str) -> str:
        """Return why a leader could not be reached; `error` None: it closed the connection."""
        text = CLOSED if error is None else str(error)
        if error is not None and not isinstance(error, (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)):
            return text
        if self._tls is None or error is None:
            return f"{text} before it had accepted this broker: see its log"
        failure = broker_failure(error, name=host, has_ca=True, has_cert=True, words=_DIAL_WORDS)
        return f"{failure.text}; if it has no TLS, {_TURN_ON}" if failure.word == "gone" else failure.text


NO_ENCRYPTION = Encryption(None, Reloads())
"""The encryption of a broker without a certificate."""


def without_tls(error: Exception) -> str:
    """The reason why bytes are not a follower's request, for a listener without TLS."""
    foreign = foreign_protocol(error)
    if foreign is not None and foreign.protocol == "TLS":
        return f"it speaks TLS, and this broker has no certificate: give this broker {_OPTIONS}"
    return str(error)
