"""RMSprop, Adagrad, Adadelta and Adafactor: gradients divided by their own running size.

With z = ±G + λw (Adafactor's λ is decoupled):

    RMSprop   s_t = αs + (1−α)z², centered: minus the square of a_t = αa + (1−α)z
              b ← μb + z / (√s_t + ε);  w ← w − lr·b
    Adagrad   s_t = s + z²;  w ← w − lr / (1 + (t−1)·decay) · z / (√s_t + ε)
    Adadelta  s_t = ρs + (1−ρ)z²;  δ = √((d + ε) / (s_t + ε)) z;  w ← w − lr·δ;  d ← ρd + (1−ρ)δ²
    Adafactor w ← w − lr·λ·w − α·F∘z / max(1, rms(F∘z) / d),  F = 1 / √(row·column / mean(row))

Adafactor's row and column are running means of z² along the other dimension; vectors keep all of
z². F and the clipping by d depend on the whole tensor and are held fixed, like every A.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from inrun.optimizers import lists
from inrun.optimizers.lists import Tensors, scaled_, wide
from inrun.optimizers.registry import register
from inrun.optimizers.rule import NO_MEMORY, GroupStep, Memory, Scalar, State, UpdateRule
from inrun.optimizers.sgd import plain_rate


@register(torch.optim.RMSprop)
class RMSpropRule(UpdateRule):
    """With momentum q is the buffer, A = lr, and z is divided by its size as it enters."""

    adaptive = elementwise = True
    buffer = "momentum_buffer"
    decoupled = False

    def memory(self, step: GroupStep) -> list[Memory] | None:
        """The buffer forgets by μ and takes all of what comes."""
        momentum = step.option("momentum")
        return [Memory(momentum, 1.0) if momentum > 0.0 else NO_MEMORY] * len(step.states)

    def pushed(self, step: GroupStep) -> list[Tensor]:
        """Return the buffer, or z."""
        return super().pushed(step) if step.option("momentum") > 0.0 else self.entering(step)

    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr; without momentum lr / (√s + ε), 0 where s is 0."""
        return plain_rate(step) if step.option("momentum") > 0.0 else self._over(step, step.lr)

    def entry(self, step: GroupStep) -> list[Tensor] | None:
        """Return 1 / (√s + ε) where there is momentum, 0 where s is 0."""
        return self._over(step, 1.0) if step.option("momentum") > 0.0 else None

    @torch.no_grad()
    def _over(self, step: GroupStep, rate: Any) -> list[Tensor]:
        second, eps = step.kept("square_avg"), step.option("eps")
        if not step.group["centered"]:
            return lists.over_roots(second, eps, rate)
        mean = step.kept("grad_avg")
        sizes = list(torch._foreach_addcmul(second, mean, mean, value=-1.0))
        torch._foreach_sqrt_(sizes)
        return lists.quotient(second, lists.shifted_(sizes, eps), rate)


@register(torch.optim.Adagrad)
class AdagradRule(UpdateRule):
    """Adagrad with its learning rate decay and initial accumulator."""

    adaptive = forgetful = elementwise = True
    decoupled = False

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr / (1 + (t−1)·decay) / (√s + ε); 0 where s is 0."""
        slowed = (step.counts() - 1.0) * step.option("lr_decay") + 1.0
        return lists.over_roots(step.kept("sum"), step.option("eps"), step.lr / slowed)


@register(torch.optim.Adadelta)
class AdadeltaRule(UpdateRule):
    """A has the size of earlier moves in it, to which the step has already added its own."""

    adaptive = forgetful = elementwise = True
    decoupled = False

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr·√((d + ε) / (s_t + ε)), 0 where s is 0.

        From the d_t that the step leaves, d_t = ρd + (1−ρ)(d + ε) z² / (s_t + ε), follows
        (d + ε) / (s_t + ε) = (d_t + ρε) / (ρ(s_t + ε) + (1−ρ)z²).
        """
        rho, eps = step.option("rho"), step.option("eps")
        z, second = self.entering(step), step.kept("square_avg")
        below = lists.shifted_(list(torch._foreach_mul(second, rho)), rho * eps)
        torch._foreach_addcmul_(below, z, z, value=1.0 - rho)
        torch._foreach_clamp_min_(below, lists.TINY)
        out = list(torch._foreach_add(step.kept("acc_delta"), rho * eps))
        torch._foreach_div_(out, below)
        torch._foreach_sqrt_(out)
        torch._foreach_mul_(out, torch._foreach_sign(second))
        return scaled_(out, step.lr)


def rms(x: Tensor) -> Tensor:
    """Return √(mean of x²), 0-dim."""
    return torch.linalg.vector_norm(x) / math.sqrt(max(x.numel(), 1))


@register(torch.optim.Adafactor)
class AdafactorRule(UpdateRule):
    """torch's: α = max(ε₂, rms(w)) · min(lr, 1/√t)."""

    adaptive = forgetful = decoupled = True

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return α·F / max(1, rms(F∘G) / d); 0 where row or column is 0."""
        eps, out = step.group["eps"], []
        rates = lists.spread(step.counts().rsqrt().clamp(max=step.lr))
        each = zip(step.before, wide(step.gradients), step.states, rates, strict=True)
        for w, g, state, rate in each:
            least = torch.finfo(w.dtype).eps if eps[0] is None else float(eps[0])
            inverse = self._inverse(state, least)
            clip = (rms(inverse * g) / float(step.group["d"])).clamp_min(1.0)
            out.append(inverse * (rms(w).clamp_min(float(eps[1])) * rate / clip))
        return out

    def _inverse(self, state: State, eps: float) -> Tensor:
        if "variance" in state:
            (second,) = wide([state["variance"]])
            return second.clamp_min(eps * eps).rsqrt() * second.sign()
        row, column = wide([state["row_var"], state["col_var"]])
        second = row @ column / row.mean(-2, keepdim=True).clamp_min(eps)
        return second.clamp_min(eps * eps).rsqrt() * row.sign() * column.sign()


@register("transformers.optimization.Adafactor")
class TransformersAdafactorRule(UpdateRule):
    """transformers': a schedule of its own, and momentum after the division.

    Only this step's own gradient is followed; earlier ones are given no shares.
    """

    adaptive = True

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return the rate times F / max(1, rms(F∘G) / d): what G is multiplied by."""
        out, most = [], float(step.group["clip_threshold"])
        for g, state in zip(wide(step.gradients), step.states, strict=True):
            inverse = self._inverse(g, state, float(step.group["eps"][0]))
            clip = (rms(inverse * g) / most).clamp_min(1.0)
            out.append(inverse * (self._rate(step, state) / clip))
        return out

    def _rate(self, step: GroupStep, state: State) -> Scalar:
        group, t = step.group, float(state["step"])
        slow = min(1e-6 * t if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(t))
        rate = slow if group["relative_step"] else step.lr
        if not group["scale_parameter"]:
            return rate
        return torch.as_tensor(state["RMS"]).clamp_min(float(group["eps"][1])) * rate

    def _inverse(self, g: Tensor, state: State, eps: float) -> Tensor:
        """Return F; 0 without a gradient where there has never been one, beyond the ε it adds."""
        if "exp_avg_sq" in state:
            (second,) = wide([state["exp_avg_sq"]])
            seen, inverse = second > 2.0 * eps, second.rsqrt()
        else:
            row, column = wide([state["exp_avg_sq_row"], state["exp_avg_sq_col"]])
            row, column = row.unsqueeze(-1), column.unsqueeze(-2)
            seen = (row > 2.0 * eps) & (column > 2.0 * eps)
            inverse = (row / row.mean(-2, keepdim=True)).rsqrt() * column.rsqrt()
        return torch.where(seen | (g != 0), inverse, 0.0)

    @torch.no_grad()
    def own_direction(self, raw: Tensors, moved: Tensors, step: GroupStep) -> list[Tensor]:
        """Return (1−β₁) A∘∇: the part of the move that this step's gradient made, A held fixed."""
        factor = self.factor(step)
        assert isinstance(factor, list)
        torch._foreach_mul_(factor, raw)
        return scaled_(factor, 1.0 - step.option("beta1"))
