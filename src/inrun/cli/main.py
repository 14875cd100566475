"""Entry point. Heavy imports happen inside the commands, so that ``--help`` is quick."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from inrun import __version__
from inrun.cli.ledger_commands import add_commands as add_ledger_commands
from inrun.cli.replay_command import add_commands as add_replay_command
from inrun.cli.report_command import add_commands as add_report_command
from inrun.cli.train_commands import add_commands as add_train_commands
from inrun.cli.trust_commands import add_commands as add_trust_commands
from inrun.errors import ConfigurationError, InrunError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="inrun")
def cli() -> None:
    """Tell what every training sample was worth to the model you actually trained, while you train it."""


@cli.command(
    epilog="""\b
Examples:
  inrun bench                                    GPT of width 256 with AdamW
  inrun bench --optimizer sgd --no-clip
  inrun bench --width 768 --heads 12 --layers 2 --context 1024 --rounds 5
  inrun bench --model llama --device cuda --dtype bfloat16 --json
"""
)
@click.option("--model", default="gpt", show_default=True, help="gpt, a transformers model type, or a config folder.")
@click.option("--width", default=256, show_default=True, type=click.IntRange(1))
@click.option("--layers", default=4, show_default=True, type=click.IntRange(1))
@click.option("--heads", default=4, show_default=True, type=click.IntRange(1))
@click.option("--context", default=256, show_default=True, type=click.IntRange(2), help="Positions per row.")
@click.option("--vocab", default=4096, show_default=True, type=click.IntRange(2))
@click.option("--tied/--untied", default=True, show_default=True, help="Head and token table share one weight (gpt).")
@click.option("--batch", default=16, show_default=True, type=click.IntRange(1), help="Training rows per step.")
@click.option("--validation-rows", default=1, show_default=True, type=click.IntRange(1))
@click.option("--optimizer", default="adamw", show_default=True, type=click.Choice(["sgd", "adamw"]))
@click.option("--clip/--no-clip", default=True, show_default=True, help="Clip the gradient norm at 1.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "float64", "bfloat16"]))
@click.option("--rounds", default=20, show_default=True, type=click.IntRange(1), help="Interleaved rounds; best counts.")
@click.option("--slow-rounds", default=3, show_default=True, type=click.IntRange(0), help="Rounds of the slow rivals.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only contestants whose name contains this (repeatable).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads (default: torch's own choice).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for machines.")
def bench(
    clip: bool, rounds: int, slow_rounds: int, only: tuple[str, ...], threads: int | None, as_json: bool, **options: Any
) -> None:
    """Measure throughput and memory of scoring beside plain training, on your machine and shape.

    Throughput is relative to plain training with the same optimizer. "limit" is plain training on the batch plus the
    validation rows: the floor for anything that differentiates the validation loss at every step.
    """
    import torch

    from inrun.bench.contestants import entries
    from inrun.bench.measure import measure
    from inrun.bench.shape import Shape
    from inrun.cli.bench_table import print_table
    from inrun.cli.progress import progress

    if threads:
        torch.set_num_threads(threads)
    shape = Shape(clip=1.0 if clip else None, **options)
    contestants = [e for e in entries(shape) if slow_rounds or not e.slow]
    if only:
        contestants = [e for e in contestants if e.name in ("plain", "limit") or any(part in e.name for part in only)]
    with progress() as tell:
        results = measure(shape, contestants, rounds, slow_rounds, tell)
    if as_json:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "inrun": __version__}
        rows = [r.as_dict() for r in results]
        click.echo(json.dumps({"shape": shape.as_dict(), "rounds": rounds, "software": about, "results": rows}, indent=2))
    else:
        print_table(shape, results, rounds)


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


@cli.command(
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for machines.")
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


add_train_commands(cli)
add_replay_command(cli)
add_ledger_commands(cli)
add_trust_commands(cli)
add_report_command(cli)


def main() -> None:
    """Run the command; exit with 1 on failure, 2 on wrong usage, 130 on Ctrl-C."""
    try:
        code = cli.main(standalone_mode=False)
        if isinstance(code, int):  # click hands over what Exit was raised with
            sys.exit(code)
    except click.UsageError as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except ConfigurationError as error:
        click.echo(f"inrun: {error}", err=True)
        sys.exit(2)
    except InrunError as error:
        click.echo(f"inrun: {error}", err=True)
        sys.exit(1)
