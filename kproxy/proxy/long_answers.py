"""Process long messages in short steps, and ask brokers once for an answer that several clients want.

A message may be megabytes long, and one step of that length would delay all other clients. `Portions.of` works on it
in portions of about a millisecond (kproxy_codec.walk), one in a turn of the event loop. `apart` uses another thread.

Invariants
1. In a turn of the event loop at most one portion of one long message is worked on; several messages alternate.
2. Short messages (SHORT_BYTES; in `apart` READ_AT_ONCE_BYTES) do not wait.
3. `Shared` returns only answers that were requested after the caller came: a client that created a topic sees it.
4. `Shared` keeps the latest answer to a question, and only while somebody waits for that question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

from kproxy_codec.walk import Work, at_once

Result = TypeVar("Result")

# Some hundred partitions: a fraction of a portion.
SHORT_BYTES: Final = 4 << 10
# kproxy_codec.control takes up to 20 µs for an element.
READ_AT_ONCE_BYTES: Final = 1 << 10
_READ_TOGETHER_BYTES: Final = 16 << 10


class Portions:
    """Work on the long messages of all connections in portions."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._apart = asyncio.Lock()

    async def apart(self, size: int, read: Callable[[], Result]) -> Result:
        """Read or build a message of `size` bytes with kproxy_codec.control: on another thread, unless it is short.

        Long messages are read one at a time, so that other threads stay free, which also check passwords. Raises
        the errors of `read`.
        """
        if size <= READ_AT_ONCE_BYTES:
            return read()
        if size <= _READ_TOGETHER_BYTES:
            return await asyncio.to_thread(read)
        async with self._apart:
            return await asyncio.to_thread(read)

    async def of(self, work: Work[Result], size: int) -> Result:
        """Return the result of `work` on a message of `size` bytes.

        Raises the errors of the work.
        """
        if size <= SHORT_BYTES:
            return at_once(work)
        while True:
            async with self._turn:
                try:
                    next(work)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                # Hold the lock until the next turn of the event loop, so that no other portion runs in this one.
                await asyncio.sleep(0)

    async def next_turn(self) -> None:
        """Wait for a later turn of the event loop, in turn with all who have portions to process."""
        async with self._turn:
            await asyncio.sleep(0)


class _Question(Generic[Result]):
    """One question while a caller waits for it.

    `asked` counts the attempts, `answered` is the number of the latest that ended.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0
        self.asked = 0
        self.answered = 0
        self.answer: Result


class Shared(Generic[Result]):
    """Ask a question once for all callers that came before it was asked.

    Later callers wait until it is answered, and ask again, once for all. If the caller that asks is cancelled or fails,
    another asks.
    """

    def __init__(self) -> None:
        self._questions: dict[Hashable, _Question[Result]] = {}

    async def ask(self, key: Hashable, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Return the answer to the question `key`, by `ask` or another caller's."""
        question = self._questions.get(key)
        if question is None:
            question = self._questions[key] = _Question()
        asked_before = question.asked
        question.waiting += 1
        try:
            async with question.turn:
                if question.answered <= asked_before:
                    question.asked += 1
                    number = question.asked
                    question.answer = await ask()
                    question.answered = number
                return question.answer
        finally:
            question.waiting -= 1
            if not question.waiting:
                del self._questions[key]
