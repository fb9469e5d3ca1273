"""What becomes of an entry that met something other than success: another try, or its error.

The table of what may be tried again is kproxy.routing.retry. What is tried again goes through its lane, so that nothing
of its partition overtakes it.
"""

from __future__ import annotations

from codec.api_keys import PRODUCE
from codec.error_codes import NOT_LEADER_OR_FOLLOWER, OUT_OF_ORDER_SEQUENCE_NUMBER
from codec.primitives import Buffer
from codec.produce_response import base_offset_of
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.lookups import OwnerLookups
from kproxy.proxy.open_exchanges import OpenExchanges
from kproxy.proxy.order import Order
from kproxy.proxy.pieces import UnderWay
from kproxy.proxy.standing import Standing
from kproxy.routing import retry
from kproxy.routing.identity import is_recognisable, lane_key
from kproxy.routing.lanes import Item
from kproxy.routing.merge import Exchange
from kproxy.routing.split import Entry


class Failures:
    """Of one client connection."""

    def __init__(
        self,
        context: ProxyContext,
        exchanges: OpenExchanges,
        order: Order,
        under_way: UnderWay,
        standing: Standing,
    ) -> None:
        self._context = context
        self._topology = context.topology
        self._exchanges = exchanges
        self._order = order
        self._lanes = order.lanes
        self._under_way = under_way
        self._standing = standing
        self.lookups = OwnerLookups(context)

    def failed(
        self, exchange: Exchange, entry: Entry, event: int, routed_at: int, result: Buffer | None = None
    ) -> None:
        """An `event` (kproxy.routing.retry) has met what was sent at the topology's revision `routed_at`.

        `result` is the broker's own entry, for codes that are handed on.
        """
        key, sequence = lane_key(exchange, entry), exchange.sequence
        topic, partition_index = exchange.partition(entry)
        owner_revision = self._topology.owner_revision(topic, partition_index)
        if owner_revision <= routed_at and retry.doubts_the_owner(event):
            # Whether or not anything is sent again from here: the client's own next attempt is to find the new owner.
            self.lookups.ask(topic, partition_index, routed_at)
        if not exchange.is_open(entry) or exchange not in self._exchanges:
            # It was answered at its deadline, or its client is gone; only the lane still wants to know.
            self._order.settle(exchange, entry, appended=False)
            return
        rows = self._rows(exchange, result)
        safe, is_ambiguous = False, retry.is_ambiguous(rows, event)
        if is_ambiguous:
            exchange.ambiguous.add(entry)
            safe = self._context.knows_batches_again and is_recognisable(exchange, entry)
        is_probing = self._lanes.is_probing(key, sequence)
        # Where a refusal may come after an append, being behind another one does not make a second sending safe.
        behind = key in self._lanes and retry.is_held_back(event) and not is_probing and (safe or not is_ambiguous)
        attempts = exchange.attempts(entry)
        if not behind:
            attempts.add(routed_at, owner_revision, self._context.clock())
        verdict = retry.decide(rows, event, exhausted=attempts.exhausted, resend_is_safe=safe)
        # Being out of order behind another one is not its own outcome, and producers end at that code.
        is_misled = behind and event == OUT_OF_ORDER_SEQUENCE_NUMBER
        error_code = NOT_LEADER_OR_FOLLOWER if is_misled else verdict.error_code
        item = Item(exchange, entry, error_code)
        pause = None if behind else self._order.timer.pause(item, attempts, routed_at)
        latest = min(exchange.deadline, attempts.first_failed_at + verdict.wait_s)
        tries_again = pause is None or (verdict.retry and pause.due < latest and not self._owner_hangs(exchange, entry))
        if tries_again and not self._standing.is_over(exchange, entry) and not self._lanes.is_given_up(key, sequence):
            self._context.tally.retry(event, attempts.sent_to)
            later = () if key in self._lanes else [each for each in self._under_way.of(key) if each > sequence]
            self._lanes.refused(key, item, pause, later)
            return
        self._exchanges.conclude(exchange, entry, error_code, result if error_code == event else None)
        gives_up = event in rows or (is_probing and retry.is_tried_again_by_clients(event))
        if gives_up and exchange.is_ordered and ((behind_it := self._under_way.of(key)) or key in self._lanes):
            # Its client sends it again; what it sent behind it before it could know is not to come first.
            self._exchanges.give_up(self._lanes.give_up(key, sequence, self._exchanges.newest, behind_it))
        self._order.settle(exchange, entry, appended=False, given_up=gives_up)

    def unanswered_code(self, exchange: Exchange) -> int:
        """The error of what a broker may have seen and has not answered."""
        return self._rows(exchange, None)[retry.CONNECTION_LOST].final or NOT_LEADER_OR_FOLLOWER

    def _owner_hangs(self, exchange: Exchange, entry: Entry) -> bool:
        """Whether sending again would wait behind a hung broker; a new owner's breaker counts, not the old one's."""
        health = self._context.health
        if not health.watching:
            return False
        return health.is_open(self._topology.address(exchange.route(entry, self._topology)))

    def _rows(self, exchange: Exchange, result: Buffer | None) -> dict[int, retry.Row]:
        api = exchange.api
        base_offset = base_offset_of(result) if result is not None and api.api_key == PRODUCE else None
        return retry.rows_of(api.api_key, exchange.request.acks, self._context.conduct, base_offset)
