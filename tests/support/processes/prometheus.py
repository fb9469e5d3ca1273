"""Run a real Prometheus that scrapes admin pages every second, with the chart's rules at shorter durations.

The rules are changed in their durations alone (`quick`), so that what fires here fires there, only later:

- `for:` lasts HOLD_S or what the test says, in place of minutes;
- every range (`[5m]`, `[1d]`) and `offset` is WINDOW_S, of fifteen scrapes;
- the age of the audit trail at which it counts as not shipped is WINDOW_S as well.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.pages import ROOT
from tests.support.processes.ports import free_port
from tests.support.waiting import wait_for

RULES = ROOT / "deploy/helm/kproxy/files/alerts.yaml"
FIRES_WITHIN_S = 180.0
HOLD_S = 2
WINDOW_S = 15
# What the text of an alert names, if the alert has it.
_NAMED = ("broker", "topic", "limit", "instance", "error", "mechanism", "operation", "use")
# A process that stands still for seconds is not scraped, and answers late.
_OF_A_BUSY_MACHINE = ("KproxyAllDown", "KproxyBrokerSlow", "KproxyBusy", "KproxyDown")
Cause = Callable[[], Awaitable[object]]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._api = f"http://127.0.0.1:{port}"

    def _asked(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self._api}{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        """The series of a query; raises HTTPError for one that is malformed."""
        series: list[Any] = self._asked("/api/v1/query", query=expression)["result"]
        return series

    def firing(self, name: str = "", **labels: str) -> list[Any]:
        """The alerts that fire, of this name and with these labels."""
        return [
            each
            for each in self._asked("/api/v1/alerts")["alerts"]
            if each["state"] == "firing" and name in ("", each["labels"]["alertname"])
            if labels.items() <= each["labels"].items()
        ]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._api}/-/ready", timeout=60):
                return True
        except OSError:
            return False

    def wait_scraped(self, targets: int) -> None:
        """Wait until it has the page of every target: counters have their first value."""
        wait_for(lambda: self.query(f"sum(up) == {targets}"), FIRES_WITHIN_S)

    async def fires_only(self, *names: str) -> None:
        """No other alert fires, but for those that a busy machine may raise."""
        others = [each for each in await asyncio.to_thread(self.firing) if each["labels"]["alertname"] not in names]
        assert [each for each in others if each["labels"]["alertname"] not in _OF_A_BUSY_MACHINE] == [], others

    async def stays_quiet(self) -> None:
        """Nothing fires although it is longer than each rule's duration."""
        await asyncio.sleep(2 * HOLD_S + 1)
        await self.fires_only()

    async def until(self, name: str, cause: Cause | None = None, **labels: str) -> None:
        """Wait until an alert fires, whose text names what it is about; `cause` is repeated meanwhile."""
        began = time.monotonic()
        while not (firing := await asyncio.to_thread(self.firing, name, **labels)):
            assert time.monotonic() < began + FIRES_WITHIN_S, f"{name} does not fire; {self.firing()}"
            if cause is not None:
                await cause()
            await asyncio.sleep(0.3)
        print(f"fired after {time.monotonic() - began:3.0f} s: {name} {labels or ''}")
        rule = RULES.read_text().partition(f"- alert: {name}\n")[2].partition("- alert: ")[0]
        for each in firing:
            text = " ".join(each["annotations"].values())
            unnamed = [label for label in _NAMED if each["labels"].get(label, "") not in text]
            missing = [label for label in re.findall(r"{{ \$labels\.(\w+) }}", rule) if not each["labels"].get(label)]
            assert not unnamed + missing, each

    async def until_over(self, name: str) -> None:
        wait_for(lambda: not self.firing(name), FIRES_WITHIN_S)


def quick(rules: str, hold_s: int = HOLD_S) -> str:
    """The rules with shorter durations."""
    rules = re.sub(r"(?m)^( +for:) \d+m$", rf"\1 {hold_s}s", rules)
    rules = re.sub(r"\[\d+[mhd]\]", f"[{WINDOW_S}s]", rules)
    rules = re.sub(r"(age_seconds >) \d+", rf"\1 {WINDOW_S}", rules)
    return re.sub(r"offset \d+m", f"offset {WINDOW_S}s", rules)


@contextmanager
def prometheus(directory: Path, jobs: Mapping[str, Sequence[str]], *, hold_s: int = HOLD_S) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the admin pages of `jobs`, until the block ends."""
    directory.mkdir()
    (directory / "alerts.yaml").write_text(quick(RULES.read_text(), hold_s))
    scraped = [{"job_name": job, "static_configs": [{"targets": list(pages)}]} for job, pages in jobs.items()]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["alerts.yaml"], "scrape_configs": scraped}
    # JSON is YAML.
    (directory / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        running = Prometheus(port)
        wait_for(running.is_ready, FIRES_WITHIN_S)
        running.wait_scraped(sum(map(len, jobs.values())))
        yield running
    finally:
        process.terminate()
        process.wait(60)
