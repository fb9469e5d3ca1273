"""A job's flags decide where it runs; errors that would end Spark are reported before Spark starts."""

from __future__ import annotations

import socket

import pytest

from kproxy.cli import main
from kproxy.cli.pipeline import check_master, session_options
from kproxy.errors import StartupError
from tests.support.processes.ports import free_port


@pytest.mark.parametrize(
    "master", [None, "local", "local[*]", "local[2,3]", "yarn", "spark://a:7077,b:7077", "k8s://https://c"]
)
@pytest.mark.parametrize("memory", [None, "2g", "512M"])
def test_valid_spark_options_pass(master: str | None, memory: str | None) -> None:
    options = session_options("job", master, memory, ())
    assert (options.master, options.memory) == (master, memory)


@pytest.mark.parametrize(
    ("master", "memory", "said"),
    [
        ("foo", None, "--master foo is not a Spark master"),
        ("spark:7077", None, "--master spark:7077 is not a Spark master"),
        (None, "much", "--memory much is not a size"),
        (None, "512", "--memory 512 is not a size"),
    ],
)
def test_invalid_spark_options_are_named(master: str | None, memory: str | None, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        session_options("job", master, memory, ())


@pytest.mark.parametrize("job", [["audit"], ["ingest", "--from", "rate", "--topic", "t", "--checkpoint", "c"]])
def test_unreachable_master_is_named_before_spark_starts(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    master = f"spark://127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as kafka:
        bootstrap = f"127.0.0.1:{kafka.getsockname()[1]}"
        assert main(["pipeline", *job, "--bootstrap", bootstrap, "--master", master]) == 2

    said = capsys.readouterr().err
    assert said.startswith(
        f"kproxy: nothing answers at --master {master.removeprefix('spark://')} (Connection refused)"
    )
    assert said.count("\n") == 1


def test_one_of_several_masters_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as standby:
        masters = f"spark://127.0.0.1:{free_port()},127.0.0.1:{standby.getsockname()[1]}"
        check_master(session_options("job", masters, None, ()))
