"""One small request to a broker, and its answer to be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

from kproxy.proxy.upstream import Upstream
from kproxy_codec.primitives import Buffer


class Lost(Exception):
    """A broker's connection ended before it answered; `written` says whether it may have seen the request."""

    def __init__(self, *, written: bool) -> None:
        super().__init__("the broker's connection ended before it answered")
        self.written = written


class Question:
    """The ticket of one request that somebody awaits."""

    expects_answer = True
    may_wait_until = -inf

    def __init__(self) -> None:
        self.answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

    def sent(self) -> None:
        """Never said: every question has an answer."""

    def unconfirmed(self) -> None:
        """Never said, for the same reason."""

    def answered(self, frame: memoryview) -> None:
        if not self.answer.done():
            self.answer.set_result(frame)

    def lost(self, *, written: bool) -> None:
        if not self.answer.done():
            self.answer.set_exception(Lost(written=written))


async def ask(upstream: Upstream, correlation_id: int, buffers: Sequence[Buffer]) -> memoryview:
    """Send a request that has this correlation_id in it; the answer, a whole frame. Raises Lost."""
    question = Question()
    upstream.send(question, correlation_id, buffers)
    return await question.answer
