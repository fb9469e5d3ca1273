"""Recognise clients and servers that do not speak Kafka's protocol in plain text; answer clients in their protocol.

The first bytes of a connection show the protocol: as a frame's length, they are a number that no listener admits.
SASL is part of Kafka's protocol and is recognised by its requests.
"""

from __future__ import annotations

from kproxy_codec.api_keys import SASL_HANDSHAKE
from kproxy_codec.error_codes import UNSUPPORTED_SASL_MECHANISM
from kproxy_codec.errors import ForeignProtocol, FrameTooLarge
from kproxy_codec.framing import RequestHeader, frame_message, response_header
from kproxy_codec.primitives import INT16, INT32

# A TLS record begins with its type in one byte and its version in two bytes: 3, and 0 to 4.
_TLS_HANDSHAKE = 0x1603
_TLS_ALERT = 0x1503
# The first four bytes of HTTP requests, and of an answer; "PRI " opens HTTP/2.
_HTTP = frozenset(b"GET |POST|PUT |HEAD|OPTI|CONN|DELE|PATC|TRAC|PRI |HTTP".split(b"|"))
_SSH = b"SSH-"

# The first bytes of answers in other protocols.
_ANSWERS = {
    b"HTTP": "HTTP, not Kafka, as etcd and admin pages do",
    b"\x15\x03": "TLS, which is not spoken here",
    _SSH: "SSH, not Kafka",
}

# Plain text makes TLS libraries report the problem ("wrong version number", "plaintext connection?"). A TLS alert would
# name versions, and if the connection just ends, Java's client retries without a message.
_TO_TLS = b"this listener is plain text: set security.protocol=PLAINTEXT\r\n"


def http_answer(sentence: bytes) -> bytes:
    """A listener's answer to HTTP that it does not serve: status 400 and the sentence."""
    return (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(sentence), sentence)
    )


ANSWER_TO_HTTP = http_answer(b"This listener speaks Kafka's protocol. A proxy's HTTP page is at its --admin address.\n")
"""The answer of kproxy's Kafka listeners to HTTP clients."""

SASL_HANDSHAKE_REFUSED = INT16.pack(UNSUPPORTED_SASL_MECHANISM) + INT32.pack(0)
"""The body of a SaslHandshake answer, in every version, that offers no mechanism."""


def foreign_protocol(error: Exception) -> ForeignProtocol | None:
    """The protocol that the other side speaks instead, if its first bytes show it; None otherwise."""
    if isinstance(error, ForeignProtocol):
        return error
    if not isinstance(error, FrameTooLarge):
        return None
    first_bytes = error.first_bytes
    if first_bytes in _HTTP:
        return ForeignProtocol(
            "HTTP",
            "this listener speaks Kafka's protocol; a proxy's HTTP page is at its --admin address",
            ANSWER_TO_HTTP,
        )
    if first_bytes == _SSH:
        return ForeignProtocol("SSH", "this listener speaks Kafka's protocol")
    record = int.from_bytes(first_bytes[:2])
    if record == _TLS_HANDSHAKE:
        return ForeignProtocol(
            "TLS",
            "the client has security.protocol=SSL or SASL_SSL, and this listener is plain text: "
            "set security.protocol=PLAINTEXT",
            _TO_TLS,
        )
    if record == _TLS_ALERT:
        return ForeignProtocol("TLS", "the client sends a TLS alert, and this listener is plain text")
    return None


def answered_in(first_bytes: bytes) -> str | None:
    """The name of the protocol in which a server answers instead; None if its first bytes show none."""
    return next((words for begins, words in _ANSWERS.items() if first_bytes.startswith(begins)), None)


def sasl(header: RequestHeader) -> ForeignProtocol:
    """The error for a SASL request on a listener without SASL."""
    reply = b""
    if header.api_key == SASL_HANDSHAKE:
        head = response_header(header.api_key, header.api_version, header.correlation_id)
        reply = frame_message(head, SASL_HANDSHAKE_REFUSED)
    return ForeignProtocol(
        "SASL",
        "the client has security.protocol=SASL_PLAINTEXT or SASL_SSL, and this listener has no SASL: "
        "set security.protocol=PLAINTEXT",
        reply,
    )
