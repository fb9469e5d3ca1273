"""Match the answers on one connection to the requests that await them.

A broker answers the requests of a connection in their order, each with the request's correlation_id. Requests without
an answer (Produce with acks=0) are not recorded here.

States
  in step       every answer so far was the answer to the oldest request
  out of step   a CodecError was raised: later bytes cannot be attributed, and the owner closes the connection

Transitions
  in step -> out of step   a frame of an illegal length, an answer shorter than its header, or not the awaited answer

Invariants
1. A waiter is returned at most once: with its answer (`match`, `receive`) or without one (`end`).
2. Answers are matched in the order of `sent`, and the correlation_id of each is verified.
3. At most `most` requests await answers. Their reader bounds the frames (kproxy_codec.framing).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, Generic, TypeVar

from kproxy_codec.errors import CodecError, UnexpectedAnswer
from kproxy_codec.framing import FrameReader, response_correlation_id
from kproxy_codec.primitives import Buffer

MAX_CORRELATION_ID: Final = 0x7FFF_FFFF

Waiter = TypeVar("Waiter")


class AwaitedAnswers(Generic[Waiter]):
    """The requests of one connection that await answers, oldest first. `frames` cuts the received bytes.

    `awaited_bytes` is the size of these requests together. `sent_at` is when the request that was removed last (by its
    answer, or by `end`) had been sent, by the owner's clock.
    """

    __slots__ = ("_last_id", "_most", "_waiting", "awaited_bytes", "frames", "sent_at")

    def __init__(self, frames: FrameReader, most: int = MAX_CORRELATION_ID) -> None:
        """Without `most` only the number of ids bounds the queue; its owner then bounds the requests."""
        self.frames = frames
        self._most = most
        self._last_id = 0
        self._waiting: deque[tuple[int, Waiter, int, float]] = deque()
        self.awaited_bytes = 0
        self.sent_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiter]:
        return (waiting[1] for waiting in self._waiting)

    @property
    def oldest(self) -> tuple[int, Waiter] | None:
        """The correlation_id and the waiter of the next answer."""
        return self._waiting[0][:2] if self._waiting else None

    def next_id(self) -> int:
        """A correlation_id for the next request."""
        self._last_id = correlation_id = (self._last_id + 1) & MAX_CORRELATION_ID
        return correlation_id

    def sent(self, correlation_id: int, waiter: Waiter, size: int = 0, at: float = 0.0) -> None:
        """Add a request of `size` bytes after those sent before.

        Raises CodecError if `most` requests await answers already.
        """
        if len(self._waiting) >= self._most:
            raise CodecError(f"{self._most} earlier requests have no answer yet")
        self._waiting.append((correlation_id, waiter, size, at))
        self.awaited_bytes += size

    def match(self, answer: Buffer) -> Waiter:
        """The waiter of this answer, a whole frame. Raises UnexpectedAnswer, Truncated."""
        answered_id = response_correlation_id(answer)
        waiting = self._waiting
        if not waiting or waiting[0][0] != answered_id:
            raise unexpected_answer(self.oldest, answer)
        return self._take()

    def _take(self) -> Waiter:
        _, waiter, size, self.sent_at = self._waiting.popleft()
        self.awaited_bytes -= size
        return waiter

    def receive(self, nbytes: int) -> Iterator[tuple[Waiter, memoryview]]:
        """The answers that `nbytes` more bytes in the buffer of `frames` complete. Raises CodecError."""
        for frame in self.frames.buffer_updated(nbytes):
            yield self.match(frame), frame

    def replace(self, waiters: Mapping[Waiter, Waiter]) -> None:
        """Replace the waiters that are keys of `waiters`, in place, because `receive` may be running."""
        replaced = [(each[0], waiters.get(each[1], each[1]), *each[2:]) for each in self._waiting]
        self._waiting.clear()
        self._waiting.extend(replaced)

    def end(self) -> Iterator[Waiter]:
        """Remove and yield the waiters one by one; each counts as waiting until it is yielded."""
        while self._waiting:
            yield self._take()

    def clear(self) -> None:
        """Forget all waiters."""
        self._waiting.clear()
        self.awaited_bytes = 0


def unexpected_answer(oldest: tuple[int, object] | None, answer: Buffer) -> UnexpectedAnswer:
    """The error for an answer that is not the one to `oldest`. Raises Truncated for one without a correlation_id."""
    answered_id = response_correlation_id(answer)
    awaited = f"correlation_id {oldest[0]} is awaited" if oldest else "nothing is awaited"
    return UnexpectedAnswer(f"the answer matches no request ({answered_id}; {awaited})")
