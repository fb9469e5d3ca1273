"""Write the derived parts of the Helm chart: `make docs`; with --check report whether they are up to date.

The table of values in README.md comes from values.yaml: a comment that begins with `# --` describes the key below it,
and `# @default --` describes a default that is too long to show. Keys below a described key need no description.
The schema of the value `config` comes from the options of `kproxy serve`, the arrays of tables among them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kproxy.config.access import ACLS, AclSection
from kproxy.config.listeners import SECTION as LISTENERS
from kproxy.config.listeners import ListenerSection
from kproxy.config.parsing import Secret, Texts
from kproxy.config.proxy import SECTIONS
from kproxy.config.quotas import QUOTAS, QuotaSection
from kproxy.config.static_table import STATIC_TABLE_SECTIONS, TopicOwners

CHART = Path(__file__).parents[1] / "deploy/helm/kproxy"
# The tables of the configuration that are no sections.
BROKERS, TOPICS = STATIC_TABLE_SECTIONS
TABLE_KINDS: dict[str, Any] = {
    LISTENERS: list[ListenerSection],
    ACLS: list[AclSection],
    QUOTAS: list[QuotaSection],
    BROKERS: dict[str, str],
    TOPICS: list[TopicOwners],
}
# A key that names a file takes the name and key of a Secret as well; `jwks` may be a URL, too.
_FILE = {"$ref": "#/definitions/file"}
_TEXT = {"type": "string"}
_SCHEMAS = {Path: _FILE, Secret: _TEXT, Texts: {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}}
_IN_SECRET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["secretName", "key"],
    "properties": {name: {"type": "string", "minLength": 1} for name in ("secretName", "key")},
}
_BEGIN, _END = "<!-- values: written by `make docs` -->\n", "<!-- end of values -->\n"
_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z0-9_]+):(?: (?P<value>.*))?")


class Value(NamedTuple):
    """A line of the table."""

    path: str
    default: str
    description: str


def values(lines: list[str]) -> Iterator[Value]:
    """Yield the described values of values.yaml, in order. Raise ValueError for a value without a description."""
    comment: list[str] = []
    open_keys: list[tuple[int, str]] = []
    described_at: int | None = None
    for line in lines:
        text = line.strip()
        if not text:
            comment = []
        elif text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
        elif match := _LINE.fullmatch(line):
            indent, path = len(match["indent"]), match["key"]
            open_keys = [each for each in open_keys if each[0] < indent]
            path = ".".join([*(key for _, key in open_keys), match["key"]])
            open_keys.append((indent, match["key"]))
            if described_at is None or indent <= described_at:
                described_at = indent if comment and comment[0].startswith("--") else None
                if described_at is not None:
                    yield _described(path, match["value"] or "", comment)
                elif match["value"]:
                    raise ValueError(f"values.yaml: nothing describes {path}: write `# -- ...` above it")
            comment = []


def _described(path: str, value: str, comment: list[str]) -> Value:
    words = [each for each in comment if not each.startswith("@default")]
    told = [each.removeprefix("@default --").strip() for each in comment if each.startswith("@default")]
    return Value(path, told[0] if told else f"`{value}`", " ".join(words).removeprefix("--").strip())


def readme(before: str, table: list[Value]) -> str:
    """Return README.md with that table between its marks."""
    head, _, rest = before.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    rows = [f"| `{path}` | {default} | {description} |\n" for path, default, description in table]
    return "".join([head, _BEGIN, "| value | default | meaning |\n| --- | --- | --- |\n", *rows, _END, tail])


def schema(before: str) -> str:
    """Return values.schema.json with the options of `kproxy serve` as `config`."""
    whole: dict[str, Any] = json.loads(before)
    config = {}
    for name, kind in {**SECTIONS, **TABLE_KINDS}.items():
        found = msgspec.json.schema(kind, schema_hook=_SCHEMAS.__getitem__)
        config[name] = _inlined("", found, found.get("$defs", {}))
    whole["definitions"] = {"file": {"anyOf": [{"type": "string"}, _IN_SECRET]}}
    whole["properties"]["config"] = {"type": "object", "additionalProperties": False, "properties": config}
    return json.dumps(whole, indent=2) + "\n"


def _inlined(name: str, found: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key, with its references resolved, without null, which TOML lacks."""
    kinds = [each for each in found.get("anyOf", ()) if each != {"type": "null"}]
    found = kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else found
    if name == "jwks" or found == _FILE:
        return _FILE
    if "$ref" in found:
        found = definitions[found["$ref"].rpartition("/")[2]]
    if "properties" in found:
        properties = {key: _inlined(key, each, definitions) for key, each in found["properties"].items()}
        required = {"required": found["required"]} if found["required"] else {}
        return {"type": "object", "additionalProperties": False, **required, "properties": properties}
    items = {"items": _inlined("", found["items"], definitions)} if "items" in found else {}
    return {**{key: value for key, value in found.items() if key != "$defs"}, **items}


def main() -> int:
    table = list(values((CHART / "values.yaml").read_text().splitlines()))
    stale = []
    for file, make in ((CHART / "README.md", lambda old: readme(old, table)), (CHART / "values.schema.json", schema)):
        old = file.read_text()
        new = make(old)
        if old != new:
            stale.append(str(file.relative_to(CHART.parents[2])))
            if "--check" not in sys.argv[1:]:
                file.write_text(new)
    if stale and "--check" in sys.argv[1:]:
        sys.stderr.write(f"not up to date: {', '.join(stale)}: run `make docs`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
