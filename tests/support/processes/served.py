"""Run a real `kproxy serve` before brokers that the test drives, and read its admin page."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kproxy.proxy.apis import SERVED
from kproxy_codec.api_keys import API_VERSIONS
from tests.support.brokers.scripted_upstream import Asked, Script, ScriptedUpstream
from tests.support.clients.raw_client import RawClient
from tests.support.processes.dev import KPROXY_MAIN, KproxyProcess, serving
from tests.support.waiting import PATIENCE_S

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@contextmanager
def static_proxy(
    directory: Path,
    brokers: Mapping[int, int],
    *,
    limits: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
    rooms: str = "",
    listen: str | None = "127.0.0.1:0",
    owners: Sequence[int] = (),
    command: Sequence[str] | None = None,
    module: str = KPROXY_MAIN,
) -> Iterator[KproxyProcess]:
    """A proxy process that knows brokers by id and port; partition n of the topic `t` belongs to the n-th of `owners`.

    Without `owners`, the brokers own them in order. `rooms` are further options of its configuration; `listen` is None
    if these have listeners. `command` runs in place of `kproxy`, or the `main` of `module` does.
    """
    lines = ["[ownership]", 'ownership = "static"', "[limits]"]
    # Brokers in this process answer only when it runs, so no proxy may give them up earlier.
    limits = {"probe_timeout_s": PATIENCE_S, **(limits or {})}
    lines += [f"{key} = {str(value).lower()}" for key, value in limits.items()]
    lines += ["[brokers]", *(f'{broker} = "127.0.0.1:{port}"' for broker, port in brokers.items())]
    lines += ["[[topics]]", 'name = "t"', f"owners = {[*(owners or brokers)]}"]
    file = directory / "kproxy.toml"
    file.write_text("\n".join(lines) + "\n" + rooms)
    arguments = ["serve", "--config", file, "--admin", "127.0.0.1:0"]
    arguments += [*(["--listen", listen] if listen is not None else []), *more]
    with serving(arguments, directory / "serve.stderr", command, module=module) as process:
        yield process


@contextmanager
def kafka_proxy(directory: Path, bootstrap: str, *more: str) -> Iterator[KproxyProcess]:
    """A proxy process that learns the owners from a Kafka cluster's metadata."""
    directory.mkdir(parents=True, exist_ok=True)
    arguments = ["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    arguments += ["--ownership", "kafka", "--bootstrap", bootstrap, *more]
    with serving(arguments, directory / "serve.stderr") as process:
        yield process


@asynccontextmanager
async def beside(process: AbstractContextManager[KproxyProcess]) -> AsyncIterator[KproxyProcess]:
    """Start and stop a process while this event loop continues, because the process may need its answers."""
    with contextlib.ExitStack() as stack:
        try:
            yield await asyncio.to_thread(stack.enter_context, process)
        finally:
            await asyncio.to_thread(stack.close)


class ServedBroker(ScriptedUpstream):
    """A broker that reports its versions by itself: a proxy process asks, and the test need not handle it."""

    def take(self, asked: Asked) -> None:
        if asked.header.api_key == API_VERSIONS:
            ranges = [
                {"api_key": key, "min_version": offer.min_version, "max_version": offer.max_version}
                for key, offer in SERVED.items()
            ]
            asked.answer_message(error_code=0, api_keys=ranges)
        else:
            super().take(asked)


class Served:
    """A proxy process, its brokers in this process, and clients, which end with it."""

    def __init__(self, process: KproxyProcess, brokers: Sequence[ServedBroker]) -> None:
        self.process = process
        self.brokers = brokers
        self.clients: list[RawClient] = []

    @property
    def broker(self) -> ServedBroker:
        return self.brokers[0]

    async def client(self) -> RawClient:
        self.clients.append(await RawClient().connect(port_of(self.process)))
        return self.clients[-1]

    async def page(self, path: str, **headers: str) -> tuple[int, str]:
        return await asyncio.to_thread(page, self.process.admin, path, **headers)

    async def samples(self) -> Samples:
        return samples((await self.page("/metrics"))[1])

    async def ended(self, within_s: float) -> float:
        """The seconds until it has ended with status 0."""
        began = time.monotonic()
        assert await asyncio.to_thread(self.process.wait, within_s) == 0, self.process.stderr()[-2000:]
        return time.monotonic() - began


@asynccontextmanager
async def served(directory: Path, *scripts: Script | None, **options: Any) -> AsyncIterator[Served]:
    """A proxy before a broker for each script; None leaves its requests to the test. `options` are `static_proxy`'s."""
    brokers = [ServedBroker(number, script) for number, script in enumerate(scripts, 1)]
    try:
        ports = {broker.node_id: (await broker.start()).port for broker in brokers}
        async with beside(static_proxy(directory, ports or {1: 1}, **options)) as process:
            served = Served(process, brokers)
            yield served
            for client in served.clients:
                client.abort()
    finally:
        for broker in brokers:
            await broker.stop()


def port_of(process: KproxyProcess) -> int:
    return int(process.kafka.rpartition(":")[2])


def page(admin: str, path: str, **headers: str) -> tuple[int, str]:
    """Status and text of a page."""
    host, _, port = admin.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def counted(admin: str, beginning: str) -> float:
    """The sum of the values of /metrics in lines with this beginning: a whole name, and perhaps labels."""
    whole = re.compile(rf"^{re.escape(beginning)}(?:(?<![a-z_])|(?![a-z_])).*", flags=re.MULTILINE)
    lines = whole.findall(page(admin, "/metrics")[1])
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def samples(text: str) -> Samples:
    """Every sample of a `/metrics` page as Prometheus' own parser reads it, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def refused(port: int) -> None:
    """Wait until no connection is accepted any more."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            client = await RawClient().connect(port)
        except ConnectionError:
            return
        client.abort()
        await asyncio.sleep(0.02)
    raise AssertionError("connections are still taken")
