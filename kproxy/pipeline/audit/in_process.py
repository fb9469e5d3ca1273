"""Judge a small audit in this process, with the judge of `judge.py` on whole partitions and without Spark."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from kproxy.errors import StartupError
from kproxy.pipeline.audit import columns
from kproxy.pipeline.audit.columns import ABOUT, DELETED, GONE, UNREAD, arrow_schema
from kproxy.pipeline.audit.findings import Findings, Row, of_unproven, sum_up, window_row
from kproxy.pipeline.audit.judge import (
    Amounts,
    Batch,
    Bounds,
    JudgeRules,
    Range,
    judge_gone,
    judge_log,
    repeats,
)
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.proof import Stamp, TrailName, TrailPart, Unproven, is_unproven, trail_part
from kproxy.pipeline.audit.rules import AuditRules
from kproxy.pipeline.audit.trail_rows import TrailRow


@dataclass(slots=True)
class Results:
    """The rows of the result tables, by the names in `columns.py`."""

    windows: list[Row] = field(default_factory=list)
    partitions: list[Row] = field(default_factory=list)
    findings: list[Row] = field(default_factory=list)
    owners: list[Row] = field(default_factory=list)
    throughput: list[Row] = field(default_factory=list)

    def write(self, directory: str, about: Mapping[str, str]) -> None:
        """Write all tables to a directory of this machine, replacing earlier ones, as `tables.write_results` does.

        Raise StartupError.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise StartupError(
                "--output writes Parquet files, with pyarrow: pip install 'kproxy-kafka[parquet]'."
            ) from error
        tables = {name: (getattr(self, name), getattr(columns, name.upper())) for name in self.__slots__}
        rows = [{"label": label, "text": text} for label, text in about.items()]
        tables[ABOUT] = (rows, {"label": "string", "text": "string"})
        try:
            for name, (listed, kinds) in tables.items():
                place = Path(directory, name)
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                parquet.write_table(pa.Table.from_pylist(listed, arrow_schema(kinds)), place / "part-00000.parquet")
        except OSError as error:
            reason = error.strerror or error
            raise StartupError(f"The audit's results could not be written to {directory}: {reason}.") from error

    def listed(self) -> list[Row]:
        return self.findings

    def rows(self, table: str, only: Collection[tuple[str, int]] | None = None) -> Iterator[Row]:
        return (row for row in getattr(self, table) if only is None or (row["topic"], row["partition"]) in only)

    def extent(self) -> tuple[int, int] | None:
        times = [row[name] for row in self.windows for name in ("window_start", "window_end")]
        return (round(min(times).timestamp() * 1000), round(max(times).timestamp() * 1000)) if times else None


def audit_rows(
    rows: Iterable[TrailRow],
    log: Mapping[TopicPartition, list[Batch]],
    bounds: Mapping[TopicPartition, Bounds],
    rules: AuditRules,
    unread: Mapping[TopicPartition, str] = MappingProxyType({}),
    parts: Mapping[TrailName, TrailPart] | None = None,
) -> Results:
    """Audit `rows`, in any order. `unread`: partitions whose logs could not be read, and why.

    `parts`: the trails, if `rows` are not all their rows.
    """
    living = {topic: limits.topic_id for (topic, _), limits in bounds.items()}
    stamps: dict[TrailName, list[Stamp]] = defaultdict(list)
    # By partition and, for deleted topics, topic id; the existing topic has "".
    ranges: dict[TopicPartition, dict[str | None, list[Range]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if parts is None:
            stamps[row.proxy, row.incarnation].append(row.stamp())
        if row.kind != "range" or row.topic is None or row.partition is None:
            continue
        if rules.judges(row.topic, row.last_acked_at or 0):
            topic_id = row.topic_id if rules.is_gone(row.topic, row.topic_id, living) else ""
            ranges[TopicPartition(row.topic, row.partition)][topic_id].append(row.acknowledged())
    if parts is None:
        parts = {name: trail_part(each) for name, each in stamps.items()}
    judge, missing = rules.prove(parts)
    audit = _Audit(rules, judge, missing)
    for which in sorted(bounds.keys() | ranges.keys() | log.keys() | unread.keys()):
        batches = [] if which in unread else log.get(which, [])
        audit.judge_partition(which, ranges.get(which, {}), batches, bounds.get(which), unread.get(which))
    return audit.results()


class _Audit:
    def __init__(self, rules: AuditRules, judge: JudgeRules, missing: list[Unproven]) -> None:
        self._rules = rules
        self._judge = judge
        self._missing = missing
        self._results = Results()
        self._findings = Findings(rules.max_findings)
        self._flows: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])

    def judge_partition(
        self,
        which: TopicPartition,
        ranges: Mapping[str | None, list[Range]],
        batches: list[Batch],
        bounds: Bounds | None,
        unread: str | None,
    ) -> None:
        topic, partition = which
        deleted = self._rules.deleted_topics
        probes = [(at, each) for each in repeats(batches) for at in (each.batch.base_offset, each.first_base_offset)]
        here = ranges.get("", ()) if unread is None else ()
        windows, part, copies = judge_log(here, batches, bounds, self._judge, probes=probes)
        for topic_id, theirs in ranges.items():
            if topic_id != "" or unread is not None:
                kind = UNREAD if topic_id == "" else DELETED if topic in deleted else GONE
                more, gone = judge_gone(theirs, topic_id, self._judge, kind)
                part.add(gone, self._rules.max_findings)
                for window, amounts in more.items():
                    windows.setdefault(window, Amounts()).add(amounts)
        unproven = bool(self._missing)
        summed = sum_up(topic, partition, part, bounds, deleted, self._judge, unproven=unproven, unread=unread)
        self._results.partitions.append(summed.row)
        self._results.owners += summed.owners
        self._findings.note(summed.findings, summed.found)
        for window, records in copies.values():
            windows[window].counts["duplicated"] += records
        for window, changes in summed.changes.items():
            if window in windows:
                windows[window].counts["ownership_changes"] += changes
        for window, amounts in sorted(windows.items()):
            self._note_window(which, window, amounts, unproven=summed.row["unchecked"] > 0)

    def _note_window(self, which: TopicPartition, window: int, amounts: Amounts, *, unproven: bool) -> None:
        length_ms = self._rules.window_ms
        unproven |= is_unproven(window, length_ms, self._missing)
        self._results.windows.append(window_row(*which, window, length_ms, amounts, unproven=unproven))
        for owner, (records, size) in amounts.by_owner.items():
            flow = self._flows[window, owner]
            flow[0] += records
            flow[1] += size

    def results(self) -> Results:
        for each in map(of_unproven, self._missing):
            self._findings.note([each], {each["kind"]: 1})
        self._results.findings = self._findings.whole()
        self._results.throughput = [
            {
                "window_start": datetime.fromtimestamp(window / 1000, UTC),
                "owner": owner,
                "records": records,
                "bytes": size,
            }
            for (window, owner), (records, size) in sorted(self._flows.items())
        ]
        return self._results
