"""A data directory serves one broker at a time, only its own broker, and only logs of the requested topic."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kproxy.broker.config import LogOptions
from kproxy.broker.data_dir import DataDir
from kproxy.broker.disk import DiskError, read_json
from kproxy.broker.leader_epochs import NO_LEADERSHIP
from kproxy.broker.log import LogCorrupt
from kproxy.broker.segment import LogFailed
from kproxy.errors import StartupError
from tests.support.brokers.broker_logs import append_values

FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[DataDir]:
    opened = DataDir.open(tmp_path, 1)
    yield opened
    opened.close()


def test_directory_serves_one_broker_at_a_time(tmp_path: Path) -> None:
    first = DataDir.open(tmp_path / "data", 1)
    with pytest.raises(StartupError, match="another broker uses"):
        DataDir.open(tmp_path / "data", 1)
    first.close()
    DataDir.open(tmp_path / "data", 1).close()


def test_directory_is_closed_to_other_users(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        for path in (tmp_path / "above" / "data", given):
            data_dir = DataDir.open(path, 1)
            data_dir.open_log("t", 0, FIRST).close()
            data_dir.close()
    finally:
        os.umask(before)
    made = [tmp_path / "above" / "data", *(each for each in tmp_path.glob("*/**/*") if each.is_dir())]
    assert {str(each.relative_to(tmp_path)): each.stat().st_mode & 0o777 for each in made} == {
        "above/data": 0o700,
        **{f"{place}/{name}": 0o700 for place in ("above/data", "given") for name in ("t-0", "log-ids")},
    }
    # The owner chose the mode of an existing directory.
    assert given.stat().st_mode & 0o777 == 0o755


def test_directory_belongs_to_one_node_id(tmp_path: Path) -> None:
    DataDir.open(tmp_path, 1).close()
    with pytest.raises(StartupError, match="belongs to broker 1, not 2"):
        DataDir.open(tmp_path, 2)
    DataDir.open(tmp_path, 1).close()


def test_log_is_found_again_for_its_topic_alone(data_dir: DataDir, tmp_path: Path) -> None:
    log = data_dir.open_log("t", 0, FIRST)
    append_values(log, 10)
    log.close()
    again = data_dir.open_log("t", 0, FIRST)
    assert again.log_end_offset == 1
    again.close()
    other = data_dir.open_log("t", 0, SECOND)
    assert other.log_end_offset == 0, "a topic of the same name got another's records"
    other.close()
    assert len(list(tmp_path.glob("#stray-*/*.log"))) == 1, "the earlier records were destroyed"


def test_directory_keeps_one_unique_log_id(tmp_path: Path) -> None:
    ids = []
    for name in ("a", "a", "b"):
        data_dir = DataDir.open(tmp_path / name, 1)
        data_dir.open_log("t", 0, FIRST).close()
        assert data_dir.log_id_of(FIRST, 0) == data_dir.log_id
        ids.append(data_dir.log_id)
        data_dir.close()
    assert ids[0] == ids[1] != ids[2]


def test_removed_log_gets_another_id_when_restarted(data_dir: DataDir, tmp_path: Path) -> None:
    data_dir.open_log("t", 0, FIRST).close()
    data_dir.open_log("t", 1, FIRST).close()
    shutil.rmtree(tmp_path / "t-0")
    data_dir.open_log("t", 0, FIRST).close()
    begun_anew = data_dir.log_id_of(FIRST, 0)
    assert begun_anew != data_dir.log_id == data_dir.log_id_of(FIRST, 1)
    data_dir.open_log("t", 0, FIRST).close()
    assert data_dir.log_id_of(FIRST, 0) == begun_anew
    data_dir.delete_log("t", 0, FIRST)
    assert data_dir.log_id_of(FIRST, 0) is None


def test_log_that_fails_to_begin_leaves_no_trace(data_dir: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")))
        with pytest.raises(DiskError):
            data_dir.open_log("t", 0, FIRST)
    data_dir.open_log("t", 0, FIRST).close()
    assert data_dir.log_id_of(FIRST, 0) == data_dir.log_id


def lose_committed(tmp_path: Path, lost: str) -> Path:
    """A log of three one-batch segments, without the last ones; return its directory."""
    data_dir = DataDir.open(tmp_path, 1)
    log = data_dir.open_log("t", 0, FIRST, LogOptions(segment_bytes=100))
    append_values(log, 100, 100, 100)
    log.checkpoint(3, NO_LEADERSHIP)
    log.close()
    data_dir.close()
    segments = sorted((tmp_path / "t-0").glob("*.log"))
    if lost == "bytes":
        segments[-1].write_bytes(b"")
    for segment in {"bytes": [], "files": segments[1:], "all": segments}[lost]:
        segment.unlink()
    return tmp_path / "t-0"


LOST = [("bytes", 2), ("files", 1), ("all", 0)]


@pytest.mark.parametrize(("lost", "left"), LOST)
def test_log_without_committed_records_has_another_id(tmp_path: Path, lost: str, left: int) -> None:
    """Other logs have more records, so this one is no longer in sync."""
    lose_committed(tmp_path, lost)
    data_dir = DataDir.open(tmp_path, 1)
    log = data_dir.open_log("t", 0, FIRST)
    assert log.log_end_offset == left
    assert data_dir.log_id_of(FIRST, 0) != data_dir.log_id
    log.close()
    data_dir.close()


@pytest.mark.parametrize(("lost", "left"), LOST)
def test_only_log_without_committed_records_stays_closed(tmp_path: Path, lost: str, left: int) -> None:
    directory = lose_committed(tmp_path, lost)
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    data_dir = DataDir.open(tmp_path, 1)
    for _ in range(2):
        with pytest.raises(LogCorrupt, match=f"t-0: ends at offset {left}; all below offset 3 was on the disk"):
            data_dir.open_log("t", 0, FIRST, is_only_replica=True)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == found
    # The remedy that the broker names.
    (directory / "checkpoint.json").unlink()
    log = data_dir.open_log("t", 0, FIRST, is_only_replica=True)
    assert log.log_end_offset == left
    assert data_dir.log_id_of(FIRST, 0) == data_dir.log_id
    log.close()
    data_dir.close()


def test_directory_of_another_release_is_refused(tmp_path: Path) -> None:
    tmp_path.joinpath("broker.json").write_text('{"node_id": 1, "version": 3}')
    with pytest.raises(StartupError, match="has version 3, made by another release"):
        DataDir.open(tmp_path, 1)


def test_hung_disk_takes_no_threads_of_others(tmp_path: Path) -> None:
    """The files of etcd's TLS are read in the loop's own threads."""
    release = threading.Event()

    async def run() -> None:
        data_dir = DataDir.open(tmp_path, 1)
        hanging = [asyncio.create_task(data_dir.in_thread(release.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        try:
            assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 60) == 7
            assert not any(task.done() for task in hanging)
        finally:
            release.set()
            await asyncio.gather(*hanging)
            data_dir.close()

    asyncio.run(run())


def test_only_the_deleted_topics_log_is_deleted(data_dir: DataDir, tmp_path: Path) -> None:
    data_dir.open_log("t", 0, SECOND).close()
    data_dir.delete_log("t", 0, FIRST)
    assert (tmp_path / "t-0").exists()
    data_dir.delete_log("t", 0, SECOND)
    assert not (tmp_path / "t-0").exists()
    data_dir.delete_log("t", 0, SECOND)
    assert not list(tmp_path.glob("#*"))


def test_topic_recreated_during_removal_keeps_its_log(data_dir: DataDir, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir.open_log("t", 0, FIRST).close()
    looked, created = threading.Event(), threading.Event()

    def look_slowly(path: Path) -> dict[str, object] | None:
        found = read_json(path)
        if threading.current_thread() is removing:
            looked.set()
            created.wait(0.3)
        return found

    monkeypatch.setattr("kproxy.broker.data_dir.read_json", look_slowly)
    removing = threading.Thread(target=data_dir.delete_log, args=("t", 0, FIRST))
    removing.start()
    assert looked.wait(60)
    log = data_dir.open_log("t", 0, SECOND)
    created.set()
    removing.join()
    append_values(log, 10)
    log.close()
    again = data_dir.open_log("t", 0, SECOND)
    assert again.log_end_offset == 1
    again.close()


def test_deleted_topic_leaves_nothing_for_its_namesake(data_dir: DataDir, tmp_path: Path) -> None:
    """Its partitions are removed one by one, and a new creation does not wait for the last."""
    data_dir.open_log("t", 0, FIRST).close()
    data_dir.mark_deleted(FIRST)
    data_dir.open_log("t", 0, SECOND).close()
    data_dir.delete_log("t", 0, FIRST)
    data_dir.unmark_deleted(FIRST)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["log-ids", "t-0"]
    data_dir.open_log("t", 0, FIRST).close()
    assert len(list(tmp_path.glob("#stray-*"))) == 1, "who was not deleted is kept"


def test_topics_that_differ_in_case_stay_apart(data_dir: DataDir, tmp_path: Path) -> None:
    data_dir.open_log("Flights", 0, FIRST).close()
    (tmp_path / "Flights-0").rename(tmp_path / "flights-0")  # a case-insensitive file system would find it
    with pytest.raises(LogFailed, match="case-sensitive"):
        data_dir.open_log("flights", 0, SECOND)


def test_half_removed_directory_is_removed_at_next_start(tmp_path: Path) -> None:
    (tmp_path / "#deleted-x").mkdir()
    (tmp_path / "#deleted-x" / "00000000000000000000.log").write_bytes(b"x")
    DataDir.open(tmp_path, 1).close()
    assert not list(tmp_path.glob("#*"))


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_undeletable_log_prevents_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for name in ("#deleted-a", "#deleted-b", "#deleted-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000000000000000000.log").write_bytes(b"x")
    if kind == "a file":
        shutil.rmtree(tmp_path / "#deleted-b")
        (tmp_path / "#deleted-b").write_bytes(b"x")
    else:
        keep_folders(monkeypatch, "#deleted-b")
    with capture_logs() as told:
        DataDir.open(tmp_path, 1).close()
    assert [path.name for path in tmp_path.glob("#*")] == ["#deleted-b"]
    [line] = [each for each in told if each["event"] == "log of deleted topic not removed"]
    assert line["directory"] == str(tmp_path / "#deleted-b")
    assert line["reason"]


def keep_folders(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """Make folders of such a name undeletable, as a bad sector would."""
    usual = os.rmdir

    def rmdir(path: Path | str, **where: Any) -> None:
        if Path(path).name.startswith(prefix):
            raise OSError(errno.EIO, "Input/output error")
        usual(path, **where)

    monkeypatch.setattr(os, "rmdir", rmdir)


def test_undeletable_log_blocks_no_new_one(data_dir: DataDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir.open_log("t", 0, FIRST).close()
    data_dir.mark_deleted(FIRST)
    keep_folders(monkeypatch, "#deleted-")
    data_dir.open_log("t", 0, SECOND).close()
    assert len(list(tmp_path.glob("#deleted-*"))) == 1
    data_dir.delete_log("t", 0, SECOND)
    assert data_dir.log_id_of(SECOND, 0) is None


NO_LOG_IDS = [b"", b"\x00" * 60, b"[1]", b"{}", b'{"log_id": "mine"}']


@pytest.mark.parametrize("content", NO_LOG_IDS)
def test_damaged_log_id_keeps_its_log_closed(data_dir: DataDir, tmp_path: Path, content: bytes) -> None:
    for partition_index in (0, 1):
        log = data_dir.open_log("t", partition_index, FIRST)
        append_values(log, 10)
        log.close()
    path = tmp_path / "log-ids" / f"{FIRST}-0"
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises((LogFailed, OSError), match=f"{path} is damaged"):
            data_dir.open_log("t", 0, FIRST)
    data_dir.open_log("t", 1, FIRST).close()
    # The remedies that the broker names: one if other replicas have the records, one if none has.
    (tmp_path / "t-0").rename(tmp_path / "elsewhere")
    data_dir.open_log("t", 0, FIRST).close()
    assert data_dir.log_id_of(FIRST, 0) not in (None, data_dir.log_id), "an empty log counts as the one that was there"
    shutil.rmtree(tmp_path / "t-0")
    (tmp_path / "elsewhere").rename(tmp_path / "t-0")
    path.unlink()
    log = data_dir.open_log("t", 0, FIRST)
    assert (log.log_end_offset, data_dir.log_id_of(FIRST, 0)) == (1, data_dir.log_id)
    log.close()


NO_BROKERS = [*NO_LOG_IDS, b'{"node_id": 1, "version": 2}', b'{"node_id": 1, "version": "x"}']


@pytest.mark.parametrize("content", NO_BROKERS)
def test_damaged_identity_names_its_file(tmp_path: Path, content: bytes) -> None:
    data_dir = DataDir.open(tmp_path, 1)
    data_dir.open_log("t", 0, FIRST).close()
    log_id = data_dir.log_id
    data_dir.close()
    (tmp_path / "broker.json").write_bytes(content)
    for _ in range(2):
        with pytest.raises(StartupError, match=rf"{tmp_path}/broker.json is damaged.*: put it back, or remove it"):
            DataDir.open(tmp_path, 1)
    (tmp_path / "broker.json").unlink()
    data_dir = DataDir.open(tmp_path, 1)
    data_dir.open_log("t", 0, FIRST).close()
    assert data_dir.log_id_of(FIRST, 0) == log_id, "the log is taken for another"
    data_dir.close()


def test_half_written_small_file_is_removed(tmp_path: Path) -> None:
    data_dir = DataDir.open(tmp_path, 1)
    data_dir.open_log("t", 0, FIRST).close()
    leftovers = (tmp_path / "broker.json.0123.new", tmp_path / "t-0" / "checkpoint.json.0123.new")
    for leftover in leftovers:
        leftover.write_text('{"high_wat')
    data_dir.close()
    data_dir = DataDir.open(tmp_path, 1)
    data_dir.open_log("t", 0, FIRST).close()
    assert not any(leftover.exists() for leftover in leftovers)
    data_dir.close()


def test_logs_of_unknown_topics_are_found(tmp_path: Path) -> None:
    known, unknown = uuid.uuid4(), uuid.uuid4()
    data_dir = DataDir.open(tmp_path / "data", 1)
    for topic, topic_id in (("kept", known), ("gone", unknown)):
        data_dir.open_log(topic, 0, topic_id).close()
    data_dir.open_log("gone", 1, unknown).close()
    assert data_dir.logs_of_others([known]) == [data_dir.partition_path("gone", index) for index in (0, 1)]
    assert data_dir.logs_of_others([known, unknown]) == []
    data_dir.close()
