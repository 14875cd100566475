"""Code blocks of the documentation, and what it takes to run them.

A page is run in a folder of its own, from top to bottom, with one namespace:

- ``python`` blocks are executed.
- ``sh`` and ``console`` blocks (lines that begin with ``$`` are commands, the rest is what they print): every ``inrun`` command is
  run and must exit with 0. Commands that set a machine up (``pip install``, ``make``, ``git clone``, ``cd``) are not.
- ``yaml``, ``json`` and ``jsonl`` blocks whose first line is ``# name`` are written to that file (but for YAML without that line).
- a block after ``<!-- not run: why -->`` is shown only, and counted.
- others (``text``, ``diff``, no language) are listings, and must not hold commands.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inrun.cli.main import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
COMMANDS, FILES, LISTINGS = ("sh", "console"), ("yaml", "json", "jsonl"), ("text", "diff", "")
SET_UP = (("pip", "install"), ("make",), ("git", "clone"), ("cd",))

_block = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def where(self) -> str:
        """Return page and line, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8") if text is None else text
    found = []
    for match in _block.finditer(text):
        lines = match["text"].splitlines()
        body = "\n".join(line.removeprefix(match["indent"]) for line in lines) + "\n"
        found.append(Block(page, text.count("\n", 0, match.start("language")) + 2, match["language"], body, match["why"]))
    return found


def commands_of(block: Block) -> list[list[str]]:
    """Return the commands of a block as lists of words; lines that end in a backslash go on."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[1:] for line in lines if line.startswith("$")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def holds_commands(block: Block) -> bool:
    """Tell whether a listing looks as if it had commands to run."""
    return any(re.match(r"(\$ |inrun [a-z]|python |torchrun |pip |make )", line) for line in block.text.splitlines())


def run_command(words: list[str]) -> None:
    """Run one command in this process. It must succeed."""
    if any(tuple(words[: len(verb)]) == verb for verb in SET_UP):
        return
    assert words[0] == "inrun", f"{' '.join(words)!r} is neither an inrun command nor one that sets up: mark its block as not run"
    try:
        code = cli.main(words[1:], prog_name="inrun", standalone_mode=False)
    except SystemExit as end:
        code = end.code
    assert not code, f"{' '.join(words)!r} exits with {code}"


def run_block(block: Block, folder: Path, names: dict[str, Any]) -> None:
    """Run one block; the working folder is ``folder``."""
    if block.language == "python":
        padded = "\n" * (block.line - 1) + block.text  # so that a traceback has the page's own lines
        exec(compile(padded, str(block.page), "exec"), names)  # noqa: S102 - our own page
    elif block.language in COMMANDS:
        for words in commands_of(block):
            run_command(words)
    elif block.language in FILES and (name := re.match(r"# (\S+\.\w+)\n", block.text)):
        text = block.text if block.language == "yaml" else block.text[name.end() :]
        (folder / name[1]).write_text(text, encoding="utf-8")
    elif block.language in LISTINGS:
        assert not holds_commands(block), f"{block.where}: commands in a listing; call it sh or console"
    else:
        assert block.language in FILES, f"{block.where}: what is {block.language!r}?"


def run_page(page: Path, folder: Path, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a page, and return its names."""
    names = {"__name__": "__main__"} if names is None else names
    for block in blocks_of(page):
        if block.not_run is None:
            run_block(block, folder, names)
    return names
