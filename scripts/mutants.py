"""Put small faults into a package, one at a time, and see which of them its tests notice: `make mutants SET=trail`.

A seed draws the faults (scripts/mutation.py); without one a new seed is drawn and printed. `--patch` also runs faults
that are unified diffs; a survivor is printed as such a diff. A module's tests come in stages: those that import it,
then the other unit and property tests of its package, and with `--integration` the slow ones. The first stage that
fails decides.

Each fault is tried in a copy of the tree: the checkout is only read. A fault is killed if the tests fail or exceed
their time limit, and survives if they pass. `--record` writes all tests that kill each fault. Exit status: 0 if at
least PASS_SHARE of the faults of each package and every patch are killed, 1 otherwise, 2 if nothing could be judged.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import functools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from asyncio import Task
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from scripts.mutation import Mutant, diff, draw

REPOSITORY: Final = Path(__file__).parents[1]
# The folders of tests below tests/unit and tests/integration, where they have another name than the package.
FOLDERS: Final = {
    **dict.fromkeys(("cli", "dev", "kproxy", "observe", "runtime"), ("commands",)),
    "config": ("commands", "security"),
    "demo": ("demo", "pipeline"),
    "fleet": ("routing", "fleet"),
    "ownership": ("ownership", "etcd", "kafka"),
    "plain": ("proxy",),
    "workers": ("proxy", "commands"),
}
SETS: Final = ("codec", "kproxy", *sorted(file.parent.name for file in (REPOSITORY / "kproxy").glob("*/__init__.py")))
MUTANTS: Final = 60
PASS_SHARE: Final = 0.85
# The time limit of the tests without a fault.
BASELINE_TIMEOUT_S: Final = 1800.0
# The time limit for one mutant: a multiple of the time that the tests take without a fault, and at least this.
TIMEOUT_FACTOR: Final = 5.0
MIN_TIMEOUT_S: Final = 30.0
# An endless loop may allocate all memory. The limit is on data: etcd and Java reserve more address space than they use.
MAX_MEMORY_KIB: Final = 4 << 20
NOT_COPIED: Final = (".git", ".venv*", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "dist", "build")
# A line of pytest's summary.
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def modules_of(package: str) -> list[str]:
    """Return the package's files that have a statement of their own."""
    folder = REPOSITORY / (package if package in ("codec", "kproxy") else f"kproxy/{package}")
    found = folder.glob("*.py") if package == "kproxy" else folder.rglob("*.py")
    return sorted(str(file.relative_to(REPOSITORY)) for file in found if file.stat().st_size)


def stages_of(package: str, *, integration: bool = False) -> dict[str, list[list[str]]]:
    """Return the tests of each module: first those that import it and little else."""
    folders = FOLDERS.get(package, (package,))
    units = {str(file.relative_to(REPOSITORY)): imports_of(file) for file in _tests("unit/*", "property")}
    mine = [path for path in units if path.split("/")[2] in folders]
    slow = [str(file.relative_to(REPOSITORY)) for each in folders for file in _tests(f"integration/{each}", each)]
    # A module that its siblings use is tested where they are.
    modules = {dotted(path) for path in modules_of(package)}
    properties = (path for path in units if path.startswith("tests/property/"))
    mine += [path for path in properties if not modules.isdisjoint(_by_models(units[path]))]
    stages = {}
    for path in modules_of(package):
        near = sorted((test for test in units if dotted(path) in units[test]), key=lambda test: len(units[test]))
        rest = [test for test in mine if test not in near]
        stages[path] = [stage for stage in (near, rest, slow if integration else []) if stage]
    return stages


def _tests(*folders: str) -> list[Path]:
    return [file for folder in folders for file in sorted(REPOSITORY.glob(f"tests/{folder}/test_*.py"))]


def dotted(path: str) -> str:
    """Return the name that a module is imported by."""
    return path.removeprefix("codec/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def imports_of(file: Path) -> frozenset[str]:
    """Return a file's imports, by dotted names; a package's name for a thing counts as the module that defines it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            home = REPOSITORY / node.module.replace(".", "/") / "__init__.py"
            names = {alias.name for alias in node.names}
            found |= {node.module, *(f"{node.module}.{name}" for name in names)}
            if home.exists() and home != file:
                found |= {each.rpartition(".")[0] for each in imports_of(home) if each.rpartition(".")[2] in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


def _by_models(names: frozenset[str]) -> frozenset[str]:
    """Return these imports, and those of the models and simulations among them."""
    own = (name for name in names if name.startswith(("tests.support.models.", "tests.simulation.")))
    files = (REPOSITORY / f"{name.replace('.', '/')}.py" for name in own)
    more = names.union(*(imports_of(file) for file in files if file.exists()))
    return names if more == names else _by_models(more)


class Fault(NamedTuple):
    """A drawn mutant or a patch: `put` puts it into a copy of the tree; `paths` are the files that it changes."""

    name: str
    diff: str
    paths: Sequence[str]
    put: Callable[[Path], None]
    is_patch: bool


class Outcome(NamedTuple):
    """The result of a fault. `killed_by` is empty for a survivor; `tests` are those that failed, if pytest ran them."""

    fault: Fault
    killed_by: str
    tests: Sequence[str] = ()


def drawn_fault(mutant: Mutant, source: bytes) -> Fault:
    def put(tree: Path) -> None:
        _write(tree / mutant.path, mutant.apply(source))

    return Fault(str(mutant), diff(mutant, source), [mutant.path], put, is_patch=False)


def patch_fault(patch: Path, repository: Path) -> Fault:
    """Return the fault of a patch. Raise ValueError if the patch does not apply to the checkout."""
    patch = patch.resolve()
    try:
        _git_apply(patch, repository, "--check")
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{patch} does not apply: {error.stderr.strip()}") from error
    lines = _git_apply(patch, repository, "--numstat").splitlines()
    paths = [line.split("\t")[2] for line in lines]

    def put(tree: Path) -> None:
        _git_apply(patch, tree)
        for path in paths:
            _forget_bytecode(tree / path)

    return Fault(patch.name, patch.read_text(), paths, put, is_patch=True)


def _git_apply(patch: Path, tree: Path, *flags: str) -> str:
    # The copy is not a repository, and may lie in one.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *flags, str(patch)]
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    return ran.stdout


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _forget_bytecode(path)


def _forget_bytecode(path: Path) -> None:
    """Remove the bytecode: it is identified by its source's size and seconds, which two mutants may share."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


class Runner:
    """Runs the tests in copies of a tree, one copy for each job.

    `command` runs all of them. `stages` has other commands by the file that has a fault: the first that fails decides.
    """

    def __init__(
        self,
        repository: Path,
        directory: Path,
        command: Sequence[str],
        jobs: int,
        stages: Mapping[str, Sequence[Sequence[str]]] = MappingProxyType({}),
    ) -> None:
        self._repository = repository
        self._directory = directory
        self._command = command
        self._stages = stages
        self._jobs = jobs
        self.timeout_s = BASELINE_TIMEOUT_S

    async def check(self) -> None:
        """Run the tests without a fault; their time sets the limit for mutants. Raise ValueError if they fail."""
        tree = self._copy("unchanged")
        began = time.monotonic()
        killed_by, _ = await self._run(tree, self._command)
        if killed_by:
            output = (tree.parent / "unchanged.out").read_text()
            raise ValueError(f"without a fault: {killed_by}\n{output[-4000:]}")
        self.timeout_s = max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * (time.monotonic() - began))

    async def run(self, faults: Sequence[Fault], report: Callable[[Outcome], None]) -> list[Outcome]:
        """Return the outcome of every fault, in order; `report` gets each when it is known."""
        waiting = iter(enumerate(faults))
        outcomes: dict[int, Outcome] = {}

        async def work(tree: Path) -> None:
            for place, fault in waiting:
                fault.put(tree)
                try:
                    outcomes[place] = await self._judge(tree, fault)
                finally:
                    for path in fault.paths:
                        self._restore(tree, path)
                report(outcomes[place])

        async with asyncio.TaskGroup() as group:
            for number in range(min(self._jobs, len(faults))):
                group.create_task(work(self._copy(str(number))))
        return [outcomes[place] for place in range(len(faults))]

    def _copy(self, name: str) -> Path:
        tree = self._directory / name
        unchanged = self._directory / "unchanged"
        # Modules that ran once have their bytecode there.
        source = unchanged if unchanged.exists() else self._repository
        shutil.copytree(source, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        return tree

    def _restore(self, tree: Path, path: str) -> None:
        source = self._repository / path
        if source.exists():
            _write(tree / path, source.read_bytes())
        else:
            (tree / path).unlink(missing_ok=True)

    async def _judge(self, tree: Path, fault: Fault) -> Outcome:
        for path in fault.paths:
            for command in self._stages.get(path, [self._command]):
                killed_by, tests = await self._run(tree, command)
                if killed_by:
                    return Outcome(fault, killed_by, tests)
        return Outcome(fault, "")

    async def _run(self, tree: Path, command: Sequence[str]) -> tuple[str, Sequence[str]]:
        """Return how the tests failed, empty if they passed, and which."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "codec")])}
        bounded = ("sh", "-c", f'ulimit -d {MAX_MEMORY_KIB}; exec "$@"', "sh", *command)
        said = tree.parent / f"{tree.name}.out"
        with said.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *bounded, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                async with asyncio.timeout(self.timeout_s):
                    status = await process.wait()
            except TimeoutError:
                return f"time-out after {self.timeout_s:.0f} s", ()
            finally:
                # All processes that the tests started are in their session.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if not status:
            return "", ()
        return f"tests failed with status {status}", _FAILED.findall(said.read_text(errors="replace"))


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return survivors with diffs, the number killed for each file and for all, and the files of tests that killed."""
    survivors = [each.fault for each in outcomes if not each.killed_by]
    timed_out = sum(each.killed_by.startswith("time-out") for each in outcomes)
    killed = len(outcomes) - len(survivors)
    parts = [f"survived: {fault.name}\n{fault.diff}\n" for fault in survivors]
    for path in sorted({path for each in outcomes for path in each.fault.paths}):
        judged = [each for each in outcomes if path in each.fault.paths]
        parts.append(f"{path}: {sum(bool(each.killed_by) for each in judged)} of {len(judged)} killed\n")
    killers = [{test.partition("::")[0] for test in each.tests} for each in outcomes]
    alone = Counter(file for files in killers for file in files if len(files) == 1)
    for file, count in Counter(file for files in killers for file in files).most_common():
        parts.append(f"{file} failed {count} times, {alone[file]} alone\n")
    parts.append(
        f"{killed} of {len(outcomes)} killed ({killed / len(outcomes):.0%}), {timed_out} of them by time-out; "
        f"{len(survivors)} survived\n"
    )
    return "".join(parts)


def passes(outcomes: Sequence[Outcome]) -> bool:
    """Return whether enough faults are killed, and every patch."""
    survivors = [each.fault for each in outcomes if not each.killed_by]
    killed = len(outcomes) - len(survivors)
    return killed >= PASS_SHARE * len(outcomes) and not any(fault.is_patch for fault in survivors)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(outcome: Outcome, record: Path | None) -> None:
    _say(f"{outcome.killed_by or 'SURVIVED'}: {outcome.fault.name} {' '.join(outcome.tests[:1])}\n")
    if record is not None:
        line = {"diff": outcome.fault.diff, "killed_by": outcome.killed_by, "tests": list(outcome.tests)}
        with record.open("a") as file:
            file.write(json.dumps(line) + "\n")


async def judge(
    faults: Sequence[Fault],
    command: Sequence[str],
    stages: Mapping[str, Sequence[Sequence[str]]],
    jobs: int,
    record: Path | None,
) -> list[Outcome]:
    """Return every fault's outcome; print a line for each. Raise ValueError if the tests fail without a fault."""
    # As Ctrl-C does. An exception could come between the start of a process and the code that ends it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, cast(Task[Any], asyncio.current_task()).cancel)
    with tempfile.TemporaryDirectory(prefix="kproxy-mutants-") as directory:
        runner = Runner(REPOSITORY, Path(directory), command, jobs, stages)
        await runner.check()
        return await runner.run(faults, lambda outcome: _report(outcome, record))


def run_set(name: str, arguments: argparse.Namespace, seed: int) -> list[Outcome]:
    """Judge one package. Raise ValueError if its tests fail without a fault, and if there is nothing to run."""
    of_modules = stages_of(name, integration=arguments.integration)
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    pytest += ["--tb=no"] if arguments.record else ["-x"]
    every = dict.fromkeys(test for stages in of_modules.values() for tests in stages for test in tests)
    command = shlex.split(arguments.command) if arguments.command else [*pytest, *(arguments.tests or every)]
    stages = {path: [[*pytest, *tests] for tests in of_path] for path, of_path in of_modules.items()}
    if arguments.command or arguments.tests:
        stages = {}
    sources = {path: (REPOSITORY / path).read_bytes() for path in arguments.modules or of_modules}
    drawn = draw(sources, arguments.mutants, seed)
    _say(f"SET={name} SEED={seed}: {len(drawn)} mutants of {len(sources)} modules, {len(arguments.patch)} patches\n")
    faults = [patch_fault(patch, REPOSITORY) for patch in arguments.patch]
    faults += [drawn_fault(mutant, sources[mutant.path]) for mutant in drawn]
    if not faults:
        raise ValueError("there is nothing to run")
    return asyncio.run(judge(faults, command, stages, arguments.jobs, arguments.record))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--mutants", type=int, default=MUTANTS, metavar="N", help="how many of each set; 0 for patches alone")
    add("--seed", type=int, help="of the draw; a new one where none is given")
    add("--set", nargs="+", choices=SETS, default=["routing"], help="packages of kproxy, and the codec")
    add("--integration", action="store_true", help="run the integration tests of the package too")
    add("--record", type=Path, metavar="FILE", help="add a line of JSON for each fault, with all tests that kill it")
    add("--modules", nargs="+", metavar="FILE", help="others, from the repository's root")
    add("--tests", nargs="+", metavar="FILE", help="others, all at once")
    add("--command", help="what runs in a copy of the tree in place of pytest, and fails where it notices a fault")
    add("--patch", nargs="+", default=(), type=Path, metavar="FILE", help="unified diffs, tried too")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="how many are tried side by side")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    outcomes: dict[str, list[Outcome]] = {}
    try:
        for name in arguments.set:
            outcomes[name] = run_set(name, arguments, seed)
            _say(f"\n{summary(outcomes[name])}")
    except ValueError as error:
        sys.stderr.write(f"mutants: {error}\n")
        return 2
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    for name, judged in outcomes.items():
        _say(f"{name:10} {len(judged):4} drawn {sum(bool(each.killed_by) for each in judged):4} killed\n")
    _say(f"SEED={seed}\n")
    return 0 if all(map(passes, outcomes.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
