"""The exchanges of one client connection that are not answered yet, and how they end.

States of an exchange
  open       some entry of it has no result; or all have one, and it is asked again after a pause
             (kproxy.proxy.second_looks)
  answered   its `respond` has been called
  dropped    its client is gone and hears of nothing any more

Transitions
  open -> answered   `pass_through` or `finish`: every entry is done
  open -> dropped    `drop`

Invariants
1. The `respond` of an exchange is called once, or never if it is dropped.
2. At most MAX_OPEN_PARTITIONS partitions are asked for in requests that are open, or what one request asks for: an
   event, such as the end of a broker's connection, concerns no more, and takes no longer. Requests for one partition do
   not count: their number is bounded by itself.
3. An error that a client gets is counted; what is not delivered of a client that gets no answer (acks=0) is told to
   `on_undeliverable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from codec.partitioned import MAX_PARTITIONS, PartitionedApi, PartitionedRequest, set_response_correlation_id
from codec.primitives import Buffer
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.owning import Respond
from kproxy.proxy.second_looks import SecondLooks
from kproxy.routing import retry
from kproxy.routing.lanes import Item
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry

MAX_OPEN_PARTITIONS = MAX_PARTITIONS


class NoRoom(Exception):
    """A request for `partitions` has to wait until others are answered."""

    def __init__(self, partitions: int) -> None:
        super().__init__(f"{partitions} partitions are too many for now")
        self.partitions = partitions


class OpenExchanges:
    """`again` sends a read once more that found too little; `on_undeliverable` gets a topic and an error code."""

    def __init__(
        self,
        context: ProxyContext,
        again: Callable[[Exchange], None],
        on_undeliverable: Callable[[bytes, int], None],
    ) -> None:
        self._context = context
        self._on_undeliverable = on_undeliverable
        # By sequence. Every request and every answer asks for it: by name, for a call costs more; read-only elsewhere.
        self.table: dict[int, tuple[Exchange, Respond]] = {}
        # Of requests for more than one.
        self.open_partitions = 0
        self.looks = SecondLooks(context, again)
        # The sequence of the newest exchange: now, at the last call of `take_out`, and at the one before.
        self.newest = 0
        self._seen = 0
        self._taken_out_to = 0
        # Done when nothing is open any more, once somebody waits for that.
        self._emptied: asyncio.Future[None] | None = None

    def __contains__(self, exchange: Exchange) -> bool:
        return exchange.sequence in self.table

    def all(self) -> list[Exchange]:
        """In the order of their requests."""
        return [exchange for exchange, _ in self.table.values()]

    def begin(self, api: PartitionedApi, request: PartitionedRequest, deadline: float, respond: Respond) -> Exchange:
        self.newest = sequence = self.newest + 1
        exchange = Exchange(api, request, sequence, deadline)
        self.table[sequence] = (exchange, respond)
        if exchange.open_count > 1:
            self.open_partitions += exchange.open_count
        return exchange

    def has_room_for(self, partitions: int) -> bool:
        """Whether a request for so many partitions may be begun."""
        return not self.open_partitions or self.open_partitions + partitions <= MAX_OPEN_PARTITIONS

    def take_out(self) -> None:
        """Called now and then: what has waited since the last call keeps no receive buffer from being used again."""
        since, self._taken_out_to, self._seen = self._taken_out_to, self._seen, self.newest
        for sequence, (exchange, _) in self.table.items():
            if since < sequence <= self._taken_out_to:
                exchange.request.take_out()

    # Ending

    def pass_through(self, exchange: Exchange, frame: memoryview) -> None:
        """Hand an answer on as it came, the client's correlation_id in it."""
        set_response_correlation_id(frame, exchange.request.header.correlation_id)
        exchange.open_count = 0
        respond = self._close(exchange)
        respond([] if exchange.is_silent else [frame])

    def finish_if_complete(self, exchange: Exchange) -> None:
        if exchange.complete:
            self.finish(exchange)

    def finish(self, exchange: Exchange) -> None:
        """Answer a complete exchange, unless it is answered already or is asked again."""
        if exchange.sequence not in self.table or exchange.sequence in self.looks.waiting:
            return
        if exchange.look_until and self.looks.wants(exchange):
            return
        respond = self._close(exchange)
        respond([] if exchange.is_silent else exchange.encode())

    def _close(self, exchange: Exchange) -> Respond:
        """It is open no more."""
        _, respond = self.table.pop(exchange.sequence)
        if self.open_partitions:
            partitions = exchange.request.partition_count
            self.open_partitions -= partitions if partitions > 1 else 0
        if self._emptied is not None:
            self._tell_if_emptied(self._emptied)
        return respond

    def drop(self, exchange: Exchange) -> None:
        """Its client is gone."""
        self.looks.stop(exchange)
        self._close(exchange)

    async def emptied(self, timeout_s: float) -> None:
        """Until all are answered that are open now, for so many seconds at most."""
        if self.table:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,), timeout=timeout_s)

    def _tell_if_emptied(self, emptied: asyncio.Future[None]) -> None:
        if not self.table and not emptied.done():
            emptied.set_result(None)

    # Errors

    def conclude(self, exchange: Exchange, entry: Entry, error_code: int, result: Buffer | None = None) -> None:
        """Give an entry its final error; `result` is the broker's own entry where its code is handed on."""
        final = retry.final_code(error_code, is_ambiguous=entry in exchange.ambiguous)
        if exchange.is_silent:
            exchange.take(entry, b"")
            self._on_undeliverable(exchange.partition(entry)[0], final)
            return
        self._context.tally.error(exchange.api.api_key, final, exchange.sent_to(entry))
        if result is not None and final == error_code:
            exchange.has_errors = True
            exchange.take(entry, result)
        else:
            exchange.give_error(entry, final)

    def give_up(self, items: Iterable[Item]) -> None:
        """Each of these gets its `give_up_code`."""
        for item in items:
            self.conclude(item.exchange, item.entry, item.give_up_code)
            self.finish_if_complete(item.exchange)
