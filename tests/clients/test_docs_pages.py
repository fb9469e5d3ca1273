"""The programs and commands of the pages for newcomers work as described, on the `kproxy dev` that they start.

tests/integration/kafka/test_docs_kafka.py has the page about an own Kafka, tests/pipeline/test_docs_spark.py that about
Spark, tests/integration/commands/test_docs_run.py that about security.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import kafka
import pytest

from tests.support.brokers.kafka_jars import KAFKA_VERSION, client_classpath
from tests.support.clients.member_processes import GO_MODULE, built_by_npm, program
from tests.support.pages import Block, blocks, shell
from tests.support.processes.dev import KproxyProcess, dev_arguments, serving

LANGUAGES = blocks("languages.md")
TIMEOUT_S = 300.0
# What the page tells to type before anything else; here `kproxy dev` is started with free ports.
PREPARES = """python3 -m venv ~/kproxy && ~/kproxy/bin/pip install '.[dev]'
export PATH="$HOME/kproxy/bin:$PATH"
kproxy dev
"""


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KproxyProcess]:
    directory = tmp_path_factory.mktemp("dev")
    with serving(dev_arguments(directory / "data"), directory / "stderr") as process:
        yield process


@pytest.fixture(scope="module")
def orders(dev: KproxyProcess) -> None:
    """The topic that pages name."""
    with kafka.KafkaProducer(bootstrap_servers=dev.kafka) as producer:
        producer.send("orders", b"1").get(TIMEOUT_S)


def at(dev: KproxyProcess, text: str) -> str:
    """The text of a block, with the addresses of this cluster."""
    return text.replace("127.0.0.1:9092", dev.kafka).replace("127.0.0.1:9644", dev.admin)


def test_first_page_leads_to_a_clean_audit(dev: KproxyProcess, tmp_path: Path) -> None:
    prepare, write, look = blocks("start-dev.md", "sh")
    assert prepare.text == PREPARES
    # kcat is not everywhere, hence the page's second way.
    by_kcat = 1000 if shutil.which("kcat") else 0
    if by_kcat:
        assert shell(at(dev, write.text), tmp_path).splitlines() == [str(number) for number in range(1, 1001)]
    [program_of_page] = blocks("start-dev.md", "python")
    assert run([sys.executable, "-c", at(dev, program_of_page.text)], tmp_path) == "0 0 b'hello'\n"
    said = shell(at(dev, look.text), tmp_path, KPROXY_ADMIN=dev.admin)
    assert "greetings" in said
    assert "FAIL" not in said
    assert f"{by_kcat + 2:,} acknowledged records are in the log" in said


@pytest.mark.parametrize("page", ["runbook.md", "troubleshooting.md"])
def test_commands_for_trouble_find_none(dev: KproxyProcess, page: str, tmp_path: Path) -> None:
    [block] = blocks(page, "sh")
    said = shell(at(dev, block.text), tmp_path)
    assert "ok " in said
    assert "FAIL" not in said


# Of the page about audits: what serves, goes on for ever, or needs Spark or files of a proxy.
ELSEWHERE = ("kproxy serve", "kproxy dev", "--follow", "--master", "--engine", "json:", "--trail-key")


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize(("page", "count"), [("commands.md", 2), ("audit.md", 4)])
def test_queries_of_a_page_are_answered(dev: KproxyProcess, page: str, count: int, tmp_path: Path) -> None:
    lines = "".join(each.text for each in blocks(page, "sh")).splitlines()
    queries = [each for each in lines if each.startswith("kproxy ") and not any(word in each for word in ELSEWHERE)]
    assert len(queries) == count
    for query in queries:
        shell(at(dev, query), tmp_path, KPROXY_ADMIN=dev.admin, KPROXY_BOOTSTRAP=dev.kafka)


@pytest.mark.usefixtures("orders")
def test_claim_is_listed_watched_and_freed(dev: KproxyProcess, tmp_path: Path) -> None:
    """The page's four commands; `watch` and `claim` stay until they are ended, or severed."""
    [people] = [each.text for each in blocks("single-writer.md", "sh") if "own watch" in each.text]
    show, watch, claim, free = (line.partition("#")[0] for line in people.splitlines())
    script = f"{watch} > watched & watcher=$!\n{claim} & owner=$!\n"
    script += f"until {show} | grep orders/0; do sleep 0.2; done\n"
    script += f"until grep -q orders/0 watched; do sleep 0.2; done\n{free}\n"
    script += "if wait $owner; then exit 9; fi\nkill $watcher; wait $watcher || true; grep orders/0 watched"
    said = shell(
        f"timeout 100 bash -euo pipefail -c '{script}'", tmp_path, KPROXY_ADMIN=dev.admin, KPROXY_BOOTSTRAP=dev.kafka
    )
    assert "orders/0" in said


def run(command: Sequence[str | Path], directory: Path, **environ: str) -> str:
    ended = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended
    return ended.stdout


def greets(dev: KproxyProcess, block: Block) -> tuple[str, str]:
    """The program with a topic and a group of its own, and the words that it writes and reads."""
    words = block.text.partition("hello from ")[2]
    name = words[: min(words.index(mark) for mark in ("'", '"') if mark in words)]
    topic = f"greetings-{block.line}"
    text = at(dev, block.text).replace("greetings", topic).replace("readers", f"readers-{block.line}")
    return text, f"hello from {name}"


@pytest.mark.parametrize("block", [each for each in LANGUAGES if each.kind == "python"], ids=lambda block: block.name)
def test_python_program_reads_what_it_wrote(dev: KproxyProcess, block: Block, tmp_path: Path) -> None:
    text, words = greets(dev, block)
    assert run([sys.executable, "-c", text], tmp_path) == f"0 {words}\n"


@pytest.mark.long
def test_shell_reads_what_it_wrote(dev: KproxyProcess, tmp_path: Path) -> None:
    program("kcat")
    [block] = blocks("languages.md", "sh")
    text, words = greets(dev, block)
    assert words in shell(text, tmp_path)


def by_java(directory: Path, text: str) -> tuple[Sequence[str | Path], Mapping[str, str]]:
    program("javac")
    (directory / "Hello.java").write_text(text)
    return [program("java"), "-cp", client_classpath(KAFKA_VERSION), "Hello.java"], {}


def by_go(directory: Path, text: str) -> tuple[Sequence[str | Path], Mapping[str, str]]:
    for name in ("go.mod", "go.sum"):
        shutil.copy(GO_MODULE / name, directory)
    (directory / "main.go").write_text(text)
    return [program("go"), "run", "."], {}


def by_node(directory: Path, text: str) -> tuple[Sequence[str | Path], Mapping[str, str]]:
    (directory / "hello.js").write_text(text)
    return [program("node"), "hello.js"], {"NODE_PATH": str(built_by_npm() / "node_modules")}


COMPILED = {"java": by_java, "go": by_go, "js": by_node}


@pytest.mark.java
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [each for each in LANGUAGES if each.kind in COMPILED], ids=lambda block: block.name)
def test_other_program_reads_what_it_wrote(dev: KproxyProcess, block: Block, tmp_path: Path) -> None:
    text, words = greets(dev, block)
    command, environ = COMPILED[block.kind](tmp_path, text)
    assert f"0 {words}\n" in run(command, tmp_path, **environ)


def test_every_program_of_the_page_is_run() -> None:
    assert {each.kind for each in LANGUAGES} == {"python", "sh", *COMPILED}
