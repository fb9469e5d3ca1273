"""Whether this proxy can serve clients: what `/readyz` says.

| finding | answer |
| --- | --- |
| starting or draining | not ready |
| no broker is known, or none of them answers | not ready: every request would fail; another proxy may fare better |
| the table is stale | ready, degraded: the last known table serves on |
| some brokers do not answer | ready: their partitions fail wherever a client goes |

Brokers are asked when `/readyz` is, and no oftener than every FRESH_S: a proxy that nobody asks sends nothing.

States of `Brokers`
  idle      what was found out last is remembered
  asking    one task asks; whoever wants to know meanwhile waits for it
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from random import Random

from kproxy.observe.http_page import Readiness
from kproxy.observe.table import TableView
from kproxy.proxy.dialling import Dialler, Turn
from kproxy.routing.topology import Address
from kproxy_codec import api_keys
from kproxy_codec.headers import request_header
from kproxy_codec.partitioned import with_length

FRESH_S = 1.0
AT_ONCE = 16
_CORRELATION_ID = 0x72647920
# Version 0 has no body: every broker answers it, whatever it serves.
_QUESTION = b"".join(with_length([request_header(api_keys.API_VERSIONS, 0, _CORRELATION_ID, b"kproxy-readyz")]))
_ANSWER_HEAD = struct.Struct(">ii")


class Brokers:
    """Whether any of `addresses` answers, in `timeout_s` seconds a broker; `clock` in seconds."""

    def __init__(
        self,
        addresses: Callable[[], Mapping[int, Address]],
        *,
        dialler: Dialler,
        timeout_s: float,
        clock: Callable[[], float],
        random: Random,
    ) -> None:
        self._addresses = addresses
        self._dialler = dialler
        self._timeout_s = timeout_s
        self._clock = clock
        self._random = random
        self._asking: asyncio.Task[str | None] | None = None
        self._last: tuple[int, Address] | None = None
        self._fresh_until = 0.0
        self._problem: str | None = None

    async def problem(self) -> str | None:
        """Why no broker can be used; None where one answers."""
        if self._asking is None:
            if self._clock() < self._fresh_until:
                return self._problem
            self._asking = asyncio.get_running_loop().create_task(self._ask())
            self._asking.add_done_callback(self._asked)
        return await asyncio.shield(self._asking)

    def _asked(self, task: asyncio.Task[str | None]) -> None:
        self._asking = None
        if not task.cancelled() and task.exception() is None:
            self._problem, self._fresh_until = task.result(), self._clock() + FRESH_S

    async def _ask(self) -> str | None:
        brokers = list(self._addresses().items())
        if not brokers:
            return "no broker is known"
        self._random.shuffle(brokers)
        # The one that answered last is enough, as a rule.
        brokers.sort(key=lambda broker: broker != self._last)
        groups = [brokers[:1], *(brokers[at : at + AT_ONCE] for at in range(1, len(brokers), AT_ONCE))]
        for group in groups:
            self._last = await self._first_to_answer(group)
            if self._last is not None:
                return None
        return f"no broker answers: {len(brokers)} asked"

    async def _first_to_answer(self, brokers: list[tuple[int, Address]]) -> tuple[int, Address] | None:
        asked = [asyncio.get_running_loop().create_task(self._answers(*broker)) for broker in brokers]
        try:
            for answer in asyncio.as_completed(asked):
                broker = await answer
                if broker is not None:
                    return broker
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _answers(self, broker: int, address: Address) -> tuple[int, Address] | None:
        """Itself if a broker answers there. Connecting is not enough: a stopped process's kernel does that."""
        reader = asyncio.StreamReader()
        transport: asyncio.Transport | None = None
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            with self._dialler.attempt(broker, address, Turn.NEXT) as attempt:
                async with asyncio.timeout_at(deadline):
                    transport = await attempt.connect(asyncio.StreamReaderProtocol(reader))
            async with asyncio.timeout_at(deadline):
                transport.write(_QUESTION)
                _, correlation_id = _ANSWER_HEAD.unpack(await reader.readexactly(_ANSWER_HEAD.size))
            return (broker, address) if correlation_id == _CORRELATION_ID else None
        except (OSError, UnicodeError, asyncio.IncompleteReadError):
            # TimeoutError is an OSError. UnicodeError: a host that no name server can be asked about.
            return None
        finally:
            if transport is not None:
                transport.abort()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


async def readiness(not_ready: str | None, view: TableView, brokers: Brokers) -> Readiness:
    """The table above; `not_ready` is the listener's own word."""
    problem = not_ready or await brokers.problem()
    if problem is not None:
        return Readiness(ready=False, text=problem)
    if view.stale:
        return Readiness(ready=True, text="ready, degraded: the table is stale, the last known owners are used")
    return Readiness(ready=True, text="ready")
