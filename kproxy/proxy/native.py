"""What the proxy answers itself where its brokers leave it to (kproxy.proxy.versions.NATIVE).

- InitProducerId without a transactional id: a producer id that no other proxy and no broker gives out, epoch 0. The
  brokers do not look at it, so that an idempotent producer works before them and nothing is deduplicated. Where etcd
  gives none in time: COORDINATOR_NOT_AVAILABLE, upon which clients ask again.
- FindCoordinator for a group: this proxy, which knows the group's coordinator from its lease when it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from kproxy.etcd import EtcdError
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.naming import renamed
from kproxy_codec import api_keys as keys
from kproxy_codec.control import build_response, encode_response
from kproxy_codec.coordination import GROUP, Found, answer_find_coordinator
from kproxy_codec.error_codes import COORDINATOR_NOT_AVAILABLE, INVALID_REQUEST, NONE
from kproxy_codec.headers import RequestHeader, response_body_offset
from kproxy_codec.primitives import INT16, INT32, INT64, Buffer

log = structlog.get_logger(__name__)

_NO_PRODUCER_ID = -1
# In the body of an answer to InitProducerId, behind throttle_time_ms.
_ERROR_CODE_AT = INT32.size
_PRODUCER_ID_AT = _ERROR_CODE_AT + INT16.size


async def answer_natively(context: ProxyContext, header: RequestHeader, body: memoryview) -> Buffer:
    """The body of the answer to a request of an API in NATIVE. Raises CodecError."""
    if header.api_key == keys.FIND_COORDINATOR:
        answer = answer_find_coordinator(
            header.api_version, body, lambda key_type, key: _coordinator(context, key_type, key)
        )
        return await context.portions.of(answer, len(body))
    return await _init_producer_id(context, header)


async def _init_producer_id(context: ProxyContext, header: RequestHeader) -> Buffer:
    producer_id, error_code = _NO_PRODUCER_ID, NONE
    try:
        if context.producer_ids is None:
            raise EtcdError("there is nowhere to take producer ids from")
        async with asyncio.timeout(context.limits.control_attempt_s):
            producer_id = await context.producer_ids.allocate()
        context.counters["producer_ids.given_out"] += 1
    except (EtcdError, TimeoutError) as error:
        context.counters["producer_ids.refused"] += 1
        log.warning("no producer id", reason=str(error) or "etcd does not answer in time")
        error_code = COORDINATOR_NOT_AVAILABLE
    epoch = 0 if error_code == NONE else _NO_PRODUCER_ID
    fields = {"error_code": error_code, "producer_id": producer_id, "producer_epoch": epoch}
    return encode_response(build_response(keys.INIT_PRODUCER_ID, header.api_version, **fields))


def lacks_producer_id(header: RequestHeader, answer: Sequence[Buffer]) -> bool:
    """Whether a broker's answer to InitProducerId says that all is well and gives no id, as KafScale's does.

    Its brokers answer what they do not serve with the defaults of every field.
    """
    [frame] = answer
    body = memoryview(frame)[response_body_offset(frame, header.api_key, header.api_version) :]
    if len(body) < _PRODUCER_ID_AT + INT64.size:
        return False
    error_code, producer_id = INT16.unpack_from(body, _ERROR_CODE_AT)[0], INT64.unpack_from(body, _PRODUCER_ID_AT)[0]
    return bool(error_code == NONE and producer_id < 0)


def _coordinator(context: ProxyContext, key_type: int, key: str) -> Found:
    if key_type != GROUP:
        return Found(key, -1, "", -1, INVALID_REQUEST, "only consumer groups have coordinators here")
    return renamed(context.fleet, key_type, Found(key, -1, "", -1))
