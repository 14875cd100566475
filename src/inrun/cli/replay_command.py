"""`inrun replay`: scores for validation data that arrived after training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from inrun.cli.options import JSON, RUN, SKETCH, Registered
from inrun.errors import ConfigurationError
from inrun.methods import METHODS
from inrun.replay import MODES


@click.command(
    epilog="""\b
Examples:
  inrun replay runs/mine --validation new.jsonl            every step again, exactly; books in runs/mine/replays/new
  inrun replay runs/mine --validation math=new.jsonl --every 10      a tenth of the steps, a tenth of the time
  inrun replay runs/mine --validation new.jsonl --from nearest --method first --rows 0
  inrun replay runs/mine                                   only says how close replay is, by sets that were scored live
Then: inrun scores runs/mine/replays/new, inrun groups ..., inrun report ...
"""
)
@RUN
@click.option("--validation", "-v", "files", multiple=True, metavar="[NAME=]FILE", help="New validation data (repeatable).")
@click.option("--rows", type=click.IntRange(0), help="Rows of a set per step, 0 for all (default: as the run's own sets).")
@click.option("--folds", default=0, type=click.IntRange(0), help="Parts scored side by side, for standard errors.")
@click.option("--where", multiple=True, metavar="KEY=VALUE", help="Only documents with this domain, source or owner (repeatable).")
@click.option(
    "--from",
    "mode",
    default="exact",
    show_default=True,
    type=click.Choice(MODES),
    help="Train on from checkpoints, or look from between them, from the nearest, or from the one before.",
)
@click.option("--exact", is_flag=True, help="The same as --from exact.")
@click.option("--method", type=Registered(METHODS), help="Default: the run's; whole needs every step, exactly.")
@click.option("--sketch", type=SKETCH, help='Numbers per sample, or "exact" (default: the run\'s).')
@click.option("--every", default=1, show_default=True, type=click.IntRange(1), metavar="K", help="Replay one step in K.")
@click.option("--limit-steps", type=click.IntRange(1), metavar="N", help="Replay the first N steps only.")
@click.option("--out", type=click.Path(), metavar="DIR", help="Where the new books go (default: RUN/replays/NAME).")
@click.option("--check/--no-check", default=True, help="Say how close replay is, by a set that was scored live (default: yes).")
@click.option("--check-set", multiple=True, metavar="NAME", help="By which set (repeatable; default: the first).")
@click.option(
    "--check-steps", default=48, show_default=True, type=click.IntRange(2), metavar="N", help="Steps per line of the table."
)
@click.option("--data", multiple=True, metavar="PATH", help="Where the training data is now, if it has moved (repeatable).")
@click.option("--threads", type=click.IntRange(1), help="CPU threads (default: as many as the run had).")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@JSON
def replay(run: str, files: tuple[str, ...], quiet: bool, as_json: bool, exact: bool, mode: str, **options: Any) -> None:
    """Score the samples of RUN, a run of `inrun train`, for validation data that arrived afterwards.

    Steps are taken again from the run's checkpoints, with the batches in its books. Exact replay goes on training from them, and is
    the run itself to rounding. The others look at every step from a saved state, and are guesses: see how good they are by
    `inrun replay RUN` alone.
    """
    from inrun.cli.progress import log_to_terminal, progress
    from inrun.cli.replay_table import print_replayed, print_study
    from inrun.cli.train_progress import reading_bar
    from inrun.replay.replayer import Look
    from inrun.replay.score import choose_steps
    from inrun.replay.score import replay as run_replay
    from inrun.replay.source import open_source
    from inrun.replay.study import study

    if exact and mode != "exact":
        raise ConfigurationError(f"--exact and --from {mode} are two different ways; give one of them")
    log_to_terminal()
    new = _sets(Path(run), files, options["rows"], options["folds"], options["where"])
    out = Path(options["out"] or Path(run) / "replays" / re.sub(r"[^\w-]+", "_", "-".join(new)))
    if new and out.exists():
        raise ConfigurationError(f"{out} exists already; choose another folder with --out, or move it away")
    with reading_bar(quiet) as reading:
        source = open_source(run, new, paths=options["data"], reading=reading)
    _set_threads(options["threads"], source)
    look = Look(mode, options["method"], options["sketch"])
    sets = _check_sets(source, options["check_set"], options["check"] or not new, everything=not new)
    with progress(quiet, patience=10.0) as tell:
        if not new:
            lines = study(source, sets, MODES, options["check_steps"], look, tell)
            click.echo(json.dumps({"run": run, "study": [c.as_dict() for c in lines]})) if as_json else print_study(lines)
            return
        steps = choose_steps(source, look, options["every"], options["limit_steps"])
        beside = sets if mode == "exact" else []
        result = run_replay(
            source, list(new), out, look, steps=steps, check=beside, tell=lambda done, total: tell("replaying", done, total)
        )
        lines = study(source, sets, [mode], options["check_steps"], look, tell) if sets and mode != "exact" else []
    summary = {"run": run, **result.as_dict(), "study": [c.as_dict() for c in lines]}
    (out / "replay.json").write_text(json.dumps(summary, indent=2), "utf-8")
    if as_json:
        click.echo(json.dumps(summary))
        return
    print_replayed(result)
    if lines:
        print_study(lines)


def _sets(run: Path, files: tuple[str, ...], rows: int | None, folds: int, where: tuple[str, ...]) -> dict[str, Any]:
    """Return the new validation sets by name."""
    from inrun.training.config import ValidationSet, load_config

    chosen: dict[str, list[str]] = {}
    for text in where:
        key, equals, value = text.partition("=")
        if not equals or not key or not value:
            raise ConfigurationError(f"--where is {text!r}; accepted is KEY=VALUE, such as domain=math")
        chosen.setdefault(key, []).append(value)
    if rows is None and (run / "config.yaml").is_file():
        own = [v.rows for v in load_config(run / "config.yaml").validation.values()] or [1]
        rows = 0 if 0 in own else max(*own, folds, 1)
    found: dict[str, Any] = {}
    for text in files:
        name, equals, file = text.partition("=")
        if not equals or Path(text).exists():  # a path may hold a "=" itself
            name, file = _stem(Path(text)), text
        if not file:
            raise ConfigurationError(f"--validation {text!r} names no file; accepted is FILE, or NAME=FILE")
        if not Path(file).exists():
            raise ConfigurationError(f"--validation {text!r}: there is no file or folder {file!r}")
        if name in found:
            raise ConfigurationError(f"two validation sets are called {name!r}; name them apart: NAME=FILE")
        found[name] = ValidationSet(paths=[file], rows=rows or 0, folds=folds, where=dict(chosen))
    return found


def _stem(file: Path) -> str:
    """Return a file's name without its endings: new of new.jsonl.gz."""
    name = file.name or file.resolve().name
    return name.split(".")[0] or name


def _set_threads(given: int | None, source: Any) -> None:
    """Take as many threads as the run had: sums are then rounded as they were."""
    import os

    import torch

    had = int(source.checkpoints[-1].state.get("threads") or 0)
    torch.set_num_threads(given or min(had, os.cpu_count() or 1) or torch.get_num_threads())


def _check_sets(source: Any, given: tuple[str, ...], wanted: bool, everything: bool) -> list[str]:
    """Return the live sets to check by."""
    unknown = [name for name in given if name not in source.live_sets]
    live = ", ".join(source.live_sets) or "none"
    if unknown:
        raise ConfigurationError(f"--check-set {unknown[0]!r} was not scored live by {source.run}; it has {live}")
    if everything and not source.live_sets:
        raise ConfigurationError(f"{source.run} scored no validation set live to check by; give new data with --validation FILE")
    if not wanted:
        return []
    return list(given) or (source.live_sets if everything else source.live_sets[:1])
