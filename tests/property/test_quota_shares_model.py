"""Workers share a rate so that all clients together stay within it, even if messages are lost or workers die.

The model has the real accounts and the real ledger, and clients that wait as the meter demands. Every used amount is
also counted in one bucket with the whole rate, whose level shows the worst excess over any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kproxy.config.quotas import parse_quotas
from kproxy.proxy.metering import SHORTEST_WAIT_S
from kproxy.security.principals import Principal
from kproxy.security.quotas import BURST_S, LONGEST_WAIT_S, PARTS, Account, Accounts, Bucket, Quotas
from kproxy.workers import shares
from kproxy.workers.shares import LEAST, MOST_CHANGES, MOST_RATES, QUIET_ROUNDS, Ledger, aims_of
from tests.support.rules import examples

RATE = 1_000_000.0
REQUEST = 20_000
STEP_S = 0.05
# More than the rate of one connection.
REQUESTS_A_STEP = 6
ALICE = Principal("alice")
QUOTAS = parse_quotas([{"principal": "User:alice", "produce_bytes_per_s": RATE}], "here")

# What happens to a worker's messages in a second: all arrive; its own arrive late, reordered, and more than once; it
# receives none, or its confirmations are lost; its own are lost; all are lost.
FATES = PROMPT, LATE, DEAF, APPLIES, SILENT, LOST = "prompt", "late", "deaf", "applies", "silent", "lost"


@dataclass
class Client:
    resumes_at: float = 0.0
    ends_at: float = 0.0

    def is_held(self, account: Account, now: float) -> bool:
        """Whether a client must wait again at the end of its wait, as in kproxy.proxy.metering."""
        return account.is_shared and self.ends_at > now and account.wait(now) > SHORTEST_WAIT_S


@dataclass
class Worker:
    """One process and its clients. If accounts are None it has ended."""

    accounts: Accounts | None
    clients: list[Client] = field(default_factory=list)
    account: Account | None = None
    inbox: deque[shares.Shares] = field(default_factory=deque)
    # Reports, and numbers of applied changes.
    outbox: list[list[tuple[bytes, int, bool]] | int] = field(default_factory=list)

    @property
    def bucket(self) -> Bucket:
        assert self.account is not None
        assert self.account.produced is not None
        return self.account.produced


class Site:
    """Workers, their clients and their supervisor, with a simulated clock."""

    def __init__(self, workers: int, clients: int) -> None:
        self.now = 100.0
        self.ledger = Ledger(workers)
        self.reference = Bucket(RATE)
        self.used = 0.0
        # The most that may be in excess: each client may begin one more request, and a new process knows no use.
        self.slack = REQUEST * workers * clients
        self.restart_slack = REQUEST * clients + RATE / workers * BURST_S
        self.workers = [self.started(number, workers, clients) for number in range(workers)]
        for number in range(workers):
            self.ledger.serve(number)

    def started(self, number: int, workers: int, clients: int) -> Worker:
        accounts = Accounts(1 / workers)
        accounts.set_parts(self.ledger.begin(number), self.now)
        return Worker(accounts, [Client() for _ in range(clients)], Quotas(QUOTAS, accounts).account(ALICE, ""))

    def step(self, busy: set[int]) -> None:
        """Let the clients at these workers send as much as they may."""
        self.now += STEP_S
        for number, worker in enumerate(self.workers):
            if worker.account is None or number not in busy:
                continue
            for client in worker.clients:
                for _ in range(REQUESTS_A_STEP):
                    if client.resumes_at > self.now or client.is_held(worker.account, self.now):
                        break
                    wait = worker.account.use(self.now, produced=REQUEST, fetched=0)
                    self.reference.use(REQUEST, self.now)
                    self.used += REQUEST
                    client.resumes_at, client.ends_at = self.now + wait, self.now + LONGEST_WAIT_S

    def report(self, number: int) -> None:
        worker = self.workers[number]
        if worker.accounts is not None:
            worker.outbox.append(worker.accounts.uses(self.now, MOST_CHANGES))

    def hear(self, number: int, which: int = 0) -> None:
        """Deliver a message to the supervisor, not necessarily the first one."""
        outbox = self.workers[number].outbox
        message = outbox.pop(which % len(outbox))
        if isinstance(message, int):
            self.ledger.applied(number, message)
        else:
            self.ledger.report(number, message, {})

    def round(self) -> None:
        for number, changes in self.ledger.round().items():
            self.workers[number].inbox.append(changes)

    def apply(self, number: int) -> None:
        worker = self.workers[number]
        changes = worker.inbox.popleft()
        if worker.accounts is not None:
            worker.accounts.set_parts(changes.parts, self.now)
            worker.outbox.append(changes.number)

    def second(self, busy: set[int], fates: Sequence[str] = (PROMPT,) * 99, seconds: float = 1.0) -> None:
        """Run all clients at the busy workers for a second or less, then deliver messages by each worker's fate."""
        for _ in range(round(seconds / STEP_S)):
            self.step(busy)
        for number, worker in enumerate(self.workers):
            fate = fates[number]
            self.report(number)
            if fate == LOST:
                worker.outbox.clear()
                worker.inbox.clear()
            elif fate == LATE and worker.outbox:
                # Deliver the last message out of order, and again later.
                worker.outbox.append(worker.outbox[-1])
                self.hear(number, -1)
            elif fate != SILENT:
                while worker.outbox:
                    self.hear(number)
        self.round()
        for number, worker in enumerate(self.workers):
            while worker.inbox and fates[number] in (PROMPT, LATE, APPLIES):
                self.apply(number)
            while worker.outbox and fates[number] == PROMPT:
                self.hear(number)

    def end(self, number: int) -> None:
        self.workers[number] = Worker(None)

    def check(self) -> None:
        alive = [worker for worker in self.workers if worker.account is not None]
        assert sum(worker.bucket.rate for worker in alive) <= RATE * (1 + 1e-9)
        assert all(worker.bucket.rate >= RATE / len(self.workers) * LEAST / PARTS * (1 - 1e-9) for worker in alive)
        self.reference.use(0, self.now)
        assert self.reference.level <= RATE * BURST_S + self.slack


class Shares(RuleBasedStateMachine):
    @initialize(workers=st.integers(2, 4), clients=st.integers(1, 2))
    def begin(self, workers: int, clients: int) -> None:
        self.site = Site(workers, clients)
        self.clients = clients

    @rule(
        busy=st.sets(st.integers(0, 3), max_size=4),
        rounds=st.integers(1, 5),
        seconds=st.sampled_from([STEP_S, 1.0]),
        fates=st.lists(st.sampled_from(FATES), min_size=4, max_size=4),
    )
    def use(self, busy: set[int], rounds: int, seconds: float, fates: list[str]) -> None:
        for _ in range(rounds):
            self.site.second(busy, fates, seconds)
            self.site.check()

    @rule(number=st.integers(0, 3))
    def crash(self, number: int) -> None:
        """End a process without the knowledge of the supervisor."""
        self.site.end(number % len(self.site.workers))

    @precondition(lambda self: any(worker.account is None for worker in self.site.workers))
    @rule(serves=st.booleans(), starts=st.booleans())
    def reap(self, serves: bool, starts: bool) -> None:
        site = self.site
        for number, worker in enumerate(site.workers):
            if worker.account is None:
                site.ledger.end(number)
                if starts:
                    site.workers[number] = site.started(number, len(site.workers), self.clients)
                    site.slack += site.restart_slack
                    if serves:
                        site.ledger.serve(number)

    @invariant()
    def keeps_to_the_rate(self) -> None:
        if hasattr(self, "site"):
            self.site.check()


Shares.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=25, deadline=None)
test_clients_together_keep_to_the_rate = Shares.TestCase


@pytest.mark.parametrize("workers", [2, 4, 64])
def test_one_connection_gets_nearly_all_within_seconds(workers: int) -> None:
    site = Site(workers, 1)
    for _ in range(6):
        site.second({1})
    assert site.workers[1].bucket.rate >= 0.95 * RATE
    before = site.used
    for _ in range(10):
        site.second({1})
    assert 0.94 * RATE * 10 <= site.used - before <= 1.1 * RATE * 10
    site.check()


def test_later_worker_gets_same_share_as_earlier() -> None:
    site = Site(2, 1)
    for _ in range(5):
        site.second({0})
    # The worker has the least share, and reports its use at once.
    before = site.used
    site.step({1})
    assert site.used > before
    for _ in range(5):
        site.second({0, 1})
    assert [worker.bucket.rate for worker in site.workers] == [RATE / 2, RATE / 2]
    # One worker ends, and the other has almost the whole rate again.
    for _ in range(6):
        site.second({1})
    assert site.workers[1].bucket.rate >= 0.95 * RATE
    site.check()


def test_duplicate_message_is_counted_once() -> None:
    ledger = Ledger(2)
    for number in range(2):
        ledger.begin(number)
        ledger.serve(number)
    key = b"key"
    ledger.report(0, [(key, PARTS, True)], {})
    first = ledger.round()[1]
    ledger.applied(1, first.number)
    second = ledger.round()[1]
    assert second.parts[key] < first.parts[key]
    ledger.applied(1, first.number)
    # The worker has not applied the second change, so it holds the first share.
    assert ledger.begin(1) == first.parts


def test_silent_worker_keeps_its_share() -> None:
    site = Site(2, 1)
    busy = {0, 1}
    for _ in range(3):
        site.second(busy)
    for _ in range(20):
        for _ in range(20):
            site.step({0})
        site.report(0)
        while site.workers[0].outbox:
            site.hear(0)
        # The other worker reports no more use.
        site.ledger.report(1, [], {})
        site.round()
        while site.workers[0].inbox:
            site.apply(0)
        site.check()
    assert site.workers[0].bucket.rate == RATE / 2
    assert len(site.workers[1].inbox) == 1
    # The worker's share is free once its end is known.
    site.end(1)
    site.ledger.end(1)
    for _ in range(3):
        site.second({0})
    assert site.workers[0].bucket.rate >= 0.95 * RATE
    # The new worker begins with the least share.
    site.workers[1] = site.started(1, 2, 1)
    assert site.workers[1].bucket.rate == RATE / 2 * LEAST / PARTS
    site.check()


def test_unused_rates_become_equal_again_and_are_forgotten() -> None:
    site = Site(2, 1)
    for _ in range(5):
        site.second({0})
    for _ in range(QUIET_ROUNDS + 5):
        site.second(set())
    assert [worker.bucket.rate for worker in site.workers] == [RATE / 2, RATE / 2]
    assert site.ledger.round() == {}
    assert site.ledger.begin(0) == {}


def test_shared_rates_and_messages_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MOST_RATES", 30)
    monkeypatch.setattr(shares, "MOST_CHANGES", 10)
    ledger = Ledger(2)
    for number in range(2):
        ledger.begin(number)
        ledger.serve(number)
    for at in range(10):
        uses = [(bytes((at, n)), 2_000, True) for n in range(10)]
        ledger.report(0, uses, {})
        told = ledger.round()
        assert all(len(changes.parts) <= 10 for changes in told.values())
        for number, changes in told.items():
            ledger.applied(number, changes.number)
    assert len(ledger.begin(1)) <= 30
    assert MOST_RATES == 4_000


@pytest.mark.parametrize(
    ("uses", "held", "aims"),
    [
        ([(900, True), (0, False)], [1_000, 1_000], [1_750, 250]),
        ([(900, True), (900, True)], [1_900, 100], [1_000, 1_000]),
        ([(900, True), (400, False), (0, False)], [1_000, 1_000, 100], [2_450, 500, 50]),
        ([(900, True), (5_000, False)], [1_000, 1_000], [1_000, 1_000]),
    ],
)
def test_worker_with_higher_need_gets_the_rest_equally(
    uses: list[tuple[int, bool]], held: list[int], aims: list[int]
) -> None:
    assert aims_of(uses, held) == aims
    assert sum(aims) <= PARTS * len(uses)


def test_connections_of_ended_workers_are_not_counted() -> None:
    ledger = Ledger(3)
    for number in range(3):
        ledger.begin(number)
        ledger.serve(number)
    ledger.report(0, [], {b"a": 2, b"b": 1})
    ledger.report(1, [], {b"a": 3})
    told = ledger.round()
    assert [told[number].elsewhere for number in range(3)] == [{b"a": 3}, {b"a": 2, b"b": 1}, {b"a": 5, b"b": 1}]
    for number, changes in told.items():
        ledger.applied(number, changes.number)
    assert ledger.round() == {}
    ledger.end(1)
    assert {number: changes.elsewhere for number, changes in ledger.round().items()} == {
        0: {},
        2: {b"a": 2, b"b": 1},
    }
