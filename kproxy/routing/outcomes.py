"""Decide the outcome of entries: resent, failed, given up or expired.

kproxy.routing.retry has the rules for each error. This module adds the facts of the client connection: earlier
attempts, batches before and behind in the lane, deadlines, the client's end. Entries that may go now are `released`;
kproxy.routing.fanout sends them at the end of the event.

Rules
1. Nothing is resent after its deadline, to a broker that hangs, or where kproxy.routing.client_end forbids it.
2. A batch behind a refused one is resent behind it, and uses none of its attempts.
3. If an attempt may have been appended, the batch is resent only if brokers recognise it.
4. An out-of-order error behind a refused batch is not the batch's own outcome: producers overreact to it. librdkafka
   begins a new epoch, in which it resends unacknowledged batches of every partition, also those that were appended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kproxy.routing import retry
from kproxy.routing.actions import Actions, Counted, Reread, Retried, View
from kproxy.routing.client_end import ClientEnd
from kproxy.routing.identity import LaneKey, is_recognisable, lane_key
from kproxy.routing.in_flight import InFlight, Piece
from kproxy.routing.lanes import Item, Lanes, Pause
from kproxy.routing.merge import Exchange
from kproxy.routing.open_exchanges import OpenExchanges
from kproxy.routing.split import Entry
from kproxy.routing.topology import NO_OWNER
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.error_codes import NOT_LEADER_OR_FOLLOWER, OUT_OF_ORDER_SEQUENCE_NUMBER
from kproxy_codec.primitives import Buffer
from kproxy_codec.produce import base_offset_of


class _Verdict(NamedTuple):
    """The next step: another attempt after `pause`, or `error_code` for the client.

    Without a pause the entry is resent behind the one before it. `gives_up`: later batches of its client must not
    overtake it.
    """

    sends_again: bool
    pause: Pause | None
    error_code: int
    gives_up: bool


class Outcomes:
    """The outcomes of one client connection's entries, at the time `now` of the current event."""

    __slots__ = (
        "_actions",
        "_client",
        "_exchanges",
        "_in_flight",
        "_lanes",
        "_view",
        "jitter",
        "now",
        "released",
    )

    def __init__(
        self,
        view: View,
        actions: Actions,
        lanes: Lanes,
        in_flight: InFlight,
        exchanges: OpenExchanges,
        client: ClientEnd,
    ) -> None:
        self._view = view
        self._actions = actions
        self._lanes = lanes
        self._in_flight = in_flight
        self._exchanges = exchanges
        self._client = client
        self.now = 0.0
        self.jitter = 0.0
        self.released: list[Item] = []

    # Failed attempts

    def failed(
        self, exchange: Exchange, entry: Entry, event: int, routed_at: int, result: Buffer | None, *, broker: int
    ) -> None:
        """Retry or fail an entry after an attempt that was sent at the topology's version `routed_at`.

        `event` is an error code or a failure of kproxy.routing.retry. `result` is the broker's own entry, for codes
        that are passed on. `broker` would receive it now; NO_OWNER if none.
        """
        self.doubt(exchange, entry, event, routed_at)
        if not exchange.is_open(entry) or exchange not in self._exchanges:
            # It was answered at its deadline, or its client is gone; only the lane still needs the outcome.
            self.settle(exchange, (entry,))
            return
        verdict = self._judge(exchange, entry, event, routed_at, result, broker)
        key, sequence, error_code = lane_key(exchange, entry), exchange.sequence, verdict.error_code
        if verdict.sends_again:
            self._actions.add(Retried(event, exchange.sent_to(entry)))
            later = () if key in self._lanes else [each for each in self._in_flight.of(key) if each > sequence]
            self._lanes.refused(key, Item(exchange, entry, error_code), verdict.pause, later)
            return
        self._exchanges.conclude(exchange, entry, error_code, result if error_code == event else None)
        if verdict.gives_up and exchange.is_ordered and (behind_it := self._in_flight.of(key)):
            # Its client resends it. Batches that the client sent after it, unaware of the error, must not come first.
            self.give_up(self._lanes.give_up(key, sequence, self._exchanges.newest, behind_it))
        self.settle(exchange, (entry,), given_up=verdict.gives_up)

    def _judge(
        self, exchange: Exchange, entry: Entry, event: int, routed_at: int, result: Buffer | None, broker: int
    ) -> _Verdict:
        """Decide about an open entry that would go to `broker` now. Counts the attempt."""
        key, sequence = lane_key(exchange, entry), exchange.sequence
        rows = self._rows(exchange, result)
        safe, is_ambiguous = False, retry.is_ambiguous(rows, event)
        if is_ambiguous:
            exchange.ambiguous.add(entry)
            safe = self._view.keeps_producer_state and is_recognisable(exchange, entry)
        is_probing = self._lanes.is_probing(key, sequence)
        # If a refusal may follow an append, a resend is not safe just because it was behind another batch.
        behind = key in self._lanes and retry.is_held_back(event) and not is_probing and (safe or not is_ambiguous)
        attempts = exchange.attempts(entry)
        owner_version = self._view.topology.owner_version(*exchange.partition(entry))
        if not behind:
            attempts.add(routed_at, owner_version, self.now)
        decision = retry.decide(rows, event, exhausted=attempts.exhausted, resend_is_safe=safe)
        pause = None
        if not behind:
            soonest = self.now + attempts.soonest_s(self.jitter)
            has_moved = owner_version > routed_at and broker != NO_OWNER
            pause = Pause(soonest if has_moved else self.now + attempts.due_s(self.jitter), soonest, routed_at)
        sends_again = (
            (pause is None or (decision.retry and self._has_time(exchange, attempts, decision, pause, broker)))
            and not self._client.forbids(exchange, entry)
            and not self._client.forbids_again(exchange)
            and not self._lanes.is_given_up(key, sequence)
        )
        is_misled = event == OUT_OF_ORDER_SEQUENCE_NUMBER and behind
        error_code = NOT_LEADER_OR_FOLLOWER if is_misled else decision.error_code
        return _Verdict(sends_again, pause, error_code, gives_up=event in rows or retry.comes_again(event))

    def _has_time(
        self, exchange: Exchange, attempts: retry.Attempts, decision: retry.Decision, pause: Pause, broker: int
    ) -> bool:
        """Whether a retry may succeed before the deadline: a broker that hangs would delay it."""
        latest = min(exchange.deadline, attempts.first_failed_at + decision.wait_s)
        return pause.due < latest and not self._view.is_hung(self._view.topology.address(broker))

    def _rows(self, exchange: Exchange, result: Buffer | None) -> dict[int, retry.RetryRule]:
        """The rules for an exchange; `result` is the broker's answer to the entry, if there is one."""
        api_key = exchange.api.api_key
        base_offset = base_offset_of(result) if result is not None and api_key == PRODUCE else None
        return retry.rows_of(api_key, exchange.request.acks, self._view.semantics, base_offset)

    def doubt(self, exchange: Exchange, entry: Entry, event: int, routed_at: int) -> None:
        """Look up the owner after an event that casts doubt on it.

        This is done even without a resend: the client's next attempt needs the new owner.
        """
        if retry.doubts_the_owner(event):
            self.ask_for_owner(*exchange.partition(entry), routed_at)

    def ask_for_owner(self, topic: bytes, partition_index: int, routed_at: int) -> None:
        """Look up the owner, unless the topology has changed it since `routed_at`."""
        if self._view.topology.owner_version(topic, partition_index) <= routed_at:
            self._actions.add(Reread(topic, partition_index, routed_at))

    # Lanes

    def settle(
        self, exchange: Exchange, entries: Iterable[Entry], *, appended: bool = False, given_up: bool = False
    ) -> None:
        """Report an outcome to the lanes, if there are any."""
        if not self._lanes.table:
            return
        for entry in entries:
            key = lane_key(exchange, entry)
            release = self._lanes.settled(key, exchange.sequence, appended=appended, given_up=given_up)
            self.released += release.send
            self.give_up(release.give_up)

    def settle_pieces(self, withdrawn: Iterable[Piece]) -> None:
        """Settle the entries of pieces that no broker gets."""
        for piece in withdrawn:
            self.settle(piece.exchange, piece.entries())

    # Giving up

    def give_up(self, items: Iterable[Item]) -> None:
        """Answer each item with its `give_up_code`."""
        for item in items:
            self._exchanges.conclude(item.exchange, item.entry, item.give_up_code)
            self._exchanges.finish_if_complete(item.exchange)

    def give_up_lanes(self, keys: Iterable[LaneKey]) -> None:
        """Answer the items waiting in these lanes, except for acks=0."""
        for key in keys:
            self.give_up(self._lanes.take_away(key, lambda item: self._client.forbids_again(item.exchange)))

    def give_up_late(self, item: Item) -> None:
        """Give up an item if its deadline, or that of an earlier one in its lane, has passed."""
        exchange = item.exchange
        self.give_up([item])
        if exchange.is_late(self.now) and exchange not in self._exchanges:
            self._actions.add(Counted("deadlines", 1))
        self.settle(exchange, (item.entry,), given_up=True)

    def expire(self, due: list[Exchange]) -> None:
        """Answer the open entries of these exchanges and withdraw their pieces that no broker has seen."""
        sequences = {exchange.sequence for exchange in due}
        withdrawn = self._in_flight.withdraw(lambda piece: piece.exchange.sequence in sequences)
        written = [piece for piece in self._in_flight.pieces.values() if piece.exchange.sequence in sequences]
        for piece in (*withdrawn, *written):
            for entry in piece.entries():
                piece.exchange.note_sent(entry, piece.connection.broker)
        unwritten = {(piece.exchange.sequence, entry) for piece in withdrawn for entry in piece.entries()}
        for exchange in due:
            # The expiry of another exchange may have answered it by giving up the entries behind it.
            if exchange in self._exchanges:
                self.expire_one(exchange, unwritten)
        self.settle_pieces(withdrawn)

    def expire_one(self, exchange: Exchange, unwritten: set[tuple[int, Entry]]) -> None:
        """Answer the open entries of an exchange; no broker has received those in `unwritten`."""
        written = self._rows(exchange, None)[retry.CONNECTION_LOST].final or NOT_LEADER_OR_FOLLOWER
        for entry in exchange.open_entries():
            key = lane_key(exchange, entry)
            self.give_up(self._lanes.give_up(key, exchange.sequence, self._exchanges.newest, self._in_flight.of(key)))
            if exchange.is_open(entry):
                never_written = (exchange.sequence, entry) in unwritten
                self._exchanges.conclude(exchange, entry, NOT_LEADER_OR_FOLLOWER if never_written else written)
        self._exchanges.finish_if_complete(exchange)
        if exchange not in self._exchanges:
            # Its pieces may stay in flight for long; they are kept only for their order.
            exchange.request.let_go()
