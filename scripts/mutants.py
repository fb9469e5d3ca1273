"""Put small faults into modules, one at a time, and see which of them tests notice: `make mutants MUTANTS=60 SEED=7`.

The modules and the tests are those of a set: `SET=security`, by default routing.

A seed draws the faults (scripts/mutation.py); without one a new seed is drawn and printed. `--patch` also runs faults
that are unified diffs; a survivor is printed as such a diff.

Each fault is tried in a copy of the tree: the checkout is only read. A fault is killed if the tests fail or exceed
their time limit, and survives if they pass. Exit status: 0 if at least PASS_SHARE of all faults and every patch are
killed, 1 otherwise, 2 if nothing could be judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from scripts.mutation import Mutant, diff, draw

REPOSITORY: Final = Path(__file__).parents[1]
MODULES: Final = tuple(
    f"kproxy/routing/{name}.py"
    for name in (
        "client_end",
        "fanout",
        "identity",
        "in_flight",
        "lanes",
        "merge",
        "open_exchanges",
        "outcomes",
        "refused",
        "retry",
        "routes",
        "split",
    )
)
FOLDER: Final = "tests/unit/routing"
TESTS: Final = (
    *(f"{FOLDER}/test_{name}.py" for name in ("identity", "lanes", "routes", "retry", "refused", "topology")),
    *(f"{FOLDER}/test_fanout_{name}.py" for name in ("answers", "clients", "ends", "lanes", "retries", "topology")),
)


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


_GATE: Final = _tests("unit/proxy", "admission_gate")
_SASL: Final = (*_tests("unit/security", "sasl"), *_GATE, *_tests("property", "sasl_machine"))
_ACL_FILTER: Final = _tests("unit/proxy", "acl_filter_refusals", "acl_filter")
_ADMISSION: Final = _tests("integration/proxy", "admission")
_CARRIED: Final = _tests("integration/security", "carried_identity")
_ACCEPTOR: Final = _tests("integration/security", "tls_listener", "half_open", "several_listeners", "proxy_header")
_IN_ETCD: Final = _tests("integration/security", "access_in_etcd")
_BY_URL: Final = _tests("integration/security", "tokens_by_url")
# The tests of each module: the fast ones, and those that are run where these notice nothing.
SECURITY: Final[Mapping[str, Sequence[Sequence[str]]]] = {
    "kproxy/proxy/access.py": (_ACL_FILTER, _ADMISSION),
    "kproxy/proxy/admission.py": (_GATE, _ADMISSION),
    "kproxy/proxy/acl_filter.py": (_ACL_FILTER, _ADMISSION),
    "kproxy/security/acls.py": ((*_tests("unit/security", "acls"), *_ACL_FILTER), _IN_ETCD),
    "kproxy/security/broker_auth.py": (_tests("unit/security", "broker_auth"), _CARRIED),
    "kproxy/security/tls_acceptor.py": (
        _tests("unit/security", "tls_acceptor", "handshake_pace", "listeners"),
        _ACCEPTOR,
    ),
    "kproxy/security/events.py": (
        _tests("unit/security", "security_events"),
        _tests("integration/security", "security_stream"),
    ),
    "kproxy/security/files.py": (_tests("unit/security", "security_files", "key_server"), _IN_ETCD),
    "kproxy/security/in_etcd.py": (_tests("unit/security", "in_etcd"), _IN_ETCD),
    "kproxy/security/key_server.py": (_tests("unit/security", "key_server"), _BY_URL),
    "kproxy/security/mechanisms.py": (_SASL, _ADMISSION),
    "kproxy/security/principals.py": (
        _tests("unit/security", "principals", "security_files"),
        _tests("integration/security", "listener_identity"),
    ),
    "kproxy/security/proxy_protocol.py": (
        (*_tests("property", "proxy_protocol"), *_tests("unit/security", "tls_acceptor")),
        _tests("integration/security", "proxy_header"),
    ),
    "kproxy/security/quotas.py": (
        (*_tests("unit/security", "quotas"), *_tests("property", "quota_shares_model")),
        _tests("integration/proxy", "quotas_enforced"),
    ),
    "kproxy/security/reloading.py": (_tests("unit/security", "reloading"), _ACCEPTOR),
    "kproxy/security/sasl.py": (_SASL, (*_ADMISSION, *_CARRIED)),
    "kproxy/security/sasl_client.py": (_tests("unit/security", "sasl_client", "broker_auth"), _CARRIED),
    "kproxy/security/tls_errors.py": (_tests("unit/security", "tls_errors", "listeners"), _ACCEPTOR),
    "kproxy/security/tokens.py": (_tests("unit/security", "sasl", "security_files", "key_server"), _BY_URL),
    "kproxy/security/users.py": (
        _tests("unit/security", "security_files", "sasl"),
        (*_tests("unit/commands", "config_sasl"), *_IN_ETCD),
    ),
}
# Of each set: the tests of each module, in stages; a fault that one stage notices is not tried with the next.
SETS: Final[Mapping[str, Mapping[str, Sequence[Sequence[str]]]]] = {
    "routing": dict.fromkeys(MODULES, (TESTS,)),
    "security": SECURITY,
}
MUTANTS: Final = 60
PASS_SHARE: Final = 0.9
# The time limit of the tests without a fault.
BASELINE_TIMEOUT_S: Final = 1800.0
# The time limit for one mutant, as a multiple of the time that the tests take without a fault: TIMEOUT_FACTOR while
# that is at most MAX_TIMEOUT_S, else LONG_TIMEOUT_FACTOR; at least MIN_TIMEOUT_S.
MAX_TIMEOUT_S: Final = 120.0
MIN_TIMEOUT_S: Final = 30.0
TIMEOUT_FACTOR: Final = 10.0
LONG_TIMEOUT_FACTOR: Final = 3.0
# An endless loop may allocate all memory. The limit is on data: etcd and Java reserve more address space than they use.
MAX_MEMORY_KIB: Final = 4 << 20
NOT_COPIED: Final = (".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "dist", "build")


class Fault(NamedTuple):
    """A drawn mutant or a patch: `put` puts it into a copy of the tree; `paths` are the files that it changes."""

    name: str
    diff: str
    paths: Sequence[str]
    put: Callable[[Path], None]
    is_patch: bool


class Outcome(NamedTuple):
    """`killed_by` is empty for a survivor."""

    fault: Fault
    killed_by: str


def drawn_fault(mutant: Mutant, source: bytes) -> Fault:
    def put(tree: Path) -> None:
        _write(tree / mutant.path, mutant.apply(source))

    return Fault(str(mutant), diff(mutant, source), [mutant.path], put, is_patch=False)


def patch_fault(patch: Path, repository: Path) -> Fault:
    """Raises ValueError if the patch does not apply to the checkout."""
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
    """Bytecode is identified by its source's size and seconds: two mutants may have both in common."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def limit_of(baseline_s: float) -> float:
    """The time limit for one mutant, in seconds, where the tests take that long without a fault."""
    return max(MIN_TIMEOUT_S, min(MAX_TIMEOUT_S, TIMEOUT_FACTOR * baseline_s), LONG_TIMEOUT_FACTOR * baseline_s)


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
        """Run the tests without a fault; their time sets the limit for mutants. Raises ValueError if they fail."""
        tree = self._copy("unchanged")
        began = time.monotonic()
        killed_by = await self._run(tree, self._command)
        if killed_by:
            output = (tree.parent / "unchanged.out").read_text()
            raise ValueError(f"without a fault: {killed_by}\n{output[-4000:]}")
        self.timeout_s = limit_of(time.monotonic() - began)

    async def run(self, faults: Sequence[Fault], report: Callable[[Outcome], None]) -> list[Outcome]:
        """The outcome of every fault, in order; `report` gets each when it is known."""
        waiting = iter(enumerate(faults))
        outcomes: dict[int, Outcome] = {}

        async def work(tree: Path) -> None:
            for place, fault in waiting:
                fault.put(tree)
                try:
                    outcomes[place] = Outcome(fault, await self._judge(tree, fault))
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

    async def _judge(self, tree: Path, fault: Fault) -> str:
        killed_by = ""
        for path in fault.paths:
            for command in self._stages.get(path, [self._command]):
                killed_by = killed_by or await self._run(tree, command)
        return killed_by

    async def _run(self, tree: Path, command: Sequence[str]) -> str:
        """How the tests failed; empty if they passed."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "codec")])}
        bounded = ("sh", "-c", f'ulimit -d {MAX_MEMORY_KIB}; exec "$@"', "sh", *command)
        with (tree.parent / f"{tree.name}.out").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *bounded, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                async with asyncio.timeout(self.timeout_s):
                    status = await process.wait()
            except TimeoutError:
                return f"time-out after {self.timeout_s:.0f} s"
            finally:
                # All processes that the tests started are in their session.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return f"tests failed with status {status}" if status else ""


def summary(outcomes: Sequence[Outcome]) -> str:
    """Survivors with their diffs, and the number killed: for each file, and for all."""
    survivors = [each.fault for each in outcomes if not each.killed_by]
    timed_out = sum(each.killed_by.startswith("time-out") for each in outcomes)
    killed = len(outcomes) - len(survivors)
    parts = [f"survived: {fault.name}\n{fault.diff}\n" for fault in survivors]
    for path in sorted({path for each in outcomes for path in each.fault.paths}):
        judged = [each for each in outcomes if path in each.fault.paths]
        parts.append(f"{path}: {sum(bool(each.killed_by) for each in judged)} of {len(judged)} killed\n")
    parts.append(
        f"{killed} of {len(outcomes)} killed ({killed / len(outcomes):.0%}), {timed_out} of them by time-out; "
        f"{len(survivors)} survived\n"
    )
    return "".join(parts)


def passes(outcomes: Sequence[Outcome]) -> bool:
    """Whether enough faults are killed, and every patch."""
    survivors = [each.fault for each in outcomes if not each.killed_by]
    killed = len(outcomes) - len(survivors)
    return killed >= PASS_SHARE * len(outcomes) and not any(fault.is_patch for fault in survivors)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


async def judge(
    faults: Sequence[Fault], command: Sequence[str], jobs: int, stages: Mapping[str, Sequence[Sequence[str]]]
) -> list[Outcome]:
    """Every fault's outcome, and a line for each as it comes. Raises ValueError if the tests fail without a fault."""
    with tempfile.TemporaryDirectory(prefix="kproxy-mutants-") as directory:
        runner = Runner(REPOSITORY, Path(directory), command, jobs, stages)
        await runner.check()
        return await runner.run(
            faults, lambda outcome: _say(f"{outcome.killed_by or 'SURVIVED'}: {outcome.fault.name}\n")
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.mutants", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--mutants", type=int, default=MUTANTS, metavar="N", help="how many are drawn; 0 for patches alone")
    add("--seed", type=int, help="of the draw; a new one where none is given")
    add("--set", choices=SETS, default="routing", help="of modules, and of the tests that pytest runs")
    add("--modules", nargs="+", metavar="FILE", help="others, from the repository's root")
    add("--tests", nargs="+", metavar="FILE", help="others, all at once")
    add("--command", help="what runs in a copy of the tree in place of pytest, and fails where it notices a fault")
    add("--patch", nargs="+", default=(), type=Path, metavar="FILE", help="unified diffs, tried too")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="how many are tried side by side")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    chosen = SETS[arguments.set]
    every = dict.fromkeys(test for stages in chosen.values() for tests in stages for test in tests)
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command = shlex.split(arguments.command) if arguments.command else [*pytest, *(arguments.tests or every)]
    stages = {path: [[*pytest, *tests] for tests in of_path] for path, of_path in chosen.items()}
    if arguments.command or arguments.tests:
        stages = {}
    sources = {path: (REPOSITORY / path).read_bytes() for path in arguments.modules or chosen}
    drawn = draw(sources, arguments.mutants, seed)
    _say(f"SEED={seed}: {len(drawn)} mutants of {len(sources)} modules, {len(arguments.patch)} patches\n")
    try:
        faults = [patch_fault(patch, REPOSITORY) for patch in arguments.patch]
        faults += [drawn_fault(mutant, sources[mutant.path]) for mutant in drawn]
        if not faults:
            raise ValueError("there is nothing to run")
        outcomes = asyncio.run(judge(faults, command, arguments.jobs, stages))
    except ValueError as error:
        sys.stderr.write(f"mutants: {error}\n")
        return 2
    _say("\n" + summary(outcomes) + f"SEED={seed}\n")
    return 0 if passes(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
