"""The trail as messages of a topic, with the process's incarnation as key: one partition has it all, in order.

kproxy writes them with kafka-python's producer, whose network runs on a thread of its own; what blocks is called on
another one. By default it reaches the cluster through this proxy itself, on connections that never leave the process:
`dial` makes one, whatever broker's address the producer asks for. So it does not matter what the proxy is called by
others, who else listens on its port, or whether that is still open.

States: none --a page--> a producer --a failure--> none.

Invariants
1. A producer that has failed is thrown away with all that it holds: what is written again is written by the next one,
   with a producer id of its own. A page may then be there twice, never changed and never out of its order by more.
2. Nothing blocks for longer than the time-outs below, and nothing on the event loop.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError, TopicAlreadyExistsError

from kproxy.observe.kafka_python import connected, create_topic, over_the_network
from kproxy.trail.sinks.sink import Appetite, SinkFailed, on_thread

PARTITIONS = 3
WRITE_BYTES = 1 << 20
CLIENT_ID = "kproxy-audit"
# A name for what `dial` reaches; nobody resolves it.
INSIDE = "kproxy.invalid:9092"
BOOTSTRAP_MS = 5_000
REQUEST_MS = 10_000
DELIVERY_MS = 20_000
CLOSE_S = 1.0


class TopicSink:
    """`bootstrap` are HOST:PORT, or `dial` is given: it connects, on any thread, or raises OSError."""

    def __init__(
        self,
        topic: str,
        incarnation: str,
        *,
        bootstrap: Sequence[str] = (),
        dial: Callable[[], socket.socket] | None = None,
    ) -> None:
        self.appetite = Appetite(WRITE_BYTES)
        self._topic = topic
        self._key = incarnation.encode()
        self._client: dict[str, Any] = {
            "bootstrap_servers": list(bootstrap) if dial is None else [INSIDE],
            "client_id": CLIENT_ID,
            "bootstrap_timeout_ms": BOOTSTRAP_MS,
            "request_timeout_ms": REQUEST_MS,
        }
        self._connect = over_the_network if dial is None else lambda host, port: dial()
        self._producer: Any = None
        # Why the topic could not be made, in case it is missing.
        self._not_made = ""

    async def write(self, pages: Sequence[bytes]) -> None:
        try:
            if self._producer is None:
                self._producer = await on_thread(self._open)
            producer = self._producer
            await on_thread(lambda: self._send(producer, pages))
        except Exception as error:
            await self.close()
            if not isinstance(error, (KafkaError, OSError)):
                raise
            reason = f"topic {self._topic}: {str(error) or type(error).__name__}"
            raise SinkFailed(
                f"{reason}; it could not be made: {self._not_made}" if self._not_made else reason
            ) from error

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            await on_thread(lambda: _close(producer))

    def _open(self) -> Any:
        self._not_made = ""
        admin = connected(KafkaAdminClient, self._connect, **self._client)
        try:
            create_topic(admin, self._topic, PARTITIONS)
        except TopicAlreadyExistsError:
            pass
        except KafkaError as error:
            # It may be there all the same, and be made by somebody else: writing to it tells.
            self._not_made = str(error) or type(error).__name__
        finally:
            admin.close()
        return connected(
            KafkaProducer,
            self._connect,
            **self._client,
            acks="all",
            enable_idempotence=True,
            max_block_ms=REQUEST_MS,
            delivery_timeout_ms=DELIVERY_MS,
            metrics_enabled=False,
        )

    def _send(self, producer: Any, pages: Sequence[bytes]) -> None:
        until = time.monotonic() + (DELIVERY_MS + REQUEST_MS) / 1000
        sent = [producer.send(self._topic, value=page, key=self._key) for page in pages]
        for each in sent:
            each.get(timeout=max(0.0, until - time.monotonic()))
        self._not_made = ""


def _close(producer: Any) -> None:
    """What has not been sent by now is not to be."""
    try:
        producer.close(timeout=CLOSE_S)
    except KafkaError:
        # It gives up where it cannot send all, and would go on trying in the background.
        producer._sender.force_close()
