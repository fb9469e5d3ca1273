"""Work out which API versions to offer to clients.

An API is offered in the versions that the proxy (kproxy.proxy.apis) and all upstream brokers serve: `offer`. Brokers
are asked with ApiVersions (KIP-35): `BrokerVersions`. A request outside of the offered versions closes the connection,
as in Kafka; only ApiVersions has an error for that (KIP-511).

The proxy answers some APIs itself where brokers leave them to it (`Api.ends_here`). It then offers its own versions,
whatever brokers serve.

Features (KIP-584) are the brokers' common ones, except for transaction.version. From its level 2 on a client leaves out
AddPartitionsToTxn and uses newer versions of its other requests instead (KIP-890). So level 2 is offered only with
those versions: a client that is offered level 2 and may not send them aborts its transactions.

States of a broker of the topology
  unknown    it has never reported what it serves
  known      it has reported it at its present address, and the connection of that report is open
  outdated   its last answer still counts, but the broker may be another version by now: it has left and come back,
             changed its address, or closed that connection (as a broker does that is restarted)

Transitions
  unknown, outdated -> known      it answers; asked by `current`, and by `look` at once and then with a pause
  known -> outdated               its connection ends, or its address changes
  any -> any                      a broker that leaves keeps its last answer, in case it comes back

Invariants
1. `offered` is `offer` of the last answers of the brokers in the topology, as of the latest answer, `look` or
   `current`. `on_change` is called once for each change of its ranges, after the change. Changes are logged once all
   brokers known at first have been asked, and from then on as they happen.
2. An unknown broker does not count. It cannot be told from one that serves everything, and a broker that never starts
   must not stop the others. Once it answers, APIs that it does not serve are withdrawn, as when a broker joins.
3. One task at a time asks a broker, whoever waits for the answer; `close` ends all tasks. A broker that hangs is not
   asked.
4. A broker that could not be asked is doubted (kproxy.routing.topology) until it answers.
5. At most MAX_REMEMBERED brokers that are not in the topology are remembered.
6. Nothing relies on the fences (the Own API's) of an unknown broker: it may have none. Nor on its producer state: a
   batch that it may have appended is not sent to it a second time.
7. `on_lost` is called for each broker of the topology that becomes outdated, and for each failed attempt to reach one:
   no other open connection may notice that it is gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import structlog

from kproxy.config import Limits
from kproxy.plain import ReceiveArena
from kproxy.proxy.apis import APIS, NO_RANGES, NOT_SERVED, Range, Ranges, proxy_ranges
from kproxy.proxy.broker_connection import Lost, Upstream, ask
from kproxy.proxy.broker_health import BrokerHealth
from kproxy.proxy.dialling import Turn
from kproxy.routing.topology import Address, Topology
from kproxy_codec import api_keys as keys
from kproxy_codec import foreign
from kproxy_codec.api_keys import is_flexible
from kproxy_codec.control import Message, build_request, build_response, decode_response, encode_request
from kproxy_codec.error_codes import INVALID_REQUEST, NONE, UNSUPPORTED_VERSION
from kproxy_codec.errors import CodecError, InvalidField, UnsupportedVersion
from kproxy_codec.framing import RequestHeader, request_header, response_body_offset
from kproxy_codec.own import BIND_FENCES_VERSION
from kproxy_codec.partitioned import with_length
from kproxy_codec.walk import Walk

log = structlog.get_logger(__name__)

ASK_TIMEOUT_S = 2.0
# The pause after a broker did not answer: one that hangs must not hold up every new client.
SILENT_FOR_S = 10.0
UNREACHABLE_FOR_S = 2.0
MAX_REMEMBERED: Final = 1000
# Version 4 names all features. Older brokers answer it in version 0 with an error (KIP-511), or close the connection.
_ASKED_VERSIONS: Final = (4, 0)
_CLIENT_ID: Final = b"kproxy-versions"
_SOFTWARE_PATTERN: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE: Final = {"client_software_name": "kproxy", "client_software_version": "1"}
_PRODUCER_IDS: Final[Ranges] = {keys.INIT_PRODUCER_ID: (0, 0)}
_FENCES: Final[Ranges] = {keys.BIND_FENCES: (BIND_FENCES_VERSION, BIND_FENCES_VERSION)}

# Offered where the proxy has the means for them, whatever brokers serve.
_ONLY_OURS: Final = frozenset({keys.OWN, keys.SASL_HANDSHAKE, keys.SASL_AUTHENTICATE})

TRANSACTION_VERSION: Final = "transaction.version"
# With these versions a producer uses transactions of level 2 (KIP-890).
_LEVEL_2: Final[Ranges] = {keys.PRODUCE: (12, 12), keys.END_TXN: (5, 5), keys.TXN_OFFSET_COMMIT: (5, 5)}
_UNKNOWN_EPOCH: Final = -1
NO_CAPS: Final[Mapping[int, int]] = MappingProxyType({})

# Versions of ApiVersions: the client's software in requests; features in answers.
_SOFTWARE_FROM: Final = 3
_FEATURES_FROM: Final = 3
# Up to this version an answer cannot name a feature that is supported from level 0 (KIP-1022).
_NO_LEVEL_0_TO: Final = 3


class BrokerApis(NamedTuple):
    """The APIs that one broker says it serves.

    `ranges` are versions by API key; features are lowest and highest levels by name. `epoch` counts the changes of the
    finalized features, which are the cluster's; -1 where they are not known.
    """

    ranges: Ranges
    supported: Mapping[str, Range] = MappingProxyType({})
    finalized: Mapping[str, Range] = MappingProxyType({})
    epoch: int = _UNKNOWN_EPOCH

    def without(self, api_keys: Collection[int]) -> BrokerApis:
        """Return a copy that lacks these APIs."""
        return self._replace(ranges={key: span for key, span in self.ranges.items() if key not in api_keys})


class OfferedApis(NamedTuple):
    """The APIs that clients are offered, with fields as in `BrokerApis`.

    `native` are APIs that the proxy answers itself, and that brokers might have answered.
    """

    ranges: Ranges
    supported: Mapping[str, Range]
    finalized: Mapping[str, Range]
    epoch: int
    native: frozenset[int] = frozenset()


def intersect(upstreams: Iterable[Ranges], caps: Mapping[int, int] = NO_CAPS) -> Ranges:
    """Return the versions that the proxy and all `upstreams` serve.

    `caps` are highest versions by API key. The range of ApiVersions is the proxy's. Produce keeps its minimum of 0,
    whatever brokers serve (see the table).
    """
    offered = {
        key: (lowest, min(highest, caps.get(key, highest)))
        for key, (lowest, highest) in proxy_ranges().items()
        if key not in _ONLY_OURS
    }
    for upstream in upstreams:
        for key, (lowest, highest) in list(offered.items()):
            if key == keys.API_VERSIONS:
                continue
            theirs = upstream.get(key)
            common = None if theirs is None else (max(lowest, theirs[0]), min(highest, theirs[1]))
            if common is None or common[0] > common[1]:
                del offered[key]
            else:
                offered[key] = (0 if key == keys.PRODUCE else common[0], common[1])
    return offered


def offer(
    brokers: Sequence[BrokerApis], caps: Mapping[int, int] = NO_CAPS, can_answer: Mapping[int, Range] = NO_RANGES
) -> OfferedApis:
    """Work out what to offer before these brokers.

    `can_answer` are the APIs, and their versions, that the proxy has the means to answer itself.

    Finalized features are those of the broker with the highest epoch. The epoch rises when transaction.version is
    capped: clients that have seen the higher level accept a lower one only with a higher epoch.
    """
    ranges = intersect((broker.ranges for broker in brokers), caps)
    native = frozenset(key for key in can_answer if _ends_here(key, ranges))
    ranges |= {key: can_answer[key] for key in native}
    supported = _common_features([broker.supported for broker in brokers])
    latest = max(brokers, key=lambda broker: broker.epoch, default=BrokerApis({}))
    finalized = dict(latest.finalized)
    highest = _highest_transaction_version(ranges)
    capped = _cap(finalized, highest)
    _cap(supported, highest)
    epoch = _UNKNOWN_EPOCH if latest.epoch < 0 else 2 * latest.epoch + capped
    return OfferedApis(ranges, supported, finalized, epoch, native)


def _ends_here(api_key: int, common: Ranges) -> bool:
    ends_here = APIS[api_key].ends_here
    return ends_here is not None and ends_here(common)


def _common_features(brokers: Sequence[Mapping[str, Range]]) -> dict[str, Range]:
    common = dict(brokers[0]) if brokers else {}
    for broker in brokers[1:]:
        for name, (lowest, highest) in list(common.items()):
            theirs = broker.get(name, NOT_SERVED)
            common[name] = (max(lowest, theirs[0]), min(highest, theirs[1]))
            if common[name][0] > common[name][1]:
                del common[name]
    return common


def _highest_transaction_version(ranges: Ranges) -> int:
    if keys.END_TXN not in ranges:
        return 0
    return 2 if covers(ranges, _LEVEL_2) else 1


def _cap(features: dict[str, Range], highest: int) -> bool:
    """Lower transaction.version to `highest`, and return whether it was above.

    Level 0 is left out.
    """
    level = features.get(TRANSACTION_VERSION)
    if level is None or level[1] <= highest:
        return False
    if highest == 0:
        del features[TRANSACTION_VERSION]
    else:
        features[TRANSACTION_VERSION] = (min(level[0], highest), highest)
    return True


def covers(offered: Ranges, wanted: Ranges) -> bool:
    """Return whether all of `wanted` lies within `offered`."""
    for key, (lowest, highest) in wanted.items():
        theirs = offered.get(key, NOT_SERVED)
        if not theirs[0] <= lowest <= highest <= theirs[1]:
            return False
    return True


def check_served(header: RequestHeader, ranges: Ranges) -> None:
    """Raise UnsupportedVersion for a request outside of `ranges`.

    ApiVersions is allowed in any version (KIP-511). Raises ForeignProtocol for SASL.
    """
    lowest, highest = ranges.get(header.api_key, NOT_SERVED)
    if lowest <= header.api_version <= highest or header.api_key == keys.API_VERSIONS:
        return
    name = keys.name_of(header.api_key)
    if header.api_key in (keys.SASL_HANDSHAKE, keys.SASL_AUTHENTICATE):
        raise foreign.sasl(header)
    if header.api_key not in ranges:
        raise UnsupportedVersion(f"{name} is not offered")
    raise UnsupportedVersion(f"{name} v{header.api_version}: versions {lowest} to {highest} are offered")


# Answers to clients


def unsupported_version_response() -> Message:
    """Answer ApiVersions of a version that is not served.

    The answer is of version 0, and names the versions that are served (KIP-511).
    """
    lowest, highest = APIS[keys.API_VERSIONS].versions
    mine = {"api_key": keys.API_VERSIONS, "min_version": lowest, "max_version": highest}
    return build_response(keys.API_VERSIONS, 0, error_code=UNSUPPORTED_VERSION, api_keys=[mine])


def check_api_versions_request(header: RequestHeader, body: memoryview) -> int:
    """Return the error code of a request: the name and version of the client's software must match Kafka's pattern.

    Raises CodecError for a malformed request.
    """
    walk = Walk(body, compact=is_flexible(keys.API_VERSIONS, header.api_version))
    software = [walk.text() or "", walk.text() or ""] if walk.compact else []
    walk.end()
    return NONE if all(map(_SOFTWARE_PATTERN.fullmatch, software)) else INVALID_REQUEST


def offered_response(api_version: int, offered: OfferedApis) -> Message:
    """Build the answer to ApiVersions, of a version that is served."""
    fields: dict[str, Any] = {
        "api_keys": [
            {"api_key": key, "min_version": lowest, "max_version": highest}
            for key, (lowest, highest) in sorted(offered.ranges.items())
        ]
    }
    if api_version >= _FEATURES_FROM:
        fields["supported_features"] = [
            {"name": name, "min_version": lowest, "max_version": highest}
            for name, (lowest, highest) in sorted(offered.supported.items())
            if lowest > 0 or api_version > _NO_LEVEL_0_TO
        ]
        fields["finalized_features_epoch"] = offered.epoch
        fields["finalized_features"] = [
            {"name": name, "min_version_level": lowest, "max_version_level": highest}
            for name, (lowest, highest) in sorted(offered.finalized.items())
        ]
    return build_response(keys.API_VERSIONS, api_version, **fields)


# Answers of brokers


class BrokerVersions:
    """Ask the brokers of `topology` what they serve, and follow changes.

    `caps` and `can_answer` are those of `offer`; `clock` is in seconds.
    """

    def __init__(
        self,
        topology: Topology,
        limits: Limits,
        clock: Callable[[], float],
        arena: ReceiveArena,
        health: BrokerHealth,
        caps: Mapping[int, int] = NO_CAPS,
        can_answer: Mapping[int, Range] = NO_RANGES,
    ) -> None:
        self._topology = topology
        self._limits = limits
        self._clock = clock
        self._arena = arena
        self._health = health
        self._caps = caps
        self._can_answer = can_answer
        # APIs that brokers say they serve and do not.
        self._disproved: set[int] = set()
        self._said: dict[int, BrokerApis] = {}
        self._connections: dict[int, Upstream] = {}
        # The address at which each known broker was asked.
        self._known: dict[int, Address] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._not_before: dict[tuple[int, Address], float] = {}
        self._seen_version = -1
        # The topology's version, and `know_batches_again` for it.
        self._know_again: tuple[int, bool] | None = None
        self._closed = False
        self.offered = offer([], caps, can_answer)
        # As logged last; nothing is logged before the first round of asking is over.
        self._logged = self.offered
        self._asked_once = False
        self.on_change: Callable[[Ranges], None] = lambda ranges: None
        self.on_lost: Callable[[], None] = lambda: None

    async def current(self) -> OfferedApis:
        """Ask every broker that is due, and return what is offered then.

        This takes ASK_TIMEOUT_S at most.
        """
        asking = self._ask_where_due()
        if asking:
            await asyncio.wait(asking)
        self._update()
        return self.offered

    def has_fences(self, broker: int) -> bool | None:
        """Return whether a broker keeps fences (serves BindFences).

        None for an unknown broker, and for one that is not in the topology.
        """
        serves = self._said.get(broker) if broker in self._topology.brokers else None
        return None if serves is None else covers(serves.ranges, _FENCES)

    @property
    def know_batches_again(self) -> bool:
        """Whether all brokers that answer keep producer state.

        Brokers that assign producer ids keep it.
        """
        version = self._topology.version
        if self._know_again is None or self._know_again[0] != version:
            said = [self._said.get(broker) for broker in self._topology.takers]
            knows = bool(said) and all(serves is not None and covers(serves.ranges, _PRODUCER_IDS) for serves in said)
            self._know_again = (version, knows and keys.INIT_PRODUCER_ID not in self._disproved)
        return self._know_again[1]

    @property
    def fenced(self) -> bool:
        """Whether all known brokers keep fences, and there are any.

        Call `current` first: this property asks no broker. An unknown broker does not count: it is asked when it is to
        keep a fence for a partition that it leads.
        """
        said = [known for broker in self._topology.brokers if (known := self.has_fences(broker)) is not None]
        return bool(said) and all(said)

    def may_have_fences(self, broker: int) -> bool:
        """Return whether to send fences to a broker.

        An unknown broker is taken to keep fences where any other does.
        """
        known = self.has_fences(broker)
        return any(map(self.has_fences, self._topology.brokers)) if known is None else known

    def look(self) -> None:
        """Follow the topology, and ask brokers that are due; call it regularly."""
        if self._topology.version != self._seen_version:
            self._seen_version = self._topology.version
            self._update()
        self._ask_where_due()

    def _ask_where_due(self) -> list[asyncio.Task[None]]:
        """Ask brokers that are unknown or outdated; return the tasks."""
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
                self._forget_departed()
                self._update()
        except Exception:  # the boundary: a failure with one broker must not reach those who wait for all
            log.exception("broker API versions not read", broker=broker)
            self._pause(broker, address, SILENT_FOR_S)
        finally:
            del self._asking[broker]
            if not self._asked_once and not self._asking and not self._closed:
                self._asked_once = True
                self._log_changes()

    async def _ask_each_version(self, broker: int, address: Address) -> BrokerApis | None:
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
        """Return an open connection to a broker at this address."""
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
            clock=self._clock,
            max_answer_bytes=self._limits.max_control_request_bytes,
            connect_timeout_s=self._limits.connect_timeout_s,
        )
        return connection

    def _pause(self, broker: int, address: Address, seconds: float) -> None:
        self._not_before[broker, address] = self._clock() + seconds

    def _forget_departed(self) -> None:
        here = self._topology.brokers
        departed = [broker for broker in self._said if broker not in here]
        for broker in departed[: max(0, len(departed) - MAX_REMEMBERED)]:
            del self._said[broker]
            self._known.pop(broker, None)
        for place in [place for place in self._not_before if here.get(place[0]) != place[1]]:
            del self._not_before[place]

    def _update(self) -> None:
        """Work out what is offered, and report a change."""
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
        self._log_changes()

    def _log_changes(self) -> None:
        """Log changes, once all brokers have been asked for the first time."""
        if not self._asked_once:
            return
        before, self._logged = self._logged, self.offered
        if self._logged.native != before.native:
            log.info("APIs of the proxy changed", apis=sorted(map(keys.name_of, self._logged.native)))
        if self._logged.ranges != before.ranges:
            brokers = sum(broker in self._said for broker in self._topology.brokers)
            log.info("APIs offered to clients changed", brokers=brokers, **_changes(before.ranges, self._logged.ranges))

    def disprove(self, api_key: int) -> None:
        """Count an API as not served by brokers, whatever they say."""
        self._disproved.add(api_key)
        self._update()

    async def close(self) -> None:
        """Stop asking, and close the connections."""
        self._closed = True
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))


async def _ask_versions(connection: Upstream, version: int) -> BrokerApis:
    """Ask a broker in one version of ApiVersions.

    Raises Lost, and CodecError for a malformed answer or an error code.
    """
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
    return _broker_apis(message, version)


def _broker_apis(message: Message, version: int) -> BrokerApis:
    ranges = {api.api_key: (api.min_version, api.max_version) for api in message.api_keys}
    if version < _SOFTWARE_FROM:
        return BrokerApis(ranges)
    return BrokerApis(
        ranges,
        {each.name: (each.min_version, each.max_version) for each in message.supported_features},
        {each.name: (each.min_version_level, each.max_version_level) for each in message.finalized_features},
        message.finalized_features_epoch,
    )


def _changes(before: Ranges, after: Ranges) -> dict[str, str]:
    """Describe a change for the log.

    `withdrawn` are APIs by name, `versions` the ranges of those that are new or changed.
    """
    withdrawn = ", ".join(keys.name_of(key) for key in sorted(before) if key not in after)
    changed = [key for key in sorted(after) if before.get(key) != after[key]]
    versions = ", ".join("{} {}-{}".format(keys.name_of(key), *after[key]) for key in changed)
    return {what: words for what, words in (("withdrawn", withdrawn), ("versions", versions)) if words}
