"""A trail in files has all written rows, complete and in files that sort by time; a full disk damages none."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from kproxy.config import AuditOptions
from kproxy.errors import StartupError
from kproxy.trail.file_sinks import JsonSink
from kproxy.trail.parquet_sink import SCHEMA, ParquetSink
from kproxy.trail.rows import Begin, End, Mark, Range, Row, encode_page
from kproxy.trail.sink import Sink, SinkFailed, make_sink
from tests.support.audit.audit_trails import (
    BEGAN_MS,
    INCARNATION,
    paged,
    rows_in_files,
    some_rows,
    the_end,
)
from tests.support.brokers.small_disk import small_disk
from tests.support.waiting import eventually

STEM = f"kproxy-audit-{BEGAN_MS}-{INCARNATION}"
KINDS = {"begin": Begin, "mark": Mark, "end": End, "range": Range}


def rows_in_parquet(directory: Path) -> list[Row]:
    rows: list[Row] = []
    for file in sorted(directory.glob("*.parquet")):
        for found in pyarrow.parquet.read_table(file).to_pylist():
            fields = {field.name for field in msgspec.structs.fields(KINDS[found["kind"]])}
            assert all(value is None for name, value in found.items() if name not in fields | {"kind"})
            rows.append(msgspec.convert({name: found[name] for name in (*fields, "kind")}, Begin | Mark | End | Range))
    return rows


SINKS: dict[str, tuple[Callable[[Path, str, int], Sink], Callable[[Path], list[Row]]]] = {
    "json": (JsonSink, rows_in_files),
    "parquet": (ParquetSink, rows_in_parquet),
}


@pytest.mark.parametrize("kind", SINKS)
async def test_written_rows_are_in_the_file(tmp_path: Path, kind: str) -> None:
    make, read = SINKS[kind]
    sink, rows = make(tmp_path, INCARNATION, BEGAN_MS), [*some_rows(30), the_end(30)]
    pages = paged(rows, 4)
    await sink.write(pages[:3])
    # The file is durable before it is closed.
    assert read(tmp_path) == rows[:12]
    assert not any(file.stat().st_mode & 0o007 for file in tmp_path.iterdir()), "everybody may read it"
    await sink.write(pages[3:])
    await sink.close()
    assert read(tmp_path) == rows


async def test_large_file_is_followed_by_another(tmp_path: Path) -> None:
    sink, rows = JsonSink(tmp_path, INCARNATION, BEGAN_MS, file_bytes=4000), some_rows(60)
    for page in paged(rows, 4):
        await sink.write([page])
    await sink.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) > 3
    assert [file.name for file in files] == [f"{STEM}-{number:06d}.jsonl" for number in range(len(files))]
    assert all(4000 <= file.stat().st_size < 4000 + 4 * 700 for file in files[:-1])
    assert rows_in_files(tmp_path) == rows


async def test_removed_file_is_followed_by_another(tmp_path: Path) -> None:
    directory = tmp_path / "trail"
    directory.mkdir()
    sink, rows = JsonSink(directory, INCARNATION, BEGAN_MS), some_rows(6)
    pages = paged(rows, 2)
    await sink.write(pages[:1])
    shutil.rmtree(directory)
    for _ in range(2):
        with pytest.raises(SinkFailed, match="No such file"):
            await sink.write(pages[1:])
    directory.mkdir()
    await sink.write(pages[1:])
    await sink.close()
    assert rows_in_files(directory) == rows[2:]


async def test_each_parquet_file_has_one_write(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path, INCARNATION, BEGAN_MS)
    for page in paged(some_rows(9), 3):
        await sink.write([page])
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{STEM}-{number:06d}.parquet" for number in range(3)]


@pytest.mark.parametrize("kind", SINKS)
async def test_full_disk_damages_nothing_and_recovers(tmp_path: Path, kind: str) -> None:
    make, read = SINKS[kind]
    with small_disk(tmp_path / "disk", 256 << 10) as disk:
        disk.confine(os.getpid())
        sink, rows = make(disk.path, INCARNATION, BEGAN_MS), some_rows(4000)
        pages = paged(rows, 100)
        written = 0
        await sink.write(pages[:4])
        disk.fill()
        for _ in range(3):
            with pytest.raises(SinkFailed, match=r"disk: (No space left on device|File too large)"):
                await sink.write(pages[4:])
            written = len(read(disk.path))
            assert read(disk.path) == rows[:written], "a page is there in part"
            assert [file.name for file in disk.path.iterdir() if file.suffix == ".tmp"] == []
        assert len([*disk.path.glob("kproxy-audit-*")]) <= 2
        assert written == 400
        disk.free()
        await sink.write(pages[4:])
        await sink.close()
        assert read(disk.path) == rows


def test_half_written_files_of_killed_process_are_removed(tmp_path: Path) -> None:
    other = "kproxy-audit-1000000000000-0123"
    long_ago, lately = BEGAN_MS / 1000 - 3700, BEGAN_MS / 1000 - 60
    for name, changed in {
        f"{other}-000001.parquet.tmp": long_ago,
        f"{other}-000000.parquet": long_ago,
        f"{other}-000000.jsonl": long_ago,
        "kproxy-audit-1999999999999-4567-000000.parquet.tmp": lately,
        "somebody-else.parquet.tmp": long_ago,
    }.items():
        (tmp_path / name).write_bytes(b"PAR1")
        os.utime(tmp_path / name, (changed, changed))
    made = make_sink(AuditOptions(sink="parquet", directory=tmp_path), INCARNATION, BEGAN_MS, _nothing_to_dial)
    assert isinstance(made, ParquetSink)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{other}-000000.jsonl",
        f"{other}-000000.parquet",
        "kproxy-audit-1999999999999-4567-000000.parquet.tmp",
        "somebody-else.parquet.tmp",
    ]


async def test_disappearing_directory_is_only_a_failure(tmp_path: Path) -> None:
    for make, read in SINKS.values():
        directory = tmp_path / "trail"
        directory.mkdir()
        sink = make(directory, INCARNATION, BEGAN_MS)
        directory.rmdir()
        with pytest.raises(SinkFailed, match="No such file or directory"):
            await sink.write(paged(some_rows(3), 3))
        directory.mkdir()
        await sink.write(paged(some_rows(3), 3))
        await sink.close()
        assert read(directory) == some_rows(3)
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


@pytest.mark.parametrize("kind", SINKS)
async def test_event_loop_runs_while_a_disk_hangs(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, went_on = threading.Event(), threading.Event()
    real = os.fsync

    def hang(descriptor: int) -> None:
        go_on.wait(20)
        real(descriptor)
        went_on.set()

    monkeypatch.setattr(os, "fsync", hang)
    sink = SINKS[kind][0](tmp_path, INCARNATION, BEGAN_MS)
    writing = asyncio.create_task(sink.write(paged(some_rows(3), 3)))
    await asyncio.sleep(0.2)
    assert not writing.done()
    # The waiter may be cancelled, and the file stays open until the write ends.
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await sink.close()
    go_on.set()
    await eventually(went_on.is_set)


def test_parquet_columns_are_the_fields_of_rows() -> None:
    fields: list[str] = ["kind"]
    for kind in (Begin, Range):
        fields += [field.name for field in msgspec.structs.fields(kind) if field.name not in fields]
    assert SCHEMA.names == fields


def test_rows_parsed_in_blocks_form_one_table(tmp_path: Path) -> None:
    rows = some_rows(3000)
    asyncio.run(ParquetSink(tmp_path, INCARNATION, BEGAN_MS).write([encode_page(rows)]))
    assert rows_in_parquet(tmp_path) == rows


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("place", ["file", "file/trail"])
def test_invalid_directory_is_reported_at_the_start(tmp_path: Path, kind: Any, place: str) -> None:
    (tmp_path / "file").write_text("")
    options = AuditOptions(kind, directory=tmp_path / place)
    with pytest.raises(StartupError, match=r"audit\.sink: the directory .* cannot be created"):
        make_sink(options, INCARNATION, BEGAN_MS, _nothing_to_dial)


@pytest.mark.parametrize("kind", SINKS)
def test_missing_directory_is_created(tmp_path: Path, kind: Any) -> None:
    options = AuditOptions(kind, directory=tmp_path / "a" / "b")
    sink = make_sink(options, INCARNATION, BEGAN_MS, _nothing_to_dial)
    assert sink is not None
    asyncio.run(sink.write(paged(some_rows(3), 3)))
    assert SINKS[kind][1](tmp_path / "a" / "b") == some_rows(3)
    assert (tmp_path / "a" / "b").stat().st_mode & 0o007 == 0, "everybody may see what is in it"


def _nothing_to_dial() -> Any:
    raise AssertionError("files need no connection")
