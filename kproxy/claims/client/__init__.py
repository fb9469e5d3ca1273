"""Owning something with a stock client: the Own API (the Kafka wiki's "Single Reader/Writer") for applications.

aiokafka (0.14), a producer or a consumer:

    async with own(producer, "writers", ["orders/0"], generation=2) as ownership:
        await producer.send_and_wait("orders", b"...", partition=0)

kafka-python (3.0), a producer or a consumer:

    with own_sync(producer, "writers", ["orders/0"], generation=2) as ownership:
        producer.send("orders", b"...", partition=0).get()
        ownership.check()

Either claims on the connections that the client itself produces or fetches on, when the block is entered. It raises
OwnRefused where somebody else owns a resource with a higher generation, OwnNotOffered where no kproxy with etcd is
there, OwnError for whatever else; nothing is claimed then. When the block is left, what the producer still has is sent
and these connections are closed, whereupon the resources are free; the client opens new ones as it needs them.

What is owned
    `resources` are "topic/partition", (topic, partition) or any other names; None for the whole group. A topic's writes
    are gated by the group that the proxies are given for it (--writer-group TOPIC=GROUP), its reads by any group.
    `generation` is the one they are owned with: whoever claims with the same or a higher one takes over. 0 takes over
    from anybody and is 1 from then on. A whole group is granted the highest that there is in it.
    `stand_by=True` waits until nobody owns them with this generation or a higher one. It asks with one less, so that of
    two with the same generation the second one waits for the first.

What happens when it is lost, because somebody took over, or because the connection or the proxy broke
    `own` cancels the block and raises Severed out of it, as asyncio.timeout does; with cancels_body=False it raises
    when the block is left. `own_sync` raises Severed when the block is left, and `ownership.check()` does so earlier.
    `ownership.is_valid`, `ownership.severed` and `ownership.wait_severed()` tell, and `on_severed` is called, on the
    event loop or the client's own thread, before any record that was under way is reported as failed.
    From then on whatever the client would send to produce or fetch fails, its own resends too; what it had sent without
    having been answered may have been written, or not. A producer that has been severed is of no use any more, as the
    sequence of an idempotent one is broken: close it and make a new one.
    A connection that is cut without a word, or whose proxy stands still, is found out within three times
    `check_every_s`.

Claiming again: not unless `reclaim=True`
    Then a lost connection is opened again, and what the client would send waits until it is claimed once more, with the
    generation it was owned with. This takes nothing from anybody who owns it with that generation by then: it is tried
    for `timeout_s`, and then it is severed after all. In between others may have owned it and written; what was under
    way before is written after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kproxy.claims.client.errors import OwnError, OwnNotOffered, OwnRefused, Severed
from kproxy.claims.client.ownership import Ownership
from kproxy.claims.client.plan import plan_of

if TYPE_CHECKING:
    # Either library is there only where an application uses it.
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
    from kafka import KafkaConsumer, KafkaProducer

    from kproxy.claims.client.aiokafka import AioOwn
    from kproxy.claims.client.kafka_python import SyncOwn

__all__ = ["OwnError", "OwnNotOffered", "OwnRefused", "Ownership", "Severed", "own", "own_sync"]


def own(
    client: AIOKafkaProducer | AIOKafkaConsumer,
    group: str,
    resources: Iterable[str | tuple[str, int]] | None,
    generation: int,
    *,
    stand_by: bool = False,
    reclaim: bool = False,
    timeout_s: float = 75.0,
    check_every_s: float = 2.0,
    cancels_body: bool = True,
    on_severed: Callable[[Severed], None] | None = None,
) -> AioOwn:
    """`async with own(...) as ownership`, for a client of aiokafka that has been started, else RuntimeError.

    `timeout_s` is for how long a claim, a second claim and the sending of what is left are tried, each; standing by has
    no end. Unless you are in a hurry it is longer than the proxies wait for what can never be known
    (limits.own_unsettled_s). Raises ValueError and TypeError for arguments that make no sense.
    """
    from kproxy.claims.client.aiokafka import AioOwn

    plan = plan_of(
        group,
        resources,
        generation,
        stand_by=stand_by,
        reclaim=reclaim,
        timeout_s=timeout_s,
        check_every_s=check_every_s,
    )
    return AioOwn(client, plan, cancels_body=cancels_body, on_severed=on_severed)


def own_sync(
    client: KafkaProducer | KafkaConsumer,
    group: str,
    resources: Iterable[str | tuple[str, int]] | None,
    generation: int,
    *,
    stand_by: bool = False,
    reclaim: bool = False,
    timeout_s: float = 75.0,
    check_every_s: float = 2.0,
    on_severed: Callable[[Severed], None] | None = None,
) -> SyncOwn:
    """`with own_sync(...) as ownership`, for a client of kafka-python; otherwise as `own`."""
    from kproxy.claims.client.kafka_python import SyncOwn

    plan = plan_of(
        group,
        resources,
        generation,
        stand_by=stand_by,
        reclaim=reclaim,
        timeout_s=timeout_s,
        check_every_s=check_every_s,
    )
    return SyncOwn(client, plan, on_severed=on_severed)
