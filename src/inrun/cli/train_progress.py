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


def ending(run: str, most: int = 4) -> list[str]:
    """Return what the books of a run are worth, set by set, with the steps that hold an outsized part."""
    from inrun.analysis import summarise_run
    from inrun.analysis.verdict import GIVEN, percent

    lines = []
    for s in summarise_run(run).sets[:most]:
        lines.append(f"{printable(s.validation, 40)}: {s.verdict}")
        if s.outsized:
            named = ", ".join(f"{o.step} ({percent(o.share)}; {o.why[0]})" for o in s.outsized[:most])
            more = f" and {s.outsized_steps - most} more" if s.outsized_steps > most else ""
            lines.append(f"  {percent(s.outsized_share)} of {GIVEN} is in steps {named}{more}")
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
