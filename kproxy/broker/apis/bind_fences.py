"""Handle BindFences, version 0: this project's own API, by which proxies tell a broker which writers it may accept.

kproxy_codec.own has its format.

- A bound fence applies to later writes to its partition on this connection, and etcd keeps it. A write on a connection
  bound lower gets POLICY_VIOLATION; so does one on an unbound connection until a release with a higher fence.
- A fence below the known one gets POLICY_VIOLATION with the highest fence; then the connection may not write.
- A partition that this broker does not lead gets NOT_LEADER_OR_FOLLOWER; the connection counts as bound if this broker
  leads it by the time of its next requests. An unknown topic or partition gets UNKNOWN_TOPIC_OR_PARTITION. This broker
  first takes a partition without an owner, if it may.
- If etcd does not answer, the binding does not change: COORDINATOR_NOT_AVAILABLE if nothing was done, REQUEST_TIMED_OUT
  if that is unknown.
- A fence below 1 or above etcd's revision gets INVALID_REQUEST, as does every partition of a request that names one
  twice or would exceed MAX_BINDINGS.
"""

from __future__ import annotations

from kproxy.broker.context import FENCE_TIMEOUT_S, Answer, Bindings, Body, Broker, Request
from kproxy.broker.partition import Partition
from kproxy_codec import error_codes
from kproxy_codec.own import (
    BoundFence,
    FenceBinding,
    encode_bind_fences_response,
    parse_bind_fences_request,
)

# The limit of one connection: four times the partitions of one request.
MAX_BINDINGS = 16_384
# The codes that bind the connection: the broker can compare the fence, or is not the owner.
_BINDING = (error_codes.NONE, error_codes.NOT_LEADER_OR_FOLLOWER, error_codes.POLICY_VIOLATION)


def handle(broker: Broker, request: Request) -> Answer:
    """Bind and release, in one step if no partition must be taken and no fence kept first."""
    asked = parse_bind_fences_request(request.frame, request.header)
    wanted = [(each.topic.encode(), (each.partition_index,)) for each in asked]
    return broker.take_then(wanted, lambda: _bind(broker, request, asked))


def _bind(broker: Broker, request: Request, asked: tuple[FenceBinding, ...]) -> Answer:
    places = {(each.topic, each.partition_index) for each in asked}
    if len(places) < len(asked) or not _has_room(broker, request.bindings, len(asked)):
        return [encode_bind_fences_response([_refused(each, error_codes.INVALID_REQUEST) for each in asked])]
    answers = [_at_once(broker, each) for each in asked]
    if any(isinstance(answer, Partition) for answer in answers):
        return _settle_and_answer(broker, request, asked, answers)
    return _answer(request, asked, answers)


def _at_once(broker: Broker, asked: FenceBinding) -> BoundFence | Partition:
    """Answer from memory, or return the partition whose fence etcd must keep first."""
    if asked.fence < 1:
        return _refused(asked, error_codes.INVALID_REQUEST)
    partition = broker.led(asked.topic.encode(), asked.partition_index)
    if partition is None:
        return _refused(asked, broker.refusal(asked.topic, asked.partition_index))
    return broker.fences.at_once(partition, asked) or partition


async def _settle_and_answer(
    broker: Broker, request: Request, asked: tuple[FenceBinding, ...], answers: list[BoundFence | Partition]
) -> Body:
    """Answer once etcd keeps the fences, or the time is over."""
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
    """Return whether the connection may be bound to `more` fences; those of deleted topics are dropped."""
    if len(bindings) + more > MAX_BINDINGS:
        gone = error_codes.UNKNOWN_TOPIC_OR_PARTITION
        for topic, index in [place for place in bindings if broker.refusal(place[0].decode(), place[1]) == gone]:
            del bindings[topic, index]
    return len(bindings) + more <= MAX_BINDINGS


def _refused(asked: FenceBinding, error_code: int) -> BoundFence:
    return BoundFence(asked.topic, asked.partition_index, error_code)
