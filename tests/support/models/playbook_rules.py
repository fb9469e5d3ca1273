"""Check the rules that hold after every event of a Playbook (tests.support.models.playbook), in any script.

 1. An open entry is in one place: one piece under way, or one lane. One of a read is in a lane, or its broker is asked
    for something; a connection has one read at a time.
 2. `open_count` is the number of entries that have no result, `open_partitions` that of the partitions of open requests
    that have more than one.
 3. `InFlight.of` names exactly the pieces under way, and the pieces for which a lane waits are under way.
 4. A lane's items are not done, and in the order of requests; a lane that waits only for a time has a wake-up.
 5. A request is answered or dropped once at most.
 6. An acknowledgement is noted once, with the client's answer, and before it is sent; nothing else is noted.
 7. An error that is answered was counted.
 8. Nothing is sent past its deadline, beside its lane, or while something before it is under way on another connection
    or from an earlier ownership. What is sent goes to the partition's owner, if it has one.
 9. Undeliverable comes last; held and lost come before the end of a connection.
10. Once all requests are answered no state is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kproxy.routing import actions
from kproxy.routing.actions import Action
from kproxy.routing.client_end import ClientState
from kproxy.routing.fanout import TIMER_STEP_S, Fanout
from kproxy.routing.identity import lane_key
from kproxy.routing.in_flight import READERS, Piece
from kproxy.routing.lanes import Item, LaneState
from kproxy.routing.merge import Exchange
from kproxy.routing.reads import LEAST_WAIT_S
from kproxy.routing.split import Entry, entries_of, split_whole
from kproxy.routing.topology import NO_OWNER
from kproxy_codec.produce import base_offset_of
from tests.support.models.playbook_words import entry_text, read, read_answer

if TYPE_CHECKING:
    from tests.support.models.playbook import Playbook


class Rules:
    """The state that the rules keep of one Playbook."""

    def __init__(self, play: Playbook) -> None:
        self._play = play
        # By request and partition: the base offset that was noted.
        self._noted: dict[tuple[int, str], int] = {}
        self._ended: set[int] = set()
        # Error codes that were counted and not answered yet.
        self._failed: Counter[int] = Counter()

    def noted_plainly(self, exchange: Exchange, text: str) -> None:
        """Record the acknowledgements that the plain path has noted."""
        for each in read(text):
            self._noted[exchange.sequence, f"{each.topic}-{each.index}"] = each.offset

    def check(self, done: Sequence[Action]) -> None:
        """Check the rules; `done` are the actions of the last event."""
        self._check_order(done)
        for action in done:
            match action:
                case actions.Send():
                    self._check_send(action)
                case actions.Note(exchange, entry, _, _, result):
                    at = (exchange.sequence, entry_text(exchange, entry))
                    assert at not in self._noted, f"{at} is noted twice"
                    assert exchange.sequence not in self._ended, f"{at} is noted after its answer"
                    self._noted[at] = base_offset_of(result)
                case actions.Failed(_, code, _, _):
                    self._failed[code] += 1
                case actions.Respond(sequence, answer):
                    self._end(sequence)
                    if answer:
                        self._check_answer(self._play.exchanges[sequence], action)
                case actions.Drop(sequence):
                    self._end(sequence)
        self._check_places()
        self._check_in_flight()
        self._check_lanes()
        self._check_rest()

    def _end(self, sequence: int) -> None:
        assert sequence not in self._ended, f"request {sequence} is ended twice"
        self._ended.add(sequence)

    def _check_answer(self, exchange: Exchange, action: actions.Respond) -> None:
        answer = read_answer(exchange, action.answer)
        assert answer.correlation_id == exchange.request.header.correlation_id
        for each in answer.results:
            if each.code:
                self._failed[each.code] -= 1
                assert self._failed[each.code] >= 0, f"{each} is answered and was not counted"
        if not exchange.is_ordered:
            return
        acknowledged = {
            (exchange.sequence, f"{each.topic}-{each.index}"): each.offset for each in answer.results if not each.code
        }
        noted = {at: offset for at, offset in self._noted.items() if at[0] == exchange.sequence}
        assert noted == acknowledged, f"request {exchange.sequence}: noted {noted}, answered {acknowledged}"

    def _check_order(self, done: Sequence[Action]) -> None:
        kinds = [type(action) for action in done]
        if actions.Undeliverable in kinds:
            first = kinds.index(actions.Undeliverable)
            assert set(kinds[first:]) == {actions.Undeliverable}, "Undeliverable is not said last"
        if actions.Close in kinds:
            behind = kinds[kinds.index(actions.Close) :]
            assert actions.NoteLost not in behind, "said lost after the connection's end"
            assert actions.Hold not in behind, "held after the connection's end"

    def _check_send(self, send: actions.Send) -> None:
        play, exchange = self._play, send.exchange
        what = f"#{send.piece} of request {exchange.sequence}"
        piece = play.core._in_flight.pieces.get(send.piece)
        assert piece is not None, f"{what} is sent and not under way"
        assert exchange.is_silent or exchange.deadline > play.now, f"{what} is sent past its deadline"
        for entry in entries_of(send.part or split_whole(exchange.request.topics)):
            owner = play.topology.owner(*exchange.partition(entry))
            assert owner in (send.broker, NO_OWNER), f"{what} goes to {send.broker} and not to {owner}"
            if not exchange.is_ordered:
                continue
            if (key := lane_key(exchange, entry)) in play.core.lanes:
                assert play.core.lanes.is_probing(key, exchange.sequence), f"{what} is sent beside its lane"
            self._check_nothing_elsewhere(piece, entry, what)

    def _check_nothing_elsewhere(self, piece: Piece, entry: Entry, what: str) -> None:
        exchange = piece.exchange
        key, owned_at = lane_key(exchange, entry), self._play.topology.owner_version(*exchange.partition(entry))
        for other in self._play.core._in_flight.ordered():
            if other is piece or all(lane_key(other.exchange, each) != key for each in other.entries()):
                continue
            assert other.connection is piece.connection, f"{what} is sent while #{other.number} is elsewhere"
            assert other.routed_at >= owned_at, f"{what} is sent while #{other.number} is of an earlier ownership"

    def _check_places(self) -> None:
        core = self._play.core
        places: Counter[tuple[int, Entry]] = Counter()
        self._check_reads()
        for piece in core._in_flight.pieces.values():
            if not piece.exchange.is_read:
                places.update((piece.exchange.sequence, entry) for entry in piece.entries())
        assert all(count == 1 for count in places.values()), f"under way twice: {places}"
        for lane in core.lanes.table.values():
            places.update((item.exchange.sequence, item.entry) for item in lane.waiting)
        places.update((item.exchange.sequence, item.entry) for item in core._outcomes.released)
        for exchange in core._exchanges:
            entries = exchange.open_entries()
            assert exchange.open_count == len(entries), f"request {exchange.sequence} miscounts what is open"
            if exchange.is_read:
                continue
            for entry in entries:
                at = (exchange.sequence, entry)
                assert places[at] == 1, f"{exchange.sequence} {entry_text(exchange, entry)} is in {places[at]} places"
            assert entries, f"request {exchange.sequence} is complete and open"
        for sequence in self._ended:
            assert self._play.exchanges[sequence].open_count >= 0, f"request {sequence} has a result too many"

    def _check_reads(self) -> None:
        core = self._play.core
        in_flight, read = core._in_flight, core._reads.present
        for connection in in_flight.connections.values():
            pieces = [piece for piece in in_flight.pieces.values() if piece.connection is connection]
            assert connection.open_count == len(pieces), f"c{connection.number} miscounts its pieces"
            reading = [piece for piece in pieces if piece.exchange.is_read]
            assert reading == ([] if connection.reading is None else [connection.reading])
            assert not reading or connection.reader, f"a read is asked on c{connection.number}"
        if read is None or read not in core._exchanges or core._client._state is not ClientState.PRESENT:
            return
        # Its time may be nearly over: it is woken at its end.
        assert not core._reads.is_done(read, core._outcomes.now - LEAST_WAIT_S), (
            f"read {read.sequence} has enough and is open"
        )
        for entry in read.open_entries():
            broker = core._router.broker_for(read, entry)
            is_asked = any(each.reading for each in in_flight.readers(broker))
            is_waiting = lane_key(read, entry) in core.lanes
            # By lists of offsets.
            is_busy = sum(each.open_count > 0 for each in in_flight.readers(broker)) == READERS
            assert is_asked or is_waiting or is_busy, f"nobody is asked for {read.sequence} {entry_text(read, entry)}"

    def _check_in_flight(self) -> None:
        in_flight = self._play.core._in_flight
        expected: dict[object, set[int]] = {}
        for piece in in_flight.ordered():
            for entry in piece.entries():
                expected.setdefault(lane_key(piece.exchange, entry), set()).add(piece.exchange.sequence)
        if in_flight._sequences is not None:
            assert in_flight._sequences == expected

    def _check_lanes(self) -> None:
        core = self._play.core
        under_way = {
            (lane_key(piece.exchange, entry), piece.exchange.sequence)
            for piece in core._in_flight.pieces.values()
            for entry in piece.entries()
        }
        for key, lane in core.lanes.table.items():
            sequences = [item.exchange.sequence for item in lane.waiting]
            assert sequences == sorted(set(sequences)), f"{key} waits in another order: {sequences}"
            if core._client._state is ClientState.PRESENT:
                done = [item for item in lane.waiting if not _is_open(core, item)]
                assert not done, f"{key} holds what is done: {done}"
            waited_for = lane.outstanding | ({lane.probing} if lane.probing is not None else set())
            assert all((key, each) in under_way for each in waited_for), f"{key} waits for {waited_for}, which is gone"
            assert waited_for or lane.waiting, f"{key} waits for nothing"
            # The next event handles a lane that is released when a client leaves.
            if core._client._state is ClientState.PRESENT and not waited_for and lane.state is LaneState.BLOCKED:
                wakes_at = self._play._wakes_at
                assert wakes_at is not None, f"{key} is not woken"
                assert wakes_at <= max(lane.due, self._play.now) + 2 * TIMER_STEP_S, f"{key} is woken too late"

    def _check_rest(self) -> None:
        core = self._play.core
        assert core.open_count == len(core._exchanges)
        counts = [exchange.request.partition_count for exchange in core._exchanges]
        assert core.open_partitions == sum(count for count in counts if count > 1)
        if len(core._exchanges) or core._in_flight.pieces or core._reads.found:
            return
        assert core.is_idle
        if core._client._state is ClientState.PRESENT:
            assert not core.lanes.table, f"nothing is open, and lanes are left: {list(core.lanes.table)}"
            assert not core._outcomes.released


def _is_open(core: Fanout, item: Item) -> bool:
    return item.exchange in core._exchanges and item.exchange.is_open(item.entry)
