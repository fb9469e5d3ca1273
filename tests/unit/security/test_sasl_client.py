"""The client's side of SASL towards a broker, against scramp's server side and generated answers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scramp import ScramMechanism

from kproxy.security.sasl_client import (
    MAX_ITERATIONS,
    Credential,
    Request,
    SaslClient,
    SaslRefused,
    State,
    mechanism,
)
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, decode_request, encode_response

SECRET = "correct horse, battery=staple"


def handshake(error_code: int = 0, mechanisms: tuple[str, ...] = ("PLAIN",)) -> memoryview:
    return memoryview(
        encode_response(build_response(keys.SASL_HANDSHAKE, 1, error_code=error_code, mechanisms=list(mechanisms)))
    )


def answer(auth_bytes: bytes = b"", **fields: Any) -> memoryview:
    known: Mapping[str, Any] = {"error_code": 0, "error_message": None, "session_lifetime_ms": 0}
    made = build_response(keys.SASL_AUTHENTICATE, 1, auth_bytes=auth_bytes, **{**known, **fields})
    return memoryview(encode_response(made))


def sent(request: Request | None) -> bytes:
    assert request is not None
    assert (request.api_key, request.api_version) == (keys.SASL_AUTHENTICATE, 1)
    return bytes(decode_request(keys.SASL_AUTHENTICATE, 1, memoryview(request.body)).auth_bytes)


def begun(name: str, secret: str = SECRET) -> tuple[SaslClient, bytes]:
    """A client whose mechanism is accepted, and its first message."""
    client = SaslClient(mechanism(name, "kproxy", secret), 2)
    first = client.begin()
    assert decode_request(keys.SASL_HANDSHAKE, 1, memoryview(first.body)).mechanism == name
    return client, sent(client.receive(handshake(mechanisms=(name,))))


def test_plain_sends_user_and_password_once() -> None:
    client, first = begun("PLAIN")
    assert first == b"\0kproxy\0" + SECRET.encode()
    assert client.receive(answer(session_lifetime_ms=5_000)) is None
    assert (client.state, client.session_lifetime_ms) == (State.AUTHENTICATED, 5_000)
    # Invalid values from a broker are not passed on.
    for told, taken in ((-5, 0), (1 << 62, 31_536_000_000)):
        client, _ = begun("PLAIN")
        client.receive(answer(session_lifetime_ms=told))
        assert client.session_lifetime_ms == taken


def test_oldest_version_has_no_session_lifetime() -> None:
    client = SaslClient(mechanism("PLAIN", "kproxy", SECRET), 0)
    client.begin()
    client.receive(handshake())
    made = build_response(keys.SASL_AUTHENTICATE, 0, error_code=0, error_message=None, auth_bytes=b"")
    assert client.receive(memoryview(encode_response(made))) is None
    assert (client.state, client.session_lifetime_ms) == (State.AUTHENTICATED, 0)


def carried(name: str, message: bytes) -> SaslClient:
    """A client that presents a forwarded credential, after the mechanism was accepted."""
    client = SaslClient(Credential(name, message), 1)
    client.begin()
    assert sent(client.receive(handshake(mechanisms=(name,)))) == message
    return client


@pytest.mark.parametrize(
    ("name", "message", "secret"),
    [
        ("PLAIN", b"\0alice\0" + SECRET.encode(), SECRET),
        ("PLAIN", b"alice\0alice\0s3cr3t", "s3cr3t"),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer a.b.c\x01\x01", "a.b.c"),
        ("OAUTHBEARER", b"n,a=x,\x01auth=bearer a.b.c\x01logicalCluster=lkc\x01\x01", "a.b.c"),
    ],
)
def test_presented_credential_is_sent_unchanged(name: str, message: bytes, secret: str) -> None:
    assert carried(name, message).receive(answer()) is None
    client = carried(name, message)
    if name == "OAUTHBEARER":
        assert sent(client.receive(answer(b'{"status":"invalid_token"}'))) == b"\x01"
    # A broker may send any text, and a client has its own.
    text = f"no {secret} here"
    with pytest.raises(SaslRefused, match=r"SASL_AUTHENTICATION_FAILED: no \*\*\* here") as raised:
        client.receive(answer(error_code=58, error_message=text))
    assert (raised.value.to_client, client.state) == (text, State.FAILED)
    assert secret not in repr(Credential(name, message))


def test_own_token_is_the_message_of_a_client() -> None:
    assert begun("OAUTHBEARER", "a.b.c")[1] == b"n,,\x01auth=Bearer a.b.c\x01\x01"


@pytest.mark.parametrize(("error_code", "is_judged"), [(58, True), (34, False), (-1, False), (35, False)])
def test_only_a_verdict_reaches_the_client(error_code: int, is_judged: bool) -> None:
    client = carried("PLAIN", b"\0alice\0x")
    with pytest.raises(SaslRefused) as raised:
        client.receive(answer(error_code=error_code, error_message="so it is"))
    assert (raised.value.to_client is not None) == is_judged


def test_brokers_long_message_is_cut() -> None:
    with pytest.raises(SaslRefused) as raised:
        carried("PLAIN", b"\0alice\0x").receive(answer(error_code=58, error_message="y" * 1_000))
    assert raised.value.to_client == "y" * 300


def scram_server(name: str, password: str, iterations: int = 4_096) -> Any:
    kind = ScramMechanism(name)
    info = kind.make_auth_info(password, iteration_count=iterations)
    return kind.make_server(lambda username: info)


@pytest.mark.parametrize("name", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_proves_the_password_to_either_side(name: str) -> None:
    client, first = begun(name)
    server = scram_server(name, SECRET)
    server.set_client_first(first.decode())
    server.set_client_final(sent(client.receive(answer(server.get_server_first().encode()))).decode())
    assert client.receive(answer(server.get_server_final().encode(), session_lifetime_ms=9)) is None
    assert (client.state, client.session_lifetime_ms) == (State.AUTHENTICATED, 9)


def test_broker_without_the_password_is_rejected() -> None:
    client, first = begun("SCRAM-SHA-256")
    server = scram_server("SCRAM-SHA-256", SECRET)
    server.set_client_first(first.decode())
    client.receive(answer(server.get_server_first().encode()))
    forged = b"v=" + base64.b64encode(bytes(32))
    with pytest.raises(SaslRefused, match="SCRAM-SHA-256 message is invalid"):
        client.receive(answer(forged))
    assert client.state is State.FAILED


def test_broker_iteration_count_is_limited_both_ways() -> None:
    for iterations in ("0", "1", "4095", str(MAX_ITERATIONS + 1), "99999999999", "x", ""):
        client, first = begun("SCRAM-SHA-256")
        nonce = first.decode().partition("r=")[2] + "more"
        with pytest.raises(SaslRefused, match="iterations"):
            client.receive(answer(f"r={nonce},s={base64.b64encode(b'salt').decode()},i={iterations}".encode()))


REFUSED: dict[str, tuple[Callable[[], memoryview], str]] = {
    "another mechanism": (lambda: handshake(33, ("GSSAPI", "PLAIN")), "does not offer SCRAM-SHA-512 but GSSAPI, PLAIN"),
    "no SASL": (lambda: handshake(34), "it offers no SASL there"),
    "another error": (lambda: handshake(41), "it refuses SaslHandshake"),
    "malformed": (lambda: memoryview(b"\x00"), "malformed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_failed_handshake_is_reported(case: str) -> None:
    make, says = REFUSED[case]
    client = SaslClient(mechanism("SCRAM-SHA-512", "kproxy", SECRET), 1)
    client.begin()
    with pytest.raises(SaslRefused, match=says) as raised:
        client.receive(make())
    assert SECRET not in str(raised.value)
    assert client.state is State.FAILED


@pytest.mark.parametrize("name", ["PLAIN", "OAUTHBEARER"])
def test_long_echoed_secret_is_not_shown(name: str) -> None:
    """Not even a part of it, where the message is cut."""
    secret = "s3cr3t" * 100
    client, _ = begun(name, secret)
    with pytest.raises(SaslRefused) as raised:
        client.receive(answer(error_code=58, error_message=f"unknown: {secret}"))
    assert str(raised.value).endswith("unknown: ***")


@pytest.mark.parametrize(
    ("code", "option", "says"),
    [(33, "sasl.mechanism", "set sasl.mechanism"), (34, "broker_sasl.mechanism", "or use no SASL")],
)
def test_option_that_chose_the_mechanism_is_named(code: int, option: str, says: str) -> None:
    client = SaslClient(mechanism("PLAIN", "audit", SECRET), 1, option)
    client.begin()
    with pytest.raises(SaslRefused) as raised:
        client.receive(handshake(code, ("GSSAPI",)))
    assert str(raised.value).endswith(says)


@given(st.sampled_from(["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"]), st.lists(st.binary(max_size=120), max_size=4))
def test_invalid_answers_neither_raise_nor_show_secret(name: str, answers: list[bytes]) -> None:
    client = SaslClient(mechanism(name, "kproxy", SECRET), 1)
    request: Request | None = client.begin()
    client.receive(handshake(mechanisms=(name,)))
    for each in answers:
        refused: SaslRefused | None = None
        try:
            request = client.receive(memoryview(each) if len(each) % 2 else answer(each))
        except SaslRefused as error:
            refused = error
        if refused is not None:
            assert SECRET not in f"{refused} {refused.__context__}"
            assert client.state is State.FAILED
            return
        if request is None:
            assert client.state is State.AUTHENTICATED
            return
