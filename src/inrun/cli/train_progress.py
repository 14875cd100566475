"""How a run looks while it reads its data and trains."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from inrun.cli.progress import progress
from inrun.cli.text import printable
from inrun.training.loop import Status

#: Seconds between plain lines at the beginning.
PATIENCE = 2.0
#: Validation sets, and steps and samples of each, that the last words of a run speak of.
MOST_SETS, MOST_NAMED = 4, 3


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


def ending(run: str) -> list[str]:
    """Return what the books of a run are worth, set by set, with the steps and samples that hold an outsized part."""
    from inrun.analysis import summarise_run
    from inrun.analysis.summary_page import standing_out

    lines = []
    for s in summarise_run(run).sets[:MOST_SETS]:
        lines.append(f"{printable(s.validation, 40)}: {s.verdict}")
        lines += [f"  {line}" for line in (standing_out(s, MOST_NAMED) if s.outsized or s.samples else [])]
        lines += [f"  > {line}" for line in s.advice]
    return lines


@contextlib.contextmanager
def training_line(quiet: bool = False) -> Iterator[Callable[[Status], None]]:
    """Show where training stands."""
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    line = "step {1}/{2}: {0}".format
    with progress(quiet, columns=columns, stays=True, patience=PATIENCE, line=line) as tell:
        yield lambda status: tell(describe(status), status.step, status.steps)


@contextlib.contextmanager
def reading_bar(quiet: bool = False) -> Iterator[Callable[[int, int, int], None]]:
    """Show how far documents are tokenised."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with progress(quiet, columns=columns) as tell:
        yield lambda done, total, documents: tell(f"tokenising, {documents:,} documents", done, total)
