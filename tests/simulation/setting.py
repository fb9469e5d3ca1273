"""Draw the setting of a world and its faults from its seed, before the world begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from kproxy.routing.retry import KAFKA, LEASED, BrokerSemantics

KINDS: Final = ("plain", "idempotent", "transactional", "silent")
# The writer group of the gated topic.
WRITERS: Final = "writers"
# The share of all worlds.
WITH_CLAIMS: Final = 0.05
# The duration of the trouble in worlds with claims: claims take time.
CLAIMS_S: Final = 4.0
# The share of worlds with slow re-reads, and how long each takes: longer than the back-offs of three attempts.
WITH_SLOW_REREADS: Final = 0.03
REREAD_S: Final = 0.25


@dataclass(frozen=True)
class Move:
    """A partition moves from its broker to the broker `to`; times in seconds.

    From `at` on no broker serves it, from `taken_at` on `to` owns it, and from `served_at` on `to` serves it. The proxy
    learns this `told_after_s` after `taken_at`, or (None) not by itself; if `is_released` it also learns that the
    partition has no owner.
    """

    at: float
    partition: int
    to: int
    taken_at: float
    served_at: float
    told_after_s: float | None
    is_released: bool


@dataclass(frozen=True)
class Trouble:
    """A fault of a broker for a while: `crash`, `hang`, `stall`, `deaf`, `readdress`, `leave`, `cut`."""

    at: float
    kind: str
    broker: int
    lasts_s: float


@dataclass(frozen=True)
class ClientSetting:
    """One client: `count` requests, one every `pace_s`, each for some of `partitions`."""

    kind: str
    count: int
    partitions: tuple[int, ...]
    in_flight: int
    acks: int
    timeout_ms: int
    versions: tuple[int, ...]
    leaves: float
    reads: float
    pace_s: float
    padding: int


@dataclass(frozen=True)
class LeaseTrouble:
    """A fault of the lease in etcd behind a proxy's claims: `suspend` and `late`."""

    at: float
    kind: str
    proxy: int
    lasts_s: float


@dataclass(frozen=True)
class ClaimSetting:
    """The claims of a world with claims: `topic` has a writer group.

    `fenced`: the brokers keep fences. A message to etcd takes up to `etcd_way_s`. `lapses` is how often a proxy loses
    the lease behind its claims when a claimant's request is refused.
    """

    topic: str
    proxies: int
    fenced: bool
    ttl_s: int
    etcd_way_s: float
    lapses: float
    troubles: tuple[LeaseTrouble, ...]


@dataclass(frozen=True)
class Setting:
    """One world. `trouble_s` is the duration of its trouble; rates are shares of requests or of batches.

    `limits` are the proxy's limits that differ from the defaults. The proxy does not know the id of a topic in
    `late_ids` before that time. In a world with `claims` only claimants use the last topic. In a world with
    `slow_rereads` moves are the only faults, and the proxy learns of them only by re-reads.
    """

    seed: int
    semantics: BrokerSemantics
    knows_again: bool
    confirm_acks0: bool
    brokers: int
    topics: tuple[int, ...]
    trouble_s: float
    fates: float
    codes: float
    lies: bool
    cuts: float
    latency_s: float
    limits: Mapping[str, float]
    late_ids: Mapping[int, float]
    clients: tuple[ClientSetting, ...]
    moves: tuple[Move, ...]
    troubles: tuple[Trouble, ...]
    claims: ClaimSetting | None = None
    slow_rereads: bool = False


def draw(seed: int, *, claims: bool = False, slow_rereads: bool = False) -> Setting:
    """The setting of the world with this seed; on request one with claims, or one with slow re-reads."""
    setting = _draw(seed)
    random = Random(f"rereads {seed}")
    if slow_rereads or (random.random() < WITH_SLOW_REREADS and not claims):
        return _with_slow_rereads(setting, random)
    # Worlds without claims are the same as before claims were added.
    random = Random(f"claims {seed}")
    return _with_claims(setting, random) if random.random() < WITH_CLAIMS or claims else setting


def _draw(seed: int) -> Setting:
    random = Random(seed)
    knows_again = random.random() < 0.8
    brokers = random.randint(3, 5)
    topics = tuple(random.randint(1, 4) for _ in range(random.randint(1, 3)))
    partitions = sum(topics)
    trouble_s = random.choice((0.6, 1.5, 3.0))
    # Recognizing resent batches matters if outcomes are unknown; otherwise brokers that forget do no harm.
    fates = random.choice((0.0, 0.01, 0.03, 0.1))
    late_ids = {topic: random.random() * trouble_s for topic in range(len(topics)) if random.random() < 0.1}
    return Setting(
        seed=seed,
        semantics=random.choice((LEASED, LEASED, KAFKA)),
        knows_again=knows_again,
        confirm_acks0=random.random() < 0.25,
        brokers=brokers,
        topics=topics,
        trouble_s=trouble_s,
        fates=fates,
        codes=random.choice((0.0, 0.01, 0.05, 0.15)),
        lies=random.random() < 0.3,
        cuts=random.choice((0.0, 0.02, 0.1)),
        latency_s=random.choice((0.0003, 0.001, 0.004)),
        limits=_limits(random),
        late_ids=late_ids,
        clients=_clients(random, partitions, trouble_s, mixes_versions=not late_ids),
        moves=_moves(random, brokers, range(partitions), trouble_s, knows_again=knows_again),
        troubles=_troubles(random, brokers, trouble_s),
    )


def _with_claims(setting: Setting, random: Random) -> Setting:
    """The same world with one more topic, which has a writer group, and its claimants: the other clients send half as
    much, and claimants the rest.
    """
    first, count = sum(setting.topics), random.randint(1, 3)
    partitions = range(first, first + count)
    proxies, ttl_s = random.randint(1, 2), random.choice((2, 10, 60))
    etcd_way_s = random.choice((0.0005, 0.002, 0.01))
    troubles = [
        LeaseTrouble(at * CLAIMS_S, kind, proxy, random.random() * random.choice((0.05, 0.3, 1.0)))
        for proxy in range(proxies)
        for kind in ("suspend", "late")
        if random.random() < 0.5
        for at in (random.random() for _ in range(random.randint(1, 4)))
    ]
    limits = {
        "own_timeout_s": random.choice((0.5, 2.0)),
        "own_unsettled_s": random.choice((0.05, 0.3, 1.0)),
    }
    moves = _moves(random, setting.brokers, partitions, CLAIMS_S, knows_again=setting.knows_again)
    ordinary = range(first)
    others = [replace(each, count=(each.count + 1) // 2) for each in setting.clients]
    most = random.randint(2, 4)
    claimants = [_claimant(random, partitions, ordinary, CLAIMS_S, 100 // most) for _ in range(most)]
    return replace(
        setting,
        topics=(*setting.topics, count),
        trouble_s=CLAIMS_S,
        # The interesting batches are those on their way when a claim is lost.
        fates=random.choice((setting.fates, 0.05, 0.2)),
        codes=random.choice((setting.codes, 0.05, 0.2)),
        limits={**setting.limits, **limits},
        clients=(*others, *claimants),
        moves=(*setting.moves, *moves),
        claims=ClaimSetting(
            topic=f"topic-{len(setting.topics)}",
            proxies=proxies,
            # Apache Kafka's brokers keep no fences.
            fenced=setting.semantics is LEASED and random.random() < 0.4,
            ttl_s=ttl_s,
            etcd_way_s=etcd_way_s,
            lapses=random.choice((0.0, 0.05, 0.2)),
            troubles=tuple(troubles),
        ),
    )


def _with_slow_rereads(setting: Setting, random: Random) -> Setting:
    """The same brokers and partitions as Apache Kafka's, whose leaders move now and then."""
    moves: list[Move] = []
    for partition in range(sum(setting.topics)):
        at, owner = random.random(), partition % setting.brokers + 1
        while at < CLAIMS_S:
            owner = owner % setting.brokers + 1
            taken_at = at + random.random() * 0.1
            moves.append(Move(at, partition, owner, taken_at, taken_at, None, is_released=False))
            at = taken_at + 1.5 + random.random()
    # A plain batch with acks=all that a deposed leader has appended is in doubt: it is not sent again.
    clients = [
        replace(each, acks=1 if each.kind == "plain" else -1, timeout_ms=3000, leaves=0.0)
        for each in setting.clients
        if each.kind in ("plain", "idempotent")
    ]
    return replace(
        setting,
        semantics=KAFKA,
        knows_again=True,
        trouble_s=CLAIMS_S,
        fates=0.0,
        codes=0.0,
        lies=False,
        cuts=0.0,
        limits={},
        late_ids={},
        clients=tuple(replace(each, pace_s=CLAIMS_S / each.count) for each in clients),
        moves=tuple(moves),
        troubles=(),
        slow_rereads=True,
    )


def _claimant(random: Random, partitions: range, ordinary: range, trouble_s: float, least: int) -> ClientSetting:
    requests = least + random.randrange(20)
    return ClientSetting(
        kind="claimant",
        count=requests,
        partitions=(*sorted(random.sample(ordinary, random.randint(0, min(2, len(ordinary))))), *partitions),
        in_flight=random.choice((1, 3, 5)),
        acks=random.choice((-1, -1, 1, 0)),
        timeout_ms=random.choice((500, 1000, 3000)),
        versions=(random.randint(3, 13),),
        leaves=random.choice((0.0, 0.02, 0.1)),
        reads=0.0,
        pace_s=trouble_s / requests * random.choice((0.3, 0.8, 1.2)),
        padding=random.choice((8, 60, 200)),
    )


def _limits(random: Random) -> Mapping[str, float]:
    """Limits that are sometimes so low that requests must wait for each other."""
    limits: dict[str, float] = {"connect_timeout_s": random.choice((0.3, 1.0, 1.0, 3.0))}
    if random.random() < 0.15:
        limits["max_open_requests"] = random.choice((2, 4))
    if random.random() < 0.15:
        limits["max_in_flight_bytes"] = random.choice((500, 2_000))
    if random.random() < 0.1:
        limits["max_in_flight_bytes_total"] = 4_000
    if random.random() < 0.2:
        limits["probe_timeout_s"] = 0.5
    return limits


def _clients(random: Random, partitions: int, trouble_s: float, *, mixes_versions: bool) -> tuple[ClientSetting, ...]:
    count = random.randint(4, 6)
    kinds = ["idempotent", "plain", *random.choices(KINDS, (4, 2, 1, 2), k=count - 2)]
    requests = 240 // count + random.randrange(20)
    clients = []
    for kind in kinds:
        lowest = random.randint(3, 13)
        clients.append(
            ClientSetting(
                kind=kind,
                count=requests,
                partitions=tuple(sorted(random.sample(range(partitions), random.randint(1, min(4, partitions))))),
                in_flight=random.choice((1, 2, 5, 5, 5)) if kind != "plain" else random.choice((1, 3, 5, 10)),
                acks={"silent": 0, "plain": random.choice((-1, 1))}.get(kind, -1),
                timeout_ms=random.choice((500, 1000, 1500, 3000)),
                # A request with an unknown topic id may be for the same topic as one with the topic's name.
                versions=(lowest,)
                if random.random() < 0.5 or not mixes_versions
                else tuple(random.randint(3, 13) for _ in range(4)),
                leaves=random.choice((0.0, 0.0, 0.01, 0.04)),
                reads=random.choice((0.0, 0.05, 0.3)),
                pace_s=trouble_s / requests * random.choice((0.3, 0.8, 1.2)),
                padding=random.choice((8, 10, 60, 200, 9_000 if random.random() < 0.1 else 30)),
            )
        )
    return tuple(clients)


def _moves(random: Random, brokers: int, partitions: range, trouble_s: float, *, knows_again: bool) -> tuple[Move, ...]:
    # With brokers that forget, moves matter most.
    a_second = random.choice((0.0, 0.5, 2.0, 5.0) if knows_again else (2.0, 5.0, 8.0))
    moves = []
    for partition in partitions:
        at, owner = 0.0, partition % brokers + 1
        while a_second and (at := at + random.expovariate(a_second)) < trouble_s:
            taken_at = at + (random.random() * random.choice((0.004, 0.05, 0.2)) if random.random() < 0.6 else 0.0)
            served_at = taken_at + (random.random() * random.choice((0.004, 0.05)) if random.random() < 0.5 else 0.0)
            told_after_s = random.random() * random.choice((0.002, 0.02, 0.3)) if random.random() < 0.75 else None
            if knows_again:
                # Sometimes the partition returns to its former broker.
                owner = random.choice((owner, *range(1, brokers + 1)))
            else:
                # A broker that forgets must not be back while batches for it are on their way.
                owner = owner % brokers + 1
                taken_at = at + random.random() * 0.01
                served_at = taken_at + 0.01 + random.random() * 0.04
                told_after_s = random.random() * 0.01
            released = random.random() < 0.2
            moves.append(Move(at, partition, owner, taken_at, served_at, told_after_s, released))
            at = served_at + (0.0 if knows_again else 0.05)
    return tuple(moves)


def _troubles(random: Random, brokers: int, trouble_s: float) -> tuple[Trouble, ...]:
    troubles = []
    for kind, most in (
        ("crash", 3),
        ("hang", 2),
        ("stall", 2),
        ("deaf", 1),
        ("readdress", 1),
        ("leave", 1),
        ("cut", 8),
    ):
        if random.random() < 0.4:
            for _ in range(random.randint(1, most)):
                lasts_s = random.random() * random.choice((0.02, 0.2, 1.0 if kind != "hang" else 4.0))
                troubles.append(Trouble(random.random() * trouble_s, kind, random.randint(1, brokers), lasts_s))
    return tuple(sorted(troubles, key=lambda trouble: trouble.at))
