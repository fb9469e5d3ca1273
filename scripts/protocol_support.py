"""Write docs/protocol-support.md from the tables of APIs and tools; `--check` only reports whether it is up to date."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kproxy.proxy.apis import APIS, SERVED, Api, Handling
from kproxy_codec.api_keys import name_of

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "protocol-support.md"
TOOLS = REPOSITORY / "tests" / "support" / "clients" / "kafka_tools.toml"

INTRODUCTION = """\
# Protocol support

<!-- Written by scripts/protocol_support.py from kproxy/proxy/apis.py and tests/support/clients/kafka_tools.toml: run
`make docs` after a change there. -->

**For** people who ask whether an API or a tool works. The proxy knows these APIs of Kafka's protocol. A client is
offered each API in the versions that both the proxy and all upstream brokers serve, and ApiVersions names them. A
request outside of that is answered with UNSUPPORTED_VERSION in the form of its version, or closes the connection
where that has none; the log says why. Leader epochs (KIP-320) are removed from requests and answers.

| handling | a request is |
| --- | --- |"""

HANDLING = {
    Handling.PROXY: "answered by the proxy",
    Handling.SPLIT: "split by the owners of its partitions, and the answers are merged",
    Handling.EACH_OWNER: "divided, each partition sent to its owner once, and the answers are merged",
    Handling.GROUP_COORDINATOR: "sent to the broker that coordinates its group",
    Handling.EACH_GROUP: "divided, each group sent to its coordinator, and the answers are merged",
    Handling.TRANSACTION_COORDINATOR: "sent to the broker that coordinates its transactional id",
    Handling.EACH_TRANSACTION: "divided, each transactional id sent to its coordinator, and the answers are merged",
    Handling.NAMED_BROKER: "sent to the broker that it names, or parts of it; what names none, to one broker",
    Handling.ALL_BROKERS: "sent to all brokers, and the answers are merged; one that does not answer is an error in it",
    Handling.ANY_BROKER: "sent to one broker; if that one does not answer, to the next",
    Handling.REFUSED: "not served: the connection is closed",
}

TABLE = """
Where an answer names brokers, the proxy puts proxies in their place ("Names proxies"). A request that one broker may
have carried out is not sent to another where the notes say "Once". With ACLs (see
[Security](security.md#authorisation)) a client needs the permission.

| API | key | versions | handling | permission | notes |
| --- | ---: | --- | --- | --- | --- |"""

COMMAND_LINE = """
## Kafka's command line tools

`make test-all` runs each command below against three brokers of Apache Kafka {release}, direct and through one proxy,
and fails where an outcome is not as here. "Same": the same exit status and the same lines, where a proxy's id and
address stand for those of its brokers. "Refused": the tool shows this error. In a command NODE and NODES are ids as its
client sees them, which are the proxy's behind a proxy; BROKER and BROKERS are the brokers' own.

| tool | command | through the proxy |
| --- | --- | --- |"""

NOT_RUN = """
Not run: tools that speak to no broker (`kafka-dump-log`, `kafka-storage`, `kafka-metadata-shell`, `kafka-jmx`), and
`kafka-replica-verification`, which never ends and reads as a replica."""


def kafka_name(api_key: int) -> str:
    """Return an API's name as Kafka's documentation writes it."""
    return "".join(word.capitalize() for word in name_of(api_key).split("_"))


def notes(api: Api) -> Iterator[str]:
    """Yield the notes on one API, as sentences."""
    if api.names_brokers:
        yield "Names proxies."
    if not api.repeatable and api.handling is Handling.ANY_BROKER:
        yield "Once."
    if api.note:
        yield api.note


def row(api_key: int, api: Api) -> str:
    """Return the line of one served API."""
    lowest, highest = api.versions
    versions = str(lowest) if lowest == highest else f"{lowest}–{highest}"
    needs = dict.fromkeys(f"{each.operation.value} {each.resource.value}" for each in api.needs or ())
    permission = ", ".join(needs) or "none"
    cells = (kafka_name(api_key), str(api_key), versions, api.handling.value, permission, " ".join(notes(api)))
    return f"| {' | '.join(cells)} |"


def refused() -> Iterator[str]:
    """Yield a line for each API that is refused."""
    yield "## Refused"
    yield ""
    for key, api in sorted(APIS.items()):
        if api.handling is Handling.REFUSED:
            yield f"- {kafka_name(key)} ({key})" + (f": {api.note}" if api.note else "")


def tool_rows() -> Iterator[str]:
    """Yield the section on Kafka's tools."""
    table: dict[str, Any] = tomllib.loads(TOOLS.read_text())
    yield COMMAND_LINE.format(release=table["release"])
    for tool in table["tools"]:
        for command in tool["commands"]:
            outcome = f"refused: {command['refused']}" if "refused" in command else "same"
            if "differs" in command:
                outcome = f"differs: {command['differs']}"
            run = f"`{command['run']}`" if command["run"] else ""
            yield f"| {tool['script']} | {run} | {outcome} |"
    yield NOT_RUN


def lines() -> Iterable[str]:
    yield INTRODUCTION
    for handling in Handling:
        yield f"| {handling.value} | {HANDLING[handling]} |"
    yield TABLE
    for key, api in sorted(SERVED.items()):
        yield row(key, api)
    yield ""
    yield from refused()
    yield from tool_rows()


def main() -> int:
    """Return status 1 if `--check` finds a page that differs from the table."""
    text = "\n".join(lines()) + "\n"
    if "--check" in sys.argv[1:]:
        is_current = PAGE.exists() and PAGE.read_text() == text
        if not is_current:
            sys.stderr.write("docs/protocol-support.md is not up to date: run make docs\n")
        return 0 if is_current else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
