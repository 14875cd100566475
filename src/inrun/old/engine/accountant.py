"""The accountant: the door to the engine."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inrun.analysis import Summary, summarise, summarise_run
from inrun.errors import ConfigurationError, LedgerError, StepError
from inrun.ledger import Ledger, LedgerReader, LedgerWriter, MemoryLedger
from inrun.ledger.live import live_reader
from inrun.ledger.record import SettledCredits
from inrun.ledger.scores import Names
from inrun.old.engine.attach import Attachment
from inrun.old.engine.audits import Schedule
from inrun.old.engine.checks.coverage import Coverage
from inrun.old.engine.credit.gathered import of_all
from inrun.old.engine.credit.redistribute import state_of_rank
from inrun.old.engine.description import accountant_html, describe_accountant
from inrun.old.engine.look import StepLook
from inrun.old.engine.processes import Communication
from inrun.old.engine.record import FinishedStep, StepResult
from inrun.old.engine.run import Run
from inrun.old.engine.setup import check_count, make_setup, unwrapped
from inrun.old.engine.sites import Scored
from inrun.old.engine.step import Step
from inrun.old.engine.traffic import expected_payload
from inrun.old.engine.validation import Loss

if TYPE_CHECKING:
    from inrun.fidelity import FidelityReport
    from inrun.figures import Plots

log = logging.getLogger("inrun")
#: Models that have an accountant.
_attached: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


class Accountant:
    """Tells what every training sample was worth to the model, while it trains.

    Every move of the weights is made of pushes, and every push is a sample's. Under *whole credit* (the default where the
    optimizers allow it) the use of a sample is paid at its own step and at every later one in which the optimizer still remembers
    its gradient: credit = Σ_t κ_t ⟨g_n, D_t⟩ with g_n the part of the batch gradient that flows through sample n's rows, κ_t what
    the optimizer's memory lets through at step t, and D_t the realised factor of that step times the validation gradient along its
    move. At every step data + decay + inherited + residual = the fall of the loss: what samples were paid, weight decay, momentum
    from before scoring began, and the error of the quadrature.

    In the *step game* only the step's own batch is paid, c_n = ⟨g_n, v⟩ with the step's direction v, and
    data + momentum + decay + residual = the fall: what earlier samples' pushes still did is the momentum account.

    Positive means the sample lowered the validation loss; the unit is that of the loss.

    Args:
        model: The module whose forward you call.
        optimizer: Its optimizer, or a list of optimizers.
        validation: One callable ``model -> loss``, or several by name. A callable with two required arguments gets the
            step number too. A vector of m losses asks for per-point contributions ``[n, m]``. None where the validation rows are
            part of the batches (``step(ids, merged=m)``).
        credit: "whole" (what a use did over all later steps, through the optimizer's memory: the samples' credits add up to the
            fall of the loss), "step" (what it did in its own step), "auto" (whole where the optimizers allow it and neither
            ``method`` nor ``update`` is given).
        credit_memory: For whole credit: "sketch" (a few numbers of every sample's gradient until its window has passed) or "exact"
            (the gradients themselves, in host memory).
        sketch: Numbers per sample; None for a default by model size.
        method: For the step game, where the validation gradient is taken: "first" (at the weights before the step), "lookahead"
            (after momentum and decay), "midpoint" (in the middle of the data's part of the move), "second" (before the step,
            bent by the Hessian; Theorem 2 of the paper for SGD). The first two keep nothing beyond the backward.
        update: What a sample's gradient does to the weights: "sgd" (the paper's proxy, lr · g), "frozen" (the
            optimizer's own rule with its state as it stands before the step), "secant" (its share of the real move),
            "realised" (with the factor that the step really applied),
            "auto" (frozen for the first two methods, secant for the others).
        audit_every: Check conservation and measure the accounts at every k-th step; 1 = every step, 0 = never,
            None = as often as costs under one per cent.
        ledger: Where contributions go: None for memory, a folder for books on disk, an ``inrun.Ledger`` (to resume one), or an
            object with ``write(record)``.
        refresh: Reuse the validation gradient for this many steps.
        bitwise: Leave every weight gradient to the framework, so that training is bit for bit the same.
        form: How layers contract: "shared" (weight gradient and contraction from the same products), "project" (one
            more product, the weight gradient stays the framework's), "gram" (merged steps: products of positions with positions,
            no validation gradient is formed), "auto" (by cost).
        validation_mode: "eval" (default) or "train": the mode the model is in during validation passes.
        check_rows: Verify, by exchanging a sample, that rows belong to samples: at the first step, on new shapes, on audited
            steps and now and then.
        quadrature: By which points the gradient is averaged along the move (whole credit) or its data's part (method "midpoint"):
            None ("adaptive") takes the middle, and at rough steps more points, at most 33, until the residual is below 1 % of Σ|c|.
            A rule that is named ("midpoint", "trapezoid", "simpson", "gauss2" to "gauss32") is kept at every step of the step game;
            under whole credit it is where rough steps begin.
        hessian: For "second": "double" (double backward) or "differences" (two more gradients, for losses that cannot be
            differentiated twice; on a small GPT exact to about 0.1 % in float32, to 1 to 12 % where the callable or the model
            enters autocast, and of little use with bfloat16 weights).
        deferred_memory: Bytes, or text such as "4GB", that contractions may keep from the backward until the optimizer
            steps; None for no limit. What is needed is said at the first step; more than allowed raises.
        extra: What ``last`` tells of every sample beside its contribution: "norm" (``last.norms``: of its part of the gradient, as
            the optimizers used it) and "cosine" (``last.cosines``: with the validation gradient; methods "first" and "lookahead").
            The ledger keeps both beside the contributions.
        about: What ``run.json`` of a new ledger says beside method, model and coverage (plain data).
        process_group: The processes that train together, where the model itself does not tell: give it with the module inside
            DistributedDataParallel. The wrapper, and a module that ``fully_shard`` was applied to, tell by themselves.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        validation: Loss | Mapping[str, Loss] | None = None,
        *,
        method: str | None = None,
        update: str | None = None,
        credit: str = "auto",
        credit_memory: str = "sketch",
        sketch: int | None = None,
        audit_every: int | None = None,
        ledger: LedgerWriter | str | os.PathLike[str] | None = None,
        refresh: int = 1,
        bitwise: bool = False,
        form: str = "auto",
        validation_mode: str = "eval",
        check_rows: bool = True,
        quadrature: str | None = None,
        hessian: str = "double",
        deferred_memory: int | str | None = None,
        extra: Iterable[str] = (),
        about: Mapping[str, Any] | None = None,
        process_group: Any = None,
    ) -> None:
        """Attach to the model and its optimizers; :meth:`close` detaches."""
        if audit_every is not None:
            check_count("audit_every", audit_every, 0)
        _check_ledger(ledger)
        if isinstance(model, nn.Module) and unwrapped(model)[1] in _attached:
            raise ConfigurationError("this model already has an accountant; close() it before making another")
        self._setup = make_setup(
            model,
            optimizer,
            validation,
            method=method,
            update=update,
            credit=credit,
            credit_memory=credit_memory,
            sketch=sketch,
            refresh=refresh,
            bitwise=bitwise,
            form=form,
            validation_mode=validation_mode,
            check_rows=check_rows,
            quadrature=quadrature,
            hessian=hessian,
            deferred_memory=deferred_memory,
            extra=extra,
            process_group=process_group,
        )
        self._run = Run(self._setup, Schedule(audit_every))
        self._owns_ledger = isinstance(ledger, (str, os.PathLike))
        #: Where contributions go.
        self.ledger: LedgerWriter = self._begin_books(ledger, about or {})
        parameters = [s.parameter for s in self._setup.scored]
        model = self._setup.model
        self._attachment = Attachment(model, self._setup.sites, parameters, self._run)
        self._attachment.attach_optimizers(self._setup.optimizers)
        # An accountant that is forgotten lets go of the model by itself.
        self._detach = weakref.finalize(self, self._attachment.close)
        self._detach.atexit = False
        _attached[model] = None
        self._setup.warn()

    def _begin_books(self, ledger: LedgerWriter | str | os.PathLike[str] | None, about: Mapping[str, Any]) -> LedgerWriter:
        if not isinstance(ledger, (str, os.PathLike)):
            return MemoryLedger(self.about()) if ledger is None else ledger
        processes = self._setup.processes
        return Ledger(os.fspath(ledger), rank=processes.rank, world=processes.world, about={**self.about(), **about})

    # Steps

    def step(self, ids: Any = None, *, merged: int | None = None, points: bool = False, single_closure: bool = False) -> Step:
        """Observe one optimizer step: ``with accountant.step(ids):`` around forward, backward and optimizer.step().

        ``ids`` are integers, one per batch row, or one per position ``[n, t]`` where rows hold several documents that do not see
        each other (−1 for padding; every run of an id in a row is one use of that document). Without ids, open
        ``step.microbatch(ids)`` around each backward.

        ``merged=m`` (of an accountant without ``validation=``): the batch has m more rows than there are ids, at its end, and they
        are validation rows. The loss is train_loss(rows :n) + validation_loss(rows n:), each with a mean of its own (or
        ``step.merge(train_loss, validation_loss)``, which sees more), and one forward and backward serve both; ``.grad`` gets the
        training rows' gradient. ``points=True`` gives every validation row a column: validation_loss is then the *sum* of the rows'
        own losses (``step.merge`` takes them as a vector).

        ``single_closure=True`` accepts ``optimizer.step(closure)`` of an optimizer that runs its closure once, before it moves
        anything, as those of torch do but LBFGS: it is run at that moment, inside the step. A second run raises.
        """
        step = Step(self._run, ids, self._begin_step, self._finish_step, merged, points)
        step.single_closure = single_closure
        return step

    def _begin_step(self) -> None:
        if not self._detach.alive:
            raise StepError("this accountant is closed; make a new one")
        self._attachment.go_last()

    def _finish_step(self, finished: FinishedStep, look: StepLook, moved: list[Scored] | None) -> None:
        """Write a finished step."""
        self._settle(self._run.take_left_over())
        shared = isinstance(self.ledger, Ledger) and self._setup.processes.rank > 0
        self.ledger.write(finished.record(with_accounts=not shared))
        self._run.finish(finished.result(), moved, look.hessian_checked)
        if finished.skipped:
            log.warning("inrun: step %d is not scored: %s", finished.step, finished.reason)

    def _settle(self, settled: list[SettledCredits]) -> None:
        """Hand over credits that are settled without a step."""
        settle = getattr(self.ledger, "settle", None)
        if settled and callable(settle):
            settle(settled)

    @property
    def last(self) -> StepResult:
        """Return the result of the last finished step."""
        if self._run.last is None:
            raise StepError("no step has finished yet")
        return self._run.last

    @property
    def steps_done(self) -> int:
        """Return how many steps were recorded, which is the number of the next one."""
        return self._run.steps_done

    @property
    def open_step(self) -> Step | None:
        """Return the step that is open, if any."""
        step = self._run.open_step
        return step if isinstance(step, Step) else None

    def seek(self, step: int, afresh: bool = True, rough: bool | None = None) -> None:
        """Go on as if this were the next step (for replays of a recorded run).

        ``afresh`` reuses nothing of steps before; ``rough`` tells whether the recorded step took more points (None: not known).
        """
        self._run.seek(step, afresh, rough)

    @property
    def refresh(self) -> int:
        """Return for how many steps a validation gradient serves."""
        return self._setup.refresh

    def hush(self) -> None:
        """Do not say how much memory waiting gradients take (for accountants that live for one step)."""
        self._run.hush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model run unobserved for the time of the block, inside a step or not."""
        with self._run.capture.paused():
            yield

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the model and its optimizers alone for the time of the block, so that another accountant may have them."""
        if self._run.open_step is not None:
            raise StepError("a step is open; leave it first")
        self._begin_step()
        self._setup.check_unchanged()
        model = self._setup.model
        self._attachment.detach_model()
        _attached.pop(model, None)
        self._run.suspend(True)
        try:
            yield
        finally:
            self._attachment.attach_model()
            _attached[model] = None
            self._run.suspend(False)

    # What a run says

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return self._setup.method.name

    @property
    def update(self) -> str:
        """Return the update, with "auto" resolved."""
        return self._setup.update

    @property
    def credit(self) -> str:
        """Return "whole" or "step": which credit is kept, with "auto" resolved."""
        return "step" if self._setup.credit is None else "whole"

    @property
    def coverage(self) -> Coverage:
        """Return which parameter is scored by which rule and form."""
        return self._setup.coverage()

    def about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the run."""
        rules: dict[str, int] = {}
        for row in self.coverage:
            rules[row.rule] = rules.get(row.rule, 0) + row.numel
        return {**self._setup.about(), "coverage": {"share": self.coverage.scored_share, "entries_by_rule": rules}}

    def scores(
        self,
        validation: Names = None,
        view: str = "plain",
        *,
        top: int | None = None,
        bottom: int | None = None,
        by: str | None = None,
        together: bool = False,
    ) -> Any:
        """Return one row per sample and validation set as an Arrow table.

        ``score`` is the credit so far (in the step game the sum of contributions), ``step_score`` the sum of the steps' own parts,
        ``pending`` the number of uses whose window is open.

        Of several processes, each may ask for itself: samples of others then have what they have written, and under whole credit
        the last steps' differences to the books are not spread yet. Where all ask ``together``, between two steps, the table is
        that of one process (with books in memory: of their own samples).

        Args:
            validation: A set, several, or None for all.
            view: How a use is seen: one of :data:`inrun.ledger.scores.VIEWS`.
            top: Only the so many highest scores of every set, with what is registered of these samples; the highest first.
            bottom: Only the so many lowest, the lowest first. With ``top`` both ends, from the highest down, no sample twice.
            by: A column of the registered samples (``accountant.ledger.register_samples``): one row per ``group`` and set, with the
                figures of ``inrun groups``; ``top`` and ``bottom`` then choose groups.
            together: All processes ask at once.
        """
        scores: Any = self._readable("scores")
        asked = {"validation": validation, "view": view, "top": top, "bottom": bottom, "by": by}
        credits = self._credits_to_show(together)
        if isinstance(self.ledger, (LedgerReader, MemoryLedger)):
            return scores(**asked, open_credits=credits)
        if (validation, view, top, bottom, by) != (None, "plain", None, None, None):
            raise LedgerError(
                f"the ledger {type(self.ledger).__name__} answers scores() alone; arguments are for inrun's own ledgers"
            )
        return scores() if self._run.credit is None else scores(open_credits=credits)

    def _credits_to_show(self, together: bool) -> list[SettledCredits]:
        """Return what is still being paid; of all processes where they ask together, once all have written what they have."""
        together = together and self._detach.alive and self._setup.processes.several
        credits = self.open_credits(together)
        if together and isinstance(self.ledger, Ledger):
            credits = of_all(self._setup.processes, credits)
            with self._setup.processes.together("scores", self.steps_done):  # what is read is what all have written
                self.ledger.flush_if_open()
        return credits

    @property
    def plot(self) -> Plots:
        """Return the figures: ``plot.groups()``, ``.samples()``, ``.over_time()``, ``.agreement(a, b)``, ``.books()``."""
        from inrun.figures import Plots

        return Plots(lambda: live_reader(self.ledger, self.open_credits()))

    def open_credits(self, together: bool = False) -> list[SettledCredits]:
        """Return the credit so far of uses whose window is open, as if they were settled now; none in the step game.

        Those of this process's samples; ``together`` as in :meth:`scores`.
        """
        return [] if self._run.credit is None else self._run.credit.so_far(together)

    def summary(self) -> Summary:
        """Return the books of the run so far, the worst steps, and what they mean.

        Under whole credit: data, decay, inherited (momentum from before scoring began) and residual (the quadrature's error on the
        whole move). In the step game: data, momentum, decay and residual (the method's error on the data's part of the move).
        ``print(accountant.summary())`` shows a page per validation set. Losses are measured at audited and at rough steps, and only
        those have a residual.
        """
        uses = getattr(self.ledger, "uses", None)
        if isinstance(self.ledger, LedgerReader):
            return summarise_run(self.ledger)
        accounts = self._readable("accounts")()
        return summarise(accounts, self.method, self.update, self.credit, uses() if callable(uses) else None)

    def _readable(self, what: str) -> Callable[[], Any]:
        found = getattr(self.ledger, what, None)
        if found is None:
            raise LedgerError(f"the ledger {type(self.ledger).__name__} only writes; ask the place it writes to")
        return found  # type: ignore[no-any-return]

    @property
    def communication(self) -> Communication:
        """Return what this rank exchanged with others in the last step, beside what DDP or FSDP exchange, in bytes."""
        return self._setup.processes.communication()

    def expected_communication(self, columns: int | None = None, microbatches: int = 1) -> dict[str, int]:
        """Return the bytes that a usual step will exchange from here on, by kind, computed from shapes (docs/distributed.md).

        Args:
            columns: Columns of validation losses, folds and points counted; as many as there are sets where they are not given.
            microbatches: Of a step.
        """
        return expected_payload(
            self._setup, self._run.credit, len(self._setup.validation.names) if columns is None else columns, microbatches
        )

    def held_bytes(self) -> int:
        """Return the memory that is held between steps: buffers to be reused and, under whole credit, all that the window needs."""
        return self._run.buffers.nbytes() + (0 if self._run.credit is None else self._run.credit.nbytes())

    def fidelity(self, sample_losses: Callable[[nn.Module], Tensor], **options: Any) -> FidelityReport:
        """Hold methods against the Shapley values of the real game of the next step; see :func:`inrun.fidelity.beside`."""
        from inrun.fidelity import beside

        return beside(self, sample_losses, **options)

    @property
    def model(self) -> nn.Module:
        """Return the model."""
        return self._setup.model

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers."""
        return list(self._setup.optimizers)

    def validation_loss(self, name: str | None = None) -> tuple[str, Callable[[nn.Module], Tensor]]:
        """Return the name of a validation set (default: the first) and its loss at the next step as a function of any model."""
        names = self._setup.validation.names
        name = names[0] if name is None else name
        if name not in names:
            raise ConfigurationError(f"validation is {name!r}; this accountant has {', '.join(names)}")
        return name, self._setup.validation.scalar(name, self.steps_done)

    def save(self, folder: str) -> None:
        """Write the contributions and accounts held in memory to a folder, as a ledger."""
        if not isinstance(self.ledger, MemoryLedger):
            raise LedgerError(f"the ledger {type(self.ledger).__name__} is not held in memory; it has its own place")
        self.ledger.save(folder, {**self.about(), "steps": self.steps_done})

    # Going on later

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain data."""
        mark = getattr(self.ledger, "mark", None)
        return {
            "version": 1,
            "method": self.method,
            "update": self.update,
            "game": self.credit,
            "refresh": self._setup.refresh,
            "forms": {site.name: site.form for site in self._setup.sites},
            "ledger": mark() if callable(mark) else None,
            **self._run.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from a saved state; the validation gradient is taken afresh at the next step.

        Of several processes each loads its own. Where their number has changed, every process gives the states of all that saved,
        in the order of their ranks: open windows are shared out anew.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        for one in states:
            if one.get("version") != 1:
                raise ConfigurationError(f"accountant state has version {one.get('version')!r}; this inrun reads version 1")
            for key, mine in (("method", self.method), ("update", self.update), ("game", self.credit)):
                if one.get(key, "step") != mine:
                    raise ConfigurationError(f"the saved run used {key}={one[key]!r}, this accountant has {mine!r}")
        self._run.load_state_dict(state_of_rank(states, self._setup.processes))

    def close(self, settle: bool = True, alone: bool = False) -> None:
        """Detach from model and optimizers. Scores stay readable.

        Under whole credit, uses whose window is open are settled; ``settle=False`` leaves that to a run that goes on from a saved
        state. All processes of a run close together, but for one that is left ``alone`` by an error.
        """
        if not self._detach.alive:
            return
        if settle:
            self._settle_rest(alone or self._setup.processes.broken)
        if self._owns_ledger and isinstance(self.ledger, Ledger):
            self.ledger.close()
        self._detach()
        self._run.buffers.free()
        _attached.pop(self._setup.model, None)

    def _settle_rest(self, alone: bool) -> None:
        """Under whole credit: settle what is open, and say what the end cut off."""
        credit = self._run.credit
        if credit is None:
            return
        rest = [*self._run.take_left_over(), *credit.settle_all(alone)]
        cut = [float(s.paid.mean()) for s in rest if len(s.paid) and s.paid.mean() < 0.99]
        if cut:
            log.info(
                "inrun: uses of the last %d steps are settled before their window has passed: %.0f %% of their push was paid",
                len(cut),
                100 * sum(cut) / len(cut),
            )
        self._settle(rest)

    def __repr__(self) -> str:
        """Return what is scored, and how far it is."""
        return describe_accountant(self)

    def _repr_html_(self) -> str:
        """Return the same for a notebook, with the books' verdict and the coverage in a line."""
        return accountant_html(self)

    @property
    def closed(self) -> bool:
        """Whether it has let go of the model."""
        return not self._detach.alive

    def __enter__(self) -> Accountant:
        """Return the accountant."""
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        """Close."""
        self.close(alone=kind is not None)


def _check_ledger(ledger: Any) -> None:
    is_path = isinstance(ledger, (str, os.PathLike))
    if ledger is not None and not is_path and not callable(getattr(ledger, "write", None)):
        raise LedgerError(
            f"ledger is {type(ledger).__name__}; accepted are a folder, an inrun.Ledger, or an object with write(record)"
        )
