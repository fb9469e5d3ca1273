"""Load the schemas of messages that kafka-python lacks, in Kafka's notation: those of consumer groups (KIP-848)."""

from __future__ import annotations

from kafka.protocol.api_message import ApiMessage


class ConsumerGroupHeartbeatRequest(ApiMessage, load_json=__name__):  # type: ignore[misc, call-arg]
    pass


class ConsumerGroupHeartbeatResponse(ApiMessage, load_json=__name__):  # type: ignore[misc, call-arg]
    pass


class ConsumerGroupDescribeRequest(ApiMessage, load_json=__name__):  # type: ignore[misc, call-arg]
    pass


class ConsumerGroupDescribeResponse(ApiMessage, load_json=__name__):  # type: ignore[misc, call-arg]
    pass


__all__ = [
    "ConsumerGroupDescribeRequest",
    "ConsumerGroupDescribeResponse",
    "ConsumerGroupHeartbeatRequest",
    "ConsumerGroupHeartbeatResponse",
]
