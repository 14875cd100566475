"""`inrun fidelity`: methods beside the truth."""

from __future__ import annotations

import json
from typing import Any

import click

from inrun.cli.options import JSON


def _numbers(kind: type) -> Any:
    """Return a parser of comma-separated numbers."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[Any, ...]:
        try:
            found = tuple(kind(part) for part in value.split(",") if part.strip())
        except ValueError:
            found = ()
        if not found or any(x < 0 for x in found):
            raise click.BadParameter(f"{value!r} is not a list of numbers such as {'6e-4,5e-3' if kind is float else '3,20,100'}")
        return found

    return parse


@click.command(
    epilog="""\b
Examples:
  inrun fidelity                                     AdamW, two learning rates, four steps, three seeds
  inrun fidelity --steps 20 --seeds 0 --permutations 100 --out runs/fidelity
  inrun fidelity --proxy --lr 3e-4,6e-4,5e-3         the paper's SGD game
On your own model: accountant.fidelity(sample_losses) at any step.
"""
)
@click.option("--lr", "lrs", default="6e-4,5e-3", show_default=True, callback=_numbers(float), help="Learning rates.")
@click.option("--steps", default="3,20,100,300", show_default=True, callback=_numbers(int), help="Steps to look at.")
@click.option("--seeds", default="0,1,2", show_default=True, callback=_numbers(int))
@click.option("--batch", default=16, show_default=True, type=click.IntRange(2))
@click.option("--permutations", default=300, show_default=True, type=click.IntRange(2))
@click.option("--optimizer", default="adamw", show_default=True, type=click.Choice(["adamw", "sgd"]))
@click.option("--proxy", is_flag=True, help="Play the paper's SGD game at states of an AdamW run.")
@click.option("--subsets", default=0, show_default=True, type=click.IntRange(0), help="Random subsets for Taylor utilities.")
@click.option("--width", default=64, show_default=True, type=click.IntRange(4))
@click.option("--layers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--context", default=64, show_default=True, type=click.IntRange(4))
@click.option("--out", type=click.Path(file_okay=False), help="Folder for fidelity.json and the scatter pictures.")
@JSON
def fidelity(out: str | None, as_json: bool, **options: Any) -> None:
    """Hold every method against the true Shapley values of real steps of a small GPT.

    The truth plays the next step out for many coalitions of the batch, with the real optimizer and the real loss.
    """
    from inrun.cli.fidelity_table import print_table, save
    from inrun.cli.progress import progress
    from inrun.experiments.fidelity import FidelityConfig, as_data, run_fidelity

    config = FidelityConfig(**options)
    with progress() as tell:
        cells = run_fidelity(config, tell)
    written = save(config, cells, out) if out else []
    if as_json:
        click.echo(json.dumps(as_data(config, cells), indent=2))
        return
    print_table(config, cells)
    if written:
        click.echo(f"written: {written[0]} and {len(written) - 1} pictures beside it")
