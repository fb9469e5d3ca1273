"""Run the Own service of one process on an etcd, without a proxy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from kproxy.claims.inflight_writes import InflightWrites
from kproxy.claims.service import OwnService
from kproxy.etcd import EtcdClient


def own_service(
    client: EtcdClient,
    prefix: str,
    *,
    port: int = 1,
    writer_groups: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    unsettled_s: float = 60.0,
    counters: Counter[str] | None = None,
) -> OwnService:
    """A service that does not run yet, with a lease of a minute."""
    groups = {} if writer_groups is None else writer_groups
    return OwnService(
        client,
        prefix,
        "proxy.test",
        port,
        ttl_s=60,
        writer_groups=groups,
        timeout_s=timeout_s,
        unsettled=InflightWrites(groups, asyncio.get_running_loop().time, unsettled_s=unsettled_s),
        counters=Counter() if counters is None else counters,
    )
