"""Divide a request among brokers, and merge their answers into one.

The row of an API says where its parts go (`Handling` and `needs` in kproxy.proxy.apis):
- EACH_GROUP, EACH_TRANSACTION: each key to its coordinator (PART_KEY_TYPES);
- EACH_OWNER: each partition to its owner;
- NAMED_BROKER: a resource that is a broker to that broker, the others to any;
- ANY_BROKER with `replicas`: each part to any broker; parts with replicas on proxies are refused;
- ALL_BROKERS: the whole request to every known broker.

kproxy_codec.parts divides and merges messages by their schemas. A share is the parts for one receiver. If it gets no
answer, each of its parts gets an error, so no answer is silently shorter than the request; where all brokers are asked,
the answer as a whole has the error. Clients act on it as on a broker's own: after NOT_COORDINATOR and
COORDINATOR_NOT_AVAILABLE they look for the coordinator again, after NOT_LEADER_OR_FOLLOWER for the leader. Admin
clients show errors for ListGroups beside what other brokers listed, or ask again.

In requests, too, a proxy's node id means the proxy (kproxy.proxy.virtual_brokers). Its configuration is that of one of
the brokers, always the same as long as that one answers: a broker describes only itself, so the request names that
broker, and the answer the proxy. A proxy's configuration cannot be altered, and a proxy holds no replicas.

A request may have 500,000 parts. Those with the same target (a broker, a proxy, any broker, a refusal) are one share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kproxy.proxy.apis import PART_KEY_TYPES, Api, Handling, api_of
from kproxy.proxy.broker_connection import Unanswerable, Upstream
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.virtual_brokers import BROKER_TYPES, VirtualBrokers
from kproxy.routing.fleet import FIRST_NODE_ID
from kproxy.routing.split import route
from kproxy.routing.topology import NO_OWNER
from kproxy_codec import api_keys as keys
from kproxy_codec.control import Message, decode_request, decode_response, encode_request, encode_response
from kproxy_codec.coordination import error_codes
from kproxy_codec.error_codes import (
    BROKER_NOT_AVAILABLE,
    COORDINATOR_NOT_AVAILABLE,
    INVALID_REPLICA_ASSIGNMENT,
    INVALID_REQUEST,
    NOT_COORDINATOR,
    NOT_LEADER_OR_FOLLOWER,
    REQUEST_TIMED_OUT,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from kproxy_codec.errors import CodecError
from kproxy_codec.framing import RequestHeader, frame_message, response_body_offset
from kproxy_codec.parts import (
    Part,
    answered,
    changed,
    merged,
    name_of,
    numbers,
    only,
    partitions_of,
    parts_of,
    refused,
    result_of,
)
from kproxy_codec.primitives import Buffer

if TYPE_CHECKING:
    from kproxy.proxy.control_plane import ControlPlane

# Of a node id.
_MOST_DIGITS: Final = 10
# The same for all proxies, because parts that are refused alike are one share.
_A_PROXY: Final = f"an id from {FIRST_NODE_ID} up is the id of a proxy (kproxy)"
# Parts that are looked at in a turn of the event loop: about a millisecond.
_PORTION: Final = 256
# The errors for parts of which no answer comes.
_UNANSWERED: Final = {
    Handling.EACH_GROUP: NOT_COORDINATOR,
    Handling.EACH_TRANSACTION: NOT_COORDINATOR,
    Handling.EACH_OWNER: NOT_LEADER_OR_FOLLOWER,
    Handling.ALL_BROKERS: COORDINATOR_NOT_AVAILABLE,
}


class Refusal(NamedTuple):
    """The error of parts that no broker gets."""

    error_code: int
    message: str | None = None


Target: TypeAlias = "int | str | Refusal | None"
"""Where a part goes: to the broker with this id, to one in the place of the proxy with this id, or to any."""


@dataclass(eq=False)
class Distribution:
    """Divide the request in `frame`, of an API with `is_divided`."""

    _context: ProxyContext
    _virtual: VirtualBrokers
    _brokers: ControlPlane
    _frame: memoryview
    _header: RequestHeader
    _answered_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._topology = self._context.topology
        self._api: Api = api_of(self._header.api_key, self._header.api_version)
        self._at, self._to = self._api.parts

    async def answer(self) -> Buffer | None:
        """The body of the answer; None if any broker may have the request as it is. Raises CodecError."""
        header, portions = self._header, self._context.portions
        body = self._frame[header.body_offset :]
        try:
            request = await portions.apart(len(body), partial(decode_request, header.api_key, header.api_version, body))
        except CodecError:
            if self._api.handling is Handling.ANY_BROKER:
                # A broker judges it, as any that is not divided.
                return None
            raise
        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                shares = await self._divide(request)
        except TimeoutError:
            shares = {Refusal(self._unanswered): parts_of(request, self._at)}
        if not shares.keys() - {None}:
            return None
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._answer(request, *share)) for share in shares.items()]
        answers = [each.result() for each in asked]
        size = max(len(body), self._answered_bytes)
        parts = parts_of(request, self._at)
        return await portions.apart(size, lambda: encode_response(merged(answers, self._to, parts)))

    # Dividing

    async def _divide(self, request: Message) -> dict[Target, list[Part]]:
        if self._api.handling is Handling.ALL_BROKERS:
            return {broker: [] for broker in self._topology.brokers} or {Refusal(self._unanswered): []}
        parts, key_type = parts_of(request, self._at), PART_KEY_TYPES.get(self._api.handling)
        if key_type is not None:
            return await self._by_coordinator(key_type, parts)
        shares: dict[Target, list[Part]] = {}
        for number, part in enumerate(parts, 1):
            await self._rest(number)
            if self._api.handling is not Handling.EACH_OWNER:
                shares.setdefault(await self._target(part), []).append(part)
                continue
            owned: dict[Target, list[Part]] = {}
            for place, each in enumerate(partitions_of(part), 1):
                await self._rest(place)
                owned.setdefault(await self._owner(name_of(part), name_of(each)), []).append(each)
            for target, partitions in owned.items():
                shares.setdefault(target, []).append(only(part, partitions))
        return shares

    async def _by_coordinator(self, key_type: int, parts: Sequence[Part]) -> dict[Target, list[Part]]:
        shares: dict[Target, list[Part]] = {}
        for first in range(0, len(parts), _PORTION):
            some = parts[first : first + _PORTION]
            brokers = await self._brokers.coordinators(key_type, [*map(name_of, some)])
            for part in some:
                broker = brokers[name_of(part)]
                shares.setdefault(Refusal(COORDINATOR_NOT_AVAILABLE) if broker is None else broker, []).append(part)
            await self._rest(first + len(some))
        return shares

    async def _rest(self, number: int) -> None:
        """Let others have a turn of the event loop after some hundred parts, by their number."""
        if not number % _PORTION:
            await self._context.portions.next_turn()

    async def _target(self, part: Part) -> Target:
        if self._api.replicas:
            for number, broker in enumerate(numbers(part, self._api.replicas), 1):
                await self._rest(number)
                if self._virtual.is_virtual(broker):
                    return Refusal(INVALID_REPLICA_ASSIGNMENT, f"{_A_PROXY}: name brokers ({self._known}), or none")
            return None
        name = part.resource_name
        if part.resource_type not in BROKER_TYPES or not name.isdecimal() or len(name) > _MOST_DIGITS:
            return None
        if not self._virtual.is_virtual(int(name)):
            return int(name) if int(name) in self._topology.brokers else None
        if self._header.api_key == keys.DESCRIBE_CONFIGS:
            # Any broker refuses an id that no proxy has: one request may name thousands.
            return str(name) if self._virtual.is_named(int(name)) else None
        return Refusal(
            INVALID_REQUEST, f"{_A_PROXY}: configure a broker ({self._known}) at its own address, or the default of all"
        )

    @property
    def _known(self) -> str:
        """The brokers' ids, for the text of a refusal."""
        return ", ".join(map(str, sorted(self._topology.brokers)[:10]))

    async def _owner(self, topic: str, partition_index: int) -> Target:
        name = topic.encode(errors="surrogateescape")
        owner = route(self._topology, name, partition_index)
        if owner == NO_OWNER:
            await self._look_up(name, partition_index)
            owner = route(self._topology, name, partition_index)
        if owner != NO_OWNER:
            return owner
        is_unknown = self._topology.lacks(name, partition_index)
        return Refusal(UNKNOWN_TOPIC_OR_PARTITION if is_unknown else NOT_LEADER_OR_FOLLOWER)

    async def _look_up(self, topic: bytes, partition_index: int) -> None:
        revision = self._topology.owner_revision(topic, partition_index)
        await self._context.source.refresh(topic, partition_index, revision)

    # Asking

    async def _answer(self, request: Message, target: Target, parts: Sequence[Part]) -> Message:
        """The answer to these parts, or the error of each of them."""
        if isinstance(target, Refusal):
            return await self._refused(request, parts, target)
        if target is None:
            upstreams = self._brokers.in_turn()
        elif isinstance(target, str):
            upstreams = self._brokers.in_turn(target.encode())
        else:
            upstreams = self._brokers.at(target)
        asked = ""

        async def frame_for(upstream: Upstream) -> memoryview:
            nonlocal asked
            asked = str(upstream.owner)

            def build() -> memoryview:
                named = [changed(part, resource_name=asked) for part in parts] if isinstance(target, str) else parts
                return self._reframed(request, named)

            return await self._context.portions.apart(len(self._frame), build)

        async def take(frame: memoryview) -> Message:
            body = await self._body_of(frame)

            def read() -> Message:
                answer = decode_response(self._header.api_key, self._header.api_version, body)
                if isinstance(target, str):
                    for result in answer.results:
                        result.resource_name = target
                for result in getattr(answer, self._to) if self._api.of_broker else ():
                    setattr(result, self._api.of_broker, f"{asked}:{getattr(result, self._api.of_broker)}")
                return answer

            return await self._context.portions.apart(len(body), read)

        try:
            async with asyncio.timeout(self._context.limits.control_timeout_s):
                answer = await self._brokers.ask_first(upstreams, self._header, frame_for, take)
        except (TimeoutError, Unanswerable):
            answer = await self._refused(request, parts, Refusal(self._unanswered))
        with suppress(TimeoutError):
            async with asyncio.timeout(self._context.limits.control_attempt_s):
                await self._doubt(answer, target)
        return answer

    async def _body_of(self, frame: memoryview) -> memoryview:
        """The body of an answer, without leader epochs."""
        key, version = self._header.api_key, self._header.api_version
        body = frame[response_body_offset(frame, key, version) :]
        self._answered_bytes += len(body)
        if key == keys.OFFSET_FETCH:
            await self._context.portions.of(error_codes(key, version, body, without_epochs=True), len(body))
        return body

    @property
    def _unanswered(self) -> int:
        return BROKER_NOT_AVAILABLE if self._api.of_broker else _UNANSWERED.get(self._api.handling, REQUEST_TIMED_OUT)

    async def _refused(self, request: Message, parts: Sequence[Part], refusal: Refusal) -> Message:
        if not self._at:
            return refused(request, *refusal)

        def build() -> Message:
            results = [result_of(self._header.api_key, self._to, part, *refusal) for part in parts]
            return answered(request, self._to, results)

        return await self._context.portions.apart(len(self._frame), build)

    async def _doubt(self, answer: Message, target: Target) -> None:
        """Forget coordinators, and look up owners again, that the answer denies, before the client's next attempt."""
        key_type, coordinators = PART_KEY_TYPES.get(self._api.handling), self._context.coordinators
        if not isinstance(target, int) or (key_type is None and self._api.handling is not Handling.EACH_OWNER):
            return
        for number, result in enumerate(getattr(answer, self._to), 1):
            await self._rest(number)
            name = name_of(result)
            if key_type is None:
                for place, each in enumerate(partitions_of(result), 1):
                    await self._rest(place)
                    if each.error_code == NOT_LEADER_OR_FOLLOWER:
                        await self._look_up(name.encode(errors="surrogateescape"), name_of(each))
            elif result.error_code == NOT_COORDINATOR:
                coordinators.forget(key_type, name)
                coordinators.refused(key_type, name, target)

    def _reframed(self, request: Message, parts: Sequence[Part]) -> memoryview:
        """The frame of a request with these parts alone; it is as received if all brokers get it."""
        if not self._at:
            return memoryview(bytearray(self._frame))
        head = self._frame[4 : self._header.body_offset]
        body = encode_request(changed(request, **{self._at: parts}))
        return memoryview(bytearray(frame_message(head, body)))
