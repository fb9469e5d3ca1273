"""Draw random small histories of a partition, and judge them with a model that looks at each offset separately."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from tests.support.audit.trails import Row, Trail, batch, bounds

WINDOW_MS = 10_000
OFFSETS = 80
WHOLE = 62
END = OFFSETS - 5
COUNTED = ("present", "lost", "removed", "overlapped", "unclaimed", "duplicated")
JUDGED = ("present", "lost", "removed", "overlapped")


class History(NamedTuple):
    acked: list[Row]
    log: list[Row]
    start: int
    is_compacted: bool


def topic_of(seed: int) -> str:
    return f"seed-{seed}"


def make(seed: int) -> tuple[Trail, History]:
    """Claims and batches that fit each other now and then."""
    chance = random.Random(seed)
    trail, topic = Trail(proxy=f"{topic_of(seed)}:1", incarnation=str(seed)), topic_of(seed)
    log: list[Row] = []
    acked: list[Row] = []
    offset, at = 0, 1_000
    producers = [-1, 1, 2][: chance.randint(1, 3)]

    def claim(spans: list[int], who: dict[str, Any]) -> None:
        nonlocal at
        at += chance.choice([1, 500, 9_000])
        acked.append(trail.acked(topic, *spans, at=at, owner=chance.randint(1, 2), **who))

    def some(base: int, count: int) -> dict[str, Any]:
        producer = chance.choice(producers)
        return {"producer": producer, "epoch": chance.choice([0, 0, 0, 1]), "sequence": base + chance.choice([0, 0, 5])}

    while offset < OFFSETS:
        count = chance.randint(1, 20)
        who = some(offset, count)
        what = chance.random()
        if what < 0.75:
            claim([offset, count], who)
        if what < 0.1:
            # Acknowledge the same record again, or part of it, or another.
            again = chance.randint(0, count - 1)
            other = dict(who, sequence=who["sequence"] + again) if chance.random() < 0.7 else some(offset, count)
            claim([offset + again, chance.randint(1, 20)], other)
        if 0.05 < what < 0.9:
            more = chance.choices(
                [{}, {"crc_ok": False}, {"is_control": True}, {"records": chance.randint(0, count)}, {"producer": 9}],
                [12, 1, 1, 1, 1],
            )[0]
            log.append(batch(topic, offset, count, **{**who, **more}))
            if chance.random() < 0.1:
                offset += count
                log.append(batch(topic, offset, count, **who))
        offset += count
    if chance.random() < 0.3 and len(acked) > 1:
        # One row of several spans, with other writers in between.
        first, second = chance.randint(0, 30), chance.randint(40, 70)
        claim([first, 3, second, 4], {"producer": 1, "epoch": 0, "sequence": first})
    return trail, History(acked, log, chance.choice([0, 0, chance.randint(0, OFFSETS)]), chance.random() < 0.2)


class Judged(NamedTuple):
    counts: Counter[str]
    windows: dict[int, Counter[str]]
    lost: set[int]
    overlapped: set[int]


def judge(history: History, bits: int = WHOLE) -> Judged:
    """Judge offset by offset, claim by claim. `bits`: the size of the judged ranges."""
    held: dict[int, tuple[int, ...] | None] = {}
    for header in history.log:
        if header["is_control"] or header["crc_ok"] is False:
            continue
        base = header["base_offset"]
        for offset in range(base, base + header["record_count"]):
            held[offset] = _record(header["producer_id"], header["producer_epoch"], base - header["base_sequence"])
    claims = _claims(history, bits)
    told = Judged(Counter(), defaultdict(Counter), set(), set())
    for offset in range(OFFSETS + 100):
        by_record = claims.get(offset, {})
        if not by_record:
            told.counts["unclaimed"] += offset in held
            continue
        what = ["present"]
        record = next(iter(by_record))
        is_there = offset in held and (len(by_record) > 1 or held[offset] == (None if record[0] == -1 else record))
        if not is_there:
            is_compacted = history.is_compacted and offset < END and offset not in held
            what = ["removed" if is_compacted or offset < history.start else "lost"]
        if len(by_record) > 1:
            what.append("overlapped")
        told.lost.update({offset} if "lost" in what else ())
        told.overlapped.update({offset} if "overlapped" in what else ())
        for name in what:
            told.counts[name] += 1
            for window in by_record.values():
                told.windows[window][name] += 1
    told.counts["duplicated"] = _duplicated(history.log)
    return told


def _record(producer: int, epoch: int, distance: int) -> tuple[int, ...] | None:
    return (producer, epoch, distance) if producer >= 0 else None


def _claims(history: History, bits: int) -> dict[int, dict[tuple[int, ...], int]]:
    """By offset: the window in which each record was first claimed, as far as a range knows."""
    claims: dict[int, list[tuple[int, int, tuple[int, ...], int]]] = defaultdict(list)
    for nth, row in enumerate(history.acked):
        before = 0
        for start, count in zip(row["spans"][::2], row["spans"][1::2], strict=True):
            distance = start - before - row["first_sequence"]
            before += count
            record = _record(row["producer_id"], row["producer_epoch"], distance) or (-1, nth, start)
            window = row["last_acked_at"] - row["last_acked_at"] % WINDOW_MS
            for offset in range(start, start + count):
                begin = max(start, offset >> bits << bits)
                claims[offset].append((begin, row["first_acked_at"], record, window))
    by_offset: dict[int, dict[tuple[int, ...], int]] = {}
    for offset, found in claims.items():
        by_offset[offset] = {}
        for _, _, record, window in sorted(found):
            by_offset[offset].setdefault(record, window)
    return by_offset


def _duplicated(log: list[Row]) -> int:
    seen, records = set(), 0
    for header in sorted(log, key=lambda row: row["base_offset"]):
        if header["producer_id"] < 0 or header["is_control"] or header["crc_ok"] is False:
            continue
        key = header["producer_id"], header["producer_epoch"], header["base_sequence"]
        records += header["record_count"] if key in seen else 0
        seen.add(key)
    return records


def bounds_of(seed: int, history: History) -> Row:
    return bounds(topic_of(seed), END, start=history.start, is_compacted=history.is_compacted)
