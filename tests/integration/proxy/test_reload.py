"""SIGHUP: the configuration is read again while clients are served, taken whole or not at all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kproxy.trail.rows import Begin, End, Range
from kproxy_codec.api_keys import FETCH
from kproxy_codec.error_codes import NONE, TOPIC_AUTHORIZATION_FAILED
from tests.support.audit.audit_trails import rows_in_files
from tests.support.brokers.scripted_upstream import PATIENCE_S, answers_everything
from tests.support.clients.raw_client import RawClient, batch, fetch_frame, produce_frame
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import beside, counted, port_of, served
from tests.support.security.tls_files import Signer, client_context
from tests.support.waiting import eventually

RELOADED, REFUSED = "configuration reloaded", "configuration not reloaded"
ACLS = '[[acls]]\nprincipal = "User:*"\noperations = ["{operation}"]\ntopics = ["t"]\n'
WAYS = ("write", "read")


@pytest.fixture(autouse=True)
def log_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPROXY_LOG_FORMAT", "json")


def lines(process: KproxyProcess, event: str) -> list[dict[str, Any]]:
    """The lines of its log with this event."""
    told = [json.loads(line) for line in process.stderr().splitlines() if line.startswith("{")]
    return [line for line in told if line["event"] == event]


async def reload(process: KproxyProcess, event: str = RELOADED) -> dict[str, Any]:
    """Send SIGHUP; return the line that tells of its end."""
    before = len(lines(process, event))
    process.signal(signal.SIGHUP)
    await eventually(lambda: len(lines(process, event)) > before, process.stderr)
    return lines(process, event)[-1]


class Config:
    """The file of `static_proxy`, with rooms that are replaced."""

    def __init__(self, directory: Path, rooms: str = "") -> None:
        self._file = directory / "kproxy.toml"
        self._before = self._file.read_text().removesuffix(rooms)

    def write(self, rooms: str, **replaced: str) -> None:
        text = self._before
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        self._file.write_text(text + rooms)


async def code(client: RawClient, number: int = 0) -> int:
    client.send(produce_frame(records=batch(number)))
    return (await client.answer()).codes["t", 0]


async def test_lower_limits_hold_for_new_clients(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything) as s:
        config = Config(tmp_path)
        old = [await s.client() for _ in range(3)]
        assert [await code(client) for client in old] == [NONE] * 3
        config.write("", probe_timeout_s="max_connections = 3\nmax_connections_per_address = 2\nprobe_timeout_s")
        told = await reload(s.process)
        assert told["changed"] == ["limits.max_connections", "limits.max_connections_per_address"]
        assert await (await s.client()).is_closed()
        assert [await code(client, 1) for client in old] == [NONE] * 3
        for client in old:
            client.close()

        async def is_served() -> bool:
            client = await RawClient().connect(port_of(s.process))
            s.clients.append(client)
            client.send(produce_frame())
            try:
                return (await client.answer()).codes["t", 0] == NONE
            except (asyncio.IncompleteReadError, ConnectionError):
                return False

        # Both the total and the number of an address: three clients have gone, two of them at most are replaced.
        await eventually(is_served)
        assert await is_served()
        assert not await is_served()
        samples = await s.samples()
        assert samples["kproxy_client_connections_limit", ()] == 3
        config.write("")
        assert len((await reload(s.process))["changed"]) == 2
        assert await is_served()


async def test_quota_throttles_after_reload(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything) as s:
        Config(tmp_path).write("[[quotas]]\nrequests_per_s = 0.5\n")
        await reload(s.process)
        client = await s.client()
        client.send(produce_frame(), produce_frame())
        throttled = [(await client.answer()).fields["throttle_time_ms"] for _ in range(2)]
        assert throttled[1] > 0
        assert (await s.samples())["kproxy_throttled_requests_total", ()] >= 1


async def test_rules_hold_for_next_request(tmp_path: Path) -> None:
    """For plain writes, and for reads that the compiled path repeats."""

    rooms = "".join(ACLS.format(operation=operation) for operation in WAYS)
    async with served(tmp_path, answers_everything, rooms=rooms) as s:
        config, writer, reader = Config(tmp_path, rooms), await s.client(), await s.client()

        async def codes() -> tuple[int, int]:
            reader.send(fetch_frame())
            read = (await reader.answer(FETCH, 12)).codes["t", 0]
            return await code(writer), read

        for _ in range(3):
            assert await codes() == (NONE, NONE)
        for operation, expected in (
            ("write", (NONE, TOPIC_AUTHORIZATION_FAILED)),
            ("read", (TOPIC_AUTHORIZATION_FAILED, NONE)),
        ):
            config.write(ACLS.format(operation=operation))
            assert (await reload(s.process))["changed"] == ["acls"]
            for _ in range(3):
                assert await codes() == expected


async def test_log_level_changes_both_ways(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything) as s:
        config = Config(tmp_path)
        config.write('[log]\nlevel = "error"\n')
        s.process.signal(signal.SIGHUP)
        await eventually(lambda: counted(s.process.admin, 'kproxy_config_reloads_total{outcome="done"}') == 1)
        assert not lines(s.process, RELOADED)
        config.write("")
        await reload(s.process)


@pytest.mark.parametrize("level", ["info", "error"])
async def test_flag_wins_over_log_level_of_file(tmp_path: Path, level: str) -> None:
    file = tmp_path / "kproxy.toml"
    file.write_text('[ownership]\nownership = "static"\n[brokers]\n1 = "127.0.0.1:1"\n[log]\nlevel = "error"\n')
    arguments = ["--log-level", level, "serve", "--config", file, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    async with beside(serving(arguments, tmp_path / "stderr")) as process:
        process.signal(signal.SIGHUP)
        await eventually(lambda: counted(process.admin, 'kproxy_config_reloads_total{outcome="done"}') == 1)
        assert bool(lines(process, RELOADED)) is (level == "info")


async def test_audit_goes_on_in_another_sink(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one", "two")]
    sinks = [f'[audit]\nsink = "json:{place}"\ninterval_s = 0.5\n' for place in places]
    async with served(tmp_path, answers_everything) as s:
        config, client = Config(tmp_path), await s.client()
        for number, sink in enumerate([sinks[0], sinks[1], "", sinks[0]]):
            config.write(sink)
            assert "audit.sink" in (await reload(s.process))["changed"]
            assert await code(client, number) == NONE
        s.process.signal(signal.SIGTERM)
        await s.ended(PATIENCE_S)
    first, second = ([*rows_in_files(place)] for place in places)
    for rows, trails in ((first, 2), (second, 1)):
        assert [sum(isinstance(row, kind) for row in rows) for kind in (Begin, Range, End)] == [trails] * 3
        assert len({row.incarnation for row in rows}) == trails


async def test_listener_takes_other_certificate_and_authority(tmp_path: Path) -> None:
    ours, others = Signer(tmp_path / "ours"), Signer(tmp_path / "others")
    pairs = [signer.issue("server", "localhost") for signer in (ours, others)]
    client = others.issue("client", "client.example.org")
    one, two = (f'[tls]\ncert = "{pair.cert}"\nkey = "{pair.key}"\n' for pair in pairs)

    async def is_served(process: KproxyProcess, context: ssl.SSLContext) -> bool:
        try:
            opened = await RawClient().connect(port_of(process), tls=context)
            opened.send(produce_frame())
            return (await opened.answer()).codes["t", 0] == NONE
        except (OSError, asyncio.IncompleteReadError):
            return False

    async with served(tmp_path, answers_everything, rooms=one) as s:
        config, before = Config(tmp_path, one), client_context(ours.ca)
        opened = await RawClient().connect(port_of(s.process), tls=before)
        s.clients.append(opened)
        config.write(f'{two}client_ca = "{others.ca}"\n')
        assert (await reload(s.process))["changed"] == ["tls.cert", "tls.key", "tls.client_ca"]
        assert await code(opened) == NONE
        assert not await is_served(s.process, before)
        assert not await is_served(s.process, client_context(others.ca))
        assert await is_served(s.process, client_context(others.ca, client))
        # An unreadable one is invalid; so is one that is there, next to an invalid value.
        for wrong in (two.replace(str(pairs[1].cert), str(tmp_path / "nowhere")), f"{one}min_version = 1\n"):
            config.write(wrong)
            assert "tls." in (await reload(s.process, REFUSED))["reason"]
        assert await is_served(s.process, client_context(others.ca, client))


async def test_other_keys_need_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything) as s:
        config = Config(tmp_path)
        config.write(
            '[listen]\nadvertise = "a:1"\n[metrics]\ntopics = 3\n[sasl]\ntimeout_s = 3\n' + "[fleet]\nalone = true\n"
        )
        assert "sasl.timeout_s" in (await reload(s.process, REFUSED))["reason"]
        config.write('[listen]\nadvertise = "a:1"\n[metrics]\ntopics = 3\n' + ACLS.format(operation="read"))
        for times in (1, 2):
            assert (await reload(s.process))["changed"] == []
            named = [line["key"] for line in lines(s.process, "configuration key needs a restart")]
            assert named == ["listen.advertise", "metrics.topics", "acls"] * times
        assert await code(await s.client()) == NONE


def a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


INVALID: dict[str, tuple[Callable[[Path], object], str]] = {
    "half": (lambda file: file.write_bytes(file.read_bytes()[:-3]), "is not TOML"),
    "gone": (lambda file: file.unlink(), "cannot be read (No such file"),
    "directory": (a_directory, "cannot be read (Is a directory): name a file in it"),
    "binary": (lambda file: file.write_bytes(b"\xff" * 99), "is not UTF-8"),
    "long": (lambda file: file.write_bytes(b"#" * (17 << 20)), "is larger than 16 MiB"),
    "misspelt": (lambda file: file.write_text(f"{file.read_text()}[limts]\na = 1\n"), "did you mean [limits]"),
    "value": (lambda file: file.write_text(f"{file.read_text()}[audit]\ninterval_s = 0\n"), "audit.interval_s in"),
    "sink": (lambda file: file.write_text(f'{file.read_text()}[audit]\nsink = "json:/proc/a"\n'), "/proc/a"),
    "table": (
        lambda file: file.write_text(file.read_text().replace("owners = [1]", "owners = [3]")),
        "not in [brokers]",
    ),
    "users": (lambda file: (file.parent / "users.toml").write_text("nonsense"), "users: "),
}


@pytest.mark.parametrize("kind", INVALID)
async def test_invalid_file_changes_nothing(tmp_path: Path, kind: str) -> None:
    spoil, reason = INVALID[kind]
    users = tmp_path / "users.toml"
    users.write_text("")
    users.chmod(0o600)
    rooms = f'[sasl]\nmechanisms = "SCRAM-SHA-512"\nusers = "{users}"\n[[quotas]]\nconnections = 9\n'
    async with served(tmp_path, answers_everything, rooms=rooms) as s:
        file = tmp_path / "kproxy.toml"
        # A valid change beside the fault.
        file.write_text(file.read_text().replace("[limits]\n", "[limits]\nmax_connections = 7\n"))
        spoil(file)
        told = await reload(s.process, REFUSED)
        assert reason in told["reason"]
        assert told["advice"]
        # Longer than the files are watched at.
        await asyncio.sleep(5)
        assert [line for line in lines(s.process, REFUSED) if line["level"] == "error"] == [told]
        assert not lines(s.process, "reload failed")
        assert (await s.samples())["kproxy_client_connections_limit", ()] == 10_000
        assert (await s.samples())["kproxy_config_last_reload_successful", ()] == 0
        overview = json.loads((await s.page("/overview"))[1])
        assert reason in overview["facts"]["last reload failed"]
        assert any("not reloaded" in event["text"] and event["level"] == "bad" for event in overview["events"])


async def test_outcome_is_on_page_and_in_metrics(tmp_path: Path) -> None:
    async with served(tmp_path, answers_everything) as s:
        before = await s.samples()
        assert before["kproxy_config_last_reload_successful", ()] == 1
        file = tmp_path / "kproxy.toml"
        good = file.read_text()
        file.write_text("[")
        await reload(s.process, REFUSED)
        await asyncio.sleep(1.1)
        file.write_text(good)
        await reload(s.process)
        after = await s.samples()
        assert after["kproxy_config_last_reload_successful", ()] == 1
        name = "kproxy_config_last_reload_success_timestamp_seconds"
        assert after[name, ()] > before[name, ()]
        for outcome in ("done", "failed"):
            assert after["kproxy_config_reloads_total", (("outcome", outcome),)] == 1
        facts = json.loads((await s.page("/overview"))[1])["facts"]
        assert "last reload failed" not in facts
        assert facts["configuration in force since"].endswith("UTC")


async def test_hangup_without_file_has_nothing_to_read(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[brokers]\n1 = "127.0.0.1:1"\n')
    arguments = ["serve", "--ownership", "static", "--table", str(table), "--listen", "127.0.0.1:0"]
    async with beside(serving(arguments, tmp_path / "stderr")) as process:
        await reload(process, "configuration file not given")
        table.write_text('[brokers]\n1 = "127.0.0.1:1"\n2 = "127.0.0.1:2"\n')
        await reload(process)
        await eventually(lambda: "0 partitions and 2 brokers" in process.stderr())


async def test_early_hangups_never_end_the_process(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[brokers]\n1 = "127.0.0.1:1"\n')
    arguments = ["serve", "--ownership", "static", "--table", str(table), "--listen", "127.0.0.1:0"]
    process = KproxyProcess(arguments, tmp_path / "stderr", [sys.executable, "-m", "kproxy"])
    try:
        # Python itself needs a moment to start.
        def is_held() -> bool:
            status = Path(f"/proc/{process.pid}/status").read_text()
            blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
            return bool(blocked & 1)

        await eventually(is_held)
        process.signal(signal.SIGHUP)
        await asyncio.to_thread(process.wait_ready)
        await eventually(lambda: lines(process, RELOADED), process.stderr)
        # One more while one runs is not lost, and any number is one.
        for _ in range(20):
            process.signal(signal.SIGHUP)
        await asyncio.sleep(1)
        assert 2 <= len(lines(process, RELOADED)) <= 21
        os.kill(process.pid, 0)
    finally:
        process.stop()
