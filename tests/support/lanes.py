"""Two lanes of tests, each in a process of its own, side by side: a pytest plugin, in force with `pytest -n 2`.

Most of tests/integration waits, for leases above all; everything else computes, or has Java compute. So the one lane is
tests/integration, less the few files there that need Java, and the other lane is all the rest, at a lower priority:
what hangs on time is not to find the machine busy. Within a lane tests run in the order in which they run without
lanes, and share what they share; the lanes share nothing. Only the second starts Kafka's brokers, and Spark, which
cannot look for its jars twice at a time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

INTEGRATION = "tests/integration/"
WITH_JAVA = (
    "test_kafka_source.py",
    "test_own_spark.py",
    "test_own_unfenced.py",
    "test_several_proxies.py",
    "test_transactions.py",
)
NICENESS = 10


def lane(nodeid: str) -> str:
    """The name of a test's lane."""
    file = nodeid.partition("::")[0]
    return "integration" if file.startswith(INTEGRATION) and not file.endswith(WITH_JAVA) else "rest"


def needs_java(item: pytest.Item) -> bool:
    """Whether a test is marked so, or asks for Kafka's brokers."""
    marked = any(item.get_closest_marker(name) for name in ("java", "spark"))
    return marked or "real_kafka" in getattr(item, "fixturenames", ())


# There is such a hook only where xdist is installed.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):  # type: ignore[misc, no-any-unimported]
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)

    return Lanes(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and lane(item.nodeid) == "rest" and os.nice(0) < NICENESS:
        # What it starts inherits this.
        os.nice(NICENESS - os.nice(0))
