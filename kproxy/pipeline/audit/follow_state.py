"""What a following audit keeps between micro-batches: its state, and which findings it has reported.

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

from kproxy.pipeline.audit.schemas import UNPROVEN_KINDS, WRONG_KINDS
from kproxy.pipeline.spark import as_spark_failure

# Of what was told already so much is remembered, so that nothing is told twice. More than is listed at a time.
TOLD_AT_MOST: Final = 20_000
# So many trails are remembered of which rows were forgotten.
TRAILS_AT_MOST: Final = 10_000
_KEPT_FILES: Final = 3
_STATE: Final = re.compile(r"state-(\d+)\.json")


class Kept(msgspec.Struct):
    """A micro-batch whose rows and headers are still looked at.

    `until_ms`: when its last record was acknowledged. `last`: the last sequence number by trail (`trail_key`).
    """

    batch: int
    until_ms: int
    last: dict[str, int]


class FollowState(msgspec.Struct):
    """`read_to`: by topic and partition up to which offset logs were read. `settled_ms`: windows before it are written.

    `forgotten`: by trail how many of its first rows are not looked at any more. `is_behind`: there is more to be read
    already. `told`: what was told one by one; `beyond`: by kind how many findings there were besides those that were
    listed. The sums are of all batches.
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
        """These were told now."""
        self.told = [*self.told, *keys][-TOLD_AT_MOST:]

    def forget(self, key: str, count: int) -> None:
        """So many of a trail's first rows are not looked at any more.

        It may be heard of again long after: what was forgotten of it is no gap then.
        """
        self.forgotten[key] = max(count, self.forgotten.pop(key, 0))
        while len(self.forgotten) > TRAILS_AT_MOST:
            del self.forgotten[next(iter(self.forgotten))]


class Place:
    """A directory, of this machine or any that Spark can write to."""

    def __init__(self, session: Any, path: str) -> None:
        self.path = path.rstrip("/")
        self._session = session

    def below(self, name: str) -> str:
        return f"{self.path}/{name}"

    def has(self, path: str) -> bool:
        """Whether there is such a file or directory, by its whole path. Raises SparkFailed."""
        with as_spark_failure(f"{path} could not be looked for"):
            found, files = self._at(path)
            return bool(files.exists(found))

    def names(self) -> list[str]:
        """Of what is in the directory; none where there is none. Raises SparkFailed."""
        with as_spark_failure(f"{self.path} could not be read"):
            path, files = self._at(self.path)
            return [each.getPath().getName() for each in files.listStatus(path)] if files.exists(path) else []

    def read(self, name: str) -> bytes | None:
        """None where there is no such file. Raises SparkFailed."""
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
        """Whole or not at all. Raises SparkFailed."""
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
        """With all that is in it; nothing where it is not there. Raises SparkFailed."""
        with as_spark_failure(f"{self.below(name)} could not be deleted"):
            path, files = self._files(name)
            files.delete(path, True)

    def _files(self, name: str) -> tuple[Any, Any]:
        return self._at(self.below(name))

    def _at(self, path: str) -> tuple[Any, Any]:
        """As Hadoop knows it, and the file system that it is in."""
        context = self._session.sparkContext
        found = context._jvm.org.apache.hadoop.fs.Path(path)
        return found, found.getFileSystem(context._jsc.hadoopConfiguration())


class StateFiles:
    """The states of the last micro-batches."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def before(self, batch: int) -> FollowState:
        """The state in which `batch` begins. Raises SparkFailed."""
        if batch == 0:
            return FollowState()
        content = self._place.read(_name(batch - 1))
        return FollowState() if content is None else msgspec.json.decode(content, type=FollowState)

    def newest(self) -> FollowState:
        """Where the run before ended. Raises SparkFailed."""
        batches = [int(found[1]) for found in map(_STATE.fullmatch, self._place.names()) if found]
        return self.before(max(batches) + 1) if batches else FollowState()

    def save(self, state: FollowState) -> None:
        self._place.write(_name(state.batch), msgspec.json.encode(state))
        if state.batch >= _KEPT_FILES:
            self._place.delete(_name(state.batch - _KEPT_FILES))


def _name(batch: int) -> str:
    return f"state-{batch}.json"


def trail_key(proxy: str, incarnation: str) -> str:
    """A trail as one text, whatever characters its proxy's name has."""
    return msgspec.json.encode((proxy, incarnation)).decode()


def trail_of(key: str) -> tuple[str, str]:
    """Proxy and incarnation."""
    return msgspec.json.decode(key, type=tuple[str, str])


Alarm = Callable[[str, bool], None]
"""Told of each finding in a sentence, and whether it is a failure or only unproven."""


# Of each kind so many findings of a micro-batch are told one by one.
TOLD_ONE_BY_ONE: Final = 100
LISTED: Final = 2_000
# What whoever audits has said himself is no news.
TOLD_KINDS: Final = (*WRONG_KINDS, *UNPROVEN_KINDS)

Row = Mapping[str, Any]


class Said(NamedTuple):
    """A sentence, and whether it is of a failure or only of what is unproven."""

    sentence: str
    fails: bool


def untold(state: FollowState, findings: Sequence[Row]) -> list[Row]:
    """Those that were not told before, each once, the worst first."""
    told = set(state.told)
    new = {key: row for row in findings if (key := _told_as(row)) not in told}
    return sorted(new.values(), key=lambda row: -(row["records"] or 0))


def tell(state: FollowState, findings: Sequence[Row], kinds: Collection[str]) -> tuple[list[Row], list[Said]]:
    """What is new among an audit's findings of these kinds, and what to say of it; it counts as told then."""
    new = [row for row in untold(state, findings) if row["kind"] in kinds]
    said = []
    for kind in kinds:
        rows = [row for row in new if row["kind"] == kind]
        beyond = _beyond(kind, findings)
        count = len(rows) + max(0, beyond - state.beyond.get(kind, 0))
        state.beyond = {**state.beyond, kind: beyond}
        fails = kind not in UNPROVEN_KINDS
        state.failures += count * fails
        state.unproven += count * (not fails)
        said += [Said(f"{_where(row)}{row['detail']}", fails) for row in rows[:TOLD_ONE_BY_ONE]]
        more = count - len(rows[:TOLD_ONE_BY_ONE])
        if more:
            said.append(Said(f"{kind}: {more:,} more, too many to tell one by one: see the table findings.", fails))
    state.remember(_told_as(row) for row in new)
    return new, said


def _beyond(kind: str, findings: Sequence[Row]) -> int:
    """How many there are besides those that are listed."""
    of_kind = [row["of_kind"] or 0 for row in findings if row["kind"] == kind]
    return max(0, max(of_kind, default=0) - len(of_kind))


def _told_as(row: Row) -> str:
    names = ("kind", "topic", "partition", "first_offset", "last_offset", "proxy", "incarnation", "sequence")
    return " ".join(str(row[name]) for name in names)


def _where(row: Row) -> str:
    if row["topic"] is None:
        return ""
    offsets = "" if row["first_offset"] is None else f" offsets {row['first_offset']} to {row['last_offset']}"
    return f"{row['kind']}: {row['topic']}/{row['partition']}{offsets}: "
