"""How a run looks while it trains: one live line on a terminal, plain lines elsewhere. All of it on standard error."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from inrun.cli.text import printable
from inrun.training.loop import Status

#: Seconds between plain lines at the beginning; they grow apart as the run goes on.
PATIENCE = 2.0


def describe(status: Status) -> str:
    """Return what people watch: losses, speed, what scoring costs, how far the books are off."""
    parts = [f"loss {status.loss:.3f}"]
    parts += [f"{printable(name, 20)} {loss:.3f}" for name, loss in list(status.validation.items())[:4]]
    parts.append(f"{status.samples_per_second:.1f} samples/s")
    if not math.isnan(status.overhead):
        parts.append(f"scoring {status.overhead:+.0%}")
    if not math.isnan(status.residual):
        parts.append(f"residual {status.residual:.1%}")
    return ", ".join(parts)


@contextlib.contextmanager
def training_line(quiet: bool = False) -> Iterator[Callable[[Status], None]]:
    """Show where training stands."""
    console = Console(stderr=True)
    if quiet:
        yield lambda status: None
    elif console.is_terminal:
        columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"))
        with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("", total=None)
            yield lambda s: bar.update(task, completed=s.step, total=s.steps, description=describe(s))
    else:
        yield _lines()


def _lines() -> Callable[[Status], None]:
    began = shown = time.monotonic()
    last = -1

    def tell(status: Status) -> None:
        nonlocal shown, last
        now = time.monotonic()
        due = now - shown >= max(PATIENCE, 0.05 * (now - began)) or status.step in (1, status.steps)
        if due and status.step != last:
            shown, last = now, status.step
            click.echo(f"step {status.step}/{status.steps}: {describe(status)}", file=sys.stderr)

    return tell


@contextlib.contextmanager
def reading_bar(quiet: bool = False) -> Iterator[Callable[[int, int, int], None]]:
    """Show how far documents are tokenised."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total, documents: bar.update(
            task, completed=done, total=total, description=f"tokenising, {documents:,} documents"
        )
