"""Imitate KafScale: the values that its operator and brokers write to etcd, and brokers with its answers.

Everything here was observed on KafScale's own broker (July 2026), the values byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kproxy_codec.api_keys import API_VERSIONS, INIT_PRODUCER_ID
from tests.support.brokers.scripted_upstream import Asked, ScriptedUpstream

ORDERS_ID = bytes((150, 88, 64, 56, 22, 64, 158, 102, 235, 162, 23, 95, 142, 255, 139, 83))
ORDERS = MappingProxyType({"orders": ORDERS_ID})


def _broker(node_id: int, port: int) -> str:
    return f'{{"NodeID":{node_id},"Host":"127.0.0.1","Port":{port},"Rack":null,"UnknownTags":{{}}}}'


def _partition(index: int) -> str:
    return (
        f'{{"ErrorCode":0,"Partition":{index},"Leader":{index % 2},"LeaderEpoch":0,"Replicas":[0,1],"ISR":[0,1],'
        '"OfflineReplicas":null,"UnknownTags":{}}'
    )


def _topic(name: str, topic_id: bytes, partitions: int) -> str:
    return (
        f'{{"ErrorCode":0,"Topic":"{name}","TopicID":[{",".join(map(str, topic_id))}],"IsInternal":false,"Partitions":['
        f'{",".join(map(_partition, range(partitions)))}],"AuthorizedOperations":0,"UnknownTags":{{}}}}'
    )


def snapshot_value(ports: dict[int, int], partitions: int = 2, topics: Mapping[str, bytes] = ORDERS) -> bytes:
    """`{prefix}/metadata/snapshot`: brokers on 127.0.0.1, and topics with their ids. Order and spelling are Go's."""
    brokers = ",".join(_broker(node_id, port) for node_id, port in ports.items())
    listed = ",".join(_topic(name, topic_id, partitions) for name, topic_id in topics.items())
    return (
        f'{{"Brokers":[{brokers}],"ControllerID":0,"Topics":[{listed}],"ClusterName":"kafscale",'
        '"ClusterID":"3f1c6a52-uid"}'
    ).encode()


SNAPSHOT = snapshot_value({0: 29092, 1: 29093})

# The ApiVersions of KafScale's brokers: the APIs that they serve, and as -1 to -1 those that they do not.
API_RANGES: dict[int, tuple[int, int]] = {
    18: (0, 4),
    3: (0, 12),
    0: (0, 9),
    1: (11, 13),
    10: (3, 3),
    2: (0, 4),
    **dict.fromkeys((11, 14, 12, 13), (4, 4)),
    8: (3, 3),
    9: (5, 5),
    15: (5, 5),
    16: (0, 5),
    23: (3, 3),
    32: (4, 4),
    33: (1, 1),
    37: (0, 3),
    19: (0, 2),
    20: (0, 2),
    42: (0, 2),
    **dict.fromkeys((4, 5, 6, 7, 21, 22, 24, 25, 26), (-1, -1)),
}


class KafScaleBroker(ScriptedUpstream):
    """A broker that lists the APIs of KafScale's brokers, and leaves the rest to the test.

    `claims_producer_ids`: it lists InitProducerId as served. Unserved requests get the defaults of every field.
    """

    def __init__(self, node_id: int, *, claims_producer_ids: bool = False) -> None:
        super().__init__(node_id)
        self._ranges = API_RANGES | ({INIT_PRODUCER_ID: (0, 4)} if claims_producer_ids else {})

    def take(self, asked: Asked) -> None:
        if asked.header.api_key == API_VERSIONS:
            ranges = [
                {"api_key": key, "min_version": lowest, "max_version": highest}
                for key, (lowest, highest) in self._ranges.items()
            ]
            asked.answer_message(error_code=0, api_keys=ranges)
        elif asked.header.api_key == INIT_PRODUCER_ID:
            self.log.append(asked)
            asked.answer_message(error_code=0, producer_id=-1, producer_epoch=0)
        else:
            super().take(asked)
