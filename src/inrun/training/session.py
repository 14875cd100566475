"""From a configuration to a finished run: a new folder, or one that goes on from its newest checkpoint."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from inrun.corpus.build import Tell
from inrun.corpus.tokenizers import ABOUT
from inrun.errors import ConfigurationError, TrainingError
from inrun.files import Files, LockedError, alone, write_durably
from inrun.ledger import Ledger
from inrun.training.checkpoint import Checkpoint, checkpoints_of, folder_of, read_checkpoint, whole_checkpoints
from inrun.training.config import TrainConfig, load_config, make_config
from inrun.training.loop import Result, Status, Training
from inrun.training.metrics import Metrics
from inrun.training.prepare import Prepared, prepare, tokenizer_of
from inrun.training.processes import Job, job_of

log = logging.getLogger("inrun")
#: First line of the configurations that `inrun train` writes.
HEAD = "# The resolved configuration of this run, written by `inrun train`.\n"
#: Options that may differ when a run is resumed: they change neither weights nor scores of steps done.
FREE = ("run", "device", "threads", "nonfinite", "steps", "logging", "checkpoints", "distributed", "data.cache", "data.paths")


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    reading: Tell = lambda done, total, documents: None,
    tell: Callable[[Status], None] = lambda status: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run a configuration to its end.

    Args:
        config: What to do; ``config.run`` is the folder.
        resume: Go on from the newest whole checkpoint of that folder; begins if there is nothing yet.
        reading: Called while documents are tokenised: bytes done, bytes in all, documents.
        tell: Called after every step.
        stop: Asked after every step; True ends the run with a checkpoint.
    """
    run = Path(config.run)
    with job_of(config) as job, contextlib.ExitStack() as stack:
        prepared: list[Prepared] = []
        told = job.processes.from_first(lambda: _open(config, run, resume, reading, job, stack, prepared))
        return _train(make_config(told["config"]), run, told["step"], prepared, job, tell, stop)


def _open(
    config: TrainConfig,
    run: Path,
    resume: bool,
    reading: Tell,
    job: Job,
    stack: contextlib.ExitStack,
    prepared: list[Prepared],
) -> dict[str, Any]:
    """Do what is done once, by the first process: lock the folder, begin or find the run, and tokenise what is not yet."""
    stack.enter_context(_alone(run))
    checkpoint = _begin(config, run, resume)
    _warn_of_warmup(config)
    _check_device(job.device)
    prepared.append(prepare(config, tokenizer_of(config, run), reading))
    _check_data(checkpoint, prepared[0])
    return {"config": msgspec.to_builtins(config), "step": None if checkpoint is None else checkpoint.step}


def _warn_of_warmup(config: TrainConfig) -> None:
    """Say so where the learning rate never comes to what was asked for."""
    o = config.optimizer
    if o.warmup and o.warmup >= config.steps:
        log.warning(
            "inrun: optimizer.warmup is %d and the run has %d steps, so the learning rate gets to %.3g and never to "
            "optimizer.lr=%g; a tenth of the run would be optimizer.warmup=%d",
            o.warmup,
            config.steps,
            o.lr * config.steps / o.warmup,
            o.lr,
            config.steps // 10,
        )


@contextlib.contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Keep a second `inrun train` out of the folder, before anything in it is read, cut or removed."""
    with contextlib.ExitStack() as stack:
        try:
            run.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(run / "train.lock"))
        except OSError as error:
            raise TrainingError(f"{run} cannot be written: {error}") from error
        except LockedError:
            raise TrainingError(f"{run} is being trained by another process; wait for it, or choose another run=") from None
        yield


def _train(
    config: TrainConfig,
    run: Path,
    step: int | None,
    prepared: list[Prepared],
    job: Job,
    tell: Callable[[Status], None],
    stop: Callable[[], bool],
) -> Result:
    """Train as one of the processes, from a checkpoint if there is one; ``prepared`` holds the data where they are at hand."""
    checkpoint = None if step is None else read_checkpoint(folder_of(run, step))
    if config.threads:
        torch.set_num_threads(config.threads)
    _check_device(job.device)
    with contextlib.ExitStack() as stack:
        metrics = None
        if job.is_first:
            metrics = Metrics(run, checkpoint.step if checkpoint else 0, config.logging.tensorboard, config.logging.wandb)
            stack.callback(metrics.close)
        data = prepared[0] if prepared else prepare(config, tokenizer_of(config, run))
        training = Training(config, data, checkpoint, job)
        stack.callback(training.close)
        return training.go(metrics, tell, stop)


def _begin(config: TrainConfig, run: Path, resume: bool) -> Checkpoint | None:
    """Write the resolved configuration of a new run, or find where an old one goes on."""
    saved = run / "config.yaml"
    if saved.exists() and not _is_ours(run):
        raise ConfigurationError(
            f"{saved} was not written by `inrun train`, and would be replaced; choose another folder with run="
        )
    if saved.exists() and not resume and _nothing_done(run):
        _clear(run)
    if not saved.exists():
        if Ledger.exists(run):
            raise ConfigurationError(f"{run} holds books that `inrun train` did not write; choose another folder with run=")
        try:
            run.mkdir(parents=True, exist_ok=True)
            _write(saved, config)
        except OSError as error:
            raise TrainingError(f"{run} cannot be written: {error}") from error
        if resume:
            log.warning("inrun: %s holds no run yet; it begins", run)
        return None
    if not resume:
        raise ConfigurationError(f"{run} holds a run already; go on with it by --resume, or choose another folder with run=")
    _check_same(load_config(saved), config, saved)
    checkpoint = next(whole_checkpoints(run), None)
    if checkpoint is None and checkpoints_of(run):
        raise TrainingError(f"no checkpoint of {run} is whole; move its folder away to begin anew")
    log.warning("inrun: %s goes on from %s", run, "the beginning" if checkpoint is None else f"step {checkpoint.step}")
    if checkpoint is not None and (checkpoint.state.get("accountant") is None) == config.scoring.enabled:
        raise TrainingError(f"{run} was begun with scoring.enabled={not config.scoring.enabled}; it cannot change within a run")
    if checkpoint is not None and checkpoint.step > config.steps:
        raise ConfigurationError(f"steps is {config.steps}, and {run} has done {checkpoint.step} already")
    if checkpoint is None:  # nothing of it counts: metadata of samples must be that of the data as it is now, and whole
        _clear(run)
    _write(saved, config)
    return checkpoint


def _write(saved: Path, config: TrainConfig) -> None:
    write_durably(Files(), saved, (HEAD + config.as_yaml()).encode())


def _is_ours(run: Path) -> bool:
    written = (run / "config.yaml").read_text("utf-8", "replace").startswith(HEAD)
    return written or Ledger.exists(run) or bool(checkpoints_of(run))


def _nothing_done(run: Path) -> bool:
    """Whether a run failed before its first step, by a wrong path or option: then the next try is a new one."""
    return not checkpoints_of(run) and not Ledger.holds_steps(run)


def _clear(run: Path) -> None:
    """Remove what a run without a checkpoint left: files that `inrun train` writes, never others."""
    Ledger.erase(run)
    if (run / "tokenizer" / ABOUT).is_file():
        shutil.rmtree(run / "tokenizer")
    for name in ("metrics.jsonl", "config.yaml"):
        (run / name).unlink(missing_ok=True)


def _check_same(before: TrainConfig, now: TrainConfig, file: Path) -> None:
    old, new = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(now))
    for name in sorted(old.keys() | new.keys()):
        free = any(name == f or name.startswith(f + ".") for f in FREE)
        if old.get(name) != new.get(name) and not free:
            raise ConfigurationError(
                f"{name} is {new.get(name)!r}, and the run was begun with {old.get(name)!r} ({file}); a run keeps its options. "
                f"What may change is {', '.join(FREE)}"
            )
    if before.steps != now.steps:
        log.warning(
            "inrun: steps is now %d, it was %d: the learning rate follows the new length from here on", now.steps, before.steps
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _check_data(checkpoint: Checkpoint | None, data: Prepared) -> None:
    if checkpoint is None:
        return
    now = data.validation_fingerprints
    other = [name for name, was in checkpoint.state.get("validation_data", now).items() if now.get(name) != was]
    if other:
        raise TrainingError(
            f"the documents of validation set {other[0]!r} have changed since the run began: scores would mix the two"
        )
    if checkpoint.state["data"] != data.chunks.store.fingerprint:
        raise TrainingError(
            "the documents, or how they are read, have changed since the run began: sample ids would mean other samples. "
            "Point data.paths at the original files"
        )
    # Checkpoints of earlier versions do not say it.
    if checkpoint.state.get("samples", data.samples_fingerprint) != data.samples_fingerprint:
        raise TrainingError(
            "other pieces of the documents would be trained on than when the run began, in another order. Bring the chunks.parquet "
            "of data.pieces back as it was, or begin another run"
        )


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigurationError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
