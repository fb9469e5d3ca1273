"""Meter a client's usage, and throttle it by not reading.

A session gives each request of an admitted client to its `Meter` before it is begun, to charge the client's
account. A request that exceeds a quota is served, as in Kafka: its answer says how long the client is throttled
(throttle_time_ms, in answers to Produce, Fetch and ListOffsets), and the client is not read meanwhile. A session has no
meter as long as no quota applies to its client.

Every request of a busy client passes here. So its account is found once, and again when its client id changes, if a
quota names client ids; new quotas apply at the session's next tick.

Where several processes share a rate, a client whose wait is over is read only if its usage fits the current rate; until
then the meter checks again every LOOK_S.

Bytes produced are those of whole Produce requests. Bytes fetched are all that was sent to the client since its last
request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kproxy.proxy.answer_order import AnswerOrder, Slot
from kproxy.security.principals import Principal
from kproxy.security.quotas import LONGEST_WAIT_S, Account, Quotas
from kproxy_codec.api_keys import FETCH, LIST_OFFSETS, PRODUCE, is_flexible
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import RESPONSE_CORRELATION_ID_OFFSET, client_id, parse_request_header
from kproxy_codec.primitives import INT16, INT32, Buffer

_API_KEY_AT, _API_KEY_END = 4, 6
_int16 = INT16.unpack_from
# Position of a frame's client id, its length first; and the longest id that is kept.
_CLIENT_ID_AT: Final = 12
MOST_CLIENT_ID_BYTES: Final = 255
# Seconds between checks of a shared rate during a wait; and the shortest wait that gets a timer.
LOOK_S: Final = 1.0
SHORTEST_WAIT_S: Final = 0.001
# Versions from which an answer begins with throttle_time_ms.
_AT_BEGINNING_FROM: Final = {FETCH: 1, LIST_OFFSETS: 2}


@dataclass(eq=False)
class Meter:
    """The meter of one connection. `quotas` returns the current quotas, `on_pressure` stops reading.

    `begin` begins a request whose answer states for how many ms its client is throttled; it raises CodecError.
    """

    quotas: Callable[[], Quotas]
    principal: Principal
    begin: Callable[[memoryview, float, int], None]
    answers: AnswerOrder
    on_pressure: Callable[[bool], None]
    clock: Callable[[], float]
    counters: Counter[str]

    def __post_init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        # The exceeded account, and the time at which the wait ends in any case.
        self._exceeded: Account | None = None
        self._ends_at = 0.0
        # Whether the account depends on the client id; otherwise it never changes.
        self._names_clients = False
        self._account: Account | None = None
        # The client id of an earlier request, as in its frame, and its account.
        self._named: bytes | None = None
        self._of_named: Account | None = None
        self._sent_bytes = 0
        self._known = self.quotas()
        self._use_known()

    def take(self, frame: memoryview, first_byte_at: float) -> bool:
        """Charge a request; begin it and return True if it exceeds a quota. Raises CodecError."""
        account = self._account
        if self._names_clients:
            named = self._named
            if named is not None and frame[_CLIENT_ID_AT : _CLIENT_ID_AT + len(named)] == named:
                account = self._of_named
            else:
                account = self._account_of(frame)
        if account is None:
            return False
        fetched, outbox = 0, self.answers.outbox
        if outbox is not None:
            sent_bytes = outbox.written_bytes
            fetched, self._sent_bytes = sent_bytes - self._sent_bytes, sent_bytes
        size = len(frame)
        is_produce = size >= _API_KEY_END and _int16(frame, _API_KEY_AT)[0] == PRODUCE
        wait = account.use(self.clock(), produced=size if is_produce else 0, fetched=fetched)
        if wait <= 0.0:
            return False
        self._throttle(frame, first_byte_at, account, wait)
        return True

    def look(self) -> None:
        """Use the current quotas."""
        quotas = self.quotas()
        if quotas is not self._known:
            self._known = quotas
            self._use_known()

    def _use_known(self) -> None:
        self._names_clients = self._known.names_clients(self.principal)
        self._account = self._known.account(self.principal, "")
        self._named = self._of_named = None

    def _account_of(self, frame: memoryview) -> Account | None:
        """Find the account by the client id of a request, and keep both."""
        try:
            parse_request_header(frame)
        except CodecError:
            # The session refuses it.
            return self._account
        sender = client_id(frame) or b""
        account = self._known.account(self.principal, sender.decode(errors="replace"))
        if len(sender) <= MOST_CLIENT_ID_BYTES:
            self._named = bytes(frame[_CLIENT_ID_AT : _CLIENT_ID_AT + INT16.size + len(sender)])
            self._of_named = account
        return account

    def _throttle(self, frame: memoryview, first_byte_at: float, account: Account, wait: float) -> None:
        """Begin a request over its quota, and stop reading for `wait` seconds. Raises CodecError."""
        self.counters["quotas.throttled"] += 1
        if self._timer is None:
            self.on_pressure(True)
        else:
            self._timer.cancel()
        self._exceeded = account
        self._ends_at = self.clock() + LONGEST_WAIT_S
        self._timer = asyncio.get_running_loop().call_later(wait, self._go_on)
        self.begin(frame, first_byte_at, max(1, round(wait * 1000)))

    def _go_on(self) -> None:
        account, now = self._exceeded, self.clock()
        if account is not None and account.is_shared:
            # Its rate may have been cut meanwhile, or may rise during the wait.
            wait = min(account.wait(now), LOOK_S, self._ends_at - now)
            if wait > SHORTEST_WAIT_S:
                self._timer = asyncio.get_running_loop().call_later(wait, self._go_on)
                return
        self._timer = self._exceeded = None
        self.on_pressure(False)

    def close(self) -> None:
        """End with the connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._exceeded = None


class ThrottledSlot(Slot):
    """The slot of an answer with a throttle time."""

    __slots__ = ("api_key", "api_version", "throttle_ms")

    def __init__(
        self, order: AnswerOrder, sequence: int, weight: int, began: float, frame: memoryview, throttle_ms: int
    ) -> None:
        super().__init__(order, sequence, weight, began)
        header = parse_request_header(frame)
        self.api_key = header.api_key
        self.api_version = header.api_version
        self.throttle_ms = throttle_ms

    def fill(self, buffers: list[Buffer], is_allowed: Callable[[], bool] | None = None) -> None:
        super().fill(with_throttle(self.api_key, self.api_version, buffers, self.throttle_ms), is_allowed)


def with_throttle(api_key: int, api_version: int, buffers: list[Buffer], throttle_ms: int) -> list[Buffer]:
    """Return an answer with at least this throttle_time_ms, or unchanged if its version or form has no such field."""
    flexible = is_flexible(api_key, api_version)
    if not buffers:
        return buffers
    if api_key == PRODUCE and api_version >= 1:
        # At the end, before the empty tagged fields (one zero byte).
        last = buffers[-1]
        if flexible and (not last or last[-1] != 0):
            return buffers
        return _raised(buffers, len(buffers) - 1, len(last) - INT32.size - flexible, throttle_ms)
    first_version = _AT_BEGINNING_FROM.get(api_key)
    if first_version is None or api_version < first_version:
        return buffers
    at = RESPONSE_CORRELATION_ID_OFFSET + INT32.size + flexible
    for place, buffer in enumerate(buffers):
        if at < len(buffer):
            return _raised(buffers, place, at, throttle_ms)
        at -= len(buffer)
    return buffers


def _raised(buffers: list[Buffer], place: int, at: int, throttle_ms: int) -> list[Buffer]:
    buffer = buffers[place]
    if at < 0 or at + INT32.size > len(buffer):
        return buffers
    if isinstance(buffer, bytes) or (isinstance(buffer, memoryview) and buffer.readonly):
        buffer = bytearray(buffer)
    INT32.pack_into(buffer, at, max(throttle_ms, INT32.unpack_from(buffer, at)[0]))
    return [*buffers[:place], buffer, *buffers[place + 1 :]]
