"""`inrun train` and `inrun demo`: pretrain with scores."""

from __future__ import annotations

import json
import logging
import math
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import click

from inrun.cli.options import JSON

#: Steps of the demo.
DEMO_STEPS = 280


@click.command(
    epilog="""\b
Examples:
  inrun train config.yaml
  inrun train config.yaml optimizer.lr=3e-4 run=runs/low-lr
  inrun train data.paths=[corpus.jsonl.gz] validation.math.where.domain=math steps=2000 model.width=256
  inrun train config.yaml scoring.method=step      scores samples by what they did in their own step
  inrun train config.yaml --resume            goes on from the newest checkpoint, bit for bit
  inrun train config.yaml --dry-run           prints the resolved configuration
  torchrun --nproc-per-node 4 -m inrun train config.yaml    four processes; --resume goes on with any number of them
"""
)
@click.argument("arguments", nargs=-1, metavar="[CONFIG.yaml] [NAME=VALUE]...")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint of the run's folder.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and stop.")
@click.option("--quiet", is_flag=True, help="Say nothing but warnings.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for machines at the end.")
def train(arguments: tuple[str, ...], resume: bool, dry_run: bool, quiet: bool, as_json: bool) -> None:
    """Pretrain a language model and score every sample while it trains.

    CONFIG.yaml holds sections data, tokenizer, model, optimizer, batch, validation, scoring, checkpoints, logging; what it does
    not say is the paper's recipe. NAME=VALUE overrides single options, with dots for sections.

    Samples are scored by whole credit: every push that moves the weights, now or later through momentum, belongs to a sample, and
    the samples' credits add up to what the model learned. scoring.method=step counts its own step alone; first and second are
    the paper's.
    """
    from inrun.training.config import load_config

    files = [a for a in arguments if "=" not in a]
    if len(files) > 1:
        raise click.UsageError(f"give one configuration file; got {', '.join(files)}. Overrides are NAME=VALUE")
    config = load_config(files[0] if files else None, [a for a in arguments if "=" in a])
    if dry_run:
        click.echo(config.as_yaml(), nl=False)
        return
    from inrun.cli.progress import log_to_terminal
    from inrun.cli.train_progress import ending, next_commands, reading_then_training
    from inrun.training.processes import launched
    from inrun.training.session import train as run_training

    first = launched()[0] == 0  # the others say nothing but errors
    quiet = quiet or not first
    log_to_terminal(logging.WARNING if first else logging.ERROR)
    stop = Stop(tells=first)
    with stop.listening(), reading_then_training(quiet) as (reading, tell):

        def watched(done: int, total: int, documents: int) -> None:
            if stop():  # what is tokenised so far is kept
                raise click.exceptions.Exit(stop.exit_code)
            reading(done, total, documents)

        result = run_training(config, resume=resume, reading=watched, tell=tell, stop=stop)
    if not first:
        pass
    elif as_json:
        s = result.status
        ended = {"run": config.run, "step": s.step, "steps": s.steps, "finished": result.finished}
        more = {
            "loss": s.loss if math.isfinite(s.loss) else None,
            "validation": s.validation,
            "skipped": result.skipped,
            "seconds": round(result.seconds, 3),
        }
        click.echo(json.dumps({**ended, **more}))
    elif result.finished:
        click.echo(f"{s_of(result.status.step, 'step')} done in {result.seconds:.0f} s. Books and checkpoints are in {config.run}")
        if config.scoring.enabled:
            for line in ending(config.run):
                click.echo(line)
            for command in next_commands(config.run):
                click.echo(f"  {command}")
    else:
        click.echo(f"stopped at step {result.status.step}; go on with --resume", err=True)
    if not result.finished:
        raise click.exceptions.Exit(stop.exit_code)


@click.command(
    epilog="""\b
Examples:
  inrun demo                          86 s of CPU time; 4 min 38 s on two cores with other work on them
  inrun demo --steps 120 --run runs/short
"""
)
@click.option("--run", default="runs/demo", show_default=True, type=click.Path(file_okay=False), help="Folder of the run.")
@click.option("--steps", default=DEMO_STEPS, show_default=True, type=click.IntRange(8))
@JSON
def demo(run: str, steps: int, as_json: bool) -> None:
    """Train a small GPT on the text of this Python installation and see what each piece was worth.

    Four domains, two validation sets, and planted rubbish: random characters, scrambled text, copies. Ends with a story, a
    ledger and a report.
    """
    from inrun.cli.demo_story import findings, tell_story
    from inrun.cli.train_progress import training_line
    from inrun.demo.run import DemoConfig, run_demo

    stop = Stop()
    first: dict[str, float] = {}

    with stop.listening(), training_line(as_json) as line:

        def tell(status: Any) -> None:
            first.update({} if first else status.validation)
            line(status)

        result = run_demo(DemoConfig(run=run, steps=steps), tell, stop)
    if not result.finished:
        raise click.exceptions.Exit(stop.exit_code)
    report = _report(run)
    told = findings(run, result, first)
    if as_json:
        click.echo(json.dumps({**told, "report": None if report is None else str(report)}, indent=2))
    else:
        tell_story(told, report)


def _report(run: str) -> Path | None:
    """Write the report, where what draws it is installed."""
    from inrun.report import ReportError, build_report

    try:
        return Path(build_report(run))
    except ReportError as error:
        click.echo(f"no report: {error}", err=True)
        return None


def s_of(count: int, noun: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class Stop:
    """Turns SIGTERM and Ctrl-C into a wish that training fulfils at the end of its step; a second Ctrl-C is at once."""

    def __init__(self, tells: bool = True) -> None:
        """Nothing was asked for yet; ``tells``: a wish is answered by a line."""
        self.signal: int | None = None
        self.tells = tells

    def __call__(self) -> bool:
        """Whether training is to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.signal or 0)

    def listening(self) -> Any:
        """Catch the signals for the time of a block."""
        return _Listening(self)


class _Listening:
    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup asks for that
                self.before[number] = signal.signal(number, self._wish)

    def _wish(self, number: int, frame: FrameType | None) -> None:
        if self.stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop.signal = number
        if self.stop.tells:
            click.echo("stopping after this step: books and a checkpoint are written", err=True)

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
