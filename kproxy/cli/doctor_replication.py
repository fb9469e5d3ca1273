"""What `kproxy doctor` says of the reference brokers' replicas: who is missing where, and what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

from kproxy.cli.admin_page import NoAnswer
from kproxy.cli.doctor_checks import ANSWER_TIMEOUT_S, Finding
from kproxy.cli.table_sources import ReplicasUnknown, ask_replication
from kproxy.config import Address
from kproxy.config.etcd import EtcdOptions
from kproxy.etcd import EtcdClient, EtcdError
from kproxy.observe.table import NO_LEADER, ReplicaRow
from kproxy.ownership.replication import read_replication

# Of the partitions, in a sentence and in the facts.
MAX_NAMED = 5
MAX_FACTS = 1_000


async def replication_in_etcd(endpoints: Sequence[str], options: EtcdOptions, prefix: str) -> list[Finding]:
    """As an etcd tells; nothing where it does not answer, which is found elsewhere."""
    client = EtcdClient(endpoints, options, timeout_s=ANSWER_TIMEOUT_S)
    try:
        await client.connect()
        known = await read_replication(client, prefix)
    except EtcdError:
        return []
    finally:
        await client.close()
    return about_replicas(known.rows, known.brokers, ",".join(endpoints))


async def replication_of_proxy(address: Address) -> list[Finding]:
    """As a proxy's admin page tells; nothing where no page answers, which is found elsewhere."""
    try:
        pages = await asyncio.to_thread(ask_replication, address)
    except NoAnswer:
        return []
    except ReplicasUnknown as unknown:
        text = f"whether replicas are in sync is not known: {unknown}"
        return [Finding("warn", text, "replication.isr", str(address))]
    rows = [row for page in pages for row in page.partitions]
    return about_replicas(rows, pages[-1].brokers if pages else [], str(address))


def about_replicas(rows: Sequence[ReplicaRow], live: Collection[int], at: str) -> list[Finding]:
    """A line for each broker that is missing in some ISR, one for partitions that refuse acks=all, and one for those
    that nobody leads; nothing where there are no replicas to look at."""
    if not rows:
        return []
    findings = []
    for broker in sorted({missing for row in rows for missing in row.missing}):
        lacking = [row for row in rows if broker in row.missing]
        why = (
            "its lease is alive, so it has not caught up (see its log) or died just now"
            if broker in live
            else "it is down: start it"
        )
        text = f"broker {broker} is not in sync for {_named(lacking, len(rows))}: {why}."
        findings.append(_warn("replication.isr", text, at, lacking, broker=broker, alive=broker in live))
    refused = [row for row in rows if row.is_under_min_isr]
    if refused:
        missing = _brokers({each for row in refused for each in row.missing})
        text = f"acks=all is refused for {_named(refused, len(rows))}: fewer replicas are in sync than "
        text += f"min.insync.replicas wants, without {missing}."
        findings.append(_warn("replication.min_isr", text, at, refused))
    leaderless = [row for row in rows if row.leader == NO_LEADER]
    if leaderless:
        waits_for = {each for row in leaderless if not set(row.isr) & set(live) for each in row.isr}
        way_out = f"start {_brokers(waits_for)}, the last in sync" if waits_for else "one is elected within seconds"
        text = f"nobody leads {_named(leaderless, len(rows))}, so nothing is written or read there: {way_out}."
        findings.append(_warn("replication.leader", text, at, leaderless))
    if not findings:
        text = f"all replicas of {_count(len(rows))} are in sync"
        findings.append(Finding("ok", text, "replication.isr", at, {"count": len(rows)}))
    return findings


def _warn(check: str, text: str, at: str, rows: Sequence[ReplicaRow], **facts: object) -> Finding:
    partitions = [f"{row.topic}/{row.partition}" for row in rows[:MAX_FACTS]]
    return Finding("warn", text, check, at, {"count": len(rows), "partitions": partitions, **facts})


def _named(rows: Sequence[ReplicaRow], of: int) -> str:
    """`2 of 12 partitions (t/0, t/1)`."""
    names = [f"{row.topic}/{row.partition}" for row in rows[:MAX_NAMED]]
    more = f" and {len(rows) - MAX_NAMED:,} more" if len(rows) > MAX_NAMED else ""
    return f"{len(rows):,} of {_count(of)} ({', '.join(names)}{more})"


def _count(partitions: int) -> str:
    return f"{partitions:,} {'partition' if partitions == 1 else 'partitions'}"


def _brokers(ids: Iterable[int]) -> str:
    listed = sorted(ids)
    return f"{'broker' if len(listed) == 1 else 'brokers'} {', '.join(map(str, listed))}"
