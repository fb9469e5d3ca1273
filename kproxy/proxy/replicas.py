"""The page `/replication` of a proxy, or of one with several workers: read from its etcd when somebody asks."""

from __future__ import annotations

import time

import msgspec

from kproxy.config import ProxyConfig
from kproxy.etcd import EtcdError
from kproxy.observe.admin import Unanswered
from kproxy.observe.claims import NotOffered
from kproxy.observe.table import TableQuery, replication_page
from kproxy.ownership.replication import ReplicationReader


class ReplicaPages:
    """Raises ValueError for a query that will not do, Unanswered, NotOffered."""

    def __init__(self, config: ProxyConfig) -> None:
        self._reader = (
            ReplicationReader(config.etcd, config.etcd_options, config.prefix, clock=time.monotonic)
            if config.etcd
            else None
        )

    async def page(self, query: TableQuery) -> bytes:
        if self._reader is None:
            raise NotOffered("replicas are not known here: reference brokers keep theirs in an etcd (--etcd URL)")
        try:
            return msgspec.json.encode(replication_page(await self._reader.read(), query))
        except EtcdError as error:
            raise Unanswered(str(error)) from error

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()
