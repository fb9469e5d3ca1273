"""Replace the brokers in answers to clients by the proxies of the fleet, as virtual brokers.

Every answer shows the same cluster. Its brokers are the proxies of the fleet. Each partition is led by one of them,
which is also its only replica; a claimed partition (the Own API) is led by its claimant's proxy. Leader epochs are
always -1, so that no client compares one with a broker's (KIP-320). Racks are omitted. The cluster's id, topics,
partitions, ids, configurations and error codes stay as the broker says, so all proxies of one upstream say the same.

In requests, too, a virtual broker's id means that proxy: `is_virtual`.

An answer may be megabytes long (kproxy.proxy.long_answers). It names the proxies that were in the fleet when it was
begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from kproxy.claims.service import OwnService
from kproxy.proxy.context import ProxyContext
from kproxy.routing.fleet import FIRST_NODE_ID, Fleet, Proxy
from kproxy_codec import api_keys as keys
from kproxy_codec import cluster
from kproxy_codec.cluster import ASK_ANOTHER, Named, Verdict, rename_brokers
from kproxy_codec.control import decode_response, encode_response
from kproxy_codec.coordination import (
    GROUP,
    Found,
    answer_find_coordinator,
    parse_find_coordinator,
    replace_coordinators,
)
from kproxy_codec.error_codes import INVALID_REQUEST, NONE
from kproxy_codec.framing import RequestHeader, response_body_offset
from kproxy_codec.parts import changed
from kproxy_codec.primitives import Buffer

BROKER_TYPES: Final = frozenset({4, 8})
"""The types of configuration resources whose names are node ids: brokers, and brokers' loggers."""


class AskAnother(Exception):
    """Another broker is to be asked: this one, a reference broker without a lease, does not know the cluster."""


class VirtualBrokers:
    """Put the proxies of `fleet` into brokers' answers, or answer without brokers."""

    def __init__(self, context: ProxyContext, fleet: Fleet) -> None:
        self._context = context
        self._fleet = fleet

    async def rewrite(
        self, answer: memoryview, request_body: memoryview, header: RequestHeader, verdict: Verdict | None = None
    ) -> Buffer:
        """Return the body of a broker's answer with virtual brokers in it, and with topics as `verdict` decides.

        An answer to FindCoordinator is remembered. Raises CodecError, AskAnother.
        """
        key, version = header.api_key, header.api_version
        body = answer[response_body_offset(answer, key, version) :]
        if key == keys.METADATA and bytes(body[-len(ASK_ANOTHER) :]) == ASK_ANOTHER:
            raise AskAnother
        if key == keys.LIST_CONFIG_RESOURCES:
            return await self._context.portions.apart(len(body), partial(self._config_resources, version, body))
        if key == keys.FIND_COORDINATOR:
            asked = parse_find_coordinator(version, request_body)
            work = replace_coordinators(version, asked, body, self._learn_coordinator)
        else:
            work = rename_brokers(key, version, body, self._named(verdict))
        return await self._context.portions.of(work, len(body))

    def _config_resources(self, version: int, body: memoryview) -> Buffer:
        message = decode_response(keys.LIST_CONFIG_RESOURCES, version, body)
        listed = {each.resource_type: each for each in message.config_resources}
        message.config_resources = [
            each for each in message.config_resources if each.resource_type not in BROKER_TYPES
        ] + [
            changed(of_type, resource_name=str(proxy.node_id))
            for kind, of_type in listed.items()
            for proxy in (self._fleet.proxies if kind in BROKER_TYPES else ())
        ]
        return encode_response(message)

    def is_virtual(self, node_id: int) -> bool:
        """Whether a client that names this broker means a proxy, of the fleet now or earlier."""
        return node_id >= FIRST_NODE_ID and node_id not in self._context.topology.brokers

    def is_named(self, node_id: int) -> bool:
        """Whether answers name a proxy by this id."""
        return any(proxy.node_id == node_id for proxy in self._fleet.proxies)

    async def leaderless_metadata(self, header: RequestHeader, request_body: memoryview) -> Buffer:
        """Answer Metadata with proxies, and with topics that have no leaders.

        Raises CodecError.
        """
        work = cluster.leaderless_metadata(header.api_version, request_body, self._named())
        return await self._context.portions.of(work, len(request_body))

    async def find_coordinator(self, header: RequestHeader, request_body: memoryview) -> Buffer:
        """Answer FindCoordinator for groups without a broker. Raises CodecError."""
        work = answer_find_coordinator(header.api_version, request_body, self._group_coordinator)
        return await self._context.portions.of(work, len(request_body))

    def _named(self, verdict: Verdict | None = None) -> Named:
        # A copy: the fleet may change between portions.
        fleet, own = Fleet(self._fleet.proxies), self._context.own
        claimants = self._context.fleet.proxies
        return Named(
            fleet.proxies,
            fleet.controller.node_id,
            lambda topic, indexes: [
                proxy.node_id for proxy in partition_leaders(fleet, own, topic, indexes, claimants)
            ],
            verdict,
        )

    def _learn_coordinator(self, key_type: int, found: Found) -> Found:
        self._context.coordinators.take(key_type, found)
        return self._virtual_coordinator(key_type, found)

    def _virtual_coordinator(self, key_type: int, found: Found) -> Found:
        if found.error_code != NONE:
            return found
        node_id, host, port = self._fleet.coordinator(key_type, found.key)
        return found._replace(node_id=node_id, host=host, port=port)

    def _group_coordinator(self, key_type: int, key: str) -> Found:
        if key_type != GROUP:
            return Found(key, -1, "", -1, INVALID_REQUEST, "only consumer groups have coordinators here")
        return self._virtual_coordinator(key_type, Found(key, -1, "", -1))


def partition_leaders(
    fleet: Fleet, own: OwnService | None, topic: bytes, partition_indexes: list[int], claimants: Sequence[Proxy]
) -> list[Proxy]:
    """Return the virtual leader of each partition; `topic` is its name.

    A claimed partition is led by its claimant's proxy if the client's listener has that proxy. `claimants`: the proxies
    by the addresses with which they claim.
    """
    leaders = fleet.leaders(topic, partition_indexes)
    group = own.gated.get(topic) if own is not None else None
    if own is None or group is None:
        return leaders
    by_id = {proxy.node_id: proxy for proxy in fleet.proxies}
    by_address = {proxy.address: by_id[proxy.node_id] for proxy in claimants if proxy.node_id in by_id}
    for place, partition_index in enumerate(partition_indexes):
        row = own.table.owner(group, f"{topic.decode()}/{partition_index}")
        member = own.table.members.get(row.owner.proxy) if row is not None else None
        if member is not None:
            leaders[place] = by_address.get((member.host, member.port), leaders[place])
    return leaders
