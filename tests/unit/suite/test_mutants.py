"""Mutants are drawn by a seed, each is one change that parses, and they run in a copy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scripts.mutants import (
    REPOSITORY,
    SETS,
    Fault,
    Outcome,
    Runner,
    drawn_fault,
    modules_of,
    passes,
    patch_fault,
    stages_of,
    summary,
)
from scripts.mutation import Mutant, draw, mutants_of
from tests.support.rules import examples
from tests.support.waiting import wait_for

SOURCES = {path: (REPOSITORY / path).read_bytes() for path in modules_of("routing")}

# The mutants of each line of a function: the operator and the text that it writes.
CHANGES = {
    "if a < b: pass": {("comparison", "(a <= b)"), ("comparison", "(a >= b)"), ("condition negated", "(not a < b)")},
    "if a is b: pass": {("comparison", "(a is not b)")},
    "if not a: pass": {("not dropped", "a")},
    "while a: pass": {("condition negated", "(not a)")},
    "a and b": {("and/or", "(a or b)"), ("operand dropped", "a"), ("operand dropped", "b")},
    "a.f(b)": {("statement removed", "pass")},
    "await a.f(b)": {("statement removed", "pass")},
    "a.add(b)": {("statement removed", "pass"), ("method", "a.discard")},
    "log.info(f'{a}', min(a, b))": set(),
    "a.b = b": {("assignment removed", "pass")},
    "c = b": set(),
    "a = b": {("assignment removed", "pass")},
    "a.b += b": {("assignment removed", "pass"), ("arithmetic", "a.b -= b")},
    "del a[b]": {("statement removed", "pass")},
    "raise a(f'{b + 1}')": {("statement removed", "pass")},
    "assert a is not None": set(),
    "for _ in a: break": {("loop skipped", "()"), ("loop control", "continue"), ("loop control", "pass")},
    "for _ in a: continue": {("loop skipped", "()"), ("loop control", "break"), ("loop control", "pass")},
    "return": {("early return removed", "pass")},
    "return a": {("early return removed", "pass"), ("bare default returned", "return []")},
    "return []": {("early return removed", "pass")},
    "return min(a)": {
        ("early return removed", "pass"),
        ("bare default returned", "return []"),
        ("function", "max"),
    },
    "a.f(True)": {("statement removed", "pass"), ("constant", "(False)")},
    "a.f(3)": {("statement removed", "pass"), ("constant", "4"), ("constant", "2")},
    "a.f([a, b])": {("statement removed", "pass"), ("element dropped", "[a]"), ("element dropped", "[b]")},
    "a.f((a, b))": {("statement removed", "pass")},
    "if a in (a, b): pass": {
        ("comparison", "(a not in (a, b))"),
        ("element dropped", "(a,)"),
        ("element dropped", "(b,)"),
    },
    "a.f({a: b})": {("statement removed", "pass"), ("element dropped", "{}")},
    "a.f(a[:b])": {("statement removed", "pass"), ("slice", "a[:]")},
    "c: dict[int, int] = cast('int | None', a)": set(),
    "if TYPE_CHECKING: a.f(b)": set(),
    "'''A text of 3.'''": set(),
}


@pytest.mark.parametrize("line", CHANGES)
def test_line_has_the_listed_mutants(line: str) -> None:
    source = f"async def f(a, b: Literal[1]) -> list[int]:\n    {line}\n    pass\n".encode()
    found = mutants_of("f.py", source)
    assert {(each.operator, each.text) for each in found} == CHANGES[line]
    assert {each.line for each in found} <= {2}


@pytest.mark.parametrize("path", SOURCES)
def test_each_mutant_parses_and_differs_in_one_place(path: str) -> None:
    source = SOURCES[path]
    found = mutants_of(path, source)
    # Only a part of a large module's mutants, because parsing is slow.
    for mutant in found[:: 1 + len(found) // examples(30)]:
        mutated = mutant.apply(source)
        ast.parse(mutated)
        assert mutated.startswith(source[: mutant.start])
        assert mutated.endswith(source[mutant.end :])
        assert source[: mutant.start].count(b"\n") < mutant.line <= source[: mutant.end].count(b"\n") + 1


def test_same_seed_draws_the_same_mutants() -> None:
    drawn = draw(SOURCES, 12, 7)
    assert drawn == draw(dict(reversed(SOURCES.items())), 12, 7)
    assert len(drawn) == 12
    assert drawn != draw(SOURCES, 12, 8)
    assert draw(SOURCES, 4, 7) == drawn[:4]


def test_sets_have_each_module_once() -> None:
    files = {*(REPOSITORY / "kproxy").rglob("*.py"), *(REPOSITORY / "codec").rglob("*.py")}
    modules = [path for name in SETS for path in modules_of(name)]
    assert sorted(modules) == sorted(str(file.relative_to(REPOSITORY)) for file in files if file.stat().st_size)


def test_tests_that_import_a_module_come_first() -> None:
    near, rest, slow = stages_of("etcd", integration=True)["kproxy/etcd/client.py"]
    # Found by the name that the package gives the client.
    assert "tests/unit/ownership/test_lease_table_at_scale.py" in near
    assert "tests/unit/etcd/test_etcd_generate.py" in rest
    assert "tests/integration/etcd/test_etcd_client.py" in slow
    _, rest = stages_of("broker")["kproxy/broker/lease_txn.py"]
    assert "tests/property/test_replication_model.py" in rest, "by way of its model"
    rest = stages_of("claims")["kproxy/claims/service.py"][-1]
    assert "tests/property/test_worlds.py" in rest, "by way of the simulated proxy"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A module, and a command that fails if the module's result is not 3."""
    directory = tmp_path / "checkout"
    directory.mkdir()
    (directory / "module.py").write_text("def f() -> int:\n    return 3\n")
    return directory


COMMAND = (sys.executable, "-c", "import module; assert module.f() == 3")


async def outcomes_of(checkout: Path, faults: list[Fault], jobs: int = 2, timeout_s: float = 60.0) -> list[Outcome]:
    copies = checkout.parent / "copies"
    copies.mkdir()
    runner = Runner(checkout, copies, COMMAND, jobs)
    await runner.check()
    runner.timeout_s = timeout_s
    return await runner.run(faults, lambda outcome: None)


def change(checkout: Path, old: str, new: str) -> Fault:
    source = (checkout / "module.py").read_bytes()
    start = source.index(old.encode())
    return drawn_fault(Mutant("module.py", 2, start, start + len(old), f"{old} to {new}", new), source)


async def test_noticed_mutant_is_killed_and_unnoticed_survives(checkout: Path) -> None:
    # Same size, same second: stale bytecode would hide one behind the other.
    faults = [change(checkout, "3", new) for new in ("4", "3 ", "5", "3;", "6")]
    outcomes = await outcomes_of(checkout, faults, jobs=1)
    assert [bool(each.killed_by) for each in outcomes] == [True, False, True, False, True]
    assert (checkout / "module.py").read_text() == "def f() -> int:\n    return 3\n"
    assert not (checkout / "__pycache__").exists()
    said = summary(outcomes)
    assert "+    return 3;" in said
    assert "module.py: 3 of 5 killed\n3 of 5 killed (60%), 0 of them by time-out; 2 survived" in said
    assert not passes(outcomes)


async def test_fault_is_removed_before_the_next(checkout: Path) -> None:
    unused = b"def g() -> int:\n    return 3\n"
    (checkout / "unused.py").write_bytes(unused)
    unnoticed = drawn_fault(Mutant("unused.py", 2, 27, 28, "3 to 4", "4"), unused)
    outcomes = await outcomes_of(checkout, [change(checkout, "3", "4"), unnoticed], jobs=1)
    assert [bool(each.killed_by) for each in outcomes] == [True, False]


async def test_endless_mutant_is_killed_by_timeout(checkout: Path) -> None:
    endless = change(checkout, "return 3", "while True: pass")
    outcomes = await outcomes_of(checkout, [endless], timeout_s=2.0)
    assert outcomes[0].killed_by == "time-out after 2 s"
    assert "1 of 1 killed (100%), 1 of them by time-out" in summary(outcomes)
    assert passes(outcomes)


async def test_tests_that_fail_without_a_fault_judge_nothing(checkout: Path) -> None:
    (checkout / "module.py").write_text("def f() -> int:\n    return 4\n")
    with pytest.raises(ValueError, match=r"(?s)without a fault: tests failed with status 1.*AssertionError"):
        await outcomes_of(checkout, [])


async def test_survivors_diff_is_a_nameable_patch(checkout: Path) -> None:
    drawn = change(checkout, "3", "3 ")
    patch = checkout.parent / "named.diff"
    patch.write_text(drawn.diff)
    named = patch_fault(patch, checkout)
    assert named.paths == ["module.py"]
    outcomes = await outcomes_of(checkout, [named] + [change(checkout, "3", "4")] * 9, jobs=1)
    assert [bool(each.killed_by) for each in outcomes] == [False] + [True] * 9
    # For drawn faults nine in ten are enough.
    assert not passes(outcomes)
    assert passes([outcomes[0]._replace(fault=drawn), *outcomes[1:]])


def test_terminated_run_ends_its_tests(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = f"sh -c 'echo $$ > {pid_file}; exec sleep 600'"
    arguments = ["--mutants", "1", "--modules", "kproxy/routing/lanes.py", "--command", command]
    run = subprocess.Popen([sys.executable, "-m", "scripts.mutants", *arguments], cwd=REPOSITORY)
    try:
        wait_for(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        run.terminate()
        assert run.wait(60) == 143
        assert not psutil.pid_exists(int(pid_file.read_text()))
    finally:
        run.kill()
        run.wait()
