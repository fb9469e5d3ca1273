"""FindCoordinator and InitProducerId.

Neither groups nor transactions are offered; idempotent producers are.

FindCoordinator, versions 0-6
- No answer names a coordinator: every key gets an error and, from version 1, a sentence with the reason. With these
  codes clients fail at once and show the sentence (tried with librdkafka 2.16 and kafka-python 3.0): INVALID_REQUEST
  for groups; CLUSTER_AUTHORIZATION_FAILED for transactions, because librdkafka would retry INVALID_REQUEST for ever.

InitProducerId, versions 0-5
- Without a transactional id: a producer id that was never assigned before, epoch 0. COORDINATOR_NOT_AVAILABLE, which
  clients retry, if etcd gives none.
- With one: TRANSACTIONAL_ID_AUTHORIZATION_FAILED, the one code that makes every client fail at once instead of asking
  for ever. (Clients send FindCoordinator first, whose answer gives the reason.)
- An empty transactional id, and a producer id without an epoch or the reverse: INVALID_REQUEST.
"""

from __future__ import annotations

import structlog

from kproxy.broker.context import Body, Broker, Request
from kproxy.etcd import EtcdError
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import FIND_COORDINATOR, INIT_PRODUCER_ID

_logger = structlog.get_logger(__name__)

_BATCH_VERSION = 4
_IDENTITY_FROM = 3
_GROUP = 0
_CODES = {1: error_codes.CLUSTER_AUTHORIZATION_FAILED}
_REASONS = {
    0: "consumer groups are not offered by this broker: assign partitions, or use a cluster that has groups",
    1: "transactions are not offered by this broker: use an idempotent producer without a transactional id",
    2: "share groups are not offered by this broker",
}


def handle_find_coordinator(broker: Broker, request: Request) -> Body:
    """Answer FindCoordinator: refuse every key, with the reason."""
    version = request.header.api_version
    message = control.decode_request(FIND_COORDINATOR, version, request.body)
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
        return [control.encode_response(control.build_response(FIND_COORDINATOR, version, coordinators=coordinators))]
    if version == 0:
        del nowhere["error_message"]
    return [control.encode_response(control.build_response(FIND_COORDINATOR, version, **nowhere))]


async def handle_init_producer_id(broker: Broker, request: Request) -> Body:
    """Answer InitProducerId with a new producer id."""
    version = request.header.api_version
    message = control.decode_request(INIT_PRODUCER_ID, version, request.body)
    error_code, producer_id, producer_epoch = error_codes.NONE, -1, -1
    has_part = version >= _IDENTITY_FROM and (message.producer_id == -1) != (message.producer_epoch == -1)
    if message.transactional_id == "" or has_part:
        error_code = error_codes.INVALID_REQUEST
    elif message.transactional_id is not None:
        error_code = error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    else:
        try:
            producer_id, producer_epoch = await broker.producer_ids.allocate(), 0
        except EtcdError as error:
            _logger.warning("producer id not allocated", reason=str(error))
            error_code = error_codes.COORDINATOR_NOT_AVAILABLE
    response = control.build_response(
        INIT_PRODUCER_ID, version, error_code=error_code, producer_id=producer_id, producer_epoch=producer_epoch
    )
    return [control.encode_response(response)]
