"""Sphinx's configuration of the documentation's site: `make site` builds it into build/site.

The pages are docs/*.md, which can be read without the site, too. When a page is read for it, three things are done. A
page of `INCLUDED` gets the text of a file outside of docs/ below its own words. A link to such a file leads to its
page, and one to any other file to a copy of it. The page of commands gets the help of each, from the program itself.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import click
from sphinx.application import Sphinx

from kproxy import installed
from kproxy.cli import cli

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

from scripts.man_pages import AS_IT_STANDS, commands  # noqa: E402

project = "kproxy"
release = installed.version()
html_title = f"kproxy {release}"
extensions = ["myst_parser"]
exclude_patterns = ["man"]
myst_heading_anchors = 4
# A block without a language is a picture or a line of output.
highlight_language = "none"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
myst_enable_extensions = ["deflist"]
html_theme_options = {"navigation_with_keys": True}

# Pages that have the text of a file elsewhere.
INCLUDED = {
    "changelog": ROOT / "CHANGELOG.md",
    "chart": ROOT / "deploy/helm/kproxy/README.md",
    "contributing": ROOT / "CONTRIBUTING.md",
    "examples": ROOT / "examples/README.md",
    "security-policy": ROOT / "SECURITY.md",
}
PAGE_OF = {file: f"{page}.md" for page, file in INCLUDED.items()}
_LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]+)?\)")


def with_links(text: str, page: str, directory: Path) -> str:
    """The text of a file in that directory, with the links that it has as part of the page."""

    def link(match: re.Match[str]) -> str:
        words, anchor = match[1], match[3] or ""
        file = Path(os.path.normpath(directory / match[2]))
        if PAGE_OF.get(file) == f"{page}.md" or file.is_dir():
            return words
        return f"[{words}]({PAGE_OF.get(file) or os.path.relpath(file, DOCS)}{anchor})"

    return _LINK.sub(link, text)


def described(context: click.Context) -> str:
    """The section of one command: what `--help` shows."""
    parts = [f"## {context.command_path}"]
    for text in (context.command.help or "").split("\n\n"):
        lines = text.strip("\n").split("\n")
        literal = lines[0].strip() == AS_IT_STANDS
        parts.append("```\n" + "\n".join(line.strip() for line in lines[1:]) + "\n```" if literal else "\n".join(lines))
    rows = [each.get_help_record(context) for each in context.command.get_params(context)]
    options = [f"`{row[0]}`\n: {row[1]}" for row in rows if row is not None]
    return "\n\n".join([*parts, *options, *filter(None, [context.command.epilog])])


def read(app: Sphinx, page: str, source: list[str]) -> None:
    text = with_links(source[0], page, DOCS)
    if page in INCLUDED:
        # The file's heading comes first.
        head, _, rest = with_links(INCLUDED[page].read_text(), page, INCLUDED[page].parent).partition("\n")
        text = f"{head}\n\n{text}\n{rest}"
    elif page == "command-line":
        contexts = commands(cli, click.Context(cli, info_name="kproxy"))
        text += "\n" + "\n\n".join(map(described, contexts)) + "\n"
    source[0] = text


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
