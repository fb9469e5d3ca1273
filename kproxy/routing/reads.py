"""Serve the reads (Fetch requests) of one client connection: ask all brokers of a read, and answer with the first data.

A broker answers the requests of a connection in order, and lets a read wait for data as long as its client wishes. So
reads have connections without batches, with one request at a time (kproxy.routing.in_flight). The client gets the first
data at once, though other brokers wait. Their pieces stay in flight and serve the client's next read, which
usually asks for the same offsets there. Ending the others' waits would cost a new connection for each, and asking them
without a wait would need a pause between attempts, which delays data or burdens brokers.

Where the compiled plain path is built, it sends a read that differs from the last one in its offsets alone, if a single
broker answered that (`Proven`); a read in flight there is adopted here before another is served (`adopt`).

The client's reads are served one after another, as a broker would serve them. The one that is served is the `present`
read; its `until` is the end of its wait.

States of one broker for the present read
  covered   a piece in flight, of this read or of one before, asks for the same offsets with the same limits
  busy      something else is wanted, but all READERS connections have an unanswered request: it is asked for when one
            of them has answered. If one waits only for what nobody wants, it is closed and replaced instead
  late      it has not answered LATE_AFTER_S after the end of its wait: reads do not wait for it, nor ask it for more
  found     it has answered

The present read is answered
  at once     if it has an error, or a broker throttles the client, or answers early with less data than asked for
  with data   as soon as there are min_bytes over all brokers. A read that does not wait (max_wait or min_bytes is 0) is
              answered when all brokers have answered
  without     when its time is over and all have answered, or LATE_AFTER_S later

Invariants
1. A result is taken for a read only if it answers its partition's entry, byte for byte, under the same limits and
   version, and the partition has not moved since. So records come once and in order, wherever the client seeks.
2. An answer with records that comes between two reads is kept for the next one, for at most FOUND_S; entries that the
   next one does not want are dropped. At most one answer is kept for each connection.
3. A piece asks for all that the read wants of its broker, with the client's own wait; so one piece at a time is enough
   unless the client's wishes change.
4. A partition without an answer has no records and the offsets of its last result. One that waits for its retry has the
   error of its last attempt.
5. A broker that answers early, with too little data and no error, is not asked again in the read: that is answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kproxy.routing.actions import Actions, Proven, Send
from kproxy.routing.identity import lane_key
from kproxy.routing.in_flight import BrokerConnection, InFlight, Piece
from kproxy.routing.lanes import Lanes
from kproxy.routing.merge import Exchange, Matched, Partition
from kproxy.routing.open_exchanges import OpenExchanges
from kproxy.routing.outcomes import Outcomes
from kproxy.routing.routes import Router
from kproxy.routing.split import Entry, Selection, entries_of
from kproxy.routing.topology import NO_OWNER, Topology
from kproxy_codec.error_codes import NOT_LEADER_OR_FOLLOWER
from kproxy_codec.fetch import as_fetch, no_result, offsets_of
from kproxy_codec.partitioned import MAX_PARTITIONS, PartitionedResponse
from kproxy_codec.primitives import Buffer

# In seconds. A broker that answers so long after its wait is over is late.
LATE_AFTER_S: Final = 0.2
# How long an answer that no read has asked for yet is kept.
FOUND_S: Final = 1.0
# A wait that would end sooner is not worth asking for.
LEAST_WAIT_S: Final = 0.02


class _Found(NamedTuple):
    """The records of an answer that came while no read was present."""

    piece: Piece
    results: Sequence[tuple[Entry, Buffer, int]]
    at: float


class Reads:
    """The reads of one client connection."""

    __slots__ = (
        "_actions",
        "_answers",
        "_exchanges",
        "_has_asked",
        "_in_flight",
        "_lanes",
        "_left_out",
        "_offsets",
        "_outcomes",
        "_receiving",
        "_router",
        "_topology",
        "_waiting",
        "found",
        "has_news",
        "present",
    )

    def __init__(
        self,
        topology: Topology,
        actions: Actions,
        lanes: Lanes,
        in_flight: InFlight,
        exchanges: OpenExchanges,
        outcomes: Outcomes,
        router: Router,
    ) -> None:
        self._topology = topology
        self._actions = actions
        self._router = router
        self._lanes = lanes
        self._in_flight = in_flight
        self._exchanges = exchanges
        self._outcomes = outcomes
        self.present: Exchange | None = None
        # Bounded by the requests that a client may have open. Tuples, because most clients have no reads.
        self._waiting: tuple[Exchange, ...] = ()
        self.found: tuple[_Found, ...] = ()
        # Whether the present read may go on, or the next one begin.
        self.has_news = False
        # Of the present read: whether brokers were asked, and the number of answers with records in it.
        self._has_asked = False
        self._answers = 0
        # The connections on which an answer arrived when it was last looked at.
        self._receiving: Collection[int] = ()
        # The first partition that the limits of the last read left out.
        self._left_out: Partition | None = None
        # The offsets of the last results, as encoded, of reads from several brokers.
        self._offsets: dict[Partition, bytes] | None = None

    def add(self, read: Exchange, refused: Collection[Entry]) -> None:
        """Serve a read when those before it are answered; no broker is asked for entries in `refused`."""
        read.refused = refused
        self._waiting += (read,)
        self.has_news = True

    def adopt(self, pieces: Iterable[Piece]) -> None:
        """Serve the read that the plain path has sent whole, if one of these is; no other is present."""
        for piece in pieces:
            read = piece.exchange
            if read.is_read:
                self.present, self._has_asked, self._answers, self._receiving = read, True, 0, ()
                piece.due, piece.least_bytes = read.until, as_fetch(read.request).least_bytes(1)

    def go_on(self) -> Exchange | None:
        """The present read if there is news, or else the next one, which begins; None if there is none."""
        if not self.has_news:
            return None
        self.has_news = False
        if self.present is None or self.present not in self._exchanges:
            self.present = None
            while self._waiting and self.present is None:
                read, *rest = self._waiting
                self._waiting = tuple(rest)
                if read in self._exchanges:
                    self._begin(read)
        return self.present

    def _begin(self, read: Exchange) -> None:
        self.present, self._has_asked, self._answers, self._receiving = read, False, 0, ()
        wait_s = 0.0 if as_fetch(read.request).min_bytes <= 0 else read.wait_s
        read.begin_read(self._outcomes.now + wait_s, wait_s)
        # Errors by now are those of entries that no broker is asked for.
        read.is_over = not read.open_count
        if self._offsets is not None and len(self._offsets) > MAX_PARTITIONS:
            self._offsets = None
        pieces = self._in_flight.reading()
        found, self.found = self.found, ()
        if pieces or found:
            places = {read.partition(entry): entry for entry in read.open_entries()}
            for piece in (*pieces, *(each.piece for each in found)):
                piece.targets = _targets(piece, read, places)
        for each in found:
            for entry, result, size in each.results:
                mine = self._target(each.piece, entry)
                if mine is not None:
                    read.find(mine, result, size)
            self._answers += 1

    # Asking

    def ask(self, read: Exchange) -> list[Selection]:
        """Ask brokers for the parts of the present read that no piece covers; return those that have no broker.

        A new read asks before it is answered, so that brokers read while its client does.
        """
        held, now = read.refused, self._outcomes.now
        if self._lanes.table:
            held = {*held, *(each for each in read.open_entries() if lane_key(read, each) in self._lanes.table)}
        pieces = self._router.split_again(read, held) if read.has_attempts else self._router.split(read, held)
        read.shares = max(1, len(pieces))
        is_done, is_first = self.is_done(read, now), not self._has_asked
        if is_done and not is_first:
            return []
        self._has_asked = True
        is_whole = is_first and len(pieces) == 1 and read.open_count == read.request.partition_count
        lost, late = [], 0
        for broker, selection in pieces.items():
            if is_done or now >= read.until - LEAST_WAIT_S:
                # Ask no more for what has been found.
                selection = _open_part(read, selection)
            if not selection:
                continue
            if broker == NO_OWNER:
                for entry in entries_of(selection):
                    read.lose(entry)
                lost.append(selection)
                continue
            reading = [piece for each in self._in_flight.readers(broker) if (piece := each.reading) is not None]
            if any(self._is_late(piece, now) for piece in reading):
                late += 1
                for entry in filter(read.is_open, entries_of(selection)):
                    self._leave(read, entry)
            elif connection := self._connection_for(broker, selection, reading):
                part, least_bytes = None if is_whole else selection, self._least_bytes(read, selection)
                piece = self._in_flight.add(read, connection, part, self._topology.version)
                piece.due, piece.least_bytes = now + read.wait_s, least_bytes
                place = connection.number, broker, piece.number
                self._actions.add(Send(*place, read, part, read.shares, (), connection.reader, least_bytes))
        if late and late == len(pieces):
            # The client may have others to ask for.
            read.until = min(read.until, now + LATE_AFTER_S)
        return lost

    def _connection_for(self, broker: int, selection: Selection, reading: Sequence[Piece]) -> BrokerConnection | None:
        """The connection to ask for a part on; None if all of it is covered, or the broker is busy."""
        covered = [set(self._aims(piece)) for piece in reading]
        if reading and set().union(*covered).issuperset(entries_of(selection)):
            return None
        connection = self._in_flight.free_reader(broker)
        useless = next((piece for piece, entries in zip(reading, covered, strict=True) if not entries), None)
        if connection is None and useless is not None:
            self._in_flight.remove(useless)
            self._in_flight.close(useless.connection, "")
            connection = self._in_flight.free_reader(broker)
        return connection

    def _least_bytes(self, read: Exchange, selection: Selection) -> int:
        """The bytes of records that a broker waits for: its share, or, once it has that, all that the others lack."""
        least = as_fetch(read.request).least_bytes(read.shares)
        share = -(-least // read.shares)
        here = read.found_at(entries_of(selection))
        return share if here < share or not here else max(1, least - (read.payload_bytes - here))

    def _target(self, piece: Piece, entry: Entry) -> Entry | None:
        """The present read's entry that a piece's entry asks for; None if it does not want that (invariant 1)."""
        read = self.present
        mine = entry if piece.exchange is read else (piece.targets or {}).get(entry)
        if read is None or mine is None or mine in read.refused:
            return None
        has_moved = (
            piece.routed_at != self._topology.version
            and self._topology.owner_version(*read.partition(mine)) > piece.routed_at
        )
        return None if has_moved else mine

    def _aims(self, piece: Piece) -> Iterator[Entry]:
        """The present read's entries that a piece asks for, as by `_target`."""
        for entry in piece.entries():
            mine = self._target(piece, entry)
            if mine is not None:
                yield mine

    # Answers

    def take(self, piece: Piece, frame: memoryview, response: PartitionedResponse, matched: Matched) -> None:
        """Take a broker's answer."""
        self.has_news = True
        read, now = self.present, self._outcomes.now
        failed, taken = False, 0
        kept: list[tuple[Entry, Buffer, int]] = []
        for entry, error_code, topic, ordinal in matched:
            result, size = frame[topic.starts[ordinal] : topic.ends[ordinal]], topic.sizes[ordinal]
            mine = self._target(piece, entry)
            if read is None or mine is None:
                self._outcomes.doubt(piece.exchange, entry, error_code, piece.routed_at)
                if size and not error_code and read is None:
                    kept.append((entry, result, size))
                continue
            taken += 1
            if error_code:
                failed = True
                if error_code == NOT_LEADER_OR_FOLLOWER:
                    read.attempts(mine).refused_by |= {piece.connection.broker}
                self._fail(read, mine, error_code, piece, result)
                continue
            read.find(mine, result, size)
            read.forget_attempts(mine)
            if self._lanes.table:
                self._lanes.take_away(lane_key(read, mine), lambda _: True)
            if read.shares > 1 or self._offsets:
                self._offsets = self._offsets or {}
                self._offsets[read.partition(mine)] = offsets_of(read.request.header.api_version, result)
        if kept:
            self.found += (_Found(piece, kept, now),)
        if read is not None:
            read.note(response)
            self._answers += bool(taken and response.payload_bytes)
            is_early = response.payload_bytes < piece.least_bytes and now < piece.due - LEAST_WAIT_S
            read.is_over |= bool(taken and not failed and (is_early or response.throttle_time_ms))

    def lost(self, piece: Piece, event: int) -> None:
        """Handle the failure of a whole piece, an event of kproxy.routing.retry."""
        self.has_news, read = True, self.present
        for entry in piece.entries():
            mine = self._target(piece, entry)
            if read is None or mine is None:
                self._outcomes.doubt(piece.exchange, entry, event, piece.routed_at)
            else:
                self._fail(read, mine, event, piece)

    def _fail(self, read: Exchange, entry: Entry, event: int, piece: Piece, result: Buffer | None = None) -> None:
        if lane_key(read, entry) in self._lanes.table:
            # Another piece for this entry has failed before.
            return
        read.lose(entry)
        read.note_sent(entry, piece.connection.broker)
        broker = self._router.broker_for(read, entry)
        self._outcomes.failed(read, entry, event, piece.routed_at, result, broker=broker)

    def pass_on(self, read: Exchange, piece: Piece, response: PartitionedResponse) -> None:
        """Note that the present read is answered with a broker's answer as it is."""
        self.present, self.has_news = None, True
        if self._lanes.table:
            # Another piece may have been refused for some of it.
            for entry in read.open_entries():
                self._lanes.take_away(lane_key(read, entry), lambda _: True)
        connection = piece.connection
        is_alone = not (self._waiting or self.found or self._offsets or self._in_flight.reading())
        is_next = self._in_flight.readers(connection.broker)[:1] == [connection]
        if is_alone and is_next and piece.routed_at == self._topology.version:
            self._actions.add(Proven(read, connection.number, piece.routed_at))
        if self._offsets:
            for topic in response.topics:
                for index in topic.partitions:
                    self._offsets.pop((topic.name, index), None)

    def is_done(self, read: Exchange, now: float) -> bool:
        """Whether it is to be answered now."""
        least = as_fetch(read.request).least_bytes(read.shares)
        has_enough = read.payload_bytes >= least
        if read.is_over or (has_enough and read.payload_bytes and read.wait_s):
            return True
        return not read.open_count and (has_enough or now >= read.until - LEAST_WAIT_S)

    def answer_if_done(self, read: Exchange) -> None:
        """Answer the present read with what it has found, if it is time."""
        if not self.is_done(read, self._outcomes.now):
            return
        for entry in read.open_entries():
            key = lane_key(read, entry)
            if key in self._lanes.table:
                self._outcomes.give_up(self._lanes.take_away(key, lambda _: True))
            if read.is_open(entry):
                self._leave(read, entry)
        if self._answers > 1:
            self._left_out = read.fit(self._left_out) or self._left_out
        self._exchanges.respond(read, read.encode())
        read.release()
        self.present, self.has_news = None, True

    def _leave(self, read: Exchange, entry: Entry) -> None:
        topic, index = read.partition(entry)
        version = read.request.header.api_version
        offsets = self._offsets.get((topic, index), b"") if self._offsets else b""
        read.find(entry, no_result(version, index, offsets), 0)

    # Time

    def next_wake(self) -> float | None:
        """When the present read is to be looked at."""
        read, now = self.present, self._outcomes.now
        if read is None:
            return None
        if now < read.until and read.open_count < read.request.partition_count:
            return read.until
        late_at = read.until + LATE_AFTER_S
        return late_at if now < late_at else now + LATE_AFTER_S

    def _is_late(self, piece: Piece, now: float) -> bool:
        return piece.due + LATE_AFTER_S <= now and piece.connection.number not in self._receiving

    def woken(self, receiving: Collection[int]) -> None:
        """Leave late brokers out of the present read; none is late whose answer arrives on a `receiving` connection."""
        read, self._receiving = self.present, receiving
        self.has_news = True
        if read is None or self._outcomes.now < read.until + LATE_AFTER_S:
            return
        pieces = (piece for piece in self._in_flight.reading() if piece.connection.number in receiving)
        arriving = {entry for piece in pieces for entry in self._aims(piece)}
        for entry in read.open_entries():
            if entry not in arriving and lane_key(read, entry) not in self._lanes.table:
                self._leave(read, entry)

    def forget(self) -> None:
        """Drop what was kept for too long."""
        self.found = tuple(each for each in self.found if self._outcomes.now < each.at + FOUND_S)


def _open_part(read: Exchange, selection: Selection) -> Selection:
    """The open entries of a part."""
    part = [(place, [each for each in ordinals if read.is_open((place, each))]) for place, ordinals in selection]
    return [(place, ordinals) for place, ordinals in part if ordinals]


def _targets(piece: Piece, read: Exchange, places: Mapping[Partition, Entry]) -> dict[Entry, Entry]:
    """The entries of a read, by its `places`, that a piece of an earlier read asks for as well."""
    before, request = as_fetch(piece.exchange.request), as_fetch(read.request)
    if not request.asks_alike(before):
        return {}
    targets = {}
    for entry in piece.entries():
        mine = places.get(piece.exchange.partition(entry))
        if mine is not None and before.entry(*entry) == request.entry(*mine):
            targets[entry] = mine
    return targets
