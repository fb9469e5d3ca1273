"""Simulate clients that claim partitions with the Own API, write while they own them, and lose them to others.

On each new connection a claimant claims again, at one of the proxies: single partitions, or sometimes the whole group.
Half of these claims have a generation that takes the partitions from their claimant. It writes each batch once: to
partitions that it owns, sometimes to partitions that it does not own or not know to own, and to ungated partitions. It
claims until it has sent everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation import clients, wire
from tests.simulation.clients import Client, Connection, Plain, Sent
from tests.simulation.dice import What
from tests.simulation.grants import Holder
from tests.simulation.partitions import POLICY_VIOLATION, Batch, Partition
from tests.simulation.setting import WRITERS, ClientSetting

if TYPE_CHECKING:
    from tests.simulation.world import World

REQUEST_TIMED_OUT: Final = 7
COORDINATOR_NOT_AVAILABLE: Final = 15
FENCED_INSTANCE_ID: Final = 82
REFUSALS: Final = frozenset({REQUEST_TIMED_OUT, COORDINATOR_NOT_AVAILABLE, POLICY_VIOLATION, FENCED_INSTANCE_ID})
BLIND: Final = 0.15
RESETS: Final = 0.1
TAKES: Final = 0.5
CLAIMS_MORE: Final = 0.04
CLAIMS_ALL: Final = 0.05


class Claimant(Plain):
    """A client that claims those of its `partitions` that have a writer group; any client may write the others."""

    def __init__(self, world: World, number: int, setting: ClientSetting, partitions: list[Partition]) -> None:
        super().__init__(world, number, setting, partitions)
        self._claimable = [partition for partition in partitions if partition in world.cluster.gated]
        # For the connection `_on`: the grants with their fences, and whether a claim is not answered yet.
        self._on: Connection | None = None
        self._fences: dict[Partition, int] = {}
        self._is_asking = False
        self._claims = 0
        # The batches written to partitions known to be owned, with the fence.
        self._rightly: dict[int, int] = {}

    def proxy_of(self, ordinal: int) -> int:
        return int(self._dice.at(What.CLAIM, -self.number, ordinal) * len(self.world.proxies))

    def _rests_s(self, drawn: float) -> float:
        # Long enough for others to use what they have claimed.
        return 1.2 * drawn**3

    def _compose(self) -> list[Batch]:
        connection = self.connection
        if not self.left or connection is None:
            return []
        if self._on is not connection:
            self._on, self._fences, self._is_asking = connection, {}, False
        drawn = self._dice.at(What.CLAIM, self.number, self.requests, self.left, self._claims)
        if not self._is_asking and (not self._fences or drawn < CLAIMS_MORE):
            self._claim(connection)
        if drawn > 1 - BLIND:
            wanted = self.partitions
        else:
            wanted = [
                partition
                for partition in self.partitions
                if partition in self._fences or (self._fences and partition not in self.world.cluster.gated)
            ]
        if not wanted:
            return []
        self.left -= 1
        batches = [self._new_batch(partition) for partition in self._some_of(wanted)]
        for batch in batches:
            if batch.partition in self._fences:
                self._rightly[batch.id] = self._fences[batch.partition]
        return batches

    # Claims

    def _claim(self, connection: Connection) -> None:
        self._claims += 1
        self._is_asking = True
        generations = self.world.grants.generations
        drawn = self._dice.at(What.CLAIM, self.number, -self._claims)
        sent = Sent(wire.OWN, 1, -self._claims)
        if drawn >= CLAIMS_ALL:
            sent.partitions = self._some_of(self._claimable)
        named = []
        for partition in sent.partitions:
            kind = self._dice.at(What.CLAIM, -self.number, self._claims, partition.number)
            generation = 0 if kind < RESETS else generations[partition] + 1 if kind < TAKES else 1
            generations[partition] = max(1, generations[partition], generation)
            named.append((str(partition), generation))
        connection.in_flight.append(sent)
        connection.send(wire.own_request(sent.correlation_id, self._name, WRITERS, named or None), sent)

    def patience_s(self, sent: Sent) -> float:
        if sent.api_key != wire.OWN:
            return super().patience_s(sent)
        # The wait also covers a slow etcd, and brokers that do not report what they serve.
        return self.world.limits.own_timeout_s + 15.0

    def _read_answer(self, sent: Sent, frame: bytes) -> tuple[int, wire.Results]:
        return wire.read_own_response(frame, WRITERS) if sent.api_key == wire.OWN else super()._read_answer(sent, frame)

    def _take_answer(self, connection: Connection, sent: Sent, results: wire.Results) -> None:
        if sent.api_key != wire.OWN:
            super()._take_answer(connection, sent, results)
            return
        self._is_asking = False
        entries = [(resource.decode(), code, fence) for resource, ((_, code, fence),) in results]
        asked = [str(partition) for partition in sent.partitions] or [""]
        is_whole = not sent.partitions
        if entries and [resource for resource, _, _ in entries] != asked:
            self.world.found.append(f"{self} claimed {asked} and got {entries}")
        for partition in sent.partitions or self._claimable:
            for resource, code, fence in entries:
                if code == 0 and (is_whole or resource == str(partition)):
                    self._fences[partition] = fence
                    self.world.grants.granted(partition, Holder(self.number, connection.ordinal), fence)
        for _, code, _ in entries:
            self.world.cluster.happened[f"claim: {code}"] += 1
            if code and code not in REFUSALS:
                self.world.found.append(f"{self} claimed {asked} and got {entries}")
        if not self._fences:
            # Do not claim again at once.
            self._wait(0.02 + 0.2 * self._dice.at(What.PAUSE, -self.number, self._claims))

    def _settled(self, batch: Batch, code: int | None) -> None:
        fence = self._rightly.get(batch.id)
        if code != POLICY_VIOLATION or fence is None or self.connection is None:
            return
        proxy = self.world.proxies[self.proxy_of(self.connection.ordinal)]
        if self.world.grants.is_standing(batch.partition, fence) and not proxy.may_have_lapsed:
            self.world.found.append(f"{self}: {batch} was refused, and it owns the partition behind fence {fence}")


KINDS: Final[dict[str, type[Client]]] = {**clients.KINDS, "claimant": Claimant}
