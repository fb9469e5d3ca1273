"""A trail is read from files in this process: whole rows, of any release, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kproxy.errors import StartupError
from kproxy.pipeline.audit.trail_place import parse_place
from kproxy.pipeline.audit.trail_reader import read_files
from kproxy.pipeline.audit.trail_rows import TrailRow, decode
from kproxy.trail.parquet_sink import SCHEMA
from kproxy.trail.signature import Signatures, signed
from tests.support.audit.trails import BAD_LINES, Trail, page, trail_rows

Reader = Callable[..., list[TrailRow]]


@pytest.fixture
def read() -> Reader:
    """The reader; tests/pipeline/test_audit_trails_read.py has Spark's, for the tests that it imports."""
    return lambda place, from_ms=None, signatures=None: list(read_files(parse_place(place), from_ms, signatures))


def some_trail(proxy: str = "p") -> Trail:
    trail = Trail(proxy, proxy)
    for n in range(1, 5):
        trail.acked("topic", n * 10, 10, at=n * 1000, topic_id="0f" if n > 2 else None)
    trail.end(5000)
    return trail


def test_json_files_are_read_without_torn_rows(read: Reader, tmp_path: Path) -> None:
    trail = some_trail()
    (tmp_path / "a.jsonl").write_text("\n".join([page(trail.rows), *BAD_LINES]))
    (tmp_path / "a.jsonl.tmp").write_text(page(some_trail("q").rows))
    assert read(f"json:{tmp_path}") == trail_rows(trail.rows)
    late = trail_rows(trail.rows)[3:]
    assert read(f"json:{tmp_path}", from_ms=late[0].at) == late


def test_json_files_are_read_without_msgspec(read: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kproxy.pipeline.audit.trail_rows.decoder", lambda: decode)
    test_json_files_are_read_without_torn_rows(read, tmp_path)


def test_rows_without_a_signature_are_left_out(read: Reader, tmp_path: Path) -> None:
    trail, key = some_trail(), b"k" * 16
    lines = [line.encode() for line in page(trail.rows).split("\n")]
    signed_lines = [signed(line, key) for line in lines]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*signed_lines[:3], lines[3], signed(lines[4], b"o" * 16), b""]))
    signatures = Signatures([b"other" * 4, key])
    assert read(f"json:{tmp_path}", signatures=signatures) == trail_rows(trail.rows)[:3]


def test_rows_without_a_signature_are_counted(read: Reader, tmp_path: Path) -> None:
    signatures = Signatures([b"k" * 16])
    (tmp_path / "a.jsonl").write_text(page(some_trail().rows))
    assert read(f"json:{tmp_path}", signatures=signatures) == []
    assert signatures.refused == len(some_trail().rows)


def test_parquet_files_of_several_releases_are_read(read: Reader, tmp_path: Path) -> None:
    """Columns and widths of numbers differ between files."""
    trail = some_trail()
    rows = [{name: row.get(name) for name in SCHEMA.names} for row in trail.rows]
    earlier = pyarrow.Table.from_pylist(rows[:2], SCHEMA).drop_columns(["topic_id", "mark_ms"])
    narrow = SCHEMA.set(SCHEMA.get_field_index("batches"), pyarrow.field("batches", pyarrow.int32()))
    later = pyarrow.Table.from_pylist(rows[2:], narrow).append_column("surplus", [["of the future"] * len(rows[2:])])
    for name, table in (("1", earlier), ("2", later)):
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    # A killed process left an incomplete file.
    (tmp_path / "kproxy-audit-1-2-000003.parquet.tmp").write_bytes(b"PAR1")
    expected = trail_rows(trail.rows)
    expected[0].mark_ms = None
    assert read(f"parquet:{tmp_path}") == expected


def test_damaged_parquet_file_is_named(read: Reader, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([dict.fromkeys(SCHEMA.names)], SCHEMA), tmp_path / "1.parquet"
    )
    assert read(f"parquet:{tmp_path}") == []
    (tmp_path / "2.parquet").write_bytes((tmp_path / "1.parquet").read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"The trail could not be read: .*2\.parquet"):
        read(f"parquet:{tmp_path}")


def test_unreadable_file_is_named(read: Reader, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(StartupError, match=r"The trail could not be read: .*a\.jsonl: Is a directory"):
        read(f"json:{tmp_path}")


@pytest.mark.parametrize("text", ["", "topic:", "json", "csv:/tmp"])
def test_invalid_trail_location_is_refused(text: str) -> None:
    with pytest.raises(StartupError, match="give topic:NAME, json:DIR or parquet:DIR"):
        parse_place(text)
