"""Mutants are drawn by a seed, each is one change that parses, and they run in a copy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutants import (
    MODULES,
    REPOSITORY,
    SETS,
    Fault,
    Outcome,
    Runner,
    drawn_fault,
    limit_of,
    passes,
    patch_fault,
    summary,
)
from scripts.mutation import Mutant, diff, draw, mutants_of
from tests.support.rules import examples

SOURCES = {path: (REPOSITORY / path).read_bytes() for path in MODULES}

# What is changed by each line of a function, by operator and the text that comes in its place.
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


@pytest.mark.parametrize(
    "text",
    [
        '"""1 + 1"""',
        "class A(Enum):\n    B = 1",
        "class A:\n    __slots__ = ['a']",
        "class A:\n    def __repr__(self):\n        return a + b",
        "A: TypeAlias = dict[int, Literal[1]]",
        "A = dict[int, Literal[1]]",
        "@cache(1)\ndef f(): ...",
    ],
)
def test_code_without_effect_is_not_mutated(text: str) -> None:
    assert mutants_of("a.py", text.encode()) == []


@pytest.mark.parametrize("path", SOURCES)
def test_each_mutant_parses_and_differs_in_one_place(path: str) -> None:
    source = SOURCES[path]
    found = mutants_of(path, source)
    # Of a large module a part: parsing takes its time.
    for mutant in found[:: 1 + len(found) // examples(100)]:
        mutated = mutant.apply(source)
        ast.parse(mutated)
        assert mutated.startswith(source[: mutant.start])
        assert mutated.endswith(source[mutant.end :])
        assert source[: mutant.start].count(b"\n") < mutant.line <= source[: mutant.end].count(b"\n") + 1


def test_place_is_found_behind_multibyte_letters() -> None:
    source = "a = 'ä€', 3\n".encode()
    assert {each.apply(source).decode() for each in mutants_of("a.py", source) if each.operator == "constant"} == {
        "a = 'ä€', 4\n",
        "a = 'ä€', 2\n",
    }


def test_same_seed_draws_the_same_mutants() -> None:
    drawn = draw(SOURCES, 40, 7)
    assert drawn == draw(dict(reversed(SOURCES.items())), 40, 7)
    assert len(drawn) == 40
    assert drawn != draw(SOURCES, 40, 8)
    assert draw(SOURCES, 10, 7) == drawn[:10]


def test_mutants_differ_from_module_and_each_other() -> None:
    # `a` is left whichever operand is dropped, and nothing but the return is left out in the other module.
    sources = {"a.py": b"def f(a):\n    return a and a\n", "b.py": b"def f(a):\n    return a\n"}
    drawn = draw(sources, 1000, 1)
    mutated = [ast.dump(ast.parse(each.apply(sources[each.path]))) for each in drawn if each.path == "a.py"]
    assert len(mutated) == len(set(mutated)) == 3
    assert len(drawn) == 4


def test_every_module_is_drawn_from() -> None:
    sources = {f"{name}.py": b"def f(a):\n    return a + 1\n" for name in "abcdef"}
    assert {each.path for each in draw(sources, 20, 7)} == set(sources)


@pytest.mark.parametrize("name", SETS)
def test_named_modules_and_tests_exist(name: str) -> None:
    named = {*SETS[name], *(test for stages in SETS[name].values() for tests in stages for test in tests)}
    assert [path for path in named if not (REPOSITORY / path).is_file()] == []


def test_set_has_every_module_of_security() -> None:
    modules = {f"kproxy/security/{path.name}" for path in (REPOSITORY / "kproxy/security").glob("*.py")}
    assert modules - set(SETS["security"]) == {"kproxy/security/__init__.py"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A module, and a command that fails where it does not give 3."""
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
    # Alike in size and made within a second: stale bytecode would hide one behind the other.
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


async def test_stages_end_with_first_failure(checkout: Path) -> None:
    copies = checkout.parent / "copies"
    copies.mkdir()
    # The second one never ends with the first fault, and notices the second.
    second = (sys.executable, "-c", "import module\nwhile module.f() == 4: pass\nassert module.f() is not True")
    first = (sys.executable, "-c", "import module; assert module.f() != 4")
    runner = Runner(checkout, copies, COMMAND, 1, {"module.py": (first, second)})
    await runner.check()
    outcomes = await runner.run([change(checkout, "3", new) for new in ("4", "True", "5")], lambda _: None)
    assert [each.killed_by for each in outcomes] == ["tests failed with status 1"] * 2 + [""]


async def test_endless_mutant_is_killed_by_timeout(checkout: Path) -> None:
    endless = change(checkout, "return 3", "while True: pass")
    outcomes = await outcomes_of(checkout, [endless], timeout_s=2.0)
    assert outcomes[0].killed_by == "time-out after 2 s"
    assert "1 of 1 killed (100%), 1 of them by time-out" in summary(outcomes)
    assert passes(outcomes)


async def test_memory_hungry_mutant_is_killed_in_time(checkout: Path) -> None:
    outcomes = await outcomes_of(checkout, [change(checkout, "return 3", "return len(bytes(8 << 30)) and 3")])
    assert outcomes[0].killed_by == "tests failed with status 1"


async def test_address_space_without_memory_is_allowed(checkout: Path) -> None:
    # As etcd's runtime does: what is reserved has no memory behind it.
    reserve = "import mmap as m; m.mmap(-1, 64 << 30, m.MAP_PRIVATE, m.PROT_READ); return 3"
    outcomes = await outcomes_of(checkout, [change(checkout, "return 3", reserve)])
    assert outcomes[0].killed_by == ""


@pytest.mark.parametrize(
    ("baseline_s", "limit_s"), [(0.5, 30.0), (8.0, 80.0), (20.0, 120.0), (40.0, 120.0), (300.0, 900.0)]
)
def test_limit_follows_the_baseline(baseline_s: float, limit_s: float, tmp_path: Path) -> None:
    assert limit_of(baseline_s) == limit_s
    assert Runner(tmp_path, tmp_path, COMMAND, 1).timeout_s > 600.0


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
    # Nine in ten are enough for drawn ones.
    assert not passes(outcomes)
    assert passes([outcomes[0]._replace(fault=drawn), *outcomes[1:]])


def test_inapplicable_patch_is_no_mutant(checkout: Path) -> None:
    patch = checkout.parent / "named.diff"
    patch.write_text(change(checkout, "3", "4").diff)
    (checkout / "module.py").write_text("def f() -> int:\n    return 5\n")
    with pytest.raises(ValueError, match="does not apply"):
        patch_fault(patch, checkout)


def test_the_diff_of_a_real_mutant_applies() -> None:
    for mutant in draw(SOURCES, 10, 7):
        text = diff(mutant, SOURCES[mutant.path])
        checked = subprocess.run(
            ["git", "apply", "--check", "-"], input=text, cwd=REPOSITORY, capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stderr


@pytest.mark.long
def test_command_prints_and_accepts_its_seed() -> None:
    command = [sys.executable, "-m", "scripts.mutants", "--mutants", "1", "--command"]
    passing = subprocess.run([*command, "true"], cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert passing.returncode == 1
    seed = passing.stdout.partition("SEED=")[2].partition(":")[0]
    again = subprocess.run(
        [*command, "true", "--seed", seed], cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert again.stdout == passing.stdout
    failing = subprocess.run([*command, "false"], cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert failing.returncode == 2
