"""Refusals of control requests: one error code, in the form of each version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import pytest

from kproxy.proxy.apis import SERVED, Handling
from kproxy.proxy.long_answers import Portions
from kproxy.proxy.refusals import refusal
from kproxy_codec import api_keys as keys
from kproxy_codec import control
from kproxy_codec.errors import UnsupportedVersion
from kproxy_codec.framing import parse_request_header, response_body_offset
from tests.support.wire.fattest import arrays, body_of, control_request

ELSEWHERE = (Handling.PROXY, Handling.SPLIT)
REFUSED = [
    (key, version)
    for key, api in SERVED.items()
    # Telemetry is sent on unread.
    if api.handling not in ELSEWHERE and key not in (keys.GET_TELEMETRY_SUBSCRIPTIONS, keys.PUSH_TELEMETRY)
    for version in range(control.version_range(key)[0], control.version_range(key)[1] + 1)
]


def codes(part: Any) -> Iterator[int]:
    """All error codes of a message, at any depth."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            # Those of a topic's configuration are beside its own.
            is_code = name.endswith("error_code") and name != "topic_config_error_code"
            yield from [value] if is_code else codes(value)
    elif isinstance(part, list | tuple):
        for each in part:
            yield from codes(each)


async def refused(key: int, version: int, body: bytes) -> Any:
    frame = memoryview(bytearray(control_request(key, version, body)))
    header = parse_request_header(frame)
    answer = memoryview(b"".join(await refusal(Portions(), header, frame[header.body_offset :], 35)))
    return control.decode_response(key, version, answer[response_body_offset(answer, key, version) :])


def has_place(key: int, version: int) -> bool:
    """Some answers have errors only of what they describe."""
    if key == keys.METADATA:
        return version >= 13
    if key == keys.DESCRIBE_LOG_DIRS:
        return version >= 3
    without = {(keys.DELETE_TOPICS, 6), (keys.ELECT_LEADERS, 0)}
    return key != keys.DESCRIBE_TOPIC_PARTITIONS and (key, version) not in without


@pytest.mark.parametrize(("key", "version"), REFUSED)
async def test_every_version_has_its_own_refusal(key: int, version: int) -> None:
    named = arrays("request", key, version)
    deepest = max(named, key=len, default=())
    body = body_of("request", key, version, deepest, 2 if deepest else 0)
    if not has_place(key, version):
        with pytest.raises(UnsupportedVersion):
            await refused(key, version, body)
        return
    assert set(codes((await refused(key, version, body)).to_dict())) == {35}


async def test_refusals_name_what_was_asked() -> None:
    groups = [{"group_id": each, "topics": None} for each in ("g", "h")]
    body = control.encode_request(control.build_request(keys.OFFSET_FETCH, 9, groups=groups))
    message = await refused(keys.OFFSET_FETCH, 9, body)
    assert [(each.group_id, each.error_code) for each in message.groups] == [("g", 35), ("h", 35)]
    partition = {"partition_index": 3, "committed_offset": 7, "committed_metadata": ""}
    topics = [{"topic_id": UUID(int=7), "partitions": [partition]}]
    body = control.encode_request(control.build_request(keys.OFFSET_COMMIT, 10, group_id="g", topics=topics))
    [topic] = (await refused(keys.OFFSET_COMMIT, 10, body)).topics
    assert (topic.topic_id, topic.partitions[0].partition_index) == (UUID(int=7), 3)
    topics = [{"name": "t", "partition_indexes": [3]}]
    body = control.encode_request(control.build_request(keys.OFFSET_FETCH, 1, group_id="g", topics=topics))
    [topic] = (await refused(keys.OFFSET_FETCH, 1, body)).topics
    partition = topic.partitions[0]
    assert (topic.name, partition.partition_index, partition.committed_offset, partition.metadata) == ("t", 3, -1, "")
    body = control.encode_request(control.build_request(keys.DELETE_TOPICS, 5, topic_names=["t"], timeout_ms=1))
    [topic] = (await refused(keys.DELETE_TOPICS, 5, body)).responses
    assert (topic.name, topic.error_code) == ("t", 35)


@pytest.mark.parametrize("count", [0, 1000])
async def test_any_number_of_names_is_refused(count: int) -> None:
    names = [str(number) for number in range(count)]
    body = control.encode_request(control.build_request(keys.DELETE_TOPICS, 5, topic_names=names, timeout_ms=1))
    assert [each.name for each in (await refused(keys.DELETE_TOPICS, 5, body)).responses] == names
