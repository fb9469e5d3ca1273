"""Run two writers of one partition, of which only one at a time can write.

Start this program in two terminals with the same arguments. One becomes active and writes numbered records. The other
stands by: it asks for the partition again and again, without disturbing the active one. When the active one ends or is
killed (kill -9), the other becomes active, finds the end of the log, and continues with the next number. A writer that
is stopped (kill -STOP) stays the owner, because it may continue (kill -CONT) at any time. To replace it, start a third
one with --take-over, which claims with a higher generation. Later writes of the stopped one are refused; it reports
that and stands by.

    kproxy dev --writer-group orders=writers
    python examples/active_standby.py --name A          # terminal 1
    python examples/active_standby.py --name B          # terminal 2
    python examples/active_standby.py --name C --take-over

A record is {"writer": name, "fence": fence, "number": n}. In the log the numbers rise one by one, and the fences never
fall: this shows that only one writer at a time got through.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import signal
import time
from dataclasses import dataclass
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from kproxy.claims.client import OwnError, own

# A writer that stands by asks with one less, a writer that takes over asks with one more.
GENERATION = 2
LOOK_BACK = 100


@dataclass(frozen=True)
class Settings:
    bootstrap: str
    topic: str
    partition: int
    group: str
    name: str
    every_s: float
    takes_over: bool


async def run(settings: Settings) -> None:
    """Be active or stand by until cancelled."""
    takes_over = settings.takes_over
    while True:
        try:
            await be_active(settings, takes_over=takes_over)
        except (OwnError, KafkaError) as error:
            say(settings, f"NOT ACTIVE: {error}")
            await asyncio.sleep(0.2)
        takes_over = False


async def be_active(settings: Settings, *, takes_over: bool) -> None:
    """Claim the partition, now or when it is free, and write until it is lost."""
    # A producer that has lost its claim cannot be used again, so each claim has a new one.
    producer = AIOKafkaProducer(
        bootstrap_servers=settings.bootstrap, client_id=settings.name, acks="all", enable_idempotence=True
    )
    await producer.start()
    try:
        resource = f"{settings.topic}/{settings.partition}"
        if takes_over:
            say(settings, f"taking over {resource}")
            claim = own(producer, settings.group, [resource], GENERATION + 1)
        else:
            say(settings, f"standing by for {resource}")
            claim = own(producer, settings.group, [resource], GENERATION, stand_by=True)
        async with claim as ownership:
            await write(settings, producer, ownership.fences[resource])
    finally:
        await producer.stop()


async def write(settings: Settings, producer: AIOKafkaProducer, fence: int) -> None:
    # No earlier writer can write any more. Once this record is acknowledged, all of theirs can be read, too.
    begins_at = await send(settings, producer, {"writer": settings.name, "fence": fence, "number": None})
    last = await last_number(settings, begins_at)
    say(settings, f"ACTIVE with fence {fence}, going on after number {last}")
    for number in itertools.count(last + 1):
        offset = await send(settings, producer, {"writer": settings.name, "fence": fence, "number": number})
        say(settings, f"wrote number {number} at offset {offset}")
        await asyncio.sleep(settings.every_s)


async def send(settings: Settings, producer: AIOKafkaProducer, record: dict[str, Any]) -> int:
    value = json.dumps(record).encode()
    written = await producer.send_and_wait(settings.topic, value, partition=settings.partition)
    offset: int = written.offset
    return offset


async def last_number(settings: Settings, end: int) -> int:
    """Return the highest number before that offset; 0 if there is none."""
    consumer = AIOKafkaConsumer(bootstrap_servers=settings.bootstrap, enable_auto_commit=False)
    await consumer.start()
    try:
        partition = TopicPartition(settings.topic, settings.partition)
        consumer.assign([partition])
        first = (await consumer.beginning_offsets([partition]))[partition]
        for start in range(end, first - 1, -LOOK_BACK):
            consumer.seek(partition, max(start - LOOK_BACK, first))
            number = 0
            async for record in consumer:
                if record.offset >= start:
                    break
                number = max(number, json.loads(record.value).get("number") or 0)
            if number:
                return number
        return 0
    finally:
        await consumer.stop()


def say(settings: Settings, what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} [{settings.name}] {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="One of several writers of a partition; only one at a time is active.")
    parser.add_argument("--bootstrap", default="127.0.0.1:9092", help="where kproxy listens")
    parser.add_argument("--topic", default="orders")
    parser.add_argument("--partition", type=int, default=0)
    parser.add_argument("--group", default="writers", help="the topic's writer group, as kproxy was told")
    parser.add_argument("--name", default="A", help="what this writer calls itself in its records")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between records")
    parser.add_argument("--take-over", action="store_true", help="take the partition from whoever is active")
    given = parser.parse_args()
    # The client library's logs of ended connections are left out: `say` reports them in one sentence.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    settings = Settings(
        given.bootstrap, given.topic, given.partition, given.group, given.name, given.every, given.take_over
    )
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(until_terminated(settings))
    say(settings, "ended; what it owned is free")


async def until_terminated(settings: Settings) -> None:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run(settings)


if __name__ == "__main__":
    main()
