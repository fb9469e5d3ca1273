"""Turn judgements into rows of the result tables: sentences of findings, counts of partitions and windows.

All functions are pure. A row is a dict by the names in `columns.py`; findings omit columns that they lack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple

from kproxy.pipeline.audit.columns import (
    CORRUPT,
    DELETED,
    DUPLICATE,
    FINDING_KINDS,
    FINDINGS,
    GAP,
    GONE,
    LOST,
    OVERLAP,
    PARTITIONS,
    UNCHECKED,
    UNREAD,
    WINDOWS,
)
from kproxy.pipeline.audit.judge import (
    Amounts,
    Batch,
    Bounds,
    Gone,
    Island,
    Ownership,
    PartitionPart,
    Repeat,
    Told,
)
from kproxy.pipeline.audit.log_client import TopicPartition
from kproxy.pipeline.audit.proof import Unproven
from kproxy.pipeline.audit.report_facts import SUMMED
from kproxy.pipeline.audit.rules import AuditRules

Row = dict[str, Any]
Ownerships = Mapping[tuple[int, int], Ownership]

_COUNTS: Final = tuple(name for name in SUMMED if name not in ("acked", "ownership_changes"))
_ACKED: Final = ("present", "lost", "removed", "deleted", "gone", "unread")


def _amounts(amounts: Amounts) -> Row:
    counts = amounts.counts
    return {
        **{name: counts[name] for name in _COUNTS},
        "acked": sum(counts[name] for name in _ACKED),
        "producers": len(amounts.producers),
        "owners": sorted(amounts.by_owner),
        **amounts.percentiles(),
    }


def window_row(which: TopicPartition, begin_ms: int, length_ms: int, amounts: Amounts, *, unproven: bool) -> Row:
    """Return a row of WINDOWS. Its amounts have `ownership_changes` among the counts."""
    row = {
        **which._asdict(),
        "window_start": datetime.fromtimestamp(begin_ms / 1000, UTC),
        "window_end": datetime.fromtimestamp((begin_ms + length_ms) / 1000, UTC),
        **_amounts(amounts),
        "ownership_changes": amounts.counts["ownership_changes"],
        "unproven": unproven or amounts.counts["gone"] + amounts.counts["unread"] > 0,
    }
    return {name: row[name] for name in WINDOWS}


def ownership_changes(ownerships: Ownerships, length_ms: int) -> Counter[int]:
    """Count changes of owner by window: a change is in the window of the new owner's first acknowledgement.

    The same owner at another revision is not a change, since a late answer may have an earlier revision.
    """
    order = sorted((each.first_acked_at, revision, owner) for (owner, revision), each in ownerships.items())
    pairs = pairwise(order)
    return Counter(at - at % length_ms for (_, _, before), (at, _, owner) in pairs if owner != before)


def findings_of(
    which: TopicPartition, part: PartitionPart, bounds: Bounds | None, rules: AuditRules
) -> tuple[list[Row], Counter[str]]:
    """Return the first findings of each kind, by offset, and the number of findings of each kind."""
    rows: list[Row] = []
    for island in sorted(part.islands, key=lambda each: each.start):
        rows += _lost(which, island, bounds) if island.kind == LOST else [_overlap(which, island)]
    rows += [_repeated(which, each) for each in part.repeats]
    rows += [_corrupt(which, each) for each in part.corrupt]
    found = Counter(part.found)
    if unchecked := part.amounts.counts["unchecked"]:
        rows.append(_unchecked(which, unchecked))
        found[UNCHECKED] += 1
    kind = DELETED if which.topic in rules.deleted_topics else GONE
    for topic_id, gone in sorted(part.gone.items(), key=str):
        rows.append(_gone(which, kind, topic_id, gone, bounds))
        found[kind] += 1
    kept = _first_of_each_kind(rows, rules.max_findings)
    # An island with several owners or trails has several findings.
    listed: Counter[str] = Counter(row["kind"] for row in kept)
    return kept, found | listed


def _first_of_each_kind(rows: Iterable[Row], most: int) -> list[Row]:
    listed: Counter[str] = Counter()
    kept = []
    for row in rows:
        listed[row["kind"]] += 1
        if listed[row["kind"]] <= most:
            kept.append(row)
    return kept


class Findings:
    """The first `most` findings of each kind by topic, partition and offset, and the number of each kind."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: list[Row] = []
        self._found: Counter[str] = Counter()

    def note(self, rows: Iterable[Row], found: Mapping[str, int]) -> None:
        """Add rows; `found` has the number of findings by kind, listed or not."""
        self._rows += rows
        self._found.update(found)
        if len(self._rows) > 2 * self._most * len(FINDING_KINDS):
            self._rows = self._first()

    def whole(self) -> list[Row]:
        """Return rows of FINDINGS."""
        return [
            {name: row.get(name) for name in FINDINGS} | {"of_kind": self._found[row["kind"]]} for row in self._first()
        ]

    def _first(self) -> list[Row]:
        ordered = sorted(self._rows, key=lambda row: tuple(_nulls_first(row.get(name)) for name in _ORDER))
        return _first_of_each_kind(ordered, self._most)


_ORDER: Final = ("kind", "topic", "partition", "first_offset", "from_ms")


def _nulls_first(value: Any) -> tuple[bool, Any]:
    return (value is not None, value)


_NO_LOG: Final = "and there is no log of this partition. If its topic was deleted on purpose, give --deleted-topic {}."
_NOT_DECLARED: Final = (
    " It is unknown whether they were in the log until then. If the deletion was on purpose, give --deleted-topic {}."
)
_ACKS_1: Final = " They were written with acks=1, so they may be lost if the owner dies before replication."


def _finding(which: TopicPartition, kind: str, detail: str, records: int | None = None, **others: Any) -> Row:
    return {"kind": kind, "detail": detail, "records": records, **which._asdict(), **others}


def _lost(which: TopicPartition, island: Island, bounds: Bounds | None) -> list[Row]:
    """Return a finding for each owner and trail; a finding names the producer if there was only one."""
    rows = []
    for (owner, revision, proxy, incarnation), told in island.told.items():
        # A record may have been acknowledged twice.
        records = min(told.records, told.behind - told.first)
        first, behind = island.within or (told.first, told.behind)
        if bounds is None:
            why = _NO_LOG.format(which.topic)
        elif island.within:
            lacks = "one of its records, and does not say which" if records == 1 else f"{records} of its records"
            why = f"and the batch there lacks {lacks}."
        elif island.replaced:
            why = "and the log has other records there."
        elif first >= bounds.end_offset:
            why = f"and the log ends earlier, at offset {bounds.end_offset}."
        else:
            why = "and the log does not have them."
        producer_id, producer_epoch = told.producer or (None, None)
        row = _finding(
            which,
            LOST,
            f"Broker {owner} acknowledged offsets {first} to {behind - 1} of {which.name} at revision {revision}, "
            f"{why}{_ACKS_1 if told.acks == 1 else ''}",
            records,
            first_offset=first,
            last_offset=behind - 1,
            owner=owner,
            revision=revision,
            proxy=proxy,
            incarnation=incarnation,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            sequence=told.sequence,
            from_ms=told.from_ms,
            to_ms=told.to_ms,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (row["first_offset"], row["owner"], row["revision"]))


def _overlap(which: TopicPartition, island: Island) -> Row:
    """Name the first ownership that assigned the offsets, and the last other one, preferably of another owner."""
    told: Sequence[Told] = list(island.told.values())
    one = min(each.earliest for each in told)
    latest = max(each.latest for each in told)
    lowest = min(told, key=lambda each: each.earliest[1]).earliest
    highest = max(told, key=lambda each: each.latest[1]).latest
    other = next((each for each in (latest, highest, lowest) if each[1] != one[1]), latest)
    revision, owner, _, proxy, incarnation, sequence, producer_id, producer_epoch = one
    other_revision, other_owner = other[:2]
    if other_owner != owner:
        who = f"and by broker {other_owner} at revision {other_revision}"
    else:
        who = "twice" if revision == other_revision else f"and again at revision {other_revision}"
    acks_1 = _ACKS_1 if any(each.acks == 1 for each in told) else ""
    return _finding(
        which,
        OVERLAP,
        f"Offsets {island.start} to {island.end - 1} of {which.name} were assigned by broker {owner} at revision "
        f"{revision} {who}. The log keeps at most one of two records at an offset.{acks_1}",
        island.end - island.start,
        first_offset=island.start,
        last_offset=island.end - 1,
        owner=owner,
        revision=revision,
        other_owner=other_owner,
        other_revision=other_revision,
        proxy=proxy,
        incarnation=incarnation,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        sequence=sequence,
        from_ms=min(each.from_ms for each in told),
        to_ms=max(each.to_ms for each in told),
    )


def _repeated(which: TopicPartition, repeat: Repeat) -> Row:
    batch = repeat.batch
    detail = (
        f"The batch at offset {batch.base_offset} of {which.name} is already at offset {repeat.first_base_offset}: "
        f"sequence number {batch.base_sequence} of producer {batch.producer_id}."
    )
    producer = {"producer_id": batch.producer_id, "producer_epoch": batch.producer_epoch}
    return _finding(which, DUPLICATE, detail, batch.record_count, **_offsets(batch), **producer)


def _corrupt(which: TopicPartition, batch: Batch) -> Row:
    what = f"The batch at offset {batch.base_offset} of {which.name} does not match its checksum"
    records = batch.last_offset - batch.base_offset + 1
    return _finding(which, CORRUPT, f"{what}: its records may be corrupt.", records, **_offsets(batch))


def _offsets(batch: Batch) -> Row:
    return {"first_offset": batch.base_offset, "last_offset": batch.last_offset}


def _unchecked(which: TopicPartition, count: int) -> Row:
    what = "the checksum of one batch was" if count == 1 else f"the checksums of {count} batches were"
    why = "because crc32c is not installed where the log was read. The log may be corrupt."
    return _finding(which, UNCHECKED, f"{which.name}: {what} not checked, {why}")


def _gone(which: TopicPartition, kind: str, topic_id: str | None, gone: Gone, bounds: Bounds | None) -> Row:
    was = f"its id was {topic_id}, and " if topic_id else ""
    is_there = bounds is not None and bounds.topic_id is not None
    now = f"the topic of that name now has {bounds.topic_id}" if bounds and is_there else "no topic has that name now"
    detail = (
        f"{gone.records} records of {which.name} were acknowledged in a topic that has been deleted: {was}{now}."
        f"{'' if kind == DELETED else _NOT_DECLARED.format(which.topic)}"
    )
    return _finding(which, kind, detail, gone.records, from_ms=gone.from_ms, to_ms=gone.to_ms)


def _unread(which: TopicPartition, part: PartitionPart, reason: str) -> Row:
    records = part.amounts.counts["unread"]
    detail = (
        f"The log of {which.name} could not be read: {reason.rstrip('.')}. It is unknown whether the {records} records "
        f"that were acknowledged are there. Run the audit again when it can be read."
    )
    return _finding(which, UNREAD, detail, records)


def of_unproven(unproven: Unproven) -> Row:
    """Return the finding of a gap or a tail."""
    proxy, missing = unproven.proxy, unproven.missing
    if unproven.kind == GAP and not missing:
        detail = (
            f"Row {unproven.sequence} of the trail of {proxy}, or the row after it, was altered after the proxy wrote "
            f"it: the two do not fit each other."
        )
    elif unproven.kind == GAP:
        rows = "A row is" if missing == 1 else f"{missing} rows are"
        detail = (
            f"{rows} missing from the trail of {proxy}: the trail may lack records that the proxy acknowledged then."
        )
    elif unproven.lives:
        detail = (
            f"The trail of {proxy} continues: its last rows before the end of this audit had not arrived when the "
            f"audit read it. Run the audit again later."
        )
    else:
        detail = (
            f"The trail of {proxy} has no end: the proxy was killed or cut off, and its last acknowledgements may be "
            f"missing."
        )
    return {
        "kind": unproven.kind,
        "proxy": proxy,
        "incarnation": unproven.incarnation,
        "sequence": unproven.sequence,
        "from_ms": unproven.from_ms,
        "to_ms": unproven.to_ms,
        "detail": detail,
    }


class Summed(NamedTuple):
    """A partition's rows of the result tables. `changes`: the changes of ownership by window."""

    which: TopicPartition
    row: Row
    findings: list[Row]
    found: Mapping[str, int]
    owners: list[Row]
    changes: Mapping[int, int]


def sum_up(
    which: TopicPartition,
    part: PartitionPart,
    bounds: Bounds | None,
    rules: AuditRules,
    *,
    unproven: bool,
    unread: str | None = None,
) -> Summed:
    """Return the rows of a judged partition; `unproven`: some trail proves nothing for some time.

    `unread`: why its log could not be read.
    """
    counts = part.amounts.counts
    changes = ownership_changes(part.ownerships, rules.window_ms)
    findings, found = findings_of(which, part, bounds, rules)
    if unread is not None:
        findings.append(_unread(which, part, unread))
        found[UNREAD] += 1
    row = {
        **which._asdict(),
        **_amounts(part.amounts),
        "ownership_changes": changes.total(),
        "unproven": unproven or unread is not None or counts["unchecked"] + counts["gone"] + counts["unread"] > 0,
        "log_start_offset": None if bounds is None else bounds.log_start_offset,
        "end_offset": None if bounds is None else bounds.end_offset,
    }
    owners = [
        {**which._asdict(), "owner": owner, "revision": revision, **asdict(each)}
        for (owner, revision), each in part.ownerships.items()
    ]
    return Summed(which, {name: row[name] for name in PARTITIONS}, findings, found, owners, changes)
