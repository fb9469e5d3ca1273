"""The stream of security events: whole lines in the named file, and the behaviour if it cannot be written."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kproxy.errors import StartupError
from kproxy.security.events import EVENTS, MOST_CHARACTERS, MOST_ENTRIES, SecurityEvents, check_events_file
from tests.support.waiting import PATIENCE_S, eventually


def lines_of(*files: Path) -> list[dict[str, Any]]:
    """The events in files; fails if a line is incomplete."""
    text = "".join(file.read_text("ascii") for file in files if file.exists())
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def named(file: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in lines_of(file) if line["event"] == event]


async def test_events_are_whole_lines_readable_by_owner(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    async with SecurityEvents(file, Counter(), worker=3, wall=lambda: 1_000.25) as events:
        events.tell("reloaded", what="users")
    started, reloaded, stopped = lines_of(file)
    assert reloaded == {"time": "1970-01-01T00:16:40.250000Z", "event": "reloaded", "pid": os.getpid(), "what": "users"}
    assert [started["event"], started["worker"], stopped["event"]] == ["started", 3, "stopped"]
    assert file.stat().st_mode & 0o777 == 0o600


async def test_client_chosen_names_stay_within_their_line(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    forged = 'x"}\n{"event": "login"}\r\u2028\x1b[2J\udc80'
    async with SecurityEvents(file, Counter()) as events:
        events.tell("login_failed", user=forged, reason="y" * 10_000)
        events.tell("denied", names=[forged] * (MOST_ENTRIES + 1))
    _, failed, denied, _ = lines_of(file)
    assert failed["user"] == forged
    assert len(failed["reason"]) == MOST_CHARACTERS
    assert (len(denied["names"]), denied["names_total"]) == (MOST_ENTRIES, MOST_ENTRIES + 1)
    assert len(file.read_bytes().splitlines()) == 4


async def test_change_events_have_names_without_values(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    async with SecurityEvents(file, Counter()) as events:
        events.tell_changes("users", {"a": "1", "b": "secret"}, {"b": "other", "c": "3"})
        events.tell_changes("users", {"a": "1"}, {"a": "1"})
        events.tell_changes("users", {}, {"a": "1"})
        events.tell_changes("users", {"a": "1"}, {})
        events.tell_changes("users", {"a": "1"}, {"a": "2"})
    told = [[line[key] for key in ("added", "removed", "changed")] for line in named(file, "changed")]
    assert told == [[["c"], ["a"], ["b"]], [["a"], [], []], [[], ["a"], []], [[], [], ["a"]]]
    assert "secret" not in file.read_text()
    assert "other" not in file.read_text()


async def test_renamed_and_removed_files_are_created_again(tmp_path: Path) -> None:
    """Several processes append while the file is rotated: no event is lost or torn."""
    file = tmp_path / "events.jsonl"
    rotated = []
    async with SecurityEvents(file, Counter()) as one, SecurityEvents(file, Counter()) as other:
        for round_number in range(20):
            for number in range(100):
                for events in (one, other):
                    events.tell("reloaded", what=f"{id(events)} {round_number} {number}")
                await asyncio.sleep(0)
            rotated.append(tmp_path / f"events.{round_number}")
            await eventually(file.exists)
            file.rename(rotated[-1])
        one.tell("reloaded", what="last")
        await eventually(file.exists)
    told = [line["what"] for line in lines_of(*rotated, file) if line["event"] == "reloaded"]
    assert len(told) == len(set(told)) == 4_001


async def test_full_disk_counts_and_reports_losses(tmp_path: Path) -> None:
    file, counters = tmp_path / "events.jsonl", Counter[str]()
    file.symlink_to("/dev/full")
    async with SecurityEvents(file, counters, most_bytes=1_000) as events:
        for number in range(100):
            events.tell("reloaded", what=str(number))
        lost = counters["security.events_lost"]
        assert 85 < lost < 100
        file.unlink()
        await eventually(lambda: named(file, "lost"))
    told = lines_of(file)
    assert [line["event"] for line in told] == ["started", *["reloaded"] * (100 - lost), "lost", "stopped"]
    assert told[-2]["count"] == lost
    assert told[-2]["since"] <= told[-2]["time"]


async def test_stop_is_reported_without_room(tmp_path: Path) -> None:
    """Room is free only some time after events are in the file, and the stop event was lost then."""
    file, counters = tmp_path / "events.jsonl", Counter[str]()
    async with SecurityEvents(file, counters, most_bytes=1_000) as events:
        await eventually(lambda: named(file, "started"))
        # All room is free again.
        await eventually(lambda: events._waiting_bytes == 0)
        events._waiting_bytes = 1_000
    assert [line["event"] for line in lines_of(file)] == ["started", "stopped"]
    assert not counters["security.events_lost"]


async def test_partial_batch_is_truncated(tmp_path: Path) -> None:
    """The disk accepts a part of a batch. The limit applies to a process of its own."""
    script = """
import asyncio, resource, sys
from collections import Counter
from pathlib import Path
from kproxy.security.events import SecurityEvents

async def run(file, counters):
    async with SecurityEvents(file, counters) as events:
        while not file.stat().st_size:
            await asyncio.sleep(0.01)
        before = file.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (before + 50, hard))
        for number in range(100):
            events.tell("reloaded", what=str(number))
        while not events._is_failing:
            await asyncio.sleep(0.01)
        assert file.stat().st_size == before
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

counters = Counter()
asyncio.run(run(Path(sys.argv[1]), counters))
assert counters["security.events_lost"] == 0
"""
    file = tmp_path / "events.jsonl"
    command = [sys.executable, "-c", script, str(file)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert [line["event"] for line in lines_of(file)] == ["started", *["reloaded"] * 100, "stopped"]


async def test_missing_directory_delays_events(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    file = folder / "events.jsonl"
    async with SecurityEvents(file, Counter()) as events:
        await eventually(lambda: named(file, "started"))
        folder.rename(tmp_path / "gone")
        events.tell("reloaded", what="users")
        await asyncio.sleep(0.1)
        folder.mkdir()
        await eventually(lambda: named(file, "reloaded"))


async def test_hanging_file_delays_end_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.security.events.CLOSE_S", 0.1)
    file = tmp_path / "pipe"
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with SecurityEvents(file, Counter()) as events:
            for _ in range(1_000):
                events.tell("not_reloaded", what="users", reason="x" * 250)
    finally:
        os.close(reader)


@pytest.mark.parametrize("place", ["missing/events.jsonl", "", "file/events.jsonl"])
def test_unusable_file_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    for use in (check_events_file, lambda file: SecurityEvents(file, Counter())):
        with pytest.raises(StartupError, match=r"access\.events.*cannot be written.*or name another"):
            use(tmp_path / place)


def test_check_creates_no_file(tmp_path: Path) -> None:
    check_events_file(tmp_path / "events.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_documented_events_and_fields_match_the_code() -> None:
    """Compares the table in docs/security.md with every call in the code."""
    root = Path(__file__).parents[3]
    documented: dict[str, set[str]] = {}
    text = (root / "docs/security.md").read_text().split("## Security events")[1].split("\n## ")[0]
    for events, fields in re.findall(r"^\| (`[^|]+) \|[^|]+\| ([^|]+) \|$", text, re.MULTILINE):
        for event in re.findall(r"`(\w+)`", events):
            documented[event] = set(re.findall(r"`(\w+)`", fields)) if event != "stopped" else set()
    assert documented == {event: set(fields) for event, fields in EVENTS.items()}
    told: dict[str, set[str]] = {}
    for file in (root / "kproxy").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                # The gate's `_tell` adds its client and listener.
                case ast.Call(func=ast.Attribute(attr="tell" | "_tell" as name), args=[ast.Constant(str(event)), *_]):
                    if event in EVENTS:
                        fields = {str(each.arg) for each in call.keywords}
                        fields |= {"client", "listener"} if name == "_tell" else set()
                        assert fields == set(EVENTS[event]), f"{file}: {event}"
                        told[event] = fields
    assert told.keys() == EVENTS.keys() - {"lost", "stopped"}
