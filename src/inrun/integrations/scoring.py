"""The accountant of a trainer that calls in pieces: begin, microbatch after microbatch, the optimizer, the end."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from inrun.engine import Accountant
from inrun.engine.step import Step
from inrun.errors import ConfigurationError, StepError
from inrun.integrations.data import add_scores
from inrun.ledger import Ledger, MemoryLedger

log = logging.getLogger("inrun")


def processes() -> tuple[int, int]:
    """Return the number of this process and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


class Scoring:
    """Owns the accountant of a run and the step that is open.

    Args (of the constructor):
        options: What :class:`inrun.Accountant` takes beside model, optimizer and validation.
        single_closure: The trainer's optimizers get a closure that is run once (Lightning).
    """

    def __init__(self, options: dict[str, Any], single_closure: bool = False) -> None:
        """Hold the options; :meth:`begin` makes the accountant."""
        self._options, self._single_closure = options, single_closure
        self._accountant: Accountant | None = None
        self._resumed: Ledger | None = None
        self._step: Step | None = None

    @property
    def accountant(self) -> Accountant:
        """Return the accountant, which is made when training begins."""
        if self._accountant is None:
            raise StepError("training has not begun: the accountant is made when the trainer has its optimizer")
        return self._accountant

    @property
    def begun(self) -> bool:
        """Whether there is an accountant."""
        return self._accountant is not None

    def begin(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        validation: Any,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Make the accountant, and put it where a saved state stands."""
        if self._accountant is not None:
            self.close(settle=False)  # of a run that failed, or ended
        options = dict(self._options)
        ledger = options.pop("ledger", None)
        if state is not None:
            ledger = self._resume(ledger, state)
        try:
            accountant = Accountant(model, list(optimizers), validation, ledger=ledger, **options)
        except BaseException:
            self._close_resumed()
            raise
        self._accountant = accountant
        if state is not None:
            try:
                accountant.load_state_dict(state)
            except BaseException:
                self.close(settle=False)
                raise

    def _resume(self, ledger: Any, state: dict[str, Any]) -> Any:
        """Reopen the books that belong to a saved state."""
        mark = state.get("ledger")
        if isinstance(ledger, (str, os.PathLike)):
            if mark is None:
                raise ConfigurationError(
                    f"ledger={os.fspath(ledger)!r}, but the saved run kept its books in memory; give no ledger"
                )
            rank, size = processes()
            self._resumed = Ledger.resume(os.fspath(ledger), mark, rank=rank, world=size)
            return self._resumed
        if mark is not None and ledger is None:
            raise ConfigurationError("the saved run has a ledger on disk; give the same folder as ledger= to go on with it")
        if ledger is None or isinstance(ledger, MemoryLedger):
            log.warning("inrun: the books are in memory: scores of steps before the resume are not in them. Give ledger=FOLDER.")
        return ledger

    # Steps

    def open(self) -> Step:
        """Return the step that is open; a new one if there is none."""
        if self._step is None:
            step = self.accountant.step(single_closure=self._single_closure)
            step.__enter__()
            self._step = step
        return self._step

    @property
    def stepping(self) -> bool:
        """Whether a step is open."""
        return self._step is not None

    @contextlib.contextmanager
    def microbatch(self, ids: Any) -> Iterator[None]:
        """Observe one forward and backward; what fails in it drops the step."""
        try:
            with self.open().microbatch(ids):
                yield
        except BaseException as error:
            self.abandon(error)
            raise

    def finish(self) -> None:
        """The optimizers have stepped (or were held back): record the step."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def abandon(self, error: BaseException | None = None) -> None:
        """Drop the step that is open; nothing of it is recorded."""
        step, self._step = self._step, None
        if step is not None:
            error = error or StepError("the step was left before its optimizer stepped")
            step.__exit__(type(error), error, error.__traceback__)

    # What comes out

    def figures(self) -> dict[str, float]:
        """Return a few numbers of the last step for a trainer's logs.

        Per validation set: ``loss`` (where its gradient was taken), ``paid`` (what the step's samples did to it in this very step;
        positive: lowered it), ``helpful`` (the share of them that lowered it).
        """
        if self._accountant is None or self._accountant.steps_done == 0:
            return {}
        try:
            last = self._accountant.last
        except StepError:  # resumed, and no step since
            return {}
        if last.skipped is not None:
            return {}
        found: dict[str, float] = {}
        for name, c in last.contributions.items():
            each = c if c.dim() == 1 else c.mean(1)
            found[f"inrun/{name}/loss"] = last.losses[name]
            found[f"inrun/{name}/paid"] = float(each.sum())
            found[f"inrun/{name}/helpful"] = float((each > 0).double().mean()) if len(each) else 0.0
        return found

    def scores(self) -> Any:
        """Return one row per sample and validation set as an Arrow table; see :meth:`inrun.Accountant.scores`."""
        return self.accountant.scores()

    def scored(self, dataset: Any, id_column: str) -> Any:
        """Return a dataset with its samples' scores; see :func:`inrun.integrations.data.add_scores`."""
        return add_scores(dataset, self.scores(), id_column)

    def state(self) -> dict[str, Any]:
        """Return the accountant's state; between two steps."""
        return self.accountant.state_dict()

    # The end

    def close(self, settle: bool = True) -> None:
        """Let go of model and optimizers; scores stay readable."""
        self.abandon()
        if self._accountant is not None:
            self._accountant.close(settle=settle)
        self._close_resumed()

    def _close_resumed(self) -> None:
        ledger, self._resumed = self._resumed, None
        if ledger is not None:
            ledger.close()


class Undo:
    """What was set on somebody's object, and how it comes off."""

    def __init__(self) -> None:
        """Begin with nothing set."""
        self._put_back: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance."""
        had, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        self._put_back.append(lambda: setattr(owner, name, before) if had else delattr(owner, name))

    def add(self, put_back: Callable[[], None]) -> None:
        """Remember something else to do at the end."""
        self._put_back.append(put_back)

    def all(self) -> None:
        """Put everything back, last first."""
        while self._put_back:
            self._put_back.pop()()
