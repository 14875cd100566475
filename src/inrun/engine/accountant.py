"""The accountant: scores every training sample of a run while it trains."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from inrun.analysis import Summary, summarise
from inrun.engine.move import Mover
from inrun.engine.options import Coverage, CoverageRow, audit_due
from inrun.engine.parameters import Parameters, find_parameters, table_places
from inrun.engine.record import StepResult
from inrun.engine.run import Run
from inrun.engine.scorer import FirstScorer, Scorer, WholeScorer
from inrun.engine.sketch import Sketcher, default_size, make_plans
from inrun.engine.step import Step
from inrun.engine.validation import Loss, Validation
from inrun.errors import ConfigurationError, LedgerError, OptimizerError, StepError
from inrun.ledger import Ledger, LedgerReader, LedgerWriter, MemoryLedger
from inrun.ledger.live import live_reader
from inrun.optimizers import UpdateRule, find_rule

log = logging.getLogger("inrun")
METHODS = ("whole", "step", "first", "second")
#: Models that have an accountant.
_attached: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


class Accountant:
    """Scores what every training sample was worth to the model, while it trains.

    Positive means the sample lowered the validation loss; the unit is that of the loss.

    Args:
        model: The module whose forward you call.
        optimizer: Its optimizer, or a list of optimizers.
        validation: One callable ``model -> loss``, or several by name. A vector of m losses asks for one score per point.
        method: "whole" (credit through the optimizer's memory), "step" (the step's own share of the real update), "first" and "second"
            (Theorems 1 and 2 of the paper, with its SGD proxy).
        sketch: Numbers per sample; None chooses by model size, "exact" keeps every entry of the gradients.
        ledger: A folder, an ``inrun.Ledger``, or None for memory.
        parameters: Patterns of parameter names to score; None scores all that the optimizers have.
        audit_every: Steps between audits; None audits often at first, then every 50th step.
        check_rows: Read from the graph which rows belong to which sample.
        bitwise: Leave every gradient of the model to the framework, so that training is bit for bit the same.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        validation: Loss | Mapping[str, Loss],
        method: str = "whole",
        sketch: int | str | None = None,
        ledger: LedgerWriter | str | os.PathLike[str] | None = None,
        parameters: Sequence[str] | None = None,
        audit_every: int | None = None,
        check_rows: bool = True,
        bitwise: bool = False,
    ) -> None:
        if method not in METHODS:
            raise ConfigurationError(f"method is {method!r}. Accepted are {', '.join(map(repr, METHODS))}.")
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model is {type(model).__name__}, not a torch.nn.Module.")
        if model in _attached:
            raise ConfigurationError("this model already has an accountant. Close it before making another.")
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        if ledger is not None and not isinstance(ledger, (str, os.PathLike)) and not callable(getattr(ledger, "write", None)):
            raise ConfigurationError(f"ledger is {type(ledger).__name__}. Give a folder, an inrun.Ledger, or None for memory.")
        self.model, self.method, self.check_rows = model, method, check_rows
        self._audit_every = audit_every
        found = find_parameters(model, optimizers, parameters)
        rules = [find_rule(o) if method in ("whole", "step") else UpdateRule() for o in optimizers]
        scorer = _make_scorer(method, model, found, Validation(model, validation), rules, sketch)
        self._owns_ledger = isinstance(ledger, (str, os.PathLike))
        self._run = Run(model, optimizers, found, scorer, Mover(found, rules), bitwise, self._write)
        self.ledger: LedgerWriter = (
            MemoryLedger(self.about())
            if ledger is None
            else Ledger(os.fspath(ledger), about=self.about())
            if isinstance(ledger, (str, os.PathLike))
            else ledger
        )
        if isinstance(scorer, WholeScorer):
            scorer.inherit(optimizers)
        self._hooks = [hook for i, o in enumerate(optimizers) for hook in self._hook(i, o)]
        _attached[model] = None
        self.closed = False

    def _hook(self, index: int, optimizer: torch.optim.Optimizer) -> list[Any]:
        run = self._run

        def before(*_: Any) -> None:
            if run.open_step is not None:
                run.open_step.before_optimizer(index)

        def after(*_: Any) -> None:
            if run.open_step is not None:
                run.open_step.after_optimizer(index)

        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    def _write(self, record: Any) -> None:
        self.ledger.write(record)

    # Steps

    def step(self, ids: Any = None) -> Step:
        """Observe one optimizer step: ``with accountant.step(ids):`` around forward, backward and ``optimizer.step()``.

        ``ids`` are integers, one per batch row, or one per position ``[n, t]`` of packed documents (−1 for padding). Without ids, open
        ``step.microbatch(ids)`` around each forward and backward.
        """
        if self.closed:
            raise StepError("this accountant is closed. Make a new one.")
        audited = audit_due(self._run.steps_done, self._audit_every)
        return Step(self._run, ids, audited, fresh=self.check_rows and audited)

    @property
    def last(self) -> StepResult:
        """Return the result of the last finished step."""
        if self._run.last is None:
            raise StepError("no step has finished yet.")
        return self._run.last

    @property
    def steps_done(self) -> int:
        """Return how many steps were recorded."""
        return self._run.steps_done

    @property
    def coverage(self) -> Coverage:
        """Return which parameters are scored."""
        scored = {s.name for s in self._run.parameters.scored}
        rows = [CoverageRow(leaf.name, leaf.name in scored, leaf.parameter.numel()) for leaf in self._run.parameters.leaves]
        return Coverage(tuple(rows))

    # Results

    @property
    def _reader(self) -> LedgerReader | MemoryLedger:
        if isinstance(self.ledger, (MemoryLedger, Ledger)):
            return self.ledger if isinstance(self.ledger, MemoryLedger) else live_reader(self.ledger)  # type: ignore[arg-type, return-value]
        raise LedgerError("this accountant writes to an object of yours; ask it.")

    def scores(self, validation: str | None = None, top: int | None = None, bottom: int | None = None) -> Any:
        """Return one row per sample and validation set, as an Arrow table."""
        return self._reader.scores(validation=validation, top=top, bottom=bottom)  # type: ignore[call-arg]

    def summary(self) -> Summary:
        """Return what the accounts say of the run so far."""
        update = "sgd" if self.method in ("first", "second") else "realised"
        return summarise(self._reader.accounts(), self.method, update, "whole" if self.method == "whole" else "step")

    def about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the run."""
        scorer = self._run.scorer
        return {
            "method": self.method,
            "update": "sgd" if self.method in ("first", "second") else "realised",
            "credit": "whole" if self.method == "whole" else "step",
            **({"sketch": scorer.sketcher.size} if isinstance(scorer, WholeScorer) else {}),
            "validation": scorer.validation.names,
            "optimizers": [type(o).__name__ for o in self._run.optimizers],
            "model": type(self.model).__name__,
            "parameters": sum(s.parameter.numel() for s in self._run.parameters.scored),
        }

    def held_bytes(self) -> int:
        """Return the memory that scoring holds between steps, in bytes."""
        return self._run.scorer.nbytes()

    # The end

    def close(self) -> None:
        """Settle what is open, write it, and leave model and optimizers as they were."""
        if self.closed:
            return
        self.closed = True
        for hook in self._hooks:
            hook.remove()
        self._run.layouts.end()
        for leaf in self._run.parameters.leaves:
            leaf.reader = None
        _attached.pop(self.model, None)
        settled = self._run.settled(self._run.scorer.settle_all(), self._run.labels)
        settle = getattr(self.ledger, "settle", None)
        if settled and callable(settle):
            settle(settled)
        if self._owns_ledger:
            self.ledger.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Accountant:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _make_scorer(
    method: str, model: nn.Module, parameters: Parameters, validation: Validation, rules: list[UpdateRule], sketch: int | str | None
) -> Scorer:
    if method in ("first", "second"):
        return FirstScorer(parameters, validation, rules, second=method == "second")
    if sketch is not None and sketch != "exact" and not (isinstance(sketch, int) and not isinstance(sketch, bool) and sketch >= 1):
        raise ConfigurationError(
            f'sketch is {sketch!r}. Give a number of numbers per sample, "exact", or None to choose by model size.'
        )
    if method == "whole":
        for s, rule in ((s, rules[s.optimizer]) for s in parameters.scored):
            if type(rule).memory is UpdateRule.memory:
                raise OptimizerError(
                    f'method="whole" needs an optimizer whose memory of gradients is known; {s.name} has none. Take method="step".'
                )
    entries = sum(s.parameter.numel() for s in parameters.scored)
    size = None if sketch == "exact" else default_size(entries) if sketch is None else int(sketch)
    tables, outputs = table_places(model, parameters)
    plans = make_plans([s.leaf for s in parameters.scored], size, tables, outputs)
    sketcher = Sketcher([s.leaf for s in parameters.scored], plans, parameters.dtype)
    return WholeScorer(parameters, validation, rules, sketcher, sorted(tables | outputs), own_step=method == "step")
