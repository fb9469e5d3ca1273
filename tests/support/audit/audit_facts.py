"""Build the results of an audit for tests of reports: one cluster's hour, with every kind of fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kproxy.pipeline.audit.report_facts import (
    Facts,
    Finding,
    FindingCount,
    Grid,
    Holding,
    Partition,
    State,
    Sums,
    Verdict,
)

# Saturday, 21 November 2026, 20:00 UTC.
START_MS = 1_795_291_200_000
STEP_MS = 60_000
COLUMNS = 60
OWNERS = (1, 2, 3)
TAKEN_AT = 25
HTML_TOPIC = "$x^2$<script>alert('x')</script>&\"" + "very-long-" * 20 + "\x00\x1b[31mred"


def clean() -> Facts:
    """Twelve partitions of two topics on three brokers; broker 3 takes over broker 2's after 25 minutes."""
    partitions = tuple(_partition(topic, number) for topic in ("orders", "payments") for number in range(6))
    return _facts(partitions)


def _partition(topic: str, number: int, *, acked: int = 120_000) -> Partition:
    owner = OWNERS[number % 3]
    owners = (2, 3) if owner == 2 else (owner,)
    sums = Sums(
        partitions=1,
        acked=acked,
        present=acked,
        batches=acked // 100,
        bytes=acked * 180,
        ownership_changes=len(owners) - 1,
    )
    return Partition(topic, number, sums, owners, 4, 0, acked, 2.4, 11.8, 240.0)


def _facts(partitions: tuple[Partition, ...]) -> Facts:
    names = Sums.__slots__
    sums = Sums(*(sum(getattr(one.sums, name) for one in partitions) for name in names))
    return Facts(
        verdict=Verdict(sums),
        topics=len({one.topic for one in partitions}),
        partitions=partitions,
        findings=(),
        finding_counts={},
        grid=Grid(START_MS, STEP_MS, COLUMNS, 1),
        states={
            one.which: [
                State.COMPLETE if 2 in one.owners or column % 20 != 19 else State.NOTHING for column in range(COLUMNS)
            ]
            for one in partitions[:40]
        },
        holdings={one.which: _holdings(one) for one in partitions[:40]},
        about={
            "Bootstrap": "127.0.0.1:9092",
            "Trail": "topic __kproxy_audit, 3 proxies, 4 incarnations",
            "Windows": "1 min",
            "Audited at": "2026-11-21 21:00:04 UTC",
        },
    )


def _holdings(one: Partition) -> list[Holding]:
    taken = START_MS + TAKEN_AT * STEP_MS
    end = START_MS + COLUMNS * STEP_MS
    if 2 not in one.owners:
        return [Holding(one.owners[0], 1041 + one.partition, START_MS, end, one.sums.acked)]
    half = one.sums.acked // 2
    return [
        Holding(2, 1041 + one.partition, START_MS, taken, half),
        Holding(3, 1190 + one.partition, taken + 9_000, end, half),
    ]


def _with(facts: Facts, at: int, states: dict[int, State], *findings: Finding, **counts: int) -> Facts:
    """`facts` with other numbers for the partition at place `at`, and the findings."""
    changed = facts.partitions[at]
    sums = replace(changed.sums, **counts)
    partitions = [*facts.partitions]
    partitions[at] = replace(changed, sums=sums)
    drawn = [states.get(column, state) for column, state in enumerate(facts.states[changed.which])]
    names = Sums.__slots__
    total = Sums(*(getattr(facts.sums, name) - getattr(changed.sums, name) + getattr(sums, name) for name in names))
    both = (*facts.findings, *findings)
    kinds = {kind: [found for found in both if found.kind == kind] for kind in {found.kind for found in both}}
    return replace(
        facts,
        partitions=(partitions[at], *partitions[:at], *partitions[at + 1 :]),
        states={**facts.states, changed.which: drawn},
        verdict=replace(facts.verdict, sums=total, conflicts=sum(found.kind == "overlap" for found in findings)),
        findings=both,
        finding_counts={
            kind: FindingCount(len(found), sum(one.records or 0 for one in found))
            for kind, found in sorted(kinds.items())
        },
    )


def loss() -> Facts:
    finding = Finding(
        "lost",
        "Broker 1 acknowledged this at revision 1044, and the log does not have it.",
        *("orders", 3, 61_200, 61_249, 50, 1, 1044, None, None, "127.0.0.1:9092", "9f3c1a2b4d5e6f70", 4001, 0, 812),
        *(START_MS + 31 * STEP_MS, START_MS + 31 * STEP_MS + 900),
    )
    return _with(clean(), 3, {31: State.LOST}, finding, lost=50, present=119_950)


def split_brain() -> Facts:
    facts = clean()
    taken = START_MS + TAKEN_AT * STEP_MS
    finding = Finding(
        "overlap",
        "Broker 2 at revision 1042 and broker 3 at revision 1191 both assigned these offsets. The log keeps at most "
        "one of two records at an offset.",
        *("orders", 1, 50_000, 50_399, 400, 2, 1042, 3, 1191, "127.0.0.1:9092", "9f3c1a2b4d5e6f70", 4001, 0, 640),
        *(taken + 9_000, taken + 5 * STEP_MS),
    )
    states = dict.fromkeys(range(TAKEN_AT, TAKEN_AT + 5), State.OVERLAPPED)
    facts = _with(facts, 1, states, finding, overlapped=400, lost=200, present=119_800)
    first, *others = facts.holdings["orders", 1]
    both = [replace(first, last_ms=taken + 5 * STEP_MS), *others]
    return replace(facts, holdings={**facts.holdings, ("orders", 1): both})


def unproven() -> Facts:
    begin, end = START_MS + 40 * STEP_MS, START_MS + 44 * STEP_MS
    trail = {"proxy": "127.0.0.1:9092", "incarnation": "9f3c1a2b4d5e6f70"}
    gap = Finding(
        "gap",
        "Rows 812 to 830 of the trail of 127.0.0.1:9092 are missing: what it acknowledged then is unproven.",
        **trail,
        sequence=812,
        from_ms=START_MS + 10 * STEP_MS,
        to_ms=START_MS + 12 * STEP_MS,
    )
    tail = Finding(
        "tail",
        "The trail of 127.0.0.1:9092 has no end: the proxy was killed, and what it acknowledged last is unproven.",
        **trail,
        sequence=1400,
        from_ms=begin,
        to_ms=end,
    )
    facts = clean()
    for at in range(len(facts.partitions)):
        columns = dict.fromkeys((10, 11, *range(40, 44)), State.UNPROVEN)
        facts = _with(facts, at, columns, *((gap, tail) if at == 0 else ()), unproven=1)
    return replace(facts, trail_holes=(10, 11, 40, 41, 42, 43), verdict=replace(facts.verdict, trail_faults=2))


def unsequenced() -> Facts:
    """One partition was written by a producer without idempotence."""
    return _with(clean(), 2, {}, unsequenced=1200)


def deleted() -> Facts:
    """A partition's topic was intentionally deleted and created again."""
    finding = Finding("deleted", "20000 records of orders/2 were acknowledged in a topic that was deleted since.")
    return _with(clean(), 2, {}, replace(finding, topic="orders", partition=2), present=100_000, deleted=20_000)


def gone() -> Facts:
    """The same, but without a declared deletion."""
    finding = Finding("gone", "20000 records of orders/2 were acknowledged in a topic that was deleted since.")
    counts = {"present": 100_000, "gone": 20_000, "unproven": 1}
    return _with(clean(), 2, {}, replace(finding, topic="orders", partition=2), **counts)


def unchecked() -> Facts:
    """One partition's batches were read without crc32c."""
    finding = Finding("unchecked", "Of orders/2 the checksums of 1200 batches were not checked.", "orders", 2)
    return _with(clean(), 2, dict.fromkeys(range(COLUMNS), State.UNPROVEN), finding, unchecked=1200, unproven=1)


def huge() -> Facts:
    """Ten thousand partitions, a year of windows and a million findings, cut to the limits of a report."""
    states = list(State)
    partitions = tuple(
        replace(
            _partition(f"team-{number % 7}.service-{number % 11}.events-of-a-rather-long-name.v{number % 3}", number),
            sums=replace(
                _partition("", number).sums,
                lost=max(0, 20 - number),
                removed=5_000,
                unproven=number % 2,
                unclaimed=7,
                late=3,
            ),
            owners=tuple(range(number % 16 + 1)),
        )
        for number in range(60)
    )
    facts = _facts(partitions)
    finding = loss().findings[0]
    return replace(
        facts,
        verdict=Verdict(
            replace(
                facts.sums,
                partitions=10_000,
                acked=91_234_567_890,
                present=91_184_567_000,
                lost=890,
                overlapped=12,
                corrupt=3,
            ),
            conflicts=1,
            trail_faults=40,
        ),
        topics=400,
        findings=tuple(replace(finding, partition=number, records=50 - number) for number in range(50)),
        finding_counts={"lost": FindingCount(1_000_000, 890), "gap": FindingCount(40, 0)},
        grid=Grid(START_MS, 86_400_000 * 4, 96, 5760),
        states={
            one.which: [states[(column * 7 + row * 5 + column * row // 3) % 7] for column in range(96)]
            for row, one in enumerate(partitions[:40])
        },
        holdings={
            one.which: [
                Holding((one.partition + turn) % 9, 10_000 + turn, begin, begin + 86_400_000 * 9, 1000)
                for turn in range(40)
                for begin in (START_MS + turn * 86_400_000 * 9,)
            ]
            for one in partitions[:40]
        },
        hidden_holdings=12_345,
    )


def empty() -> Facts:
    return Facts(Verdict(Sums()), 0, (), (), {}, about={"Bootstrap": "127.0.0.1:9092"})


def tiny() -> Facts:
    """One partition, one window, one record, no latency known."""
    one = Partition("t", 0, Sums(1, 1, 1, batches=1, bytes=70), (1,), 1, 0, 1, None, None, None)
    return replace(
        _facts((one,)),
        grid=Grid(START_MS, 1000, 1, 1),
        states={("t", 0): [State.COMPLETE]},
        holdings={("t", 0): [Holding(1, 7, START_MS + 10, START_MS + 10, 1)]},
    )


def hostile() -> Facts:
    """A topic whose name would be markup, a terminal's escape sequence and a formula if it were not escaped."""
    facts = loss()
    name = HTML_TOPIC
    return replace(
        facts,
        partitions=tuple(replace(one, topic=name) for one in facts.partitions[:6]),
        states={(name, partition): each for (topic, partition), each in facts.states.items() if topic == "orders"},
        holdings={(name, partition): each for (topic, partition), each in facts.holdings.items() if topic == "orders"},
        findings=tuple(
            replace(one, topic=name, detail=f"{name} $x^2$ {{}}", proxy="<b>p</b>") for one in facts.findings
        ),
        about={"<i>label</i>": name},
    )


ALL: dict[str, Callable[[], Facts]] = {
    "clean": clean,
    "loss": loss,
    "split_brain": split_brain,
    "unproven": unproven,
    "unchecked": unchecked,
    "unsequenced": unsequenced,
    "deleted": deleted,
    "gone": gone,
    "huge": huge,
    "empty": empty,
    "tiny": tiny,
    "hostile": hostile,
}
