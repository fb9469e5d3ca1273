"""Print the result of a finished demo: the rows, the owners, the killed broker, and the audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from kproxy.demo.judge import Fault, RowsVerdict
from kproxy.pipeline.audit.report_facts import Facts
from kproxy.pipeline.audit.report_text import show_table


@dataclass(frozen=True, slots=True)
class KilledOwner:
    """The broker that was killed in mid-stream, and the recovery of its partitions; times in seconds since the kill.

    `rows_before`: about how many rows had been written. `taken_s` and `taken_by` have, by partition, when it had an
    owner again, and that owner; a missing partition never had one again. `back_s`: when the broker served again.
    """

    broker: int
    rows_before: int
    owners_before: Mapping[int, int]
    taken_by: Mapping[int, int]
    taken_s: Mapping[int, float]
    back_s: float

    @property
    def partitions(self) -> list[int]:
        return [partition for partition, owner in self.owners_before.items() if owner == self.broker]


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    """A finished run.

    `owners`: broker id by partition, None if not known; times in seconds. `audit`: the audit of the run by the proxy's
    own trail, if any.
    """

    verdict: RowsVerdict
    owners: Mapping[int, int] | None
    writing_s: float
    reading_s: float
    whole_s: float
    micro_batches: int
    killed: KilledOwner | None = None
    audit: Facts | None = None

    @property
    def exit_status(self) -> int:
        audited = self.audit is None or self.audit.verdict.exit_status(allow_unproven=True) == 0
        return 0 if self.verdict.clean and audited else 1


def show(outcome: DemoOutcome, output: Console | None = None) -> None:
    """Print the tables of a finished run to stdout."""
    output = output or Console(highlight=False)
    output.print(_table(outcome))
    if outcome.audit is not None:
        show_table(outcome.audit, output)


def _table(outcome: DemoOutcome) -> Table:
    verdict = outcome.verdict
    table = Table(
        Column(""),
        Column("", justify="right", no_wrap=True),
        Column("", style="dim"),
        title="From Spark's Kafka sink through kproxy to its Kafka source",
        title_justify="left",
        title_style="bold",
        show_header=False,
        caption=_sentence(verdict),
        caption_justify="left",
        caption_style="bold green" if verdict.clean else "bold red",
    )
    table.add_row("rows sent", f"{verdict.sent:,}", f"in {outcome.micro_batches} micro-batches")
    partitions = f"from {len(verdict.rows_by_partition)} partitions"
    table.add_row("rows read", f"{verdict.read:,}", partitions, end_section=True)
    faults = list(verdict.faults.items())
    for name, fault in faults:
        table.add_row(name, _count(fault), "; ".join(fault.examples), end_section=name == faults[-1][0])
    if outcome.killed is not None:
        _add_killed(table, outcome.killed)
    _add_owners(table, outcome)
    table.add_row("writing", f"{_rate(verdict.sent, outcome.writing_s)} rows/s", f"{outcome.writing_s:.1f} s")
    reading = f"{outcome.reading_s:.1f} s, judging included"
    table.add_row("reading", f"{_rate(verdict.read, outcome.reading_s)} rows/s", reading)
    table.add_row("all in all", f"{outcome.whole_s:.1f} s", "start-up included")
    return table


def _add_killed(table: Table, killed: KilledOwner) -> None:
    table.add_row("broker killed", str(killed.broker), f"after about {killed.rows_before:,} rows")
    table.add_row("its partitions", str(len(killed.partitions)), f"of {len(killed.owners_before)}")
    takers = set(killed.taken_by.values())
    until = "it was back itself" if takers == {killed.broker} else f"{brokers_in_words(takers)} took over"
    table.add_row("without an owner", _all_by(killed.taken_s, killed), f"until {until}" if takers else "")
    table.add_row("broker back", f"{killed.back_s:.1f} s", "after the kill", end_section=True)


def _all_by(times_s: Mapping[int, float], killed: KilledOwner) -> Text:
    """Format the latest of the times by partition, or how many of the killed broker's partitions have none."""
    never = len(killed.partitions) - len(times_s)
    if never:
        return Text(f"{never} never", style="bold red")
    return Text(f"{max(times_s.values(), default=0.0):.1f} s")


def _add_owners(table: Table, outcome: DemoOutcome) -> None:
    if outcome.owners is None:
        table.add_row("rows by owner", "", "not known without --etcd", end_section=True)
        return
    rows: dict[int | None, list[int]] = {}
    for partition, count in outcome.verdict.rows_by_partition.items():
        rows.setdefault(outcome.owners.get(partition), []).append(count)
    before = Counter(() if outcome.killed is None else outcome.killed.owners_before.values())
    rows |= {broker: [] for broker in before if broker not in rows}
    brokers = sorted(rows, key=lambda broker: (broker is None, broker))
    for broker in brokers:
        counts = rows[broker]
        name = "rows, no owner now" if broker is None else f"rows on broker {broker}"
        share = "1 partition" if len(counts) == 1 else f"{len(counts)} partitions"
        if outcome.killed is not None and broker is not None:
            share += f", {before[broker]} before the kill"
        table.add_row(name, f"{sum(counts):,}", share, end_section=broker == brokers[-1])


def brokers_in_words(brokers: Iterable[int]) -> str:
    """Return `broker 1`, `brokers 1 and 2`, `brokers 1, 2 and 3`; "" for none."""
    names = [str(broker) for broker in sorted(set(brokers))]
    if len(names) < 2:
        return f"broker {names[0]}" if names else ""
    return f"brokers {', '.join(names[:-1])} and {names[-1]}"


def _count(fault: Fault) -> Text:
    return Text(f"{fault.count:,}", style="bold red" if fault.count else "green")


def _rate(rows: int, seconds: float) -> str:
    return f"{rows / seconds:,.0f}" if seconds > 0 else "-"


def _sentence(verdict: RowsVerdict) -> str:
    if verdict.clean:
        return "Every row arrived: once, unchanged and in order."
    wrong = ", ".join(f"{fault.count:,} {name}" for name, fault in verdict.faults.items() if fault.count)
    return f"Not as sent: {wrong}."
