"""Brokers prove to each other that they know the cluster's secret; those that do not know it are refused."""

from __future__ import annotations

import random
import uuid
from contextlib import suppress

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scramp import ScramClient

from kproxy.broker.keys import ReplicaKey
from kproxy.broker.replication import authentication
from kproxy.broker.replication.authentication import AuthenticationFailed, FollowerHandshake, ListenerHandshake, Secret

SECRET = Secret.of("the cluster's secret, as long as one from etcd")
LOG_ID = uuid.UUID(int=0xA11)
SEVEN = ReplicaKey(7, LOG_ID)
ANOTHER = Secret.of("another cluster's secret, as long as this one's")


def converse(listener: ListenerHandshake, follower: FollowerHandshake) -> list[bytes]:
    """Exchange all four messages; return them."""
    messages = [follower.first()]
    messages.append(listener.answer(messages[-1]))
    messages.append(follower.final(messages[-1]))
    messages.append(listener.answer(messages[-1]))
    follower.check(messages[-1])
    return messages


@pytest.mark.parametrize("node_id", [0, 7, 2**31 - 1])
def test_peer_with_the_secret_is_authenticated(node_id: int) -> None:
    listener = ListenerHandshake(SECRET)
    messages = converse(listener, FollowerHandshake(ReplicaKey(node_id, LOG_ID), SECRET))
    assert listener.follower == (node_id, LOG_ID)
    assert SECRET.text.encode() not in b"".join(messages)


def test_peer_without_the_secret_is_not_authenticated() -> None:
    listener, follower = ListenerHandshake(SECRET), FollowerHandshake(SEVEN, ANOTHER)
    final = follower.final(listener.answer(follower.first()))
    with pytest.raises(AuthenticationFailed):
        listener.answer(final)
    assert listener.follower is None
    with pytest.raises(AuthenticationFailed):
        listener.answer(final)
    assert listener.follower is None


def test_listener_without_the_secret_is_detected() -> None:
    """The listener accepts every follower without knowing the secret."""
    follower = FollowerHandshake(SEVEN, SECRET)
    first = ListenerHandshake(ANOTHER).answer(follower.first())
    follower.final(first)
    for signature in (b"v=" + b"A" * 43 + b"=", b"e=other-error", b"", b"v="):
        with pytest.raises(AuthenticationFailed):
            follower.check(signature)


def test_recorded_exchange_authenticates_nobody() -> None:
    first, _, final, _ = converse(ListenerHandshake(SECRET), FollowerHandshake(SEVEN, SECRET))
    listener = ListenerHandshake(SECRET)
    listener.answer(first)
    with pytest.raises(AuthenticationFailed, match="nonce"):
        listener.answer(final)
    assert listener.follower is None


def test_name_cannot_be_changed_in_transit() -> None:
    listener, follower = ListenerHandshake(SECRET), FollowerHandshake(SEVEN, SECRET)
    final = follower.final(listener.answer(follower.first().replace(b"n=7/", b"n=8/")))
    with pytest.raises(AuthenticationFailed):
        listener.answer(final)
    assert listener.follower is None


@pytest.mark.parametrize(
    "name",
    [
        "admin",
        "7",
        "7/",
        f"-1/{LOG_ID}",
        f"7.0/{LOG_ID}",
        f"99999999999/{LOG_ID}",
        f"٧/{LOG_ID}",
        f"7/{LOG_ID}/",
        f"7/{LOG_ID.hex}",
        f"07/{LOG_ID}",
    ],
)
def test_name_is_broker_id_and_log_id(name: str) -> None:
    client = ScramClient([authentication.MECHANISM], name, SECRET.text)
    listener = ListenerHandshake(SECRET)
    with pytest.raises(AuthenticationFailed):
        listener.answer(client.get_client_first().encode())


def test_listener_cannot_keep_follower_busy_with_rounds() -> None:
    """Ten million rounds of hashing are several seconds in which this broker serves nobody."""
    costly = SECRET._replace(iterations=authentication.MAX_ITERATIONS + 1)
    follower = FollowerHandshake(SEVEN, SECRET)
    with pytest.raises(AuthenticationFailed, match="iterations"):
        follower.final(ListenerHandshake(costly).answer(follower.first()))


@pytest.mark.parametrize("text", ["", "short", "\x00" * 20, "\u0627a" * 10])
def test_invalid_secret_is_refused(text: str) -> None:
    """An empty key in etcd must not let everybody in."""
    with pytest.raises(ValueError, match=r"expected at least|control|bidi"):
        Secret.of(text)


# Text with a meaning in a message, and text that breaks its form.
SNIPPETS = [
    b"=",
    b",",
    b"n=",
    b"r=",
    b"i=99999999",
    b"\xff",
    b"e=x",
    b"v=",
    b"m=a",
    b"p=tls-unique,,",
    b"\x00",
    "۝".encode(),
]


@settings(max_examples=300)
@given(st.integers(0, 3), st.integers(0, 2**32), st.binary(max_size=30) | st.none())
def test_changed_message_is_rejected(place: int, seed: int, noise: bytes | None) -> None:
    chance = random.Random(seed)

    def passed_on(message: bytes, step: int) -> bytes:
        if step != place:
            return message
        changed = bytearray(message)
        at = chance.randrange(len(changed) + 1)
        changed[at : at + chance.choice((0, 1, 3))] = chance.choice(SNIPPETS)
        assume(changed != message)
        return bytes(changed) if noise is None else noise

    listener, follower = ListenerHandshake(SECRET), FollowerHandshake(SEVEN, SECRET)
    first = passed_on(follower.first(), 0)
    try:
        answer = passed_on(listener.answer(first), 1)
        final = passed_on(follower.final(answer), 2)
        proof = passed_on(listener.answer(final), 3)
    except AuthenticationFailed:
        assert listener.follower is None
        return
    assert (place, listener.follower) == (3, SEVEN), "what was changed was believed"
    # Unknown extensions may follow the proof (RFC 5802), but nothing may stand inside it.
    with suppress(AuthenticationFailed):
        follower.check(proof)
        assert proof.startswith(b"v=")
        assert b"," in proof
