"""The accountant: scores every training sample of a run while it trains."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from inrun.engine.answers import Answers
from inrun.engine.description import accountant_html, describe_accountant
from inrun.engine.hooks import OptimizerHooks
from inrun.engine.options import Options, audit_due
from inrun.engine.processes import find_processes
from inrun.engine.record import StepResult
from inrun.engine.resharing import state_of_rank
from inrun.engine.run import Run
from inrun.engine.setup import check_arguments, check_ranks, make_setup
from inrun.engine.step import Step
from inrun.engine.validation import Loss
from inrun.engine.wrapped import check_model, unwrap
from inrun.errors import ConfigurationError, StepError
from inrun.ledger import Ledger, LedgerWriter, MemoryLedger
from inrun.ledger.record import StepRecord

if TYPE_CHECKING:
    pass

log = logging.getLogger("inrun")
#: Models that have an accountant.
_attached: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


class Accountant(Answers):
    """Scores every training sample of a run while it trains.

    Positive means that the sample lowered the validation loss; the unit is that of the loss.

    Args:
        model: The module whose forward you call, with its wrapper (DistributedDataParallel, ``torch.compile``) if it has one.
        optimizer: Its optimizer, or a list of optimizers.
        validation: A callable ``model -> loss``, or a dictionary of callables by name. The loss is a scalar, or a vector ``[m]``
            for one score per point. A callable with two required arguments gets the step number too.
        method: ``"whole"``: credit over all later steps, through the optimizer's memory. ``"step"``: the share of the real move
            of the step itself. ``"first"``, ``"second"``: Theorems 1 and 2 of the paper, with its SGD proxy.
        sketch: Numbers kept per sample until its credit is settled. None chooses by model size; ``"exact"`` keeps every entry.
        ledger: A folder, an :class:`inrun.Ledger`, an object with ``write(record)``, or None for memory.
        parameters: Patterns of parameter names, such as ``["*.lora_*"]``. None scores all that the optimizers have.
        audit_every: Steps between audits. None audits steps 0, 1, 2, 5, 10, 20, 30, 40 and every 50th; 0 audits none.
        check_rows: Whether audits read again which rows belong to which sample; first steps and new shapes are always read.
        bitwise: Whether the framework computes all of the model's gradients, so that training is the same bit for bit.
        options: Rarely needed options, see :class:`inrun.Options`.

    Raises:
        ConfigurationError: For an argument of the wrong type or value, and for models that cannot be scored.
        OptimizerError: For an optimizer that the method does not support.
        CoverageError: If no trainable parameter is in the optimizer.

    Example:
        >>> accountant = inrun.Accountant(model, optimizer, lambda model: loss_of(model, held_out))  # doctest: +SKIP
        >>> with accountant.step(batch["sample_id"]):  # doctest: +SKIP
        ...     loss_of(model, batch).backward()
        ...     optimizer.step()
        >>> accountant.scores()  # doctest: +SKIP
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
        options: Options | None = None,
    ) -> None:
        flags = {"check_rows": check_rows, "bitwise": bitwise}
        optimizers = check_arguments(model, optimizer, method, sketch, ledger, audit_every, flags)
        if model in _attached:
            raise ConfigurationError("this model already has an accountant. Close it before making another.")
        wrapped = unwrap(model)
        model = wrapped.model
        self.model, self.method, self.options = model, method, options or Options()
        group = self.options.process_group or wrapped.group
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._processes = processes = find_processes(group, device, wrapped.sharded)
        if processes.several:
            check_model(model)
        with processes.barrier("making the accountant", 0):
            setup = make_setup(model, optimizers, validation, method, sketch, parameters, self.options.validation_mode, processes)
        given = {"validation": setup.scorer.validation.names, "method": method, "sketch": sketch, "parameters": parameters}
        folder = "a folder" if isinstance(ledger, (str, os.PathLike)) else "no folder"
        check_ranks(processes, {**given, "ledger": folder, "audit_every": audit_every, **flags})
        self._schedule = (audit_every, check_rows)
        self._run = Run(model, optimizers, setup.parameters, setup.scorer, setup.mover, bitwise, _writer(self))
        self._owns_ledger = isinstance(ledger, (str, os.PathLike))
        self.ledger: LedgerWriter = self._open_ledger(ledger)
        self._hooks = OptimizerHooks(optimizers, self._run)
        # An accountant that is forgotten lets go of the model.
        self._detach = weakref.finalize(self, _detach, self._run, self._hooks, model)
        self._detach.atexit = False
        _attached[model] = None

    def _open_ledger(self, ledger: LedgerWriter | str | os.PathLike[str] | None) -> LedgerWriter:
        if ledger is None:
            return MemoryLedger(self.about())
        if isinstance(ledger, (str, os.PathLike)):
            about = {**self.about(), **self.options.about}
            with self._processes.barrier("the ledger", 0):
                return Ledger(os.fspath(ledger), rank=self._processes.rank, world=self._processes.world, about=about)
        return ledger

    # Steps

    def step(self, ids: Any = None) -> Step:
        """Observe one optimizer step: ``with accountant.step(ids):`` around forward, backward and ``optimizer.step()``.

        ``ids`` are integers, one per batch row, or one per position ``[n, t]`` of packed documents (−1 for padding). Without ids,
        open ``step.microbatch(ids)`` around each forward and backward.
        """
        if self.closed:
            raise StepError("this accountant is closed. Make a new one.")
        every, check_rows = self._schedule
        audited = audit_due(self._run.steps_done, every)
        self._hooks.go_last()
        return Step(self._run, ids, audited, fresh=check_rows and audited)

    @property
    def last(self) -> StepResult:
        """Return the result of the last finished step; waits for it."""
        self._run.history.flush()
        if self._run.history.last is None:
            raise StepError("no step has finished yet.")
        return self._run.history.last

    @property
    def open_step(self) -> Step | None:
        """Return the step that is open, if any."""
        return self._run.open_step

    def seek(self, step: int) -> None:
        """Go on as if this were the next step (for replays of a recorded run)."""
        self._run.steps_done = step

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model run unobserved for the time of the block, inside a step or not."""
        with self._run.tape.paused():
            yield

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the model and its optimizers alone for the time of the block, so that another accountant may have them."""
        if self._run.open_step is not None:
            raise StepError("a step is open. Leave it first.")
        _attached.pop(self.model, None)
        try:
            yield
        finally:
            _attached[self.model] = None

    # Going on later

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: nested dictionaries and lists of plain data and tensors."""
        if self._run.open_step is not None:
            raise StepError("a step is open. Take the state between two steps.")
        state = self._run.state_dict()
        mark = getattr(self.ledger, "mark", None)
        return {"version": 2, "method": self.method, "ledger": mark() if callable(mark) else None, **state}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a saved state.

        Of several processes each gives the state that it saved. Where their number is another now, or ``fully_shard`` splits the
        model otherwise, each gives the list of the states of all that saved, in the order of their ranks.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if one.get("version") != 2:
                raise ConfigurationError(f"the state has version {one.get('version')!r}; this release reads version 2.")
            if one["method"] != self.method:
                raise ConfigurationError(f'the saved run used method="{one["method"]}", this accountant has "{self.method}".')
        shapes = [p.shape for p in self._run.parameters.tensors()]
        self._run.load_state_dict(state_of_rank(states, self._processes, shapes))

    # The end

    def close(self, settle: bool = True) -> None:
        """Settle what is open, write it, and leave model and optimizers as they were. Scores stay readable.

        ``settle=False`` leaves open uses to a run that goes on from a saved state.
        """
        if self.closed:
            return
        history = self._run.history
        try:
            if history.failed is None:
                history.flush()
                settled = self._run.settle_all() if settle else []
                cut = [float(s.paid.mean()) for s in settled if len(s.paid) and s.paid.mean() < 0.99]
                if cut:
                    log.info(
                        "inrun: uses of the last %d steps are settled before their window has passed (%.0f %% of their push paid)",
                        len(cut),
                        100 * sum(cut) / len(cut),
                    )
                write = getattr(self.ledger, "settle", None)
                if settled and callable(write):
                    write(settled)
        finally:
            self._detach()
            if self._owns_ledger and isinstance(self.ledger, Ledger):
                self.ledger.close()

    def __enter__(self) -> Accountant:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return describe_accountant(self)

    def _repr_html_(self) -> str:
        return accountant_html(self)


def _writer(accountant: Accountant) -> Callable[[StepRecord], None]:
    """Return what writes a record to the accountant's ledger, without keeping the accountant alive."""
    found = weakref.ref(accountant)

    def write(record: StepRecord) -> None:
        if (accountant := found()) is not None:
            accountant.ledger.write(record)

    return write


def _detach(run: Run, hooks: OptimizerHooks, model: nn.Module) -> None:
    _attached.pop(model, None)
    hooks.remove()
    run.layouts.end()
    for leaf in run.parameters.leaves:
        leaf.reader = None
