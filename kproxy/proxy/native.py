"""What the proxy answers itself where its brokers leave it to (kproxy.proxy.versions.NATIVE).

- InitProducerId without a transactional id: a producer id that no other proxy and no broker gives out, epoch 0. The
  brokers do not look at it, so that an idempotent producer works before them and nothing is deduplicated. Where etcd
  gives none in time: COORDINATOR_NOT_AVAILABLE, upon which clients ask again.
- FindCoordinator for a group: this proxy, which knows the group's coordinator from its lease when it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog

from codec import api_keys as keys
from codec.control import Message, build_response, decode_response
from codec.error_codes import COORDINATOR_NOT_AVAILABLE, INVALID_REQUEST, NONE
from codec.errors import CodecError
from codec.headers import RequestHeader, response_body_offset
from codec.primitives import Buffer
from kproxy.ownership.etcd import EtcdError
from kproxy.proxy.context import ProxyContext
from kproxy.proxy.coordinators import BATCHED_FROM, GROUP, key_type_of
from kproxy.proxy.naming import rename_coordinators

log = structlog.get_logger(__name__)

_NO_PRODUCER_ID = -1


async def answer_natively(context: ProxyContext, header: RequestHeader, request: Message) -> Message:
    """The answer to a request of an API in NATIVE."""
    if header.api_key == keys.FIND_COORDINATOR:
        return _find_coordinator(context, header, request)
    return await _init_producer_id(context, header)


async def _init_producer_id(context: ProxyContext, header: RequestHeader) -> Message:
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
    return build_response(keys.INIT_PRODUCER_ID, header.api_version, **fields)


def lacks_producer_id(header: RequestHeader, answer: Sequence[Buffer]) -> bool:
    """Whether a broker's answer to InitProducerId says that all is well and gives no id, as KafScale's does.

    Its brokers answer what they do not serve with the defaults of every field.
    """
    [frame] = answer
    try:
        body = memoryview(frame)[response_body_offset(frame, header.api_key, header.api_version) :]
        message = decode_response(header.api_key, header.api_version, body)
    except CodecError:
        return False
    return bool(message.error_code == NONE and message.producer_id < 0)


def _find_coordinator(context: ProxyContext, header: RequestHeader, request: Message) -> Message:
    found: dict[str, Any] = {"error_code": NONE, "error_message": None, "node_id": -1, "host": "", "port": -1}
    if key_type_of(request) != GROUP:
        found |= {"error_code": INVALID_REQUEST, "error_message": "only consumer groups have coordinators here"}
    if header.api_version >= BATCHED_FROM:
        found = {"coordinators": [{**found, "key": key} for key in request.coordinator_keys]}
    answer = build_response(keys.FIND_COORDINATOR, header.api_version, **found)
    rename_coordinators(request, answer, context.fleet)
    return answer
