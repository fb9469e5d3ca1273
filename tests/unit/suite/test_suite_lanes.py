"""Only tests that may run side by side do, and the longest lanes begin."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.support.lanes import (
    ALONE,
    Lanes,
    module_name,
    modules_with_tests,
    needed_lanes,
    recorded_durations,
    table_text,
)

REPOSITORY = Path(__file__).parents[3]
RECORD = "make test ARGS=--record-durations writes tests/support/durations.toml anew, or correct it by hand"


def test_durations_table_names_existing_modules() -> None:
    named = [module for modules in recorded_durations().values() for module in modules]
    assert {*named} - {*modules_with_tests()} == set(), RECORD
    assert [name for name, count in Counter(named).items() if count > 1] == []
    assert len(named) > 50, "nothing is recorded"


def test_each_module_has_a_name_of_its_own() -> None:
    """By which it is a lane, and stands in the table of durations."""
    assert [name for name, count in Counter(modules_with_tests()).items() if count > 1] == []


def test_spark_and_kafka_tests_have_shared_lanes(request: pytest.FixtureRequest) -> None:
    """As far as it is being run: of all tests in a run of all."""
    recorded = {module: lane for lane, modules in recorded_durations().items() for module in modules if lane != ALONE}
    needed = {module: lane for module, lane in needed_lanes(request.session.items).items() if lane != ALONE}
    # With the long tests a module may ask for Spark that otherwise asks for Kafka.
    assert {module for module in needed if module not in recorded} == set(), RECORD
    assert {module for module, lane in needed.items() if lane == "kafka" != recorded[module]} == set(), RECORD


def test_durations_are_kept_for_long_existing_modules() -> None:
    spark = {"test_gone": 9.0, "test_kept": 3.0, "test_seldom_on_spark": 8.0}
    before = {"spark": spark, ALONE: {"test_slow": 4.0, "test_now_short": 5.0}}
    measured = {"kafka": {"test_kafka": 0.2}, ALONE: {"test_short": 0.3, "test_slow": 7.25, "test_now_short": 0.5}}
    # Its long test, which asks for Spark, was not run.
    measured[ALONE]["test_seldom_on_spark"] = 0.5
    existing = [
        "test_seldom_on_spark",
        "test_kept",
        "test_slow",
        "test_now_short",
        "test_short",
        "test_kafka",
        "test_new",
    ]
    table = tomllib.loads(table_text(before, measured, existing))
    kafka = {"test_kafka": 0.2}
    kept = {lane: modules for lane, modules in table.items() if modules}
    assert kept == {"spark": {"test_kept": 3.0, "test_seldom_on_spark": 0.5}, "kafka": kafka, ALONE: {"test_slow": 7.2}}


def test_shared_lane_lasts_as_its_modules() -> None:
    lanes = Lanes({"spark": {"test_a": 3.0, "test_b": 4.0}, ALONE: {"test_c": 5.0}})
    found = {name: (lanes.lane(f"tests/{name}.py::test_it"), lanes.length_s(f"{name}.py::test_it")) for name in NAMES}
    assert found == {
        "test_a": ("spark", 7.0),
        "test_b": ("spark", 7.0),
        "test_c": ("test_c", 5.0),
        "test_d": ("test_d", 0.0),
    }


NAMES = ("test_a", "test_b", "test_c", "test_d")


# Each test says in which process it ran, and the fixture when it began and ended.
CONFTEST = """
import os, pytest
from pathlib import Path
from tests.support import lanes

pytest_plugins = ["tests.support.lanes"]
lanes.DURATIONS = Path(__file__).with_name("durations.toml")

@pytest.fixture(scope="session")
def note():
    def write(text):
        with Path(__file__).with_name("notes").open("a") as notes:
            notes.write(f"{os.environ.get('PYTEST_XDIST_WORKER')} {text}\\n")
    return write

@pytest.fixture(scope="session")
def real_kafka(note):
    note("begin")
    yield
    note("end")
"""
TEST = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number, note FIXTURE):
    note("NAME")
"""


TABLE = """
[kafka]
test_kafka_a = 20
test_kafka_b = 20
[alone]
test_long = 50
"""


def run_lanes(directory: Path, *arguments: str) -> list[list[str]]:
    """What was noted, and by whom, of a run of four modules, two of which ask for Kafka's brokers."""
    (directory / "durations.toml").write_text(
        "[kafka]\ntest_kafka_b = 20\ntest_kafka_a = 20\n[alone]\ntest_long = 50\n"
    )
    (directory / "conftest.py").write_text(CONFTEST)
    for name in ("kafka_a", "kafka_b", "long", "short"):
        text = TEST.replace("NAME", name).replace(" FIXTURE", ", real_kafka" if name.startswith("kafka") else "")
        (directory / f"test_{name}.py").write_text(text)
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("KPROXY_TEST_", "PYTEST_"))}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", directory),
            *(*arguments, directory),
        ],
        cwd=REPOSITORY,
        env=settings,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in (directory / "notes").read_text().splitlines()]


@pytest.mark.long
def test_longest_lane_starts_first_with_own_fixtures(tmp_path: Path) -> None:
    said = [what for _, what in run_lanes(tmp_path, "-n", "1")]
    kafka = ["begin", *["kafka_a"] * 4, *["kafka_b"] * 4, "end"]
    assert said == [*["long"] * 4, *kafka, *["short"] * 4]


@pytest.mark.long
def test_each_lane_has_one_process(tmp_path: Path) -> None:
    said = run_lanes(tmp_path, "-n", "2")
    by_lane: dict[str, set[str]] = {}
    for process, what in said:
        by_lane.setdefault("kafka" if what in ("begin", "end", "kafka_a", "kafka_b") else what, set()).add(process)
    assert {lane: len(processes) for lane, processes in by_lane.items()} == {"kafka": 1, "long": 1, "short": 1}
    assert by_lane["kafka"] != by_lane["long"]
    assert [what for _, what in said].count("begin") == 1


def test_one_process_alone_runs_in_the_usual_order(tmp_path: Path) -> None:
    said = [what for _, what in run_lanes(tmp_path, "-n", "0")]
    assert said == ["begin", *["kafka_a"] * 4, *["kafka_b"] * 4, *["long"] * 4, *["short"] * 4, "end"]


def test_run_records_the_time_of_its_modules(tmp_path: Path) -> None:
    run_lanes(tmp_path, "-n", "2", "--record-durations")
    text = (tmp_path / "durations.toml").read_text()
    recorded = {lane: [*modules] for lane, modules in tomllib.loads(text).items() if modules}
    assert recorded == {"kafka": ["test_kafka_a", "test_kafka_b"]}


def test_module_name_is_found_in_test_id() -> None:
    assert module_name("tests/unit/test_it.py::test_a[x::y]") == "test_it"
