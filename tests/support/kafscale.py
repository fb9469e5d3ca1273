"""Values as KafScale's operator and brokers write them to etcd, byte for byte as they were seen there."""

from __future__ import annotations

ORDERS_ID = bytes((150, 88, 64, 56, 22, 64, 158, 102, 235, 162, 23, 95, 142, 255, 139, 83))


def _broker(node_id: int, port: int) -> str:
    return f'{{"NodeID":{node_id},"Host":"127.0.0.1","Port":{port},"Rack":null,"UnknownTags":{{}}}}'


def _partition(index: int) -> str:
    return (
        f'{{"ErrorCode":0,"Partition":{index},"Leader":{index % 2},"LeaderEpoch":0,"Replicas":[0,1],"ISR":[0,1],'
        '"OfflineReplicas":null,"UnknownTags":{}}'
    )


def snapshot_value(ports: dict[int, int], partitions: int = 2) -> bytes:
    """`{prefix}/metadata/snapshot`: brokers on 127.0.0.1, and the topic `orders`. Go's own order and spelling."""
    brokers = ",".join(_broker(node_id, port) for node_id, port in ports.items())
    numbers = ",".join(map(str, ORDERS_ID))
    topic = (
        f'{{"ErrorCode":0,"Topic":"orders","TopicID":[{numbers}],"IsInternal":false,"Partitions":['
        f'{",".join(map(_partition, range(partitions)))}],"AuthorizedOperations":0,"UnknownTags":{{}}}}'
    )
    return (
        f'{{"Brokers":[{brokers}],"ControllerID":0,"Topics":[{topic}],"ClusterName":"kafscale",'
        '"ClusterID":"3f1c6a52-uid"}'
    ).encode()


SNAPSHOT = snapshot_value({0: 29092, 1: 29093})
