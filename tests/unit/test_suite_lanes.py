"""Tests that run side by side are those that may."""

from __future__ import annotations

import pytest

from tests.support.lanes import lane, needs_java


def test_what_needs_java_is_in_one_lane(request: pytest.FixtureRequest) -> None:
    """As far as it is being run: of all tests in a run of all."""
    astray = {item.path.name for item in request.session.items if needs_java(item) and lane(item.nodeid) != "rest"}
    assert not astray, "name these in tests.support.lanes.WITH_JAVA"


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/integration/test_dev.py::test_it[x::y]", "integration"),
        ("tests/integration/test_kafka_source.py::test_it", "rest"),
        ("tests/unit/test_suite_lanes.py::test_it", "rest"),
    ],
)
def test_a_test_is_in_the_lane_of_its_file(nodeid: str, expected: str) -> None:
    assert lane(nodeid) == expected
