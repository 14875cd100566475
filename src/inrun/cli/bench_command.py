"""`inrun bench`: what scoring costs."""

from __future__ import annotations

import json
from typing import Any

import click

from inrun import __version__
from inrun.cli.options import JSON


@click.command(
    epilog="""\b
Examples:
  inrun bench                                    GPT of width 256 with AdamW
  inrun bench --optimizer sgd --no-clip
  inrun bench --width 768 --heads 12 --layers 2 --context 1024 --rounds 50
  inrun bench --conditions                       what bf16, torch.compile and checkpointing do to the ratio
  inrun bench --processes 2                      two processes with DDP beside one, and the bytes they exchange
  torchrun --nproc-per-node 4 -m inrun bench --fsdp
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
@click.option("--rounds", default=60, show_default=True, type=click.IntRange(1), help="Timed steps of each; the mean counts.")
@click.option("--slow-rounds", default=3, show_default=True, type=click.IntRange(0), help="Rounds of the slow rivals.")
@click.option("--only", multiple=True, metavar="TEXT", help="Only contestants whose name contains this (repeatable).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads (default: torch's own choice).")
@click.option(
    "--conditions",
    is_flag=True,
    help="Instead: bf16 autocast, torch.compile and checkpointing, plain and scored.",
)
@click.option("--processes", type=click.IntRange(2), help="Instead: scaling to so many local processes, a batch for each.")
@click.option("--fsdp", is_flag=True, help="With --processes or torchrun: fully_shard in place of DistributedDataParallel.")
@JSON
def bench(
    clip: bool,
    rounds: int,
    slow_rounds: int,
    only: tuple[str, ...],
    threads: int | None,
    conditions: bool,
    processes: int | None,
    fsdp: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure throughput and memory of scoring beside plain training, on your machine and shape.

    Throughput is relative to plain training with the same optimizer. "floor" is plain training that also takes the gradient of
    the validation rows at every step: the least that anything of this kind can cost. "paper" is inrun.paper. With --conditions,
    lines that begin with a condition are relative to plain training under that condition. With --processes (or under torchrun)
    every process has a batch of its own and one thread, and throughput is relative to plain training in as many processes.
    """
    import torch

    from inrun.bench.contestants import entries, under_conditions
    from inrun.bench.measure import measure
    from inrun.bench.shape import Shape
    from inrun.cli.bench_table import print_table
    from inrun.cli.progress import progress
    from inrun.training.processes import launched

    shape = Shape(clip=1.0 if clip else None, **options)
    if processes or launched()[1] > 1:
        _scale(shape, processes, rounds, "fsdp" if fsdp else "ddp", threads or 1, as_json)
        return
    if fsdp:
        raise click.UsageError("--fsdp is for several processes: add --processes N, or start with torchrun")
    if threads:
        torch.set_num_threads(threads)
    contestants = under_conditions(shape) if conditions else [e for e in entries(shape) if slow_rounds or not e.slow]
    if only:
        chosen = [e for e in contestants if any(part in e.name for part in only)]
        kept = {"plain", "floor", *(e.name for e in chosen), *(e.against for e in chosen)}
        contestants = [e for e in contestants if e.name in kept]
    with progress() as tell:
        results = measure(shape, contestants, rounds, slow_rounds, tell)
    if as_json:
        _print_json(shape, rounds, [r.as_dict() for r in results])
    else:
        print_table(shape, results, rounds)


def _scale(shape: Any, processes: int | None, rounds: int, mode: str, threads: int, as_json: bool) -> None:
    from inrun.bench.scaling import scale
    from inrun.cli.bench_table import print_scaling
    from inrun.cli.progress import progress

    found = scale(shape, processes, rounds, mode, threads, progress)
    if found is None:  # another process prints
        return
    if as_json:
        _print_json(shape, rounds, [x.as_dict() for x in found], mode=mode, threads=threads)
    else:
        print_scaling(shape, found, rounds, mode, threads)


def _print_json(shape: Any, rounds: int, rows: list[dict[str, Any]], threads: int | None = None, **more: Any) -> None:
    import torch

    about = {"torch": torch.__version__, "threads": threads or torch.get_num_threads(), "inrun": __version__}
    click.echo(json.dumps({"shape": shape.as_dict(), "rounds": rounds, "software": about, **more, "results": rows}, indent=2))
