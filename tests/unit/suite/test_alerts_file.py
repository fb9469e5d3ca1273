"""Every alert says what to do first, and promtool sees it fire beyond its edge and not at it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.pages import ROOT

RULES = ROOT / "deploy/helm/kproxy/files/alerts.yaml"
SERIES = ROOT / "tests/deploy/alerts_test.yaml"
NAMES = re.findall(r"- alert: (\w+)", RULES.read_text())
FIRST = re.compile(r"(Ask|Check|Compare|Find|Give|Look|Put|Renew|Repair|Restart|Run|Set|Start) ")


@pytest.mark.parametrize("rule", re.split(r"(?m)^      - (?=alert: )", RULES.read_text())[1:], ids=NAMES)
def test_alert_says_what_to_do_first(rule: str) -> None:
    [severity] = re.findall(r"^          severity: (\w+)$", rule, re.MULTILINE)
    [_] = re.findall(r"^          summary: \S.*$", rule, re.MULTILINE)
    [description] = re.findall(r'^          description: "?(.*?)"?$', rule, re.MULTILINE)
    assert severity in ("warning", "critical")
    assert description.endswith(".")
    assert FIRST.match(re.split(r"(?<=[.!?]) ", description)[-1])


def test_every_alert_has_series_that_raise_it() -> None:
    assert {*re.findall(r'alertname="(\w+)"', SERIES.read_text())} == {*NAMES}
    for case in SERIES.read_text().split("  - name: ")[1:]:
        moments = re.split("eval_time: ", case)[1:]
        # There is a moment before the edge, and one beyond it.
        assert len({moment.count("alertname=") for moment in moments}) > 1, case


# promtool is not everywhere.
@pytest.mark.long
def test_alerts_fire_beyond_their_edges(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (the Debian package prometheus)")
    for file in (RULES, SERIES):
        shutil.copy(file, tmp_path)
    for what, file in (("check", RULES), ("test", SERIES)):
        done = subprocess.run(
            [promtool, what, "rules", tmp_path / file.name], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
