"""Write with librdkafka, as confluent-kafka brings it, and record the outcome of each record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import confluent_kafka

from tests.support.clients.client_process import ClientRun
from tests.support.clients.kafka_io import Record

TIMEOUT_S = 180.0


def run_librdkafka(topic: str, records: Iterable[Record], settings: Mapping[str, Any]) -> ClientRun:
    """Write all of `records`, as fast as they come."""
    run = ClientRun(0, {}, {}, [])

    def on_delivery(number: int) -> Callable[[Any, Any], None]:
        def delivered(error: Any, message: Any) -> None:
            assert number not in run.acknowledged, f"record {number} was acknowledged twice"
            if error is None:
                run.acknowledged[number] = (message.partition(), message.offset())
            else:
                run.errors[number] = str(error)

        return delivered

    producer = confluent_kafka.Producer({**settings})
    sent = 0
    for number, record in enumerate(records):
        where = -1 if record.partition is None else record.partition
        headers: Any = [*record.headers]
        while True:
            try:
                producer.produce(
                    topic, record.value, record.key, where, on_delivery=on_delivery(number), headers=headers
                )
                break
            except BufferError:
                # Its queue is full because a broker is busy: Kafka's coordinator takes seconds to load.
                producer.poll(0.1)
        producer.poll(0)
        sent += 1
    assert producer.flush(TIMEOUT_S) == 0, "not all was acknowledged in time"
    return run._replace(sent=sent)
