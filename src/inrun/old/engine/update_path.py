"""The move that the optimizer is about to make, parameter by parameter, and the model at places along it.

u(0) = δ_∅ is what would happen without a gradient, u(G) the real move. Their difference is the data's part,
−gain ∘ G with the gain −P of the update rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import OptimizerError
from inrun.old.engine.buffers import Buffers
from inrun.old.engine.sites import Scored
from inrun.old.optimizers import UpdateRule
from inrun.torch_private import keep_version_counters

Shift = Callable[[Scored, Tensor], None]
Place = contextlib.AbstractContextManager[None]


class UpdatePath:
    """Gains and moves of the scored parameters in one step, made from the gradients the optimizers are about to use."""

    def __init__(self, scored: list[Scored], rules: list[UpdateRule], update: str, buffers: Buffers) -> None:
        """``update`` "frozen" takes the linearisation with the state before the step for the gain, "realised" the real factor."""
        self.scored, self.rules, self.buffers = scored, rules, buffers
        self.frozen = update == "frozen"
        self.realised = update == "realised"
        self.gains: dict[nn.Parameter, Tensor | float] = {}
        #: The optimizers that will step; None where that is not known yet.
        self._stepping: frozenset[int] | None = None

    def expect(self, optimizers: Collection[int]) -> None:
        """Take note of the optimizers whose parameters got gradient: others do not step, whatever zeros are in ``.grad``."""
        self._stepping = frozenset(optimizers)

    def moving(self) -> list[Scored]:
        """Return the parameters that the coming steps move: optimizers pass over those without a gradient."""
        with_gradient = [s for s in self.scored if s.parameter.grad is not None]
        return with_gradient if self._stepping is None else [s for s in with_gradient if s.optimizer in self._stepping]

    def gain(self, s: Scored) -> Tensor | float:
        """Return −P, learning rate included; made once per step."""
        if s.parameter not in self.gains:
            self.gains[s.parameter] = self._make_gain(s)
        return self.gains[s.parameter]

    def _make_gain(self, s: Scored) -> Tensor | float:
        rule, state, weight = self.rules[s.optimizer], s.state, s.weight
        gradient = s.used_gradient
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        if self.realised:
            return _realised_gain(s, rule, gradient.to(dtype))
        if rule.linear or (self.frozen and self._has_frozen_gain(s, rule, state)):
            ones = weight.new_ones((1, 1) if rule.linear else (1, *weight.shape), dtype=dtype)
            factor = rule.frozen(ones, weight, s.group, state)
            if factor is not None:
                scale = factor * float(s.group["lr"])
                return scale if rule.linear else ones[0].mul_(scale)
        return rule.secant(gradient.to(dtype), weight.to(dtype), s.group, state)

    @staticmethod
    def _has_frozen_gain(s: Scored, rule: UpdateRule, state: dict[str, Any]) -> bool:
        """Whether the gain before the step is usable: not of tables, output vocabularies and what never had a gradient."""
        classes = any(site.rule.rows_are_classes(name, s.parameter) for site, name in s.uses)
        return not s.some_sparse and not classes and rule.without_history(state) < s.weight.numel()

    def direction(self, s: Scored, raw: Tensor) -> Tensor:
        """Return v = gain ∘ ∇̄ for validation gradients ``[k, *shape]``, which are overwritten."""
        rule = self.rules[s.optimizer]
        if rule.elementwise or self.realised:
            return raw.mul_(self.gain(s))
        gradient = s.used_gradient.to(raw.dtype)
        return rule.direction(raw, gradient, s.weight.to(raw.dtype), s.group, s.state)

    def _add(self, s: Scored, out: Tensor, zero: float, data: float) -> None:
        """Add zero · δ_∅ + data · (data's part) to ``out``, which may be the weight itself: all is computed before writing."""
        rule, at, state = self.rules[s.optimizer], s.weight, s.state
        if self.realised:
            self._add_realised(s, out, zero, data)
            return
        if zero == 1.0 and data != 0.0 and out.data_ptr() == at.data_ptr() and self._travel(s, out, data):
            return
        if zero == 1.0 and data == 0.0 and out.data_ptr() == at.data_ptr() and rule.coast(out, s.group, state):
            return
        without = rule.zero_move(at, s.group, state)[1]
        if data == 0.0:
            out.add_(without, alpha=zero)
            return
        gradient = s.used_gradient
        if not rule.elementwise:
            whole = rule.move(gradient.to(torch.promote_types(gradient.dtype, torch.float32)), at, s.group, state)
            out.add_(without, alpha=zero - data).add_(whole, alpha=data)
            return
        gain = self.gain(s)
        out.add_(without, alpha=zero)
        if isinstance(gain, Tensor):
            wide = torch.promote_types(out.dtype, gain.dtype)  # a gain may be too large for half precision
            if wide == out.dtype:
                out.addcmul_(gain.to(wide), gradient.to(wide), value=-data)
            else:
                out.add_(gain * gradient.to(wide), alpha=-data)
        else:
            out.add_(gradient, alpha=-data * gain)

    def _add_realised(self, s: Scored, out: Tensor, zero: float, data: float) -> None:
        """The same where the data's part is −gain ∘ G with the realised gain, and the rest of the move is δ_∅."""
        gradient, at = s.used_gradient, s.weight
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        whole = self.rules[s.optimizer].move(wide, at.to(wide.dtype), s.group, s.state)
        out.add_(whole, alpha=zero).add_(wide * self.gain(s), alpha=zero - data)

    def _travel(self, s: Scored, weight: Tensor, fraction: float) -> bool:
        """Shift a weight and make its gain in one pass, where the rule has one and the gain is not made yet."""
        rule = self.rules[s.optimizer]
        whole = weight.dtype in (torch.float32, torch.float64)  # a gain must not be rounded to half precision
        if self.frozen or s.parameter in self.gains or not rule.elementwise or not whole:
            return False
        gradient = s.used_gradient
        gain = self.buffers.named(("gain", s), weight)
        if not rule.travel(weight, gradient, s.group, s.state, fraction, gain):
            return False
        self.gains[s.parameter] = gain
        return True

    @contextlib.contextmanager
    def shifted(self, moving: list[Scored], shift: Shift) -> Iterator[None]:
        """Let ``shift(s, weight)`` change the weights for the time of the block; then put them back, from copies."""
        saved: list[tuple[Scored, Tensor]] = []
        # The content comes back bit for bit, so graphs that saved these weights stay valid: do not count the writes.
        with keep_version_counters([s.weight for s in moving]):
            try:
                with torch.no_grad():
                    for s in moving:
                        weight = s.weight
                        saved.append((s, self.buffers.named(("weights", s), weight).copy_(weight)))
                        shift(s, weight)
                yield
            finally:
                with torch.no_grad():
                    for s, copy in reversed(saved):
                        s.weight.copy_(copy)  # asked for again: a forward may have given the parameter other memory

    def at_zero_move(self, moving: list[Scored]) -> Place:
        """Hold the model at w + δ_∅."""
        return self.shifted(moving, lambda s, weight: self._add(s, weight, 1.0, 0.0))

    def at_decay(self, moving: list[Scored]) -> Place | None:
        """Hold the model at w + the decay's part of δ_∅; None where it cannot be told apart from the optimizer's memory."""
        parts = {}
        for s in moving:
            parts[s] = self.rules[s.optimizer].zero_move(s.weight, s.group, s.state)[0]
            if parts[s] is None:
                return None
        return self.shifted(moving, lambda s, weight: _add_part(weight, parts[s]))

    def along(self, moving: list[Scored], fraction: float) -> Place:
        """Hold the model at w + δ_∅ + fraction · (data's part)."""
        return self.shifted(moving, lambda s, weight: self._add(s, weight, 1.0, fraction))

    def at(self, moving: list[Scored], where: dict[nn.Parameter, Tensor], scale: float) -> Place:
        """Hold the model at w + scale · d."""
        return self.shifted(moving, lambda s, weight: _add_part(weight, where[s.parameter], scale))

    @torch.no_grad()
    def twice_to_the_middle(self, moving: list[Scored]) -> dict[nn.Parameter, Tensor]:
        """Return δ_∅ + Δ = 2δ_∅ + data's part, per parameter."""
        found = {}
        for s in moving:
            found[s.parameter] = self.buffers.named(("move", s), s.weight).zero_()
            self._add(s, found[s.parameter], 2.0, 1.0)
        return found


def _realised_gain(s: Scored, rule: UpdateRule, gradient: Tensor) -> Tensor | float:
    """Return the factor that the step really applies to its own gradient."""
    recall = rule.recall(s.group, s.state)
    if recall is None:
        raise OptimizerError(
            f'update="realised": the moves of the optimizer of {s.name} have no unique shares; take update="secant"'
        )
    found = rule.realised(gradient, s.weight.to(gradient.dtype), s.group, s.state)
    sign = -1.0 if s.group.get("maximize", False) or getattr(rule, "maximize", False) else 1.0
    gain = found.gain if found.entry is None else found.gain * found.entry
    return gain * (found.pace * recall.own * sign)


def _add_part(weight: Tensor, part: Tensor | None, scale: float = 1.0) -> None:
    assert part is not None
    weight.add_(part, alpha=scale)
