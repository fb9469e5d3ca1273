"""BindFences, version 0: this project's own, from proxies (kproxy_codec.own).

- A fence that is bound counts for what is produced on this connection from then on, and etcd keeps it: whoever is
  bound lower, or not at all, is refused with POLICY_VIOLATION until the fence is released with a higher one.
- A lower fence than is known: POLICY_VIOLATION, with the highest; and what is produced on the connection is refused.
- Not the owner: 6, and the connection counts as bound if this broker leads by the time of what comes behind it. No
  such topic or partition: 3. A partition that nobody ever took is taken first, if it is ours to take.
- etcd does not answer: 15 where nothing was done, 7 where nobody knows; the connection is bound as it was before.
- A fence below 1, or one that etcd has not come to: INVALID_REQUEST; also for each partition where one is named twice.
"""

from __future__ import annotations

from collections.abc import Awaitable

from kproxy.broker.context import FENCE_TIMEOUT_S, TAKE_TIMEOUT_S, Bindings, Body, Broker, Request
from kproxy.broker.keys import PartitionKey
from kproxy.broker.partition import Partition
from kproxy_codec import error_codes
from kproxy_codec.own import (
    BoundFence,
    FenceBinding,
    encode_bind_fences_response,
    parse_bind_fences_request,
)

# Of one connection: as many as a client's requests may name partitions, four times over.
MAX_BINDINGS = 16_384
# What the broker knows for certain of the partition, and of how the fence compares.
_BINDING = (error_codes.NONE, error_codes.NOT_LEADER_OR_FOLLOWER, error_codes.POLICY_VIOLATION)


def handle(broker: Broker, request: Request) -> Body | Awaitable[Body | None]:
    """Bind and release in one step where nothing has to be taken or kept first."""
    asked = parse_bind_fences_request(request.frame, request.header)
    takeable = broker.takeable([(each.topic.encode(), (each.partition_index,)) for each in asked])
    if takeable:
        return _take_and_bind(broker, request, asked, takeable)
    return _bind(broker, request, asked)


async def _take_and_bind(
    broker: Broker, request: Request, asked: tuple[FenceBinding, ...], takeable: list[PartitionKey]
) -> Body | None:
    await broker.replica_manager.take(takeable, TAKE_TIMEOUT_S)
    result = _bind(broker, request, asked)
    return await result if isinstance(result, Awaitable) else result


def _bind(broker: Broker, request: Request, asked: tuple[FenceBinding, ...]) -> Body | Awaitable[Body | None]:
    places = {(each.topic, each.partition_index) for each in asked}
    if len(places) < len(asked) or not _has_room(broker, request.bindings, len(asked)):
        return [encode_bind_fences_response([_refused(each, error_codes.INVALID_REQUEST) for each in asked])]
    answers = [_at_once(broker, each) for each in asked]
    if any(isinstance(answer, Partition) for answer in answers):
        return _settle_and_answer(broker, request, asked, answers)
    return _answer(request, asked, answers)


def _at_once(broker: Broker, asked: FenceBinding) -> BoundFence | Partition:
    """The answer, or the partition for which etcd has to keep the fence first."""
    if asked.fence < 1:
        return _refused(asked, error_codes.INVALID_REQUEST)
    partition = broker.led(asked.topic.encode(), asked.partition_index)
    if partition is None:
        return _refused(asked, broker.refusal(asked.topic, asked.partition_index))
    return broker.fences.at_once(partition, asked) or partition


async def _settle_and_answer(
    broker: Broker, request: Request, asked: tuple[FenceBinding, ...], answers: list[BoundFence | Partition]
) -> Body:
    """The answer once etcd keeps what it says, or the time is over."""
    to_settle = [(at, answer) for at, answer in enumerate(answers) if isinstance(answer, Partition)]
    settled = await broker.fences.settle_all([(partition, asked[at]) for at, partition in to_settle], FENCE_TIMEOUT_S)
    for (at, _), answer in zip(to_settle, settled, strict=True):
        answers[at] = answer
    return _answer(request, asked, answers)


def _answer(request: Request, asked: tuple[FenceBinding, ...], answers: list[BoundFence | Partition]) -> Body:
    bound = [answer for answer in answers if isinstance(answer, BoundFence)]
    for each, answer in zip(asked, bound, strict=True):
        if answer.error_code in _BINDING and not each.is_released and each.fence >= 1:
            place = each.topic.encode(), each.partition_index
            request.bindings[place] = max(each.fence, request.bindings.get(place, 0))
    return [encode_bind_fences_response(bound)]


def _has_room(broker: Broker, bindings: Bindings, more: int) -> bool:
    """Whether the connection may be bound to so many more; those of deleted topics make room."""
    if len(bindings) + more > MAX_BINDINGS:
        gone = error_codes.UNKNOWN_TOPIC_OR_PARTITION
        for topic, index in [place for place in bindings if broker.refusal(place[0].decode(), place[1]) == gone]:
            del bindings[topic, index]
    return len(bindings) + more <= MAX_BINDINGS


def _refused(asked: FenceBinding, error_code: int) -> BoundFence:
    return BoundFence(asked.topic, asked.partition_index, error_code)
