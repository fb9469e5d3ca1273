"""Run lanes of tests in parallel in several processes: a pytest plugin, in force with `pytest -n 4`.

A lane is a group of tests that one process runs in their usual order. Each module is a lane. Modules that share an
expensive fixture are one lane: Spark's session, Kafka's brokers, the sites of claims, the cluster of `kproxy dev`. So
are those that start a Spark of their own: only one of them may run at a time. A free process takes the next lane.
Long lanes go first, so that no process is left alone with one at the end. Lanes and times come from
tests/support/durations.toml, which `make test ARGS=--record-durations` writes. (`--dist loadgroup` would have marks
instead of a table, but xdist 3.8 does not find them with pytest 9.2.)

A fixture that starts processes ends with the lane that asked for it: idle brokers cost as much as a test.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

DURATIONS = Path(__file__).with_name("durations.toml")
# Session fixtures by the lane that their modules share; the first that a module asks for decides. Each of the last
# three starts five to eight processes, which takes a second of CPU for each.
SHARED_LANES = {
    "spark": "spark",
    "real_kafka": "kafka",
    "own_site": "own",
    "owned_topics": "own",
    "dev_cluster": "dev",
}
# Modules with the mark `spark` and without that fixture.
OWN_SPARK = "own_spark"
# The table's name for modules that are a lane each; shorter ones are not recorded.
ALONE = "alone"
LEAST_RECORDED_S = 20.0
# A process may start them again for another lane, so they share no etcd prefix with earlier ones.
END_WITH_LANE = ("spark", "real_kafka", "etcd_cluster", "owned_topics", "own_site", "dev_cluster")
# Spark uses much CPU; tests that depend on time must not run beside it.
NICENESS = 5

# By lane, seconds by module.
Durations = Mapping[str, Mapping[str, float]]
_HEADER = "# Seconds by module, by lane: `make test ARGS=--record-durations` writes it. Only their order matters.\n"
_LANE = "lane"
_ALIVE = pytest.StashKey["list[tuple[pytest.FixtureDef[Any], pytest.FixtureRequest]]"]()


def module_name(nodeid: str) -> str:
    """The name of a test's module, without folders: files move more often than they are renamed."""
    return Path(nodeid.partition("::")[0]).stem


def modules_with_tests() -> list[str]:
    """The names of all modules with tests."""
    return sorted(file.stem for file in DURATIONS.parents[1].rglob("test_*.py"))


def recorded_durations() -> Durations:
    """The recorded table; empty if nothing has been recorded."""
    return tomllib.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def table_text(before: Durations, measured: Durations, existing: Iterable[str]) -> str:
    """The table with the measured times, without modules that no longer exist or are short."""
    merged = {module: (lane, seconds) for lane, modules in before.items() for module, seconds in modules.items()}
    for lane, modules in measured.items():
        for module, seconds in modules.items():
            recorded_lane, _ = merged.get(module, (ALONE, 0.0))
            # A long test may need the recorded lane, and not be in this run.
            merged[module] = (lane if recorded_lane == ALONE else recorded_lane, seconds)
    text = _HEADER
    for lane in dict.fromkeys((*SHARED_LANES.values(), OWN_SPARK, ALONE)):
        text += f"\n[{lane}]\n"
        for module in sorted({*existing}):
            recorded_lane, seconds = merged.get(module, (ALONE, 0.0))
            if recorded_lane == lane and (lane != ALONE or seconds >= LEAST_RECORDED_S):
                text += f"{module} = {seconds:.1f}\n"
    return text


def needed_lane(items: Iterable[pytest.Item]) -> str:
    """The lane that a module needs, by the fixtures and marks of its tests."""
    asked = {name for item in items for name in getattr(item, "fixturenames", ())}
    if "spark" not in asked and "real_kafka" not in asked and any(map(_has_spark_mark, items)):
        return OWN_SPARK
    return next((lane for fixture, lane in SHARED_LANES.items() if fixture in asked), ALONE)


def _has_spark_mark(item: pytest.Item) -> bool:
    return item.get_closest_marker("spark") is not None


def needed_lanes(items: Iterable[pytest.Item]) -> dict[str, str]:
    """The needed lanes by module."""
    modules: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        modules[module_name(item.nodeid)].append(item)
    return {module: needed_lane(tests) for module, tests in modules.items()}


class Lanes:
    """The lanes of tests, and the lengths of lanes."""

    def __init__(self, durations: Durations) -> None:
        self._shared = {module: lane for lane, modules in durations.items() for module in modules if lane != ALONE}
        self._lengths = {**durations.get(ALONE, {})}
        self._lengths |= {lane: sum(modules.values()) for lane, modules in durations.items() if lane != ALONE}

    def lane(self, nodeid: str) -> str:
        """The name of a test's lane."""
        module = module_name(nodeid)
        return self._shared.get(module, module)

    def length_s(self, nodeid: str) -> float:
        """The recorded length of its lane; 0 if it is not known."""
        return self._lengths.get(self.lane(nodeid), 0.0)


@functools.cache
def lanes() -> Lanes:
    return Lanes(recorded_durations())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write the times of modules to {DURATIONS.name}")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ALIVE] = []
    if config.getoption("record_durations") and not _is_worker():
        config.pluginmanager.register(Recorder())
    # Lanes come in the order of the collection, not by their number of tests.
    config.option.loadscopereorder = False


def _is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import all tests before they are collected; each process starts at a different module.

    pytest rewrites a module's assertions at its first import, which takes 12 s of CPU for all of them, and keeps the
    result in a file. So each process rewrites a part, and reads what the others have rewritten.
    """
    gc.disable()
    given: Mapping[str, Any] = getattr(session.config, "workerinput", {})
    if not given or session.config.args != session.config.getini("testpaths"):
        return
    files = sorted(DURATIONS.parents[1].rglob("test_*.py"))
    first = len(files) * int(given["workerid"].removeprefix("gw")) // given["workercount"]
    for file in files[first:] + files[:first]:
        # Modules that fail to import are reported when they are collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(file.relative_to(DURATIONS.parents[2]).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Collect without the garbage collector, which finds nothing among millions of objects that stay.

    It takes a fifth of the collection's time; frozen, they cost it nothing afterwards.
    """
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _is_worker():
        items.sort(key=lambda item: -lanes().length_s(item.nodeid))
    if config.getoption("record_durations"):
        needed = needed_lanes(items)
        for item in items:
            item.user_properties.append((_LANE, needed[module_name(item.nodeid)]))


# The hook exists only if xdist is installed.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    from xdist.scheduler import LoadScopeScheduling

    class ByLane(LoadScopeScheduling):  # type: ignore[misc, no-any-unimported]
        def _split_scope(self, nodeid: str) -> str:
            return lanes().lane(nodeid)

    return ByLane(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_worker() and lanes().lane(item.nodeid) in (SHARED_LANES["spark"], OWN_SPARK):
        # Processes that it starts inherit this.
        os.nice(max(0, NICENESS - os.nice(0)))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    value = yield
    if fixturedef.argname in END_WITH_LANE and fixturedef.scope == "session":
        request.config.stash[_ALIVE].append((fixturedef, request))
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Any:
    outcome = yield
    if _is_worker() and nextitem is not None and lanes().lane(item.nodeid) != lanes().lane(nextitem.nodeid):
        alive = item.config.stash[_ALIVE]
        while alive:
            fixture, request = alive.pop()
            # As pytest itself ends a fixture that is requested with another parameter. Dependent fixtures end first.
            fixture.finish(request)
    return outcome


class Recorder:
    """Adds up the times of each module's tests, and writes the table at the end."""

    def __init__(self) -> None:
        self._measured: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        lane = dict(report.user_properties)[_LANE]
        self._measured[str(lane)][module_name(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        DURATIONS.write_text(table_text(recorded_durations(), self._measured, modules_with_tests()))
