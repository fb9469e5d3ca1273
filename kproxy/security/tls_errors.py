"""Explain why a TLS handshake failed: a sentence for the log and a word for the metrics.

OpenSSL's own texts name neither the side that objects nor the remedy. The other side reports a failure as an alert (RFC
8446, section 6).
"""

from __future__ import annotations

import ssl
from typing import Final, NamedTuple

# X509_V_ERR_* of OpenSSL.
UNSPECIFIED: Final = 1
EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_NO_CRL: Final = 3
_CRL_EXPIRED: Final = 12
_REVOKED: Final = 23
_UNTRUSTED: Final = frozenset({2, 18, 19, 20, 21, 27})
_WRONG_PURPOSE: Final = 26
_OTHER_NAME: Final = frozenset({62, 63, 64})


class Failure(NamedTuple):
    """The reason of a failure. `word`, one of few, is a label of a metric."""

    word: str
    text: str


class ListenerWords(NamedTuple):
    """The options of a listener, as explanations name them.

    `speak_tls` is the remedy for a client that does not speak TLS.
    """

    client_ca: str = "tls.client_ca"
    client_auth: str = "tls.client_auth"
    min_version: str = "tls.min_version"
    speak_tls: str = "set security.protocol=SSL"


class DialWords(NamedTuple):
    """The options of connections to brokers, as explanations name them.

    `whose` is the owner of our certificate. `other_name` and `no_tls` are the remedies if the broker's certificate has
    another name, and if the broker does not speak TLS.
    """

    whose: str = "the proxy's"
    ca: str = "broker_tls.ca"
    pair: str = "broker_tls.cert and broker_tls.key"
    other_name: str = "correct the address that it advertises, or set broker_tls.server_name"
    no_tls: str = "name its TLS port, or drop broker_tls"


_OURS: Final = "this listener's"
_CLIENTS: Final = ListenerWords()
_BROKERS: Final = DialWords()

_OF_CERTIFICATE: Final = {
    EXPIRED: ("expired", "its certificate has expired"),
    _NOT_YET_VALID: ("expired", "its certificate is not valid yet; compare the clocks"),
    _REVOKED: ("revoked", "its certificate is revoked"),
    _WRONG_PURPOSE: ("purpose", "its certificate is not meant for this use (extended key usage)"),
    _NO_CRL: (
        "revocation_list",
        "there is no revocation list of the authority that signed its certificate, or of one above it",
    ),
    _CRL_EXPIRED: ("revocation_list", "the revocation list has expired"),
}
# Alerts of a client about our certificate, and of a broker about the proxy's.
_ALERTS: Final = {
    "UNKNOWN_CA": ("alert_unknown_ca", "does not trust the authority that signed {whose} certificate"),
    "CERTIFICATE_EXPIRED": ("alert_expired", "finds {whose} certificate expired"),
    "CERTIFICATE_REVOKED": ("alert_revoked", "finds {whose} certificate revoked"),
    "BAD_CERTIFICATE": ("alert_bad_certificate", "rejects {whose} certificate"),
    "CERTIFICATE_UNKNOWN": (
        "alert_bad_certificate",
        "rejects {whose} certificate, often because of its authority or name",
    ),
    "UNSUPPORTED_CERTIFICATE": ("alert_bad_certificate", "does not support {whose} certificate"),
    "CERTIFICATE_REQUIRED": ("alert_certificate_required", "requires a certificate"),
    "UNRECOGNIZED_NAME": ("alert_name", "does not serve the name that was asked for"),
    "PROTOCOL_VERSION": ("version", "speaks no TLS version in common"),
    "HANDSHAKE_FAILURE": ("alert_handshake_failure", "found no cipher or certificate in common"),
    "INTERNAL_ERROR": ("alert_other", "had an internal error"),
}


def client_failure(
    error: BaseException, *, names: tuple[str, ...], asked_for: str, words: ListenerWords = _CLIENTS
) -> Failure:
    """Explain why the handshake of a client, or of another program that connects to a listener, failed.

    `names` are those of the listener's certificate; `asked_for` the server name of the client, or empty.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _UNTRUSTED:
            return Failure("untrusted", f"its certificate is not signed by an authority of {words.client_ca}")
        return _certificate_failure(error)
    reason = _reason(error)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Failure(
            "no_certificate", f"it presents no certificate, and this listener requires one ({words.client_auth})"
        )
    if reason in ("UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE"):
        return Failure("version", f"it speaks no TLS version that this listener admits ({words.min_version})")
    if reason == "NO_SHARED_CIPHER":
        return Failure("cipher", "it offers no cipher that fits this listener's certificate")
    if reason == "CALLBACK_FAILED":
        return Failure("server_name", f"it asks for {_names(names, asked_for)}")
    alert = _alert(reason)
    if alert is not None:
        word, text = alert
        about_names = word in ("alert_bad_certificate", "alert_unknown_ca")
        hint = f"; it asked for {_names(names, asked_for)}" if about_names else ""
        return Failure(word, f"it {text.format(whose=_OURS)}{hint}")
    return _transport_failure(error, reason)


def _names(names: tuple[str, ...], asked_for: str) -> str:
    return f"{asked_for or 'no name'}, and the certificate is for {', '.join(names[:10]) or 'no name'}"


def broker_failure(
    error: BaseException, *, name: str, has_ca: bool, has_cert: bool, words: DialWords = _BROKERS
) -> Failure:
    """Explain why a handshake with a broker failed. `name` is the name that its certificate must have."""
    if isinstance(error, ssl.SSLCertVerificationError):
        code = error.verify_code
        if code in _OTHER_NAME:
            return Failure(
                "name",
                f"its certificate is for another name than {name}: {words.other_name}",
            )
        if code in _UNTRUSTED:
            whom = f"by the authorities in {words.ca}" if has_ca else "by an authority that this machine trusts"
            return Failure("untrusted", f"its certificate is not signed {whom}: set {words.ca} to its authority")
        return _certificate_failure(error)
    reason = _reason(error)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"):
        return Failure("plain_text", f"it does not speak TLS there: {words.no_tls}")
    alert = _alert(reason)
    if alert is not None:
        word, text = alert
        if word == "alert_certificate_required" or (word.startswith("alert_bad") and not has_cert):
            return Failure(word, f"it requires a client certificate: set {words.pair}")
        return Failure(word, f"it {text.format(whose=words.whose)}")
    return _transport_failure(error, reason)


def _certificate_failure(error: ssl.SSLCertVerificationError) -> Failure:
    other = "certificate", f"its certificate is not accepted: {error.verify_message}"
    return Failure(*_OF_CERTIFICATE.get(error.verify_code, other))


def _transport_failure(error: BaseException, reason: str) -> Failure:
    if isinstance(error, TimeoutError) or "is taking longer" in str(error):
        return Failure("timeout", "the TLS handshake was not finished in time")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return Failure("plain_text", "it does not speak TLS")
    if isinstance(error, (ssl.SSLEOFError, ConnectionError, EOFError)) or reason == "UNEXPECTED_EOF_WHILE_READING":
        return Failure("gone", "it closed the connection during the TLS handshake")
    if reason:
        return Failure("other", f"TLS failed: {reason.lower().replace('_', ' ')}")
    return Failure("other", f"TLS failed: {error or type(error).__name__}")


def _reason(error: BaseException) -> str:
    return str(error.reason or "") if isinstance(error, ssl.SSLError) else ""


def _alert(reason: str) -> tuple[str, str] | None:
    if "_ALERT_" not in reason:
        return None
    return _ALERTS.get(reason.partition("_ALERT_")[2], ("alert_other", f"ended the handshake: {reason.lower()}"))
