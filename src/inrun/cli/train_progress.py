"""How a run looks while it reads its data and trains."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from inrun.cli.progress import progress, terminal_width
from inrun.cli.text import printable
from inrun.training.loop import Status

#: Seconds between plain lines at the beginning.
PATIENCE = 2.0
#: Validation sets, and steps and samples of each, that the last words of a run speak of.
MOST_SETS, MOST_NAMED = 4, 3
#: Seconds of a step below which what scoring costs is not told.
SMALL = 0.1


#: Columns that step, bar, time left and the gaps between them take beside the digits of the step.
FRAME, BAR = 30, 14


def describe(status: Status) -> str:
    """Return what people watch, the most telling first: losses, speed, what scoring costs, how far the books are off."""
    parts = [] if math.isnan(status.loss) else [f"loss {status.loss:.3f}"]
    parts += [f"{printable(name, 20)} {loss:.3f}" for name, loss in list(status.validation.items())[:4]]
    if not math.isnan(status.samples_per_second):
        parts.append(f"{status.samples_per_second:.1f} samples/s")
    # Of a model that takes a millisecond the percentage tells of Python, not of scoring.
    if not math.isnan(status.overhead) and status.plain_seconds >= SMALL:
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


def next_commands(run: str) -> list[str]:
    """Return what to ask next of a run: only what will work, with what is installed and what is known of its samples."""
    from inrun.ledger import Ledger

    with Ledger.open(run).tables() as tables:
        by = next((name for name in ("domain", "source", "owner") if name in tables.columns), None)
    drawn = all(find_spec(name) for name in ("plotly", "jinja2"))
    place = shlex.quote(run)
    found = [f"inrun report {place}"] if drawn else []
    found += [f"inrun groups {place} --by {by}"] if by else [f"inrun scores {place}"]
    return [*found, f"inrun audit {place}"]


class StepColumn(ProgressColumn):
    """``step 12/280``; nothing before the first step is known."""

    def render(self, task: Task) -> Text:
        """Return the step, as wide as the last one will be."""
        if task.total is None:
            return Text("starting")
        total = str(int(task.total))
        return Text(f"step {int(task.completed):>{len(total)}}/{total}")


class FieldsColumn(ProgressColumn):
    """What fits of the description, field by field: step, bar and time left stay whole on a narrow terminal."""

    def render(self, task: Task) -> Text:
        """Return as many fields as there is room for."""
        if task.total is None:
            return Text("")
        digits = 2 * len(str(int(task.total)))
        return Text(fitting(task.description, terminal_width() - FRAME - digits), no_wrap=True, overflow="ellipsis")


def fitting(description: str, width: int) -> str:
    """Return the first fields of a description that ``width`` characters hold."""
    fields = description.split(", ")
    while len(fields) > 1 and len(", ".join(fields)) > width:
        fields.pop()
    return ", ".join(fields) if len(", ".join(fields)) <= width else ""


@contextlib.contextmanager
def training_line(quiet: bool = False) -> Iterator[Callable[[Status], None]]:
    """Show where training stands."""
    columns = (StepColumn(), BarColumn(bar_width=BAR), TimeRemainingColumn(compact=True), FieldsColumn())
    line = "step {1}/{2}: {0}".format
    with progress(quiet, columns=columns, stays=True, patience=PATIENCE, line=line) as tell:
        yield lambda status: tell(describe(status), status.step, status.steps)


@contextlib.contextmanager
def reading_bar(quiet: bool = False) -> Iterator[Callable[[int, int, int], None]]:
    """Show how far documents are tokenised."""
    columns = (TextColumn("{task.description}"), BarColumn(), BytesColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with progress(quiet, columns=columns) as tell:
        yield lambda done, total, documents: tell(
            f"{'tokenising' if done < total else 'tokenised'}, {documents:,} documents", done, total
        )


class BytesColumn(DownloadColumn):
    """Bytes done and in all; nothing before they are known."""

    def render(self, task: Task) -> Text:
        """Return the two numbers."""
        return Text("") if task.total is None else super().render(task)


@contextlib.contextmanager
def reading_then_training(quiet: bool = False) -> Iterator[tuple[Callable[[int, int, int], None], Callable[[Status], None]]]:
    """Give what :func:`reading_bar` and :func:`training_line` give; the first goes when the other comes, so one line is shown."""
    with contextlib.ExitStack() as training, contextlib.ExitStack() as reading:
        told = reading.enter_context(reading_bar(quiet))
        line: Callable[[Status], None] | None = None

        def tell(status: Status) -> None:
            nonlocal line
            if line is None:
                reading.close()
                line = training.enter_context(training_line(quiet))
            line(status)

        yield told, tell
