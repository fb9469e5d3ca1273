"""Write the outcomes of other clients' test suites, as a plugin of their pytest; replace a fixture of aiokafka's.

`scripts/client_suites.py` copies it beside the suite's output, as it runs without kproxy, in the suite's environment.
"""

from __future__ import annotations

import os
from asyncio import AbstractEventLoop
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each outcome as it comes, so that those before a crash count."""
    if report.when == "call" or report.outcome != "passed":
        with (Path(os.environ["OUTPUT"]) / "outcomes").open("a") as outcomes:
            outcomes.write(f"{report.nodeid}\t{report.outcome}\n")


@pytest.fixture(scope="class")
def setup_test_class(request: pytest.FixtureRequest, loop: AbstractEventLoop) -> None:
    """Tell a class of tests where its broker is. aiokafka's own fixture starts one in Docker."""
    request.cls.loop = loop
    request.cls.hosts = [os.environ["BROKERS"]]
    request.cls.kafka_host, _, port = os.environ["BROKERS"].partition(":")
    request.cls.kafka_port = int(port)
    request.cls.kafka_version = os.environ["VERSION"]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """A fixture of a module comes before that of a conftest."""
    if isinstance(collector, pytest.Module):
        collector.obj.setup_test_class = setup_test_class
