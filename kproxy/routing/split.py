"""Split a request into one piece for each partition owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import NO_OWNER, Topology
from kproxy_codec.partitioned import PartitionedRequest, TopicSpan

Selection = list[tuple[int, list[int]]]
"""A part of a request, by topic (its position in the request): the ordinals of the selected partitions, ascending."""
Entry = tuple[int, int]
"""One partition of a request: the topic's position and the partition's ordinal within it."""
NOTHING_REFUSED: Final[Mapping[Entry, int]] = MappingProxyType({})
"""No refused entries. Such a mapping has an error code for each entry that is not sent."""


def route(
    topology: Topology,
    topic: bytes,
    partition_index: int,
    *,
    is_nameless: bool = False,
    taken_by: int = NO_OWNER,
    refused_by: Collection[int] = (),
) -> int:
    """The broker to send this partition to, or NO_OWNER.

    An owned partition goes only to its owner, even if the owner's address is unknown (then NO_OWNER). One without an
    owner goes nowhere if the topology's brokers accept no partitions, or if `topic` is an unknown topic id, which may
    be that of a deleted topic. Else it goes to `taken_by`, if known, or to the broker that rendezvous hashing prefers
    among `takers`. Those in `refused_by`, which may be stopping, are left out unless no other taker remains.
    """
    owner = topology.owner(topic, partition_index)
    if owner != NO_OWNER:
        return owner if topology.address(owner) is not None else NO_OWNER
    if is_nameless or not topology.offers_unowned:
        return NO_OWNER
    if topology.address(taken_by) is not None:
        return taken_by
    takers = topology.takers
    if refused_by:
        takers = [broker_id for broker_id in takers if broker_id not in refused_by] or takers
    candidate = preferred(topic + b"/" + str(partition_index).encode(), takers)
    return NO_OWNER if candidate is None else candidate


def split(
    request: PartitionedRequest, topology: Topology, held: Collection[Entry], taken_by: Callable[[bytes, int], int]
) -> dict[int, Selection]:
    """The pieces by broker, without the entries in `held`.

    NO_OWNER collects entries that cannot be sent. `taken_by` returns the broker that accepted a partition without an
    owner, or NO_OWNER.
    """
    pieces: dict[int, Selection] = {}
    for topic_place, topic in enumerate(request.topics):
        name = topic.name
        for ordinal, partition_index in enumerate(topic.partitions):
            if held and (topic_place, ordinal) in held:
                continue
            owner = topology.owner(name, partition_index)
            if owner == NO_OWNER or topology.address(owner) is None:
                is_nameless = request.is_nameless(topic)
                taker = taken_by(name, partition_index) if owner == NO_OWNER else NO_OWNER
                owner = route(topology, name, partition_index, is_nameless=is_nameless, taken_by=taker)
            add_entry(pieces.setdefault(owner, []), topic_place, ordinal)
    return pieces


# Shared, because a finished selection is never changed.
_ONE_PARTITION: Final[Selection] = [(0, [0])]


def split_whole(topics: Sequence[TopicSpan]) -> Selection:
    """The whole request in one piece."""
    if len(topics) == 1:
        partitions = len(topics[0].partitions)
        return _ONE_PARTITION if partitions == 1 else [(0, list(range(partitions)))]
    return [(topic_place, list(range(len(topic.partitions)))) for topic_place, topic in enumerate(topics)]


def add_entry(selection: Selection, topic_place: int, ordinal: int) -> None:
    """Append one entry; entries come in ascending order."""
    if selection and selection[-1][0] == topic_place:
        selection[-1][1].append(ordinal)
    else:
        selection.append((topic_place, [ordinal]))


def entries_of(selection: Selection) -> Iterator[Entry]:
    """The entries of a selection, in order."""
    for topic_place, ordinals in selection:
        for ordinal in ordinals:
            yield topic_place, ordinal
