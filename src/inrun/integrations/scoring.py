"""The accountant of a trainer that calls in pieces: begin, microbatch after microbatch, the optimizer, the end."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from inrun.engine import Accountant
from inrun.engine.options import Options
from inrun.engine.processes import Processes, find_processes
from inrun.engine.step import Step
from inrun.errors import ConfigurationError, StepError
from inrun.integrations.data import add_scores
from inrun.ledger import Ledger, MemoryLedger

log = logging.getLogger("inrun")
#: What a run goes on from: the state of this process, or those of all processes that saved, where their number was another.
State = dict[str, Any] | list[dict[str, Any]]


def world_group() -> Any:
    """Return the group of all processes of the job; None where there is one."""
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if running and torch.distributed.get_world_size() > 1 else None


def job(model: nn.Module) -> Processes:
    """Return the processes that train together under a trainer: all of the job. They are asked at once, all of them."""
    group = world_group()
    if group is None:
        return Processes()
    return find_processes(group, next((p.device for p in model.parameters()), torch.device("cpu")))


def check_options(options: dict[str, Any]) -> None:
    """Raise at once for options that the accountant does not take: it is made only when training begins."""
    accepted = [n for n in inspect.signature(Accountant).parameters if n not in ("model", "optimizer", "validation")]
    unknown = [name for name in options if name not in accepted]
    if unknown:
        raise ConfigurationError(
            f"{', '.join(f'{name}=' for name in unknown)} is no option of inrun.Accountant. Accepted are {', '.join(accepted)}. "
            "How samples are credited, and by which update, is one choice: method=."
        )


class Scoring:
    """Owns the accountant of a run and the step that is open.

    Args (of the constructor):
        options: What :class:`inrun.Accountant` takes beside model, optimizer and validation.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Hold the options; :meth:`begin` makes the accountant."""
        check_options(options)
        self._options = options
        self._accountant: Accountant | None = None
        self._resumed: Ledger | None = None
        self._step: Step | None = None
        self._closed = False
        #: The processes of the job; known when training begins.
        self.processes = Processes()

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
        saved: Callable[[Processes], State] | None = None,
        inside: bool = False,
    ) -> None:
        """Make the accountant, and put it where a saved state stands.

        Args:
            model: What is called, or the module inside.
            optimizers: Those that move it.
            validation: As for :class:`inrun.Accountant`.
            saved: Reads what the run goes on from.
            inside: The model is the module inside a wrapper, or will be, so that it cannot tell the processes that train it.
        """
        if self._accountant is not None:
            self.close(settle=False)  # of a run that failed, or ended
        self.processes = job(model)
        state = None if saved is None else saved(self.processes)
        options = dict(self._options)
        ledger = options.pop("ledger", None)
        if inside and self.processes.several:
            expert = options.get("options") or Options()
            options["options"] = dataclasses.replace(expert, process_group=expert.process_group or world_group())
        self._warn_of_memory(ledger, state is not None)
        if state is not None:
            ledger = self._resume(ledger, state if isinstance(state, dict) else state[0])
        try:
            accountant = Accountant(model, list(optimizers), validation, ledger=ledger, **options)
        except BaseException:
            self._close_resumed()
            raise
        self._accountant, self._closed = accountant, False
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
            self._resumed = Ledger.resume(os.fspath(ledger), mark, rank=self.processes.rank, world=self.processes.world)
            return self._resumed
        if mark is not None and ledger is None:
            raise ConfigurationError("the saved run has a ledger on disk; give the same folder as ledger= to go on with it")
        return ledger

    def _warn_of_memory(self, ledger: Any, resumed: bool) -> None:
        """Say what books in memory do not have."""
        if ledger is not None and not isinstance(ledger, MemoryLedger):
            return
        if resumed:
            log.warning("inrun: the books are in memory: scores of steps before the resume are not in them. Give ledger=FOLDER.")
        if self.processes.several and self.processes.rank == 0:
            log.warning(
                "inrun: the books are in memory: every one of the %d processes has the scores of its own samples. Give "
                "ledger=FOLDER for one set of books.",
                self.processes.world,
            )

    # Steps

    def open(self) -> Step:
        """Return the step that is open; a new one if there is none."""
        if self._step is None:
            step = self.accountant.step()
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

    def failed(self, error: BaseException) -> None:
        """The trainer failed, in a step or between two: drop what is open, and raise who is missing where a connection broke.

        A trainer meets the other processes for purposes of its own (token counts, logs, checkpoints), and may be the first to miss
        one.
        """
        self.abandon(error)
        self.processes.announce(error)
        lost = self.processes.explain(error)
        if lost is not None:
            raise lost from error

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
        if self.processes.several and isinstance(self.accountant.ledger, MemoryLedger):
            raise ConfigurationError(
                f"the books are in memory, and this one of {self.processes.world} processes has the scores of its own samples: "
                "those of the others would look unused. Give ledger=FOLDER, which all processes write. scores() has those of this "
                "process."
            )
        return add_scores(dataset, self.scores(), id_column)

    def state(self) -> dict[str, Any]:
        """Return the accountant's state; between two steps."""
        return self.accountant.state_dict()

    # The end

    def close(self, settle: bool = True) -> None:
        """Let go of model and optimizers; scores stay readable: of several processes, when all have written theirs."""
        self.abandon()
        if self._accountant is not None and not self._closed:
            self._closed = True
            if not settle:
                self._accountant.close(settle=False)
            else:
                with self.processes.barrier("closing the books", self._accountant.steps_done):
                    self._accountant.close()
                    self._close_resumed()
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
