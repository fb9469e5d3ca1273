"""The dashboard follows the conventions of Grafana, and its queries those of the other panels."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from tests.support.pages import ROOT

DASHBOARD = json.loads((ROOT / "deploy/helm/kproxy/files/dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
CHARTS = [panel for panel in PANELS if panel["type"] != "row"]
UNITS = {"reqps", "Bps", "ops", "short", "s", "bytes", "percentunit"}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_panels_are_told_apart() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    assert all(isinstance(each, int) and each > 0 for each in ids)
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert {"Clients", "Brokers", "Stages", "Limits", "Audit"} <= {*rows}


def test_panels_fill_the_grid_without_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    # In the order in which they are read, each row before its panels.
    order = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in PANELS]
    assert all(one < other for one, other in pairwise(order))


@pytest.mark.parametrize("panel", CHARTS, ids=lambda panel: panel["title"])
def test_panel_has_unit_legend_and_source(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["options"]["legend"] == {"displayMode": "list", "placement": "bottom"}
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
    legends = [target["legendFormat"] for target in panel["targets"]]
    assert len({*legends}) == len(legends)
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"] == SOURCE
        expression, legend = target["expr"], target["legendFormat"]
        assert expression.count("{") == expression.count('{job=~"$job",instance=~"$instance"') > 0
        assert {*re.findall(r"\[([^]]*)\]", expression)} <= {"$__rate_interval"}
        groups = [*{*re.findall(r"by \(([^)]*)\)", expression)}] or [""]
        labels = {*groups[0].split(", ")} - {"", "le"}
        # All series of a panel have names of their own.
        assert len(groups) == 1
        assert {*re.findall(r"{{(\w+)}}", legend)} == labels
        assert legend


def test_variables_are_those_of_the_queries() -> None:
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    used = {*re.findall(r"\$\{?([a-z]+)", json.dumps(PANELS))}
    assert [*names] == ["datasource", "job", "instance"]
    assert used == {*names}
    assert DASHBOARD["uid"] == "kproxy"
    assert DASHBOARD["schemaVersion"] >= 36
