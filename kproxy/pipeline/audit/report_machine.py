"""Write an audit's result for programs: one JSON document, and metrics for Prometheus' textfile collector.

docs/audit.md describes both. Lists are bounded and begin with the worst, as in the report; counts include everything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kproxy.pipeline.audit.report_facts import COUNTS, Facts, Sums
from kproxy.pipeline.audit.report_text import headline, summary
from kproxy.pipeline.preflight import write_whole


def as_json(facts: Facts, status: int) -> str:
    """Return the audit as one line of JSON; `status` is the exit status."""
    document = {
        "verdict": headline(facts.verdict),
        "summary": summary(facts.verdict),
        "exit_status": status,
        "partitions": facts.sums.partitions,
        "unproven_partitions": facts.sums.unproven,
        "counts": _counts(facts.sums),
        "findings_by_kind": {kind: asdict(count) for kind, count in sorted(facts.finding_counts.items())},
        "findings": [_without_none(asdict(finding)) for finding in facts.findings],
        "findings_not_listed": facts.hidden_findings,
        "worst_partitions": [
            {
                "topic": one.topic,
                "partition": one.partition,
                "log_start_offset": one.log_start_offset,
                "end_offset": one.end_offset,
                "owners": list(one.owners),
                "unproven": bool(one.sums.unproven),
                **_counts(one.sums),
            }
            for one in facts.partitions
        ],
        "about": dict(facts.about),
    }
    return json.dumps(document, ensure_ascii=False)


def _counts(sums: Sums) -> dict[str, int]:
    return {name: getattr(sums, name) for name in COUNTS}


def _without_none(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def write_metrics(facts: Facts, status: int, path: Path, now_s: float | None = None) -> None:
    """Write the metrics to `path`, whole or not at all. Raise StartupError."""
    write_whole(path, _metrics(facts, status, time.time() if now_s is None else now_s), "--metrics")


def _metrics(facts: Facts, status: int, now_s: float) -> str:
    lines = []

    def add(name: str, meaning: str, values: Mapping[str, float]) -> None:
        lines.append(f"# HELP kproxy_audit_{name} {meaning}")
        lines.append(f"# TYPE kproxy_audit_{name} gauge")
        lines.extend(f"kproxy_audit_{name}{labels} {value:.0f}" for labels, value in values.items())

    add("last_run_timestamp_seconds", "When the last audit ended.", {"": now_s})
    add("last_exit_status", "Its exit status: 0 proven, 1 faults, 3 unproven.", {"": status})
    counts = {f'{{state="{name}"}}': getattr(facts.sums, name) for name, count in COUNTS.items() if not count.unit}
    add("last_records", "Records of the last audit, by state.", counts)
    batches = {f'{{state="{name}"}}': getattr(facts.sums, name) for name, count in COUNTS.items() if count.unit}
    add("last_batches", "Batches of the last audit, by state.", batches)
    found = {f'{{kind="{kind}"}}': count.findings for kind, count in sorted(facts.finding_counts.items())}
    add("last_findings", "Findings of the last audit, by kind.", found)
    return "\n".join(lines) + "\n"
