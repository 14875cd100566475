"""Adam and its relatives: a running mean m of gradients over a running size.

With z = ±G + λw (λ only where decay is coupled), m_t = β₁m + (1−β₁)z, v_t = β₂v + (1−β₂)z²:

    Adam     w ← w − lr·m_t / (1−β₁ᵗ) / (√(v_t / (1−β₂ᵗ)) + ε);  amsgrad: the largest v so far
    NAdam    w ← w − lr·((1−μ_t) z / (1−Π_t) + μ_{t+1} m_t / (1−Π_{t+1})) / (√(v_t / (1−β₂ᵗ)) + ε)
             μ_t = β₁(1 − ½·0.96^(tψ)),  Π_t = μ₁⋯μ_t
    RAdam    ρ_t = ρ − 2tβ₂ᵗ/(1−β₂ᵗ),  ρ = 2/(1−β₂) − 1;  while ρ_t ≤ 5:  w ← w − lr·m_t / (1−β₁ᵗ)
             then times ϱ_t √(1−β₂ᵗ) / (√v_t + ε),  ϱ_t² = (ρ_t−4)(ρ_t−2)ρ / ((ρ−4)(ρ−2)ρ_t)
    Adamax   n_t = max(β₂n, |z| + ε);  w ← w − lr·m_t / (1−β₁ᵗ) / n_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from inrun.errors import OptimizerError
from inrun.optimizers.lists import over_roots, quotient, shifted_
from inrun.optimizers.registry import register
from inrun.optimizers.rule import Group, GroupStep, Memory, UpdateRule


class MomentRule(UpdateRule):
    """What they share: the first moment is the memory."""

    adaptive = elementwise = True
    reads_gradients = False
    buffer = "exp_avg"
    decoupled = False

    def memory(self, step: GroupStep) -> list[Memory] | None:
        """The first moment forgets by β₁ and takes 1−β₁ of z."""
        beta1 = step.betas[0]
        return [Memory(beta1, 1.0 - beta1)] * len(step.states)

    def slow_start(self, step: GroupStep, counts: Tensor) -> Tensor:
        """Return lr / (1−β₁ᵗ), ``[n]``."""
        return step.lr / (1.0 - step.betas[0] ** counts)


@register(torch.optim.Adam)
class AdamRule(MomentRule):
    """Adam, and AdamW where the group says so."""

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr/(1−β₁ᵗ) · r / (√v + εr), r = √(1−β₂ᵗ); 0 where v is 0."""
        counts = step.counts()
        root = (1.0 - step.betas[1] ** counts).sqrt()
        second = step.kept("max_exp_avg_sq" if step.group.get("amsgrad") else "exp_avg_sq")
        rates = root * self.slow_start(step, counts)
        return over_roots(second, root * step.option("eps"), rates)


@register(torch.optim.AdamW)
class AdamWRule(AdamRule):
    """Adam with decoupled weight decay."""

    decoupled = True


@register(torch.optim.NAdam)
class NAdamRule(AdamRule):
    """Adam that looks ahead: z enters the step twice, directly and through m."""

    reads_gradients = True

    def check(self, group: Group) -> None:
        """Refuse ``capturable``: κ depends on the step count, which would be on the device."""
        super().check(group)
        if group.get("capturable", False):
            raise OptimizerError(
                "NAdam with capturable=True keeps its momentum schedule on the device, where "
                "credits cannot follow it. Use capturable=False.",
            )

    def memory(self, step: GroupStep) -> list[Memory] | None:
        """Return m's memory, read with μ_{t+1}/(1−Π_{t+1}); z enters again with (1−μ_t)/(1−Π_t)."""
        beta1, psi, out = step.betas[0], step.option("momentum_decay"), []
        for state in step.states:
            t, product = float(state["step"]), float(state["mu_product"])
            mu, ahead = (beta1 * (1.0 - 0.5 * 0.96 ** (i * psi)) for i in (t, t + 1.0))
            read, direct = ahead / (1.0 - product * ahead), (1.0 - mu) / (1.0 - product)
            out.append(Memory(beta1, 1.0 - beta1, read, direct))
        return out

    @torch.no_grad()
    def pushed(self, step: GroupStep) -> list[Tensor]:
        """Return read·m + direct·z."""
        memories = self.memory(step) or []
        q = list(torch._foreach_mul(super().pushed(step), [m.read for m in memories]))
        direct = torch._foreach_mul(self.entering(step), [m.direct for m in memories])
        torch._foreach_add_(q, direct)
        return q

    def slow_start(self, step: GroupStep, counts: Tensor) -> Tensor:
        """Return lr: the bias of m is corrected in κ."""
        return torch.ones_like(counts) * step.lr


@register(torch.optim.RAdam)
class RAdamRule(MomentRule):
    """Adam that divides by the second moment only once its estimate has settled."""

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr/(1−β₁ᵗ), times ϱ√(1−β₂ᵗ) / (√v + ε) once ρ_t > 5 (then 0 where v is 0)."""
        beta2, t = step.betas[1], step.counts()
        left, longest = 1.0 - beta2**t, 2.0 / (1.0 - beta2) - 1.0
        length = longest - 2.0 * t * beta2**t / left
        settled, bare = length > 5.0, self.slow_start(step, t)
        squared = (length - 4.0) * (length - 2.0) * longest * left
        squared = squared / ((longest - 4.0) * (longest - 2.0) * length)
        rectified = torch.where(settled, squared.sqrt() * bare, 0.0)
        out = over_roots(step.kept("exp_avg_sq"), step.option("eps"), rectified)
        return shifted_(out, torch.where(settled, 0.0, bare))


@register(torch.optim.Adamax)
class AdamaxRule(MomentRule):
    """Adam with the largest gradient so far, slowly forgotten, as size."""

    @torch.no_grad()
    def factor(self, step: GroupStep) -> list[Tensor] | float:
        """Return lr/(1−β₁ᵗ)/n; 0 where n is ε and m is 0, that is, no gradient ever came."""
        sizes = step.kept("exp_inf")
        history = list(torch._foreach_sub(sizes, step.option("eps")))
        torch._foreach_add_(history, torch._foreach_abs(step.kept("exp_avg")))
        return quotient(history, sizes, self.slow_start(step, step.counts()))
