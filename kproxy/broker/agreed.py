"""Values that a cluster's first broker chooses for all."""

from __future__ import annotations

from kproxy.etcd import EtcdClient, get_op, key_absent, put_op


async def agreed_value(client: EtcdClient, key: str, proposal: bytes) -> bytes:
    """What stands in `key`: `proposal`, if nothing stood there. Raises EtcdError."""
    result = await client.txn([key_absent(key)], [put_op(key, proposal)], [get_op(key)])
    return proposal if result.succeeded else result.responses[0].kvs[0].value
