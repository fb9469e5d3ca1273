"""Fill a table of leases of any size in etcd, and change owners at a steady rate or as fast as etcd accepts.

`python -m bench.lease_keys ENDPOINT PREFIX TOPICS PARTITIONS RATE` changes owners at that rate until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import uvloop

from kproxy.etcd import EtcdClient, TxnOp, put_op

# etcd's own limit on the operations of one transaction.
OPERATIONS = 128
TRANSACTIONS_AT_ONCE = 16
# A step through the table that visits every partition before it comes back, all over the topics.
STRIDE = 7_919
WRITE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Shape:
    """`topics` × `partitions`, owned by `brokers` brokers in rotation; the topics' names begin with `topic`."""

    topics: int
    partitions: int
    brokers: int = 3
    topic: str = "topic"

    def __str__(self) -> str:
        return f"{self.topics:,} × {self.partitions:,}"

    @property
    def count(self) -> int:
        return self.topics * self.partitions

    def partition(self, number: int) -> tuple[str, int]:
        topic, index = divmod(number % self.count, self.partitions)
        return f"{self.topic}-{topic:06}", index

    def far_apart(self, number: int) -> tuple[str, int]:
        return self.partition(number * STRIDE)


def lease_key(prefix: str, topic: str, partition_index: int) -> str:
    return f"{prefix}/partition-leases/{topic}/{partition_index}"


async def put_all(client: EtcdClient, operations: Iterator[TxnOp]) -> int:
    """Carry out all operations, in the largest transactions of etcd, several at once; return the highest revision."""
    highest = 0

    async def work() -> None:
        nonlocal highest
        while batch := list(islice(operations, OPERATIONS)):
            highest = max(highest, (await client.txn([], batch)).revision)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(TRANSACTIONS_AT_ONCE):
            tasks.create_task(work())
    return highest


async def fill(client: EtcdClient, prefix: str, shape: Shape, lease_id: int = 0) -> int:
    """Assign an owner to every partition, on a lease if one is given; return the revision."""
    return await put_all(
        client,
        (
            put_op(lease_key(prefix, *shape.partition(number)), b"%d" % (number % shape.brokers + 1), lease_id)
            for number in range(shape.count)
        ),
    )


async def move(client: EtcdClient, prefix: str, shape: Shape, count: int) -> int:
    """Make `count` changes of owners as fast as etcd accepts them; return the revision of the last."""
    return await put_all(
        client,
        (
            put_op(lease_key(prefix, *shape.far_apart(number)), b"%d" % (number % shape.brokers + 11))
            for number in range(count)
        ),
    )


async def name_brokers(client: EtcdClient, prefix: str, ports: list[int]) -> None:
    for node_id, port in enumerate(ports, 1):
        value = json.dumps({"node_id": node_id, "host": "127.0.0.1", "port": port})
        await client.put(f"{prefix}/brokers/{node_id}", value.encode())


async def change_steadily(
    client: EtcdClient, prefix: str, shape: Shape, *, rate: float, count: int | None, first_owner: int
) -> list[float]:
    """Put a new owner every 1/`rate` s, with numbers from `first_owner` up; return the send time of each put."""
    sent: list[float] = []
    start = time.monotonic()
    async with asyncio.TaskGroup() as puts:
        while count is None or len(sent) < count:
            number = len(sent)
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            topic, index = shape.far_apart(number)
            sent.append(time.monotonic())
            puts.create_task(client.put(lease_key(prefix, topic, index), b"%d" % (first_owner + number)))
    return sent


async def main(endpoint: str, prefix: str, topics: str, partitions: str, rate: str) -> None:
    client = EtcdClient([endpoint], timeout_s=WRITE_TIMEOUT_S)
    await client.connect()
    sys.stdout.write("writing\n")
    sys.stdout.flush()
    shape = Shape(int(topics), int(partitions))
    await change_steadily(client, prefix, shape, rate=float(rate), count=None, first_owner=1_000)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
