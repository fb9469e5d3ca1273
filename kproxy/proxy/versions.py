"""Which APIs and versions this proxy offers, and what becomes of each.

Offered is what both the proxy and its upstream brokers serve: `offer`. Requests outside of what was offered are refused
as Kafka does, by closing the connection; only ApiVersions has an answer for that (KIP-511).

Some APIs the proxy can answer itself, given what its ownership source has (`NATIVE`); it does so where the brokers
leave it to, and offers then what it serves, whatever they do.

Features (KIP-584) are handed on as the brokers have them in common, but for transaction.version. From its level 2 on a
client leaves out AddPartitionsToTxn and says the same by the version of its other requests (KIP-890), so the level is 2
only where those versions are offered: a client that is told 2 and may not send them aborts its transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from kproxy_codec import api_keys as keys
from kproxy_codec import fetch, foreign, list_offsets, own, produce
from kproxy_codec.errors import UnsupportedVersion
from kproxy_codec.headers import RequestHeader


class Handling(Enum):
    """What the proxy does with a request."""

    PARTITIONED = "split by owner"
    LOCAL = "answered here"
    REWRITTEN = "answered by a broker; the brokers it names are replaced by the proxy"
    FORWARDED = "answered by a broker as it is"
    COORDINATED = "answered by the broker that coordinates the transactional id or group, as it is"


class Offer(NamedTuple):
    """`repeatable` says whether a request that may have been served can be sent to another broker."""

    min_version: int
    max_version: int
    handling: Handling
    repeatable: bool = True


OFFERS: Final[Mapping[int, Offer]] = {
    # From 0, although 0 to 2 are refused when sent: with a higher minimum librdkafka drops gzip and lz4.
    keys.PRODUCE: Offer(0, produce.MAX_VERSION, Handling.PARTITIONED),
    # Up to where topics have names: where their ids are not known, nobody need be told another range for reads.
    keys.FETCH: Offer(fetch.MIN_VERSION, fetch.TOPIC_IDS_FROM - 1, Handling.PARTITIONED),
    keys.LIST_OFFSETS: Offer(list_offsets.MIN_VERSION, list_offsets.MAX_VERSION, Handling.PARTITIONED),
    keys.METADATA: Offer(0, 13, Handling.REWRITTEN),
    keys.FIND_COORDINATOR: Offer(0, 6, Handling.REWRITTEN),
    keys.API_VERSIONS: Offer(0, 4, Handling.LOCAL),
    # Version 10 names topics by id alone.
    keys.OFFSET_COMMIT: Offer(2, 9, Handling.COORDINATED),
    # From version 8 on it asks about several groups, which may have several coordinators (KIP-709).
    keys.OFFSET_FETCH: Offer(1, 7, Handling.COORDINATED),
    keys.JOIN_GROUP: Offer(0, 9, Handling.COORDINATED),
    keys.HEARTBEAT: Offer(0, 4, Handling.COORDINATED),
    keys.LEAVE_GROUP: Offer(0, 5, Handling.COORDINATED),
    keys.SYNC_GROUP: Offer(0, 5, Handling.COORDINATED),
    keys.CREATE_TOPICS: Offer(2, 7, Handling.FORWARDED, repeatable=False),
    keys.DELETE_TOPICS: Offer(1, 6, Handling.FORWARDED, repeatable=False),
    # Without a transactional id any broker answers it.
    keys.INIT_PRODUCER_ID: Offer(0, 5, Handling.COORDINATED),
    # From version 4 on it is for brokers alone.
    keys.ADD_PARTITIONS_TO_TXN: Offer(0, 3, Handling.COORDINATED),
    keys.ADD_OFFSETS_TO_TXN: Offer(0, 4, Handling.COORDINATED),
    keys.END_TXN: Offer(0, 5, Handling.COORDINATED),
    keys.TXN_OFFSET_COMMIT: Offer(0, 5, Handling.COORDINATED),
    keys.DESCRIBE_CONFIGS: Offer(1, 4, Handling.FORWARDED),
    keys.CREATE_PARTITIONS: Offer(0, 3, Handling.FORWARDED, repeatable=False),
    keys.DESCRIBE_CLUSTER: Offer(0, 1, Handling.REWRITTEN),
    keys.DESCRIBE_TOPIC_PARTITIONS: Offer(0, 0, Handling.REWRITTEN),
    keys.OWN: Offer(own.OWN_MIN_VERSION, own.OWN_MAX_VERSION, Handling.LOCAL, repeatable=False),
}

Range = tuple[int, int]
Ranges = dict[int, Range]

TRANSACTION_VERSION: Final = "transaction.version"
# The versions in which a producer says that its transactions are of the second kind (KIP-890).
_SECOND_KIND: Final[Ranges] = {keys.PRODUCE: (12, 12), keys.END_TXN: (5, 5), keys.TXN_OFFSET_COMMIT: (5, 5)}
_UNKNOWN_EPOCH: Final = -1
NOT_SERVED: Final[Range] = (1, 0)
"""The range of an API that is not served: no version lies in it."""
NO_CAPS: Final[Mapping[int, int]] = MappingProxyType({})


NATIVE: Final[Mapping[int, Callable[[Ranges], bool]]] = {
    # Only where brokers give out no producer ids: theirs come with their knowing a batch again.
    keys.INIT_PRODUCER_ID: lambda common: keys.INIT_PRODUCER_ID not in common,
    # The leases say who coordinates a group, and clients are told that the proxy does. Transactions have no leases.
    keys.FIND_COORDINATOR: lambda common: keys.JOIN_GROUP in common and keys.END_TXN not in common,
    # Brokers know nothing of it.
    keys.OWN: lambda common: True,
}
"""Whether the proxy is to answer an API itself, by what is common to it and all its brokers."""


class Serves(NamedTuple):
    """What one broker says it serves: versions by API key; features by name, lowest and highest level.

    `epoch` counts the changes of the finalized features, which are the cluster's; -1 where they are not known.
    """

    ranges: Ranges
    supported: Mapping[str, Range] = MappingProxyType({})
    finalized: Mapping[str, Range] = MappingProxyType({})
    epoch: int = _UNKNOWN_EPOCH

    def without(self, api_keys: Collection[int]) -> Serves:
        """The same but for these APIs."""
        return self._replace(ranges={key: span for key, span in self.ranges.items() if key not in api_keys})


class Offered(NamedTuple):
    """What clients are told: the same as `Serves`, of the proxy with its brokers behind it.

    `native`: what of it the proxy answers itself, which brokers might have answered.
    """

    ranges: Ranges
    supported: Mapping[str, Range]
    finalized: Mapping[str, Range]
    epoch: int
    native: frozenset[int] = frozenset()


def own_ranges() -> Ranges:
    """What the proxy itself serves: lowest and highest version by API key."""
    return {key: (offer.min_version, offer.max_version) for key, offer in OFFERS.items()}


def intersect(upstreams: Iterable[Ranges], caps: Mapping[int, int] = NO_CAPS) -> Ranges:
    """What the proxy and every one of `upstreams` serve, and nothing above `caps`: highest versions by API key.

    ApiVersions is always the proxy's own, and Produce keeps its minimum of 0: the reason for that holds whatever the
    brokers say.
    """
    offered = {
        key: (lowest, min(highest, caps.get(key, highest)))
        for key, (lowest, highest) in own_ranges().items()
        if key != keys.OWN
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


def offer(brokers: Sequence[Serves], caps: Mapping[int, int] = NO_CAPS, can_answer: Collection[int] = ()) -> Offered:
    """What is offered before these brokers; `can_answer` is what of NATIVE the proxy has the means for.

    Finalized features are those of the broker that has heard of the latest change. The epoch goes up when
    transaction.version is capped: clients that have seen the higher level take a lower one only with a higher epoch.
    """
    ranges = intersect((broker.ranges for broker in brokers), caps)
    native = frozenset(key for key in can_answer if NATIVE[key](ranges))
    ranges |= {key: own_ranges()[key] for key in native}
    supported = _common_features([broker.supported for broker in brokers])
    latest = max(brokers, key=lambda broker: broker.epoch, default=Serves({}))
    finalized = dict(latest.finalized)
    highest = _highest_transaction_version(ranges)
    capped = _cap(finalized, highest)
    _cap(supported, highest)
    epoch = _UNKNOWN_EPOCH if latest.epoch < 0 else 2 * latest.epoch + capped
    return Offered(ranges, supported, finalized, epoch, native)


def _common_features(brokers: Sequence[Mapping[str, Range]]) -> dict[str, Range]:
    common = dict(brokers[0]) if brokers else {}
    for broker in brokers[1:]:
        for name, (lowest, highest) in list(common.items()):
            theirs = broker.get(name, (1, 0))
            common[name] = (max(lowest, theirs[0]), min(highest, theirs[1]))
            if common[name][0] > common[name][1]:
                del common[name]
    return common


def _highest_transaction_version(ranges: Ranges) -> int:
    if keys.END_TXN not in ranges:
        return 0
    return 2 if covers(ranges, _SECOND_KIND) else 1


def _cap(features: dict[str, Range], highest: int) -> bool:
    """Lower transaction.version to `highest`; whether it was above. Level 0 is not named."""
    level = features.get(TRANSACTION_VERSION)
    if level is None or level[1] <= highest:
        return False
    if highest == 0:
        del features[TRANSACTION_VERSION]
    else:
        features[TRANSACTION_VERSION] = (min(level[0], highest), highest)
    return True


def check_served(header: RequestHeader, ranges: Ranges) -> None:
    """Raises UnsupportedVersion for a request outside of what is served, but for ApiVersions (KIP-511).

    ForeignProtocol for one about SASL.
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


def covers(offered: Ranges, wanted: Ranges) -> bool:
    """Whether everything in `wanted` lies within `offered`."""
    for key, (lowest, highest) in wanted.items():
        theirs = offered.get(key, NOT_SERVED)
        if not theirs[0] <= lowest <= highest <= theirs[1]:
            return False
    return True
