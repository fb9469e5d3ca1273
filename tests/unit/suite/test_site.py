"""The documentation's site is built without a warning, and what it says of alerts and errors is true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import confluent_kafka
import pytest

from kproxy_codec import error_codes
from tests.support.pages import DOCS, ROOT, blocks, shell

ALERTS = (ROOT / "deploy/helm/kproxy/files/alerts.yaml").read_text()
CODE = "".join(file.read_text() for folder in ("kproxy", "codec") for file in (ROOT / folder).rglob("*.py"))
TROUBLE = (DOCS / "troubleshooting.md").read_text()
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
# A row of an error, by the number and name of its code, and the words of librdkafka.
ERROR = re.compile(r"^\| (\d+) (\w+) \| `(.*?)` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make site` builds it; links and anchors that lead nowhere are warnings."""
    directory = tmp_path_factory.mktemp("site")
    recipe = re.search(
        r"^site: .*\n\t@\$\(BIN\)/python (-m sphinx .*?) -d build/doctrees docs build/site",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    assert recipe is not None
    command = [sys.executable, *recipe[1].split(), "-d", directory / "doctrees", DOCS, directory / "html"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return directory / "html"


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert len(loaded) > 5
        assert [each for each in loaded if "//" in each] == []


def test_every_page_says_whom_it_is_for() -> None:
    for page in sorted({*DOCS.glob("*.md")} - {DOCS / "index.md"}):
        text = re.sub(r"<!--.*?-->", "", HEADING.sub("", page.read_text(), count=1), flags=re.DOTALL)
        assert text.lstrip().startswith("**For** "), page.name


def test_every_command_is_in_the_site(site: Path) -> None:
    page = (site / "command-line.html").read_text()
    for command in ("serve", "own claim", "pipeline audit", "user add", "check-config"):
        assert f'id="kproxy-{command.replace(" ", "-")}"' in page


def test_every_alert_leads_to_its_section(site: Path) -> None:
    names = re.findall(r"- alert: (\w+)", ALERTS)
    urls = re.findall(r"runbook_url: (\S+)", ALERTS)
    assert urls == [f"runbook.html#{name.lower()}" for name in names]
    page = (site / "runbook.html").read_text()
    assert [url for url in urls if f'id="{url.partition("#")[2]}"' not in page] == []
    sections = (DOCS / "runbook.md").read_text().split("\n## ")[1:]
    assert sorted(each.partition("\n")[0] for each in sections if each.startswith("Kproxy")) == sorted(names)
    for each in sections:
        if each.startswith("Kproxy"):
            assert re.findall(r"^- \*\*(\w+)\.\*\*", each, re.MULTILINE) == ["Symptom", "Cause", "Action"], each


def test_base_of_runbook_urls_is_set_as_described(tmp_path: Path) -> None:
    [block] = [each for each in blocks("deploy.md", "sh") if "runbook_url" in each.text]
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    shell(block.text.partition("\n")[0], tmp_path)
    text = (tmp_path / "alerts.yaml").read_text()
    assert text.count("runbook_url: https://docs.example.org/kproxy/runbook.html#kproxy") == ALERTS.count("- alert: ")


def test_errors_have_their_numbers_names_and_words() -> None:
    rows = ERROR.findall(TROUBLE)
    assert len(rows) > 20
    for number, name, words in rows:
        assert error_codes.name_of(int(number)) == name
        assert confluent_kafka.KafkaError(int(number)).str() == words


@pytest.mark.parametrize("page", ["troubleshooting.md", "runbook.md"])
def test_events_and_reasons_of_the_log_exist(page: str) -> None:
    text = (DOCS / page).read_text()
    named = re.findall(r"`([a-z][a-z ]+ [a-z ]+)`(?! shows)", text)
    events = [each for each in named if not each.startswith(("kproxy ", "hostname ", "send"))]
    assert len(events) > 4
    assert [each for each in events if each not in CODE] == []
