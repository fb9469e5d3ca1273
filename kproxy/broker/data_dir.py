"""A broker's data directory: who may use it, and where each partition's log lies in it.

broker.json                 the node id that the directory belongs to
.lock                       held, as long as a broker runs, against a second one
{topic}-{partition}/        one log each; partition.json names the topic and its id
#deleted-…/                 what is being removed ('#' stands in no topic's name)
#stray-…/                   logs set aside, of a topic that was deleted and created again
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import uuid
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path

import structlog

from kproxy.broker.checkpoint import Checkpoint, write_checkpoint
from kproxy.broker.disk import disk_error, sync_directory
from kproxy.broker.json_file import read_json, remove_scratch_files, write_json
from kproxy.broker.log import Log
from kproxy.broker.log_options import LogOptions
from kproxy.broker.segment import LogFailed
from kproxy.errors import StartupError

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl

_BROKER_FILE = "broker.json"
_PARTITION_FILE = "partition.json"
_logger = structlog.get_logger(__name__)


class DataDir:
    """An open data directory; close it last."""

    def __init__(self, path: Path, lock_fd: int, log_options: LogOptions) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._log_options = log_options
        # Held between looking whose a directory is and giving it another name: a topic that is deleted and at once
        # created again is removed by one thread and set up by another.
        self._renaming = threading.Lock()
        self._condemned: set[str] = set()

    @classmethod
    def open(cls, path: Path, node_id: int, *, log_options: LogOptions | None = None) -> DataDir:
        """Lock the directory and check whose it is, creating it where there is none. Raises StartupError.

        `log_options` are for logs that are opened without any of their own.
        """
        lock_fd = -1
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            _lock(lock_fd, path)
            _claim(path, node_id)
            remove_scratch_files(path)
            for leftover in path.glob("#deleted-*"):
                shutil.rmtree(leftover)
        except (OSError, StartupError) as error:
            if lock_fd >= 0:
                os.close(lock_fd)
            if isinstance(error, StartupError):
                raise
            raise StartupError(
                f"the data directory {path} cannot be used ({error.strerror or error}): "
                "give another with --data-dir, or make it one that this user can write to"
            ) from error
        return cls(path, lock_fd, log_options or LogOptions())

    def partition_path(self, topic: str, partition_index: int) -> Path:
        return self.path / f"{topic}-{partition_index}"

    def open_log(
        self,
        topic: str,
        partition_index: int,
        topic_id: uuid.UUID,
        options: LogOptions | None = None,
        *,
        is_expected: bool = False,
    ) -> Log:
        """The partition's log; blocks while it is read through. Raises OSError, LogFailed.

        The log of an earlier topic of the same name is set aside, not opened. Where one `is_expected` and there is
        none, it is created as one that is not whole.
        """
        directory = self.partition_path(topic, partition_index)
        identity: dict[str, object] = {"topic": topic, "partition": partition_index, "topic_id": str(topic_id)}
        remove_scratch_files(directory)
        is_new = read_json(directory / _PARTITION_FILE) != identity
        if is_new:
            self._set_up(directory, identity, is_expected=is_expected)
        options = options or self._log_options
        log = Log.open(directory, options=options)
        if is_new and options.flush != "never":
            sync_directory(self.path)
        if log.truncated_bytes:
            _logger.warning(
                "torn tail cut off", directory=str(directory), bytes=log.truncated_bytes, end_offset=log.log_end_offset
            )
        if not log.is_whole:
            _logger.error(
                "records that were here are gone; it does not lead before they are fetched from the others",
                directory=str(directory),
                end_offset=log.log_end_offset,
                high_watermark=log.high_watermark_checkpoint,
            )
        return log

    def _set_up(self, directory: Path, identity: dict[str, object], *, is_expected: bool) -> None:
        """Make the directory that of another partition than it was, if it was any. Raises OSError, LogFailed."""
        with self._renaming:
            found = read_json(directory / _PARTITION_FILE)
            if found is not None and found.get("topic") != identity["topic"]:
                raise LogFailed(f"{directory} holds topic {found.get('topic')}: this file system ignores case")
            condemned = None
            if found is not None and str(found.get("topic_id")) in self._condemned:
                condemned = self._condemn(directory)
            elif directory.exists() and any(directory.iterdir()):
                stray = self.path / f"#stray-{uuid.uuid4()}"
                _logger.warning("log set aside", directory=str(directory), moved_to=str(stray), was=found, now=identity)
                directory.rename(stray)
            try:
                directory.mkdir(exist_ok=True)
            except OSError as error:
                raise disk_error(error, directory) from error
        if condemned is not None:
            shutil.rmtree(condemned)
        try:
            if is_expected:
                write_checkpoint(directory, Checkpoint(is_whole=0), nullcontext())
            write_json(directory / _PARTITION_FILE, identity)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)  # nothing half begun, which would look like another's
            raise disk_error(error, directory) from error

    def logs_of_others(self, topic_ids: Collection[uuid.UUID]) -> list[Path]:
        """Logs of topics that are none of these; blocks. Raises OSError."""
        known = set(map(str, topic_ids))
        found = []
        for file in sorted(self.path.glob(f"*/{_PARTITION_FILE}")):
            identity = read_json(file)
            if identity is not None and identity.get("topic_id") not in known and not file.parent.name.startswith("#"):
                found.append(file.parent)
        return found

    def condemn(self, topic_id: uuid.UUID) -> None:
        """The topic is deleted, its logs are about to be: what of them stands in another's way goes at once."""
        self._condemned.add(str(topic_id))

    def all_deleted(self, topic_id: uuid.UUID) -> None:
        """Of a condemned topic nothing is left to delete."""
        self._condemned.discard(str(topic_id))

    def _condemn(self, directory: Path) -> Path:
        """Renamed first: a half-removed log must never be opened again."""
        return directory.rename(self.path / f"#deleted-{uuid.uuid4()}")

    def delete_log(self, topic: str, partition_index: int, topic_id: uuid.UUID) -> None:
        """Remove a closed log of exactly this topic, where there is one. Raises OSError."""
        directory = self.partition_path(topic, partition_index)
        with self._renaming:
            found = read_json(directory / _PARTITION_FILE)
            if found is None or found.get("topic_id") != str(topic_id):
                return
            condemned = self._condemn(directory)
        shutil.rmtree(condemned)

    def close(self) -> None:
        """Let another broker have the directory."""
        os.close(self._lock_fd)


def _lock(lock_fd: int, path: Path) -> None:
    try:
        if sys.platform == "win32":  # pragma: no cover
            msvcrt.locking(lock_fd, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise StartupError(f"another broker uses the data directory {path}; choose another --data-dir") from error


def _claim(path: Path, node_id: int) -> None:
    found = read_json(path / _BROKER_FILE)
    if found is None:
        write_json(path / _BROKER_FILE, {"node_id": node_id})
    elif found.get("node_id") != node_id:
        raise StartupError(
            f"the data directory {path} belongs to broker {found.get('node_id')}, not {node_id}; "
            f"give its --node-id or another --data-dir"
        )
