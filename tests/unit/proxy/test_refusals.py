"""Refusals of control requests: one error code, in the form of each version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kproxy.proxy.apis import SERVED, Handling
from kproxy.proxy.long_answers import SHORT_BYTES, Portions
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
    body = control.encode_request(control.build_request(keys.DELETE_TOPICS, 5, topic_names=["t"], timeout_ms=1))
    [topic] = (await refused(keys.DELETE_TOPICS, 5, body)).responses
    assert (topic.name, topic.error_code) == ("t", 35)


async def test_long_requests_are_not_read() -> None:
    names = [f"{number:0>200}" for number in range(SHORT_BYTES // 200 + 1)]
    body = control.encode_request(control.build_request(keys.DELETE_TOPICS, 5, topic_names=names, timeout_ms=1))
    with pytest.raises(UnsupportedVersion):
        await refused(keys.DELETE_TOPICS, 5, body)
    join = control.build_request(keys.JOIN_GROUP, 5, group_id="g", member_id="x" * SHORT_BYTES)
    assert (await refused(keys.JOIN_GROUP, 5, control.encode_request(join))).error_code == 35
