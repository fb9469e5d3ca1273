"""Keep a job's identity and schema beside Spark's own checkpoint.

A checkpoint directory is free (missing or empty), has our file (`kproxy-ingest.json`, written before Spark writes
anything), or belongs to another program: it has Spark's files alone.

Invariants
1. A job does not start if its source or target differs from the stored one: it would use another job's offsets and skip
   rows.
2. A schema is inferred once; later starts use the stored one.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql import SparkSession

from kproxy.config import split_list
from kproxy.errors import StartupError
from kproxy.pipeline.ingest.options import FileSource, IngestOptions, KafkaSource
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
    the source has its own schema.
    """

    job_id: str
    source: str
    target: str
    source_cluster: str | None = None
    target_cluster: str | None = None
    schema: str | None = None
    schema_inferred: bool = False


class Checkpoint:
    """The directory at `path`, on any file system that Spark knows."""

    def __init__(self, session: SparkSession, path: str) -> None:
        jvm: Any = session._jvm
        with as_spark_failure(f"The checkpoint {path} cannot be used"):
            self._directory = jvm.org.apache.hadoop.fs.Path(path)
            self._files = self._directory.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
            self.path = str(self._files.makeQualified(self._directory))
        self._given = path
        self._path_type = jvm.org.apache.hadoop.fs.Path
        self._io = jvm.org.apache.commons.io.IOUtils

    def job(self) -> Job | None:
        """Return the stored job, None if the directory is free.

        Raise SparkFailed if it is not accessible, StartupError if it is another program's or our file not readable.
        """
        with as_spark_failure(f"The checkpoint {self._given} cannot be looked at"):
            if self._files.exists(self._at(FILE_NAME)):
                return self._load()
            if not any(self._files.exists(self._at(name)) for name in _SPARKS):
                return None
        raise StartupError(
            f"--checkpoint {self._given} belongs to another Spark job: give a directory of this job's own."
        )

    def save(self, job: Job) -> None:
        """Write a temporary file and rename it, so that it is whole even after a kill. Raise SparkFailed."""
        fields = {name: getattr(job, name) for name in Job.__slots__}
        text = json.dumps({"version": _VERSION, **fields}, indent=2) + "\n"
        aside, final = self._at(f".{FILE_NAME}.{uuid.uuid4().hex}"), self._at(FILE_NAME)
        with as_spark_failure(f"The checkpoint {self._given} cannot be written"):
            stream = self._files.create(aside, True)
            try:
                stream.write(text.encode())
            finally:
                stream.close()
            if not self._files.rename(aside, final):
                # Some file systems do not rename over an existing file.
                self._files.delete(final, False)
                self._files.rename(aside, final)

    def _load(self) -> Job:
        if self._files.getFileStatus(self._at(FILE_NAME)).getLen() > _MAX_BYTES:
            raise StartupError(f"{self._given}/{FILE_NAME} is not ours: give another --checkpoint.")
        stream = self._files.open(self._at(FILE_NAME))
        try:
            text = self._io.toString(stream, "UTF-8")
        finally:
            stream.close()
        try:
            fields = json.loads(text)
            version = fields.pop("version")
            if version != _VERSION:
                raise StartupError(
                    f"the checkpoint {self._given} was written by another version of kproxy: use that one, "
                    "or give another --checkpoint."
                )
            return Job(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(
                f"{self._given}/{FILE_NAME} cannot be read ({error}): give another --checkpoint."
            ) from error

    def _at(self, name: str) -> Any:
        return self._path_type(self._directory, name)


def source_in_words(session: SparkSession, options: IngestOptions) -> str:
    """Describe the source; the same for all spellings of its path. Raise SparkFailed if it cannot be resolved."""
    source = options.source
    if isinstance(source, FileSource):
        jvm: Any = session._jvm
        with as_spark_failure(f"{source.path} cannot be used"):
            path = jvm.org.apache.hadoop.fs.Path(source.path)
            configuration = session._jsparkSession.sessionState().newHadoopConf()
            return f"{source.format} files in {path.getFileSystem(configuration).makeQualified(path)}"
    if isinstance(source, KafkaSource):
        return f"topic {', '.join(sorted(split_list(source.topics, '--from kafka:')))}"
    return f"numbers, {source.rows_per_second} a second"


def settle(known: Job | None, asked: Job, path: str) -> Job:
    """Return the job to run: the `known` one, else the one `asked` for. Pure.

    Raise StartupError if the checkpoint belongs to another job. A schema in `asked` was given and is used.
    """
    if known is None:
        return asked
    for what, theirs, ours in (("reads", known.source, asked.source), ("writes to", known.target, asked.target)):
        if theirs != ours:
            raise StartupError(
                f"--checkpoint {path} belongs to a job that {what} {theirs}, not {ours}: give another --checkpoint for "
                "a new job, or its own options to go on with that one."
            )
    clusters = (
        ("--from-bootstrap", known.source_cluster, asked.source_cluster),
        ("--bootstrap", known.target_cluster, asked.target_cluster),
    )
    for flag, before, now in clusters:
        if before is not None and now is not None and before != now:
            raise StartupError(
                f"--checkpoint {path} belongs to a job with another Kafka cluster behind {flag} ({before}, not {now}): "
                "give another --checkpoint for a new job, or the address of that cluster."
            )
    going_on = replace(
        known,
        source_cluster=asked.source_cluster or known.source_cluster,
        target_cluster=asked.target_cluster or known.target_cluster,
    )
    if asked.schema is not None:
        return replace(going_on, schema=asked.schema, schema_inferred=False)
    return going_on
