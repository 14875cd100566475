"""The directions of one step: v = gain ∘ ∇ℓ per parameter, known before the backward or only at the optimizer's step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inrun.errors import StepError
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Scored
from inrun.old.engine.update_path import UpdatePath
from inrun.old.layers import SketchPlan
from inrun.old.optimizers import UpdateRule

#: Columns from which the factor of a row is taken.
COLUMNS = 32
#: Steps in which parameters are looked at for history at every step; later only when audited.
EARLY = 20


class Timing(enum.Enum):
    """When directions are known."""

    #: Before the backward, where the update rule has a gain by then.
    BEFORE = enum.auto()
    #: The validation gradient before the backward, the gain of a nonlinear update at the optimizer's step.
    GAIN_AT_STEP = enum.auto()
    #: Both at the optimizer's step.
    AT_STEP = enum.auto()

    def waits(self, rule: UpdateRule) -> bool:
        """Whether all contractions of an update wait for the optimizer's step."""
        return self is not Timing.BEFORE and (self is Timing.AT_STEP or not rule.linear)

    def waits_at(self, rule: UpdateRule, sparse: bool) -> bool:
        """Whether the contraction of one use of a parameter waits for the optimizer's step."""
        streams = type(rule).frozen is not UpdateRule.frozen
        return self.waits(rule) or (not rule.linear and (sparse or not streams))


@dataclass
class Direction:
    """Directions ``[k, *shape]`` of one parameter, per unit of learning rate; ``scale`` is still to be applied."""

    v: Tensor
    scale: float


@dataclass
class Sketch:
    """How the gradients of one parameter are sketched in a step: ``signs`` ``[entries]``, ``weights`` ``[segments]``."""

    plan: SketchPlan
    signs: Tensor
    weights: Tensor


def _plain(value: Any) -> Any:
    """Return an option as plain numbers, whatever tensors it holds."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(_plain(x) for x in value) if isinstance(value, (tuple, list)) else value


class History:
    """Which parameters have had a gradient, as far as the optimizers' states tell; lasts over steps.

    Some: looked at again after the early steps only when audited. All: only when audited.
    """

    def __init__(self, processes: Processes) -> None:
        """Nothing is known yet."""
        self.processes = processes
        self._with_some: dict[nn.Parameter, dict[str, Any]] = {}
        self._with_all: dict[nn.Parameter, dict[str, Any]] = {}

    def missing(self, s: Scored, rule: UpdateRule, state: dict[str, Any], count: bool) -> int | None:
        """Return how many entries never had a gradient; None where that need not be looked at again."""
        p = s.parameter
        held = s.owner.state.get(p, state)
        if not count and self._with_all.get(p) is held:
            return None
        if not count and self._with_some.get(p) is held and float(state.get("step", 0)) > EARLY:
            return None
        missing = self._missing(s, rule, state)
        if missing < p.numel() and state:
            self._with_some[p] = held
        if missing == 0 and state:
            self._with_all[p] = held
        return missing

    def _missing(self, s: Scored, rule: UpdateRule, state: dict[str, Any]) -> int:
        if s.shards is None:
            return rule.without_history(state)
        here = s.shards.local.numel() if not state else rule.without_history(state)
        return int(self.processes.joined(torch.tensor([here])))


class Asks(Protocol):
    """What a step asks of its backward, as microbatches and factors see it."""

    streaming: dict[nn.Parameter, Direction]
    #: Entries that score 0 because the optimizer has no history of them.
    zero_gains: int
    #: Whether what is asked of a use that need not wait is inner products alone.
    only_contracts: bool

    def check_options(self, optimizer: int) -> None:
        """Raise if options changed since directions were made with them."""
        ...

    def stream(self, s: Scored, sparse: bool) -> Direction | None:
        """Return the direction for a use that contracts inside the backward, or None."""
        ...

    def sketch(self, s: Scored) -> Sketch | None:
        """Return how a parameter's gradients are sketched, or None."""
        ...

    def by_rows(self, s: Scored) -> bool:
        """Whether contractions leave the rows of a parameter apart."""
        ...

    def is_zero(self, s: Scored) -> bool:
        """Whether a parameter scores 0."""
        ...


class Directions:
    """Makes and holds the directions of a step."""

    only_contracts = True

    def __init__(
        self,
        path: UpdatePath,
        optimizers: list[torch.optim.Optimizer],
        timing: Timing,
        history: History,
        keep_raw: bool,
    ) -> None:
        """``keep_raw`` tells that the raw gradients serve more than one step and must not be overwritten."""
        self.path, self.scored, self.rules = path, path.scored, path.rules
        self.optimizers, self.timing, self.history, self.keep_raw = optimizers, timing, history, keep_raw
        self.raw: dict[nn.Parameter, Tensor] = {}
        self.streaming: dict[nn.Parameter, Direction] = {}
        self.ready: dict[nn.Parameter, Tensor] = {}
        #: Entries that score 0 because the optimizer has no history of them.
        self.zero_gains = 0
        #: Options of all groups as they stood when directions were made before the backward.
        self._options: list[list[dict[str, Any]]] = []

    def take(self, raw: list[Tensor | None]) -> None:
        """Take validation gradients, one per scored parameter."""
        self.raw = {s.parameter: g for s, g in zip(self.scored, raw, strict=True) if g is not None}

    def _blank(self, s: Scored, rule: UpdateRule, state: dict[str, Any], count: bool) -> bool:
        """Whether a parameter never had a gradient (LoRA's A while B is 0): it must wait for the real one, like a new one."""
        missing = self.history.missing(s, rule, state, count)
        self.zero_gains += missing or 0
        return missing == s.parameter.numel()

    @torch.no_grad()
    def prepare(self, count: bool) -> None:
        """Make the directions that are known before the backward; ``count`` entries whose gain is 0 for lack of history."""
        self._options = [self._options_of(i) for i in range(len(self.optimizers))]
        made: dict[UpdateRule, list[tuple[Scored, tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]]]] = {}
        for s in self.scored:
            raw = self.raw.get(s.parameter)
            rule = self.rules[s.optimizer]
            if raw is None or self.timing.waits(rule):
                continue
            state = s.state
            if rule.linear:
                factor = rule.frozen(raw, s.weight, s.group, state)
                assert factor is not None
                self.streaming[s.parameter] = Direction(raw, factor)
            elif not s.only_sparse and not self._blank(s, rule, state, count):
                # A table that is also a head needs its raw gradient again when the optimizer steps.
                spare = self.keep_raw or (s.some_sparse and not rule.can_thaw(state))
                v = raw.clone() if spare else raw
                made.setdefault(rule, []).append((s, (v, s.weight, s.group, state)))
        for rule, items in made.items():
            for (s, (v, *_)), factor in zip(items, rule.frozen_each([item for _, item in items]), strict=True):
                if factor is not None:
                    self.streaming[s.parameter] = Direction(v, factor)

    def _options_of(self, optimizer: int) -> list[dict[str, Any]]:
        """Return the groups' options that a gain depends on; the learning rate is read when the optimizer steps."""
        names = ["betas", "momentum", "dampening", "nesterov", "eps", "amsgrad", "maximize"]
        if self.rules[optimizer].rate_is_state:
            names.append("lr")
        groups = self.optimizers[optimizer].param_groups
        return [{k: _plain(group[k]) for k in names if k in group} for group in groups]

    def check_options(self, optimizer: int) -> None:
        """Raise if options changed since directions were made with them."""
        if self._options and any(s.optimizer == optimizer and s.parameter in self.streaming for s in self.scored):
            for before, now in zip(self._options[optimizer], self._options_of(optimizer), strict=True):
                changed = [name for name in now if now[name] != before.get(name)]
                if changed:
                    raise StepError(
                        f"{', '.join(changed)} of the optimizer changed inside the step, after contributions had begun to be made "
                        "with it; set options before the step opens (a scheduler steps after the optimizer)"
                    )

    def stream(self, s: Scored, sparse: bool) -> Direction | None:
        """Return the direction for a use that contracts inside the backward, or None if it must wait.

        Embedding look-ups wait unless the update is linear: rows without history have no usable gain before the step.
        """
        if sparse and not self.rules[s.optimizer].linear:
            return None
        return self.streaming.get(s.parameter)

    def sketch(self, s: Scored) -> Sketch | None:
        """Return how a parameter's gradients are sketched; the step game keeps no sketches."""
        return None

    def by_rows(self, s: Scored) -> bool:
        """Whether the gain of a parameter with one row per class is corrected row by row when the optimizer steps."""
        return not self.rules[s.optimizer].linear

    def is_zero(self, s: Scored) -> bool:
        """Whether no validation loss depends on this parameter, so that it scores 0 (unknown before the step: no)."""
        return self.timing is not Timing.AT_STEP and s.parameter not in self.raw

    @torch.no_grad()
    def complete(self) -> None:
        """Make all waiting directions at once: when one of several optimizers has stepped, others' states are no help."""
        self.ready = {}
        for s in self.scored:
            raw = self.raw.get(s.parameter)
            if raw is not None and s.parameter.grad is not None and self.timing.waits(self.rules[s.optimizer]):
                self.ready[s.parameter] = self.path.direction(s, raw.clone() if self.keep_raw else raw)

    @torch.no_grad()
    def deferred(self, s: Scored, rows: Tensor | None) -> Tensor | None:
        """Make the direction from the gradient the optimizer is about to use, for all rows or some: ``[k, ...]``.

        None where no validation loss depends on the parameter.
        """
        p = s.parameter
        if p not in self.raw:
            return None
        if p in self.ready:
            return self.ready[p] if rows is None else self.ready[p].index_select(1, rows)
        state = s.state
        raw, grad, weight = self.raw[p], s.used_gradient, s.weight
        if rows is not None:
            raw, grad, weight = raw.index_select(1, rows), grad.index_select(0, rows), weight.index_select(0, rows)
            whole = [k for k, x in state.items() if isinstance(x, Tensor) and x.shape == self.raw[p].shape[1:]]
            state = dict(state) | {k: state[k].index_select(0, rows) for k in whole}
        rule, streamed = self.rules[s.optimizer], self.streaming.get(p)
        if streamed is not None and streamed.v is self.raw[p] and not rule.linear:
            raw = rule.thaw(raw, s.group, state)
        return rule.direction(raw, grad.to(raw.dtype), weight.to(raw.dtype), s.group, state)

    @torch.no_grad()
    def whole(self, s: Scored) -> Tensor | None:
        """Return a parameter's whole direction as its samples were contracted with it, ``[k, *shape]``; None where it scores 0."""
        p = s.parameter
        if p not in self.raw or p in self.streaming:
            return self.streaming[p].v if p in self.streaming else None
        if p in self.ready:
            return self.ready[p]
        kept = self.raw[p]
        self.raw[p] = kept.clone()  # a direction may be made in place
        try:
            return self.deferred(s, None)
        finally:
            self.raw[p] = kept

    @torch.no_grad()
    def row_factors(self, s: Scored) -> Tensor:
        """Return, per row of an output vocabulary, the real step's gain over the streamed one, ``[p]``, learning rate included.

        A word that is rare has a tiny second moment until it occurs, and then a gradient a thousand times larger: the
        gain before the step is far too large for that row, and for no other. The factor is the ratio of the row's mean
        secant gain to its mean frozen gain, over the first columns.
        """
        rule, state = self.rules[s.optimizer], s.state
        columns = slice(COLUMNS)
        some = {k: x[:, columns] if isinstance(x, Tensor) and x.shape == s.weight.shape else x for k, x in state.items()}
        weight, grad = s.weight[:, columns], s.used_gradient[:, columns]
        frozen = torch.ones((1, *weight.shape), dtype=weight.dtype, device=weight.device)
        scale = rule.frozen(frozen, weight, s.group, some)
        assert scale is not None
        secant = rule.secant(grad, weight, s.group, some)
        before = frozen[0].sum(1) * scale
        after = secant.sum(1) if isinstance(secant, Tensor) else secant * weight.shape[1]
        found = torch.where(before == 0, torch.zeros_like(before), after / torch.where(before == 0, 1.0, before))
        return s.whole(found.unsqueeze(0))[0]
