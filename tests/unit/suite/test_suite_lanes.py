"""The table of lanes matches the tests, because no other check shows that two Sparks or Kafkas run side by side."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.lanes import ALONE, modules_with_tests, needed_lanes, recorded_durations

RECORD = "make test ARGS=--record-durations writes tests/support/durations.toml anew, or correct it by hand"


def test_durations_table_names_existing_modules() -> None:
    named = [module for modules in recorded_durations().values() for module in modules]
    assert {*named} - {*modules_with_tests()} == set(), RECORD
    assert [name for name, count in Counter(named).items() if count > 1] == []
    assert len(named) > 50, "nothing is recorded"


def test_each_module_has_a_name_of_its_own() -> None:
    """The name identifies its lane, and its row in the table of durations."""
    assert [name for name, count in Counter(modules_with_tests()).items() if count > 1] == []


def test_spark_and_kafka_tests_have_shared_lanes(request: pytest.FixtureRequest) -> None:
    """Checked for the tests of this run only; a run of all checks all."""
    recorded = {module: lane for lane, modules in recorded_durations().items() for module in modules if lane != ALONE}
    needed = {module: lane for module, lane in needed_lanes(request.session.items).items() if lane != ALONE}
    # Among the long tests, a module that asks for Kafka may also ask for Spark.
    assert {module for module in needed if module not in recorded} == set(), RECORD
    assert {module for module, lane in needed.items() if lane == "kafka" != recorded[module]} == set(), RECORD
