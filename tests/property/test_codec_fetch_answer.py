"""Fetch answers of one partition are decoded correctly: hand-made bytes, and bytes that kafka-python reads."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kproxy_codec.api_keys import FETCH
from kproxy_codec.errors import InvalidField, UnsupportedVersion
from kproxy_codec.fetch_answer import MAX_VERSION, read_fetch_answer
from tests.support.wire.hostile import assert_refused_when_cut
from tests.support.wire.messages import read_by_kafka_python, response_body, response_frame, sample_response

VERSIONS = range(4, MAX_VERSION + 1)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=40)
@given(data=st.data())
def test_answer_is_read_as_by_kafka_python(version: int, data: st.DataObject) -> None:
    sample = sample_response(FETCH, {"t": [3]})
    entry = sample["responses"][0]["partitions"][0]
    entry["error_code"] = data.draw(st.integers(-1, 120))
    entry["high_watermark"] = data.draw(st.integers(-1, 2**62))
    entry["log_start_offset"] = data.draw(st.integers(-1, 2**62))
    entry["records"] = data.draw(st.none() | st.binary(max_size=200))
    entry["aborted_transactions"] = data.draw(
        st.none()
        | st.lists(
            st.fixed_dictionaries({"producer_id": st.integers(0, 9), "first_offset": st.integers(0, 9)}), max_size=3
        )
    )
    body = response_body(FETCH, version, sample)
    theirs = read_by_kafka_python("response", FETCH, version, body)["responses"][0]["partitions"][0]
    ours = read_fetch_answer(response_frame(FETCH, version, body), version, "t")
    assert (ours.partition_index, ours.error_code) == (theirs["partition_index"], theirs["error_code"])
    assert ours.high_watermark == theirs["high_watermark"]
    assert ours.log_start_offset == (theirs["log_start_offset"] if version >= 5 else -1)
    assert bytes(ours.records) == bytes(theirs["records"] or b"")


@pytest.mark.parametrize("version", VERSIONS)
def test_truncated_answer_is_refused(version: int) -> None:
    frame = response_frame(FETCH, version, response_body(FETCH, version, sample_response(FETCH, {"t": [0]})))
    read_fetch_answer(frame, version, "t")
    assert_refused_when_cut(lambda cut: read_fetch_answer(cut, version, "t"), frame)


@pytest.mark.parametrize("partitions", [{}, {"t": []}, {"t": [0, 1]}, {"u": [0]}, {"t": [0], "u": [0]}])
def test_answer_about_another_partition_is_refused(partitions: dict[str, list[int]]) -> None:
    body = response_body(FETCH, 12, sample_response(FETCH, partitions))
    with pytest.raises(InvalidField, match="expected one, of t"):
        read_fetch_answer(response_frame(FETCH, 12, body), 12, "t")


def test_whole_answer_error_applies_to_partition() -> None:
    body = response_body(FETCH, 12, sample_response(FETCH, {}, error_code=70))
    assert read_fetch_answer(response_frame(FETCH, 12, body), 12, "t").error_code == 70


def test_versions_with_topic_ids_are_not_read() -> None:
    with pytest.raises(UnsupportedVersion):
        read_fetch_answer(memoryview(bytearray(64)), 13, "t")
