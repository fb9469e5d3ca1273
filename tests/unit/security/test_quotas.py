"""Quotas: the amount allowed, which clients share an account, and where an answer states the wait."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kproxy.config import load_proxy_config
from kproxy.config.quotas import parse_quotas
from kproxy.errors import StartupError
from kproxy.observe.tally import Tally
from kproxy.proxy import metering
from kproxy.proxy.admission import OpenConnections
from kproxy.proxy.answer_order import AnswerOrder
from kproxy.proxy.memory_budget import Budget
from kproxy.proxy.metering import MOST_CLIENT_ID_BYTES, Meter, with_throttle
from kproxy.proxy.outbox import PacedOutbox
from kproxy.security import quotas as quotas_module
from kproxy.security.principals import Principal
from kproxy.security.quotas import LONGEST_WAIT_S, PARTS, Account, Accounts, Bucket, Quotas
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, METADATA, PRODUCE
from kproxy_codec.control import build_response, decode_response, encode_response
from kproxy_codec.framing import client_id, frame_message, request_header, response_body_offset, response_header
from tests.support.waiting import eventually

ALICE, BOB = Principal("alice"), Principal("bob")


def quotas(*given: dict[str, Any], share: float = 1.0) -> Quotas:
    return Quotas(parse_quotas(list(given), "here"), Accounts(share))


def account_of(some: Quotas, principal: Principal, client_id: str = "") -> Account:
    account = some.account(principal, client_id)
    assert account is not None
    return account


def request_rate(account: Account) -> float:
    assert account.requests is not None
    return account.requests.rate


def test_one_seconds_worth_fits_at_once() -> None:
    bucket = Bucket(100.0)
    assert bucket.use(100, 10.0) == 0
    assert bucket.use(50, 10.0) == pytest.approx(0.5)
    assert bucket.use(0, 10.5) == 0
    assert bucket.use(100, 1_000.0) == 0


def test_client_that_waits_as_told_keeps_rate() -> None:
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


def test_wait_is_bounded_and_late_clock_adds_nothing() -> None:
    account = Account(None, None, 1.0)
    assert account.use(10.0, produced=0, fetched=0) == 0
    # Connections of a client share the account, and their events read the clock at slightly different times.
    assert account.use(9.5, produced=0, fetched=0) == 1
    waits = [account.use(9.5, produced=0, fetched=0) for _ in range(100)]
    assert (max(waits), account.wait(9.5)) == (LONGEST_WAIT_S, LONGEST_WAIT_S)
    assert account.requests is not None
    account.requests.used = 0.0
    assert [account.is_active(now) for now in (9.5, 111.0, 111.5)] == [True, True, False]


def test_most_specific_quota_applies() -> None:
    some = quotas(
        {"requests_per_s": 1},
        {"client_id": "app", "requests_per_s": 2},
        {"principal": "User:alice", "requests_per_s": 3},
        {"principal": "User:alice", "client_id": "app", "requests_per_s": 4},
    )
    clients = ((BOB, "x"), (BOB, "app"), (ALICE, "x"), (ALICE, "app"))
    assert [request_rate(account_of(some, *each)) for each in clients] == [1, 2, 3, 4]
    # Connections of one client share an account; other clients have their own.
    assert some.account(ALICE, "x") is some.account(ALICE, "y")
    assert some.account(BOB, "x") is not some.account(ALICE, "x")


def test_process_has_its_share_of_the_rate() -> None:
    some = quotas({"principal": "User:alice", "produce_bytes_per_s": 100}, share=0.25)
    account = account_of(some, ALICE)
    assert account.use(0.0, produced=25, fetched=1_000) == 0
    assert account.use(0.0, produced=25, fetched=0) == pytest.approx(1.0)
    assert some.account(BOB, "") is None
    assert not some.limits(BOB)


def test_changed_rate_adds_no_immediate_credit() -> None:
    bucket = Bucket(100.0)
    assert bucket.use(60, 10.0) == 0
    # The burst is at least 40 at any rate, and 20 at the lowest one.
    bucket.set_rate(200.0, 10.0)
    assert bucket.use(40, 10.0) == 0
    assert bucket.use(20, 10.0) == pytest.approx(0.1)
    # The excess stays; a wait shorter than at the first rate is reported by that rate.
    bucket.set_rate(50.0, 10.0)
    assert bucket.use(0, 10.0) == pytest.approx(0.2)
    # The excess is 20, of which 12.5 leak; after that the burst follows the new rate.
    assert bucket.use(0, 10.25) == pytest.approx(0.075)
    assert bucket.use(0, 20.0) == 0
    assert bucket.use(50, 20.0) == 0
    assert bucket.use(1, 20.0) > 0
    idle = Bucket(100.0)
    idle.set_rate(20.0, 5.0)
    assert idle.use(20, 5.0) == 0
    assert idle.use(1, 5.0) > 0


def test_account_outlasts_unrelated_quota_reload() -> None:
    accounts = Accounts(0.5)
    alice = {"principal": "User:alice", "requests_per_s": 100}

    def read(*given: dict[str, Any]) -> Account:
        return account_of(Quotas(parse_quotas(list(given), "here"), accounts), ALICE)

    first = read(alice)
    first.use(0.0, produced=0, fetched=0)
    ((key, used, is_short),) = accounts.uses(1.0, 10)
    assert (used, is_short) == (20, False)
    accounts.set_parts({key: 2 * PARTS - 100}, 1.0)
    assert request_rate(first) == 95
    assert read({"client_id": "other", "produce_bytes_per_s": 1}, alice | {"connections": 3}) is first
    # A changed rate opens a new account, which begins with an equal share.
    other = read(alice | {"requests_per_s": 50})
    assert other is not first
    assert request_rate(other) == 25


def test_account_opened_later_has_the_share() -> None:
    accounts = Accounts(0.5)
    given = parse_quotas([{"produce_bytes_per_s": 1_000, "requests_per_s": 1_000}], "here")
    some = Quotas(given, accounts)
    # Nine tenths of a share are almost the whole share.
    for n, produced in enumerate((0, 100, 200, 440, 450)):
        account_of(some, Principal(f"user-{n}")).use(0.0, produced=produced, fetched=0)
    uses = accounts.uses(1.0, 3)
    assert [(used, is_short) for _, used, is_short in uses] == [(900, True), (880, False), (400, False)]
    assert len({key for key, _, _ in uses}) == 3
    # Another process has the same key for the account before it opens it.
    elsewhere = Accounts(0.5)
    elsewhere.set_parts({uses[0][0]: PARTS // 20}, 1.0)
    account = account_of(Quotas(given, elsewhere), Principal("user-4"))
    assert account.produced is not None
    assert (account.produced.rate, request_rate(account)) == (25, 500)
    assert account.is_shared
    elsewhere.set_parts({uses[0][0]: PARTS}, 2.0)
    assert account.produced.rate == 500
    # Use that was reported and has leaked is not reported again.
    assert accounts.uses(100.0, 10) == []


def test_forgotten_account_in_use_stays_with_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "MOST_ACCOUNTS", 2)
    accounts = Accounts(0.5)
    some = Quotas(parse_quotas([{"requests_per_s": 100}], "here"), accounts)
    held = account_of(some, ALICE)
    held.use(0.0, produced=0, fetched=0)
    for n in range(9):
        some.account(Principal(f"user-{n}"), "")
    ((key, _, _),) = accounts.uses(1.0, 10)
    accounts.set_parts({key: PARTS // 2}, 1.0)
    assert request_rate(held) == 25
    assert some.account(ALICE, "") is held


def test_connections_at_other_workers_count() -> None:
    here, there = OpenConnections(), OpenConnections()
    here.by_address.update({"10.0.0.1": 2, "10.0.0.2": 1})
    here.by_principal.update({"10.0.0.1": 5})
    there.elsewhere = here.counts(10)
    there.by_address["10.0.0.1"] += 1
    assert [there.of_address(name) for name in ("10.0.0.1", "10.0.0.2", "10.0.0.3")] == [3, 1, 0]
    assert [there.of_principal(name) for name in ("10.0.0.1", "10.0.0.2")] == [5, 0]
    # Only the addresses with the most clients, if there are too many.
    there.elsewhere = here.counts(2)
    assert (there.of_principal("10.0.0.1"), there.of_address("10.0.0.1"), there.of_address("10.0.0.2")) == (5, 3, 0)


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
        ("[[quotas]]\nrequests_per_s = 0", ["entry 1 of", "requests_per_s", "a number above 0", "no limit"]),
        ('[[quotas]]\nfetch_bytes_per_s = "9MB"', ["fetch_bytes_per_s", "a number above 0"]),
        ("[[quotas]]\nconnections = 0", ["connections", "at least 1"]),
        ("[[quotas]]\nrequest_per_s = 1", ["request_per_s", "requests_per_s"]),
        ('[[quotas]]\nclient_id = "a"\nconnections = 1', ["client_id"]),
        ('[[quotas]]\nprincipal = "alice"\nconnections = 1', ["principal", "User:NAME"]),
        ("[[quotas]]\nrequests_per_s = 1\n[[quotas]]\nfetch_bytes_per_s = 1", ["entry 2", "as entry 1,", "into one"]),
        ("[[quotas]]\nconnections = 1\n[[quotas]]\nconnections = 1", ["entry 2", "as entry 1,", "into one"]),
    ],
)
def test_invalid_quota_is_reported(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text('[ownership]\netcd = "http://127.0.0.1:2379"\n' + text)
    with pytest.raises(StartupError) as raised:
        load_proxy_config(file, environ={})
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("api_key", "versions"), [(PRODUCE, range(3, 14)), (FETCH, range(4, 13)), (LIST_OFFSETS, range(2, 8))]
)
@pytest.mark.parametrize("cut", ["whole", "length", "parts"])
def test_answer_contains_the_longer_throttle_time(api_key: int, versions: range, cut: str) -> None:
    for version in versions:
        for already, told in ((0, 500), (900, 900)):
            body = encode_response(build_response(api_key, version, throttle_time_ms=already))
            head = response_header(api_key, version, 7)
            whole = frame_message(head, body)
            buffers: list[Any] = {
                "whole": [memoryview(bytearray(whole))],
                "length": [whole[:4], whole[4:]],
                # Pieces as in a merged answer: bytes before the topics, the topics, bytes after them.
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


class _Session:
    """The session of a meter."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def take_throttled(self, frame: memoryview, first_byte_at: float, throttle_ms: int) -> None:
        self.told.append(throttle_ms)


def _answers(outbox: PacedOutbox | None = None) -> AnswerOrder:
    context: Any = SimpleNamespace(clock=lambda: 0.0, tally=Tally(), budget=Budget(1 << 30))
    answers = AnswerOrder(context, None)  # type: ignore[arg-type]
    answers.outbox = outbox
    return answers


class _Transport:
    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        """Keep the written bytes."""


def _frame(api_key: int, sender: bytes | None, size: int = 100) -> memoryview:
    return memoryview(frame_message(request_header(api_key, 9, 1, sender), bytes(size)))


async def test_account_is_looked_up_once_per_client_id() -> None:
    found: list[bytes | None] = []
    throttled: list[tuple[int, float]] = []

    class Metering(Meter):
        def _account_of(self, frame: memoryview) -> Account:
            sender = client_id(frame)
            found.append(sender)
            if sender is not None and len(sender) <= MOST_CLIENT_ID_BYTES:
                self._named = bytes(frame[12 : 14 + len(sender)])
                self._of_named = accounts.get(sender, of_others)
            return accounts.get(sender or b"", of_others)

        def _throttle(self, frame: memoryview, first_byte_at: float, account: Account, wait: float) -> None:
            throttled.append((len(frame), wait))

    loop = asyncio.get_running_loop()
    outbox = PacedOutbox(loop, _Transport(), None, Tally().writing, lambda: 0.0)  # type: ignore[arg-type]
    accounts = {b"a": Account(1_000.0, 1e9, 1e9), b"ab": Account(1e9, 100.0, 1e9)}
    of_others = Account(None, None, 1e9)
    charging = Metering(quotas, ALICE, _Session(), _answers(outbox), lambda presses: None, lambda: 10.0, Counter())
    charging._names_clients = True
    took = []
    long = b"l" * (MOST_CLIENT_ID_BYTES + 1)
    for sender in (b"a", b"a", b"ab", b"ab", b"a", long, long, None):
        took.append(charging.take(_frame(PRODUCE, sender), 0.0))
        # An answer counts as fetched once it has been sent.
        outbox.put([bytes(60)])
        outbox.flush()
    # A frame shorter than the client id that is kept.
    charging._named, charging._of_named = b"\x00\x01a", accounts[b"a"]
    took.append(charging.take(memoryview(bytes(13) + b"\x01"), 0.0))
    assert found == [b"a", b"ab", b"a", long, long, None, b""]
    assert took == [False, False, False, True, *[False] * 5]
    assert [account.produced.used for account in accounts.values()] == [348.0, 234.0]  # type: ignore[union-attr]
    assert [account.fetched.used for account in accounts.values()] == [120.0, 120.0]  # type: ignore[union-attr]
    assert [account.requests.used for account in (*accounts.values(), of_others)] == [3.0, 2.0, 4.0]  # type: ignore[union-attr]
    assert throttled == [(117, pytest.approx(0.2))]


async def test_meter_takes_reloaded_quotas_at_a_tick() -> None:
    def of(rate: float) -> Quotas:
        return quotas({"principal": "User:alice", "client_id": "a", "requests_per_s": rate})

    current, session, pressure = of(1.0), _Session(), list[bool]()
    meter = Meter(lambda: current, ALICE, session.take_throttled, _answers(), pressure.append, lambda: 10.0, Counter())
    assert [meter.take(_frame(PRODUCE, b"b"), 0.0) for _ in range(3)] == [False] * 3
    assert [meter.take(_frame(PRODUCE, b"a"), 0.0) for _ in range(2)] == [False, True]
    current = of(3.0)
    assert meter.take(_frame(PRODUCE, b"a"), 0.0)
    meter.look()
    assert [meter.take(_frame(PRODUCE, b"a"), 0.0) for _ in range(4)] == [False, False, False, True]
    current = quotas()
    meter.look()
    assert not meter.take(_frame(PRODUCE, b"a"), 0.0)
    assert (pressure, len(session.told)) == ([True], 3)
    meter.close()


async def test_wait_follows_rate_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "LOOK_S", 0.01)
    accounts = Accounts(0.5)
    some = Quotas(parse_quotas([{"produce_bytes_per_s": 2_000}], "here"), accounts)
    session, pressure, now = _Session(), list[bool](), 100.0
    meter = Meter(lambda: some, ALICE, session.take_throttled, _answers(), pressure.append, lambda: now, Counter())
    frame = memoryview(frame_message(request_header(PRODUCE, 9, 1, b"a"), bytes(990)))
    # A few bytes more than the burst.
    assert meter.take(frame, 0.0)
    assert pressure == [True]
    assert 1 <= session.told[0] <= 10
    ((key, _, is_short),) = accounts.uses(now, 10)
    assert is_short
    accounts.set_parts({key: 1}, now)
    now += 1
    await asyncio.sleep(0.05)
    assert pressure == [True]
    accounts.set_parts({key: 2 * PARTS}, now)
    now += 1
    await eventually(lambda: pressure == [True, False])
    meter.close()
