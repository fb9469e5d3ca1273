"""Which brokers get a new topic's replicas. The first of each partition's is the one that takes it first."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def spread_replicas(brokers: Sequence[int], partitions: int, replication_factor: int, first: int) -> list[list[int]]:
    """The replicas of each partition: distinct, and as even over the brokers as may be.

    First replicas go round the brokers, from the one at `first` on. The further ones of a partition are the brokers
    behind its first, from a distance on that grows with every round: so what a broker led goes to all the others when
    it dies, and not to its neighbour alone.
    """
    count = len(brokers)
    assigned = []
    for partition_index in range(partitions):
        round_number, leader = partition_index // count, first + partition_index
        distances = [0] + [1 + (round_number + further) % (count - 1) for further in range(replication_factor - 1)]
        assigned.append([brokers[(leader + distance) % count] for distance in distances])
    return assigned


def check_assignments(assignments: Sequence[Sequence[int]], live: Collection[int]) -> str | None:
    """Why these replicas, by partition, may not be a topic's, or None."""
    for partition_index, replicas in enumerate(assignments):
        where = f"the replicas {list(replicas)} of partition {partition_index}"
        if not replicas:
            return f"partition {partition_index} is assigned no broker"
        if len(set(replicas)) != len(replicas):
            return f"{where} name a broker twice"
        absent = [node_id for node_id in replicas if node_id not in live]
        if absent:
            return f"{where} name broker {absent[0]}, which is not live"
        if len(replicas) != len(assignments[0]):
            return f"{where} are {len(replicas)}, those of partition 0 are {len(assignments[0])}: give all as many"
    return None
