"""Hold the objects that all client connections of one proxy share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

from kproxy.claims.service import OwnService
from kproxy.config import Limits
from kproxy.etcd import IdBlocks
from kproxy.observe.tally import Tally
from kproxy.plain import ReceiveArena
from kproxy.proxy.access import AccessControl
from kproxy.proxy.answer_memory import AnswerMemory
from kproxy.proxy.api_versions import NO_CAPS, offer
from kproxy.proxy.apis import APIS, NO_RANGES, Range
from kproxy.proxy.broker_watch import Brokers
from kproxy.proxy.coordinators import Coordinators, LeasedCoordinators
from kproxy.proxy.dialling import Dialler
from kproxy.proxy.long_answers import Portions, Shared
from kproxy.proxy.memory_budget import Budget
from kproxy.routing.fleet import Fleet
from kproxy.routing.retry import LEASED, BrokerSemantics
from kproxy.routing.topology import Topology
from kproxy.runtime.tasks import Turns
from kproxy.security.broker_auth import BrokerAuth
from kproxy.security.quotas import Quotas
from kproxy.trail.trail import Trail
from kproxy_codec.api_keys import FIND_COORDINATOR, INIT_PRODUCER_ID, OWN
from kproxy_codec.primitives import Buffer


class OwnershipSource(Protocol):
    """The source of the topology."""

    def refresh(self, topic: bytes, partition_index: int, seen_revision: int) -> Awaitable[object]:
        """Read one partition's owner again after a broker refused a request routed at `seen_revision`; shared."""
        ...


@dataclass
class ProxyContext:
    """The objects that all sessions share, on one event loop."""

    topology: Topology
    source: OwnershipSource
    fleet: Fleet
    limits: Limits
    clock: Callable[[], float]
    random: Random
    # How brokers are accessed; by default in plain text.
    broker_auth: BrokerAuth = field(default_factory=BrokerAuth)
    arena: ReceiveArena = field(default_factory=ReceiveArena)
    counters: Counter[str] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)
    semantics: BrokerSemantics = LEASED
    # Whether brokers confirm acks=0 requests.
    confirm_acks0: bool = False
    # Highest versions by API key that the ownership source allows, if lower than those that the proxy serves.
    version_caps: Mapping[int, int] = field(default_factory=lambda: NO_CAPS)
    # Producer ids, for where brokers give none out (kproxy.proxy.apis); None: the proxy has none.
    producer_ids: IdBlocks | None = None
    # Coordinators by leases in etcd, where brokers do not tell of them.
    leased_coordinators: LeasedCoordinators | None = None
    found_coordinators: Coordinators = field(default_factory=Coordinators)
    # The Own API's service; None without an etcd for the claims.
    own: OwnService | None = None
    # The SASL APIs, if a listener authenticates clients by it.
    sasl_apis: Mapping[int, Range] = field(default_factory=lambda: NO_RANGES)
    # Returns the current quotas; None: clients have none.
    quotas: Callable[[], Quotas] | None = None
    # The permissions of clients; None: all.
    access: AccessControl | None = None
    # Records acknowledgements; None: they are not recorded.
    trail: Trail | None = None
    portions: Portions = field(default_factory=Portions)
    # Bodies of answers to Metadata requests for all topics; None if no broker has answered.
    all_topics: Shared[Buffer | None] = field(default_factory=Shared)
    dialler: Dialler = field(init=False)
    brokers: Brokers = field(init=False)
    # Paces the work of many connections that end, lose their broker or follow the topology at once.
    turns: Turns = field(init=False)
    budget: Budget = field(init=False)
    answer_memory: AnswerMemory = field(init=False)

    def __post_init__(self) -> None:
        own_means = {
            INIT_PRODUCER_ID: self.producer_ids is not None,
            FIND_COORDINATOR: self.leased_coordinators is not None,
            OWN: self.own is not None,
        }
        can_answer = {key: APIS[key].versions for key, has_means in own_means.items() if has_means}
        can_answer |= self.sasl_apis
        self.dialler = Dialler(self.clock, self.broker_auth, self.arena, self.tally)
        self.brokers = Brokers(
            self.topology,
            self.limits,
            self.tally,
            self.dialler,
            partial(offer, caps=self.version_caps, can_answer=can_answer),
        )
        self.turns = Turns(self.clock)
        self.budget = Budget(self.limits.max_in_flight_bytes_total)
        self.answer_memory = AnswerMemory(self.budget, self.clock)

    def change(self, limits: Limits) -> None:
        """Use other limits; limits of a single connection apply to later connections only."""
        self.limits = limits
        self.brokers.change(limits)
        self.budget.total = limits.max_in_flight_bytes_total
        self.answer_memory.follow_total()
        if self.trail is not None:
            self.trail.deadline_cap_ms = limits.deadline_cap_ms
        if self.own is not None:
            self.own.timeout_s = limits.own_timeout_s
            self.own.unsettled.unsettled_s = limits.own_unsettled_s

    @property
    def coordinators(self) -> Coordinators | LeasedCoordinators:
        """The known coordinators: by leases where the proxy itself names them to clients, or else as brokers say."""
        leased = self.leased_coordinators if FIND_COORDINATOR in self.brokers.offered.native else None
        return leased or self.found_coordinators

    @property
    def keeps_producer_state(self) -> bool:
        """As in `retry.BrokerSemantics`, for brokers that allocate producer ids.

        Other brokers ignore the ids, which come from this proxy.
        """
        return self.semantics.keeps_producer_state and self.brokers.keep_producer_state
