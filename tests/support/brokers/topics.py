"""Put topics into etcd as brokers create them, with any replicas."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Final

from kproxy.broker.keys import BrokerValue, Keys, ReplicaKey, StateValue, TopicValue, decode_value, encode_value
from kproxy.etcd import EtcdClient, put_op
from tests.support.waiting import eventually

# In replica lists: a broker that never lives.
DEAD: Final = 99
_OPS_PER_TXN = 100


async def put_topic(
    client: EtcdClient,
    keys: Keys,
    topic: str,
    replicas: list[list[int]],
    configs: Mapping[str, str] | None = None,
    *,
    log_ids: Mapping[int, uuid.UUID] | None = None,
    leader_epoch: int = -1,
) -> uuid.UUID:
    """Put an empty topic with all its replicas but DEAD in sync, and return its id.

    The others are live, or `log_ids` has the ids of their data directories. `leader_epoch`: 0 as if led before.
    """
    known = dict(log_ids or {})

    async def are_known() -> bool:
        # A busy machine may have let the lease of a broker end, which registers again.
        live = [decode_value(kv.value, BrokerValue) for kv in (await client.get_prefix(keys.brokers)).kvs]
        known.update({each.node_id: each.log_id for each in live if each.node_id not in (log_ids or {})})
        return all(each in known or each == DEAD for placed in replicas for each in placed)

    await eventually(are_known, lambda: f"{topic}: {replicas}, known are {sorted(known)}")
    value = TopicValue(uuid.uuid4(), replicas, dict(configs or {}))
    states = []
    for index, placed in enumerate(replicas):
        isr = [ReplicaKey(each, known[each]) for each in sorted(placed) if each != DEAD]
        state = StateValue(leader_epoch, isr, value.topic_id)
        states.append(put_op(keys.state(topic, index), encode_value(state)))
    for start in range(0, len(states), _OPS_PER_TXN):
        await client.txn([], states[start : start + _OPS_PER_TXN])
    await client.put(keys.topic(topic), encode_value(value))
    return value.topic_id
