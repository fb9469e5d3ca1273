"""The state machine of SASL, message by message, for any kind of client."""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
from pathlib import Path
from typing import Any, Final

import pytest
from scramp import ScramClient

from kproxy.security.mechanisms import Refused, Step
from kproxy.security.principals import Principal
from kproxy.security.sasl import Answer, Failure, ForwardToBroker, Outcome, Pending, SaslExchange, State
from kproxy.security.users import Users
from kproxy_codec.api_keys import API_VERSIONS, METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE
from kproxy_codec.error_codes import (
    ILLEGAL_SASL_STATE,
    NONE,
    SASL_AUTHENTICATION_FAILED,
    UNSUPPORTED_SASL_MECHANISM,
)
from tests.support.clients.raw_client import Answer as Read
from tests.support.clients.raw_client import control_frame, produce_frame, raw_frame
from tests.support.security import sasl_client as client


def receive(exchange: SaslExchange, frame: bytes) -> Outcome:
    """The outcome of a frame, after any step of a mechanism."""
    outcome = exchange.receive(memoryview(bytearray(frame)))
    return exchange.resume(outcome.step()) if isinstance(outcome, Pending) else outcome


def pending(exchange: SaslExchange, frame: bytes) -> Step | Refused:
    """The outcome of a step that has not run yet."""
    outcome = exchange.receive(memoryview(bytearray(frame)))
    assert isinstance(outcome, Pending)
    return outcome.step()


def read(outcome: Outcome, api_key: int, version: int) -> Any:
    assert isinstance(outcome, Answer | Failure), outcome
    return Read(outcome.frame, api_key, version).message


def begun(mechanism: str = "PLAIN", *, carries: bool = False, **options: Any) -> SaslExchange:
    """An exchange whose client has chosen a mechanism."""
    begin = client.carrying if carries else client.exchange
    exchange = begin(*["OAUTHBEARER"] * (mechanism == "OAUTHBEARER"), **options)
    receive(exchange, client.handshake(mechanism))
    return exchange


def answer_to(exchange: SaslExchange, message: bytes) -> Any:
    """The answer to a message of the mechanism."""
    return read(receive(exchange, client.authenticate(message)), SASL_AUTHENTICATE, 2)


def authenticated(exchange: SaslExchange, version: int = 2) -> Any:
    """Authenticate alice by PLAIN; return the last answer."""
    read(receive(exchange, client.handshake("PLAIN")), SASL_HANDSHAKE, 1)
    message = client.authenticate(client.plain("alice", "alice-secret"), version)
    return read(receive(exchange, message), SASL_AUTHENTICATE, version)


def test_api_versions_is_passed_on_before_the_handshake() -> None:
    exchange = client.exchange()
    for version in (0, 3, 4):
        assert receive(exchange, control_frame(API_VERSIONS, version)) == ForwardToBroker()
    assert exchange.state is State.HANDSHAKE


@pytest.mark.parametrize("version", [0, 1, 2])
def test_plain_names_principal_and_session_ends(version: int) -> None:
    exchange = client.exchange(lifetime_s=90.0)
    answer = authenticated(exchange, version)
    assert (answer.error_code, bytes(answer.auth_bytes)) == (NONE, b"")
    assert version == 0 or answer.session_lifetime_ms == 90_000
    assert (exchange.principal, exchange.state) == (Principal("alice"), State.AUTHENTICATED)
    assert exchange.session_ends_at == 1_090.0


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (client.plain("alice", "wrong"), "Authentication failed: Invalid username or password"),
        (client.plain("nobody", "alice-secret"), "Authentication failed: Invalid username or password"),
        (client.plain("alice", "bob-secret"), "Authentication failed: Invalid username or password"),
        (client.plain("", "alice-secret"), "Authentication failed: username not specified"),
        (client.plain("alice", ""), "Authentication failed: password not specified"),
        (client.plain("alice", "alice-secret", "bob"), "authorization id that is different"),
        (b"alice\x00alice-secret", "Invalid SASL/PLAIN response"),
        (b"\xff\x00\xff\x00\xff", "Invalid SASL/PLAIN response"),
        (b"", "Invalid SASL/PLAIN response"),
        (b"\x00a\x00b\x00c", "Invalid SASL/PLAIN response"),
    ],
)
def test_plain_is_refused_in_kafkas_words(message: bytes, words: str) -> None:
    exchange = begun()
    outcome = receive(exchange, client.authenticate(message))
    answer = read(outcome, SASL_AUTHENTICATE, 2)
    assert answer.error_code == SASL_AUTHENTICATION_FAILED
    assert words in answer.error_message
    assert isinstance(outcome, Failure)
    assert outcome.is_refusal
    assert "secret" not in outcome.reason
    assert exchange.principal is None
    assert exchange.state is State.FAILED


def scram(exchange: SaslExchange, mechanism: str, name: str, password: str, version: int = 2) -> Outcome:
    """The outcome of the last message; the client verifies the proxy's in turn."""
    speaker = ScramClient([mechanism], name, password)
    receive(exchange, client.handshake(mechanism))
    first = receive(exchange, client.authenticate(speaker.get_client_first().encode(), version))
    speaker.set_server_first(bytes(read(first, SASL_AUTHENTICATE, version).auth_bytes).decode())
    last = receive(exchange, client.authenticate(speaker.get_client_final().encode(), version))
    if isinstance(last, Answer):
        speaker.set_server_final(bytes(read(last, SASL_AUTHENTICATE, version).auth_bytes).decode())
    return last


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_proves_both_sides(mechanism: str) -> None:
    exchange = client.exchange()
    assert isinstance(scram(exchange, mechanism, "bob", "bob-secret"), Answer)
    assert exchange.principal == Principal("bob")


@pytest.mark.parametrize(("name", "password"), [("bob", "wrong"), ("nobody", "bob-secret")])
def test_scram_refuses_unknown_user_as_wrong_password(name: str, password: str) -> None:
    exchange = client.exchange()
    answer = read(scram(exchange, "SCRAM-SHA-256", name, password), SASL_AUTHENTICATE, 2)
    assert (answer.error_code, answer.error_message) == (
        SASL_AUTHENTICATION_FAILED,
        "Authentication failed during authentication due to invalid credentials with SASL mechanism SCRAM-SHA-256",
    )
    assert exchange.principal is None


def test_stand_in_authenticates_no_unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even for a client that knows its password."""
    monkeypatch.setattr(Users, "stand_in", lambda users, name, mechanism: client.credentials_of("bob")[mechanism])
    exchange = client.exchange()
    answer = read(scram(exchange, "SCRAM-SHA-256", "nobody", "bob-secret"), SASL_AUTHENTICATE, 2)
    assert (answer.error_code, exchange.principal) == (SASL_AUTHENTICATION_FAILED, None)


def test_unknown_user_always_has_same_salt() -> None:
    salts = set()
    for _ in range(2):
        exchange = begun("SCRAM-SHA-256")
        first = receive(exchange, client.authenticate(b"n,,n=nobody,r=abc"))
        salts.add(bytes(read(first, SASL_AUTHENTICATE, 2).auth_bytes).split(b",")[1:][0])
    assert len(salts) == 1


@pytest.mark.parametrize(
    "message", [b"", b"n,,", b"\xff\xff", b"n,,n=,r=", b"p=x,,n=a,r=b", b"n,a=b,n=a,r=b", b"c=biws,r=x"]
)
def test_malformed_scram_message_is_a_refusal(message: bytes) -> None:
    exchange = begun("SCRAM-SHA-512")
    assert answer_to(exchange, message).error_code == SASL_AUTHENTICATION_FAILED


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("is_other", [False, True])
def test_proof_over_another_nonce_is_refused(mechanism: str, is_other: bool) -> None:
    """CVE-2024-56128: the proof is valid for its own message, whose nonce is not the server's."""
    exchange, speaker = client.exchange(), ScramClient([mechanism], "bob", "bob-secret")
    receive(exchange, client.handshake(mechanism))
    client_first = speaker.get_client_first()
    first = receive(exchange, client.authenticate(client_first.encode()))
    server_first = bytes(read(first, SASL_AUTHENTICATE, 2).auth_bytes).decode()
    nonce = server_first.partition(",")[0].removeprefix("r=")
    without_proof = f"c=biws,r={nonce}x" if is_other else f"c=biws,r={nonce}"
    signed = ",".join((client_first.partition(",,")[2], server_first, without_proof)).encode()
    credential = client.credentials_of("bob")[mechanism]
    name = mechanism.removeprefix("SCRAM-").replace("-", "").lower()
    salted = hashlib.pbkdf2_hmac(name, b"bob-secret", credential.salt, credential.iterations)
    key = hmac.digest(salted, b"Client Key", name)
    signature = hmac.digest(credential.stored_key, signed, name)
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
    last = receive(exchange, client.authenticate(f"{without_proof},p={proof}".encode()))
    assert isinstance(last, Failure if is_other else Answer)
    assert exchange.principal == (None if is_other else Principal("bob"))


def test_recorded_exchange_cannot_be_replayed() -> None:
    speaker, exchange = ScramClient(["SCRAM-SHA-256"], "bob", "bob-secret"), client.exchange()
    receive(exchange, client.handshake("SCRAM-SHA-256"))
    begin = client.authenticate(speaker.get_client_first().encode())
    answer = receive(exchange, begin)
    speaker.set_server_first(bytes(read(answer, SASL_AUTHENTICATE, 2).auth_bytes).decode())
    end = client.authenticate(speaker.get_client_final().encode())
    assert isinstance(receive(exchange, end), Answer)
    again = client.exchange()
    receive(again, client.handshake("SCRAM-SHA-256"))
    receive(again, begin)
    assert isinstance(receive(again, end), Failure)
    assert again.principal is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(["team"], {"team"}), ("team", {"team"}), (["g"] * 1_000, {"g"}), (["g"] * 1_001, None), ([1], None), ({}, None)],
)
def test_token_names_principal_and_its_groups(tmp_path: Path, groups: object, expected: set[str] | None) -> None:
    exchange = begun("OAUTHBEARER", tokens=client.verifier(tmp_path, groups_claim="groups"))
    assert answer_to(exchange, client.bearer(client.token(groups=groups))).error_code == NONE
    assert exchange.principal == (None if expected is None else Principal("alice", frozenset(expected)))


def test_refused_token_fails_with_the_next_message(tmp_path: Path) -> None:
    exchange = begun("OAUTHBEARER", tokens=client.verifier(tmp_path))
    told = answer_to(exchange, client.bearer(client.token(aud="other")))
    assert (told.error_code, bytes(told.auth_bytes)) == (NONE, b'{"status":"invalid_token"}')
    assert exchange.principal is None
    # A valid token in its place comes too late.
    ends = answer_to(exchange, client.bearer(client.token()))
    assert ends.error_code == SASL_AUTHENTICATION_FAILED
    assert exchange.state is State.FAILED


def test_client_with_token_cannot_choose_another_name(tmp_path: Path) -> None:
    exchange = begun("OAUTHBEARER", tokens=client.verifier(tmp_path))
    message = client.bearer(client.token()).replace(b"n,,", b"n,a=bob,")
    assert isinstance(receive(exchange, client.authenticate(message)), Failure)


@pytest.mark.parametrize("password", ["alice-secret", "wrong"])
def test_handshake_v0_is_followed_by_bare_messages(password: str) -> None:
    """A refusal has no answer."""
    exchange = client.exchange(lifetime_s=90.0, allows_v0=True)
    assert read(receive(exchange, client.handshake("PLAIN", 0)), SASL_HANDSHAKE, 0).error_code == NONE
    outcome = receive(exchange, raw_frame(client.plain("alice", password)))
    if password == "wrong":
        assert isinstance(outcome, Failure)
        assert outcome.frame == b""
        return
    assert outcome == Answer(b"\x00\x00\x00\x00")
    assert (exchange.principal, exchange.session_ends_at) == (Principal("alice"), 1_090.0)


def test_handshake_v0_is_refused_unless_allowed() -> None:
    exchange = client.exchange()
    outcome = receive(exchange, client.handshake("PLAIN", 0))
    assert isinstance(outcome, Failure)
    assert (outcome.frame, "sasl.handshake_v0 = true" in outcome.reason) == (b"", True)


@pytest.mark.parametrize("version", [0, 1])
def test_unknown_mechanism_is_answered_with_offered_ones(version: int) -> None:
    exchange = client.exchange(allows_v0=True)
    outcome = receive(exchange, client.handshake("GSSAPI", version))
    answer = read(outcome, SASL_HANDSHAKE, version)
    assert answer.error_code == UNSUPPORTED_SASL_MECHANISM
    assert list(answer.mechanisms) == ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
    assert isinstance(outcome, Failure)
    assert exchange.state is State.FAILED


@pytest.mark.parametrize(
    "frame",
    [
        produce_frame(),
        control_frame(METADATA, 9),
        client.authenticate(b"x"),
        client.handshake("PLAIN")[:-3],
        raw_frame(b"\x00\x11\x00\x02\x00\x00\x00\x01\xff\xff\x00\x05PLAIN"),
        raw_frame(b""),
        raw_frame(bytes(100)),
    ],
    ids=["produce", "metadata", "authenticate first", "cut", "handshake v2", "empty", "zeros"],
)
def test_invalid_first_bytes_close_without_answer(frame: bytes) -> None:
    exchange = client.exchange()
    outcome = receive(exchange, frame)
    assert isinstance(outcome, Failure)
    assert (outcome.frame, outcome.is_refusal) == (b"", False)
    # No message reopens a failed exchange.
    assert isinstance(receive(exchange, client.handshake("PLAIN")), Failure)


def test_only_mechanism_messages_follow_the_handshake() -> None:
    for frame in (control_frame(API_VERSIONS, 3), client.handshake("PLAIN"), produce_frame()):
        exchange = begun()
        assert isinstance(receive(exchange, frame), Failure)


@pytest.mark.parametrize("is_late", [False, True])
def test_early_frame_and_late_outcome_end_the_exchange(is_late: bool) -> None:
    exchange = begun()
    message = client.authenticate(client.plain("alice", "alice-secret"))
    step = pending(exchange, message)
    # A proxy that judges by itself keeps no credential.
    assert exchange.credential is None
    if is_late:
        exchange.time_is_over()
    else:
        assert isinstance(exchange.receive(memoryview(message)), Failure)
    assert isinstance(exchange.resume(step), Failure)
    assert exchange.principal is None


# Sessions that end (KIP-368)


def test_token_ends_its_session(tmp_path: Path) -> None:
    clock = client.Clock()
    tokens = client.verifier(tmp_path)
    for lifetime_s in (0.0, 1e9):
        exchange = begun("OAUTHBEARER", lifetime_s=lifetime_s, tokens=tokens, clock=clock)
        receive(exchange, client.authenticate(client.bearer(client.token())))
        assert exchange.session_ends_at is not None
        assert exchange.session_ends_at > clock.now


def renewed(exchange: SaslExchange, name: str, password: str) -> Outcome:
    receive(exchange, client.handshake("PLAIN"))
    return receive(exchange, client.authenticate(client.plain(name, password)))


def test_session_is_renewed_by_same_principal_and_mechanism() -> None:
    clock = client.Clock()
    exchange = client.exchange(lifetime_s=90.0, clock=clock)
    authenticated(exchange)
    clock.now += 60
    assert isinstance(renewed(exchange, "alice", "alice-secret"), Answer)
    assert exchange.session_ends_at == clock.now + 90
    clock.now += 60
    assert isinstance(receive(copy.copy(exchange), client.handshake("SCRAM-SHA-256")), Failure)
    outcome = renewed(exchange, "bob", "bob-secret")
    answer = read(outcome, SASL_AUTHENTICATE, 2)
    assert answer.error_code == SASL_AUTHENTICATION_FAILED
    assert answer.error_message.startswith("Cannot change principals during re-authentication from User:alice")
    assert exchange.principal == Principal("alice")
    assert exchange.state is State.FAILED


def test_sasl_out_of_turn_is_ignored() -> None:
    exchange = client.exchange()
    authenticated(exchange)
    early = read(receive(exchange, client.handshake("PLAIN")), SASL_HANDSHAKE, 1)
    assert early.error_code == ILLEGAL_SASL_STATE
    stray = answer_to(exchange, b"x")
    assert stray.error_code == ILLEGAL_SASL_STATE
    assert exchange.state is State.AUTHENTICATED


# Carried identities

EVES: Final = client.plain("eve", "unknown here")


@pytest.mark.parametrize("version", [0, 1, 2, None], ids=["0", "1", "2", "raw"])
def test_credential_is_held_until_its_outcome(version: int | None) -> None:
    exchange = client.carrying(allows_v0=True)
    receive(exchange, client.handshake("PLAIN", 0 if version is None else 1))
    step = pending(exchange, raw_frame(EVES) if version is None else client.authenticate(EVES, version))
    assert isinstance(step, Step)
    assert step.principal == Principal("eve")
    credential = exchange.credential
    assert credential is not None
    assert credential.first() == EVES
    assert "unknown" not in f"{credential!r} {step!r}"
    outcome = exchange.resume(step._replace(lifetime_s=5.0))
    assert not version or read(outcome, SASL_AUTHENTICATE, version).session_lifetime_ms == 5_000
    assert (exchange.credential, exchange.principal) == (None, Principal("eve"))


def test_broker_refusal_is_a_proxy_refusal() -> None:
    exchange = begun(carries=True)
    pending(exchange, client.authenticate(client.plain("eve", "x")))
    outcome = exchange.resume(Refused("a broker says no", "no, it says"))
    assert isinstance(outcome, Failure)
    assert outcome.is_refusal
    assert read(outcome, SASL_AUTHENTICATE, 2).error_message == "no, it says"
    assert (exchange.credential, exchange.state) == (None, State.FAILED)


def test_missing_judge_closes_without_answer() -> None:
    exchange = begun(carries=True)
    pending(exchange, client.authenticate(client.plain("eve", "x")))
    assert exchange.give_up("nobody knows") == Failure(b"", "nobody knows")
    assert (exchange.credential, exchange.principal) == (None, None)


def test_renewal_by_another_is_known_before_forwarding() -> None:
    exchange = client.carrying()
    assert exchange.may_become(Principal("eve"))
    receive(exchange, client.handshake("PLAIN"))
    exchange.resume(pending(exchange, client.authenticate(client.plain("eve", "x"))))
    assert exchange.may_become(Principal("eve"))
    assert not exchange.may_become(Principal("alice"))


def test_unverified_token_names_its_principal() -> None:
    exchange = begun("OAUTHBEARER", carries=True)
    step = pending(exchange, client.authenticate(client.bearer(client.token(sub="carol"))))
    assert isinstance(step, Step)
    assert step.principal == Principal("carol")


@pytest.mark.parametrize(
    "text",
    ["opaque", "a.b.c", "a.e30.c", "a.eyJzdWIiOiA1fQ.c", "a.eyJzdWIiOiAiIn0.c", "a.W10.c", "..", "a." + "W" * 9_000],
)
def test_token_without_principal_is_refused(text: str) -> None:
    exchange = begun("OAUTHBEARER", carries=True)
    told = answer_to(exchange, client.bearer(text))
    assert bytes(told.auth_bytes) == b'{"status":"invalid_token"}'
    outcome = receive(exchange, client.authenticate(b"\x01"))
    assert isinstance(outcome, Failure)
    assert text not in outcome.reason
