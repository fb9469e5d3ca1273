"""Which APIs and versions this proxy offers, and what becomes of each.

Offered is what both the proxy and its upstream brokers serve: `intersect`. Requests outside of what was offered are
refused as Kafka does, by closing the connection; only ApiVersions has an answer for that (KIP-511).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, NamedTuple

from codec import api_keys as keys
from codec import fetch, list_offsets, produce


class Handling(Enum):
    """What the proxy does with a request."""

    PARTITIONED = "split by owner"
    LOCAL = "answered here"
    REWRITTEN = "answered by a broker; the brokers it names are replaced by the proxy"
    FORWARDED = "answered by a broker as it is"


class Offer(NamedTuple):
    """`repeatable` says whether a request that may have been served can be sent to another broker."""

    min_version: int
    max_version: int
    handling: Handling
    repeatable: bool = True


OFFERS: Final[Mapping[int, Offer]] = {
    # From 0, although 0 to 2 are refused when sent: with a higher minimum librdkafka drops gzip and lz4.
    keys.PRODUCE: Offer(0, produce.MAX_VERSION, Handling.PARTITIONED),
    keys.FETCH: Offer(fetch.MIN_VERSION, fetch.MAX_VERSION, Handling.PARTITIONED),
    keys.LIST_OFFSETS: Offer(list_offsets.MIN_VERSION, list_offsets.MAX_VERSION, Handling.PARTITIONED),
    keys.METADATA: Offer(0, 13, Handling.REWRITTEN),
    keys.FIND_COORDINATOR: Offer(0, 6, Handling.REWRITTEN),
    keys.API_VERSIONS: Offer(0, 4, Handling.LOCAL),
    keys.CREATE_TOPICS: Offer(2, 7, Handling.FORWARDED, repeatable=False),
    keys.DELETE_TOPICS: Offer(1, 6, Handling.FORWARDED, repeatable=False),
    keys.INIT_PRODUCER_ID: Offer(0, 5, Handling.FORWARDED),
    keys.DESCRIBE_CONFIGS: Offer(1, 4, Handling.FORWARDED),
    keys.CREATE_PARTITIONS: Offer(0, 3, Handling.FORWARDED, repeatable=False),
    keys.DESCRIBE_CLUSTER: Offer(0, 1, Handling.REWRITTEN),
    keys.DESCRIBE_TOPIC_PARTITIONS: Offer(0, 0, Handling.REWRITTEN),
}

Range = tuple[int, int]
Ranges = dict[int, Range]


def own_ranges() -> Ranges:
    """What the proxy itself serves: lowest and highest version by API key."""
    return {key: (offer.min_version, offer.max_version) for key, offer in OFFERS.items()}


def intersect(upstreams: Iterable[Ranges]) -> Ranges:
    """What the proxy and every one of `upstreams` serve.

    ApiVersions is always the proxy's own, and Produce keeps its minimum of 0: the reason for that holds whatever the
    brokers say.
    """
    offered = own_ranges()
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
