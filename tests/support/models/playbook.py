"""Run scripts of the fan-out's core (kproxy.routing.fanout): an event, then the expected actions.

A Playbook is one core with a real topology, real frames, and a clock that only the script moves. Its methods are
events. Each returns the core's actions, in order, as texts:

  send #3 b2/c1: 1 t-0 t-1     piece 3 to broker 2 on connection 1, these partitions of request 1
  send #3 b2/c1: 1 t-0 behind t-0=7     the same behind a fence
  answer 1: t-0@17 t-1=6       what the client reads, in the notation of tests.support.models.playbook_words
  done 1                       the same for a client that gets no answer (acks=0)
  drop 1, withdraw #3 from c1, hold #3: t-0, let go #3, lost t-0, close c1, distrust c1, undeliverable t=6

The counts, notes, look-ups and wake-ups of the last event are in `aside`:

  note 1 t-0@17 of b1, retried CONNECTION_LOST of b1, failed Produce 6 of b1, reread t-0, wake in 21 ms,
  count splits 1, unconfirmed t 2

Unless the script gives a base offset, a broker's success has ten times the number of its piece, so that an answer shows
from which piece its results are.

After each event the rules that always hold are checked (tests.support.models.playbook_rules).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kproxy.routing import actions
from kproxy.routing.actions import Action, Loss
from kproxy.routing.fanout import Fanout
from kproxy.routing.in_flight import ConnectionState, Piece
from kproxy.routing.merge import Exchange
from kproxy.routing.retry import LEASED, BrokerSemantics
from kproxy.routing.split import Entry, split_whole
from kproxy.routing.topology import NO_OWNER, Address
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS
from kproxy_codec.partitioned import PartitionedRequest
from tests.support.models.playbook_plain import PlainRequests, is_plain, proven_parts
from tests.support.models.playbook_rules import Rules
from tests.support.models.playbook_view import View, topology_of
from tests.support.models.playbook_words import (
    ASIDE,
    NO_OFFSET,
    Answer,
    Producer,
    action_text,
    answer_frame,
    batch_of,
    entry_text,
    name_of,
    partition,
    produce_request,
    read,
    read_answer,
    read_request,
    selection_text,
)
from tests.support.wire.messages import APIS, topic_id

DEADLINE_S = 10.0
_ANSWER = re.compile(r"(?:answer|done|drop) (\d+)")


class Playbook:
    """`owners` are the owners of a topic's partitions by index, brokers 1 to 3 or None; broker 4 is a spare.

    `gated` are the topics with a writer group, `hung` the brokers known not to answer. `dials`: connections open when
    `opens` is called, not at once.
    """

    def __init__(
        self,
        owners: Mapping[str, Sequence[int | None]] | None = None,
        semantics: BrokerSemantics = LEASED,
        *,
        keeps_producer_state: bool = True,
        gated: Collection[str] = (),
        fenced: bool = False,
        hung: Iterable[int] = (),
        dials: bool = False,
        offers_unowned: bool = True,
        jitter: float = 0.0,
    ) -> None:
        self.topology = topology_of(owners or {"t": [1, 2, 3]}, offers_unowned=offers_unowned)
        self.view = View(self.topology, semantics)
        self.view.keeps_producer_state = keeps_producer_state
        self.view.gated = frozenset(topic.encode() for topic in gated)
        self.view.fenced = fenced
        self.view.hung = set(hung)
        self.core = Fanout(self.view)
        self.now = 100.0
        self.jitter = jitter
        self.aside: list[str] = []
        # By request: its exchange, and the answer to its client, also as bytes.
        self.exchanges: dict[int, Exchange] = {}
        self.answered: dict[int, Answer] = {}
        self.bytes_of: dict[int, bytes] = {}
        # By piece: the action that sent it.
        self.sent: dict[int, actions.Send] = {}
        self._dials = dials
        self._plain = PlainRequests(self.core)
        self._wakes_at: float | None = None
        self._rules = Rules(self)

    # Requests

    def submits(
        self,
        sequence: int,
        partitions: str,
        *,
        producer: Producer = (7, 0, None),
        is_transactional: bool = False,
        acks: int = -1,
        by_id: bool = False,
        silent: bool | None = None,
        deadline_s: float = DEADLINE_S,
        refused: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Submit a produce request. Its batches have the producer's base sequence; None means the request's own number.

        Without a `producer` it is not idempotent. `refused` has the error codes of partitions that must not be sent.

        `silent`: its client gets no answer, as with acks=0, whatever acks the brokers see.
        """
        batch = batch_of(producer, sequence)
        request = produce_request(partitions, producer=batch, is_transactional=is_transactional, acks=acks, by_id=by_id)
        exchange = self._exchange(sequence, request, deadline_s)
        exchange.is_silent = acks == 0 if silent is None else silent
        codes = {self._entry(exchange, text): code for text, code in (refused or {}).items()}
        return self._submit(exchange, codes)

    def fetches(
        self,
        sequence: int,
        partitions: str,
        *,
        until_s: float = 0.0,
        deadline_s: float = DEADLINE_S,
        **changes: Any,
    ) -> list[str]:
        """Submit a fetch; `until_s`: how long it waits for data, in seconds.

        Partitions may have the offsets that it reads from, as in `t-0@7`. `changes` are further fields of the message.
        """
        changes.setdefault("max_wait_ms", round(until_s * 1000))
        exchange = self._exchange(sequence, read_request(FETCH, partitions, **changes), deadline_s)
        exchange.wait_s = until_s
        return self._submit(exchange, {})

    def lists_offsets(self, sequence: int, partitions: str) -> list[str]:
        return self._submit(self._exchange(sequence, read_request(LIST_OFFSETS, partitions), DEADLINE_S), {})

    def _exchange(self, sequence: int, request: PartitionedRequest, deadline_s: float) -> Exchange:
        exchange = Exchange(APIS[request.header.api_key], request, sequence, self.now + deadline_s)
        self.exchanges[sequence] = exchange
        self.core.name_topics(request)
        return exchange

    def _submit(self, exchange: Exchange, refused: Mapping[Entry, int]) -> list[str]:
        return self._bring(lambda: self.core.submitted(exchange, refused, self.now, self.jitter), adopts=False)

    def _entry(self, exchange: Exchange, text: str) -> Entry:
        return next(entry for entry in exchange.open_entries() if entry_text(exchange, entry) == text)

    # The plain path

    def passes(self, sequence: int, partitions: str, *, producer: Producer = (7, 0, None)) -> list[str]:
        """Send a request on the plain path: all its routes must be proven. It enters the core with the next event."""
        exchange = self._exchange(
            sequence, produce_request(partitions, producer=batch_of(producer, sequence)), DEADLINE_S
        )
        return self._plain.send(exchange, self.topology.version)

    def passes_back(self, sequence: int, connection: int, text: str) -> None:
        """Report a success on the plain path, for one part of several."""
        self._rules.noted_plainly(self._plain.answer(sequence, connection, text), text)

    def adopts(self) -> list[int]:
        """Move all requests on the plain path into the core; return the numbers of their pieces. Events do this too."""
        return self._plain.enter() if self._plain else []

    # Brokers

    def opens(self, connection: int) -> None:
        """Report that a dial has succeeded."""
        self.core.opened(connection)
        self._rules.check([])

    def answers(self, piece: int, text: str, *, throttle_ms: int = 0, error_code: int = 0) -> list[str]:
        """Report a broker's answer to a piece; `error_code` is the error of a whole fetch."""
        of_piece = self.pieces[piece].exchange
        results = [
            each._replace(offset=10 * piece if not each.code and each.offset == NO_OFFSET else each.offset)
            for each in read(text)
        ]
        words = " ".join(map(str, results))
        frame = answer_frame(of_piece.request, words, throttle_ms=throttle_ms, error_code=error_code)
        return self.answers_bytes(piece, frame)

    def answers_bytes(self, piece: int, frame: memoryview) -> list[str]:
        adopts = not is_plain(self.pieces[piece], frame)
        return self._bring(lambda: self.core.answered(piece, frame, self.now, self.jitter), adopts=adopts)

    def leaves(self, *pieces: int) -> list[str]:
        """Report that pieces without an answer (acks=0) have been written."""
        return self._bring(lambda: self.core.left(pieces, self.now, self.jitter), adopts=False)

    def loses(
        self, connection: int, *, unwritten: Collection[int] = (), left: Collection[int] = (), unconfirmed: bool = False
    ) -> list[str]:
        """Report the end of a connection: its pieces were written except `unwritten`, or none if it never opened."""
        self.adopts()
        ended = self.core._in_flight.connections[connection]
        never_opened = ended.state is ConnectionState.DIALLING
        losses = [
            (each, Loss.LEFT if each in left else Loss.UNWRITTEN if never_opened or each in unwritten else Loss.WRITTEN)
            for each, piece in self.core._in_flight.pieces.items()
            if piece.connection is ended
        ]
        return self._bring(
            lambda: self.core.lost(connection, losses, self.now, self.jitter, is_unconfirmed=unconfirmed)
        )

    def unsent(self, piece: int) -> None:
        """Note that a piece was not written, because its client is about to be cut off."""
        self.core.unsent(piece)

    # The topology and time

    def moves(self, text: str, *owners: int | None, revision: int | None = None) -> list[str]:
        """Give a partition these owners one after another, None for no owner, in one event.

        `revision` is that of a single change; by default it is the next one.
        """
        topic, index = partition(text)
        for owner in owners:
            at = self.topology.revision + 1 if revision is None else revision
            self.topology.set_owner(topic, index, NO_OWNER if owner is None else owner, at)
        return self._follow()

    def removes(self, broker: int) -> list[str]:
        self.topology.remove_broker(broker)
        return self._follow()

    def readdresses(self, broker: int) -> list[str]:
        """Move a broker to another address."""
        self.topology.set_broker(broker, Address("moved", broker))
        return self._follow()

    def names(self, topic: str) -> list[str]:
        """Let the topology learn the id of a topic."""
        self.topology.set_topic_id(topic.encode(), topic_id(topic).bytes)
        return self._follow()

    def _follow(self) -> list[str]:
        if self._plain and self.core.is_concerned:
            self.adopts()
        return self._carry_out(self.core.topology_changed(self.now, self.jitter))

    def waits(self, seconds: float) -> None:
        """Let time pass without an event."""
        self.now += seconds

    def wakes(self, receiving: Collection[int] = ()) -> list[str]:
        """Let time pass until the core is due, and wake it; answers are arriving on `receiving` connections."""
        assert self._wakes_at is not None, "the core waits for no time"
        self.now, self._wakes_at = max(self.now, self._wakes_at), None
        return self._bring(lambda: self.core.woken(receiving, self.now, self.jitter), adopts=False)

    def wakes_in_ms(self) -> int | None:
        """The time until the core is due."""
        return None if self._wakes_at is None else round((self._wakes_at - self.now) * 1000)

    def ticks(self, after_s: float = 0.0) -> list[str]:
        """After `after_s` seconds, call the tick that looks for expired requests."""
        self.now += after_s
        if self.core.is_due(self.now) or self._plain.is_due(self.now):
            self.adopts()
        oldest: dict[int, int] = {}
        for piece in self.core._in_flight.pieces.values():
            if piece.exchange.request.acks and piece.connection.state is ConnectionState.OPEN:
                oldest.setdefault(piece.connection.number, piece.number)
        return self._bring(lambda: self.core.tick(oldest, self.now, self.jitter), adopts=False)

    # The client's end

    def half_closes(self) -> list[str]:
        self.core.stop_retries()
        return self._bring(lambda: self.core.give_up_retries(self.now, 0.0))

    def gives_up_unwritten(self) -> list[str]:
        return self._bring(lambda: self.core.give_up_unwritten(self.now, 0.0))

    def parts(self) -> list[str]:
        return self._bring(lambda: self.core.parted(self.now, self.jitter))

    def severs(self) -> list[str]:
        return self._bring(lambda: self.core.severed(self.now, self.jitter))

    def closes(self) -> list[str]:
        return self._bring(lambda: self.core.closing(self.now, self.jitter))

    def ends(self) -> list[str]:
        return self._bring(lambda: self.core.ended(self.now, self.jitter))

    # What is there

    @property
    def pieces(self) -> Mapping[int, Piece]:
        """The pieces in flight."""
        return self.core._in_flight.pieces

    @property
    def lanes(self) -> list[str]:
        """The partitions that have a lane, each with its state."""
        keys: dict[Any, Any] = self.core.lanes.table
        return [f"{name_of(key[0])}-{key[1]} {lane.state.name.lower()}" for key, lane in keys.items()]

    def proven(self, partitions: str) -> bool:
        """Whether the routes of all these partitions are proven."""
        return bool(proven_parts(self.core.routes, produce_request(partitions)))

    # One event

    def _bring(self, event: Callable[[], list[Action]], *, adopts: bool = True) -> list[str]:
        texts = self._follow() if self.topology.version != self.core.version else []
        if adopts:
            self.adopts()
        return texts + self._carry_out(event())

    def _carry_out(self, done: list[Action]) -> list[str]:
        self.aside = []
        texts: list[str] = []
        for action in done:
            if isinstance(action, ASIDE):
                self.aside.append(action_text(action, self.now))
                if isinstance(action, actions.WakeAt):
                    self._wakes_at = action.at
            else:
                texts.append(self._told(action))
        self._rules.check(done)
        # Answers leave in the order of requests, whatever their order within an event.
        found = [_ANSWER.match(each) for each in texts]
        ordered = iter(sorted((int(each[1]), each.string) for each in found if each))
        return [next(ordered)[1] if each else text for each, text in zip(found, texts, strict=True)]

    def _told(self, action: Action) -> str:
        if isinstance(action, actions.Send):
            self.sent[action.piece] = action
            connection = self.core._in_flight.connections[action.connection]
            if connection.state is ConnectionState.DIALLING and not self._dials:
                self.core.opened(action.connection)
            exchange = action.exchange
            asked = selection_text(exchange, action.part or split_whole(exchange.request.topics))
            fences = " ".join(f"{name_of(topic)}-{index}={fence}" for (topic, index), fence in action.fences)
            behind = f" behind {fences}" if fences else ""
            return f"send #{action.piece} b{action.broker}/c{action.connection}: {exchange.sequence} {asked}{behind}"
        if isinstance(action, actions.Respond):
            if not action.answer:
                return f"done {action.sequence}"
            answer = read_answer(self.exchanges[action.sequence], action.answer)
            self.answered[action.sequence] = answer
            self.bytes_of[action.sequence] = b"".join(action.answer)
            return f"answer {action.sequence}: {answer}"
        return action_text(action, self.now)


def proven(partitions: str = "t-0") -> Playbook:
    """Request 1 was accepted, so the routes of these partitions are proven, and later batches may be pipelined."""
    play = Playbook()
    play.submits(1, partitions)
    for piece in list(play.pieces.values()):
        words = [f"{topic.decode()}-{index}" for topic, index in map(piece.exchange.partition, piece.entries())]
        play.answers(piece.number, " ".join(words))
    assert play.proven(partitions)
    return play


def piped(*requests: int) -> Playbook:
    """A proven route of t-0 with these requests in flight: request n is piece n."""
    play = proven()
    for n in requests:
        assert play.submits(n, "t-0") == [f"send #{n} b1/c1: {n} t-0"]
    return play
