"""Reads that span brokers and found too little: each is asked again after a pause, until its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kproxy.proxy.context import ProxyContext
from kproxy.routing.merge import Exchange

# Pauses of a read that spans brokers and waits for data, in seconds: soon at first, then easy on the brokers.
LOOK_PAUSES_S = (0.005, 0.01, 0.02, 0.04)


class SecondLooks:
    """The reads of one client connection that wait to be asked again by `again`; `waiting` has their sequences."""

    def __init__(self, context: ProxyContext, again: Callable[[Exchange], None]) -> None:
        self._context = context
        self._again = again
        self.waiting: dict[int, asyncio.TimerHandle] = {}

    def wants(self, exchange: Exchange) -> bool:
        """Whether a read that found too little is asked once more; if so, it will be."""
        pause = LOOK_PAUSES_S[min(exchange.looks, len(LOOK_PAUSES_S) - 1)]
        if exchange.has_errors or self._context.clock() + pause >= exchange.look_until:
            return False
        if exchange.api.holds_enough(exchange.request, exchange.payload_bytes):
            return False
        loop = asyncio.get_running_loop()
        self.waiting[exchange.sequence] = loop.call_later(pause, self._look, exchange)
        return True

    def _look(self, exchange: Exchange) -> None:
        del self.waiting[exchange.sequence]
        exchange.reset()
        self._again(exchange)

    def stop(self, exchange: Exchange) -> None:
        """Do not ask again."""
        handle = self.waiting.pop(exchange.sequence, None)
        if handle is not None:
            handle.cancel()
