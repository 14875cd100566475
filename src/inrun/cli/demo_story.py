"""What the demo found, as tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inrun.cli.text import printable
from inrun.ledger import SIGN, UNIT
from inrun.training.demo import DemoResult


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int, float], None]]:
    """Show a bar on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=None)

        def tell(step: int, total: int, loss: float) -> None:
            bar.update(task, description=f"training, loss {loss:.2f}", completed=step, total=total)

        yield tell


def as_data(result: DemoResult) -> dict[str, Any]:
    """Return the findings as plain data."""
    return {
        "steps": result.steps,
        "sign": SIGN,
        "unit": UNIT,
        "losses": {n: [result.first_losses[n], result.last_losses[n]] for n in result.scores},
        "domains": {
            n: {d: {"total": t, "mean": m, "negative_share": s} for d, (t, m, s) in result.by_domain(n).items()}
            for n in result.scores
        },
    }


def print_story(result: DemoResult, extremes: int = 4) -> None:
    """Print totals per domain and the best and worst samples, per validation set."""
    console = Console()
    console.print(f"Trained {result.steps} steps on {len(result.samples)} samples. {SIGN[0].upper()}{SIGN[1:]}; unit: {UNIT}.")
    console.print(
        "Adam's very first step is a sign step that no first-order score describes: the samples of that one batch stand out "
        "although the warm-up keeps the step small."
    )
    for name in result.scores:
        fell = f"{result.first_losses[name]:.2f} to {result.last_losses[name]:.2f}"
        table = Table(title=f"validation set '{name}': loss {fell}", title_justify="left")
        table.add_column("domain")
        for column in ("total", "per sample", "negative"):
            table.add_column(column, justify="right")
        for domain, (total, mean, negative) in result.by_domain(name).items():
            table.add_row(domain, f"{total:+.4f}", f"{mean:+.6f}", f"{negative:.0%}")
        console.print(table)
        ranked = result.ranked(name)
        for label, rows in (("helped most", ranked[:extremes]), ("hurt most", ranked[: -extremes - 1 : -1])):
            console.print(f"  {label}:")
            for score, sample in rows:
                text = printable(sample.data, 64)
                console.print(f"    {score:+.5f}  {sample.domain:7} {escape(text)}", highlight=False, soft_wrap=True)
        console.print()
