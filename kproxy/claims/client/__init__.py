"""Own resources with a stock client: the Own API (the Kafka wiki's "Single Reader/Writer") for applications.

aiokafka (0.14), a producer or a consumer:

    async with own(producer, "writers", ["orders/0"], generation=2) as ownership:
        await producer.send_and_wait("orders", b"...", partition=0)

kafka-python (3.0), a producer or a consumer:

    with own_sync(producer, "writers", ["orders/0"], generation=2) as ownership:
        producer.send("orders", b"...", partition=0).get()
        ownership.check()

On entry both functions claim on the connections on which the client itself produces or fetches. They raise OwnRefused
if a claim is refused, as when another client owns a resource with a higher generation, OwnNotOffered if no kproxy with
etcd answers, and OwnError otherwise; nothing is claimed then. At the end of the block the producer's records are sent
and these connections are closed, which frees the resources; the client opens new connections as it needs them.

Resources and generations
    `resources` are "topic/partition", (topic, partition) or any other names; None for the whole group. The group in
    --writer-group TOPIC=GROUP of the proxies gates a topic's writes, and any group gates its reads. A resource is owned
    with `generation`: a client that claims it with the same or a higher one takes over. 0 takes over from any claimant
    and counts as 1 from then on. A whole group is granted with its highest generation. `stand_by=True` waits until
    nobody owns the resources with this generation or a higher one. It asks with the next lower generation, so that of
    two clients with the same generation the second waits for the first.

Losing ownership, because another client took over, or because the connection or the proxy broke
    `own` cancels the block and raises Severed out of it, as asyncio.timeout does; with cancels_body=False it raises at
    the end of the block. `own_sync` raises Severed at the end of the block, and `ownership.check()` does so earlier.
    `ownership.is_valid`, `ownership.severed` and `ownership.wait_severed()` report it, and `on_severed` is called, on
    the event loop or the client's own thread, before any record in flight is reported as failed.
    From then on every produce and fetch request of the client fails, its own resends too; a request that was sent and
    not answered may have been written, or not. Close a producer that was severed and make a new one: the sequence of an
    idempotent producer is broken.
    A connection that breaks silently, or whose proxy hangs, is detected within three times `check_every_s`.

Claiming again: only with `reclaim=True`
    A lost connection is opened again, and the client's requests wait until the resources are claimed once more, with
    the generation of their last grant. This takes nothing from a client that owns them with that generation by then.
    The attempts last `timeout_s`; if they fail the ownership is severed. Meanwhile other clients may have owned and
    written; requests that were in flight at the loss are written after theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kproxy.claims.client.claimant import Ownership
from kproxy.claims.client.errors import OwnError, OwnNotOffered, OwnRefused, Severed
from kproxy.claims.client.plan import plan_of

if TYPE_CHECKING:
    # Each library is installed only if an application uses it.
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
    """Own resources in `async with own(...) as ownership`, with a started client of aiokafka.

    `timeout_s` bounds each of a claim, a second claim and the sending of pending records, in seconds; standing by has
    no bound. The default is longer than the proxies wait for answers that may never come (limits.own_unsettled_s).
    Raises ValueError and TypeError for invalid arguments; `async with` raises RuntimeError for a client not started.
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
    """Own resources in `with own_sync(...) as ownership`, with a client of kafka-python; otherwise like `own`."""
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
