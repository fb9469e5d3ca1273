"""Split, send, retry and merge the requests of one client connection.

These are Produce, Fetch and ListOffsets requests. This module decides; it has no sockets, tasks or clocks. Events come
in as method calls, and actions go out as values (kproxy.routing.actions). An event carries the time `now`, in seconds,
and a `jitter` in [0, 1). The caller carries out all actions of an event, in order, before it brings the next one. If
the topology has changed, that is the next event.

The compiled plain path (kproxy.plain), if built, sends requests whose routes are all proven, and handles their
successes. These requests enter the core by `adopt` before an event that may concern them: an answer that is not a
success, a due deadline, a lost connection, a topology change (`is_concerned`), the end of the client's data.

The states are those of the core's parts: kproxy.routing.merge for an exchange, kproxy.routing.lanes for a lane,
kproxy.routing.in_flight for a broker connection, kproxy.routing.client_end for the client. kproxy.routing.routes
decides where batches may be pipelined, kproxy.routing.outcomes decides about failed attempts.

Invariants
1. An open entry of a Produce or ListOffsets request is in one place at any time: a piece in flight or a lane.
2. An entry that is sent again goes through a lane; nothing of its partition overtakes it.
3. On a new route one batch goes first, and the next ones follow its success (kproxy.routing.routes).
4. If a topology change moves a partition away from the broker of its unanswered batches, later batches wait for them.
5. Nothing is sent again after its deadline, or for the first time after waiting until then. An entry that a broker may
   have seen keeps its lane until it is answered or its connection has ended; entries that the client sent after it are
   given up with it.
6. Entries that the client's end forbids (kproxy.routing.client_end) are not sent. Batches for topics with a writer
   group that a broker has received are held from then on until they are answered or lost.
7. An event changes all lanes it concerns before anything is sent.
8. A request is answered once, or never if it is dropped. The acknowledgement of an entry is noted once, before that.
9. Each error that a client gets is counted. A loss for a client that gets no answer (acks=0) is reported as
   Undeliverable.
10. Reads have connections apart from those of batches, and rules of their own (kproxy.routing.reads). Each event ends
   with a look at the present read.
11. Batches of claimed partitions are sent with the fences in force at that moment. Whether the claims are live is not
   decided here: the caller checks it when it writes.
12. An event judges at most MOST_AT_ONCE entries that have neither a broker nor a lane; `woken` sends from at most as
   many due lanes. The other entries wait in lanes for the next wake.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from kproxy.routing import retry
from kproxy.routing.actions import (
    Action,
    Actions,
    Adopted,
    Counted,
    Fenced,
    LetGo,
    Loss,
    Note,
    NoteLost,
    Send,
    Unconfirmed,
    View,
    WakeAt,
)
from kproxy.routing.client_end import ClientEnd, ClientState
from kproxy.routing.identity import LaneKey, TopicNames, lane_key
from kproxy.routing.in_flight import BrokerConnection, ConnectionState, InFlight, Piece
from kproxy.routing.lanes import Item, Lanes
from kproxy.routing.merge import Exchange, Matched, answers_in_order, match_results
from kproxy.routing.open_exchanges import OpenExchanges
from kproxy.routing.outcomes import Outcomes
from kproxy.routing.reads import Reads
from kproxy.routing.routes import Router, Routes
from kproxy.routing.split import NOTHING_REFUSED, Entry, Selection, add_entry, entries_of
from kproxy.routing.topology import NO_OWNER
from kproxy_codec.api_keys import PRODUCE
from kproxy_codec.error_codes import NOT_LEADER_OR_FOLLOWER, POLICY_VIOLATION, UNKNOWN_TOPIC_ID
from kproxy_codec.errors import CodecError
from kproxy_codec.partitioned import PartitionedRequest, PartitionedResponse, set_response_correlation_id
from kproxy_codec.primitives import Buffer

# A broker that has not answered this long after a deadline will not answer: its own timer has expired too. Seconds.
HUNG_AFTER_S = 5.0
# Entries without a broker, and due lanes, that one event judges: some milliseconds of work.
MOST_AT_ONCE: Final = 128
# Timers have a resolution of milliseconds and may fire a fraction of one early, when nothing is due yet.
TIMER_STEP_S: Final = 0.001
# A broker has the piece, but its answer will not come.
_MAY_STILL_BE_APPENDED: Final = (retry.CONNECTION_LOST, retry.UNREADABLE)


class Fanout:
    """The exchanges of one client connection."""

    __slots__ = (
        "_actions",
        "_client",
        "_exchanges",
        "_in_flight",
        "_left_to_judge",
        "_names",
        "_outcomes",
        "_reads",
        "_router",
        "_topology",
        "_view",
        "_wakes_at",
        "lanes",
        "routes",
        "version",
    )

    def __init__(self, view: View) -> None:
        self._view = view
        self._topology = view.topology
        self.lanes = Lanes()
        self.routes = Routes(view.topology)
        self._actions = Actions()
        self._in_flight = InFlight(self._actions)
        self._exchanges = OpenExchanges(self._actions, view.topology)
        self._client = ClientEnd(view, self._actions)
        self._outcomes = Outcomes(view, self._actions, self.lanes, self._in_flight, self._exchanges, self._client)
        self._router = Router(view.topology, self.routes, self._in_flight)
        self._reads = Reads(
            view.topology, self._actions, self.lanes, self._in_flight, self._exchanges, self._outcomes, self._router
        )
        self._names = TopicNames(view)
        # The last version of the topology that `_follow` has handled.
        self.version = view.topology.version
        self._wakes_at: float | None = None
        # Valid during the current event.
        self._left_to_judge = 0

    # Queries of the shell and the plain path, without side effects

    @property
    def gate(self) -> tuple[Mapping[LaneKey, Any], Mapping[Hashable, Any], OpenExchanges]:
        """The objects that decide whether requests may use the plain path.

        The first two must be empty; the third counts the core's open `partitions`. The objects are never replaced.
        """
        return self.lanes.table, self._exchanges.refused_lanes, self._exchanges

    @property
    def is_concerned(self) -> bool:
        """Whether the change of the topology affects requests on the plain path."""
        return self.routes.is_outdated(self._topology.moved_since(self.version))

    @property
    def open_count(self) -> int:
        """The number of open exchanges: not answered, or with acks=0 not sent."""
        return len(self._exchanges)

    @property
    def open_partitions(self) -> int:
        """The number of partitions in open exchanges with more than one."""
        return self._exchanges.partitions

    @property
    def is_idle(self) -> bool:
        """Whether time alone changes nothing."""
        return not (len(self._exchanges) or self._in_flight.pieces or self._reads.found)

    @property
    def is_reading(self) -> bool:
        """Whether a read waits for answers now."""
        return self._reads.present is not None

    def is_due(self, now: float) -> bool:
        """Whether a tick at this time reaches a deadline; requests of the plain path must enter before."""
        return any(exchange.is_late(now) for exchange in self._exchanges)

    # Not events: these return no actions.

    def name_topics(self, request: PartitionedRequest) -> None:
        """Replace topic ids by names."""
        self._names.put(request)

    def adopt(self, records: Sequence[Adopted]) -> list[int]:
        """Take over requests of the plain path, in order; return the numbers of their pieces."""
        in_flight = self._in_flight
        self._exchanges.adopt(record.exchange for record in records)
        pieces = [
            in_flight.add(exchange, in_flight.connections[connection], part, routed_at)
            for exchange, routed_at, parts in records
            for connection, part in parts
        ]
        self._reads.adopt(pieces)
        return [piece.number for piece in pieces]

    def opened(self, connection: int) -> None:
        """Note a successful dial: pieces that waited for it are about to be written."""
        self._in_flight.opened(connection)

    def unsent(self, number: int) -> None:
        """Drop a piece that was not written because its client is about to be severed."""
        piece = self._in_flight.pieces[number]
        self._in_flight.remove(piece)
        self._outcomes.settle(piece.exchange, piece.entries())

    def take_out(self, since: int, up_to: int) -> None:
        """Copy the requests with a sequence in (since, up_to] out of receive buffers, so that these can be reused."""
        self._exchanges.take_out(since, up_to)
        if not self.lanes.table:
            self._in_flight.forget()

    def shrink(self) -> None:
        """Shrink the tables. Call only while nothing is open."""
        self._exchanges.shrink()
        self._in_flight.shrink()
        self.lanes.shrink()

    def stop_retries(self) -> None:
        """Send no batch a second time from now on, except with acks=0; `give_up_retries` ends those that wait."""
        self._client.has_ended_sending = True

    # Events: requests

    def submitted(self, exchange: Exchange, refused: Mapping[Entry, int], now: float, jitter: float) -> list[Action]:
        """Begin a request. Entries in `refused` are not sent; each gets its error code."""
        self._begin(now, jitter)
        if early := self._exchanges.add(exchange):
            refused = {**early, **refused}
        if not exchange.is_silent and exchange.is_late(now):
            # The deadline passed before the request began: no broker receives any of it.
            self._actions.add(Counted("deadlines", 1))
            self._outcomes.expire_one(exchange, {(exchange.sequence, entry) for entry in exchange.open_entries()})
            return self._finish()
        if exchange.is_read:
            self._reads.add(exchange, refused)
        else:
            self._dispatch(exchange, refused)
        for entry, error_code in refused.items():
            if error_code == UNKNOWN_TOPIC_ID:
                # Its client retries, and the name decides whether it may access the topic.
                self._outcomes.ask_for_owner(*exchange.partition(entry), self._topology.version)
            self._exchanges.conclude(exchange, entry, error_code)
        if refused:
            self._exchanges.finish_if_complete(exchange)
        return self._finish()

    # Events: brokers

    def left(self, pieces: Sequence[int], now: float, jitter: float) -> list[Action]:
        """Finish pieces without an answer (acks=0) that have been sent: their outcome stays unknown."""
        self._begin(now, jitter)
        for number in pieces:
            self._left(self._in_flight.pieces[number])
        return self._finish()

    def answered(self, number: int, frame: memoryview, now: float, jitter: float) -> list[Action]:
        """Handle a broker's answer to a piece."""
        self._begin(now, jitter)
        piece = self._in_flight.pieces[number]
        exchange = piece.exchange
        try:
            response = exchange.api.parse_response(frame, exchange.request.header.api_version)
            passes = self._passes_through(piece, response)
            is_looked_at = not response.error_code and (exchange.is_ordered or not passes)
            matched = match_results(exchange, piece.selection, response) if is_looked_at else []
        except CodecError as error:
            self._fail_piece(piece, retry.UNREADABLE)
            self._in_flight.close(piece.connection, str(error), is_untrue=True)
            return self._finish(piece)
        if response.error_code:
            (self._reads.present or exchange if exchange.is_read else exchange).note(response)
            self._fail_piece(piece, response.error_code)
            return self._finish(piece)
        self._in_flight.remove(piece)
        self._note(piece, frame, matched)
        if passes:
            for entry, *_ in matched:
                self._succeeded(piece, entry)
            if exchange.is_read:
                self._reads.pass_on(exchange, piece, response)
            set_response_correlation_id(frame, exchange.request.header.correlation_id)
            self._exchanges.respond(exchange, [frame])
        elif exchange.is_read:
            self._reads.take(piece, frame, response, matched)
        else:
            exchange.note(response)
            self._take_results(piece, frame, matched)
        return self._finish(piece)

    def lost(
        self, connection: int, losses: Sequence[tuple[int, Loss]], now: float, jitter: float, *, is_unconfirmed: bool
    ) -> list[Action]:
        """End a connection and the pieces on it.

        `is_unconfirmed`: acks=0 batches that left on it shortly before may not have arrived, or the broker refused them
        by closing the connection, as Kafka does. So their owners are looked up again.
        """
        self._begin(now, jitter)
        ended = self._in_flight.connections[connection]
        self._in_flight.closed(ended)
        self.routes.forget_connection(connection)
        # A read that nobody wants any more is not in flight.
        known = self._in_flight.pieces
        lost = [(known[number], loss) for number, loss in losses if number in known]
        for piece, loss in lost:
            if loss is Loss.LEFT:
                self._left(piece)
            else:
                self._fail_piece(piece, retry.CONNECTION_LOST if loss is Loss.WRITTEN else retry.NOT_WRITTEN)
        if is_unconfirmed:
            for (topic, partition_index), (batches, routed_at) in ended.take_unconfirmed(now).items():
                self._actions.add(Unconfirmed(self._topology.name_of(topic) or topic, batches))
                self._outcomes.ask_for_owner(topic, partition_index, routed_at)
        del self._in_flight.connections[connection]
        return self._finish(*(piece for piece, _ in lost))

    # Events: the topology and time

    def topology_changed(self, now: float, jitter: float) -> list[Action]:
        """Follow the topology; an entry that backs off from one owner is sent at once to a new one."""
        self._begin(now, jitter)
        self._follow()
        self.lanes.hasten(self._has_moved)
        return self._finish()

    def woken(self, receiving: Collection[int], now: float, jitter: float) -> list[Action]:
        """Handle the time of the last WakeAt: lanes may be due, and a read's time over.

        `receiving` are the connections where an answer arrives, or which are not read for now: no read there is late.
        """
        self._begin(now, jitter)
        self._wakes_at = None
        self._reads.woken(receiving)  # A partition that leaves its lane below is not late.
        self._send_items(self.lanes.ready(now, MOST_AT_ONCE))
        self._send_released()
        return self._finish()

    def tick(self, oldest: Mapping[int, int], now: float, jitter: float) -> list[Action]:
        """Answer requests at their deadline.

        Done entries get their results, the others an error. A produce entry that a broker may have seen gets
        REQUEST_TIMED_OUT, one never written NOT_LEADER_OR_FOLLOWER. `oldest` is the next piece to be answered, by
        connection.
        """
        self._begin(now, jitter)
        due = [exchange for exchange in self._exchanges if exchange.is_late(now)]
        if due:
            self._actions.add(Counted("deadlines", len(due)))
            self._outcomes.expire(due)
            self._reads.has_news = True
        for number in oldest.values():
            piece = self._in_flight.pieces.get(number)
            if piece is not None and max(piece.exchange.deadline, piece.due) + HUNG_AFTER_S <= now:
                self._in_flight.close(piece.connection, "it does not answer")
        self._reads.forget()
        return self._finish()

    # Events: the client's end

    def parted(self, now: float, jitter: float) -> list[Action]:
        """Note that the client is gone: send nothing more for topics with a writer group, whatever the acks."""
        return self._part(ClientState.PARTED, now, jitter) if self._view.gated else []

    def give_up_retries(self, now: float, jitter: float) -> list[Action]:
        """Answer the batches that wait to be sent again, and those behind them."""
        self._begin(now, jitter)
        waiting = self.lanes.waiting()
        self._outcomes.give_up_lanes({key for key, item in waiting if item.exchange.attempts(item.entry).in_all})
        return self._finish()

    def give_up_unwritten(self, now: float, jitter: float) -> list[Action]:
        """Answer batches that still wait for a dial some time after `stop_retries`, and those behind them."""
        self._begin(now, jitter)
        withdrawn = self._in_flight.withdraw(lambda piece: self._client.forbids_again(piece.exchange))
        for piece in withdrawn:
            items = [Item(piece.exchange, entry, NOT_LEADER_OR_FOLLOWER) for entry in piece.entries()]
            self._outcomes.give_up(item for item in items if piece.exchange.is_open(item.entry))
            self._outcomes.give_up_lanes({lane_key(piece.exchange, item.entry) for item in items})
        self._outcomes.settle_pieces(withdrawn)
        return self._finish()

    def severed(self, now: float, jitter: float) -> list[Action]:
        """Note that another client has its claims: send nothing more for any topic."""
        return self._part(ClientState.SEVERED, now, jitter)

    def closing(self, now: float, jitter: float) -> list[Action]:
        """Note that the client is gone: drop its requests, except those with acks=0.

        The client sends the dropped ones again itself. Requests with acks=0 are still sent.
        """
        self._begin(now, jitter)
        for exchange in self._exchanges:
            if not exchange.is_silent:
                self._exchanges.drop(exchange)
        self.lanes.drop(lambda exchange: not exchange.is_silent)
        self._outcomes.settle_pieces(self._in_flight.withdraw(lambda piece: not piece.exchange.is_silent))
        return self._finish()

    def ended(self, now: float, jitter: float) -> list[Action]:
        """Stop waiting for the remaining requests."""
        self._begin(now, jitter)
        self._outcomes.expire(list(self._exchanges))
        return self._finish()

    # One event

    def _begin(self, now: float, jitter: float) -> None:
        self._outcomes.now = now
        self._outcomes.jitter = jitter
        self._left_to_judge = MOST_AT_ONCE

    def _finish(self, *pieces: Piece) -> list[Action]:
        """Send waiting entries that may go now; `pieces` are answered or lost."""
        self._send_released()
        self._reads.has_news |= any(piece.connection.reader for piece in pieces)
        self._read_on()
        for piece in pieces:
            if piece.is_held:
                self._actions.add(LetGo(piece.number))
        due = self._next_wake()
        if due is not None and (self._wakes_at is None or due < self._wakes_at):
            self._wakes_at = due
            self._actions.add(WakeAt(due))
        return self._actions.take()

    def _next_wake(self) -> float | None:
        due = self.lanes.next_due() if self.lanes.table else None
        if due is not None:
            due = max(due, self._outcomes.now) + TIMER_STEP_S
        others = (due, self._reads.next_wake())
        return min((each for each in others if each is not None), default=None)

    # Sending

    def _dispatch(self, exchange: Exchange, refused: Mapping[Entry, int] = NOTHING_REFUSED) -> None:
        """Send all entries of an exchange that are not `refused`, or queue them in their lanes."""
        held = self._hold_back(exchange, refused) if self.lanes.table else refused
        pieces = self._router.split(exchange, held)
        exchange.shares = max(1, len(pieces))
        if len(pieces) > 1:
            self._actions.add(Counted("splits", 1))
        whole = len(pieces) == 1 and not held
        for owner, selection in pieces.items():
            self._send(exchange, owner, selection, shares=len(pieces), whole=whole)
        self._exchanges.finish_if_complete(exchange)

    def _hold_back(self, exchange: Exchange, refused: Mapping[Entry, int]) -> set[Entry]:
        """Put entries that must wait into their lanes; return these, and the refused ones, which do not wait."""
        held = set(refused)
        for entry in exchange.open_entries():
            key = lane_key(exchange, entry)
            if key in self.lanes.table and entry not in refused:
                self.lanes.queue(key, Item(exchange, entry, NOT_LEADER_OR_FOLLOWER))
                held.add(entry)
        return held

    def _send(self, exchange: Exchange, owner: int, selection: Selection, *, shares: int, whole: bool) -> None:
        if owner == NO_OWNER:
            for entry in entries_of(selection):
                if self._left_to_judge <= 0 and self._puts_off(exchange, entry):
                    continue
                self._left_to_judge -= 1
                is_nameless = exchange.request.is_nameless(exchange.topic(entry))
                event = UNKNOWN_TOPIC_ID if is_nameless else retry.NOT_WRITTEN
                self._failed(exchange, entry, event, self._topology.version)
            return
        connection = self._connection_for(exchange, owner)
        if exchange.is_ordered:
            self._probe_new_routes(exchange, connection, selection)
        part = None if whole else selection
        piece = self._in_flight.add(exchange, connection, part, self._topology.version)
        fences = self._fences(exchange, selection) if self._view.has_claims else ()
        place = connection.number, owner, piece.number
        self._actions.add(Send(*place, exchange, part, shares, fences, connection.reader))

    def _connection_for(self, exchange: Exchange, owner: int) -> BrokerConnection:
        """The connection for a part of a request, except a read."""
        if exchange.api.api_key != PRODUCE and (connection := self._in_flight.free_reader(owner)) is not None:
            # Offsets are listed beside reads, but do not wait behind one.
            return connection
        return self._in_flight.connection_to(owner)

    def _read_on(self) -> None:
        """Begin, ask for and answer reads, as far as possible now."""
        while (read := self._reads.go_on()) is not None:
            for lost in self._reads.ask(read):
                self._send(read, NO_OWNER, lost, shares=read.shares, whole=False)
            self._reads.answer_if_done(read)

    def _puts_off(self, exchange: Exchange, entry: Entry) -> bool:
        """Let an entry without a broker wait for the next wake, if this event has judged enough of them."""
        key = lane_key(exchange, entry)
        if key in self.lanes.table:
            # The entry came from there a moment ago, or something else is unresolved: judge it now.
            return False
        self.lanes.put_off(key, Item(exchange, entry, NOT_LEADER_OR_FOLLOWER), self._outcomes.now)
        return True

    def _fences(self, exchange: Exchange, selection: Selection) -> list[Fenced]:
        """The fences for sending the entries now: a claim may be raised before a retry."""
        if exchange.api.api_key != PRODUCE:
            return []
        partitions = map(exchange.partition, entries_of(selection))
        return [(each, fence) for each in partitions if (fence := self._view.write_fence(*each))]

    def _probe_new_routes(self, exchange: Exchange, connection: BrokerConnection, selection: Selection) -> None:
        for topic_place, ordinals in selection:
            topic = exchange.request.topics[topic_place]
            for ordinal in self.routes.new_among(topic, ordinals, connection.number):
                self.lanes.probe(lane_key(exchange, (topic_place, ordinal)), exchange.sequence)

    def _send_released(self) -> None:
        while self._outcomes.released:
            released, self._outcomes.released = self._outcomes.released, []
            self._send_items(released)

    def _send_items(self, items: list[Item]) -> None:
        """Send items that may go now: one piece for each exchange and broker."""
        items.sort(key=lambda item: (item.exchange.sequence, item.entry))
        given_up: set[LaneKey] = set()
        for sequence, group in groupby(items, key=lambda item: item.exchange.sequence):
            pieces: dict[int, Selection] = {}
            for item in group:
                exchange = item.exchange
                key = lane_key(exchange, item.entry)
                self._reads.has_news |= exchange.is_read
                if exchange not in self._exchanges or not exchange.is_open(item.entry):
                    self._outcomes.settle(exchange, (item.entry,))
                elif key in given_up or exchange.is_late(self._outcomes.now):
                    # It, or an earlier one, has reached its deadline.
                    given_up.add(key)
                    self._outcomes.give_up_late(item)
                elif key in self.lanes.table and not self.lanes.is_probing(key, sequence):
                    # An earlier batch found its route new, or found no route.
                    self.lanes.queue(key, item)
                else:
                    partition = exchange.partition(item.entry)
                    if self._view.is_reread(*partition):
                        exchange.attempts(item.entry).send_blindly(self._topology.owner_version(*partition))
                    if exchange.is_read:
                        # Its lane ends, and the present read asks for it with all else.
                        self._outcomes.settle(exchange, (item.entry,))
                        continue
                    add_entry(pieces.setdefault(self._router.broker_for(exchange, item.entry), []), *item.entry)
            # An entry of a request with several partitions is sent as a part, whatever the state of the others.
            whole = exchange.is_ordered and exchange.request.partition_count == 1
            shares = max(2, len(pieces))
            exchange.shares = max(exchange.shares, shares)
            for owner, selection in pieces.items():
                self._send(exchange, owner, selection, shares=shares, whole=whole)
            self._exchanges.finish_if_complete(exchange)

    # Following the topology

    def _follow(self) -> None:
        """Block partitions with unanswered batches that would now go elsewhere.

        If many partitions change owners, few of them are this client's: partitions that did not move are skipped.
        """
        moved = self._topology.moved_since(self.version)
        self.version = self._topology.version
        self.routes.forget_outdated(moved)
        if moved is None:
            self._rename()
            for connection in self._in_flight.connections.values():
                if self._topology.address(connection.broker) is None:
                    # Later batches go elsewhere, or wait.
                    self.routes.forget_connection(connection.number)
        topics = {topic for topic, _ in moved} if moved is not None else None
        read = self._reads.present
        self._reads.has_news |= read is not None and (topics is None or read.asks_of_any(topics))
        for piece in self._in_flight.ordered():
            exchange = piece.exchange
            if topics is not None and not exchange.asks_of_any(topics):
                continue
            for entry in piece.entries():
                # The same owner with a new ownership counts as a different one: it now accepts what it refused before.
                is_new = self._topology.owner_version(*exchange.partition(entry)) > piece.routed_at
                if is_new or self._router.broker_for(exchange, entry) != piece.connection.broker:
                    self.lanes.block(lane_key(exchange, entry), (exchange.sequence,))

    def _rename(self) -> None:
        """Apply topic names that the topology has learnt to requests that are open or in flight."""
        in_flight = [piece.exchange for piece in self._in_flight.ordered()]
        renamed = self._names.learn([*in_flight, *self._exchanges])
        if renamed:
            self._in_flight.forget()
        for key, new_key in renamed:
            self._outcomes.give_up(self.lanes.rename(key, new_key))

    def _has_moved(self, item: Item, routed_at: int) -> bool:
        """Whether the partition has since moved to an owner that can be reached."""
        if self._topology.owner_version(*item.exchange.partition(item.entry)) <= routed_at:
            return False
        return self._router.broker_for(item.exchange, item.entry) != NO_OWNER

    # Answers

    def _passes_through(self, piece: Piece, response: PartitionedResponse) -> bool:
        """Whether an answer can be passed to the client unchanged."""
        exchange = piece.exchange
        return (
            piece.part is None
            and not response.names_brokers
            and exchange in self._exchanges
            and exchange.throttle_time_ms == 0
            and answers_in_order(exchange.request, response)
        )

    def _note(self, piece: Piece, frame: memoryview, matched: Matched) -> None:
        """Note the entries that an answer acknowledges, for a client that still waits for it."""
        exchange = piece.exchange
        if exchange not in self._exchanges or not exchange.is_ordered or exchange.is_silent:
            return
        broker = piece.connection.broker
        for entry, error_code, topic, ordinal in matched:
            if not error_code:
                result = frame[topic.starts[ordinal] : topic.ends[ordinal]]
                self._actions.add(Note(exchange, entry, broker, piece.routed_at, result))

    def _take_results(self, piece: Piece, frame: memoryview, matched: Matched) -> None:
        """Record an answer's results: successes first, as the lanes that they release affect the failures."""
        exchange = piece.exchange
        failures = []
        for entry, error_code, topic, ordinal in matched:
            result = frame[topic.starts[ordinal] : topic.ends[ordinal]]
            if error_code:
                failures.append((entry, error_code, result))
            else:
                exchange.take(entry, result)
                self._succeeded(piece, entry)
        broker = piece.connection.broker
        for entry, error_code, result in failures:
            exchange.note_sent(entry, broker)
            if error_code == NOT_LEADER_OR_FOLLOWER:
                exchange.attempts(entry).refused_by |= {broker}
                if exchange.is_ordered:
                    # Not for ListOffsets: the plain path does not enter the core for it, and relies on this route.
                    self.routes.refuted(*exchange.partition(entry), piece.connection.number)
            self._failed(exchange, entry, error_code, piece.routed_at, result)
        self._exchanges.finish_if_complete(exchange)

    def _succeeded(self, piece: Piece, entry: Entry) -> None:
        if not self.lanes.table:
            return
        exchange, connection = piece.exchange, piece.connection
        is_probing = exchange.is_ordered and self.lanes.is_probing(lane_key(exchange, entry), exchange.sequence)
        is_there = connection.state is ConnectionState.OPEN and self._topology.address(connection.broker) is not None
        if is_probing and is_there:
            self.routes.prove(*exchange.partition(entry), connection.number, piece.routed_at)
        self._outcomes.settle(exchange, (entry,), appended=True)

    def _left(self, piece: Piece) -> None:
        exchange, connection = piece.exchange, piece.connection
        self._in_flight.remove(piece)
        for entry in piece.entries():
            exchange.take(entry, b"")
            connection.note_unconfirmed(exchange.partition(entry), piece.routed_at, self._outcomes.now)
        self._outcomes.settle(exchange, piece.entries(), appended=True)
        self._exchanges.finish_if_complete(exchange)

    def _fail_piece(self, piece: Piece, event: int) -> None:
        """Apply the same event (kproxy.routing.retry) to every entry of a piece."""
        if event in _MAY_STILL_BE_APPENDED and (gated := self._client.gated_partitions(piece)):
            self._actions.add(NoteLost(gated))
        self._in_flight.remove(piece)
        exchange = piece.exchange
        if exchange.is_read:
            self._reads.lost(piece, event)
            return
        for entry in piece.entries():
            exchange.note_sent(entry, piece.connection.broker)
            self._failed(exchange, entry, event, piece.routed_at)
        self._exchanges.finish_if_complete(exchange)

    def _failed(
        self, exchange: Exchange, entry: Entry, event: int, routed_at: int, result: Buffer | None = None
    ) -> None:
        """Retry or fail an entry after an attempt that was sent at the topology's version `routed_at`."""
        to = self._router.broker_for(exchange, entry)
        self._outcomes.failed(exchange, entry, event, routed_at, result, broker=to)

    # The client's end

    def _part(self, state: ClientState, now: float, jitter: float) -> list[Action]:
        self._begin(now, jitter)
        self._client.move(state)
        withdrawn = self._in_flight.withdraw(self._client.forbids_any_of)
        written = self._in_flight.ordered()
        self._client.hold(written)
        sent = {(piece.exchange.sequence, entry) for piece in written for entry in piece.entries()}
        is_severed = state is ClientState.SEVERED
        for exchange in self._exchanges:
            # A read may ask for all of its entries again.
            if is_severed or any(self._client.forbids(exchange, entry) for entry in exchange.open_entries()):
                self._part_from(exchange, sent)
        self._outcomes.settle_pieces(withdrawn)
        # Items that these release have also ended; the next event handles them.
        return self._actions.take()

    def _part_from(self, exchange: Exchange, sent: set[tuple[int, Entry]]) -> None:
        if not exchange.is_silent:
            self._exchanges.drop(exchange)
            exchange.request.let_go()
            return
        for entry in exchange.open_entries():
            if (exchange.sequence, entry) not in sent:
                self._exchanges.conclude(exchange, entry, POLICY_VIOLATION)
        self._exchanges.finish_if_complete(exchange)
