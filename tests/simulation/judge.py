"""Judge a finished world: compare the logs, the counters and the audit trail with the clients' records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.simulation.clients import NONE, NOT_APPENDED, SAY_NOT_APPENDED, Client, Idempotent
from tests.simulation.cluster import NOT_LEADER
from tests.simulation.partitions import Batch, Partition

if TYPE_CHECKING:
    from tests.simulation.world import World


def judge(world: World) -> list[str]:
    """Return the findings as sentences."""
    found: list[str] = []
    for client in world.clients:
        found += _judge_batches(world, client)
        if isinstance(client, Idempotent):
            found += _judge_producer(client)
        elif client.setting.kind in ("plain", "claimant") and client.setting.acks:
            found += _judge_order(client)
    found += _judge_silent(world)
    found += _judge_trail(world)
    found += world.grants.judge()
    return found


def _judge_batches(world: World, client: Client) -> Iterator[str]:
    for batch in client.unsent:
        if batch.places:
            yield f"{client}: a batch that was never sent whole is in a log: {batch}"
    knows_again = world.setting.knows_again and isinstance(client, Idempotent)
    not_appended = SAY_NOT_APPENDED if isinstance(client, Idempotent) else NOT_APPENDED
    for batch in client.batches:
        places = batch.places
        if NOT_LEADER in batch.codes and world.setting.slow_rereads:
            yield f"{client}: {batch} was refused, although the re-read after its first refusal named its owner"
        if NONE in batch.codes and not places:
            yield f"{client}: {batch} was acknowledged and is missing"
        if len(places) > 1 and (knows_again or batch.sends == 1):
            yield f"{client}: {batch} is there {len(places)} times, at {places}"
        if places and batch.sends == 1 and len(batch.codes) == 1 and batch.codes[0] in not_appended:
            yield f"{client}: {batch} was refused, and is at {places}"


def _judge_producer(client: Idempotent) -> Iterator[str]:
    """Check that every batch is in the log, in order."""
    if client.is_void:
        return
    firsts: dict[Partition, int] = defaultdict(lambda: -1)
    for batch in client.batches:
        if not batch.places:
            yield f"{client}: {batch} is missing"
        elif batch.places[0] < firsts[batch.partition]:
            if client.is_beyond_help(batch.partition):
                return
            yield f"{client}: {batch} stands at {batch.places}, before one that was sent before it"
        else:
            firsts[batch.partition] = batch.places[0]


def _judge_order(client: Client) -> Iterator[str]:
    """Check that the batches of one connection to one partition are in the order of sending."""
    latest: dict[tuple[Partition, int], Batch] = {}
    for batch in client.batches:
        if not batch.places or batch.is_late:
            continue
        before = latest.get((batch.partition, batch.connection))
        if before is not None and batch.places[0] < before.places[0]:
            yield f"{client}: {batch} stands at {batch.places}, before {before} at {before.places}"
        latest[batch.partition, batch.connection] = batch


def _judge_silent(world: World) -> Iterator[str]:
    """Check that a batch that the proxy had received but no log has was counted as lost or unconfirmed."""
    missing: Counter[tuple[bytes, bytes]] = Counter()
    for client in world.clients:
        if client.setting.acks == 0:
            for batch in client.batches:
                is_lost = batch.taken_at >= 0 and not batch.places and not batch.is_excused
                # With brokers that keep fences a severed client's broker connections are cut, with batches that have
                # just left.
                number = client.number * 1000 + batch.connection
                if is_lost and number not in world.cluster.cut_short and number not in world.grants.severed_at:
                    missing[batch.partition.topic, batch.partition.topic_id] += 1
    tallies = [proxy.context.tally for proxy in world.proxies]
    for (topic, topic_id), count in missing.items():
        # Batches lost before the proxy knew the topic's name are counted under its id.
        told = sum(
            tally.drops.get(each, Counter()).total() + tally.unconfirmed[each]
            for tally in tallies
            for each in (topic, topic_id)
        )
        if count > told:
            yield f"{count} acks=0 batches of {topic.decode()} are missing, {told} of them are counted"


def _judge_trail(world: World) -> Iterator[str]:
    """Check that the trail has every acknowledged batch, and only batches that are in a log."""
    told: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    for row in world.rows:
        number = int(row.client_id.rpartition("-")[2])
        offsets = told[row.topic, row.partition, number]
        for first, count in zip(row.spans[::2], row.spans[1::2], strict=True):
            offsets.update(range(first, first + count))
    for client in world.clients:
        for partition in client.partitions:
            offsets = told.pop((partition.topic.decode(), partition.index, client.number), set())
            yield from _judge_told(client, partition, offsets)
    if told:
        yield f"the trail tells of what nobody sent: {sorted(told)}"


def _judge_told(client: Client, partition: Partition, told: set[int]) -> Iterator[str]:
    mine = [batch for batch in client.batches if batch.partition is partition]
    possible = {place + each for batch in mine if batch.acks for place in batch.places for each in range(batch.count)}
    if told - possible:
        yield f"{client}: the trail tells of offsets of {partition} that it did not write: {sorted(told - possible)}"
    for batch in mine:
        if NONE in batch.codes and batch.acks and not told.issuperset(range(batch.offset, batch.offset + batch.count)):
            yield f"{client}: {batch} was acknowledged at {batch.offset}, and the trail does not tell of it"
