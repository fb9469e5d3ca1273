"""An audit's report has every finding and nothing else, and is one file that loads nothing.

People judge its appearance. These tests check its structure, its words and numbers, and that it lacks forbidden
content, whatever names topics have.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from kproxy.errors import StartupError
from kproxy.pipeline.audit.report_facts import COUNTS, TRAIL_READ, Facts, Grid, State, Sums, Verdict
from kproxy.pipeline.audit.report_html import report_page, write_report
from kproxy.pipeline.audit.report_plots import LAST_DATE_MS, TICKS_AT_MOST, Time
from kproxy.pipeline.audit.report_text import (
    GLOSSARY,
    STATE_NAMES,
    TITLES,
    headline,
    partition_verdict,
    printable,
    shortened,
    show_table,
    summary,
    utc,
)
from tests.support.audit import audit_facts

VOID = {"meta", "link", "br"}
SIZE_AT_MOST = 1_000_000
ROOT = Path(__file__).parents[3]


class Page(HTMLParser):
    """The page as a browser reads it: elements closed in order, ids, attributes, text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value is not None]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value is not None]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append((self.open[-1] if self.open else "", data))

    def texts(self, tag: str) -> list[str]:
        return [data for inside, data in self.text if inside == tag]

    @property
    def words(self) -> str:
        return " ".join(data for inside, data in self.text if inside != "style")


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: report_page(make()) for name, make in audit_facts.ALL.items()}


@pytest.mark.parametrize(
    ("name", "tone", "title", "said"),
    [
        (
            "clean",
            "good",
            "Clean",
            "All 1,440,000 acknowledged records are in the log, once and at one offset. Contents are not compared.",
        ),
        (
            "unsequenced",
            "good",
            "Clean, duplicates not known",
            "All 1,440,000 acknowledged records are in the log, each at one offset. Duplicates are found only for "
            "idempotent producers: 1,200 batches without sequence numbers are not checked. Contents are not compared.",
        ),
        (
            "loss",
            "bad",
            "Loss",
            "Of 1,440,000 acknowledged records 50 are not in the log. Contents are not compared.",
        ),
        (
            "split_brain",
            "bad",
            "Loss and split brain",
            "400 were assigned an offset that another broker assigned too.",
        ),
        (
            "unproven",
            "warn",
            "Unproven",
            "The trails have 2 gaps: further records acknowledged in that time are unknown (12 of 12",
        ),
        (
            "deleted",
            "warn",
            "Deleted topics",
            "All 1,440,000 acknowledged records are accounted for, 20,000 as deleted with their topics; 1,420,000 are "
            "in the log, once",
        ),
        (
            "gone",
            "warn",
            "Unproven",
            "20,000 records are gone with deleted topics. If the deletion was on purpose, give --deleted-topic (1 of "
            "12 partitions affected). Contents",
        ),
        (
            "unchecked",
            "warn",
            "Unproven",
            "1,200 batches were not checked against checksums, so the log may be corrupt (1 of 12 partitions",
        ),
        ("huge", "bad", "Loss, split brain and corrupt batches", "3 batches in the log do not match their checksums"),
        ("empty", "idle", "Nothing acknowledged", "there is nothing to check"),
        ("tiny", "good", "Clean", "The one acknowledged record is in the log"),
    ],
)
def test_verdict_is_the_first_statement(pages: dict[str, str], name: str, tone: str, title: str, said: str) -> None:
    page = Page(pages[name])
    assert page.texts("h1") == [title]
    assert page.texts("title")[0] == f"{title} – kproxy audit"
    assert said in page.texts("p")[0]
    assert ("header", {"class": f"verdict {tone}", "data-verdict": tone}) in page.elements


@pytest.mark.parametrize("name", audit_facts.ALL)
def test_page_is_complete_and_loads_nothing(pages: dict[str, str], name: str) -> None:
    text = pages[name]
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"script", "img", "iframe", "object", "embed", "base", "form", "image", "foreignobject"})
    policies = [attributes for tag, attributes in page.elements if attributes.get("http-equiv")]
    assert [policy["content"] for policy in policies] == [
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    ]
    assert [attributes["href"] for tag, attributes in page.elements if tag == "link"] == ["data:,"]
    for tag, attributes in page.elements:
        assert not any(attribute.startswith("on") for attribute in attributes), (tag, attributes)
        assert "src" not in attributes
        if tag not in ("link", "meta"):
            assert (attributes.get("href") or "#").startswith("#")
    assert "://" not in text
    assert not re.search(r"@import|url\((?!#)|@font-face", text)
    assert len(page.ids) == len(set(page.ids))
    # Every referenced element exists.
    references = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
    assert {one or other for one, other in references} <= set(page.ids)
    assert len(text) < SIZE_AT_MOST


@pytest.mark.parametrize("name", audit_facts.ALL)
def test_drawings_have_text_and_the_pages_colours(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    facts = audit_facts.ALL[name]()
    drawn = len(facts.states) + bool(facts.trail_holes) + min(20, len(facts.holdings))
    titles = re.findall(r'<svg[^>]* role="img"><title>([^<]{12,})</title>', pages[name])
    assert len(titles) == drawn
    hidden = [attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("role") != "img"]
    assert all(attributes["aria-hidden"] == "true" for attributes in hidden)
    styles = " ".join(
        value or ""
        for tag, attributes in page.elements
        for key, value in attributes.items()
        if key in ("style", "fill")
    )
    # A fixed colour would be invisible on a dark or a light page.
    assert not re.findall(r"#[0-9a-f]{6}", styles)
    sheet = pages[name][: pages[name].index("</style>")]
    assert set(re.findall(r"var\(--([\w-]+)\)", styles)) <= set(re.findall(r"--([\w-]+):", sheet))


def test_report_has_the_audits_numbers(pages: dict[str, str]) -> None:
    facts = audit_facts.split_brain()
    page = Page(pages["split_brain"])
    numbers = [page.text[at + 1][1] for at, (tag, _) in enumerate(page.text) if tag == "dt"][:6]
    assert numbers == ["1,440,000", "1,439,800", "200", "400", "0", "0"]
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', pages["split_brain"].partition("<h2>Partitions")[2])
    cells = {name: re.findall(r"<td[^>]*>(?:<span[^>]*>)?(.*?)(?:</span>)?</td>", row) for name, row in rows}
    assert list(cells) == [*(one.name for one in facts.partitions), "all 12"]
    assert cells["orders/1"][:6] == ["lost, overlapped", "120,000", "119,800", "200", "400", "0"]
    assert cells["orders/0"][:6] == ["clean", "120,000", "120,000", "0", "0", "0"]
    assert cells["all 12"][:6] == ["lost, overlapped", "1,440,000", "1,439,800", "200", "400", "0"]
    assert '<td class="bad">400</td><td class="zero">0</td>' in pages["split_brain"]
    finding = facts.findings[0]
    for told in (
        finding.detail,
        "50,000 to 50,399",
        "broker 2 at revision 1042",
        "broker 3 at revision 1191",
        "20:25:09.000",
    ):
        assert told in page.words


def test_hidden_rows_are_summed_and_mentioned(pages: dict[str, str]) -> None:
    facts = audit_facts.huge()
    page = Page(pages["huge"])
    assert len(facts.partitions) == 60
    for told in (
        "9,940 more",
        "all 10,000",
        "The worst 60 of 10,000.",
        "999,990 findings more",
        "42 more findings",
        "1,000,000 losses, 40 gaps in trails",
        "Not drawn: 9,960 partitions",
        "12,345 more stretches of ownership did not fit",
    ):
        assert told in page.words
    shown = sum(one.sums.acked for one in facts.partitions)
    assert f"{facts.sums.acked - shown:,}" in page.words


def test_states_and_owners_differ_by_hatching(pages: dict[str, str]) -> None:
    strokes = dict(re.findall(r'<pattern id="([^"]+)".*?<path d="([^"]*)"', pages["huge"]))
    for drawn in ([state.value for state in State if state is not State.NOTHING], [f"owner-{n}" for n in range(8)]):
        assert len({strokes[name] for name in drawn}) == len(drawn)
    assert [text for text in Page(pages["huge"]).texts("li") if text in STATE_NAMES.values()] == [
        STATE_NAMES[state] for state in reversed(State)
    ]


def test_bars_are_where_and_when_they_belong(pages: dict[str, str]) -> None:
    bars = re.findall(
        r'<rect x="([\d.]+)%" y="(\d+)" width="([\d.]+)%"[^>]*fill="([^"]+)"><title>(.*?)<', pages["split_brain"]
    )
    # Five of sixty minutes, from minute 25 on.
    assert ("41.67", "2", "8.33", "url(#overlapped)", "overlapped, 2026-11-21 20:25:00.000 to 20:30:00.000 UTC") in bars
    two = [bar for bar in bars if "at revision 1042" in bar[4] or "at revision 1191" in bar[4]]
    # Two owners of orders/1 overlap, so they are drawn below each other.
    assert [(float(left), top, fill) for left, top, _, fill, _ in two[:2]] == [
        (0.0, "2", "url(#owner-1)"),
        (41.92, "22", "url(#owner-2)"),
    ]
    assert two[0][4] == "broker 2 at revision 1042, 60,000 records, 2026-11-21 20:00:00.000 to 20:30:00.000 UTC"


def test_topic_names_are_escaped_as_text(pages: dict[str, str]) -> None:
    text = pages["hostile"]
    page = Page(text)
    assert "<script" not in text
    assert "<b>p</b>" not in text
    assert "\x1b" not in text
    assert "\x00" not in text
    assert f"{printable(audit_facts.HTML_TOPIC)}/3" in page.words
    assert "<i>label</i>" in page.words
    # A plot's row name, shortened.
    assert any(label.startswith("$x^2$") and len(label) < 60 for label in page.texts("th"))
    output = io.StringIO()
    show_table(audit_facts.hostile(), Console(file=output, width=200, force_terminal=False))
    assert "\x1b" not in output.getvalue()
    assert "<b>p</b>" in output.getvalue()


def test_report_is_identical_at_any_time_and_place(pages: dict[str, str], tmp_path: Path) -> None:
    """The other report is made by another process, in another directory, in another time zone."""
    script = "import sys; from kproxy.pipeline.audit.report_html import report_page; "
    script += "from tests.support.audit import audit_facts; "
    script += "sys.stdout.buffer.write(report_page(audit_facts.split_brain()).encode())"
    environment = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "LC_ALL": "C"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    other = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, check=True, cwd=tmp_path
    )
    assert other.stdout.decode() == pages["split_brain"]


def test_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the one before")
    write_report(audit_facts.empty(), path)
    assert path.read_text() == report_page(audit_facts.empty())
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(StartupError, match=r"could not be written to .*nowhere"):
        write_report(audit_facts.empty(), tmp_path / "nowhere" / "report.html")


@pytest.mark.long(but=3)
@pytest.mark.parametrize(
    "grid", [Grid(0, 1, 1, 1), Grid(-5, 1, 96, 1), Grid(2**60, 2**50, 96, 1), Grid(0, 2**45, 96, 3)]
)
def test_wrong_clocks_do_not_break_the_report(grid: Grid) -> None:
    facts = audit_facts.tiny()
    holdings = {
        which: [replace(one, first_ms=grid.start_ms, last_ms=grid.end_ms) for one in each]
        for which, each in facts.holdings.items()
    }
    states = {which: [State.COMPLETE] * grid.columns for which in facts.states}
    finding = replace(audit_facts.loss().findings[0], from_ms=grid.start_ms, to_ms=grid.end_ms, topic="t", partition=0)
    assert Page(report_page(replace(facts, grid=grid, states=states, holdings=holdings, findings=(finding,)))).texts(
        "h1"
    ) == ["Clean"]


@pytest.mark.parametrize("begin_ms", [0, 1, 1_763_000_000_123])
def test_time_axis_has_few_round_ticks(begin_ms: int) -> None:
    longs = [1, 7, 5_000, 70_000, 100_000, 170_000, 4_000_000, 9_000_000, 10**8, 2 * 10**8, 6 * 10**9, 9 * 10**10]
    for long_ms in (*longs, LAST_DATE_MS - begin_ms):
        _, ticks = Time(begin_ms, begin_ms + long_ms).ticks()
        assert 1 <= len(ticks) <= TICKS_AT_MOST, long_ms
        assert all(0 <= at <= 100 for at, _ in ticks)
        assert len({label for _, label in ticks}) == len(ticks), long_ms
    days, ticks = Time(audit_facts.START_MS, audit_facts.START_MS + 1_800_000).ticks()
    assert days == "2026-11-21 (UTC)"
    assert ticks[1] == (33.33, "20:10")
    assert [label for _, label in ticks] == ["20:00", "20:10", "20:20", "20:30"]


def _shown(facts: Facts, width: int = 200) -> list[str]:
    output = io.StringIO()
    show_table(facts, Console(file=output, width=width, force_terminal=False))
    return output.getvalue().splitlines()


def test_end_of_judged_time_is_stated() -> None:
    facts = audit_facts.loss()
    read_at = "2026-11-21 21:00:04.000 UTC"
    facts = replace(facts, about={**facts.about, TRAIL_READ: read_at})
    assert _shown(facts)[-1] == f"The trail was read at {read_at}; later rows are not included."
    assert read_at in Page(report_page(facts)).words


@pytest.mark.parametrize("name", audit_facts.ALL)
def test_terminal_report_begins_with_verdict_and_stays_short(name: str) -> None:
    facts = audit_facts.ALL[name]()
    lines = _shown(facts)
    assert lines[0] == f"{headline(facts.verdict)}. {summary(facts.verdict)}"
    assert len(lines) < 60


def test_terminal_shows_partitions_and_findings() -> None:
    text = "\n".join(_shown(audit_facts.split_brain()))
    row = next(line for line in text.splitlines() if "orders/1 " in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells == ["orders/1", "120,000", "119,800", "200", "400", "0", "2, 3", "11.8 ms", "lost,"]
    assert "split brain orders/1, offsets 50,000 to 50,399: Broker 2" in text
    assert "owner broker 2 at revision 1042; other owner broker 3 at revision 1191" in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_narrow_terminal_drops_columns_and_cuts_no_numbers(width: int) -> None:
    lines = _shown(audit_facts.split_brain(), width)
    table = [line for line in lines if line.startswith(("┃", "│"))]
    assert all(len(line) <= width for line in table)
    assert not any("…" in line for line in table)
    assert all(any(number in line for line in table) for number in ("1,440,000", "200", "400"))


@pytest.mark.parametrize(
    ("verdict", "status", "allowed"),
    [
        (Verdict(Sums(1, 5, 5)), 0, 0),
        (Verdict(Sums(1, 5, 5, unsequenced=2)), 0, 0),
        (Verdict(Sums(1, 5, 4, lost=1)), 1, 1),
        (Verdict(Sums(1, 5, 5, overlapped=1)), 1, 1),
        (Verdict(Sums(1, 5, 5, overlapped=1), conflicts=1), 1, 1),
        (Verdict(Sums(1, 5, 5, duplicated=1)), 1, 1),
        (Verdict(Sums(1, 5, 5, corrupt=1)), 1, 1),
        (Verdict(Sums(1, 5, 5, unchecked=1, unproven=1)), 3, 0),
        (Verdict(Sums(1, 5, 2, removed=3)), 0, 0),
        (Verdict(Sums(1, 5, 5, unproven=1)), 3, 0),
        (Verdict(Sums(1, 5, 3, deleted=2)), 0, 0),
        (Verdict(Sums(1, 5, 3, gone=2, unproven=1)), 3, 0),
        (Verdict(Sums(1, 5, 5), trail_faults=1), 3, 0),
        (Verdict(Sums()), 0, 0),
    ],
)
def test_exit_status_tells_findings_from_unproven(verdict: Verdict, status: int, allowed: int) -> None:
    assert verdict.exit_status() == status
    assert verdict.exit_status(allow_unproven=True) == allowed
    assert verdict.clean == (headline(verdict) in ("Clean", "Clean, duplicates not known"))


def test_one_owner_alone_makes_no_split_brain() -> None:
    facts = audit_facts.split_brain()
    alone = replace(facts.findings[0], other_owner=2)
    facts = replace(facts, findings=(alone,), verdict=replace(facts.verdict, conflicts=0))
    assert Page(report_page(facts)).texts("h1") == ["Loss and offsets assigned twice"]
    assert "overlap orders/1, offsets 50,000 to 50,399" in "\n".join(_shown(facts))


def test_each_count_is_shown_and_explained() -> None:
    facts = audit_facts.tiny()
    sums = Sums(1, **dict.fromkeys(COUNTS, 7))
    facts = replace(facts, partitions=(replace(facts.partitions[0], sums=sums),), verdict=Verdict(sums))
    page, heads = Page(report_page(facts)), next(line for line in _shown(facts) if "partition" in line)
    documented = re.findall(r"^\| (\w+) \|", (ROOT / "docs/audit.md").read_text(), re.MULTILINE)
    for name, title in TITLES.items():
        assert title in page.texts("th")
        assert title in page.texts("dt")
        assert name in heads
        assert name in documented
    assert set(GLOSSARY) == {*TITLES.values(), "unproven"}


@pytest.mark.parametrize(
    ("text", "longest", "short"),
    [("orders", 6, "orders"), ("orders/12", 6, "or…/12"), ("", 5, ""), ("abcdef", 5, "ab…ef")],
)
def test_names_are_cut_in_the_middle(text: str, longest: int, short: str) -> None:
    assert shortened(text, longest) == short


def test_times_are_utc() -> None:
    assert utc(audit_facts.START_MS + 7) == "2026-11-21 20:00:00.007"
    assert utc(2**62) == "4,611,686,018,427,387,904 ms after 1970"


def test_unchecked_batches_are_in_both_reports(pages: dict[str, str]) -> None:
    page, shown = Page(pages["unchecked"]), "\n".join(_shown(audit_facts.unchecked()))
    for told in (page.words, shown):
        assert "unchecked" in told
        assert "1 partition not checked" in told
    assert "of 12 partitions; 1,200 batches not checked" in page.words
    assert "corrupt batches" not in page.texts("th")


def test_unsequenced_batches_are_counted_by_partition(pages: dict[str, str]) -> None:
    page = Page(pages["unsequenced"])
    assert "in the log more than once; 1,200 batches not checked" in page.words
    assert "unsequenced batches" in page.texts("th")
    assert "unsequenced batches" not in Page(pages["clean"]).texts("th")


@pytest.mark.parametrize(
    ("sums", "word"),
    [
        (Sums(acked=5, present=5), "clean"),
        (Sums(acked=5, present=5, unsequenced=2), "at least once"),
        (Sums(acked=5, present=3, deleted=2), "deleted"),
        (Sums(acked=5, present=5, unsequenced=2, unproven=1), "unproven"),
        (Sums(acked=5, present=4, lost=1, unsequenced=2), "lost"),
        (Sums(unclaimed=5, unsequenced=2), "nothing"),
    ],
)
def test_partition_verdict_says_no_more_than_headline(sums: Sums, word: str) -> None:
    assert partition_verdict(sums) == word


def test_single_lost_record_counts_as_one() -> None:
    assert "1 record is gone with" in summary(Verdict(Sums(1, acked=2, present=1, gone=1, unproven=1)))
    found = summary(Verdict(Sums(1, acked=2, present=1, lost=1, corrupt=1)))
    assert "1 is not in the log and 1 batch in the log does not match its checksum." in found
