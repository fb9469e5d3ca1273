"""Run the settings of audits: clusters whose logs can be tampered with, and proxies whose trails go to files.

Spark writes through these proxies as through any others. Forging needs the brokers.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from kproxy.pipeline.audit.report_gather import gather
from kproxy.pipeline.audit.run import AuditJob, audit_here
from kproxy.pipeline.audit.steps import Results
from kproxy.pipeline.audit.trail_place import JSON, TrailPlace
from tests.support.brokers.broker_hooks import UNFENCED
from tests.support.brokers.reference_broker import RawClient, start_brokers
from tests.support.processes.dev import KproxyProcess, serving
from tests.support.processes.served import page, samples
from tests.support.waiting import wait_for

PREFIX = "/audited"
TTL_S = 3
VALUE_BYTES = 400
ADMIN_TIMEOUT_S = 60.0


class AuditedProxies:
    """Proxies of one cluster; `ownership` has the flags that name their source of owners."""

    def __init__(self, directory: Path, ownership: Sequence[str], stack: ExitStack) -> None:
        self.trail = directory / "trail"
        self._directory = directory
        self._ownership = ownership
        self._stack = stack
        self._started = 0

    def start(self, *, interval_s: float, listen: str = "127.0.0.1:0") -> KproxyProcess:
        self._started += 1
        # The proxy must not give up a broker that sleeps past its lease before it wakes.
        config = self._directory / "proxy.toml"
        config.write_text(f"[limits]\nprobe_timeout_s = {ADMIN_TIMEOUT_S}\n")
        where = ["serve", "--config", config, *self._ownership, "--listen", listen, "--admin", "127.0.0.1:0"]
        audit = ["--audit-sink", f"json:{self.trail}", "--audit-interval-s", str(interval_s)]
        return self._stack.enter_context(serving([*where, *audit], self._directory / f"proxy-{self._started}.stderr"))


class ForgeableCluster:
    """Two reference brokers: `sleeper`, 1, does not fence itself off, `forged`, 2, has the logs that are forged."""

    def __init__(self, directory: Path, etcd: str, stack: ExitStack) -> None:
        directory.mkdir()
        # Either broker could; one of them is told to.
        options = {"lease_ttl_s": TTL_S, "unfenced": 1}
        self.sleeper, self.forged = stack.enter_context(start_brokers((1, 2), directory, etcd, PREFIX, **options))

    def create(self, replicas: Mapping[str, list[list[int]]]) -> None:
        """Create topics whose partitions are led by their first replica."""
        admin = AdminClient({"bootstrap.servers": self.forged.address, "log_level": 0})
        topics = [NewTopic(topic, len(each), replica_assignment=each) for topic, each in replicas.items()]
        for made in admin.create_topics(topics).values():
            made.result(ADMIN_TIMEOUT_S)
        wait_for(
            lambda: all(
                self.leaders(topic) == {index: brokers[0] for index, brokers in enumerate(each)}
                for topic, each in replicas.items()
            ),
            ADMIN_TIMEOUT_S,
            "those lead that are to",
        )

    def leaders(self, topic: str) -> dict[int, int]:
        with self.forged.client() as client:
            return client.leaders(topic)

    def log(self, topic: str, partition: int) -> Path:
        """The directory of a log of broker 2."""
        return self.forged.data_dir / f"{topic}-{partition}"

    def put_to_sleep(self) -> None:
        """Suspend broker 1: requests wait in its sockets, and when it wakes it believes that it still leads."""
        self.sleeper.signal(signal.SIGUSR1)
        wait_for(lambda: UNFENCED in self.sleeper.log(), what="broker 1 is unfenced")
        self.sleeper.signal(signal.SIGSTOP)

    def wake(self) -> None:
        self.sleeper.signal(signal.SIGCONT)


def raw_client(proxy: KproxyProcess) -> RawClient:
    host, _, port = proxy.kafka.rpartition(":")
    return RawClient(host, int(port), timeout_s=2 * ADMIN_TIMEOUT_S)


def write(session: Any, bootstrap: str, rows: Mapping[tuple[str, int], int], **settings: object) -> None:
    """Write this many rows to each topic's partition in one job, some dozens in a batch."""
    places = [(topic, partition, count) for (topic, partition), count in rows.items()]
    frame = session.createDataFrame(places, "topic string, partition int, count int")
    messages = frame.selectExpr("topic", "partition", "explode(sequence(1, count)) as n").selectExpr(
        "topic", "partition", f"lpad(cast(n as string), {VALUE_BYTES}, '.') as value"
    )
    options = {f"kafka.{name.replace('_', '.')}": str(value) for name, value in settings.items()}
    messages.write.format("kafka").options(**options, **{"kafka.bootstrap.servers": bootstrap}).save()


def metrics(proxy: KproxyProcess) -> dict[str, float]:
    """The values of metrics without labels, by name."""
    read = samples(page(proxy.admin, "/metrics")[1])
    return {name: value for (name, labels), value in read.items() if not labels}


class Audited:
    """The results of an audit: its findings, and its counts of partitions, each by name."""

    def __init__(self, results: Results) -> None:
        self.findings = [SimpleNamespace(**row) for row in results.findings]
        self._partitions = {(row["topic"], row["partition"]): SimpleNamespace(**row) for row in results.partitions}
        self.exit_status = gather(results, {}).verdict.exit_status()

    def of(self, kind: str, topic: str | None = None, partition: int | None = None) -> list[Any]:
        wanted = (kind, topic, partition)
        return [row for row in self.findings if (row.kind, row.topic, row.partition) == wanted]

    def partition(self, topic: str, partition: int) -> Any:
        return self._partitions[topic, partition]


def audit(bootstrap: str, trail: Path, topics: Sequence[str]) -> Audited:
    """Audit these topics by that trail, in this process."""
    job = AuditJob(bootstrap=bootstrap, trail=TrailPlace(JSON, str(trail)), topics=tuple(topics))
    return Audited(audit_here(job).results)
