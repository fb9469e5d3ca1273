"""FindCoordinator, versions 0-6.

There are no coordinators, so no broker is ever named: every key gets an error and, from version 1 on, a sentence that
says why. The codes are those upon which clients fail at once and show the sentence, as tried with librdkafka 2.16 and
kafka-python 3.0: INVALID_REQUEST for groups; CLUSTER_AUTHORIZATION_FAILED for transactions, since librdkafka would ask
for ever after the former.
"""

from __future__ import annotations

from kproxy.broker.context import Body, Broker, Request
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import FIND_COORDINATOR

API_KEY = FIND_COORDINATOR
MIN_VERSION = 0
MAX_VERSION = 6

_BATCH_VERSION = 4
_GROUP = 0
_CODES = {1: error_codes.CLUSTER_AUTHORIZATION_FAILED}
_REASONS = {
    0: "consumer groups are not offered by this broker: assign partitions, or use a cluster that has groups",
    1: "transactions are not offered by this broker: use an idempotent producer without a transactional id",
    2: "share groups are not offered by this broker",
}


def handle(broker: Broker, request: Request) -> Body:
    """No, and why."""
    version = request.header.api_version
    message = control.decode_request(API_KEY, version, request.body)
    key_type = message.key_type if version >= 1 else _GROUP
    nowhere = {
        "error_code": _CODES.get(key_type, error_codes.INVALID_REQUEST),
        "error_message": _REASONS.get(key_type, f"there is no coordinator type {key_type}"),
        "node_id": -1,
        "host": "",
        "port": -1,
    }
    if version >= _BATCH_VERSION:
        coordinators = [{"key": key, **nowhere} for key in message.coordinator_keys]
        return [control.encode_response(control.build_response(API_KEY, version, coordinators=coordinators))]
    if version == 0:
        del nowhere["error_message"]
    return [control.encode_response(control.build_response(API_KEY, version, **nowhere))]
