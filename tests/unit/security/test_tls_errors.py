"""The texts for failed handshakes, and the names that a certificate is for."""

from __future__ import annotations

import ssl

import pytest

from kproxy.config.certificates import Certificate
from kproxy.security.tls_errors import broker_failure, client_failure


def error(reason: str) -> ssl.SSLError:
    made = ssl.SSLError(1, f"[SSL: {reason}]")
    made.reason = reason
    return made


def verification(code: int, message: str = "") -> ssl.SSLCertVerificationError:
    made = ssl.SSLCertVerificationError(1, "certificate verify failed")
    made.verify_code, made.verify_message = code, message
    return made


@pytest.mark.parametrize(
    ("failed", "word", "says"),
    [
        (verification(10), "expired", "has expired"),
        (verification(9), "expired", "compare the clocks"),
        (verification(20), "untrusted", "tls.client_ca"),
        (verification(23), "revoked", "is revoked"),
        (verification(12), "revocation_list", "the revocation list has expired"),
        (verification(3), "revocation_list", "there is no revocation list"),
        (verification(99, "path too long"), "certificate", "path too long"),
        (error("PEER_DID_NOT_RETURN_A_CERTIFICATE"), "no_certificate", "tls.client_auth"),
        (error("UNSUPPORTED_PROTOCOL"), "version", "tls.min_version"),
        (
            error("TLSV1_ALERT_UNKNOWN_CA"),
            "alert_unknown_ca",
            "it asked for k.example.org, and the certificate is for a, b",
        ),
        (error("SSLV3_ALERT_BAD_CERTIFICATE"), "alert_bad_certificate", "rejects this listener's certificate"),
        (error("SSLV3_ALERT_CERTIFICATE_EXPIRED"), "alert_expired", "finds this listener's certificate expired"),
        (error("SSLV3_ALERT_CERTIFICATE_REVOKED"), "alert_revoked", "finds this listener's certificate revoked"),
        (error("SSLV3_ALERT_CERTIFICATE_UNKNOWN"), "alert_bad_certificate", "often because of its authority or name"),
        (error("SSLV3_ALERT_UNSUPPORTED_CERTIFICATE"), "alert_bad_certificate", "does not support this listener's"),
        (error("TLSV1_ALERT_UNRECOGNIZED_NAME"), "alert_name", "does not serve the name"),
        (error("TLSV1_ALERT_PROTOCOL_VERSION"), "version", "speaks no TLS version in common"),
        (error("SSLV3_ALERT_HANDSHAKE_FAILURE"), "alert_handshake_failure", "found no cipher or certificate in common"),
        (error("TLSV1_ALERT_INTERNAL_ERROR"), "alert_other", "had an internal error"),
        (error("NO_SHARED_CIPHER"), "cipher", "no cipher that fits"),
        (error("CALLBACK_FAILED"), "server_name", "it asks for k.example.org, and the certificate is for a, b"),
        (error("HTTP_REQUEST"), "plain_text", "it does not speak TLS"),
        (error("HELLO_TOO_LONG"), "other", "hello too long"),
        (error("SOMETHING_NEW"), "other", "something new"),
        (error("TLSV1_ALERT_SOMETHING_NEW"), "alert_other", "something_new"),
        (TimeoutError(), "timeout", "in time"),
        (ConnectionResetError(104, "reset"), "gone", "closed the connection"),
        (OSError("?"), "other", "?"),
    ],
)
def test_client_tls_errors_are_explained(failed: BaseException, word: str, says: str) -> None:
    failure = client_failure(failed, names=("a", "b"), asked_for="k.example.org")
    assert failure.word == word
    assert says in failure.text


@pytest.mark.parametrize(
    ("failed", "has_cert", "word", "says"),
    [
        (verification(62), True, "name", "another name than k1"),
        (verification(19), True, "untrusted", "set broker_tls.ca"),
        (verification(10), True, "expired", "has expired"),
        (error("WRONG_VERSION_NUMBER"), True, "plain_text", "it does not speak TLS there"),
        (error("TLSV13_ALERT_CERTIFICATE_REQUIRED"), False, "alert_certificate_required", "set broker_tls.cert"),
        (error("SSLV3_ALERT_BAD_CERTIFICATE"), False, "alert_bad_certificate", "set broker_tls.cert"),
        (error("SSLV3_ALERT_BAD_CERTIFICATE"), True, "alert_bad_certificate", "rejects the proxy's certificate"),
        (error("TLSV1_ALERT_UNKNOWN_CA"), True, "alert_unknown_ca", "that signed the proxy's certificate"),
        (ConnectionResetError(104, "reset"), True, "gone", "during the TLS handshake"),
    ],
)
def test_broker_tls_errors_are_explained(failed: BaseException, has_cert: bool, word: str, says: str) -> None:
    failure = broker_failure(failed, name="k1", has_ca=True, has_cert=has_cert)
    assert failure.word == word
    assert says in failure.text


def test_wildcard_stands_for_one_label() -> None:
    certificate = Certificate(0.0, ("localhost", "*.Example.org", "127.0.0.1"))
    assert all(map(certificate.is_for, ("localhost", "LOCALHOST.", "kafka.example.org", "127.0.0.1")))
    assert not any(map(certificate.is_for, ("example.org", "a.b.example.org", ".example.org", "localhost.org", "")))
