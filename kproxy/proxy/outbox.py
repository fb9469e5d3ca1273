"""What one connection is to write, gathered over one step of the event loop.

A write is a system call, and on one machine that call carries the bytes through the whole of TCP. Requests and answers
come in bursts; writing each burst at once costs a fraction of writing its messages one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from codec.primitives import Buffer

# Up to here one copy is cheaper than one more buffer for the kernel to gather.
JOIN_BYTES = 64 << 10
# More is not gathered in one step: the transport's own limits should notice it.
FLUSH_BYTES = 512 << 10


class Outbox:
    """The messages for one transport, written in order when the event loop has finished what it is doing."""

    __slots__ = ("_buffers", "_bytes", "_loop", "_transport", "written_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._buffers: list[Buffer] = []
        self._bytes = 0
        self.written_bytes = 0

    def put_one(self, buffer: Buffer) -> None:
        """The same as `put` for one buffer."""
        if not self._buffers:
            self._loop.call_soon(self.flush)
        self._bytes += len(buffer)
        self._buffers.append(buffer)
        if self._bytes > FLUSH_BYTES:
            self.flush()

    def put(self, buffers: Sequence[Buffer]) -> None:
        """Write these, behind all that was put before."""
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
            # Lost, as what the transport itself still holds may be; uvloop's own raises where asyncio's is silent.
            return
        self.written_bytes += size
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif size <= JOIN_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)
