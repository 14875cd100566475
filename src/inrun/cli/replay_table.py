"""Replays on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click
from rich import box
from rich.console import Console
from rich.table import Table

from inrun.cli.text import printable
from inrun.replay.compare import Closeness
from inrun.replay.score import Replayed


def print_study(lines: Sequence[Closeness]) -> None:
    """Print how close replays are to what was scored live, one table per set."""
    console = Console()
    for name in dict.fromkeys(c.validation for c in lines):
        title = f"replay of {printable(name, 40)} beside its live scores (samples' scores over the same steps)"
        table = Table(title=title, box=box.SIMPLE, padding=(0, 1), collapse_padding=True)
        heads = ("spacing", "from", "steps", "Spearman", "Pearson", "Σ c\n/ live", "Σ|c|\n/ live", "domains", "s/step")
        for head in heads:
            table.add_column(head, justify="left" if head == "from" else "right", no_wrap=True)
        previous = None
        for c in (c for c in lines if c.validation == name):
            if previous not in (None, c.spacing):
                table.add_section()
            previous = c.spacing
            numbers = (c.spearman, c.pearson, c.total, c.spread, c.domains, c.seconds / max(c.steps, 1))
            table.add_row(_number(c.spacing, 0), c.mode, str(c.steps), *(_number(x, 3) for x in numbers))
        console.print(table)
    click.echo("spacing: steps between states that are looked from; domains: Spearman of their totals; exact replay trains on from")
    click.echo("checkpoints, so that its spacing does not matter. The others are guesses, no cheaper step by step.")


def _number(x: float, digits: int) -> str:
    return "-" if math.isnan(x) else f"{x:.{digits}f}"


def print_replayed(r: Replayed) -> None:
    """Say what was done, how close it is, and what to do with it."""
    sets = ", ".join(printable(name, 40) for name in r.validation)
    click.echo(f"{r.scored:,} of {r.recorded:,} recorded steps replayed for {sets} in {r.seconds:.0f} s")
    paid = "all later steps, through the optimizer's momentum" if r.method == "whole" else "its own step"
    click.echo(f"  a use of a sample is paid by {paid} (method {r.method})")
    if r.scored < r.recorded:
        click.echo("  scores are sums over the steps replayed: a part of the run's, and not scaled up")
    if r.skipped:
        step, reason = next(iter(r.skipped.items()))
        click.echo(
            f"  {len(r.skipped)} step{'s' * (len(r.skipped) != 1)} could not be scored (step {step}: {printable(reason, 200)})"
        )
    if r.mode != "exact":
        click.echo(f"  looked at from {r.mode}: up to {r.furthest:,} step{'s' * (r.furthest != 1)} away from a checkpoint")
    elif r.passed:
        worst = max(r.passed, key=lambda p: p.difference)
        equal = (
            "equal bit for bit"
            if worst.difference == 0
            else f"a weight differs by at most {worst.difference:.1e} (step {worst.step})"
        )
        click.echo(f"  trained again past {len(r.passed)} checkpoint{'s' * (len(r.passed) != 1)}: {equal}")
    for c in r.check:
        what = f"{printable(c.validation, 40)}, which was scored live: Spearman {c.spearman:.4f}, Pearson {c.pearson:.4f}"
        what += "" if c.steps == r.scored else f" over the {c.steps:,} step{'s' * (c.steps != 1)} whose uses are paid in full"
        click.echo(f"  {what}, total {c.total:.4f} of live")
    if r.unchecked:
        click.echo(f"  not compared with live scores: {r.unchecked}")
    out = printable(r.out, 4096)
    click.echo(f"Books are in {out}\n  inrun scores {out}\n  inrun groups {out} --by domain\n  inrun report {out}")
