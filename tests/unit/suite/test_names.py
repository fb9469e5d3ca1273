"""Test functions are named in the order of a sentence: subject, verb, at most eight words."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
MOST_WORDS = 8
# A name that begins with one of these has a late subject or none.
RELATIVES = "what whatever which whichever who whoever whom whose whether how why"
PRONOUNS = "it its they their him them this these those nobody somebody anybody everybody"
CONJUNCTIONS = "as because if neither nor not once than though unless until when where wherever while"
PREPOSITIONS = (
    "after at before behind beside between beyond by during for from in of on since under with within without"
)
INVERTED = frozenset(f"{RELATIVES} {PRONOUNS} {CONJUNCTIONS} {PREPOSITIONS}".split())


def problem(name: str) -> str | None:
    """The fault in the name of a test function, if any."""
    _, *words = name.split("_")
    if len(words) > MOST_WORDS:
        return f"{len(words)} words"
    return f"begins with {words[0]!r}" if words[0] in INVERTED else None


def test_long_or_inverted_name_is_found() -> None:
    assert problem("test_malformed_message_raises_codec_error") is None
    assert problem("test_one_two_three_four_five_six_seven_eight") is None
    assert problem("test_one_two_three_four_five_six_seven_eight_nine") == "9 words"
    assert problem("test_what_is_no_message_is_a_codec_error") == "begins with 'what'"


def test_names_of_tests_are_short_and_uninverted() -> None:
    named = [
        (path, node.name)
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in ast.parse(path.read_bytes()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(named) > 1000
    assert [f"{path.relative_to(TESTS)}: {name}: {wrong}" for path, name in named if (wrong := problem(name))] == []
