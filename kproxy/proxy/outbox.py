"""Gather the messages for one transport and write them once in each step of the event loop.

A write is a system call that on one machine carries the bytes through the whole TCP stack. Requests and answers come in
bursts; one write for a burst costs a fraction of one write for each message.

States of an `Outbox`
  empty     nothing is to be written
  waiting   messages are to be written in the next step of the event loop (`Flushes`)
  paused    only a `PacedOutbox`: the transport has enough, and the messages stay here until `resume`

Transitions
  empty   -> waiting   `put`, `put_one`
  waiting -> empty     `flush`: in the next step, or at once beyond FLUSH_BYTES; or the transport is closing, and the
                       messages are lost
  any     -> paused    `pause`
  paused  -> empty     `resume` writes, unless the transport pauses again

Invariants
1. Messages are written in the order of `put`, each once.
2. While it is not paused, no more than FLUSH_BYTES and one message wait.

The compiled plain path (kproxy.plain) has twins of `Outbox` and `TimedOutbox`, used instead where it is built.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from kproxy.observe.tally import Durations
from kproxy.plain import compiled
from kproxy.proxy.answer_memory import ClientMemory
from kproxy_codec.primitives import Buffer

# Up to this size one copy is cheaper than one more buffer for the kernel to gather.
JOIN_BYTES = 64 << 10
# Waiting messages are written beyond this size, so that the transport's own limits apply.
FLUSH_BYTES = 512 << 10
# One write to a client's transport, and the largest one, which has the end of an answer of many parts.
PART_BYTES = 256 << 10
LAST_PART_BYTES = 320 << 10
# Times at which waiting answers were put into a client's outbox; more are not told apart.
MOST_RUNS: Final = 4


class Flushes:
    """The outboxes of one event loop that have something to write; one callback writes them all."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Outbox] = []

    def add(self, loop: asyncio.AbstractEventLoop, outbox: Outbox) -> None:
        """Flush `outbox` in the next step of `loop`."""
        if not self._waiting:
            loop.call_soon(self._flush_all, loop)
        self._waiting.append(outbox)

    def _flush_all(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting, self._waiting = deque(self._waiting), []
        try:
            while waiting:
                outbox = waiting.popleft()
                outbox.is_waiting = False
                outbox.flush()
        finally:
            # One of them failed; the others keep their turn.
            for outbox in waiting:
                self.add(loop, outbox)


_flushes: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, Flushes]] = WeakKeyDictionary()


def flushes_of(loop: asyncio.AbstractEventLoop) -> Flushes:
    """The `Flushes` of an event loop."""
    found = _flushes.get(loop)
    if found is None:
        found = _flushes[loop] = Flushes()
    return found


class Outbox:
    """The messages for one transport, written in order in the next step of the event loop."""

    __slots__ = ("_buffers", "_bytes", "_flushes", "_loop", "_transport", "is_waiting", "written_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._flushes = flushes_of(loop)
        self._buffers: list[Buffer] = []
        # Whether `_flushes` has this outbox.
        self.is_waiting = False
        self._bytes = 0
        self.written_bytes = 0

    @property
    def put_bytes(self) -> int:
        """All bytes ever put here and not dropped; the transport has `written_bytes` of them."""
        return self.written_bytes + self._bytes

    def put_one(self, buffer: Buffer) -> None:
        """Like `put`, for one buffer."""
        self._bytes += len(buffer)
        self._buffers.append(buffer)
        if not self.is_waiting:
            self._wait()
        if self._bytes > FLUSH_BYTES:
            self.flush()

    def _wait(self) -> None:
        self.is_waiting = True
        self._flushes.add(self._loop, self)

    def put(self, buffers: Sequence[Buffer]) -> None:
        """Append buffers to the queue."""
        for buffer in buffers:
            self.put_one(buffer)

    def flush(self) -> None:
        """Hand everything to the transport."""
        self._write_all()

    def _write_all(self) -> None:
        buffers = self._buffers
        if not buffers:
            return
        self._buffers = []
        size, self._bytes = self._bytes, 0
        if self._transport.is_closing():
            # Lost, like bytes in the transport itself. uvloop's transport would raise; asyncio's would not.
            return
        self.written_bytes += size
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif size <= JOIN_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)


class TimedOutbox(Outbox):
    """The answers for one client, timed from when they are put here until they are written."""

    __slots__ = ("_clock", "_is_paused", "_runs", "_writing")

    # Methods of the PacedOutbox.
    _write_in_parts: Callable[[], None]
    _count_untaken: Callable[[], None]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.WriteTransport,
        writing: Durations,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(loop, transport)
        self._writing = writing
        self._clock = clock
        # Answers that wait here: the position of their last byte, their number, and since when they wait.
        self._runs: list[tuple[int, int, float]] = []
        self._is_paused = False

    def add_answers(self, count: int, at: float) -> None:
        """Note that the last `count` answers to produce requests were put here `at` a time.

        Beyond MOST_RUNS times, they count as put with the latest of these.
        """
        runs, end = self._runs, self.put_bytes
        if len(runs) == MOST_RUNS:
            _, before, since = runs.pop()
            runs.append((end, before + count, since))
        else:
            runs.append((end, count, at))

    def _count_runs(self) -> None:
        """Count the time that written answers have waited here."""
        now = self._clock() if self._runs else 0.0
        while self._runs and self._runs[0][0] <= self.written_bytes:
            _, count, at = self._runs.pop(0)
            self._writing.count(now - at, count)

    def _forget_runs(self) -> None:
        self._runs = []

    def flush(self) -> None:
        """Hand as much to the transport as it accepts."""
        if not self._is_paused:
            if self._bytes <= FLUSH_BYTES:
                self._write_all()
            else:
                self._write_in_parts()
            self._count_runs()
        if self._is_paused:
            self._count_untaken()


if not TYPE_CHECKING and compiled is not None:
    Outbox, TimedOutbox = compiled.Outbox, compiled.TimedOutbox


class PacedOutbox(TimedOutbox):
    """The answers for one client, written as fast as its transport takes them.

    While the transport is full, the rest stays here and counts in the client's share. A transport may copy bytes that
    it cannot send at once, and such copies could not be counted.
    """

    __slots__ = ("_looked_at", "_share", "_untaken")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.WriteTransport,
        share: ClientMemory,
        writing: Durations,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(loop, transport, writing, clock)
        self._share = share
        # While it is paused: the number of counted buffers, and the bytes in them that have no room of their own, plus
        # the bytes that the transport held when it was paused.
        self._looked_at = 0
        self._untaken = 0

    @property
    def taken_bytes(self) -> int:
        """The number of bytes that the kernel, here or at the client, has."""
        return self.written_bytes - self._transport.get_write_buffer_size()

    def pause(self) -> None:
        """Stop writing: the transport has enough."""
        self._is_paused = True
        self._looked_at = 0
        self._untaken = self._transport.get_write_buffer_size()
        self._share.leave_untaken(self._untaken)

    def resume(self) -> None:
        """Resume writing."""
        self._is_paused = False
        self.flush()
        if not self._is_paused:
            self._share.leave_untaken(0)

    def flush_all(self) -> None:
        """Hand everything to the transport before the connection closes."""
        self._is_paused = False
        self._write_all()
        self._count_runs()
        self._share.leave_untaken(0)

    def discard(self) -> None:
        """Discard all unwritten answers."""
        self._buffers, self._bytes = [], 0
        self._forget_runs()
        self._share.leave_untaken(0)

    def _count_untaken(self) -> None:
        buffers = self._buffers
        for buffer in buffers[self._looked_at :]:
            if not self._share.has_room(buffer):
                self._untaken += len(buffer)
        self._looked_at = len(buffers)
        self._share.leave_untaken(self._untaken)

    def _write_in_parts(self) -> None:
        waiting, self._buffers = deque(self._buffers), []
        while waiting and not self._is_paused and not self._transport.is_closing():
            part: list[Buffer] = []
            size = 0
            most = PART_BYTES if self._bytes > LAST_PART_BYTES else LAST_PART_BYTES
            while waiting and size < most:
                buffer = waiting.popleft()
                fits = most - size
                if len(buffer) > fits:
                    view = memoryview(buffer)
                    waiting.appendleft(view[fits:])
                    buffer = view[:fits]
                part.append(buffer)
                size += len(buffer)
            self._bytes -= size
            self.written_bytes += size
            self._transport.writelines(part)
        if self._transport.is_closing():
            self._bytes = 0
        else:
            self._buffers = list(waiting)
