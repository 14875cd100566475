"""`inrun reproduce`: the paper's tables and figures, on data that is here."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from inrun.cli.options import JSON, Registered


def _recipes() -> dict[str, object]:
    from inrun.experiments.recipes import RECIPES

    return dict(RECIPES)


@click.command(
    epilog="""\b
Examples:
  inrun reproduce --list                              what there is, and where the paper has it
  inrun reproduce mislabel --data data --quick        minutes; CIFAR-10 from data/cifar10_subset.npz
  inrun reproduce curation --data data --full         what the docs page reports; goes on where it was interrupted
  inrun reproduce domains --smoke --json              seconds, on what is installed
"""
)
@click.argument("name", type=Registered(_recipes), required=False)
@click.option("--list", "listing", is_flag=True, help="List the experiments.")
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder with data sets.")
@click.option("--smoke", "size", flag_value="smoke", help="Seconds: does it run?")
@click.option("--quick", "size", flag_value="quick", default="quick", help="Minutes (the default).")
@click.option("--full", "size", flag_value="full", help="What the docs page reports.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="How many; they are 0, 1, 2 ...")
@click.option("--first-seed", default=0, show_default=True, type=click.IntRange(0), help="Where they begin.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1), help="Processes for retraining.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="CPU threads; results depend on them.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder.  [default: runs/reproduce/NAME-SIZE]")
@click.option("--fresh", is_flag=True, help="Compute cells again that an earlier run has left.")
@JSON
def reproduce(
    name: str | None,
    listing: bool,
    data: Path | None,
    size: str,
    seeds: int,
    first_seed: int,
    jobs: int,
    threads: int,
    out: Path | None,
    fresh: bool,
    as_json: bool,
) -> None:
    """Run one of the paper's experiments, and put its numbers beside ours.

    Writes results.json (the same for the same seeds), timings.json, table.md and figure.png. Finished parts are kept, so
    that an interrupted run goes on. Nothing is downloaded: without --data, what is installed serves (scikit-learn's
    digits, Python's own text), and the table says so.
    """
    if listing or name is None:
        _list(as_json)
        return
    import torch

    from inrun.cli.progress import progress
    from inrun.experiments.outputs import page, save
    from inrun.experiments.recipes import Work, run

    torch.set_num_threads(threads)
    folder = out or Path("runs") / "reproduce" / f"{name}-{size}"
    cells = folder / "cells"
    try:
        cells.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # now, not when there is something to keep
        raise click.UsageError(f"--out: cannot write to {folder}: {error.strerror}; give another folder") from error
    if fresh:
        for kept in cells.rglob("*.json"):
            kept.unlink()
    began = time.perf_counter()
    with progress(patience=30.0) as tell:
        work = Work(name, tuple(range(first_seed, first_seed + seeds)), data, cells, jobs, tell)
        findings = run(name, size, work)
    written = save(findings, work, folder, time.perf_counter() - began)
    if as_json:
        click.echo(json.dumps(findings.data, indent=1, sort_keys=True))
        return
    click.echo(page(findings, work))
    click.echo(f"written: {', '.join(str(path) for path in written)}")


def _list(as_json: bool) -> None:
    from inrun.experiments.recipes import RECIPES

    if as_json:
        click.echo(json.dumps([{"name": r.name, "question": r.question, "paper": r.paper} for r in RECIPES.values()], indent=1))
        return
    width = max(map(len, RECIPES))
    for recipe in RECIPES.values():
        click.echo(f"{recipe.name:{width}}  {recipe.question} (paper: {recipe.paper})")
