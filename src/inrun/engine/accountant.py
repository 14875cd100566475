"""The accountant: scores every sample of a training run while it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from inrun.analysis import Summary, summarise
from inrun.engine.audit import Schedule
from inrun.engine.buffers import Buffers
from inrun.engine.capture import Capture, Expected
from inrun.engine.coverage import Coverage, CoverageRow
from inrun.engine.curvature import add_scaled, bent_by_differences, check_hessian, own
from inrun.engine.directions import Directions, Timing
from inrun.engine.moves import Moves
from inrun.engine.results import make_record, make_result
from inrun.engine.sites import Scored, find_sites, scored_parameters
from inrun.engine.step import Step, StepResult
from inrun.engine.validation import Column, Gradients, Loss, Validation
from inrun.engine.watch import GradientWatch
from inrun.errors import ConfigurationError, CoverageError, LedgerError, OptimizerError, StepError
from inrun.ledger import Ledger, LedgerWriter, MemoryLedger
from inrun.methods import find_method, find_quadrature, resolve_update
from inrun.optimizers import UpdateRule, find_update, plain

if TYPE_CHECKING:
    from inrun.fidelity import FidelityReport

log = logging.getLogger("inrun")
#: Bytes of kept contractions from which on their size is said without being asked.
WORTH_SAYING = 10_000_000
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
        method: Where the validation gradient is taken: "first" (at the weights before the step), "lookahead" (after
            momentum and decay), "midpoint" (in the middle of the data's part of the move), "second" (before the step,
            bent by the Hessian; Theorem 2 of the paper for SGD). The first two keep nothing beyond the backward.
        update: What a sample's gradient does to the weights: "sgd" (the paper's proxy, lr · g), "frozen" (the
            optimizer's own rule with its state as it stands before the step), "secant" (its share of the real move),
            "auto" (frozen for the first two methods, secant for the others).
        audit_every: Check conservation and measure the books at every k-th step; 1 = every step, 0 = never,
            None = as often as costs under one per cent.
        ledger: Where contributions go: None for memory, a folder for books on disk, an ``inrun.Ledger`` (to resume one), or an
            object with ``write(record)``.
        refresh: Reuse the validation gradient for this many steps.
        bitwise: Leave every weight gradient to the framework, so that training is bit for bit the same.
        form: How layers contract: "shared" (weight gradient and contraction from the same products), "project" (one
            more product, the weight gradient stays the framework's), "auto" (by cost).
        validation_mode: "eval" (default) or "train": the mode the model is in during validation passes.
        check_rows: Verify at the first step, by exchanging a sample, that rows belong to samples.
        quadrature: For "midpoint": by which points the gradient is averaged along the data's part of the move:
            "midpoint" (default), "trapezoid", "simpson", "gauss2" to "gauss32".
        hessian: For "second": "double" (double backward) or "differences" (two more gradients, for losses that cannot be
            differentiated twice; on a small GPT exact to about 0.1 % in float32).
        deferred_memory: Bytes, or text such as "4GB", that contractions may keep from the backward until the optimizer
            steps; None for no limit. What is needed is said at the first step; more than allowed raises.
        about: What ``run.json`` of a new ledger says beside method, model and coverage (plain data).
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
        ledger: LedgerWriter | str | os.PathLike[str] | None = None,
        refresh: int = 1,
        bitwise: bool = False,
        form: str = "auto",
        validation_mode: str = "eval",
        check_rows: bool = True,
        quadrature: str | None = None,
        hessian: str = "double",
        deferred_memory: int | str | None = None,
        about: Mapping[str, Any] | None = None,
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
        is_path = isinstance(ledger, (str, os.PathLike))
        if ledger is not None and not is_path and not callable(getattr(ledger, "write", None)):
            raise LedgerError(
                f"ledger is {type(ledger).__name__}; accepted are a folder, an inrun.Ledger, or an object with write(record)"
            )
        if model in _attached:
            raise ConfigurationError("this model already has an accountant; close() it before making another")
        self.method = find_method(method)
        self.update = resolve_update(update, self.method)
        rules = [plain if self.update == "sgd" else find_update(o) for o in self.optimizers]
        self.quadrature = find_quadrature(quadrature, self.method)
        if hessian not in ("double", "differences"):
            raise ConfigurationError(f'hessian is {hessian!r}; accepted are "double" and "differences"')
        if refresh > 1 and self.method.deferred:
            raise ConfigurationError(
                f'refresh={refresh} reuses validation gradients; method="{method}" takes its own at every move'
            )
        self.hessian, self.deferred_memory = hessian, parse_bytes(deferred_memory)
        if form not in ("auto", "shared", "project"):
            raise ConfigurationError(f"form is {form!r}; accepted are auto, shared and project")
        if bitwise and form == "shared":
            raise ConfigurationError("bitwise=True leaves weight gradients to the framework, which form='shared' replaces")
        self.model, self.refresh = model, refresh
        self.validation = Validation(model, validation, validation_mode)
        by_parameter = scored_parameters(model, self.optimizers)
        self.scored = list(by_parameter.values())
        sites = find_sites(model, by_parameter)
        self.buffers = Buffers()
        self.moves = Moves(self.scored, rules, self.update == "frozen", self.buffers)
        self.real_moves = self._real_moves(rules)
        timing = Timing.AT_STEP if self.method.deferred else Timing.GAIN_AT_STEP if self.update == "secant" else Timing.BEFORE
        self.directions = Directions(self.moves, self.optimizers, timing, keep_raw=refresh > 1)
        in_groups = {p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
        self._foreign = in_groups - set(by_parameter)
        if self._foreign:
            log.warning("inrun: %d optimizer parameters are not part of the model and are not scored", len(self._foreign))
        self.audits = Schedule(audit_every)
        self._owns_ledger = is_path
        self.steps_done = 0
        self.open_step: Step | None = None
        self._last: StepResult | None = None
        self._fresh: tuple[list[Column], Tensor] | None = None
        self._moved: list[Scored] | None = None
        self.told_memory = self._hessian_checked = False
        self._fresh_since = 0
        self._closed = False
        self._warned_outside = self._suspended = False
        self.device = self.scored[0].parameter.device
        double = any(s.parameter.dtype == torch.float64 for s in self.scored)
        self.probe_dtype = torch.float64 if double else torch.float32
        self.lane_count = sum(len(o.param_groups) for o in self.optimizers)
        self.watch = GradientWatch(self.scored, active=lambda: self.open_step is not None)
        self.capture = Capture(model, sites, "project" if bitwise else form, check_rows)
        self.capture.after_forward = self._after_forward
        self.capture.in_step = lambda: self.open_step is not None
        self.ledger = self._begin_books(ledger, about or {})
        self._hooks = [o.register_step_pre_hook(self._before_step(i)) for i, o in enumerate(self.optimizers)]
        self._hooks += [o.register_step_post_hook(self._after_step(i)) for i, o in enumerate(self.optimizers)]
        _attached[model] = None
        self._tell_fallbacks()

    def _begin_books(self, ledger: LedgerWriter | str | os.PathLike[str] | None, about: Mapping[str, Any]) -> LedgerWriter:
        if not isinstance(ledger, (str, os.PathLike)):
            return MemoryLedger() if ledger is None else ledger
        rules: dict[str, int] = {}
        for row in self.coverage:
            rules[row.rule] = rules.get(row.rule, 0) + row.numel
        coverage = {"share": self.coverage.scored_share, "entries_by_rule": rules}
        try:
            return Ledger(os.fspath(ledger), about={**self._about(), "coverage": coverage, **about})
        except BaseException:
            self.capture.close()
            self.watch.close()
            raise

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

    def go_last(self) -> None:
        """Put our hooks behind those that others registered since, which may clip: ours must see what the optimizer uses."""
        for optimizer, hook in zip(self.optimizers, self._hooks, strict=False):
            hooks = optimizer._optimizer_step_pre_hooks
            hooks[hook.id] = hooks.pop(hook.id)

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

    def _real_moves(self, rules: list[UpdateRule]) -> Moves | None:
        """Return what the optimizers really do, for the books; None where one of them has no rule."""
        if self.update != "sgd":
            return self.moves
        try:
            return Moves(self.scored, [find_update(o) for o in self.optimizers], False, self.buffers)
        except OptimizerError:
            return None

    def expected(self) -> Expected:
        """Return a new count of what a step keeps."""
        return Expected(self.deferred_memory, self.method.name)

    def prepare_directions(self, step: Step) -> None:
        """Before the backward: take validation gradients (or reuse them) and make the directions that are known by now."""
        self.moves.forget()
        if self.method.deferred:
            self.directions.forget()
            return
        if self._fresh is None or self.steps_done % self.refresh == 0:
            self.directions.forget()
            gradients = self._gradients_before()
            self.directions.set_raw(gradients.raw)
            self._fresh, self._fresh_since = (gradients.columns, gradients.losses), self.steps_done
        audited = step.audited
        with torch.no_grad():
            self.directions.prepare(count=audited)
        step.columns, step.losses = self._fresh
        if not self.directions.keep_raw:
            self._fresh = None
        if self.method.name == "first" and self._fresh_since == self.steps_done:
            step.at.before = step.losses
        elif audited:
            step.at.before = self.validation.losses(self.steps_done)  # this step's loss, not that where the gradient was taken

    def _gradients_before(self) -> Gradients:
        parameters = [s.parameter for s in self.scored]
        if self.method.name == "first":
            return self.validation.gradients(parameters, self.steps_done)
        # Which parameters will get a gradient is not known yet: those that did in the last step.
        with self.moves.at_zero_move(self.scored if self._moved is None else self._moved):
            return self.validation.gradients(parameters, self.steps_done)

    def prepare_at_step(self, step: Step) -> None:
        """When the optimizers are about to step: take the validation gradients that the method averages along the move."""
        parameters, moving = [s.parameter for s in self.scored], self.moves.moving()
        if self.method.name == "second":
            found = self._bent_gradients(parameters, moving)
            step.at.before = found.losses
        else:
            found = self._averaged_gradients(parameters, moving)
        self.directions.set_raw(found.raw)
        step.columns, step.losses = found.columns, found.losses

    def _bent_gradients(self, parameters: list[nn.Parameter], moving: list[Scored]) -> Gradients:
        """Return ∇ℓ(w) + ½H(δ_∅ + Δ)."""
        move = self.moves.twice_to_the_middle(moving)
        if self.hessian == "differences":
            return bent_by_differences(self.validation, self.moves, parameters, moving, move, self.steps_done)[0]
        found = self.validation.bent_gradients(parameters, self.steps_done, move)
        if not self._hessian_checked:
            found = own(found)  # the check takes gradients too, into the same buffers
            self._hessian_checked = check_hessian(found, self.validation, self.moves, parameters, moving, move, self.steps_done)
        return found

    def _averaged_gradients(self, parameters: list[nn.Parameter], moving: list[Scored]) -> Gradients:
        """Return Σ_q w_q ∇ℓ(w + δ_∅ + s_q · data)."""
        average: Gradients | None = None
        for place, weight in self.quadrature:
            with self.moves.along(moving, place):
                found = self.validation.gradients(parameters, self.steps_done)
            if len(self.quadrature) == 1:
                return found
            if average is None:
                average = own(found)
                average.losses = average.losses * weight
                for g in average.raw:
                    if g is not None:
                        g.mul_(weight)
            else:
                average.losses = average.losses + weight * found.losses
                add_scaled(average, found, weight)
        assert average is not None
        return average

    def _after_forward(self) -> None:
        """Say once, after the first forward and before any of it is taken, what waiting contractions keep."""
        step = self.open_step
        if self.told_memory or step is None or step.expected is None:
            return
        self.told_memory = True
        small = step.expected.nbytes < WORTH_SAYING and self.deferred_memory is None
        if self.directions.timing is Timing.BEFORE or small:
            return
        rows = sum(m.n for m in step.microbatches)
        of_model = sum(s.parameter.nbytes for s in self.scored)
        log.warning(
            "inrun: %s+%s keeps %.0f MB for %d rows from the backward until the optimizer steps, and about %.0f MB for weights "
            "and gains; rows of further microbatches of a step add up (limit: %s)",
            self.method.name,
            self.update,
            step.expected.nbytes / 1e6,
            rows,
            3 * of_model / 1e6,
            "none" if self.deferred_memory is None else f"{self.deferred_memory / 1e6:,.0f} MB",
        )

    def _before_step(self, index: int) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.open_step is None:
                if not self._warned_outside and not self._suspended:
                    log.warning("inrun: optimizer.step() outside accountant.step(); its samples are not scored")
                    self._warned_outside = True
                return
            # torch hands over the arguments of the unbound step: the optimizer itself comes first.
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is not None:
                raise StepError("optimizer.step(closure) runs the model several times per step and cannot be scored")
            if torch._C._current_graph_task_id() != -1:
                raise StepError("the optimizer steps inside the backward; optimizer-in-backward cannot be scored")
            # A subclass whose step calls its parent's runs the hooks twice: only the outer call is the step.
            self.open_step.depth[index] = self.open_step.depth.get(index, 0) + 1
            if self.open_step.depth[index] > 1:
                return
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None and float(found_inf) > 0:
                self.open_step.skipped = "gradient is not finite and the optimizer did not step"
                self.open_step.held_back = True
            self.open_step.settle(index)

        return hook

    def _after_step(self, index: int) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.open_step is not None:
                self.open_step.depth[index] = self.open_step.depth.get(index, 1) - 1
                if self.open_step.depth[index] <= 0:
                    self.open_step.completed.add(index)

        return hook

    def record(self, step: Step, contributions: Tensor) -> None:
        """Write a finished step."""
        if step.audited and step.skipped is None:
            began = time.perf_counter()
            step.at.after = self.validation.losses(self.steps_done)
            self.audits.spent(time.perf_counter() - began)
        if not step.columns:
            step.columns = [Column(name, None) for name in self.validation.names]
            contributions = contributions.new_zeros(len(contributions), len(step.columns))
        ids = torch.cat([m.ids for m in step.microbatches])
        clip = tuple(step.settled.get(i, 1.0) for i in range(len(self.optimizers)))
        self._moved = self.moves.scored if step.skipped else step.moved
        result = make_result(step, self.steps_done, ids, contributions, clip, self.directions.zero_gains)
        self.ledger.write(make_record(step, result, contributions))
        self._last = result
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

    def summary(self) -> Summary:
        """Return the books of the run so far: data, momentum, decay, residual, the worst steps, and what they mean.

        ``print(accountant.summary())`` shows a page per validation set. Only audited steps measure the books.
        """
        accounts = getattr(self.ledger, "accounts", None)
        if accounts is None:
            raise LedgerError(f"the ledger {type(self.ledger).__name__} only writes; ask the place it writes to")
        return summarise(accounts(), self.method.name, self.update)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the model and its optimizers alone for the time of the block, so that another accountant may have them."""
        if self.open_step is not None:
            raise StepError("a step is open; leave it first")
        self.check_open()
        self.capture.close()
        _attached.pop(self.model, None)
        self._suspended = True
        try:
            yield
        finally:
            self.capture.attach()
            _attached[self.model] = None
            self._suspended = False

    def fidelity(
        self,
        sample_losses: Callable[[nn.Module], Tensor],
        *,
        validation: str | None = None,
        choices: Sequence[tuple[str, str]] | None = None,
        max_norm: float | None = None,
        permutations: int = 300,
        exact: bool = False,
        subsets: int = 0,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> FidelityReport:
        """Hold methods against the Shapley values of the real game of the next step, on this very model.

        The step is taken back: weights, optimizer state, gradients and random state stay as they are.

        Args:
            sample_losses: ``model -> [n]``, each sample's part of the batch loss of the step to look at.
            validation: Which validation set (default: the first).
            choices: (method, update) pairs; default: this accountant's, and the usual ones beside it.
            max_norm: What the training loop gives to ``clip_grad_norm_``.
            permutations: Permutations of the truth; ``exact`` enumerates all subsets instead (at most 16 samples).
            exact: See ``permutations``.
            subsets: Compare Taylor utilities with the true utility on so many random subsets.
            seed: Of the permutations.
            progress: Called with done and total.

        Returns:
            Spearman, Pearson, RMSE and residual of each choice; ``str()`` is a table, ``save_picture`` draws the scatter.
        """
        from inrun.fidelity import CHOICES, fidelity

        name = self.validation.names[0] if validation is None else validation
        if name not in self.validation.names:
            raise ConfigurationError(f"validation is {name!r}; this accountant has {', '.join(self.validation.names)}")
        own = (self.method.name, self.update)
        with self.suspended():
            return fidelity(
                self.model,
                self.optimizers,
                self.validation.scalar(name, self.steps_done),
                sample_losses,
                choices=choices or (CHOICES if own in CHOICES else (*CHOICES, own)),
                max_norm=max_norm,
                permutations=permutations,
                exact=exact,
                subsets=subsets,
                seed=seed,
                step=self.steps_done,
                name=name,
                progress=progress,
            )

    def save(self, folder: str) -> None:
        """Write the contributions and accounts held in memory to a folder of Parquet files (``inrun audit`` reads it)."""
        if not isinstance(self.ledger, MemoryLedger):
            raise LedgerError(f"the ledger {type(self.ledger).__name__} is not held in memory; it has its own place")
        self.ledger.save(folder, {**self._about(), "steps": self.steps_done})

    def _about(self) -> dict[str, Any]:
        """Return what ``run.json`` says of the run."""
        return {
            "method": self.method.name,
            "update": self.update,
            "validation": self.validation.names,
            "optimizers": [type(o).__name__ for o in self.optimizers],
            "model": type(self.model).__name__,
            "parameters": sum(s.parameter.numel() for s in self.scored),
        }

    @property
    def coverage(self) -> Coverage:
        """Return which parameter is scored by which rule and form."""
        rows = []
        moved = {s.parameter for s in self.scored}
        for s in self.scored:
            for site, _ in s.uses:
                waits = self.directions.waits_at(s, site.rule.sparse)
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
            "refresh": self.refresh,
            "audit": self.audits.state_dict(),
            "moved": None if self._moved is None else [s.name for s in self._moved],
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
        moved = state.get("moved")
        self._moved = None if moved is None else [s for s in self.scored if s.name in set(moved)]
        self.audits.load_state_dict(state["audit"])

    def close(self) -> None:
        """Detach from model and optimizers. Scores stay readable."""
        if self._closed:
            return
        self._closed = True
        if self._owns_ledger and isinstance(self.ledger, Ledger):
            self.ledger.close()
        self.capture.close()
        self.watch.close()
        for hook in self._hooks:
            hook.remove()
        self.directions.forget()
        self.moves.forget()
        self.buffers.free()
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


def parse_bytes(given: int | str | None) -> int | None:
    """Read a number of bytes, or text such as "500MB" or "4 GB"."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b\s*", str(given).lower())
    if not found:
        raise ConfigurationError(
            f'deferred_memory is {given!r}; accepted are bytes as an integer, or text such as "500MB" or "4GB"'
        )
    return int(float(found.group(1)) * 1000.0 ** " kmgt".index(found.group(2) or " "))
