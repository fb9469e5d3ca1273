"""Outboxes gather the messages of one step of the event loop, however many they are."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any, cast

import pytest

from kproxy.proxy.outbox import Outbox, flushes_of

OUTBOXES = 1000
MESSAGE = bytes(100)
# Much less than a large block for each.
MOST_BYTES = OUTBOXES * (20 << 10) + (16 << 20)


class Transport:
    """What an outbox needs of one."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))


@pytest.mark.parametrize("messages", [1, 200])
async def test_outboxes_of_one_step_write_once_and_hold_little_memory(messages: int) -> None:
    loop = asyncio.get_running_loop()
    transports = [Transport() for _ in range(OUTBOXES if messages == 1 else 100)]
    outboxes = [Outbox(loop, cast(asyncio.Transport, each), flushes_of(loop)) for each in transports]
    for _ in range(2):
        tracemalloc.start()
        try:
            for number, outbox in enumerate(outboxes):
                for _ in range(messages):
                    outbox.put_one(MESSAGE[:-4] + number.to_bytes(4, "big"))
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < MOST_BYTES
        await asyncio.sleep(0)
        for number, transport in enumerate(transports):
            assert transport.written == [(MESSAGE[:-4] + number.to_bytes(4, "big")) * messages]
            transport.written.clear()
