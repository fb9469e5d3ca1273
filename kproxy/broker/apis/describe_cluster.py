"""DescribeCluster, versions 0-1 (KIP-700).

Endpoint type 1, brokers, is known; any other gets UNSUPPORTED_ENDPOINT_TYPE: there are no controllers to ask.
While this broker has no lease the connection is closed (`Broker.check_knows_cluster`).
"""

from __future__ import annotations

from kproxy.broker.apis.describe import controller_id, describe_brokers
from kproxy.broker.context import Body, Broker, Request
from kproxy_codec import control
from kproxy_codec.api_keys import DESCRIBE_CLUSTER

API_KEY = DESCRIBE_CLUSTER
MIN_VERSION = 0
MAX_VERSION = 1

_BROKERS = 1
_UNSUPPORTED_ENDPOINT_TYPE = 115


def handle(broker: Broker, request: Request) -> Body:
    """The live brokers."""
    broker.check_knows_cluster()
    version = request.header.api_version
    message = control.decode_request(API_KEY, version, request.body)
    if version >= 1 and message.endpoint_type != _BROKERS:
        response = control.build_response(
            API_KEY, version, error_code=_UNSUPPORTED_ENDPOINT_TYPE, error_message="only brokers can be described here"
        )
    else:
        response = control.build_response(
            API_KEY,
            version,
            cluster_id=broker.cluster_id,
            controller_id=controller_id(broker),
            brokers=describe_brokers(broker, "broker_id"),
        )
    return [control.encode_response(response)]
