"""What each broker serves, asked of the brokers themselves (ApiVersions, KIP-35), and what is offered because of it.

States of a broker of the topology
  unknown    it has never said what it serves
  known      it has said so at the address it has now, and the connection it said it on is open
  outdated   what it said last still counts, but it may be another version by now: it has left and come back, changed
             its address or closed that connection (as a broker does that is restarted)

Transitions
  unknown, outdated -> known      it answers; asked by `current`, and by `look` at once and then with a pause
  known -> outdated               its connection ends, its address changes
  any -> any                      a broker that leaves keeps its last word for the case that it comes back

Invariants
1. `offered` is what `versions.offer` makes of the last words of the brokers in the topology, as of the latest answer,
   `look` or `current`. Each change of its ranges is told to `on_change` once, after it stands; it is logged when all
   brokers known at first have been asked once, and from then on as it happens.
2. An unknown broker does not count. It cannot be told from one that serves everything, and a broker that never comes up
   must not stop the others; once it answers, what it does not serve is withdrawn as when a broker joins.
3. Each broker is asked once at a time, by one task, whoever wants to know; `close` ends them all. One that hangs is not
   asked.
4. A broker that could not be asked is doubted (kproxy.routing.topology) until it answers.
5. At most MAX_REMEMBERED brokers that are not in the topology are remembered.
6. No word is taken for fences (the Own API's): a broker that has not spoken yet may well have none. Neither is it for
   knowing a batch again: what such a broker may have appended is not sent to it a second time.
7. `on_lost` is told of each broker of the topology that was known and is outdated, and of each vain attempt at one: no
   other connection may be open to notice that it has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from math import inf
from typing import Final

import structlog

from kproxy.config import Limits
from kproxy.proxy.broker_connection import Lost, Upstream, ask
from kproxy.proxy.broker_health import BrokerHealth
from kproxy.proxy.dialling import Turn
from kproxy.proxy.versions import NO_CAPS, Offered, Ranges, Serves, covers, offer
from kproxy.routing.topology import Address, Topology
from kproxy_codec import api_keys as keys
from kproxy_codec.control import Message, build_request, decode_response, encode_request
from kproxy_codec.error_codes import NONE
from kproxy_codec.errors import CodecError, InvalidField
from kproxy_codec.framing import ReceiveArena
from kproxy_codec.headers import request_header, response_body_offset
from kproxy_codec.own import BIND_FENCES_VERSION
from kproxy_codec.partitioned import with_length

log = structlog.get_logger(__name__)

ASK_TIMEOUT_S = 2.0
# A broker that did not say is not asked again for so long: one that hangs must not hold up every new client.
SILENT_FOR_S = 10.0
UNREACHABLE_FOR_S = 2.0
MAX_REMEMBERED: Final = 1000
# Version 4 tells of all features; older brokers answer it in version 0 with an error (KIP-511), or close.
_ASKED_VERSIONS: Final = (4, 0)
_CLIENT_ID: Final = b"kproxy-versions"
_PRODUCER_IDS: Final[Ranges] = {keys.INIT_PRODUCER_ID: (0, 0)}
_FENCES: Final[Ranges] = {keys.BIND_FENCES: (BIND_FENCES_VERSION, BIND_FENCES_VERSION)}
_SOFTWARE: Final = {"client_software_name": "kproxy", "client_software_version": "1"}


class BrokerVersions:
    """What the brokers of `topology` serve, and with `can_answer` (as in `versions.offer`) what is offered.

    `clock` is in seconds; `caps` are highest versions by API key.
    """

    def __init__(
        self,
        topology: Topology,
        limits: Limits,
        clock: Callable[[], float],
        arena: ReceiveArena,
        health: BrokerHealth,
        caps: Mapping[int, int] = NO_CAPS,
        can_answer: Collection[int] = (),
    ) -> None:
        self._topology = topology
        self._limits = limits
        self._clock = clock
        self._arena = arena
        self._health = health
        self._caps = caps
        self._can_answer = can_answer
        # What brokers were found not to serve although they say so.
        self._disproved: set[int] = set()
        self._said: dict[int, Serves] = {}
        self._connections: dict[int, Upstream] = {}
        # Brokers that are known, by the address they were asked at.
        self._known: dict[int, Address] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._not_before: dict[tuple[int, Address], float] = {}
        self._seen_version = -1
        # The topology's version, and whether its brokers know batches again.
        self._know_again: tuple[int, bool] | None = None
        self._closed = False
        self.offered = offer([], caps, can_answer)
        # As it was logged last; not before the first round of asking is over.
        self._told = self.offered
        self._asked_once = False
        self.on_change: Callable[[Ranges], None] = lambda ranges: None
        self.on_lost: Callable[[], None] = lambda: None

    async def current(self) -> Offered:
        """What is offered, after every broker that can be asked has been; takes ASK_TIMEOUT_S at most."""
        asking = self._ask_where_due()
        if asking:
            await asyncio.wait(asking)
        self._conclude()
        return self.offered

    def has_fences(self, broker: int) -> bool | None:
        """Whether a broker of the topology keeps fences (BindFences), by its last word; None where it has said none."""
        serves = self._said.get(broker) if broker in self._topology.brokers else None
        return None if serves is None else covers(serves.ranges, _FENCES)

    @property
    def know_batches_again(self) -> bool:
        """Whether the brokers give out producer ids, and so keep producer state: all that answer have said so."""
        version = self._topology.version
        if self._know_again is None or self._know_again[0] != version:
            said = [self._said.get(broker) for broker in self._topology.takers]
            knows = bool(said) and all(serves is not None and covers(serves.ranges, _PRODUCER_IDS) for serves in said)
            self._know_again = (version, knows and keys.INIT_PRODUCER_ID not in self._disproved)
        return self._know_again[1]

    @property
    def fenced(self) -> bool:
        """Whether the brokers keep fences, all that have said what they serve. Ask after `current`: this asks nobody.

        One that has never said anything does not count: where it leads, it is asked to keep a fence, and says then.
        """
        said = [known for broker in self._topology.brokers if (known := self.has_fences(broker)) is not None]
        return bool(said) and all(said)

    def may_have_fences(self, broker: int) -> bool:
        """Whether to tell a broker of fences: one that has not said what it serves is taken for one like the others."""
        known = self.has_fences(broker)
        return any(map(self.has_fences, self._topology.brokers)) if known is None else known

    def look(self) -> None:
        """Follow the topology and ask whom there is to ask; to be called now and then."""
        if self._topology.version != self._seen_version:
            self._seen_version = self._topology.version
            self._conclude()
        self._ask_where_due()

    def _ask_where_due(self) -> list[asyncio.Task[None]]:
        """The tasks under way that ask brokers whose word is missing or outdated."""
        if self._closed:
            return []
        now = self._clock()
        for broker, address in self._topology.brokers.items():
            if self._is_known(broker, address) or broker in self._asking or self._health.is_open(address):
                continue
            if now >= self._not_before.get((broker, address), -inf):
                if broker in self._known or (broker, address) in self._not_before:
                    self.on_lost()
                self._asking[broker] = asyncio.get_running_loop().create_task(self._learn(broker, address))
        return [task for broker, task in self._asking.items() if broker in self._topology.brokers]

    def _is_known(self, broker: int, address: Address) -> bool:
        connection = self._connections.get(broker)
        return self._known.get(broker) == address and connection is not None and not connection.closed

    async def _learn(self, broker: int, address: Address) -> None:
        try:
            serves = await self._ask_each_version(broker, address)
            if self._topology.address(broker) == address:
                self._topology.doubt(broker, doubted=serves is None)
            if serves is not None:
                self._said.pop(broker, None)
                self._said[broker] = serves
                self._known[broker] = address
                self._not_before.pop((broker, address), None)
                self._forget_the_departed()
                self._conclude()
        except Exception:  # the boundary: one broker's trouble must not end the others' task
            log.exception("a broker could not be asked what it serves", broker=broker)
            self._pause(broker, address, SILENT_FOR_S)
        finally:
            del self._asking[broker]
            if not self._asked_once and not self._asking and not self._closed:
                self._asked_once = True
                self._tell()

    async def _ask_each_version(self, broker: int, address: Address) -> Serves | None:
        for version in _ASKED_VERSIONS:
            connection = await self._connection(broker, address)
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    with self._health.wondering(broker, address):
                        return await _ask_versions(connection, version)
            except TimeoutError:
                connection.give_up("it does not say what it serves")
                self._pause(broker, address, SILENT_FOR_S)
                return None
            except Lost as lost:
                if not lost.written:
                    break
            except CodecError as error:
                if version == _ASKED_VERSIONS[-1]:
                    connection.distrust(str(error))
        self._pause(broker, address, UNREACHABLE_FOR_S)
        return None

    async def _connection(self, broker: int, address: Address) -> Upstream:
        """The open connection to a broker; a new one where the last has ended or leads elsewhere."""
        connection = self._connections.get(broker)
        if connection is not None and not connection.closed and connection.address == address:
            return connection
        if connection is not None:
            await connection.close()
        connection = self._connections[broker] = Upstream(
            broker,
            address,
            dialler=self._health.dialler,
            turn=Turn.NEXT,
            arena=self._arena,
            max_answer_bytes=self._limits.max_control_request_bytes,
            connect_timeout_s=self._limits.connect_timeout_s,
            on_pressure=lambda slow: None,
        )
        return connection

    def _pause(self, broker: int, address: Address, seconds: float) -> None:
        self._not_before[broker, address] = self._clock() + seconds

    def _forget_the_departed(self) -> None:
        here = self._topology.brokers
        departed = [broker for broker in self._said if broker not in here]
        for broker in departed[: max(0, len(departed) - MAX_REMEMBERED)]:
            del self._said[broker]
            self._known.pop(broker, None)
        for place in [place for place in self._not_before if here.get(place[0]) != place[1]]:
            del self._not_before[place]

    def _conclude(self) -> None:
        """Work out what is offered; what was offered before stays where nothing has changed."""
        for broker in [each for each in self._connections if each not in self._topology.brokers]:
            if not self._connections[broker].closed:
                self._connections[broker].give_up("its broker has left")
            self._known.pop(broker, None)
        self._know_again = None
        said = [self._said[broker] for broker in self._topology.brokers if broker in self._said]
        if self._disproved:
            said = [serves.without(self._disproved) for serves in said]
        offered = offer(said, self._caps, self._can_answer)
        before, self.offered = self.offered, offered
        if offered.ranges != before.ranges:
            self.on_change(offered.ranges)
        self._tell()

    def _tell(self) -> None:
        """Log what has changed since the last time; nothing before all brokers have been asked once."""
        if not self._asked_once:
            return
        before, self._told = self._told, self.offered
        if self._told.native != before.native:
            log.info("APIs answered by the proxy itself changed", apis=sorted(map(keys.name_of, self._told.native)))
        if self._told.ranges != before.ranges:
            brokers = sum(broker in self._said for broker in self._topology.brokers)
            log.info("APIs offered to clients changed", brokers=brokers, **_changes(before.ranges, self._told.ranges))

    def disprove(self, api_key: int) -> None:
        """A broker that says it serves an API does not; nothing it says of it is believed any more."""
        self._disproved.add(api_key)
        self._conclude()

    async def close(self) -> None:
        """Ask no more."""
        self._closed = True
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))


async def _ask_versions(connection: Upstream, version: int) -> Serves:
    """Raises Lost, and CodecError for an answer that is none."""
    correlation_id = connection.next_correlation_id()
    head = request_header(keys.API_VERSIONS, version, correlation_id, _CLIENT_ID)
    fields = _SOFTWARE if version >= _SOFTWARE_FROM else {}
    body = encode_request(build_request(keys.API_VERSIONS, version, **fields))
    answer = await ask(connection, correlation_id, with_length([head, body]))
    message = decode_response(
        keys.API_VERSIONS, version, answer[response_body_offset(answer, keys.API_VERSIONS, version) :]
    )
    if message.error_code != NONE:
        raise InvalidField(f"ApiVersions v{version} is answered with error {message.error_code}")
    return _serves(message, version)


_SOFTWARE_FROM: Final = 3


def _serves(message: Message, version: int) -> Serves:
    ranges = {api.api_key: (api.min_version, api.max_version) for api in message.api_keys}
    if version < _SOFTWARE_FROM:
        return Serves(ranges)
    return Serves(
        ranges,
        {each.name: (each.min_version, each.max_version) for each in message.supported_features},
        {each.name: (each.min_version_level, each.max_version_level) for each in message.finalized_features},
        message.finalized_features_epoch,
    )


def _changes(before: Ranges, after: Ranges) -> dict[str, str]:
    """In words: the APIs that are `withdrawn`, and the `versions` of those that are offered otherwise than before."""
    withdrawn = ", ".join(keys.name_of(key) for key in sorted(before) if key not in after)
    changed = [key for key in sorted(after) if before.get(key) != after[key]]
    versions = ", ".join("{} {}-{}".format(keys.name_of(key), *after[key]) for key in changed)
    return {what: words for what, words in (("withdrawn", withdrawn), ("versions", versions)) if words}
