"""Work on long messages in portions, and share one answer among clients that ask the same.

A message to a client or a broker may be megabytes long, and work on it in one go would delay all other clients. It is
done in portions of about a millisecond (`kproxy_codec.walk`), one in a turn of the event loop.

Invariants
1. In a turn of the event loop at most one portion of one long message is worked on; several messages take turns, a
   portion each.
2. Short messages, up to SHORT_BYTES, do not wait.
3. What `Shared` gives out as the answer to a request was asked for after that request had come: who has created
   something and asks then is told of it.
4. `Shared` keeps the latest answer to a question, and only while somebody asks that question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

from kproxy_codec.walk import Work, at_once

Result = TypeVar("Result")

# Some hundred partitions: a fraction of a portion.
SHORT_BYTES: Final = 4 << 10


class Portions:
    """The long work of all connections."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def of(self, work: Work[Result], size: int) -> Result:
        """The result of `work` on a message of `size` bytes. Raises what the work raises."""
        if size <= SHORT_BYTES:
            return at_once(work)
        while True:
            async with self._turn:
                try:
                    next(work)
                except StopIteration as end:
                    result: Result = end.value
                    return result
                # Held until the next turn of the event loop, so that no other message is worked on in this one.
                await asyncio.sleep(0)


class _Question(Generic[Result]):
    """One question, asked again and again while anybody waits: `asked` counts how often."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0
        self.asked = 0
        # The latest time of these that came to an end.
        self.answered = 0
        self.answer: Result


class Shared(Generic[Result]):
    """Questions that several ask at a time: one of them asks, for all who came before it was asked.

    Those that come later wait until it is answered, and ask again, as one. Where who asks is cancelled or fails,
    another asks.
    """

    def __init__(self) -> None:
        self._questions: dict[Hashable, _Question[Result]] = {}

    async def ask(self, key: Hashable, ask: Callable[[], Awaitable[Result]]) -> Result:
        """The answer to the question `key`, from `ask` or from whoever asks the same."""
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
