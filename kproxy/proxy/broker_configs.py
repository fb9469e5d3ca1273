"""Answer DescribeConfigs for a virtual broker with a real broker's configuration.

A client asks for the brokers that Metadata names, by their node ids: these are ids of proxies, and a broker describes
only itself. So the request names the broker that receives it, and the answer names the virtual broker again. Values are
the real broker's own, including its id and listeners. A virtual broker always maps to the same broker, as long as that
one answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Self

from kproxy.proxy.long_answers import Portions
from kproxy_codec.configs import rename_in_answer, rename_in_request
from kproxy_codec.framing import RequestHeader, response_body_offset
from kproxy_codec.partitioned import with_length
from kproxy_codec.primitives import Buffer


class BrokerConfigs:
    """One DescribeConfigs request that names virtual brokers.

    `key` chooses the broker that is asked (kproxy.routing.rendezvous).
    """

    def __init__(
        self, portions: Portions, frame: memoryview, header: RequestHeader, virtual: Collection[bytes]
    ) -> None:
        self._portions = portions
        self._frame = frame
        self._header = header
        self._virtual = virtual
        self.key = b""
        # The replaced names by type and broker, in the order of the request.
        self._asked: dict[tuple[int, bytes], deque[bytes]] = {}

    @classmethod
    async def of(
        cls, portions: Portions, frame: memoryview, header: RequestHeader, virtual: Collection[bytes]
    ) -> Self | None:
        """Parse the request; None if it names no virtual broker. Raises CodecError."""
        found = cls(portions, frame, header, virtual)
        await found.to(b"")
        return found if found.key else None

    async def to(self, broker: bytes) -> memoryview:
        """The frame to send to the broker with this id."""
        header, self._asked = self._header, {}

        def rename(kind: int, name: bytes) -> bytes:
            is_virtual = name in self._virtual
            if is_virtual and not self.key:
                self.key = name
            sent = broker if is_virtual else name
            self._asked.setdefault((kind, sent), deque()).append(name)
            return sent

        body = self._frame[header.body_offset :]
        renamed = await self._portions.of(rename_in_request(header.api_version, body, rename), len(body))
        return memoryview(bytearray(b"".join(with_length([self._frame[4 : header.body_offset], renamed]))))

    async def take(self, answer: memoryview, frame: memoryview, header: RequestHeader) -> Buffer:
        """The body of the broker's answer, with the original names. Raises CodecError."""

        def rename(kind: int, name: bytes) -> bytes:
            names = self._asked.get((kind, name))
            return names.popleft() if names else name

        body = answer[response_body_offset(answer, header.api_key, header.api_version) :]
        return await self._portions.of(rename_in_answer(header.api_version, body, rename), len(body))
