"""Tests that run side by side are those that may."""

from __future__ import annotations

import pytest

from tests.support.lanes import lane, needs_java, needs_spark


def test_what_needs_spark_is_in_one_lane_and_what_needs_java_there_or_in_another(
    request: pytest.FixtureRequest,
) -> None:
    """As far as it is being run: of all tests in a run of all."""
    items = request.session.items
    astray = {item.nodeid for item in items if needs_spark(item) and lane(item.nodeid) != "spark"}
    assert not astray, "name these in tests.support.lanes.WITH_SPARK"
    astray = {item.nodeid for item in items if needs_java(item) and lane(item.nodeid) not in ("kafka", "spark")}
    assert not astray, "name these in tests.support.lanes.WITH_KAFKA"


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/integration/test_dev.py::test_it[x::y]", "integration abcd"),
        ("tests/integration/test_zombie.py::test_it", "integration rstuvwxyz"),
        ("tests/integration/test_kafka_source.py::test_it", "kafka"),
        ("tests/clients/test_produce_versions.py::test_java[x]", "kafka"),
        ("tests/clients/test_produce_versions.py::test_spark", "spark"),
        ("tests/pipeline/test_session.py::test_it", "spark"),
        ("tests/unit/test_suite_lanes.py::test_it", "rest"),
    ],
)
def test_a_test_is_in_the_lane_of_its_file(nodeid: str, expected: str) -> None:
    assert lane(nodeid) == expected
