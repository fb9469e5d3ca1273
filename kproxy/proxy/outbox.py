"""Gather the writes of one connection over one step of the event loop.

A write is a system call, and on one machine that call carries the bytes through the whole TCP stack. Requests and
answers come in bursts; writing a burst at once costs a fraction of writing its messages one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from kproxy.proxy.answer_room import AnswerBuffer, Share
from kproxy_codec.primitives import Buffer

# Up to this size one copy is cheaper than one more buffer for the kernel to gather.
JOIN_BYTES = 64 << 10
# More than this is not gathered in one step, so that the transport's own limits notice it.
FLUSH_BYTES = 512 << 10
# The largest write to a client's transport.
PART_BYTES = 256 << 10


class Outbox:
    """The messages for one transport, written in order at the end of the current step of the event loop."""

    __slots__ = ("_buffers", "_bytes", "_loop", "_transport", "written_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._buffers: list[Buffer] = []
        self._bytes = 0
        self.written_bytes = 0

    @property
    def put_bytes(self) -> int:
        """All bytes ever put here and not dropped; `written_bytes` of them are with the transport."""
        return self.written_bytes + self._bytes

    def put_one(self, buffer: Buffer) -> None:
        """Like `put`, for one buffer."""
        if not self._buffers:
            self._loop.call_soon(self.flush)
        self._bytes += len(buffer)
        self._buffers.append(buffer)
        if self._bytes > FLUSH_BYTES:
            self.flush()

    def put(self, buffers: Sequence[Buffer]) -> None:
        """Queue buffers behind those that were put before."""
        if not self._buffers:
            self._loop.call_soon(self.flush)
        self._bytes += sum(map(len, buffers))
        self._buffers += buffers
        if self._bytes > FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the transport."""
        buffers = self._buffers
        if not buffers:
            return
        self._buffers = []
        size, self._bytes = self._bytes, 0
        if self._transport.is_closing():
            # Lost, like bytes that the transport itself still holds. uvloop's transport would raise, not asyncio's.
            return
        self.written_bytes += size
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif size <= JOIN_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)


class PacedOutbox(Outbox):
    """The answers for one client, written as fast as its transport takes them.

    While the transport has enough, the rest stays here and counts in the client's share. A transport may copy bytes
    that it cannot send at once, and such copies could not be counted.
    """

    __slots__ = ("_is_paused", "_looked_at", "_share", "_untaken")

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, share: Share) -> None:
        super().__init__(loop, transport)
        self._share = share
        self._is_paused = False
        # While it is paused: the number of counted buffers, and the bytes in them that have no room of their own, plus
        # the bytes that the transport held when it was paused.
        self._looked_at = 0
        self._untaken = 0

    @property
    def taken_bytes(self) -> int:
        """The bytes that the client's kernel or this host's has."""
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

    def flush(self) -> None:
        """Hand to the transport what it takes."""
        if not self._is_paused:
            if self._bytes <= FLUSH_BYTES:
                super().flush()
                return
            self._flush_in_parts()
        if self._is_paused:
            self._count()

    def flush_all(self) -> None:
        """Hand everything to the transport: the connection is to be closed."""
        self._is_paused = False
        super().flush()
        self._share.leave_untaken(0)

    def discard(self) -> None:
        """Discard all unwritten answers."""
        self._buffers, self._bytes = [], 0
        self._share.leave_untaken(0)

    def _count(self) -> None:
        for buffer in self._buffers[self._looked_at :]:
            if not (isinstance(buffer, memoryview) and isinstance(buffer.obj, AnswerBuffer)):
                self._untaken += len(buffer)
        self._looked_at = len(self._buffers)
        self._share.leave_untaken(self._untaken)

    def _flush_in_parts(self) -> None:
        waiting, self._buffers = deque(self._buffers), []
        while waiting and not self._is_paused and not self._transport.is_closing():
            part: list[Buffer] = []
            size = 0
            while waiting and size < PART_BYTES:
                buffer = waiting.popleft()
                fits = PART_BYTES - size
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
