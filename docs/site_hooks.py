"""What the site's pages need beside Markdown: links that leave docs/, titles for links, and the help of every command."""

from __future__ import annotations

import re
from typing import Any

import click

from inrun.cli.main import cli

#: Where a link out of docs/ goes on the site. Others are shown as text: the files are in the repository, not on the site.
ELSEWHERE = {"../README.md": "index.md"}
_link = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+)\)")
_file = re.compile(r"\[(?:docs/)?([\w-]+\.md)\]\((\S+?)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Mend links that leave docs/ (pages of docs/ itself only), call pages by their titles, put the commands in."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    if "/" not in page.file.src_uri:
        markdown = _link.sub(_moved, markdown)
    titles = titles_of(config["nav"])
    markdown = _file.sub(lambda found: f"[{titles.get(found[1], found[1])}]({found[2]})", markdown)
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", "\n".join(commands()))
    return markdown


def titles_of(nav: Any) -> dict[str, str]:
    """Return the navigation's titles by file."""
    if isinstance(nav, list):
        return {file: title for entry in nav for file, title in titles_of(entry).items()}
    if isinstance(nav, dict):
        return {
            file: found
            for title, inner in nav.items()
            for file, found in ({inner: title} if isinstance(inner, str) else titles_of(inner)).items()
        }
    return {}


def commands() -> list[str]:
    """Return the help of every command, as sections."""
    found: list[str] = []
    with click.Context(cli, info_name="inrun") as outer:
        for name in cli.list_commands(outer):
            command = cli.get_command(outer, name)
            assert command is not None
            with click.Context(command, info_name=f"inrun {name}", terminal_width=100, max_content_width=100) as inner:
                found += [f"## inrun {name}", "", "```text", command.get_help(inner), "```", ""]
    return found


def _moved(found: re.Match[str]) -> str:
    text, target = found.groups()
    return f"[{text}]({ELSEWHERE[target]})" if target in ELSEWHERE else text
