"""InitProducerId, versions 0-5.

- Without a transactional id: a producer id that nobody had before, epoch 0. COORDINATOR_NOT_AVAILABLE, which clients
  retry, where etcd gives none.
- With one: TRANSACTIONAL_ID_AUTHORIZATION_FAILED, the one code that makes every client fail at once instead of asking
  for ever. (FindCoordinator, which they ask first, says in words why.)
"""

from __future__ import annotations

import structlog

from kproxy.broker.context import Body, Broker, Request
from kproxy.etcd import EtcdError
from kproxy_codec import control, error_codes
from kproxy_codec.api_keys import INIT_PRODUCER_ID

API_KEY = INIT_PRODUCER_ID
MIN_VERSION = 0
MAX_VERSION = 5

_logger = structlog.get_logger(__name__)


async def handle(broker: Broker, request: Request) -> Body:
    """A new producer id."""
    version = request.header.api_version
    message = control.decode_request(API_KEY, version, request.body)
    error_code, producer_id, producer_epoch = error_codes.NONE, -1, -1
    if message.transactional_id is not None:
        error_code = error_codes.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    else:
        try:
            producer_id, producer_epoch = await broker.producer_ids.allocate(), 0
        except EtcdError as error:
            _logger.warning("no producer id", error=str(error))
            error_code = error_codes.COORDINATOR_NOT_AVAILABLE
    response = control.build_response(
        API_KEY, version, error_code=error_code, producer_id=producer_id, producer_epoch=producer_epoch
    )
    return [control.encode_response(response)]
