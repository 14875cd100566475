"""The pretraining loop: data, model, optimizer and accountant of a configuration, from a checkpoint to the last step.

batch -> forward, backward -> clip -> optimizer        under accountant.step()
      -> metrics -> evaluation -> checkpoint           at their intervals
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inrun.engine import Accountant
from inrun.engine.options import Options
from inrun.engine.processes import Processes
from inrun.errors import StepError, TrainingError
from inrun.ledger import Ledger
from inrun.ledger.labels import set_of
from inrun.ledger.record import SettledCredits
from inrun.methods import PROXY
from inrun.training.checkpoint import Checkpoint, prune, save_checkpoint
from inrun.training.config import TrainConfig
from inrun.training.loss import PADDING, token_losses
from inrun.training.metrics import Metrics
from inrun.training.models import build_model, decay_groups, describe_model
from inrun.training.order import Ids, Order
from inrun.training.parallel import is_split, spread, whole, without_sync
from inrun.training.prepare import Prepared
from inrun.training.processes import Job
from inrun.training.timing import Timer
from inrun.training.validation import validation_loss

log = logging.getLogger("inrun")


@dataclass
class Status:
    """Where a run stands, for whoever shows it."""

    step: int
    steps: int
    loss: float = math.nan
    lr: float = 0.0
    #: Mean validation loss of the last evaluation, by set.
    validation: dict[str, float] = field(default_factory=dict)
    samples_per_second: float = math.nan
    #: How much longer a step takes than forward and backward without scores: 0.2 is a fifth longer. NaN where not measured.
    overhead: float = math.nan
    #: Seconds of forward and backward without scores; NaN where not measured.
    plain_seconds: float = math.nan
    #: |residual| / Σ|c_n| of the last audited step, the worst of the sets; NaN with methods that score another update than the
    #: optimizer's.
    residual: float = math.nan


@dataclass
class Result:
    """How a run ended."""

    status: Status
    #: Whether all steps are done; else it was asked to stop.
    finished: bool
    skipped: int
    seconds: float


def lr_at(step: int, config: TrainConfig) -> float:
    """Return the learning rate: linear warm-up, then half a cosine down to ``final_lr``."""
    o = config.optimizer
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    share = min((step - o.warmup) / max(config.steps - o.warmup, 1), 1.0)
    return o.final_lr + 0.5 * (o.lr - o.final_lr) * (1.0 + math.cos(math.pi * share))


def mean_of_folds(credits: Mapping[str, Any]) -> dict[str, Any]:
    """Return settled credits by validation set: of one in folds their mean."""
    by_set: dict[str, list[Any]] = {}
    for label, values in credits.items():
        by_set.setdefault(set_of(label), []).append(values)
    return {name: np.mean(parts, axis=0, dtype=np.float64) for name, parts in by_set.items()}


class Training:
    """One run in memory.

    Args:
        config: What to do.
        data: Its data; see :func:`inrun.training.prepare.prepare`.
        checkpoint: Where to go on; None begins.
        job: The processes that train together; None is one alone.
    """

    def __init__(self, config: TrainConfig, data: Prepared, checkpoint: Checkpoint | None = None, job: Job | None = None) -> None:
        """Make model, optimizer and accountant, and put them where the checkpoint stands."""
        self.config, self.data, self.run = config, data, Path(config.run)
        self.job = Job(Processes(), config.device) if job is None else job
        self.device = self.job.device
        self.step, self.skipped = (0, 0) if checkpoint is None else (checkpoint.step, int(checkpoint.state["skipped"]))
        torch.manual_seed(config.seed)
        self.model = build_model(config.model, data.tokenizer.vocab_size).to(self.device)
        if checkpoint is not None:
            checkpoint.load_model(self.model)
        #: What is called in training.
        self.called = spread(self.model, self.job, config.distributed.mode)
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model, o.weight_decay), lr=lr_at(0, config), betas=o.betas, eps=o.eps, foreach=True
        )
        self.order = Order(data.chunks.ids, config.batch.size, config.seed)
        self.codes, self.domains = self._domains()
        self.totals = {name: np.zeros(len(self.domains) + 1) for name in config.validation}
        if checkpoint is not None:
            checkpoint.load_optimizer(self.optimizer)
            if self.job.is_first:  # totals are those of all processes
                self.totals |= {name: np.array(values) for name, values in checkpoint.state["totals"].items()}
        self.model.train()
        self.accountant = self._account(checkpoint) if config.scoring.enabled else None
        if checkpoint is not None:
            checkpoint.load_random(self.job.rank)  # last: making a model draws random numbers
        elif self.job.rank > 0:  # dropout must not be the same on all ranks; weights are, by now
            torch.manual_seed(config.seed + 1_000_003 * self.job.rank)
        self.status = Status(self.step, config.steps)
        #: Whether all steps are done and the last checkpoint is written.
        self.finished = False

    def _domains(self) -> tuple[Any, list[str]]:
        """Return a function from sample ids to domain codes (the last code: none), and the names."""
        names = self.data.chunks.store.column("domain")[1]
        return lambda ids: self.data.chunks.codes("domain", ids) % (len(names) + 1), names

    def _account(self, checkpoint: Checkpoint | None) -> Accountant:
        s = self.config.scoring
        ledger = self._ledger(checkpoint)
        try:
            accountant = Accountant(
                self.called,
                self.optimizer,
                {name: validation_loss(held, self.job) for name, held in self.data.validation.items()},
                method=s.method,
                sketch=s.sketch,
                ledger=self.run if ledger is None else ledger,
                audit_every=s.audit_every,
                check_rows=s.check_rows,
                bitwise=s.bitwise,
                options=Options(about=self._about()),
            )
        except BaseException:
            if ledger is not None:
                ledger.close()
            raise
        books = accountant.ledger
        assert isinstance(books, Ledger)
        try:
            if self.job.is_first and not books.has_samples:
                self.data.register(books)
            if checkpoint is not None:
                accountant.load_state_dict(checkpoint.accountant_state(self.job.rank, self.job.world, is_split(self.model)))
        except BaseException:
            accountant.close(settle=False)
            books.close()
            raise
        return accountant

    def _ledger(self, checkpoint: Checkpoint | None) -> Ledger | None:
        """Go on with the books that belong to a checkpoint; None begins new ones."""
        if checkpoint is None:
            return None
        return Ledger.resume(self.run, checkpoint.state["accountant"]["ledger"], rank=self.job.rank, world=self.job.world)

    def _about(self) -> dict[str, Any]:
        shape, size = describe_model(self.model), sum(p.numel() for p in self.model.parameters())
        return {
            "model": f"{shape.get('type') or shape.get('model_type')}, {size:,} parameters",
            "tokenizer": self.data.tokenizer.name,
            "context": self.config.model.context,
            "batch": self.config.batch.size,
            "steps_planned": self.config.steps,
            "seed": self.config.seed,
        }

    def close(self) -> None:
        """Flush the books and let go of the model.

        A run that has done all its steps settles what is open. One that stopped before does not: its windows are in the checkpoint.
        """
        if self.accountant is not None:
            ledger = self.accountant.ledger
            self.accountant.close(settle=self.finished)
            assert isinstance(ledger, Ledger)
            ledger.close()

    # One step

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the coming step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, ids: Ids, rows: Tensor, observe: Any) -> float:
        """Run forward and backward, microbatch by microbatch; return the mean loss of the step's tokens.

        Of several processes each runs its own rows, and returns its part of the loss. The gradient is the mean over processes, so
        that each takes its losses world times: together they are the mean over all tokens, however many each has.
        """
        total, parts, world = self._targets(rows), self.config.batch.accumulation, self.job.world
        loss = 0.0
        for place, (some, part) in enumerate(zip(np.array_split(ids, parts), rows.tensor_split(parts), strict=True)):
            with (
                observe.microbatch(some) if observe is not None else contextlib.nullcontext(),
                contextlib.nullcontext() if world == 1 or place == parts - 1 else without_sync(self.called),
            ):
                share = token_losses(self.called, part)[0].sum() / total
                (share * world if world > 1 else share).backward()
                loss += float(share.detach())
        return loss

    def _targets(self, rows: Tensor) -> Tensor | int:
        """Return how many tokens of the step are predicted, on all processes: every one knows the samples of the global batch."""
        if self.job.world == 1:
            return (rows[:, 1:] != PADDING).sum()
        return int((self.data.chunks.lengths(self.order.batch(self.step)) - 1).sum())

    def clip(self) -> float:
        """Clip the gradient as the recipe says; return its norm before."""
        most = self.config.optimizer.clip
        return float(whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), math.inf if most is None else most)))

    def take_step(self) -> float:
        """Take one optimizer step; return its training loss."""
        ids = self.job.part(self.order.batch(self.step))
        rows = self.data.sample_tokens(ids, self.device)
        self.status.lr = lr_at(self.step, self.config)
        self.set_lr(self.status.lr)
        with contextlib.nullcontext() if self.accountant is None else self.accountant.step() as observe:
            loss = self.backward(ids, rows, observe)
            if self.job.world > 1:
                loss = float(self.job.sum("loss", loss))
            norm = self.clip()
            finite = math.isfinite(norm) and math.isfinite(loss)
            if finite:
                self.optimizer.step()
            elif math.isfinite(norm):
                raise StepError(f"at step {self.step} the loss is {loss} though all gradients are finite")
            self.optimizer.zero_grad()
        if not finite:
            self._not_finite(loss, norm)
        elif self.accountant is not None:
            self._note_scores(ids)
        return loss

    def _not_finite(self, loss: float, norm: float) -> None:
        what = f"step {self.step}: the loss is {loss}, the norm of its gradient {norm}"
        if self.config.nonfinite == "stop":
            raise TrainingError(
                f"{what}. The run stops here, with the weights before this step untouched. Let such steps pass with nonfinite=skip "
                "and --resume, or begin another run from its last checkpoint (model.path, model.pretrained=true) with a smaller "
                "optimizer.lr"
            )
        self.skipped += 1
        log.warning("inrun: %s. The step is skipped (nonfinite=skip); %d so far", what, self.skipped)

    def _note_scores(self, ids: Ids) -> None:
        assert self.accountant is not None
        last = self.accountant.last
        if self.accountant.method == "whole":
            self._add_settled(self.totals, last.settled)
        else:
            self._add_up(self.totals, ids, {name: x.double().cpu().numpy() for name, x in last.contributions.items()})
        ratios = [abs(a.residual) / a.spread for a in last.accounts.values() if a and a.spread and a.residual is not None]
        if ratios and self.accountant.method not in PROXY:
            self.status.residual = max(ratios)

    def _add_up(self, totals: dict[str, Any], ids: Ids, values: Mapping[str, Any]) -> None:
        """Add scores of samples to totals of their domains."""
        codes = self.codes(ids)
        for name, x in values.items():
            np.add.at(totals[name], codes, x)

    def _add_settled(self, totals: dict[str, Any], settled: Sequence[SettledCredits]) -> None:
        for s in settled:
            self._add_up(totals, s.sample_ids, mean_of_folds(s.credits))

    def _totals_so_far(self) -> dict[str, Any]:
        """Return the totals of domains with the credit so far of uses that are still being paid."""
        found = {name: values.copy() for name, values in self.totals.items()}
        if self.accountant is not None:
            self._add_settled(found, self.accountant.open_credits())
        return self._of_all(found)

    def _of_all(self, totals: dict[str, Any]) -> dict[str, Any]:
        """Add totals up over processes."""
        if self.job.world == 1:
            return totals
        return {name: self.job.sum("totals", values).numpy() for name, values in totals.items()}

    # Around steps

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of every validation set, on the same samples every time; leaves no trace in training."""
        was = self.model.training
        shared = self.job.world > 1 and not is_split(self.model)  # all processes must call a split model equally often
        self.model.eval()
        try:
            with torch.random.fork_rng():
                found = {}
                for name, held in self.data.validation.items():
                    rows = held.evaluation_rows(self.config.logging.evaluate_rows, self.device)
                    if shared:
                        rows = rows.tensor_split(self.job.world)[self.job.rank]
                    sums = [token_losses(self.model, part) for part in rows.split(self.config.batch.size) if len(part)]
                    loss, targets = (sum((x[j].sum() for x in sums), torch.zeros(())) for j in range(2))
                    if shared:
                        loss, targets = self.job.sum("evaluation", [float(loss), float(targets)])
                    found[name] = float(loss / targets)
                return found
        finally:
            self.model.train(was)

    def plain_seconds(self) -> float:
        """Time forward and backward of the coming batch without scores; gradients and random state stay as they are."""
        if self.accountant is None:
            return math.nan
        ids = self.job.part(self.order.batch(self.step))
        rows, best = self.data.sample_tokens(ids, self.device), math.inf
        with torch.random.fork_rng():
            for _ in range(2):
                began = time.perf_counter()
                self.backward(ids, rows, None)
                self.optimizer.zero_grad()
                best = min(best, time.perf_counter() - began)
        return best

    def save(self) -> Path:
        """Write a checkpoint of the state before the next step."""
        more = {
            "skipped": self.skipped,
            "data": self.data.chunks.store.fingerprint,
            "samples": self.data.samples_fingerprint,
            "validation_data": self.data.validation_fingerprints,
            "totals": {name: values.tolist() for name, values in self._of_all(self.totals).items()},
            "model": describe_model(self.model),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        books = None if self.accountant is None else self.accountant.state_dict()
        written = save_checkpoint(self.run, self.step, self.model, self.optimizer, more, books, self.job.processes)
        if self.job.is_first:
            prune(self.run, self.step, self.config.checkpoints.keep, self.config.checkpoints.keep_every)
        return written

    def go(
        self,
        metrics: Metrics | None,
        tell: Callable[[Status], None] = lambda status: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Train to the end, or until ``stop()`` on any process; a checkpoint is left behind either way.

        ``metrics`` is None on processes that write none.
        """
        c, began, stopped = self.config, time.perf_counter(), False
        if self.step == 0 and (c.checkpoints.keep is None or c.checkpoints.keep_every):
            self.save()
        timer = Timer(c.batch.size)
        while self.step < c.steps and not stopped:
            evaluated = self.step % c.evaluate_every == 0
            if evaluated:
                self.status.validation = self.evaluate()
                timer.compare_with(self.plain_seconds())
            with timer.step():
                self.status.loss = self.take_step()
            self.step += 1
            self.status.step = self.step
            self.status.samples_per_second, self.status.overhead = timer.samples_per_second, timer.overhead
            self.status.plain_seconds = timer.plain_seconds
            if evaluated or self.step % c.logging.every == 0 or self.step == c.steps:
                row = self._row(evaluated)
                if metrics is not None:
                    metrics.write(row)
            tell(self.status)
            stopped = self.job.processes.any("the wish to stop", self.step, stop())
            if self.step % c.checkpoints.every == 0 and self.step < c.steps:
                self.save()
        if self.step == c.steps:
            self.status.validation = self.evaluate()
            if metrics is not None:
                metrics.write({"step": c.steps, "validation": self.status.validation})
        self.save()  # with the windows that are open, so that a finished run can be made longer
        self.finished = self.step == c.steps
        tell(self.status)
        return Result(self.status, self.finished, self.skipped, time.perf_counter() - began)

    def _row(self, evaluated: bool) -> dict[str, Any]:
        s = self.status
        row: dict[str, Any] = {"step": self.step - 1, "loss": s.loss, "lr": s.lr, "samples_per_second": s.samples_per_second}
        if evaluated:  # before the step, with the weights that its loss speaks of
            row["validation"] = s.validation
        if self.accountant is not None:
            row |= {"overhead": s.overhead, "residual": s.residual}
            names, totals = [*self.domains, "(none)"], self._totals_so_far()
            row["domains"] = {name: {names[i]: float(x) for i, x in enumerate(values) if x} for name, values in totals.items()}
        return row
