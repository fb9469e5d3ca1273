"""The commands: their names, their exit status, and their output."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kproxy import cli
from kproxy.broker.config import BrokerConfig
from kproxy.cli import COMMANDS, doctor_checks, main
from kproxy.config import load_settings
from kproxy.demo.run import DemoOptions
from kproxy.errors import StartupError
from tests.support.processes.dev import run_kproxy

ROOT = Path(__file__).parents[3]
# Names and flags are a public interface.
ETCD_FLAGS = "etcd-ca etcd-cert etcd-key etcd-server-name etcd-username etcd-password-file"
FLAGS = {
    "serve": "config",  # Also every flag in docs/configuration.md.
    "broker": "node-id listen advertise replication-listen admin data-dir etcd prefix lease-ttl replication-factor "
    "tls-cert tls-key tls-client-ca tls-client-auth tls-client-crl "
    "replication-tls-cert replication-tls-key replication-tls-ca "
    f"{ETCD_FLAGS}",
    "dev": "listen brokers data-dir admin lease-ttl writer-group",
    "demo": "rows bootstrap etcd prefix data-dir report keep",
    "table": f"admin etcd prefix topic json watch {ETCD_FLAGS}",
    "top": "admin view order search once",
    "pipeline": "",
    "own": "",
    "user": "",
    "acl": "",
    "doctor": f"bootstrap topic no-write etcd prefix admin json {ETCD_FLAGS}",
    "check-config": "config json",
    "completion": "help",
}
OWN_FLAGS = "admin etcd prefix etcd-ca etcd-password-file"
FLAGS_OF_OWN = {
    "own list": f"group json {OWN_FLAGS}",
    "own claim": f"all bootstrap client-id {OWN_FLAGS}",
    "own free": f"all json {OWN_FLAGS}",
    "own watch": f"group json {OWN_FLAGS}",
}


@pytest.mark.parametrize(("name", "flags"), [*FLAGS.items(), *FLAGS_OF_OWN.items()])
def test_each_command_has_its_flags_and_an_example(name: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert [flag for flag in flags.split() if f"--{flag} " not in said and f"--{flag}\n" not in said] == []
    assert f"      kproxy {name}" in said or f"    kproxy {name}" in said


def test_command_list_is_complete_and_loads_little() -> None:
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


def test_unknown_command_or_flag_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert main(["dev", "--broker", "3"]) == 2
    said = capsys.readouterr().err
    assert "--brokers" in said
    assert "Traceback" not in said


def test_startup_error_is_one_sentence_and_status_2(
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
def test_unexpected_error_is_one_line_without_debug(
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


def test_audit_crash_status_differs_from_lost_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down(*_: object, **__: object) -> None:
        raise ValueError("seven")

    monkeypatch.setattr("kproxy.pipeline.audit.run.run_audit_job", break_down)
    assert main(["pipeline", "audit", "--bootstrap", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("kproxy: unexpected ValueError: seven (")


def test_unwritable_executor_archive_place_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["pipeline", "path", "--py-files", str(tmp_path / "file" / "below")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/file/below (Not a directory)" in said
    assert "name another directory" in said


# Commands that need an address, the flag that names it, and the variable that replaces the flag.
INGEST = ["pipeline", "ingest", "--from", "csv:in/", "--topic", "t", "--checkpoint", "c"]
ADMIN, BOOTSTRAP = ("--admin", "KPROXY_ADMIN"), ("--bootstrap", "KPROXY_BOOTSTRAP")
ASKING = {
    "table": (["table"], ADMIN),
    "top": (["top"], ADMIN),
    "own list": (["own", "list"], ADMIN),
    "own watch": (["own", "watch"], ADMIN),
    "own free": (["own", "free", "g", "a"], ADMIN),
    "own claim": (["own", "claim", "g", "a"], BOOTSTRAP),
    "doctor, a page": (["doctor"], ADMIN),
    "doctor, Kafka": (["doctor"], BOOTSTRAP),
    "pipeline ingest": (INGEST, BOOTSTRAP),
    "pipeline audit": (["pipeline", "audit"], BOOTSTRAP),
}
# No server listens on these addresses.
BY_FLAG, BY_VARIABLE = "127.0.0.1:1", "127.0.0.1:2"


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that cannot connect; return the addresses in its error."""
    for _, variable in (ADMIN, BOOTSTRAP):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("kproxy.pipeline.audit.run.PATIENCE_S", 0.2)

    def run(arguments: Sequence[str], **environ: str) -> str:
        with monkeypatch.context() as patched:
            for name, value in environ.items():
                patched.setenv(name, value)
            assert main(arguments) in (1, 2)
        captured = capsys.readouterr()
        assert "Usage" not in captured.err, captured.err
        return captured.out + captured.err

    return run


@pytest.mark.parametrize("name", ASKING)
def test_address_flag_precedes_its_variable(asks: Callable[..., str], name: str) -> None:
    arguments, (flag, variable) = ASKING[name]
    assert f"{BY_FLAG}" in asks([*arguments, flag, BY_FLAG])
    assert f"{BY_VARIABLE}" in asks(arguments, **{variable: BY_VARIABLE})
    said = asks([*arguments, flag, BY_FLAG], **{variable: BY_VARIABLE})
    assert BY_FLAG in said
    assert BY_VARIABLE not in said
    # Each file is named where it is invalid.
    assert f"{variable}: 'nowhere' has no port" in asks(arguments, **{variable: "nowhere"})
    assert f"{flag}: 'nowhere' has no port" in asks([*arguments, flag, "nowhere"], **{variable: BY_VARIABLE})


@pytest.mark.parametrize("name", ["table", "own list", "own watch", "own free"])
def test_etcd_flag_precedes_page_variable(asks: Callable[..., str], name: str) -> None:
    arguments, _ = ASKING[name]
    said = asks([*arguments, "--etcd", "ftp://x"], KPROXY_ADMIN=BY_VARIABLE)
    assert "'ftp://x'" in said
    assert BY_VARIABLE not in said
    assert "give one of them" in asks([*arguments, "--etcd", "ftp://x", "--admin", BY_FLAG])


def test_doctor_prefers_flags_to_variables(asks: Callable[..., str]) -> None:
    environ = {"KPROXY_ADMIN": BY_VARIABLE, "KPROXY_BOOTSTRAP": "127.0.0.1:3"}
    said = asks(["doctor"], **environ)
    assert BY_VARIABLE in said
    assert "127.0.0.1:3" in said
    # A command that asks an admin page has nothing to do with records.
    said = asks(["doctor", "--admin", BY_FLAG], **environ)
    assert said.count("FAIL") == 1
    assert BY_FLAG in said


@pytest.mark.parametrize("name", sorted({" ".join(arguments[:2]) for arguments, _ in ASKING.values()}))
def test_help_uses_the_same_words_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = dict(asked for arguments, asked in ASKING.values() if " ".join(arguments[:2]) == name)
    assert main([*name.split(), "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for flag, variable in flags.items():
        default = {"KPROXY_ADMIN": "127.0.0.1:9644", "KPROXY_BOOTSTRAP": "127.0.0.1:9092"}[variable]
        assert f"{flag} H:P" in said
        if name != "doctor":
            assert f"[${variable}, else {default}]" in said
        assert variable in said
    assert "--proxy" not in said


def test_claim_is_made_through_any_of_several_proxies(asks: Callable[..., str]) -> None:
    said = asks(["own", "claim", "g", "a"], KPROXY_BOOTSTRAP=f"{BY_FLAG},{BY_VARIABLE}")
    assert f"{BY_FLAG} cannot be reached" in said
    assert f"{BY_VARIABLE} cannot be reached" in said


def test_demo_writes_only_to_the_flagged_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[DemoOptions] = []
    monkeypatch.setattr("kproxy.demo.run.run_demo", lambda options: run.append(options) or 0)
    monkeypatch.setenv("KPROXY_BOOTSTRAP", BY_VARIABLE)
    assert main(["demo"]) == 0
    assert main(["demo", "--bootstrap", BY_FLAG]) == 0
    assert [options.bootstrap for options in run] == [None, BY_FLAG]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_command_environment_is_not_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    monkeypatch.setenv("KPROXY_OWNERSHIP__ETCD", "http://a:1")
    assert main(["check-config", *flags]) == 0
    without = capsys.readouterr().out
    monkeypatch.setenv("KPROXY_ADMIN", BY_VARIABLE)
    monkeypatch.setenv("KPROXY_BOOTSTRAP", BY_VARIABLE)
    assert main(["check-config", *flags]) == 0
    assert capsys.readouterr().out == without


@pytest.mark.parametrize(("flags", "isr_lag_s"), [([], 10.0), (["--isr-lag", "2.5"], 2.5)])
def test_broker_takes_the_replica_lag_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], isr_lag_s: float
) -> None:
    told: list[BrokerConfig] = []

    async def run_broker(config: BrokerConfig) -> None:
        told.append(config)

    monkeypatch.setattr("kproxy.broker.server.run_broker", run_broker)
    assert main(["broker", "--node-id", "1", "--data-dir", "x", "--etcd", "http://a:1", *flags]) == 0
    assert [config.isr_lag_s for config in told] == [isr_lag_s]
    assert main(["broker", "--help"]) == 0
    (option,) = re.findall(r"--isr-lag SECONDS.*?\[(.*?)\]", capsys.readouterr().out, re.DOTALL)
    assert "default: 10.0;" in option


@pytest.mark.parametrize("name", ["serve", "broker", "dev", "demo"])
def test_windows_gets_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(cli.sys, "platform", "win32")
    required = ["--node-id", "1", "--data-dir", "x", "--etcd", "y"] if name == "broker" else []
    assert main([name, *required]) == 2
    assert capsys.readouterr().err == (
        f"kproxy: kproxy {name} runs on Linux and macOS: on Windows run it in WSL 2 (wsl --install).\n"
    )


def test_check_config_refuses_unwritable_trail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, at = tmp_path / "kproxy.toml", tmp_path / "file" / "trail"
    config = f'[ownership]\netcd = "http://a:1"\n[audit]\nsink = "json:{at}"\n'
    file.write_text(config)
    assert main(["check-config", "--config", str(file)]) == 0
    assert not at.parent.exists()
    at.parent.write_text("")
    assert main(["check-config", "--config", str(file)]) == 2
    assert f"{at} is not writable: it would be created in {at.parent}" in capsys.readouterr().err


def test_check_config_prints_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    # The output is a valid configuration, and equal to the input.
    file.write_text(said)
    assert main(["check-config", "--config", str(file)]) == 0
    assert tomllib.loads(capsys.readouterr().out) == parsed


def test_check_config_prints_the_effective_static_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    # Tables in a file of their own are shown too, but not reported twice.
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


def test_check_config_prints_json_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, table = tmp_path / "kproxy.toml", tmp_path / "owners.toml"
    table.write_text('[brokers]\n1 = "a:1"\n[[topics]]\nname = "t"\nowners = [1, 1]\n')
    file.write_text(f'[ownership]\nownership = "static"\netcd = ["http://a:1"]\ntable = "{table}"\n')
    monkeypatch.setenv("KPROXY_ETCD__USERNAME", "me")
    monkeypatch.setenv("KPROXY_ETCD__PASSWORD", "hunter2")
    assert main(["check-config", "--config", str(file), "--json"]) == 0
    said = capsys.readouterr().out
    told = json.loads(said)
    assert (set(told), told["ok"], told["problem"]) == (
        {"ok", "problem", "warnings", "settings", "owners", "listeners", "acls", "quotas"},
        True,
        None,
    )
    assert set(told["settings"]) == set(load_settings(environ={}))
    expected = {
        "listen.workers": (1, "set", "default"),
        "ownership.etcd": (["http://a:1"], "set", f"ownership.etcd in {file}"),
        "etcd.username": ("me", "set", "KPROXY_ETCD__USERNAME"),
        "etcd.password": (None, "not_shown", "KPROXY_ETCD__PASSWORD"),
        "listen.admin": (None, "not_set", "default"),
        "ownership.refresh_s": (30.0, "not_used", "default"),
    }
    found = {path: told["settings"][path] for path in expected}
    assert {path: tuple(each[key] for key in ("value", "state", "source")) for path, each in found.items()} == expected
    assert told["owners"] == {"brokers": {"1": "a:1"}, "topics": [{"name": "t", "owners": [1, 1]}]}
    assert "hunter2" not in said
    # Both commands refuse the same configurations.
    file.write_text("[limits]\nmax_conections = 7\n")
    assert main(["check-config", "--config", str(file), "--json"]) == 2
    captured = capsys.readouterr()
    refused = json.loads(captured.out)
    assert (refused["ok"], refused["settings"], refused["owners"]) == (False, {}, None)
    assert captured.err == f"kproxy: {refused['problem']}\n"
    assert "did you mean limits.max_connections?" in refused["problem"]


def test_every_check_of_doctor_is_documented() -> None:
    source = inspect.getsource(doctor_checks)
    checks = re.findall(r'"((?:etcd|proxy|kafka|replication)\.\w+)"', source)
    documented = re.findall(r"^\| `(\w+\.\w+)` \|", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    assert sorted(set(checks)) == sorted(documented)


def test_closed_output_pipe_is_no_error() -> None:
    command = f"{sys.executable} -P -m kproxy check-config"
    done = subprocess.run(
        ["bash", "-c", f"KPROXY_OWNERSHIP__ETCD=a:1 {command} | head -n 1; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[listen]\n0\n"
    assert done.stderr == ""


def test_version_is_printed() -> None:
    ended = run_kproxy("--version")
    assert (ended.status, ended.stdout.split()[0]) == (0, "kproxy,")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(shell: str) -> None:
    script = run_kproxy("completion", shell)
    assert (script.status, script.stderr) == (0, "")
    assert "_KPROXY_COMPLETE" in script.stdout

    asked = {"_KPROXY_COMPLETE": f"{shell}_complete", "COMP_WORDS": "kproxy serve --dr"}
    asked["COMP_CWORD"] = "--dr" if shell == "fish" else "2"
    assert "--drain-delay" in run_kproxy(environ=asked).stdout
