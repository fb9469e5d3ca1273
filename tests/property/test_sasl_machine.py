"""No sequence of messages authenticates a client without proof, or makes an exception escape."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scramp import ScramClient

from kproxy.security.principals import Principal
from kproxy.security.sasl import Answer, Failure, ForwardToBroker, Pending, SaslExchange, State
from kproxy_codec.api_keys import API_VERSIONS, METADATA
from tests.support.clients.raw_client import control_frame, produce_frame, raw_frame
from tests.support.rules import examples
from tests.support.security import sasl_client as client

_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_WRONG = st.one_of(
    st.binary(max_size=200),
    st.builds(client.plain, st.sampled_from(["alice", "bob", "x", ""]), st.sampled_from(["bob-secre", "", "x"])),
    st.text(alphabet="nypc=,arsalt\x00biws0", max_size=60).map(str.encode),
    st.just(b"n,,n=alice,r=abcdefgh"),
    st.builds(lambda nonce: b"c=biws,r=" + nonce + b",p=AAAA", st.binary(max_size=20)),
)
_FRAMES = st.one_of(
    st.builds(client.handshake, st.sampled_from([*_MECHANISMS, "GSSAPI", ""]), st.sampled_from([0, 1])),
    st.builds(client.authenticate, _WRONG, st.sampled_from([0, 1, 2])),
    _WRONG.map(raw_frame),
    st.binary(max_size=300).map(raw_frame),
    st.sampled_from([control_frame(API_VERSIONS, 3), control_frame(METADATA, 9), produce_frame()]),
)


def step(exchange: SaslExchange, frame: bytes) -> Answer | Failure | ForwardToBroker:
    outcome = exchange.receive(memoryview(bytearray(frame)))
    return exchange.resume(outcome.step()) if isinstance(outcome, Pending) else outcome


@settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_FRAMES, max_size=8))
def test_client_without_proof_is_not_authenticated(frames: list[bytes]) -> None:
    exchange = client.exchange()
    for frame in frames:
        was = exchange.state
        outcome = step(exchange, frame)
        assert exchange.principal is None
        assert exchange.state is not State.AUTHENTICATED
        if was is State.FAILED:
            assert isinstance(outcome, Failure)
            assert outcome.frame == b""
        if isinstance(outcome, ForwardToBroker):
            assert was is State.HANDSHAKE
        assert isinstance(outcome, Failure) == (exchange.state is State.FAILED)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_flipped_bit_never_changes_the_principal(mechanism: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        exchange = client.exchange()
        speaker = ScramClient(["SCRAM-SHA-256"], "alice", "alice-secret")
        broken = rng.randrange(3)
        for number in range(3):
            if number == 0:
                frame = client.handshake(mechanism)
            elif mechanism == "PLAIN":
                frame = client.authenticate(client.plain("alice", "alice-secret"))
            elif number == 1:
                frame = client.authenticate(speaker.get_client_first().encode())
            else:
                frame = client.authenticate(speaker.get_client_final().encode())
            if number == broken:
                bits = bytearray(frame)
                bits[rng.randrange(4, len(bits))] ^= 1 << rng.randrange(8)
                frame = bytes(bits)
            outcome = step(exchange, frame)
            if isinstance(outcome, Failure) or number == broken:
                break
            if number == 1 and mechanism != "PLAIN":
                speaker.set_server_first(outcome.frame[outcome.frame.index(b"r=") :].split(b"\x00")[0].decode())
        # A changed bit in a header, such as the correlation id, may leave the proof valid.
        assert exchange.principal in (None, Principal("alice"))
