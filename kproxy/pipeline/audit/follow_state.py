"""The state of a following audit, and its reports of new findings.

The state is in files beside Spark's own checkpoint, one for each micro-batch, written after all of its results. A
repeated micro-batch starts from the file of the one before it, and so gives the same results.

Invariants
1. Findings that were reported are removed first, and only the rest is counted: a new finding is reported, however many
   were before.
2. The sums in the state count all findings, reported one by one or not.
3. At most `LISTED` findings of a kind are listed. If there are more, the number of the others is reported whenever it
   rises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kproxy.pipeline.audit.columns import UNPROVEN_KINDS, WRONG_KINDS
from kproxy.pipeline.spark import as_spark_failure

# Findings remembered, so that none is reported twice. More than are listed at a time.
REMEMBERED_AT_MOST: Final = 20_000
# Trails remembered whose first rows were dropped.
TRAILS_AT_MOST: Final = 10_000
_KEPT_FILES: Final = 3
_STATE: Final = re.compile(r"state-(\d+)\.json")


class Kept(msgspec.Struct):
    """A micro-batch whose rows and headers are kept.

    `until_ms`: when its last record was acknowledged. `last`: the last sequence number by trail (`trail_key`).
    """

    batch: int
    until_ms: int
    last: dict[str, int]


class FollowState(msgspec.Struct):
    """The state after a micro-batch. Its field names are those of the files.

    `read_to`: the offset that logs were read to, by topic and partition. `settled_ms`: windows before it are written.
    `forgotten`: the number of a trail's first rows that were dropped. `is_behind`: more rows are waiting to be read.
    `told`: the findings that were reported one by one; `beyond`: the number of findings besides the listed ones, by
    kind. The sums are of all micro-batches.
    """

    batch: int = -1
    kept: list[Kept] = []
    read_to: dict[str, dict[str, int]] = {}
    forgotten: dict[str, int] = {}
    settled_ms: int = 0
    is_behind: bool = False
    told: list[str] = []
    beyond: dict[str, int] = {}
    acked: int = 0
    failures: int = 0
    unproven: int = 0

    def remember(self, keys: Iterable[str]) -> None:
        """Remember that these findings were reported."""
        self.told = [*self.told, *keys][-REMEMBERED_AT_MOST:]

    def forget(self, key: str, count: int) -> None:
        """Remember that the first `count` rows of a trail were dropped.

        If the trail continues long after, its dropped rows are not a gap.
        """
        self.forgotten[key] = max(count, self.forgotten.pop(key, 0))
        while len(self.forgotten) > TRAILS_AT_MOST:
            del self.forgotten[next(iter(self.forgotten))]


class Place:
    """A directory on this machine, or any that Spark can write to."""

    def __init__(self, session: Any, path: str) -> None:
        self.path = path.rstrip("/")
        self._session = session

    def below(self, name: str) -> str:
        return f"{self.path}/{name}"

    def has(self, path: str) -> bool:
        """Return whether the file or directory at this full path exists. Raise SparkFailed."""
        with as_spark_failure(f"{path} could not be looked for"):
            found, files = self._at(path)
            return bool(files.exists(found))

    def names(self) -> list[str]:
        """Return the names in the directory; [] if it does not exist. Raise SparkFailed."""
        with as_spark_failure(f"{self.path} could not be read"):
            path, files = self._at(self.path)
            return [each.getPath().getName() for each in files.listStatus(path)] if files.exists(path) else []

    def read(self, name: str) -> bytes | None:
        """Return the file's content, None if it does not exist. Raise SparkFailed."""
        with as_spark_failure(f"{self.below(name)} could not be read"):
            path, files = self._files(name)
            if not files.exists(path):
                return None
            stream = files.open(path)
            try:
                return bytes(stream.readAllBytes())
            finally:
                stream.close()

    def write(self, name: str, content: bytes) -> None:
        """Write the file, whole or not at all. Raise SparkFailed."""
        with as_spark_failure(f"{self.below(name)} could not be written"):
            unfinished, files = self._files(f"{name}.unfinished")
            stream = files.create(unfinished, True)
            try:
                stream.write(bytearray(content))
            finally:
                stream.close()
            path, _ = self._files(name)
            files.delete(path, False)
            files.rename(unfinished, path)

    def delete(self, name: str) -> None:
        """Delete a file or a whole directory, if it exists. Raise SparkFailed."""
        with as_spark_failure(f"{self.below(name)} could not be deleted"):
            path, files = self._files(name)
            files.delete(path, True)

    def _files(self, name: str) -> tuple[Any, Any]:
        return self._at(self.below(name))

    def _at(self, path: str) -> tuple[Any, Any]:
        """Return Hadoop's path and its file system."""
        context = self._session.sparkContext
        found = context._jvm.org.apache.hadoop.fs.Path(path)
        return found, found.getFileSystem(context._jsc.hadoopConfiguration())


class StateFiles:
    """The state files of the last micro-batches."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def before(self, batch: int) -> FollowState:
        """Return the state in which `batch` begins. Raise SparkFailed."""
        if batch == 0:
            return FollowState()
        content = self._place.read(_name(batch - 1))
        return FollowState() if content is None else msgspec.json.decode(content, type=FollowState)

    def newest(self) -> FollowState:
        """Return the state in which the previous run ended. Raise SparkFailed."""
        batches = [int(found[1]) for found in map(_STATE.fullmatch, self._place.names()) if found]
        return self.before(max(batches) + 1) if batches else FollowState()

    def save(self, state: FollowState) -> None:
        self._place.write(_name(state.batch), msgspec.json.encode(state))
        if state.batch >= _KEPT_FILES:
            self._place.delete(_name(state.batch - _KEPT_FILES))


def _name(batch: int) -> str:
    return f"state-{batch}.json"


def trail_key(proxy: str, incarnation: str) -> str:
    """Encode a trail as one text, whatever characters its proxy's name has."""
    return msgspec.json.encode((proxy, incarnation)).decode()


def trail_of(key: str) -> tuple[str, str]:
    """Decode a `trail_key` into proxy and incarnation."""
    return msgspec.json.decode(key, type=tuple[str, str])


Alarm = Callable[[str, bool], None]
"""Receives each finding as a sentence, and whether it is a failure or only unproven."""


# Findings of a kind that are reported one by one after a micro-batch.
ALERTS_PER_KIND: Final = 100
LISTED: Final = 2_000
# Without declared deletions, which the user named.
REPORTED_KINDS: Final = (*WRONG_KINDS, *UNPROVEN_KINDS)

Row = Mapping[str, Any]


class Alert(NamedTuple):
    """A sentence; `fails`: it reports a failure, not only something unproven."""

    sentence: str
    fails: bool


def unreported(state: FollowState, findings: Sequence[Row]) -> list[Row]:
    """Return the findings that were not reported before, each once, the worst first."""
    told = set(state.told)
    new = {key: row for row in findings if (key := _identity(row)) not in told}
    return sorted(new.values(), key=lambda row: -(row["records"] or 0))


def new_alerts(state: FollowState, findings: Sequence[Row], kinds: Collection[str]) -> tuple[list[Row], list[Alert]]:
    """Return the new findings of these kinds and the alerts for them, and mark them as reported."""
    new = [row for row in unreported(state, findings) if row["kind"] in kinds]
    alerts = []
    for kind in kinds:
        rows = [row for row in new if row["kind"] == kind]
        beyond = _beyond(kind, findings)
        count = len(rows) + max(0, beyond - state.beyond.get(kind, 0))
        state.beyond = {**state.beyond, kind: beyond}
        fails = kind not in UNPROVEN_KINDS
        state.failures += count * fails
        state.unproven += count * (not fails)
        alerts += [Alert(f"{_where(row)}{row['detail']}", fails) for row in rows[:ALERTS_PER_KIND]]
        more = count - len(rows[:ALERTS_PER_KIND])
        if more:
            alerts.append(Alert(f"{kind}: {more:,} more, too many to tell one by one: see the table findings.", fails))
    state.remember(_identity(row) for row in new)
    return new, alerts


def _beyond(kind: str, findings: Sequence[Row]) -> int:
    """Return how many findings there are besides the listed ones."""
    of_kind = [row["of_kind"] or 0 for row in findings if row["kind"] == kind]
    return max(0, max(of_kind, default=0) - len(of_kind))


def _identity(row: Row) -> str:
    names = ("kind", "topic", "partition", "first_offset", "last_offset", "proxy", "incarnation", "sequence")
    return " ".join(str(row[name]) for name in names)


def _where(row: Row) -> str:
    if row["topic"] is None:
        return ""
    offsets = "" if row["first_offset"] is None else f" offsets {row['first_offset']} to {row['last_offset']}"
    return f"{row['kind']}: {row['topic']}/{row['partition']}{offsets}: "
