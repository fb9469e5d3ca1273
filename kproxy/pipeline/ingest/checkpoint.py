"""Keep a job's identity and schema beside Spark's own checkpoint.

A checkpoint directory has our file (`kproxy-ingest.json`, written before Spark writes anything), belongs to another
program (it has Spark's files alone), or is free (it has neither).

Invariants
1. A job does not start if its source or target differs from the stored one: it would use another job's offsets and skip
   rows.
2. A schema is inferred once; later starts use the stored one, or one that the user gives.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pyspark.sql import SparkSession

from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import RATE, IngestOptions
from kproxy.pipeline.ingest.transactions import Unfinished
from kproxy.pipeline.spark import as_spark_failure

FILE_NAME: Final = "kproxy-ingest.json"
# Spark's files that every checkpoint has.
_SPARKS: Final = ("metadata", "offsets")
_VERSION: Final = 1
_MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """The stored identity.

    `source` and `target` are in words; cluster ids are None if they are not known. `schema` is Spark's JSON, None if
    the source has its own schema. `tasks` is how many write in transactions, None if the last start was without these.
    """

    job_id: str
    source: str
    target: str
    source_cluster: str | None = None
    target_cluster: str | None = None
    schema: str | None = None
    schema_inferred: bool = False
    tasks: int | None = None


class Checkpoint:
    """The directory at `path`, on any file system that Spark knows."""

    def __init__(self, session: SparkSession, path: str) -> None:
        jvm: Any = session._jvm
        self._given = path
        self._path_type = jvm.org.apache.hadoop.fs.Path
        with as_spark_failure(f"The checkpoint {path} cannot be used"):
            self._files, self._directory = _qualified(session, path)
        self.path = str(self._directory)

    def job(self) -> Job | None:
        """Return the stored job, None if the directory is free.

        Raise SparkFailed if it is not accessible, StartupError if it is another program's or our file not readable.
        """
        with as_spark_failure(f"The checkpoint {self._given} cannot be looked at"):
            if self._files.exists(self._at(FILE_NAME)):
                with contextlib.closing(self._files.open(self._at(FILE_NAME))) as stream:
                    return self._read(bytes(stream.readNBytes(_MAX_BYTES)))
            if not any(self._files.exists(self._at(name)) for name in _SPARKS):
                return None
        raise StartupError(
            f"--checkpoint {self._given} belongs to another Spark job: give a directory of this job's own."
        )

    def unfinished(self) -> Unfinished | None:
        """Return the micro-batch that Spark will run again, None if it committed all that it began."""
        with as_spark_failure(f"The checkpoint {self._given} cannot be looked at"):
            begun, done = map(self._numbered, ("offsets", "commits"))
            last = max(begun, default=-1)
            return Unfinished(last, begun[last].getModificationTime()) if last > max(done, default=-1) else None

    def _numbered(self, name: str) -> dict[int, Any]:
        """Return the files of one of Spark's logs."""
        found = self._files.listStatus(self._at(name)) if self._files.exists(self._at(name)) else ()
        return {int(number): each for each in found if (number := each.getPath().getName()).isdigit()}

    def _read(self, content: bytes) -> Job:
        try:
            fields = json.loads(content)
            if fields.pop("version") != _VERSION:
                raise ValueError("another version of kproxy wrote it")
            return Job(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(
                f"{self._given}/{FILE_NAME} cannot be read ({error}): give another --checkpoint."
            ) from error

    def save(self, job: Job) -> None:
        """Write a temporary file and rename it, so that it is whole even after a kill. Raise SparkFailed."""
        text = json.dumps({"version": _VERSION, **asdict(job)}, indent=2) + "\n"
        aside, final = self._at(f".{FILE_NAME}.{uuid.uuid4().hex}"), self._at(FILE_NAME)
        with as_spark_failure(f"The checkpoint {self._given} cannot be written"):
            with contextlib.closing(self._files.create(aside, True)) as stream:
                stream.write(text.encode())
            if not self._files.rename(aside, final):
                # Some file systems do not rename over an existing file.
                self._files.delete(final, False)
                self._files.rename(aside, final)

    def _at(self, name: str) -> Any:
        return self._path_type(self._directory, name)


def _qualified(session: SparkSession, path: str) -> tuple[Any, Any]:
    """Return Hadoop's file system for `path`, and the qualified path, which is the same for all spellings of it."""
    jvm: Any = session._jvm
    given = jvm.org.apache.hadoop.fs.Path(path)
    files = given.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
    return files, files.makeQualified(given)


def source_in_words(session: SparkSession, options: IngestOptions) -> str:
    """Describe the source; the same for all spellings of its path. Raise SparkFailed if it cannot be resolved."""
    if options.reads_kafka:
        return f"topic {', '.join(sorted(options.topics))}"
    if options.format == RATE:
        return f"numbers, {options.rows_per_second} a second"
    if not options.reads_files:
        return options.source
    with as_spark_failure(f"{options.where} cannot be used"):
        return f"{options.format} files in {_qualified(session, options.where)[1]}"


def settle(known: Job | None, asked: Job, path: str) -> Job:
    """Return the job to run: `known` with the tasks of `asked` and what else the user gave; without it, `asked`. Pure.

    Raise StartupError if the checkpoint belongs to another job.
    """
    if known is None:
        return asked
    for what, theirs, ours in (("reads", known.source, asked.source), ("writes to", known.target, asked.target)):
        if theirs != ours:
            raise StartupError(
                f"--checkpoint {path} belongs to a job that {what} {theirs}, not {ours}: give another --checkpoint for "
                "a new job, or its own options to go on with that one."
            )
    merged: dict[str, Any] = {"tasks": asked.tasks}
    for name, flag in (("source_cluster", "--from-bootstrap"), ("target_cluster", "--bootstrap")):
        before, now = getattr(known, name), getattr(asked, name)
        if None not in (before, now) and before != now:
            raise StartupError(
                f"--checkpoint {path} belongs to a job with another Kafka cluster behind {flag} ({before}, not {now}): "
                "give another --checkpoint for a new job, or the address of that cluster."
            )
        merged[name] = now or before
    if asked.schema is not None:
        merged |= {"schema": asked.schema, "schema_inferred": False}
    return replace(known, **merged)
