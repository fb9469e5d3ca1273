"""Write the answers of a client connection in the order of its requests.

It also counts the connection's bytes in flight.

States of a slot, the place of one answer
  empty    its answer is not known
  filled   its answer is known and waits for those before it
  gone     it is written, or its connection has ended. The slot of a request without an answer (acks=0) leaves the order
           at once, and counts until the request is sent or lost

Invariants
1. Each request that has an answer takes a slot before anything is sent; a slot is written when it is filled and all
   before it are written.
2. In flight are the bytes of requests (with acks=0 until they are sent, confirmed or lost) and the most that reads may
   return. They count here until the slot is gone. The requests' own bytes count in the budget as well.
3. Without an `outbox`, before the connection is made and after it has ended, nothing is written.

The compiled plain path (kproxy.plain) has a twin of each class here, which is used instead where it is built.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from kproxy.plain import compiled
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.outbox import PacedOutbox
from kproxy_codec.primitives import Buffer

if TYPE_CHECKING:
    from kproxy.proxy.client_session import ClientSession


class Slot:
    """The place of one answer in the order of answers.

    `sequence` is the request's own number on its connection. `weight` is its share of the connection's bytes in flight,
    `frame_bytes` the request's share of the budget. `is_allowed` is called in the answer's turn, as the answer may be
    forbidden by then.
    """

    __slots__ = (
        "answered_at",
        "began",
        "buffers",
        "frame_bytes",
        "is_allowed",
        "order",
        "sent_at",
        "sequence",
        "taken_at",
        "weight",
    )

    def __init__(self, order: AnswerOrder, sequence: int, weight: int, began: float) -> None:
        self.order = order
        self.sequence = sequence
        self.weight = weight
        self.frame_bytes = weight
        # Arrival of a produce request's first byte; 0 for other requests, whose latency is not measured.
        self.began = began
        # When it was begun, when a part of it was last written to a broker (0: never), and when its answer was known.
        self.taken_at = order.now() if began else 0.0
        self.sent_at = 0.0
        self.answered_at = 0.0
        self.buffers: list[Buffer] | None = None
        self.is_allowed: Callable[[], bool] | None = None

    def fill(self, buffers: list[Buffer], is_allowed: Callable[[], bool] | None = None) -> None:
        """Set the whole answer, its length prefix first; empty for a finished request without an answer."""
        if buffers:
            if self.began:
                self.answered_at = self.order.now()
            self.buffers = buffers
            self.is_allowed = is_allowed
            self.order.flush()
        else:
            self.order.unload(self)


class AnswerOrder:
    """The slots of one client connection. While `is_waited_for`, `client` continues after each written answer.

    The code that begins requests adds to `slots`, `sequence`, `silent` and `in_flight_bytes` directly, because a call
    costs more.
    """

    __slots__ = (
        "_budget",
        "_client",
        "_tally",
        "in_flight_bytes",
        "is_waited_for",
        "now",
        "outbox",
        "sequence",
        "silent",
        "slots",
    )

    def __init__(self, context: ProxyContext, client: ClientSession) -> None:
        self.now = context.clock
        self._tally = context.tally
        self._budget = context.budget
        self._client = client
        self.outbox: PacedOutbox | None = None
        # A list: an empty deque takes 760 bytes, and open requests are bounded.
        self.slots: list[Slot] = []
        # The number of the newest request.
        self.sequence = 0
        # Open requests that have no answer (acks=0), and so no slot.
        self.silent = 0
        self.in_flight_bytes = 0
        self.is_waited_for = False

    @property
    def open_count(self) -> int:
        """Requests that are not answered, or with acks=0 not sent."""
        return len(self.slots) + self.silent

    def flush(self) -> None:
        """Write every answer whose turn has come."""
        if self.outbox is None:
            return
        slots, budget, count, now = self.slots, self._budget, 0, 0.0
        while self.outbox is not None and slots and (buffers := slots[0].buffers) is not None:
            slot = slots[0]
            if slot.is_allowed is not None and not slot.is_allowed():
                self._client.forbidden()
                return
            del slots[0]
            self.in_flight_bytes -= slot.weight
            budget.held -= slot.frame_bytes
            if slot.began:
                now = now or self.now()
                self._tally.answered(slot, now)
                count += 1
            self.outbox.put(buffers)
        if count and self.outbox is not None:
            self.outbox.add_answers(count, now)
        if budget.waiting:
            budget.wake()
        if self.is_waited_for:
            self._client.go_on()

    def handed_over(self, sequence: int) -> None:
        """Note that a part of the produce request with this number is written to its broker now."""
        at = bisect_left(self.slots, sequence, key=attrgetter("sequence"))
        if at < len(self.slots) and self.slots[at].sequence == sequence and self.slots[at].began:
            self.slots[at].sent_at = self.now()

    def unload(self, slot: Slot) -> None:
        """Stop counting a request without an answer that is sent or lost."""
        self.in_flight_bytes -= slot.weight
        self._budget.held -= slot.frame_bytes
        slot.frame_bytes = 0
        self.silent -= 1
        if self._budget.waiting:
            self._budget.wake()
        if self.is_waited_for:
            self._client.go_on()


if not TYPE_CHECKING and compiled is not None:
    Slot, AnswerOrder = compiled.Slot, compiled.AnswerOrder
