"""Quotas: the amount allowed, which clients share an account, and where an answer states the wait."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kproxy.config import load_proxy_config
from kproxy.config.quotas import parse_quotas
from kproxy.errors import StartupError
from kproxy.plain import compiled
from kproxy.proxy.metering import with_throttle
from kproxy.security.principals import Principal
from kproxy.security.quotas import Account, Bucket, Quotas, _Account
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, METADATA, PRODUCE
from kproxy_codec.control import build_response, decode_response, encode_response
from kproxy_codec.framing import frame_message, response_body_offset, response_header

ALICE, BOB = Principal("alice"), Principal("bob")


def quotas(*given: dict[str, Any], share: float = 1.0) -> Quotas:
    return Quotas(parse_quotas(list(given), "here"), share)


def test_a_second_s_worth_fits_at_once_and_the_rest_must_leak() -> None:
    bucket = Bucket(100.0)
    assert bucket.use(100, 10.0) == 0
    assert bucket.use(50, 10.0) == pytest.approx(0.5)
    assert bucket.use(0, 10.5) == 0
    assert bucket.use(100, 1_000.0) == 0


def test_whoever_waits_as_told_keeps_to_the_rate() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        rate, now, used = rng.uniform(1, 1e6), 0.0, 0.0
        bucket = Bucket(rate)
        largest = rate * rng.uniform(0.01, 3)
        while now < 60:
            amount = rng.uniform(0, largest)
            used += amount
            now += bucket.use(amount, now) + rng.choice([0, 0, rng.uniform(0, 0.1)])
        assert used <= rate * (now + 1) + largest


def test_the_most_special_quota_counts() -> None:
    some = quotas(
        {"requests_per_s": 1},
        {"client_id": "app", "requests_per_s": 2},
        {"principal": "User:alice", "requests_per_s": 3},
        {"principal": "User:alice", "client_id": "app", "requests_per_s": 4},
    )

    def rate(principal: Principal, client_id: str) -> float:
        account = some.account(principal, client_id)
        assert account is not None
        assert account.requests is not None
        return account.requests.rate

    assert [rate(*each) for each in ((BOB, "x"), (BOB, "app"), (ALICE, "x"), (ALICE, "app"))] == [1, 2, 3, 4]
    # Connections of one client share an account; others have theirs.
    assert some.account(ALICE, "x") is some.account(ALICE, "y")
    assert some.account(BOB, "x") is not some.account(ALICE, "x")


def test_a_process_has_its_share_and_whom_nothing_fits_has_no_account() -> None:
    some = quotas({"principal": "User:alice", "produce_bytes_per_s": 100}, share=0.25)
    account = some.account(ALICE, "")
    assert account is not None
    assert account.use(0.0, produced=25, fetched=1_000) == 0
    assert account.use(0.0, produced=25, fetched=0) == pytest.approx(1.0)
    assert some.account(BOB, "") is None
    assert not some.limits(BOB)


def test_connections_are_limited_by_principal() -> None:
    some = quotas({"connections": 5}, {"principal": "User:alice", "connections": 2})
    assert (some.connections(ALICE), some.connections(BOB)) == (2, 5)
    assert not some.limits(ALICE)
    assert quotas({"requests_per_s": 1}).connections(ALICE) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[quotas]", ["[[quotas]]"]),
        ("[[quotas]]", ["limits nothing"]),
        ("[[quotas]]\nrequests_per_s = 0", ["requests_per_s"]),
        ("[[quotas]]\nrequest_per_s = 1", ["request_per_s", "requests_per_s"]),
        ('[[quotas]]\nclient_id = "a"\nconnections = 1', ["client_id"]),
        ('[[quotas]]\nprincipal = "alice"\nconnections = 1', ["principal"]),
    ],
)
def test_what_is_no_quota_is_told_in_a_sentence(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text('[ownership]\netcd = "http://127.0.0.1:2379"\n' + text)
    with pytest.raises(StartupError) as raised:
        load_proxy_config(file, environ={})
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("api_key", "versions"), [(PRODUCE, range(3, 14)), (FETCH, range(4, 13)), (LIST_OFFSETS, range(2, 8))]
)
@pytest.mark.parametrize("cut", ["whole", "length", "parts"])
def test_an_answer_tells_the_longer_wait(api_key: int, versions: range, cut: str) -> None:
    for version in versions:
        for already, told in ((0, 500), (900, 900)):
            body = encode_response(build_response(api_key, version, throttle_time_ms=already))
            head = response_header(api_key, version, 7)
            whole = frame_message(head, body)
            buffers: list[Any] = {
                "whole": [memoryview(bytearray(whole))],
                "length": [whole[:4], whole[4:]],
                # As a merged answer: what is before the topics, these, and what is behind.
                "parts": [whole[:4], head + body[:-5], body[-5:]] if api_key == PRODUCE else [whole[:4], whole[4:]],
            }[cut]
            answer = b"".join(with_throttle(api_key, version, buffers, 500))
            assert len(answer) == len(whole)
            message = decode_response(api_key, version, answer[response_body_offset(answer, api_key, version) :])
            assert message.throttle_time_ms == told, version


def test_other_answers_stay_as_they_are() -> None:
    body = encode_response(build_response(METADATA, 9))
    assert with_throttle(METADATA, 9, [body], 500) == [body]
    assert with_throttle(PRODUCE, 9, [], 500) == []


uses = st.lists(st.tuples(st.floats(-10, 100), st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=20)
rates = st.none() | st.floats(1e-3, 1e12)


@pytest.mark.skipif(compiled is None, reason="the plain path is not compiled here")
@given(st.tuples(rates, rates, rates), uses)
def test_the_compiled_account_waits_as_long(
    limits: tuple[float | None, ...], used: list[tuple[float, int, int]]
) -> None:
    found = []
    for kind in (_Account, Account):
        account, now, waits = kind(*limits), 0.0, []
        for passed, produced, fetched in used:
            # A clock may also stand still, or differ a little between events.
            now += passed
            waits.append(account.use(now, produced=produced, fetched=fetched))
        found.append(waits)
    assert found[0] == found[1]
