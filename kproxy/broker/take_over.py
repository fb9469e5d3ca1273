"""The transaction that makes a broker the owner of a partition.

If the lease key is absent, and the state and the topic are as they were when the decision was made: put the lease key
on the broker's lease, and the state with the next leader epoch and this broker as its ISR. All or nothing, so that a
partition never has an owner without a state, and two brokers never both believe that they took it.
"""

from __future__ import annotations

from typing import NamedTuple

from kproxy.broker.cluster import Topic
from kproxy.broker.keys import Keys, PartitionKey, StateValue, decode_value, encode_value
from kproxy.ownership.etcd import (
    EtcdClient,
    EtcdError,
    LeaseLost,
    TxnResult,
    get_op,
    key_absent,
    mod_revision_is,
    put_op,
)

ATTEMPTS = 3


class Taken(NamedTuple):
    """`revision` is the lease key's create revision, the fencing token; `state` the state's value as it stands now."""

    revision: int
    leader_epoch: int
    state: bytes


class TakeOver:
    """One broker's attempt at one partition. `owner` is what the lease key says."""

    def __init__(self, client: EtcdClient, keys: Keys, node_id: int, key: PartitionKey, topic: Topic) -> None:
        self.owner = str(node_id).encode()
        self._client = client
        self._node_id = node_id
        self._lease_key = keys.lease(*key)
        self._state_key = keys.state(*key)
        self._topic_key = keys.topic(topic.name)
        self._topic = topic

    async def attempt(self, lease_id: int, leader_epoch: int, stored_revision: int) -> Taken | None:
        """Take the partition, or find that an attempt whose answer was lost has taken it; None if it is not to be had.

        `stored_revision` is the mod_revision of what stands in the state's key, 0 for nothing. Raises EtcdError,
        ValueError for a state that cannot be read.
        """
        value = encode_value(StateValue(leader_epoch, [self._node_id], self._topic.topic_id))
        result = await self._run(lease_id, value, stored_revision)
        if result.succeeded:
            return Taken(result.revision, leader_epoch, value)
        lease_kvs, state_kvs = result.responses[0].kvs, result.responses[1].kvs
        if not lease_kvs or not state_kvs or lease_kvs[0].lease_id != lease_id:
            return None
        state = decode_value(state_kvs[0].value, StateValue)
        return Taken(lease_kvs[0].create_revision, state.leader_epoch, state_kvs[0].value)

    async def _run(self, lease_id: int, value: bytes, stored_revision: int) -> TxnResult:
        compares = [
            key_absent(self._lease_key),
            mod_revision_is(self._state_key, stored_revision),
            mod_revision_is(self._topic_key, self._topic.mod_revision),
        ]
        puts = [put_op(self._lease_key, self.owner, lease_id), put_op(self._state_key, value)]
        look = [get_op(self._lease_key), get_op(self._state_key)]
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._client.txn(compares, puts, look)
            except LeaseLost:
                raise
            except EtcdError as error:
                # Asked again, a Txn that did go through fails its comparison and shows our own key.
                if not error.maybe_applied:
                    raise
        return await self._client.txn(compares, puts, look)
