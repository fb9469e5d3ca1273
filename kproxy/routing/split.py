"""One request to one piece per owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from codec.partitioned import PartitionedRequest, TopicSpan
from kproxy.routing.rendezvous import preferred
from kproxy.routing.topology import NO_OWNER, Topology

# By topic (its place in the request): the ordinals of the partitions meant, ascending.
Selection = list[tuple[int, list[int]]]
Entry = tuple[int, int]
"""One partition of a request: the topic's place and the partition's ordinal within it."""
NOTHING_REFUSED: Final[Mapping[Entry, int]] = MappingProxyType({})
"""Entries that are not to be sent, with the error code of each: none."""


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

    An owned partition goes to its owner and nowhere else, even where the owner's address is unknown (then NO_OWNER).
    One that nobody owns goes on to the broker that it was `taken_by`, or else is offered to the one that rendezvous
    hashing prefers among the topology's `takers`, where its brokers take partitions; but not to those in `refused_by`,
    since a broker that stops takes nothing more. Not so where `topic` is an id that nobody knows, which may be that of
    a topic that is no more.
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
    request: PartitionedRequest, topology: Topology, held: set[Entry], taken_by: Callable[[bytes, int], int]
) -> dict[int, Selection]:
    """What goes to which broker, entries in `held` left out; NO_OWNER collects what cannot be sent.

    `taken_by` says of a partition that nobody owns which broker has taken it, or NO_OWNER.
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


# Nobody changes a selection that is made.
_ONE_PARTITION: Final[Selection] = [(0, [0])]


def split_whole(topics: Sequence[TopicSpan]) -> Selection:
    """All of a request in one piece."""
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
