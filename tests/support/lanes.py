"""Lanes of tests, run side by side by as many processes as there are: a pytest plugin, in force with `pytest -n 2`.

Most of tests/integration waits, for leases above all; what uses Java computes. Neither keeps two processors busy, so
they run beside each other. A process takes one lane after another, as it becomes free, in the order of the collection.
Within a lane tests run in the order in which they run without lanes, and share what they share; processes share none.
All that starts Spark is in one lane, as Spark cannot look for its jars twice at a time. It is the longest one, and at a
lower priority: what hangs on time is not to find the machine busy.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

INTEGRATION = "tests/integration/test_"
WITH_SPARK = (
    "tests/clients/test_produce_versions.py::test_spark",
    "tests/clients/test_rolled_cluster.py",
    "tests/clients/test_rolling_restart.py",
    "tests/integration/test_own_spark.py",
    "tests/pipeline/",
)
WITH_KAFKA = (
    "tests/clients/",
    "tests/contract/",
    "tests/integration/test_doctor.py",
    "tests/integration/test_kafka_source.py",
    "tests/integration/test_own_unfenced.py",
    "tests/integration/test_several_proxies.py",
    "tests/integration/test_stale_views.py",
    "tests/integration/test_transactions.py",
    "tests/packaging/",
    "tests/unit/test_java_truststore.py",
)
# By the initials of files, and so that none of them is much longer than others.
INTEGRATION_LANES = ("abcd", "efghijkl", "mno", "pq", "rstuvwxyz")
NICENESS = 5


def lane(nodeid: str) -> str:
    """The name of a test's lane."""
    if nodeid.startswith(WITH_SPARK):
        return "spark"
    if nodeid.startswith(WITH_KAFKA):
        return "kafka"
    if nodeid.startswith(INTEGRATION):
        initial = nodeid.removeprefix(INTEGRATION)[0]
        return f"integration {next(each for each in INTEGRATION_LANES if initial in each)}"
    return "rest"


def needs_spark(item: pytest.Item) -> bool:
    """Whether a test is marked so, or asks for the session."""
    return item.get_closest_marker("spark") is not None or "spark_driver" in getattr(item, "fixturenames", ())


def needs_java(item: pytest.Item) -> bool:
    """Whether a test is marked so, or asks for Kafka's brokers."""
    return item.get_closest_marker("java") is not None or "real_kafka" in getattr(item, "fixturenames", ())


# There is such a hook only where xdist is installed.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):  # type: ignore[misc, no-any-unimported]
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    # The lanes with the most tests are not those that take longest.
    config.option.loadscopereorder = False
    return Lanes(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and lane(item.nodeid) == "spark" and os.nice(0) < NICENESS:
        # What it starts inherits this.
        os.nice(NICENESS - os.nice(0))
