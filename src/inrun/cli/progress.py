"""How far a command has come: a bar on a terminal, plain lines elsewhere if asked for. All of it on standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Called with what is being done, how much of it is done, and how much there is in all.
Tell = Callable[[str, int, int], None]
#: A description, a bar, the count, the time gone by and the time to go.
COLUMNS: tuple[type[ProgressColumn], ...] = (BarColumn, MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn)


@contextlib.contextmanager
def progress(
    quiet: bool = False,
    *,
    columns: Sequence[ProgressColumn] | None = None,
    stays: bool = False,
    patience: float | None = None,
    line: Callable[[str, int, int], str] = "{}: step {}/{}".format,
) -> Iterator[Tell]:
    """Give a function to call with what is being done, and show what it is told.

    Args:
        quiet: Show nothing.
        columns: What the bar consists of; ``COLUMNS`` behind the description by default.
        stays: Leave the bar on the screen when all is done; of plain lines, always show the first and the last.
        patience: Seconds between plain lines where there is no terminal; they grow apart as time goes by. None: no such lines.
        line: Makes a plain line.
    """
    console = Console(stderr=True)
    if not quiet and console.is_terminal:
        shown = columns or (TextColumn("{task.description}"), *(column() for column in COLUMNS))
        with Progress(*shown, console=console, transient=not stays) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
    elif quiet or patience is None:
        yield lambda what, done, total: None
    else:
        lines = _Lines(patience, line, stays)
        try:
            yield lines
        finally:
            lines.end()


def log_to_terminal(level: int = logging.WARNING) -> None:
    """Write messages of the library above a bar that is being shown, not into it."""
    handler = _ErrorHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])


class _ErrorHandler(logging.Handler):
    """Writes to what standard error is at that moment: a bar puts something of its own there, which knows where the bar is."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):
            self.handleError(record)


def terminal_width() -> int:
    """Return the columns of the terminal that standard error is."""
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stderr.fileno()).columns)
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


class _Lines:
    """Plain lines now and then, one a step. With ``ends`` the first step has one and the last, as it was told of last."""

    def __init__(self, patience: float, line: Callable[[str, int, int], str], ends: bool) -> None:
        self._patience, self._line, self._ends = patience, line, ends
        self._began = self._shown = time.monotonic()
        self._last = -1
        self._ending: str | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take in how far it is."""
        if self._ends and done == total:  # what is told of it again, as its evaluation, belongs into its line
            self._ending = self._line(what, done, total)
            return
        now = time.monotonic()
        due = now - self._shown >= max(self._patience, 0.05 * (now - self._began)) or (self._ends and done == 1)
        if due and done != self._last:
            self._shown, self._last = now, done
            click.echo(self._line(what, done, total), file=sys.stderr)

    def end(self) -> None:
        """Show the last line."""
        if self._ending is not None:
            click.echo(self._ending, file=sys.stderr)
