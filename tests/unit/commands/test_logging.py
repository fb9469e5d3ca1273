"""Log events are constant phrases with plain fields, and lines are text or JSON."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kproxy

PACKAGE = Path(kproxy.__file__).parent
LOGGERS = {"log", "_logger"}
METHODS = {"debug", "info", "warning", "error", "exception"}
EVENT = re.compile(r"[A-Za-z][A-Za-z0-9\'-]*( [A-Za-z0-9\'-]+)*")
MOST_CHARACTERS = 60
# Functions that pass on an event, with the place of the event among their arguments.
PASSED_ON = {"self._log_once": 0, "SkippedKeys": 0}


def calls() -> Iterator[tuple[str, ast.Call, ast.expr]]:
    """Every call that logs with structlog: its place, the call, and its event."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "import structlog" not in path.read_text():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            of, function = f"{path.relative_to(PACKAGE)}:{node.lineno}", node.func
            if isinstance(function, ast.Attribute) and function.attr in METHODS:
                if isinstance(function.value, ast.Name) and function.value.id in LOGGERS:
                    yield of, node, node.args[0]
            elif ast.unparse(function) in PASSED_ON:
                yield of, node, node.args[PASSED_ON[ast.unparse(function)]]


def is_passed_on(event: ast.expr) -> bool:
    return ast.unparse(event) in {"event", "self._event"}


def test_every_event_is_a_constant_short_phrase() -> None:
    events = [(of, event) for of, _, event in calls() if not is_passed_on(event)]
    assert len(events) > 100
    wrong = [
        f"{of}: {ast.unparse(event)}"
        for of, event in events
        if not isinstance(event, ast.Constant)
        or not EVENT.fullmatch(str(event.value))
        or len(str(event.value)) > MOST_CHARACTERS
    ]
    assert not wrong, "\n".join(wrong)


def test_log_field_is_never_a_python_repr() -> None:
    wrong = [
        f"{of}: {ast.unparse(node)}"
        for of, call, _ in calls()
        for keyword in call.keywords
        for node in ast.walk(keyword.value)
        if (isinstance(node, ast.Call) and ast.unparse(node.func) == "repr")
        or (isinstance(node, ast.FormattedValue) and node.conversion == ord("r"))
    ]
    assert not wrong, "\n".join(wrong)


SCRIPT = """
import logging, structlog
from kproxy.observe.logging import configure_logging
configure_logging("info", {log_format!r})
log = structlog.get_logger()
log.debug("left out")
log.warning("client connection closed", client="127.0.0.1:5", topics=(b"t", b"\\xff"), reason=ValueError("no"), lag=2)
logging.getLogger("kafka").error("out of %s", 5)
try:
    raise ValueError("boom")
except ValueError:
    log.exception("request failed")
"""


def logged(log_format: str | None) -> str:
    script = SCRIPT.format(log_format=log_format)
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=200, check=True)
    return done.stderr


@pytest.mark.parametrize("log_format", ["json", None], ids=["asked for", "stderr is no terminal"])
def test_json_line_has_utc_time_and_plain_values(log_format: str | None) -> None:
    lines = [json.loads(line) for line in logged(log_format).splitlines()]
    for line in lines:
        assert list(line)[:3] == ["timestamp", "level", "event"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("timestamp"))
    assert lines[0] == {
        "level": "warning", "event": "client connection closed", "client": "127.0.0.1:5", "topics": ["t", "\ufffd"],
        "reason": "no", "lag": 2,
    }  # fmt: skip
    assert lines[1] == {"level": "error", "event": "out of 5", "logger": "kafka"}
    assert lines[2].pop("exception").endswith("ValueError: boom")
    assert lines[2:] == [{"level": "error", "event": "request failed"}]


def test_text_line_has_utc_time_and_trailing_fields() -> None:
    first, *_ = logged("text").splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[warning *\] client connection closed ", first)
    assert all(word in first for word in ("client=127.0.0.1:5", "lag=2", "reason=no"))


def test_logged_name_does_not_control_the_terminal() -> None:
    """Clients choose topic names; `\x1b[2J` would clear the screen of a reader of the log."""
    script = r"""
import logging, structlog
from kproxy.observe.logging import configure_logging
configure_logging("info", "text")
structlog.get_logger().warning("access denied", name="a\x1b[2J\u202e", others=["b\x1b"], reason="two\nlines")
logging.getLogger("kafka").error("about %s", "c\x1b[2J\nd")
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=200, check=True)
    first, second = done.stderr.splitlines()
    assert "\x1b" not in done.stderr
    assert "name=a\ufffd[2J\ufffd" in first
    assert "about c\ufffd[2J\ufffdd" in second
