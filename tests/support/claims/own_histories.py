"""Run random histories of ownership: clients claim, write, pause and die, under faults of proxies and brokers.

A history has one topic with its own writer group, and MEMBERS clients. Many histories run side by side through the same
two proxies, under the same faults. A seed determines all choices, but the machine decides how far clients get during a
fault.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Self

from kproxy_codec import error_codes
from tests.support.claims.own_client import OwnClient, Produced
from tests.support.claims.own_model import Claimed, Fenced, Granted, Recorded, Written, judge
from tests.support.claims.own_site import BROKERS, HOST, OwnSite
from tests.support.clients.attempts import Stored
from tests.support.models.linearizability import NEVER, UNKNOWN

MEMBERS: Final = 4
# More than a proxy's time limit for a claim that cannot be confirmed.
ANSWER_S: Final = 8.0
# The time limit for a client that keeps trying to own and write, once all faults have ended.
GOES_ON_S: Final = 60.0
# Pauses between two steps of one client, in seconds; the last one is that of a standby that wakes up late.
PAUSES: Final = (*(0.0,) * 3, *(0.05,) * 2, *(0.3,) * 6, *(0.6,) * 6, *(1.0,) * 3, 2.5)


def topic_of(number: int) -> str:
    return f"history.{number}"


def group_of(number: int) -> str:
    return f"writers {number}"


class Connection:
    """One connection of a member, as recorded in the history."""

    def __init__(self, name: str, proxy: int, client: OwnClient, since: float) -> None:
        self.name = name
        self.proxy = proxy
        self.client = client
        self.since = since
        self.closed_at = NEVER
        # The time of its first request with acks=0.
        self.unconfirmed_from = NEVER
        # The fence granted last, by partition.
        self.fences: dict[int, int] = {}

    def end(self, now: float, *, abruptly: bool) -> None:
        """Record the end of the connection by its client."""
        self.closed_at = min(self.closed_at, now)
        self.client.abort() if abruptly else self.client.raw.close()

    def may_end_from(self, faults: Mapping[int, float], reasons: Sequence[float]) -> float:
        """The time from which its partitions may have been free.

        `faults`: the time from which its proxy may have had a fault. `reasons`: other possible reasons for severing it.
        """
        by_proxy = min(reasons, default=NEVER) if self.client.closed else NEVER
        return max(self.since, min(self.closed_at, by_proxy, faults.get(self.proxy, NEVER)))


class History:
    """One history: `run` it, let it `settle` once all faults have ended, then `judge` it."""

    def __init__(self, site: OwnSite, number: int, seed: int) -> None:
        self.number = number
        self.site = site
        self._chance = random.Random(f"{seed}/{number}")
        self.topic, self.group = topic_of(number), group_of(number)
        self.partitions = range(self._chance.choice((1, 1, 2)))
        self.is_replicated = self._chance.random() < 0.3
        self.connections: list[Connection] = []
        self.claims: dict[int, list[Claimed]] = {each: [] for each in self.partitions}
        self.writes: dict[int, list[Written]] = {each: [] for each in self.partitions}
        self.generations = dict.fromkeys(self.partitions, 1)
        self._answers: set[asyncio.Task[None]] = set()
        self._written = 0

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def prepare(self) -> None:
        first = self._chance.randrange(len(BROKERS))
        replicas = [*BROKERS[first:], *BROKERS[:first]]
        placed = replicas if self.is_replicated else replicas[:1]
        await self.site.put_topic(self.topic, [placed for _ in self.partitions])

    async def run(self) -> None:
        """Run all clients side by side."""
        members = [
            Member(self, f"{self.number}{'abcd'[place]}", random.Random(self._chance.random()))
            for place in range(MEMBERS)
        ]
        at_once = asyncio.Barrier(MEMBERS) if self._chance.random() < 0.4 else None
        async with asyncio.TaskGroup() as running:
            for member in members:
                running.create_task(member.run(self._chance.randint(2, 5), at_once))

    async def settle(self) -> None:
        """Check progress: a client that keeps trying owns and writes. Then end all waiting for answers."""
        member = Member(self, f"{self.number}last", random.Random(self._chance.random()))
        for partition in self.partitions:
            await member.insists(partition)
        if self._answers:
            await asyncio.wait(self._answers)
        await self._losers_are_severed()

    async def _losers_are_severed(self) -> None:
        """Wait until each connection that lost a partition to another one is severed."""
        for connection in self.connections:
            lost = [
                partition
                for partition, fence in connection.fences.items()
                if any(
                    isinstance(each.told, Granted) and each.told.fence > fence and each.connection != connection.name
                    for each in self.claims[partition]
                )
            ]
            if lost and connection.closed_at == NEVER:
                assert await connection.client.wait_closed(GOES_ON_S), (
                    f"{connection.name} lost {lost} and is still open"
                )

    async def close(self) -> None:
        for connection in self.connections:
            await connection.client.close()

    # Records of the members

    def value(self, connection: Connection, partition: int) -> bytes:
        """The value of one record: its writer, connection and fence; no two are the same."""
        self._written += 1
        return f"{connection.name} {connection.fences.get(partition, 0)} {self._written}".encode()

    def await_answer(self, answer: asyncio.Task[None]) -> None:
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    # The judgement

    async def judge(self, faults: Mapping[int, float]) -> Counter[str]:
        """Read the logs and compare all records with them; return counts of all kinds. Raises AssertionError."""
        counts: Counter[str] = Counter()
        for partition in self.partitions:
            acked = sum(each.error_code == 0 and not each.may_be_lost for each in self.writes[partition])
            log = await self.site.log(self.topic, partition, at_least=acked)
            # In a thread, because otherwise the relays on this event loop would stop, and leases would end.
            await asyncio.to_thread(self.judge_partition, partition, log, faults)
            counts += self._counted(partition, log)
        return counts

    def recorded(self, partition: int, faults: Mapping[int, float]) -> Recorded:
        """All recorded facts about a partition whose log was just read."""
        ends_from = {each.name: each.may_end_from(faults, self._reasons(each, partition)) for each in self.connections}
        return Recorded(self.claims[partition], self.writes[partition], ends_from, time.monotonic())

    def _reasons(self, connection: Connection, partition: int) -> list[float]:
        """The time from which a proxy may have freed `partition` by severing, without another claim of it.

        The connection lost another partition, its acks=0 write failed, or its claim came too late and was undone.
        """
        return [
            each.called
            for other, claims in self.claims.items()
            for each in claims
            if (each.connection == connection.name and other == partition and each.told is UNKNOWN)
            or (each.connection != connection.name and other != partition and not isinstance(each.told, Fenced))
        ] + [connection.unconfirmed_from]

    def judge_partition(self, partition: int, log: Sequence[Stored], faults: Mapping[int, float]) -> None:
        try:
            judge(self.recorded(partition, faults), log)
        except AssertionError as error:
            error.add_note(f"{self.topic}/{partition}{' replicated' if self.is_replicated else ''}; the log:")
            for record in log:
                error.add_note(f"    {record}")
            raise

    def _counted(self, partition: int, log: Sequence[Stored]) -> Counter[str]:
        claims, writes = self.claims[partition], self.writes[partition]
        fences = {each.value: each.fence for each in writes}
        in_order = [fences[value] for _, value in log]
        codes = Counter(each.error_code for each in writes)
        return Counter(
            {
                "granted": sum(isinstance(each.told, Granted) for each in claims),
                "fenced": sum(isinstance(each.told, Fenced) for each in claims),
                "claims without an answer": sum(each.told is UNKNOWN for each in claims),
                "acknowledged": codes[error_codes.NONE],
                "refused": codes[error_codes.POLICY_VIOLATION],
                "writes without an answer": codes[None],
                "other errors": sum(codes.values()) - codes[0] - codes[error_codes.POLICY_VIOLATION] - codes[None],
                "records": len(log),
                "owners in logs": len(set(in_order)),
            }
        )


class Member:
    """One client of a history, with one connection at a time."""

    def __init__(self, history: History, name: str, chance: random.Random) -> None:
        self._history = history
        self._name = name
        self._chance = chance
        self._connection: Connection | None = None
        self._connected = 0

    async def run(self, steps: int, at_once: asyncio.Barrier | None) -> None:
        """`at_once`: all clients begin by claiming the same partitions at once."""
        if at_once is not None:
            connection = await self.connect()
            await at_once.wait()
            if connection is not None:
                await self.claim(connection, [0])
        for _ in range(steps):
            await asyncio.sleep(self._chance.choice(PAUSES) * self._chance.uniform(0.5, 1.5))
            connection = await self.connect()
            if connection is None:
                continue
            partition = self._chance.choice(self._history.partitions)
            owns = partition in connection.fences
            action = self._chance.random()
            if action < 0.06:
                connection.end(time.monotonic(), abruptly=self._chance.random() < 0.7)
            elif action < (0.15 if owns else 0.55):
                some = self._chance.sample(self._history.partitions, 1) if action < 0.4 else None
                await self.claim(connection, some)
                if partition in connection.fences and self._chance.random() < 0.7:
                    await self._write(connection, partition)
            else:
                await self._write(connection, partition)

    async def insists(self, partition: int) -> Connection:
        """Try until this member owns the partition and has written a record. Return the connection."""
        async with asyncio.timeout(GOES_ON_S):
            while not await self._writes(partition):
                await asyncio.sleep(0.1)
        assert self._connection is not None
        return self._connection

    async def _writes(self, partition: int) -> bool:
        """Claim the partition, whoever owns it, and write one record; return whether both succeeded."""
        connection = await self.connect()
        if connection is None:
            return False
        if partition not in connection.fences:
            await self.claim(connection, [partition], generation=0)
        if partition not in connection.fences:
            return False
        return error_codes.NONE in await self.send(connection, partition)

    async def connect(self, proxy: int | None = None) -> Connection | None:
        """The connection, or a new one to `proxy` or a random proxy; None if that proxy is down."""
        if self._connection is not None and not self._connection.client.closed and self._connection.closed_at == NEVER:
            return self._connection
        if proxy is None:
            proxy = self._chance.randrange(len(self._history.site.proxies))
        name = f"{self._name}{self._connected}"
        since = time.monotonic()
        try:
            client = await OwnClient.connect(HOST, self._history.site.proxies[proxy].port, name)
        except OSError:
            return None
        self._connected += 1
        self._connection = Connection(name, proxy, client, since)
        self._history.connections.append(self._connection)
        return self._connection

    async def claim(
        self, connection: Connection, partitions: Sequence[int] | None = None, generation: int | None = None
    ) -> None:
        """Claim some partitions, or all of them for None, with a random or the given generation."""
        history = self._history
        asked = {
            each: self._generation(each) if generation is None else generation
            for each in (history.partitions if partitions is None else partitions)
        }
        resources = {f"{history.topic}/{each}": each for each in asked}
        called = time.monotonic()
        told: dict[int, Granted | Fenced | None] = dict.fromkeys(asked, UNKNOWN)
        try:
            wanted = [(resource, asked[each]) for resource, each in resources.items()]
            response = await asyncio.wait_for(connection.client.send_own(history.group, wanted), ANSWER_S)
        except (ConnectionError, TimeoutError):
            connection.end(time.monotonic(), abruptly=True)
        else:
            assert response.error_code in (error_codes.NONE, error_codes.COORDINATOR_NOT_AVAILABLE), response
            for each in response.resources:
                if each.error_code == error_codes.NONE:
                    told[resources[each.resource]] = Granted(each.generation, each.fence)
                elif each.error_code == error_codes.FENCED_INSTANCE_ID:
                    told[resources[each.resource]] = Fenced()
        returned = time.monotonic()
        for partition, each in told.items():
            until = NEVER if each is UNKNOWN else returned
            claim = Claimed(self._name, called, until, connection.name, asked[partition], each)
            history.claims[partition].append(claim)
            if isinstance(each, Granted):
                connection.fences[partition] = each.fence
                history.generations[partition] = each.generation

    def _generation(self, partition: int) -> int:
        latest = self._history.generations[partition]
        return self._chance.choice((0, latest, latest, latest + 1, latest + 1, max(1, latest - 1)))

    async def _write(self, connection: Connection, partition: int) -> None:
        """Write some records without a pause; sometimes do not wait for the answers before the next step."""
        acks = self._chance.choice((-1, -1, -1, 1, 0))
        sending = asyncio.ensure_future(self.send(connection, partition, self._chance.randint(1, 3), acks))
        if self._chance.random() < 0.7:
            await sending
        else:
            # Let the request be sent before the next step.
            await asyncio.sleep(0)
            self._history.await_answer(sending)

    async def send(self, connection: Connection, partition: int, count: int = 1, acks: int = -1) -> list[int | None]:
        """Write `count` records without a pause; return the error codes, None for a missing answer."""
        history = self._history
        fence = connection.fences.get(partition, 0)
        sent: list[tuple[bytes, float, asyncio.Future[Produced]]] = []
        for _ in range(count):
            value, called = history.value(connection, partition), time.monotonic()
            try:
                answer = connection.client.send_produce(history.topic, partition, value, acks)
            except ConnectionError:
                break
            sent.append((value, called, answer))
            if acks == 0:
                connection.unconfirmed_from = min(called, connection.unconfirmed_from)
        codes: list[int | None] = []
        for value, called, answer in sent:
            code, offset = None, -1
            try:
                code, offset = await asyncio.wait_for(asyncio.shield(answer), ANSWER_S)
            except (ConnectionError, TimeoutError):
                connection.end(time.monotonic(), abruptly=True)
            if acks == 0:
                code = None
            codes.append(code)
            returned = NEVER if code is None else time.monotonic()
            may_be_lost = acks != -1 and history.is_replicated
            history.writes[partition].append(
                Written(
                    self._name, called, returned, connection.name, fence, value, code, offset, may_be_lost=may_be_lost
                )
            )
        return codes


async def run_histories(histories: Sequence[History]) -> None:
    """Create all topics, and run the histories side by side."""
    await asyncio.gather(*(each.prepare() for each in histories))
    await asyncio.gather(*(each.run() for each in histories))


async def close_all(histories: Sequence[History]) -> None:
    with suppress(ConnectionError):
        await asyncio.gather(*(each.close() for each in histories))
