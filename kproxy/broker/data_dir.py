"""Manage a broker's data directory: lock it, check which broker it belongs to, and open and delete logs in it.

  broker.json                 the broker id, the directory's log id, and the version of this layout, 2
  .lock                       held by a running broker, against a second one
  {topic}-{partition}/        one log each; partition.json names the topic and its id
  log-ids/{topic id}-{partition}
                              the log id of each log that was ever begun here and not deleted
  #deleted-…/                 a log being removed ('#' is in no topic's name)
  #stray-…/                   a log set aside, of a topic that was deleted and created again

A log id names the contents of one disk (ReplicaKey). It is made with the data directory, so that a broker with a
replaced disk counts as another replica. A single log that is gone, or lacks committed records, gets an id of its own
when it is opened.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import structlog

from kproxy.broker.config import LogOptions
from kproxy.broker.disk import disk_error, probe_disk, read_json, remove_scratch_files, sync_directory, write_json
from kproxy.broker.disk_threads import DiskThreads
from kproxy.broker.log import Log
from kproxy.broker.segment import LogFailed
from kproxy.errors import StartupError

_BROKER_FILE = "broker.json"
_PARTITION_FILE = "partition.json"
_LOG_IDS = "log-ids"
# The mode of directories created here: other users of this machine may not read records.
_OWN_USERS = 0o700
VERSION = 2
THREADS = 8
_Result = TypeVar("_Result")
_logger = structlog.get_logger(__name__)


class DataDir:
    """An open data directory; close it last. `log_id` is the directory's own."""

    def __init__(self, path: Path, lock_fd: int, log_id: uuid.UUID) -> None:
        self.path = path
        self.log_id = log_id
        self._lock_fd = lock_fd
        self._threads = DiskThreads(THREADS, "data-dir")
        # Held from reading a directory's partition.json to renaming it: when a topic is recreated at once, one thread
        # removes the old log while another creates the new one.
        self._rename_lock = threading.Lock()
        self._deleted_topics: set[str] = set()

    @classmethod
    def open(cls, path: Path, node_id: int) -> DataDir:
        """Lock the directory and check its owner, creating it if needed. Raises StartupError."""
        lock_fd = -1
        try:
            path.mkdir(_OWN_USERS, parents=True, exist_ok=True)
            lock_fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            _lock(lock_fd, path)
            log_id = _claim(path, node_id)
            (path / _LOG_IDS).mkdir(_OWN_USERS, exist_ok=True)
            remove_scratch_files(path / _LOG_IDS)
            remove_scratch_files(path)
            for leftover in path.glob("#deleted-*"):
                _remove_deleted(leftover)
        except (OSError, StartupError) as error:
            if lock_fd >= 0:
                os.close(lock_fd)
            if isinstance(error, StartupError):
                raise
            raise StartupError(
                f"the data directory {path} cannot be used ({error.strerror or error}): "
                "give another with --data-dir, or make it one that this user can write to"
            ) from error
        return cls(path, lock_fd, log_id)

    async def in_thread(self, work: Callable[[], _Result]) -> _Result:
        """Run work that blocks on the disk in a thread of this directory."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def probe(self) -> None:
        """Check that the disk works; blocks. Raises OSError."""
        probe_disk(self.path)

    def partition_path(self, topic: str, partition_index: int) -> Path:
        return self.path / f"{topic}-{partition_index}"

    def open_log(
        self,
        topic: str,
        partition_index: int,
        topic_id: uuid.UUID,
        options: LogOptions | None = None,
        *,
        is_only_replica: bool = False,
    ) -> Log:
        """Open the partition's log; blocks while it is read.

        Raises OSError, LogFailed. The log of an earlier topic of the same name is set aside, not opened. A log that
        lacks committed records gets another id, because other replicas have more; a sole replica's is not opened.
        """
        directory = self.partition_path(topic, partition_index)
        identity: dict[str, object] = {"topic": topic, "partition": partition_index, "topic_id": str(topic_id)}
        remove_scratch_files(directory)
        is_new = read_json(directory / _PARTITION_FILE) != identity
        was_here = self._id_file(topic_id, partition_index).exists()
        if is_new:
            # Written before the log: if the log is removed, or lost in a power cut, the id shows that it was here.
            self._keep_id(topic_id, partition_index, uuid.uuid4() if was_here else self.log_id)
            try:
                self._set_up(directory, identity)
            except BaseException:
                if not was_here:
                    self._id_file(topic_id, partition_index).unlink(missing_ok=True)
                raise
        elif was_here:
            self.log_id_of(topic_id, partition_index)  # before the log is touched
        options = options or LogOptions()
        log = Log.open(directory, options=options, is_only_replica=is_only_replica)
        if is_new and options.flush != "never":
            sync_directory(self.path)
        if log.truncated_bytes:
            _logger.warning(
                "torn log tail removed",
                directory=str(directory),
                bytes=log.truncated_bytes,
                end_offset=log.log_end_offset,
            )
        lacks_some = log.high_watermark_checkpoint > log.log_end_offset
        if lacks_some or (is_new and was_here):
            _logger.error(
                "records lost from log",
                directory=str(directory),
                end_offset=log.log_end_offset,
                high_watermark=log.high_watermark_checkpoint,
            )
        try:
            if lacks_some:
                self._keep_id(topic_id, partition_index, uuid.uuid4())
            elif not is_new and not was_here:
                # Its file was damaged, and removed as the error message advises.
                self._keep_id(topic_id, partition_index, self.log_id)
        except BaseException:
            log.close()
            raise
        return log

    def log_id_of(self, topic_id: uuid.UUID, partition_index: int) -> uuid.UUID | None:
        """Return the id of the log; None if no id is kept here. Raises OSError, LogFailed for a damaged file."""
        path = self._id_file(topic_id, partition_index)
        kept = read_json(path)
        try:
            return None if kept is None else uuid.UUID(str(kept.get("log_id")))
        except ValueError as error:
            raise LogFailed(f"{path} is damaged: it holds no log id but {kept}") from error

    def _keep_id(self, topic_id: uuid.UUID, partition_index: int, log_id: uuid.UUID) -> None:
        try:
            write_json(self._id_file(topic_id, partition_index), {"log_id": str(log_id)})
            sync_directory(self.path / _LOG_IDS)
        except OSError as error:
            raise disk_error(error, self._id_file(topic_id, partition_index)) from error

    def _id_file(self, topic_id: uuid.UUID, partition_index: int) -> Path:
        return self.path / _LOG_IDS / f"{topic_id}-{partition_index}"

    def _set_up(self, directory: Path, identity: dict[str, object]) -> None:
        """Create the directory for this partition, replacing an earlier one's. Raises OSError, LogFailed."""
        with self._rename_lock:
            found = read_json(directory / _PARTITION_FILE)
            if found is not None and found.get("topic") != identity["topic"]:
                raise LogFailed(f"{directory} holds topic {found.get('topic')}; use a case-sensitive file system")
            renamed = None
            if found is not None and str(found.get("topic_id")) in self._deleted_topics:
                renamed = self._rename_deleted(directory)
            elif directory.exists() and any(directory.iterdir()):
                stray = self.path / f"#stray-{uuid.uuid4()}"
                _logger.warning("log set aside", directory=str(directory), moved_to=str(stray), was=found, now=identity)
                directory.rename(stray)
            try:
                directory.mkdir(_OWN_USERS, exist_ok=True)
            except OSError as error:
                raise disk_error(error, directory) from error
        if renamed is not None:
            _remove_deleted(renamed)
        try:
            write_json(directory / _PARTITION_FILE, identity)
        except OSError as error:
            # Leave no half-begun directory, which would look like another partition's.
            shutil.rmtree(directory, ignore_errors=True)
            raise disk_error(error, directory) from error

    def logs_of_others(self, topic_ids: Collection[uuid.UUID]) -> list[Path]:
        """List the logs of topics other than these; blocks. Raises OSError."""
        known = set(map(str, topic_ids))
        found = []
        for file in sorted(self.path.glob(f"*/{_PARTITION_FILE}")):
            identity = read_json(file)
            if identity is not None and identity.get("topic_id") not in known and not file.parent.name.startswith("#"):
                found.append(file.parent)
        return found

    def mark_deleted(self, topic_id: uuid.UUID) -> None:
        """Note that the topic is deleted: its logs are removed if a topic of the same name needs their place."""
        self._deleted_topics.add(str(topic_id))

    def unmark_deleted(self, topic_id: uuid.UUID) -> None:
        """Forget a deleted topic that has no more logs here."""
        self._deleted_topics.discard(str(topic_id))

    def _rename_deleted(self, directory: Path) -> Path:
        """Rename the directory before it is removed: a half-removed log must never be opened again."""
        return directory.rename(self.path / f"#deleted-{uuid.uuid4()}")

    def delete_log(self, topic: str, partition_index: int, topic_id: uuid.UUID) -> None:
        """Remove a closed log of exactly this topic, if it exists. Raises OSError."""
        directory = self.partition_path(topic, partition_index)
        renamed = None
        with self._rename_lock:
            found = read_json(directory / _PARTITION_FILE)
            if found is not None and found.get("topic_id") == str(topic_id):
                renamed = self._rename_deleted(directory)
        if renamed is not None:
            _remove_deleted(renamed)
        self._id_file(topic_id, partition_index).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the directory. May be called twice."""
        self._threads.shutdown()
        lock_fd, self._lock_fd = self._lock_fd, -1
        if lock_fd >= 0:
            os.close(lock_fd)


def _lock(lock_fd: int, path: Path) -> None:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StartupError(f"another broker uses the data directory {path}; choose another --data-dir") from error


def _remove_deleted(directory: Path) -> None:
    """Remove a deleted log; the next start retries failures, which block nothing."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        _logger.error("log of deleted topic not removed", directory=str(directory), reason=str(error))


def _claim(path: Path, node_id: int) -> uuid.UUID:
    """Make the directory the broker's, or check that it is; return its log id. Raises OSError, StartupError."""
    file = path / _BROKER_FILE
    way_out = f"put it back, or remove it if the directory is broker {node_id}'s: its logs have their ids in {_LOG_IDS}"
    try:
        found = read_json(file)
    except OSError as error:
        raise StartupError(f"{error}: {way_out}") from error
    if found is not None:
        damaged = StartupError(f"{file} is damaged, it says {found}: {way_out}")
        owner, version = found.get("node_id"), found.get("version")
        if not isinstance(owner, int) or not isinstance(version, int):
            raise damaged
        if owner != node_id:
            raise StartupError(
                f"the data directory {path} belongs to broker {owner}, not {node_id}; "
                f"give its --node-id or another --data-dir"
            )
        if version != VERSION:
            raise StartupError(
                f"the data directory {path} has version {version}, made by another release; "
                f"this one reads {VERSION}: start that release, or give another --data-dir"
            )
        try:
            return uuid.UUID(str(found.get("log_id")))
        except ValueError as error:
            raise damaged from error
    log_id = uuid.uuid4()
    write_json(file, {"node_id": node_id, "log_id": str(log_id), "version": VERSION})
    sync_directory(path)
    return log_id
