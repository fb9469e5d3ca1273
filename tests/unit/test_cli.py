"""The commands: what they are called, how they end, and what they say."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kproxy import cli
from kproxy.cli import COMMANDS, main
from kproxy.errors import StartupError
from tests.support.dev import run_kproxy

# Names and flags are a public interface.
ETCD_FLAGS = "etcd-ca etcd-cert etcd-key etcd-server-name etcd-username etcd-password-file"
FLAGS = {
    "serve": f"config listen advertise ownership etcd prefix bootstrap table admin workers writer-group {ETCD_FLAGS}",
    "broker": "node-id listen advertise replication-listen data-dir etcd prefix lease-ttl replication-factor "
    f"{ETCD_FLAGS}",
    "dev": "listen brokers data-dir admin lease-ttl writer-group",
    "demo": "rows bootstrap etcd prefix data-dir report keep",
    "table": f"admin etcd prefix topic json watch {ETCD_FLAGS}",
    "pipeline": "",
    "own": "",
    "doctor": f"etcd prefix admin {ETCD_FLAGS}",
    "check-config": "config",
}


@pytest.mark.parametrize("name", FLAGS)
def test_each_command_has_its_flags_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert [flag for flag in FLAGS[name].split() if f"--{flag} " not in said and f"--{flag}\n" not in said] == []
    assert f"      kproxy {name}" in said or f"    kproxy {name}" in said


def test_the_list_of_commands_is_whole_and_loads_nothing_heavy() -> None:
    assert set(FLAGS) == set(COMMANDS)
    heavy = "grpc aiohttp kafka rich pyspark structlog asyncio google.protobuf"
    probe = (
        "import sys\nfrom kproxy.cli import main\nstatus = main(['--help'])\n"
        f"print(status, [name for name in {heavy.split()} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    for name in FLAGS:
        assert f"  {name} " in done.stdout


def test_an_unknown_command_or_flag_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert main(["dev", "--broker", "3"]) == 2
    said = capsys.readouterr().err
    assert "--brokers" in said
    assert "Traceback" not in said


def test_what_cannot_start_is_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StartupError("port 9092 is taken: give another --listen.")

    monkeypatch.setattr(cli.cli, "main", refuse)
    assert main(["dev"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "kproxy: port 9092 is taken: give another --listen.\n")


@pytest.mark.parametrize(
    ("arguments", "environ", "traceback_wanted"),
    [([], "", False), (["--debug"], "", True), ([], "1", True), ([], "0", False)],
)
def test_an_unexpected_error_is_one_line_unless_debug_is_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    environ: str,
    traceback_wanted: bool,
) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise ExceptionGroup("several", [ValueError("seven\nof nine")])

    monkeypatch.setattr(cli.cli, "main", break_down)
    monkeypatch.setenv("KPROXY_DEBUG", environ)
    assert main([*arguments, "dev"]) == 1
    said = capsys.readouterr().err
    assert ("Traceback" in said) == traceback_wanted
    assert "seven" in said
    if not traceback_wanted:
        assert said.startswith("kproxy: unexpected ValueError: seven of nine (")
        assert said.count("\n") == 1


def test_an_audit_that_breaks_down_does_not_say_by_its_status_that_records_are_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise ValueError("seven")

    monkeypatch.setattr("kproxy.pipeline.audit.job.run_audit_job", break_down)
    assert main(["pipeline", "audit", "--bootstrap", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("kproxy: unexpected ValueError: seven (")


def test_where_executors_archive_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["pipeline", "path", "--py-files", str(tmp_path / "file" / "below")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/file/below (Not a directory)" in said
    assert "name another directory" in said


@pytest.mark.parametrize("name", ["serve", "broker", "dev", "demo"])
def test_windows_gets_a_clear_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(cli.sys, "platform", "win32")
    required = ["--node-id", "1", "--data-dir", "x", "--etcd", "y"] if name == "broker" else []
    assert main([name, *required]) == 2
    assert capsys.readouterr().err == (
        f"kproxy: kproxy {name} runs on Linux and macOS: on Windows run it in WSL 2 (wsl --install).\n"
    )


def test_what_check_config_prints_is_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kproxy.toml"
    own = '[own]\nwriter_group = ["t=g"]\n'
    file.write_text(f'[ownership]\netcd = ["http://a:1", "http://b:2"]\n{own}[limits]\nmax_connections = 7\n')
    assert main(["check-config", "--config", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"# limits.max_connections in {file}" in said
    assert "# default" in said
    parsed = tomllib.loads(said)
    assert parsed["limits"]["max_connections"] == 7
    assert parsed["own"] == {"writer_group": ["t=g"]}
    assert parsed["ownership"]["etcd"] == ["http://a:1", "http://b:2"]
    # What it prints is itself a configuration, and the same one.
    file.write_text(said)
    assert main(["check-config", "--config", str(file)]) == 0
    assert tomllib.loads(capsys.readouterr().out) == parsed


def test_check_config_prints_a_static_table_as_it_is_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, table = tmp_path / "kproxy.toml", tmp_path / "owners.toml"
    owners = '[brokers]\n1 = "a:1"\n2 = "[::1]:2"\n[[topics]]\nname = "t"\nowners = [1, 2, 1]\n'
    table.write_text(owners)
    file.write_text(f'[ownership]\nownership = "static"\n{owners}')
    assert main(["check-config", "--config", str(file)]) == 0
    said = capsys.readouterr().out
    parsed = tomllib.loads(said)
    assert {key: parsed[key] for key in ("brokers", "topics")} == tomllib.loads(owners)
    file.write_text(said)
    assert main(["check-config", "--config", str(file)]) == 0
    assert tomllib.loads(capsys.readouterr().out) == parsed
    # In a file of its own it is shown too, but not said twice.
    file.write_text(f'[ownership]\nownership = "static"\ntable = "{table}"\n')
    assert main(["check-config", "--config", str(file)]) == 0
    said = capsys.readouterr().out
    assert "# owners = [1, 2, 1]" in said
    assert "brokers" not in tomllib.loads(said)
    file.write_text(said)
    assert main(["check-config", "--config", str(file)]) == 0
    assert tomllib.loads(capsys.readouterr().out) == tomllib.loads(said)
    table.write_text(owners.replace("[1, 2, 1]", "[1, 3]"))
    assert main(["check-config", "--config", str(file)]) == 2
    assert "broker 3" in capsys.readouterr().err


def test_check_config_refuses_what_serve_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text('[ownership]\netcd = "a:1"\n[limits]\nmax_conections = 7\n')
    assert main(["check-config", "--config", str(file)]) == 2
    assert "did you mean limits.max_connections?" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -P -m kproxy check-config"
    done = subprocess.run(
        ["bash", "-c", f"KPROXY_OWNERSHIP__ETCD=a:1 {command} | head -n 1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[listen]\n0\n"
    assert done.stderr == ""


def test_the_version_is_told() -> None:
    ended = run_kproxy("--version")
    assert (ended.status, ended.stdout.split()[0]) == (0, "kproxy,")
