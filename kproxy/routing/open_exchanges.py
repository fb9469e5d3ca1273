"""Keep the unanswered requests of one client connection until each is answered or dropped.

kproxy.routing.merge has the states of an exchange.

Invariants
1. A request is answered once, or never if it is dropped.
2. Each error that a client gets is counted. A loss for a client that gets no answer (acks=0) is reported as
   Undeliverable.
3. A read is answered by its own rules (kproxy.routing.reads).
4. A partition that was sent to no broker gets UNKNOWN_TOPIC_OR_PARTITION if the upstream does not have it, as from
   Kafka; without a leader or a known owner it gets NOT_LEADER_OR_FOLLOWER.
5. A batch that was sent before its client learned that an earlier one was refused is refused (kproxy.routing.refused).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from kproxy.routing import retry
from kproxy.routing.actions import Actions, Drop, Failed, Respond, Undeliverable
from kproxy.routing.identity import lane_key, place_of
from kproxy.routing.merge import Exchange, ExchangeState
from kproxy.routing.refused import Refused
from kproxy.routing.split import NOTHING_REFUSED, Entry
from kproxy.routing.topology import Topology
from kproxy_codec.error_codes import NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION
from kproxy_codec.primitives import Buffer


class OpenExchanges:
    """The open exchanges; actions go into `actions`."""

    __slots__ = ("_actions", "_refused", "_table", "_topology", "newest", "partitions")

    def __init__(self, actions: Actions, topology: Topology) -> None:
        self._actions = actions
        self._topology = topology
        # By sequence, in the order of requests.
        self._table: dict[int, Exchange] = {}
        self._refused = Refused()
        # The newest request that has been read.
        self.newest = 0
        # The number of partitions in open exchanges with more than one.
        self.partitions = 0

    def __len__(self) -> int:
        return len(self._table)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(list(self._table.values()))

    def __contains__(self, exchange: Exchange) -> bool:
        return exchange.sequence in self._table

    def add(self, exchange: Exchange) -> Mapping[Entry, int]:
        """Add a new request; return the entries that come too early (`Refused.arrived`), each with its error code."""
        self.newest = exchange.sequence
        self._open(exchange)
        return self._note_arrival(exchange) if self._refused.lanes and exchange.is_ordered else NOTHING_REFUSED

    def adopt(self, exchanges: Iterable[Exchange]) -> None:
        """Add requests that may be older than others here."""
        for exchange in exchanges:
            self.newest = max(self.newest, exchange.sequence)
            self._open(exchange)
        self._table = dict(sorted(self._table.items()))

    def shrink(self) -> None:
        """Shrink the tables. Call only while no exchange is open."""
        self._table.clear()

    def _open(self, exchange: Exchange) -> None:
        self._table[exchange.sequence] = exchange
        partitions = exchange.request.partition_count
        if partitions > 1:
            self.partitions += partitions

    def _close(self, exchange: Exchange) -> None:
        del self._table[exchange.sequence]
        partitions = exchange.request.partition_count
        if partitions > 1:
            self.partitions -= partitions

    @property
    def refused_lanes(self) -> Mapping[Hashable, Any]:
        """Not empty while all new requests must enter the core: a refused batch may come again."""
        return self._refused.lanes

    def _note_arrival(self, exchange: Exchange) -> dict[Entry, int]:
        early = {}
        for entry in exchange.open_entries():
            topic = exchange.topic(entry)
            # A batch may have been refused before its topic's id had a name.
            both = dict.fromkeys((lane_key(exchange, entry), (topic.wire, topic.partitions[entry[1]])))
            keys = [key for key in both if key in self._refused.lanes]
            place = place_of(exchange, entry) if keys else None
            if place is not None and any(self._refused.arrived(key, place) for key in keys):
                early[entry] = NOT_LEADER_OR_FOLLOWER
        return early

    def take_out(self, since: int, up_to: int) -> None:
        """Copy requests with a sequence in (since, up_to] out of receive buffers, so that these can be reused."""
        for sequence, exchange in self._table.items():
            if since < sequence <= up_to:
                exchange.request.take_out()

    # Results

    def conclude(self, exchange: Exchange, entry: Entry, error_code: int, result: Buffer | None = None) -> None:
        """Give an entry its final error; `result` is the broker's own entry if its code is passed on."""
        if error_code == NOT_LEADER_OR_FOLLOWER and result is None and self._topology.lacks(*exchange.partition(entry)):
            error_code = UNKNOWN_TOPIC_OR_PARTITION
        final = retry.final_code(error_code, is_ambiguous=entry in exchange.ambiguous)
        if exchange.is_silent:
            exchange.take(entry, b"")
            self._actions.add_last(Undeliverable(exchange.partition(entry)[0], final))
            return
        topic = exchange.partition(entry)[0]
        self._actions.add(Failed(exchange.api.api_key, final, exchange.sent_to(entry), topic))
        if exchange.is_ordered and retry.comes_again(final) and (place := place_of(exchange, entry)) is not None:
            self._refused.note(lane_key(exchange, entry), place)
        if result is not None and final == error_code:
            exchange.is_over = True
            exchange.take(entry, result)
        else:
            exchange.give_error(entry, final)

    def finish_if_complete(self, exchange: Exchange) -> None:
        """Answer a complete exchange, unless it is already answered or a read."""
        if exchange.complete and exchange.state is ExchangeState.OPEN and not exchange.is_read:
            self.respond(exchange, [] if exchange.is_silent else exchange.encode())

    def respond(self, exchange: Exchange, answer: list[Buffer]) -> None:
        """Answer an exchange; one without an answer (acks=0) is done."""
        exchange.move(ExchangeState.ANSWERED)
        self._close(exchange)
        self._actions.add(Respond(exchange.sequence, [] if exchange.is_silent else answer))

    def drop(self, exchange: Exchange) -> None:
        """Drop an exchange whose client is gone."""
        exchange.drop()
        self._close(exchange)
        self._actions.add(Drop(exchange.sequence))
