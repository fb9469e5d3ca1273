"""Who is named in answers that name brokers: proxies alone.

One view of the cluster in every answer: the brokers are the proxies of the fleet, and each partition is led by one of
them, which is its only replica as well; leader epochs are always -1, so that no client compares one of ours with one of
a broker's (KIP-320); racks are left out. The cluster's id, topics, partitions, ids, configurations and error codes stay
as the broker says: all proxies of one upstream tell the same.

An answer is written in portions, and names who was there when it was begun.
"""

from __future__ import annotations

from kproxy.claims.service import OwnService
from kproxy.proxy.naming_claimants import Claimants
from kproxy.routing.fleet import Fleet
from kproxy_codec.cluster import Named
from kproxy_codec.coordination import Found
from kproxy_codec.error_codes import NONE


def named(fleet: Fleet, own: OwnService | None) -> Named:
    """The proxies of now, as one answer about the cluster names them."""
    now = Fleet(fleet.proxies)
    claimants = Claimants(own, now)
    return Named(
        now.proxies,
        now.controller.node_id,
        lambda topic, indexes: [proxy.node_id for proxy in claimants.leaders(topic, indexes)],
    )


def renamed(fleet: Fleet, key_type: int, found: Found) -> Found:
    """The proxy that is said to coordinate what a broker was found for."""
    if found.error_code != NONE:
        return found
    node_id, host, port = fleet.coordinator(key_type, found.key)
    return found._replace(node_id=node_id, host=host, port=port)
