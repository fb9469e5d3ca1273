"""Claim partitions with the Own API, on one connection, one request at a time.

`python -m bench.own_client PORT GROUP RESOURCE GENERATION` runs one in a process of its own, which can be killed: it
claims, prints the fence, and keeps the claim until its stdin ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Self

from kproxy_codec.api_keys import OWN
from kproxy_codec.error_codes import COORDINATOR_NOT_AVAILABLE, FENCED_INSTANCE_ID, NONE, REQUEST_TIMED_OUT, name_of
from kproxy_codec.framing import LENGTH_BYTES, frame_message, request_header
from kproxy_codec.own import (
    OWN_MAX_VERSION,
    OwnedResource,
    OwnRequest,
    OwnResource,
    encode_own_request,
    parse_own_response,
)
from kproxy_codec.primitives import INT32

HOST = "127.0.0.1"
# The errors of a claim that cannot be granted, or not be confirmed, yet: the client asks again.
NOT_YET = (FENCED_INSTANCE_ID, REQUEST_TIMED_OUT, COORDINATOR_NOT_AVAILABLE)
ASK_AGAIN_S = 0.005


def own_frame(group: str, *claims: tuple[str, int]) -> bytes:
    """Return an Own request for resources and their generations, with its length prefix."""
    body = encode_own_request(OwnRequest(group, tuple(OwnResource(*claim) for claim in claims)))
    return frame_message(request_header(OWN, OWN_MAX_VERSION, 0, b"bench"), body)


class OwnConnection:
    """A connection of the Own API; `close` releases all its claims."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection(HOST, port))

    async def ask(self, group: str, resource: str, generation: int) -> OwnedResource:
        """Return the outcome of one claim. Raise SystemExit if the request was refused or the connection was closed."""
        self._writer.write(own_frame(group, (resource, generation)))
        try:
            length = await self._reader.readexactly(LENGTH_BYTES)
            message = await self._reader.readexactly(INT32.unpack(length)[0])
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise SystemExit(f"the proxy closed the connection that claimed {resource} in {group}") from error
        response = parse_own_response(length + message, OWN_MAX_VERSION)
        if response.error_code != NONE:
            raise SystemExit(f"a claim in {group} was refused: {name_of(response.error_code)}")
        return response.resources[0]

    async def claim(self, group: str, resource: str, generation: int = 1) -> float:
        """Return the seconds until the claim was granted. Raise SystemExit if it was not."""
        started = time.perf_counter()
        owned = await self.ask(group, resource, generation)
        took = time.perf_counter() - started
        if owned.error_code != NONE:
            raise SystemExit(f"{resource} in {group} was not granted: {name_of(owned.error_code)}")
        return took

    async def claim_when_possible(self, group: str, resource: str, generation: int, timeout_s: float) -> float:
        """Return the time (time.monotonic) of the grant. Raise SystemExit if it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while (owned := await self.ask(group, resource, generation)).error_code != NONE:
            if owned.error_code not in NOT_YET or time.monotonic() > deadline:
                raise SystemExit(f"{resource} in {group} was not granted: {name_of(owned.error_code)}")
            await asyncio.sleep(ASK_AGAIN_S)
        return time.monotonic()

    async def close(self) -> None:
        self._writer.transport.abort()
        await asyncio.sleep(0)


async def hold(port: int, group: str, resource: str, generation: int) -> None:
    connection = await OwnConnection.connect(port)
    # A resource without an owner is granted with generation 1, whatever was asked for, and then raised.
    for asked in (1, generation):
        owned = await connection.ask(group, resource, asked)
        if owned.error_code != NONE:
            raise SystemExit(f"{resource} in {group} was not granted: {name_of(owned.error_code)}")
    sys.stdout.write(f"{owned.fence}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await connection.close()


if __name__ == "__main__":
    asyncio.run(hold(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
