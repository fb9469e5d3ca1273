"""`kproxy pipeline audit --follow`: judge the new rows of a trail every few seconds, and report faults at once.

A round reads the trail's new rows and the logs' new batches. In this process it judges the new rows,
together with earlier rows that may have the same offsets, and reports each finding once. Each round judges again which
times the trails prove, so a proxy that falls silent is reported without any new row.

States: FOLLOWING --stop--> ENDED. The job also ends if brokers fail for longer than the patience, or if the state file
fails. After a restart with its state file it continues where it was.

Invariants
1. A round reads the rows before the logs, so that the logs must have every record that the rows acknowledge.
2. Each reading of a log begins at the first offset that new rows acknowledge, or where the last one ended, whichever is
   lower, and replaces earlier batches from there on: the log may have been truncated or created again.
3. For `horizon_ms`, at most MOST_KEPT rows, and MOST_KEPT batches of each partition, are kept to find offsets assigned
   twice and repeated batches. Trails are kept for `horizon_ms` after their end, and at most TRAILS_AT_MOST.
4. The state file has the state of `horizon_ms` ago, and the findings reported since. Rows that are read again are
   judged again, but no finding is reported twice.
5. Rows of a partition that cannot be read are judged again in the next round.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from kproxy.errors import StartupError
from kproxy.pipeline.audit.columns import UNPROVEN_KINDS, WRONG_KINDS
from kproxy.pipeline.audit.judge import Batch
from kproxy.pipeline.audit.log_client import LogClient, Offsets, TopicPartition, Unread
from kproxy.pipeline.audit.logs import LogTask, bounds_now, ends_behind, ends_of, existing, offsets_at, plan
from kproxy.pipeline.audit.proof import TrailName, TrailPart, joined, merge
from kproxy.pipeline.audit.report_facts import FAULTY, UNPROVEN, UNSIGNED
from kproxy.pipeline.audit.run import LOG_LOOKBACK_MS, SPARK, AuditJob, check
from kproxy.pipeline.audit.steps import audit_rows
from kproxy.pipeline.audit.trail_place import JSON, TOPIC
from kproxy.pipeline.audit.trail_reader import file_rows, files_of
from kproxy.pipeline.audit.trail_rows import TrailRow, acked_in, rows_of_pages
from kproxy.pipeline.preflight import write_whole
from kproxy.pipeline.progress import Report, stopped_by_signals
from kproxy.trail.signature import Signatures

MOST_KEPT: Final = 1_000_000
TRAILS_AT_MOST: Final = 10_000
# The most findings of a kind that a round reports one by one, and that are remembered so that none is reported twice.
ALERTS_PER_KIND: Final = 100
REMEMBERED_AT_MOST: Final = 20_000
# All kinds but declared deletions, which the user named.
_REPORTED: Final = (*WRONG_KINDS, *UNPROVEN_KINDS)
_SNAPSHOTS: Final = 10

Row = Mapping[str, Any]
Alarm = Callable[[str, bool], None]
"""Receives each finding as a sentence, and whether it is a failure or only unproven."""


@dataclass(frozen=True, slots=True)
class FollowOptions:
    """Options, with times in milliseconds. `state`: the file with which a later start continues, None for none."""

    state: Path | None = None
    every_ms: int = 5_000
    horizon_ms: int = 600_000


class Snapshot(msgspec.Struct):
    """The end of the read trail, at `at_ms` by the proxies' clocks: offsets by partition, or files; and its parts."""

    at_ms: int = 0
    offsets: dict[int, int] = {}
    files: list[str] = []
    trails: list[tuple[str, str, TrailPart]] = []
    acked: int = 0


class FollowState(msgspec.Struct):
    """The state file. `reported`: the reported findings by their identity."""

    begin: Snapshot = msgspec.field(default_factory=Snapshot)
    reported: list[str] = []
    failures: int = 0
    unproven: int = 0

    def alerts(self, findings: Sequence[Row]) -> list[Alert]:
        """Return alerts for the findings that are new, the worst first, and remember them."""
        known = set(self.reported)
        new = {key: row for row in findings if (key := _identity(row)) not in known and row["kind"] in _REPORTED}
        said: list[Alert] = []
        counts: Counter[str] = Counter()
        listed = Counter(row["kind"] for row in findings)
        for row in sorted(new.values(), key=lambda row: -(row["records"] or 0)):
            kind = row["kind"]
            counts[kind] += 1
            if counts[kind] <= ALERTS_PER_KIND:
                said.append(Alert(f"{_where(row)}{row['detail']}", kind not in UNPROVEN_KINDS))
        for kind, count in counts.items():
            # The unlisted ones are of this round's rows only, except for trails, which are judged as a whole.
            beyond = max((row["of_kind"] or 0) - listed[kind] for row in findings if row["kind"] == kind)
            total = count + (beyond if kind in WRONG_KINDS else 0)
            if kind in UNPROVEN_KINDS:
                self.unproven += total
            else:
                self.failures += total
            if (more := total - min(count, ALERTS_PER_KIND)) > 0:
                said.append(Alert(f"{kind}: {more:,} more, too many to tell one by one.", kind not in UNPROVEN_KINDS))
        self.reported = [*self.reported, *new][-REMEMBERED_AT_MOST:]
        return said


class Alert(NamedTuple):
    """A sentence to report; `fails`: it is about a failure, not only about something unproven."""

    sentence: str
    fails: bool


def _identity(row: Row) -> str:
    names = ("kind", "topic", "partition", "first_offset", "last_offset", "proxy", "incarnation", "sequence")
    return " ".join(str(row[name]) for name in names)


def _where(row: Row) -> str:
    if row["topic"] is None:
        return ""
    offsets = "" if row["first_offset"] is None else f" offsets {row['first_offset']} to {row['last_offset']}"
    return f"{row['kind']}: {row['topic']}/{row['partition']}{offsets}: "


class Follower:
    """Judge one round after another. Raise LogReadFailed, or StartupError if a file cannot be read or written."""

    def __init__(
        self,
        job: AuditJob,
        options: FollowOptions,
        alarm: Alarm,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._job = job
        self._options = options
        self._alarm = alarm
        self._wall_ms = wall_ms
        self.state = _read_state(options.state)
        begin = self.state.begin
        self._offsets, self._files, self.acked = dict(begin.offsets), set(begin.files), begin.acked
        self._trails: dict[TrailName, TrailPart] = {(proxy, name): part for proxy, name, part in begin.trails}
        self._snapshots = deque([begin])
        self._rows: dict[TopicPartition, deque[TrailRow]] = defaultdict(deque)
        self._batches: dict[TopicPartition, list[Batch]] = defaultdict(list)
        self._read_to: dict[TopicPartition, int] = {}
        self._again: list[TrailRow] = []
        self._newest_ms = 0

    def round(self) -> None:
        """Read new rows and batches, judge them, report, and write the state file."""
        # Set before reading, which may take longer than a live proxy is silent.
        read_at_ms = self._wall_ms()
        rules = self._job.rules(read_at_ms, lookback_ms=self._options.horizon_ms)
        signatures = self._job.trail.signatures()
        new = self._new_rows(signatures)
        if signatures is not None and signatures.refused:
            self._alarm(f"{UNSIGNED.capitalize()}: {signatures.refused:,}.", False)
        # Rows dated in the future by a wrong clock must not move the horizon beyond all other rows.
        newest_ms = max((row.last_acked_at if row.kind == "range" else row.at for row in new), default=0)
        self._newest_ms = max(self._newest_ms, min(newest_ms, read_at_ms))
        self._note_trails(new)
        ranges = [*self._again, *(row for row in new if self._is_judged(row))]
        self.acked += sum(row.record_count for row in new if self._is_judged(row, lookback_ms=0))
        log, bounds, unread = self._read_logs(ranges)
        self._again = [row for row in ranges if row.which in unread]
        results = audit_rows(self._concerned(ranges, unread), log, bounds, rules, unread, self._trails)
        for each in self.state.alerts(list(results.findings)):
            self._alarm(each.sentence, each.fails)
        self._forget()
        self._save()

    def _is_judged(self, row: TrailRow, lookback_ms: int = LOG_LOOKBACK_MS) -> bool:
        job = self._job
        if row.kind != "range" or (job.topics and row.topic not in job.topics):
            return False
        return job.from_ms is None or row.last_acked_at >= job.from_ms - lookback_ms

    def _new_rows(self, signatures: Signatures | None) -> list[TrailRow]:
        job = self._job
        if job.trail.kind != TOPIC:
            files = files_of(job.trail)
            rows = [row for file in files if file.name not in self._files for row in file_rows(file, signatures)]
            # Forget files that have been removed since.
            self._files = {file.name for file in files}
            return rows
        bootstrap = job.trail_bootstrap or job.bootstrap
        with LogClient(bootstrap, job.kafka) as client:
            ends = ends_of(client, (job.trail.name,))
            starts: Offsets = {which: self._offsets.get(which.partition, 0) for which in ends}
            if not self._offsets and job.from_ms is not None:
                starts = offsets_at(client, max(0, job.from_ms - self._options.horizon_ms), ends)
            pieces = plan(client, starts, ends)
            rows = list(rows_of_pages(signatures, LogTask(bootstrap, job.kafka, client.leaders).pages(pieces)))
        self._offsets = {which.partition: end for which, end in ends.items()}
        return rows

    def _note_trails(self, rows: Sequence[TrailRow]) -> None:
        parts: dict[TrailName, list[TrailPart]] = defaultdict(list)
        for row in rows:
            known = self._trails.get((row.proxy, row.incarnation))
            if known is None or row.sequence > known.last:
                parts[row.proxy, row.incarnation].append(row.part())
        for name, each in parts.items():
            merge(self._trails, name, joined(each))

    def _read_logs(self, ranges: Sequence[TrailRow]) -> tuple[Mapping[TopicPartition, list[Batch]], Any, Unread]:
        """Read the logs of the partitions in `ranges`; topics deleted since have none."""
        job, unread, acked = self._job, Unread(), acked_in(ranges)
        needed = acked.first
        if not needed:
            return {}, {}, unread
        with LogClient(job.bootstrap, job.kafka) as client:
            topics = existing(client, {which.topic for which in needed})
            if not topics:
                return {}, {}, unread
            ends = ends_behind(acked.behind_one, lambda: ends_of(client, topics, unread))
            # Partitions without new rows start at their end, so none of their batches are read.
            starts = {
                which: min(first, self._read_to.get(which, first), ends[which])
                for which, first in needed.items()
                if which in ends
            }
            pieces = plan(client, starts, ends, unread=unread)
            read: dict[TopicPartition, list[Batch]] = defaultdict(list)
            for chunk in LogTask(job.bootstrap, job.kafka, client.leaders).headers(pieces):
                read[chunk.which] += chunk.batches
                unread |= {} if chunk.unread is None else {chunk.which: chunk.unread}
            bounds = bounds_now(client, topics, job.compacted, unread)
        for which, start in starts.items():
            before = [each for each in self._batches[which] if each.base_offset < start]
            self._batches[which] = [*before, *read[which]]
            self._read_to[which] = ends[which]
        log = {which: self._batches[which] for which in needed}
        return log, {which: each for which, each in bounds.items() if which in needed}, unread

    def _concerned(self, ranges: Sequence[TrailRow], unread: Unread) -> Iterator[TrailRow]:
        """Yield the new rows, and earlier rows that may have the same offsets; keep the new rows that are judged."""
        for which, first in acked_in(ranges).first.items():
            for row in self._rows[which]:
                if max(at + count for at, count in row.ranges) > first:
                    yield row
        for row in ranges:
            if row.which not in unread:
                self._rows[row.which].append(row)
            yield row

    def _forget(self) -> None:
        """Drop rows, batches and trails that are older than the horizon or too many to keep."""
        until_ms = self._newest_ms - self._options.horizon_ms
        too_many = max(0, sum(map(len, self._rows.values())) - MOST_KEPT)
        for which, rows in list(self._rows.items()):
            while rows and (too_many > 0 or rows[0].last_acked_at < until_ms):
                rows.popleft()
                too_many -= 1
            if rows:
                first = min(acked_in(rows).first.values())
                kept = [each for each in self._batches[which] if each.last_offset >= first]
                self._batches[which] = kept[-MOST_KEPT:]
            else:
                del self._rows[which]
                self._batches.pop(which, None)
        self._again = self._again[-MOST_KEPT:]
        ended = [name for name, part in self._trails.items() if part.end is not None and part.last_at < until_ms]
        oldest = sorted(self._trails, key=lambda name: self._trails[name].last_at)
        for name in {*ended, *oldest[: max(0, len(oldest) - TRAILS_AT_MOST)]}:
            del self._trails[name]

    def _save(self) -> None:
        horizon_ms = self._options.horizon_ms
        if self._newest_ms - self._snapshots[-1].at_ms >= horizon_ms // _SNAPSHOTS:
            # Copies, because later rows are joined to the parts.
            trails = [(*name, deepcopy(part)) for name, part in self._trails.items()]
            files = sorted(self._files)
            self._snapshots.append(Snapshot(self._newest_ms, dict(self._offsets), files, trails, self.acked))
        while len(self._snapshots) > 1 and self._snapshots[1].at_ms <= self._newest_ms - horizon_ms:
            self._snapshots.popleft()
        self.state.begin = self._snapshots[0]
        if self._options.state is not None:
            write_whole(self._options.state, msgspec.json.encode(self.state).decode(), "--state")


def _read_state(path: Path | None) -> FollowState:
    if path is None or not path.exists():
        return FollowState()
    try:
        return msgspec.json.decode(path.read_bytes(), type=FollowState)
    except (OSError, msgspec.DecodeError) as error:
        raise StartupError(f"--state {path} cannot be read ({error}): name another file, or remove it.") from error


def run_follow_job(
    job: AuditJob,
    options: FollowOptions,
    *,
    display: Report | None = None,
    output: Console | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Follow the trail until interrupted; return the exit status. Raise StartupError or LogReadFailed."""
    if job.to_ms is not None or job.json or any(each is not None for each in (job.report, job.output, job.metrics)):
        raise StartupError(
            "--follow does not end and reports each finding at once: omit --to, --report, --output, --json, --metrics."
        )
    if job.engine == SPARK or "://" in job.trail.name:
        raise StartupError(
            "--follow reads files of this machine in this process: omit --engine spark and addresses with ://."
        )
    if job.trail.kind == JSON:
        raise StartupError("--follow needs files that are whole when they appear, or a topic: give another --trail.")
    check(job)
    display, stop = display or Report(), stop or threading.Event()
    with display:
        stage = display.stage("audit", "waiting for the first rows")
        output = output or Console(highlight=False)
        # If stdout is a terminal, print through the progress display, which moves its bars below the line.
        follower = Follower(job, options, partial(_alarm, display.progress if output.is_terminal else output))
        with stopped_by_signals(stop.set):
            while True:
                follower.round()
                stage.say(_progress(follower))
                if stop.wait(options.every_ms / 1000):
                    break
        stage.finish(_progress(follower))
    if follower.state.failures:
        return FAULTY
    return UNPROVEN if follower.state.unproven and not job.allow_unproven else 0


def _alarm(console: Console, sentence: str, fails: bool) -> None:
    """Print an alarm when it is found."""
    style, word = ("bold red", "ALARM") if fails else ("yellow", "UNPROVEN")
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} "
    console.print(Text.assemble(now, (word, style), f" {sentence}"), soft_wrap=True)


def _progress(follower: Follower) -> str:
    state = follower.state
    found = "nothing wrong" if not state.failures else f"{state.failures:,} alarms"
    unproven = f", {state.unproven:,} times unproven" if state.unproven else ""
    return f"{follower.acked:,} records acknowledged, {found}{unproven}"
