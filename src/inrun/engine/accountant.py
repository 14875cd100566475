"""The accountant: scores every sample of a training run while it runs."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.audit import Schedule
from inrun.engine.capture import Capture
from inrun.engine.coverage import Coverage, CoverageRow
from inrun.engine.directions import Directions
from inrun.engine.sites import find_sites, scored_parameters
from inrun.engine.step import Account, Step, StepResult
from inrun.engine.validation import Column, Loss, Validation
from inrun.engine.watch import GradientWatch
from inrun.errors import ConfigurationError, CoverageError, LedgerError, OptimizerError, StepError
from inrun.ledger import LedgerWriter, MemoryLedger, StepRecord
from inrun.methods import find_method, resolve_update
from inrun.optimizers import find_update, plain

log = logging.getLogger("inrun")
#: Models that have an accountant.
_attached: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


class Accountant:
    """Tells what every training sample was worth to the model, while it trains.

    Each optimizer step's change of the validation loss is shared out among the samples of its batch,
    c_n = ⟨g_n, v⟩ with g_n the part of the batch gradient that flows through sample n's rows and v the step's direction.
    Positive means the sample lowered the validation loss; the unit is that of the loss.

    Args:
        model: The module whose forward you call.
        optimizer: Its optimizer, or a list of optimizers.
        validation: One callable ``model -> loss``, or several by name. A callable with two required arguments gets the
            step number too. A vector of m losses asks for per-point contributions ``[n, m]``.
        method: Where the validation gradient is taken: "first" (at the weights before the step).
        update: What a sample's gradient does to the weights: "sgd" (the paper's proxy, lr · g), "frozen" (the
            optimizer's own rule with its state as it stands before the step), "auto".
        audit_every: Check conservation and measure the loss after every k-th step; 1 = every step, 0 = never,
            None = as often as costs under one per cent.
        ledger: Where contributions go: None for memory, or an object with ``write(record)``.
        refresh: Reuse the validation gradient for this many steps.
        bitwise: Leave every weight gradient to the framework, so that training is bit for bit the same.
        form: How layers contract: "shared" (weight gradient and contraction from the same products), "project" (one
            more product, the weight gradient stays the framework's), "auto" (by cost).
        validation_mode: "eval" (default) or "train": the mode the model is in during validation passes.
        check_rows: Verify at the first step, by exchanging a sample, that rows belong to samples.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        validation: Loss | Mapping[str, Loss],
        *,
        method: str = "first",
        update: str = "auto",
        audit_every: int | None = None,
        ledger: LedgerWriter | None = None,
        refresh: int = 1,
        bitwise: bool = False,
        form: str = "auto",
        validation_mode: str = "eval",
        check_rows: bool = True,
    ) -> None:
        """Attach to the model and its optimizers; :meth:`close` detaches."""
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model is {type(model).__name__}, not a torch.nn.Module")
        self.optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        wrong = [type(o).__name__ for o in self.optimizers if not isinstance(o, torch.optim.Optimizer)]
        if wrong or not self.optimizers:
            raise ConfigurationError(f"optimizer must be a torch optimizer or a list of them; got {wrong or 'none'}")
        _check_count("refresh", refresh, 1)
        if audit_every is not None:
            _check_count("audit_every", audit_every, 0)
        if isinstance(ledger, (str, bytes)) or hasattr(ledger, "__fspath__"):
            raise LedgerError("ledgers on disk are not part of this version; pass None or an object with write(record)")
        if ledger is not None and not callable(getattr(ledger, "write", None)):
            raise LedgerError(f"ledger is {type(ledger).__name__}; it needs a method write(record)")
        if model in _attached:
            raise ConfigurationError("this model already has an accountant; close() it before making another")
        self.method = find_method(method)
        self.update = resolve_update(update, self.method)
        rules = [plain if self.update == "sgd" else find_update(o) for o in self.optimizers]
        if form not in ("auto", "shared", "project"):
            raise ConfigurationError(f"form is {form!r}; accepted are auto, shared and project")
        if bitwise and form == "shared":
            raise ConfigurationError("bitwise=True leaves weight gradients to the framework, which form='shared' replaces")
        self.model, self.refresh = model, refresh
        self.validation = Validation(model, validation, validation_mode)
        by_parameter = scored_parameters(model, self.optimizers)
        self.scored = list(by_parameter.values())
        sites = find_sites(model, by_parameter)
        self.directions = Directions(self.scored, rules, self.optimizers, keep_raw=refresh > 1)
        in_groups = {p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
        self._foreign = in_groups - set(by_parameter)
        if self._foreign:
            log.warning("inrun: %d optimizer parameters are not part of the model and are not scored", len(self._foreign))
        self.audits = Schedule(audit_every)
        self.ledger: LedgerWriter = MemoryLedger() if ledger is None else ledger
        self.steps_done = 0
        self.open_step: Step | None = None
        self._last: StepResult | None = None
        self._fresh: tuple[list[Column], Tensor] | None = None
        self._fresh_since = 0
        self._closed = False
        self._warned_outside = False
        self.device = self.scored[0].parameter.device
        double = any(s.parameter.dtype == torch.float64 for s in self.scored)
        self.probe_dtype = torch.float64 if double else torch.float32
        self.lane_count = sum(len(o.param_groups) for o in self.optimizers)
        self.watch = GradientWatch(self.scored, active=lambda: self.open_step is not None)
        self.capture = Capture(model, sites, "project" if bitwise else form, check_rows)
        self._hooks = [o.register_step_pre_hook(self._before_step(i)) for i, o in enumerate(self.optimizers)]
        _attached[model] = None
        self._tell_fallbacks()

    def _tell_fallbacks(self) -> None:
        slow = [s for s in self.capture.sites if s.is_fallback]
        if slow:
            names = ", ".join(f"{s.name or 'the model itself'} ({type(s.module).__name__})" for s in slow)
            log.warning("inrun: no rule for %s; each runs its forward once more per backward (see coverage)", names)
        coupled = [n for n, m in self.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if coupled:
            log.warning(
                "inrun: batch norm in training mode (%s) couples the rows of a batch: a sample's contribution is what flows "
                "through its own rows, and its effect on the others' statistics is not told apart. Ways out: eval mode, "
                "GroupNorm.",
                ", ".join(coupled),
            )

    # What a step asks for

    def lanes_of(self, optimizer: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the lanes (position, group) of one optimizer."""
        first = sum(len(o.param_groups) for o in self.optimizers[:optimizer])
        return list(enumerate(self.optimizers[optimizer].param_groups, first))

    def loss_scale(self, optimizer: int) -> float:
        """Return the scale that a fused optimizer divides out by itself (GradScaler hands it over), else 1."""
        scale = getattr(self.optimizers[optimizer], "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def check_open(self) -> None:
        """Raise if the accountant was closed or its optimizers gained groups."""
        if self._closed:
            raise StepError("this accountant is closed; make a new one")
        if sum(len(o.param_groups) for o in self.optimizers) != self.lane_count:
            raise OptimizerError("a parameter group was added after the Accountant was made; make a new one")
        trainable = {p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
        known = {s.parameter for s in self.scored} | self._foreign
        if trainable != known:
            names = {p: n for n, p in self.model.named_parameters()}
            changed = ", ".join(sorted(names.get(p, "?") for p in trainable ^ known))
            raise CoverageError(f"{changed} was frozen or unfrozen after the Accountant was made; make a new one")

    def prepare_directions(self) -> tuple[list[Column], Tensor]:
        """Take validation gradients (or reuse them) and make this step's directions."""
        if self._fresh is None or self.steps_done - self._fresh_since >= self.refresh:
            self.directions.forget()
            gradients = self.validation.gradients([s.parameter for s in self.scored], self.steps_done)
            self.directions.set_raw(gradients.raw)
            self._fresh, self._fresh_since = (gradients.columns, gradients.losses), self.steps_done
        with torch.no_grad():
            self.directions.prepare(count=self.audits.due(self.steps_done))
        columns, losses = self._fresh
        if not self.directions.keep_raw:
            self._fresh = None
        elif self._fresh_since != self.steps_done and self.audits.due(self.steps_done):
            losses = self.validation.losses(self.steps_done)  # the books need this step's loss, not that of the gradient
        return columns, losses

    def _before_step(self, index: int) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.open_step is None:
                if not self._warned_outside:
                    log.warning("inrun: optimizer.step() outside accountant.step(); its samples are not scored")
                self._warned_outside = True
                return
            # torch hands over the arguments of the unbound step: the optimizer itself comes first.
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is not None:
                raise StepError("optimizer.step(closure) runs the model several times per step and cannot be scored")
            if torch._C._current_graph_task_id() != -1:
                raise StepError("the optimizer steps inside the backward; optimizer-in-backward cannot be scored")
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None and float(found_inf) > 0:
                self.open_step.skipped = "gradient is not finite and the optimizer did not step"
            self.open_step.settle(index)

        return hook

    def record(self, step: Step, contributions: Tensor) -> None:
        """Write a finished step."""
        assert step.losses is not None
        losses = step.losses.cpu()
        after = None
        if step.audited and step.skipped is None:
            began = time.perf_counter()
            after = self.validation.losses(self.steps_done).cpu()
            self.audits.spent(time.perf_counter() - began)
        ids = torch.cat([m.ids for m in step.microbatches])
        host = contributions.detach().to("cpu", torch.float32)
        totals = contributions.double().sum(0).cpu()
        clip = tuple(step.settled.get(i, 1.0) for i in range(len(self.optimizers)))
        rows = [
            {
                "step": self.steps_done,
                "validation": column.label,
                "loss_before": float(losses[j]),
                "loss_after": None if after is None else float(after[j]),
                "data": None if step.skipped else float(totals[j]),
                "lr": step.lr,
                "clip": clip[0],
                "n_samples": len(ids),
                "skipped": step.skipped,
            }
            for j, column in enumerate(step.columns)
        ]
        values = {} if step.skipped else {c.label: host[:, j].numpy().copy() for j, c in enumerate(step.columns)}
        self.ledger.write(StepRecord(self.steps_done, ids.numpy(), values, rows))
        self._last = _result(step, self, ids, contributions, losses, after, totals, clip)
        if step.skipped:
            log.warning("inrun: step %d is not scored: %s", self.steps_done, step.skipped)
        self.audits.finish(self.steps_done, step.audited)
        self.steps_done += 1

    # What a user asks for

    def step(self, ids: Any = None) -> Step:
        """Observe one optimizer step: ``with accountant.step(ids):`` around forward, backward and optimizer.step().

        ``ids`` are integers, one per batch row. Without ids, open ``step.microbatch(ids)`` around each backward.
        """
        return Step(self, ids)

    @property
    def last(self) -> StepResult:
        """Return the result of the last finished step."""
        if self._last is None:
            raise StepError("no step has finished yet")
        return self._last

    def scores(self) -> Any:
        """Return one row per sample and validation set as an Arrow table; ``score`` is the sum of contributions."""
        scores = getattr(self.ledger, "scores", None)
        if scores is None:
            raise LedgerError(f"the ledger {type(self.ledger).__name__} only writes; ask the place it writes to")
        return scores()

    @property
    def coverage(self) -> Coverage:
        """Return which parameter is scored by which rule and form."""
        rows = []
        moved = {s.parameter for s in self.scored}
        for s in self.scored:
            for site, _ in s.uses:
                waits = self.directions.rules[s.optimizer].linear is False and site.rule.sparse
                rows.append(
                    CoverageRow(
                        s.name,
                        site.name,
                        site.rule.label,
                        site.form,
                        "deferred" if waits else "streaming",
                        s.parameter.numel(),
                    )
                )
        for name, p in self.model.named_parameters():
            if p.requires_grad and p not in moved:
                rows.append(CoverageRow(name, name.rpartition(".")[0], "in no optimizer", "", "unmoved", p.numel()))
        return Coverage(tuple(rows))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data."""
        mark = getattr(self.ledger, "mark", None)
        return {
            "version": 1,
            "step": self.steps_done,
            "method": self.method.name,
            "update": self.update,
            "refresh": {"every": self.refresh, "since": self._fresh_since},
            "audit": self.audits.state_dict(),
            "forms": {site.name: site.form for site in self.capture.sites},
            "ledger": mark() if callable(mark) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the validation gradient is taken afresh at the next step."""
        if state.get("version") != 1:
            raise ConfigurationError(f"accountant state has version {state.get('version')!r}; this inrun reads version 1")
        for key, mine in (("method", self.method.name), ("update", self.update)):
            if state[key] != mine:
                raise ConfigurationError(f"the saved run used {key}={state[key]!r}, this accountant has {mine!r}")
        self.steps_done = int(state["step"])
        self._fresh = None
        self.audits.load_state_dict(state["audit"])

    def close(self) -> None:
        """Detach from model and optimizers. Scores stay readable."""
        if self._closed:
            return
        self._closed = True
        self.capture.close()
        self.watch.close()
        for hook in self._hooks:
            hook.remove()
        self.directions.forget()
        _attached.pop(self.model, None)

    def __enter__(self) -> Accountant:
        """Return the accountant."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close()


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name} is {value!r}; it must be an integer of at least {least}")


def _result(
    step: Step,
    accountant: Accountant,
    ids: Tensor,
    contributions: Tensor,
    losses: Tensor,
    after: Any,
    totals: Tensor,
    clip: Any,
) -> StepResult:
    """Sort columns into validation sets."""
    by_set: dict[str, list[int]] = {}
    vector: set[str] = set()
    for j, column in enumerate(step.columns):
        by_set.setdefault(column.name, []).append(j)
        if column.point is not None:
            vector.add(column.name)
    if step.skipped:
        contributions = torch.zeros_like(contributions)
    accounts: dict[str, Account | None] = dict.fromkeys(by_set)
    for name, js in by_set.items():
        if after is not None:
            accounts[name] = Account(float(losses[js].mean()), float(after[js].mean()), float(totals[js].mean()))
    return StepResult(
        step=accountant.steps_done,
        sample_ids=ids,
        contributions={n: contributions[:, js] if n in vector else contributions[:, js[0]] for n, js in by_set.items()},
        accounts=accounts,
        losses={n: float(losses[js].mean()) for n, js in by_set.items()},
        skipped=step.skipped,
        clip=clip,
        audited=step.audited,
        kept_bytes=step.kept_bytes,
        zero_gains=accountant.directions.zero_gains,
    )
