"""The demo exits 1 when something between Spark and the cluster loses, doubles or swaps a single record.

All tests share one cluster and one Spark. A relay makes the fault on the wire, so that neither the demo nor Spark nor
the cluster can know of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from rich.console import Console

from kproxy.config import Address
from kproxy.demo.run import DemoOptions, run_demo
from kproxy.dev.cluster import DevCluster
from kproxy.pipeline.progress import Report
from tests.pipeline.tampering import Record, Tamper, TamperingRelay, double_one, drop_one, swap_two
from tests.support.processes.dev import asyncios_own_loop, serving
from tests.support.processes.ports import free_port

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ROWS = 3_000
FAULTS = ("missing", "duplicated", "out of order", "altered", "keys in two partitions", "offsets not rising")
T = TypeVar("T")


class LoopThread:
    """An event loop beside the test's own thread, where `run_demo` runs another."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Course(NamedTuple):
    """The way from Spark through the relay, which may tamper, to a proxy of `etcd`'s cluster, all run by `beside`."""

    beside: LoopThread
    relay: TamperingRelay
    etcd: str


@pytest.fixture(scope="module")
def beside() -> Iterator[LoopThread]:
    with asyncios_own_loop():
        thread = LoopThread()
        yield thread
        thread.close()


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory, spark: Any, beside: LoopThread) -> Iterator[Course]:
    with contextlib.ExitStack() as stack:
        cluster = DevCluster(tmp_path_factory.mktemp("cluster"))
        stack.callback(lambda: beside.run(cluster.stop()))
        beside.run(cluster.start())
        relay = TamperingRelay()
        beside.run(relay.start())
        stack.callback(lambda: beside.run(relay.stop()))
        # A second proxy on the same etcd, which sends its clients to the relay.
        # The proxy's ready line will name the relay and not its own port.
        relay.upstream_port = free_port()
        serve = ["serve", "--listen", f"127.0.0.1:{relay.upstream_port}", "--advertise", relay.address]
        serve += ["--etcd", cluster.etcd]
        stack.enter_context(serving(serve, tmp_path_factory.mktemp("proxy") / "stderr"))
        yield Course(beside, relay, cluster.etcd)


# The next test judges a fault on the wire in the same run of the demo, and more; tests/unit/demo has each fault.
@pytest.mark.parametrize(
    ("change", "wrong", "read"),
    [
        pytest.param(None, {}, ROWS, id="no fault", marks=pytest.mark.long),
        pytest.param(drop_one, {"missing": 1}, ROWS - 1, id="one dropped", marks=pytest.mark.long),
        pytest.param(double_one, {"duplicated": 1}, ROWS + 1, id="one doubled", marks=pytest.mark.long),
        pytest.param(swap_two, {"out of order": 1}, ROWS, id="two of one key swapped", marks=pytest.mark.long),
    ],
)
def test_one_fault_on_the_wire_ends_with_1(
    course: Course,
    tmp_path: Path,
    change: Callable[[list[Record]], list[Record] | None] | None,
    wrong: dict[str, int],
    read: int,
) -> None:
    course.relay.tamper = tamper = None if change is None else Tamper(change)
    requests_before = course.relay.produce_requests
    options = DemoOptions(
        rows=ROWS, bootstrap=course.relay.address, etcd=(course.etcd,), data_dir=tmp_path, audit=False
    )
    shown = io.StringIO()
    report = Report(progress=Console(file=io.StringIO()))

    status = run_demo(options, report=report, output=Console(file=shown, width=120))

    table = _rows_of(shown.getvalue())
    assert {name: int(table[name][0]) for name in FAULTS} == {name: wrong.get(name, 0) for name in FAULTS}
    assert (table["rows sent"][0], table["rows read"][0]) == (f"{ROWS:,}", f"{read:,}")
    assert status == (1 if wrong else 0)
    by_owner = [int(cells[0].replace(",", "")) for name, cells in table.items() if "on broker" in name]
    assert sum(by_owner) == read
    assert len(by_owner) > 1, "one broker owned all: nothing had to be split"
    assert course.relay.produce_requests > requests_before, "the rows went round the relay"
    if tamper is not None:
        assert tamper.victims, "no batch was fit for the fault"
        (fault,) = wrong
        assert any(f"n={n}" in table[fault][1] for n in tamper.victims)
    # The files of a bad run stay for inspection, those of a good run do not.
    assert bool(list(tmp_path.iterdir())) == bool(wrong)


def test_fault_beside_an_owner_kill_is_found(
    beside: LoopThread, spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The relay swaps records in the first micro-batch, before the kill; resent batches are unchanged.
    relay = TamperingRelay(keep_producers=True)
    relay.tamper = tamper = Tamper(swap_two)
    relay.upstream_port = free_port()
    beside.run(relay.start())

    class RelayedCluster(DevCluster):
        """A cluster whose proxy sends clients to the relay."""

        def _proxy_arguments(self, listen: Address, admin: Address | None) -> list[str]:
            behind_relay = f"127.0.0.1:{relay.upstream_port}"
            arguments = super()._proxy_arguments(listen, admin)
            return [*arguments, "--listen", behind_relay, "--advertise", relay.address]

    monkeypatch.setattr("kproxy.demo.run.DevCluster", RelayedCluster)
    said, shown = io.StringIO(), io.StringIO()
    report = Report(progress=Console(file=said))
    try:
        options = DemoOptions(rows=ROWS, kill_owner=True, data_dir=tmp_path, audit=False)
        status = run_demo(options, report=report, output=Console(file=shown, width=120))
    finally:
        beside.run(relay.stop())

    table = _rows_of(shown.getvalue())
    assert {name: int(table[name][0]) for name in FAULTS} == dict.fromkeys(FAULTS, 0) | {"out of order": 1}
    assert any(f"n={n}" in table["out of order"][1] for n in tamper.victims)
    assert (table["rows sent"][0], table["rows read"][0]) == (f"{ROWS:,}", f"{ROWS:,}")
    assert status == 1
    killed = table["broker killed"][0]
    assert f"kill -9 of broker {killed}, owner of 4 of the 12 partitions" in said.getvalue()
    assert table[f"rows on broker {killed}"][1].endswith(", 4 before the kill")
    assert all(table[name][0].endswith(" s") for name in ("without an owner", "broker back"))


def _rows_of(table: str) -> dict[str, tuple[str, str]]:
    """Map each row's first cell to the other two."""
    rows = re.findall(r"^│ (.+?) +│ +(.*?) │ (.*?) *│$", table, re.MULTILINE)
    return {name: (count, detail) for name, count, detail in rows}
