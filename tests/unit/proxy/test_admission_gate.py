"""One client's gate: which clients it admits, when it closes, and which clients it drops. Its session is a recorder."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import pytest

from kproxy.config.principal_rules import PrincipalMapping, parse_rules
from kproxy.config.quotas import QuotaSection
from kproxy.proxy import admission as admissions
from kproxy.proxy.admission import Admission, Gate, NotAdmitted, OpenConnections
from kproxy.proxy.client_identity import NotJudged
from kproxy.proxy.client_session import ClientSession
from kproxy.security.mechanisms import Refused, Servers, Step, servers
from kproxy.security.principals import ANONYMOUS, Principal
from kproxy.security.quotas import Quotas
from kproxy.security.sasl import Times
from kproxy.security.sasl_client import Credential
from kproxy.security.users import Users
from kproxy_codec import api_keys as keys
from kproxy_codec.control import decode_response
from kproxy_codec.framing import response_body_offset
from tests.support.clients.raw_client import control_frame
from tests.support.security import sasl_client as client

ALICE = {"subject": ((("commonName", "alice"),),)}


class Slot:
    """A slot of one answer."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def fill(self, buffers: Sequence[bytes]) -> None:
        self.frames.extend(buffers)


class Session:
    """The session behind the gate, which records its calls. `judge` stands for the brokers."""

    def __init__(self) -> None:
        self.peer = "192.0.2.1:50000"
        self.slots: list[Slot] = []
        self.done: list[str] = []
        self.principal: Principal | None = None
        self.refusals: list[str] = []
        self.carried: list[tuple[Credential, float]] = []
        self.judge: Callable[[Step], Step | Refused] = lambda step: step
        self.pressures: list[bool] = []
        self.broker_presses = self.pressures.append

    def place(self, frame: memoryview) -> Slot:
        self.slots.append(Slot())
        return self.slots[-1]

    async def carry(self, step: Step, credential: Credential, within_s: float) -> Step | Refused:
        self.carried.append((credential, within_s))
        return self.judge(step)

    def admit(self, principal: Principal) -> None:
        self.done.append("admit")
        self.principal = principal

    def guard(self) -> None:
        self.done.append("guard")

    def refuse(self, error: Exception) -> None:
        assert isinstance(error, NotAdmitted)
        self.refusals.append(str(error))

    def drain(self) -> None:
        self.done.append("drain")

    def dismiss(self, reason: str) -> None:
        self.done.append(reason)


class Site:
    """An admission, and gates of it; by default with the users of `sasl_client.USERS` and PLAIN."""

    def __init__(self, *, by_certificate: bool = False, carries: bool = False, **options: Any) -> None:
        known = client.users()
        self.clock = client.Clock()
        self.counters = Counter[str]()
        offered: Servers | None = servers(("PLAIN",), lambda: known, lambda: None)
        if carries:
            offered = servers(("PLAIN",), lambda: None, lambda: None, unverified_claim="sub")
        self.admission = Admission(
            None if by_certificate else offered,
            Times(self.clock, self.clock, options.pop("lifetime_s", 0.0)),
            counters=self.counters,
            carries=carries,
            **options,
        )

    def enter(self, certificate: object = None, address: str = "192.0.2.1") -> tuple[Gate, Session, list[bool]]:
        session = Session()
        gate = Gate(self.admission, cast(ClientSession, session))
        gate.connected(certificate, address)
        return gate, session, session.pressures


async def take(gate: Gate, frame: bytes) -> bool:
    """Let the gate take a frame, and its step finish."""
    taken = gate.take(memoryview(frame), 0.0, {})
    while (task := gate._task) is not None and not task.done():
        await asyncio.sleep(0)
    return taken


async def prove(gate: Gate, name: str = "alice", password: str = "alice-secret") -> None:
    await take(gate, client.authenticate(client.plain(name, password)))


async def log_in(gate: Gate, name: str = "alice", password: str = "alice-secret") -> None:
    await take(gate, client.handshake("PLAIN"))
    await prove(gate, name, password)


async def admitted(site: Site, name: str = "alice") -> tuple[Gate, Session]:
    """A client that has logged in."""
    gate, session, _ = site.enter()
    await log_in(gate, name, f"{name}-secret")
    assert session.done == ["admit"]
    return gate, session


def renew(gate: Gate) -> Slot:
    """Begin to authenticate again; the slot gets the answer."""
    slot = Slot()
    gate.renew(memoryview(client.handshake("PLAIN")), slot)  # type: ignore[arg-type]
    return slot


def answer(slot: Slot, api_key: int, version: int) -> Any:
    (frame,) = slot.frames
    view = memoryview(frame)
    return decode_response(api_key, version, view[response_body_offset(view, api_key, version) :])


async def test_client_with_password_is_admitted_once() -> None:
    site = Site()
    gate, session, pressures = site.enter()
    assert not await take(gate, control_frame(keys.API_VERSIONS, 0))
    assert not session.slots
    assert await take(gate, client.handshake("PLAIN"))
    assert session.done == []
    assert pressures == []
    await prove(gate)
    assert pressures == [True, False]
    assert session.principal == Principal("alice")
    assert session.done == ["admit"]
    shaken, proved = session.slots
    assert answer(shaken, keys.SASL_HANDSHAKE, 1).error_code == 0
    assert answer(proved, keys.SASL_AUTHENTICATE, 2).error_code == 0
    assert site.counters == {"sasl.succeeded.PLAIN": 1}
    # The session is authenticated, so the timeout for authentication no longer applies.
    gate.look(site.clock() + 1e6)
    assert session.refusals == []
    assert session.done == ["admit"]
    await gate.close()


async def test_wrong_password_is_answered_late_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    asleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asleep(0)

    monkeypatch.setattr(admissions.asyncio, "sleep", sleep)
    site = Site()
    gate, session, pressures = site.enter()
    await log_in(gate, password="wrong")
    assert admissions.REFUSAL_DELAY_S in slept
    assert (session.done, session.principal, session.refusals) == (["drain"], None, [])
    refusal = answer(session.slots[1], keys.SASL_AUTHENTICATE, 2)
    assert (refusal.error_code, refusal.error_message) == (58, "Authentication failed: Invalid username or password")
    assert site.counters == {"sasl.failed.PLAIN": 1}
    assert pressures == [True, False]


async def test_request_before_authentication_is_refused_at_once() -> None:
    site = Site()
    gate, session, pressures = site.enter()
    assert await take(gate, control_frame(keys.METADATA, 1, topics=None))
    assert len(session.refusals) == 1
    assert (session.done, session.slots[0].frames, pressures) == ([], [], [])
    assert site.counters == {"sasl.failed.": 1}
    await take(gate, control_frame(keys.API_VERSIONS, 0))
    assert len(session.refusals) == 2


async def test_error_of_mechanism_admits_nobody() -> None:
    site = Site()

    class Broken:
        is_slow = False
        user = ""

        def step(self, token: bytes) -> Step:
            raise RuntimeError("a bug")

    site.admission.servers = {"PLAIN": Broken}
    gate, session, pressures = site.enter()
    await log_in(gate)
    assert (session.refusals, session.principal) == (["an error here, see the log"], None)
    assert pressures == [True, False]
    await log_in(gate)
    assert session.principal is None


async def test_authentication_has_a_time_limit() -> None:
    site = Site(timeout_s=4.0)
    gate, session, _ = site.enter()
    gate.look(site.clock() + 4.0)
    assert session.refusals == []
    gate.look(site.clock() + 4.1)
    assert session.refusals == ["it has not authenticated within 4 s"]
    assert site.counters == {"sasl.timed_out.": 1}
    # The client is counted once, and its later credential is refused.
    gate.look(site.clock() + 5)
    assert site.counters == {"sasl.timed_out.": 1}
    await log_in(gate)
    assert session.principal is None


async def test_session_is_renewed_before_other_requests() -> None:
    site = Site(lifetime_s=10.0, timeout_s=4.0)
    gate, session = await admitted(site)
    began = site.clock.now
    gate.look(began + 9.9)
    assert session.done == ["admit"]
    gate.look(began + 10.0)
    assert session.done == ["admit", "guard"]
    # The session may idle for long; a renewal has the full timeout, counted from its first request.
    site.clock.now = began + 3_600
    gate.look(site.clock.now)
    assert session.refusals == []
    await take(gate, client.handshake("PLAIN"))
    gate.look(site.clock.now + 4.0)
    assert session.refusals == []
    await prove(gate)
    assert session.done == ["admit", "guard", "admit"]
    gate.look(site.clock.now + 9.9)
    assert session.done == ["admit", "guard", "admit"]
    gate.look(site.clock.now + 10)
    assert session.done[3:] == ["guard"]
    # Any other request ends the session.
    await take(gate, control_frame(keys.METADATA, 1, topics=None))
    assert len(session.refusals) == 1


async def test_renewal_that_takes_too_long_ends_client() -> None:
    site = Site(timeout_s=4.0)
    gate, session = await admitted(site)
    site.clock.now += 100
    assert len(renew(gate).frames) == 1
    assert session.done == ["admit", "guard"]
    gate.look(site.clock.now + 3.9)
    assert session.refusals == []
    gate.look(site.clock.now + 4.1)
    assert len(session.refusals) == 1


async def test_early_renewal_is_refused_without_closing() -> None:
    site = Site()
    gate, session = await admitted(site)
    assert len(renew(gate).frames) == 1
    assert session.done == ["admit"]
    site.clock.now += 2
    renew(gate)
    await prove(gate, "bob", "bob-secret")
    assert session.principal == Principal("alice")
    assert session.done == ["admit", "guard", "drain"]


async def test_sasl_is_refused_where_certificates_authenticate() -> None:
    gate, session, _ = Site(by_certificate=True).enter(ALICE)
    assert answer(renew(gate), keys.SASL_HANDSHAKE, 1).error_code == 34
    assert session.done == ["admit"]


def test_certificate_names_principal() -> None:
    site = Site(by_certificate=True, mapping=PrincipalMapping(parse_rules("RULE:^CN=(a.*)$/$1/U")))
    _, session, _ = site.enter(ALICE)
    assert session.principal == Principal("ALICE")
    _, session, _ = site.enter({"subject": ((("commonName", "bob"),),)})
    assert (session.principal, session.refusals) == (None, ["its certificate's name matches no rule"])
    _, session, _ = site.enter()
    assert session.principal is ANONYMOUS
    # With SASL a certificate does not authenticate.
    _, session, _ = Site().enter(ALICE)
    assert (session.principal, session.done) == (None, [])


# Rules, and names that each would take years to match: their parts, in the name's order.
A: Final = "a" * 1_900
KAFKAS: Final = "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L"
EXPLODING: Final[dict[str, list[tuple[str, str]]]] = {
    # A rule from Kafka's documentation: each part may begin in many places.
    KAFKAS: [
        ("commonName", "a"),
        *[
            ("organizationalUnitName", "a"),
            ("organizationName", "b"),
            ("localityName", "c"),
            ("stateOrProvinceName", "d"),
        ]
        * 150,
    ],
    "RULE:^CN=(([a-z]+)+),OU=([^,]+),.*$/$1/": [("commonName", A)],
    "RULE:^CN=((.|..)+),OU=([^,]+),.*$/$1/": [("commonName", A)],
    "RULE:^CN=.*a.*a.*a.*,OU=([^,]+),.*$/$1/": [("commonName", A)],
}


@pytest.mark.parametrize("rule", EXPLODING)
def test_slow_rule_admits_nobody(rule: str) -> None:
    site = Site(by_certificate=True, mapping=PrincipalMapping(parse_rules([rule, "DEFAULT"])))
    honest = subject_of([("commonName", "banana"), *EXPLODING[KAFKAS][1:5], ("countryName", "DE")])
    for _ in range(2):
        _, session, _ = site.enter(honest)
        assert session.principal is not None
        assert not session.principal.name.startswith("CN=")
        _, session, _ = site.enter(subject_of(EXPLODING[rule]))
        assert session.refusals == ["the rules for its certificate's names took more than 0.02 s"]
        assert session.done == []


def subject_of(parts: list[tuple[str, str]]) -> dict[str, Any]:
    return {"subject": tuple((part,) for part in reversed(parts))}


async def test_connections_of_address_are_limited() -> None:
    site = Site(by_certificate=True, most_of_an_address=2)
    first = site.enter()[0]
    assert site.enter()[1].done == ["admit"]
    refused, session, _ = site.enter()
    assert session.refusals == ["its address has more than 2 connections"]
    assert (session.done, site.counters) == ([], {"clients.too_many": 1})
    assert site.enter(address="192.0.2.2")[1].done == ["admit"]
    await refused.close()
    assert site.enter()[1].done == []
    await first.close()
    assert site.admission.connections.by_address["192.0.2.1"] == 2


async def test_connections_of_principal_are_limited() -> None:
    limits = Quotas([QuotaSection(principal="User:alice", connections=1)])
    site = Site(quotas=lambda: limits)
    gate, _ = await admitted(site)
    second, refused, _ = site.enter()
    await log_in(second)
    assert (refused.done, refused.refusals) == ([], ["User:alice has more than 1 connections"])
    assert site.counters["clients.too_many"] == 1
    await admitted(site, "bob")
    await second.close()
    # A renewal counts nothing twice.
    site.clock.now += 2
    renew(gate)
    await prove(gate)
    assert site.admission.connections.by_principal == {"alice": 1, "bob": 1}
    await gate.close()
    assert site.admission.connections.by_principal == {"bob": 1}
    await admitted(site)


def test_connections_at_other_workers_count_too() -> None:
    here, there = OpenConnections(), OpenConnections()
    there.by_address["192.0.2.1"] = 3
    there.by_principal["alice"] = 2
    there.by_principal["bob"] = 1
    assert here.of_address("192.0.2.1") == 0
    here.elsewhere = there.counts(2)
    assert len(here.elsewhere) == 2
    here.by_address["192.0.2.1"] = 1
    assert (here.of_address("192.0.2.1"), here.of_address("alice")) == (4, 0)
    # The addresses and principals with the most clients were reported.
    assert (here.of_principal("alice"), here.of_principal("bob")) == (2, 0)
    here.elsewhere = there.counts(3)
    assert here.of_principal("bob") == 1


async def test_brokers_judge_forwarded_identity() -> None:
    site = Site(carries=True, timeout_s=4.0)
    gate, session, _ = site.enter()
    await take(gate, client.handshake("PLAIN"))
    site.clock.now += 1
    await prove(gate, "carol", "x")
    ((credential, within_s),) = session.carried
    assert credential.first() == client.plain("carol", "x")
    assert within_s == pytest.approx(4.0 * 0.9 - 1)
    assert session.principal == Principal("carol")


@pytest.mark.parametrize("is_judged", [True, False])
async def test_identity_refused_by_all_brokers_is_not_admitted(is_judged: bool) -> None:
    def judge(step: Step) -> Step | Refused:
        if is_judged:
            return Refused("no carol here", "no such user")
        raise NotJudged("no broker answers")

    site = Site(carries=True)
    gate, session, _ = site.enter()
    session.judge = judge
    await log_in(gate, "carol", "x")
    assert session.principal is None
    assert site.counters == {"sasl.failed.PLAIN": 1}
    if is_judged:
        assert answer(session.slots[1], keys.SASL_AUTHENTICATE, 2).error_message == "no such user"
        assert (session.done, session.refusals) == (["drain"], [])
    else:
        assert (session.done, session.refusals) == ([], ["no broker answers"])


async def test_end_of_brokers_session_ends_clients() -> None:
    site = Site(carries=True)
    gate, session, _ = site.enter()
    session.judge = lambda step: step._replace(lifetime_s=5.0)
    await log_in(gate, "carol", "x")
    gate.look(site.clock.now + 4.9)
    assert session.done == ["admit"]
    gate.look(site.clock.now + 5.0)
    assert session.done == ["admit", "guard"]


async def test_credential_that_fails_here_reaches_no_broker() -> None:
    site = Site(carries=True)
    gate, session, _ = site.enter()
    await log_in(gate, "carol", "x")
    site.clock.now += 2
    renew(gate)
    await prove(gate, "dave", "x")
    assert len(session.carried) == 1
    assert session.done == ["admit", "guard", "drain"]
    # A session whose listener checks certificates is not counted either.
    _, session = await admitted(Site())
    assert session.carried == []


async def test_removed_user_is_disconnected() -> None:
    present = [client.users()]
    site = Site(users=lambda: present[-1])
    (alice, of_alice), (bob, of_bob) = [await admitted(site, name) for name in ("alice", "bob")]
    present.append(client.users("alice"))
    for gate in (alice, bob) * 2:
        gate.look(site.clock.now)
    assert (of_alice.done, of_bob.done) == (["admit"], ["admit", "its user was removed"])
    # A user that was added again is another user.
    present.append(Users({"alice": client.credentials_of("alice")}, {"alice": 7}))
    alice.look(site.clock.now)
    assert of_alice.done == ["admit", "its user was removed"]


async def test_authentication_step_ends_with_its_connection() -> None:
    site = Site(carries=True)
    gate, session, _ = site.enter()
    forever = asyncio.Event()

    async def carry(step: Step, credential: Credential, within_s: float) -> Mapping[str, object]:
        await forever.wait()
        raise AssertionError

    session.carry = carry  # type: ignore[assignment,method-assign]
    gate.take(memoryview(client.handshake("PLAIN")), 0.0, {})
    gate.take(memoryview(client.authenticate(client.plain("carol", "x"))), 0.0, {})
    await asyncio.sleep(0)
    await gate.close()
    assert gate._task is not None
    assert gate._task.done()
    assert session.principal is None


async def test_handshake_v0_is_refused_unless_allowed() -> None:
    for site, is_refused in ((Site(), True), (Site(allows_v0=True), False)):
        gate, session, _ = site.enter()
        await take(gate, client.handshake("PLAIN", 0))
        assert bool(session.refusals) == is_refused
